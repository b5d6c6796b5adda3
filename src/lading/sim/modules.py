"""A model as modules in the order of their work: seconds, bytes alive and parameters, of one rank and micro-batch.

[Note: pieces of a block]
A segment as a whole takes the seconds that ``simulate`` gives it; its kernels share them in proportion to what each
takes alone. Kernels of one module in a row are a piece. A module lasts from the first to the last piece of itself or of
a module in it, in forward and in backward alike. Recomputed kernels come first in backward.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lading.cost.kernels import operand_share
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, Role
from lading.ir.machine import Machine
from lading.ir.request import StepRequest
from lading.ir.table import ModelTable
from lading.ir.work import Collective, RankSegment, Stage
from lading.memory.rank_bytes import gathered_bytes, gradient_width, shards, state_bytes
from lading.parallel.memory import AliveBytes, alive_bytes
from lading.parallel.recompute import recomputed
from lading.sim.noise import waiting_share
from lading.sim.parts import MEMORY, cause_of, span
from lading.sim.phases import Phases
from lading.sim.prices import MachinePrices
from lading.sim.simulate import Priced, machine_of, priced, prices_of, rank_segments
from lading.sim.step import SimulatedStage as Chunk
from lading.sim.step import host_s, stage_of
from lading.sim.updates import block_matrices, rank_update


@dataclass(frozen=True)
class Atom:
    """Parameters of one module, without those of its submodules: the smallest unit that a bucket may gather.

    Attributes:
        module: Path within its block.
        elements: Number of elements, by the axes over which they are replicated.
        read_again: Whether backward, or a kernel recomputed for it, reads them.
    """

    module: str
    elements: dict[str, int]
    read_again: bool = True

    @property
    def count(self) -> int:
        """Elements in all."""
        return sum(self.elements.values())


@dataclass(frozen=True)
class Piece:
    """Kernels of one module in a row.

    Attributes:
        alive_bytes: Largest bytes of the block's activations while the piece runs.
        left_bytes: Bytes of the block's activations while the last kernel of the piece runs.
        gradients: Positions in ``Block.atoms`` of the atoms whose gradients are complete when it ends.
    """

    module: str
    seconds: float
    alive_bytes: int
    left_bytes: int
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Block:
    """A distinct block, or a segment before or after the blocks.

    Attributes:
        atoms: Atoms in the order of forward.
        forward, backward: Pieces in the order in which they run; recomputed ones are in ``backward``.
        saved_bytes: Bytes kept from forward to backward.
        enters_bytes: Bytes of the block's inputs.
        is_recomputed: Whether its forward runs again in backward.
    """

    atoms: tuple[Atom, ...]
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    saved_bytes: int
    enters_bytes: int
    is_recomputed: bool

    def lasts(self, module: str, *, backward: bool) -> tuple[int, int]:
        """First and last piece of a module; for a module without kernels, those of the module that contains it."""
        pieces = self.backward if backward else self.forward
        while True:
            places = [place for place, piece in enumerate(pieces) if is_in(piece.module, module)]
            if places:
                return places[0], places[-1]
            if not module:
                raise ConfigError("modules: expected a block with kernels, got none")
            module = module.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class Modules:
    """The model of a request, as blocks of modules.

    Attributes:
        blocks: Distinct blocks.
        order: (position in ``blocks``, path of the module) of every block in the order of forward.
        slowdown: Share by which computing takes longer while the network's kernels run beside it.
        rest_s: Seconds of a step outside of forward and backward: the optimizer and the host.
        waits: Share by which work takes longer because devices are not equal.
        states: Bytes on the device of sharded parameters, optimizer states and permanent buffers, by role; gradients
            are not in it, as backward makes them.
        summed_bytes: Bytes of this rank's shard of all gradients if micro-batches add them up on the device, else 0.
    """

    request: StepRequest
    machine: Machine
    prices: MachinePrices
    blocks: tuple[Block, ...]
    order: tuple[tuple[int, str], ...]
    slowdown: float
    rest_s: float
    waits: float
    states: Mapping[Role, int]
    summed_bytes: int

    @cached_property
    def atoms(self) -> tuple[tuple[int, int], ...]:
        """(Position in ``order``, position in ``Block.atoms``) of every atom, in the order of forward."""
        return tuple((place, n) for place, (block, _) in enumerate(self.order) for n in range(self._count(block)))

    @property
    def state_bytes(self) -> int:
        """Bytes of all ``states``."""
        return sum(self.states.values())

    @cached_property
    def computing_s(self) -> float:
        """Seconds of a micro-batch's forward and backward with no collective beside them."""
        blocks = [self.blocks[block] for block, _ in self.order]
        return sum(piece.seconds for block in blocks for piece in (*block.forward, *block.backward))

    def atom(self, number: int) -> Atom:
        """Atom at a position of ``atoms``."""
        place, inner = self.atoms[number]
        return self.blocks[self.order[place][0]].atoms[inner]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of one parameter, before it is reduced."""
        return gradient_width(self.request.layout, self.request.stack)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the gradient of one parameter in the buffer that is reduced."""
        return DTYPE_BYTES[self.request.stack.gradient_dtype]

    def elements(self, atoms: Iterable[int]) -> dict[str, int]:
        """Parameters of some atoms by the axes over which they are replicated."""
        by_axes: dict[str, int] = {}
        for number in atoms:
            for axes, count in self.atom(number).elements.items():
                by_axes[axes] = by_axes.get(axes, 0) + count
        return by_axes

    def gathered(self, elements: Mapping[str, int]) -> int:
        """Bytes of ``elements`` parameters in the buffer into which they are gathered."""
        return gathered_bytes(elements, self.request.layout, self.request.stack)

    def shard_elements(self, elements: Mapping[str, int]) -> int:
        """Number of ``elements`` that one rank keeps as its shards."""
        return sum(-(-count // shards(axes, self.request.layout)) for axes, count in elements.items())

    def _count(self, block: int) -> int:
        return len(self.blocks[block].atoms)


def is_in(module: str, outer: str) -> bool:
    """Whether ``module`` is ``outer`` or one of its submodules; every module is in ""."""
    return not outer or module == outer or module.startswith(outer + ".")


def unfit(request: StepRequest, machine: Machine) -> str:
    """Reason why no groups of parameters can be chosen for a request; "" if they can."""
    layout = request.layout
    if layout.zero != 3 or layout.is_pipeline:
        return f"expected a layout with zero3 and without pp, got {layout}"
    if layout.offload and (
        machine.offload_tier(layout.offload_to).name != machine.host_tier
        or set(layout.offload) - {"optimizer"} != {"parameters"}
    ):
        return f"expected everything on the device, or parameters and their states on the host, got {layout}"
    if request.task in ("lora", "qlora"):
        return f"expected all weights to be trained, got task {request.task!r}"
    return ""


def modules_of(request: StepRequest, table: ModelTable, parts: Priced | None = None) -> Modules:
    """Split the model of a request into modules.

    Args:
        parts: Result of ``priced`` for the request; None to price it here.
    Raises:
        ConfigError: parameters are not sharded, there is a pipeline, or weights are frozen: groups of parameters are
            chosen for none of these.
    """
    layout, stack = request.layout, request.stack
    if reason := unfit(request, parts.machine if parts else machine_of(request)):
        raise ConfigError(f"unsharding: {reason}")
    parts = parts or priced(request, table)
    prices = prices_of(request, parts.machine, table)
    ranked = rank_segments(request, table, prices)
    made: dict[tuple[int, bool], int] = {}
    blocks: list[Block] = []
    order: list[tuple[int, str]] = []
    left = layout.recompute_layers if layout.recompute_layers >= 0 else sum(table.counts)
    numbers: dict[str, int] = {}
    for place, (segment, count) in enumerate(zip(table.segments, table.counts, strict=True)):
        inside = bool(segment.enters and segment.leaves)
        for _ in range(count):
            again = inside and layout.recompute != "none" and left > 0
            left -= inside
            if (place, again) not in made:
                made[place, again] = len(blocks)
                whole = parts.segments[place + (0 if again else len(ranked))]
                blocks.append(_block(*ranked[place], whole, request, again))
            order.append((made[place, again], _path(segment.name, numbers) if inside else ""))
    stage = stage_of(
        [(n, sum(n == o for o, _ in order)) for n in range(len(blocks))], _phases(parts, made), prices, stack
    )
    memory_bound = stage.forward.shares_s.get(MEMORY, 0.0) / stage.forward.seconds if stage.forward.seconds else 0.0
    states, rest_s = _updates(request, table, parts.machine, stage, [place for place, _ in made])
    return Modules(
        request=request,
        machine=parts.machine,
        prices=prices,
        blocks=tuple(blocks),
        order=tuple(order),
        slowdown=prices.slowdown(min(1.0, memory_bound)),
        rest_s=rest_s,
        waits=waiting_share(layout.devices, every_block=True),
        states={**states, Role.GRADIENT: 0, Role.WORKSPACE: sum(stage.placeholders.values())},
        summed_bytes=states.get(Role.GRADIENT, 0) if layout.micro_batches > 1 else 0,
    )


def _updates(
    request: StepRequest, table: ModelTable, machine: Machine, stage: Chunk, places: Sequence[int]
) -> tuple[dict[Role, int], float]:
    """Bytes of a rank's states by role, and seconds of the optimizer and the host; ``places``: segments of blocks."""
    layout, stack = request.layout, request.stack
    states, prices = state_bytes(stage.elements, layout, stack), prices_of(request, machine, table)
    optimizer_s = prices.optimizer_s(stage.trained)
    rest_s = optimizer_s + host_s([stage], stack, optimizer_s) + prices.gradient_copies_s(stage.trained)
    if request.moves_matrices:
        of_segment = block_matrices(request, table)
        update = rank_update([stage], [of_segment[place] for place in places], request, machine)
        states, rest_s = update.states(states), update.seconds + update.host_s
    return {} if "parameters" in layout.offload else states, rest_s


def _phases(parts: Priced, made: Mapping[tuple[int, bool], int]) -> list[Phases]:
    half = len(parts.segments) // 2
    phases = [parts.segments[place + (0 if again else half)] for place, again in made]
    return [dataclasses.replace(segment, tied=0) for segment in phases]  # groups are gathered each by itself


def _path(name: str, numbers: dict[str, int]) -> str:
    """Path of the next block of a list, such as "layers.3"; ``numbers``: number of the last block of each list."""
    base = re.sub(r"\.\d+$", "", name)
    number = numbers[base] = numbers.get(base, -1) + 1
    return f"{base}.{number}"


def _block(ranked: RankSegment, prices: MachinePrices, whole: Phases, request: StepRequest, again: bool) -> Block:
    layout, stack = request.layout, request.stack
    mode = layout.recompute if again else "none"
    recompute = recomputed(ranked, mode, layout.recompute_modules, early_stop=stack.early_stop)
    share = operand_share(layout.precision, stack)
    alive = alive_bytes(ranked, recompute, stack.fusion, fused_loss=stack.fused_loss, operand_share=share)
    seconds = {
        "forward": span(whole.forward, prices, stack).seconds,
        "again": span(whole.again, prices, stack).seconds,
        "backward": span(whole.backward_input, prices, stack).seconds
        + span(whole.backward_weight, prices, stack).seconds,
    }
    atoms, homes = _atoms(ranked, recompute.kernels)
    ends = _ends(ranked, alive, homes)
    split = len(recompute.kernels)
    return Block(
        atoms=atoms,
        forward=_pieces(ranked, prices, alive.forward, seconds["forward"], {}),
        backward=(
            *_pieces(ranked, prices, alive.backward[:split], seconds["again"], {}),
            *_pieces(ranked, prices, alive.backward[split:], seconds["backward"], ends),
        ),
        saved_bytes=alive.saved,
        enters_bytes=sum(ranked.tensors[t].size_bytes for t in ranked.enters),
        is_recomputed=again and split > 0,
    )


def _atoms(ranked: RankSegment, again: Sequence[int]) -> tuple[tuple[Atom, ...], dict[int, int]]:
    """Atoms in the order in which forward reads them, and {local tensor of a parameter: position of its atom}.

    Args:
        again: Kernels of forward that are recomputed.
    """
    elements: dict[str, dict[str, int]] = {}
    modules: dict[int, str] = {}
    for tensor, axes in ranked.parameters:
        local = ranked.tensors[tensor]
        modules[tensor] = local.name.rpartition(".")[0]
        by_axes = elements.setdefault(modules[tensor], {})
        count = 1
        for length in local.shape:
            count *= length
        by_axes[axes] = by_axes.get(axes, 0) + count
    storages = {ranked.tensors[t].storage: module for t, module in modules.items()}
    first: dict[str, int] = {}
    read: set[str] = set()
    for place, kernel in enumerate(ranked.kernels):
        for t in kernel.inputs:
            if (module := storages.get(ranked.tensors[t].storage)) is not None:
                first.setdefault(module, place)
                if kernel.stage is not Stage.FORWARD or place in again:
                    read.add(module)
    names = sorted(elements, key=lambda module: first.get(module, len(ranked.kernels)))
    return tuple(Atom(name, elements[name], name in read) for name in names), {
        t: names.index(m) for t, m in modules.items()
    }


def _ends(ranked: RankSegment, alive: AliveBytes, homes: Mapping[int, int]) -> dict[int, list[int]]:
    """{Kernel: atoms whose last gradient it makes}."""
    last: dict[int, int] = {}
    for tensor, place in alive.gradients.items():
        atom = homes[tensor]
        last[atom] = max(last.get(atom, 0), place)
    ready_atoms: dict[int, list[int]] = {}
    for atom, place in last.items():
        ready_atoms.setdefault(place, []).append(atom)
    if missing := set(homes.values()) - set(last):
        raise ConfigError(
            f"unsharding: expected a gradient of every parameter of segment {ranked.name!r}, got none of "
            f"{len(missing)}; leave them out of the model, or freeze none"
        )
    return ready_atoms


def _pieces(
    ranked: RankSegment,
    prices: MachinePrices,
    alive: Sequence[tuple[int, int]],
    seconds: float,
    ends: Mapping[int, Sequence[int]],
) -> tuple[Piece, ...]:
    """Kernels of one module in a row, each with its share of the seconds."""
    alone = [_alone_s(ranked, prices, place) for place, _ in alive]
    scale = seconds / total if (total := sum(alone)) else 0.0
    pieces: list[Piece] = []
    for (place, size), each in zip(alive, alone, strict=True):
        module, made = ranked.kernels[place].module, tuple(ends.get(place, ()))
        share = each * scale if total else seconds / len(alive)
        if pieces and pieces[-1].module == module:
            last = pieces.pop()
            peak_bytes, gradients = max(size, last.alive_bytes), (*last.gradients, *made)
            pieces.append(Piece(module, share + last.seconds, peak_bytes, size, gradients))
        else:
            pieces.append(Piece(module, share, size, size, made))
    return tuple(pieces)


def _alone_s(ranked: RankSegment, prices: MachinePrices, place: int) -> float:
    kernel = ranked.kernels[place]
    if isinstance(kernel.detail, Collective):
        return prices.collective_s(kernel.detail)
    return prices.kernel_s(kernel) * prices.in_situ(cause_of(kernel, prices.precision))
