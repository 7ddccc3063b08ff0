"""Recurrent mixers: the state tensors of one rank, in the layout of vLLM or transformers, and the mixers' weights.

                 conv state                                       recurrent state
    vllm         [K - 1 + drafts, channels], the model's dtype     the config's SSM dtype, else the model's
    transformers [channels, K], the model's dtype                  float32

K is the width of the causal convolution. The config's SSM dtype is the field ``mamba_ssm_cache_dtype`` or
``mamba_ssm_dtype``. Sources: Mamba (arXiv 2312.00752), Mamba-2 (arXiv 2405.21060), gated delta networks
(arXiv 2412.06464), Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridkv.models.fields import Fields
from hybridkv.models.layers import ReadOptions, linear, per_rank
from hybridkv.specs import MambaSpec
from hybridkv.units import dtype_name


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Selective state space of ``inner`` channels with ``state`` values each.

    Attributes:
        hidden: hidden size of the model.
        inner: channels.
        state: state values per channel.
        kernel: width of the convolution.
        dt_rank: width of the bottleneck of the step size.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        heads: heads of Zamba, which splits projections and state; ``None`` for other models.
        norms: whether step size, B and C have norms (Jamba).
    """

    hidden: int
    inner: int
    state: int
    kernel: int
    dt_rank: int
    conv_bias: bool = True
    bias: bool = False
    heads: int | None = None
    norms: bool = False

    def spec(self, fields: Fields, options: ReadOptions) -> MambaSpec:
        """Return the state on one rank, with split channels. Raises ConfigError where tp does not divide them."""
        inner = per_rank(self.inner, options.tp, "Mamba channels", fields.name)
        shape: tuple[int, ...] = (inner, self.state)
        if self.heads is not None and options.backend == "transformers":
            shape = (self.heads, inner // self.heads, self.state)
        return _spec(fields, options, "mamba1", (inner, self.kernel), shape)

    @property
    def weights(self) -> int:
        """Weights of one mixer."""
        inner, low = self.inner, self.dt_rank + 2 * self.state
        conv = inner * self.kernel + (inner if self.conv_bias else 0)
        scan = inner * (low // (self.heads or 1)) * (self.heads or 1) + self.dt_rank * inner + inner
        projections = linear(self.hidden, 2 * inner, bias=self.bias) + linear(inner, self.hidden, bias=self.bias)
        return projections + conv + scan + inner * self.state + inner + (low if self.norms else 0)


@dataclass(frozen=True, slots=True)
class Mamba2:
    """State space duality: ``heads`` of ``head_dim`` channels, with B and C shared within ``groups``.

    ``norm``: a gated norm before the output projection. ``out_bias``: ``None`` for the value of ``bias``.
    """

    hidden: int
    heads: int
    head_dim: int
    state: int
    kernel: int
    groups: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool | None = None
    norm: bool = True

    def spec(self, fields: Fields, options: ReadOptions) -> MambaSpec:
        """Return the state on one rank, with split heads and groups. Groups that tp does not divide are repeated."""
        heads = per_rank(self.heads, options.tp, "Mamba heads", fields.name)
        groups = self.groups // options.tp if self.groups % options.tp == 0 else 1
        channels = heads * self.head_dim + 2 * groups * self.state
        return _spec(fields, options, "mamba2", (channels, self.kernel), (heads, self.head_dim, self.state))

    @property
    def weights(self) -> int:
        """Weights of one mixer."""
        inner = self.heads * self.head_dim
        channels = inner + 2 * self.groups * self.state
        conv = channels * self.kernel + (channels if self.conv_bias else 0)
        out_bias = self.bias if self.out_bias is None else self.out_bias
        projections = linear(self.hidden, inner + channels + self.heads, bias=self.bias)
        projections += linear(inner, self.hidden, bias=out_bias)
        return projections + conv + 3 * self.heads + (inner if self.norm else 0)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta rule, or Kimi's delta attention: a matrix of ``key_dim`` x ``value_dim`` for every value head.

    ``full_gate``: the output gate of Kimi K3, one matrix (``use_full_rank_gate``) instead of two of low rank.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    mamba_type: str = "gdn_attention"
    full_gate: bool = False

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def spec(self, fields: Fields, options: ReadOptions) -> MambaSpec:
        """Return the state on one rank, with split heads. Raises ConfigError where tp does not divide them."""
        per_rank(self.key_heads, options.tp, "linear attention key heads", fields.name)
        heads = per_rank(self.value_heads, options.tp, "linear attention value heads", fields.name)
        channels = per_rank(self.channels, options.tp, "linear attention channels", fields.name)
        matrix = (self.value_dim, self.key_dim) if options.backend == "vllm" else (self.key_dim, self.value_dim)
        # Kimi's recurrence is kept in float32 whatever the config says of its model
        fallback = "float32" if self.mamba_type == "kda_attention" else None
        return _spec(
            fields, options, self.mamba_type, (channels, self.kernel), (heads, *matrix), recurrent_dtype=fallback
        )

    @property
    def weights(self) -> int:
        """Weights of one mixer: QKV, gates, convolution, norm, output. Kimi's low-rank gates decay per channel."""
        value = self.value_heads * self.value_dim
        shared = self.hidden * self.channels + self.channels * self.kernel + self.value_dim + value * self.hidden
        if self.mamba_type == "kda_attention":
            low_rank = self.value_dim * (self.hidden + value)
            gates = low_rank + (self.hidden * value if self.full_gate else low_rank) + self.hidden * self.value_heads
            return shared + gates + value + self.value_heads
        return shared + self.hidden * (value + 2 * self.value_heads) + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated convolution of ``hidden`` channels. The state is its last inputs only."""

    hidden: int
    kernel: int
    bias: bool = False

    def spec(self, fields: Fields, options: ReadOptions) -> MambaSpec:
        """Return the state on one rank, with split channels. Raises ConfigError where tp does not divide them."""
        channels = per_rank(self.hidden, options.tp, "convolution channels", fields.name)
        return _spec(fields, options, "short_conv", (channels, self.kernel), None)

    @property
    def weights(self) -> int:
        """Weights of one mixer."""
        hidden = self.hidden
        conv = hidden * self.kernel + (hidden if self.bias else 0)
        return linear(hidden, 3 * hidden, bias=self.bias) + conv + linear(hidden, hidden, bias=self.bias)


def one_width_of_convolutions(fields: Fields) -> None:
    """Raise ConfigError where LFM2's ``conv_dim`` (of vLLM) differs from ``hidden_size`` (of transformers)."""
    channels = fields.optional("conv_dim")
    if channels not in (None, fields.integer("hidden_size", channels)):
        raise fields.fail(
            f"conv_dim {channels} differs from hidden_size {fields.integer('hidden_size')}, and engines disagree about "
            "which of them is the width of the convolutions: correct one of them"
        )


def _spec(
    fields: Fields,
    options: ReadOptions,
    mamba_type: str,
    conv: tuple[int, int],
    recurrent: tuple[int, ...] | None,
    *,
    recurrent_dtype: str | None = None,
) -> MambaSpec:
    """Return a spec for ``conv`` (channels, kernel) and ``recurrent``.

    ``recurrent_dtype`` applies where the config names no dtype; ``None`` for the model's.
    """
    channels, kernel = conv
    if options.backend == "transformers":
        conv_shape, ssm_dtype = (channels, kernel), "float32"
    else:
        conv_shape = (kernel - 1 + options.num_speculative_tokens, channels)
        named = fields.text("mamba_ssm_cache_dtype") or fields.text("mamba_ssm_dtype")
        ssm_dtype = dtype_name(named or recurrent_dtype or options.state_dtype)
    states: list[tuple[tuple[int, ...], str]] = [(conv_shape, options.state_dtype)]
    if recurrent is not None:
        states.append((recurrent, ssm_dtype))
    return state_of(options, mamba_type, *states)


def state_of(options: ReadOptions, mamba_type: str, *states: tuple[tuple[int, ...], str]) -> MambaSpec:
    """Return the spec of ``states``: shapes and dtypes in the order in which they lie in a page."""
    return MambaSpec(
        block_size=options.block_size,
        shapes=tuple(shape for shape, _ in states),
        dtypes=tuple(options.every_state or dtype for _, dtype in states),
        mamba_type=mamba_type,
        num_speculative_blocks=options.num_speculative_tokens,
    )
