"""Long random runs whose every Step and result crosses as bytes: the oracle sees no difference, nor does the worker."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from wire_support import same

from how_much import how_many, too_rare
from hybridkv.planner.config import KVCacheConfig
from hybridkv.step import Step, StepResult
from hybridkv.testing import DigestModel, FakeWorker, digest_model
from hybridkv.wire import decode_reply, decode_step, encode_reply, encode_step
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run

pytestmark = pytest.mark.usefixtures("quiet")


class OverTheWire(FakeWorker):
    """Sees decoded Steps only and gives decoded results, beside one in process that is given the Steps themselves."""

    def __init__(self, config: KVCacheConfig, model: DigestModel, *, sharded: bool) -> None:
        super().__init__(config, model, sharded=sharded)
        self.in_process = FakeWorker(config, model, sharded=sharded)
        self.met: Counter[str] = Counter()

    def execute(self, step: Step) -> StepResult:
        result = decode_reply(encode_reply(super().execute(self._carried(step))))
        assert isinstance(result, StepResult)
        assert same(result, self.in_process.execute(step))
        assert self.storage == self.in_process.storage
        return result

    def break_down(self, step: Step, random: Random) -> None:
        again = Random()
        again.setstate(random.getstate())
        super().break_down(self._carried(step), random)
        self.in_process.break_down(step, again)
        self.met["broken"] += 1

    def _carried(self, step: Step) -> Step:
        data = encode_step(step)
        decoded = decode_step(data)
        assert same(decoded, step)
        assert encode_step(decoded) == data
        self.met.update(copy.kind for copy in step.copies)
        self.met.update(
            steps=1,
            new=len(step.new_rows),
            ended=len(step.finished_rows),
            zeroed=len(step.zero),
            written=len(step.state_writes),
            unknown=int((step.token_ids.values < 0).sum()),
            skipped=int(step.id - step.after > 1),
            forked=sum("#" in new.request_id for new in step.new_rows),
        )
        return decoded


@pytest.mark.parametrize(
    ("make", "runs", "least"),
    [
        (
            random_options,
            20,
            {"broken": 11, "preempted": 7, "state": 130, "zeroed": 40, "written": 250, "unknown": 140, "skipped": 11},
        ),
        (
            random_natural_options,
            12,
            {"broken": 7, "preempted": 1, "move": 45, "block": 18, "state": 11, "forked": 18, "skipped": 6},
        ),
    ],
)
def test_runs_over_the_wire_are_those_in_process(
    make: Callable[[Random], RigOptions], runs: int, least: dict[str, int]
) -> None:
    """Such runs are no empty ones: each bound is about half of what all seeds give."""
    met: Counter[str] = Counter()
    for number in range(how_many(runs)):
        random = Random(f"wire {number}")
        options = make(random)
        config = options.config
        worker = OverTheWire(config, digest_model(config, options.vocabulary), sharded=options.ranks > 1)
        rig = Rig(options, config=config, worker=worker)
        random_run(rig, random, actions=60)
        met += worker.met + rig.oracle.counts
    assert too_rare(met, least) == {}
