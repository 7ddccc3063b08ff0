"""AdaptiveDrafter proposes the number of drafts with the most tokens per second.

It estimates the speed from the measured step times and from the share of accepted drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from runner_support import EngineFactory, greedy, loaded_model

from hybridkv.cli.engine_options import Speculate
from hybridkv.errors import ConfigError
from hybridkv.request import Request
from hybridkv.runner import EngineOptions
from hybridkv.runner.drafters import AdaptiveDrafter, NgramDrafter, StepSeconds
from hybridkv.runner.load import LoadedModel


class GivenDrafts:
    """Propose the drafts that a test gave for each request."""

    num_speculative_tokens = 4

    def __init__(self) -> None:
        self.drafts: dict[str, list[int]] = {}
        self.closed = 0

    def require(self, target: LoadedModel) -> None:
        """Any model will do."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the given drafts."""
        return [self.drafts.get(one.request_id, []) for one in requests]

    def close(self) -> None:
        """Counted."""
        self.closed += 1


def timed(drafter: AdaptiveDrafter, fixed: float, each: float) -> None:
    """Steps of 1 to 40 tokens took ``fixed`` seconds and ``each`` a token."""
    for _ in range(3):
        for tokens in range(1, 41):
            drafter.took(tokens, fixed + each * tokens)


def fed(drafter: AdaptiveDrafter, given: GivenDrafts, right: Sequence[bool], name: str = "taught") -> None:
    """A request of which every draft is proposed alone and comes true or not; nothing of it is decoded in a step."""
    request = Request(name, [1])
    for one in right:
        given.drafts[name] = [5]
        drafter.propose([request])
        request.append(5 if one else 6)
    given.drafts[name] = []
    drafter.propose([request])


# -- what steps take


def test_step_seconds_fit_a_line_once_step_sizes_differ() -> None:
    seconds = StepSeconds()
    for _ in range(5):
        seconds.took(8, 0.5)
        assert not seconds.known
    for tokens in range(9, 30):
        seconds.took(tokens, 0.1 + 0.05 * tokens)
    assert seconds.known
    np.testing.assert_allclose(seconds.of(np.array([1, 10, 64])), [0.15, 0.6, 3.3], rtol=0.2)
    for tokens in range(300):  # what was before is forgotten
        seconds.took(8 + tokens % 8, 1.0 + 0.5 * (8 + tokens % 8))
    np.testing.assert_allclose(seconds.of(np.array([8, 16])), [5, 9], rtol=0.01)
    for _ in range(500):  # steps alike show no slope: it is kept, and the line goes through them
        seconds.took(32, 17.0)
    np.testing.assert_allclose(seconds.of(np.array([32, 34])), [17, 18], rtol=0.01)


def test_step_seconds_never_fall_with_more_tokens() -> None:
    """After slow short steps the fitted line is level, and no time is below zero."""
    seconds = StepSeconds()
    for tokens in (40, 30, 20, 10):
        seconds.took(tokens, 1.0 / tokens)
    line = seconds.of(np.arange(1, 100))
    assert (np.diff(line) >= 0).all()
    assert (line > 0).all()


# -- what is handed out


def test_adaptive_drafter_before_timings_proposes_all_drafts() -> None:
    given = GivenDrafts()
    drafter = AdaptiveDrafter(given)
    given.drafts = {"a": [1, 2, 3], "b": []}
    assert drafter.propose([Request("a", [1]), Request("b", [1])]) == [[1, 2, 3], []]
    assert drafter.num_speculative_tokens == 4
    drafter.close()
    assert given.closed == 1


def test_adaptive_drafter_learns_from_drafts_it_withheld() -> None:
    given = GivenDrafts()
    drafter = AdaptiveDrafter(given)
    timed(drafter, 0.02, 0.01)
    fed(drafter, given, [False] * 60)
    given.drafts = {"x": [1, 2]}
    assert drafter.propose([Request("x", [1])]) == [[]]
    for at in range(80):
        fed(drafter, given, [True], f"right {at}")  # first drafts of new requests, none of them handed out at first
    given.drafts = {"x": [1, 2]}
    assert len(drafter.propose([Request("x", [1])])[0]) >= 1


def test_adaptive_drafter_proposes_more_after_accepted_drafts() -> None:
    """Four of five first drafts are wrong. Drafts after three right ones are always right."""
    given = GivenDrafts()
    drafter = AdaptiveDrafter(given)
    timed(drafter, 0.02, 0.01)
    for at in range(60):
        fed(drafter, given, [at % 5 == 0, True, True, True, True, True], f"{at}") if at % 5 == 0 else fed(
            drafter, given, [False], f"{at}"
        )
    new, going = Request("new", [1]), Request("going", [1])
    for _ in range(4):
        given.drafts = {"going": [5]}
        drafter.propose([going])
        going.append(5)
    given.drafts = {"new": [5, 5], "going": [5, 5]}
    assert drafter.propose([new]) == [[]]
    assert drafter.propose([going]) == [[5, 5]]
    again = Request("going", [1, 5, 5, 5, 5])  # another request by the same name: nothing is known of it
    assert drafter.propose([again]) == [[]]


@pytest.mark.parametrize(
    ("came", "run"),
    [([], 0), ([5], 1), ([5, 6], 2), ([5, 6, 7], 0), ([5, 7], 0), ([7], 0)],  # the third was foreseen by nobody
)
def test_adaptive_drafter_run_counts_right_drafts_only(came: list[int], run: int) -> None:
    given = GivenDrafts()
    drafter, request = AdaptiveDrafter(given), Request("x", [1])
    given.drafts = {"x": [5, 6]}
    drafter.propose([request])
    for token in came:
        request.append(token)
    drafter.propose([request])
    assert drafter._proposed["x"].run == run


def test_adaptive_drafter_weighs_old_results_less() -> None:
    given = GivenDrafts()
    drafter = AdaptiveDrafter(given)
    fed(drafter, given, [False] * 2000)
    for at in range(500):
        fed(drafter, given, [True], f"right {at}")
    assert 0.5 < drafter._right[0] / drafter._tried[0] < 0.9
    assert drafter._tried[0] <= 501
    assert len(drafter._proposed) == 501


def test_adaptive_drafter_forgets_old_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridkv.runner.drafters._KEPT", 10)
    drafter = AdaptiveDrafter(GivenDrafts())
    for at in range(40):
        drafter.propose([Request(str(at), [1])])
    assert len(drafter._proposed) <= 11


@pytest.mark.parametrize("seed", range(8))
def test_adaptive_drafter_choice_has_the_most_tokens_per_second(seed: int) -> None:
    """Compare the choice with every possible choice."""
    random = np.random.default_rng(seed)
    given = GivenDrafts()
    drafter = AdaptiveDrafter(given)
    fixed, each = random.uniform(0.001, 0.1), random.uniform(0.001, 0.02)
    timed(drafter, fixed, each)
    for at in range(40):
        fed(drafter, given, (random.random(6) < random.uniform(0.3, 1)).tolist(), f"taught {at}")
    rows = [Request(str(at), [1]) for at in range(4)]
    for _ in range(3):
        given.drafts = {one.request_id: [5] for one in rows}
        drafter.propose(rows)
        for one in rows:
            one.append(5 if random.random() < 0.8 else 6)
    given.drafts = {one.request_id: [5] * int(random.integers(0, 4)) for one in rows}
    handed = [len(one) for one in drafter.propose(rows)]
    runs = [drafter._proposed[one.request_id].run for one in rows]
    right = drafter._right / drafter._tried

    def speed(counts: Sequence[int]) -> float:
        tokens = sum(
            1 + np.cumprod([right[min(run + at, 8)] for at in range(count)]).sum()
            for run, count in zip(runs, counts, strict=True)
        )
        return float(tokens / (fixed + each * (len(rows) + sum(counts))))

    best = max(map(speed, product(*(range(len(given.drafts[one.request_id]) + 1) for one in rows))))
    none = speed([0] * 4)
    assert speed(handed) == pytest.approx(best if best > 1.05 * none else none, rel=1e-3)


def test_adaptive_drafter_without_a_drafter_is_rejected() -> None:
    with pytest.raises(ConfigError, match="drafter must be a Drafter, got 4"):
        AdaptiveDrafter(4)  # type: ignore[arg-type]


# -- in an engine


def test_engine_reports_decode_step_times_to_its_drafter(make_engine: EngineFactory) -> None:
    """Tokens are those without drafts, and the time of a decode-only step is reported before the next proposal."""
    reported = list[tuple[int, float]]()

    class Noted(AdaptiveDrafter):
        """Notes the reported times."""

        def took(self, tokens: int, seconds: float) -> None:
            reported.append((tokens, seconds))
            super().took(tokens, seconds)

    prompts = [[65, 66, 67, 68] * 8, [7, 8, 9]]
    plain = make_engine(loaded_model("llama"), prompts, 30).generate(prompts, greedy(30))
    engine = make_engine(loaded_model("llama"), prompts, 30, speculate=Noted(NgramDrafter(3)))
    assert [one.token_ids for one in engine.generate(prompts, greedy(30))] == [one.token_ids for one in plain]
    assert len(reported) >= engine.statistics().steps // 2
    assert all(1 <= tokens <= 8 and seconds > 0 for tokens, seconds in reported)
    assert sum(map(len, prompts)) not in {tokens for tokens, _ in reported}  # no prompt


def test_ngram_option_of_the_command_line_makes_an_adaptive_drafter() -> None:
    drafts = Speculate.parse("ngram:3")
    assert drafts is not None
    drafter = drafts.drafter(EngineOptions(), [8])
    assert isinstance(drafter, AdaptiveDrafter)
    assert drafter.num_speculative_tokens == 3
