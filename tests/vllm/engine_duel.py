"""vLLM with its own scheduler and with ours, whole engines: ``make test-vllm-engine VLLM_PYTHON=...``.

Tokens, cached tokens of every prompt and preemptions must be equal with the eviction of vLLM, ``lru``; tokens only with
``hazard``, our default, which evicts something else. Prints a table in Markdown; see docs/design/0036.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from generate_duel import MATCHES, Match, say
from generation import Round, make_rounds
from generators import Plain, VllmError, answers_of, job_of

from hybridkv.runner import tiny_model, wrap

SEED = 0
_DELTA_HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
_DELTA_SIZES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
MODELS = (
    *MATCHES,
    Match("mistral", {"head_dim": 32}, {}),
    Match("llama4", {"head_dim": 32}, {}),
    Match("gpt_oss", {"head_dim": 32, "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0}}, {}),
    # kernels of latent attention and of the delta rule on CPUs take no float32
    Match("deepseek_v2", {**_LATENT, "moe_intermediate_size": 64}, {"dtype": "bfloat16"}),
    # a page of attention that a state fits in with 32 tokens
    Match(
        "qwen3_next",
        {**_DELTA_HEADS, **_DELTA_SIZES, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 8},
        {"dtype": "bfloat16"},
    ),
    # a step of at most one block of states, as granite_hybrid's
    Match("mamba2", {"n_groups": 1}, {"max_num_batched_tokens": 32}),
)
IN_EVERY_REGIME = ("llama", "gemma3", "granite_hybrid")
POOLS = {"llama": 22, "deepseek_v2": 22, "qwen3_next": 30, "mamba2": 4}
"""Blocks so few that requests are preempted; 22 for the others, where much is evicted."""
KEEP_SPARE = ("granite_hybrid", "qwen3_next", "mamba2")
"""Models with states: with little memory ours keeps blocks free at admissions, so hits and preemptions may differ."""
ASYNC, SYNC = "hybridkv.vllm.AsyncScheduler", "hybridkv.vllm.Scheduler"


@dataclass(frozen=True, slots=True)
class Regime:
    """options: of vllm.LLM. little: a pool so small that the models of POOLS are preempted. everywhere: for all models.

    stores: an ExampleConnector stores what is computed; what is compared is a second engine, which loads it.
    late: beside its steps, and not all of it (late_connector). ahead: with async scheduling, which vLLM's CPU platform
    switches off otherwise (gpu_defaults.py). eviction: of our scheduler. unit: --prefix-match-unit of ours alone,
    because stock's outputs with it are wrong (docs/design/0034); hits then differ, and tokens are compared.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str = SYNC
    priorities: bool = False
    abort: int = 0
    little: bool = False
    stores: bool = False
    late: bool = False
    ahead: bool = False
    eviction: str = "lru"
    unit: int | None = None
    everywhere: bool = False


REGIMES = (
    Regime("as started", everywhere=True),
    Regime("the async class, one step at a time", scheduler=ASYNC),
    Regime("a step ahead", scheduler=ASYNC, ahead=True, everywhere=True),
    Regime("a step ahead, chunks", {"max_num_batched_tokens": 48}, ASYNC, ahead=True),
    Regime("a step ahead, preempted", scheduler=ASYNC, little=True, ahead=True),
    Regime("a step ahead, aborts", scheduler=ASYNC, abort=2, ahead=True),
    Regime("a step ahead, loaded beside steps", scheduler=ASYNC, stores=True, late=True, ahead=True),
    Regime("chunks", {"max_num_batched_tokens": 48}),
    Regime("preempted", little=True, everywhere=True),
    Regime("preempted, by priority", {"scheduling_policy": "priority"}, little=True, priorities=True),
    Regime("drafts", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}),
    Regime("aborts", abort=2),
    Regime("events", {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}),
    Regime("all kept", {"prefix_cache_retention_interval": None}),
    Regime("stored, and started anew", stores=True),
    Regime("loaded beside steps", stores=True, late=True),
    Regime("loaded beside steps, preempted", stores=True, late=True, little=True),
    Regime("two ranks", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    Regime(
        "two stages",
        {
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            # without the warm-up that compiled models have, stock's second stage has no buffers on CPUs
            "enforce_eager": False,
            "compilation_config": {"backend": "eager"},
        },
    ),
    Regime("ranked eviction", eviction="hazard"),
    Regime("ranked eviction, preempted", little=True, eviction="hazard", everywhere=True),
    Regime("ranked eviction, a step ahead", scheduler=ASYNC, little=True, ahead=True, eviction="hazard"),
    Regime("hits inside blocks", unit=16),
    Regime("hits inside blocks, ranked eviction", eviction="hazard", unit=16),
    Regime("nothing cached", {"enable_prefix_caching": False}),
)


def run(model: Path, rounds: Sequence[Round], match: Match, regime: Regime, scheduler: str | None) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
    options = {
        "max_model_len": 320,
        "block_size": 32,
        "enable_prefix_caching": True,
        "async_scheduling": regime.ahead,
        "additional_config": {"hybridkv": {"eviction": regime.eviction}},
        **match.options,
        **regime.options,
    }
    if regime.unit is not None and scheduler is not None:
        options["prefix_match_unit"] = regime.unit
    if regime.little:
        options["num_gpu_blocks_override"] = POOLS.get(match.name, 22)
    if regime.stores:
        path = model.with_name("stored by vLLM" if scheduler is None else "stored by ours")
        more = {"shared_storage_path": str(path)}
        options["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": more,
        }
    told = {"priorities": regime.priorities, "abort": regime.abort, "ahead": regime.ahead}
    asked = job_of(model, rounds, options, scheduler=scheduler, **told)
    if regime.stores:
        plenty = {name: value for name, value in options.items() if name != "num_gpu_blocks_override"}
        answers_of({**asked, "options": plenty}, model.parent)
    if regime.late:
        asked["options"]["kv_transfer_config"] |= {
            "kv_connector": "LateConnector",
            "kv_connector_module_path": "late_connector",
            "kv_load_failure_policy": "recompute",
        }
    return answers_of(asked, model.parent)


def fitting(match: Match) -> list[str]:
    """The regimes that are run: all for some models, for the others those where their groups matter."""
    fit = [one for one in REGIMES if one.everywhere or match.name in IN_EVERY_REGIME]
    return [one.name for one in fit if one.unit is None or match.name != "llama"]  # vLLM: only for several groups


def faults(theirs: Any, ours: Any, rounds: Sequence[Round], regime: Regime, match: Match) -> Iterator[str]:  # noqa: ANN401 - as above
    """What is not equal, or not what the regime says."""
    spare = regime.little and match.name in KEEP_SPARE
    preempts, exact = regime.little and match.name in POOLS and not spare, regime.eviction == "lru" and not spare
    exact = exact and regime.unit is None
    if theirs["in_flight"] != ours["in_flight"] or (regime.ahead and ours["in_flight"] < 2):
        yield f"{theirs['in_flight']} batches in flight, with ours {ours['in_flight']}"
    if not ours["manager"].startswith("hybridkv.") or theirs["manager"].startswith("hybridkv."):
        yield f"managers are {theirs['manager']} and {ours['manager']}"
    for one, wanted, found in zip(rounds, theirs["rounds"], ours["rounds"], strict=True):
        for number, (theirs_, ours_) in enumerate(zip(wanted, found, strict=True)):
            for what in ("tokens", "hit_tokens")[: 2 if exact else 1]:
                if theirs_[what] != ours_[what]:
                    yield f"{one.name}, prompt {number}: {what} {theirs_[what]}, with ours {ours_[what]}"
    differ = exact and theirs["preemptions"] != ours["preemptions"]
    if differ or (preempts and not ours["preemptions"]):
        yield f"{theirs['preemptions']} preemptions, with ours {ours['preemptions']}"
    if ours["usage"]:
        yield f"{ours['usage']:.3f} of the cache is in use at the end"


def main(arguments: Sequence[str] | None = None) -> int:
    names, regimes = [match.name for match in MODELS], [regime.name for regime in REGIMES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--regimes", nargs="+", choices=regimes, help="these, for every model that is asked for")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    wrong = 0
    say("| model | regime | prompts | tokens | hit tokens: stock | ours | preemptions | |")
    say("|---|---|--:|--:|--:|--:|--:|---|")
    for match in (match for match in MODELS if match.name in asked.models):
        model = tiny_model(match.name, SEED, match.fields)
        rounds = make_rounds(SEED, Plain(wrap(model, name=match.name)).generate)
        for regime in (one for one in REGIMES if one.name in (asked.regimes or fitting(match))):
            with TemporaryDirectory() as name:
                folder = Path(name)
                model.save_pretrained(folder / "model")
                try:
                    theirs = run(folder / "model", rounds, match, regime, None)
                except VllmError as error:
                    say(f"| tiny:{match.name} | {regime.name} | | | | | | stock itself: {error} |")
                    continue
                try:
                    ours = run(folder / "model", rounds, match, regime, regime.scheduler)
                except VllmError as error:
                    say(f"| tiny:{match.name} | {regime.name} | | | | | | **{error}** |")
                    wrong += 1
                    continue
            every = [one for answers in ours["rounds"] for one in answers]
            hits = sum(one["hit_tokens"] for answers in theirs["rounds"] for one in answers)
            found = list(faults(theirs, ours, rounds, regime, match))
            cells = (
                f"tiny:{match.name}",
                regime.name,
                str(len(every)),
                f"{sum(len(one['tokens']) for one in every):,}",
                f"{hits:,}",
                f"{sum(one['hit_tokens'] for one in every):,}",
                str(ours["preemptions"]),
                f"**{len(found)} differences**" if found else "equal",
            )
            say(f"| {' | '.join(cells)} |")
            for line in found[:8]:
                say(line)
            wrong += len(found)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
