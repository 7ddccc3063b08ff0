"""Compare models of real shapes on a GPU with transformers and vLLM, in at most ten minutes: a table and JSON.

    python bench_gpu.py [--minutes 9] [--json bench_gpu.json] [--models llama-1b,...] [--attention NAMES]

Needs the checkout, a CUDA build of torch and transformers; ``hybridkv[gpu]`` for the Triton kernel. Weights are random
and made on the spot. Prompts have 512 tokens and 64 new ones, in bfloat16. For hits of 90%, the first 460 tokens of a
prompt are one of four prefixes that were computed before the measurement.

    hybridkv      once for every --attention; triton+decode: steps that only decode as CUDA graphs
    continuous    transformers' generate_batch; it rejects recurrent models
    static        transformers' generate, all prompts in one batch
    vllm          if VLLM_PYTHON names a Python with it: the same prompts, dummy weights

``outside`` is the share of a decode step beyond a plain forward pass of the same batch on transformers' own cache.
The code that reads and writes pages is measured first, in bytes per second beside a plain copy
(attention_bandwidth.py). Measurements that do not fit the minutes are left out and listed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybridkv.errors import ConfigError, HybridKVError
from hybridkv.request import SamplingParams
from hybridkv.runner import Engine, EngineOptions, wrap

PROMPT, NEW, SHARED, BEGINNINGS = 512, 64, 460, 4
REQUESTS: Final = (64, 1, 16, 256)
"""What the aims are about first."""
_ONE: Final = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-next-like": {
        "model_type": "qwen3_next",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 0,
        "mlp_only_layers": list(range(24)),
    },
    "nemotron-h-like": {
        "model_type": "nemotron_h",
        "vocab_size": 131_072,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "hybrid_override_pattern": "M-M-M*-M-M-M*-M-M-",
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
TINY: Final = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
"""In place of these fields with --tiny, which shows on any machine that everything runs."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Row:
    """seconds: of all requests together. outside: see above. why: what kept it from running, "" for nothing."""

    model: str
    engine: str
    requests: int
    hits: int
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    outside: float | None = None
    why: str = ""


def made(name: str, device: str, *, tiny: bool) -> PreTrainedModel:
    """Build a model of that shape, in bfloat16 on a GPU."""
    fields = dict(SHAPES[name]) | _ONE | (TINY if tiny else {})
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompts_of(vocabulary: int, requests: int, hits: int, length: int) -> tuple[Prompts, Prompts]:
    """Return prompts to compute first, and ``requests`` prompts that hit ``hits`` percent of their tokens then."""
    draw = torch.Generator().manual_seed(requests + hits)

    def ids(rows: int, tokens: int) -> Prompts:
        found: Prompts = torch.randint(3, vocabulary, (rows, tokens), generator=draw).tolist()
        return found

    if not hits:
        return [], ids(requests, length)
    shared = length * SHARED // PROMPT
    before = ids(BEGINNINGS, shared)
    return before, [[*before[at % BEGINNINGS], *rest] for at, rest in enumerate(ids(requests, length - shared))]


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds until the device has done it."""
    _wait(device)
    begun = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Bench:
    """One model after the other, until ``until`` (time.perf_counter). tiny: shapes of nothing, on any device."""

    def __init__(self, device: str, until: float, attentions: list[str], *, tiny: bool) -> None:
        self.device, self.until, self.attentions, self.tiny = device, until, attentions, tiny
        self.length, self.new = (32, 4) if tiny else (PROMPT, NEW)
        self.counts = (2,) if tiny else REQUESTS

    def rows(self, name: str) -> Iterator[Row]:
        """Of every engine, count and share of hits, what is compared beside each other."""
        model = made(name, self.device, tiny=self.tiny)
        for requests in self.counts:
            for hits in (0, 90):
                before, asked = prompts_of(model.config.vocab_size, requests, hits, self.length)
                for attention in self.attentions:
                    row = Row(name, f"hybridkv, {attention}", requests, hits)
                    yield self._row(row, partial(self._hybridkv, model, before, asked, attention))
                if not hits:
                    yield self._row(Row(name, "static", requests, hits), partial(self._static, model, asked))
                if not (hits or self.tiny):
                    yield self._row(Row(name, "continuous", requests, hits), partial(self._continuous, model, asked))
        del model
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _row(self, row: Row, run: Callable[[], tuple[float, float | None]]) -> Row:
        """``row`` with what ``run`` took, or why it did not run."""
        if time.perf_counter() > self.until:
            return replace(row, why="no time left")
        try:
            seconds, outside = run()
        except (HybridKVError, RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            return replace(row, why=why)
        rate = row.requests * self.new / seconds
        return replace(row, seconds=seconds, tokens_per_second=rate, outside=outside)

    def _hybridkv(self, model: PreTrainedModel, before: Prompts, asked: Prompts, backend: str) -> tuple[float, float]:
        attention, _, compiled = backend.partition("+")
        options = EngineOptions(
            max_running=256, token_budget=8192, attention=attention, self_check=False, compile=compiled or None
        )
        sampling = SamplingParams(max_tokens=self.new, ignore_eos=True)
        memory, longest = ("64MiB", 128) if self.tiny else ("24GiB", self.length + 4 * self.new)
        with Engine(wrap(model), options=options, memory=memory, max_model_len=longest) as engine:
            if compiled and engine.runner.decode_graphs is None:
                raise ConfigError("its steps that only decode run as they are: see the log")
            few = SamplingParams(max_tokens=2, ignore_eos=True)
            engine.generate([*before, asked[0][::-1]], few)
            if compiled:  # captured before the clock runs
                engine.generate([one[3::-1] for one in asked], few)
            seconds = timed(lambda: engine.generate(asked, sampling), self.device)
            step = self._decode_step(engine, asked)
        return seconds, max(0.0, 1 - self._plain_step(model, asked) / step)

    def _decode_step(self, engine: Engine, asked: Prompts) -> float:
        """Seconds of a step in which every request decodes, half of them thrown away to warm up."""
        steps = 2 if self.tiny else 16
        for one in asked:
            engine.add(one, SamplingParams(max_tokens=2 * steps + 32, ignore_eos=True))
        while engine.scheduler.num_waiting:
            engine.step()
        for _ in range(steps):
            engine.step()
        found = timed(lambda: [engine.step() for _ in range(steps)], self.device) / steps
        for live in list(engine._live):
            engine.abort(live)
        return found

    def _plain_step(self, model: PreTrainedModel, asked: Prompts) -> float:
        """Seconds of a forward over a token of each request, behind their prompts on transformers' own cache."""
        ids = torch.tensor(asked, device=self.device)
        with torch.inference_mode():
            cache = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1)
            name = "cache_params" if "cache_params" in cache else "past_key_values"
            held = {name: cache[name]}

            def forwards(count: int) -> None:
                for _ in range(count):
                    model(input_ids=ids[:, -1:], use_cache=True, **held)

            forwards(2)
            return timed(lambda: forwards(8), self.device) / 8

    def _static(self, model: PreTrainedModel, asked: Prompts) -> tuple[float, None]:
        ids = torch.tensor(asked, device=self.device)
        config = GenerationConfig(max_new_tokens=self.new, do_sample=False, pad_token_id=0, eos_token_id=-1)
        kept = {"attention_mask": torch.ones_like(ids), "generation_config": config}
        with torch.inference_mode():
            model.generate(input_ids=ids[:1, :8], attention_mask=torch.ones_like(ids[:1, :8]), max_new_tokens=2)
            return timed(lambda: model.generate(input_ids=ids, **kept), self.device), None

    def _continuous(self, model: PreTrainedModel, asked: Prompts) -> tuple[float, None]:
        config = GenerationConfig(max_new_tokens=self.new, do_sample=False, pad_token_id=0, eos_token_id=-1)

        def run() -> None:
            found = model.generate_batch(inputs=asked, generation_config=config, progress_bar=False)
            if len(found) < len(asked):
                raise RuntimeError(f"{len(found)} of {len(asked)} requests ended")

        return timed(run, self.device), None


_VLLM: Final = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, new, asked = sys.argv[1], int(sys.argv[2]), json.load(open(sys.argv[3]))
llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
          max_model_len=len(asked[0]) + new, gpu_memory_utilization=0.6)
params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": one[::-1]} for one in asked[:1]], params, use_tqdm=False)
begun = time.perf_counter()
llm.generate([{"prompt_token_ids": one} for one in asked], params, use_tqdm=False)
json.dump(time.perf_counter() - begun, open(sys.argv[4], "w"))
"""


def vllm_row(name: str, requests: int, until: float) -> Row:
    """Run the same prompts through vLLM, without hits, in a process of its own."""
    row = Row(name, "vllm", requests, 0)
    config = AutoConfig.for_model(**SHAPES[name], **_ONE)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    _, asked = prompts_of(config.vocab_size, requests, 0, PROMPT)
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        given, taken = Path(folder, "asked.json"), Path(folder, "seconds.json")
        given.write_text(json.dumps(asked), "utf-8")
        command = [os.environ["VLLM_PYTHON"], "-c", _VLLM, folder, str(NEW), str(given), str(taken)]
        try:
            done = subprocess.run(  # noqa: S603 - the Python that was named
                command, capture_output=True, text=True, check=False, timeout=max(1.0, until - time.perf_counter())
            )
        except subprocess.TimeoutExpired:
            return replace(row, why="no time left")
        if done.returncode:
            return replace(row, why=done.stderr.strip().rpartition("\n")[2][:120])
        seconds = float(taken.read_text("utf-8"))
    return replace(row, seconds=seconds, tokens_per_second=requests * NEW / seconds)


def bandwidths() -> list[dict[str, Any]]:
    """Yield a row for each case that attention_bandwidth.py measures."""
    script = Path(__file__).with_name("attention_bandwidth.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)  # noqa: S603
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--attention", default="triton,triton+decode,gather")
    parser.add_argument("--json", type=Path, default=Path("bench_gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="models of nothing, on a CPU where there is no GPU")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.tiny:
        raise SystemExit("error: torch sees no GPU: run this where there is one, or --tiny to see that it runs")
    until = time.perf_counter() + 60 * given.minutes
    bench = Bench(device, until, given.attention.split(","), tiny=given.tiny)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, prompts of {bench.length} tokens, {bench.new} new ones")
    print(f"{'model':<16} {'engine':<18} {'requests':>8} {'hits':>5} {'seconds':>8} {'tokens/s':>9} {'outside':>8}")
    pages = bandwidths() if device == "cuda" else []
    rows: list[Row] = []

    def write() -> None:
        """Replace the file, after every row: a run that is stopped leaves what it measured."""
        document = {"device": name, "torch": torch.__version__, "rows": [asdict(row) for row in rows], "pages": pages}
        given.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    for model in given.models.split(","):
        found = bench.rows(model)
        for row in found:
            rows.append(row)
            outside = "" if row.outside is None else f"{row.outside:.1%}"
            said = row.why or f"{row.seconds:8.3f} {row.tokens_per_second:9.0f} {outside:>8}"
            print(f"{row.model:<16} {row.engine:<18} {row.requests:>8} {row.hits:>4}% {said}", flush=True)
            write()
        if "VLLM_PYTHON" in os.environ and device == "cuda" and time.perf_counter() < until:
            rows.append(vllm_row(model, 64, until))
            print(rows[-1], flush=True)
    write()


if __name__ == "__main__":
    main()
