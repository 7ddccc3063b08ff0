"""What ``vllm serve`` starts with the options of docs/vllm.md, asked by OpenAI's SDK: ``make test-vllm-engine ...``.

Stock, the reference layout and the natural layout answer the same prompts, one after the other: tokens and the metrics
of the server's prefix cache must be those of stock; the natural layout may have more hits. KV events are subscribed to
as a router does, and decoded by vLLM's own classes: the reference layout's must be those of stock, the natural layout's
name the tokens of prompts and outputs. Prints a table in Markdown.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import openai
import zmq
from generate_duel import MATCHES, say
from generation import make_rounds
from generators import OUTPUT, Plain
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from hybridkv.runner import tiny_model, wrap

SEED, VOCABULARY = 0, 128
STARTS_WITHIN_S, STOPS_WITHIN_S, ANSWERS_WITHIN_S = 600.0, 60.0, 120.0
SUBSCRIBED_WITHIN_S, LAST_EVENTS_WITHIN_MS = 2.0, 3000
QUERIES, HITS, USAGE = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:kv_cache_usage_perc"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # what vLLM's keys begin with
}
RAW_EVENTS = ("--additional-config", '{"hybridkv": {"kv_events": "raw"}}')
NATURAL = ("--scheduler-cls", "hybridkv.vllm.NaturalScheduler", "--worker-cls", "hybridkv.vllm.NaturalWorker")


@dataclass(frozen=True, slots=True)
class Line:
    """name, and what is typed behind ``vllm serve MODEL``. more: hits than stock are right."""

    name: str
    options: Sequence[str]
    more: bool = False


LINES = (
    Line("stock", ()),
    Line("reference", ("--scheduler-cls", "hybridkv.vllm.AsyncScheduler", *RAW_EVENTS)),
    Line("natural", ("--no-enable-prefix-caching", *NATURAL), more=True),
)


class Answered(NamedTuple):
    """outputs: token ids by prompt. metrics: the server's own, once all is answered. events: vLLM's, in order."""

    outputs: list[list[int]]
    metrics: Mapping[str, float]
    events: list[Any]


def model_with_words(folder: Path) -> Plain:
    """A tiny Llama and a tokenizer of as many words."""
    match = MATCHES[0]
    model = tiny_model(match.name, SEED, match.fields)
    model.save_pretrained(folder)
    add_words(folder, VOCABULARY)
    return Plain(wrap(model, name=match.name))


def add_words(folder: Path, vocabulary: int) -> None:
    """Save a tokenizer of as many words beside the model."""
    words = models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0")  # noqa: S106 - a word
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(folder)  # noqa: S106 - same


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def server(model: Path, options: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Its address. Ended behind the block. environment: variables of its own."""
    port = free_port()
    memory = ("--kv-cache-memory-bytes", str(1 << 30))
    sizes = ("--max-model-len", "320", "--block-size", "32", "--dtype", "float32", "--enforce-eager", *memory)
    # what ``vllm serve`` runs; the command itself asks for metadata of vllm, and the CPU build's are vllm-cpu's
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    place = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny")
    log = model.with_name(f"server-{port}.log")
    with log.open("w", encoding="utf-8") as told:
        running = subprocess.Popen(  # noqa: S603 - vLLM's own
            [*command, *place, *sizes, *options],
            env={**os.environ, **ENVIRONMENT, **(environment or {})}, stdout=told, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/health", running, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """End a server that leads a process group.

    While its engine still imports, which takes minutes on a busy machine, it notes SIGTERM and goes on.
    """
    running.terminate()
    try:
        running.wait(STOPS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # with its engine
        running.wait()


def wait_for(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until and running.poll() is None:
        try:
            with urlopen(address, timeout=5):  # noqa: S310 - loopback
                return
        except URLError:
            time.sleep(1)
    raise SystemExit(f"vllm serve did not start:\n{log.read_text('utf-8')[-3000:]}")


@contextmanager
def subscribed(endpoint: str) -> Iterator[Callable[[], list[Any]]]:
    """What takes all events so far, decoded as vLLM has them."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    with zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.connect(endpoint)
        heard.subscribe(b"")
        time.sleep(SUBSCRIBED_WITHIN_S)

        def take() -> list[Any]:
            found = list[Any]()
            while heard.poll(LAST_EVENTS_WITHIN_MS):
                found += decoder.decode(heard.recv_multipart()[-1]).events
            return found

        yield take


def ask(address: str, prompts: Sequence[Sequence[int]]) -> Answered:
    outputs = [tokens_of(address, prompt, OUTPUT) for prompt in prompts]
    return Answered(outputs, metrics(address), [])


def tokens_of(address: str, prompt: Sequence[int], count: int, **more: object) -> list[int]:
    """An output of ``count`` tokens. more: of the body."""
    answer = answer_of(address, prompt, count, **more)
    return list(answer.choices[0].model_extra["token_ids"])  # type: ignore[index] # vLLM's field


def answer_of(address: str, prompt: Sequence[int], count: int, **more: object) -> openai.types.Completion:
    """As tokens_of, the whole answer."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=ANSWERS_WITHIN_S)
    return client.completions.create(
        model="tiny",
        prompt=list(prompt),
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )


def metrics(address: str) -> dict[str, float]:
    """A server's, by name, labels left out."""
    with urlopen(f"{address}/metrics", timeout=ANSWERS_WITHIN_S) as page:  # noqa: S310 - loopback
        said = page.read().decode()
    lines = (line.rpartition(" ") for line in said.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


def unexplained_blocks(found: Answered, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """What events of blocks say that nobody asked or answered: chains of blocks are beginnings of texts."""
    texts = [[*prompt, *output] for prompt, output in zip(prompts, found.outputs, strict=True)]
    known = dict[Any, list[int]]()
    for event in found.events:
        if not isinstance(event, BlockStored):
            continue
        before = [] if event.parent_block_hash is None else known.get((event.group_idx, event.parent_block_hash))
        if before is None:
            yield f"a block behind {event.parent_block_hash}, which was not told"
            continue
        for number, key in enumerate(event.block_hashes):
            before = [*before, *event.token_ids[number * event.block_size : (number + 1) * event.block_size]]
            known[event.group_idx, key] = before
    yield from (f"{ids} was stored" for ids in known.values() if not any(text[: len(ids)] == ids for text in texts))
    if not known:
        yield "no block was told"


def faults(line: Line, stock: Answered, found: Answered) -> Iterator[str]:
    """What is not as it should be."""
    if not line.more and found.events != stock.events:
        yield f"{len(found.events)} events, not the {len(stock.events)} of stock"
    for number, (theirs, ours) in enumerate(zip(stock.outputs, found.outputs, strict=True)):
        if theirs != ours:
            yield f"prompt {number}: {theirs}, {line.name} {ours}"
    hits = found.metrics[HITS]
    if found.metrics[QUERIES] != stock.metrics[QUERIES] or (line.more and hits < stock.metrics[HITS]):
        yield f"{line.name} hit {hits} of {found.metrics[QUERIES]}, stock {stock.metrics[HITS]}"
    if not line.more and hits != stock.metrics[HITS]:
        yield f"{line.name} hit {hits}, stock {stock.metrics[HITS]}"
    if found.metrics[USAGE]:
        yield f"{line.name} has {found.metrics[USAGE]} of its blocks in use at the end"


def main() -> int:
    wrong = 0
    say("| vllm serve | prompts | tokens asked for | hit, of the server's metrics | KV events | |")
    say("|---|--:|--:|--:|--:|---|")
    with TemporaryDirectory() as name:
        model = Path(name) / "model"
        plain = model_with_words(model)
        prompts = [prompt for one in make_rounds(SEED, plain.generate) for prompt in one.prompts]
        stock = None
        for line in LINES:
            endpoint = f"ipc://{model.with_name('events')}"  # vLLM binds those, and tcp://*: on all addresses
            told_at = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
            options = (*line.options, "--kv-events-config", json.dumps(told_at))
            with server(model, options) as address, subscribed(endpoint) as take:
                found = ask(address, prompts)._replace(events=take())
            stock = stock or found
            bad = [*faults(line, stock, found), *unexplained_blocks(found, prompts)]
            asked, hits = (f"{found.metrics[what]:,.0f}" for what in (QUERIES, HITS))
            told = f"{len(found.events)}"
            say(
                f"| {line.name} | {len(prompts)} | {asked} | {hits} | {told} | "
                f"{f'**{len(bad)} faults**' if bad else 'equal'} |"
            )
            for one in bad[:8]:
                say(one)
            wrong += len(bad)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
