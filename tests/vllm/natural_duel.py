"""vLLM as it is and with the natural layout in its workers, whole engines: ``make test-vllm-engine VLLM_PYTHON=...``.

Tokens must be equal but for near-ties: where a chunk or a hit ends decides in which order sums are taken. Stock caches
prefixes itself where it can. Prints a table in Markdown; see docs/design/0036.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from generate_duel import MATCHES, Match, say
from generation import PRINTABLE, QUESTION, Answer, Comparison, Round, make_rounds
from generators import Plain, VllmError, answers_of, job_of
from natural_faults import FAULTS

from hybridkv.runner import tiny_model, wrap

SEED = 0
EIGHT = {"num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
MODELS = (
    *MATCHES,
    Match("mistral", {"head_dim": 32, "num_hidden_layers": 4}, {}),
    # kernels of the delta rule on CPUs take no float32
    Match(
        "qwen3_next",
        {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, **EIGHT},
        {"dtype": "bfloat16"},
    ),
    Match("mamba2", {"n_groups": 1}, {}),
)
WITHOUT_STATES, ROUNDED = ("llama", "gemma3", "mistral"), ("qwen3_next",)
BOUNDED = ("mamba2",)
"""What states hold alone does not grow with tokens: nobody has to give way."""
IN_STAGES = "mistral", "qwen3_next"
"""Models whose two stages have equal layers, and that stock splits: not mamba2, nor granite_hybrid without experts."""
OURS = {
    "scheduler": "hybridkv.vllm.NaturalScheduler",
    "worker_cls": "hybridkv.vllm.NaturalWorker",
    "enable_prefix_caching": False,
}
STAGES = {
    "pipeline_parallel_size": 2,
    "distributed_executor_backend": "mp",
    # without the warm-up that compiled models have, stock's second stage has no buffers on CPUs
    "enforce_eager": False,
    "compilation_config": {"backend": "eager"},
}
CAPTURED = {
    "enforce_eager": False,
    # no compiler: steps that only decode are captured as they are
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}
GRID = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
SMALL = {"num_gpu_blocks_override": 30}
SMALLER = {"granite_hybrid": 16}
"""Blocks of stock's where in 30 only the crowd is preempted."""
CROWD = 32
"""Prompts at once, of one block in each group. Small memory does not hold all of them.

Stock admits them until memory is full, the natural layout until a quarter of their next blocks would not fit: about 4/5
are full. After 12 of 24 output tokens each needs a second block in all groups of attention; a window of 24 tokens still
has its first. None has ended, and there is no room: llama runs 23 in 30 blocks and needs 46, gemma3 12 in 60 slabs and
needs 96, granite_hybrid 10 in 12 slabs and needs 14.
"""


@dataclass(frozen=True, slots=True)
class Regime:
    """options: of vllm.LLM, ours: of ours beside them. ahead: a step is scheduled before the last one's output is in.

    preempts: a crowd comes last, and requests of ours are preempted, where tokens take blocks.
    drafts: not for models with recurrent states.
    alike: chunks end at the same tokens in both, and only so are bfloat16 models the same: second turns, which go on
    from states that decoding left, are left out. captured: on GPUs alone; graphs of decode steps have to run.
    priorities: later prompts go first. second_runner: vLLM would take its second model runner for ours, as it does on
    GPUs.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = False
    abort: int = 0
    preempts: bool = False
    drafts: bool = False
    alike: bool = False
    captured: bool = False
    priorities: bool = False
    second_runner: bool = False


def crowd() -> Round:
    random = Random("crowd")  # numbers would repeat the heads of make_rounds
    return Round("crowd", tuple(tuple(random.choices(PRINTABLE, k=QUESTION)) for _ in range(CROWD)))


def placed(name: str) -> Mapping[str, Any]:
    return {"additional_config": {"hybridkv": {"placement": name}}}


REGIMES = (
    Regime("as started"),
    Regime("chunks", {"max_num_batched_tokens": 48}),
    Regime("little memory", SMALL, preempts=True),
    Regime("a step ahead", ahead=True),
    Regime("a step ahead, chunks", {"max_num_batched_tokens": 48}, ahead=True),
    Regime("a step ahead, aborts", ahead=True, abort=2),
    Regime("little memory, a step ahead", SMALL, ahead=True, preempts=True),
    Regime("little memory, by priority", {**SMALL, "scheduling_policy": "priority"}, preempts=True, priorities=True),
    Regime("aborts", abort=2),
    Regime(
        "drafts",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        drafts=True,
    ),
    Regime("events", {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}),
    Regime("interval:64", ours=placed("interval:64")),
    Regime("align:32", ours=placed("align:32")),
    Regime("nothing kept", ours=placed("none"), alike=True),
    Regime("on one grid", GRID, ours=placed("interval:64"), alike=True),
    Regime("captured", CAPTURED, captured=True),
    Regime("the second runner by default", second_runner=True),
    Regime("two stages", STAGES),
    Regime("two stages, little memory", {**STAGES, **SMALL}, preempts=True),
    Regime("two stages, on one grid", {**STAGES, **GRID}, ours=placed("interval:64"), alike=True),
    Regime("two ranks", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
)


def answers(
    model: Path, rounds: Sequence[Round], match: Match, regime: Regime, *, ours: bool, fault: str | None = None
) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
    options = {
        "max_model_len": 320,
        "block_size": 32,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 1 << 30,
        "async_scheduling": regime.ahead,
        **match.options,
        **regime.options,
    }
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] = SMALLER.get(match.name, options["num_gpu_blocks_override"])
    scheduler = None
    if ours:
        options |= {**OURS, **regime.ours}
        scheduler = options.pop("scheduler")
        if regime.ahead:
            scheduler = "hybridkv.vllm.AsyncNaturalScheduler"
    elif regime.ahead:
        scheduler = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    told: dict[str, object] = {"priorities": regime.priorities, "abort": regime.abort, "ahead": regime.ahead}
    told["fault"] = fault
    # ours chooses its model runner itself, and stock gets the same one
    told |= {"first_runner": not ours, "second_runner": regime.second_runner and ours}
    return answers_of(job_of(model, rounds, options, scheduler=scheduler, **told), model.parent)


def fits(match: Match, regime: Regime) -> bool:
    """Whether that is anything to compare."""
    if regime.captured and not torch.cuda.is_available():
        return False
    if "pipeline_parallel_size" in regime.options and match.name not in IN_STAGES:
        return False
    return (match.name in WITHOUT_STATES or not regime.drafts) and (regime.alike or match.name not in ROUNDED)


def stock(model: Path, rounds: Sequence[Round], match: Match, regime: Regime) -> tuple[Any, str]:
    """Its answers, and a word on its caching."""
    try:
        return answers(model, rounds, match, regime, ours=False), ""
    except VllmError as error:
        without = Match(match.name, match.fields, {**match.options, "enable_prefix_caching": False})
        return answers(model, rounds, without, regime, ours=False), f"stock caches nothing: {error}"


def compared(theirs: Any, ours: Any, rounds: Sequence[Round], plain: Plain) -> list[Comparison]:  # noqa: ANN401 - as above
    """Round by round. Of outputs that were aborted what is there is compared."""
    found = []
    for one, wanted, given in zip(rounds, theirs["rounds"], ours["rounds"], strict=True):
        for length in sorted({len(answer["tokens"]) for answer in wanted}):
            some = [i for i, answer in enumerate(wanted) if len(answer["tokens"]) == length]
            prompts = [one.prompts[i] for i in some]
            found.append(Comparison.of(prompts, picked(wanted, some), picked(given, some), plain.gap))
    return found


def picked(answered: Any, places: Sequence[int]) -> list[Answer]:  # noqa: ANN401 - as above
    return [Answer(tuple(answered[i]["tokens"]), answered[i]["hit_tokens"]) for i in places]


def main(arguments: Sequence[str] | None = None) -> int:
    names, regimes = [match.name for match in MODELS], [regime.name for regime in REGIMES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--regimes", nargs="+", default=regimes, choices=regimes)
    parser.add_argument("--fault", choices=FAULTS, help="what ours does wrong: the comparison must see it")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = 0
    say("| model | regime | tokens | near-ties | hit tokens: stock | natural | preemptions: stock | natural | |")
    say("|---|---|--:|--:|--:|--:|--:|--:|---|")
    for match in (match for match in MODELS if match.name in asked.models):
        model = tiny_model(match.name, SEED, match.fields)
        plain = Plain(wrap(model, name=match.name))
        every = make_rounds(SEED, plain.generate)
        for regime in (regime for regime in REGIMES if regime.name in asked.regimes):
            if not fits(match, regime):
                continue
            rounds = [one for one in every if not (regime.alike and one.name == "second turn")]
            rounds += [crowd()] * regime.preempts
            with TemporaryDirectory() as name:
                folder = Path(name) / "model"
                model.save_pretrained(folder)
                try:
                    theirs, note = stock(folder, rounds, match, regime)
                except VllmError as error:
                    say(f"| tiny:{match.name} | {regime.name} | | | | | | | stock itself: {error} |")
                    continue
                try:
                    ours = answers(folder, rounds, match, regime, ours=True, fault=asked.fault)
                except VllmError as error:
                    say(f"| tiny:{match.name} | {regime.name} | | | | | | | **{error}** |")
                    wrong += 1
                    continue
            if not ours["manager"].startswith("hybridkv.") or theirs["manager"].startswith("hybridkv."):
                wrong += 1
                say(f"managers are {theirs['manager']} and {ours['manager']}")
            wrong += tell(match, regime, compared(theirs, ours, rounds, plain), theirs, ours, note)
    return int(wrong > 0)


def tell(  # noqa: PLR0917 - what its line is made of
    match: Match,
    regime: Regime,
    found: Sequence[Comparison],
    theirs: Any,  # noqa: ANN401 - as above
    ours: Any,  # noqa: ANN401 - as above
    note: str,
) -> int:
    """A line of the table; how much of it is wrong."""
    differences = [one for round_ in found for one in round_.differences if not one.near_tie]
    faults = [str(one) for one in differences]
    if regime.preempts and match.name not in BOUNDED and not ours["preemptions"]:
        faults.append("nobody was preempted")
    if theirs["in_flight"] != ours["in_flight"] or (regime.ahead and ours["in_flight"] < 2):
        faults.append(f"{theirs['in_flight']} batches in flight, with ours {ours['in_flight']}")
    if ours["runner"] != theirs["runner"]:
        faults.append(f"the model runner is {ours['runner']}, that of stock {theirs['runner']}")
    if regime.captured and not (theirs["replays"] and ours["replays"]):
        faults.append(f"{theirs['replays']} captured graphs ran, with ours {ours['replays']}")
    if ours["usage"]:
        faults.append(f"{ours['usage']:.3f} of the cache is in use at the end")
    cells = (
        f"tiny:{match.name}",
        regime.name,
        f"{sum(one.tokens for one in found):,}",
        str(sum(one.near_ties for one in found)),
        f"{sum(one.theirs for one in found):,}",
        f"{sum(one.ours for one in found):,}",
        str(theirs["preemptions"]),
        str(ours["preemptions"]),
        "; ".join(filter(None, (f"**{len(faults)} faults**" if faults else "equal", note))),
    )
    say(f"| {' | '.join(cells)} |")
    for line in faults[:8]:
        say(line)
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
