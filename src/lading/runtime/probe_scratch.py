"""Process that runs the kernels of a training step once and prints by how many bytes it grew, and why.

It first does what capturing a model does, so that only what the kernels themselves bring in is counted: code pages,
thread pools, the buffers in which products are packed, and the code compiled for products of 16-bit numbers. What freed
temporaries leave behind is given back first: the planner counts those of its own step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lading.ir.machine import PACKED_COLUMNS
from lading.optim.registry import default_rule
from lading.runtime.resident import resident_bytes, reuse_pages, trim


def forward_backward(size: int) -> None:
    """Run one step of a small decoder layer on ``size`` tokens through autograd."""
    x = torch.rand(1, size, 64)
    weight = torch.nn.Parameter(torch.rand(64, 64))
    table = torch.nn.Parameter(torch.rand(64, 64))
    x = x + F.embedding(torch.zeros(1, size, dtype=torch.int64), table)
    heads = F.linear(F.layer_norm(x, (64,)), weight).view(1, size, 4, 16).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    hidden = F.silu(mixed) * F.gelu(mixed) + F.rms_norm(mixed, (64,))
    F.cross_entropy(hidden.flatten(0, 1), torch.zeros(size, dtype=torch.int64)).backward()


def kernels(shared: torch.Tensor) -> None:
    """Run products of several shapes in memory that exists, and an update, as the executor calls them."""
    views: list[Callable[[int, int], torch.Tensor]] = [
        lambda n, m, k=k: shared[k, : n * m].view(n, m) for k in range(3)
    ]
    for rows, inner, columns in ((1024, 512, 512), (256, 256, 1024), (64, 64, 64)):
        a, b, out = views[0](rows, inner), views[1](inner, columns), views[2](rows, columns)
        torch.mm(a, b, out=out)
        torch.mm(a.t(), out, out=b)
        torch.mm(out, b.t(), out=a)
    p, g, m = shared[0], shared[1], shared[2]
    rule = default_rule()
    states = {name: m.clone().abs_() if number else m for number, name in enumerate(rule.state_specs(tuple(p.shape)))}
    rule.update(p, g, states, lr=1e-3, step=torch.ones(()))


def packed(shared: torch.Tensor) -> int:
    """Bytes that BLAS keeps after a product of many columns, the code it needs not counted."""
    flat = shared.view(-1)
    a, b = flat[: 64 * 512].view(64, 512), flat[64 * 512 :][: 512 * PACKED_COLUMNS].view(512, PACKED_COLUMNS)
    out = flat[-64 * PACKED_COLUMNS :].view(64, PACKED_COLUMNS)
    before = anonymous_bytes()
    torch.mm(a, b, out=out)
    return max(0, anonymous_bytes() - before)


def compiled(shared: torch.Tensor) -> int:
    """Bytes that a library keeps for one more distinct product of 16-bit numbers, on average."""
    flat = shared.view(-1).view(torch.bfloat16)
    sizes = (192, 320, 448)

    def product(rows: int, inner: int, columns: int) -> None:
        a, b = flat[: rows * inner].view(rows, inner), flat[1 << 20 :][: inner * columns]
        out = flat[2 << 20 :][: rows * columns].view(rows, columns)
        torch.mm(a, b.view(inner, columns), out=out)
        torch.mm(a, b.view(columns, inner).t(), out=out)

    product(64, 128, 64)  # the library's own code
    before = anonymous_bytes()
    for inner in sizes:
        for columns in sizes:
            product(512, inner, columns)
    trim()
    return max(0, anonymous_bytes() - before) // (2 * len(sizes) ** 2)


def anonymous_bytes() -> int:
    """Bytes of resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def main() -> None:
    """Run as ``python -m lading.runtime.probe_scratch THREADS``: print overhead_bytes, packing_bytes, kernel_bytes."""
    torch.set_num_threads(int(sys.argv[1]))
    with FakeTensorMode():
        forward_backward(64)
    shared = torch.zeros(3, 1 << 21)
    shared.add_(1e-3)
    trim()
    reuse_pages()
    before = resident_bytes()
    packing = packed(shared)
    forward_backward(256)
    kernels(shared[:, : 1 << 19])
    trim()
    grown = max(0, resident_bytes() - before - packing)
    print(grown, packing, compiled(shared))


if __name__ == "__main__":
    main()
