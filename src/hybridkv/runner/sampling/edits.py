"""What requests change in the logits of a draw, before its temperature: words that must not come, biases, penalties.

    logits -> bad words, tokens held back: -inf -> + bias -> the caller's functions -> repetition -> frequency, presence

The order is vLLM's. A request touches few tokens of a vocabulary: those that it names, and those that it has. So edits
are cells (draw, token) with a value, all draws of a Step in one go, and only the logits of draws that have some are
copied. A caller's function gets all logits of one draw.

Every draw is edited by the tokens in front of it, drafts included that it assumes to be accepted: drafts change no
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.request import LogitsProcessor, SamplingParams, takes_prompt

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

_FEWEST: Final = 16
_NO_TOKENS: Final = np.empty(0, np.int64)


class TokenCounts:
    """Distinct tokens, and how often each is in the output. O(tokens) to make, O(1) for one more."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        known = len(self._place)
        self._ids = np.zeros(max(2 * known, _FEWEST), np.int64)
        self._ids[:known] = list(self._place)
        self._counts = np.zeros(len(self._ids), np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Another token of the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    def behind(self, drafts: Sequence[int]) -> tuple[Int64, Float32]:
        """Tokens and their counts with ``drafts`` in the output, too. O(tokens)."""
        known = len(self._place)
        ids, counts = self._ids[:known], self._counts[:known].copy()
        new: dict[int, int] = {}
        for token in drafts:
            if token in self._place:
                counts[self._place[token]] += 1
            else:
                new[token] = new.get(token, 0) + 1
        if not new:
            return ids.copy(), counts
        return np.append(ids, list(new)), np.append(counts, np.array(list(new.values()), np.float32))


class RowEdits:
    """What one request changes, and its tokens as far as they decide that.

    prompt, output: its tokens. held: tokens that are not drawn before ``min_tokens`` outputs. bad_words are token ids.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], held: Int64) -> None:
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._output = list(output)
        self._min_tokens, self._held = params.min_tokens, held
        words = [word for word in params.bad_words if not isinstance(word, str)]
        self._words = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._endings: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append(word)
        tokens, biases = [token for token, _ in params.biases], [bias for _, bias in params.biases]
        self.bias = np.array(tokens, np.int64), np.array(biases, np.float32)
        self._functions = [(one, takes_prompt(one)) for one in params.logits_processors]
        self._prompt = list(prompt) if any(whole for _, whole in self._functions) else []
        self._counts = None
        if self.penalties != (1, 0, 0):
            self._counts = TokenCounts(prompt if params.repetition_penalty != 1 else (), output)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether a request changes anything."""
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        named = params.min_tokens or params.bad_words or params.logit_bias or params.logits_processors
        return penalties or bool(named)

    def add(self, tokens: Iterable[int]) -> None:
        """``tokens`` are output, too. O(tokens)."""
        for token in tokens:
            self._output.append(token)
            if self._counts is not None:
                self._counts.add(token)

    def banned(self, drafts: Sequence[int]) -> Int64:
        """Tokens that must not come behind ``drafts``. O(words that end as the output does)."""
        found = [self._words]
        if len(self._output) + len(drafts) < self._min_tokens:
            found.append(self._held)
        if self._endings:
            last = drafts[-1] if drafts else self._output[-1] if self._output else None
            ends = [word[-1] for word in self._endings.get(last, ()) if self._ends_in(word[:-1], drafts)]  # type: ignore[arg-type]  # no word has None
            found.append(np.array(ends, np.int64))
        return np.concatenate(found)

    def _ends_in(self, tokens: tuple[int, ...], drafts: Sequence[int]) -> bool:
        before = len(tokens) - len(drafts)
        behind = [*self._output[-before:], *drafts] if before > 0 else list(drafts[-len(tokens) :])
        return tuple(behind) == tokens

    def counted(self, drafts: Sequence[int]) -> tuple[Int64, Float32]:
        """Tokens that a penalty is on, and how often each is in the output; none without one."""
        return (_NO_TOKENS, np.empty(0, np.float32)) if self._counts is None else self._counts.behind(drafts)

    def asked(self, drafts: Sequence[int]) -> list[Callable[[torch.Tensor], Any]]:
        """The caller's functions of logits."""
        return [
            _bound(one, [*self._prompt] if whole else None, [*self._output, *drafts]) for one, whole in self._functions
        ]


def _bound(function: LogitsProcessor, prompt: list[int] | None, output: list[int]) -> Callable[[torch.Tensor], Any]:
    if prompt is None:
        return lambda logits: function(output, logits)
    return lambda logits: function(prompt, output, logits)


class _Cells:
    """(place, token, value), list by list."""

    def __init__(self) -> None:
        self._places: list[Int64] = []
        self._tokens: list[Int64] = []
        self._values: list[Float32] = []

    def add(self, place: int, tokens: Int64, values: Float32 | None = None) -> None:
        self._places.append(np.full(len(tokens), place, np.int64))
        self._tokens.append(tokens)
        if values is not None:
            self._values.append(values)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """All of them as tensors; None where there are none. Values: of those that have some."""
        if not any(map(len, self._tokens)):
            return None
        parts = (self._places, self._tokens, self._values or [np.empty(0, np.float32)])
        places, tokens, values = (torch.from_numpy(np.concatenate(one)).to(device) for one in parts)
        return places, tokens, values


@dataclass(slots=True, eq=False)
class Edits:
    """Those of a Step's draws. rows: of the logits, those with some, ascending; ``add`` asks for them in order."""

    rows: list[int] = field(default_factory=list)
    _penalties: list[tuple[float, float, float]] = field(default_factory=list)
    _banned: _Cells = field(default_factory=_Cells)
    _biased: _Cells = field(default_factory=_Cells)
    _counted: _Cells = field(default_factory=_Cells)
    _asked: dict[int, list[Callable[[torch.Tensor], Any]]] = field(default_factory=dict)

    def add(self, row: int, edits: RowEdits, drafts: Sequence[int] = ()) -> None:
        """The draw from logits ``row``, behind ``drafts`` of the request. Later tokens of it change nothing here."""
        place, functions = len(self.rows), edits.asked(drafts)
        banned, (counted, counts) = edits.banned(drafts), edits.counted(drafts)
        if not (len(banned) or len(counted) or len(edits.bias[0]) or functions):
            return
        self.rows.append(row)
        self._penalties.append(edits.penalties)
        self._banned.add(place, banned)
        self._biased.add(place, *edits.bias)
        self._counted.add(place, counted, counts)
        if functions:
            self._asked[place] = functions

    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Edited logits of ``rows``, [len(rows), vocabulary], and what went wrong, by row of ``logits``.

        logits: float32[n, vocabulary], left as they are; those of a row that went wrong stay so, too: a function of the
        caller raised or returned no logits, or no token is left that may be drawn.
        O(edited rows * vocabulary) to copy, then O(cells).
        """
        device = logits.device
        at = torch.tensor(self.rows, device=device)
        out = logits[at]
        wrong: dict[int, Exception] = {}
        if (cells := self._banned.on(device)) is not None:
            out[cells[0], cells[1]] = -torch.inf
        if (biases := self._biased.on(device)) is not None:
            out.index_put_(biases[:2], biases[2], accumulate=True)
        for place, functions in self._asked.items():
            try:
                for function in functions:
                    out[place] = _logits_like(out[place], function(out[place].clone()))
            except Exception as error:  # noqa: BLE001  # the caller's: it ends that request alone
                wrong[place] = error
        self._penalise(out)
        if cells is not None or self._asked:
            best = out.amax(dim=-1)
            for place in torch.nonzero(~best.isfinite()).flatten().tolist():
                wrong.setdefault(place, _undrawable(float(best[place])))
        for place in wrong:
            out[place] = logits[self.rows[place]]
        return out, {self.rows[place]: error for place, error in wrong.items()}

    def _penalise(self, out: torch.Tensor) -> None:
        cells = self._counted.on(out.device)
        if cells is None:
            return
        place, token, count = cells
        penalties = torch.tensor(self._penalties, dtype=out.dtype, device=out.device)[place]
        repetition, frequency, presence = penalties.unbind(dim=1)
        old = out[place, token]
        new = torch.where(old > 0, old / repetition, old * repetition)
        out[place, token] = new - frequency * count - presence * (count > 0)


def _logits_like(given: torch.Tensor, made: object) -> torch.Tensor:
    if not isinstance(made, torch.Tensor) or made.shape != given.shape:
        got = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise ConfigError(f"logits_processors must return logits, one of each of {len(given)} tokens, got {got}")
    return made


def _undrawable(best: float) -> ConfigError:
    if best == -np.inf:
        return ConfigError(
            "no token is left to draw: bad_words, min_tokens or logits_processors leave none; allow at least one"
        )
    return ConfigError(f"logits_processors must return numbers and -inf alone, got {best}")
