"""Products and attention: the cases to time, and the fit of timings to peak, efficiency curve and skinny_dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
#: As SHAPES, for a GPU: the sizes of models that are trained on one.
CUDA_SHAPES = (
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (16, 4096, 4096), (128, 4096, 4096), (1024, 4096, 4096), (8192, 4096, 4096), (8192, 1024, 4096),
    (8192, 4096, 128), (8192, 128, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (4096, 4096, 32768),
)  # fmt: skip
#: Which operands are transposed: x W^T forward, dy W and dy^T x backward.
LAYOUTS = ("NT", "NN", "TN")
_BATCHED = (16, 32, 64, 128, 256)
_ATTENTION = ((4, 4, 64, 32), (2, 8, 128, 64), (1, 8, 512, 64), (1, 8, 1024, 64), (1, 4, 2048, 128))
_CUDA_ATTENTION = ((8, 8, 128, 64), (8, 16, 512, 64), (4, 16, 1024, 64), (2, 16, 2048, 128), (1, 32, 4096, 128))
_KNOTS_PER_DECADE = 1


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One timed product of fp32 matrices, m x k by k x n."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """FLOP of the product; a multiply-add counts two."""
        return 2.0 * self.m * self.k * self.n


def base_dtype(device: torch.device) -> str:
    """Name of the dtype in which products are timed: what a device multiplies fastest and is trained in."""
    if device.type == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def product_cases(pool: Pool) -> list[tuple[tuple[int, int, int], Case]]:
    """Make a case for every shape (m, k, n) in every layout; returned with the shape."""
    cases: list[tuple[tuple[int, int, int], Case]] = []
    shapes = SHAPES if pool.device.type == "cpu" else CUDA_SHAPES
    place = _matrices(pool, shapes)
    for m, k, n in shapes:
        for layout in LAYOUTS:
            run = _product(place, m, k, n, layout)
            flops = 2.0 * m * k * n
            cases.append(((m, k, n), Case("mm", flops, flops, run)))
    return cases


#: (region, rows, columns) -> a matrix.
_Place = Callable[[str, int, int], torch.Tensor]


def _matrices(pool: Pool, shapes: Sequence[tuple[int, int, int]]) -> _Place:
    """Make a function that cuts a matrix of the base dtype from region "a", "b" or "o" of the pool."""
    if pool.device.type == "cpu":
        return pool.cut
    sizes = {"a": max(m * k for m, k, _ in shapes), "b": max(k * n for _, k, n in shapes)}
    sizes["o"] = max(m * n for m, _, n in shapes)
    dtype = getattr(torch, base_dtype(pool.device))
    regions = {name: torch.randn(size, device=pool.device, dtype=dtype) for name, size in sizes.items()}
    return lambda region, rows, columns: regions[region][: rows * columns].view(rows, columns)


#: m, k, n of the products timed in bfloat16 too.
_LOW_SHAPES = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (256, 512, 2048))


def low_product_cases(pool: Pool) -> Iterator[Case]:
    """Make cases of products in the pool's dtype, each layout in turn: FLOP/s against the FLOP of one."""
    suffix = str(pool.dtype).removeprefix("torch.")
    for m, k, n in _LOW_SHAPES:
        calls = [_product(pool.cut, m, k, n, layout) for layout in LAYOUTS]
        flops = 2.0 * m * k * n

        def run(calls: Sequence[Callable[[], object]] = calls) -> None:
            for call in calls:
                call()

        yield Case(f"matmul.{suffix}", flops, flops * len(calls), run)


def _product(place: _Place, m: int, k: int, n: int, layout: str) -> Callable[[], object]:
    left = place("a", m, k) if layout[0] == "N" else place("a", k, m).t()
    right = place("b", k, n) if layout[1] == "N" else place("b", n, k).t()
    return bind_call("aten.mm.default", (left, right), (place("o", m, n),))


def batched_cases(pool: Pool, key: str = "bmm") -> Iterator[Case]:
    """Make cases of products of many small matrices: FLOP/s against the FLOP of one."""
    for side in _BATCHED:
        count = max(4, min(64, (1 << 20) // side**2))
        operands = (pool.cut("a", count, side, side), pool.cut("b", count, side, side))
        each = 2.0 * side**3
        yield Case(
            key, each, each * count, bind_call("aten.bmm.default", operands, (pool.cut("o", count, side, side),))
        )


def attention_cases(pool: Pool, suffix: str = "") -> Iterator[Case]:
    """Make cases of causal attention, forward and backward: FLOP/s of the unmasked half, by the FLOP of one head."""
    if pool.device.type != "cpu":
        yield from _cuda_attention_cases(pool)
        return
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    for batch, heads, length, dim in _ATTENTION:
        q, k, v, grad = _heads(batch, heads, length, dim, pool.dtype, pool.device)
        places = [torch.empty_like(q) for _ in range(3)]
        stats = torch.empty(batch, length, heads).transpose(1, 2)
        each = 2.0 * length * length * dim
        forward = bind_call(f"{name}.default", (q, k, v, 0.0, True), (places[0], stats))
        forward()
        out = places[0].clone()
        backward = bind_call(f"{name}_backward.default", (grad, q, k, v, out, stats, 0.0, True), places)
        yield Case(f"attention{suffix}", each, each * batch * heads, forward)
        yield Case(f"attention_backward{suffix}", 2.5 * each, 2.5 * each * batch * heads, backward)


def _heads(
    batch: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and a gradient, each [batch, heads, length, dim] as a projection leaves it."""
    drawn = torch.rand(4, batch, length, heads, dim, dtype=dtype, device=device)
    return tuple(t.transpose(1, 2) for t in drawn)


def _cuda_attention_cases(pool: Pool) -> Iterator[Case]:
    """Make cases of the kernels ``lading.ir.retarget`` takes: flash in 16 bits, memory-efficient in float32."""
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    half = getattr(torch, base_dtype(pool.device))
    if torch.cuda.get_device_capability(pool.device) >= (8, 0):  # flash attention needs Ampere
        for shape in _CUDA_ATTENTION:
            yield from _cuda_attention(pool, shape, flash, half, ("attention", "attention_backward"))
        for shape in _CUDA_ATTENTION:
            yield from _cuda_attention(pool, shape, efficient, torch.float32, (efficient, f"{efficient}_backward"))
        return
    for shape in _CUDA_ATTENTION:
        yield from _cuda_attention(pool, shape, efficient, half, ("attention", "attention_backward"))


def _cuda_attention(
    pool: Pool, shape: tuple[int, int, int, int], name: str, dtype: torch.dtype, keys: tuple[str, str]
) -> Iterator[Case]:
    batch, heads, length, dim = shape
    q, k, v, grad = _heads(*shape, dtype, pool.device)
    places = [torch.empty_like(q) for _ in range(3)]
    is_flash = "flash" in name
    rows = length if is_flash else -(-length // 32) * 32
    stats = torch.empty(batch, heads, rows, device=pool.device)
    kind = torch.uint64 if is_flash else torch.int64
    zeros = torch.zeros(2, dtype=torch.int64, device=pool.device).view(kind)
    state = (zeros, zeros[0])
    args = (q, k, v, 0.0, True, False) if is_flash else (q, k, v, None, True, 0.0, True)
    outs = (places[0], stats, *(None,) * (7 if is_flash else 2))
    forward = bind_call(f"aten.{name}.default", args, outs)
    forward()
    out = places[0].clone()
    back = (
        (grad, q, k, v, out, stats, None, None, length, length, 0.0, True, *state)
        if is_flash
        else (grad, q, k, v, None, out, stats, state[1], state[1], 0.0, (True, True, True, False), True)
    )
    backward = bind_call(f"aten.{name}_backward.default", back, (*places, *(() if is_flash else (None,))))
    each = 2.0 * length * length * dim
    yield Case(keys[0], each, each * batch * heads, forward)
    yield Case(keys[1], 2.5 * each, 2.5 * each * batch * heads, backward)


def dtype_cases(pool: Pool) -> Iterator[tuple[str, Case]]:
    """Make cases of one product in each floating dtype, for the ratio of their peaks; returned with the dtype."""
    side = 256 if pool.device.type == "cpu" else 4096
    names = ("float32", "float64", "bfloat16", "float16")
    emulated = {"bfloat16"} - {base_dtype(pool.device)} if pool.device.type == "cuda" else set[str]()
    for name in (n for n in names if n not in emulated):
        a, b, out = (torch.rand(3, side, side, device=pool.device).to(getattr(torch, name))).unbind()
        flops = 2.0 * side**3
        yield name, Case(name, flops, flops, bind_call("aten.mm.default", (a, b), (out,)))


@dataclass(frozen=True, slots=True)
class ProductFit:
    """Model ``seconds = overhead + flops / (peak * efficiency(flops) * prod d / (d + skinny_dim))``, with its error."""

    peak: float
    efficiency: Curve
    skinny_dim: float
    mean_error: float


def fit_products(products: Sequence[TimedProduct], overhead_s: float) -> ProductFit:
    """Fit timed products by least squares on the logarithm of the rate; takes the best of all candidates of skinny_dim.

    Args:
        overhead_s: Seconds that any operation takes.
    Raises:
        ConfigError: fewer products than the curve has points.
    """
    if len(products) < 4:
        raise ConfigError(f"expected at least 4 timed products, got {len(products)}")
    fits = [_fit(products, overhead_s, skinny) for skinny in (0.0, *(0.5 * 1.25**i for i in range(26)))]
    return min(fits, key=lambda fit: fit.mean_error)


def _fit(products: Sequence[TimedProduct], overhead_s: float, skinny: float) -> ProductFit:
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
    """Weights of linear interpolation at ``x``, one for each knot."""
    step = knots[1] - knots[0]
    return [max(0.0, 1.0 - abs(x - knot) / step) for knot in knots]
