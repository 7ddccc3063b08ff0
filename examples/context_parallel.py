"""One model with its context on two ranks: latent attention (MLA) over decode context parallelism, on the CPU.

    python examples/context_parallel.py

    rank 0   schedules; every Step goes to all ranks   [ tables | write_latent | paged_attention ]-+
    rank 1                                             [ tables | write_latent | paged_attention ]-+- combine_over_ranks

Each rank has all weights and every other token of each block, so there is memory for twice the context. Each layer
combines the results of the ranks to the same bits everywhere, so that all ranks sample the same tokens. The tokens are
compared with a dense forward pass of the same weights.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that torch's users know
from torch import Tensor, nn

from hybridkv import KVCacheManager, Plan, Request, SamplingParams, Scheduler, SchedulerLimits, Step, StepResult, plan
from hybridkv.models import Layer, Model
from hybridkv.specs import MLAAttentionSpec
from hybridkv.step import Csr
from hybridkv.worker import (
    BlockCopier,
    KVPages,
    MultiGroupBlockTable,
    PagedStorage,
    combine_over_ranks,
    paged_attention,
    step_batch,
    write_latent,
)

RANKS, BLOCK_SIZE = 2, 4
VOCABULARY, HIDDEN, HEADS, WIDTH, LATENT, ROTARY = 61, 32, 4, 8, 12, 4
LAYERS = 3
SCALE = 1 / math.sqrt(WIDTH + ROTARY)
LIMITS = SchedulerLimits(max_running=4, max_batched_tokens=24)
MAX_MODEL_LEN = 64

Attend = Callable[[str, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [n, heads, LATENT + ROTARY], latents [n, LATENT], rotary keys [n, ROTARY]) -> [n, heads, LATENT]."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, 2.1), absorbed: queries read latents as keys and as values."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.query = nn.Linear(HIDDEN, HEADS * (WIDTH + ROTARY), bias=False)
        self.down = nn.Linear(HIDDEN, LATENT + ROTARY, bias=False)
        self.up_keys = nn.Parameter(torch.randn(HEADS, WIDTH, LATENT) / 2)
        self.up_values = nn.Parameter(torch.randn(HEADS, WIDTH, LATENT) / 2)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[n, HIDDEN] -> [n, HIDDEN]."""
        content, rotary = self.query(hidden).view(len(hidden), HEADS, -1).split((WIDTH, ROTARY), dim=-1)
        latent, key = self.down(hidden).split((LATENT, ROTARY), dim=-1)
        absorbed = torch.einsum("nhw,hwl->nhl", content, self.up_keys)
        query = torch.cat((absorbed, rotate(rotary, positions)), dim=-1)
        found = attend(self.name, query, latent, rotate(key[:, None], positions)[:, 0])
        mixed: Tensor = self.out(torch.einsum("nhl,hwl->nhw", found, self.up_values).flatten(1))
        return mixed


class Decoder(nn.Module):
    """Layers of latent attention and an MLP; the weights are large, so that whatever is read moves the logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixers = nn.ModuleList(LatentAttention(str(number)) for number in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for weights in self.parameters():
            weights.data *= 2.5 if weights.dim() == 2 else 1

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits behind int64[n] tokens at int64[n] positions, of whichever requests: [n, VOCABULARY]."""
        hidden: Tensor = self.embedding(tokens)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            hidden = hidden + mixer(F.rms_norm(hidden, (HIDDEN,)), positions, attend)
            hidden = hidden + mlp(F.rms_norm(hidden, (HIDDEN,)))
        logits: Tensor = self.head(F.rms_norm(hidden, (HIDDEN,)))
        return logits

    def described(self) -> Model:
        """Return the model as the planner needs it."""
        spec = MLAAttentionSpec(block_size=BLOCK_SIZE, head_size=LATENT + ROTARY, dtype="float32")
        layers = tuple(Layer(str(number), spec, number) for number in range(LAYERS))
        return Model("latent", "latent", layers, None, VOCABULARY, "float32", 1, 1, BLOCK_SIZE)

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits behind each of a request's tokens, without any cache."""
        ahead = torch.arange(len(tokens))[:, None] < torch.arange(len(tokens))

        def attend(_layer: str, query: Tensor, latents: Tensor, rotary: Tensor) -> Tensor:
            scores = torch.einsum("nhw,mw->hnm", query, torch.cat((latents, rotary), dim=-1)) * SCALE
            return torch.einsum("hnm,ml->nhl", scores.masked_fill(ahead, -torch.inf).softmax(dim=-1), latents)

        logits: Tensor = self(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        return logits


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on [n, heads, ROTARY]."""
    angles = positions[:, None, None] * 100.0 ** -torch.arange(0, 1, 2 / ROTARY)
    first, second = heads.reshape(*heads.shape[:-1], -1, 2).unbind(dim=-1)
    turned = (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


class Worker:
    """One rank: its share of every block, tables of all blocks. group: all ranks."""

    def __init__(self, model: Decoder, planned: Plan, rank: int, group: dist.ProcessGroup) -> None:
        self.model, self.group = model, group
        self.storage = PagedStorage(planned.config)
        self.copier = BlockCopier(self.storage)
        self.tables = MultiGroupBlockTable.of_config(
            planned.config,
            max_num_reqs=LIMITS.max_running,
            max_model_len=planned.max_model_len,
            max_num_batched_tokens=LIMITS.max_batched_tokens,
            dcp_world_size=RANKS,
            dcp_rank=rank,
        )

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run the Step on this rank; every rank has the same result."""
        self.tables.apply(step)
        self.copier.execute_before(step)
        if not len(step):
            return StepResult(step.id, Csr.empty(0))
        batch = step_batch(step, self.tables)

        def attend(layer: str, query: Tensor, latents: Tensor, rotary: Tensor) -> Tensor:
            """Tokens of other ranks go nowhere; every query attends to the tokens that lie here."""
            pages = self.storage.views[layer][0]
            write_latent(batch.groups[0].slots, pages, latents, rotary)
            found = paged_attention(query, KVPages.of_latent(pages, LATENT), batch.groups[0].reads, SCALE)
            return combine_over_ranks(*found, self.group)[0]

        logits = self.model(torch.from_numpy(step.token_ids.values.astype(np.int64)), batch.positions, attend)
        best = logits[step.token_ids.indptr[1:] - 1].argmax(dim=-1).tolist()
        sampled = [[token] if samples else [] for token, samples in zip(best, step.samples.tolist(), strict=True)]
        return StepResult(step.id, Csr.from_lists(sampled))


def planned(memory: int | str, ranks: int = RANKS) -> Plan:
    """Return the plan of the caches, one for each rank."""
    return plan(Decoder().described(), memory, max_model_len=MAX_MODEL_LEN, dcp=ranks)


def schedule(worker: Worker, of_all: Plan) -> tuple[list[Request], Scheduler]:
    """Rank 0: questions behind one beginning, the same ones again; Steps go to the others before they run here."""
    cache = KVCacheManager(of_all)
    scheduler = Scheduler(cache, LIMITS)
    asked = []
    for turn in range(2):
        prompts = [[*range(30), *(7 * n + k * k % 11 for k in range(5 + n))] for n in range(4)]
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        for n, prompt in enumerate(prompts):
            asked.append(Request(f"{turn}.{n}", prompt, sampling, hasher=cache.hasher))
            scheduler.add(asked[-1])
        while not scheduler.drained:
            step = scheduler.schedule()
            dist.broadcast_object_list([step], src=0, group=worker.group)
            scheduler.update(worker.execute(step))
    dist.broadcast_object_list([None], src=0, group=worker.group)
    return asked, scheduler


def receive(group: dist.ProcessGroup) -> Step | None:
    """Return the next Step, or None after the last."""
    received: list[Step | None] = [None]
    dist.broadcast_object_list(received, src=0, group=group)
    return received[0]


def run(rank: int, folder: str, memory: int | str) -> None:
    """Run one rank's process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model, of_all = Decoder(), planned(memory)
    worker = Worker(model, of_all, rank, dist.new_group(range(RANKS)))
    if rank:
        while (step := receive(worker.group)) is not None:
            worker.execute(step)
    else:
        asked, scheduler = schedule(worker, of_all)
        wrong = sum(map(len, (differences(model, one) for one in asked)))
        counts = scheduler.statistics()
        print(
            f"{RANKS} ranks: {len(asked)} outputs, {wrong} tokens other than a dense forward's, "
            f"{counts.hit_tokens} of {counts.prompt_tokens} prompt tokens hit, {counts.preemptions} preemptions"
        )
        if wrong:
            sys.exit(1)
    dist.destroy_process_group()


def differences(model: Decoder, request: Request) -> list[int]:
    """Positions of output tokens that a dense forward would not have drawn."""
    tokens = request.token_ids().tolist()
    best = model.dense(tokens).argmax(dim=-1).tolist()
    return [at for at in range(request.num_prompt_tokens, len(tokens)) if best[at - 1] != tokens[at]]


def main(memory: int | str = "14KiB") -> None:
    """Two processes, in a memory that is too small for all requests at once."""
    alone = planned(memory, ranks=1).capacity.tokens_that_fit
    print(f"{memory} a rank: room for {planned(memory).capacity.tokens_that_fit} tokens, on one rank for {alone}")
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        processes = [context.Process(target=run, args=(rank, folder, memory)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
