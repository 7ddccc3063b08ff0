"""vLLM in a process that lives: a line of JSON in, a line of JSON out, until the lines end.

python pd_engine.py OPTIONS     OPTIONS: of vllm.LLM, JSON
in      {"asks": [{"name": ..., "prompt": token ids, "output": tokens, "transfer": kv_transfer_params or null}, ...]}
out     {"answers": [{"tokens": [...], "hit_tokens": n}, ...], "preemptions": n, "usage": share, "manager": name}
"""

import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its scheduler is looked into

from vllm_engine import Watched

import vllm


def play(engine: Any, scheduler: Any, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: ANN401 - vLLM's
    """``asks`` side by side, to the last block that is handed over."""
    for ask in asks:
        extra = None if ask["transfer"] is None else {"kv_transfer_params": ask["transfer"]}
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=ask["output"], ignore_eos=True, detokenize=False, extra_args=extra
        )
        engine.add_request(ask["name"], vllm.TokensPrompt(prompt_token_ids=ask["prompt"]), asked)
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests() or scheduler.requests:
        for one in engine.step():
            done[one.request_id] = {"tokens": list(one.outputs[0].token_ids), "hit_tokens": one.num_cached_tokens}
    return [done[ask["name"]] for ask in asks]


def main(options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")  # before vLLM logs to it
    os.dup2(2, 1)
    watched = Watched()
    llm = vllm.LLM(skip_tokenizer_init=True, enforce_eager=True, **{"dtype": "float32", **options})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    for line in sys.stdin:
        found = play(llm.llm_engine, scheduler, json.loads(line)["asks"])
        ours = type(manager).__module__.startswith("hybridkv.")
        if ours:
            manager.cache.check()
        told = {
            "answers": found,
            "preemptions": watched.preemptions,
            "usage": manager.usage,
            "ours": ours,
        }
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":  # vLLM starts its own processes with this module
    main(json.loads(sys.argv[1]))
