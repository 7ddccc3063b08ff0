"""Incremental decoding of tokens to text, with stop strings and characters of several tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runner_support import BEGIN, PIECES, EngineFactory, fallback_tokenizer, greedy, loaded_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybridkv.request import SamplingParams
from hybridkv.runner import byte_tokenizer
from hybridkv.runner.completion import Detokenizer
from hybridkv.schedule import FinishReason

BYTES = 256
SPECIAL = 256
TEXTS = st.text(st.sampled_from("ab \u00e9\u6771\u4eac\U0001f999\U0001f469\u200d\ufffd"), max_size=60)


LEVEL, FALLBACK = byte_tokenizer(), fallback_tokenizer()
BOTH = pytest.mark.parametrize("tokenizer", [LEVEL, FALLBACK], ids=["byte level", "byte fallback"])
FALLBACK_TOKENS = st.sampled_from([*(b for b in range(BYTES) if b != ord(" ")), *range(SPECIAL, len(FALLBACK))])
"""A space is never a byte token there: it has a piece of its own."""


def in_pieces(text: str) -> list[int]:
    """Its bytes, but a piece where one stands there."""
    tokens: list[int] = []
    while text:
        piece = next((one for one in PIECES if text.startswith(one.replace("\u2581", " "))), "")
        tokens += [BYTES + 1 + PIECES.index(piece)] if piece else text[0].encode()
        text = text[len(piece) or 1 :]
    return tokens


def as_shown(tokens: Sequence[int]) -> str:
    """What byte fallback is to show: ``decode``, but a run of bytes that is no UTF-8 keeps the beginning that is."""
    parts, run = [""], b""
    for token in [*(one for one in tokens if one != SPECIAL), -1]:
        if 0 <= token < BYTES:
            run += bytes([token])
            continue
        whole = run.decode(errors="ignore") if _is_text(run) else _beginning(run)
        parts += [whole, "\ufffd" * (len(run) - len(whole.encode()))]
        parts += ["" if token < 0 else PIECES[token - BYTES - 1].replace("\u2581", " ")]
        run = b""
    return "".join(parts).removeprefix(" ")


def _is_text(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


def _beginning(run: bytes) -> str:
    """The longest one that is UTF-8; a U+FFFD at its end was held back, as one that stands for a byte is."""
    end = next(end for end in range(len(run), -1, -1) if _is_text(run[:end]))
    return run[:end].decode().rstrip("\ufffd")


def taken_in(one: Detokenizer, tokens: Sequence[int]) -> str:
    """The whole text, which only ever grew."""
    before = ""
    for token in tokens:
        assert not one.add([token])
        assert one.text.startswith(before)
        before = one.text
    return one.finish()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=120) | TEXTS.map(lambda text: list(text.encode())))
def test_incremental_text_ends_as_the_decoded_whole(tokens: list[int]) -> None:
    assert taken_in(Detokenizer(LEVEL), tokens) == LEVEL.decode(tokens, skip_special_tokens=True)


@BOTH
def test_special_tokens_are_shown_unless_hidden(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = [97, SPECIAL, 98, SPECIAL]
    assert taken_in(Detokenizer(tokenizer, hidden=(98,)), tokens) == tokenizer.decode([97, SPECIAL, SPECIAL])
    assert taken_in(Detokenizer(tokenizer, hidden=(SPECIAL,)), tokens) == taken_in(Detokenizer(tokenizer), tokens)


def test_end_token_is_never_part_of_the_text(make_engine: EngineFactory) -> None:
    engine = make_engine(loaded_model("llama"), [[97, 98]], 4)
    ends = SamplingParams(max_tokens=4, logit_bias={BYTES: 1e4}, skip_special_tokens=False)
    for sampling in (ends, replace(ends, ignore_eos=True)):
        (done,) = engine.generate([[97, 98]], sampling)
        assert (set(done.token_ids), done.text) == ({BYTES}, "")


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 80), max_size=3))
@example("\u6771\u4eac" * 12, [])
def test_byte_fallback_text_ends_as_the_decoded_whole(text: str, special: list[int]) -> None:
    tokens = in_pieces(text)
    for at in special:
        tokens.insert(at, SPECIAL)
    assert FALLBACK.decode(tokens, skip_special_tokens=True) == text.removeprefix(" ")
    assert taken_in(Detokenizer(FALLBACK), tokens) == text.removeprefix(" ")


@settings(max_examples=200, deadline=None)
@given(st.lists(FALLBACK_TOKENS | st.sampled_from([*"\u00e9\u6771\u4eac".encode(), SPECIAL]), max_size=120))
@example([*"\U0001f999".encode(), 0xF0, BYTES + 1])
@example([0xFF, *"\u6771".encode() * 20, BYTES + 1, *"\u6771".encode()])
def test_byte_fallback_of_invalid_bytes_shows_their_valid_prefix(tokens: list[int]) -> None:
    assert taken_in(Detokenizer(FALLBACK), tokens) == as_shown(tokens)


@BOTH
def test_character_of_several_tokens_is_shown_when_complete(tokenizer: PreTrainedTokenizerFast) -> None:
    one = Detokenizer(tokenizer)
    shown = []
    for token in "a🦙é".encode():
        one.add([token])
        shown.append(one.text)
    assert shown == ["a", "a", "a", "a", "a🦙", "a🦙", "a🦙é"]
    one.add("🦙".encode()[:3])
    assert (one.text, one.finish()[:3], one.finish().count("\ufffd")) == (
        "a🦙é",
        "a🦙é",
        1 if tokenizer is LEVEL else 3,
    )


def test_complete_characters_before_an_incomplete_one_match_stop_strings() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x\ufffd": 0, BEGIN: 1}, unk_token=BEGIN))
    one = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ("x",))
    assert one.add([0])
    assert one.finish() == ""


@BOTH
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_strings_are_found_across_tokens(chunk: int, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "one 🦙🦙 two\n\nthree"
    tokens = list(text.encode())
    for stop, left in (("🦙", "one "), ("\n\n", "one 🦙🦙 two"), ("o\n", "one 🦙🦙 tw"), ("one", ""), ("four", text)):
        one = Detokenizer(tokenizer, ("no such", stop))
        found = [one.add(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)]
        assert any(found) == (stop != "four")
        assert one.finish() == left
        assert one.num_tokens == len((left + stop).encode() if stop != "four" else tokens)


class Counting:
    """A tokenizer that notes how many tokens each decode has."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.decoded: list[int] = []

    def decode(self, ids: list[int], **options: bool) -> str:
        self.decoded.append(len(ids))
        text: str = self.tokenizer.decode(ids, **options)
        return text


@BOTH
@pytest.mark.parametrize("text", ["plain text", "\u6771\u4eac", "\U0001f999", "a\u00e9"])
def test_detokenizer_decodes_few_tokens_per_call(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    counting = Counting(tokenizer)
    tokens = list(text.encode()) * 60
    assert taken_in(Detokenizer(counting), tokens) == text * 60
    assert max(counting.decoded) <= 24
    assert len(counting.decoded) <= len(tokens) * 1.2


@BOTH
@pytest.mark.parametrize("token", [0xFF, 0x80, SPECIAL])
def test_tokens_without_text_cost_a_bounded_decode(token: int, tokenizer: PreTrainedTokenizerFast) -> None:
    counting = Counting(tokenizer)
    tokens = [*b"a", *[token] * 1000, *b"bc"]
    expected = as_shown(tokens) if tokenizer is FALLBACK else tokenizer.decode(tokens, skip_special_tokens=True)
    assert taken_in(Detokenizer(counting), tokens) == expected
    assert sum(counting.decoded) <= 30 * len(tokens)


def test_incomplete_character_at_the_end_can_match_a_stop_string(make_engine: EngineFactory) -> None:
    """The last token is one byte of a character, shown as U+FFFD. Text and finish reason agree on the stop."""
    loaded, prompt = loaded_model("llama"), [65, 66, 67]
    sampling = replace(greedy(60), temperature=3.0, seed=1)
    plain = make_engine(loaded, [prompt], 60).generate([prompt], sampling)[0]
    begun = next(at for at, token in enumerate(plain.token_ids) if 0x80 <= token < BYTES)
    short = replace(sampling, max_tokens=begun + 1, stop=("\ufffd",))
    engine = make_engine(loaded, [prompt], 60)
    parts = list(engine.stream(prompt, short))
    (done,) = engine.generate([prompt], short)
    text = bytes(plain.token_ids[:begun]).decode()
    assert (done.text, done.finish_reason) == (text, FinishReason.STOP)
    assert done.token_ids == plain.token_ids[: begun + 1]
    assert "".join(one.text or "" for one in parts) == text
    assert parts[-1].finish_reason is FinishReason.STOP
    longer = replace(short, stop=("never there",))
    (whole,) = engine.generate([prompt], longer)
    assert (whole.text, whole.finish_reason) == (text + "\ufffd", FinishReason.LENGTH)
