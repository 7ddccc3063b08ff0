"""Blocks written from elsewhere hold the row's own tokens: random runs of an engine with transfers beside it."""

from collections import Counter
from random import Random
from typing import Any, Literal

import pytest
from foreign_engine import Engine, digest
from test_content import GEMMA, LFM, LLAMA

from how_much import how_many
from hybridkv.cache.holds import Loads
from hybridkv.models import read_model
from hybridkv.planner import Plan, plan
from hybridkv.request import Request
from hybridkv.specs import SlidingWindowSpec
from hybridkv.testing import ContentError

RUNS = 30
STEPS = 60
MODELS: dict[str, tuple[dict[str, object], Literal["natural", "reference"]]] = {
    "full": (LLAMA, "natural"),
    "windows": (GEMMA, "natural"),
    "states": (LFM, "natural"),
    "full, reference": (LLAMA, "reference"),
    "windows, reference": (GEMMA, "reference"),
}


def planned(name: str) -> Plan:
    facts, layout = MODELS[name]
    return plan(read_model(facts, block_size=4), 14_000, max_model_len=40, layout=layout)


class _Transfer:
    """Writes the tokens of one request into the blocks that it was given when it began, some at a time."""

    def __init__(self, request: Request, tables: list[list[int]], begin: int, end: int) -> None:
        self.request, self.tables, self.at, self.end = request, tables, begin, end


class Loading(Engine):
    """The engine of the example. Some requests wait for a transfer first, which may bring less than it was to."""

    def __init__(self, plan_: Plan, random: Random) -> None:
        super().__init__(plan_)
        self.random, self.transfers = random, list[_Transfer]()
        self.windows = [
            spec.sliding_window if isinstance(spec := one.layer_specs[0], SlidingWindowSpec) else None
            for one in plan_.config.groups
        ]

    def step(self) -> None:
        self.transfer()
        self.begin_load()
        super().step()
        self.cache.check()

    def begin_load(self) -> None:
        """The first that waits is loaded beside the steps, where there is room for it."""
        if not self.waiting or self.random.random() < 0.4:
            return
        request = self.waiting[0]
        blocks, hit = self.cache.get_computed_blocks(request)
        more = self.random.randint(0, request.num_tokens - 1 - hit) if request.num_tokens - 1 > hit else 0
        if not more:
            return
        taken = self.cache.allocate_slots(
            request, 0, hit, blocks, delay_cache_blocks=True, num_external_computed_tokens=more
        )
        if taken is None:
            return
        self.waiting.popleft()
        self.counts["loads"] += 1
        self.counts["loads behind a hit"] += hit > 0
        self.copy({})
        tables = [list(one) for one in self.cache.get_block_ids(request.request_id)]
        self.transfers.append(_Transfer(request, tables, hit, hit + more))

    def transfer(self) -> None:
        """Each transfer brings some tokens. Some end early: then what came counts, or nothing."""
        for one in list(self.transfers):
            end = min(one.at + self.random.choice((0, 0, 1, 4, 9)), one.end)
            self.write(one, end)
            one.at = end
            if one.at < one.end and self.random.random() < 0.7:
                continue
            self.transfers.remove(one)
            came = self.cache.engine.finish_load(one.request, None if one.at == one.end else one.at)
            self.counts["all came" if one.at == one.end else "some came" if came else "too few came"] += 1
            one.request.num_computed_tokens = came
            if came:
                self.running.append(one.request)
            else:
                self.waiting.appendleft(one.request)

    def write(self, one: _Transfer, end: int) -> None:
        tokens = one.request.token_ids().tolist()
        for group, size in enumerate(self.sizes):
            if group in self.states:
                if end == one.end:
                    self.memory[group][one.tables[group][0]] = {0: state_of(tokens[:end])}
                continue
            for place in range(one.at, end):
                block = one.tables[group][place // size]
                if block:  # a window left it behind
                    self.memory[group].setdefault(block, {})[place % size] = digest("token", tokens[: place + 1])

    def forward(self, request: Request, count: int, checkpoints: list[Any]) -> None:
        tables, tokens = self.cache.get_block_ids(request.request_id), request.token_ids().tolist()
        start = request.num_computed_tokens
        for group, size in enumerate(self.sizes):
            if group in self.states:
                places, expected = range(min(start, 1)), [state_of(tokens[:start])]
            else:
                window = self.windows[group]
                places = range(0 if window is None else max(0, start - window + 1), start)
                expected = [digest("token", tokens[: place + 1]) for place in places]
            for place, right in zip(places, expected, strict=False):
                found = self.memory[group].get(tables[group][place // size], {}).get(place % size)
                if found != right:
                    raise ContentError(f"group {group} of {request.request_id!r} holds other tokens at {place}")
                self.counts["tokens checked"] += 1
        super().forward(request, count, checkpoints)

    def take(self, request: Request, count: int) -> None:
        """As the example, which reads all columns, but windows have dropped theirs."""
        request.num_computed_tokens += count
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens - request.num_prompt_tokens < request.sampling.max_tokens:
            request.append(self.random.randrange(4))
        if request.num_tokens - request.num_prompt_tokens == request.sampling.max_tokens:
            self.cache.keep_resume_point(request)
            self.cache.free(request)
            self.running.remove(request)


def state_of(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = digest(state, token)
    return state


def random_run(name: str, seed: int) -> Counter[str]:
    """What happened in a run of few requests that share beginnings."""
    random = Random(seed)
    engine = Loading(planned(name), random)
    for number in range(STEPS):
        if random.random() < 0.5:
            family = random.randrange(3)
            prompt = [family] * random.randrange(1, 24) + [3] * random.randrange(4)
            engine.add(str(number), prompt, random.randrange(1, 6))
        engine.step()
    return engine.counts


@pytest.mark.parametrize("name", MODELS)
def test_loaded_rows_read_their_own_tokens(name: str) -> None:
    met: Counter[str] = Counter()
    for seed in range(how_many(RUNS)):
        met += random_run(name, seed)
    wanted = {"loads", "all came", "too few came", "tokens checked", "loads behind a hit"}
    if name != "states":  # whose state would be that behind all of them
        wanted.add("some came")
    assert {one for one in wanted if not met[one]} == set()


def unwritten(_: Loading, one: _Transfer, end: int) -> None:
    """A transfer that says that tokens came which did not."""


def all_arrived(loads: Loads, request: Request, _: int | None) -> int:
    """A cache that believes of each transfer that all of it came."""
    return loads.of_row[request.row].tokens


@pytest.mark.parametrize(
    "fault", [(Loading, "write", unwritten), (Loads, "arrived", all_arrived)], ids=lambda one: one[1]
)
@pytest.mark.parametrize("name", ["full", "windows", "full, reference"])
def test_loaded_content_fault_is_detected(
    name: str, fault: tuple[type, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*fault)
    for seed in range(25):
        try:
            random_run(name, seed)
        except ContentError:
            return
    pytest.fail("25 runs saw nothing")
