"""A prefill and a decode engine of vLLM's, both stock and both ours, in either layout: ``make test-vllm-engine``.

The second engine's tokens must be those of a single engine of stock, but for near-ties, whatever becomes of what the
first hands over (folder_connector); stock and the reference layout must find as much. Deliberate faults must show.
Prints a table in Markdown; see docs/vllm.md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from generate_duel import MATCHES, Match, say
from generation import Answer, Comparison, Round, make_rounds
from generators import ENGINE, OUTPUT, Plain, VllmError, answers_of, job_of, last_error

from hybridkv.runner import tiny_model, wrap

SEED = 0
SIDES: Mapping[str, Mapping[str, Any]] = {
    "stock": {},
    "reference": {"scheduler_cls": "hybridkv.vllm.AsyncScheduler"},
    "natural": {
        "scheduler_cls": "hybridkv.vllm.NaturalScheduler",
        "worker_cls": "hybridkv.vllm.NaturalWorker",
        "enable_prefix_caching": False,
    },
}
"""Options of vllm.LLM for both engines."""
WHOLE, LATE = "whole.json", "a state one token late"
"""As folder_connector has them, which imports vLLM."""

WITH_STATES, REFUSAL, EDGES = "granite_hybrid", "let it load asynchronously", (65, 129, 193)
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclass(frozen=True, slots=True)
class Regime:
    """first, second: options of vllm.LLM for either engine. connector: its extra config.

    at_once: the second is asked before the first has answered. gone: of every so many-th handover no file is left but
    whole.json; never: it is not even asked for. fault: of the connector, which must show. little: memory of the second.
    within: loads are of the step that goes on from them, behind whole blocks. With states nobody can: stock answers
    otherwise, ours refuses.
    """

    name: str
    first: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)
    connector: Mapping[str, Any] = field(default_factory=dict)
    at_once: bool = False
    gone: int = 0
    never: int = 0
    fault: str | None = None
    states_alone: bool = False
    little: bool = False
    within: bool = False

    def refuses(self, match: Match, side: str) -> bool:
        """Whether ours has to."""
        return self.within and (side == "natural" or (side == "reference" and match.name == WITH_STATES))


REGIMES = (
    Regime("handed over"),
    Regime("asked at once", at_once=True),
    Regime("loads take three steps", connector={"delay": 3}),
    Regime("files gone", gone=3),
    Regime("never came", connector={"patience_s": 0.5}, never=3),
    Regime("chunks", {"max_num_batched_tokens": 48}),
    Regime("few blocks", connector={"delay": 3}, little=True),
    Regime("loaded within the step", connector={"within": True}, within=True),
    Regime("two ranks", TWO_RANKS, TWO_RANKS),
    Regime(LATE, fault=LATE, states_alone=True),
    Regime("a state that did not come", fault="a state that did not come", states_alone=True),
    Regime("blocks one column off", fault="blocks one column off"),
)
LITTLE = {"stock": 22, "reference": 22, "natural": 30}
"""Blocks of stock's: natural's slabs are as large as a few of those."""


class Live:
    """vllm_engine.py in a process of its own. log: what vLLM says."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        self._log = log
        self._process = subprocess.Popen(  # noqa: S603 - this very Python, and a script of these tests
            [sys.executable, str(ENGINE), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w", encoding="utf-8"),
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """It ends with its lines; one that does not is ended."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, asks: Sequence[Mapping[str, Any]]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"asks": asks}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise VllmError(last_error(self._log.read_text("utf-8"))) from None

    def answer(self) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(last_error(self._log.read_text("utf-8")))
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Pair:
    """What two engines made of all rounds: answers of the second, round by round."""

    answers: list[list[Answer]]
    preemptions: int
    faults: tuple[str, ...]


def options_of(model: Path, match: Match, side: str, regime: Regime, *, first: bool) -> dict[str, Any]:
    options = {"model": str(model), "max_model_len": 320, "block_size": 32, "enable_prefix_caching": True}
    extra = {"folder": str(model.with_name("handovers")), "patience_s": 60, "fault": regime.fault, **regime.connector}
    transfer = {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": "folder_connector",
        "kv_role": "kv_producer" if first else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    asked = regime.first if first else regime.second
    little = {"num_gpu_blocks_override": LITTLE[side]} if regime.little and not first else {}
    return {**options, **match.options, **asked, **little, **SIDES[side], "kv_transfer_config": transfer}


def pair(model: Path, match: Match, rounds: Sequence[Round], regime: Regime, side: str) -> Pair:
    """Raises VllmError, with the error of the engine that failed."""
    folder = model.with_name("handovers")
    folder.mkdir(exist_ok=True)
    found, preemptions, faults, number = list[list[Answer]](), 0, list[str](), 0
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Live(options_of(model, match, side, regime, first=one), model.with_name(f"log {one}.txt"))
            )
            for one in (True, False)
        )
        for one in rounds:
            sends, takes = [], []
            for prompt in one.prompts:
                number += 1
                name = f"{number}"
                whole = prompt if regime.fault == LATE else prompt[:-1]
                if not regime.never or number % regime.never:
                    sends.append(asked_of(name, whole, 1, {"handover": name, "send": True}))
                takes.append(asked_of(name, prompt, OUTPUT, {"handover": name}))
            first.ask(sends)
            if regime.at_once:
                second.ask(takes)
            faults += left_over("first", first.answer(), side)
            if regime.gone:
                for name in (ask["name"] for ask in takes if int(ask["name"]) % regime.gone == 0):
                    lose(folder / name)
            if not regime.at_once:
                second.ask(takes)
            answered = second.answer()
            faults += left_over("second", answered, side)
            preemptions = answered["preemptions"]
            found.append([Answer(tuple(told["tokens"]), told["hit_tokens"]) for told in answered["answers"]])
            faults += [f"{path.name} was left" for path in folder.iterdir()]
    return Pair(found, preemptions, tuple(faults))


def asked_of(name: str, prompt: Sequence[int], output: int, transfer: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "prompt": list(prompt), "output": output, "transfer": transfer}


def left_over(which: str, told: Any, side: str) -> Iterator[str]:  # noqa: ANN401 - as above
    if told["usage"]:
        yield f"{told['usage']:.3f} of the {which} engine's cache is in use at the end"
    if told["manager"].startswith("hybridkv.") != (side != "stock"):
        yield f"the {which} engine's manager is another"


def lose(folder: Path) -> None:
    """The files of a producer that went away between its word and its deed."""
    for path in folder.iterdir():
        if path.name != WHOLE:
            path.unlink()


def single(model: Path, match: Match, rounds: Sequence[Round]) -> list[list[Answer]]:
    """One engine of stock's."""
    options = {"max_model_len": 320, "block_size": 32, "enable_prefix_caching": True, **match.options}
    found = answers_of(job_of(model, rounds, options), model.parent)
    return [[Answer(tuple(one["tokens"]), one["hit_tokens"]) for one in answered] for answered in found["rounds"]]


def main(arguments: Sequence[str] | None = None) -> int:
    names, regimes = [match.name for match in MATCHES], [regime.name for regime in REGIMES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--regimes", nargs="+", default=regimes, choices=regimes)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = 0
    found, preempted = (" | ".join(f"{what}: {side}" for side in asked.sides) for what in ("found", "preemptions"))
    say(f"| model | regime | tokens | near-ties | {found} | {preempted} | |")
    say("|---|---|--:|--:|" + "--:|" * (2 * len(asked.sides)) + "---|")
    for match in (match for match in MATCHES if match.name in asked.models):
        model = tiny_model(match.name, SEED, match.fields)
        plain = Plain(wrap(model, name=match.name))
        rounds = make_rounds(SEED, plain.generate)
        with TemporaryDirectory() as name:
            folder = Path(name) / "model"
            model.save_pretrained(folder)
            wanted = single(folder, match, rounds)
            for regime in (regime for regime in REGIMES if regime.name in asked.regimes):
                if regime.states_alone and match.name != WITH_STATES:
                    continue
                if regime.within:
                    some = at_edges(rounds)
                    wrong += compare(folder, match, some, regime, asked.sides, single(folder, match, some), plain)
                else:
                    wrong += compare(folder, match, rounds, regime, asked.sides, wanted, plain)
    return int(wrong > 0)


def at_edges(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """The first prompts, as long as whole blocks and the token that the second engine computes."""
    return (Round("edges", tuple(one[:n] for one in rounds[0].prompts for n in EDGES if len(one) >= n)),)


def compare(  # noqa: PLR0917 - what a line is made of
    model: Path,
    match: Match,
    rounds: Sequence[Round],
    regime: Regime,
    sides: Sequence[str],
    wanted: Sequence[Sequence[Answer]],
    plain: Plain,
) -> int:
    """A line of the table; how much of it is wrong."""
    pairs, faults, failed = dict[str, Pair](), list[str](), list[str]()
    for side in sides:
        try:
            pairs[side] = pair(model, match, rounds, regime, side)
        except VllmError as error:
            refused = regime.refuses(match, side) and REFUSAL in str(error)
            failed.append(f"{side} refuses" if refused else f"{side}: {error}")
            faults += [failed[-1]] if side != "stock" and not refused else []
    faults += [f"{side} does not refuse" for side in pairs if regime.refuses(match, side)]
    compared = {side: compared_with(wanted, rounds, one, plain) for side, one in pairs.items()}
    different = {side: [one for one in found if not one.near_tie] for side, found in compared.items()}
    if regime.within and match.name == WITH_STATES and (theirs := different.pop("stock", None)) is not None:
        failed.append(f"stock answers {len(theirs)} otherwise")
        faults += [] if theirs else ["stock answers as one engine does: it need not be refused any longer"]
    if regime.fault is None:
        faults += [f"{side}: {one}" for side, found in different.items() for one in found]
        faults += [f"{side}: {fault}" for side, one in pairs.items() for fault in one.faults]
    else:
        faults += [f"{side}: {regime.fault} does not show" for side, found in different.items() if not found]
    hits = {
        side: sum(one.hit_tokens for answered in found.answers for one in answered) for side, found in pairs.items()
    }
    same = [hits[side] for side in ("stock", "reference") if side in hits]
    if len({*same}) > 1 and not any(one.preemptions for one in pairs.values()):
        faults.append("stock and the reference layout find different amounts")
    cells = (
        f"tiny:{match.name}",
        regime.name,
        f"{sum(len(one.tokens) for found in pairs.values() for answered in found.answers for one in answered):,}",
        str(sum(one.near_tie for found in compared.values() for one in found)),
        *(f"{hits[side]:,}" if side in hits else "-" for side in sides),
        *(str(pairs[side].preemptions) if side in pairs else "-" for side in sides),
        "; ".join(filter(None, (f"**{len(faults)} faults**" if faults else shown(regime, different), *failed))),
    )
    say(f"| {' | '.join(cells)} |")
    for line in faults[:8]:
        say(line)
    return len(faults)


def shown(regime: Regime, different: Mapping[str, Sequence[object]]) -> str:
    """That all is well."""
    if regime.fault is None:
        return "equal" if different else ""
    return f"seen: {', '.join(f'{len(found)} ({side})' for side, found in different.items())} outputs differ"


def compared_with(wanted: Sequence[Sequence[Answer]], rounds: Sequence[Round], found: Pair, plain: Plain) -> list[Any]:
    """All differences."""
    return [
        one
        for round_, theirs, ours in zip(rounds, wanted, found.answers, strict=True)
        for one in Comparison.of(round_.prompts, theirs, ours, plain.gap).differences
    ]


if __name__ == "__main__":
    sys.exit(main())
