"""Products and attention: what to time, and the fit of timings to peak, efficiency curve and skinny_dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lading.errors import ConfigError
from lading.ir.machine import Curve
from lading.runtime.probe_cases import Case, Pool, bind_call

#: m, k, n of the timed products: squares from launch-bound to large, and shapes with one or two short dims.
SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (16, 1024, 1024), (64, 1024, 1024), (256, 1024, 1024), (1024, 16, 1024), (1024, 64, 1024), (1024, 1024, 64),
    (512, 128, 128), (512, 128, 512), (2048, 256, 256), (512, 768, 3072), (512, 3072, 768), (256, 512, 8192),
)  # fmt: skip
#: Which operands are transposed: x W^T forward, dy W and dy^T x backward.
LAYOUTS = ("NT", "NN", "TN")
_BATCHED = (16, 32, 64, 128, 256)
_ATTENTION = ((4, 4, 64, 32), (2, 8, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64), (1, 4, 2048, 128))
_KNOTS_PER_DECADE = 1


@dataclass(frozen=True, slots=True)
class Product:
    """One timed product of fp32 matrices, m x k by k x n."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """A multiply-add counts two."""
        return 2.0 * self.m * self.k * self.n


def product_cases(pool: Pool) -> list[tuple[tuple[int, int, int], Case]]:
    """Every shape in every layout, with its shape."""
    cases: list[tuple[tuple[int, int, int], Case]] = []
    for m, k, n in SHAPES:
        for layout in LAYOUTS:
            left = pool.cut("a", m, k) if layout[0] == "N" else pool.cut("a", k, m).t()
            right = pool.cut("b", k, n) if layout[1] == "N" else pool.cut("b", n, k).t()
            run = bind_call("aten.mm.default", (left, right), (pool.cut("o", m, n),))
            flops = 2.0 * m * k * n
            cases.append(((m, k, n), Case("mm", flops, flops, run)))
    return cases


def batched_cases(pool: Pool) -> Iterator[Case]:
    """Products of many small matrices: FLOP/s against the FLOP of one."""
    for side in _BATCHED:
        count = max(4, min(64, (1 << 20) // side**2))
        operands = (pool.cut("a", count, side, side), pool.cut("b", count, side, side))
        each = 2.0 * side**3
        yield Case(
            "bmm", each, each * count, bind_call("aten.bmm.default", operands, (pool.cut("o", count, side, side),))
        )


def attention_cases(pool: Pool) -> Iterator[Case]:
    """Causal attention forward and backward: FLOP/s of the half that is not masked, against the FLOP of one head."""
    if pool.device.type != "cpu":
        yield from _autograd_attention_cases(pool)
        return
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    for batch, heads, length, dim in _ATTENTION:
        shape = (batch, heads, length, dim)
        q, k, v, grad = (t.view(batch, length, heads, dim).transpose(1, 2) for t in torch.rand(4, *shape))
        places = [torch.empty_like(q) for _ in range(3)]
        stats = torch.empty(batch, length, heads).transpose(1, 2)
        each = 2.0 * length * length * dim
        forward = bind_call(f"{name}.default", (q, k, v, 0.0, True), (places[0], stats))
        forward()
        out = places[0].clone()
        backward = bind_call(f"{name}_backward.default", (grad, q, k, v, out, stats, 0.0, True), places)
        yield Case("attention", each, each * batch * heads, forward)
        yield Case("attention_backward", 2.5 * each, 2.5 * each * batch * heads, backward)


def _autograd_attention_cases(pool: Pool) -> Iterator[Case]:
    for batch, heads, length, dim in _ATTENTION:
        q, k, v = torch.rand(3, batch, heads, length, dim, device=pool.device).bfloat16().unbind()
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def forward(leaves: Sequence[torch.Tensor] = leaves) -> torch.Tensor:
            with torch.enable_grad():
                return torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)

        out = forward()

        def backward(out: torch.Tensor = out, leaves: Sequence[torch.Tensor] = leaves) -> object:
            return torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)

        each = 2.0 * length * length * dim
        yield Case("attention", each, each * batch * heads, forward)
        yield Case("attention_backward", 2.5 * each, 2.5 * each * batch * heads, backward)


def dtype_cases(pool: Pool) -> Iterator[tuple[str, Case]]:
    """The same product in each floating dtype, for the ratio of their peaks."""
    side = 256 if pool.device.type == "cpu" else 4096
    for name in ("float32", "float64", "bfloat16", "float16"):
        a, b, out = (torch.rand(3, side, side, device=pool.device).to(getattr(torch, name))).unbind()
        flops = 2.0 * side**3
        yield name, Case(name, flops, flops, bind_call("aten.mm.default", (a, b), (out,)))


@dataclass(frozen=True, slots=True)
class ProductFit:
    """``seconds = overhead + flops / (peak * efficiency(flops) * prod d / (d + skinny_dim))``, and how well it fits."""

    peak: float
    efficiency: Curve
    skinny_dim: float
    mean_error: float


def fit_products(products: Sequence[Product], overhead_s: float) -> ProductFit:
    """Least squares on the logarithm of the rate, for every candidate skinny_dim; the best is kept.

    Raises:
        ConfigError: fewer products than the curve has points.
    """
    if len(products) < 4:
        raise ConfigError(f"expected at least 4 timed products, got {len(products)}")
    fits = [_fit(products, overhead_s, skinny) for skinny in (0.0, *(0.5 * 1.25**i for i in range(26)))]
    return min(fits, key=lambda fit: fit.mean_error)


def _fit(products: Sequence[Product], overhead_s: float, skinny: float) -> ProductFit:
    target: list[float] = []
    weight: list[float] = []
    for p in products:
        seconds = max(p.seconds - overhead_s, 0.05 * p.seconds)
        share = math.prod(d / (d + skinny) for d in (p.m, p.k, p.n))
        target.append(math.log(p.flops / seconds / share))
        weight.append(seconds / p.seconds)
    knots = _knots([p.flops for p in products])
    hats = torch.tensor([_hat(math.log(p.flops), knots) for p in products], dtype=torch.float64)
    scale = torch.tensor(weight, dtype=torch.float64).unsqueeze(1)
    wanted = torch.tensor(target, dtype=torch.float64).unsqueeze(1)
    values = torch.linalg.lstsq(hats * scale, wanted * scale).solution
    error = (((hats @ values - wanted) * scale).abs().sum() / scale.sum()).item()
    peak = max(p.flops / p.seconds for p in products)
    rates = [math.exp(v) for v in values.squeeze(1).tolist()]
    curve = Curve(size=tuple(math.exp(k) for k in knots), rate=tuple(r / peak for r in rates))
    return ProductFit(peak, curve, skinny, error)


def _knots(flops: Sequence[float]) -> list[float]:
    """Logarithms of evenly spaced sizes, each with a product within its reach."""
    low, high = math.log(min(flops)), math.log(max(flops))
    count = max(2, round((high - low) / math.log(10) * _KNOTS_PER_DECADE) + 1)
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def _hat(x: float, knots: Sequence[float]) -> list[float]:
    """Weights of linear interpolation between the knots."""
    step = knots[1] - knots[0]
    return [max(0.0, 1.0 - abs(x - knot) / step) for knot in knots]
