"""Jobs of several ranks: the processes that train one model together.

torch.distributed is the engine: its launcher starts the ranks (torchrun), its process groups carry the collectives,
its store what is compared before. A job has process groups of its own, so that no collective of the user's comes
between those of a step: one of all ranks, and for each set of a layout's axes over which a collective of the step goes
those of the ranks that it joins (``Layout.group``). Every wait has a limit.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from lading.alone import import_groupless
from lading.errors import ConfigError, StorageError
from lading.ir.layout import AXES, Layout
from lading.ir.program import RUNS_OP, Program
from lading.ir.reduction import TRANSFERS
from lading.runtime.agreement import Meeting, listed, lost_store, run_number
from lading.runtime.batch_threads import batch_threads
from lading.runtime.binding import Mailbox
from lading.runtime.interrupts import ending_at_once
from lading.runtime.shard_exchange import exchange_parts, gather_shards, sum_shards

#: Seconds that a rank waits for the others in a collective.
TIMEOUT_S = 300.0
#: Seconds that ranks wait for the one that plans or writes a checkpoint.
FIRST_RANK_S = 3600.0
#: Seconds that a rank that has ended waits for the others.
_CLOSING_S = 10.0
#: Seconds in which ranks that have lost another say so: who does not is the one.
_ROLL_CALL_S = 2.0
#: Seconds between two looks at the store while ranks meet.
_PAUSE_S = 0.01
#: Elements of a first reduction. It, and first collectives of other kinds, bring in code and buffers that later ones
#: keep, which do not count as memory of a step.
_FIRST_ELEMENTS = 1 << 18
#: Numbers that ranks compare before they do something, at most.
_MOST_FACTS = 10
#: Tag of announcements, beside those of what a step sends.
_ANNOUNCED = 1 << 20
#: Tag of questions for the first rank's clock, and how often each rank asks.
_CLOCK, _CLOCK_READINGS = _ANNOUNCED + 1, 8
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start_job(ranks: int) -> int:
    """Make sure that this process belongs to a job of so many ranks that can talk to each other; gives its number.

    A process group that exists is used; else one is made, over gloo, from what the launcher has set.

    Raises:
        ConfigError: the job has another number of ranks, or nothing launched it.
    """
    if not dist.is_initialized():
        if missing := [name for name in _VARIABLES if name not in os.environ]:
            raise ConfigError(
                f"expected a job of {ranks} ranks, as the plan is for so many, found one process (no {missing[0]} in "
                f"the environment); start it with: torchrun --nproc-per-node {ranks} SCRIPT"
            )
        _connect()
        atexit.register(_end_job)
    if (count := dist.get_world_size()) != ranks:
        raise ConfigError(
            f"expected a job of {ranks} ranks, as the plan is for so many, found one of {count}; start so many, or "
            f'plan with layout="dp{count}"'
        )
    return dist.get_rank()


def _connect() -> None:
    """Make the process group of the ranks that a launcher has started; raises as ``start_job``."""
    count, limit = os.environ["WORLD_SIZE"], timedelta(seconds=TIMEOUT_S)
    import_groupless()
    try:
        with ending_at_once(), batch_threads():
            store, rank, ranks = next(rendezvous("env://", timeout=limit))
            started = distributed_c10d.PrefixStore(_start_of(store, rank, ranks), store)
            dist.init_process_group("gloo", store=started, rank=rank, world_size=ranks, timeout=limit)
    except RuntimeError as error:
        raise ConfigError(
            f"expected {count} ranks to meet within {TIMEOUT_S:g} s at {os.environ['MASTER_ADDR']}, port "
            f"{os.environ['MASTER_PORT']}: {_first_line(error)}; look at the output of the others"
        ) from error


def _start_of(store: distributed_c10d.Store, rank: int, ranks: int) -> str:
    """Agree on a name of this start of a job, for its keys in a store that may have those of earlier ones.

    torchrun's store outlives the ranks that it starts again, and each of several nodes counts starts by itself. So the
    first rank makes up the name and answers whoever says hello now; nobody answers who has gone.

    Raises:
        ConfigError: a rank has not come.
    """

    def read_key(key: str) -> str:
        return bytes(store.get(f"lading/{key}")).decode() if store.check([f"lading/{key}"]) else ""

    mine, deadline, late = uuid4().hex, time.monotonic() + TIMEOUT_S, [*range(1, ranks)] if rank == 0 else [0]
    store.set(f"lading/hello {rank}", mine)
    while late and time.monotonic() < deadline:
        if rank == 0:
            late = [peer for peer in late if read_key(f"joined {peer}") != mine]
            for peer in late:
                store.set(f"lading/answer {peer}", f"{read_key(f'hello {peer}')} {mine}")
        elif read_key(f"answer {rank}").startswith(mine):
            store.set(f"lading/joined {rank}", read_key(f"answer {rank}").split()[1])
            return read_key(f"joined {rank}")
        time.sleep(_PAUSE_S)
    if late:
        raise ConfigError(
            f"expected {ranks} ranks to come within {TIMEOUT_S:g} s, {listed(late)} did not; see whether their "
            "processes live"
        )
    return mine


def _end_job() -> None:
    """Leave the job; the rank that keeps its store, as no torchrun does, waits a while for those that still ask it."""
    if not dist.is_initialized():
        return
    store, ranks = distributed_c10d._get_default_store(), range(dist.get_world_size())
    with suppress(RuntimeError):  # who keeps the store is gone, or another rank does not come
        store.set(f"lading/ended {dist.get_rank()}", "")
        if dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            store.wait([f"lading/ended {rank}" for rank in ranks], timedelta(seconds=_CLOSING_S))
    dist.destroy_process_group()


def by_first_rank(
    call: str,
    make: Callable[[], str],
    *,
    timeout_s: float = FIRST_RANK_S,
    meanwhile: Callable[[], object] = lambda: None,
) -> str:
    """Let the first rank make a text that all ranks get.

    Args:
        call: What the user called, for messages.
        meanwhile: What the others do, before they wait.
        timeout_s: Seconds that the others wait for it.
    Raises:
        ConfigError: the first rank has failed, or has not come in time; it raises what it failed of itself.
    """
    meeting = Meeting.of(call, range(dist.get_world_size()), timeout_s)
    store = meeting.store
    if meeting.rank == 0:
        try:
            text = make()
        except Exception as error:
            is_first_to_fail()  # before the others learn of it
            store.set("failed", f"{error}")
            store.set("made", "")
            raise
        store.set("made", text)
        return text
    meanwhile()
    try:
        if not meeting.wait(["made"], timeout_s):
            raise ConfigError(f"{call}: expected rank 0 to come within {timeout_s:g} s, it has not; look at its output")
        text = bytes(store.get("made")).decode()
    except RuntimeError as error:
        raise lost_store(call, "this rank waited for rank 0") from error
    if not text:
        raise ConfigError(f"{call}: failed on rank 0: {bytes(store.get('failed')).decode()}")
    return text


def start_run() -> None:
    """Begin another run of the job, of which nothing has failed yet; all ranks call this."""
    run_number(1)


def is_first_to_fail() -> bool:
    """Whether no other rank has failed before in this run: what fails next does so for want of the first."""
    if not dist.is_initialized():  # nor have ranks met
        return True
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    try:
        first = store.compare_set(f"lading/failed in {run_number(0)}", "", str(rank))
    except RuntimeError:  # the process that keeps the store is gone
        return True
    return bytes(first).decode() == str(rank)


def tell_launcher(error: Exception) -> None:
    """Let torchrun, if it started this rank, say that this error ended the job: else it names the first rank to end."""
    get_error_handler().record_exception(error)


def sequences(programs: Sequence[Program]) -> dict[str, str]:
    """Hash of the collectives of Programs, in order, by the axes that they go over."""
    hashes: dict[str, Any] = {}
    for program in programs:
        actions = program.ranks[0]
        for kind, index in zip(actions.kind, actions.op, strict=True):
            if kind not in RUNS_OP or index not in program.graph.collectives:
                continue
            op = program.graph.ops[index]
            digest = hashes.setdefault(cast("str", dict(op.kwargs)["over"]), hashlib.sha256())
            if op.name not in TRANSFERS:  # whose other end is on another rank
                digest.update(f"{op.name} {op.bytes_read} {op.bytes_written}\n".encode())
    return {over: digest.hexdigest() for over, digest in hashes.items()}


class Replicas:
    """Ranks that train one model together; made on all of them.

    Args:
        layout: How the step is spread over them.
        collectives: What this rank's collectives over some axes are, from ``sequences``, to be compared with those of
            the ranks that they join.
        timeout_s: Seconds that a rank waits for the others in a collective.

    Attributes:
        rank: Number of this one.

    Raises:
        ConfigError: the job has another number of ranks, or ranks have other collectives than those that they join.
    """

    def __init__(self, layout: Layout, collectives: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> None:
        ranks = layout.devices
        self.ranks, self.rank, self._timeout_s = ranks, start_job(ranks), timeout_s
        try:
            with ending_at_once(), batch_threads():
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StorageError(f"lost the other ranks while they connected: {_first_line(error)}") from error
        self._group = cast("dist.ProcessGroup | None", group)
        self._layout, self._all = layout, cast("str", dict(layout.across(*AXES))["over"])
        self._groups: dict[str, tuple[dist.ProcessGroup, tuple[int, ...]]] = {}
        store = distributed_c10d.PrefixStore(f"lading/steps of {run_number(0)}", distributed_c10d._get_default_store())
        self._store = distributed_c10d.PrefixStore(str(store.add(f"jobs of {self.rank}", 1)), store)
        self._doing, self._failed = "begin", False
        self.meet("begin", {"number of ranks": ranks})
        self._join(collectives)

    def _join(self, collectives: Mapping[str, str]) -> None:
        """Make the groups that the steps of all ranks need, in one order, once their collectives are compared."""
        by_rank: list[dict[str, str]] = [{} for _ in range(self.ranks)]
        self._collective(lambda: dist.all_gather_object(by_rank, dict(collectives), group=self._group))
        limit, first = timedelta(seconds=self._timeout_s), torch.zeros(_FIRST_ELEMENTS // self.ranks * self.ranks)
        for over in dict.fromkeys(
            (self._all, *sorted({over for rank_collectives in by_rank for over in rank_collectives}))
        ):
            groups = sorted({self._layout.group(rank, over) for rank in range(self.ranks)})
            for ranks in groups:
                if unlike := [rank for rank in ranks if by_rank[rank].get(over) != by_rank[ranks[0]].get(over)]:
                    raise ConfigError(
                        f"begin: expected the same collectives over {over} on ranks {', '.join(map(str, ranks))}, "
                        f"rank {unlike[0]} has others than rank {ranks[0]}; give every rank the same plan and capture, "
                        "built by the same versions"
                    )
            group = self._group
            if len(groups) > 1:
                with batch_threads():
                    group = dist.new_subgroups_by_enumeration([[*ranks] for ranks in groups], limit, "gloo")[0]
            self._groups[over] = cast("dist.ProcessGroup", group), self._layout.group(self.rank, over)
            self.mean_(first, over)
            self.all_gather(first, first[: len(first) // len(self._groups[over][1])].clone(), over)
        number, count = self.number(self._all), self.ranks
        arrived = self.expect(torch.empty_like(first), (number - 1) % count, 0, self._all)
        self.send(first, (number + 1) % count, 0, self._all)
        arrived()

    def number(self, over: str) -> int:
        """Number of this rank among those over some axes."""
        return self._groups[over][1].index(self.rank)

    def mean_(self, values: torch.Tensor, over: str) -> None:
        """Replace a tensor by its mean over ranks.

        Raises:
            StorageError: another rank is gone or late; says which.
        """
        self.sum_(values, over)
        values.div_(len(self._groups[over][1]))

    def sum_(self, values: torch.Tensor, over: str) -> None:
        """Replace a tensor by its sum over ranks; errors as ``mean_``."""
        group, _ = self._groups[over]
        self._collective(lambda: dist.all_reduce(values, group=group))

    def reduce_scatter(self, shard: torch.Tensor, values: torch.Tensor, over: str, *, mean: bool = True) -> None:
        """Fill a shard with this rank's part of the mean of ``values`` over ranks, or the sum; errors as ``mean_``.

        Shapes: values (ranks * n,) -> shard (n,).
        """
        group, ranks = self._groups[over]
        self._collective(lambda: sum_shards(shard, values, group))
        if mean:
            shard.div_(len(ranks))

    def all_gather(self, values: torch.Tensor, shard: torch.Tensor, over: str) -> None:
        """Fill ``values`` with the shards of ranks, one after another; errors as ``mean_``.

        Shapes: shard (n,) -> values (ranks * n,).
        """
        group, _ = self._groups[over]
        self._collective(lambda: gather_shards(values, shard, group))

    def all_to_all(self, arrived: torch.Tensor, values: torch.Tensor, over: str) -> None:
        """Send each rank its part of ``values``, and fill ``arrived`` with what they send; errors as ``mean_``.

        Shapes: values (ranks * n,) -> arrived (ranks * n,).
        """
        group, _ = self._groups[over]
        self._collective(lambda: exchange_parts(arrived, values, group))

    def send(self, values: torch.Tensor, peer: int, tag: int, over: str) -> None:
        """Send a tensor to another rank, which receives it by the same tag; errors as ``mean_``."""
        group, ranks = self._groups[over]
        self._collective(lambda: dist.send(values, ranks[peer], group=group, tag=tag))

    def mailbox(self, size_bytes: int, peer: int, tag: int, over: str) -> Mailbox:
        """Make room for what another rank sends by this tag once a step."""
        place = torch.empty(size_bytes, dtype=torch.uint8)
        return _Mailbox(lambda: self.expect(place, peer, tag, over), place)

    def expect(self, values: torch.Tensor, peer: int, tag: int, over: str) -> Callable[[], None]:
        """Begin to receive a tensor; returns what waits for it, with errors as ``mean_``."""
        group, ranks = self._groups[over]
        work = dist.irecv(values, ranks[peer], group=group, tag=tag)
        assert work is not None, "this rank is of the group"
        return lambda: self._collective(work.wait)

    def broadcast(self, values: torch.Tensor, source: int, over: str) -> None:
        """Fill a tensor with that of one rank, on all others; errors as ``mean_``."""
        group, ranks = self._groups[over]
        self._collective(lambda: dist.broadcast(values, ranks[source], group=group))

    def first_of(self, number: int | None, over: str) -> int:
        """First rank of the job that has this number among those over some axes; of all without one."""
        groups = (self._layout.group(rank, over) for rank in range(self.ranks))
        return next(rank for rank, group in enumerate(groups) if group.index(rank) == (number or 0))

    def share(self, values: torch.Tensor, source: int) -> None:
        """Fill a tensor with that of one rank of the job, on all others; errors as ``mean_``."""
        self.broadcast(values, source, self._all)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers over all ranks, the same on each; errors as ``mean_``."""
        total = torch.tensor(values, dtype=torch.float64)
        self.sum_(total, self._all)
        return total.tolist()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Largest of numbers over all ranks, the same on each; errors as ``mean_``."""
        most = torch.tensor(values, dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group))
        return most.tolist()

    def gather(self, what: object) -> list[Any] | None:
        """Collect an object of every rank on the first, in order of ranks; None on the others. Errors as ``mean_``."""
        by_rank = [None] * self.ranks if self.rank == 0 else None
        self._collective(lambda: dist.gather_object(what, by_rank, dst=0, group=self._group))
        return by_rank

    def clock_ahead_s(self, clock: str, now: Callable[[], float]) -> tuple[float, float]:
        """Seconds by which this rank's clock is ahead of the first one's, and the most by which that may be wrong.

        The first rank tells its time to each rank that has another clock, a few times; the quickest answer counts,
        which was given somewhere between question and arrival. All ranks call this; errors as ``mean_``.

        Args:
            clock: Name of the clock that ``now`` reads (``lading.runtime.host.clock_id``).
            now: Gives its time in seconds.
        """
        clocks: list[str] = [""] * self.ranks
        self._collective(lambda: dist.all_gather_object(clocks, clock, group=self._group))
        clock_reading, best = torch.zeros(1, dtype=torch.float64), (0.0, float("inf"))
        for rank in (rank for rank in range(self.ranks) if clocks[rank] != clocks[0]):
            for _ in range(_CLOCK_READINGS if self.rank in (0, rank) else 0):
                if self.rank == 0:
                    self.expect(clock_reading, rank, _CLOCK, self._all)()
                    self.send(clock_reading.fill_(now()), rank, _CLOCK, self._all)
                    continue
                arrived, asked_s = self.expect(clock_reading, 0, _CLOCK, self._all), now()
                self.send(torch.zeros_like(clock_reading), 0, _CLOCK, self._all)
                arrived()
                took_s = now() - asked_s
                best = min(
                    best, (asked_s + took_s / 2 - clock_reading.item(), took_s / 2), key=lambda reading: reading[1]
                )
        return best if clocks[self.rank] != clocks[0] else (0.0, 0.0)

    def meet(
        self, doing: str, facts: Mapping[str, float | str], of_replica: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Wait until all ranks come to do the same.

        Args:
            doing: What this rank is about to do ("step 8"), for messages.
            facts: Numbers that are to be equal on all ranks, by name; of a text its hash is compared.
            of_replica: Numbers that are to be equal on all ranks of a replica.
        Raises:
            ConfigError: they are not; says which, and on which ranks.
            StorageError: a rank is gone or late; says which.
        """
        self._doing = doing
        self._store.set(f"doing {self.rank}", doing)
        numbers = (zlib.crc32(fact.encode()) if isinstance(fact, str) else fact for fact in (doing, *facts.values()))
        values = [*map(float, numbers), *of_replica.values()]
        mine = torch.tensor(values + [0.0] * (_MOST_FACTS + 1 - len(values)), dtype=torch.float64)
        facts_by_rank = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._collective(lambda: dist.all_gather(facts_by_rank, mine, group=self._group))
        if differing := [rank for rank, row in enumerate(facts_by_rank) if row[0] != mine[0]]:
            details = ", ".join(f"rank {rank} is about to {self._announced_operation(rank)}" for rank in differing[:8])
            self.barrier()  # all have read what the others are about to do
            raise ConfigError(f"{doing}: expected all ranks to do the same, but {details}; nothing has run")
        for column, (name, fact) in enumerate(facts.items(), 1):
            fact_by_rank = [float(row[column]) for row in facts_by_rank]
            if len(set(fact_by_rank)) > 1:
                details = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(fact_by_rank[:8]))
                if isinstance(fact, str):
                    first = next(rank for rank, value in enumerate(fact_by_rank) if value != fact_by_rank[0])
                    details = f"another on rank {first} than on rank 0"
                raise ConfigError(f"{doing}: expected the same {name} on all ranks, got {details}; nothing has run")
        for column, name in enumerate(of_replica, 1 + len(facts)):
            for replica in range(self._layout.dp):
                ranks = [rank for rank in range(self.ranks) if self._layout.replica(rank) == replica]
                by_member = [facts_by_rank[rank][column] for rank in ranks]
                if differing := [rank for rank, fact in zip(ranks, by_member, strict=True) if fact != by_member[0]]:
                    raise ConfigError(
                        f"{doing}: expected the same {name} on ranks {', '.join(map(str, ranks))}, which compute on "
                        f"them together, got others on rank {differing[0]} than on rank {ranks[0]}; give rank r those "
                        "of replica plan.replica(r); nothing has run"
                    )

    def note(self, what: str) -> None:
        """Let any rank know that this one has come so far (``noted``); does not wait, and may be called on any thread.

        Raises:
            RuntimeError: the process that keeps the job's store is gone.
        """
        self._store.set(f"{what} {self.rank}", "")

    def noted(self, what: str, ranks: Sequence[int]) -> bool:
        """Whether ranks have come so far; on any thread, with errors as ``note``."""
        return all(self._store.check([f"{what} {rank}"]) for rank in ranks)

    def by_first(self, call: str, make: Callable[[], str], meanwhile: Callable[[], object]) -> str:
        """Let the first rank make a text that all get, as ``by_first_rank``; the others notice if it goes.

        Args:
            meanwhile: What the others do first: their part in it.
        """

        def make_and_announce() -> str:
            try:
                return make()
            finally:
                self.announce()

        def waited() -> None:
            meanwhile()
            self.hear(0, FIRST_RANK_S)  # which ends with the first rank, as its store may not

        return by_first_rank(call, make_and_announce, meanwhile=waited)

    def announce(self) -> None:
        """Tell all other ranks that what they wait for has ended; those that are gone do not matter."""
        for peer in range(self.ranks):
            if peer != self.rank:
                with suppress(RuntimeError):
                    dist.send(torch.zeros(1), peer, group=self._group, tag=_ANNOUNCED)

    def hear(self, peer: int, timeout_s: float) -> None:
        """Wait until another rank announces; errors as ``mean_``, at once where that rank is gone."""
        work = dist.irecv(torch.zeros(1), peer, group=self._group, tag=_ANNOUNCED)
        self._collective(lambda: cast("dist.Work", work).wait(timedelta(seconds=timeout_s)))

    def barrier(self) -> None:
        """Wait until all ranks have come here; raises as ``mean_`` does."""
        self._collective(lambda: dist.barrier(group=self._group))

    def abandon(self, error: Exception) -> None:
        """Let ``close`` wait for nobody, as this rank has failed: the others notice when its connections close."""
        self._failed = True
        with suppress(RuntimeError):  # the process that keeps the store is gone
            self._store.set(f"doing {self.rank}", f"failed: {_first_line(error)}")

    def close(self) -> None:
        """Give up the process group of these ranks; the job's own stays. May be called twice.

        Waits a while for the others, unless one is gone already: a rank that leaves while another is still about to
        receive its part of the last collective would break it.
        """
        if self._group is None:
            return
        groups = dict.fromkeys((*(group for group, _ in self._groups.values()), self._group))
        self._group = None
        self._groups.clear()  # what holds this object, as an error's frames do, keeps no connection
        if not dist.is_initialized():
            return
        with suppress(RuntimeError):  # the others are gone, so there is nobody to wait for
            self._store.set(f"closed {self.rank}", "")
            if not self._failed:
                self._store.set(f"doing {self.rank}", f"closed, had come to {self._doing}")
                self._store.wait([f"closed {rank}" for rank in range(self.ranks)], timedelta(seconds=_CLOSING_S))
        for group in groups:
            dist.destroy_process_group(group)

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            self._failed = True
            raise StorageError(self._lost(error)) from error

    def _lost(self, error: Exception) -> str:
        """Say which ranks did not come to a collective, as far as they can still be asked."""
        first, deadline, silent = _first_line(error), time.monotonic() + _ROLL_CALL_S, [*range(self.ranks)]
        try:
            self._store.set(f"lost in {self._doing} {self.rank}", "")
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not self._store.check([f"lost in {self._doing} {rank}"])]
                time.sleep(_PAUSE_S)
            descriptions = [f"rank {rank} ({self._announced_operation(rank) or 'had not come'})" for rank in silent]
        except RuntimeError as lost:
            return (
                f"lost the other ranks while waiting for them to {self._doing}: the process that keeps the job's store "
                f"has ended ({_first_line(lost)}; {first}); look at its output, and start the job again"
            )
        waited = f"waited {self._timeout_s:g} s for" if "imed out" in first else "lost a connection while waiting for"
        return (
            f"rank {self.rank} {waited} the others to {self._doing}; missing: "
            f"{', '.join(descriptions[:8]) or 'none, but a connection broke'} ({first}); look at its output, and "
            "start the job again from the last checkpoint"
        )

    def _announced_operation(self, rank: int) -> str:
        key = f"doing {rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""


class _Mailbox:
    """Place of its own for one thing that another rank sends once a step, asked for before the step begins.

    gloo sends only what the other has asked for. Asked for as late as there is room for it, two ranks could wait for
    each other: each for a send to end whose memory what it is to receive next will take.
    """

    def __init__(self, ask: Callable[[], Callable[[], None]], place: torch.Tensor) -> None:
        self._ask, self._place = ask, place
        self._wait: Callable[[], None] | None = None

    def post(self) -> None:
        """Ask for this step's; in the order in which they are sent."""
        self._wait = self._ask()

    def take(self, values: torch.Tensor) -> None:
        """Wait for it, and copy it out."""
        assert self._wait is not None, "it was asked for when the step began"
        self._wait()
        self._wait = None
        values.view(torch.uint8).copy_(self._place)


def _first_line(error: Exception) -> str:
    """First line of an error, without the advice that gloo adds."""
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0]
