"""Extra keys of blocks, against a definition token by token; what they do to hashes, hits and events."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.cache import BlockHasher, BlockStored, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput, Extra, ExtraKeys, LoraAdapter, MultimodalItem
from hybridkv.request import Hasher, Request
from hybridkv.testing import attention_config

SIZE = 4
PROMPT = 20
LORA = LoraAdapter("sql", "/adapters/sql", 3)
LORA_KEY = ("lora", "sql", "/adapters/sql")
IMAGE = MultimodalItem("cat", 2, 5)
ENCODER = EncoderInput(b"audio", 30)
EMBEDS = np.arange(12, dtype=np.float32).reshape(6, 2)


def extras(**known: object) -> ExtraKeys:
    return ExtraKeys(PROMPT, SIZE, **known)  # type: ignore[arg-type]  # by name


def request(hasher: Hasher | None, prompt: Sequence[int] = range(PROMPT), **known: object) -> Request:
    return Request("r", prompt, hasher=hasher, **known)  # type: ignore[arg-type]  # by name


# -- the keys of a block


def test_extra_keys_without_extras_are_none() -> None:
    assert extras().of_blocks(0, 5) is None
    assert extras().of_blocks(2, 0) is None
    assert request(BlockHasher(SIZE)).extra_keys(0, 5) is None
    assert request(None, cache_salt="s", lora=LORA).extra_keys(0, 5) is None  # not hashed at all


@st.composite
def known_extras(draw: st.DrawFn) -> dict[str, Any]:
    """Any extras of a prompt of PROMPT tokens."""
    known: dict[str, Any] = {}
    items, end = [], 0
    lengths = {name: draw(st.integers(1, 7)) for name in "abc"}  # an id names one content
    for name in draw(st.lists(st.sampled_from("abc"), max_size=6)):
        gap, length = draw(st.integers(0, 3)), lengths[name]
        if end + gap + length <= PROMPT:
            items.append(MultimodalItem(name, end + gap, length))
            end += gap + length
    known["multimodal"] = draw(st.permutations(items))
    if draw(st.booleans()):
        known["lora"] = LORA
    if draw(st.booleans()):
        known["cache_salt"] = "s"
    if draw(st.booleans()):
        known["encoder"] = ENCODER
    if embedded := draw(st.integers(0, PROMPT)):
        known["prompt_embeds"] = np.arange(embedded * 2, dtype=np.float32).reshape(embedded, 2) % 8
    return known


def naive(known: dict[str, Any], start: int, size: int) -> Extra | None:
    """What the tokens of a block say, one after the other."""
    lora, salt, encoder, embeds = (known.get(key) for key in ("lora", "cache_salt", "encoder", "prompt_embeds"))
    keys: list[tuple[object, ...]] = [LORA_KEY] if lora else []
    rows = []
    for token in range(start, start + size):
        for item in known["multimodal"]:
            if item.offset <= token < item.offset + item.length:
                key = ("mm", item.id, item.offset - start)
                if key not in keys:
                    keys.append(key)
        if isinstance(embeds, np.ndarray) and token < len(embeds):
            rows.append(embeds[token])
    if salt and start == 0:
        keys.append(("cache_salt", salt))
    if rows:
        content = f"<f4 float32 ({len(rows)}, 2)".encode() + b"".join(row.tobytes() for row in rows)
        keys.append(("prompt_embeds", hashlib.sha256(content).digest()))
    if encoder and start == 0:
        keys.append(("encoder", b"audio"))
    return tuple(keys) or None


@given(known_extras(), st.integers(1, 9), st.integers(0, 8), st.integers(0, 8))
def test_extra_keys_of_blocks_match_those_of_their_tokens(
    known: dict[str, Any], size: int, first: int, count: int
) -> None:
    got = ExtraKeys(PROMPT, size, **known).of_blocks(first, count)
    expected = [naive(known, block * size, size) for block in range(first, first + count)]
    assert got == (expected if any(expected) else None)


def test_extra_keys_of_blocks_read_their_own_items_only() -> None:
    """Reads of the list of items, 10,000 of one token each: those of the blocks asked for, and no more."""

    class Watched(list[tuple[int, int, str]]):
        reads = 0

        def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 - as a list takes and gives
            self.reads += 1
            return super().__getitem__(place)

    known = ExtraKeys(10_000, SIZE, multimodal=[MultimodalItem(str(i), i, 1) for i in range(10_000)])
    watched = known._items = Watched(known._items)
    assert known.of_blocks(1000, 2) is not None
    assert 0 < watched.reads <= 2 * (2 * SIZE + 2)


# -- embeddings: content, never identity (D6)


def test_equal_embeddings_in_different_objects_have_equal_keys() -> None:
    keys = extras(prompt_embeds=EMBEDS).of_blocks(0, 3)
    assert keys is not None
    assert [key is None for key in keys] == [False, False, True]
    wide = np.zeros((12, 4), np.float32)
    wide[::2, ::2] = EMBEDS
    for equal in (EMBEDS.copy(), np.asfortranarray(EMBEDS), wide[::2, ::2]):
        assert extras(prompt_embeds=equal).of_blocks(0, 3) == keys


def test_embeddings_of_another_shape_or_dtype_have_other_keys() -> None:
    zeros = [np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float64), np.zeros((4, 4), np.float16)]
    zeros += [np.zeros((4, 2), np.int32), np.zeros((2, 4), np.float32), np.zeros((4, 2), ">f4")]
    keys = [extras(prompt_embeds=embeds).of_blocks(0, 1) for embeds in zeros]
    assert len({str(key) for key in keys}) == len(zeros)


def test_embeddings_changed_later_keep_their_keys() -> None:
    """A decoder may reuse its buffer: what was hashed stays."""
    buffer = EMBEDS.copy()
    known = extras(prompt_embeds=buffer)
    before = known.of_blocks(0, 2)
    buffer += 1
    assert known.of_blocks(0, 2) == before


# -- what cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraAdapter("", "p"), "needs a name and a path, got '' and 'p'"),
        (lambda: LoraAdapter("n", ""), "needs a name and a path, got 'n' and ''"),
        (lambda: MultimodalItem("", 0, 1), "needs an id that names its content"),
        (lambda: MultimodalItem("a", -1, 1), "'a' covers 1 tokens from -1: offset must be 0 or more"),
        (lambda: MultimodalItem("a", 0, 0), "'a' covers 0 tokens from 0: .* length at least 1"),
        (lambda: EncoderInput(b"", 3), "needs a digest"),
        (lambda: EncoderInput("", 3), "needs a digest"),
        (lambda: EncoderInput(b"d", 0), "at least 1 token, got 0"),
        (lambda: extras(multimodal=[MultimodalItem("b", 6, 2), IMAGE]), "'b' begins at token 6, .* ends at 7"),
        (lambda: extras(multimodal=[IMAGE, IMAGE]), "'cat' begins at token 2, .* ends at 7"),
        (lambda: extras(multimodal=[MultimodalItem("b", 18, 3)]), "'b' ends at token 21, after the prompt's 20"),
        (lambda: extras(prompt_embeds=np.zeros(3)), r"must be \[tokens, hidden\] .* got shape \(3,\)"),
        (lambda: extras(prompt_embeds=np.zeros((21, 2))), r"for 1 to 20 tokens, .* got shape \(21, 2\)"),
        (lambda: extras(prompt_embeds=np.zeros((0, 2))), r"got shape \(0, 2\)"),
        (lambda: extras(prompt_embeds=np.zeros((2, 0))), r"got shape \(2, 0\)"),
        (lambda: extras(prompt_embeds=np.full((2, 2), object())), "must hold numbers, got object"),
        (lambda: extras(prompt_embeds=np.zeros((2, 2), "i4,f4")), "must hold numbers, got "),
        (lambda: extras(prompt_embeds=[[1.0]]), "must be a numpy array, got list"),
        (lambda: request(None, multimodal=[MultimodalItem("b", 18, 3)]), "'b' ends at token 21"),
    ],
)
def test_extra_key_input_that_is_invalid_is_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- hashes of requests


def test_extra_keys_with_numpy_integers_hash_as_plain_integers() -> None:
    """Offsets found with np.flatnonzero are hashed as plain integers."""
    hasher = BlockHasher(SIZE)
    item = MultimodalItem("cat", np.int64(2), np.int64(5))  # type: ignore[arg-type]  # what users hand in
    assert request(hasher, multimodal=[item]).hashes == request(hasher, multimodal=[IMAGE]).hashes


@given(known_extras(), st.integers(1, 5))
def test_extra_keys_of_a_block_are_hashed(known: dict[str, Any], size: int) -> None:
    hasher = BlockHasher(size)
    keys = [naive(known, start, size) for start in range(0, PROMPT // size * size, size)]
    assert request(hasher, **known).hashes == hasher.hash_chain(None, np.arange(PROMPT), keys)


# -- hits


def embeds(rows: int, changed: int | None = None) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    out = np.ones((rows, 3), np.float32)
    if changed is not None:
        out[changed] = 2
    return out


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ({}, {"lora": LORA}, 0),
        ({"lora": LORA}, {"lora": LoraAdapter("chat", "/adapters/sql")}, 0),
        ({"lora": LORA}, {"lora": LoraAdapter("sql", "/elsewhere")}, 0),
        ({"lora": LORA}, {"lora": LoraAdapter("sql", "/adapters/sql", 9)}, 16),
        ({}, {"cache_salt": "s"}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "s"}, 16),
        ({}, {"multimodal": [IMAGE]}, 0),
        ({"multimodal": [IMAGE]}, {"multimodal": [MultimodalItem("dog", 2, 5)]}, 0),
        ({"multimodal": [IMAGE]}, {"multimodal": [MultimodalItem("cat", 3, 5)]}, 0),
        ({"multimodal": [IMAGE]}, {"multimodal": [MultimodalItem("cat", 2, 5)]}, 16),
        ({"multimodal": [MultimodalItem("cat", 9, 2)]}, {"multimodal": [MultimodalItem("dog", 9, 2)]}, 8),
        ({"multimodal": [MultimodalItem("cat", 7, 2)]}, {"multimodal": [MultimodalItem("dog", 7, 1)]}, 4),
        ({}, {"prompt_embeds": embeds(10)}, 0),
        ({"prompt_embeds": embeds(10)}, {"prompt_embeds": embeds(10)}, 16),
        ({"prompt_embeds": embeds(10)}, {"prompt_embeds": embeds(10, changed=0)}, 0),
        ({"prompt_embeds": embeds(10)}, {"prompt_embeds": embeds(10, changed=5)}, 4),
        ({"prompt_embeds": embeds(10)}, {"prompt_embeds": embeds(9)}, 8),
        ({}, {"encoder": ENCODER}, 0),
        ({"encoder": ENCODER}, {"encoder": EncoderInput(b"other", 30)}, 0),
        ({"encoder": ENCODER}, {"encoder": EncoderInput(b"audio", 30)}, 16),
    ],
)
def test_requests_that_differ_in_one_extra_share_no_later_block(
    one: dict[str, Any], other: dict[str, Any], shared: int
) -> None:
    for first, second in ((one, other), (other, one)):
        cache = KVCacheManager(attention_config(20, (SIZE,)), 100)
        cache.allocate_slots(request(cache.hasher, **first), PROMPT)
        assert cache.get_computed_blocks(request(cache.hasher, **second))[1] == shared
        assert cache.get_computed_blocks(request(cache.hasher, **first))[1] == 16


# -- events


def stored(cache: KVCacheManager) -> list[BlockStored]:
    return [event for event in cache.take_events() if isinstance(event, BlockStored)]


def events_of(
    block_sizes: tuple[int, ...], prompt: int = PROMPT, *, chunk: int = 100, **known: object
) -> tuple[list[BlockStored], Request]:
    cache = KVCacheManager(attention_config(100, block_sizes), 100, enable_kv_cache_events=True)
    one = request(cache.hasher, range(prompt), **known)
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        cache.allocate_slots(one, end - start)
        one.num_computed_tokens = end
    return stored(cache), one


def test_events_carry_adapters_items_salts_and_digests() -> None:
    (event,), one = events_of((SIZE,), lora=LORA, multimodal=[IMAGE], cache_salt="s", encoder=ENCODER)
    assert (event.lora_id, event.lora_name) == (3, "sql")
    assert event.extra_keys == (("sql", ("cat", 2), "s", b"audio"), ("sql", ("cat", -2)), *[("sql",)] * 3)
    assert event.block_hashes == tuple(one.hashes)
    (event,), one = events_of((SIZE,), prompt_embeds=EMBEDS)
    keys = one.extra_keys(0, 2)
    assert keys is not None
    assert event.extra_keys == (*[(key[0][1],) for key in keys if key], None, None, None)


def hash_block_keys(published: tuple[object, ...] | None, stride: int, *, lora: bool) -> list[Extra | None]:
    """What a router reads from a block's entry, by the text of published_extras alone. Salts are "s" here."""
    items: list[list[tuple[object, ...]]] = [[] for _ in range(stride)]
    salt, encoder, digests = [], [], []
    told = list(published or ())
    if lora:
        assert told.pop(0) == "sql"
    pairs = [key for key in told if isinstance(key, tuple)]
    for name, offset in dict.fromkeys(pairs):
        first = max(offset, 0) // SIZE
        for j in range(first, first + pairs.count((name, offset))):
            items[j].append(("mm", name, offset - j * SIZE))
    for key in told:
        if key == "s":
            salt.append(("cache_salt", key))
        elif key == b"audio":
            encoder.append(("encoder", key))
        elif isinstance(key, bytes):
            digests.append(("prompt_embeds", key))
    keys = []
    for j in range(stride):
        before, behind = (salt, encoder) if j == 0 else ([], [])
        keys.append((*([LORA_KEY] if lora else []), *items[j], *before, *digests[j : j + 1], *behind) or None)
    return keys


@given(known_extras(), st.sampled_from([(4,), (4, 8), (4, 8, 12)]), st.integers(1, 25))
def test_router_recomputes_hashes_from_events(known: dict[str, Any], block_sizes: tuple[int, ...], chunk: int) -> None:
    """D8 in every group: the token span matches the hash list, and with the extra keys gives it."""
    events, one = events_of(block_sizes, 25, chunk=chunk, **known)
    assert {event.group_idx for event in events} == set(range(len(block_sizes)))
    hasher = one.hasher
    assert hasher is not None
    for event in events:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        stride = event.block_size // SIZE
        told = event.extra_keys or (None,) * len(event.block_hashes)
        assert len(told) == len(event.block_hashes)
        keys = [key for block in told for key in hash_block_keys(block, stride, lora="lora" in known)]
        hashes = hasher.hash_chain(event.parent_block_hash, np.array(event.token_ids, np.int32), keys)
        assert tuple(hashes[stride - 1 :: stride]) == event.block_hashes
