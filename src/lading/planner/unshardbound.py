"""A bound on steps whose parameters are gathered: no buckets, stays or distances that fit are faster.

[Note: bound of unsharding]
Gathering x bytes takes at least x r, with r the rate of gathering everything at once, as time by byte falls with size.
What is not gathered again in backward is there at the turn of a micro-batch, next to all saved activations A and the
states S, so at most K = budget - S - A bytes are. A step of m micro-batches then gathers for at least

    N = r (X + (m - 1) max(0, X - K) + m max(0, Y - K)),     and reduces for at least m R     (``_least``)

with Y the bytes that backward reads (not an embedding's). It lasts at least N + m R; at least the first gather, all
computing C, which loses s / (1 + s) of each second that the network is busy beside it, and the last reduction; and in
each forward and backward at least what is gathered there. ``lower_bound`` takes the largest.
"""

from __future__ import annotations

from lading.sim.modules import Modules


def lower_bound(modules: Modules, budget: int) -> float:
    """Seconds of a step below which no choice is ([Note: bound of unsharding])."""
    count = modules.request.layout.micro_batches
    blocks = [modules.blocks[block] for block, _ in modules.order]
    kept = max(0, budget - modules.state_bytes - sum(block.saved_bytes for block in blocks))
    atoms = range(len(modules.atoms))
    elements = modules.elements(atoms)
    once, later = _least(modules, elements, 0), _least(modules, elements, kept)
    again = _least(modules, modules.elements(n for n in atoms if modules.atom(n).read_again), kept)
    gathers = once[0] + (count - 1) * later[0] + count * again[0]
    copies = once[1] + (count - 1) * later[1] + count * again[1]
    network = gathers + count * modules.prices.reduce_s(elements)
    lost = modules.slowdown / (1 + modules.slowdown)
    forward = sum(piece.seconds for block in blocks for piece in block.forward)
    backward = sum(piece.seconds for block in blocks for piece in block.backward)
    backward += modules.prices.copies_s(elements, modules.request.stack.reduce_copy_bytes)

    def window(computing: float, gathered: float) -> float:
        return max(computing + gathered * lost, gathered)

    windows = window(forward, once[0]) + (count - 1) * window(forward, later[0]) + count * window(backward, again[0])
    ends = _ends_s(modules)
    device = ends + count * (forward + backward) + copies + max(0.0, network - ends) * lost
    waited = (count * modules.computing_s + modules.rest_s) * modules.waits
    return max(network, device, windows) + modules.rest_s + waited


def _least(modules: Modules, elements: dict[str, int], kept: int) -> tuple[float, float]:
    """Least seconds to gather such parameters, and to copy them out, where so many bytes are there already."""
    prices = modules.prices
    rates = {axes: prices.gather_s({axes: count}) / count for axes, count in elements.items()}
    seconds, left, rest = 0.0, kept, 0.0
    for axes in sorted(rates, key=lambda name: -rates[name]):
        size = modules.gathered({axes: elements[axes]})
        held = min(left, size)
        left -= held
        missing = elements[axes] * (1 - held / size)
        seconds += rates[axes] * missing
        rest += missing
    share = rest / total if (total := sum(elements.values())) else 0.0
    return seconds, share * prices.copies_s(elements, modules.request.stack.gather_copy_bytes)


def _ends_s(modules: Modules) -> float:
    """Least seconds of the first gather, before all computing, and of the last reduction, behind it."""
    first = modules.atom(0)
    block = modules.blocks[modules.order[0][0]]
    head = modules.prices.gather_s(first.elements) if block.lasts(first.module, backward=False)[0] == 0 else 0.0
    tail = modules.prices.reduce_s(first.elements) if 0 in block.backward[-1].gradients else 0.0
    return head + tail
