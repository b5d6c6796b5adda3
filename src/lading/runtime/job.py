"""Jobs of several ranks: the processes that train one model together, each with a batch of its own.

torch.distributed is the engine: its launcher starts the ranks (torchrun), its process group carries the collectives,
its store what is compared before. A job has a process group of its own, so that no collective of the user's comes
between those of a step, and every wait has a limit.
"""

from __future__ import annotations

import atexit
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lading.errors import ConfigError, StorageError
from lading.runtime.agreement import Meeting
from lading.runtime.binding import Mailbox

#: Seconds that a rank waits for the others in a collective.
TIMEOUT_S = 300.0
#: Seconds that ranks wait for the one that plans or writes a checkpoint.
FIRST_RANK_S = 3600.0
#: Seconds that a rank that has ended waits for the others.
_CLOSING_S = 10.0
#: Elements of a first reduction. It, and first collectives of other kinds, bring in code and buffers that later ones
#: keep, which do not count as memory of a step.
_FIRST_ELEMENTS = 1 << 18
#: Numbers that ranks compare before they do something, at most.
_MOST_FACTS = 8
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
        dist.init_process_group("gloo")
        atexit.register(_end_job)
    if (count := dist.get_world_size()) != ranks:
        raise ConfigError(
            f"expected a job of {ranks} ranks, as the plan is for so many, found one of {count}; start so many, or "
            f'plan with layout="dp{count}"'
        )
    return dist.get_rank()


def _end_job() -> None:
    if dist.is_initialized():
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
    late = f"{call}: expected rank 0 to come within {timeout_s:g} s, it has not; look at its output"
    try:
        if not meeting.wait(["made"], timeout_s):
            raise ConfigError(late)
        text = bytes(store.get("made")).decode()
    except RuntimeError as error:
        raise ConfigError(late) from error
    if not text:
        raise ConfigError(f"{call}: failed on rank 0: {bytes(store.get('failed')).decode()}")
    return text


def start_run() -> None:
    """Begin another run of the job, of which nothing has failed yet; all ranks call this."""
    _run_number(1)


def is_first_to_fail() -> bool:
    """Whether no other rank has failed before in this run: what fails next does so for want of the first."""
    if not dist.is_initialized():  # nor have ranks met
        return True
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    try:
        first = store.compare_set(f"lading/failed in {_run_number(0)}", "", str(rank))
    except RuntimeError:  # the process that keeps the store is gone
        return True
    return bytes(first).decode() == str(rank)


def _run_number(more: int) -> int:
    """Number of runs that this rank has begun, with some more."""
    return distributed_c10d._get_default_store().add(f"lading/runs of {dist.get_rank()}", more)


class Replicas:
    """Ranks that train one model together; made on all of them.

    Args:
        ranks: How many.
        timeout_s: Seconds that a rank waits for the others in a collective.

    Attributes:
        rank: Number of this one.

    Raises:
        ConfigError: the job has another number of ranks.
    """

    def __init__(self, ranks: int, timeout_s: float = TIMEOUT_S) -> None:
        self.ranks, self.rank, self._timeout_s = ranks, start_job(ranks), timeout_s
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._group = cast("dist.ProcessGroup | None", made)
        store = distributed_c10d.PrefixStore("lading/steps", distributed_c10d._get_default_store())
        self._store = distributed_c10d.PrefixStore(str(store.add(f"jobs of {self.rank}", 1)), store)
        self._doing, self._failed = "begin", False
        self.meet("begin", {"number of ranks": ranks})
        first = torch.zeros(_FIRST_ELEMENTS // ranks * ranks)
        self.mean_(first)
        self.all_gather(first, first[: _FIRST_ELEMENTS // ranks].clone())
        self.mean([0.0])
        arrived = self.expect(torch.empty_like(first), (self.rank - 1) % ranks, 0)
        self.send(first, (self.rank + 1) % ranks, 0)
        arrived()

    def mean_(self, values: torch.Tensor) -> None:
        """Replace a tensor by its mean over all ranks.

        Raises:
            StorageError: another rank is gone or late; says which.
        """
        self._collective(lambda: dist.all_reduce(values, group=self._group))
        values.div_(self.ranks)

    def sum_(self, values: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks; errors as ``mean_``."""
        self._collective(lambda: dist.all_reduce(values, group=self._group))

    def reduce_scatter(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a shard with this rank's part of the mean of ``values`` over all ranks; errors as ``mean_``.

        ``values`` are overwritten: gloo scatters what it reduced of a copy, so this reduces them where they are.
        Shapes: values (ranks * n,) -> shard (n,).
        """
        self.sum_(values)
        torch.div(values[self.rank * len(shard) : (self.rank + 1) * len(shard)], self.ranks, out=shard)

    def all_gather(self, values: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``values`` with the shards of all ranks, one after another; errors as ``mean_``.

        Each rank broadcasts its own, all at once: gloo's gather takes a copy of all of them, and longer.
        Shapes: shard (n,) -> values (ranks * n,).
        """
        parts = values.view(self.ranks, len(shard))
        parts[self.rank].copy_(shard)

        def broadcast() -> None:
            works = [dist.broadcast(part, rank, group=self._group, async_op=True) for rank, part in enumerate(parts)]
            for work in works:
                cast("dist.Work", work).wait()

        self._collective(broadcast)

    def send(self, values: torch.Tensor, peer: int, tag: int) -> None:
        """Send a tensor to another rank, which receives it by the same tag; errors as ``mean_``."""
        self._collective(lambda: dist.send(values, peer, group=self._group, tag=tag))

    def mailbox(self, size_bytes: int, peer: int, tag: int) -> Mailbox:
        """Make room for what another rank sends by this tag once a step."""
        return _Mailbox(self, torch.empty(size_bytes, dtype=torch.uint8), peer, tag)

    def expect(self, values: torch.Tensor, peer: int, tag: int) -> Callable[[], None]:
        """Begin to receive a tensor; returns what waits for it, with errors as ``mean_``."""
        work = dist.irecv(values, peer, group=self._group, tag=tag)
        assert work is not None, "this rank is of the group"
        return lambda: self._collective(work.wait)

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """Fill a tensor with that of one rank, on all others; errors as ``mean_``."""
        self._collective(lambda: dist.broadcast(values, source, group=self._group))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers over all ranks, the same on each; errors as ``mean_``."""
        total = torch.tensor(values, dtype=torch.float64)
        self.sum_(total)
        return total.tolist()

    def mean(self, values: Sequence[float]) -> list[float]:
        """Means of numbers over all ranks, the same on each; errors as ``mean_``."""
        total = torch.tensor(values, dtype=torch.float64)
        self.mean_(total)
        return total.tolist()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Largest of numbers over all ranks, the same on each; errors as ``mean_``."""
        most = torch.tensor(values, dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group))
        return most.tolist()

    def meet(self, doing: str, facts: dict[str, float]) -> None:
        """Wait until all ranks come to do the same.

        Args:
            doing: What this rank is about to do ("step 8"), for messages.
            facts: Numbers that are to be equal on all ranks, by name.
        Raises:
            ConfigError: they are not; says which, and on which ranks.
            StorageError: a rank is gone or late; says which.
        """
        self._doing = doing
        self._store.set(f"doing {self.rank}", doing)
        values = [float(zlib.crc32(doing.encode())), *facts.values()]
        mine = torch.tensor(values + [0.0] * (_MOST_FACTS - len(facts)), dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._collective(lambda: dist.all_gather(every, mine, group=self._group))
        if other := [rank for rank, row in enumerate(every) if row[0] != mine[0]]:
            each = ", ".join(f"rank {rank} is about to {self._told(rank)}" for rank in other[:8])
            raise ConfigError(f"{doing}: expected all ranks to do the same, but {each}; nothing has run")
        for column, name in enumerate(facts, 1):
            told = [float(row[column]) for row in every]
            if len(set(told)) > 1:
                each = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(told[:8]))
                raise ConfigError(f"{doing}: expected the same {name} on all ranks, got {each}; nothing has run")

    def barrier(self) -> None:
        """Wait until all ranks have come here; raises as ``mean_`` does."""
        self._collective(lambda: dist.barrier(group=self._group))

    def abandon(self) -> None:
        """Let ``close`` wait for nobody, as this rank has failed: the others notice when its connections close."""
        self._failed = True

    def close(self) -> None:
        """Give up the process group of these ranks; the job's own stays. May be called twice.

        Waits a while for the others, unless one is gone already: a rank that leaves while another is still about to
        receive its part of the last collective would break it.
        """
        if self._group is None:
            return
        group, self._group = self._group, None
        if not dist.is_initialized():
            return
        with suppress(RuntimeError):  # the others are gone, so there is nobody to wait for
            self._store.set(f"closed {self.rank}", "")
            if not self._failed:
                self._store.wait([f"closed {rank}" for rank in range(self.ranks)], timedelta(seconds=_CLOSING_S))
        dist.destroy_process_group(group)

    def _collective(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            self._failed = True
            raise StorageError(self._lost(error)) from error

    def _lost(self, error: Exception) -> str:
        """Say which ranks did not come to a collective, as far as they can still be asked."""
        first = _first_line(error)
        try:
            told = {r: self._told(r) for r in range(self.ranks) if r != self.rank}
        except RuntimeError as lost:
            return (
                f"lost the other ranks while waiting for them to {self._doing}: the process that keeps the job's store "
                f"has ended ({_first_line(lost)}; {first}); look at its output, and start the job again"
            )
        late = [f"rank {rank} ({doing or 'had not come'})" for rank, doing in told.items() if doing != self._doing]
        who = ", ".join(late[:8]) if late else "a rank that had come, and then failed or hung"
        return (
            f"rank {self.rank} waited up to {self._timeout_s:g} s for the others to {self._doing}; missing: {who} "
            f"({first}); look at its output, and start the job again from the last checkpoint"
        )

    def _told(self, rank: int) -> str:
        key = f"doing {rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""


class _Mailbox:
    """Place of its own for one thing that another rank sends once a step, asked for before the step begins.

    gloo sends only what the other has asked for. Asked for as late as there is room for it, two ranks could wait for
    each other: each for a send to end whose memory what it is to receive next will take.
    """

    def __init__(self, ranks: Replicas, place: torch.Tensor, peer: int, tag: int) -> None:
        self._ranks, self._place, self._peer, self._tag = ranks, place, peer, tag
        self._wait: Callable[[], None] | None = None

    def post(self) -> None:
        """Ask for this step's; in the order in which they are sent."""
        self._wait = self._ranks.expect(self._place, self._peer, self._tag)

    def take(self, values: torch.Tensor) -> None:
        """Wait for it, and copy it out."""
        assert self._wait is not None, "it was asked for when the step began"
        self._wait()
        self._wait = None
        values.view(torch.uint8).copy_(self._place)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
