"""The least tokens of a text: never more than it comes to, for tokenizers of every kind."""

import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridkv.runner.tiny import byte_tokenizer
from hybridkv.serve.text_bound import TextBound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # of byte-level tokenizers
META = "\N{LOWER ONE EIGHTH BLOCK}"  # of SentencePiece's
WORDS = ["a", "the", "\N{GREEK SMALL LETTER ALPHA}", "\N{COMBINING GREEK YPOGEGRAMMENI}", "\N{COMBINING GRAVE ACCENT}"]
WORDS += ["\N{GREEK SMALL LETTER ALPHA WITH DASIA AND VARIA AND YPOGEGRAMMENI}", "\N{COMBINING REVERSED COMMA ABOVE}"]
WORDS += [" ", "        ", "\n\n", "<end>", "<wide>", "\N{HANGUL CHOSEONG KIYEOK}\N{HANGUL JUNGSEONG A}", "x" * 40]


def merged(vocabulary: list[str], *runs: tuple[str, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary, and merges that make tokens of 2, 4, ... of each of ``runs``' characters."""
    found, merges = list(vocabulary), []
    for one, doublings in runs:
        run = one
        for _ in range(doublings):
            merges.append((run, run))
            run += run
            found.append(run)
    return {token: number for number, token in enumerate(found)}, merges


def tokenizer(backend: Tokenizer, *added: AddedToken) -> PreTrainedTokenizerFast:
    backend.add_tokens([AddedToken("<end>", special=True), *added])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level(normalizer: Any = None, *added: AddedToken) -> PreTrainedTokenizerFast:  # noqa: ANN401  # tokenizers has no types
    """As Llama 3's and Qwen's: words split by an expression, tokens of up to 64 spaces."""
    vocabulary, merges = merged(ALPHABET, (SPACE, 6), ("x", 4))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    return tokenizer(backend, *added)


def byte_fallback(*, missing: int = 0) -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's."""
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256 - missing)]
    vocabulary, merges = merged(["<unk>", *bytes_of, "a", META], (META, 4))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106  # no password
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
    backend.decoder = decoders.ByteFallback()
    return tokenizer(backend)


KNOWN = {
    "bytes": byte_tokenizer(),
    "byte level": byte_level(),
    "byte level, composed": byte_level(normalizers.NFC()),
    "byte level, compatible": byte_level(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "byte level, words replaced": byte_level(normalizers.Replace("the", "a")),
    "byte level, wide tokens": byte_level(None, AddedToken("<wide>", rstrip=True, lstrip=True)),
    "byte fallback": byte_fallback(),
    "unknown ones": tokenizer(Tokenizer(models.BPE(vocab={"?": 0, "a": 1}, merges=[], unk_token="?"))),  # noqa: S106
}


def dropping(**parts: Any) -> PreTrainedTokenizerFast:  # noqa: ANN401  # tokenizers has no types
    """Byte-level, with a part that loses characters."""
    vocabulary, merges = merged(ALPHABET)
    backend = Tokenizer(parts.pop("model", models.BPE(vocab=vocabulary, merges=merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return tokenizer(backend)


class Shortening(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is not typed
    """Loses characters in code of its own."""

    def encode(self, text: str, **_: object) -> list[int]:
        ids: list[int] = super().encode(text[:9])
        return ids


UNKNOWN: dict[str, tuple[Any, str]] = {
    "no tokenizer": (None, ""),
    "stripped": (dropping(normalizer=normalizers.Strip()), " "),
    "without accents": (dropping(normalizer=normalizers.StripAccents()), "\N{COMBINING GRAVE ACCENT}"),
    "blanks made one": (dropping(normalizer=normalizers.Replace(Regex(" {2,}"), " ")), " "),
    "removed": (dropping(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("b", "")])), "b"),
    "split at blanks": (
        dropping(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
        " ",
    ),
    "split and removed": (dropping(pre_tokenizer=pre_tokenizers.Split("b", "removed")), "b"),
    "unknown ones fused": (dropping(model=models.BPE({"?": 0}, [], unk_token="?", fuse_unk=True)), "b"),  # noqa: S106
    "unknown ones dropped": (dropping(model=models.BPE({"a": 0}, [])), "b"),
    "a byte is missing": (byte_fallback(missing=200), "b"),
    "words": (dropping(model=models.WordLevel({"?": 0}, unk_token="?"), pre_tokenizer=None), "b"),  # noqa: S106
    "code of its own": (Shortening(tokenizer_object=byte_tokenizer().backend_tokenizer), "b"),
}


@settings(deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.text() | st.lists(st.sampled_from(WORDS), max_size=60).map("".join))
def test_text_bound_never_exceeds_the_token_count(name: str, text: str) -> None:
    one = KNOWN[name]
    bound = TextBound.of(one)
    assert bound is not None
    assert not bound.exceeded(text, len(one.encode(text)))


@pytest.mark.parametrize(
    ("name", "per_token", "spaces_count"),
    [
        ("bytes", 5, True),  # <eos>
        ("byte level", 64, True),
        ("byte level, composed", 4 * 64, True),
        ("byte level, words replaced", 3 * 64, True),
        ("byte level, wide tokens", 64, False),
        ("byte fallback", 16, True),
    ],
)
def test_text_bound_uses_the_longest_token(name: str, per_token: int, *, spaces_count: bool) -> None:
    bound = TextBound.of(KNOWN[name])
    assert bound == TextBound(per_token, spaces_count)
    assert not bound.exceeded("x" * 7 * per_token, 7)
    assert bound.exceeded("x" * (7 * per_token + 1), 7)


@pytest.mark.parametrize("name", UNKNOWN)
def test_text_bound_of_dropping_tokenizer_is_absent(name: str) -> None:
    one, lost = UNKNOWN[name]
    assert TextBound.of(one) is None
    assert one is None or len(one.encode(lost * 1000)) < 20  # so that any bound would be wrong


def test_text_bound_ignores_spaces_that_tokens_absorb() -> None:
    wide, many = KNOWN["byte level, wide tokens"], " " * 100_000
    text = f"{many}<wide>{many}"
    assert len(wide.encode(text)) == 1
    bound = TextBound.of(wide)
    assert bound is not None
    assert not bound.exceeded(text, 1)
    assert bound.exceeded(f"{many}{'x' * 129}{many}", 2)


def test_text_bound_assumes_four_composed_characters() -> None:
    every = map(chr, range(sys.maxunicode + 1))
    assert max(len(unicodedata.normalize("NFD", one)) for one in every) == 4
