"""A transformer of two layers in plain torch, whose attention is whatever it is handed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's users know

from hybridkv.models import Layer, Model
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec
from hybridkv.worker import AttentionMask

VOCABULARY, HIDDEN, HEADS, KV_HEADS, WIDTH, LATENT, ROTARY, WINDOW = 97, 32, 4, 2, 8, 12, 4, 24

Attend = Callable[[int, torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
"""(layer, query [n, heads, width], what the layer keeps of these tokens) -> [n, heads, width of a value].

What a layer keeps: keys and values, [n, kv heads, width] each; of MLA latents [n, LATENT] and rotary keys [n, ROTARY].
"""

KINDS = {"llama": ("full", "full"), "sliding": ("window", "full"), "mla": ("mla", "mla")}


@dataclass(frozen=True)
class AttentionKind:
    """How a layer attends. sinks: one logit a head, or none."""

    mask: AttentionMask
    scale: float
    sinks: torch.Tensor | None


class TinyTransformer:
    """Embeddings, two layers of attention and MLP, a head; float32 weights drawn from ``seed``.

    Queries and keys are scaled until attention is sharp: what is read from the cache moves the logits.
    """

    def __init__(self, name: str, block_size: int, seed: int = 0) -> None:
        self.name, self.block_size, self.kinds = name, block_size, KINDS[name]
        self._rng = torch.Generator().manual_seed(seed)
        self.embedding = self._matrix(VOCABULARY, HIDDEN, 1.0)
        self.layers = [self._layer(kind) for kind in self.kinds]
        self.head = self._matrix(HIDDEN, VOCABULARY, 1 / math.sqrt(HIDDEN))

    def _matrix(self, rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._rng) * std

    def _layer(self, kind: str) -> dict[str, torch.Tensor]:
        sharp, plain = 2 / math.sqrt(HIDDEN), 1 / math.sqrt(HIDDEN)
        weights = {
            "up": self._matrix(HIDDEN, 2 * HIDDEN, plain),
            "down": self._matrix(2 * HIDDEN, HIDDEN, plain),
            "out": self._matrix(HEADS * WIDTH, HIDDEN, 1.5 * plain),
        }
        if kind == "mla":
            return weights | {
                "query": self._matrix(HIDDEN, HEADS * (WIDTH + ROTARY), sharp),
                "latent": self._matrix(HIDDEN, LATENT + ROTARY, plain),
                "up_keys": self._matrix(HEADS * WIDTH, LATENT, 1 / math.sqrt(LATENT)).view(HEADS, WIDTH, LATENT),
                "up_values": self._matrix(HEADS * WIDTH, LATENT, 1 / math.sqrt(LATENT)).view(HEADS, WIDTH, LATENT),
            }
        return weights | {
            "query": self._matrix(HIDDEN, HEADS * WIDTH, sharp),
            "key": self._matrix(HIDDEN, KV_HEADS * WIDTH, sharp),
            "value": self._matrix(HIDDEN, KV_HEADS * WIDTH, plain),
            "sinks": self._matrix(1, HEADS, 2.0)[0] + 1,
        }

    def planned(self) -> Model:
        """What the planner needs to know."""
        layers = tuple(Layer(f"layer{i}", self._spec(kind), i) for i, kind in enumerate(self.kinds))
        return Model(self.name, "tiny", layers, 1024, VOCABULARY, "float32", 1, 1, self.block_size)

    def _spec(self, kind: str) -> KVCacheSpec:
        if kind == "mla":
            return MLAAttentionSpec(block_size=self.block_size, head_size=LATENT + ROTARY, dtype="float32")
        if kind == "full":
            return FullAttentionSpec(
                block_size=self.block_size, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype="float32"
            )
        return SlidingWindowSpec(
            block_size=self.block_size,
            num_kv_heads=KV_HEADS,
            head_size=WIDTH,
            dtype="float32",
            sliding_window=WINDOW,
        )

    def attention(self, layer: int) -> AttentionKind:
        """Windowed layers have sinks, as in gpt-oss."""
        kind = self.kinds[layer]
        if kind == "mla":
            return AttentionKind(AttentionMask(), 1 / math.sqrt(WIDTH + ROTARY), None)
        if kind == "full":
            return AttentionKind(AttentionMask(), 1 / math.sqrt(WIDTH), None)
        return AttentionKind(AttentionMask(window=WINDOW), 1 / math.sqrt(WIDTH), self.layers[layer]["sinks"])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """float32[n, VOCABULARY] of int64[n] tokens at int64[n] positions."""
        hidden = self.embedding[tokens]
        for number, (kind, weights) in enumerate(zip(self.kinds, self.layers, strict=True)):
            states = F.rms_norm(hidden, (HIDDEN,))
            mixed = self._mla if kind == "mla" else self._heads
            hidden = hidden + mixed(number, weights, states, positions, attend).flatten(1) @ weights["out"]
            hidden = hidden + F.silu(F.rms_norm(hidden, (HIDDEN,)) @ weights["up"]) @ weights["down"]
        return F.rms_norm(hidden, (HIDDEN,)) @ self.head

    @staticmethod
    def _heads(
        number: int, weights: dict[str, torch.Tensor], states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        n = len(states)
        query = rotate((states @ weights["query"]).view(n, HEADS, WIDTH), positions)
        key = rotate((states @ weights["key"]).view(n, KV_HEADS, WIDTH), positions)
        return attend(number, query, (key, (states @ weights["value"]).view(n, KV_HEADS, WIDTH)))

    @staticmethod
    def _mla(
        number: int, weights: dict[str, torch.Tensor], states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Absorbed: latents are keys and values."""
        query = (states @ weights["query"]).view(len(states), HEADS, WIDTH + ROTARY)
        content = torch.einsum("nhw,hwl->nhl", query[..., :WIDTH], weights["up_keys"])
        kept = states @ weights["latent"]
        rotary = rotate(kept[:, None, LATENT:], positions)[:, 0]
        absorbed = torch.cat((content, rotate(query[..., WIDTH:], positions)), -1)
        out = attend(number, absorbed, (kept[:, :LATENT], rotary))
        return torch.einsum("nhl,hwl->nhw", out, weights["up_values"])

    def whole(self, tokens: list[int]) -> torch.Tensor:
        """float32[n, VOCABULARY] of one request without any cache: one softmax over a mask."""

        def attend(number: int, query: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            keys, values = states
            if self.kinds[number] == "mla":
                keys, values = torch.cat((keys, values), -1)[:, None], keys[:, None]
            how, n = self.attention(number), len(query)
            keys, values = (one.repeat_interleave(HEADS // one.shape[1], dim=1) for one in (keys, values))
            scores = torch.einsum("nhw,mhw->hnm", query, keys) * how.scale
            ahead = torch.arange(n)[:, None] - torch.arange(n)
            hidden = (ahead < 0) | (ahead >= (how.mask.window or n))
            scores = scores.masked_fill(hidden, -torch.inf)
            if how.sinks is not None:  # one more column, whose value is nothing
                scores = torch.cat((scores, how.sinks[:, None, None].expand(HEADS, n, 1)), -1)
            return torch.einsum("hnm,mhw->nhw", scores.softmax(-1)[..., :n], values)

        return self.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)


def rotate(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) on [n, heads, width]."""
    half = states.shape[-1] // 2
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    first, second = states[..., :half], states[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)
