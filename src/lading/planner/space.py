"""Space: the layouts that are searched, as blocks (how one block is cut) times pipes (stages) times exchanges.

A layout is (block, pipe, exchange). What a block costs does not depend on the other two, so it is priced once; how many
replicas there are follows from the devices. What is left out, unless it is pinned, is said by ``Space.left_out``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any, NamedTuple

from lading.cost.product import LOW_PRECISIONS, peak_flops
from lading.errors import ConfigError, did_you_mean
from lading.ir.layout import ALONE, PRECISIONS, RECOMPUTES, SCHEDULES, Layout
from lading.ir.machine import Machine
from lading.ir.request import Request, StepRequest
from lading.ir.schedules import V_SHAPED
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.parallel.recompute import has_parts
from lading.planner.least import Least
from lading.sim.simulate import segments_of
from lading.sim.updates import segment_directions_s

_SHORT = {"mb": "micro_batch"}
#: What ``--pin`` takes.
PINS = (
    "dp", "tp", "cp", "pp", "ep", "etp", "vpp", "sp", "zero", "shard", "cp_comm", "micro_batch", "schedule",
    "recompute", "recompute_layers", "recompute_modules", "precision", "offload", "offload_to",
)  # fmt: skip
_WORDS = ("cp_comm", "schedule", "recompute", "precision", "offload_to")
_CP_COMMS = ("ring", "all_gather", "all_to_all")
#: What a search puts behind the device: the optimizer's states, or the pieces of parameters with them.
_BEHIND = ("optimizer", "parameters")
#: Precisions with a scale for each 16 or 32 elements, whose products Blackwell brought.
_SCALED_BLOCKS = ("mxfp8", "nvfp4")
_YES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
#: A rank's part of a sequence under context parallel is no shorter; a micro-batch has no more tokens, or sequences.
_LEAST_TOKENS, _MOST_TOKENS, _MOST_SEQUENCES = 1024, 1 << 17, 4


@dataclass(frozen=True, slots=True, order=True)
class Mesh:
    """Ranks over which parameters are cut inside a stage.

    Attributes:
        tp, cp, ep: Ranks of tensor, context and expert parallel.
        etp: Ranks of tensor parallel inside an expert; 0 for ``tp``.
    """

    tp: int
    cp: int
    ep: int
    etp: int

    @property
    def expert_ways(self) -> int:
        """Number of ranks that an expert layer is cut over."""
        return self.ep * (self.etp or self.tp)


@dataclass(frozen=True, slots=True, order=True)
class LayoutBlock:
    """Layouts that are alike in all that kernels and collectives depend on, but the recompute mode.

    Attributes:
        micro_batch: Sequences.
        sp: Whether sequence parallel is on.
        cp_comm: How keys and values meet under context parallel: ring, all_gather or all_to_all.
        precision: Number format of products.
    """

    mesh: Mesh
    micro_batch: int
    sp: bool
    cp_comm: str
    precision: str = "bf16"


@dataclass(frozen=True, slots=True, order=True)
class Pipe:
    """Pipeline of a layout.

    Attributes:
        pp, vpp: Ranks, and chunks of each.
        layers: Layers of each chunk that are recomputed; -1 for all.
    """

    pp: int
    vpp: int
    schedule: str
    layers: int

    @property
    def stages(self) -> int:
        """Number of stages, chunks counted."""
        return self.pp * self.vpp


@dataclass(frozen=True, slots=True, order=True)
class StateLayout:
    """Way to keep the states of parameters: how they are cut, and which lie behind the device for the host to update.

    Attributes:
        zero: ZeRO stage, 0 to 3.
        shard: Ranks that states are cut over; 0 for all replicas.
        offload: States behind the device: "optimizer" or "parameters".
        tier: Tier that they lie in, as in ``Layout.offload_to``.
    """

    zero: int
    shard: int
    offload: tuple[str, ...] = ()
    tier: str = ""


def parse_pins(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parse pins from ``key=value``; ``sp=yes``, ``recompute_modules=act+layernorm``.

    Raises:
        ConfigError: not such a text, an unknown key or a value that is none of its kind.
    """
    pins: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        key = _SHORT.get(key, key)
        if not equals or key not in PINS:
            hint = did_you_mean(key, (*PINS, *_SHORT))
            raise ConfigError(f"--pin: expected KEY=VALUE with one of {', '.join(PINS)}, got {text!r}{hint}")
        if key in pins:
            raise ConfigError(f"--pin: expected {key} once, got it twice; leave one out")
        pins[key] = _value(key, value)
    Layout(**{key: value for key, value in pins.items() if key in ("zero", "schedule", "recompute", "precision")})
    if (ways := pins.get("cp_comm", "ring")) not in _CP_COMMS:
        raise ConfigError(f"--pin cp_comm: expected {', '.join(_CP_COMMS)}, got {ways!r}")
    return pins


def _value(key: str, value: str) -> Any:
    if key in _WORDS:
        return value
    if key == "recompute_modules":
        return tuple(filter(None, value.split("+")))
    if key == "offload":
        if value not in ("none", *_BEHIND):
            raise ConfigError(
                f"--pin offload: expected none, {' or '.join(_BEHIND)}, got {value!r}: activations behind the device "
                "are simulated, not searched; give lading simulate a layout"
            )
        return () if value == "none" else (value,)
    if key == "sp":
        if value.lower() not in _YES:
            raise ConfigError(f"--pin sp: expected yes or no, got {value!r}")
        return _YES[value.lower()]
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"--pin {key}: expected a whole number, got {value!r}") from None
    min_value = {"zero": 0, "shard": 0, "etp": 0, "recompute_layers": -1}.get(key, 1)
    if number < min_value:
        raise ConfigError(f"--pin {key}: expected at least {min_value}, got {number}")
    return number


def precisions_of(text: str, machine: Machine, stack: Stack) -> tuple[str, ...]:
    """Parse precisions from ``bf16``, ``bf16,fp8`` or ``any``.

    Returns:
        Precisions to choose from; of ``any``, bf16 and all below it that the stack and the device have.

    Raises:
        ConfigError: one that is not known, that one of several cannot be, or fp32 beside others.
    """
    low = [name for name in LOW_PRECISIONS if not _lacks(name, machine, stack)]
    if text == "any":
        return ("bf16", *low)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in PRECISIONS:
            hint = did_you_mean(name, PRECISIONS)
            raise ConfigError(f"--precision: expected any, or of {', '.join(PRECISIONS)}, got {name!r}{hint}")
        if len(names) > 1 and (why := _lacks(name, machine, stack)):
            raise ConfigError(f"--precision: {name} cannot be chosen: {why}; leave it out")
    return names


def _lacks(precision: str, machine: Machine, stack: Stack) -> str:
    """Say why a search cannot choose a precision; "" where it can."""
    if precision == "fp32":
        return "parameters, gradients and states in fp32 are other layouts, to be asked for alone"
    if precision not in LOW_PRECISIONS:
        return ""
    if precision not in stack.low_precisions:
        return f"software stack {stack.name} has {', '.join(stack.low_precisions) or 'none of fewer than 16 bits'}"
    gpu = machine.device.gpu
    if gpu is None or (precision in _SCALED_BLOCKS and gpu.architecture != "blackwell"):
        return f"{machine.device.name} has no products in it"
    try:
        peak_flops(machine.device, precision)
    except ConfigError as error:
        return str(error)
    return ""


def divisors(number: int) -> list[int]:
    """List the divisors of a number in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


class RecomputeMode(NamedTuple):
    """The recomputation of every block of a layout.

    Attributes:
        name: "none", "selective" or "full".
        modules: With "selective", parts recomputed instead of attention's core.
    """

    name: str
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Space:
    """Space of the layouts that a request allows.

    Attributes:
        wanted_request: Request: how many devices, which choices are made, what may be used.
        request: One step of it: model, software and all else that is no choice; of its layout the precision counts.
        table: Operations of the model.
        machine: Each device, and what links them.
    """

    wanted_request: Request
    request: StepRequest
    table: ModelTable
    machine: Machine

    def __post_init__(self) -> None:
        asked = self.wanted_request
        precision = asked.pins.get("precision", next(iter(asked.precisions), self.request.layout.precision))
        if precision != self.request.layout.precision:  # with it goes what the stack keeps
            layout = dataclasses.replace(self.request.layout, precision=precision)
            object.__setattr__(self, "request", dataclasses.replace(self.request, layout=layout))
        for name in ("devices", "global_batch"):
            if getattr(asked, name) < 1:
                raise ConfigError(f"expected {name.replace('_', ' ')} >= 1, got {getattr(asked, name)}")
        memory = self.machine.device.memory_bytes
        if not 0 <= asked.budget_bytes <= memory:
            raise ConfigError(
                f"expected a budget of the {memory} bytes of {self.machine.device.name} or less, got "
                f"{asked.budget_bytes}; for another device take another machine"
            )
        if asked.longest and asked.longest < self.request.seq_len:
            raise ConfigError(
                f"expected longest >= the {self.request.seq_len} tokens of a sequence, got {asked.longest}"
            )
        if (tier := asked.pins.get("offload_to")) and self.machine.tier(tier) is None:
            known = ", ".join(one.name for one in self.machine.tiers) or "none"
            raise ConfigError(f"--pin offload_to: expected a tier of {self.machine.name} ({known}), got {tier!r}")
        if self.machine.processes is not None:
            raise ConfigError(
                f"layouts of {self.machine.name}, whose processes share a host, are simulated, not searched; give "
                "lading simulate a layout"
            )
        if self.request.task not in ("pretrain", "sft"):
            raise ConfigError(
                f"expected a task that trains all weights, got {self.request.task!r}: layouts of adapters are "
                "simulated, not searched; give lading simulate a layout"
            )

    def asking(self, **changes: Any) -> Space:
        """Space of the layouts of a request that differs in these fields."""
        return dataclasses.replace(self, wanted_request=dataclasses.replace(self.wanted_request, **changes))

    @cached_property
    def directions_s(self) -> list[tuple[float, float]]:
        """List by segment the seconds of a matrix optimizer on all its matrices, and on the longest; 0 without one."""
        return segment_directions_s(self.request, self.table, self.machine)

    @cached_property
    def layers(self) -> int:
        """Number of layers of the model."""
        return sum(self.table.counts[1:-1])

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions of products to choose from; parameters, gradients and states have as many bits in all of them."""
        precision = self.request.layout.precision
        return (
            (precision,) if "precision" in self.wanted_request.pins else self.wanted_request.precisions or (precision,)
        )

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 1 where there are none."""
        return self.table.symbols.get("e", 1)

    def _pinned(self, key: str, otherwise: list[Any]) -> list[Any]:
        return [self.wanted_request.pins[key]] if key in self.wanted_request.pins else otherwise

    def meshes(self) -> Iterator[Mesh]:
        """Yield all meshes of the space, in a fixed order."""
        devices = self.wanted_request.devices
        domain = self.machine.links[0].ranks if self.machine.links else 0
        for tp in self._pinned("tp", [n for n in divisors(devices) if n <= 2 * (domain or 4)]):
            for cp in self._pinned("cp", self._contexts(devices // tp)):
                if devices % (tp * cp):
                    continue
                for ep in self._pinned("ep", [n for n in divisors(self.experts) if devices % n == 0]):
                    for etp in self._pinned("etp", [0, 1] if tp > 1 and ep > 1 else [0]):
                        if devices % (ep * (etp or tp)) == 0:
                            yield Mesh(tp, cp, ep, etp)

    def _contexts(self, devices: int) -> list[int]:
        tokens = self.request.seq_len
        return [n for n in divisors(devices) if n == 1 or (tokens % (2 * n) == 0 and tokens // n >= _LEAST_TOKENS)]

    def blocks(self, mesh: Mesh) -> Iterator[LayoutBlock]:
        """Yield all blocks with a mesh, in a fixed order."""
        max_sequences = max(_MOST_SEQUENCES, _MOST_TOKENS // self.request.seq_len)
        batches = [n for n in divisors(self.wanted_request.global_batch) if n <= max_sequences]
        for micro_batch in self._pinned("micro_batch", batches):
            for sp in self._pinned("sp", [False, True] if mesh.tp > 1 else [False]):
                ways = list(_CP_COMMS) if mesh.cp > 1 else ["ring"]
                for comm in self._pinned("cp_comm", ways):
                    for precision in self.precisions:
                        yield LayoutBlock(mesh, micro_batch, sp, comm, precision)

    @cached_property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """Recompute modes to choose from: none, attention's core, other parts that the stack recomputes alone, all."""
        layers = self.wanted_request.pins.get("recompute_layers", -1)
        names = self._pinned("recompute", list(RECOMPUTES) if layers < 0 else ["full"])
        parts = self._pinned("recompute_modules", [(), *self._parts()])
        return tuple(
            RecomputeMode(name, modules) for name in names for modules in (parts if name == "selective" else [()])
        )

    def _parts(self) -> list[tuple[str, ...]]:
        """List what the stack recomputes alone, of the parts that blocks of the model have."""
        layout = Layout(precision=self.request.layout.precision)
        segments = segments_of(dataclasses.replace(self.request, layout=layout), self.table)
        blocks = [segment for segment in segments if segment.enters and segment.leaves]
        parts = [tuple(text.split("+")) for text in self.request.stack.recompute_choices]
        if self.experts == 1:
            parts = [words for words in parts if "moe_act" not in words]
        return [words for words in parts if all(has_parts(block, words) for block in blocks)]

    def pipes(self, *, partial: bool) -> list[Pipe]:
        """List the pipelines that some replicas of all devices can have.

        Chunks of a rank or another schedule, where they are pinned, leave out layouts without a pipeline.

        Args:
            partial: Whether only some layers of a chunk may be recomputed.
        """
        pipes: list[Pipe] = []
        pins = self.wanted_request.pins
        pipelined = pins.get("vpp", 1) > 1 or pins.get("schedule", ALONE.schedule) != ALONE.schedule
        depths = [n for n in divisors(self.wanted_request.devices) if n <= self.layers and (n > 1 or not pipelined)]
        for pp in self._pinned("pp", depths):
            for vpp in self._pinned("vpp", list(range(1, self.layers // pp + 1)) if pp > 1 else [1]):
                if pp * vpp > self.layers:
                    continue
                max_layers = -(-self.layers // (pp * vpp)) - 1
                for schedule in self._pinned("schedule", self._schedules(pp, vpp)):
                    for layers in self._pinned(
                        "recompute_layers", [-1, *range(1, max_layers + 1)] if partial else [-1]
                    ):
                        pipes.append(Pipe(pp, vpp, schedule, layers))
        return pipes

    def _schedules(self, pp: int, vpp: int) -> list[str]:
        """Schedules that the stack can run: Megatron-LM has 1F1B and its interleaved form, torch has all."""
        if pp == 1:
            return ["1f1b"]
        if self.request.stack.megatron_order:
            return ["1f1b"] if vpp == 1 else ["interleaved"]
        if vpp == 1:
            return ["gpipe", "1f1b", "zero-bubble"]
        both = ["interleaved", "zero-bubble"]
        return [*both, *V_SHAPED] if vpp == 2 else both

    def cuts(self, data: int, pp: int) -> list[StateLayout]:
        """List the ways to keep states over ``data`` replicas in a pipeline of ``pp`` ranks."""
        stages = list(self.request.stack.zeros)
        if pp > 1:  # [Note: sharded in a pipeline] in lading.program.emit: 2 and 3 are one there
            stages = [zero for zero in stages if zero < 2 or (zero == 3 and self.request.stack.cuts_in_pipeline)]
        cuts: list[StateLayout] = []
        for zero in self._pinned("zero", stages if data > 1 else [0]):
            parts = [0, *(n for n in divisors(data) if 1 < n < data)] if zero else [0]
            shards = [n for n in self._pinned("shard", parts) if not n or (zero and data % n == 0)]
            ways = [way for way in self._offloads if zero == 3 or "parameters" not in way[0]]
            cuts += [StateLayout(zero, shard, *way) for way in ways for shard in shards]
        return cuts

    @cached_property
    def _offloads(self) -> list[tuple[tuple[str, ...], str]]:
        """List (states, tier) that may lie behind the device; parameters only where that is pinned."""
        tier = "" if self.offloads_to_host else self.wanted_request.pins["offload_to"]
        if "offload" in self.wanted_request.pins:
            pinned = self.wanted_request.pins["offload"]
            return [(pinned, tier if pinned else "")]
        ways: list[tuple[tuple[str, ...], str]] = [((), "")]
        lower_tier = self.machine.tier(tier or self.machine.host_tier)
        if lower_tier is None or self.machine.host_device is None or self.request.moves_matrices:
            return ways  # the host updates elements, not whole matrices
        return [*ways, (("optimizer",), tier)] if self._least_behind <= lower_tier.capacity_bytes else ways

    @property
    def offloads_to_host(self) -> bool:
        """Whether what is offloaded goes to the nearest tier that the host's processors work on: no other is pinned."""
        return self.wanted_request.pins.get("offload_to", "") in ("", self.machine.host_tier)

    @cached_property
    def _least_behind(self) -> int:
        """Bytes of a device that the optimizer's states need where the host updates, whatever the layout."""
        return Least.of(self.request, self.table, self.wanted_request.devices).host_bytes

    def layout(
        self, block: LayoutBlock, mode: RecomputeMode, pipe: Pipe, cut: StateLayout, global_batch: int | None = None
    ) -> Layout:
        """Build the layout of a block, a recompute mode, a pipe and a way to keep states.

        Args:
            global_batch: Sequences of a step; None for those of the request.
        Raises:
            ConfigError: it cannot be.
        """
        mesh = block.mesh
        return Layout(
            dp=self.wanted_request.devices // (mesh.tp * mesh.cp * pipe.pp),
            **dataclasses.asdict(mesh),
            pp=pipe.pp,
            vpp=pipe.vpp,
            schedule=pipe.schedule,
            sp=block.sp,
            cp_comm=block.cp_comm,
            micro_batch=block.micro_batch,
            global_batch=self.wanted_request.global_batch if global_batch is None else global_batch,
            zero=cut.zero,
            shard=cut.shard,
            recompute=mode.name,
            recompute_layers=pipe.layers
            if mode.name == "full" or "recompute_layers" in self.wanted_request.pins
            else -1,
            recompute_modules=mode.modules,
            precision=block.precision,
            offload=cut.offload,
            offload_to=cut.tier,
        )

    def left_out(self) -> tuple[str, ...]:
        """Say which layouts are not searched unless they are pinned."""
        sentences = [
            f"context parallel with parts of a sequence under {_LEAST_TOKENS} tokens, and micro-batches of more than "
            f"{_MOST_TOKENS:,} tokens and {_MOST_SEQUENCES} sequences",
            "tensor parallel over more than two domains of the nearest link",
        ]
        stack, pins = self.request.stack, self.wanted_request.pins
        if "offload" not in pins:
            sentences.append("activations or pieces of parameters behind the device, or what is on another tier than "
                             "the host's memory (--pin offload, offload_to)")  # fmt: skip
        if "etp" not in pins and self.experts > 1:
            sentences.append("an expert over some of the ranks of tp, not one or all (--pin etp)")
        if "recompute_modules" not in pins and any(mode.name == "selective" for mode in self.modes):
            parts = ", ".join(
                ("the core of attention", *("+".join(mode.modules) for mode in self.modes if mode.modules))
            )
            sentences.append(f"other parts of a block recomputed than {parts} (--pin recompute_modules)")
        if fewer := [str(zero) for zero in range(4) if zero not in stack.zeros]:
            sentences.append(f"zero {', '.join(fewer)}, which software stack {stack.name} has not")
        if not stack.cuts_in_pipeline:
            sentences.append(
                f"cut gradients or parameters (zero 2, 3) in a pipeline: software stack {stack.name} has none"
            )
        if len(self.precisions) == 1:
            precision = self.precisions[0]
            sentences.append(
                f"products in another precision than {precision}, as it changes what is trained: --precision any"
            )
        if stack.megatron_order:
            others = ", ".join(kind for kind in SCHEDULES if kind not in ("1f1b", "interleaved"))
            sentences.append(f"schedules that software stack {stack.name} has not: {others}")
        return tuple(sentences)
