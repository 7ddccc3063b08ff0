"""A prefill and a decode engine of vLLM's with NIXL, both stock and both ours: ``make test-vllm-engine``.

The second engine's tokens must be those of a single engine of stock, but for near-ties, whatever becomes of what the
first hands over; stock and the reference layout must find and load as much. Deliberate faults must show
(nixl_variants). Prints a table in Markdown; see docs/design/0036.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from subprocess import Popen
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, Self

import torch
from generate_duel import MATCHES, Match, say
from generation import Answer, Comparison, Round, make_rounds
from generators import (
    FREE_SERVERS,
    OUTPUT,
    Plain,
    VllmError,
    answers_of,
    fork_server,
    heard,
    job_of,
    last_error,
    several,
    tell,
)
from pd_served import FIRST, SIDE_CHANNEL, connector, require_nixl
from served import free_port

from hybridkv.runner import tiny_model, wrap

SEED = 0
SIDES: Mapping[str, Mapping[str, Any]] = {
    "stock": {},
    "reference": {
        "scheduler_cls": "hybridkv.vllm.AsyncScheduler",
        "additional_config": {"hybridkv": {"eviction": "lru"}},  # as stock evicts
    },
    "natural": {
        "scheduler_cls": "hybridkv.vllm.NaturalScheduler",
        "worker_cls": "hybridkv.vllm.NaturalWorker",
        "enable_prefix_caching": False,
    },
}
"""Options of vllm.LLM for both engines."""
ANSWERS_WITHIN_S, ENDS_WITHIN_S = 300.0, 60.0
"""An engine that needs longer for a round is ended: it may wait for loads for ever."""
LATE = "a state one token late"
"""As nixl_variants has it, which imports vLLM."""

WITH_STATES, REFUSAL, EDGES = "granite_hybrid", "let it load asynchronously", (65, 129, 193)
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclass(frozen=True, slots=True)
class Regime:
    """first, second: options of vllm.LLM for either engine.

    alone: the second is not given what the first answers for every so many-th prompt. lost: of every so many-th prompt
    the second is sent to an engine that is gone. dies: the first is killed before the second reads its second round.
    failing: every so many-th read fails. aborts: every so many-th request is aborted while it loads. slow: steps that
    a read takes. fault: of the connector, which must show. little: memory of the second. several: the connector is one
    of several. ahead: with async scheduling (gpu_defaults.py). within: loads belong to the step that resumes after
    them, at the end of whole blocks. With states nobody can: stock answers otherwise, ours refuses.
    """

    name: str
    first: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=dict)
    alone: int = 0
    lost: int = 0
    dies: bool = False
    failing: int = 0
    aborts: int = 0
    slow: int = 0
    fault: str | None = None
    states_alone: bool = False
    little: bool = False
    several: bool = False
    ahead: bool = False
    within: bool = False

    def fails(self, match: Match, side: str) -> bool:
        """Whether loads fail, which are computed again.

        In the natural layout, groups of layers depend on memory: an engine with less refuses another with several.
        """
        unlike = self.little and side == "natural" and match.name != "llama"
        return bool(self.lost or self.dies or self.failing) or unlike

    @property
    def varied(self) -> Mapping[str, Any]:
        """Options of nixl_variants; none for the connectors as they are."""
        options = {"fault": self.fault, "within": self.within, "failing": self.failing, "slow": self.slow}
        return {name: value for name, value in options.items() if value}

    def refuses(self, match: Match, side: str) -> bool:
        """Whether ours has to."""
        return self.within and (side == "natural" or (side == "reference" and match.name == WITH_STATES))

    def given(self, number: int, answered: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The transfer parameters of the second engine's request, after the first engine's answer."""
        if self.alone and number % self.alone == 0:
            return None
        if self.lost and number % self.lost == 0:
            return {**answered, "remote_engine_id": f"gone-{number}", "remote_port": free_port()}
        return answered


REGIMES = (
    Regime("handed over"),
    Regime("every third alone", alone=3),
    Regime("every ninth prefill engine gone", lost=9),
    Regime("every fourth read fails", second={"max_num_batched_tokens": 48}, failing=4),
    Regime("the prefill engine dies", dies=True),
    Regime("every third aborted while it loads", aborts=3, slow=3),
    Regime("chunks", {"max_num_batched_tokens": 48}),
    Regime("few blocks", little=True),
    Regime("several connectors", several=True),
    Regime("a step ahead", ahead=True),
    Regime("a step ahead, few blocks, every fourth read fails", little=True, failing=4, ahead=True),
    Regime("loaded within the step", within=True),
    Regime("two ranks", TWO_RANKS, TWO_RANKS),
    Regime(LATE, fault=LATE, states_alone=True),
    Regime("a state that did not come", fault="a state that did not come", states_alone=True),
    Regime("blocks one column off", fault="blocks one column off"),
)
LITTLE = {"stock": 22, "reference": 22, "natural": 30}
"""Blocks of stock's: natural's slabs are as large as a few of those."""


class Live:
    """An engine of vllm_engine.py in a fork. log: what vLLM says."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        self._log = log
        self._server: Popen[str] | None = fork_server()
        variables = {SIDE_CHANNEL: str(free_port()), "VLLM_SSM_CONV_STATE_LAYOUT": "DS"}  # else by name
        tell(self._server, {"options": options, "log": str(log), "environment": variables})
        self._process = heard(self._server)["process"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """It ends with its lines; one that does not is ended."""
        if self._server is not None:
            tell(self._server, {})
        while self._server is not None:
            self._hear(ENDS_WITHIN_S)

    def kill(self) -> None:
        """End it at once, as when its machine is lost."""
        os.kill(self._process, SIGKILL)
        self._hear(ENDS_WITHIN_S)

    def ask(self, asks: Sequence[Mapping[str, Any]], *, hold: bool = False) -> None:
        """hold: it is asked once more, when others have read its blocks."""
        assert self._server is not None
        tell(self._server, {"asks": asks, "hold": hold})

    def answer(self) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
        found = self._hear(ANSWERS_WITHIN_S)
        if found is None:
            raise VllmError(last_error(self._log.read_text("utf-8")))
        return found

    def _hear(self, seconds: float) -> Any:  # noqa: ANN401 - as above
        """Its next line, None when it has ended. It is ended if it needs longer."""
        assert self._server is not None
        late = Timer(seconds, os.kill, (self._process, SIGKILL))
        late.start()
        found = heard(self._server)
        late.cancel()
        if isinstance(found, dict):
            return found
        FREE_SERVERS.append(self._server)
        self._server = None
        return None


@dataclass(frozen=True, slots=True)
class Pair:
    """What two engines made of all rounds: answers of the second, round by round; tokens that it loaded.

    An aborted request has an answer without tokens. failed: loads of the second.
    """

    answers: list[list[Answer]]
    loaded: int
    failed: int
    preemptions: int
    faults: tuple[str, ...]


def options_of(model: Path, match: Match, side: str, regime: Regime, *, first: bool) -> dict[str, Any]:
    options = {"model": str(model), "max_model_len": 320, "block_size": 32, "enable_prefix_caching": True}
    natural = side == "natural"
    transfer = connector("kv_producer" if first else "kv_consumer", natural=natural, varied=bool(regime.varied))
    if regime.varied:
        transfer["kv_connector_extra_config"] = dict(regime.varied)
    if regime.several:
        stores = match.name == "llama" and not natural  # ExampleConnector takes models of one group in vLLM's layout
        transfer = several(transfer, model.with_name(f"stored, {side}") if stores else None)
    asked = regime.first if first else regime.second
    little = {"num_gpu_blocks_override": LITTLE[side]} if regime.little and not first else {}
    ahead: dict[str, Any] = {"async_scheduling": True} if regime.ahead else {}
    if regime.ahead and natural:
        ahead["scheduler_cls"] = "hybridkv.vllm.AsyncNaturalScheduler"
    return {**options, **match.options, **asked, **little, **SIDES[side], **ahead, "kv_transfer_config": transfer}


def pair(model: Path, match: Match, rounds: Sequence[Round], regime: Regime, side: str) -> Pair:
    """Raises VllmError, with the error of the engine that failed."""
    found, faults, number, answered = list[list[Answer]](), list[str](), 0, dict[str, Any]()
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Live(options_of(model, match, side, regime, first=one), model.with_name(f"log {one}.txt"))
            )
            for one in (True, False)
        )
        for at, one in enumerate(rounds):
            died = regime.dies and at > 1
            names = [f"{number + place}" for place in range(len(one.prompts))]
            handed = [None] * len(names) if died else prefilled(first, names, one.prompts)
            if regime.several and not all(params and params.get("seen_blocks") for params in handed):
                faults.append("the second connector did not see the blocks of each request")
            if regime.dies and at == 1:
                first.kill()
            takes = []
            for name, prompt, params in zip(names, one.prompts, handed, strict=True):
                number += 1
                given = None if params is None else regime.given(number, params)
                abort = regime.aborts > 0 and number % regime.aborts == 0
                takes.append(asked_of(name, prompt, OUTPUT, given) | {"abort": abort})
            second.ask(takes)
            answered = second.answer()
            faults += left_over("second", answered, side)
            if not regime.alone and not regime.fails(match, side):  # the lease of blocks that nobody reads is 30 s
                first.ask([])
                faults += left_over("first", first.answer(), side)
            found.append([Answer(tuple(told["tokens"]), told["hit_tokens"]) for told in answered["answers"]])
    if bool(answered["failed"]) != regime.fails(match, side):
        faults.append(f"{answered['failed']} loads failed")
    if answered["in_flight"] < 2 * regime.ahead:
        faults.append(f"{answered['in_flight']} batches in flight")
    if regime.aborts and all(one.tokens for round_ in found for one in round_):
        faults.append("no request was aborted")
    return Pair(found, answered["loaded"], answered["failed"], answered["preemptions"], tuple(faults))


def prefilled(first: Live, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[dict[str, Any] | None]:
    """The transfer parameters that the first engine answers."""
    first.ask([asked_of(*ask, 1, FIRST) for ask in zip(names, prompts, strict=True)], hold=True)
    return [answer["transfer"] for answer in first.answer()["answers"]]


def asked_of(name: str, prompt: Sequence[int], output: int, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "prompt": list(prompt), "output": output, "transfer": transfer}


def left_over(which: str, told: Any, side: str) -> Iterator[str]:  # noqa: ANN401 - as above
    if told["usage"]:
        yield f"{told['usage']:.3f} of the {which} engine's cache is in use at the end"
    if told["manager"].startswith("hybridkv.") != (side != "stock"):
        yield f"the {which} engine's manager is another"


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
    require_nixl()
    torch.set_num_threads(1)
    wrong = 0
    columns = [f"{what}: {side}" for what in ("found", "loaded", "failed loads", "preemptions") for side in asked.sides]
    say(f"| model | regime | tokens | near-ties | {' | '.join(columns)} | |")
    say("|---|---|--:|--:|" + "--:|" * len(columns) + "---|")
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
    """The first prompts, cut to whole blocks and the token that the second engine computes; none begins another.

    They come twice: later requests hit what was loaded.
    """
    cut = (one[: max((n for n in EDGES if n <= len(one)), default=0)] for one in rounds[0].prompts)
    prompts = tuple(filter(None, cut))
    return (Round("edges", prompts), Round("edges again", prompts))


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
    compared = {
        side: compared_with(wanted, rounds, one, plain, aborts=regime.aborts > 0) for side, one in pairs.items()
    }
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
    same = [(hits[side], pairs[side].loaded) for side in ("stock", "reference") if side in hits]
    if len({*same}) > 1 and not any(one.preemptions for one in pairs.values()):
        faults.append("stock and the reference layout find different amounts")
    cells = (
        f"tiny:{match.name}",
        regime.name,
        f"{sum(len(one.tokens) for found in pairs.values() for answered in found.answers for one in answered):,}",
        str(sum(one.near_tie for found in compared.values() for one in found)),
        *(f"{hits[side]:,}" if side in hits else "-" for side in sides),
        *(f"{pairs[side].loaded:,}" if side in pairs else "-" for side in sides),
        *(str(pairs[side].failed) if side in pairs else "-" for side in sides),
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


def compared_with(
    wanted: Sequence[Sequence[Answer]], rounds: Sequence[Round], found: Pair, plain: Plain, *, aborts: bool
) -> list[Any]:
    """All differences. aborts: answers without tokens are left out."""
    differences = list[Any]()
    for round_, theirs, ours in zip(rounds, wanted, found.answers, strict=True):
        rows = [row for row in zip(round_.prompts, theirs, ours, strict=True) if row[2].tokens or not aborts]
        prompts, wants, founds = zip(*rows, strict=True)
        differences += Comparison.of(prompts, wants, founds, plain.gap).differences
    return differences


if __name__ == "__main__":
    sys.exit(main())
