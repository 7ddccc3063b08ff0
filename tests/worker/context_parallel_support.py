"""The real control plane in this process, its Steps run by workers: here, or in processes that hold a share each.

Scheduler -> Step -> every rank: tables, slots of its own tokens, write_kv, paged_attention, combine_over_ranks
          <- StepResult, logits of every token
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed
from attention_support import local_slot
from tiny_transformer import VOCABULARY, TinyTransformer

from hybridkv.cache import KVCacheManager
from hybridkv.planner import KVCacheConfig, plan
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Scheduler, SchedulerLimits
from hybridkv.step import Csr, Step, StepResult
from hybridkv.worker import (
    BlockCopier,
    ContextShare,
    KVPages,
    MultiGroupBlockTable,
    PagedBatch,
    PagedStorage,
    PageOrder,
    WriteSlots,
    combine_over_ranks,
    paged_attention,
    paged_batch,
    parts_of,
    with_sink,
    write_kv,
    write_latent,
    write_slots,
)

BUDGET, LONGEST = 40, 256


@dataclass(frozen=True)
class Setting:
    """A model on ranks. damage: what one worker does wrong, "" for nothing."""

    model: str
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    layout: str = "natural"
    order: PageOrder = PageOrder.NHD
    damage: str = ""
    block_size: int = 16

    @property
    def ranks(self) -> int:
        return self.dcp * self.pcp

    def share(self, rank: int) -> ContextShare:
        return ContextShare.of_ranks(
            dcp_size=self.dcp,
            dcp_rank=rank % self.dcp,
            pcp_size=self.pcp,
            pcp_rank=rank // self.dcp,
            interleave=self.interleave,
        )

    def config(self) -> KVCacheConfig:
        model = TinyTransformer(self.model, self.block_size).planned()
        return plan(
            model,
            "2MiB",
            max_model_len=LONGEST,
            max_batched_tokens=BUDGET,
            dcp=self.dcp,
            pcp=self.pcp,
            layout=self.layout,
        ).config


class Worker:
    """One rank: the arena of its share, block tables of all ranks, and the model. group: of the ranks, None alone."""

    def __init__(
        self, setting: Setting, config: KVCacheConfig, rank: int, group: torch.distributed.ProcessGroup | None
    ) -> None:
        self.setting, self.config, self.group = setting, config, group
        self.share = setting.share(rank)
        self.model = TinyTransformer(setting.model, setting.block_size)
        layout = {
            name: parts_of(spec)
            for one in config.groups
            for name, spec in zip(one.layer_names, one.layer_specs, strict=True)
        }
        self.storage = PagedStorage(config, layout, order=setting.order)
        self.copier = BlockCopier(self.storage)
        if not setting.damage:
            self.storage.arena.fill_(255)  # NaN in every dtype: what nobody wrote may reach nobody
        self.group_of = {name: number for number, one in enumerate(config.groups) for name in one.layer_names}
        sizes = [setting.block_size * setting.ranks for _ in config.groups]
        self.tables = MultiGroupBlockTable(8, LONGEST, BUDGET, False, "cpu", sizes)  # noqa: FBT003 - vLLM's positions
        self.names: dict[int, str] = {}

    def execute(self, step: Step) -> tuple[StepResult, torch.Tensor]:
        """The result, with tokens that depend on nothing computed, and float32[tokens, vocabulary]."""
        self.tables.apply(step)
        self.tables.commit_block_table(8)
        self.names |= {new.row: new.request_id for new in step.new_rows}
        if len(step.zero) or any(copy.stage != "before" for copy in step.copies):
            raise AssertionError("only attention is expected here")
        self.copier.execute_before(step)
        ends = (step.num_computed + step.num_scheduled).tolist()
        sampled = [
            [forced_token(self.names[row], end)] if samples else []
            for row, end, samples in zip(step.rows.tolist(), ends, step.samples.tolist(), strict=True)
        ]
        result = StepResult(step.id, Csr.from_lists(sampled))
        return result, self._forward(step) if step.num_tokens else torch.empty(0, VOCABULARY)

    def _forward(self, step: Step) -> torch.Tensor:
        counts, computed = step.num_scheduled.tolist(), step.num_computed.tolist()
        positions = [p for first, n in zip(computed, counts, strict=True) for p in range(first, first + n)]
        owners = np.repeat(step.rows, step.num_scheduled).tolist()
        slots = [self._slots(g, owners, positions) for g in range(len(self.config.groups))]
        batches = [self._batch(step, g) for g in range(len(self.config.groups))]

        def attend(number: int, query: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            group = self.group_of[f"layer{number}"]
            return self._attend(number, query, states, slots[group], batches[group])

        tokens = torch.from_numpy(step.token_ids.values.astype(np.int64))
        return self.model.forward(tokens, torch.tensor(positions), attend)

    def _slots(self, group: int, owners: list[int], positions: list[int]) -> WriteSlots:
        table = self.tables[group].get_numpy_array()
        slots = [
            local_slot(table[row].tolist(), p, self.setting.block_size, self.share)
            for row, p in zip(owners, positions, strict=True)
        ]
        if self.setting.damage == "slots" and self.share.rank == self.share.size - 1:
            slots = [slot ^ 1 if slot >= 0 else -1 for slot in slots]
        return write_slots(torch.tensor(slots), self.config.blocks_of(group), self.setting.block_size)

    def _batch(self, step: Step, group: int) -> PagedBatch:
        share = self.share
        if self.setting.damage == "tail" and share.rank:  # takes its own tokens for those of the rank before
            share = ContextShare(share.size, share.rank - 1, share.interleave)
        return paged_batch(
            [0, *np.cumsum(step.num_scheduled).tolist()],
            (step.num_computed + step.num_scheduled).tolist(),
            self.tables[group].get_device_tensor()[step.rows],
            block_size=self.setting.block_size,
            num_blocks=self.config.blocks_of(group),
            share=share,
        )

    def _attend(
        self,
        number: int,
        query: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
        slots: WriteSlots,
        batch: PagedBatch,
    ) -> torch.Tensor:
        views, how = self.storage.views[f"layer{number}"], self.model.attention(number)
        if self.model.kinds[number] == "mla":
            write_latent(slots, views[0], *states)
            pages = KVPages.of_latent(views[0], states[0].shape[1])
        else:
            pages = KVPages.of_views(views, self.setting.order)
            write_kv(slots, pages, *states)
        out, lse = paged_attention(query, pages, batch, how.scale, mask=how.mask)
        if self.group is not None and self.setting.damage != "alone":
            out, lse = combine_over_ranks(out, lse, self.group)
        if how.sinks is not None and self.setting.damage != "sink":
            out, lse = with_sink(out, lse, how.sinks)
        return out


def forced_token(request_id: str, position: int) -> int:
    """What is "sampled": the same whatever ran, so that runs can be compared."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % VOCABULARY


# -- the processes


class Ranks:
    """``size`` processes, started once, that run one setting after the other; each a Worker over gloo."""

    def __init__(self, size: int, folder: Path) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.size = size
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends ``serve``
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def begin(self, setting: Setting, config: KVCacheConfig) -> None:
        """From now on Steps are of this setting."""
        for pipe in self._pipes:
            pipe.send((setting, config))

    def execute(self, step: Step) -> tuple[StepResult, torch.Tensor]:
        """What the ranks say, which is the same to the bit."""
        for pipe in self._pipes:
            pipe.send(step)
        answers = [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        first = answers[0]
        for result, logits in answers[1:]:
            assert result.sampled.values.tolist() == first[0].sampled.values.tolist()
            assert np.array_equal(logits, first[1]), f"the ranks disagree in step {step.id}"
        return first[0], torch.from_numpy(first[1])

    @staticmethod
    def _answer(rank: int, pipe: Connection[Any, Any]) -> Any:  # noqa: ANN401 - what ``serve`` sends
        if not pipe.poll(60):
            raise AssertionError(f"rank {rank} does not answer")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise AssertionError(f"rank {rank}: {answer}")  # noqa: TRY004 - not of a type: what went wrong there
        return answer


def serve(rank: int, size: int, store: str, pipe: Connection[Any, Any]) -> None:
    """A process's life: (Setting, KVCacheConfig) begins a worker, a Step is run by it; ends when the pipe closes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = torch.distributed.group.WORLD
    try:
        setting, config = pipe.recv()
        while True:
            worker = Worker(setting, config, rank, group)
            setting, config = execute_all(worker, pipe)
    except EOFError:
        torch.distributed.destroy_process_group()


def execute_all(worker: Worker, pipe: Connection[Any, Any]) -> tuple[Setting, KVCacheConfig]:
    """Answer Steps until another setting comes."""
    while isinstance(message := pipe.recv(), Step):
        try:
            result, logits = worker.execute(message)
            pipe.send((result, logits.numpy()))
        except Exception:  # noqa: BLE001 - whatever it is, the test shows it
            pipe.send(traceback.format_exc())
    setting, config = message
    return setting, config


# -- a run


@dataclass(frozen=True)
class Outcome:
    """logits: of every computed token, by (request, position). hits: tokens found in the cache, by request."""

    logits: dict[tuple[str, int], torch.Tensor]
    hits: dict[str, int]
    tokens: dict[str, list[int]]
    mixed_steps: int


def prompts() -> dict[str, tuple[int, list[int]]]:
    """(the step before which it comes, prompt): b and d continue what a has left, e what d has; c comes in between."""
    rng = np.random.default_rng(5)
    a, other = rng.integers(0, VOCABULARY, 105).tolist(), rng.integers(0, VOCABULARY, 60).tolist()
    return {
        "a": (0, a),
        "b": (4, a[:98] + other[:30]),
        "c": (4, other[:21]),
        "d": (9, a[:64] + other[5:45]),
        "e": (14, a[:64] + other[5:45] + [1, 2, 3]),
    }


def run(setting: Setting, config: KVCacheConfig, execute: Callable[[Step], tuple[StepResult, torch.Tensor]]) -> Outcome:
    """All prompts, seven tokens of output each, in chunks of at most BUDGET tokens a step."""
    cache = KVCacheManager(config, LONGEST, dcp_world_size=setting.dcp, pcp_world_size=setting.pcp)
    scheduler = Scheduler(cache, SchedulerLimits(max_running=8, max_batched_tokens=BUDGET), clock=lambda: 0.0)
    coming, requests = prompts(), {}
    names: dict[int, str] = {}
    logits: dict[tuple[str, int], torch.Tensor] = {}
    steps = mixed = 0
    while coming or not scheduler.drained:
        for name in [name for name, (at, _) in coming.items() if at <= steps]:
            prompt = coming.pop(name)[1]
            requests[name] = Request(name, prompt, SamplingParams(max_tokens=7), hasher=cache.hasher)
            scheduler.add(requests[name])
        step = scheduler.schedule()
        names |= {new.row: new.request_id for new in step.new_rows}
        result, computed = execute(step)
        places = _places(step, names)
        logits |= dict(zip(places, computed, strict=True))
        mixed += len({min(n, 2) for n in step.num_scheduled.tolist()}) == 2
        scheduler.update(result)
        steps += 1
    hits = {name: request.first_hit_tokens or 0 for name, request in requests.items()}
    return Outcome(logits, hits, {name: request.token_ids().tolist() for name, request in requests.items()}, mixed)


def _places(step: Step, names: dict[int, str]) -> Sequence[tuple[str, int]]:
    counts = zip(step.rows.tolist(), step.num_computed.tolist(), step.num_scheduled.tolist(), strict=True)
    return [(names[row], p) for row, first, n in counts for p in range(first, first + n)]
