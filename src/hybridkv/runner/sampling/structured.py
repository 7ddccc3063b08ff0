"""Structured outputs: the tokens that may come next, by llguidance.

    engine's thread   rows begin | forward ......... | draws, which the parsers read
    masks' thread                | masks of all draws | joined before the draws

Each row with a structured output has a parser, which has read its output. A draw after drafts needs the mask after
these drafts: the parser reads them, a mask is written after each, and the parser goes back. A row that begins, also
after a preemption or a hand-over, makes its parser from all known tokens. llguidance works without the interpreter.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from re import escape
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from numpy.typing import NDArray

from hybridkv.errors import ConfigError
from hybridkv.request import StructuredOutput
from hybridkv.units import shown

if TYPE_CHECKING:  # a LoadedModel is made by modules that sample
    from hybridkv.runner.load import LoadedModel

Bool = NDArray[np.bool_]

_KEPT: Final = 128
"""Uses of grammars that keep them compiled after their requests."""
_SHOWN: Final = 400
"""Characters of a compiler's error that are repeated: it may print a grammar."""
SPACES: Final = r"\n?[ \t]{0,40}"
"""Space between the parts of JSON. Without a bound, a model may write spaces up to max_tokens."""
_LIMITS: Final = LLParserLimits(verbose_errors=False)
_STACK: Final = 1 << 29
"""Bytes of stack to compile with. The compiler recurses into rules and references, by up to 16 KB each: without room, a
long chain of them would end the process. Only pages that are used take memory."""
_STARTING: Final = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Grammar:
    """A compiled structured output.

    Attributes:
        start: a parser that has read nothing, to be copied.
    """

    start: LLMatcher

    def parser(self, output: Sequence[int] = ()) -> LLMatcher:
        """Return a parser that has read ``output``. O(output)."""
        made = self.start.deep_copy()
        made.consume_tokens([*output])
        return made


class Masks(NamedTuple):
    """The masks of a Step's draws.

    Attributes:
        forbidden: bool[draws, vocabulary], the tokens that must not be drawn.
        wrong: errors of parsers, by draw.
    """

    forbidden: Bool
    wrong: Mapping[int, Exception]


class Masked(NamedTuple):
    """A row with a structured output.

    Attributes:
        draw: its first draw.
        parser: has read the tokens before it.
        drafts: before its later draws.
    """

    draw: int
    parser: LLMatcher
    drafts: list[int]


class Grammars:
    """Compiles structured outputs for one model, and masks its draws. Any thread may compile.

    Args:
        loaded: the model, whose tokenizer has the text of each token.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._made: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()
        self._recent = deque[Grammar](maxlen=_KEPT)
        self._executor = LLExecutor(min(max((os.cpu_count() or 1) // 4, 1), 8))  # the forward needs the other cores
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridkv-masks")

    def of(self, form: StructuredOutput | None) -> Grammar | None:
        """Return ``form`` compiled, once for equal forms in use; None for None. Other threads run meanwhile.

        Args:
            form: of a request.

        Raises:
            ConfigError: it cannot be compiled, or the model's tokenizer is missing or cannot be read.
        """
        if form is None:
            return None
        found = self._made.get(form)
        if found is None:
            tokenizer = self._plain_tokenizer if form.frame else self._tokenizer
            found = self._made[form] = _with_room(partial(_compiled, form, tokenizer))
        self._recent.append(found)
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        loaded = self._loaded
        if loaded.tokenizer is None:
            raise ConfigError(
                f"structured outputs need the text of each token, and {loaded.name} has no tokenizer: give the engine "
                "one, or leave structured out"
            )
        try:
            size = max(loaded.vocab_size, len(loaded.tokenizer))
            return from_tokenizer(loaded.tokenizer, size, [*loaded.eos_token_ids] or None)
        except Exception as error:
            raise ConfigError(
                f"structured outputs need a fast tokenizer with an end token, and that of {loaded.name} cannot be read "
                f"({error}): load the model with one, or leave structured out"
            ) from error

    @cached_property
    def _plain_tokenizer(self) -> LLTokenizer:
        """The tokenizer for frames: special tokens are text, but for those that end an output."""
        known = self._tokenizer
        texts = [known.decode_bytes([one]) for one in range(known.vocab_size)]
        named = SimpleNamespace(
            eos_token_id=known.eos_token,
            bos_token_id=None,
            tokens=[b"" if text == b"<[%d]>" % one else text for one, text in enumerate(texts)],  # b"<[1]>": none
            special_token_ids=known.eos_tokens,
        )
        return LLTokenizer(TokenizerWrapper(named), eos_token=known.eos_tokens)

    def begin(self, rows: Sequence[Masked], draws: int, vocabulary: int) -> Future[Masks]:
        """Mask draws in another thread; the parsers of ``rows`` must rest until the result is there.

        Args:
            rows: rows with a structured output.
            draws: draws of all rows.
            vocabulary: number of token ids.
        """
        return self._thread.submit(self.masks, rows, draws, vocabulary)

    def masks(self, rows: Sequence[Masked], draws: int, vocabulary: int) -> Masks:
        """Return the masks of ``draws``; all tokens may be drawn in other rows, and after a draft that is wrong.

        O(draws * vocabulary / 8), in addition to the parsers. The arguments are those of ``begin``.
        """
        bits = allocate_token_bitmask(draws, self._tokenizer.vocab_size)
        plain = [(one.parser, one.draw) for one in rows if not one.drafts]
        drafted = [(one.parser, one.draw, one.drafts) for one in rows if one.drafts]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
        forbidden = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
        wrong = {one.draw: _stuck(one.parser) for one in rows if one.parser.is_error()}
        forbidden[[*wrong]] = False
        return Masks(forbidden, wrong)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _with_room(work: Callable[[], Grammar]) -> Grammar:
    """Return the result of ``work`` in a thread with a stack of _STACK."""
    future = Future[Grammar]()
    with _STARTING:  # the size counts for threads that start from now on
        before = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=_settle, args=(future, work), name="hybridkv-compile", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return future.result()


def _settle(future: Future[Grammar], work: Callable[[], Grammar]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  # raised where the result is wanted
        future.set_exception(error)


def _compiled(form: StructuredOutput, tokenizer: LLTokenizer) -> Grammar:
    try:
        made = LLMatcher(tokenizer, _grammar(form), log_level=0, limits=_LIMITS)
        first = made.deep_copy()
        first.compute_bitmask()
        dead = first.is_stopped() and not first.is_accepting()
        error = made.get_error() or ("no output satisfies it" if dead else "")
    except ValueError as raised:  # a grammar in neither syntax
        error = str(raised)
    if error:
        which = f"frame {shown(form.frame)}" if form.frame else f"{form.kind} {shown(form.text)}"
        raise ConfigError(f"{which} cannot be compiled, correct it: {error[:_SHOWN]}")
    return Grammar(made)


def _grammar(form: StructuredOutput) -> str:
    """Return ``form`` as llguidance reads it."""
    if form.frame:
        inner = _grammar(replace(form, frame=""))
        named = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
        # no_forcing: the text that must come next would be tokenized in Python
        frame = {"lark_grammar": '%llguidance {"no_forcing": true}\n' + form.frame}
        return json.dumps({"grammars": [frame, {**named, "name": "form"}]})
    if form.kind == "regex":
        return LLMatcher.grammar_from_regex(form.text)
    if form.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(escape, form.choices)))
    if form.kind == "grammar":
        return grammar_from("grammar", form.text)
    schema = form.text if form.kind == "json_schema" else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": SPACES})


def _stuck(parser: LLMatcher) -> ConfigError:
    return ConfigError(f"the structured output cannot go on, simplify it: {parser.get_error()[:_SHOWN]}")
