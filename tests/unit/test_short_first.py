"""Short prompts go ahead of long ones within a share of each step; docs/contracts.md, 6."""

import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.errors import ConfigError
from hybridkv.planner.config import KVCacheGroupSpec
from hybridkv.planner.natural import natural_config, slab_layout
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, StepResult
from hybridkv.testing.configs import attention_config, full_spec

B = 4
BUDGET = 64


def natural(slabs: int = 1000) -> KVCacheManager:
    """One group; a slab is a block of 4 tokens."""
    groups = (KVCacheGroupSpec(("layer",), full_spec(B)),)
    return KVCacheManager(natural_config(groups, slab_layout(1536, slabs + 1, (1,), (1,))), 5000)


class Run:
    """A scheduler, the tokens that each request had in each step, and the step of its first token."""

    def __init__(self, cache: KVCacheManager, **limits: object) -> None:
        known: dict[str, object] = {"max_running": 16, "max_batched_tokens": BUDGET, **limits}
        self.scheduler = Scheduler(cache, SchedulerLimits(**known), clock=lambda: 0.0)  # type: ignore[arg-type]  # by name
        self.first: dict[str, int] = {}
        self.steps: list[dict[str, int]] = []
        self._names: dict[int, str] = {}
        self._added = 0

    def add(self, name: str, tokens: int, max_tokens: int = 1, shared: int = 0) -> None:
        """A prompt; ``shared`` tokens at its beginning are those of all, the others its own."""
        self._added += 1
        prompt = [*range(shared), *range(10_000 * self._added, 10_000 * self._added + tokens - shared)]
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(Request(name, prompt, sampling, hasher=self.scheduler.cache.hasher))

    def step(self) -> dict[str, int]:
        """Runs the next step; tokens of each request in it."""
        step = self.scheduler.schedule()
        self._names |= {new.row: new.request_id for new in step.new_rows}
        names = [self._names[row] for row in step.rows.tolist()]
        ran = dict(zip(names, step.num_scheduled.tolist(), strict=True))
        for name, samples in zip(names, step.samples.tolist(), strict=True):
            if samples:
                self.first.setdefault(name, len(self.steps))
        self.steps.append(ran)
        sampled = [[7] if samples else [] for samples in step.samples.tolist()]
        self.scheduler.update(StepResult(step.id, Csr.from_lists(sampled)))
        self.scheduler.check()
        return ran

    def finish(self) -> None:
        """Runs steps until all are done."""
        while not self.scheduler.drained:
            self.step()


def test_a_short_prompt_has_its_first_token_while_a_long_one_prefills() -> None:
    run = Run(natural())
    run.add("long", 640)
    assert run.step() == {"long": 64}
    run.add("short", 20)
    assert run.step() == {"long": 44, "short": 20}
    run.finish()
    assert run.first == {"short": 1, "long": 10}
    assert sum(sum(step.values()) for step in run.steps) == 660


@pytest.mark.parametrize(("share", "least"), [(0.25, 48), (0.5, 32), (0.9, 7)])
def test_the_oldest_long_prompt_has_the_rest_of_every_step(share: float, least: int) -> None:
    """However many short ones come, it ends when it must."""
    run, number = Run(natural(), short_share=share), 0
    run.add("long", 1280)
    run.step()
    while "long" not in run.first:
        for _ in range(12):
            run.add(f"short{number}", 7)
            number += 1
        ran = run.step()
        assert ran["long"] >= least or "long" in run.first
        assert sum(ran.values()) == BUDGET
    assert len(run.first) > 1


def test_the_reference_layout_has_everybody_in_order_unless_told() -> None:
    """As vLLM does."""
    for share, first in ((None, 10), (0.5, 1)):
        run = Run(KVCacheManager(attention_config(900, (B,)), 5000), short_share=share)
        run.add("long", 640)
        run.step()
        run.add("short", 20)
        run.finish()
        assert run.first["short"] == first


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), "half", True])
def test_a_share_is_at_least_0_and_below_1(share: object) -> None:
    with pytest.raises(ConfigError, match="short_share"):
        SchedulerLimits(short_share=share)  # type: ignore[arg-type]  # on purpose
