"""Hints about tiers change where prefixes are, and never a token: prefetch, time to live, and demote."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise

import pytest
from runner_support import generated, greedy, loaded_model

from hybridkv.errors import ConfigError
from hybridkv.request import Hints, SamplingParams
from hybridkv.runner import Completion, Engine, EngineOptions, plan_for
from hybridkv.schedule import FinishReason

TOKENS, OUTPUT, FILL = 60, 4, 24
KINDS = ("llama", "gemma3", "lfm2")


_DRAW = random.Random(7)
CHATS = [[_DRAW.randrange(3, 200) for _ in range(TOKENS)] for _ in range(FILL)]
"""Prompts that share nothing."""


@cache
def expected(name: str) -> list[tuple[int, ...]]:
    """What plain generation answers."""
    return [generated(loaded_model(name), prompt, OUTPUT) for prompt in CHATS]


class Chat:
    """An engine whose device keeps one or two of the chats."""

    def __init__(self, engine: Engine, answers: list[tuple[int, ...]]) -> None:
        self.engine, self.answers = engine, answers

    def ask(self, chat: int, hints: Hints | None = None) -> Completion:
        """Run one request to its end, and until every transfer has ended."""
        engine = self.engine
        name = engine.add(CHATS[chat], greedy(OUTPUT), hints=hints or Hints())
        done: list[Completion] = []
        while not done:
            done = engine.step()
        while engine.tier is not None and not engine.tier.is_idle:
            engine._launch(engine.scheduler.schedule())
            engine._settle()
        engine.scheduler.check()
        assert done[0].request_id == name
        return done[0]

    def loads(self) -> int:
        """How many prefixes came up so far."""
        assert self.engine.tier is not None
        return self.engine.tier.statistics().loads

    def hit_of(self, chat: int, hints: Hints | None = None) -> int:
        """Ask; return the hit tokens. The answer is that of plain generation."""
        done = self.ask(chat, hints)
        assert done.token_ids == self.answers[chat]
        return done.hit_tokens


@contextmanager
def chatting(name: str, host_memory: str | float | None = "16MiB", fits: int = 2) -> Iterator[Chat]:
    """Its device has memory for ``fits`` chats; host_memory: a size, or times the memory of the device."""
    answers, loaded, most = expected(name), loaded_model(name), TOKENS + OUTPUT
    plan = plan_for(loaded, [most] * fits, max_model_len=most + 1)
    if isinstance(host_memory, float):
        host_memory = str(int(host_memory * plan.config.arena_bytes))
    with Engine(loaded, plan, EngineOptions(self_check=False), host_memory=host_memory) as engine:
        yield Chat(engine, answers)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of model."""
    name: str = request.param
    return name


def test_prefetch_brings_a_prefix_up_before_its_request(kind: str) -> None:
    with chatting(kind) as chat:
        for one in range(FILL):
            chat.ask(one)
        before = chat.loads()
        done = chat.ask(0, Hints(prefetch=True))
        assert (done.token_ids, done.finish_reason, done.hit_tokens) == ((), FinishReason.LENGTH, TOKENS - 1)
        assert done.computed_tokens == 0
        assert chat.loads() == before + 1
        assert chat.hit_of(0) == TOKENS - 1
        assert chat.loads() == before + 1  # it was there
        assert chat.hit_of(1) == TOKENS - 1
        assert chat.loads() == before + 2  # this one was not


@pytest.mark.parametrize("host_memory", [None, "16MiB"])
def test_prefetch_of_nothing_ends_at_once(kind: str, host_memory: str | None) -> None:
    with chatting(kind, host_memory) as chat:
        assert chat.ask(0, Hints(prefetch=True)).hit_tokens == 0
        chat.ask(0)
        done = chat.ask(0, Hints(prefetch=True))
        assert (done.hit_tokens, done.computed_tokens, done.token_ids) == (TOKENS - 1, 0, ())
        assert chat.hit_of(0) == TOKENS - 1


def test_time_to_live_keeps_a_prefix_on_a_device_that_would_evict_it(kind: str) -> None:
    hits = dict[str, int]()
    for name, hints in (("none", Hints()), ("lives", Hints(ttl_s=1000.0)), ("ended", Hints(ttl_s=0.001))):
        with chatting(kind, None) as chat:
            chat.hit_of(0, hints)
            time.sleep(0.01)
            for one in range(1, FILL):
                chat.hit_of(one)
            hits[name] = chat.hit_of(0)
    assert hits["lives"] == TOKENS - 1
    assert max(hits["none"], hits["ended"]) < TOKENS - 1


def test_time_to_live_of_everything_leaves_room_for_requests(kind: str) -> None:
    """What should live longer than memory lasts is evicted in the order of use."""
    with chatting(kind, None) as chat:
        for _ in range(2):
            for one in range(FILL):
                chat.hit_of(one, Hints(ttl_s=1000.0))
                assert chat.hit_of(one) == TOKENS - 1


def test_time_to_live_holds_in_host_memory(kind: str) -> None:
    """A host that keeps few chats: one that it would evict stays, though the device has given it up."""
    with chatting(kind, 1.5) as chat:
        for one in range(FILL):
            chat.hit_of(one)
        gone = next(one for one in range(FILL) if chat.hit_of(one) < TOKENS - 1)
    with chatting(kind, 1.5) as chat:
        for one in range(FILL):
            chat.hit_of(one, Hints(ttl_s=1000.0, demote=True) if one == gone else None)
        for one in range(gone):
            chat.hit_of(one)
        assert chat.hit_of(gone) == TOKENS - 1
        assert chat.loads() > 0


def came_up(kind: str, after: int, *, demoted: bool) -> list[bool]:
    """Whether the first and the second of some chats come up when they are asked again, ``after`` others."""
    with chatting(kind) as chat:
        chat.hit_of(0)
        chat.hit_of(1, Hints(demote=demoted))
        for one in range(2, 2 + after):
            chat.hit_of(one)
        counts = [chat.loads()]
        for one in range(2):
            assert chat.hit_of(one) == TOKENS - 1
            counts.append(chat.loads())
    return [later > earlier for earlier, later in pairwise(counts)]


def test_demote_gives_the_copy_on_the_device_up_first(kind: str) -> None:
    """As many others as push the first chat from the device push the second one instead, if that was demoted."""
    after = next(one for one in range(1, FILL) if came_up(kind, one, demoted=False)[0])
    assert came_up(kind, after, demoted=True) == [False, True]


def test_demote_without_host_memory_keeps_the_copy(kind: str) -> None:
    with chatting(kind, None) as chat:
        chat.hit_of(0, Hints(demote=True))
        assert chat.hit_of(0) == TOKENS - 1


def test_prefetch_of_several_outputs_is_rejected() -> None:
    with chatting("llama") as chat:
        with pytest.raises(
            ConfigError, match=r"only brings up its prefix \(prefetch\), but has 2 outputs: leave n out"
        ):
            chat.engine.add(CHATS[0], SamplingParams(n=2), hints=Hints(prefetch=True))
        assert chat.engine.idle
