"""vLLM, with its own scheduler or ours, in a process of its own.

python vllm_engine.py JOB ANSWERS    both JSON files

JOB      {"model": folder, "rounds": [[token ids, ...], ...], "output": tokens, "options": {of vllm.LLM},
          "scheduler": a name or null, "priorities": whether later prompts go first, "abort": every so many-th prompt,
          "ahead": whether steps are scheduled ahead of outputs, "first_runner": whether model runner V1 runs,
          "second_runner": whether V2 is the default, as on GPUs, "fault": of natural_faults, "connector_faults": of
          connector_faults, "one_by_one": whether prompts wait for the last answer, "salts": of prompts, round by round,
          or null, "killed": the round and after how many of its steps this process kills itself, or null}
ANSWERS  {"rounds": [[{"tokens": [...], "hit_tokens": n, "first_s": seconds to the first token}, ...], ...],
          "preemptions": n, "usage": share, "manager": name, "in_flight": most batches in the engine's queue, 0 without
          one, "runner": module of the model runner where it runs in this process, "version": of vLLM,
          "counts": of the connector, "replays": captured graphs that ran in this process}

python vllm_engine.py                a fork for each job or engine, a line of JSON; at its end its exit code

in       {"job": [JOB, ANSWERS], "log": file, "seconds": after which SIGALRM ends it}
in       {"options": of vllm.LLM, "log": file, "environment": variables}, then lines for the fork, and {} to end it
out      {"process": of the fork}, then its lines

in       {"asks": [{"name": ..., "prompt": token ids, "output": tokens, "transfer": kv_transfer_params or null,
                    "abort": whether it is aborted while a connector loads it}, ...],
          "hold": whether the engine stops at the last answer, while others may still read blocks of these requests}
out      {"answers": [{"tokens": [...], "hit_tokens": n, "transfer": kv_transfer_params or null}, ...],
          "loaded": tokens that a connector was to bring, "failed": loads that failed, "preemptions": n,
          "usage": share, "manager": name, "in_flight": most batches in the engine's queue}
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # products of float32 as on CPUs, not in TF32
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler is looked into

import connector_faults
import gpu_defaults
import natural_faults
from vllm.v1.core.sched.scheduler import Scheduler

import vllm


class Watched:
    """An engine whose scheduler is watched: it tells what its outputs do not."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - of vllm.LLM
        self.preemptions = 0
        preempt = Scheduler._preempt_request

        def counted(scheduler: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            self.preemptions += 1
            return preempt(scheduler, *args, **kwargs)

        Scheduler._preempt_request = counted
        gpu_defaults.tune_nothing()
        self._graphs = gpu_defaults.count_replays()
        options = {"dtype": "float32", "enforce_eager": True, **options}
        self.engine = vllm.LLM(skip_tokenizer_init=True, **options).llm_engine
        self.core = self.engine.engine_core.engine_core
        self._manager = self.core.scheduler.kv_cache_manager
        if self.core.batch_queue is not None:
            self.core.batch_queue = gpu_defaults.Counted(maxlen=self.core.batch_queue.maxlen)
        self.loaded = self.failed = 0
        self.counts = Counter[str]()
        if self.core.scheduler.connector is not None:
            self._count_loads(self.core.scheduler.connector)

    def _count_loads(self, connector: Any) -> None:  # noqa: ANN401 - vLLM's
        allocated = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401 - vLLM's
            self.loaded += num_external_tokens
            allocated(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = counted
        heard = connector.update_connector_output

        def failed(output: Any) -> None:  # noqa: ANN401 - vLLM's
            self.failed += len(output.failed_recving or ())
            self.counts.update(counts_of(output.kv_connector_stats))
            heard(output)

        connector.update_connector_output = failed
        counts = connector.get_kv_connector_stats

        def of_scheduler() -> Any:  # noqa: ANN401 - vLLM's
            stats = counts()
            self.counts.update(counts_of(stats))
            return stats

        connector.get_kv_connector_stats = of_scheduler

    def play(self, asks: list[dict[str, Any]], abort: int = 0, *, hold: bool = False) -> list[dict[str, Any]]:
        """``asks`` side by side, to the last block that is handed over; greedy, every output as long as asked for.

        abort: of every so many prompts the second ends after 5 tokens. hold: end at the last answer.
        """
        numbers = {ask["name"]: number for number, ask in enumerate(asks)}
        for ask in asks:
            extra = None if ask.get("transfer") is None else {"kv_transfer_params": ask["transfer"]}
            asked = vllm.SamplingParams(
                temperature=0, max_tokens=ask["output"], ignore_eos=True, detokenize=False, extra_args=extra
            )
            prompt = vllm.TokensPrompt(prompt_token_ids=ask["prompt"])
            if ask.get("salt"):
                prompt["cache_salt"] = ask["salt"]
            self.engine.add_request(ask["name"], prompt, asked, priority=ask.get("priority", 0))
        done: dict[str, Any] = {}
        first: dict[str, float] = {}
        began = perf_counter()
        while self.engine.has_unfinished_requests() or (self.core.scheduler.requests and not hold):
            for one in self.engine.step():
                name, tokens = one.request_id, list(one.outputs[0].token_ids)
                first.setdefault(name, perf_counter() - began)
                done[name] = {"tokens": tokens, "hit_tokens": one.num_cached_tokens, "transfer": one.kv_transfer_params}
                if abort and numbers[name] % abort == 1 and len(tokens) >= 5 and not one.finished:
                    done[name]["tokens"] = tokens[:5]
                    self.engine.abort_request([name])
            for name in ({ask["name"] for ask in asks if ask.get("abort")} - done.keys()) & self.loading():
                done[name] = {"tokens": [], "hit_tokens": 0, "transfer": None}
                self.engine.abort_request([name])
        while not hold and self.core.scheduler.connector is not None and self.core.scheduler.has_requests():
            self.engine.step()  # what the connector has begun
        return [{**done[ask["name"]], "first_s": first.get(ask["name"])} for ask in asks]

    def loading(self) -> set[str]:
        """Names of the requests that wait for a connector."""
        waiting = (one for one in self.core.scheduler.requests.values() if one.status.name == "WAITING_FOR_REMOTE_KVS")
        return {one.request_id.rpartition("-")[0] for one in waiting}  # vLLM appends a random part

    def final_state(self) -> dict[str, Any]:
        """Return the state after the last request. Raise an error if an invariant of our cache is broken."""
        name = type(self._manager).__module__
        if name.startswith("hybridkv."):
            self._manager.cache.check()
            if self._manager.tier is not None:
                self._manager.tier.check()
        queue = self.core.batch_queue
        worker = getattr(self.core.model_executor, "driver_worker", None)  # of the executor of this process alone
        return {
            "runner": None if worker is None else type(worker.worker.model_runner).__module__,
            "loaded": self.loaded,
            "counts": self.counts,
            "failed": self.failed,
            "preemptions": self.preemptions,
            "replays": self._graphs["replays"],
            "usage": self._manager.usage,
            "manager": name,
            "in_flight": 0 if queue is None else queue.longest,
        }


def counts_of(stats: Any) -> dict[str, float]:  # noqa: ANN401 - vLLM's, None for no counts
    """Counts of a connector, or of those in a MultiConnector, which have each their own."""
    if stats is None:
        return {}
    return {name: n for key, one in stats.data.items() for name, n in getattr(one, "data", {key: one}).items()}


def prepare(job: dict[str, Any]) -> None:
    """Make this process what a job asks for."""
    if job.get("fault") is not None:
        natural_faults.commit(job["fault"])
    for fault in job.get("connector_faults") or ():
        connector_faults.commit(fault)
    if job.get("ahead"):
        gpu_defaults.schedule_ahead()
    if job.get("first_runner"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if job.get("second_runner"):
        gpu_defaults.prefer_second_runner()


def end_after(engine: Any, steps: int) -> None:  # noqa: ANN401 - vLLM's
    """Kill this process after some steps."""
    made, left = engine.step, iter(range(steps))

    def step() -> Any:  # noqa: ANN401 - vLLM's
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return made()

    engine.step = step


def do(job_file: str, out: str) -> None:
    """A job, its rounds one after the other."""
    job = json.loads(Path(job_file).read_text("utf-8"))
    if job.get("scheduler") is not None:
        job["options"]["scheduler_cls"] = job["scheduler"]
    prepare(job)
    watched = Watched(model=job["model"], **job["options"])
    found = []
    killed = job.get("killed") or {}
    for number, prompts in enumerate(job["rounds"]):
        if number == killed.get("round"):
            end_after(watched.engine, killed["steps"])
        asks = [{"name": f"{number}-{i}", "prompt": ids, "output": job["output"]} for i, ids in enumerate(prompts)]
        if job.get("priorities"):
            asks = [ask | {"priority": len(prompts) - i} for i, ask in enumerate(asks)]
        if job.get("salts"):
            asks = [ask | {"salt": job["salts"][number]} for ask in asks]
        if job.get("one_by_one"):
            found.append([watched.play([ask])[0] for ask in asks])
        else:
            found.append(watched.play(asks, job.get("abort", 0)))
    answers = {"rounds": found, "version": vllm.__version__, **watched.final_state()}
    Path(out).write_text(json.dumps(answers), "utf-8")


def fork_for_each_line() -> None:
    """vLLM is imported once, before the first fork."""
    assert vllm.LLM  # imports most of vLLM
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        if "log" not in asked:
            continue  # for a fork that has failed
        child = os.fork()
        if child == 0:
            os.environ.update(asked.get("environment", {}))
            with Path(asked["log"]).open("w", encoding="utf-8") as told:
                os.dup2(told.fileno(), 1)
                os.dup2(told.fileno(), 2)
            if "job" in asked:
                signal.setitimer(signal.ITIMER_REAL, asked["seconds"])
                do(*asked["job"])
            else:
                answer(asked["options"], out)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=out, flush=True)


def answer(options: dict[str, Any], out: TextIO) -> None:
    """Lines, until they end or an empty object comes."""
    print(json.dumps({"process": os.getpid()}), file=out, flush=True)
    if options.get("async_scheduling"):
        gpu_defaults.schedule_ahead()
    watched = Watched(**options)
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            break
        found = watched.play(asked["asks"], hold=asked.get("hold", False))
        print(json.dumps({"answers": found, **watched.final_state()}), file=out, flush=True)


if __name__ == "__main__":  # vLLM starts its own processes with this module
    if len(sys.argv) > 1:
        do(*sys.argv[1:])
    else:
        fork_for_each_line()
