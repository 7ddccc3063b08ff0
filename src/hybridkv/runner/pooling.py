"""Embeddings of prompts: the last hidden states of the model, pooled to one vector for each prompt.

    a request of one output token -> hidden states of its prompt's tokens -> the last one, or their mean -> unit length

The request runs like any other, in steps with others. The last token of a prompt is always computed, so pooling it
reads the prefix cache. A mean needs the states of all tokens, so its prompt is computed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.arguments import check_fields, flag, instance, one_of, or_none
from hybridkv.errors import ConfigError
from hybridkv.models.json_text import read_json_file
from hybridkv.request import SamplingParams
from hybridkv.runner.engine import Engine
from hybridkv.runner.inputs import Prompt
from hybridkv.runner.model_call import is_encoder_decoder
from hybridkv.step import Step

_MODULES: Final = "modules.json"
_MEAN: Final = "pooling_mode_mean_tokens"
_LAST: Final = "pooling_mode_lasttoken"
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How hidden states become a vector.

    Attributes:
        mean: take the mean of all tokens, not the last one.
        normalized: divide the vector by its length.
    """

    mean: bool = False
    normalized: bool = True

    def __post_init__(self) -> None:
        check_fields(self, flag, "mean", "normalized")

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request whose prompt is embedded."""
        return SamplingParams(max_tokens=1, prompt_logprobs=0 if self.mean else None)

    def vector(self, states: Sequence[float] | None, dimensions: int | None = None) -> Vector:
        """Return an embedding, float32[width].

        Args:
            states: as ``Kept.pooled`` returned them.
            dimensions: first elements to keep; None for all.

        Raises:
            ConfigError: the vector is shorter, or there is none.
        """
        if states is None:
            raise ConfigError("the request was aborted before its prompt was computed: ask again")
        if dimensions is not None and not 0 < dimensions <= len(states):
            raise ConfigError(f"dimensions must be 1 to {len(states)}, got {dimensions}")
        found = np.asarray(states[:dimensions], np.float32)
        return found / max(float(np.linalg.norm(found)), 1e-12) if self.normalized else found

    @classmethod
    def of(cls, folder: str | Path) -> Self:
        """Read the files that sentence-transformers saves; without any: the last token, normalized, as in vLLM.

        Args:
            folder: the model's folder.

        Raises:
            ConfigError: the files ask for anything but a mean or the last token, or are no such files.
        """
        if not (Path(folder) / _MODULES).is_file():
            return cls()
        modules = read_json_file(Path(folder) / _MODULES, "array")
        kinds = {str(one.get("type", "")).rpartition(".")[2]: one for one in modules if isinstance(one, dict)}
        modes = ["no Pooling"]
        if "Pooling" in kinds:
            given = read_json_file(Path(folder) / str(kinds["Pooling"].get("path", "")) / "config.json", "object")
            modes = [name for name, on in given.items() if name.startswith("pooling_mode_") and on is True]
        if modes not in ([_MEAN], [_LAST]) or (unknown := kinds.keys() - {*_KNOWN}):
            wrong = ", ".join(sorted(unknown)) if modes in ([_MEAN], [_LAST]) else ", ".join(modes)
            raise ConfigError(
                f"the embeddings of {folder} need {wrong}, which is not offered: only {_MEAN} or {_LAST}, maybe "
                "normalized, are"
            )
        return cls(modes == [_MEAN], "Normalize" in kinds)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Kept:
    """The states of one request: their sum or the last one, float32[width], and the number of tokens in it."""

    states: torch.Tensor | None = None
    tokens: int = 0

    def pooled(self) -> tuple[float, ...] | None:
        """Return the mean of the states, as many as their width; None if the prompt was not computed."""
        return None if self.states is None else tuple((self.states / self.tokens).tolist())


class Embedder:
    """Makes embeddings with an engine that may run other requests, too.

    Args:
        engine: an engine without an observer.
        pooling: how hidden states become a vector; None: that of the model's folder.

    Raises:
        ConfigError: the engine has an observer, decodes in CUDA graphs, or runs an encoder-decoder; or as Pooling.of.
    """

    def __init__(self, engine: Engine, pooling: Pooling | None = None) -> None:
        runner = instance("engine", engine, Engine).runner
        or_none(one_of(Pooling))("pooling", pooling)
        if runner.observer is not None or is_encoder_decoder(engine.loaded.model) or runner.decode_graphs is not None:
            raise ConfigError(
                "embeddings need a decoder, and an engine without an observer and compiled steps: make another engine"
            )
        self.pooling = Pooling.of(engine.loaded.name) if pooling is None else pooling
        self._engine, self._parts = engine, list[torch.Tensor]()
        self._wanted: WeakValueDictionary[str, Kept] = WeakValueDictionary()
        self._rows = dict[int, tuple[str, int]]()
        self._hook = engine.loaded.model.get_decoder().register_forward_hook(self._caught)
        runner.observer = self._observe

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request whose prompt is embedded."""
        return self.pooling.sampling

    def keep(self, request_id: str) -> Kept:
        """Keep the states of a request that is added later, as long as the result is held.

        Args:
            request_id: the id of the request.
        """
        kept = self._wanted[request_id] = Kept()
        return kept

    def vector(self, kept: Kept, dimensions: int | None = None) -> Vector:
        """Return the embedding of a request that ended, float32[width].

        Args:
            kept: as ``keep`` returned it.
            dimensions: first elements to keep; None for all.

        Raises:
            ConfigError: the vector is shorter.
        """
        return self.pooling.vector(kept.pooled(), dimensions)

    def embed(self, prompts: Sequence[Prompt]) -> list[Vector]:
        """Return the embedding of each prompt, float32[width]. Other requests of the engine run on meanwhile.

        Args:
            prompts: text or token ids each.

        Raises:
            ConfigError, CapacityError: as ``Engine.add``.
        """
        names = [f"embedding-{id(self)}-{number}" for number in range(len(prompts))]
        kept = [self.keep(name) for name in names]
        streams = [
            self._engine.stream(prompt, self.sampling, request_id=name)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        for stream in streams:
            for _ in stream:
                pass
        return [self.vector(one) for one in kept]

    def close(self) -> None:
        """Leave the engine as it was."""
        self._hook.remove()
        self._engine.runner.observer = None

    # -- in the engine's thread

    def _caught(self, _: torch.nn.Module, __: object, result: Any) -> None:  # noqa: ANN401  # of any model
        if self._wanted:
            self._parts.append(result[0][0])

    def _observe(self, step: Step, _: torch.Tensor) -> None:
        """Pool the states of the prompts in ``step``."""
        parts, self._parts = self._parts, []
        for new in step.new_rows:
            self._rows.pop(new.row, None)
            if (kept := self._wanted.get(new.request_id)) is not None:
                self._rows[new.row] = new.request_id, new.num_prompt_tokens
                kept.states, kept.tokens = None, 0  # also if it begins again after a preemption
        if not parts or not self._rows:
            return
        states = torch.cat(parts)[-step.num_tokens :]  # the states of a forward that failed may come before
        for at, row in enumerate(step.rows.tolist()):
            name, prompt = self._rows.get(row, ("", 0))
            kept = self._wanted.get(name)
            count = min(int(step.num_scheduled[at]), prompt - int(step.num_computed[at]))
            if kept is None or count <= 0:
                continue
            first = int(step.token_ids.indptr[at])
            mine = states[first : first + count].float()
            if self.pooling.mean:
                total = mine.sum(dim=0)
                kept.states = total if kept.states is None else kept.states + total
                kept.tokens += count
            else:
                kept.states, kept.tokens = mine[-1].clone(), 1
