"""Prices: seconds of kernels, collectives and exchanges on one machine, under one stack and layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import hypot
from typing import Any

import numpy as np

from lading.cost.collective import collective_s, collectives_s, dispatch_s
from lading.cost.contention import contention
from lading.cost.fusion import is_loss
from lading.cost.hosting import copy_s, host_step_s
from lading.cost.kernels import adam_bytes, clip_s, kernel_s, memory_s, step_s
from lading.cost.product import LOW_PRECISIONS, OPERAND_BYTES
from lading.cost.topology import Group, group_of
from lading.ir.graph import DTYPE_BYTES, OpKind
from lading.ir.layout import Layout
from lading.ir.machine import Machine
from lading.ir.stack import Stack
from lading.ir.work import Collective, Kernel
from lading.memory.rank_bytes import gathered_width, kept_state_bytes, shards
from lading.sim.noise import largest_of
from lading.sim.parts import ATTENTION, LOW, PRODUCTS

#: Bytes from which glibc maps memory anew however often it was freed (malloc.c, ``DEFAULT_MMAP_THRESHOLD_MAX``).
_MAPPED_BYTES = 32 << 20
#: Times that a copy of gradients reads or writes each: into the buffer, scaled there, and back.
_COPY_PASSES = 6

#: Architectures whose switches add (NVLink SHARP).
_ADDING = ("hopper", "blackwell")


#: Key of ``Processes.slowdown`` by cause; of others it is "memory-bound".
_SHARED = {PRODUCTS: "products", LOW: "products", ATTENTION: "products"}


def _overlapped_collective(axis: str) -> str:
    """The collective that runs beside computing over an axis."""
    return "all_to_all" if axis == "ep" else "send" if axis in ("pp", "cp") else "all_gather"


class MachinePrices:
    """``lading.sim.parts.Prices`` and ``lading.sim.step.Exchange`` of a machine that has links.

    Numbers of elements may be arrays where exchanges and the optimizer are priced; seconds are then arrays too.
    """

    def __init__(self, machine: Machine, layout: Layout, stack: Stack, active: int = 1, computing: int = 0) -> None:
        """Set up the prices of one request.

        Args:
            active: Number of experts that a token is sent to.
            computing: Processes of a host that compute at once, if ranks are processes; 0 for all of the layout.
        """
        self.computing = computing or layout.devices
        self.active = active
        self.machine = machine
        self.layout = layout
        self.stack = stack
        self._order = "tp-cp-dp-pp"

    def kernel_s(self, kernel: Kernel) -> float:
        """Seconds of a kernel alone, without its launch; for experts, on the rank whose experts have most tokens."""
        seconds = kernel_s(kernel, self.machine.device, self.stack, self.layout.precision)
        if is_loss(kernel):
            seconds *= self._measured("loss")
        if (
            (rate := self.stack.product_bytes_per_s)
            and kernel.kind is OpKind.MATMUL
            and self.machine.device.gpu is None
        ):
            seconds = hypot(seconds, (kernel.bytes_read + kernel.bytes_written) / rate)
        return seconds * self.stack.imbalance if kernel.is_experts else seconds

    def _measured(self, what: str) -> float:
        """Factor that a profile of the software measured on this device for something other than a kernel's cause."""
        return self.stack.in_situ.get(f"{self.architecture}.{what}", 1.0)

    def in_situ(self, cause: str) -> float:
        """Factor by which kernels of a cause take longer in a running step than alone."""
        return self._slower(_SHARED.get(cause, "memory-bound")) * self.stack.in_situ_of(self.architecture, cause)

    def _slower(self, cause: str) -> float:
        """Factor by which processes of one host take longer because others compute, too; 1 for ranks with devices."""
        shared = self.machine.processes
        return shared.slower(cause, self.computing) if shared else 1.0

    @property
    def precision(self) -> str:
        """Number format of products, such as "bf16"."""
        return self.layout.precision

    def collective_s(self, collective: Collective) -> float:
        """Seconds of a collective among the ranks of its axis; the stack's dispatcher brings tokens to experts."""
        if collective.op == "all_to_all" and collective.axis == "ep":
            return dispatch_s(
                collective.size_bytes * self.stack.imbalance,
                self._group("ep"),
                self.machine,
                dispatcher=self.stack.dispatcher,
                active=self.active,
            )
        size = collective.size_bytes
        if collective.op == "all_gather" and collective.axis == "tp" and self._gathers_low:
            size = int(size * OPERAND_BYTES[self.layout.precision] / DTYPE_BYTES["bfloat16"])
        return self._collective_s(collective.op, size, collective.axis)

    @property
    def _gathers_low(self) -> bool:
        """Whether inputs of products are cast before they are gathered, as Transformer Engine and torchao do."""
        casts = self.stack.fusion == "fused" or self.stack.gather_dtype == "float8_e4m3fn"
        return casts and self.layout.precision in LOW_PRECISIONS

    def lateness(self, axis: str) -> float:
        """Lateness of the last of an axis' ranks at a collective, in standard deviations of one rank."""
        return largest_of(self._group(axis).ranks)

    def lost_beside(self, axis: str, memory_bound: float) -> float:
        """Seconds that computing loses for each second of a collective of this axis, as of ``Prices.lost_beside``."""
        return self._lost(_overlapped_collective(axis), axis, memory_bound)

    def reduce_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of reducing the gradients of ``elements``, by the axes over which they are replicated."""
        width = DTYPE_BYTES[self.stack.gradient_dtype]
        pieces = self.stack.pieces
        seconds = pieces * sum(self._reduced_s(axes, number * width // pieces) for axes, number in elements.items())
        if self.layout.updates_on_host and self.layout.zero >= 2:
            seconds += copy_s(self._updated_elements(elements) * width, self.machine, self.machine.host_tier, out=True)
        return seconds

    def gather_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of gathering ``elements`` of sharded parameters; 0 if parameters are not sharded."""
        if self.layout.zero == 0:
            return 0.0
        pieces, width = self.stack.pieces, gathered_width(self.layout, self.stack)
        if self.layout.zero == 1 and self.stack.broadcasts and not self.stack.overlap_param_gather:
            return sum(self._broadcasts_s(number * width, self._shard_axis(axes)) for axes, number in elements.items())
        seconds = pieces * sum(
            self._collective_s("all_gather", number * width // pieces, self._shard_axis(axes))
            for axes, number in elements.items()
        )
        if self.layout.cuts_parameters and self.stack.gather_rank_s:
            ranks = max((self._group(self._shard_axis(axes)).ranks for axes in elements), default=1)
            seconds += pieces * ranks * self.stack.gather_rank_s if ranks > 1 else 0.0
        if "parameters" in self.layout.offload:
            seconds += copy_s(self._updated_elements(elements) * width, self.machine, self.layout.offload_to, out=False)
        return seconds

    def _broadcasts_s(self, size_bytes: int, axis: str) -> float:
        """Seconds of one broadcast after another, in which each rank of an axis sends its part of ``size_bytes``."""
        ranks = self._group(axis).ranks
        return ranks * self._collective_s("broadcast", size_bytes // ranks, axis) if ranks > 1 else 0.0

    def sums_s(self, summed: Mapping[int, int]) -> float:
        """Seconds of summing gradients over tp ranks that have a part of each ([Note: sums] in lading.sim.step)."""
        if self.layout.tp == 1 or not summed:
            return 0.0
        if self.layout.cuts_parameters:
            width = gathered_width(self.layout, self.stack)
            return sum(count * self._collective_s("all_reduce", n * width, "tp") for n, count in summed.items())
        elements = sum(n * count for n, count in summed.items())
        return self._collective_s("all_reduce", elements * DTYPE_BYTES[self.stack.gradient_dtype], "tp")

    def copies_sum_s(self, elements: int) -> float:
        """Seconds of summing the gradients of a tied weight, of which two pipeline ranks have a copy each.

        Args:
            elements: Elements of the weight on one rank; with ZeRO 2 and 3 a shard of them is summed.
        """
        num_elements = self._updated_elements({"dp": elements}) if self.layout.zero >= 2 else elements
        return self._collective_s("all_reduce", int(num_elements * DTYPE_BYTES[self.stack.gradient_dtype]), "pp")

    def send_s(self, size_bytes: int) -> float:
        """Seconds of sending the activations on a stage's border, ``size_bytes`` in all, to the next stage."""
        ranks = self.layout.tp
        if ranks == 1 or self.layout.sp or not self.stack.scatter_sends:
            return self._collective_s("send", size_bytes, "pp")
        gathered = self._collective_s("all_gather", size_bytes, "tp")
        return self._collective_s("send", size_bytes // ranks, "pp") + gathered

    def copies_s(self, elements: Mapping[str, int], bytes_each: float) -> float:
        """Seconds of copying parameters or gradients within the device."""
        if not bytes_each:
            return 0.0
        return memory_s(sum(elements.values()) * bytes_each, "copy", self.machine.device) * self._slower("memory-bound")

    def gradient_copies_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of a step in which a process copies gradients into a buffer and back (``Stack.gradient_copies``)."""
        times = self.stack.gradient_copies
        if not times or self.machine.device.kind != "cpu":
            return 0.0
        each = DTYPE_BYTES[self.stack.gradient_dtype]
        size = sum(elements.values()) * each
        anew = size / self._fresh_bytes_per_s if size >= _MAPPED_BYTES and self.stack.fresh_bytes_per_s else 0.0
        return times * (self.copies_s(elements, _COPY_PASSES * each) + anew)

    @property
    def _fresh_bytes_per_s(self) -> float:
        """Bytes a second of new memory that each computing process gets; more processes than processors take turns.

        Ranks that are not processes of one host each have a host of their own.
        """
        rates = {int(processes): rate for processes, rate in self.stack.fresh_bytes_per_s.items()}
        if self.machine.processes is None:
            return rates[min(rates)]
        at_once = max((number for number in rates if number <= self.computing), default=min(rates))
        cores = self.machine.processes.cores
        return rates[at_once] * max(1.0, at_once / cores) / max(1.0, self.computing / cores)

    def optimizer_s(self, elements: Mapping[str, int]) -> float:
        """Seconds of updating what a rank keeps of ``elements``, with clipping where the stack clips."""
        num_elements, device = self._updated_elements(elements), self.machine.device
        if self.layout.updates_on_host:
            states = kept_state_bytes(self.stack)
            return host_step_s(num_elements, self.layout, self.stack, self.machine, state_bytes=states)
        clipped = clip_s(num_elements, self.stack, device) if self.stack.clips else 0.0
        alone = step_s(num_elements, adam_bytes(self.stack), device) + clipped
        return alone * self._slower("memory-bound") * self._measured("optimizer")

    def copies_beside_s(self, size_bytes: int) -> tuple[float, float]:
        """Seconds of copying the activations that blocks keep to the layout's lower tier, and of copying them back."""
        both = self.layout.pp > 1
        tier = self.layout.offload_to
        out, back = (copy_s(size_bytes, self.machine, tier, out=out, both=both) for out in (True, False))
        return out, back

    def slowdown(self, memory_bound: float) -> float:
        """Share by which computing takes longer while gradients are reduced, or parameters gathered, beside it."""
        return 1 / (1 - self._lost("all_gather", "dp", memory_bound)) - 1

    @cached_property
    def architecture(self) -> str:
        """Architecture of the device's kernels, as of ``Device.architecture``."""
        return self.machine.device.architecture

    def _updated_elements(self, elements: Mapping[str, int]) -> float:
        """Number of ``elements`` that one rank updates."""
        return sum(number / shards(axes, self.layout) for axes, number in elements.items())

    def _shard_axis(self, axes: str) -> str:
        return "shard" if self._hybrid and axes == "dp" else axes

    @property
    def _hybrid(self) -> bool:
        return 0 < self.layout.shard < self.layout.dp * self.layout.cp

    def _reduced_s(self, axes: str, size_bytes: int) -> float:
        if self.layout.zero <= self.stack.reduces_whole:
            return self._collective_s("all_reduce", size_bytes, axes)
        seconds = self._collective_s("reduce_scatter", size_bytes, self._shard_axis(axes))
        if self._hybrid and axes == "dp":
            seconds += self._collective_s("all_reduce", size_bytes // self.layout.sharding_ranks, "replicate")
        return seconds

    def _collective_s(self, op: str, size_bytes: Any, axis: str) -> Any:
        """Seconds of a collective of one size, or of an array of sizes in bytes."""
        seconds: Any = collectives_s if isinstance(size_bytes, np.ndarray) else collective_s
        alone = seconds(op, size_bytes, self._group(axis), self.machine, nvls=self.architecture in _ADDING)
        slower = self.stack.in_situ_among(self.architecture, op, self._group(axis).ranks)
        return alone * max(1.0, self.processor_share(op, axis)) * slower

    def processor_share(self, op: str, axis: str) -> float:
        """Share of a host's processors that a collective takes in all groups of an axis at once; above 1 if they wait.

        It is 0 if ranks are not processes of one host.
        """
        shared = self.machine.processes
        if shared is None:
            return 0.0
        ranks = self._group(axis).ranks
        return self.layout.devices // ranks * shared.busy.get(f"{op}.{ranks}", float(ranks)) / shared.cores

    def _group(self, axis: str) -> Group:
        return group_of(self.layout, axis, self.machine, self._order)

    def rates_beside(self, axis: str) -> tuple[float, float, float]:
        """Shares of their rates left beside each other: product-bound and memory-bound computing, and a collective."""
        group, gpu = self._group(axis), self.machine.device.gpu
        if group.ranks == 1 or gpu is None:
            return 1.0, 1.0, 1.0
        op, nvls = _overlapped_collective(axis), self.architecture in _ADDING
        bound = [contention(op, group, self.machine, gpu.num_sms, memory_bound=m, nvls=nvls) for m in (0.0, 1.0)]
        return bound[0].compute, bound[1].compute, bound[0].collective

    def _lost(self, op: str, axis: str, memory_bound: float) -> float:
        group, gpu = self._group(axis), self.machine.device.gpu
        if group.ranks == 1 or gpu is None:
            return 0.0
        nvls = self.architecture in _ADDING
        return contention(op, group, self.machine, gpu.num_sms, memory_bound=memory_bound, nvls=nvls).lost
