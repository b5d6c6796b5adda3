"""Exchanges between ranks: pieces of matrices to owners and back, one all-to-all for each direction of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lading.errors import LadingError
from lading.ir.routes import RoutedShard, ShardRegion

#: What a rule raises where a matrix cannot be decomposed.
FAILURES = (LadingError, torch.linalg.LinAlgError)  # pyright: ignore[reportPrivateImportUsage]
#: Where some ranks step, while others drop the gradients of a backward that the former have not run.
_APART = (
    "{steps} of {ranks} ranks are in step() and the others in zero_grad() after a backward without a step; run "
    "backward, step and zero_grad as often on all ranks, on a loss times 0 where one has no batch"
)
#: Integers in which ranks tell each other 64 bits that are to be the same.
_TOLD = 16
#: The tensor that has a piece, and the region that it is, by matrix.
Place = Callable[[int], tuple[torch.Tensor, ShardRegion]]


@dataclass
class Traffic:
    """Counts of what exchanges have sent, for tests and reports.

    Attributes:
        collectives: Number of calls.
        elements: Elements that left this rank.
        waited_s: Seconds in which this rank had nothing else to do than wait for them.
    """

    collectives: int = 0
    elements: int = 0
    waited_s: float = 0.0


@dataclass
class RuleFailures:
    """Last error of a rule in this step; all ranks are told at its end."""

    last: Exception | None = None


@dataclass
class Under:
    """Exchange of tensors between ranks that is under way.

    Attributes:
        work: Handle to wait for; None once it has ended.
        arrived: Elements that come, piece after piece, from the first rank to the last.
        outgoing: Elements that go, alive until they have gone.
    """

    work: Any
    arrived: torch.Tensor
    outgoing: torch.Tensor

    def wait(self, traffic: Traffic) -> None:
        """Return once everything has come and gone; the time counts as waited."""
        if self.work is None:
            return
        start = time.perf_counter()
        self.work.wait()
        self.work = None
        traffic.waited_s += time.perf_counter() - start


@dataclass(frozen=True)
class Team:
    """Ranks that share matrices, numbered within the team.

    Attributes:
        rank: Number of this rank.
        ranks: Number of ranks.
        group: Process group of the team; None for one rank alone.
        inbound, outbound: Process groups of their own, so that what returns does not hold up what comes; None for one
            rank alone.
        members: Numbers of the team's ranks within the job.
    """

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    inbound: dist.ProcessGroup | None = None
    outbound: dist.ProcessGroup | None = None
    members: tuple[int, ...] = (0,)

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Team:
        """Make the team of a process group (None: all ranks), or of this process alone where there are no groups."""
        if not dist.is_initialized():
            return Team()
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        process_group = group or dist.group.WORLD
        team = Team(dist.get_rank(group), len(members), process_group, members=tuple(members))
        team.level()
        inbound, outbound = (team.part(range(team.ranks)) for _ in range(2))
        return replace(team, inbound=inbound, outbound=outbound)

    def level(self) -> None:
        """Have all ranks made equally many process groups: torch names groups by that, and waits where names differ."""
        num_groups = len(distributed_c10d._world.pg_names)
        for _ in range(max(self.gather(num_groups)) - num_groups):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def part(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Make a process group of some of the team's ranks; each of them calls this, after as many other such calls."""
        members = [self.members[rank] for rank in ranks]
        return cast(dist.ProcessGroup, dist.new_group(members, use_local_synchronization=True))

    def gather(self, what: object) -> list[Any]:
        """Collect an object from every rank, in order of ranks."""
        objects: list[Any] = [what] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(objects, what, group=self.group)
        return objects


class PieceExchange:
    """One direction of one group of matrices; every rank makes the same calls in the same order."""

    def __init__(
        self, pieces: Sequence[RoutedShard], team: Team, group: dist.ProcessGroup | None, dtype: torch.dtype
    ) -> None:
        """Make an exchange of ``pieces``; those that stay on their rank are copied there."""
        rank, ranks = team.rank, team.ranks
        self.group = group
        self.dtype = dtype
        self.kept = [p for p in pieces if p.source == p.target == rank]
        self.sent: list[list[RoutedShard]] = [[] for _ in range(ranks)]
        self.taken: list[list[RoutedShard]] = [[] for _ in range(ranks)]
        for p in pieces:
            if p.source == rank != p.target:
                self.sent[p.target].append(p)
            elif p.target == rank != p.source:
                self.taken[p.source].append(p)
        self._out = [sum(p.region.size for p in row) for row in self.sent]
        self._in = [sum(p.region.size for p in row) for row in self.taken]
        #: Whether any rank sends: all agree, as all know every piece.
        self.moves = any(p.source != p.target for p in pieces)

    def start(self, source: Place, device: torch.device, traffic: Traffic) -> Under:
        """Pack the pieces that this rank sends, and start the exchange."""
        out = torch.empty(sum(self._out), dtype=self.dtype, device=device)
        arrived = torch.empty(sum(self._in), dtype=self.dtype, device=device)
        _pack(out, self.sent, source)
        work = None
        if self.moves:
            work = dist.all_to_all_single(arrived, out, self._in, self._out, group=self.group, async_op=True)
            traffic.collectives += 1
            traffic.elements += out.numel()
        return Under(work, arrived, out)

    def finish(self, under: Under, source: Place, target: Place) -> None:
        """Copy every piece that came into its place; pieces that stayed on this rank, too."""
        start = 0
        for row in self.taken:
            for piece in row:
                part = under.arrived[start : start + piece.region.size].view(piece.region.shape)
                _view(target, piece).copy_(part)
                start += piece.region.size
        for piece in self.kept:
            _view(target, piece).copy_(_view(source, piece))


def _pack(out: torch.Tensor, rows: Sequence[Sequence[RoutedShard]], source: Place) -> None:
    start = 0
    for row in rows:
        for piece in row:
            out[start : start + piece.region.size].view(piece.region.shape).copy_(_view(source, piece))
            start += piece.region.size


def _view(place: Place, piece: RoutedShard) -> torch.Tensor:
    tensor, region = place(piece.whole)
    return tensor[piece.region.slices_in(region)]


@dataclass(frozen=True)
class Report:
    """Facts that a rank tells the others as a step begins.

    Attributes:
        has: Whether each parameter has its gradient, by name.
        changed: Whether a gradient is another one than has been sent already, by name; scalars on the device, where
            only it knows.
        finite: Whether all its gradients are, a scalar on the device; None where nobody asks.
        num_sent_groups: Number of groups that it has sent under backward.
        steps: Whether it is to take the step, not to give up what it has sent.
        settings: 64 bits that stand for the settings of its groups; None where these are wrong.
    """

    has: Mapping[str, bool]
    changed: Mapping[str, bool | torch.Tensor]
    finite: torch.Tensor | None
    num_sent_groups: int
    steps: bool
    settings: int | None


@dataclass(frozen=True)
class Verdict:
    """Result of comparing all ranks' reports.

    Attributes:
        error: What was wrong on some rank, the same text on every one; "" if nothing was.
        finite: Whether all gradients of all ranks are.
        max_sent_groups: Most groups that any rank has sent.
        ranks_disagree: Whether some ranks take the step and others give it up.
        settled: Whether all have the same settings, and none has wrong ones.
    """

    error: str
    finite: bool
    max_sent_groups: int
    ranks_disagree: bool
    settled: bool


def agree(report: Report, groups: int, team: Team, device: torch.device) -> Verdict:
    """Compare the reports of all ranks in one small reduction, before anything more is sent.

    The device is waited for once, and not at all by one rank that asks it nothing.

    Args:
        groups: Most groups that can have been sent.
    """
    infinite = False if report.finite is None else ~report.finite
    facts = [*report.has.values(), *report.changed.values(), infinite]
    flags = {place: fact for place, fact in enumerate(facts) if isinstance(fact, torch.Tensor)}
    numbers = [0 if place in flags else int(fact) for place, fact in enumerate(facts)]
    numbers += [int(number == report.num_sent_groups) for number in range(groups + 1)]
    numbers += [int(report.steps), int(report.settings is None), *_equal_told(report.settings or 0)]
    counted = _summed(numbers, team, device, flags)
    counted, (steps, wrong_settings), equal = counted[: -_TOLD - 2], counted[-_TOLD - 2 : -_TOLD], counted[-_TOLD:]
    settled = not wrong_settings and _is_equal(equal, team.ranks)
    names, parameters = list(report.has), len(report.has)
    has, changed = dict(zip(names, counted, strict=False)), dict(zip(names, counted[parameters:], strict=False))
    sent_number = max(number for number, ranks in enumerate(counted[2 * parameters + 1 :]) if ranks)
    disagree = 0 < steps < team.ranks
    wrong = _APART.format(steps=steps, ranks=team.ranks) if disagree else _wrong(has, changed, team.ranks)
    return Verdict(wrong, not counted[2 * parameters], sent_number, disagree, settled)


def _equal_told(number: int) -> list[int]:
    """Integers whose sums over ranks say whether 64 bits are the same on all: each byte, and its square."""
    parts = list(number.to_bytes(8, "big"))
    return [*parts, *(part * part for part in parts)]


def _is_equal(summed: Sequence[int], ranks: int) -> bool:
    """Whether sums of ``_equal_told`` are of equal numbers: only then is the mean of squares the square of the mean."""
    return all(ranks * square == part * part for part, square in zip(summed[:8], summed[8:], strict=True))


def _wrong(has: Mapping[str, int], changed: Mapping[str, int], ranks: int) -> str:
    for name, count in has.items():
        if 0 < count < ranks:
            return (
                f"{name}: expected a gradient on all {ranks} ranks or on none, found one on {count}; use the "
                "parameter on every rank, if only times 0, or freeze it"
            )
    for name, count in changed.items():
        if count:
            return (
                f"{name}: its gradient was changed after it had been sent under backward, on {count} of {ranks} ranks; "
                "clipping and unscaling need overlap='step' or 'forward', and of several backwards all but the last "
                "belong into `with optimizer.accumulate():`"
            )
    if not any(has.values()):
        return (
            "expected a gradient of some parameter, found none; either backward has not run, or the model was cut or "
            "moved (fully_shard, to_empty) after the optimizer had been made, and has other parameters now"
        )
    return ""


def all_finite(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Whether all elements of all tensors are finite, a scalar on their device; None of no tensors."""
    flags = [torch.isfinite(gradient).all() for gradient in gradients]
    return torch.stack(flags).all() if flags else None


def agree_done(failures: RuleFailures, team: Team, device: torch.device) -> None:
    """Raise on every rank if one could not compute what it owns.

    Raises:
        RuntimeError: from the error, on the rank that has it.
    """
    error, failures.last = failures.last, None
    if _summed([int(error is not None)], team, device)[0]:
        raise RuntimeError(f"a matrix's direction failed on some rank: {error or 'see the others'}") from error


def _summed(
    values: Sequence[int], team: Team, device: torch.device, flags: Mapping[int, torch.Tensor] | None = None
) -> list[int]:
    """Sum integers over ranks, after flags that lie on the device are added to those in their places."""
    if team.ranks == 1 and not flags:
        return list(values)
    counted = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    for place, flag in (flags or {}).items():
        counted[place] += flag
    if team.ranks > 1:
        dist.all_reduce(counted, group=team.group)
    return counted.tolist()
