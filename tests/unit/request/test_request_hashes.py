"""A request's hashes grow with its tokens, are cut with them, and go on from an earlier request's: never twice."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.cache import BlockHasher, KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.extra_keys import EncoderInput, LoraAdapter, MultimodalItem
from hybridkv.request import Request, SamplingParams
from hybridkv.request_rows import RequestRows
from hybridkv.testing import attention_config

SIZE = 4


class Counting(BlockHasher):
    """Counts the blocks that it hashes, and the calls for chains."""

    blocks = 0
    chains = 0

    def hash_chain(self, *args: object, **options: object) -> list[bytes]:
        out = super().hash_chain(*args, **options)  # type: ignore[arg-type]  # as they came
        self.blocks += len(out)
        self.chains += 1
        return out

    def hash_rows(self, *args: object, **options: object) -> list[bytes]:
        out = super().hash_rows(*args, **options)  # type: ignore[arg-type]  # as they came
        self.blocks += len(out)
        return out


KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lora": {"lora": LoraAdapter("sql", "/adapters/sql", 3)},
    "items": {"multimodal": [MultimodalItem("cat", 2, 5), MultimodalItem("dog", 7, 1)]},
    "salt": {"cache_salt": "s"},
    "embeds": {"prompt_embeds": np.arange(14).reshape(7, 2)},
    "encoder": {"encoder": EncoderInput(b"audio", 30)},
}
KINDS["all"] = {name: value for kind in KINDS.values() for name, value in kind.items()}
every_kind = pytest.mark.parametrize("kind", KINDS)


def request(hasher: BlockHasher | None, tokens: list[int] | range, kind: str = "nothing", **known: object) -> Request:
    return Request("r", tokens, hasher=hasher, **KINDS[kind], **known)  # type: ignore[arg-type]  # by name


def grown(hasher: BlockHasher, tokens: list[int] | range, prompt: int, kind: str, *, resident: bool) -> Request:
    """A request of ``tokens``, all behind the first ``prompt`` appended."""
    out = request(hasher, tokens[:prompt], kind)
    if resident:
        RequestRows(SIZE, capacity=1).bind(out)
    for token in tokens[prompt:]:
        out.append(token)
    return out


# -- continuing


@every_kind
@pytest.mark.parametrize("state", ["waiting", "resident", "finished"])
@pytest.mark.parametrize(
    ("tokens", "alike"),
    [
        (range(25), 6),  # the same
        ([*range(25), 7, 7, 7, 7], 6),  # longer: its last block was not full before
        (range(30), 6),  # longer, and of the same tokens
        (range(18), 4),  # shorter
        (range(9), 2),
        ([*range(9), 99, *range(10, 30)], 2),  # another token inside a block
        ([*range(11), 99, *range(12, 30)], 2),
        ([*range(12), 99, *range(13, 30)], 3),  # at a block's first token
        ([99, *range(1, 30)], 0),
        ([*range(8), *range(50, 70)], 2),
    ],
)
def test_request_hashes_are_not_computed_twice(kind: str, state: str, tokens: range, alike: int) -> None:
    hasher = Counting(SIZE)
    first = request(hasher, range(18), kind)
    rows = RequestRows(SIZE, capacity=1)
    if state != "waiting":
        rows.bind(first)
    for token in range(18, 25):
        first.append(token)
    if state == "finished":
        rows.release(first)
    kept = list(first.hashes)
    expected = request(hasher, tokens, kind).hashes
    hasher.blocks = hasher.chains = 0
    again = request(hasher, tokens, kind, continues=first)
    assert again.hashes == expected
    assert hasher.blocks == len(expected) - alike
    assert hasher.chains == (len(expected) > alike)
    again.append(1)
    again.append(2)
    again.append(3)
    again.append(4)
    assert first.hashes == kept  # a list of its own


def test_request_chain_of_turns_is_hashed_once() -> None:
    hasher = Counting(SIZE)
    turns = [list(range(10 * turn)) for turn in range(1, 20)]
    last = None
    for tokens in turns:
        last = request(hasher, tokens, "all", continues=last)
    assert hasher.blocks == len(turns[-1]) // SIZE
    assert last is not None
    assert last.hashes == request(hasher, turns[-1], "all").hashes


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ({"multimodal": [MultimodalItem("cat", 9, 2)]}, {"multimodal": [MultimodalItem("dog", 9, 2)]}, 2),
        ({"multimodal": [MultimodalItem("cat", 9, 2)]}, {"multimodal": [MultimodalItem("cat", 10, 2)]}, 2),
        ({"multimodal": [MultimodalItem("cat", 9, 2)]}, {}, 2),
        ({"multimodal": [MultimodalItem("cat", 9, 3)]}, {"multimodal": [MultimodalItem("cat", 9, 4)]}, 3),
        ({"cache_salt": "s"}, {}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, 0),
        ({"cache_salt": "s"}, {"cache_salt": "s"}, 4),
        ({"lora": LoraAdapter("sql", "/a")}, {"lora": LoraAdapter("sql", "/b")}, 0),
        ({"lora": LoraAdapter("sql", "/a", 1)}, {"lora": LoraAdapter("sql", "/a", 2)}, 4),
        ({"encoder": EncoderInput("x", 3)}, {"encoder": EncoderInput("y", 3)}, 0),
        ({"prompt_embeds": np.zeros((9, 2))}, {"prompt_embeds": np.zeros((8, 2))}, 2),
        ({"prompt_embeds": np.zeros((9, 2))}, {"prompt_embeds": np.zeros((9, 2))}, 4),
        ({"prompt_embeds": np.zeros((9, 2))}, {"prompt_embeds": np.ones((9, 2))}, 0),
    ],
)
def test_continued_request_takes_hashes_up_to_different_extras(
    first: dict[str, Any], second: dict[str, Any], alike: int
) -> None:
    hasher = Counting(SIZE)
    for one, other in ((first, second), (second, first)):
        earlier, expected = request(hasher, range(18), **one), request(hasher, range(18), **other).hashes
        hasher.blocks = 0
        assert request(hasher, range(18), continues=earlier, **other).hashes == expected
        assert hasher.blocks == 4 - alike


def test_continued_request_after_truncation_rehashes_the_rest() -> None:
    hasher = Counting(SIZE)
    first = grown(hasher, range(20), 5, "nothing", resident=False)
    first.truncate(10)
    hasher.blocks = 0
    assert request(hasher, range(20), continues=first).hashes == request(BlockHasher(SIZE), range(20)).hashes
    assert hasher.blocks == 3


def test_continued_request_with_another_hasher_hashes_anew() -> None:
    for mine, other in ((BlockHasher(SIZE), BlockHasher(SIZE)), (BlockHasher(SIZE), None), (None, BlockHasher(SIZE))):
        with pytest.raises(ConfigError, match=r"'r' continues 'r', .* another hasher: construct both with hasher="):
            request(mine, range(9), continues=request(other, range(9)))
    assert request(None, range(9), continues=request(None, range(9))).hashes == []


# -- cutting


@settings(max_examples=2 * settings().max_examples)
@given(st.sampled_from(list(KINDS)), st.data())
def test_request_after_random_growth_and_truncation_hashes_each_block_once(kind: str, data: st.DataObject) -> None:
    """Tokens, counts and hashes of a request that is bound, released, appended to and cut, each block hashed once."""
    hasher = Counting(data.draw(st.integers(1, 5)))
    plain, rows = BlockHasher(hasher.block_size), RequestRows(hasher.block_size, capacity=1)
    naive = list(range(data.draw(st.integers(8, 12))))
    one, prompt = request(hasher, naive, kind), len(naive)
    hashed = len(naive) // hasher.block_size
    for step in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["bind or release", "append", "cut"]))
        if action == "bind or release":
            (rows.bind if one.row < 0 else rows.release)(one)
        elif action == "append":
            if one.row >= 0 and step % 2:
                rows.append(np.array([one.row]), np.array([1000 + step], np.int32))
            else:
                one.append(1000 + step)
            naive.append(1000 + step)
            hashed += len(naive) % hasher.block_size == 0
        else:
            cut = data.draw(st.integers(prompt, len(naive)))
            one.truncate(cut)
            del naive[cut:]
        assert one.token_ids().tolist() == naive
        assert one.hashes == request(plain, naive, kind).hashes
        assert hasher.blocks == hashed
        if one.row >= 0:
            assert rows.last_tokens(np.array([one.row])).tolist() == naive[-1:]


def test_resident_request_truncation_keeps_the_cache_consistent() -> None:
    cache = KVCacheManager(attention_config(50, (SIZE,)), 100)
    one, other = Request("one", range(5), hasher=cache.hasher), Request("other", range(40, 50), hasher=cache.hasher)
    for each in (one, other):
        cache.allocate_slots(each, each.num_tokens)
        each.num_computed_tokens = each.num_tokens
    for token in range(5, 11):
        one.append(token)
    one.truncate(8)
    assert other.token_ids().tolist() == list(range(40, 50))
    assert (one.num_computed_tokens, cache.rows.num_tokens[one.row]) == (5, 8)
    cache.check()
    cache.allocate_slots(one, 3)
    cache.check()
    assert cache.get_computed_blocks(Request("again", range(9), hasher=cache.hasher))[1] == 8


def test_request_truncation_beyond_limits_is_rejected() -> None:
    one = request(BlockHasher(SIZE), range(5))
    for wrong in (4, 6, -1):
        with pytest.raises(ConfigError, match=f"'r' cannot be cut to {wrong} tokens: keep its 5 .* the 5 known"):
            one.truncate(wrong)
    one.truncate(5)
    assert one.token_ids().tolist() == list(range(5))


def test_request_truncation_of_computed_tokens_with_blocks_is_rejected() -> None:
    """Computed tokens stay while blocks are held; a request that holds none has to compute less."""
    one = grown(BlockHasher(SIZE), range(12), 5, "nothing", resident=True)
    rows = one._rows
    assert isinstance(rows, RequestRows)
    one.num_computed_tokens = 9
    with pytest.raises(ConfigError, match="cannot be cut to 8 tokens: keep its 9"):
        one.truncate(8)
    one.truncate(9)
    one.num_computed_tokens = 11  # drafts among them
    one.truncate(9)
    one.num_computed_tokens = 9
    rows.release(one)
    one.truncate(6)
    assert (one.num_tokens, one.num_computed_tokens) == (6, 6)


# -- reading and writing


def test_request_cache_options_set_reads_and_writes() -> None:
    plain = Request("r", [1])
    assert (plain.priority, plain.reads_prefix_cache, plain.writes_prefix_cache) == (0, True, True)
    assert (plain.sampling.logprobs, plain.sampling.prompt_logprobs, plain.num_encoder_tokens) == (None, None, 0)
    blind = Request("r", [1], skip_reading_prefix_cache=True, priority=-2, encoder=EncoderInput("d", 7))
    assert (blind.priority, blind.reads_prefix_cache, blind.writes_prefix_cache) == (-2, False, True)
    assert blind.num_encoder_tokens == 7
    silent = Request("r", [1], skip_writing_prefix_cache=True)
    assert (silent.reads_prefix_cache, silent.writes_prefix_cache) == (True, False)


@pytest.mark.parametrize(("asked", "reads"), [(None, True), (0, False), (5, False)])
def test_request_with_prompt_logprobs_skips_look_up(asked: int | None, reads: bool) -> None:
    assert Request("r", [1], SamplingParams(prompt_logprobs=asked)).reads_prefix_cache is reads
    assert Request("r", [1], SamplingParams(logprobs=asked)).reads_prefix_cache


def test_request_that_skips_the_cache_neither_hits_nor_publishes() -> None:
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
