"""Buckets: which parameters one collective gathers, when each is needed, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lading.errors import ConfigError
from lading.ir.plan import UnitResidency
from lading.sim.modules import Modules, is_in


@dataclass(frozen=True)
class Bucket:
    """Atoms in a row that are gathered together.

    Attributes:
        first, last: By number in ``Modules.atoms``.
        keep, again, ahead, ahead_backward: As in ``ShardedUnit``.
    """

    first: int
    last: int
    keep: UnitResidency = UnitResidency.RELEASE
    ahead: int = 1
    ahead_backward: int = 1
    again: bool = True


@dataclass(frozen=True)
class Run:
    """Work between two moments at which a bucket begins or ends.

    Attributes:
        alive_bytes: Most activations at once, with what blocks before keep and the gradients made on the way.
        end_bytes: Bytes of activations while its last kernel runs, without gradients.
        gradients: Bytes by bucket, made in it.
    """

    place: int
    seconds: float
    alive_bytes: int
    end_bytes: int
    gradients: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cost:
    """Cost of one bucket: seconds of the network and of copies, and bytes.

    Attributes:
        part: Bytes of this rank's part as it is gathered; ``shard`` has those of its gradients.
    """

    gather_s: float
    copy_s: float
    reduce_s: float
    reduce_copy_s: float
    gathered: int
    reduced: int
    shard: int
    part: int


@dataclass(frozen=True)
class Course:
    """Course of one pass of a micro-batch: buckets and runs of work in order.

    Attributes:
        acts: A bucket begins (its number + 1), ends (less its number + 1), or 0 for the next of ``runs``.
        order: Buckets as they begin.
    """

    acts: tuple[int, ...]
    runs: tuple[Run, ...]
    order: tuple[int, ...]


def names_of(modules: Modules, bucket: Bucket) -> tuple[str, ...]:
    """Paths of the fewest modules that have the parameters of a bucket, and nobody else's, in the order of forward."""
    inner: dict[int, set[int]] = {}
    for number in range(bucket.first, bucket.last + 1):
        place, atom = modules.atoms[number]
        inner.setdefault(place, set()).add(atom)
    found: list[str] = []
    for place, atoms in inner.items():
        block, path = modules.order[place]
        own = [atom.module for atom in modules.blocks[block].atoms]
        for module in _cover(own, atoms, "", bool(path)):
            found.append(f"{path}.{module}" if path and module else path or module)
    return tuple(found)


def _cover(own: Sequence[str], taken: set[int], outer: str, whole: bool) -> list[str]:
    """Modules below ``outer`` that make up the atoms ``taken``; ``whole``: it may be named itself."""
    below = [n for n, module in enumerate(own) if is_in(module, outer)]
    if not taken & set(below):
        return []
    if whole and taken >= set(below):
        return [outer]
    depth = outer.count(".") + 1 if outer else 0
    found = [outer] if any(own[n] == outer for n in taken) else []
    children = dict.fromkeys(".".join(own[n].split(".")[: depth + 1]) for n in below if own[n] != outer)
    return found + [name for child in children for name in _cover(own, taken, child, True)]


class Costs:
    """Costs of the buckets of one model; each is computed once."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self._costs: dict[tuple[tuple[str, int], ...], Cost] = {}
        self._lasts: dict[tuple[int, int, int, bool], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int, int, bool], tuple[float, int, int, tuple[tuple[int, int], ...]]] = {}
        blocks = [modules.blocks[block] for block, _ in modules.order]
        self.before = [sum(b.saved_bytes for b in blocks[:place]) for place in range(len(blocks))]
        self._first = [sum(len(b.atoms) for b in blocks[:place]) for place in range(len(blocks))]

    def of(self, bucket: Bucket) -> Cost:
        """Cost of a bucket."""
        elements = self.modules.elements(range(bucket.first, bucket.last + 1))
        key = tuple(sorted(elements.items()))
        if key not in self._costs:
            prices, stack = self.modules.prices, self.modules.request.stack
            self._costs[key] = Cost(
                gather_s=prices.gather_s(elements),
                copy_s=prices.copies_s(elements, stack.gather_copy_bytes),
                reduce_s=prices.reduce_s(elements),
                reduce_copy_s=prices.copies_s(elements, stack.reduce_copy_bytes),
                gathered=self.modules.gathered(elements),
                reduced=sum(elements.values()) * self.modules.reduced_bytes,
                shard=self.modules.shard_elements(elements) * self.modules.reduced_bytes,
                part=self.modules.gathered({"dp": self.modules.shard_elements(elements)}),
            )
        return self._costs[key]

    def runs_again(self, bucket: Bucket) -> bool:
        """Whether the forward of any of its modules runs again in backward."""
        places = range(self.modules.atoms[bucket.first][0], self.modules.atoms[bucket.last][0] + 1)
        return any(self.modules.blocks[self.modules.order[place][0]].again for place in places)

    def courses(self, buckets: Sequence[Bucket]) -> tuple[Course, Course]:
        """Forward and backward.

        Raises:
            ConfigError: the buckets are not all atoms in order, each once.
        """
        for bucket in buckets:
            read = [n for n in range(bucket.first, bucket.last + 1) if self.modules.atom(n).read_again]
            if read and not bucket.again:
                name = names_of(self.modules, Bucket(read[0], read[0]))[0]
                raise ConfigError(f"buckets: expected {name!r} to be gathered again, as backward reads it")
        numbers = [n for bucket in buckets for n in range(bucket.first, bucket.last + 1)]
        if numbers != list(range(len(self.modules.atoms))):
            raise ConfigError(f"buckets: expected each of {len(self.modules.atoms)} atoms once, in order of forward")
        return self._course(buckets, backward=False), self._course(buckets, backward=True)

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
        acts: list[int] = []
        runs: list[Run] = []
        for place in range(places - 1, -1, -1) if backward else range(places):
            self._through(place, (sorted(begins[place]), sorted(ends[place])), home, (acts, runs), backward)
        return Course(tuple(acts), tuple(runs), tuple(act - 1 for act in acts if act > 0))

    def _through(
        self,
        place: int,
        borders: tuple[list[tuple[int, int]], list[tuple[int, int]]],
        home: Sequence[int],
        into: tuple[list[int], list[Run]],
        backward: bool,
    ) -> None:
        """Add what happens in one block: at a border what ends goes before what begins."""
        (begins, ends), (acts, runs) = borders, into
        block = self.modules.blocks[self.modules.order[place][0]]
        length = len(block.backward if backward else block.forward)
        at = 0
        for cut in sorted({cut for cut, _ in begins} | {cut for cut, _ in ends} | {length}):
            if cut > at:
                seconds, alive, end, made = self._stretch(place, at, cut, backward)
                kept = self.before[place]
                gradients: dict[int, int] = {}
                for atom, size in made:
                    bucket = home[self._first[place] + atom]
                    gradients[bucket] = gradients.get(bucket, 0) + size
                runs.append(Run(place, seconds, kept + alive, kept + end, tuple(gradients.items())))
                acts.append(0)
                at = cut
            acts += [-1 - number for border, number in ends if border == cut]
            acts += [1 + number for border, number in begins if border == cut]

    def _span(self, place: int, bucket: Bucket, backward: bool) -> tuple[int, int]:
        """First and last piece of a bucket's modules in one block."""
        start = self._first[place]
        block, path = self.modules.order[place]
        count = len(self.modules.blocks[block].atoms)
        low, high = max(0, bucket.first - start), min(count - 1, bucket.last - start)
        key = (block, low, high, backward)
        if key not in self._lasts:
            own = [atom.module for atom in self.modules.blocks[block].atoms]
            names = _cover(own, set(range(low, high + 1)), "", bool(path))
            found = [self.modules.blocks[block].lasts(name, backward=backward) for name in names]
            self._lasts[key] = min(first for first, _ in found), max(last for _, last in found)
        return self._lasts[key]

    def _stretch(
        self, place: int, start: int, stop: int, backward: bool
    ) -> tuple[float, int, int, tuple[tuple[int, int], ...]]:
        """Seconds, most activations with gradients made, activations at the end, and the gradients by atom."""
        number = self.modules.order[place][0]
        key = (number, start, stop, backward)
        if key not in self._stretches:
            block = self.modules.blocks[number]
            pieces = (block.backward if backward else block.forward)[start:stop]
            made: list[tuple[int, int]] = []
            most = total = 0
            for piece in pieces:
                new = [(atom, block.atoms[atom].count * self.modules.gradient_bytes) for atom in piece.gradients]
                made += new
                total += sum(size for _, size in new)
                most = max(most, piece.alive_bytes + total)
            self._stretches[key] = sum(piece.seconds for piece in pieces), most, pieces[-1].left_bytes, tuple(made)
        return self._stretches[key]
