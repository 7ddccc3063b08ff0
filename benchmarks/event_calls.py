"""Measure one call for one request that crosses an event, compared with vLLM's allocate_slots if vLLM is installed.

    python event_calls.py [ROUNDS]      5 by default; in microseconds

Requests decode. Each gets one more token in a call of its own, inside a step. At an event, a block must be allocated,
can be freed or can be published; other calls only compare two numbers. Evicting: all other blocks are cached, so each
allocated block drops a key. Both managers take turns step by step, with garbage collection off. The result is the
median over the rounds of each round's mean.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any, Final, Protocol

import numpy as np

from hybridkv.cache import BlockHasher, KVCacheManager
from hybridkv.planner.config import KVCacheConfig, KVCacheGroupSpec
from hybridkv.request import Request, SamplingParams
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

BLOCK: Final = 16
WINDOW: Final = 64
REQUESTS: Final = 32
PROMPT: Final = 200
STEPS: Final = 160
BLOCKS: Final = 4096
OTHER: Final = 2048
MAX_MODEL_LEN: Final = 4096
VOCABULARY: Final = 50_000

GROUPS: Final = {
    "full": ("full",),
    "full + window": ("full", "window"),
    "full + 2 windows": ("full", "window", "window"),
    "full + states": ("full", "states"),
    "full + window + states": ("full", "window", "states"),
    "full + 3 of states": ("full", "states", "states", "states"),
}


class Side(Protocol):
    """A manager and its requests, by number."""

    def begin(self, step: int) -> None:
        """Begin a step; the one before has run."""
        ...

    def admit(self, prompt: Sequence[int]) -> None:
        """One more request, its prompt computed."""
        ...

    def keep(self, prompt: Sequence[int]) -> None:
        """Run a request to its end, so that its blocks are cached."""
        ...

    def append(self, number: int, token: int) -> None:
        """Append a sampled token."""
        ...

    def call(self, number: int) -> Callable[[], object]:
        """Return the call that allocates one more token."""
        ...

    def computed(self, number: int) -> None:
        """Count that token as scheduled and computed."""
        ...


class Ours:
    """hybridkv."""

    def __init__(self, kinds: Sequence[str]) -> None:
        groups = [KVCacheGroupSpec((f"layer.{i}",), _spec(kind)) for i, kind in enumerate(kinds)]
        self._hasher = BlockHasher(BLOCK)
        self.cache = KVCacheManager(KVCacheConfig(BLOCKS, (), tuple(groups)), MAX_MODEL_LEN, hasher=self._hasher)
        self._requests: list[Request] = []
        self._step = -1

    def begin(self, step: int) -> None:
        """See Side."""
        if self._step >= 0:
            self.cache.engine.end_step()
            self.cache.mark_written(self._step)
        self.cache.engine.begin_step(step)
        self._step = step

    def admit(self, prompt: Sequence[int]) -> None:
        """See Side."""
        endless = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
        request = Request(f"r{len(self._requests)}", prompt, endless, hasher=self._hasher)
        if self.cache.allocate_slots(request, len(prompt)) is None:
            raise AssertionError("the pool is too small")
        request.num_computed_tokens = len(prompt)
        self._requests.append(request)

    def keep(self, prompt: Sequence[int]) -> None:
        """See Side."""
        self.admit(prompt)
        self.cache.free(self._requests.pop())

    def append(self, number: int, token: int) -> None:
        """See Side."""
        self._requests[number].append(token)

    def call(self, number: int) -> Callable[[], object]:
        """See Side."""
        request, allocate = self._requests[number], self.cache.allocate_slots
        return lambda: allocate(request, 1)

    def computed(self, number: int) -> None:
        """See Side."""
        self._requests[number].num_computed_tokens += 1

    def due(self, number: int) -> bool:
        """Whether its next token crosses an event."""
        request = self._requests[number]
        return request.num_computed_tokens + 1 >= int(self.cache.engine.next_events(np.array([request.row]))[0])


class Stock:
    """vLLM."""

    def __init__(self, kinds: Sequence[str]) -> None:
        import torch  # noqa: PLC0415 - only where vLLM is at hand
        from vllm.sampling_params import SamplingParams as Sampling  # noqa: PLC0415
        from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415
        from vllm.v1 import kv_cache_interface as interface  # noqa: PLC0415
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheManager as StockManager  # noqa: PLC0415
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: PLC0415
        from vllm.v1.request import Request as StockRequest  # noqa: PLC0415

        hash_of = get_hash_fn_by_name("sha256_cbor")
        kv_cache_utils.init_none_hash(hash_of)
        register_all_kvcache_specs(None)
        heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "block_size": BLOCK}
        state: dict[str, Any] = {"shapes": ((1, 1),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        specs: dict[str, Callable[[], Any]] = {
            "full": lambda: interface.FullAttentionSpec(**heads),
            "window": lambda: interface.SlidingWindowSpec(**heads, sliding_window=WINDOW),
            "states": lambda: interface.MambaSpec(block_size=BLOCK, **state),
        }
        groups = [interface.KVCacheGroupSpec([f"layer{i}"], specs[kind]()) for i, kind in enumerate(kinds)]
        self._manager: Any = StockManager(
            interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
        )
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hash_of)
        self._sampling = Sampling(max_tokens=1 << 20, ignore_eos=True)
        self._sampling.update_from_generation_config({}, 1 << 20)
        self._make: Any = StockRequest
        self._requests: list[Any] = []

    def begin(self, step: int) -> None:  # noqa: ARG002 - see Side
        """See Side."""
        self._manager.new_step_starts()

    def admit(self, prompt: Sequence[int]) -> None:
        """See Side."""
        request = self._make(
            request_id=f"r{len(self._requests)}",
            prompt_token_ids=list(prompt),
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        if self._manager.allocate_slots(request, len(prompt)) is None:
            raise AssertionError("the pool is too small")
        request.num_computed_tokens = len(prompt)
        self._requests.append(request)

    def keep(self, prompt: Sequence[int]) -> None:
        """See Side."""
        self.admit(prompt)
        self._manager.free(self._requests.pop())

    def append(self, number: int, token: int) -> None:
        """See Side."""
        self._requests[number].append_output_token_ids(token)

    def call(self, number: int) -> Callable[[], object]:
        """See Side."""
        request, allocate = self._requests[number], self._manager.allocate_slots
        return lambda: allocate(request, 1)

    def computed(self, number: int) -> None:
        """See Side."""
        self._requests[number].num_computed_tokens += 1


def _spec(kind: str) -> KVCacheSpec:
    match kind:
        case "full":
            return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32")
        case "window":
            return SlidingWindowSpec(
                block_size=BLOCK, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=WINDOW
            )
        case _:
            return MambaSpec(block_size=BLOCK, shapes=((1, 1),), dtypes=("float32",), cache_mode="align")


Spent = dict[tuple[str, bool], int]
"""Nanoseconds of one side's calls that cross an event, or none."""


def run(kinds: Sequence[str], *, stock: bool, evicting: bool) -> tuple[dict[bool, int], Spent]:
    """How many calls cross an event, or none, and what they cost."""
    ours = Ours(kinds)
    sides: dict[str, Side] = {"ours": ours} | ({"vLLM": Stock(kinds)} if stock else {})
    draw = np.random.default_rng(1)
    for side in sides.values():
        side.begin(0)
        others = np.random.default_rng(2).integers(0, VOCABULARY, (BLOCKS * BLOCK // OTHER + 1, OTHER))
        for prompt in others.tolist() if evicting else ():
            side.keep(prompt)
        for number in range(REQUESTS):
            side.admit(np.random.default_rng(number).integers(0, VOCABULARY, PROMPT + number).tolist())
    counts: dict[bool, int] = {True: 0, False: 0}
    spent: Spent = dict.fromkeys(((name, due) for name in sides for due in counts), 0)
    for step in range(1, STEPS + 1):
        tokens = draw.integers(0, VOCABULARY, REQUESTS).tolist()
        for side in sides.values():
            side.begin(step)
            for number, token in enumerate(tokens):
                side.append(number, token)
        due = [ours.due(number) for number in range(REQUESTS)]
        for one in due:
            counts[one] += 1
        for name, side in _in_turn(sides, step):
            for number in range(REQUESTS):
                call = side.call(number)
                before = perf_counter_ns()
                call()
                spent[name, due[number]] += perf_counter_ns() - before
                side.computed(number)
    return counts, spent


def _in_turn(sides: dict[str, Side], step: int) -> Iterator[tuple[str, Side]]:
    """Return the two sides in an order that alternates with each step."""
    return iter(list(sides.items())[:: 1 if step % 2 else -1])


def main() -> None:
    """See the module."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.v1.core.kv_cache_manager  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        stock = False
    else:
        stock = True
    names = ["ours", "vLLM"] if stock else ["ours"]
    heads = [f"{name}, {what}" for what in ("event", "none") for name in names]
    print(f"{'':34}" + "".join(f"{head:>14}" for head in heads))
    for title, kinds in GROUPS.items():
        for evicting in (False, True):
            cells = _medians(rounds, kinds, stock=stock, evicting=evicting)
            shown = "".join(f"{cells[name, due]:14.2f}" for due in (True, False) for name in names)
            print(f"{title + ', evicting' * evicting:34}" + shown, flush=True)


def _medians(rounds: int, kinds: Sequence[str], *, stock: bool, evicting: bool) -> dict[tuple[str, bool], float]:
    """Microseconds of one side's calls that cross an event, or none."""
    run(kinds, stock=stock, evicting=evicting)  # first uses are nobody's
    found: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        counts, spent = run(kinds, stock=stock, evicting=evicting)
        gc.enable()
        for key, nanoseconds in spent.items():
            found.setdefault(key, []).append(nanoseconds / counts[key[1]] / 1000)
    return {key: median(each) for key, each in found.items()}


if __name__ == "__main__":
    main()
