"""An engine from scratch: a small hybrid model in plain torch, run by Steps alone through ``hybridkv.worker``.

    python examples/bare_engine.py

docs/build-an-engine.md explains it. The model has gated delta rule layers, one attention layer with a window and one
without. Its weights are random, and its output is compared with a dense forward pass of the same weights. The scheduler
decides; the worker follows each Step and knows nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name that torch's users know
from torch import Tensor, nn

from hybridkv import KVCacheManager, Plan, Request, SamplingParams, Scheduler, SchedulerLimits, Step, StepResult, plan
from hybridkv.models import Layer, Model
from hybridkv.specs import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from hybridkv.step import Csr
from hybridkv.worker import (
    AttentionMask,
    BlockCopier,
    InPlaceStates,
    KVPages,
    MultiGroupBlockTable,
    PagedStorage,
    StepBatch,
    paged_attention,
    step_batch,
    write_kv,
)

VOCABULARY, HIDDEN, WIDTH, HEADS, KV_HEADS, WINDOW, KERNEL = 61, 32, 8, 4, 2, 10, 4
STATES = 2  # heads of a recurrent layer
DRAFTS = 3  # proposed tokens of a row and step, at most
BLOCK_SIZE = 4

Attend = Callable[["Attention", Tensor, Tensor, Tensor], Tensor]
"""(layer, query [n, heads, width], keys, values [n, kv heads, width]) -> [n, heads, width], of n tokens of a step."""
Recur = Callable[["Delta", Tensor, Tensor], Tensor]
"""(layer, convolution's inputs [n, channels], gates [n, 2 * heads]) -> [n, heads * width]."""
Propose = Callable[[Request], list[int]]


# -- the model: nothing of it knows of pages


class Attention(nn.Module):
    """Rotary attention with grouped heads; window: how many tokens a query sees, itself included; None for all."""

    def __init__(self, name: str, window: int | None = None) -> None:
        super().__init__()
        self.name, self.window = name, window
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.out = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[n, HIDDEN] -> [n, HIDDEN]."""
        query, keys, values = self.qkv(hidden).view(len(hidden), -1, WIDTH).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        mixed: Tensor = self.out(attend(self, rotate(query, positions), rotate(keys, positions), values).flatten(1))
        return mixed

    def spec(self) -> KVCacheSpec:
        """Return the spec of the keys and values that it keeps of every token."""
        size, heads, width = BLOCK_SIZE, KV_HEADS, WIDTH
        if self.window is None:
            return FullAttentionSpec(block_size=size, num_kv_heads=heads, head_size=width, dtype="float32")
        return SlidingWindowSpec(
            block_size=size, num_kv_heads=heads, head_size=width, dtype="float32", sliding_window=self.window
        )


class Delta(nn.Module):
    """The gated delta rule (arXiv 2412.06464) behind a short convolution."""

    channels = 3 * STATES * WIDTH

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inputs = nn.Linear(HIDDEN, self.channels, bias=False)
        self.gates = nn.Linear(HIDDEN, 2 * STATES)
        self.kernel = nn.Parameter(torch.randn(KERNEL, self.channels) / 2)
        self.out = nn.Linear(STATES * WIDTH, HIDDEN, bias=False)

    def forward(self, hidden: Tensor, _positions: Tensor, recur: Recur) -> Tensor:
        """[n, HIDDEN] -> [n, HIDDEN]."""
        mixed: Tensor = self.out(recur(self, self.inputs(hidden), self.gates(hidden)))
        return mixed

    def run(self, inputs: Tensor, gates: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One request's n tokens: its outputs [n, heads * width], and what the states behind each of them are made of.

        window: [KERNEL - 1, channels], the inputs before; state: [heads, width, width]. Behind t tokens they are
        rows t .. t + KERNEL - 2 of the second result and entry t - 1 of the third.
        """
        inputs = torch.cat((window, inputs))
        mixed = F.silu(torch.einsum("nck,kc->nc", inputs.unfold(0, KERNEL, 1), self.kernel))
        query, key, value = mixed.view(-1, 3, STATES, WIDTH).unbind(dim=1)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        decay = torch.exp(-0.1 * F.softplus(gates[:, :STATES, None, None]))
        step = torch.sigmoid(gates[:, STATES:, None])
        states = []
        for t in range(len(gates)):
            state = state * decay[t]
            missing = value[t] - (state * key[t, :, :, None]).sum(dim=1)
            state = state + key[t, :, :, None] * (step[t] * missing)[:, None]
            states.append(state)
        behind = torch.stack(states)
        return torch.einsum("nhkv,nhk->nhv", behind, query).flatten(1), inputs, behind

    def begin(self) -> tuple[Tensor, Tensor]:
        """Window and state of no tokens."""
        return torch.zeros(KERNEL - 1, self.channels), torch.zeros(STATES, WIDTH, WIDTH)

    def spec(self) -> KVCacheSpec:
        """Return the spec of its window and its state; the window has room for the inputs of drafts (InPlace)."""
        shapes = ((KERNEL - 1 + DRAFTS, self.channels), (STATES, WIDTH, WIDTH))
        return MambaSpec(
            block_size=BLOCK_SIZE,
            shapes=shapes,
            dtypes=("float32", "float32"),
            mamba_type="gdn_attention",
            num_speculative_blocks=DRAFTS,
        )


class Hybrid(nn.Module):
    """Four layers, each a mixer and an MLP; the weights are large, so that whatever is read moves the logits."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixers: tuple[Delta | Attention, ...] = (Delta("0"), Attention("1", WINDOW), Delta("2"), Attention("3"))
        self.mlps = [nn.Sequential(nn.Linear(HIDDEN, 64), nn.SiLU(), nn.Linear(64, HIDDEN)) for _ in self.mixers]
        self.layers = nn.ModuleList((*self.mixers, *self.mlps))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for weights in self.parameters():
            weights.data *= 2.5 if weights.dim() == 2 else 1

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, recur: Recur) -> Tensor:
        """[n, HIDDEN] of int64[n] tokens at int64[n] positions, of whichever requests."""
        hidden: Tensor = self.embedding(tokens)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            through = attend if isinstance(mixer, Attention) else recur
            hidden = hidden + mixer(F.rms_norm(hidden, (HIDDEN,)), positions, through)
            hidden = hidden + mlp(F.rms_norm(hidden, (HIDDEN,)))
        return F.rms_norm(hidden, (HIDDEN,))

    def described(self) -> Model:
        """Return the model as the planner needs it."""
        layers = [Layer(mixer.name, mixer.spec(), number) for number, mixer in enumerate(self.mixers)]
        return Model(
            "bare", "bare", tuple(layers), None, VOCABULARY, "float32", 1, 1, BLOCK_SIZE, num_speculative_tokens=DRAFTS
        )

    @torch.inference_mode()
    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits behind each of a request's tokens, [n, VOCABULARY], without any cache."""
        ahead = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))

        def attend(layer: Attention, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            sees = (ahead >= 0) & (ahead < (layer.window or len(tokens)))
            query, keys, values = (one.transpose(0, 1)[None] for one in (query, keys, values))
            return F.scaled_dot_product_attention(query, keys, values, sees, enable_gqa=True)[0].transpose(0, 1)

        def recur(layer: Delta, inputs: Tensor, gates: Tensor) -> Tensor:
            return layer.run(inputs, gates, *layer.begin())[0]

        logits: Tensor = self.head(self(torch.tensor(tokens), torch.arange(len(tokens)), attend, recur))
        return logits


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) on [n, heads, width]."""
    angles = positions[:, None, None] * 100.0 ** -torch.arange(0, 1, 2 / WIDTH)
    turned = torch.view_as_complex(heads.reshape(*heads.shape[:-1], -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


def draw(logits: Tensor, sampling: SamplingParams, position: int) -> int:
    """Return the token at ``position``: the best one, or one drawn by noise of seed and position alone."""
    if sampling.temperature:
        noise = torch.rand(len(logits), generator=torch.Generator().manual_seed(sampling.seed << 20 | position))
        logits = logits / sampling.temperature - torch.log(-torch.log(noise))
    return int(logits.argmax())


# -- recurrent states in pages: window [blocks, KERNEL - 1 + DRAFTS, channels], state [blocks, heads, width, width]


class Named:
    """The Step names the block that a row's state is read from, and every block that one is written to."""

    def __init__(self, storage: PagedStorage, _tables: MultiGroupBlockTable) -> None:
        self.views = storage.views

    def before(self, step: Step) -> Step:
        """Return the Step whose copies are carried out before the forward."""
        return step

    def read(self, step: Step, i: int, group: int, name: str) -> tuple[Tensor, Tensor]:
        """Window and state of the Step's row ``i``; zeroed ones where its request begins."""
        block = step.state_read[i, group]
        windows, states = self.views[name]
        return windows[block, : KERNEL - 1], states[block]

    def write(self, step: Step, i: int, group: int, name: str, made: Sequence[Tensor]) -> None:
        """Write the row's states at the token counts that the Step names: checkpoints, the end, drafts."""
        (windows, states), (inputs, behind) = self.views[name], made
        for _, _, tokens, block in step.state_writes[(step.state_writes[:, :2] == (i, group)).all(axis=1)].tolist():
            t = tokens - int(step.num_computed[i])
            windows[block, : KERNEL - 1] = inputs[t : t + KERNEL - 1]
            states[block] = behind[t - 1]

    def after(self, step: Step, accepted: np.ndarray) -> None:
        """Nothing: the next Step says where the accepted state lies."""


class InPlace:
    """The worker finds the blocks by itself, for kernels that go on in place; in the reference layout only."""

    def __init__(self, storage: PagedStorage, tables: MultiGroupBlockTable) -> None:
        self.views, self.states = storage.views, InPlaceStates(storage, tables, DRAFTS)
        self.before, self.after = self.states.before, self.states.after

    def read(self, step: Step, i: int, group: int, name: str) -> tuple[Tensor, Tensor]:
        """As Named."""
        (windows, states), (blocks, bias) = self.views[name], self.states.blocks(step, group)
        return windows[blocks[i, 0], bias[i] : bias[i] + KERNEL - 1], states[blocks[i, bias[i]]]

    def write(self, step: Step, i: int, group: int, name: str, made: Sequence[Tensor]) -> None:
        """One window, with the inputs of all drafts, and a state behind each of the last 1 + drafts tokens."""
        (windows, states), (inputs, behind) = self.views[name], made
        blocks, drafts = self.states.blocks(step, group)[0], len(step.drafts[i])
        certain = len(behind) - drafts
        windows[blocks[i, 0], : KERNEL - 1 + drafts] = inputs[certain:]
        states[blocks[i, : drafts + 1]] = behind[certain - 1 :]


# -- the worker


class Worker:
    """Executes Steps. states: who finds the blocks of recurrent states."""

    def __init__(
        self, model: Hybrid, planned: Plan, limits: SchedulerLimits, states: type[Named | InPlace] = Named
    ) -> None:
        self.model = model
        self.storage = PagedStorage(planned.config)
        self.copier = BlockCopier(self.storage)
        self.tables = MultiGroupBlockTable.of_config(
            planned.config,
            max_num_reqs=limits.max_running,
            max_model_len=planned.max_model_len,
            max_num_batched_tokens=limits.max_batched_tokens,
        )
        self.states = states(self.storage, self.tables)
        self.group_of = {name: g for g, one in enumerate(planned.config.groups) for name in one.layer_names}
        self.sampling: dict[int, SamplingParams] = {}
        self.last_token = np.zeros(limits.max_running, np.int64)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """All that a Step asks for, in this order."""
        for row in step.finished_rows.tolist():
            self.sampling.pop(row, None)
        self.sampling |= {new.row: new.sampling for new in step.new_rows}
        self.tables.apply(step)
        self.before(step)
        if not len(step):
            return StepResult(step.id, Csr.empty(0))
        logits = self.forward(step)
        sampled = [self.sample(step, i, logits[i]) for i in range(len(step))]
        accepted = np.array([len(tokens) for tokens in sampled], np.int32)
        self.states.after(step, np.maximum(accepted, 1))
        return StepResult(step.id, Csr.from_lists(sampled), accepted if len(step.drafts.values) else None)

    def before(self, step: Step) -> None:
        """Blocks that move, blocks to clear, copies."""
        self.copier.execute_before(self.states.before(step))

    def tokens(self, step: Step) -> Tensor:
        """int64[tokens] that the Step runs; -1 is what the row sampled last, which the scheduler did not know yet."""
        last = np.repeat(self.last_token[step.rows], step.num_scheduled)
        return torch.from_numpy(np.where(step.token_ids.values == -1, last, step.token_ids.values))

    def forward(self, step: Step) -> list[Tensor]:
        """For each row the logits that it samples from: behind its last certain token and each of its drafts."""
        batch = step_batch(step, self.tables)
        attend, recur = partial(self.attend, batch), partial(self.recur, step)
        hidden = self.model(self.tokens(step), batch.positions, attend, recur)
        counts, ends = np.where(step.samples, np.diff(step.drafts.indptr) + 1, 0), step.token_ids.indptr[1:]
        wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        return list(self.model.head(hidden[wanted]).split(counts.tolist()))

    def attend(self, batch: StepBatch, layer: Attention, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """First the step's own tokens go to their pages, then every row attends to its pages."""
        pages, group = KVPages.of_views(self.storage.views[layer.name]), batch.groups[self.group_of[layer.name]]
        write_kv(group.slots, pages, keys, values)
        mask = AttentionMask(window=layer.window)
        return paged_attention(query, pages, group.reads, 1 / math.sqrt(WIDTH), mask=mask)[0]

    def recur(self, step: Step, layer: Delta, inputs: Tensor, gates: Tensor) -> Tensor:
        """Row by row: from the state before the step's tokens to those behind them."""
        out, group = torch.empty(len(inputs), STATES * WIDTH), self.group_of[layer.name]
        for i, (start, end) in enumerate(pairwise(step.token_ids.indptr)):
            window, state = self.states.read(step, i, group, layer.name)
            out[start:end], *behind = layer.run(inputs[start:end], gates[start:end], window, state)
            self.states.write(step, i, group, layer.name, behind)
        return out

    def sample(self, step: Step, i: int, logits: Tensor) -> list[int]:
        """Drafts as far as they are what is drawn in their place, and the token drawn behind them."""
        row, drafts = int(step.rows[i]), step.drafts[i].tolist()
        first, out = int(step.num_computed[i] + step.num_scheduled[i]) - len(drafts), list[int]()
        for one in logits:
            out.append(draw(one, self.sampling[row], first + len(out)))
            self.last_token[row] = out[-1]
            if drafts[len(out) - 1 : len(out)] != out[-1:]:
                break
        return out


# -- the loop


def ngram(request: Request) -> list[int]:
    """Propose the tokens that followed the last two tokens at their earlier position."""
    tokens: list[int] = request.token_ids().tolist()
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 : at + 2 + DRAFTS]
    return []


def serve(scheduler: Scheduler, worker: Worker, requests: Sequence[Request], propose: Propose | None = None) -> None:
    """Run ``requests`` to their ends, Steps scheduled as far ahead of their results as the limits allow."""
    in_flight = deque[Step]()
    for request in requests:
        scheduler.add(request)
    while in_flight or not scheduler.drained:
        while len(in_flight) < scheduler.limits.max_in_flight and not scheduler.drained:
            if propose is not None:
                scheduler.propose({request.request_id: propose(request) for request in requests})
            in_flight.append(scheduler.schedule())
        scheduler.update(worker.execute(in_flight.popleft()))


def wrong(model: Hybrid, request: Request) -> list[int]:
    """Positions of output tokens that a dense forward would not have drawn."""
    tokens, logits = request.token_ids().tolist(), model.dense(request.token_ids().tolist())
    outputs = range(request.num_prompt_tokens, len(tokens))
    return [at for at in outputs if draw(logits[at - 1], request.sampling, at) != tokens[at]]


def main() -> None:
    """Questions behind one beginning, asked twice, in a memory that is too small for four of them at once."""
    model = Hybrid()
    limits = SchedulerLimits(max_running=4, max_batched_tokens=48, num_speculative_tokens=DRAFTS)
    for layout, states in (("natural", Named), ("reference", Named), ("reference", InPlace)):
        planned = plan(model.described(), "88KiB", max_model_len=120, max_batched_tokens=48, layout=layout)
        cache = KVCacheManager(planned)
        scheduler, worker = Scheduler(cache, limits), Worker(model, planned, limits, states)
        prompts = [[*range(40), *(7 * n + k * k % 11 for k in range(6 + n))] for n in range(4)]
        asked = []
        for turn in range(2):
            sampling = SamplingParams(max_tokens=28, temperature=0.7 * turn, seed=turn)
            requests = [Request(f"{turn}.{n}", one, sampling, hasher=cache.hasher) for n, one in enumerate(prompts)]
            serve(scheduler, worker, requests, ngram)
            asked += requests
        if any(wrong(model, request) for request in asked):
            raise SystemExit(f"{layout}, {states.__name__}: not what the dense forward says")
        counts = scheduler.statistics()
        print(
            f"{layout}, {states.__name__}: {len(asked)} outputs as dense in {counts.steps} steps, "
            f"{counts.hit_tokens} of {counts.prompt_tokens} prompt tokens hit, {counts.preemptions} preemptions, "
            f"{counts.accepted_tokens} of {counts.drafted_tokens} drafts accepted"
        )


if __name__ == "__main__":
    main()
