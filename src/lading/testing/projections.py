"""Shapes of a decoder's projections, as its catalog entry says them: what optimizers of matrices work on."""

from __future__ import annotations

from lading.catalog.tables import model_table
from lading.ir.table import ModelTable


def projections(model: str | ModelTable) -> list[tuple[int, str, int, int]]:
    """(layer, name, rows, columns) of every block's matrices, q, k, v, gate and up apart.

    Args:
        model: A dense Llama-like model: its name in the catalog, or its table.
    """
    table = model_table(model) if isinstance(model, str) else model
    sizes = table.symbols
    hidden, wide, heads, keys, head = (sizes[key] for key in ("h", "f", "n", "k", "d"))
    shapes = {"q": (heads * head, hidden), "k": (keys * head, hidden), "v": (keys * head, hidden)}
    shapes |= {"o": (hidden, heads * head), "gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    layers = sum(table.counts) - 2
    return [(layer, name, *shape) for layer in range(layers) for name, shape in shapes.items()]
