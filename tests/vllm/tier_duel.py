"""vLLM without a connector and with TierConnector, whole engines: ``make test-vllm-engine VLLM_PYTHON=...``.

The device is so small that prompts of earlier rounds are evicted. What comes back from host memory, from a disk, and
after losses must give stock's tokens, and the hits of an engine with much memory. Faults put into the code on purpose
must be seen. Prints tables in Markdown; see docs/design/0042.

    python tier_duel.py                 regimes, faults
    python tier_duel.py --servers       stores on servers, mooncake_master and redis-server: make test-vllm-stores
    python tier_duel.py --first-token   seconds to the first token, of longer prompts and a larger model
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import connector_faults
import torch
from engine_duel import ASYNC, MODELS, SYNC
from generate_duel import Match, say
from generation import Round, make_rounds
from generators import ENGINE, Plain, VllmError, VllmKilledError, answers_of, job_of, several
from natural_duel import OURS as NATURAL

from hybridkv.runner import tiny_model, wrap
from hybridkv.stores import open_store

SEED = 0
POOLS = {"llama": 22, "gemma3": 22, "granite_hybrid": 22, "qwen3_next": 30, "llama4": 22, "mamba2": 4, "gpt_oss": 22}
"""Blocks of the device: few of the rounds stay there. Latent attention is missing: on CPUs stock caches none of it."""
ALONE = {"qwen3_next": {"max_num_seqs": 1}}
"""Options of models in bfloat16, whose rounding depends on the requests that run beside."""
NATURAL_POOLS = {**POOLS, "mamba2": 16}
"""The same in the natural layout, where a load needs room beside the states of running requests."""
ON_A_GRID = {
    "qwen3_next": {"max_num_batched_tokens": 64, "additional_config": {"hybridkv": {"placement": "interval:64"}}}
}
"""The same: chunks must end at the same tokens, with tiers and without."""
CUT_ELSEWHERE = ("blocks are lost", "loads fail")
"""Left out for the same: what is computed again ends chunks elsewhere, and stock's outputs depend on that (0042)."""
WITH_STATES, WITH_WINDOWS = ("granite_hybrid", "qwen3_next", "mamba2"), ("gemma3",)
IN_EVERY_REGIME = ("llama", "gemma3", "granite_hybrid")
SIZES = {"gemma3": {"sliding_window": 80}}
"""So that a window has several blocks."""
HOST = {"host_memory": "64MiB"}
STORE = "file://{folder}/store"
REDIS, MOONCAKE = "redis://127.0.0.1:{port}?timeout_s=20", "mooncake://127.0.0.1:{port}?timeout_s=20"
LENT = MOONCAKE + "&memory=64MiB"
"""The engine lends memory to the cluster, and it is lost with it."""
KILLED = {"round": 3, "steps": 6}
"""The first process ends by SIGKILL in the middle of this round."""
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@dataclass(frozen=True, slots=True)
class Regime:
    """options: of vllm.LLM. tiers: of TierConnector, beside host memory. disturbs: of connector_faults, harmless.

    second: a second process is compared, with the disk or store of the first. killed: when the first ends.
    salts: rounds of two tenants. loads: whether anything is loaded, None for either. scheduler: ours, or stock's.
    natural: the natural layout, also with much memory. several: in MultiConnector, beside a connector that loads
    nothing. The others: as in engine_duel.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tiers: Mapping[str, Any] = field(default_factory=dict)
    disturbs: Sequence[str] = ()
    second: bool = False
    killed: Mapping[str, int] | None = None
    salts: bool = False
    loads: bool | None = True
    scheduler: str | None = None
    natural: bool = False
    several: bool = False
    ahead: bool = False
    abort: int = 0
    priorities: bool = False
    everywhere: bool = False


REGIMES = (
    Regime("host memory", everywhere=True),
    Regime("a step ahead", ahead=True, everywhere=True),
    Regime("chunks", {"max_num_batched_tokens": 48}),
    Regime("aborts", abort=2),
    Regime("preempted, by priority", {"scheduling_policy": "priority"}, priorities=True),
    Regime("little host memory", tiers={"host_memory": "300KiB"}, loads=None),
    Regime("blocks are lost", disturbs=["blocks are lost"], everywhere=True),
    Regime("loads fail", disturbs=["loads fail"], everywhere=True),
    Regime("no answers", disturbs=["no answers"], loads=False),
    Regime("disk, second process", tiers={"disk_memory": "64MiB"}, second=True, everywhere=True),
    Regime("shared store, second process", tiers={"store": STORE}, second=True, everywhere=True),
    Regime("two tenants", salts=True),
    Regime("two ranks", RANKS),
    Regime("two ranks, blocks are lost", {**RANKS, "worker_extension_cls": "tier_disturbed.Disturbed"}),
    Regime("drafts", DRAFTS),
    Regime("our scheduler", scheduler=SYNC, everywhere=True),
    Regime("our scheduler, a step ahead", scheduler=ASYNC, ahead=True),
    Regime("natural", natural=True, everywhere=True),
    Regime("natural, a step ahead", natural=True, ahead=True, everywhere=True),
    Regime("natural, transfers are lost", disturbs=["transfers are lost"], natural=True, everywhere=True),
    Regime("natural, chunks", {"max_num_batched_tokens": 48}, natural=True),
    Regime("natural, aborts", abort=2, natural=True),
    Regime("natural, little host memory", tiers={"host_memory": "1MiB"}, natural=True, loads=None),
    Regime("natural, shared store, second process", tiers={"store": STORE}, natural=True, second=True, everywhere=True),
    Regime("natural, disk, second process", tiers={"disk_memory": "64MiB"}, natural=True, second=True, everywhere=True),
    Regime("natural, two tenants", salts=True, natural=True),
    Regime("in MultiConnector", several=True),
    Regime("natural, in MultiConnector", natural=True, several=True),
    Regime("natural, two ranks", RANKS, natural=True),
    Regime("natural, two ranks, second process", RANKS, tiers={"store": STORE}, natural=True, second=True),
    Regime("natural, two ranks, disk", RANKS, tiers={"disk_memory": "64MiB"}, natural=True, second=True),
)
ON_SERVERS = tuple(
    Regime(f"{layout}{server}, {what}", tiers={"store": url}, second=True, killed=killed, natural=bool(layout))
    for layout in ("", "natural, ")
    for server, url, what, killed in (
        ("Redis", REDIS, "second process", None),
        ("Redis", REDIS, "the first is killed", KILLED),
        ("Mooncake", MOONCAKE, "second process", None),
        ("Mooncake", MOONCAKE, "the first is killed", KILLED),
        ("Mooncake", LENT, "the first is killed with its memory", KILLED),
    )
)  # fmt: skip


@contextmanager
def served(url: str, folder: Path) -> Iterator[str]:
    """Run the server of ``url``, and yield it with the port. What Mooncake keeps lies in memory of this process."""
    if "{port}" not in url:
        yield url.format(folder=folder)
        return
    from servers import mooncake_master, redis_server  # noqa: PLC0415 - of tests/stores

    is_redis = url == REDIS
    with (redis_server if is_redis else mooncake_master)(folder) as server:
        if is_redis:
            yield url.format(port=server.port)
            return
        with open_store(f"{MOONCAKE.format(port=server.port)}&memory=256MiB") as lender:
            lender.exists([b"connect"])
            yield url.format(port=server.port)


def run(
    folder: Path, rounds: Sequence[Round], match: Match, regime: Regime, *, tiers: bool = True, fault: str | None = None
) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
    """``tiers``: otherwise without a connector, with so much memory that nothing is evicted."""
    options = {
        "max_model_len": 320,
        "block_size": 32,
        "enable_prefix_caching": True,
        "async_scheduling": regime.ahead and tiers,
        "additional_config": {"hybridkv": {"eviction": "lru"}},
        **match.options,
        **ALONE.get(match.name, {}),
    }
    scheduler = regime.scheduler if tiers else None
    if regime.natural:
        options |= {**NATURAL, "additional_config": {}, **ON_A_GRID.get(match.name, {})}
        scheduler = options.pop("scheduler")
        if options["async_scheduling"]:
            scheduler = "hybridkv.vllm.AsyncNaturalScheduler"
    told: dict[str, Any] = {"salts": ["a", "a", "b", "b", "a", "b", "a"] if regime.salts else None}
    if tiers:
        extra = {**HOST, **regime.tiers}
        if "disk_memory" in extra:
            extra["disk"] = str(folder / "disk")
        options |= regime.options
        options["num_gpu_blocks_override"] = (NATURAL_POOLS if regime.natural else POOLS)[match.name]
        options["kv_transfer_config"] = {
            "kv_connector": "TierConnector",
            "kv_connector_module_path": "hybridkv.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            # a store that loses blocks needs no policy; a device that fails does
            "kv_load_failure_policy": "recompute" if "loads fail" in regime.disturbs or fault else "fail",
        }
        if regime.several:
            options["kv_transfer_config"] = several(options["kv_transfer_config"], None)
        told |= {"ahead": regime.ahead, "abort": regime.abort, "priorities": regime.priorities}
        told |= {"connector_faults": [*regime.disturbs, *([fault] if fault else [])]}
    asked = job_of(folder / "model", rounds, options, scheduler=scheduler, **told)
    if not tiers:
        return answers_of(asked, folder)
    with served(extra.get("store", ""), folder) as url:
        if url:
            extra["store"] = url
        if regime.killed:
            killed_in(asked | {"killed": regime.killed}, folder)
        elif regime.second:
            answers_of(asked, folder, ENGINE)  # not a fork, which has the same seed of hash
        return answers_of(asked, folder)


def killed_in(asked: Mapping[str, Any], folder: Path) -> None:
    """Do a job that ends in the middle, and not in another way."""
    try:
        answers_of(asked, folder, ENGINE)
    except VllmKilledError:
        return
    raise VllmError("the first process was to be killed, but it ended")


def whole_blocks(rounds: Sequence[Round], size: int = 32) -> tuple[Round, ...]:
    """The rounds, and twice prompts that end with a block: their last token must be computed, and no state has it."""
    cut = tuple(one[: len(one) // size * size] for one in rounds[0].prompts if len(one) >= 2 * size)
    return (*rounds, Round("whole blocks", cut), Round("whole blocks again", cut))


def differences(theirs: Any, ours: Any, rounds: Sequence[Round], regime: Regime) -> Iterator[str]:  # noqa: ANN401
    """Tokens that are not stock's, and what else the regime says."""
    for one, wanted, found in zip(rounds, theirs["rounds"], ours["rounds"], strict=True):
        for number, (theirs_, ours_) in enumerate(zip(wanted, found, strict=True)):
            length = len(ours_["tokens"]) if regime.abort and number % regime.abort == 1 else None
            if theirs_["tokens"][:length] != ours_["tokens"]:
                yield f"{one.name}, prompt {number}: {theirs_['tokens']}, with tiers {ours_['tokens']}"
    if regime.salts and (hits := sum(one["hit_tokens"] for one in ours["rounds"][2])):
        yield f"{hits} tokens of another tenant are hit"
    if ours["usage"]:
        yield f"{ours['usage']:.3f} of the device is in use at the end"


def missing(theirs: Any, ours: Any, regime: Regime) -> Iterator[str]:  # noqa: ANN401 - as above
    """What the regime is about and did not happen."""
    counts, loaded = ours["counts"], loaded_tokens(ours)
    if regime.loads not in {None, bool(loaded)}:
        yield f"{loaded} tokens were loaded"
    if bool(ours["failed"]) != ("loads fail" in regime.disturbs):
        yield f"{ours['failed']} loads failed"
    if "blocks are lost" in regime.disturbs and not counts.get("lost_blocks"):
        yield "no block was lost"
    if "transfers are lost" in regime.disturbs and not counts.get("host_loads_lost"):
        yield "no load was lost"
    stays = regime.second and regime.tiers.get("store") != LENT  # what lay in the memory of the first is lost with it
    if stays and not sum(one["hit_tokens"] for one in ours["rounds"][0]):
        yield "the second process hit nothing of the first"
    if stays and not beyond(ours):
        yield "nothing came from the disk or store"
    if regime.name in {"host memory", "our scheduler", "natural"} and hits(ours) < 0.8 * hits(theirs):
        yield f"{hits(ours)} tokens are hit, {hits(theirs)} with much memory"


def loaded_tokens(answers: Any) -> int:  # noqa: ANN401 - as above
    """Tokens that came from tiers. In the natural layout they count as hits of the device for vLLM."""
    return answers["loaded"] or int(answers["counts"].get("host_loaded_tokens", 0))


def beyond(answers: Any) -> float:  # noqa: ANN401 - as above
    """Blocks that came from a disk or store; in the natural layout prefixes."""
    counts: dict[str, float] = answers["counts"]
    return sum(counts.get(name, 0) for name in ("disk_found_blocks", "store_found_blocks", "store_loads", "disk_loads"))


def hits(answers: Any) -> int:  # noqa: ANN401 - as above
    """Tokens of all prompts that were in the cache, or came back."""
    return sum(one["hit_tokens"] for one_round in answers["rounds"] for one in one_round)


def compare(match: Match, regimes: Sequence[Regime], *, faults: bool) -> int:
    """Print the rows of a model, and return how much is wrong."""
    model = tiny_model(match.name, SEED, {**match.fields, **SIZES.get(match.name, {})})
    rounds = whole_blocks(make_rounds(SEED, Plain(wrap(model, name=match.name)).generate))
    wrong = 0
    stock: dict[tuple[bool, bool], Any] = {}
    for regime in regimes:
        with TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder / "model")
            kind = regime.salts, regime.natural
            if kind not in stock:
                stock[kind] = run(folder, rounds, match, regime, tiers=False)
            theirs = stock[kind]
            try:
                ours = run(folder, rounds, match, regime)
            except VllmError as error:
                say(f"| tiny:{match.name} | {regime.name} | | | | | | **{error}** |")
                wrong += 1
                continue
        found = [*differences(theirs, ours, rounds, regime), *missing(theirs, ours, regime)]
        counts = ours["counts"]
        cells = (
            f"tiny:{match.name}", regime.name, f"{hits(theirs):,}", f"{hits(ours):,}", f"{loaded_tokens(ours):,}",
            f"{counts.get('host_found_blocks', 0) or counts.get('host_loads', 0):,.0f}", f"{beyond(ours):,.0f}",
            f"**{len(found)} differences**" if found else "equal",
        )  # fmt: skip
        say(f"| {' | '.join(cells)} |")
        for line in found[:8]:
            say(line)
        wrong += len(found)
    for fault in of_model(match.name) if faults else ():
        regime = Regime("two tenants", salts=True) if "salt" in fault else REGIMES[0]
        if fault in connector_faults.OF_NATURAL:
            regime = Regime("natural", natural=True)
        with TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder / "model")
            try:
                ours = run(folder, rounds, match, regime, fault=fault)
                theirs = stock.get((regime.salts, regime.natural))
                found = [] if theirs is None else list(differences(theirs, ours, rounds, regime))
                told = f"{len(found)} differences" if found else "**not seen**"
            except VllmError as error:
                found, told = [str(error)], f"error: {error}"
        say(f"| tiny:{match.name} | fault: {fault} | | | | | | {told} |")
        wrong += not found
    return wrong


def of_model(name: str) -> Sequence[str]:
    """The faults that a model must see."""
    states, windows = name in WITH_STATES, name in WITH_WINDOWS
    return list(connector_faults.faults_of(states=states, windows=windows, groups=states or windows))


def first_token() -> None:
    """Seconds to the first token of prompts that the device has forgotten: computed, from host memory, from a disk."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    random = torch.Generator().manual_seed(SEED)
    prompts = tuple(tuple(torch.randint(32, 127, (1_500,), generator=random).tolist()) for _ in range(4))
    rounds = (Round("cold", prompts), *(Round("again", prompts) for _ in range(3)))
    model = tiny_model("llama", SEED, {**sizes, "max_position_embeddings": 2048})
    say("| layout | tiers | cold: median s to the first token | again: median | least | most | hit tokens |")
    say("|---|---|--:|--:|--:|--:|--:|")
    for layout in ("reference", "natural"):
        with TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder / "model")
            disk = {"disk": str(folder / "disk"), "disk_memory": "1GiB"}
            for told, tiers in (
                ("none", None),
                ("host memory", {"host_memory": "1GiB"}),
                ("host memory and disk", {"host_memory": "1GiB", **disk}),
                ("the same disk, second process", {"host_memory": "1GiB", **disk}),
            ):
                found = timed(folder, rounds, tiers, natural=layout == "natural")
                cold, *again = [[one["first_s"] for one in answered] for answered in found["rounds"]]
                times = sorted(second for one in again for second in one)
                cells = (layout, told, f"{sorted(cold)[len(cold) // 2]:.3f}", f"{times[len(times) // 2]:.3f}",
                         f"{times[0]:.3f}", f"{times[-1]:.3f}", f"{hits(found):,}")  # fmt: skip
                say(f"| {' | '.join(cells)} |")
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        try:
            timed(folder, rounds, {"cpu_bytes_to_use": 1 << 30}, connector="OffloadingConnector")
        except VllmError as error:
            say(f"vLLM's own OffloadingConnector: {error}")
        else:
            say("vLLM's own OffloadingConnector started: compare it")


def timed(
    folder: Path,
    rounds: Sequence[Round],
    tiers: Mapping[str, Any] | None,
    *,
    natural: bool = False,
    connector: str = "TierConnector",
) -> Any:  # noqa: ANN401 - what vllm_engine.py answers
    """Prompts one by one. tiers: options of the connector, None for none."""
    options: dict[str, Any] = {
        "max_model_len": 1600,
        "block_size": 32,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 60,
    }
    scheduler = None
    if natural:
        options |= NATURAL
        scheduler = options.pop("scheduler")
    if tiers is not None:
        options["kv_transfer_config"] = {
            "kv_connector": connector,
            **({"kv_connector_module_path": "hybridkv.vllm"} if connector == "TierConnector" else {}),
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers,
        }
    return answers_of(job_of(folder / "model", rounds, options, scheduler=scheduler, one_by_one=True), folder)


def chosen_regimes(asked: argparse.Namespace, *, every: bool) -> list[Regime]:
    """The regimes of a model. every: not only those for all models."""
    if asked.regimes:
        return [one for one in (*REGIMES, *ON_SERVERS) if one.name in asked.regimes]
    if asked.servers:
        return list(ON_SERVERS) if every else []
    return [one for one in REGIMES if every or one.everywhere]


def main(arguments: Sequence[str] | None = None) -> int:
    names = [match.name for match in MODELS if match.name in POOLS]
    regimes = [regime.name for regime in (*REGIMES, *ON_SERVERS)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--regimes", nargs="*", choices=regimes, help="these, for every model that is asked for")
    parser.add_argument("--servers", action="store_true", help="regimes with servers, for models in every regime")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--first-token", action="store_true")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if asked.first_token:
        first_token()
        return 0
    say("| model | regime | hit tokens: much memory | with tiers | loaded | blocks from host | from disk, store | |")
    say("|---|---|--:|--:|--:|--:|--:|---|")
    wrong = 0
    for match in (match for match in MODELS if match.name in asked.models):
        every = match.name in IN_EVERY_REGIME
        chosen = chosen_regimes(asked, every=every)
        if match.name in ALONE and not asked.regimes:
            chosen = [one for one in chosen if one.name not in CUT_ELSEWHERE]
        if match.name in WITH_STATES:  # stock itself ends with an error: it copies their states in Triton, not on CPUs
            chosen = [one for one in chosen if one.options is not DRAFTS]
        wrong += compare(match, chosen, faults=every and not (asked.no_faults or asked.servers))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
