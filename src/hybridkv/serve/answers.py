"""An answer as it grows, split into reasoning, content and calls of functions.

    <think> reasoning </think> content <tool_call> {"name": "f", "arguments": {...}} </tool_call> content
            ^ prose            ^ prose ^ mark                                ^ arguments, passed on as they come

The parts of all steps together depend on the text alone, not on where steps cut it: a decision waits until no further
text can change it. A call begins once its name is known and its arguments have begun; what then follows of the
arguments is passed on as the model writes it, also if it ends early or is not valid JSON. Text that is no call, though
it begins like one, stays prose. White space next to a mark is dropped; between two contents one run of it stays.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal
from uuid import uuid4

import regex

from hybridkv.serve.formats import CallFormat, ReasoningFormat

Kind = Literal["content", "reasoning"]
Waiting = Generator[None, None, Any]
"""Runs until it needs more text, and again."""

_SPACE: Final = " \n\r\t"
_NAMED: Final = regex.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', regex.DOTALL
)
_OTHERS: Final = regex.compile(r'(?:\s*,\s*"[^"\\]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.+\-]+))*\s*\}', regex.DOTALL)
"""The rest of a call after its arguments: other keys with simple values."""
_FIRST: Final = regex.compile(r"\s*(?P<list>\[)?\s*(?=\{)")
_NEXT: Final = regex.compile(r"\s*[,;]\s*(?=\{)")
_LAST: Final = regex.compile(r"\s*\]")
_OBJECT: Final = regex.compile(r"\s*(?=\{)")
_QUOTED: Final = regex.compile(r"\\.|[\"']", regex.DOTALL)
_JSON: Final = regex.compile(r"[^\s\w.+\-,:]")
_PYTHON: Final = regex.compile(r"[\"'{}()\[\]]")
_CLOSES: Final = {"{": "}", "[": "]", "(": ")"}
_TYPES: Final[Mapping[type, set[str]]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
    str: set(),
}
"""Types of JSON schemas by type in Python. A value that may be text is not quoted."""
_MOST_REFERENCES: Final = 32
"""References to references that are followed."""
_NESTED: Final[Mapping[str, Any]] = {"type": ["object", "array"]}


@dataclass(slots=True)
class Call:
    """The new part of a call: the first has its id and name; ``arguments`` of all parts together are JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """New prose."""

    kind: Kind
    text: str


@dataclass(slots=True)
class Part:
    """The new part of an answer: pieces in the model's order. Neighbours are of different kinds or calls."""

    pieces: list[Said | Call] = field(default_factory=list)

    @property
    def content(self) -> str:
        """Return all new content."""
        return self._text("content")

    @property
    def reasoning(self) -> str:
        """Return all new reasoning."""
        return self._text("reasoning")

    @property
    def calls(self) -> list[Call]:
        """Return the new parts of calls."""
        return [one for one in self.pieces if isinstance(one, Call)]

    def _text(self, kind: Kind) -> str:
        return "".join(one.text for one in self.pieces if isinstance(one, Said) and one.kind == kind)


class AnswerParser:
    """Splits one answer.

    Attributes:
        called: whether the answer has a call.
        thoughts: where reasoning begins and ends, in characters of the answer, without its marks.

    Args:
        calls: how calls are written; None if there are none.
        reasoning: how reasoning is marked; None if it is content.
        tools: the JSON schema of each function's parameters, by name: the types of values that are written as text.
        inside: whether the prompt has begun the reasoning.
        named: the function that all of the answer but reasoning is the arguments of.
        parallel: whether there may be more than one call; further ones are dropped.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        inside: bool = False,
        named: str | None = None,
        parallel: bool = True,
    ) -> None:
        self._calls, self._reasoning, self._tools = calls, reasoning, tools
        self._parallel = parallel
        self.thoughts: list[tuple[int, int]] = []
        self._text, self._at, self._ended = "", 0, False
        self._taken = 0  # characters before ``_text``
        self._part = Part()
        self._count = 0
        self._space = ""  # at the end of the prose so far
        self._marked = self._spoken = False  # a mark was met; content was put
        self._drops = False  # white space that comes next
        self._begins = True  # nothing was put since the answer or its reasoning began or ended
        self._run = self._answer(inside and reasoning is not None, named)

    @property
    def called(self) -> bool:
        """Whether the answer has a call."""
        return self._count > 0

    def feed(self, text: str, *, ended: bool) -> Part:
        """Return the new part of the answer after ``text``, its last text if it has ``ended``. O(text) amortized."""
        self._text += text
        self._ended = ended
        self._part = Part()
        next(self._run, None)
        return self._part

    # prose

    def _answer(self, inside: bool, named: str | None) -> Waiting:  # private
        kind: Kind = "reasoning" if inside else "content"
        self._begins, self._marked, self._drops = not inside, inside, inside
        begun = 0  # the reasoning
        while True:
            if self._begins and (yield from self._bare(named)):
                self._marked, self._drops, self._begins, named = True, True, False, None
            mark = yield from self._prose(kind)
            place = self._taken + self._at
            then = yield from self._after(mark, kind)
            if kind == "reasoning" and then not in (kind, None) and place > begun:
                self.thoughts.append((begun, place))
            if not mark:
                break
            if then is None:
                self._say(kind, self._take(self._at + len(mark)))
                continue
            begun = begun if then == kind else place + len(mark)
            if "reasoning" in (kind, then) or not self._spoken:
                self._space = ""
            kind, self._marked = then, True
            self._drops = kind == "reasoning" or not self._spoken or bool(self._space)  # once between two contents
        if not self._marked:
            self._put(kind, self._space)

    def _turns(self, mark: str, kind: Kind) -> bool:
        """Return whether ``mark`` begins reasoning, or ends it."""
        reasoning = self._reasoning
        return reasoning is not None and mark == (reasoning.end if kind == "reasoning" else reasoning.start)

    def _after(self, mark: str, kind: Kind) -> Waiting:
        """Read a mark, or the call that it begins. Return the kind of what follows; ``None`` if it is prose."""
        calls = self._calls
        if not mark:
            return "content"
        if self._turns(mark, kind):
            self._take(self._at + len(mark))
            self._begins = kind == "reasoning"
            return "content" if kind == "reasoning" else "reasoning"
        if calls is None or mark not in calls.begin:
            self._take(self._at + len(mark))
            return kind
        if not (yield from self._call(calls)):
            return None
        self._begins = False
        return "content"

    def _bare(self, named: str | None) -> Waiting:
        """Read a call without a mark, or the arguments of ``named``. Return whether there is one."""
        calls = self._calls
        if named is None:
            return calls is not None and calls.bare and (yield from self._call(calls))
        found = yield from self._match(_OBJECT)
        if found is None:
            return False
        self._at = found.end()
        self._take(self._at)
        self._open(named, None)
        yield from self._value(self._argue)
        return True

    def _prose(self, kind: Kind) -> Waiting:
        """Say prose until a mark, which it returns; empty at the end of the answer."""
        while True:
            marks = self._marks(kind)
            found = _one_of(marks).search(self._text, self._at, partial=not self._ended) if marks else None
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                self._say(kind, self._take(end))
                if marks != self._marks(kind):
                    continue  # content has begun, so reasoning cannot any more
            if found is not None and not found.partial and (self._ended or not self._grows(marks)):
                return found[0]
            if self._ended:
                return ""
            yield

    def _marks(self, kind: Kind) -> tuple[str, ...]:
        reasoning, calls = self._reasoning, self._calls
        made = () if calls is None else calls.begin + calls.around
        if reasoning is None:
            return made
        if kind == "reasoning":
            return (reasoning.end, *made, *reasoning.around)
        begins = not self._spoken or reasoning.again
        return (reasoning.start, *made, *reasoning.around) if begins else made + reasoning.around

    def _grows(self, marks: Sequence[str]) -> bool:
        """Return whether more text may turn the mark that stands next into a longer one."""
        known = self._text[self._at :]
        return any(len(one) > len(known) and one.startswith(known) for one in marks)

    def _say(self, kind: Kind, text: str) -> None:
        """Put prose. White space at its end waits: a mark may follow."""
        if self._drops and not (text := text.lstrip(_SPACE)):
            return
        text = self._space + text
        said = text.rstrip(_SPACE)
        self._space = text[len(said) :]
        self._put(kind, said)

    def _put(self, kind: Kind, said: str) -> None:
        if not said:
            return
        self._drops = self._begins = False
        self._spoken = self._spoken or kind == "content"
        last = self._part.pieces[-1] if self._part.pieces else None
        if isinstance(last, Said) and last.kind == kind:
            last.text += said
        else:
            self._part.pieces.append(Said(kind, said))

    # calls

    def _call(self, calls: CallFormat) -> Waiting:
        """Read a call, or several in one pair of marks. Return whether there is one; else nothing is consumed."""
        start = self._at
        head = yield from self._match(_pattern(calls.head))
        if head is None:
            return False
        self._at = head.end()
        found = head.groupdict()
        if calls.python:
            called = yield from self._python()
        elif name := found.get("name"):
            called = True
            self._open(name, found.get("id"))
            if calls.key:
                yield from self._parameters(calls, name)
            else:
                yield from self._value(self._argue)
        else:
            called = yield from self._objects()
        if not called:
            self._at = start
            return False
        lacks = "}" if calls.key else ""
        for end in calls.end:
            if closing := (yield from self._match(_pattern(end))):
                self._at = closing.end()
                self._argue(lacks)
                lacks = ""
        return True

    def _objects(self) -> Waiting:
        """Read objects with name and arguments, or a list of them. Return whether there is one."""
        first = yield from self._match(_FIRST)
        if first is None:
            return False
        self._at = first.end()
        if not (yield from self._object()):
            return False
        while more := (yield from self._match(_NEXT)):
            start, self._at = self._at, more.end()
            if not (yield from self._object()):
                self._at = start
                break
        if first["list"] and (last := (yield from self._match(_LAST))):
            self._at = last.end()
        return True

    def _object(self) -> Waiting:
        """Read a call that is an object. Return whether it is one; else nothing is consumed."""
        head = yield from self._match(_NAMED)
        name = _loaded(head[1]) if head else None
        if head and isinstance(name, str):
            self._at = head.end()
            self._open(name, None)
            whole = (yield from self._value(self._argue)) is not None
            if whole and (rest := (yield from self._match(_OTHERS))):
                self._at = rest.end()
            return True
        # other keys, keys in another order, or arguments as text: wait for all of it
        end = yield from self._value(None)
        made = _loaded(self._text[self._at : end]) if end is not None else None
        name, arguments = _name_and_arguments(made) if isinstance(made, dict) else (None, None)
        if not isinstance(name, str) or arguments is None:
            return False
        self._at = end
        self._open(name, None)
        self._argue(arguments)
        return True

    def _parameters(self, calls: CallFormat, name: str) -> Waiting:
        """Read parameters between marks, without the bracket after the last."""
        root = self._tools.get(name, {})
        given = root.get("properties")
        known = given if isinstance(given, Mapping) else {}
        before = "{"
        while found := (yield from self._match(_pattern(calls.key))):
            self._at = found.end()
            key = found["key"].strip()
            self._argue(f"{before}{_dumped(key)}: ")
            before = ", "
            if not (yield from self._parameter(calls, value_types(known.get(key), root))):
                return
        if before == "{":
            self._argue(before)

    def _parameter(self, calls: CallFormat, types: set[str]) -> Waiting:
        """Read a value; text is passed on as it comes. Return whether it is whole."""
        is_text, held = types == {"string"}, ""
        if is_text:
            self._argue('"')
        while True:
            found = _pattern(calls.close).search(self._text, self._at, partial=not self._ended)
            new = self._take(len(self._text) if found is None else found.start())
            if is_text:
                self._argue(_dumped(new)[1:-1])
            else:
                held += new
            if found is not None and not found.partial:
                self._take(self._at + len(found[0]))
                self._argue('"' if is_text else typed(held, types))
                return True
            if self._ended:
                return False
            yield

    def _python(self) -> Waiting:
        """Read a list of calls in Python. Return whether it is one; else nothing is consumed."""
        end = yield from self._value(None, _PYTHON)
        made = _python_calls(self._text[self._at : end]) if end is not None else []
        for name, arguments in made:
            self._at = end
            self._open(name, None)
            self._argue(arguments)
        return bool(made)

    def _open(self, name: str, own_id: str | None) -> None:
        self._count += 1
        if self._parallel or self._count == 1:
            # nine characters, because the chat templates of Mistral take no other number
            self._part.pieces.append(Call(self._count - 1, own_id or uuid4().hex[:9], name))

    def _argue(self, text: str) -> None:
        if text and (self._parallel or self._count == 1):
            last = self._part.pieces[-1] if self._part.pieces else None
            if not isinstance(last, Call) or last.index != self._count - 1:
                last = Call(self._count - 1, None, None)
                self._part.pieces.append(last)
            last.arguments += text

    # text

    def _match(self, pattern: regex.Pattern[str]) -> Waiting:
        """Return the match of ``pattern`` at the next character, or ``None`` once no text can make it match."""
        while True:
            found = pattern.match(self._text, self._at, partial=not self._ended)
            if found is None or not found.partial:
                return found
            yield

    def _value(self, put: Callable[[str], None] | None, syntax: regex.Pattern[str] = _JSON) -> Waiting:
        """Read a value in brackets: ``put`` gets it as it comes and consumes it. Return its end, or ``None``.

        Without ``put`` nothing is consumed.
        """
        brackets, at = Brackets(syntax), self._at
        while True:
            at, whole = brackets.read(self._text, at)
            if self._ended and whole is None:
                at, whole = len(self._text), False
            if put is not None:
                put(self._take(at))
                at = self._at
            if whole is not None:
                return at if whole else None
            yield

    def _take(self, end: int) -> str:
        """Return the text up to ``end`` and forget it."""
        taken, self._text = self._text[self._at : end], self._text[end:]
        self._taken, self._at = self._taken + end, 0
        return taken


class Brackets:
    """Finds the end of a value in brackets, which begins with one, in a text that grows."""

    def __init__(self, syntax: regex.Pattern[str]) -> None:
        self._syntax, self._quote, self._open = syntax, "", list[str]()

    def read(self, text: str, at: int) -> tuple[int, bool | None]:
        """Read on from ``at``. Return up to where, and whether the value is whole there; ``None`` if it goes on."""
        while found := (_QUOTED if self._quote else self._syntax).search(text, at):
            mark, at = found[0], found.end()
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark == '"' or (mark == "'" and self._syntax is _PYTHON):
                self._quote = mark
            elif mark in _CLOSES:
                self._open.append(_CLOSES[mark])
            elif mark != self._open[-1]:
                return found.start(), False
            else:
                self._open.pop()
                if not self._open:
                    return at, True
        escapes = self._quote and text.endswith("\\")  # what comes
        return max(at, len(text) - bool(escapes)), None


def _pattern(text: str) -> regex.Pattern[str]:
    return regex.compile(text, regex.DOTALL)  # regex keeps what it has compiled


@cache
def _one_of(marks: tuple[str, ...]) -> regex.Pattern[str]:
    return _pattern("|".join(map(regex.escape, sorted(marks, key=len, reverse=True))))


def _loaded(text: str) -> Any:  # noqa: ANN401  # whatever JSON says
    """Return the value of JSON; ``None`` for other text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[object, str | None]:
    """Return name and arguments of a call, if it has them."""
    given = call.get("arguments", call.get("parameters"))
    try:
        return call.get("name"), given if isinstance(given, str | None) else _dumped(given)
    except (ValueError, RecursionError):  # not a number
        return None, None


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return ``schema``, or what its ``$ref`` names in ``root``; a list or an object if that is not known."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(name := schema.get("$ref"), str):
            return schema
        schema = root
        for key in name.removeprefix("#").split("/")[1:]:
            schema = schema.get(key, _NESTED) if isinstance(schema, Mapping) else _NESTED
    return _NESTED


def value_types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a value may have: text if none is named, no text if it is named elsewhere. O(schema)."""
    found, seen, left = set[str](), set[int](), [schema]
    while left:
        one = resolved(left.pop(), root)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, Mapping):
            found.add("string")
            continue
        given = one.get("type")
        own = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
        for value in choices(one):
            own |= _TYPES[type(value)] or {"string"}
        lists = [one.get(name) for name in ("anyOf", "oneOf", "allOf")]
        parts = [part for some in lists if isinstance(some, list) for part in some]
        left += parts
        found |= own or (set() if parts else {"string"})
    return found


def choices(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema names."""
    if "const" in schema:
        return [schema["const"]]
    named = schema.get("enum")
    return named if isinstance(named, list) else []


def typed(raw: str, types: set[str]) -> str:
    """Return the JSON of a value that is written as text: itself if it has a type that it may have, else text."""
    word = raw.strip()
    word = word.lower() if word.lower() in ("true", "false", "null") else word
    try:
        value = json.loads(word, parse_constant=int)  # refuses NaN
    except (ValueError, RecursionError):
        return _dumped(raw)
    return word if types & _TYPES[type(value)] else _dumped(raw)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return name and arguments of each call in a list of calls with keywords; empty for anything else."""
    try:
        elements: list[Any] = ast.parse(text, mode="eval").body.elts  # type: ignore[attr-defined]  # caught below
        found = [_python_call(one) for one in elements]
    except (ValueError, SyntaxError, TypeError, AttributeError, RecursionError, MemoryError):
        return []
    return found


def _python_call(given: Any) -> tuple[str, str]:  # noqa: ANN401  # a node of any kind
    if given.args or any(one.arg is None for one in given.keywords):
        raise ValueError("arguments without a name")
    return ast.unparse(given.func), _dumped({one.arg: ast.literal_eval(one.value) for one in given.keywords})
