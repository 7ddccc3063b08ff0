import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.runner import byte_tokenizer
from hybridkv.runner.detokenize import Detokenizer

TOKENIZER = byte_tokenizer()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=80) | st.text(max_size=60).map(lambda text: list(text.encode())))
def test_text_grows_and_ends_as_the_whole_decodes(tokens: list[int]) -> None:
    one = Detokenizer(TOKENIZER)
    before = ""
    for token in tokens:
        assert not one.add([token])
        assert one.text.startswith(before)
        before = one.text
    assert one.finish() == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_a_character_comes_when_it_is_whole() -> None:
    one = Detokenizer(TOKENIZER)
    shown = []
    for token in "a🦙é".encode():
        one.add([token])
        shown.append(one.text)
    assert shown == ["a", "a", "a", "a", "a🦙", "a🦙", "a🦙é"]


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_strings_are_found_across_tokens(chunk: int) -> None:
    text = "one 🦙 two\n\nthree"
    tokens = list(text.encode())
    for stop, left in (("🦙", "one "), ("\n\n", "one 🦙 two"), ("o\n", "one 🦙 tw"), ("one", ""), ("four", text)):
        one = Detokenizer(TOKENIZER, ("no such", stop))
        found = [one.add(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)]
        assert any(found) == (stop != "four")
        assert one.finish() == left


def test_a_token_costs_a_bounded_decode() -> None:
    longest = 0

    class Counting:
        def decode(self, ids: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            text: str = TOKENIZER.decode(ids, **options)
            return text

    rng = np.random.default_rng(0)
    one = Detokenizer(Counting())
    tokens = rng.integers(0, 256, 600).tolist()
    one.add(tokens)
    assert one.finish() == TOKENIZER.decode(tokens)
    assert longest <= 25
