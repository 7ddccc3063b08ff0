"""The comparison of `make test-vllm-generate`, without vLLM, finds differences that were made on purpose."""

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import generate_duel
import generators
import pytest
import torch
from generate_duel import MATCHES, Match, Row
from generation import (
    HEADS,
    NEAR_TIE_GAP,
    QUESTION,
    Answer,
    Comparison,
    Difference,
    FewerHits,
    Round,
    Tokens,
    make_rounds,
)
from generation import TOLERANCE as BOUND
from generators import GRID_WAY, NATURAL_WAY, REFERENCE_WAY, Plain, VllmError, last_error, our_answers, their_answers
from runner_support import TOLERANCE

from hybridkv.errors import ConfigError
from hybridkv.runner import Engine, LoadedModel, tiny_model, wrap
from hybridkv.runner.check import NEAR_TIE_FACTOR

torch.set_num_threads(1)

LLAMA, _, GRANITE = MATCHES
PROMPTS: tuple[Tokens, ...] = ((1, 2, 3), (4, 5, 6))
EQUAL = [Answer((7, 8, 9), 0), Answer((7, 7, 7), 16)]


class Gaps:
    """The same gap everywhere; what was asked."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.asked: list[tuple[Tokens, Tokens, int, int]] = []

    def __call__(self, prompt: Tokens, output: Tokens, theirs: int, ours: int) -> float:
        self.asked.append((prompt, output, theirs, ours))
        return self.value


@cache
def loaded(match: Match) -> LoadedModel:
    return wrap(tiny_model(match.name, 0, match.fields), name=match.name)


# -- comparing


def test_comparison_bounds_match_the_equality_tests() -> None:
    assert BOUND == TOLERANCE
    assert NEAR_TIE_GAP == NEAR_TIE_FACTOR * TOLERANCE


def test_comparison_of_equal_answers_has_no_differences() -> None:
    gaps = Gaps(0.0)
    found = Comparison.of(PROMPTS, EQUAL, EQUAL, gaps)
    assert found == Comparison(prompts=2, tokens=6, theirs=16, ours=16, differences=(), fewer=())
    assert (found.near_ties, found.faults, gaps.asked) == (0, (), [])


@pytest.mark.parametrize(("gap", "near_ties"), [(NEAR_TIE_GAP * 0.99, 1), (NEAR_TIE_GAP, 0)])
def test_comparison_stops_at_the_first_difference(gap: float, near_ties: int) -> None:
    gaps = Gaps(gap)
    found = Comparison.of(PROMPTS, EQUAL, [EQUAL[0], Answer((7, 6, 5), 16)], gaps)
    assert gaps.asked == [((4, 5, 6), (7,), 7, 6)]
    assert found.differences == (Difference(prompt=1, at=1, theirs=7, ours=6, gap=gap),)
    assert found.tokens == 3 + 2
    assert found.near_ties == near_ties
    assert found.faults == (() if near_ties else found.differences)


def test_comparison_with_fewer_hits_is_a_fault() -> None:
    ours = [Answer((7, 8, 9), 100), Answer((7, 7, 7), 15)]
    found = Comparison.of(PROMPTS, EQUAL, ours, Gaps(0.0))
    assert (found.theirs, found.ours) == (16, 115)
    assert found.faults == (FewerHits(prompt=1, theirs=16, ours=15),)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (EQUAL[:1], "2 prompts, 1 answers of theirs, 2 of ours"),
        ([EQUAL[0], Answer((7, 7), 16)], r"outputs of \[2, 3\] tokens"),
    ],
)
def test_comparison_of_answers_of_other_sizes_is_rejected(theirs: list[Answer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Comparison.of(PROMPTS, theirs, EQUAL, Gaps(0.0))
    with pytest.raises(ConfigError, match=r"outputs of \[0\] tokens"):
        Comparison.of(PROMPTS, [Answer((), 0)] * 2, [Answer((), 0)] * 2, Gaps(0.0))


def test_logit_gap_is_relative_to_the_range() -> None:
    prompt, output = (40, 41, 42, 43), (50, 51)
    with torch.inference_mode():
        logits = loaded(LLAMA).model(torch.tensor([[*prompt, *output]])).logits[0, 3:]
    best, second, third = logits[-1].topk(3).indices.tolist()
    plain = Plain(loaded(LLAMA))
    for pair in ((best, third), (third, best), (second, third)):
        wanted = (logits[-1, best] - logits[-1, third]) / (logits.max() - logits.min())
        assert plain.gap(prompt, output, *pair) == pytest.approx(float(wanted), abs=1e-6)
    assert plain.gap(prompt, output, best, best) == 0


# -- prompts


def test_later_rounds_repeat_earlier_prompts() -> None:
    rounds = make_rounds(3, lambda prompt: (prompt[-1],) * 5)
    cold, seen, again, same, turns = (one.prompts for one in rounds)
    assert [one.parting for one in rounds] == [False, True, False, False, False]
    for i, head in enumerate(HEADS):
        heads = {one[i][:head] for one in (cold, seen[:4], seen[4:], again)}
        tails = {one[i][head] for one in (cold, seen[:4], seen[4:], again)}
        assert len(heads) == 1
        assert len(tails) > 1
    assert same == cold
    for turn, before in zip(turns, (*cold, *seen[:4]), strict=True):
        assert turn[:-QUESTION] == (*before, *(before[-1:] * 5))
    assert rounds == make_rounds(3, lambda prompt: (prompt[-1],) * 5)
    assert rounds != make_rounds(4, lambda prompt: (prompt[-1],) * 5)


# -- Engine

SHORT = 6
"""Tokens of an output, in place of OUTPUT."""


@pytest.fixture(scope="module")
def rounds() -> Iterator[tuple[Round, ...]]:
    """Of llama: two prompts, and what follows on them. Outputs are short from here on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generators, "OUTPUT", SHORT)
        cold, *_, turns = make_rounds(generate_duel.SEED, Plain(loaded(LLAMA)).generate)
        yield tuple(replace(one, prompts=one.prompts[2:4]) for one in (cold, turns))


@pytest.fixture(scope="module")
def sound(rounds: tuple[Round, ...]) -> list[list[Answer]]:
    """As they should be."""
    return our_answers(loaded(LLAMA), rounds, REFERENCE_WAY)


def compared(rounds: Sequence[Round], theirs: list[list[Answer]], ours: list[list[Answer]]) -> list[Comparison]:
    gap = Plain(loaded(LLAMA)).gap
    return [Comparison.of(one.prompts, a, b, gap) for one, a, b in zip(rounds, theirs, ours, strict=True)]


def test_comparison_finds_a_damaged_cache(
    rounds: tuple[Round, ...], sound: list[list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(not one.faults for one in compared(rounds, sound, our_answers(loaded(LLAMA), rounds, NATURAL_WAY)))
    assert all(one.hit_tokens > 0 for one in sound[1])
    whole = Engine.generate

    def generate_and_forget(engine: Engine, *arguments: Any) -> Any:  # noqa: ANN401  # as generate has them
        done = whole(engine, *arguments)
        for views in engine.runner.storage.views.values():
            for view in views:
                view.zero_()
        return done

    monkeypatch.setattr(Engine, "generate", generate_and_forget)
    first, turns = compared(rounds, sound, our_answers(loaded(LLAMA), rounds, REFERENCE_WAY))
    assert not first.faults
    assert turns.near_ties == 0
    assert len(turns.faults) == len(rounds[1].prompts)


# -- vLLM's process

ECHO = """
import json, sys
job = json.load(open(sys.argv[1]))
answers = [[{"tokens": ids[:2], "hit_tokens": job["output"]} for ids in one] for one in job["rounds"]]
json.dump({"version": str(job["options"]["block_size"]), "rounds": answers}, open(sys.argv[2], "w"))
"""


def test_vllm_jobs_and_answers_are_exchanged_as_files(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO, "utf-8")
    rounds = [Round("cold", PROMPTS), Round("again", PROMPTS[:1])]
    version, answers = their_answers(tmp_path / "model", rounds, {"block_size": 64}, script)
    assert version == "64"
    asked = generators.OUTPUT
    assert answers == [[Answer((1, 2), asked), Answer((4, 5), asked)], [Answer((1, 2), asked)]]
    job = json.loads((tmp_path / "job.json").read_text("utf-8"))
    assert job["model"] == str(tmp_path / "model")
    assert job["options"] == {"max_model_len": 512, "block_size": 64, "enable_prefix_caching": True}


def test_generation_failure_is_reported_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise IndexError('index 12 is out of bounds')", "utf-8")
    with pytest.raises(VllmError, match=r"^IndexError: index 12 is out of bounds$"):
        their_answers(tmp_path / "model", [], {}, script)
    script.write_text("import time; time.sleep(60)", "utf-8")
    monkeypatch.setattr(generators, "STOP_AFTER_S", 0.2)
    with pytest.raises(VllmError, match="no answers within"):
        their_answers(tmp_path / "model", [], {}, script)
    monkeypatch.setattr(generators, "STOP_AFTER_S", 60.0)
    with pytest.raises(VllmError):  # neither a vllm here nor a model there
        their_answers(tmp_path / "model", [], {"no_such_option": 1})


FORKS = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    options = json.load(open(asked["job"][0]))["options"]
    open(asked["log"], "w").write("IndexError: index 12 is out of bounds")
    open(asked["job"][1], "w").write('"answers"')
    print(options["code"], flush=True)
"""


def test_exit_codes_of_forks_become_answers_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "ENGINE", tmp_path / "forks.py")
    monkeypatch.setattr(generators, "FREE_SERVERS", [])
    generators.ENGINE.write_text(FORKS, "utf-8")

    def answers(code: int) -> object:
        return generators.answers_of(generators.job_of(tmp_path, [], {"code": code}), tmp_path)

    assert answers(0) == "answers"
    with pytest.raises(VllmError, match=r"^IndexError: index 12 is out of bounds$"):
        answers(1)
    with pytest.raises(generators.VllmKilledError):
        answers(-signal.SIGKILL)
    with pytest.raises(VllmError, match="no answers within 900 s"):
        answers(-signal.SIGALRM)
    (server,) = generators.FREE_SERVERS  # one process for all jobs
    server.communicate()


def test_last_error_of_a_log_is_the_error_of_the_worker() -> None:
    log = """
(Worker pid=7) ERROR 11-21 16:26:00 [multiproc_executor.py:1063] IndexError: index 12 is out of bounds
(EngineCore pid=5) ERROR 11-21 16:26:00 [core.py:1512] RuntimeError: Worker failed
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue"""
    assert last_error(log) == "IndexError: index 12 is out of bounds"
    assert last_error("Traceback\nValueError: no\n") == "ValueError: no"
    assert last_error("killed\n") == "its log names no error"


# -- the whole run, with our own answers for vLLM's


@pytest.fixture
def theirs(rounds: tuple[Round, ...], sound: list[list[Answer]], monkeypatch: pytest.MonkeyPatch) -> list[list[Answer]]:
    """What vLLM is said to answer; a test may change it."""
    answers = [list(one) for one in sound]
    monkeypatch.setattr(generate_duel, "make_rounds", lambda *_: rounds)
    monkeypatch.setattr(generators, "their_answers", lambda *_: ("0", answers))
    return answers


@pytest.mark.usefixtures("theirs")
def test_duel_without_differences_passes(sound: list[list[Answer]], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_duel.main(["--models", "llama"]) == 0
    said, head, _, *rows = capsys.readouterr().out.splitlines()
    assert said == "tiny:llama ran in vLLM 0"
    cells = [dict(zip(columns(head), columns(row), strict=True)) for row in rows]
    assert [one["round"] for one in cells] == ["cold", "second turn"]
    for one, answers in zip(cells, sound, strict=True):
        hits = sum(answer.hit_tokens for answer in answers)
        assert (one["hit tokens: vLLM"], one["reference"], one[GRID_WAY.name]) == (str(hits), str(hits), "-")
        assert int(one["natural"]) >= hits
        assert (one["tokens compared"], one["near-ties"], one["prompts"]) == (str(2 * 2 * SHORT), "0", "2")
    assert [int(one["natural"]) > 0 for one in cells] == [False, True]


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_duel_with_another_token_or_hit_fails(theirs: list[list[Answer]], capsys: pytest.CaptureFixture[str]) -> None:
    right, last = theirs[0][1], theirs[1][0]
    theirs[0][1] = replace(right, tokens=(*right.tokens[:4], right.tokens[4] ^ 1, *right.tokens[5:]))
    theirs[1][0] = replace(last, hit_tokens=last.hit_tokens + 1)
    assert generate_duel.main(["--models", "llama"]) == 1
    faults = capsys.readouterr().out.splitlines()[5:]
    assert [line.partition(": ")[0] for line in faults] == [
        "llama, cold, reference",
        "llama, cold, natural",
        "llama, second turn, reference",
    ]
    assert "Difference(prompt=1, at=4, " in faults[0]
    assert faults[2].endswith(f"FewerHits(prompt=0, theirs={last.hit_tokens + 1}, ours={last.hit_tokens})")


@pytest.mark.usefixtures("theirs")
def test_duel_with_a_model_that_vllm_rejects_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise VllmError("IndexError: index 12")

    monkeypatch.setattr(generators, "their_answers", refuse)
    assert generate_duel.main(["--models", "llama"]) == 1
    assert "tiny:llama does not run in vLLM: IndexError: index 12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("match", "parting", "way", "explained"),
    [
        (GRANITE, True, NATURAL_WAY, True),
        (GRANITE, False, NATURAL_WAY, False),
        (GRANITE, True, GRID_WAY, False),
        (GRANITE, True, REFERENCE_WAY, False),
        (LLAMA, True, NATURAL_WAY, False),
    ],
)
def test_fewer_hits_are_accepted_where_states_are_not_kept_yet(
    match: Match, *, parting: bool, way: generators.Way, explained: bool
) -> None:
    fewer, other = FewerHits(0, 64, 0), Difference(0, 0, 1, 2, 0.5)
    found = Comparison(prompts=1, tokens=1, theirs=64, ours=0, differences=(other,), fewer=(fewer,))
    row = Row(match, Round("head seen", PROMPTS, parting=parting), {way.name: found})
    assert [fault for _, fault in row.faults()] == ([other] if explained else [other, fewer])
