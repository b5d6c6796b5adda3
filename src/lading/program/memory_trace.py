"""Memory trace: bytes of a class of ranks, counted from its list in the order in which its host asks for them.

What comes and goes follows from the list alone and is found once for each list; how many bytes each thing has is told
by the caller. An allocator is asked in the order in which the host issues actions, not in that in which streams run
them, so the peak does not depend on times.

[Note: what comes and goes]
A region of forward leaves what backward reads (SAVED) until its unit's backward; while it runs, most is alive (RUNS),
and between two regions of a unit what the first left (LEAVES). An UNSHARD takes a flat buffer (BUFFER), before it the
rank's own shard in the dtype that travels (CAST); the parameters (WHOLE) are copied out of it as a region is to use
them, before the host asks for the next one, and stay until RESHARD. In forward the buffer stays until the next group is
copied out or the model's forward ends (torch 2.13, ``FSDPState._post_forward``); in backward it goes at once. A
region of backward makes gradients (MADE), which stay until REDUCE_GRAD has copied them into a buffer (INPUT), which
stays until the next one's, also through the next forward (``_root_post_backward_final_callback``). What is reduced is
the gradient of the rank's shard (SHARD): the first one stays, later ones are added to it. Source: torch 2.13,
distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lading.ir.action import ActionKind, Work
from lading.ir.graph import Role
from lading.ir.program import ALL_UNITS, ParameterGroup, Program, Region

Ints = npt.NDArray[np.int64]


class What(IntEnum):
    """Kinds of bytes: the first line is of a region, the second of a region's unit, the third of a parameter group.

    RUNS is the most activations while a region runs, GRADIENTS what it has made by then; ADDS is both, where each is
    added to one that is there. ENTERS is what enters a unit, there from the end of the region before it on. HANDED is
    what a stage keeps of a micro-batch besides until its backward has ended. MADE of a region is what it makes, of a
    group what is reduced.
    """

    RUNS, ADDS, GRADIENTS, LEAVES = range(4)
    SAVED, ENTERS, HANDED = range(4, 7)
    MADE, BUFFER, CAST, WHOLE, INPUT, SHARD = range(7, 13)


class Thing(NamedTuple):
    """Bytes that come and go together."""

    what: What
    of: Region | ParameterGroup


@dataclass(frozen=True, eq=False)
class Changes:
    """Changes of memory: what comes (1) and goes (-1), in the order in which a rank's host asks for it.

    Attributes:
        number, sign, action: One entry a change: its number in ``things``, 1 or -1, and the action that asks for it.
        ends: 1 for what changes as the action ends, which is a region's; else 0.
    """

    things: tuple[Thing, ...]
    number: Ints
    sign: Ints
    action: Ints
    ends: Ints


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """Bytes of one class of ranks over a step.

    Attributes:
        sizes, roles: Bytes and role of each of ``changes.things``.
        fixed: Bytes that are there all the time, by role.
    """

    changes: Changes
    sizes: Ints
    roles: tuple[Role, ...]
    fixed: Mapping[Role, int]

    @cached_property
    def _deltas(self) -> Ints:
        return self.sizes[self.changes.number] * self.changes.sign

    @cached_property
    def totals(self) -> Ints:
        """Bytes after each change, all roles together."""
        return np.cumsum(self._deltas) + sum(self.fixed.values())

    @property
    def peak_bytes(self) -> int:
        """Largest sum of bytes at one moment."""
        return max(sum(self.fixed.values()), int(self.totals.max(initial=0)))

    @cached_property
    def peak(self) -> dict[Role, int]:
        """Bytes by role when their sum is largest, the first time that it is."""
        peak = dict(self.fixed)
        if not len(self.totals) or self.totals.max() < sum(self.fixed.values()):
            return peak
        until = int(self.totals.argmax()) + 1
        counts = np.bincount(self.changes.number[:until], self.changes.sign[:until], len(self.sizes))
        for role, size in zip(self.roles, (counts.astype(np.int64) * self.sizes).tolist(), strict=True):
            peak[role] = peak.get(role, 0) + size
        return peak


def memory_trace(
    changes: Changes,
    size_of: Callable[[Thing], int],
    role_of: Mapping[What, Role],
    fixed: Mapping[Role, int],
) -> MemoryTrace:
    """Count the bytes of a list.

    Args:
        changes: What comes and goes, of ``memory_changes``.
        size_of: Bytes of each thing.
        role_of: Role of each kind.
        fixed: Bytes that are there all the time, by role.
    """
    sizes = np.array([size_of(thing) for thing in changes.things], np.int64)
    return MemoryTrace(changes, sizes, tuple(role_of[thing.what] for thing in changes.things), fixed)


class GradientRules(NamedTuple):
    """Rules of a software stack for gradients before they are reduced.

    Attributes:
        makes: Backward makes them, and they go when they are reduced; else each is added to a buffer that is always
            there, and is counted while it is made.
        in_buckets: What the last micro-batch reduces goes from each unit into buffers that are always there.
        to_host: Gradients of the rank's shard go to the host once they are reduced.
    """

    makes: bool
    in_buckets: bool = False
    to_host: bool = False


@lru_cache(maxsize=512)
def memory_changes(program: Program, rank: int, rules: GradientRules) -> Changes:
    """List what comes and goes on one class of ranks ([Note: what comes and goes])."""
    return _Reader(program, rank, rules).read()


class _Reader:
    """One list, being read."""

    def __init__(self, program: Program, rank: int, rules: GradientRules) -> None:
        self.program, self.actions, self.rules = program, program.ranks[rank], rules
        self.sharded = any(program.uses)
        self.things: dict[Thing, int] = {}
        self.numbers: list[int] = []
        self.signs: list[int] = []
        self.at: list[int] = []
        self.ends: list[int] = []
        self.now = self.ending = 0
        self.regions = [number for number, kind in enumerate(self.actions.kind) if kind is ActionKind.COMPUTE]
        self.turn = 0  # regions read so far
        self.coming: dict[int, ParameterGroup] = {}  # asked for, by the UNSHARD
        self.whole: set[ParameterGroup] = set()
        self.buffer: ParameterGroup | None = None  # of the group copied out last, in forward
        self.left: Region | None = None
        self.entering: Region | None = None
        self.input: ParameterGroup | None = None
        self.reduced: set[ParameterGroup] = set()
        self.made: set[tuple[int, int]] = set()
        self.adds = False
        passes = [(region.stage, region.unit, region.work) for region in program.regions]
        #: Stage, unit, work and micro-batch of each region; behind them that of none, which is also before them.
        self.passes: list[tuple[tuple[int, int, Work], int] | None] = [
            *((passes[self.actions.op[number]], self.actions.micro_batch[number]) for number in self.regions),
            None,
        ]
        self.last = {
            pass_facts[0][0]: pass_facts[1]
            for pass_facts in self.passes
            if pass_facts and pass_facts[0][2] in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        }
        self.known: dict[tuple[int, ...], tuple[list[int], list[int], list[int], Region | None, Region | None]] = {}

    def read(self) -> Changes:
        """Walk the rank's list of actions and collect how bytes change."""
        numbers = range(len(self.actions)) if self.sharded else self.regions
        for number in numbers:
            kind = self.actions.kind[number]
            self.now, self.ending = number, 0
            if kind is ActionKind.COMPUTE:
                self._run_known(number)
            elif kind in (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD):
                group = self.program.storages[self.actions.storage[number]]
                assert isinstance(group, ParameterGroup)
                if kind is ActionKind.UNSHARD:
                    self._unshard(number, group)
                elif kind is ActionKind.RESHARD:
                    self._reshard(group)
                else:
                    self._reduce(group)
        self._end_step()
        columns = (self.numbers, self.signs, self.at, self.ends)
        ints = (np.array(column, np.int64) for column in columns)
        return Changes(tuple(self.things), *ints)

    def _region(self, number: int) -> Region:
        return self.program.regions[self.actions.op[number]]

    def _change(self, what: What, of: Region | ParameterGroup, sign: int) -> None:
        if of.unit >= 0 and self.program.alike:
            of = of._replace(unit=self.program.alike[of.stage][of.unit])
        thing = Thing(what, of)
        self.numbers.append(self.things.setdefault(thing, len(self.things)))
        self.signs.append(sign)
        self.at.append(self.now)
        self.ends.append(self.ending)

    def _run_known(self, number: int) -> None:
        """Run a region as ``_run`` does; a whole pass repeats its changes where all it looks at is the same."""
        op, this_pass, next_pass = self.actions.op[number], self.passes[self.turn], self.passes[self.turn + 1]
        if not self._is_steady(op) or this_pass in (self.passes[self.turn - 1], next_pass):
            self._run(number)
            return
        enters = self.actions.op[self.regions[self.turn + 1]] if next_pass and next_pass[0][2] is Work.FORWARD else -1
        key = (op, enters, id(self.left), id(self.entering))
        if key not in self.known:
            start = len(self.numbers)
            self._run(number)
            changed = self.numbers[start:], self.signs[start:], self.ends[start:]
            self.known[key] = (*changed, self.left, self.entering)
            return
        numbers, signs, ends, self.left, self.entering = self.known[key]
        self.numbers += numbers
        self.signs += signs
        self.ends += ends
        self.at += [number] * len(numbers)
        self.turn += 1

    def _is_steady(self, op: int) -> bool:
        """Whether nothing is to be copied out for a region, and gradients that it makes are added to those there."""
        if self.buffer is not None or self.rules.in_buckets:
            return False
        used = self.program.uses[op] if self.coming else ()
        if any(self.actions.storage[number] in used for number in self.coming):
            return False
        region = self.program.regions[op]
        makes = self.rules.makes and region.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        return not makes or (region.stage, region.unit) in self.made

    def _run(self, number: int) -> None:
        region = self._region(number)
        place, backward = self.passes[self.turn], region.work is not Work.FORWARD
        first, last = self.passes[self.turn - 1] != place, self.passes[self.turn + 1] != place
        makes = self.rules.makes and region.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        in_buckets = self.rules.in_buckets and self.actions.micro_batch[number] == self.last.get(region.stage)
        self._copy_out(number)
        if self.buffer is not None and (backward or not self.program.uses[self.actions.op[number]]):
            self._drop_buffer()
        self._drop_left()
        if first:
            already_made = (region.stage, region.unit) in self.made or (region.stage, ALL_UNITS) in self.made
            self.adds = makes and (already_made or in_buckets)
            if backward:
                self._change(What.SAVED, region._replace(work=Work.FORWARD, start=0, stop=0), -1)
        running = [What.ADDS] if self.adds else [What.RUNS, What.GRADIENTS] if makes else [What.RUNS]
        for sign in (1, -1):
            self.ending = sign < 0
            for thing in running:
                self._change(thing, region, sign)
        if makes and not self.adds:
            self._change(What.MADE, region, 1)
            self.made.add((region.stage, region.unit))
        self.turn += 1
        if not last:
            self.left = region
            self._change(What.LEAVES, region, 1)
            return
        self._end_pass(region, makes and in_buckets)

    def _end_pass(self, region: Region, in_buckets: bool) -> None:
        """Go on from the last region of a unit's pass."""
        kept_region = region._replace(work=Work.FORWARD, start=0, stop=0)
        if region.work in (Work.FORWARD, Work.BACKWARD_INPUT):
            self._change(What.SAVED, kept_region, 1)
        if region.work is Work.FORWARD and self._ends_stage(region):
            self._change(What.HANDED, kept_region, 1)
        if region.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
            if region.unit <= 0:
                self._change(What.HANDED, self._last_of(region), -1)
            if self.sharded:
                self.left = region
                self._change(What.LEAVES, region, 1)
            if in_buckets and (region.stage, region.unit) in self.made:
                self._change(What.MADE, region._replace(start=0, stop=0), -1)
                self.made.discard((region.stage, region.unit))
        elif self.sharded and (following := self.passes[self.turn]) and following[0][2] is Work.FORWARD:
            self.entering = self._region(self.regions[self.turn])
            self._change(What.ENTERS, self.entering, 1)

    def _ends_stage(self, region: Region) -> bool:
        return region.unit == ALL_UNITS or region.unit == len(self.program.alike[region.stage]) - 1

    def _last_of(self, region: Region) -> Region:
        """The region of forward behind which a stage hands on, at the same grain."""
        unit = region.unit if region.unit == ALL_UNITS else len(self.program.alike[region.stage]) - 1
        return region._replace(unit=unit, work=Work.FORWARD, start=0, stop=0)

    def _drop_left(self) -> None:
        if self.left is not None:
            self._change(What.LEAVES, self.left, -1)
        if self.entering is not None:
            self._change(What.ENTERS, self.entering, -1)
        self.left = self.entering = None

    def _drop_buffer(self) -> None:
        if self.buffer is not None:
            self._change(What.BUFFER, self.buffer, -1)
        self.buffer = None

    def _unshard(self, number: int, group: ParameterGroup) -> None:
        """Ask for a group; what the next region uses is copied out before anything more is asked for."""
        following = self.regions[self.turn] if self.turn < len(self.regions) else -1
        if self.actions.storage[number] not in self.program.uses[self.actions.op[following]]:
            self._copy_out(following)
        if self._region(following).work is not Work.FORWARD:
            self._drop_buffer()
        for thing, sign in ((What.BUFFER, 1), (What.CAST, 1), (What.CAST, -1)):
            self._change(thing, group, sign)
        self.coming[number] = group

    def _copy_out(self, region: int) -> None:
        """Copy all that a region uses out of its buffers."""
        used = self.program.uses[self.actions.op[region]] if self.coming else ()
        for number in [number for number in self.coming if self.actions.storage[number] in used]:
            self._copy(number, self._region(region).work)

    def _copy(self, number: int, work: Work) -> None:
        group = self.coming.pop(number)
        self._change(What.WHOLE, group, 1)
        self.whole.add(group)
        self._drop_buffer()
        if work is Work.FORWARD:
            self.buffer = group
        else:
            self._change(What.BUFFER, group, -1)

    def _reshard(self, group: ParameterGroup) -> None:
        if group in self.whole:
            self.whole.remove(group)
            self._change(What.WHOLE, group, -1)
            return
        for number in [number for number, group_asked in self.coming.items() if group_asked == group]:
            del self.coming[number]
            self._change(What.BUFFER, group, -1)

    def _reduce(self, group: ParameterGroup) -> None:
        if self.input is not None:
            self._change(What.INPUT, self.input, -1)
        self._change(What.INPUT, group, 1)
        self.input = group
        if self.rules.makes:
            self._change(What.MADE, group, -1)
            units = (group.unit, ALL_UNITS)
            self.made = {
                (stage, unit)
                for stage, unit in self.made
                if stage != group.stage or not (group.unit == ALL_UNITS or unit in units)
            }
        self._change(What.SHARD, group, 1)
        if group in self.reduced or self.rules.to_host:
            self._change(What.SHARD, group, -1)
        self.reduced.add(group)

    def _end_step(self) -> None:
        """Let go of all that is there only while gradients are made."""
        self.ending = 0
        self._drop_left()
        self._drop_buffer()
        for group in self.coming.values():
            self._change(What.BUFFER, group, -1)
        for group in sorted(self.whole):
            self._change(What.WHOLE, group, -1)
        if self.input is not None:
            self._change(What.INPUT, self.input, -1)
