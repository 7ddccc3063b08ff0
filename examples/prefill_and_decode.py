"""Two engines, two processes: one computes prompts, the other draws all tokens after the first.

    python examples/prefill_and_decode.py

The prefill engine writes what its cache holds of a request to a file, with the request itself. The decode engine goes
on from there. A file is there as a whole, or not at all. The prefill engine is killed while it computes the last
prompt; then the decode engine computes that prompt itself. The tokens are the same in each case.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from hybridkv import SamplingParams
from hybridkv.runner import Engine, load

MODEL = "tiny:qwen3_next"
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
QUESTIONS = ("What is a KV cache?", "What is a block table?", "Who frees a block?")


def run_prefill(channel: Connection, folder: str) -> None:
    """Run the prefill engine: prompts come in, and the names of their files go out."""
    with Engine(load(MODEL), memory="8MiB") as engine:
        while (asked := channel.recv()) is not None:
            name, prompt, sampling = asked
            with engine.stream(prompt, sampling, request_id=name) as stream:
                next(stream)  # the prompt runs, and the first token is drawn
                engine.export(name, Path(folder) / name)
            channel.send(name)


def main() -> None:
    """Run the decode engine."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, Engine(load(MODEL), memory="8MiB") as engine:
        process = context.Process(target=run_prefill, args=(theirs, folder))
        process.start()
        theirs.close()
        for number, question in enumerate(QUESTIONS):
            name, sampling = f"request {number}", replace(SAMPLING, seed=number)
            mine.send((name, question, sampling))
            if number == len(QUESTIONS) - 1:
                process.kill()
            try:
                engine.resume(Path(folder) / mine.recv(), request_id=name)
            except (EOFError, OSError):  # the other process is gone
                engine.add(question, sampling, request_id=name)
            while not engine.idle:
                for done in engine.step():
                    hit, whole = done.hit_tokens, len(done.prompt_token_ids)
                    print(
                        f"{done.request_id}: {hit} of {whole} prompt tokens came from the other engine, {done.text!r}"
                    )
        process.join()


if __name__ == "__main__":
    main()
