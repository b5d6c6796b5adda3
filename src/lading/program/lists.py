"""Lists: one step of every class of ranks, as lists of actions.

A class of ranks does the same thing: the ranks of one pipeline stage group. An action names a region (a run of
operations), a group of parameters, or what stages hand to each other. A list is kept in columns, as it may have a
hundred thousand actions; ``RankList.action`` shows one as a ``lading.ir.action.Action``.

Streams of a rank, each an in-order queue:

    compute         regions, the optimizer, and every collective that computing waits for
    network         UNSHARD and REDUCE_GRAD beside computing, one at a time in the order asked
    send_next       what goes to the stage behind        send_previous   what goes to the stage before
    receive         RECV: each ends when the SEND of its peer does; they do not wait for each other
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lading.errors import ProgramError
from lading.ir.action import Action, ActionKind, parse_action
from lading.program.schedules import Schedule, Work

COMPUTE, NETWORK, SEND_NEXT, SEND_PREVIOUS, RECEIVE = range(5)
STREAMS = ("compute", "network", "send_next", "send_previous", "receive")
#: Unit of a region that is all units of its stage.
ALL_UNITS = -1


class Region(NamedTuple):
    """Kernels ``start`` to ``stop`` of one pass of a unit, in its order; all units of the stage for ``ALL_UNITS``.

    With ``ALL_UNITS`` and ``stop`` > 0, ``start`` is a bucket: what backward runs until that bucket is full.
    """

    stage: int
    unit: int
    work: Work
    start: int = 0
    stop: int = 0


class ParameterGroup(NamedTuple):
    """Parameters of a unit that are gathered and reduced together; ``axes``: over which they are replicated.

    ``ALL_UNITS`` stands for all of a stage's; ``bucket`` counts buckets of gradients, and is -1 for no bucket.
    """

    stage: int
    unit: int
    axes: str
    bucket: int = -1


class Border(NamedTuple):
    """What ``stage`` takes from the stage before it (an activation), or, not ``forward``, from the one behind it."""

    stage: int
    forward: bool


Storage = ParameterGroup | Border


@dataclass
class RankList:
    """Actions of one class of ranks, in the order in which its host asks for them.

    Attributes:
        op: Region by number, -1 for none.
        storage: Storage by number, -1 for none.
        micro_batch: -1 for what belongs to the whole step.
        peer: Class of ranks of a SEND or RECV, else -1.
        group: Axis of the ranks of a collective.
        waits: Earlier actions of this list that must have ended.
        rows: For each action of the schedule, the first and the last COMPUTE that stand for it; where there is none,
            the one before it is the last and the first is behind that.
        sends: For each action of the schedule, the SEND of what it made, or -1.
    """

    kind: list[ActionKind] = field(default_factory=lambda: [])
    stream: list[int] = field(default_factory=lambda: [])
    op: list[int] = field(default_factory=lambda: [])
    storage: list[int] = field(default_factory=lambda: [])
    micro_batch: list[int] = field(default_factory=lambda: [])
    peer: list[int] = field(default_factory=lambda: [])
    group: list[str] = field(default_factory=lambda: [])
    waits: list[tuple[int, ...]] = field(default_factory=lambda: [])
    rows: list[tuple[int, int]] = field(default_factory=lambda: [])
    sends: list[int] = field(default_factory=lambda: [])

    def __len__(self) -> int:
        return len(self.kind)

    def add(
        self,
        kind: ActionKind,
        stream: int,
        waits: tuple[int, ...] = (),
        *,
        op: int = -1,
        storage: int = -1,
        micro_batch: int = -1,
        peer: int = -1,
        group: str = "",
    ) -> int:
        """Append an action; returns its id."""
        self.kind.append(kind)
        self.stream.append(stream)
        self.op.append(op)
        self.storage.append(storage)
        self.micro_batch.append(micro_batch)
        self.peer.append(peer)
        self.group.append(group)
        self.waits.append(waits)
        return len(self.kind) - 1

    def action(self, number: int) -> Action:
        """One action as it prints."""

        def known(value: int) -> int | None:
            return None if value < 0 else value

        return Action(
            number,
            self.kind[number],
            STREAMS[self.stream[number]],
            op=known(self.op[number]),
            storage=known(self.storage[number]),
            micro_batch=known(self.micro_batch[number]),
            group=self.group[number],
            peer=known(self.peer[number]),
            waits=self.waits[number],
        )


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One step of every class of ranks.

    Attributes:
        plan: The pipeline's schedule that the lists stand for; one rank where there is no pipeline.
        ranks: List of each class: of each rank of the pipeline.
        regions, storages: What ``op`` and ``storage`` of actions number.
        uses: For each region the sharded storages that it reads, by number.
        alike: By stage, for each of its units the first unit that is like it.
        repeat: (micro-batch, times): the actions of this micro-batch stand for so many micro-batches more, each as
            long as itself. Only where there is one class of ranks.
    """

    plan: Schedule
    ranks: tuple[RankList, ...]
    regions: tuple[Region, ...]
    storages: tuple[Storage, ...]
    uses: tuple[frozenset[int], ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()
    repeat: tuple[int, int] = (0, 0)

    @cached_property
    def bounds(self) -> list[int]:
        """Where the actions of each rank begin among those of all, and their end."""
        ends = [0]
        for rank in self.ranks:
            ends.append(ends[-1] + len(rank))
        return ends

    def label(self, rank: int, number: int) -> str:
        """Text for people: ``'forward of stage 2, micro-batch 5'``."""
        actions = self.ranks[rank]
        kind, micro_batch = actions.kind[number], actions.micro_batch[number]
        what = "optimizer" if kind is ActionKind.STEP else kind.value.lower().replace("_", " ")
        if (op := actions.op[number]) >= 0:
            region = self.regions[op]
            what = f"{_WORDS[region.work]} of stage {region.stage}"
            what += f", unit {region.unit}" if region.unit >= 0 else ""
        elif (storage := actions.storage[number]) >= 0:
            what += f" {_name(self.storages[storage])}"
        return what + (f", micro-batch {micro_batch}" if micro_batch >= 0 else "")

    def text(self) -> str:
        """One line an action, the lists of ranks one after the other, and before them what they number."""
        lines = [f"op {n} {' '.join(map(str, _plain(region)))}{self._used(n)}" for n, region in enumerate(self.regions)]
        lines += [f"storage {n} {_line(storage)}" for n, storage in enumerate(self.storages)]
        if self.repeat[1]:
            lines.append(f"repeat mb={self.repeat[0]} times={self.repeat[1]}")
        for rank, actions in enumerate(self.ranks):
            lines.append(f"rank {rank}")
            lines += [str(actions.action(number)) for number in range(len(actions))]
        return "\n".join(lines) + "\n"

    def _used(self, region: int) -> str:
        used = sorted(self.uses[region]) if self.uses else []
        return f" uses={','.join(map(str, used))}" if used else ""


_WORDS = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "input gradient",
    Work.BACKWARD_WEIGHT: "weight gradient",
}


def _plain(region: Region) -> tuple[int, ...]:
    return tuple(int(value) for value in region)


def _line(storage: Storage) -> str:
    if isinstance(storage, Border):
        return f"border {storage.stage} {'forward' if storage.forward else 'backward'}"
    return f"parameters {storage.stage} {storage.unit} {storage.axes} {storage.bucket}"


def _name(storage: Storage) -> str:
    if isinstance(storage, Border):
        return f"{'activation' if storage.forward else 'gradient'} of stage {storage.stage}"
    unit = f", unit {storage.unit}" if storage.unit >= 0 else ""
    bucket = f", bucket {storage.bucket}" if storage.bucket >= 0 else ""
    return f"parameters of stage {storage.stage}{unit}{bucket} ({storage.axes})"


def parse_lists(text: str) -> RankProgram:
    """The lists that print as ``RankProgram.text``; what only their maker knows (rows of a schedule) is left out.

    Raises:
        ProgramError: a line is not what ``RankProgram.text`` writes.
    """
    regions: list[Region] = []
    storages: list[Storage] = []
    uses: list[frozenset[int]] = []
    ranks: list[RankList] = []
    repeat = (0, 0)
    for line in text.splitlines():
        words = line.split()
        try:
            if words[0] == "op":
                stage, unit, work, start, stop = map(int, words[2:7])
                regions.append(Region(stage, unit, Work(work), start, stop))
                uses.append(
                    frozenset(map(int, words[7].removeprefix("uses=").split(","))) if words[7:] else frozenset()
                )
            elif words[0] == "storage":
                storages.append(_parse_storage(words[2:]))
            elif words[0] == "repeat":
                repeat = (int(words[1].removeprefix("mb=")), int(words[2].removeprefix("times=")))
            elif words[0] == "rank":
                ranks.append(RankList())
            else:
                _parse_action(line, ranks[-1])
        except (ValueError, IndexError, KeyError) as error:
            raise ProgramError(f"expected a line of a program's text, got {line!r}") from error
    plan = Schedule("lists", max(1, len(ranks)), 1, 1, ())
    return RankProgram(plan, tuple(ranks), tuple(regions), tuple(storages), tuple(uses), (), repeat)


def _parse_storage(words: list[str]) -> Storage:
    if words[0] == "border":
        return Border(int(words[1]), {"forward": True, "backward": False}[words[2]])
    return ParameterGroup(int(words[1]), int(words[2]), words[3], int(words[4]))


def _parse_action(line: str, actions: RankList) -> None:
    action = parse_action(line)
    if action.id != len(actions):
        raise ProgramError(f"expected action {len(actions)}, got {line!r}")
    actions.add(
        action.kind,
        STREAMS.index(action.stream),
        action.waits,
        op=-1 if action.op is None else action.op,
        storage=-1 if action.storage is None else action.storage,
        micro_batch=-1 if action.micro_batch is None else action.micro_batch,
        peer=-1 if action.peer is None else action.peer,
        group=action.group,
    )
