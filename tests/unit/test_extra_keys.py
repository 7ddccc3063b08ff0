"""Extra keys of blocks: contracts.md section 3, and what a request does with them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hybridkv.cache import BlockHasher, BlockStored, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput, Extra, ExtraKeys, LoraAdapter, MultimodalItem
from hybridkv.request import Request, SamplingParams
from hybridkv.testing import attention_config

SIZE = 4
LORA = LoraAdapter("sql", "/adapters/sql", 3)
IMAGE = MultimodalItem("cat", 2, 5)
ENCODER = EncoderInput(b"audio", 30)


def extras(**known: object) -> ExtraKeys:
    return ExtraKeys(20, **known)  # type: ignore[arg-type]  # by name


# -- the keys of a block


def test_nothing_is_none() -> None:
    assert not extras()
    assert extras().of_block(0, SIZE) is None
    assert extras().of_blocks(0, 5, SIZE) is None


def test_order() -> None:
    embeds = np.ones((3, 2), np.float32)
    everything = extras(lora=LORA, multimodal=[IMAGE], cache_salt="s", prompt_embeds=embeds, encoder=ENCODER)
    first = everything.of_block(0, SIZE)
    assert first is not None
    assert [key[0] for key in first] == ["lora", "mm", "cache_salt", "prompt_embeds", "encoder"]
    assert first[:3] == (("lora", "sql", "/adapters/sql"), ("mm", "cat", 2), ("cache_salt", "s"))
    assert first[4] == ("encoder", b"audio")


def test_salt_and_encoder_stand_at_token_0_only() -> None:
    both = extras(cache_salt="s", encoder=ENCODER)
    assert both.of_blocks(0, 3, SIZE) == [(("cache_salt", "s"), ("encoder", b"audio")), None, None]
    assert both.of_blocks(1, 3, SIZE) is None


def test_an_adapter_stands_in_every_block() -> None:
    assert extras(lora=LORA).of_blocks(2, 2, SIZE) == [(("lora", "sql", "/adapters/sql"),)] * 2


def test_items_stand_in_every_block_they_overlap() -> None:
    """Tokens 2 .. 6 and 8 .. 11 of blocks 0-3, 4-7, 8-11, 12-15."""
    both = extras(multimodal=[MultimodalItem("dog", 8, 4), IMAGE])
    assert both.of_blocks(0, 4, SIZE) == [(("mm", "cat", 2),), (("mm", "cat", -2),), (("mm", "dog", 0),), None]


def test_two_items_in_one_block() -> None:
    both = extras(multimodal=[MultimodalItem("a", 4, 1), MultimodalItem("b", 7, 1)])
    assert both.of_block(4, SIZE) == (("mm", "a", 0), ("mm", "b", 3))


def test_embeddings_are_digested_by_slice() -> None:
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    keys = extras(prompt_embeds=embeds).of_blocks(0, 3, SIZE)
    again = extras(prompt_embeds=np.concatenate((embeds, embeds))[:6].copy(order="F")).of_blocks(0, 3, SIZE)
    assert keys is not None
    assert keys == again  # content, not identity or layout
    assert [key is None for key in keys] == [False, False, True]
    other = embeds.copy()
    other[5] += 1
    changed = extras(prompt_embeds=other).of_blocks(0, 2, SIZE)
    assert changed is not None
    assert (changed[0] == keys[0], changed[1] == keys[1]) == (True, False)
    assert extras(prompt_embeds=embeds.astype(np.float64)).of_blocks(0, 1, SIZE) != [keys[0]]
    assert extras(prompt_embeds=embeds.reshape(3, 4)).of_block(0, SIZE) != extras(
        prompt_embeds=embeds.reshape(3, 4).T.copy().reshape(3, 4)
    ).of_block(0, SIZE)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4),
    st.integers(0, 10),
    st.integers(1, 7),
    st.integers(0, 20),
)
def test_blocks_say_what_their_tokens_say(gaps: list[tuple[int, int]], embedded: int, size: int, first: int) -> None:
    """Against a definition token by token."""
    items, end = [], 0
    for i, (gap, length) in enumerate(gaps):
        items.append(MultimodalItem(f"i{i}", end + gap, length))
        end += gap + length
    embeds = np.arange(2 * embedded).reshape(embedded, 2) if embedded else None
    known = ExtraKeys(40, multimodal=items, prompt_embeds=embeds, cache_salt="s")
    got = known.of_block(first * size, size) or ()
    tokens = range(first * size, first * size + size)
    over = [item for item in items if any(item.offset <= t < item.offset + item.length for t in tokens)]
    assert [key for key in got if key[0] == "mm"] == [("mm", item.id, item.offset - first * size) for item in over]
    assert any(key[0] == "prompt_embeds" for key in got) == any(t < embedded for t in tokens)
    assert any(key[0] == "cache_salt" for key in got) == (0 in tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraAdapter("", "p"), "needs a name"),
        (lambda: MultimodalItem("", 0, 1), "needs an id"),
        (lambda: MultimodalItem("a", -1, 1), "offset must be 0 or more"),
        (lambda: MultimodalItem("a", 0, 0), "length at least 1"),
        (lambda: EncoderInput(b"", 3), "needs a digest"),
        (lambda: EncoderInput(b"d", 0), "at least 1 token"),
        (lambda: extras(multimodal=[IMAGE, MultimodalItem("b", 6, 2)]), "begins at 6, before the one before ends at 7"),
        (lambda: extras(multimodal=[MultimodalItem("b", 18, 3)]), "ends at 21"),
        (lambda: extras(prompt_embeds=np.zeros(3)), r"must be \[tokens, hidden\]"),
        (lambda: extras(prompt_embeds=np.zeros((21, 2))), "at most 20 tokens"),
        (lambda: extras(prompt_embeds=np.zeros((0, 2))), r"got shape \(0, 2\)"),
    ],
)
def test_what_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# -- requests


def request(hasher: BlockHasher, tokens: range | list[int] = range(18), **known: object) -> Request:
    return Request("r", tokens, hasher=hasher, **known)  # type: ignore[arg-type]  # by name


KINDS: list[dict[str, object]] = [
    {},
    {"lora": LORA},
    {"lora": LoraAdapter("sql", "/elsewhere")},
    {"lora": LoraAdapter("chat", "/adapters/sql")},
    {"multimodal": [IMAGE]},
    {"multimodal": [MultimodalItem("dog", 2, 5)]},
    {"multimodal": [MultimodalItem("cat", 3, 5)]},
    {"cache_salt": "s"},
    {"cache_salt": "t"},
    {"prompt_embeds": np.zeros((3, 2))},
    {"prompt_embeds": np.ones((3, 2))},
    {"encoder": ENCODER},
    {"encoder": EncoderInput(b"other", 30)},
    {"lora": LORA, "cache_salt": "s"},
]


def test_requests_that_differ_in_one_extra_share_nothing() -> None:
    cache = KVCacheManager(attention_config(200, (SIZE,)), 100)
    assert cache.hasher is not None
    for i, known in enumerate(KINDS):
        for j, other in enumerate(KINDS[:i]):
            mine, theirs = request(cache.hasher, **known), request(cache.hasher, **other)  # type: ignore[arg-type]  # by name
            assert not set(mine.hashes) & set(theirs.hashes), (i, j)
        twin = Request(f"r{i}", range(18), hasher=cache.hasher, **known)  # type: ignore[arg-type]  # by name
        assert cache.get_computed_blocks(twin)[1] == 0
        cache.allocate_slots(twin, 18)
        assert cache.get_computed_blocks(request(cache.hasher, **known))[1] == 16  # type: ignore[arg-type]  # by name


def test_the_id_of_an_adapter_is_no_key() -> None:
    hasher = BlockHasher(SIZE)
    assert request(hasher, lora=LORA).hashes == request(hasher, lora=LoraAdapter("sql", "/adapters/sql", 9)).hashes


@given(
    st.sampled_from(KINDS),
    st.integers(1, 20),
    st.integers(0, 12),
    st.booleans(),
)
def test_growing_is_hashing_at_once(known: dict[str, object], prompt: int, more: int, resident: bool) -> None:
    tokens = list(range(100, 100 + 7 + prompt + more))
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    whole = Request("whole", tokens, hasher=cache.hasher, **known)  # type: ignore[arg-type]  # by name
    grown = Request("grown", tokens[: 7 + prompt], hasher=cache.hasher, **known)  # type: ignore[arg-type]  # by name
    if resident:
        cache.allocate_slots(grown, 1)
    for token in tokens[7 + prompt :]:
        grown.append(token)
    assert grown.hashes == whole.hashes


# -- requests that go on, and that are cut


class Counting(BlockHasher):
    """Counts the blocks that it hashes."""

    blocks = 0

    def hash_chain(
        self, parent: bytes | None, tokens: NDArray[np.integer], extras: Sequence[Extra | None] | None = None
    ) -> list[bytes]:
        out = super().hash_chain(parent, tokens, extras)
        self.blocks += len(out)
        return out


@pytest.mark.parametrize("known", KINDS[:1] + KINDS[4:5] + KINDS[7:8] + KINDS[-1:])
@pytest.mark.parametrize("resident", [False, True])
def test_what_was_hashed_is_not_hashed_again(known: dict[str, object], resident: bool) -> None:
    hasher = Counting(SIZE)
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100, hasher=hasher)
    first = Request("first", range(18), hasher=hasher, **known)  # type: ignore[arg-type]  # by name
    if resident:
        cache.allocate_slots(first, 18)
    for token in range(18, 25):
        first.append(token)
    for tokens, alike in (([*range(25), 7, 7, 7], 6), ([*range(9), 99, *range(10, 30)], 2)):
        expected = Request("alone", tokens, hasher=hasher, **known).hashes  # type: ignore[arg-type]  # by name
        hasher.blocks = 0
        again = Request("again", tokens, hasher=hasher, continues=first, **known)  # type: ignore[arg-type]  # by name
        assert again.hashes == expected
        assert hasher.blocks == len(expected) - alike


def test_hashes_are_not_taken_from_a_request_with_other_extras() -> None:
    hasher = Counting(SIZE)
    first = request(hasher, multimodal=[MultimodalItem("cat", 9, 2)])
    hasher.blocks = 0
    second = request(hasher, multimodal=[MultimodalItem("dog", 9, 2)], continues=first)
    assert hasher.blocks == 2  # blocks 0 and 1 are alike
    assert second.hashes == request(hasher, multimodal=[MultimodalItem("dog", 9, 2)]).hashes
    salted = request(hasher, cache_salt="s", continues=request(hasher))
    assert salted.hashes == request(hasher, cache_salt="s").hashes


def test_continuing_across_hashers() -> None:
    with pytest.raises(ConfigError, match="hashed by another hasher"):
        request(BlockHasher(SIZE), continues=request(BlockHasher(SIZE)))


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("cut", [9, 10, 11, 12, 13, 16, 17])
def test_truncated_hashes(resident: bool, cut: int) -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    one = Request("one", range(9), hasher=cache.hasher)
    if resident:
        cache.allocate_slots(one, 5)
    for token in range(9, 17):
        one.append(token)
    one.truncate(cut)
    assert one.token_ids().tolist() == list(range(cut))
    assert len(one.hashes) == cut // SIZE
    for token in range(50, 60):
        one.append(token)
    assert one.token_ids().tolist() == [*range(cut), *range(50, 60)]
    assert one.hashes == Request("new", [*range(cut), *range(50, 60)], hasher=cache.hasher).hashes
    cache.check()


def test_a_resident_request_cut_at_a_block_knows_its_last_token() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    one = Request("one", range(5), hasher=cache.hasher)
    cache.allocate_slots(one, 5)
    for token in range(5, 11):
        one.append(token)
    one.truncate(8)
    assert cache.rows.last_tokens(np.array([one.row])).tolist() == [7]


def test_what_cannot_be_cut() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    one = Request("one", range(5), hasher=cache.hasher)
    for wrong in (4, 6):
        with pytest.raises(ConfigError, match="cannot be cut"):
            one.truncate(wrong)
    one.append(5)
    one.num_computed_tokens = 6
    with pytest.raises(ConfigError, match="6 of them prompt or computed"):
        one.truncate(5)


# -- reading and writing


def test_requests_that_do_not_read_or_write() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100, log_stats=True)
    silent = Request("silent", range(18), hasher=cache.hasher, skip_writing_prefix_cache=True)
    cache.allocate_slots(silent, 10)
    silent.num_computed_tokens = 10
    rows = cache.rows.rows_of([silent])
    cache.allocate_batch(rows, 8)
    silent.num_computed_tokens = 18
    cache.cache_blocks(silent, 18)
    cache.check()
    assert cache.statistics().cached_blocks == 0
    open_one = Request("open", range(18), hasher=cache.hasher)
    cache.allocate_slots(open_one, 18)
    assert cache.get_computed_blocks(Request("a", range(18), hasher=cache.hasher))[1] == 16
    blind = Request("b", range(18), hasher=cache.hasher, skip_reading_prefix_cache=True)
    assert cache.get_computed_blocks(blind)[1] == 0
    logged = Request("c", range(18), SamplingParams(prompt_logprobs=1), hasher=cache.hasher)
    assert cache.get_computed_blocks(logged)[1] == 0
    stats = cache.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.hits) == (1, 16)
    cache.free(silent)
    cache.check()


def test_a_reader_that_does_not_write_adopts_hits() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    cache.allocate_slots(Request("a", range(18), hasher=cache.hasher), 18)
    reader = Request("b", [*range(12), *range(50, 60)], hasher=cache.hasher, skip_writing_prefix_cache=True)
    blocks, tokens = cache.get_computed_blocks(reader)
    assert tokens == 12
    cache.allocate_slots(reader, 10, tokens, blocks)
    cache.check()
    assert cache.statistics().cached_blocks == 4
    with pytest.raises(ConfigError, match="logprobs must not be negative"):
        SamplingParams(prompt_logprobs=-1)


# -- events


def stored(cache: KVCacheManager) -> list[BlockStored]:
    return [event for event in cache.take_events() if isinstance(event, BlockStored)]


def test_events_tell_adapters_and_items() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100, enable_kv_cache_events=True)
    one = Request("one", range(10), hasher=cache.hasher, lora=LORA, multimodal=[IMAGE], cache_salt="s")
    cache.allocate_slots(one, 10)
    (event,) = stored(cache)
    assert (event.lora_id, event.lora_name) == (3, "sql")
    assert event.extra_keys == (("sql", ("cat", 2), "s"), ("sql", ("cat", -2)))
    assert event.block_hashes == tuple(one.hashes)


def test_a_block_of_several_hash_blocks_has_the_keys_of_all() -> None:
    """D8: the token span and the hash list match, in every group."""
    cache = KVCacheManager(attention_config(50, (4, 8)), 100, enable_kv_cache_events=True)
    one = Request("one", range(17), hasher=cache.hasher, lora=LORA, multimodal=[MultimodalItem("cat", 5, 2)])
    cache.allocate_slots(one, 17)
    small, large = stored(cache)
    assert small.extra_keys == (("sql",), ("sql", ("cat", 1)), ("sql",), ("sql",))
    assert large.extra_keys == (("sql", ("cat", 1)), ("sql",))
    for event in (small, large):
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size


def test_keys_of_a_block_are_what_is_hashed() -> None:
    hasher = BlockHasher(SIZE)
    one = request(hasher, lora=LORA, encoder=ENCODER)
    expected: list[Extra | None] = [
        (("lora", "sql", "/adapters/sql"), ("encoder", b"audio")),
        *[(("lora", "sql", "/adapters/sql"),)] * 3,
    ]
    assert one.hashes == hasher.hash_chain(None, np.arange(18, dtype=np.int32), expected)
