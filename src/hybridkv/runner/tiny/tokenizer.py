"""The tokenizer of tiny models: a token for each byte."""

from __future__ import annotations

from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridkv.errors import ConfigError

END: Final = "<eos>"
VOCAB_SIZE: Final = 257
"""256 bytes and the end token."""
_CHAT: Final = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte and one for the end: every text encodes, and no token joins two bytes.

    A conversation is a line a message: ``user: what was said``.
    """
    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
        chat_template=_CHAT,
    )
    if len(made) != VOCAB_SIZE:
        raise ConfigError(f"the byte tokenizer has {len(made)} tokens, expected {VOCAB_SIZE}")
    return made


def _byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that byte-level tokenizers write for it (GPT-2's table).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, take the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
