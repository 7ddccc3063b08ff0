"""vLLM as a generator, in a process of its own: python vllm_generate.py JOB ANSWERS, both JSON files.

JOB      {"model": folder, "rounds": [[token ids, ...], ...], "output": tokens, "options": {of vllm.LLM}}
ANSWERS  {"version": of vLLM, "rounds": [[{"tokens": [...], "hit_tokens": n}, ...], ...]}
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import vllm


def answers(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Round by round, a round's prompts side by side; greedy, every output as long as asked for."""
    engine = vllm.LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        **job["options"],
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=job["output"], ignore_eos=True, detokenize=False)
    return [
        [
            {"tokens": list(done.outputs[0].token_ids), "hit_tokens": done.num_cached_tokens}
            for done in engine.generate(
                [vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts], greedy, use_tqdm=False
            )
        ]
        for prompts in job["rounds"]
    ]


def main(job: str, out: str) -> None:
    found = answers(json.loads(Path(job).read_text("utf-8")))
    Path(out).write_text(json.dumps({"version": vllm.__version__, "rounds": found}), "utf-8")


if __name__ == "__main__":  # vLLM starts its own processes with this module
    main(*sys.argv[1:])
