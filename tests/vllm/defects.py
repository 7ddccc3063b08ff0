"""Differences that are defects of vLLM, each with a narrow predicate; the names are those of the project's list.

D1  a state published under a token count that it does not have: the chunk went past the block's end.
D4  a hit on a state published in the same step is refused although nothing is wrong with it.
D5  chunked local attention alone: a hit that ends where the chunk begins proves nothing about the prefix.
D5b chunks that are no multiple of the block: a hit with a hole, a null block that the next token reads.
"""

from calls import Start
from cases import Kind
from difference import Difference
from duel import Duel


def defect_of(difference: Difference, duel: Duel) -> str | None:
    """The defect that explains ``difference``; None when ours is to be explained."""
    for name, explains in (("D1", _wrong_state), ("D4", _same_step), ("D5", _unproved_chunk), ("D5b", _hole)):
        if explains(difference, duel):
            return name
    return None


def _wrong_state(difference: Difference, duel: Duel) -> bool:
    """All that differs: states of theirs published at token counts that the request was never stopped at."""
    if difference.what != "keys" or difference.request is None:
        return False
    for number, (theirs, ours) in enumerate(zip(difference.theirs, difference.ours, strict=True)):
        group = duel.case.groups[number]
        for column, (their_key, our_key) in enumerate(zip(theirs, ours, strict=True)):
            if their_key == our_key:
                continue
            edge = (column + 1) * group.block_size
            if group.kind is not Kind.ALIGN or our_key is not None or edge in difference.request.stored:
                return False
    return True


def _same_step(difference: Difference, duel: Duel) -> bool:
    if difference.what != "refusal" or difference.theirs is not None:
        return False
    if not isinstance(difference.call, Start) or difference.call.step:
        return False
    hit = duel.theirs.look_up(difference.name).ids
    last = [duel.theirs.keys(((hit[i][-1],),))[0][0] for i in duel.state_groups if hit[i]]
    return any(key in duel.fresh for key in last)


def _unproved_chunk(difference: Difference, duel: Duel) -> bool:
    kinds = [group.kind for group in duel.case.groups]
    if difference.what != "hit" or kinds != [Kind.CHUNKED]:
        return False
    theirs, ours = difference.theirs, difference.ours
    return bool(theirs.tokens > ours.tokens and theirs.ids[0][-1] == 0)


def _hole(difference: Difference, duel: Duel) -> bool:
    if difference.what != "hit":
        return False
    for group, ids in zip(duel.case.groups, difference.theirs.ids, strict=True):
        if group.kind is Kind.CHUNKED and group.span % group.block_size:
            first = difference.theirs.tokens // group.span * group.span // group.block_size
            if 0 in ids[first:]:
                return True
    return False
