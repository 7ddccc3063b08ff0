"""Engines with other numbers of ranks find each other's prefixes in a store; each rank is a process with its heads."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_support import generated, greedy, loaded_model, shared_prompts

import warm
from hybridkv.runner import Engine, EngineOptions, plan_for
from hybridkv.runner.tensor_parallel import Ranks
from hybridkv.stores import DiskFolder, StoreChoice, StoreUrl

pytestmark = pytest.mark.usefixtures("warm_ranks")

TOKENS = 8
PROMPTS = shared_prompts(2, 6, prefix=40, longest=9)
TAIL = [65, 66, 67]
MARK_DIGITS = 98
"""Of the file of a mark: identity, kind and hash."""
CHECKSUM = 16
"""Bytes before a block in its file."""
KEY = b"a key of 16 bytes"
OPTIONS = EngineOptions(self_check=False, max_running=2)

RANK = """
import json, sys
from datetime import timedelta
sys.path[:0] = {path!r}
import torch.distributed as dist
from rank_models import share_of
from runner_support import loaded_model
from test_store_ranks import KEY, engine, served, url
from hybridkv.runner import ModelShare, follow, lead, wrap
from hybridkv.wire import Listener, connect

rank, ranks = int(sys.argv[1]), {ranks}
dist.init_process_group("gloo", "file://" + {meeting!r}, timedelta(seconds=60), ranks, rank)
whole = loaded_model({name!r}).model
loaded = wrap(share_of(whole, rank, ranks), share=ModelShare.of(whole, rank, ranks))
listeners = [Listener(("127.0.0.1", 0), authkey=KEY) for _ in range(1, ranks)] if not rank else []
places = [[one.address for one in listeners]]
dist.broadcast_object_list(places)
{before}
with engine(loaded, url({store!r})) as running:
    if rank:
        follow(running, connect(places[0][rank - 1], authkey=KEY))
    else:
        lead(running, [one.accept(timeout_s=60) for one in listeners])
        print(json.dumps(served(running, {prompts!r})), flush=True)
"""

DIES = """
if rank:
    import os, signal
    from hybridkv.stores import SharedStore
    puts, put = [], SharedStore.put
    def dies(self, keys, blocks):
        puts.append(1)
        if len(puts) > {puts}:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, keys, blocks)
    SharedStore.put = dies
"""


def engine(loaded: Any, store: StoreChoice) -> Engine:  # noqa: ANN401  # a LoadedModel
    plan = plan_for(loaded, [120] * 2)
    return Engine(loaded, plan, OPTIONS, host_memory="8MiB", store=store)


def url(store: object) -> StoreUrl:
    return StoreUrl(f"file://{store}?timeout_s=20")


def served(running: Engine, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Generate one after the other; return the hit and the tokens of each."""
    done = []
    for prompt in prompts:
        done += running.generate([prompt], greedy(TOKENS))
        running.settle_tiers()
    return [(one.hit_tokens, list(one.token_ids)) for one in done]


def by_ranks(
    name: str, ranks: int, prompts: list[list[int]], folder: Path, *, store: Path, before: str = ""
) -> list[tuple[int, list[int]]]:
    """What an engine of some ranks says of the prompts; nothing if ``before`` kills a rank."""
    folder.mkdir()
    script, values = folder / "rank.py", {"path": sys.path, "meeting": str(folder / "meeting"), "store": str(store)}
    script.write_text(RANK.format(name=name, ranks=ranks, prompts=prompts, before=before, **values))
    with ExitStack() as stack:
        started = [
            stack.enter_context(warm.Warm([script, str(rank)], environment={"OMP_NUM_THREADS": "1"}))
            for rank in range(ranks)
        ]
        outputs = [one.communicate(timeout=120) for one in started]
    if before:
        return []
    assert [one.returncode for one in started] == [0] * ranks, outputs
    return [(hit, tokens) for hit, tokens in json.loads(outputs[0][0].splitlines()[-1])]


def expected(name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [list(generated(loaded_model(name), prompt, TOKENS)) for prompt in prompts]


def turns(name: str) -> list[list[int]]:
    return [[*prompt, *made, *TAIL] for prompt, made in zip(PROMPTS, expected(name, PROMPTS), strict=True)]


@pytest.mark.parametrize(
    ("name", "ranks", "others"),
    [
        *(("llama", 2, 1), ("llama", 1, 4), ("llama", 4, 2)),
        *(("qwen3_next", 2, 1), ("qwen3_next", 1, 2), ("deepseek_v3", 4, 1), ("deepseek_v3", 1, 2)),
    ],
)
def test_prefixes_of_some_ranks_are_found_by_others(name: str, ranks: int, others: int, tmp_path: Path) -> None:
    """Four ranks of two KV heads: each head is copied, and written once."""
    first, again = PROMPTS, turns(name)
    for number, prompts in ((ranks, first), (others, again)):
        if number == 1:
            with engine(loaded_model(name), url(tmp_path / "store")) as running:
                said = served(running, prompts)
        else:
            said = by_ranks(name, number, prompts, tmp_path / f"of {number}", store=tmp_path / "store")
        assert [tokens for _, tokens in said] == expected(name, prompts)
    assert [hit for hit, _ in said] == [len(prompt) - len(TAIL) - 1 for prompt in again]


def served_by(
    name: str, ranks: int | str, prompts: list[list[int]], folder: Path, disk: DiskFolder | None = None
) -> list[tuple[int, list[int]]]:
    """What an engine says of the prompts, with the store in ``folder`` or a disk.

    ``ranks``: 1, a number of ranks whose recurrent layers transformers' plan leaves whole, or "cut": 2 by hand.
    """
    store = folder / "store"
    if ranks == "cut":
        return by_ranks(name, 2, prompts, folder / "cut", store=store)
    choice = disk or url(store)
    if ranks == 1:
        with engine(loaded_model(name), choice) as running:
            return served(running, prompts)
    with (
        Ranks(f"tiny:{name}", int(ranks)) as whole,
        whole.engine(options=OPTIONS, memory="4MiB", max_model_len=120, host_memory="8MiB", store=choice) as running,
    ):
        return served(running, prompts)


@pytest.mark.parametrize(
    ("name", "ranks", "others"),
    [
        *(("qwen3_next", 1, 2), ("qwen3_next", 2, "cut"), ("olmo_hybrid", 1, 2)),
        *(pytest.param("qwen3_next", *of, marks=pytest.mark.thorough) for of in ((2, 1), ("cut", 2))),
        pytest.param("olmo_hybrid", 2, 1, marks=pytest.mark.thorough),
        *(pytest.param("kimi_linear", *of, marks=pytest.mark.thorough) for of in ((4, 1), (1, 4), (2, 4), (4, 2))),
        *(pytest.param("qwen3_5", *of, marks=pytest.mark.thorough) for of in ((2, 1), (1, 2))),
    ],
)
def test_whole_states_of_some_ranks_are_found_by_others(
    name: str, ranks: int | str, others: int | str, tmp_path: Path
) -> None:
    """Transformers' plan leaves states whole on each rank, and where a norm spans all heads, keys and values, too."""
    for number, prompts in ((ranks, PROMPTS), (others, turns(name))):
        said = served_by(name, number, prompts, tmp_path)
        assert [tokens for _, tokens in said] == expected(name, prompts)
    assert [hit for hit, _ in said] == [len(prompt) - len(TAIL) - 1 for prompt in turns(name)]


@pytest.mark.parametrize(("ranks", "others"), [(2, 2), pytest.param(1, 2, marks=pytest.mark.thorough)])
def test_ranks_resume_from_their_disk_folders(ranks: int, others: int, tmp_path: Path) -> None:
    """Each writes its own; rank 0 looks for the blocks of all, and rank 1 reads the states that rank 0 wrote."""
    name, disk = "qwen3_next", DiskFolder(tmp_path / "disk", "4MiB")
    for number, prompts in ((ranks, PROMPTS), (others, turns(name))):
        said = served_by(name, number, prompts, tmp_path, disk)
        assert [tokens for _, tokens in said] == expected(name, prompts)
    assert [hit for hit, _ in said] == [len(prompt) - len(TAIL) - 1 for prompt in turns(name)]
    folders = [file.relative_to(tmp_path).parent.as_posix() for file in sorted(tmp_path.rglob("blocks"))]
    assert folders == ["disk", "disk/rank-1"]


def test_ranks_with_whole_states_store_what_one_process_stores(tmp_path: Path) -> None:
    """Equal keys and sizes. Blocks are equal but for rounding, and marks bit for bit."""
    stored = []
    for ranks in (1, 2):
        served_by("qwen3_next", ranks, PROMPTS, tmp_path / str(ranks))
        files = [file for file in (tmp_path / str(ranks) / "store").rglob("*") if file.is_file()]
        stored.append({file.name: file.read_bytes()[CHECKSUM:] for file in files})
    one, two = stored
    assert one.keys() == two.keys()
    for name, block in one.items():
        if len(name) == MARK_DIGITS:
            assert block == two[name]
        else:
            values = [np.frombuffer(of, np.float32) for of in (block, two[name])]
            np.testing.assert_allclose(values[1], values[0], rtol=1e-3, atol=1e-3)
            assert values[0].any()


@pytest.mark.parametrize("puts", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_blocks_that_a_dead_rank_did_not_write_are_misses(name: str, puts: int, tmp_path: Path) -> None:
    """Rank 1 is killed when it writes. Rank 0 has written its own shares, and the mark that promises them all."""
    store = tmp_path / "store"
    by_ranks(name, 2, PROMPTS, tmp_path / "dies", store=store, before=DIES.format(puts=puts))
    marks = [file for file in store.rglob("*") if len(file.name) == MARK_DIGITS]
    assert len(marks) == puts + 1
    again = turns(name)
    with engine(loaded_model(name), url(store)) as running:
        said = served(running, again)
    assert [tokens for _, tokens in said] == expected(name, again)
    assert said[0][0] == (len(PROMPTS[0]) - 1 if puts else 0)
