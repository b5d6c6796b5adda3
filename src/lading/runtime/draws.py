"""Random numbers of a step on several ranks: each operation draws those that it would draw in one process.

torch's generator of a CPU is one stream, of which a step of one process takes the numbers of its micro-batches in
order, and of each those of its operations. How many words of the stream an operation takes is counted once. A rank then
skips what is not its own, which takes half as long as drawing it, and leaves the generator where one process would.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from lading.errors import ConfigError
from lading.ir.graph import Op, Ref, StepGraph
from lading.runtime.device import Call
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import bind

#: Words that torch's generator (mt19937) makes at once, and where its state says how many are left of them.
_BLOCK, _LEFT = 624, slice(8, 12)
#: Words that an operation may draw: so many for each element, and some more for the last vector.
_MOST_PER_ELEMENT, _MOST_BESIDE = 4, 64
#: Pairs of words that are skipped by one call.
_PIECE = 1 << 14


class Draws:
    """Random numbers of the step of one process, and which of them are this rank's.

    The ranks' generators are in one state when a step begins, and again when it has ended.

    Args:
        captured: The captured micro-batch.
        first: Number of this rank's first micro-batch among those of all ranks.
        micro_batches: Number of micro-batches of all ranks.

    Raises:
        ConfigError: how many numbers an operation draws is not known.
    """

    def __init__(self, captured: StepGraph, first: int, micro_batches: int) -> None:
        counts: dict[object, int] = {}
        words = [_counted(op, captured, counts) for op in captured.ops if op.random]
        self._first, self._operations = first, len(words)
        self._ends = [0, *accumulate(words * micro_batches)]
        self._begins, self._before, self._highest = set[int](), -2, -1
        self._states: dict[int, torch.Tensor] = {}
        self._last = torch.get_rng_state()

    def bound(self, draw: tuple[int, int], run: Call) -> Call:
        """Make the call that runs an operation of this rank on its own numbers.

        Calls are made in the order in which they run. Where one does not go on with the numbers of the one before, as
        where a rank's next chunk of the model runs behind another micro-batch, the generator is set to where its own
        begin.

        Args:
            draw: As ``lading.ir.graph.Op.draw``.
        """
        number = (self._first + draw[1]) * self._operations + draw[0]
        if number != self._before + 1:
            self._begins.add(number)
        self._before = number
        self._highest = max(self._highest, number)

        def drawing() -> None:
            if number in self._states:
                torch.set_rng_state(self._states[number])
            run()
            if number == self._highest:
                self._last = torch.get_rng_state()

        return drawing

    def begin(self) -> None:
        """Find where each run of this rank's numbers begins, before a step."""
        self._states = {}
        self._last, at = torch.get_rng_state(), 0
        for number in sorted(self._begins):
            self._last = _skipped(self._last, self._ends[number] - at)
            self._states[number], at = self._last, self._ends[number]

    def end(self) -> None:
        """Leave the generator where the step of one process would."""
        torch.set_rng_state(_skipped(self._last, self._ends[-1] - self._ends[self._highest + 1]))


def _skipped(state: torch.Tensor, words: int) -> torch.Tensor:
    """State of a generator once it has drawn so many more words."""
    if not words:
        return state
    generator = torch.Generator()
    generator.set_state(state)
    pairs = torch.empty(_PIECE, dtype=torch.int64)
    for left in range(words // 2, 0, -_PIECE):
        pairs[:left].random_(generator=generator)
    if words % 2:
        pairs[:1].view(torch.int32)[:1].random_(generator=generator)
    return generator.get_state()


def _counted(op: Op, graph: StepGraph, known: dict[object, int]) -> int:
    """Number of words that an operation draws; it runs on zeros, without a trace.

    Args:
        known: Those of operations like it.
    """
    tensors = [graph.tensors[t] for t in (*op.inputs, *op.outputs, *op.mutates)]
    plain = tuple(arg for arg in op.args if not isinstance(arg, Ref))
    like = (op.name, plain, op.kwargs, *((t.dtype, t.shape, t.stride) for t in tensors))
    if like in known:
        return known[like]
    places: dict[int, torch.Tensor] = {}

    def view(tensor: int) -> torch.Tensor:
        storage = graph.storage_of(tensor)
        if storage not in places:
            places[storage] = torch.zeros(graph.storages[storage].size_bytes, dtype=torch.uint8)
        return view_of(places[storage], graph.tensors[tensor])

    run, saved = bind(op, view).run, torch.get_rng_state()
    try:
        with torch.inference_mode():
            run()
        after = torch.get_rng_state()
    finally:
        torch.set_rng_state(saved)
    most = _MOST_PER_ELEMENT * max(tensor.shape.numel() for tensor in map(view, (*op.outputs, *op.mutates)))
    known[like] = _words_between(saved, after, most + _MOST_BESIDE, op)
    return known[like]


def _words_between(before: torch.Tensor, after: torch.Tensor, most: int, op: Op) -> int:
    words_left = [int(state[_LEFT].view(torch.int32)) for state in (before, after)]
    words = (words_left[0] - words_left[1]) % _BLOCK
    state = _skipped(before, words)
    while words <= most:
        if torch.equal(state, after):
            return words
        state, words = _skipped(state, _BLOCK), words + _BLOCK
    raise ConfigError(
        "layout: expected operations that draw whole words of the random generator on several ranks, found "
        f"{op.name} in {op.module or 'the loss'}, which keeps some for later, as normal numbers of fewer than 16 "
        "elements do; draw more at once, or train on one rank"
    )
