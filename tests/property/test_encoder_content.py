"""Encoder-decoders, any order of actions: cross attention reads the output of its own input, and hits no other."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from controls import caught
from small_models import ENCODER_DECODERS

from how_much import how_many
from hybridkv.extra_keys import EncoderInput, ExtraKeys
from hybridkv.request import Request
from hybridkv.step import NewRow
from hybridkv.testing import FakeWorker, digest_model
from oracles import Rig, RigOptions, random_natural_options, random_options, random_run

pytestmark = pytest.mark.usefixtures("quiet", "short_runs")

MODELS = tuple(ENCODER_DECODERS.values())
RUNS = max(12, how_many(12))
CONTROLS = 60


def natural(random: Random) -> RigOptions:
    """Of a single rank, which reads everything."""
    options = random_natural_options(random, random.choice(MODELS))
    placement = "ends" if options.placement == "none" else options.placement
    return replace(options, dcp=1, pcp=1, caching=random.random() < 0.9, placement=placement)


def reference(random: Random) -> RigOptions:
    return replace(random_options(random, random.choice(MODELS)), dcp=1, pcp=1)


def test_random_histories_in_the_natural_layout() -> None:
    counts: Counter[str] = Counter()
    encoded = 0
    for seed in range(RUNS):
        random = Random(seed)
        rig = Rig(natural(random))
        random_run(rig, random)
        counts += rig.oracle.counts
        encoded += rig.worker.encoders_run
    # what is worth running: outputs found, blocks moved, branches, preemptions, failures
    assert counts["hit cross"] > encoded > RUNS
    assert min(counts[name] for name in ("hit", "moved", "branched", "preempted", "failed", "hit full")) > 0, counts


def test_random_histories_in_the_reference_layout() -> None:
    for seed in range(RUNS // 3):
        random = Random(seed)
        rig = Rig(reference(random))
        random_run(rig, random)
        assert rig.oracle.counts["hit"] == 0


# -- controls


class EncodesNever(FakeWorker):
    """Takes every output for written."""

    def _write_encoded(self, new: NewRow, content: Callable[[str, str, int], bytes]) -> None:
        pass


def test_a_faulty_worker_is_caught() -> None:
    def make(random: Random) -> Rig:
        options = natural(random)
        return Rig(options, worker=EncodesNever(options.config, digest_model(options.config, options.vocabulary)))

    assert caught(make, CONTROLS) <= CONTROLS


def blind(rig: Rig) -> Rig:
    """Only the content is asked."""
    rig.check = lambda: None  # type: ignore[method-assign]  # on purpose
    rig._compare_step = lambda *_: None  # type: ignore[method-assign]  # same
    rig._check_content = lambda: None  # type: ignore[method-assign]  # same
    return rig


def test_one_digest_for_all_inputs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager's own fault: the blocks of any input of as many tokens are taken for those of another."""
    own = Request.encoder_keys

    def careless(self: Request, block_size: int) -> list[bytes]:
        assert self.encoder is not None
        anything = Request("x", [0], hasher=self.hasher, encoder=EncoderInput("any", self.encoder.num_tokens))
        return own(anything, block_size)

    monkeypatch.setattr(Request, "encoder_keys", careless)
    assert caught(lambda random: blind(Rig(natural(random))), CONTROLS) <= CONTROLS


def test_decoder_keys_without_the_digest_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ExtraKeys.__init__

    def careless(self: ExtraKeys, *args: object, **known: object) -> None:
        plain(self, *args, **({**known, "encoder": None} if args[0] != 1 else known))  # type: ignore[arg-type]  # as it came

    monkeypatch.setattr(ExtraKeys, "__init__", careless)
    assert caught(lambda random: blind(Rig(natural(random))), CONTROLS) <= CONTROLS
