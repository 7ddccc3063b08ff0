"""KV events of TierConnector beside stock's, as subscribers of stock's publisher get them: ``make test-vllm-engine``.

Two processes run one after the other with the same disk, and with little host memory. Blocks that are told to lie in
host memory or on the disk were told of the device with the same tokens, and lie there, and no others do.

    python tier_events.py                  both
    python tier_events.py FOLDER NUMBER    one of them
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import zmq
from engine_duel import MODELS, SEED
from generate_duel import say
from generation import make_rounds
from generators import OUTPUT, Plain
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm_engine import Watched

from hybridkv.runner import tiny_model, wrap

MODEL = "granite_hybrid"
SALTS = ("a", None, "a", "b", None)
HOST_MEMORY = "300KiB"
FIELDS = ("block_size", "lora_id", "lora_name", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
Place = tuple[int, Any]
connector_of_worker: Any = get_kv_transfer_group


class Follower:
    """What events say.

    told: of the device's blocks. lying: blocks by medium. faults: what cannot be. gone: removed blocks, by medium.
    """

    def __init__(self) -> None:
        self.told = dict[Place, Any]()
        self.by_tiers = dict[Place, Any]()
        self.lying = {"GPU": set[Place](), "CPU": set[Place](), "STORAGE": set[Place]()}
        self.gone = dict.fromkeys(self.lying, 0)
        self.faults = list[str]()

    def follow(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.lying["GPU"].clear()
            return
        if event.locality != ("LOCAL" if event.medium == "STORAGE" else None):
            self.faults.append(f"the locality of {event.medium} is {event.locality}")
        for number, block_hash in enumerate(event.block_hashes):
            place = event.group_idx, block_hash
            lying = self.lying[event.medium]
            if isinstance(event, BlockRemoved):
                self.gone[event.medium] += 1
                if place not in lying and event.medium != "GPU":  # stock tells a block with two copies twice
                    self.faults.append(f"a block of {event.medium} is removed that was not there")
                lying.discard(place)
                continue
            if place in lying and event.medium != "GPU":
                self.faults.append(f"a block of {event.medium} is stored twice")
            lying.add(place)
            size = event.block_size
            parent = event.block_hashes[number - 1] if number else event.parent_block_hash
            extra = None if event.extra_keys is None else event.extra_keys[number]
            tokens = event.token_ids[number * size : (number + 1) * size]
            told = [parent, tokens, extra, *(getattr(event, name) for name in FIELDS)]
            (self.told if event.medium == "GPU" else self.by_tiers)[place] = told

    def different(self) -> int:
        """Blocks of which tiers say something else than the device."""
        return sum(self.told.get(place) != told for place, told in self.by_tiers.items())


def stores(kind: str) -> set[Place]:
    """The blocks that a store of this process has, by the keys that it has."""
    stack = connector_of_worker()._worker._prefetcher._store
    found = dict(zip(stack.names, stack._stores, strict=True))
    every = found["host"]._blocks if kind == "CPU" else found["disk"]._slots.entries
    return {(int.from_bytes(key[24:26], "little"), maybe_convert_block_hash(key[26:])) for key in every}


def subscriber() -> Any:  # noqa: ANN401 - pyzmq's types hide what poll returns
    return zmq.Context.instance().socket(zmq.SUB)


class Published:
    """What stock's publisher of an engine sends, read by a subscriber, and what it says."""

    def __init__(self, folder: Path) -> None:
        (match,) = (one for one in MODELS if one.name == MODEL)
        self._socket = subscriber()
        self._socket.set_hwm(0)
        port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._socket.subscribe(b"")
        tiers = {"host_memory": HOST_MEMORY, "disk": str(folder / "disk"), "disk_memory": "64MiB"}
        self.engine = Watched(
            model=str(folder / "model"), max_model_len=320, block_size=32, enable_prefix_caching=True,
            num_gpu_blocks_override=22, **match.options,
            kv_events_config={
                "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}",
            },
            kv_transfer_config={
                "kv_connector": "TierConnector", "kv_connector_module_path": "hybridkv.vllm", "kv_role": "kv_both",
                "kv_connector_extra_config": tiers,
            },
        )  # fmt: skip
        self.follower, self.batches = Follower(), 0
        self._expected = 0
        publisher: Any = self.engine.core.scheduler.kv_event_publisher
        for _ in range(600):
            publisher.publish(KVEventBatch(ts=0.0, events=[]))  # lost until ZeroMQ knows of the subscriber
            if self._socket.poll(100):
                break
        while self._socket.poll(1_000):
            self._socket.recv_multipart()
        self._publish: Any = publisher.publish
        publisher.publish = self._counted

    def _counted(self, batch: Any) -> None:  # noqa: ANN401 - vLLM's
        self._expected += 1
        self._publish(batch)

    def catch_up(self) -> None:
        """Report what stores did last in one more step, and follow all that was published."""
        connector_of_worker()._worker._prefetcher._writer.submit(lambda: None).result()
        self.engine.play([{"name": f"last {self.batches}", "prompt": [40 + self.batches % 50], "output": 2}])
        while self.batches < self._expected:
            if not self._socket.poll(60_000):
                raise TimeoutError(f"{self.batches} of {self._expected} batches came, and none for a minute")
            self.batches += 1
            for event in msgspec.msgpack.decode(self._socket.recv_multipart()[-1], type=KVEventBatch).events:
                self.follower.follow(event)

    def misplaced(self, before: set[Place]) -> Iterator[str]:
        """Blocks that do not lie where they are told to lie. before: on the disk when this process began."""
        for medium, untold in (("CPU", set[Place]()), ("STORAGE", before)):
            there, told = stores(medium), self.follower.lying[medium]
            if missing := there - told - untold:
                yield f"of {len(there)} blocks in {medium}, {len(missing)} are not told"
            if wrong := told - there:
                yield f"{len(wrong)} blocks are told to lie in {medium} and do not"


def run(folder: Path, *, again: bool) -> Iterator[str]:
    """Play all rounds in this process, and yield what is wrong."""
    published = Published(folder)
    follower, before = published.follower, stores("STORAGE")
    rounds = msgspec.json.decode((folder / "rounds.json").read_bytes())
    for number, (prompts, salt) in enumerate(zip(rounds, SALTS, strict=True)):
        asks = [{"name": f"{number}-{at}", "prompt": one, "output": OUTPUT} for at, one in enumerate(prompts)]
        published.engine.play([ask | {"salt": salt} for ask in asks])
        published.catch_up()
        yield from (f"round {number}: {one}" for one in published.misplaced(before))
    yield from follower.faults
    if different := follower.different():
        yield f"{different} blocks are told with other tokens or keys than those of the device"
    if not follower.gone["CPU"]:
        yield "nothing made room in host memory"
    of_first = len(follower.lying["STORAGE"] & before)
    if again and not of_first:
        yield "no block of the first process is told"
    cells = ["second" if again else "first", published.batches, len(follower.lying["CPU"]), follower.gone["CPU"],
             len(follower.lying["STORAGE"]), of_first, len(follower.by_tiers)]  # fmt: skip
    say(f"| {' | '.join(map(str, cells))} |")
    published.engine.engine.reset_prefix_cache(reset_connector=True)
    published.catch_up()
    for medium, there in follower.lying.items():
        if there:
            yield f"after a reset there are {len(there)} blocks in {medium}"


def main(arguments: Sequence[str]) -> int:
    if arguments:
        wrong = list(run(Path(arguments[0]), again=arguments[1] == "1"))
        for line in wrong[:20]:
            say(line)
        return int(bool(wrong))
    (match,) = (one for one in MODELS if one.name == MODEL)
    model = tiny_model(match.name, SEED, match.fields)
    rounds = make_rounds(SEED, Plain(wrap(model, name=match.name)).generate)
    say("| process | batches | in host memory | made room | on the disk | of the first | blocks told by tiers |")
    say("|---|--:|--:|--:|--:|--:|--:|")
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        (folder / "rounds.json").write_bytes(msgspec.json.encode([one.prompts for one in rounds]))
        ended = [subprocess.run([sys.executable, __file__, name, str(number)], check=False) for number in range(2)]  # noqa: S603 - this script
    return int(any(one.returncode for one in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
