"""Drafts, step by step: what is proposed, run, accepted, kept and cached (docs/contracts.md, 4, 8 and 10)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hybridkv.cache import KVCacheManager
from hybridkv.cache.placement import placement_named
from hybridkv.errors import ConfigError, OwnershipError, WorkerError
from hybridkv.planner.config import KVCacheConfig
from hybridkv.request import Request, SamplingParams
from hybridkv.schedule import Outcome, Scheduler, SchedulerLimits
from hybridkv.specs import KVCacheSpec, UniformTypeKVCacheSpecs
from hybridkv.step import Csr, Step, StepResult
from hybridkv.testing.configs import full_spec, model_config, natural_model_config, state_spec, window_spec
from hybridkv.wire import decode_reply, decode_step, encode_reply, encode_step

TOKEN = 7


def reference(*specs: KVCacheSpec, num_blocks: int = 60) -> KVCacheConfig:
    return model_config(num_blocks, specs)


def natural(*specs: KVCacheSpec, num_blocks: int = 60) -> KVCacheConfig:
    return natural_model_config(num_blocks, specs, [2] * len(specs))


def scheduler(
    config: KVCacheConfig, drafts: int = 3, *, max_batched_tokens: int = 64, max_in_flight: int = 1
) -> Scheduler:
    placement = placement_named("interval:5", 1) if config.slabs is not None else None
    cache = KVCacheManager(config, 100, placement=placement)
    limits = SchedulerLimits(8, max_batched_tokens, max_in_flight, num_speculative_tokens=drafts)
    return Scheduler(cache, limits)


def add(
    sched: Scheduler,
    name: str,
    length: int = 8,
    *,
    first: int = 100,
    marks: Sequence[int] = (),
    **sampling: int | tuple[int, ...],
) -> Request:
    """Tokens first, first + 1, ..."""
    params = SamplingParams(**{"max_tokens": 20, **sampling})  # type: ignore[arg-type]  # by name
    request = Request(name, range(first, first + length), params, hasher=sched.cache.hasher, marks=marks)
    sched.add(request)
    return request


def result(step: Step, accepted: Mapping[int, int] | None = None) -> StepResult:
    """So many drafts of each row are accepted, by its place, all that are not named; then TOKEN."""
    tokens = []
    for i, samples in enumerate(step.samples.tolist()):
        drafts = step.drafts[i].tolist()
        tokens.append([*drafts[: (accepted or {}).get(i, len(drafts))], TOKEN] if samples else [])
    counts = np.array([len(one) for one in tokens], np.int32)
    return StepResult(step.id, Csr.from_lists(tokens), counts)


def update(sched: Scheduler, step: Step, **accepted: int) -> Outcome:
    outcome = sched.update(result(step, {int(place[1:]): count for place, count in accepted.items()}))
    sched.check()
    return outcome


def prefilled(
    config: KVCacheConfig, *lengths: int, drafts: int = 3, max_tokens: int = 20, **limits: int
) -> tuple[Scheduler, list[Request]]:
    """Requests a, b, .. that are done with their prompts and have sampled one token."""
    sched = scheduler(config, drafts, **limits)
    named = enumerate(zip("abcdef", lengths, strict=False))
    requests = [add(sched, name, length, first=100 * i + 100, max_tokens=max_tokens) for i, (name, length) in named]
    update(sched, sched.schedule())
    return sched, requests


def drafts_of(step: Step) -> list[list[int]]:
    return [step.drafts[i].tolist() for i in range(len(step))]


# -- proposals


def test_a_step_runs_drafts_behind_the_last_token() -> None:
    sched, (a, _) = prefilled(natural(full_spec(4)), 8, 6)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    assert step.num_computed.tolist() == [8, 6]
    assert step.num_scheduled.tolist() == [4, 1]
    assert [step.token_ids[i].tolist() for i in range(2)] == [[TOKEN, 1, 2, 3], [TOKEN]]
    assert drafts_of(step) == [[1, 2, 3], []]
    assert step.samples.tolist() == [True, True]
    outcome = update(sched, step, _0=2)
    assert [outcome.appended[i].tolist() for i in range(2)] == [[1, 2, TOKEN], [TOKEN]]
    assert a.output_token_ids == [TOKEN, 1, 2, TOKEN]
    assert a.num_computed_tokens == 11
    after = sched.schedule()
    assert after.num_computed.tolist() == [11, 7]
    assert drafts_of(after) == [[], []]  # a proposal is for one step


def test_what_does_not_fit_is_cut_from_the_tail() -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8, 6, 5, max_batched_tokens=20)
    sched.propose({"a": range(9), "b": [], "nobody": [1]})
    assert drafts_of(sched.schedule()) == [[0, 1, 2], [], []]  # as many as planned
    sched, _ = prefilled(natural(full_spec(4)), 8, 6, 5, max_batched_tokens=20)
    sched.limits = SchedulerLimits(max_batched_tokens=20, num_speculative_tokens=3)
    for _ in range(17):
        update(sched, sched.schedule())
    sched.propose({"a": [1, 2, 3], "b": [1, 2, 3]})
    step = sched.schedule()
    assert drafts_of(step) == [[1], [1], []]  # 18 of 20 tokens are there; one is sampled behind the draft
    assert [str(one.reason) for one in update(sched, step).finished] == ["length", "length"]


def test_drafts_get_what_budget_the_others_leave() -> None:
    sched, _ = prefilled(natural(full_spec(4)), 2, 2, 2, max_batched_tokens=6)
    for name in "abc":
        sched.propose({name: [1, 2]})
    assert [len(one) for one in drafts_of(sched.schedule())] == [2, 1, 0]


def test_nobody_gives_blocks_up_for_drafts() -> None:
    sched, (a, b) = prefilled(reference(full_spec(4), num_blocks=6), 8, 7, max_tokens=4)
    sched.propose({"a": [1, 2], "b": [1, 2]})
    step = sched.schedule()  # a takes the last block, for tokens 8 .. 10; b has room for token 7 alone
    assert [len(one) for one in drafts_of(step)] == [2, 0]
    assert step.num_computed.tolist() == [8, 7]
    assert (a.num_preemptions, b.num_preemptions) == (0, 0)


def test_who_cannot_take_drafts_gets_none() -> None:
    sched = scheduler(natural(full_spec(4)), max_batched_tokens=8, max_in_flight=2)
    add(sched, "a", 12)
    add(sched, "b", 4)
    update(sched, sched.schedule())
    sched.propose({"a": [1], "b": [1]})  # neither is done with its prompt
    step = sched.schedule()
    assert drafts_of(step) == [[], []]
    sched.propose({"a": [1], "b": [1]})  # their results are to come
    ahead = sched.schedule()
    assert drafts_of(ahead) == [[], []]
    update(sched, step)
    update(sched, ahead)
    sched.propose({"b": [1], "a": [2]})
    assert drafts_of(sched.schedule()) == [[2], [1]]


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_proposals_die_with_their_request(end: str) -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8)
    sched.propose({"a": [1, 2]})
    getattr(sched, end)("a")
    add(sched, "b", 8)
    step = sched.schedule()  # in the same row
    assert drafts_of(step) == [[]]
    update(sched, step)
    assert drafts_of(sched.schedule()) == [[]]


@pytest.mark.parametrize("wrong", [[-1], [1, 2**31], ["a"]])
def test_drafts_must_be_token_ids(wrong: list[int]) -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8, 8)
    with pytest.raises(ConfigError, match="drafts of 'b': token ids must"):
        sched.propose({"a": [1], "b": wrong})
    assert drafts_of(sched.schedule()) == [[], []]  # those of a neither


def test_only_the_owner_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8)
    monkeypatch.setattr("threading.get_ident", lambda: -1)
    with pytest.raises(OwnershipError):
        sched.propose({"a": [1]})


def states_of_two_sizes(block_size: int, drafts: int, mode: str) -> UniformTypeKVCacheSpecs:
    """Recurrent layers whose pages differ, group 1, of 32 bytes together as a block of 4 tokens."""
    one = state_spec(block_size, drafts, mode)
    layers = ((f"group1.layer{i}", replace(one, shapes=((size,),))) for i, size in enumerate((5, 3)))
    return UniformTypeKVCacheSpecs(block_size=block_size, layers=tuple(layers))


@pytest.mark.parametrize(("natural_layout", "mode"), [(False, "align"), (False, "none"), (True, "none")])
def test_states_of_several_sizes_need_blocks_for_drafts_too(natural_layout: bool, mode: str) -> None:
    def config(drafts: int) -> KVCacheConfig:
        specs = full_spec(4), states_of_two_sizes(4, drafts, mode)
        if natural_layout:
            return natural_model_config(60, specs, [2, 2], layers_per_group=2)
        return model_config(60, specs, layers_per_group=2)

    with pytest.raises(ConfigError, match="num_speculative_tokens is 3, but group 1 has 2 speculative state blocks"):
        scheduler(config(2))
    sched, _ = prefilled(config(3), 3)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    written = step.state_writes[:, 3]
    assert len(set(written.tolist())) == len(written) == 4  # one block behind each token, none of them null
    assert written.all()
    update(sched, step, _0=2)


def test_states_need_blocks_for_drafts() -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 3, but group 1 has 2 speculative state blocks"):
        scheduler(natural(full_spec(4), state_spec(4, 2)))
    with pytest.raises(ConfigError, match=r"states kept every 3 tokens \(group 0\) need fewer drafts"):
        scheduler(reference(state_spec(3, 3)))
    scheduler(natural(state_spec(3, 3)))
    with pytest.raises(ConfigError, match="num_speculative_tokens must not be negative"):
        SchedulerLimits(num_speculative_tokens=-1)


# -- results


def drafted() -> tuple[Scheduler, Step]:
    sched, _ = prefilled(natural(full_spec(4)), 8, 6)
    sched.propose({"a": [1, 2]})
    return sched, sched.schedule()


@pytest.mark.parametrize(
    ("tokens", "accepted", "why"),
    [
        ([[1, 2, 7], [7]], None, "has drafts: its result must say num_accepted"),
        ([[1, 2, 7], [7]], [2, 1], "num_accepted of the result must be the number of its tokens"),
        ([[1, 3, 7], [7]], [3, 1], "tokens accepted of row 0 are not its drafts"),
        ([[1, 2, 7, 7], [7]], [4, 1], "must hold 1 .. drafts \\+ 1 tokens"),
        ([[], [7]], [0, 1], "must hold 1 .. drafts \\+ 1 tokens"),
        ([[7], [7, 7]], [1, 2], "must hold 1 .. drafts \\+ 1 tokens"),
    ],
)
def test_results_that_do_not_fit(tokens: list[list[int]], accepted: list[int] | None, why: str) -> None:
    sched, step = drafted()
    counts = None if accepted is None else np.array(accepted, np.int32)
    with pytest.raises(WorkerError, match=why):
        sched.update(StepResult(step.id, Csr.from_lists(tokens), counts))
    sched.check()
    update(sched, step)  # nothing was changed


def test_a_step_without_drafts_may_say_num_accepted() -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8)
    step = sched.schedule()
    with pytest.raises(WorkerError, match="num_accepted of the result must be the number"):
        sched.update(StepResult(step.id, Csr.from_lists([[7]]), np.array([2], np.int32)))
    assert sched.update(StepResult(step.id, Csr.from_lists([[7]]))).appended[0].tolist() == [7]


def test_a_stop_token_among_accepted_drafts_ends_the_output() -> None:
    sched = scheduler(natural(full_spec(4), state_spec(4, 3)))
    a = add(sched, "a", 8, stop_token_ids=(2,))
    update(sched, sched.schedule())
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    state = step.state_writes[step.state_writes[:, 2] == 11][0, 3]
    outcome = update(sched, step)
    assert outcome.appended[0].tolist() == [1, 2]
    assert [str(one.reason) for one in outcome.finished] == ["stop"]
    assert a.num_tokens == 11
    assert sched.drained
    hit = sched.cache.find_hit(Request("next", [*a.token_ids().tolist(), 5], hasher=sched.cache.hasher))
    assert hit.tokens == 11  # the stop token is computed, what lies behind it is not kept
    assert sched.cache.block_pool.local(1, np.array([hit.sources[1]])).tolist() == [state]


def test_statistics_count_by_position() -> None:
    sched, _ = prefilled(natural(full_spec(4)), 8, 6)
    for a, b in ((3, 0), (1, 1), (0, 0)):
        sched.propose({"a": [1, 2, 3], "b": [1]})
        update(sched, sched.schedule(), _0=a, _1=b)
    now = sched.statistics()
    assert now.drafted_by_position == (6, 3, 3)
    assert now.accepted_by_position == (3, 1, 1)
    assert (now.drafted_tokens, now.accepted_tokens) == (12, 5)
    assert scheduler(natural(full_spec(4))).statistics().drafted_by_position == ()


# -- what is cached


@pytest.mark.parametrize("layout", [natural, reference])
@pytest.mark.parametrize(("accepted", "hit"), [(0, 8), (2, 8), (3, 12)])
def test_only_accepted_drafts_are_published(layout: type, accepted: int, hit: int) -> None:
    """Drafts fill the block of tokens 8 .. 11; a window that reads five tokens is at its end as well."""
    sched, (a,) = prefilled(layout(full_spec(4), window_spec(4, 5)), 8)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    prompt = [*a.token_ids().tolist(), 1, 2, 3, 50]
    assert sched.cache.find_hit(Request("x", prompt, hasher=sched.cache.hasher)).tokens == 8
    update(sched, step, _0=accepted)
    assert sched.cache.find_hit(Request("x", prompt, hasher=sched.cache.hasher)).tokens == hit


@pytest.mark.parametrize(("accepted", "copies"), [(0, []), (1, [10]), (3, [10])])
def test_a_mark_among_drafts_is_kept_when_it_is_accepted(accepted: int, copies: list[int]) -> None:
    """The state at 10 is copied by the next step, from where the draft left it; if it was rejected, written there."""
    sched = scheduler(natural(full_spec(4), state_spec(4, 3)))
    a = add(sched, "a", 8, marks=(10,))
    update(sched, sched.schedule())
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    where = step.state_writes[step.state_writes[:, 2] == 10][0, 3]
    update(sched, step, _0=accepted)
    after = sched.schedule()
    assert [copy.source for copy in after.copies] == [where] * len(copies)
    assert all(copy.stage == "before" and copy.kind == "state" for copy in after.copies)
    update(sched, after)
    prompt = [*a.token_ids().tolist()[:10], 50]
    assert sched.cache.find_hit(Request("x", prompt, hasher=sched.cache.hasher)).tokens == 10


# -- states


def test_in_the_natural_layout_the_accepted_state_is_the_first_block() -> None:
    sched, _ = prefilled(natural(full_spec(4), state_spec(4, 3)), 7)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    blocks = step.state_writes[:, 3].tolist()
    assert step.state_writes[:, 2].tolist() == [8, 9, 10, 11]
    assert len(set(blocks)) == 4
    assert blocks[0] == step.state_read[0, 1]
    update(sched, step, _0=2)
    after = sched.schedule()
    assert after.state_read[0, 1] == blocks[2]
    assert after.state_writes[0].tolist() == [0, 1, 11, blocks[2]]
    told = [(c, b) for g, c, b in zip(after.cells.group, after.cells.column, after.cells.block, strict=True) if g == 1]
    assert told == [(0, blocks[2]), (2, blocks[0])]
    update(sched, after)
    assert len(sched.schedule().cells) == 0


def test_a_rotation_is_told_when_the_row_runs() -> None:
    """A step that fails takes back only what it ran: cells of other rows must not be in it."""
    sched, _ = prefilled(natural(full_spec(4), state_spec(4, 3)), 7, 7, max_batched_tokens=40, max_in_flight=2)
    sched.propose({"b": [1, 2]})
    step = sched.schedule()
    ahead = sched.schedule()
    assert step.rows.tolist() == [0, 1]
    assert ahead.rows.tolist() == [0]  # b waits for the verdict
    update(sched, step)
    assert 1 not in ahead.cells.row
    update(sched, ahead)
    assert sorted(sched.schedule().cells.column[-2:].tolist()) == [0, 2]


def test_in_the_reference_layout_columns_only_grow() -> None:
    """Blocks of 16 tokens, 2 drafts, from 61 computed tokens on: an edge among the drafts, one at their end."""
    sched, _ = prefilled(reference(full_spec(16), state_spec(16, 2)), 61, drafts=2)
    update(sched, sched.schedule())  # the prompt's chunk ends at 48 first
    seen: dict[int, int] = {}
    read, written = [], []
    for accepted in (0, 1, 2, 2):
        sched.propose({"a": [1, 2]})
        step = sched.schedule()
        for group, column, block in zip(step.cells.group, step.cells.column, step.cells.block, strict=True):
            assert group == 0 or seen.setdefault(int(column), int(block)) == block
        cells = {block: column for column, block in enumerate(sched.cache.get_block_ids("a")[1])}
        read.append(cells[step.state_read[0, 1]])
        written.append([(tokens, cells[block]) for _, group, tokens, block in step.state_writes.tolist() if group == 1])
        assert not step.copies
        update(sched, step, _0=accepted)
    assert written == [
        [(62, 5), (63, 4), (64, 3)],  # the step ends at an edge: that state where it can be published
        [(63, 4), (64, 3), (65, 6)],
        [(65, 4), (66, 5), (67, 6)],
        [(68, 4), (69, 5), (70, 6)],
    ]
    assert read == [3, 5, 3, 6]


# -- together with others


def test_other_rows_run_ahead_of_a_row_with_drafts() -> None:
    sched, (a, b) = prefilled(natural(full_spec(4)), 8, 8, max_in_flight=3)
    sched.propose({"a": [1, 2]})
    steps = [sched.schedule() for _ in range(3)]
    assert [step.rows.tolist() for step in steps] == [[0, 1], [1], [1]]
    for step in steps:
        update(sched, step)
    assert (a.num_output_tokens, b.num_output_tokens) == (4, 4)
    assert sched.schedule().rows.tolist() == [0, 1]


def test_what_waits_for_drafts_alone_is_known_before_a_step_is_made() -> None:
    """Not where another row runs ahead, a request waits, or nobody runs at all."""
    sched, _ = prefilled(natural(full_spec(4)), 8, 6, max_in_flight=2)
    sched.propose({"a": [1, 2]})
    mixed = sched.schedule()
    waits = [sched.waits_for_drafts]
    ahead = sched.schedule()
    assert len(ahead) == 1
    update(sched, mixed)
    update(sched, ahead)
    sched.propose({"a": [1], "b": [2]})
    both = sched.schedule()
    waits.append(sched.waits_for_drafts)
    add(sched, "c")
    waits.append(sched.waits_for_drafts)
    ahead = sched.schedule()
    assert [new.request_id for new in ahead.new_rows] == ["c"]
    update(sched, both)
    waits += [sched.waits_for_drafts, scheduler(natural(full_spec(4))).waits_for_drafts]
    assert waits == [False, True, False, False, False]


def test_a_preempted_request_gets_all_that_was_accepted() -> None:
    sched, (_, b) = prefilled(natural(full_spec(4), state_spec(4, 2)), 8, 8, drafts=2, max_in_flight=2)
    sched.propose({"b": [1, 2]})
    step = sched.schedule()
    sched._outcomes.preempt_last(sched._in_flight)
    sched.check()
    outcome = update(sched, step)
    assert outcome.appended[1].tolist() == [1, 2, TOKEN]
    assert (b.num_tokens, b.num_computed_tokens, b.num_preemptions) == (12, 0, 1)


def test_a_failed_step_takes_its_drafts_along() -> None:
    sched, (a,) = prefilled(natural(full_spec(4), state_spec(4, 3)), 8)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    sched.fail(step.id, "broken")
    sched.check()
    assert (a.num_tokens, a.num_computed_tokens) == (9, 0)
    after = sched.schedule()
    assert drafts_of(after) == [[]]
    update(sched, after)
    assert a.num_tokens == 10


def test_an_aborted_request_keeps_none_of_its_drafts() -> None:
    sched, (a,) = prefilled(natural(full_spec(4), state_spec(4, 3)), 8)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    sched.abort("a")
    update(sched, step)
    assert sched.drained
    prompt = [*a.token_ids().tolist(), 1, 2, 3]
    assert sched.cache.find_hit(Request("x", prompt, hasher=sched.cache.hasher)).tokens == 9


def test_branches_begin_behind_accepted_drafts() -> None:
    sched, (a,) = prefilled(natural(full_spec(4), state_spec(4, 3)), 8)
    sched.propose({"a": [1, 2, 3]})
    step = sched.schedule()
    accepted = step.state_writes[step.state_writes[:, 2] == 11][0, 3]
    update(sched, step, _0=2)
    sched.fork("a", 1)
    after = sched.schedule()
    assert after.num_computed.tolist() == [11, 11]
    copied = [copy.source for copy in after.copies if copy.group == 1]
    assert accepted in copied
    assert a.num_tokens == 12


def test_drafts_are_looked_up_by_eagles_rule() -> None:
    """A hit drops the last cached block; what drafts filled counts as cached once it is accepted."""
    cache = KVCacheManager(reference(full_spec(4)), 100, use_eagle=True)
    sched = Scheduler(cache, SchedulerLimits(num_speculative_tokens=3))
    a = add(sched, "a", 8)
    update(sched, sched.schedule())
    prompt = [*a.token_ids().tolist(), 1, 2, 3, 50]
    assert cache.find_hit(Request("x", prompt, hasher=cache.hasher)).tokens == 4
    sched.propose({"a": [1, 2, 3]})
    update(sched, sched.schedule())
    assert cache.find_hit(Request("x", prompt, hasher=cache.hasher)).tokens == 8


def test_drafts_cross_the_wire() -> None:
    sched, step = drafted()
    sent = decode_step(encode_step(step))
    assert isinstance(sent, Step)
    assert drafts_of(sent) == [[1, 2], []]
    back = decode_reply(encode_reply(result(sent, {0: 1})))
    assert isinstance(back, StepResult)
    assert back.num_accepted is not None
    assert back.num_accepted.tolist() == [2, 1]
    assert sched.update(back).appended[0].tolist() == [1, TOKEN]
