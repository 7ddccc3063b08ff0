"""Compare whole vLLM engines with vLLM's own cache manager and with this library's, on one core of a CPU.

    make bench-vllm VLLM_PYTHON=... [VLLM_BENCH="--loads TEXT ... --variants NAME ... --rounds N --json FILE"]
    python bench_vllm.py --show FILE      the table of a result as CSV: docs/data/vllm-engines.csv

    stock          vLLM as it starts
    stock-32       vLLM with --prefix-match-unit 32: a prefix hit may end at every 32nd token (hybrids only)
    reference      --scheduler-cls hybridkv.vllm.Scheduler
    reference-lru  the same with the eviction of vLLM (only where --variants names it)
    reference-32   the same as reference with --prefix-match-unit 32 (hybrids only)
    natural        --scheduler-cls hybridkv.vllm.NaturalScheduler and its worker
    reference-in-order, natural-in-order
                   the same with max_overtaken 0: first come, first served (only where --variants names them)

Models have seeded weights; vllm_loads.py has them and the loads. In each round every variant runs every load once, with
an empty cache. A run is an engine in a process of its own: a fork of this process, which has imported vLLM. The engines
of a load run in turns of a few steps:

    stock [8 steps]        [8 steps]        ...    A machine that slows down for some seconds slows all of them down.
    natural       [8 steps]        [8 steps]

Loads over HTTP start one server after the other (vllm_http.py).

The clock is the processor time of the engine's process, or of the server's. Other work on the machine changes it less.

    rate           output tokens per processor second
    first token    from a request's arrival to its first token, queue included: the mean, and the most of all rounds;
                   over HTTP the mean on the wall clock
    hits           prompt tokens found in the cache

Outputs must equal those of *stock*, except after a near-tie of the two best logits (tests/vllm/generation.py): where a
chunk or hit ends decides the order of sums. Exit code 1 for any other difference in a variant of this library. Those
of *stock-32* are vLLM's own (docs/design/0034): they are counted only.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final

from vllm_loads import HTTP_LOADS, LOADS, MIB, SHAPES, Conversation, HttpLoad, Load, Shape, prompt_of

Answers = Sequence[Sequence[tuple[Any, ...]]]
"""By conversation and turn, the tokens of an answer, or over HTTP its text as one."""
ANSWERS_WITHIN_S: Final = 600
"""For the start of an engine, and for each of its turns."""
STEPS_OF_A_TURN: Final = 8
STOCK: Final = "stock"
_REFERENCE: Final = {"scheduler_cls": "hybridkv.vllm.Scheduler"}
_RANKED: Final = {"additional_config": {"hybridkv": {"eviction": "hazard"}}}
_NATURAL: Final = {
    "scheduler_cls": "hybridkv.vllm.NaturalScheduler",
    "worker_cls": "hybridkv.vllm.NaturalWorker",
    "enable_prefix_caching": False,
}
_IN_ORDER: Final = {"additional_config": {"hybridkv": {"eviction": "hazard", "max_overtaken": 0}}}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to start vLLM.

    Attributes:
        name: name of the variant.
        options: options of vllm.LLM.
        has_unit: whether hits end at the model's ``unit`` of tokens; such a variant runs only models that have one.
        default: whether it runs if no variants are named.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    has_unit: bool = False
    default: bool = True


VARIANTS: Final = (
    Variant(STOCK),
    Variant("stock-32", has_unit=True),
    Variant("reference", {**_REFERENCE, **_RANKED}),
    Variant("reference-lru", {**_REFERENCE, "additional_config": {"hybridkv": {"eviction": "lru"}}}, default=False),
    Variant("reference-32", {**_REFERENCE, **_RANKED}, has_unit=True),
    Variant("reference-in-order", {**_REFERENCE, **_IN_ORDER}, default=False),
    Variant("natural", _NATURAL),
    Variant("natural-in-order", {**_NATURAL, **_IN_ORDER}, default=False),
)


def options_of(variant: Variant, shape: Shape, memory: int) -> dict[str, Any]:
    """Return the options of vllm.LLM for a run."""
    unit = {"prefix_match_unit": shape.unit} if variant.has_unit else {}
    return {
        "max_model_len": 3072,
        "block_size": 32,  # the smallest that vLLM's attention on CPUs takes; vLLM raises it for hybrids
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": memory,
        "max_num_seqs": 64,
        **shape.options,
        **variant.options,
        **unit,
    }


# -- the runs of a load, each in a process of its own


def play(watched: Any, load: Load, turn: Callable[[], None]) -> dict[str, Any]:  # noqa: ANN401 - vllm_engine.Watched
    """Return the measurements and answers of ``load`` in the engine ``watched``. turn: see ``_Player.run``."""
    player = _Player(watched.engine, load)
    watched.play([{"name": "warm-up", "prompt": [5, 6, 7] * 30, "output": 4}])
    watched.preemptions = 0
    begun = time.process_time()
    steps = player.run(turn)
    seconds = time.process_time() - begun
    return {
        "seconds": seconds,
        "steps": steps,
        "first_token_ms": 1000 * fmean(player.first_token_s),
        "slowest_first_token_ms": 1000 * max(player.first_token_s),
        "prompt_tokens": player.prompt_tokens,
        "hit_tokens": player.hit_tokens,
        "output_tokens": sum(len(answer) for turns in player.answers for answer in turns),
        "answers": player.answers,
        "preemptions": watched.final_state()["preemptions"],
    }


class _Player:
    """The clients of ``load``, and what they measure."""

    def __init__(self, engine: Any, load: Load) -> None:  # noqa: ANN401 - vLLM's LLMEngine
        self._engine, self._load = engine, load
        self._sent = dict[str, float]()
        self.answers: list[list[tuple[int, ...]]] = [[] for _ in load.conversations]
        self.first_token_s: list[float] = []
        self.prompt_tokens = self.hit_tokens = 0

    def run(self, turn: Callable[[], None]) -> int:
        """Run all conversations; return the steps. turn: called before each ``STEPS_OF_A_TURN`` steps."""
        waiting = iter(range(len(self._load.conversations)))
        for _, number in zip(range(self._load.at_once), waiting, strict=False):
            self._send(number)
        steps = 0
        while self._engine.has_unfinished_requests():
            if steps % STEPS_OF_A_TURN == 0:
                turn()
            outputs = self._engine.step()
            steps += 1
            for one in outputs:
                number = int(one.request_id.partition(".")[0])
                sent = self._sent.pop(one.request_id, None)
                if sent is not None:
                    self.first_token_s.append(time.process_time() - sent)
                if not one.finished:
                    continue
                self.hit_tokens += one.num_cached_tokens
                self.answers[number].append(tuple(one.outputs[0].token_ids))
                if len(self.answers[number]) < len(self._load.conversations[number]):
                    self._send(number)
                elif (following := next(waiting, None)) is not None:
                    self._send(following)
        return steps

    def _send(self, number: int) -> None:
        import vllm  # noqa: PLC0415 - the table is shown without it

        conversation, answers = self._load.conversations[number], self.answers[number]
        prompt = prompt_of(conversation, answers)
        self.prompt_tokens += len(prompt)
        name = f"{number}.{len(answers)}"
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=conversation[len(answers)].output, ignore_eos=True, detokenize=False
        )
        self._sent[name] = time.process_time()
        self._engine.add_request(name, vllm.TokensPrompt(prompt_token_ids=list(prompt)), asked)


def run(model: Path, load: Load, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Run ``load`` in an engine of each of ``variants``, in turns; return what ``play`` returns, or the ``error``."""
    engines = [_Engine(model, load, variant) for variant in variants]
    try:
        while any(engine.found is None for engine in engines):
            for engine in engines:
                engine.turn()
        return [engine.found or {} for engine in engines]
    finally:
        for engine in engines:
            engine.end()


class _Engine:
    """An engine in a fork of this process. found: what it measured, or why it failed, at its end."""

    def __init__(self, model: Path, load: Load, variant: Variant) -> None:
        self._log = model.with_name(f"{variant.name}.txt")
        fork = multiprocessing.get_context("fork")
        self._pipe, pipe = fork.Pipe()
        self._process = fork.Process(target=_child, args=(pipe, str(model), load, variant, self._log))
        self._process.start()
        pipe.close()
        self.found: dict[str, Any] | None = None
        self._wait()

    def turn(self) -> None:
        """Let the engine run its next steps, unless it has ended."""
        if self.found is None:
            self._pipe.send(None)
            self._wait()

    def _wait(self) -> None:
        from generators import last_error  # noqa: PLC0415 - as above

        try:
            answered = self._pipe.poll(ANSWERS_WITHIN_S)
            self.found = self._pipe.recv() if answered else {"error": f"no answer within {ANSWERS_WITHIN_S} s"}
        except EOFError:
            self.found = {"error": last_error(self._log.read_text("utf-8"))}

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _child(pipe: Any, model: str, load: Load, variant: Variant, log: Path) -> None:  # noqa: ANN401 - a connection
    import vllm_engine  # noqa: PLC0415 - as above
    from generators import VllmError  # noqa: PLC0415

    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    watched = vllm_engine.Watched(model=model, **options_of(variant, SHAPES[load.shape], load.memory))
    used = max(tensor.size for tensor in watched.core.scheduler.kv_cache_config.kv_cache_tensors)
    if used > load.memory:
        raise VllmError(f"VllmError: the cache has {used} bytes, the load allows {load.memory}")

    def turn() -> None:
        pipe.send(None)
        pipe.recv()

    pipe.send(play(watched, load, turn))


# -- comparison with stock


def compare(
    conversations: Sequence[Conversation] | None,
    theirs: Answers,
    ours: Answers,
    gap: Any,  # noqa: ANN401 - generation.Gap
) -> dict[str, int]:
    """Return the compared tokens, near-ties and other differences of ``ours`` from stock's answers ``theirs``.

    A conversation is compared up to its first difference: the prompts after it differ. Without ``conversations``, as
    over HTTP, near-ties count as differences.
    """
    found = {"compared": 0, "near_ties": 0, "differences": 0}
    for number, (wanted, given) in enumerate(zip(theirs, ours, strict=True)):
        for turn, (a, b) in enumerate(zip(wanted, given, strict=True)):
            at = next((at for at, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), None)
            if at is None:
                found["compared"] += len(a)
                continue
            found["compared"] += at + 1
            is_tie = conversations is not None and _near_tie(conversations[number], wanted[:turn], a, b, at, gap)
            found["near_ties" if is_tie else "differences"] += 1
            break
    return found


def _near_tie(  # noqa: PLR0917
    conversation: Conversation,
    before: Sequence[tuple[int, ...]],
    theirs: tuple[int, ...],
    ours: tuple[int, ...],
    at: int,
    gap: Any,  # noqa: ANN401 - as above
) -> bool:
    from generation import NEAR_TIE_GAP  # noqa: PLC0415 - as above

    return bool(gap(prompt_of(conversation, list(before)), theirs[:at], theirs[at], ours[at]) < NEAR_TIE_GAP)


# -- the table


def rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each load and variant: medians over the rounds, preemptions and near-ties of the first.

    ``ratio`` is the median over the rounds of the rate divided by that of the faster stock variant in that round.
    """
    keys = list(dict.fromkeys((one["shape"], one["load"], one["memory"]) for one in runs))
    for key in keys:
        of_load = [one for one in runs if (one["shape"], one["load"], one["memory"]) == key]
        best = dict[int, float]()
        for one in of_load:
            if one["variant"].startswith(STOCK) and "seconds" in one:
                best[one["round"]] = max(best.get(one["round"], 0.0), _rate(one))
        ran = {one["variant"] for one in of_load}
        for variant in (variant.name for variant in VARIANTS if variant.name in ran):
            every = [one for one in of_load if one["variant"] == variant]
            row: dict[str, Any] = dict(zip(("model", "load", "memory_mib"), key, strict=True)) | {"variant": variant}
            done = [one for one in every if "seconds" in one]
            if not done:
                yield row | {"error": every[0]["error"]}
                continue
            # not measured over HTTP
            slowest = [one["slowest_first_token_ms"] for one in done if "slowest_first_token_ms" in one]
            ratios = [_rate(one) / best[one["round"]] for one in done if one["round"] in best]
            yield row | {
                "rate": median(_rate(one) for one in done),
                "ratio": median(ratios) if ratios else None,
                "first_token_ms": median(one["first_token_ms"] for one in done),
                "slowest_first_token_ms": max(slowest, default=None),
                "hits": median(one["hit_tokens"] / one["prompt_tokens"] for one in done),
                "preemptions": done[0]["preemptions"],
                "compared": done[0]["compared"],
                "near_ties": done[0]["near_ties"],
                "differences": sum(one["differences"] for one in done),
            }


def _rate(one: Mapping[str, Any]) -> float:
    return float(one["output_tokens"] / one["seconds"])


HEADER: Final = (
    "model",
    "load",
    "memory, MiB",
    "variant",
    "tokens per CPU second",
    "of stock's best",
    "first token, ms",
    "slowest first token, ms",
    "hit",
    "preemptions",
    "outputs",
)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of the table, as HEADER names them."""
    first = (row["model"], row["load"], str(row["memory_mib"]), row["variant"])
    if "error" in row:
        return (*first, *[""] * 6, "does not start")
    outputs = "equal" if not row["near_ties"] else f"equal, {row['near_ties']} near-ties"
    return (
        *first,
        f"{row['rate']:,.0f}",
        "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        f"{row['first_token_ms']:,.0f}",
        "" if row["slowest_first_token_ms"] is None else f"{row['slowest_first_token_ms']:,.0f}",
        f"{row['hits']:.1%}",
        str(row["preemptions"]),
        f"{row['differences']} differences" if row["differences"] else outputs,
    )


def show(result: Path) -> None:
    """Print the table of ``result`` as CSV."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEADER)
    table.writerows(cells(row) for row in rows(json.loads(result.read_text("utf-8"))["runs"]))


# -- all runs


def measure(loads: Sequence[Load | HttpLoad], variants: Sequence[Variant], rounds: int) -> Iterator[dict[str, Any]]:
    """Run everything; yield the result of each run."""
    import torch  # noqa: PLC0415 - as above
    from generators import Plain  # noqa: PLC0415

    from hybridkv.runner import tiny_model, wrap  # noqa: PLC0415

    import_engines()
    torch.set_num_threads(1)
    plain = dict[str, Plain]()
    with TemporaryDirectory() as name:
        for shape in dict.fromkeys(load.shape for load in loads):
            model = tiny_model(SHAPES[shape].family, 0, SHAPES[shape].fields)
            model.save_pretrained(Path(name) / shape)
            plain[shape] = Plain(wrap(model, name=shape))
        for round_, load in product(range(rounds), loads):
            stock: Answers | None = None
            some = [one for one in variants if not one.has_unit or SHAPES[load.shape].unit is not None]
            conversations = load.conversations if isinstance(load, Load) else None
            for variant, result in zip(some, _results(Path(name) / load.shape, load, some), strict=True):
                one = {"shape": load.shape, "load": load.name, "memory": load.memory // MIB}
                one |= {"variant": variant.name, "round": round_}
                answers = result.pop("answers", None)
                if answers is None:
                    yield {**one, **result}
                    continue
                stock = stock or answers
                yield {**one, **result, **compare(conversations, stock, answers, plain[load.shape].gap)}


def _results(model: Path, load: Load | HttpLoad, variants: Sequence[Variant]) -> Iterable[dict[str, Any]]:
    """Return what each of ``variants`` measured, or the ``error``."""
    if isinstance(load, Load):
        return run(model, load, variants)
    return (_served(model, load, variant) for variant in variants)


def _served(model: Path, load: HttpLoad, variant: Variant) -> dict[str, Any]:
    import vllm_http  # noqa: PLC0415 - as above
    from generators import VllmError  # noqa: PLC0415

    try:
        return vllm_http.serve(model, options_of(variant, SHAPES[load.shape], load.memory), load)
    except VllmError as error:
        return {"error": str(error)}


def import_engines() -> None:
    """Import the modules of vLLM that an engine needs, so that forks do not."""
    import vllm_engine  # noqa: F401, PLC0415 - sets vLLM's environment variables before vLLM is imported
    from vllm.model_executor.models import gemma3, granitemoehybrid, llama  # noqa: F401, PLC0415
    from vllm.v1.worker import cpu_worker  # noqa: F401, PLC0415

    from hybridkv.vllm import natural_worker, scheduler  # noqa: F401, PLC0415
    from vllm import LLM  # noqa: F401, PLC0415

    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM would prefer it to the memory of a load


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the result; or show a result."""
    names = [one.name for one in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", metavar="TEXT", help='with all words of a text: "hybrid documents 20"')
    parser.add_argument("--variants", nargs="+", choices=names, default=[one.name for one in VARIANTS if one.default])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--show", type=Path, help="print the table of this result instead")
    asked = parser.parse_args(arguments)
    if asked.show is not None:
        show(asked.show)
        return 0
    every: list[Load | HttpLoad] = [*LOADS, *HTTP_LOADS]
    loads = [one for one in every if asked.loads is None or any(_matches(one, text) for text in asked.loads)]
    if not loads:
        parser.error(f"no load has all words of any of {asked.loads}")
    facts = about()
    runs = list[dict[str, Any]]()
    for one in measure(loads, [one for one in VARIANTS if one.name in asked.variants], asked.rounds):
        runs.append(one)
        print(", ".join(f"{name} {value}" for name, value in one.items()), file=sys.stderr, flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps({**facts, "runs": runs}, indent=1) + "\n", "utf-8")
    print("|" + "|".join(HEADER) + "|\n" + "|---" * len(HEADER) + "|")
    for row in rows(runs):
        print("|" + "|".join(cells(row)) + "|")
    return int(any(one.get("differences") for one in runs if not one["variant"].startswith(STOCK)))


def about() -> dict[str, str]:
    """Return the commit, date, machine and software of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} shared cores, engines with one thread",
        "software": f"Python {platform.python_version()}, torch {version('torch')}, vLLM {version('vllm-cpu')} (CPU)",
    }


def _matches(load: Load | HttpLoad, text: str) -> bool:
    words = f"{load.shape} {load.name} {load.memory // MIB}".split()
    return all(word in words for word in text.split())


if __name__ == "__main__":
    sys.exit(main())
