"""Check at load that a model computes the same logits on pages as in plain forwards.

Any model that attends through transformers' interface can run on pages, but its config does not show whether it runs
correctly. So a few prompts run on pages of their own, and their logits are compared with the logits of plain forwards:

    cold      two prompts in one step: neither may see the other
    chunked   the same in chunks that end inside blocks, while others run
    warm      prompts with a known beginning: full blocks are shared, and one that is hit in part is copied

Quantized pages are compared with plain forwards that round keys and values in the same way. Rounding of a product may
move an element to the next code there. So the bound of such a check is at least the measured change of the logits by
the quantization, and a wrong context shows only beyond it. Checks of other pages keep their bound.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from hybridkv.cache import KVCacheManager
from hybridkv.errors import HybridKVError, UnsupportedModelError
from hybridkv.planner import Plan
from hybridkv.request import Request, SamplingParams
from hybridkv.runner import step_context
from hybridkv.runner.attention.formulas import AttentionBackend
from hybridkv.runner.load import LoadedModel
from hybridkv.runner.model_call import is_encoder_decoder, plain_transformers
from hybridkv.runner.planning import plan_for
from hybridkv.runner.probe import (
    Forwards,
    Stored,
    attention_implementation,
    forms_of_layers,
    forwards_of,
    planner_model,
    probe,
    rounded_logits,
)
from hybridkv.runner.runner import ModelRunner
from hybridkv.runner.sampling.draws import Draws
from hybridkv.runner.states.continuation import depends_on_calls, difference
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.spec_fields import Quantization
from hybridkv.step import Step

logger = logging.getLogger(__name__)

_TOLERANCE: Final = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}

_TOKENS: Final = 41
"""Tokens of the shortest first prompt; chosen by hand."""
_LONGEST: Final = 320
"""Most tokens of a prompt that is made longer to reach past a window, chunk or choice; chosen by hand."""
_CHUNK: Final = 29
"""Tokens of a step, so that chunks end inside blocks; chosen by hand."""
_ROWS: Final = 2
_SEED: Final = 11
_FEWEST: Final = 8
"""Tokens of the shortest prompt that is compared; chosen by hand."""

_Kind = tuple[type, str, torch.dtype, str, str | None, int, AttentionBackend, Stored]
_COMPARED: Final[dict[_Kind, Forwards]] = {}
"""Kinds of models that passed, and how their Steps run. The oldest entry is dropped first."""
_MOST_KINDS: Final = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """The first ``tokens`` of a prompt, in a regime. Prompts of a ``wave`` run together, and waves in order."""

    regime: str
    wave: int
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PlainResults:
    """The model's results without pages.

    Attributes:
        prompts: token ids of the prompts.
        logits: logits after every token of each prompt, float32[tokens, vocabulary].
        bound: differences up to this share of the largest logit are rounding.
        context: change of the last logits when other tokens come before the last few. If it is not above ``bound``, a
            wrong context would not be noticed.
    """

    prompts: tuple[list[int], ...]
    logits: tuple[torch.Tensor, ...]
    bound: float
    context: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a comparison.

    Attributes:
        worst: for each regime, the largest difference as a share of the largest logit, and the tokens before it.
        bound: differences up to it are rounding.
        failed: the model's error, or "".
    """

    worst: Mapping[str, tuple[float, int]]
    bound: float
    failed: str = ""

    @property
    def wrong(self) -> str:
        """The regimes that differ and by how much, or the model's error; "" if the results agree."""
        worst = self.worst.items()
        said = (f"{regime} {most:.2g} after token {at}" for regime, (most, at) in worst if not most <= self.bound)
        return ", ".join(said) or self.failed

    def require_right(self, name: str) -> None:
        """Raise UnsupportedModelError if the model ``name`` is wrong on pages."""
        if self.failed:
            raise UnsupportedModelError(f"{name} does not run on paged caches, so it is not supported: {self.failed}")
        if self.wrong:
            raise UnsupportedModelError(
                f"{name} computes other logits on paged caches than in plain transformers, so it is not supported: "
                f"largest difference, as a share of the largest logit: {self.wrong} (bound {self.bound:.2g})"
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """How a model runs on pages: the layout of ``plan``, the kind of forwards, and the attention."""

    plan: Plan
    forwards: Forwards
    attention: AttentionBackend


def tolerance(dtype: torch.dtype) -> float:
    """Return the rounding of logits, as a share of the largest. In half precision, tokens may choose other experts."""
    return _TOLERANCE.get(dtype, 2e-1)


def require_same(loaded: LoadedModel, plan: Plan, attention: AttentionBackend) -> Forwards | None:
    """Return the kind of forwards with which ``loaded`` computes the same on pages as without them.

    Rows run together if that agrees, otherwise one by one. It takes about ten short forwards for each kind, once in a
    process for models that differ only in their weights. Encoder-decoders, and plans for requests of a few tokens, are
    not compared; the result is then None. The log says so if a wrong context would not show, or if rows run one by one.
    Raises UnsupportedModelError, with the differences, if neither agrees.
    """
    length = min(_length(plan), plan.max_model_len - 1)
    if is_encoder_decoder(loaded.model) or length < _FEWEST:
        return None
    kind = _kind_of(loaded, plan, attention)
    if kind is not None and kind in _COMPARED:
        return _COMPARED[kind]
    step_context.require_free(loaded.model)
    name, plain = type(loaded.model).__name__, results_without_pages(loaded, length, forms_of_layers(plan.model))
    probed = probe(loaded.model)  # refuses a model that cannot run on pages at all, and says why
    trial = Trial(plan, forwards_of(loaded.model, probed), attention)
    report = compare(loaded, plain, trial)
    if report.wrong and not report.failed and depends_on_calls(probed.mixers):
        return trial.forwards  # the model differs without pages, too: its mixers are compared one by one
    together = ""
    if report.wrong and trial.forwards is Forwards.TOGETHER:
        together, trial = f" (together: {report.wrong})", replace(trial, forwards=Forwards.BY_ROW)
        report = compare(loaded, plain, trial)
    report.require_right(name)
    if trial.forwards is Forwards.BY_ROW:
        logger.info("%s: each row of a step runs in a forward of its own%s", name, together)
    if plain.context <= report.bound:
        logger.info("%s: a wrong context would not show in its logits (%.2g)", name, plain.context)
    elif kind is not None:
        _COMPARED[kind] = trial.forwards
        if len(_COMPARED) > _MOST_KINDS:
            del _COMPARED[next(iter(_COMPARED))]
    return trial.forwards


def _kind_of(loaded: LoadedModel, plan: Plan, attention: AttentionBackend) -> _Kind | None:
    """Return the properties that decide how a model runs, except its weights; None if a module has code of its own."""
    model = loaded.model
    if any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in model.modules()):
        return None
    config = model.config.to_json_string(use_diff=False)
    stored = Stored.of_plan(plan)
    return type(model), config, model.dtype, plan.layout, plan.placement, plan.model.block_size, attention, stored


def _length(plan: Plan) -> int:
    """Return the tokens of a prompt: past the longest window, chunk or choice of an indexer of moderate length."""
    masks = (spec.mask for group in plan.config.groups for spec in group.layer_specs)
    spans = [span for mask in masks for span in mask if span is not None]
    # an indexer that chooses all tokens hides wrong keys
    chosen = [int(layer.top_states * getattr(layer.spec, "tokens_per_state", 1)) for layer in plan.model.layers]
    ends = [span + _TOKENS // 3 for span in (*spans, *chosen)]
    return max([_TOKENS, *(end for end in ends if end <= _LONGEST)])


def results_without_pages(loaded: LoadedModel, length: int, forms: Mapping[int, Quantization]) -> PlainResults:
    """Compute the logits of ``loaded`` for prompts of up to ``length`` tokens, at least 8, without pages.

    forms: the quantization of each layer that has one, by index. Raises UnsupportedModelError if a forward fails.
    """
    draw = np.random.default_rng(_SEED)
    first, second, other = (draw.integers(0, loaded.vocab_size, length).tolist() for _ in range(3))
    prompts = (first, second[: length // 2])
    with torch.inference_mode():
        logits = tuple(_plain(loaded, tokens) for tokens in prompts)
        with attention_implementation(loaded.model, "eager"):
            noise = difference(_plain(loaded, first), logits[0])
        elsewhere = _plain(loaded, [*other[: length - length // 8], *first[length - length // 8 :]])
        context = difference(elsewhere[-1], logits[0][-1])
        bound = max(tolerance(loaded.model.dtype), 4 * noise)
        if forms:
            exact, logits = logits, tuple(_rounded(loaded, tokens, forms) for tokens in prompts)
            moved = (difference(*pair) for pair in zip(logits, exact, strict=True))
            bound = max(bound, *moved)
    return PlainResults(prompts, logits, bound, context)


def compare(loaded: LoadedModel, plain: PlainResults, trial: Trial) -> Report:
    """Compare the prompts of ``plain`` on pages. The Report has the model's error, if it raises one."""
    length = len(plain.prompts[0])
    ends = sorted({length // 3, length // 3 + 1, length - 1, length})
    asked = [Asked("cold", 0, 0, length // 3), Asked("cold", 0, 1, length // 3 // 2)]
    asked += [Asked("chunked", 1, prompt, len(tokens)) for prompt, tokens in enumerate(plain.prompts)]
    asked += [Asked("warm", 2 + wave, 0, end) for wave, end in enumerate(ends)]
    try:
        said = _on_pages(loaded, plain.prompts, asked, trial)
    except (HybridKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a model may raise any error for arguments that it does not expect
        return Report({}, plain.bound, failed=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    worst = dict[str, tuple[float, int]]()
    for one, logits in said.items():
        found = difference(logits, plain.logits[one.prompt][one.tokens - 1])
        worst[one.regime] = max(worst.get(one.regime, (0.0, 0)), (found, one.tokens))
    return Report(worst, plain.bound)


def _plain(loaded: LoadedModel, prompt: Sequence[int]) -> torch.Tensor:
    """Return the logits after every token of ``prompt`` without pages, float32[tokens, vocabulary].

    Raises UnsupportedModelError if the forward fails or gives NaN: pages are not at fault then.
    """
    ids = torch.tensor([list(prompt)], device=loaded.model.device)
    with plain_transformers(loaded.model):
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    if logits.isnan().any():
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} computes NaN in plain transformers, without pages: its weights in "
            f"{loaded.name} are damaged, or their dtype, {str(loaded.model.dtype).removeprefix('torch.')}, is too small"
        )
    return logits


def _rounded(loaded: LoadedModel, prompt: Sequence[int], forms: Mapping[int, Quantization]) -> torch.Tensor:
    """Return what ``_plain`` does, with keys and values rounded as quantized pages hold them."""
    with plain_transformers(loaded.model):
        return rounded_logits(loaded.model, torch.tensor(list(prompt), device=loaded.model.device), forms).float()


def _on_pages(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], asked: Sequence[Asked], trial: Trial
) -> dict[Asked, torch.Tensor]:
    """Return the last logits of each prompt, float32[vocabulary], from a runner of its own."""
    plan, lengths = trial.plan, [len(prompt) + 1 for prompt in prompts] * 3
    block_size, stored = plan.model.block_size, Stored.of_plan(plan)
    small = plan_for(
        loaded, lengths, block_size=block_size, layout=plan.layout, placement=plan.placement, stored=stored
    )
    by_request, rows, said = dict[str, Asked](), dict[int, str](), dict[Asked, torch.Tensor]()

    def note(step: Step, logits: torch.Tensor) -> None:
        rows.update((new.row, new.request_id) for new in step.new_rows)
        for row, one in zip(step.rows[Draws.of(step).row].tolist(), logits, strict=True):
            said[by_request[rows[row]]] = one.cpu()

    runner = ModelRunner(
        loaded.model,
        small.config,
        planner_model(loaded.model, block_size=small.model.block_size, name=loaded.name, stored=stored),
        max_running=_ROWS,
        max_model_len=small.max_model_len,
        max_batched_tokens=_CHUNK,
        observer=note,
        forwards=trial.forwards,
        attention=trial.attention,
    )
    try:
        cache = KVCacheManager(small)
        scheduler = Scheduler(cache, SchedulerLimits(max_running=_ROWS, max_batched_tokens=_CHUNK))
        for wave in sorted({one.wave for one in asked}):
            for one in (one for one in asked if one.wave == wave):
                name, tokens = f"{one.regime} {one.prompt} {one.tokens}", prompts[one.prompt][: one.tokens]
                by_request[name] = one
                sampling = SamplingParams(max_tokens=1, ignore_eos=True)
                scheduler.add(Request(name, tokens, sampling, hasher=cache.hasher, cache_salt=one.regime))
            while not scheduler.drained:
                step = scheduler.schedule()
                scheduler.update(runner.execute(step))
    finally:
        runner.detach()
    return said
