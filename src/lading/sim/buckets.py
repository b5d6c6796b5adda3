"""Buckets: which parameters one collective gathers, when each is needed, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lading.errors import ConfigError
from lading.ir.action import Work
from lading.ir.plan import UnitResidency
from lading.ir.program import Region
from lading.memory.rank_bytes import gathered_width, parameter_width
from lading.program.groups import GroupedShape, GroupTiming, GroupTurn
from lading.sim.modules import Modules, Piece, is_in


@dataclass(frozen=True)
class Bucket:
    """Atoms in a row that are gathered together.

    Attributes:
        first, last: Positions of its first and last atom in ``Modules.atoms``.
        keep, gather_again, ahead_forward, ahead_backward: When it is gathered and released, as in ``ShardedUnit``.
    """

    first: int
    last: int
    keep: UnitResidency = UnitResidency.RELEASE
    ahead_forward: int = 1
    ahead_backward: int = 1
    gather_again: bool = True


@dataclass(frozen=True)
class Run:
    """Work between two moments at which a bucket begins or ends.

    Attributes:
        region: Pieces of the block that make up the run.
        seconds: Seconds of these pieces, and of copying the gradients of buckets that end here into their buffers.
        kept_bytes: Bytes of activations that earlier blocks keep for backward.
        most_bytes: Largest bytes of activations of its own block at once, with the gradients made until then.
        left_bytes: Bytes of activations of its block while its last kernel runs, without gradients.
        next_bytes: Bytes of activations that stay until the next run, without ``kept_bytes``.
        gradients: Bucket and bytes of the gradients that the run makes.
        made_bytes: Sum of the bytes of ``gradients``.
    """

    region: Region
    seconds: float
    kept_bytes: int
    most_bytes: int
    left_bytes: int
    next_bytes: int
    gradients: tuple[tuple[int, int], ...]
    made_bytes: int


@dataclass(frozen=True)
class Cost:
    """Cost of one bucket: seconds of the network and of copies, and bytes.

    Attributes:
        gather_s, reduce_s: Seconds of gathering its parameters, and of reducing its gradients.
        copy_s, reduce_copy_s: Seconds of copying out of the gathered buffer, and into the buffer that is reduced.
        gathered: Bytes of its gathered parameters.
        reduced, shard: Bytes of its gradients in the buffer that is reduced, and of this rank's shard of them.
        cast: Bytes of this rank's shard in the dtype that travels, if it is cast to it.
        gradient_bytes: Bytes of its gradients as backward makes them.
    """

    gather_s: float
    copy_s: float
    reduce_s: float
    reduce_copy_s: float
    gathered: int
    reduced: int
    shard: int
    cast: int
    gradient_bytes: int

    @property
    def needs_no_network(self) -> bool:
        """Whether it takes no network, as each rank has all of it."""
        return not self.gather_s and not self.reduce_s


class Turn(NamedTuple):
    """Run of work, and the numbers of the buckets that begin before it and of those that end behind it."""

    begins: tuple[int, ...]
    run: Run
    ends: tuple[int, ...]


#: Forward or backward of a micro-batch, as runs in their order.
Course = tuple[Turn, ...]


def names_of(modules: Modules, bucket: Bucket) -> tuple[str, ...]:
    """Paths of the smallest set of modules that together have exactly the parameters of a bucket, in forward order."""
    inner: dict[int, set[int]] = {}
    for number in range(bucket.first, bucket.last + 1):
        place, atom = modules.atoms[number]
        inner.setdefault(place, set()).add(atom)
    paths: list[str] = []
    for place, atoms in inner.items():
        block, path = modules.order[place]
        atom_modules = [atom.module for atom in modules.blocks[block].atoms]
        for module in _cover(atom_modules, atoms, "", bool(path)):
            paths.append(f"{path}.{module}" if path and module else path or module)
    return tuple(paths)


def _cover(atom_modules: Sequence[str], atoms_to_cover: set[int], outer: str, may_name_outer: bool) -> list[str]:
    """Modules in ``outer`` whose atoms are exactly ``atoms_to_cover``; ``outer`` itself if ``may_name_outer``."""
    below = [n for n, module in enumerate(atom_modules) if is_in(module, outer)]
    if not atoms_to_cover & set(below):
        return []
    if may_name_outer and atoms_to_cover >= set(below):
        return [outer]
    depth = outer.count(".") + 1 if outer else 0
    names = [outer] if any(atom_modules[n] == outer for n in atoms_to_cover) else []
    children = dict.fromkeys(
        ".".join(atom_modules[n].split(".")[: depth + 1]) for n in below if atom_modules[n] != outer
    )
    return names + [name for child in children for name in _cover(atom_modules, atoms_to_cover, child, True)]


class Costs:
    """Costs of the buckets of one model; each is computed once."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self._of_span: dict[tuple[int, int], Cost] = {}
        self._costs: dict[tuple[tuple[str, int], ...], Cost] = {}
        self._lasts: dict[tuple[int, int, int, bool], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int, int, bool], tuple[float, int, int, tuple[tuple[int, int], ...]]] = {}
        blocks = [modules.blocks[block] for block, _ in modules.order]
        self.before = [sum(b.saved_bytes for b in blocks[:place]) for place in range(len(blocks))]
        self._first = [sum(len(b.atoms) for b in blocks[:place]) for place in range(len(blocks))]

    def of(self, bucket: Bucket) -> Cost:
        """Cost of a bucket."""
        span = bucket.first, bucket.last
        if span not in self._of_span:
            self._of_span[span] = self._cost(self.modules.elements(range(bucket.first, bucket.last + 1)))
        return self._of_span[span]

    def _cost(self, elements: Mapping[str, int]) -> Cost:
        key = tuple(sorted(elements.items()))
        if key not in self._costs:
            prices, stack, layout = self.modules.prices, self.modules.request.stack, self.modules.request.layout
            shard, width = self.modules.shard_elements(elements), gathered_width(layout, stack)
            self._costs[key] = Cost(
                gather_s=prices.gather_s(elements),
                copy_s=prices.copies_s(elements, stack.gather_copy_bytes),
                reduce_s=prices.reduce_s(elements),
                reduce_copy_s=prices.copies_s(elements, stack.reduce_copy_bytes),
                gathered=self.modules.gathered(elements),
                reduced=sum(elements.values()) * self.modules.reduced_bytes,
                shard=shard * self.modules.reduced_bytes,
                cast=shard * width if width != parameter_width(layout, stack) else 0,
                gradient_bytes=sum(elements.values()) * self.modules.gradient_bytes,
            )
        return self._costs[key]

    def gathers(self, bucket: Bucket) -> int:
        """Number of times that backward gathers a bucket: once more where recomputing releases it again."""
        places = range(self.modules.atoms[bucket.first][0], self.modules.atoms[bucket.last][0] + 1)
        again = any(self.modules.blocks[self.modules.order[place][0]].is_recomputed for place in places)
        return self.modules.request.stack.gathers - 1 if again else 1

    def courses(self, buckets: Sequence[Bucket]) -> tuple[Course, Course]:
        """Lay out forward and backward as runs, each with the buckets that begin before it and end behind it.

        Raises:
            ConfigError: the buckets are not all atoms in order, each once.
        """
        for bucket in buckets:
            read = [n for n in range(bucket.first, bucket.last + 1) if self.modules.atom(n).read_again]
            if read and not bucket.gather_again:
                name = names_of(self.modules, Bucket(read[0], read[0]))[0]
                raise ConfigError(f"buckets: expected {name!r} to be gathered again, as backward reads it")
        numbers = [n for bucket in buckets for n in range(bucket.first, bucket.last + 1)]
        if numbers != list(range(len(self.modules.atoms))):
            raise ConfigError(f"buckets: expected each of {len(self.modules.atoms)} atoms once, in order of forward")
        return self._course(buckets, backward=False), self._course(buckets, backward=True)

    def shape(self, buckets: Sequence[Bucket], courses: tuple[Course, Course], listed: int) -> GroupedShape:
        """Describe the buckets and their passes to the emitter of the rank's list of actions.

        Args:
            courses: Result of ``courses`` for these buckets.
            listed: Most micro-batches that the list has one by one, at least 4; the others are repeats.
        """
        request = self.modules.request
        count = request.layout.micro_batches
        costs = [self.of(bucket) for bucket in buckets]
        timings = [
            GroupTiming(
                b.keep, b.gather_again, b.ahead_forward, b.ahead_backward, self.gathers(b), cost.needs_no_network
            )
            for b, cost in zip(buckets, costs, strict=True)
        ]
        forward, backward = (
            tuple(GroupTurn(begins, run.region, ends) for begins, run, ends in course) for course in courses
        )
        return GroupedShape(
            groups=tuple(timings),
            passes=(forward, backward),
            units=len(self.modules.order),
            micro_batches=min(count, listed),
            num_repeats=max(0, count - listed),
            overlap=request.stack.overlap_param_gather,
        )

    def _course(self, buckets: Sequence[Bucket], *, backward: bool) -> Course:
        places = len(self.modules.order)
        begins: list[list[tuple[int, int]]] = [[] for _ in range(places)]
        ends: list[list[tuple[int, int]]] = [[] for _ in range(places)]
        home: list[int] = []
        for number, bucket in enumerate(buckets):
            home += [number] * (bucket.last + 1 - bucket.first)
            start, stop = self.modules.atoms[bucket.first][0], self.modules.atoms[bucket.last][0]
            if backward:
                start, stop = stop, start
            begins[start].append((self._span(start, bucket, backward)[0], number))
            ends[stop].append((self._span(stop, bucket, backward)[1] + 1, number))
        work = Work.BACKWARD if backward else Work.FORWARD
        turns: list[Turn] = []
        coming: list[int] = []
        for place in range(places - 1, -1, -1) if backward else range(places):
            inside = dict[int, tuple[list[int], list[int]]]()
            for border, number in sorted(ends[place]):
                inside.setdefault(border, ([], []))[0].append(number)
            for border, number in sorted(begins[place]):
                inside.setdefault(border, ([], []))[1].append(number)
            at = 0
            for cut in sorted({*inside, len(self._pieces(place, backward))}):
                ended, begun = inside.get(cut, ((), ()))
                if cut > at:
                    copies_s = sum(self.of(buckets[number]).reduce_copy_s for number in ended) if backward else 0.0
                    run = self._run(Region(0, place, work, at, cut), home, copies_s)
                    turns.append(Turn(tuple(coming), run, tuple(ended)))
                    coming, at = [], cut
                coming += begun
        return tuple(turns)

    def _pieces(self, place: int, backward: bool) -> tuple[Piece, ...]:
        block = self.modules.blocks[self.modules.order[place][0]]
        return block.backward if backward else block.forward

    def _run(self, region: Region, home: Sequence[int], copies_s: float) -> Run:
        """Make a region's run, with ``copies_s`` seconds of copies behind it; ``home``: the bucket of each atom."""
        _, place, work, start, stop = region
        backward = work is not Work.FORWARD
        seconds, peak_bytes, end_bytes, gradient_sizes = self._stretch(place, start, stop, backward)
        gradients: dict[int, int] = {}
        for atom, size in gradient_sizes:
            bucket = home[self._first[place] + atom]
            gradients[bucket] = gradients.get(bucket, 0) + size
        after = end_bytes
        if not backward and stop == len(self._pieces(place, backward)):
            block = self.modules.blocks[self.modules.order[place][0]]
            entering = self.modules.order[place + 1 : place + 2]
            after = block.saved_bytes + sum(self.modules.blocks[number].enters_bytes for number, _ in entering)
        return Run(
            region=region,
            seconds=seconds + copies_s,
            kept_bytes=self.before[place],
            most_bytes=peak_bytes,
            left_bytes=end_bytes,
            next_bytes=after,
            gradients=tuple(gradients.items()),
            made_bytes=sum(gradients.values()),
        )

    def _span(self, place: int, bucket: Bucket, backward: bool) -> tuple[int, int]:
        """First and last piece of a bucket's modules in one block."""
        start = self._first[place]
        block, path = self.modules.order[place]
        count = len(self.modules.blocks[block].atoms)
        low, high = max(0, bucket.first - start), min(count - 1, bucket.last - start)
        key = (block, low, high, backward)
        if key not in self._lasts:
            atom_modules = [atom.module for atom in self.modules.blocks[block].atoms]
            names = _cover(atom_modules, set(range(low, high + 1)), "", bool(path))
            spans = [self.modules.blocks[block].lasts(name, backward=backward) for name in names]
            self._lasts[key] = min(first for first, _ in spans), max(last for _, last in spans)
        return self._lasts[key]

    def _stretch(
        self, place: int, start: int, stop: int, backward: bool
    ) -> tuple[float, int, int, tuple[tuple[int, int], ...]]:
        """Sum up pieces: seconds, peak bytes, bytes of activations at the end, and (atom, bytes) of each gradient."""
        number = self.modules.order[place][0]
        key = (number, start, stop, backward)
        if key not in self._stretches:
            block = self.modules.blocks[number]
            pieces = (block.backward if backward else block.forward)[start:stop]
            gradient_sizes: list[tuple[int, int]] = []
            peak_bytes = total = 0
            for piece in pieces:
                new = [(atom, block.atoms[atom].count * self.modules.gradient_bytes) for atom in piece.gradients]
                gradient_sizes += new
                total += sum(size for _, size in new)
                peak_bytes = max(peak_bytes, piece.alive_bytes + total)
            self._stretches[key] = (
                sum(piece.seconds for piece in pieces),
                peak_bytes,
                pieces[-1].left_bytes,
                tuple(gradient_sizes),
            )
        return self._stretches[key]
