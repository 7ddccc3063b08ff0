"""Drafts: every acceptance pattern over edges of blocks and states, what EAGLE and preemption make of it, controls."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from hybridkv.cache.allocator import Slots
from hybridkv.cache.checkpoints import Checkpoints
from hybridkv.cache.groups import BlockRows, CacheGroup
from hybridkv.errors import CacheError
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import SchedulerLimits
from hybridkv.specs import KVCacheSpec
from hybridkv.testing import ContentError
from hybridkv.testing.configs import full_spec, state_spec, window_spec
from oracles import Rig, RigOptions

Int64 = NDArray[np.int64]

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

LAYOUTS = ("natural", "reference")


def draft_rig(layout: str, drafts: int, specs: tuple[KVCacheSpec, ...], **other: object) -> Rig:
    """With room to spare, and a state kept every five tokens."""
    options = RigOptions(
        num_blocks=120,
        specs=specs,
        max_model_len=64,
        limits=SchedulerLimits(max_batched_tokens=40),
        placement="interval:5",
        blocks_per_slab=tuple(2 for _ in specs) if layout == "natural" else (),
    )
    return Rig(replace(options.with_drafts(drafts), **other))  # type: ignore[arg-type]  # fields by name


def run_with(rig: Rig, name: str, right: int, wrong: int) -> None:
    """``name`` to its end, with the same drafts in every step."""
    while name in rig.live_ids:
        rig.propose(name, right, wrong)
        rig.schedule()
        rig.update()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_every_acceptance_pattern_at_every_place(layout: str, drafts: int) -> None:
    """Each step, cell, state and cached block is foretold, and what is read and cached is compared in bytes."""
    for right in range(drafts + 1):
        for length in range(5, 6 + right):  # so that steps begin at every place, whatever they accept
            rig = draft_rig(layout, drafts, (full_spec(4), state_spec(12), window_spec(2, 5)))
            name = rig.add([1] * (length - 1) + [2], 26, marks=(12, 17, 18, 19))
            assert name is not None
            run_with(rig, name, right, drafts - right)
            accepted = [rig.oracle.counts[f"accepted {place}"] for place in range(drafts)]
            assert [bool(count) for count in accepted] == [place < right for place in range(drafts)]
            again = rig.add([*rig.requests[name][1].tokens, 0], 3)
            rig.drain()
            assert again is not None
            hit = rig.requests[again][0].first_hit_tokens
            assert hit is not None
            assert hit >= (24 if layout == "reference" else 25 + length - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_a_stop_token_among_accepted_drafts(layout: str, stop: int) -> None:
    """Whatever token it is, and wherever among the drafts it comes."""
    cut = 0
    for length in range(2, 14, 2):
        rig = draft_rig(layout, 3, (full_spec(4), state_spec(5)))
        name = rig.add([length % 4, *[3] * (length - 1)], 20, stop_token_ids=(stop,))
        assert name is not None
        run_with(rig, name, 3, 0)
        cut += rig.oracle.counts["cut drafts"]
        rig.add([*rig.requests[name][1].tokens, 1], 4)
        rig.drain()
    assert cut


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_eagle_hits_what_accepted_drafts_filled_less_a_block(layout: str, right: int) -> None:
    """After every step, however many of its drafts were accepted."""
    rig = draft_rig(layout, 3, (full_spec(4), window_spec(2, 5)), eagle=True)
    name = rig.add([1] * 9 + [2], 26)
    assert name is not None
    while name in rig.live_ids:
        rig.propose(name, right, 3 - right)
        rig.schedule()
        rig.update()
        tokens = rig.requests[name][1].tokens
        assert rig.probe([*tokens, 0]) == (len(tokens) - 1) // 4 * 4 - 4
    assert bool(rig.oracle.counts["accepted 2"]) == (right == 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_preempted_with_drafts_in_flight(layout: str) -> None:
    """Those that are accepted come late, all at once, and the row starts anew behind them: random runs miss this."""
    met: Counter[str] = Counter()
    limits = SchedulerLimits(max_batched_tokens=40, max_in_flight=2, num_speculative_tokens=3)
    for num_blocks in range(9, 12) if layout == "natural" else range(17, 23):  # room for one of them, but not for both
        rig = draft_rig(layout, 3, (full_spec(2), window_spec(2, 5)), num_blocks=num_blocks, limits=limits)
        rig.add([0, 1, 2, 3], 12)
        rig.add([3, 2, 1, 0], 12)
        while len(rig.live_ids) == 2:
            rig.propose("r1", 3, 0)
            rig.schedule()
            rig.schedule()
            rig.update()
            rig.update()
        rig.drain()
        met.update(rig.oracle.counts)
    assert met["preempted with drafts"]
    assert met["late"]


# -- controls: what is wrong must be seen, by the content alone

EXAMPLES = 200
HYBRID: tuple[KVCacheSpec, ...] = (full_spec(4), state_spec(4))


class Blind(Rig):
    """Compares nothing with the oracle, which only says what the model will draw."""

    def run(self, random: Random) -> None:
        """Requests that share prefixes, one after the other and together, with drafts in nearly every step."""
        scheduler, most = self.scheduler, self.options.limits.num_speculative_tokens
        histories: list[list[int]] = [[random.randrange(4) for _ in range(6)]]
        for number in range(6):
            base = random.choice(histories)
            prompt = [*base[: random.randint(1, len(base))], random.randrange(4)]
            marks = random.sample(range(1, 30), 6) if self.is_natural else ()
            hasher, params = self.cache.hasher, SamplingParams(max_tokens=random.randint(4, 16))
            request = Request(f"r{number}", prompt, params, hasher=hasher, marks=marks)
            scheduler.add(request)
            for _ in range(random.choice((1, 3, 40))):
                if scheduler.drained:
                    break
                running = scheduler._running.requests
                scheduler.propose({one.request_id: self._drafts(one, random, most) for one in running})
                scheduler.update(self.worker.execute(scheduler.schedule()))
            histories.append(request.token_ids().tolist())
        for _ in range(200):
            if not scheduler.drained:
                scheduler.update(self.worker.execute(scheduler.schedule()))
        assert scheduler.drained

    def _drafts(self, request: Request, random: Random, most: int) -> list[int]:
        tokens, right = request.token_ids().tolist(), random.randint(0, most)
        for place in range(most):
            tokens.append((self.model.next_token(tokens) + (place >= right)) % self.options.vocabulary)
        drafts: list[int] = tokens[-most:]
        return drafts


def runs_until_caught(layout: str) -> int | None:
    """The number of random runs until a step reads wrong content."""
    for seed in range(EXAMPLES):
        random = Random(seed)
        specs = HYBRID
        options = RigOptions(
            num_blocks=40,
            specs=specs,
            max_model_len=44,
            limits=SchedulerLimits(max_batched_tokens=40),
            placement=random.choice(("ends", "interval:3")),
            blocks_per_slab=(3, 1) if layout == "natural" else (),
        ).with_drafts(random.randint(1, 3))
        try:
            Blind(options).run(random)
        except ContentError:
            return seed + 1
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_controls_without_their_fault_see_nothing(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.EXAMPLES", 10)
    assert runs_until_caught(layout) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_state_of_a_wrong_accepted_position_is_caught(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = CacheGroup.accept

    def one_before(self: CacheGroup, rows: Int64, columns: Int64) -> None:
        accept(self, rows, np.maximum(columns - 1, 0))

    monkeypatch.setattr(CacheGroup, "accept", one_before)
    assert runs_until_caught(layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_that_is_published_is_caught(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind accepted drafts one more is published: under the token that took its place, which is not computed yet."""

    def one_more(self: Slots, rows: Int64) -> None:
        for request in self._residents.request_rows.owners(rows):
            with suppress(CacheError):  # all were accepted: there is no block behind them
                self.publish_computed(request, request.num_computed_tokens + 1)

    monkeypatch.setattr(Slots, "_publish_accepted", one_more)
    assert runs_until_caught(layout)


def test_a_rotation_that_is_skipped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockRows, "swap_first", lambda *_: None)
    assert runs_until_caught("natural")


def test_an_accepted_state_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheGroup, "accept", lambda *_: None)
    assert runs_until_caught("reference")


def test_a_mark_among_drafts_that_takes_another_state_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state kept for a stop among accepted drafts is that of another position."""
    store_one, keep_column = Checkpoints._store_one, Checkpoints._keep_column

    def other(self: Checkpoints, request: Request, tokens: int, column: int | None = None) -> None:
        store_one(self, request, tokens, None if column is None else (column + 1) % 2)

    def other_too(self: Checkpoints, request: Request, tokens: int, column: int, *, ended: bool) -> None:
        keep_column(self, request, tokens, column if ended else (column + 1) % 2, ended=ended)

    monkeypatch.setattr(Checkpoints, "_store_one", other)
    monkeypatch.setattr(Checkpoints, "_keep_column", other_too)
    assert runs_until_caught("natural")
