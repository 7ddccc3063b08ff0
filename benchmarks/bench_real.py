"""Compare a real model in the engine with other engines: processor seconds of the same chats, on one thread.

    python bench_real.py MODEL [--chats 32] [--prompt-tokens 330] [--new-tokens 48] [--dtype float32] [--own]
        [--engines hybridkv,static,...] [--json FILE]

MODEL is a folder with a chat model (examples/real_model.py makes one). The chats share a system prompt. Its length
makes
prompts of about ``--prompt-tokens``. Answers are greedy and all ``--new-tokens`` long. With ``--own`` each chat has its
own system prompt, so a cold run has no hits.

    hybridkv     cold, and once more with everything cached (warm)
    ngram:4      hybridkv with drafts from the text where they save time, cold; an engine without drafts (plain) runs in
                 alternation with it, because the machine's speed may change by a factor of two within a minute
    static       transformers' generate, all chats in one padded batch
    continuous   transformers' generate_batch
    sequential   transformers' generate, one chat after the other
    vllm         if VLLM_PYTHON names a Python with it, cold and warm
"""

# ruff: noqa: PLC0415 - each engine runs in a process, and maybe a Python, that has not what the others need
from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ENGINES = ("hybridkv", "ngram:4", "static", "continuous", "sequential", "vllm")
PEERS_OF_TORCH = ("static", "continuous", "sequential")
TOPICS = ("the moon", "bread", "prime numbers", "the sea", "batteries", "Rome", "volcanoes", "music")
ASKS = (
    "What should a child of six know about {}?",
    "Tell me one thing about {} that few people know.",
    "Why does {} matter to people in a small town?",
    "Write a short poem on {} with two rhymes.",
)
RULES = (
    "Rule {}: answer in short sentences, and in plain words.",
    "Rule {}: where you do not know something, say so at once.",
    "Rule {}: never repeat the question, begin with the answer.",
    "Rule {}: numbers are written as digits, with their unit.",
)

Answers = list[list[int]]


@dataclass(frozen=True)
class Run:
    """Processor seconds by what was run, the tokens of every chat, GiB by what they are of, and what was counted."""

    seconds: dict[str, float]
    answers: Answers
    gib: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def prompts_of(model: str, chats: int, tokens: int, own: bool) -> Answers:
    """Token ids of ``chats`` conversations of about ``tokens`` tokens, which share a system prompt but with ``own``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [ASKS[at // len(TOPICS) % len(ASKS)].format(TOPICS[at % len(TOPICS)]) for at in range(chats)]

    def ids(rules: int, first: int, content: str) -> list[int]:
        system = " ".join(RULES[at % len(RULES)].format(at + 1) for at in range(first, first + rules))
        said = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        found: list[int] = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        return found

    rules = 1
    while len(ids(rules, 0, asked[0])) < tokens:
        rules += 1
    return [ids(rules, rules * at if own else 0, content) for at, content in enumerate(asked)]


def timed(run: Callable[[], Answers]) -> tuple[float, Answers]:
    """Processor seconds of this process, all threads of it."""
    begun = time.process_time()
    answers = run()
    return time.process_time() - begun, answers


def hybridkv(model: str, prompts: Answers, new: int, dtype: str) -> Run:
    """Cold, then warm."""
    from hybridkv.request import SamplingParams

    with engine_of(model, prompts, new, dtype) as engine:
        plan, sampling = engine.plan, SamplingParams(max_tokens=new, ignore_eos=True)

        def run() -> Answers:
            return [list(one.token_ids) for one in engine.generate(prompts, sampling)]

        engine.runner.storage.arena.fill_(0)  # all of it is there before the peak is looked for
        before = forget_peak()
        cold, answers = timed(run)
        memory = {"cache": plan.capacity.arena_bytes / 2**30, "steps": resident("VmHWM") - before}
        return Run({"cold": cold, "warm": timed(run)[0]}, answers, memory)


def engine_of(model: str, prompts: Answers, new: int, dtype: str, drafts: int = 0) -> Any:  # noqa: ANN401  # see below
    """Start an engine of hybridkv, which a Python with a peer does not import; run one short prompt after its start."""
    import torch
    from transformers import AutoModelForCausalLM

    from hybridkv.request import SamplingParams
    from hybridkv.runner import Engine, EngineOptions, plan_for, wrap
    from hybridkv.runner.drafters import AdaptiveDrafter, NgramDrafter

    loaded = wrap(AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)))
    plan = plan_for(loaded, [len(one) + new for one in prompts], num_speculative_tokens=drafts)
    speculate = AdaptiveDrafter(NgramDrafter(drafts)) if drafts else None
    engine = Engine(loaded, plan, EngineOptions(), speculate=speculate)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    return engine


def ngram(model: str, prompts: Answers, new: int, dtype: str, drafts: int) -> Run:
    """Cold, with drafts and without, a step of the one after a step of the other; what was drafted."""
    from hybridkv.request import SamplingParams

    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    with engine_of(model, prompts, new, dtype, drafts) as drafting, engine_of(model, prompts, new, dtype) as plain:
        both = (drafting, plain)
        before = [one.statistics().steps for one in both]
        for one in both:
            one.runner.storage.arena.fill_(0)
        seconds = [0.0, 0.0]
        found: list[dict[str, list[int]]] = [{}, {}]
        for at, one in enumerate(both):
            begun = time.process_time()
            for name, prompt in enumerate(prompts):
                one.add(prompt, sampling, request_id=f"chat-{name}")
            seconds[at] += time.process_time() - begun
        while not all(one.idle for one in both):
            for at, one in enumerate(both):
                begun = time.process_time()
                ended = [] if one.idle else one.step()
                seconds[at] += time.process_time() - begun
                found[at] |= {done.request_id: list(done.token_ids) for done in ended}
        names = [f"chat-{name}" for name in range(len(prompts))]
        answers = [[by_name[name] for name in names] for by_name in found]
        if answers[0] != answers[1]:
            print("with drafts other tokens than without")
        steps = [one.statistics().steps - first for one, first in zip(both, before, strict=True)]
        of = drafting.statistics()
        counts = {"steps": steps[0], "plain": steps[1], "drafted": of.drafted_tokens, "right": of.accepted_tokens}
        return Run({"cold": seconds[0], "plain": seconds[1]}, answers[0], counts=counts)


def resident(field: str) -> float:
    """GiB of this process's memory: VmRSS now, VmHWM at most since ``forget_peak``; 0 but on Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text("utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith(field)), 0.0)


def forget_peak() -> float:
    """Reset the peak count and return the GiB in use; see proc(5), clear_refs."""
    if (clear := Path("/proc/self/clear_refs")).exists():
        clear.write_text("5", "utf-8")
    return resident("VmRSS")


def of_transformers(name: str, model: str, prompts: Answers, new: int, dtype: str) -> Run:
    """One of PEERS_OF_TORCH."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    # no token is the end of an answer; asking for so many new ones would forbid the one that is
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)

    def batch(some: Answers) -> Answers:
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in some])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in some])
        with torch.inference_mode():
            out = loaded.generate(input_ids=ids, attention_mask=mask, generation_config=asked)
        found: Answers = out[:, longest:].tolist()
        return found

    def continuous(some: Answers) -> Answers:
        config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = loaded.generate_batch(inputs=some, generation_config=config, progress_bar=False)
        return [
            list(found[name].generated_tokens) for name in sorted(found, key=lambda one: int(one.rpartition("_")[2]))
        ]

    runs: dict[str, Callable[[], Answers]] = {
        "static": lambda: batch(prompts),
        "continuous": lambda: continuous(prompts),
        "sequential": lambda: [batch([one])[0] for one in prompts],
    }
    batch([[1, 2, 3]])
    cold, answers = timed(runs[name])
    return Run({"cold": cold}, answers)


def vllm(model: str, prompts: Answers, new: int, dtype: str) -> Run:
    """Cold, then warm."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts)) + new
    engine = LLM(model=model, dtype=dtype, max_model_len=max(1024, longest), enforce_eager=True, max_num_seqs=64)
    asked = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2), use_tqdm=False)

    def run() -> Answers:
        given = [{"prompt_token_ids": one} for one in prompts]
        return [list(one.outputs[0].token_ids) for one in engine.generate(given, asked, use_tqdm=False)]

    cold, answers = timed(run)
    return Run({"cold": cold, "warm": timed(run)[0]}, answers)


def run_one(name: str, given: argparse.Namespace) -> None:
    """In a process of its own: what ``name`` took and said, into the folder ``given.work``."""
    prompts = json.loads((given.work / "prompts.json").read_text("utf-8"))
    what = given.model, prompts, given.new_tokens, given.dtype
    if name == "vllm":
        found = vllm(*what)
    else:
        import torch

        torch.set_num_threads(given.threads)
        if name in PEERS_OF_TORCH:
            found = of_transformers(name, *what)
        elif name == "hybridkv":
            found = hybridkv(*what)
        else:
            found = ngram(*what, drafts=int(name.partition(":")[2]))
    peak = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    found = replace(found, gib=found.gib | peak)
    (given.work / "answers.json").write_text(json.dumps(asdict(found)), "utf-8")


def measured(given: argparse.Namespace, engines: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of ``engines`` in turn."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    with TemporaryDirectory() as folder:
        work = Path(folder)
        prompts = prompts_of(given.model, given.chats, given.prompt_tokens, given.own)
        (work / "prompts.json").write_text(json.dumps(prompts), "utf-8")
        for name in engines:
            python = os.environ["VLLM_PYTHON"] if name == "vllm" else sys.executable
            command = [python, __file__, given.model, "--work", folder, "--engines", name, "--dtype", given.dtype]
            command += ["--new-tokens", str(given.new_tokens), "--threads", str(given.threads)]
            done = subprocess.run(  # noqa: S603  # this file
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            yield name, json.loads((work / "answers.json").read_text("utf-8"))


def main() -> None:
    """Run the engines and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=330)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    engines = given.engines.split(",")
    if given.work is not None:
        return run_one(engines[0], given)
    if "vllm" in engines and "VLLM_PYTHON" not in os.environ:
        print("vllm: left out, VLLM_PYTHON names no Python with it")
        engines.remove("vllm")
    processor = platform.processor() or platform.machine()
    print(
        f"{given.chats} chats, {given.new_tokens} new tokens each, {given.dtype}, {given.threads} thread, {processor}"
    )
    found = dict[str, dict[str, Any]]()
    for name, one in measured(given, engines):
        found[name] = one
        reference = found.get("sequential", next(iter(found.values())))["answers"]
        same = sum(mine == theirs for mine, theirs in zip(one["answers"], reference, strict=True))
        seconds = "  ".join(f"{what} {value:6.2f} s" for what, value in one["seconds"].items())
        memory = "  ".join(f"{what} {value:.2f}" for what, value in one["gib"].items())
        counts = "  ".join(f"{what} {value}" for what, value in one["counts"].items())
        print(f"{name:<12} {seconds:<32} GiB: {memory:<36} same {same} of {given.chats}  {counts}", flush=True)
    if given.json is not None:
        kept = {name: {what: one[what] for what in ("seconds", "gib", "counts")} for name, one in found.items()}
        names = ("chats", "prompt_tokens", "new_tokens", "dtype", "threads", "own")
        asked = {name: getattr(given, name) for name in names}
        given.json.write_text(json.dumps({"asked": asked, "engines": kept}, indent=1) + "\n", "utf-8")
    return None


if __name__ == "__main__":
    main()
