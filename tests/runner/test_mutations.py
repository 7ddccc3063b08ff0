"""A damaged cache must change the logits: faults that the equality tests must find."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from runner_support import (
    ALL_MODELS,
    TOLERANCE,
    EngineFactory,
    EveryLogit,
    greedy,
    loaded_model,
    reference_logits,
    relative_difference,
    shared_prompts,
)

from hybridkv.runner import Completion, Engine
from hybridkv.specs import Keeps
from hybridkv.step import Step
from hybridkv.worker import AttentionMask

# -- all that a model caches, layer by layer, damaged in a request of its own beside the others
#
#     prompt | outputs
#     0 .. 59  60 ..... 68 ............ 84 ........ 96     tokens computed
#                       ^ states noted  ^ damage
#     columns [ 0 .. 15 ] seen by all layers     [ 64 .. 79 ] by windows of 24 and chunks of 32, too
#                                                [ 80 .. 95 ] by windows of 8

START = 60
NOTED = 68
DAMAGED = 84
OUTPUT = 36


@dataclass(frozen=True, slots=True, eq=False)
class StateView:
    """One state tensor of one layer: views [blocks, *shape] of ``kind`` in ``group``."""

    layer: str
    kind: str
    group: int
    view: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """A layer of attention: ``kind`` full, window or chunk, in ``group``, and a column that its queries see.

    other: a column with another block of the request.
    """

    layer: str
    kind: str
    group: int
    column: int
    other: int


def state_views(engine: Engine) -> list[StateView]:
    found = []
    for (name, _), mixer in zip(engine.runner.continues, engine.runner._mixers, strict=True):
        parts = zip(mixer._mixer.parts, mixer._views, strict=True)
        found += [StateView(name, part.kind, mixer._group, view) for part, view in parts]
    return found


def paged_layers(engine: Engine) -> Iterator[PagedLayer]:
    for number, group in enumerate(engine.plan.config.groups):
        if group.spec.keeps is Keeps.STATE:
            continue
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            reach = AttentionMask.of(spec)
            kind = "window" if reach.window else "chunk" if reach.chunk else "full"
            short = reach.window is not None and reach.window <= group.spec.block_size  # the rows of a compressor
            column = 0 if kind == "full" else 5 if short else 4
            assert reach.first_seen(np.array([DAMAGED])).item() <= column * group.spec.block_size < DAMAGED
            yield PagedLayer(name, kind, number, column, column - 1 if short else column + 1)


class Damages:
    """What happens to each request, between two steps: its id says it, ``what kind layer``.

    Everything is done in one layer; a wrong cell of a table is wrong for all layers of its group.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.states = state_views(engine)
        self.paged = list(paged_layers(engine))
        self.names = ["nothing"]
        for what, found in (("zeroed", self.states), ("earlier", self.states), ("zeroed", self.paged)):
            self.names += [f"{what} {one.kind} {one.layer}" for one in found]
        first = {one.group: one for one in reversed(self.paged)}.values()
        self.names += [f"aliased {one.kind} {one.layer}" for one in first]
        self._noted: list[torch.Tensor] = []

    def layers(self) -> set[str]:
        return {one.layer for one in self.states} | {one.layer for one in self.paged}

    def blocks(self, step: Step, row: int, group: int) -> list[int]:
        """Where the state behind the last token of ``step`` was written for its ``row``-th row."""
        end = step.num_computed[row] + step.num_scheduled[row]
        writes = step.state_writes
        mine = (writes[:, 0] == row) & (writes[:, 1] == group) & (writes[:, 2] == end)
        return [int(block) for block in writes[mine, 3]]

    def note(self, step: Step, row: int) -> None:
        self._noted = [one.view[self.blocks(step, row, one.group)[:1]].clone() for one in self.states]

    def do(self, name: str, step: Step, row: int) -> None:
        what, kind, layer = (*name.split(), "", "")[:3]
        for at, state in enumerate(self.states):
            if (state.kind, state.layer) == (kind, layer):
                wrong = self._noted[at] if what == "earlier" else torch.zeros_like(self._noted[at])
                self._overwrite(state.view, self.blocks(step, row, state.group), wrong)
        for one in self.paged:
            if one.layer == layer and one.kind == kind:
                (self._zero if what == "zeroed" else self._alias)(one, int(step.rows[row]))

    @staticmethod
    def _overwrite(view: torch.Tensor, blocks: list[int], wrong: torch.Tensor) -> None:
        assert not torch.equal(view[blocks[:1]], wrong)
        view[blocks] = wrong

    def _zero(self, layer: PagedLayer, row: int) -> None:
        block = self.engine.runner.tables[layer.group].get_numpy_array()[row, layer.column].item()
        for view in self.engine.runner.storage.views[layer.layer]:
            assert view[block].any()
            view[block] = 0

    def _alias(self, layer: PagedLayer, row: int) -> None:
        table, column = self.engine.runner.tables[layer.group], layer.column
        block, other = table.get_numpy_array()[row, [column, layer.other]].tolist()
        assert 0 < block != other > 0
        table.write_cells([row], [column], [other])


def run_damaged(engine: Engine, observer: EveryLogit, prompt: list[int]) -> Mapping[str, Completion]:
    """One request for each damage, side by side; by its name."""
    damages = Damages(engine)
    assert damages.layers() == {layer.name for layer in engine.plan.model.layers}
    for name in damages.names:
        engine.add(prompt, greedy(OUTPUT), request_id=name, cache_salt=name)
    done: dict[str, Completion] = {}
    while not engine.idle:
        done.update((one.request_id, one) for one in engine.step())
        step = observer.steps[-1]
        ends = set((step.num_computed + step.num_scheduled).tolist())
        assert len(ends) == 1
        if NOTED in ends:
            damages.note(step, damages.names.index("nothing"))
        if DAMAGED in ends:
            for row, name in enumerate(damages.names):
                damages.do(name, step, row)
    return done


@pytest.mark.parametrize("name", ALL_MODELS)
def test_damaged_layer_changes_the_logits_of_its_request_only(name: str, make_engine: EngineFactory) -> None:
    loaded, observer = loaded_model(name), EveryLogit()
    prompt = shared_prompts(1, 3, prefix=START, longest=1)[0][:START]
    engine = make_engine(loaded, [prompt] * 40, OUTPUT, observer=observer, token_budget=40 * START)
    done = run_damaged(engine, observer, prompt)
    before = DAMAGED - START + 1  # logits behind START .. DAMAGED tokens
    moved = {one: relative_difference(observer.of(end), reference_logits(loaded, end)) for one, end in done.items()}
    assert moved["nothing"].max() <= TOLERANCE
    assert all(one[:before].max() <= TOLERANCE for one in moved.values())
    after = {one: float(values[before:].max()) for one, values in moved.items() if one != "nothing"}
    assert len(after) >= 2
    assert min(after.values()) > 10 * TOLERANCE, after


@pytest.mark.parametrize("name", ALL_MODELS)
def test_blocks_are_not_read_beyond_the_context(name: str, make_engine: EngineFactory) -> None:
    """All pages start as NaN, which would show in any output that reads beyond its own tokens."""
    loaded = loaded_model(name)
    prompts = shared_prompts(5, 4)
    observer = EveryLogit()
    engine = make_engine(loaded, prompts, 20, observer=observer, token_budget=50)
    for views in engine.runner.storage.views.values():
        for view in views:
            view.fill_(torch.nan)
    for done in engine.generate(prompts, greedy(20)):
        assert relative_difference(observer.of(done), reference_logits(loaded, done)).max() <= TOLERANCE
