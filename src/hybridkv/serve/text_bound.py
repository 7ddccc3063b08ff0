"""The most characters that a token can cover, to refuse a text that is too long for a model before it is tokenized.

    least tokens of a text  =  characters that must become tokens  /  most characters of a token

The bound holds only if every part of a tokenizer is known to keep all characters. A normalizer or a pre-tokenizer may
drop characters, and an unknown word of any length may become one token. Other tokenizers have no bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PIECE: Final = 1 << 16
_COMPOSED: Final = 4  # no character decomposes into more characters canonically
_KEPT: Final = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_WHOLE: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_SPLITS: Final = frozenset({"Split", "Punctuation"})


@dataclass(frozen=True, slots=True)
class TextBound:
    """The most characters that a token covers.

    Attributes:
        per_token: the most characters of a text that one token covers.
        spaces_count: whether whitespace always becomes tokens; special tokens may absorb the whitespace next to them.
    """

    per_token: int
    spaces_count: bool

    @classmethod
    def of(cls, tokenizer: Any) -> TextBound | None:  # noqa: ANN401  # transformers' tokenizers share no typed base
        """Derive the bound of ``tokenizer``; ``None`` if it is not of a known kind. O(vocabulary)."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or not _is_plain(type(tokenizer)):
            return None
        backend = tokenizer.backend_tokenizer
        shrinks, normalizer = _shrinks(backend.normalizer), backend.normalizer
        if shrinks is None or not _keeps(backend.pre_tokenizer) or not _knows_all(backend):
            return None
        added = backend.get_added_tokens_decoder().values()
        contents = [one.content for one in added]
        if normalizer is not None:
            contents += [normalizer.normalize_str(one.content) for one in added if one.normalized]
        longest = max(map(len, [*backend.get_vocab(with_added_tokens=False), *contents]))
        return cls(longest * shrinks, not any(one.lstrip or one.rstrip for one in added))

    def exceeded(self, text: str, tokens: int) -> bool:
        """Return whether ``text`` certainly has more than ``tokens`` tokens. O(characters) at most."""
        most = tokens * self.per_token
        if len(text) <= most or self.spaces_count:
            return len(text) > most
        counted = 0
        for begin in range(0, len(text), _PIECE):
            counted += sum(map(len, text[begin : begin + _PIECE].split()))
            if counted > most:
                return True
        return False


def _is_plain(kind: type[PreTrainedTokenizerFast]) -> bool:
    """Return whether texts reach the backend unchanged."""
    return all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "encode", "_encode_plus", "apply_chat_template")
    )


def _described(part: Any) -> dict[str, Any] | None:  # noqa: ANN401  # tokenizers has no types
    """Return a part of a tokenizer as its file describes it; ``None`` if it is Python code."""
    try:
        described: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # noqa: BLE001  # the library raises plain Exceptions here
        return None
    return described


def _shrinks(normalizer: Any) -> int | None:  # noqa: ANN401  # same
    """Return how many characters may become one; ``None`` if any number may be dropped."""
    if normalizer is None:
        return 1
    described = _described(normalizer)
    return None if described is None else _factor(described)


def _factor(described: dict[str, Any]) -> int | None:
    kind = described["type"]
    if kind == "Sequence":
        factor = 1
        for one in described["normalizers"]:
            inner = _factor(one)
            if inner is None:
                return None
            factor *= inner
        return factor
    if kind == "Replace":
        found, made = described["pattern"].get("String"), described["content"]
        return -(-len(found) // len(made)) if found and made else None
    return _KEPT.get(kind)


def _keeps(pre_tokenizer: Any) -> bool:  # noqa: ANN401  # same
    """Return whether every character reaches the model."""
    if pre_tokenizer is None:
        return True
    described = _described(pre_tokenizer)
    return described is not None and _all_kept(described)


def _all_kept(described: dict[str, Any]) -> bool:
    kind = described["type"]
    if kind == "Sequence":
        return all(map(_all_kept, described["pretokenizers"]))
    return kind in _WHOLE or (kind in _SPLITS and described["behavior"] != "Removed")


def _knows_all(backend: Any) -> bool:  # noqa: ANN401  # same
    """Return whether each character, known or not, becomes a token or a part of one."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return model.token_to_id(model.unk_token) is not None
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _is_byte_level(backend) and all(model.token_to_id(one) is not None for one in alphabet)


def _is_byte_level(backend: Any) -> bool:  # noqa: ANN401  # same
    return any(b'"ByteLevel"' in part.__getstate__() for part in (backend.normalizer, backend.pre_tokenizer) if part)
