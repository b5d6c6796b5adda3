"""Proofs of what classes of ranks do together, at the grain of units or chunks, in every timing.

Streams are in-order queues and only waits order two of them, so what has surely ended before an action is known from
the list alone: all before it on its stream, what it waits for, and what was before those on theirs.
"""

from __future__ import annotations

from collections import Counter

from lading.errors import ProgramError
from lading.ir.action import ActionKind
from lading.ir.program import COMPUTE, NETWORK, RECEIVE, STREAMS, ActionList, Border, Program


def verify_ranks(program: Program) -> None:
    """Prove the lists of all ranks, of which each waits for earlier actions only.

    Every SEND has one RECV of the rank that it goes to, and every RECV one SEND.
    Ranks that meet do so in one order. A region finds the parameters that it uses gathered, nothing is gathered twice
    or released twice, and all is released at the end. No ranks wait for each other.

    Raises:
        ProgramError: one of these does not hold; the message names the rank and the action.
    """
    for rank in range(len(program.ranks)):
        _check_gathered(program, rank)
    _check_sends(program)
    _check_meetings(program)
    _check_ends(program)


def _fail(program: Program, rank: int, number: int, expected: str) -> ProgramError:
    action = program.ranks[rank].action(number)
    return ProgramError(f"rank {rank}, action [{action}], {program.label(action)}: {expected}")


def _check_gathered(program: Program, rank: int) -> None:
    """Follow one list: which sharded parameters are gathered, and which of that computing has waited for."""
    actions = program.ranks[rank]
    gathered_by: dict[int, int] = {}  # storage -> its UNSHARD
    seen = -1  # last action on the network's stream that has surely ended before what computes next
    sharded = {storage for used in program.uses for storage in used}
    for number, kind in enumerate(actions.kind):
        storage = actions.storage[number]
        if actions.stream[number] == COMPUTE:
            seen = max([seen, *(w for w in actions.waits[number] if actions.stream[w] == NETWORK)])
        if kind is ActionKind.COMPUTE and program.uses:
            for used in sorted(program.uses[actions.op[number]]):
                if used not in gathered_by:
                    raise _fail(program, rank, number, f"expected storage {used} gathered, got it sharded")
                unshard = gathered_by[used]
                if actions.stream[unshard] == NETWORK and unshard > seen:
                    raise _fail(program, rank, number, f"expected to wait for action {unshard}, which gathers {used}")
        elif kind is ActionKind.UNSHARD and storage in sharded:
            if storage in gathered_by:
                raise _fail(
                    program, rank, number, f"expected a sharded storage, got one that {gathered_by[storage]} gathered"
                )
            gathered_by[storage] = number
        elif kind is ActionKind.RESHARD and gathered_by.pop(storage, None) is None:
            raise _fail(program, rank, number, "expected a gathered storage, got a sharded one")
    if gathered_by and program.schedule != "1f1b":
        return  # torch's lists of actions release what is left when the step ends
    if gathered_by:
        storage, number = next(iter(gathered_by.items()))
        raise _fail(program, rank, number, f"expected storage {storage} released by the end of the step")


def _check_sends(program: Program) -> None:
    """Match sends and receives by what they hand over."""
    sent: Counter[tuple[int, int, int, int]] = Counter()
    for rank, actions in enumerate(program.ranks):
        for number, kind in enumerate(actions.kind):
            key = (actions.storage[number], actions.micro_batch[number])
            if kind not in (ActionKind.SEND, ActionKind.RECV):
                continue
            if not isinstance(program.storages[key[0]], Border):
                raise _fail(program, rank, number, "expected what stages hand to each other")
            ends = (rank, actions.peer[number]) if kind is ActionKind.SEND else (actions.peer[number], rank)
            sent[(*key, *ends)] += 1 if kind is ActionKind.SEND else -1
            if abs(sent[(*key, *ends)]) > 1:
                raise _fail(program, rank, number, "expected it once, got it twice")
    for (storage, micro_batch, source, target), count in sent.items():
        if count:
            what, missing = ("receives", target) if count > 0 else ("sends", source)
            raise ProgramError(
                f"rank {source} to rank {target}, storage {storage}, micro-batch {micro_batch}: expected a SEND and a "
                f"RECV, got one of them; rank {missing} never {what} it"
            )


def _check_meetings(program: Program) -> None:
    """Compare the order in which ranks come to the collectives that several of them take part in."""
    orders: dict[int, list[str]] = {
        rank: [
            group
            for kind, group, storage in zip(actions.kind, actions.group, actions.storage, strict=True)
            if kind is ActionKind.ALL_REDUCE and storage < 0
        ]
        for rank, actions in enumerate(program.ranks)
    }
    for rank, order in orders.items():
        for other, theirs in orders.items():
            both = set(order) & set(theirs)
            mine, others = [g for g in order if g in both], [g for g in theirs if g in both]
            if mine != others:
                raise ProgramError(
                    f"ranks {rank} and {other}: expected collectives in one order, got {mine} and {others}"
                )


def _check_ends(program: Program) -> None:
    """Run the lists without times: every action must come to its turn.

    A rank goes as far as it can, and again when a SEND to it, or an all-reduce that it takes part in, has ended. A RECV
    has a buffer of its own and has ended when its SEND has.
    """
    sends: set[tuple[int, int]] = set()
    ended = [[False] * len(actions) for actions in program.ranks]
    queues = [_queues(actions) for actions in program.ranks]
    meeting = _meetings(program)
    together = {group: set(ranks) for group, ranks in meeting.items()}
    todo = dict.fromkeys(range(len(program.ranks)))
    while todo:
        rank, _ = todo.popitem()
        actions, done = program.ranks[rank], ended[rank]
        progress = True
        while progress:
            progress = False
            for queue in queues[rank]:
                while queue and _may_end(rank, actions, queue[-1], done, sends, meeting):
                    number = queue.pop()
                    done[number] = progress = True
                    if actions.kind[number] is ActionKind.SEND:
                        todo[actions.peer[number]] = None
                    elif actions.group[number] in together and actions.kind[number] is ActionKind.ALL_REDUCE:
                        todo.update(dict.fromkeys(together[actions.group[number]] - {rank}))
    for rank, (actions, done) in enumerate(zip(program.ranks, ended, strict=True)):
        for number, ends in enumerate(done):
            if not ends and not _is_received(actions, number, sends):
                raise _fail(program, rank, number, "expected to come to its turn, got ranks that wait for it")


def _queues(actions: ActionList) -> list[list[int]]:
    """Actions of each stream but what is received, the first ones last."""
    queues: list[list[int]] = [[] for _ in STREAMS]
    for number in range(len(actions) - 1, -1, -1):
        if actions.stream[number] != RECEIVE:
            queues[actions.stream[number]].append(number)
    return queues


def _is_received(actions: ActionList, number: int, sends: set[tuple[int, int]]) -> bool:
    """Whether an action is a RECV whose SEND has ended."""
    return actions.kind[number] is ActionKind.RECV and (actions.storage[number], actions.micro_batch[number]) in sends


def _meetings(program: Program) -> dict[str, set[int]]:
    """Ranks that have yet to come to each all-reduce of several classes of ranks."""
    coming: dict[str, set[int]] = {}
    for rank, actions in enumerate(program.ranks):
        for kind, group, storage in zip(actions.kind, actions.group, actions.storage, strict=True):
            if kind is ActionKind.ALL_REDUCE and storage < 0 and group != "tp":
                coming.setdefault(group, set()).add(rank)
    return coming


def _may_end(
    rank: int,
    actions: ActionList,
    number: int,
    ended: list[bool],
    sends: set[tuple[int, int]],
    coming: dict[str, set[int]],
) -> bool:
    """Whether an action that has come to its turn can end; a SEND can without its RECV, which has a buffer."""
    if not all(ended[wait] or _is_received(actions, wait, sends) for wait in actions.waits[number]):
        return False
    kind, group = actions.kind[number], actions.group[number]
    if kind is ActionKind.SEND:
        sends.add((actions.storage[number], actions.micro_batch[number]))
    if kind is ActionKind.ALL_REDUCE and actions.storage[number] < 0 and group in coming:
        coming[group].discard(rank)
        return not coming[group]
    return True
