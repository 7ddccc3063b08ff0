"""Choose tokens, greedy or sampled, for all rows at once. The other rows of a batch do not change a row's token.

    logits -> structured output, bad words, tokens held back: -inf -> + bias -> the caller's functions
           -> repetition -> frequency, presence -> / temperature -> top-k -> top-p -> min-p -> + noise -> argmax

The edits, up to presence, have the order of vLLM; the filters have the order of transformers. A request edits few
tokens of a vocabulary: the tokens that it names, and the tokens that it contains. So an edit is a cell (draw, token)
with a value. All draws of a Step are edited together, and only logits of edited draws are copied. A caller's function
gets all logits of one draw. The tokens before a draw, with the drafts that it assumes to be accepted, decide its edits.
So drafts change no output.

Sampling uses the Gumbel-max trick: add independent Gumbel noise to log probabilities and take the largest. That draws
from their softmax (Maddison et al., arXiv 1411.0030, section 2.1). The noise of a token is a hash of seed, position and
token id alone, so neither the batch nor a preemption can change a draw. The hash is SplitMix64's finaliser (Steele et
al., OOPSLA 2014, figure 16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from hybridkv.errors import ConfigError, WorkerError
from hybridkv.request import SamplingParams, takes_prompt
from hybridkv.runner.sampling.draws import NO_DRAFT, Bool
from hybridkv.runner.sampling.structured import Grammars, Masked, Masks
from hybridkv.step import Csr, NewRow

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

NONE_DRAWN: Final = -1

_FEWEST: Final = 16
"""Tokens for which ``TokenCounts`` has room at first; chosen by hand."""
_NO_TOKENS: Final = np.empty(0, np.int64)
_WORD: Final = 1 << 64
_STEP: Final = 0x9E3779B97F4A7C15 - _WORD  # 64-bit constants as the signed integers that torch has
_MIX_1: Final = 0xBF58476D1CE4E5B9 - _WORD
_MIX_2: Final = 0x94D049BB133111EB - _WORD

_HOW: Final = np.dtype([("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "i8")])
"""The sampling parameters of one row."""


class TokenCounts:
    """Distinct tokens of a request, with the count of each in its output. O(tokens) to make, O(1) to add one."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        known = len(self._place)
        self._ids = np.zeros(max(2 * known, _FEWEST), np.int64)
        self._ids[:known] = list(self._place)
        self._counts = np.zeros(len(self._ids), np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count another token of the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1

    def after(self, drafts: Sequence[int]) -> tuple[Int64, Float32]:
        """Return the tokens and their counts in the output followed by ``drafts``. O(tokens)."""
        known = len(self._place)
        ids, counts = self._ids[:known], self._counts[:known].copy()
        for token in drafts:
            if token in self._place:
                counts[self._place[token]] += 1
        new = Counter(token for token in drafts if token not in self._place)
        if not new:
            return ids.copy(), counts
        return np.append(ids, list(new)), np.append(counts, np.array(list(new.values()), np.float32))


class RowEdits:
    """The edits of one request's logits, and the tokens of the request that decide them.

    Args:
        params: sampling parameters, with bad words as token ids.
        tokens: tokens of the request.
        num_prompt: how many of them are the prompt.
        held: tokens that are not drawn before ``min_tokens`` outputs (NewRow.held_ids).
        vocabulary: number of token ids.
    """

    def __init__(
        self, params: SamplingParams, tokens: Sequence[int], num_prompt: int, held: Sequence[int], vocabulary: int
    ) -> None:
        prompt, self._output = tokens[:num_prompt], list(tokens[num_prompt:])
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._min_tokens = params.min_tokens
        self._held = np.array([token for token in held if token < vocabulary], np.int64)
        words = [word for word in params.bad_words if not isinstance(word, str)]
        self._words = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._endings: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append(word)
        tokens_biased, biases = [token for token, _ in params.biases], [bias for _, bias in params.biases]
        self.bias = np.array(tokens_biased, np.int64), np.array(biases, np.float32)
        self._functions = [(one, takes_prompt(one)) for one in params.logits_processors]
        self._prompt = list(prompt) if any(whole for _, whole in self._functions) else []
        self._counts = None
        if self.penalties != (1, 0, 0):
            self._counts = TokenCounts(prompt if params.repetition_penalty != 1 else (), self._output)

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Return whether a request with ``params`` edits logits, beside a structured output."""
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        named = params.min_tokens or params.bad_words or params.logit_bias or params.logits_processors
        return penalties or bool(named)

    def add(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the output. O(tokens)."""
        for token in tokens:
            self._output.append(token)
            if self._counts is not None:
                self._counts.add(token)

    def banned(self, drafts: Sequence[int]) -> Int64:
        """Return the tokens that must not follow ``drafts``. O(bad words that may end here)."""
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
        last = [*self._output[-before:], *drafts] if before > 0 else list(drafts[-len(tokens) :])
        return tuple(last) == tokens

    def counted(self, drafts: Sequence[int]) -> tuple[Int64, Float32]:
        """Return the tokens with a penalty and their counts in the output; empty arrays without a penalty."""
        return (_NO_TOKENS, np.empty(0, np.float32)) if self._counts is None else self._counts.after(drafts)

    def asked(self, drafts: Sequence[int]) -> list[Callable[[torch.Tensor], Any]]:
        """Return the caller's functions, bound to the tokens of the request and ``drafts``."""
        return [
            partial(one, *([[*self._prompt]] if whole else []), [*self._output, *drafts])
            for one, whole in self._functions
        ]


_Cells = list[tuple[int, Int64, Float32]]
"""For each draw: its place, tokens, and a value for each token."""


def _on(device: torch.device, cells: _Cells) -> tuple[torch.Tensor, ...] | None:
    """Return the places, tokens and values of all ``cells`` as tensors, one entry a token; None without a token."""
    counts = [len(tokens) for _, tokens, _ in cells]
    if not any(counts):
        return None
    places, tokens, values = zip(*cells, strict=True)
    columns = (np.repeat(places, counts), np.concatenate(tokens), np.concatenate(values))
    return tuple(torch.from_numpy(one).to(device) for one in columns)


@dataclass(slots=True, eq=False)
class Edits:
    """The edits of a Step's draws.

    Attributes:
        rows: the edited rows of the logits, ascending.
    """

    rows: list[int] = field(default_factory=list)
    _penalties: list[tuple[float, float, float]] = field(default_factory=list)
    _banned: _Cells = field(default_factory=list)
    _biased: _Cells = field(default_factory=list)
    _counted: _Cells = field(default_factory=list)
    _asked: dict[int, list[Callable[[torch.Tensor], Any]]] = field(default_factory=dict)

    def add(self, row: int, edits: RowEdits, drafts: Sequence[int] = ()) -> None:
        """Add the edits of logits ``row``, after ``drafts`` of the request. Call it with ascending rows.

        Tokens that the request gets later do not change these edits.
        """
        place, functions = len(self.rows), edits.asked(drafts)
        banned, (counted, counts) = edits.banned(drafts), edits.counted(drafts)
        if not (len(banned) or len(counted) or len(edits.bias[0]) or functions):
            return
        self.rows.append(row)
        self._penalties.append(edits.penalties)
        self._banned.append((place, banned, np.full(len(banned), -np.inf, np.float32)))
        self._biased.append((place, *edits.bias))
        self._counted.append((place, counted, counts))
        if functions:
            self._asked[place] = functions

    def apply(self, logits: torch.Tensor, forbidden: torch.Tensor | None) -> tuple[torch.Tensor, dict[int, Exception]]:
        """Return the edited logits of ``rows``, [len(rows), vocabulary], and the errors, by row of ``logits``.

        A row fails if a function of the caller raises or returns no logits, or if no token is left that may be drawn.
        Its logits stay unedited. O(edited rows * vocabulary) to copy, then O(cells).

        Args:
            logits: float32[n, vocabulary], not changed.
            forbidden: bool[n, vocabulary], tokens that no function may allow; None without structured outputs.
        """
        device = logits.device
        at = torch.tensor(self.rows, device=device)
        out = logits[at]
        wrong: dict[int, Exception] = {}
        if (banned := _on(device, self._banned)) is not None:
            out[banned[:2]] = banned[2]
        if (biases := _on(device, self._biased)) is not None:
            out.index_put_(biases[:2], biases[2], accumulate=True)
        for place, functions in self._asked.items():
            try:
                for function in functions:
                    out[place] = _logits_like(out[place], function(out[place].clone()))
                if forbidden is not None:
                    out[place].masked_fill_(forbidden[self.rows[place]], -torch.inf)
            except Exception as error:  # noqa: BLE001  # an error of the caller's function ends this request alone
                wrong[place] = error
        self._penalise(out)
        if banned is not None or self._asked:
            best = out.amax(dim=-1)
            for place in torch.nonzero(~best.isfinite()).flatten().tolist():
                wrong.setdefault(place, _undrawable(float(best[place])))
        for place in wrong:
            out[place] = logits[self.rows[place]]
        return out, {self.rows[place]: error for place, error in wrong.items()}

    def _penalise(self, out: torch.Tensor) -> None:
        counted = _on(out.device, self._counted)
        if counted is None:
            return
        place, token, count = counted
        penalties = torch.tensor(self._penalties, dtype=out.dtype, device=out.device)[place]
        repetition, frequency, presence = penalties.unbind(dim=1)
        old = out[place, token]
        new = torch.where(old > 0, old / repetition, old * repetition)
        out[place, token] = new - frequency * count - presence * (count > 0)


def _logits_like(given: torch.Tensor, made: object) -> torch.Tensor:
    if not isinstance(made, torch.Tensor) or made.shape != given.shape:
        got = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
        raise ConfigError(f"logits_processors must return logits, one for each of {len(given)} tokens, got {got}")
    return made


def _undrawable(best: float) -> ConfigError:
    if best == -np.inf:
        return ConfigError(
            "no token is left to draw: bad_words, min_tokens, logits_processors or structured leave none; allow at "
            "least one"
        )
    return ConfigError(f"logits_processors must return numbers and -inf alone, got {best}")


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """The draws of a batch, one for each row.

    Attributes:
        how: the sampling parameters of each row, of dtype _HOW.
        position: int64[R], the position of the token to draw, counted from the start of the request.
        edits: edits of the rows' logits; ``None`` without edits.
        masks: of the rows' logits; ``None`` without structured outputs.
    """

    how: NDArray[np.void]
    position: Int64
    edits: Edits | None = None
    masks: Masks | None = None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], edits: Edits | None = None
    ) -> SamplingBatch:
        """Make a batch from the SamplingParams of each row."""
        return cls(np.array([_how(one) for one in params], _HOW), np.asarray(positions, np.int64), edits)


def _how(params: SamplingParams) -> tuple[float, int, float, float, int]:
    """Return a row of _HOW."""
    return params.temperature, params.top_k, params.top_p, params.min_p, signed_seed(params.seed)


def signed_seed(seed: int) -> int:
    """Return ``seed`` modulo 2**64 as a signed 64-bit integer."""
    return (seed + (1 << 63)) % _WORD - (1 << 63)


class RowState:
    """The last token and the sampling parameters of each row, from the Step that begins the row to the next that does.

    Rows that edit logits (RowEdits.wanted) also have their edits, and rows with a structured output its parser. Without
    ``grammars`` there are none.
    """

    def __init__(self, rows: int, vocabulary: int, grammars: Grammars | None = None) -> None:
        self._vocabulary, self._grammars = vocabulary, grammars
        self.last_token: Int64 = np.full(rows, NONE_DRAWN, np.int64)
        self._how = np.zeros(rows, _HOW)
        self._edited = np.zeros(rows, np.bool_)
        self._edits: dict[int, RowEdits] = {}
        self._formed = np.zeros(rows, np.bool_)
        self._parsers: dict[int, LLMatcher] = {}

    def check(self, rows: Sequence[NewRow]) -> None:
        """Raise WorkerError for a row with token ids outside the vocabulary, or with what needs a tokenizer."""
        for new in rows:
            if new.sampling.structured is not None and self._grammars is None:
                raise WorkerError(
                    f"{new.request_id!r} has a structured output, and the runner no tokenizer: make it with grammars="
                )
            if any(isinstance(word, str) for word in new.sampling.bad_words):
                raise WorkerError(
                    f"bad_words of {new.request_id!r} are text, and a worker has no tokenizer: give their token ids"
                )
            if (most := max(new.sampling.named_tokens, default=0)) >= self._vocabulary:
                raise WorkerError(
                    f"logit_bias and bad_words of {new.request_id!r} name token {most}, which is outside the "
                    f"vocabulary: ids are 0 .. {self._vocabulary - 1}"
                )

    def begin(self, new: NewRow) -> None:
        """Start a row with another request, or with the same one resumed. O(tokens) if it changes logits, else O(1)."""
        row, params = new.row, new.sampling
        self.last_token[row] = NONE_DRAWN
        self._how[row] = _how(params)
        self._edits.pop(row, None)
        self._edited[row] = RowEdits.wanted(params)
        if self._edited[row]:
            tokens = new.token_ids.tolist()
            self._edits[row] = RowEdits(params, tokens, new.num_prompt_tokens, new.held_ids, self._vocabulary)
        self._parsers.pop(row, None)
        grammar = None if self._grammars is None else self._grammars.of(params.structured)
        self._formed[row] = grammar is not None
        if grammar is not None:
            self._parsers[row] = grammar.parser(new.token_ids[new.num_prompt_tokens :].tolist())

    def end(self, rows: Int32) -> None:
        """Clear rows without a request."""
        for row in rows.tolist():
            self._edits.pop(row, None)
            self._parsers.pop(row, None)
        self._edited[rows] = self._formed[rows] = False
        self.last_token[rows] = NONE_DRAWN

    def begin_masks(self, rows: Int32, before: Int64) -> Future[Masks] | None:
        """Begin to mask the draws of rows with a structured output; None if there are none. O(draws).

        No row may begin, end or draw until the result is there. The arguments are those of ``batch``.
        """
        if self._grammars is None or not self._parsers:
            return None
        found, draws = list[Masked](), np.flatnonzero(self._formed[rows])
        for draw, row, last in zip(draws.tolist(), rows[draws].tolist(), before[draws].tolist(), strict=True):
            if last == NO_DRAFT:
                found.append(Masked(draw, self._parsers[row], []))
            else:
                found[-1].drafts.append(last)
        return self._grammars.begin(found, len(rows), self._vocabulary) if found else None

    def batch(self, rows: Int32, positions: Int64, before: Int64, masks: Masks | None = None) -> SamplingBatch:
        """Return the batch that draws the token at ``positions[i]`` of ``rows[i]``, for each i.

        The draws of a row follow each other, and each is edited with the drafts of all draws before it. O(n), and
        O(cells) for rows that edit logits.

        Args:
            rows: row of each draw.
            positions: position of each token in its request.
            before: draft before each draw, or NO_DRAFT.
            masks: of the draws, if any row has a structured output.
        """
        return SamplingBatch(self._how[rows], positions, self._edits_of(rows, before) if self._edits else None, masks)

    def _edits_of(self, rows: Int32, before: Int64) -> Edits:
        edits, drafts = Edits(), list[int]()
        for draw in np.flatnonzero(self._edited[rows]).tolist():
            last = before.item(draw)
            drafts = [] if last == NO_DRAFT else [*drafts, last]
            edits.add(draw, self._edits[rows.item(draw)], drafts)
        return edits

    def completed(self, rows: Int32, drawn: Int64, kept: Bool) -> set[int]:
        """Let parsers read the tokens ``drawn`` that are ``kept``. Return the rows whose structured output is complete.

        Tokens after its end are taken out of ``kept``: they were drawn after accepted drafts. O(draws).
        """
        over: set[int] = set()
        if not self._parsers:
            return over
        draws = np.flatnonzero(self._formed[rows] & kept)
        for draw, row, token in zip(draws.tolist(), rows[draws].tolist(), drawn[draws].tolist(), strict=True):
            parser = self._parsers[row]
            if row in over:
                kept[draw] = False
            elif parser.consume_token(token) and parser.is_stopped():
                over.add(row)
        return over

    def drawn(self, rows: Int32, tokens: Csr) -> None:
        """Note that ``tokens[i]``, perhaps an empty list, were appended to ``rows[i]``."""
        some = np.flatnonzero(np.diff(tokens.indptr))
        self.last_token[rows[some]] = tokens.values[tokens.indptr[some + 1] - 1]
        for i in some[self._edited[rows[some]]].tolist() if self._edits else ():
            self._edits[rows.item(i)].add(tokens[i].tolist())


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, dict[int, Exception]]:
    """Return the token of every row, int64[R], and the errors of edits, by row. O(R * vocabulary).

    The token of a row with an error is drawn from its unedited logits. logits: float32[R, vocabulary], not changed.
    """
    logits, parts, wrong = _changed(logits, batch)
    drawn = logits.max(dim=-1).indices  # the first of equal values, like argmax, in half its time
    for at, changed in parts:
        drawn[at] = changed.argmax(dim=-1)
    return drawn, wrong


def scores(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the values to maximise, [R, vocabulary]: float32 if all rows are greedy, else float64.

    A greedy row's scores are its edited logits. A sampled row's scores are its scaled logits plus noise, with -inf for
    tokens that a filter removed. Raises the error of the first row with failed edits.
    """
    logits, parts, wrong = _changed(logits, batch)
    if wrong:
        raise wrong[min(wrong)]
    out = logits.double() if (batch.how["temperature"] > 0).any() else logits.clone()
    for at, changed in parts:
        out[at] = changed.to(out.dtype)
    return out


def _changed(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], dict[int, Exception]]:
    """Return the masked logits, the scores of edited or sampled rows in parts (rows, scores), and the errors by row.

    A row may be in two parts; the later one counts.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    wrong: dict[int, Exception] = {}
    edits, forbidden = batch.edits, None
    if batch.masks is not None:
        forbidden = torch.from_numpy(batch.masks.forbidden).to(logits.device)
        logits = logits.masked_fill(forbidden, -torch.inf)
        wrong.update(batch.masks.wrong)
    if edits is not None and edits.rows:
        edited, failed = edits.apply(logits, forbidden)
        wrong = failed | wrong
        parts.append((torch.tensor(edits.rows, device=logits.device), edited))
    sampled = np.flatnonzero(batch.how["temperature"] > 0)
    if len(sampled):
        at, how = torch.from_numpy(sampled).to(logits.device), batch.how[sampled]
        chosen = logits[at]
        if edits is not None and edits.rows:
            _, places, of_edited = np.intersect1d(sampled, edits.rows, assume_unique=True, return_indices=True)
            chosen[torch.from_numpy(places).to(at)] = edited[torch.from_numpy(of_edited).to(at)]
        scaled = _filtered(chosen.double() / _column(how["temperature"], logits.device), how)
        parts.append((at, scaled + gumbel(how["seed"], batch.position[sampled], logits.shape[-1], logits.device)))
    return logits, parts, wrong


def gumbel(seed: Int64, position: Int64, vocabulary: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return standard Gumbel noise, float64[R, vocabulary], a function of seed[i], position[i] and the token id."""
    key = _mix(_mix(torch.from_numpy(seed).to(device)) + torch.from_numpy(position).to(device))
    tokens = torch.arange(vocabulary, dtype=torch.int64, device=device)
    bits = (_mix(key[:, None] + tokens * _STEP) >> 11) & ((1 << 53) - 1)
    uniform = (bits.double() + 0.5) / (1 << 53)  # never 0 or 1
    return -(-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's finaliser of x plus its increment; int64 arithmetic wraps as uint64's does."""
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _filtered(scaled: torch.Tensor, how: NDArray[np.void]) -> torch.Tensor:
    """Set the scores of tokens outside top-k, top-p or min-p to -inf. A filter that no row uses costs nothing."""
    top_k, top_p, min_p = how["top_k"], how["top_p"], how["min_p"]
    device, vocabulary = scaled.device, scaled.shape[-1]
    if (top_k > 0).any() or (top_p < 1).any():
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        limit = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
        # ties with the k-th largest stay, as in transformers
        kth = ordered.gather(1, torch.from_numpy(limit - 1).to(device)[:, None])
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        # a token stays while the likelier tokens have less than top_p together, so the first one always stays
        cut = (before >= _column(top_p, device)) & torch.from_numpy(top_p < 1).to(device)[:, None]
        ordered = ordered.masked_fill(cut, -torch.inf)
        scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
    if (min_p > 0).any():
        probabilities = scaled.softmax(dim=-1)
        floor = _column(min_p, device) * probabilities.amax(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(probabilities < floor, -torch.inf)
    return scaled


def _column(values: Float64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)[:, None]
