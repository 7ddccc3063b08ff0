"""benchmarks/bench_vllm.py without vLLM: its loads, clients, comparison and table."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_vllm
import pytest
from bench_vllm import VARIANTS, compare, options_of, rows
from vllm_loads import HTTP_LOADS, LOADS, MIB, SHAPES, HttpLoad, Load, Turn, agents, chats, documents, prompt_of

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "bench_vllm.json"
CHAT = (Turn((1, 2), 2), Turn((3,), 1))


class Clock:
    """An engine that answers every request at the next step with its request's number, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.waiting: list[str] = []
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: SimpleNamespace) -> None:
        self.asked[name] = prompt["prompt_token_ids"], sampling.max_tokens
        self.waiting.append(name)
        self.most = max(self.most, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        name = self.waiting.pop(0)
        answer = SimpleNamespace(token_ids=[len(self.asked)] * self.asked[name][1])
        return [SimpleNamespace(request_id=name, finished=True, num_cached_tokens=1, outputs=[answer])]


def test_clients_send_the_next_turn_after_the_answer_and_keep_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(SamplingParams=SimpleNamespace, TokensPrompt=lambda **fields: fields)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    engine = Clock()
    player = bench_vllm._Player(engine, Load("", "dense", MIB, (CHAT, CHAT, CHAT), 2))
    turns = list[int]()
    monkeypatch.setattr(bench_vllm, "STEPS_OF_A_TURN", 4)
    assert player.run(lambda: turns.append(len(engine.asked))) == 6
    assert turns == [2, 5]
    assert engine.most == 2
    assert list(engine.asked) == ["0.0", "1.0", "0.1", "1.1", "2.0", "2.1"]
    assert engine.asked["0.1"] == ([1, 2, 2, 2, 3], 1)
    assert player.prompt_tokens == 3 * (2 + 5)
    assert player.hit_tokens == 6
    assert [len(turns) for turns in player.answers] == [2, 2, 2]
    assert len(player.first_token_s) == 6


def test_loads_are_drawn_alike_each_time_and_fit_the_model() -> None:
    assert chats(3) == chats(3)
    assert documents(5) == documents(5)
    assert agents(2) == agents(2)
    every: list[Load | HttpLoad] = [*LOADS, *HTTP_LOADS]
    assert len({(load.name, load.shape, load.memory) for load in every}) == len(every)
    longest = options_of(VARIANTS[0], SHAPES["dense"], MIB)["max_model_len"]
    for load in LOADS:
        for conversation in load.conversations:
            answers = [(0,) * turn.output for turn in conversation[:-1]]
            assert len(prompt_of(conversation, answers)) + conversation[-1].output <= longest


def test_documents_come_again_and_some_come_once() -> None:
    heads = [conversation[0].tokens[:400] for conversation in documents(40)]
    counts = [heads.count(head) for head in set(heads)]
    assert max(counts) >= 4
    assert min(counts) == 1


def test_a_variant_with_a_unit_gets_that_of_the_model() -> None:
    stock, unit = VARIANTS[:2]
    assert "prefix_match_unit" not in options_of(stock, SHAPES["hybrid"], MIB)
    assert options_of(unit, SHAPES["hybrid"], MIB)["prefix_match_unit"] == SHAPES["hybrid"].unit


@pytest.mark.parametrize(("gap", "kind"), [(0.0, "near_ties"), (0.5, "differences")])
def test_a_conversation_is_compared_up_to_its_first_difference(gap: float, kind: str) -> None:
    asked = []

    def gap_of(*given: object) -> float:
        asked.append(given)
        return gap

    theirs = [[(7, 8), (9,)], [(7, 8), (9,)]]
    found = compare((CHAT, CHAT), theirs, [[(7, 8), (9,)], [(7, 5), (4,)]], gap_of)
    assert found == {"compared": 3 + 2, "near_ties": 0, "differences": 0, kind: 1}
    assert asked == [((1, 2), (7,), 8, 5)]


def test_over_http_every_difference_counts() -> None:
    assert compare(None, [[("a",)], [("b",)]], [[("a",)], [("c",)]], None)["differences"] == 1


LOAD = {"shape": "hybrid", "load": "chats", "memory": 20}
MEASURED = {"output_tokens": 120, "hit_tokens": 1, "prompt_tokens": 4, "preemptions": 2}
EQUAL = {"compared": 120, "near_ties": 0, "differences": 0}


def run(variant: str, round_: int, seconds: float, **more: object) -> dict[str, Any]:
    times = {"variant": variant, "round": round_, "seconds": seconds, "first_token_ms": seconds}
    return {**LOAD, **times, **MEASURED, **EQUAL, **more}


def test_the_ratio_is_to_the_faster_stock_of_the_same_round() -> None:
    runs = [run("stock", 0, 6), run("stock-32", 0, 4), run("natural", 0, 2)]
    runs += [run("stock", 1, 10), run("stock-32", 1, 12), run("natural", 1, 5)]
    found = {row["variant"]: row for row in rows(runs)}
    assert found["natural"]["ratio"] == 2.0
    assert found["stock-32"]["ratio"] == pytest.approx((1 + 10 / 12) / 2)
    assert found["natural"]["rate"] == pytest.approx((120 / 2 + 120 / 5) / 2)
    assert bench_vllm.cells(found["natural"])[4:] == ("42", "2.00", "4", "", "25.0%", "2", "equal")
    runs[2]["slowest_first_token_ms"], runs[5]["slowest_first_token_ms"] = 2000.4, 1500
    assert bench_vllm.cells(list(rows(runs))[2])[7] == "2,000"


def test_a_variant_that_does_not_start_and_differences_are_shown() -> None:
    runs = [run("stock", 0, 1), {**LOAD, "variant": "reference-32", "round": 0, "error": "no"}]
    runs += [run("natural", 0, 1, differences=3), run("reference", 0, 1, near_ties=1)]
    last = [bench_vllm.cells(row)[-1] for row in rows(runs)]
    assert last == ["equal", "equal, 1 near-ties", "does not start", "3 differences"]


def test_the_table_of_the_guide_shows_the_committed_result(capsys: pytest.CaptureFixture[str]) -> None:
    bench_vllm.show(RESULT)
    assert capsys.readouterr().out == (ROOT / "docs" / "data" / "vllm-engines.csv").read_text("utf-8")


def test_the_readme_shows_the_committed_result() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    every = list(rows(json.loads(RESULT.read_text("utf-8"))["runs"]))
    for words, load, is_pressed in (("32 chats", "32 chats", False), ("agents in 20 MiB", "agents", True)):
        some = [row for row in every if (row["model"], row["load"]) == ("hybrid", load)]
        rates = {row["variant"]: row["rate"] for row in some if (row["memory_mib"] == 20) == is_pressed}
        (line,) = (line for line in readme.splitlines() if line.startswith("|") and words in line)
        shown = re.findall(r"\[([\d,]+)\]", line)
        assert shown == [f"{max(rates['stock'], rates['stock-32']):,.0f}", f"{rates['natural']:,.0f}"]


def test_outputs_of_this_library_equal_those_of_stock_in_the_committed_result() -> None:
    runs = json.loads(RESULT.read_text("utf-8"))["runs"]
    assert {one["variant"] for one in runs} >= {"stock", "stock-32", "reference", "natural"}
    assert all(not one["differences"] for one in runs if not one["variant"].startswith("stock-"))
