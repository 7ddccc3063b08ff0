"""Differences that are defects of vLLM, each with a narrow predicate; docs/differential.md lists them.

A look-up that one of LOOK_UP explains is counted, and the run goes on without that hit: nothing has been changed
by a look-up. Any other defect ends its run, because from there on the two caches hold different things.
"""

from calls import Call, Decode, Difference, Grow, Start
from cases import ATTENTION, Group, Kind
from duel import Duel

LOOK_UP = {
    "D5": "chunked attention alone: a hit that ends where a chunk begins, for a prefix that was never seen",
    "D5b": "chunks that are no multiple of the block: a hit with a null block that the next token reads",
    "E1": "EAGLE, blocks of a window smaller than the alignment: its leading run is cut to the alignment twice",
    "E2": "EAGLE beside states: the block behind the hit is not proved for a window",
}
ENDS = {
    "D1": "a state published under a token count that it does not have",
    "D2": "states behind an external prefix take a block more than was predicted",
    "D2b": "columns of rejected drafts make the need of a state group negative, and what another needs is not there",
    "D4": "a hit on a state that was published in the same step is refused",
    "E3": "EAGLE for all groups: a state one block behind the alignment is published, where no hit can end",
}

TAKING = "BlockPool.get_new_blocks"


def defect_of(difference: Difference, duel: Duel) -> str | None:
    """The defect that explains ``difference``; None when ours is to be explained."""
    if difference.what == "hit":
        known = {"D5": _unproved_chunk, "D5b": _hole, "E1": _cut_twice, "E2": _unproved_window}
    else:
        known = {"D1": _wrong_state, "D2": _one_short, "D2b": _negative_need, "D4": _same_step, "E3": _past_state}
    return next((name for name, explains in known.items() if explains(difference, duel)), None)


# -- look-ups


def _unproved_chunk(difference: Difference, duel: Duel) -> bool:
    kinds = [group.kind for group in duel.case.wide]
    theirs, ours = difference.theirs, difference.ours
    return bool(kinds == [Kind.CHUNKED] and theirs.tokens > ours.tokens and theirs.ids[0][-1] == 0)


def _hole(difference: Difference, duel: Duel) -> bool:
    for group, ids in zip(duel.case.wide, difference.theirs.ids, strict=True):
        if group.kind is Kind.CHUNKED and group.span % group.block_size:
            first = difference.theirs.tokens // group.span * group.span // group.block_size
            if 0 in ids[first:]:
                return True
    return False


def _cut_twice(difference: Difference, duel: Duel) -> bool:
    """Ours ends on an aligned edge with all that it needs cached, also by their own index; theirs is shorter.

    A window that drops holds all columns before that edge and the one behind it, fewer than it asks for: a
    leading run. Cut to the alignment, one block dropped, cut again: that loses a whole alignment for a block.
    """
    case, edge = duel.case, difference.ours.tokens
    if len(case.groups) == 1 or difference.theirs.tokens >= edge or edge % case.alignment:
        return False
    cached = duel.theirs.cached(difference.name)
    if not all(_holds(group, columns, edge) for group, columns in zip(case.wide, cached, strict=True)):
        return False
    return any(_leads(case.wide[i], cached[i], edge, case.alignment) for i in case.dropping)


def _leads(group: Group, cached: tuple[bool, ...], edge: int, alignment: int) -> bool:
    """Whether a window's columns up to one behind ``edge`` are cached and fewer than EAGLE asks for."""
    if group.kind is not Kind.SLIDING or group.block_size >= alignment:
        return False
    run = edge // group.block_size + 1
    return run < _read(group) + 1 and len(cached) >= run and all(cached[:run])


def _holds(group: Group, cached: tuple[bool, ...], edge: int) -> bool:
    """Whether all columns that the token behind ``edge`` reads are cached."""
    if group.kind is Kind.RING or group.replayed:  # which no hit needs
        return True
    if group.kind not in ATTENTION and group.kind is not Kind.ALIGN:
        return False
    last = edge // group.block_size
    first = {Kind.SLIDING: max(last - _read(group), 0), Kind.ALIGN: last - 1}.get(group.kind, 0)
    return len(cached) >= last and all(cached[first:last])


def _read(group: Group) -> int:
    """Columns that the token behind a block's edge reads in a window."""
    return -(-(group.span - 1) // group.block_size)


def _unproved_window(difference: Difference, duel: Duel) -> bool:
    """Theirs is longer, and a window that drops lacks the column behind it: EAGLE's reason to drop."""
    case, edge = duel.case, difference.theirs.tokens
    kinds = {group.kind for group in case.wide}
    if edge <= difference.ours.tokens or Kind.ALIGN not in kinds:
        return False
    if any(group.eagle for group in case.wide):
        return False  # where groups are flagged one by one, states are not
    cached = duel.theirs.cached(difference.name)
    windows = (i for i in case.dropping if case.wide[i].kind is Kind.SLIDING)
    behind = {i: edge // case.wide[i].block_size for i in windows}
    return any(column >= len(cached[i]) or not cached[i][column] for i, column in behind.items())


# -- everything else


def _wrong_state(difference: Difference, duel: Duel) -> bool:
    """All that differs: states of theirs published at token counts that the request was never stopped at."""
    edges = _more_states(difference, duel)
    return bool(edges) and difference.request is not None and not edges & difference.request.stored


def _past_state(difference: Difference, duel: Duel) -> bool:
    """All that differs: states of theirs one of their blocks behind a multiple of the alignment, EAGLE for all."""
    case, edges = duel.case, _more_states(difference, duel)
    if not case.use_eagle or len(case.groups) == 1 or any(group.eagle for group in case.wide):
        return False
    sizes = {group.block_size for group in case.wide if group.kind is Kind.ALIGN}
    return bool(edges) and all(edge % case.alignment in sizes for edge in edges)


def _more_states(difference: Difference, duel: Duel) -> set[int]:
    """Token counts under which theirs published states that ours did not; none where anything else differs."""
    if difference.what != "keys" or difference.request is None:
        return set()
    edges = set()
    for group, theirs, ours in zip(duel.case.wide, difference.theirs, difference.ours, strict=True):
        for column, (their_key, our_key) in enumerate(zip(theirs, ours, strict=True), start=1):
            if their_key != our_key and (group.kind is not Kind.ALIGN or our_key is not None):
                return set()
            edges |= {column * group.block_size} if their_key != our_key else set()
    return edges


def _one_short(difference: Difference, duel: Duel) -> bool:
    """A first chunk behind an external prefix, beside states: the block not counted is not there, and theirs raises."""
    call = difference.call
    external = isinstance(call, Start) and call.external > 0
    return external and bool(duel.state_groups) and difference.what == "error" and TAKING in difference.theirs


def _negative_need(difference: Difference, duel: Duel) -> bool:
    """A group beside states with drafts finds no block, and a row of the states is longer than this call needs."""
    if difference.what != "error" or TAKING not in difference.theirs or len(duel.case.groups) == 1:
        return False
    groups = [(i, duel.case.wide[i]) for i in duel.state_groups]
    for name, chunk in _asked(difference.call):
        request = duel.requests.get(name)
        if request is None or not request.resident:
            continue
        table, end = duel.theirs.table(name), request.computed + chunk
        if any(len(table[i]) > -(-end // group.block_size) + group.drafts for i, group in groups):
            return True
    return False


def _asked(call: Call) -> list[tuple[str, int]]:
    """Resident requests that a call asks slots for, and for how many tokens."""
    match call:
        case Grow():
            return [(call.name, call.chunk)]
        case Decode():
            return [(row.name, 1 + row.drafts) for row in call.rows]
        case _:
            return []


def _same_step(difference: Difference, duel: Duel) -> bool:
    if difference.what != "refusal" or difference.theirs is not None:
        return False
    if not isinstance(difference.call, Start) or difference.call.step:
        return False
    hit = duel.theirs.look_up(difference.name).ids
    last = [duel.theirs.keys(((hit[i][-1],),))[0][0] for i in duel.state_groups if hit[i]]
    return any(key in duel.fresh for key in last)
