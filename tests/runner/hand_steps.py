"""Steps made by hand for a runner without a scheduler: rows of one token list each, and whatever drafts a test wants.

Blocks are handed out once and never come back. A row has as many states in each group of states as positions of a step
can be behind; which of them holds what is known stays where it was written:

    states of a row   [ s0 s1 s2 s3 ]     accepted: the one that is read next
                           ^ accepted     the next step writes s1, s2, .. in turn, the first of them over it
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from runner_support import EveryLogit

from hybridkv.planner import KVCacheConfig, Plan
from hybridkv.planner.plan import REFERENCE
from hybridkv.request import SamplingParams
from hybridkv.runner import LoadedModel, ModelRunner, plan_for
from hybridkv.runner.probe import planner_model
from hybridkv.specs import Keeps
from hybridkv.step import Cells, Csr, NewRow, Step, StepResult


def plan_by_hand(loaded: LoadedModel, tokens: int, rows: int, drafts: int = 0) -> Plan:
    """With room for ``rows`` of ``tokens`` tokens and their states, block ids alike in all groups."""
    return plan_for(loaded, [tokens] * rows * 4, max_model_len=tokens, layout=REFERENCE, num_speculative_tokens=drafts)


class HandRows:
    """Rows that run side by side from the first step on, each with a prompt and ``sampling``.

    most_drafts: of a step. offset: added to the place of the accepted state, for tests that must fail. tier: the host
    tier's layout.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        max_tokens: int,
        most_drafts: int = 8,
        offset: int = 0,
        tier: KVCacheConfig | None = None,
    ) -> None:
        plan = plan_by_hand(loaded, max_tokens, len(prompts), most_drafts)
        planned = planner_model(loaded.model, block_size=16, name=loaded.name)
        self.seen = EveryLogit()
        self.runner = ModelRunner(
            loaded.model, plan.config, planned, max_running=len(prompts), max_model_len=max_tokens,
            max_batched_tokens=len(prompts) * max_tokens, observer=self.seen, tier=tier,
        )  # fmt: skip
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self.results: list[StepResult] = []
        self.steps: list[Step] = []
        self.prompts = [len(prompt) for prompt in prompts]
        self._sampling, self._offset = sampling, offset
        self._specs = [group.spec for group in plan.config.groups]
        self._free = iter(range(1, plan.config.num_blocks))
        self._columns = [[0] * len(self._specs) for _ in prompts]
        self._state_groups = [at for at, spec in enumerate(self._specs) if spec.keeps is Keeps.STATE]
        self._states = [
            {group: [next(self._free) for _ in range(most_drafts + 1)] for group in self._state_groups} for _ in prompts
        ]
        self._accepted = [0] * len(prompts)

    def step(self, drafts: Sequence[Sequence[int]] = (), *, chunk: int | None = None) -> list[list[int]]:
        """Run one Step over all rows, with ``drafts[row]`` behind what is known; what was appended to each.

        chunk: at most so many certain tokens of a row; who does not get to its end neither drafts nor samples.
        """
        step = self.make(drafts, chunk=chunk)
        result = self.runner.execute(step)
        self.results.append(result)
        self.steps.append(step)
        appended = []
        for row in range(len(self.tokens)):
            more = result.sampled[row].tolist()
            ran = int(step.num_scheduled[row]) - len(step.drafts[row])
            self.computed[row] += ran + max(len(more) - 1, 0)
            self._accepted[row] += max(len(more) - 1, 0)
            self.tokens[row] += more
            appended.append(more)
        return appended

    @property
    def keeps_states(self) -> bool:
        return bool(self._state_groups)

    def state_block(self, row: int, group: int) -> int:
        """Of the state that the row's next step reads."""
        blocks = self._states[row][group]
        return blocks[self._accepted[row] % len(blocks)]

    def make(self, drafts: Sequence[Sequence[int]] = (), *, chunk: int | None = None) -> Step:
        """The Step that ``step`` runs."""
        rows = range(len(self.tokens))
        certain = [tokens[done:][:chunk] for tokens, done in zip(self.tokens, self.computed, strict=True)]
        samples = [self.computed[row] + len(certain[row]) == len(self.tokens[row]) for row in rows]
        proposed = [list(drafts[row]) if drafts and samples[row] else [] for row in rows]
        run = [certain[row] + proposed[row] for row in rows]
        number = len(self.results)
        plain = Step(
            id=number,
            after=number - 1,
            rows=np.arange(len(run), dtype=np.int32),
            num_computed=np.array(self.computed, np.int32),
            num_scheduled=np.array([len(one) for one in run], np.int32),
            samples=np.array(samples),
            token_ids=Csr.from_lists(run),
            drafts=Csr.from_lists(proposed),
            cells=self._cells(run),
            finished_rows=np.empty(0, np.int32),
            new_rows=tuple(map(self._new, rows)) if not number else (),
        )
        return self._with_states(plain)

    def _new(self, row: int) -> NewRow:
        tokens = np.array(self.tokens[row], np.int32)
        return NewRow(row, str(row), tokens, self.prompts[row], self._sampling[row])

    def _cells(self, run: Sequence[Sequence[int]]) -> Cells:
        """A block for every token that runs, in each group of tokens."""
        cells: list[tuple[int, int, int, int]] = []
        for row, tokens in enumerate(run):
            for group, spec in enumerate(self._specs):
                if spec.keeps is Keeps.STATE:
                    continue
                wanted = -(-(self.computed[row] + len(tokens)) // spec.block_size)
                held = self._columns[row][group]
                cells += [(group, row, column, next(self._free)) for column in range(held, wanted)]
                self._columns[row][group] = max(held, wanted)
        return Cells(*np.array(cells, np.int32).reshape(-1, 4).T)

    def _with_states(self, step: Step) -> Step:
        read = np.full((len(step), len(self._specs)), -1, np.int32)
        writes: list[tuple[int, int, int, int]] = []
        for row in range(len(step)):
            drafts = len(step.drafts[row])
            certain = self.computed[row] + int(step.num_scheduled[row]) - drafts
            for group in self._state_groups:
                blocks = self._states[row][group]
                wrong = self._offset if self.computed[row] > self.prompts[row] else 0
                read[row, group] = blocks[(self._accepted[row] + wrong) % len(blocks)]
                writes += [
                    (row, group, certain + at, blocks[(self._accepted[row] + at) % len(blocks)])
                    for at in range(drafts + 1)
                ]
        return replace(step, state_read=read, state_writes=np.array(writes, np.int32).reshape(-1, 4))
