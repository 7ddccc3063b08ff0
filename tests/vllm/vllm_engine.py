"""vLLM, with its own scheduler or ours, in a process of its own: python vllm_engine.py JOB ANSWERS, both JSON files.

JOB      {"model": folder, "rounds": [[token ids, ...], ...], "output": tokens, "options": {of vllm.LLM},
          "scheduler": a name or null, "priorities": whether later prompts go first, "abort": every so many-th prompt,
          "ahead": whether a step is scheduled before the last one's output is in, "fault": of natural_faults, or null}
ANSWERS  {"rounds": [[{"tokens": [...], "hit_tokens": n}, ...], ...], "preemptions": n, "events": n, "manager": name}
"""

import json
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler is looked into

import natural_faults
from vllm.v1.core.sched.scheduler import Scheduler

import vllm


class Watched:
    """What a scheduler does that its outputs do not tell."""

    def __init__(self) -> None:
        self.preemptions = self.events = 0
        preempt = Scheduler._preempt_request

        def counted(scheduler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            self.preemptions += 1
            return preempt(scheduler, *args, **kwargs)

        Scheduler._preempt_request = counted


def run_ahead(core: Any) -> None:  # noqa: ANN401 - vLLM's EngineCore
    """Two steps at once, as vLLM has it on GPUs; on CPUs it says no, though its worker minds neither way."""
    core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
    core.step_fn = core.step_with_batch_queue


def play(engine: Any, job: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:  # noqa: ANN401 - vLLM's
    """A round's prompts side by side; greedy, every output as long as asked for. Aborted ones end after 5 tokens."""
    asked = vllm.SamplingParams(temperature=0, max_tokens=job["output"], ignore_eos=True, detokenize=False)
    names = []
    for number, ids in enumerate(prompts):
        priority = len(prompts) - number if job["priorities"] else 0
        names.append(f"{id(prompts)}-{number}")
        engine.add_request(names[-1], vllm.TokensPrompt(prompt_token_ids=ids), asked, priority=priority)
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for one in engine.step():
            done[one.request_id] = {"tokens": list(one.outputs[0].token_ids), "hit_tokens": one.num_cached_tokens}
            number = int(one.request_id.rpartition("-")[2])
            ends = job["abort"] and number % job["abort"] == 1 and len(done[one.request_id]["tokens"]) >= 5
            if ends and not one.finished:
                done[one.request_id]["tokens"] = done[one.request_id]["tokens"][:5]
                engine.abort_request([one.request_id])
    return [done[name] for name in names]


def main(job_file: str, out: str) -> None:
    job = json.loads(Path(job_file).read_text("utf-8"))
    watched = Watched()
    if job["scheduler"] is not None:
        job["options"]["scheduler_cls"] = job["scheduler"]
    if job.get("fault") is not None:
        natural_faults.commit(job["fault"])
    options = {"dtype": "float32", "enforce_eager": True, **job["options"]}
    llm = vllm.LLM(model=job["model"], skip_tokenizer_init=True, **options)
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    if job.get("ahead"):
        run_ahead(engine.engine_core.engine_core)
    found = [play(engine, job, prompts) for prompts in job["rounds"]]
    manager = scheduler.kv_cache_manager
    if type(manager).__module__.startswith("hybridkv."):
        manager.cache.check()
    answers = {
        "rounds": found,
        "preemptions": watched.preemptions,
        "usage": manager.usage,
        "manager": type(manager).__module__,
        "blocks": scheduler.kv_cache_config.num_blocks,
    }
    Path(out).write_text(json.dumps(answers), "utf-8")


if __name__ == "__main__":  # vLLM starts its own processes with this module
    main(*sys.argv[1:])
