"""Cases of the probe: for each rate of the cost model an operation that stands for it, bound as in the executor.

Results go to memory that exists already, so neither allocation nor page faults are in a rate unless the executor would
pay them too. Bytes are counted as the cost model counts them: every tensor read and written, once.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch

from lading.ir.graph import Arg, Literal, Op, OpKind, Phase, Ref
from lading.ir.update_ops import PREFIX
from lading.optim.registry import DEFAULT
from lading.runtime.host import cache_bytes
from lading.runtime.host_arena import Arena
from lading.runtime.kernel_calls import Call, Rate, bind
from lading.units import KiB, MiB

#: Bytes an operation reads and writes in all: from its fixed cost through every cache to memory.
SIZES = (1 * KiB, 16 * KiB, 128 * KiB, 1 * MiB, 4 * MiB, 16 * MiB, 64 * MiB)
#: A GPU is as fast as its memory only with much more.
_CUDA_SIZES = (*SIZES[1:], 256 * MiB, 1024 * MiB)
_SLOW_SIZES = SIZES[:5]
#: The update that is timed: by the rule that moves parameters where nothing is said.
_STEP = PREFIX + DEFAULT
_SLOW = frozenset({"sort", "topk", "random"})
_REGION_BYTES = {"a": 64 * MiB, "b": 32 * MiB, "o": 64 * MiB}
_CUDA_SCALE = 16
_ROW = 1024
#: Seconds of a case that is short, as most are, and of one that is timed once.
_SHORT_S, _LONG_S = 3e-4, 0.5
#: What runs before each sample: more than a core's cache, or than a GPU's. On a GPU it also takes longer than the host
#: needs to launch what is timed, so that no launch is in a sample.
_DISTURBANCE_BYTES = {"cpu": 24 * MiB, "cuda": 512 * MiB}
#: Most that it writes of the cache that cores share, where a step finds what it has made a moment ago, and its code.
#: Measured with 32 MiB of it: steps of four models were predicted 24 to 37% too long with 24 MiB, -8 to +3% with 6.
_SHARED_CACHE_SHARE = 0.25
#: How often the shared cache is overwritten before an operation whose operands are to come from memory. Measured with
#: 32 MiB: copies, products of elements and sums of 1 MB took 1.2 to 1.8 times as long after 1.5 times, 3.1 to 3.5
#: times after 2.5.
_FLUSHES = 2.5
#: Most of a shared cache that is relied on and overwritten: others have the rest of one that many processors share.
_MOST_CACHE_BYTES = 64 * MiB
#: Bytes of the operations that are timed so: with less the time is that of code and launch, with more as without.
_COLD_SIZES = (128 * KiB, 16 * MiB)
#: Bytes that ``step_work`` goes through, several caches of them.
_WORK_BYTES = 96 * MiB
#: How often a sample is taken at most until no processor was lost meanwhile.
_TAKES = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One timing: a ``run`` does ``work`` bytes or FLOP, and gives the point at ``size`` of the rate ``key``.

    ``touched``: Bytes that a float32 product reads and writes; 0 for others.
    """

    key: str
    size: float
    work: float
    run: Call
    touched: int = 0


def bind_call(
    name: str,
    args: Sequence[Any],
    outs: Sequence[torch.Tensor | None] = (),
    named: Mapping[str, Any] | None = None,
) -> Call:
    """Bind the kernel of one operation to tensors, as the executor would.

    Args:
        name: ATen overload, such as "aten.mm.default".
        args: Its arguments: tensors, numbers, None, Literals and tuples of them.
        outs: Tensors that its results go to.
        named: Arguments by name.
    """
    tensors: list[torch.Tensor] = []

    def encode(arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            tensors.append(arg)
            return Ref(len(tensors) - 1)
        return tuple(encode(item) for item in arg) if isinstance(arg, tuple) else arg

    encoded = tuple(encode(arg) for arg in args)
    by_name = tuple((key, encode(arg)) for key, arg in (named or {}).items())
    inputs = tuple(range(len(tensors)))
    results = tuple(None if out is None else len(tensors) + i for i, out in enumerate(outs))
    tensors += [torch.empty(0) if out is None else out for out in outs]
    op = Op(
        name=name,
        phase=Phase.FORWARD,
        args=encoded,
        kwargs=by_name,
        inputs=inputs,
        outputs=tuple(r for r in results if r is not None),
        results=results,
        mutates=() if outs else inputs[:1],
        module="",
        kind=OpKind.ELEMENTWISE,
    )
    kind = tensors[0].device.type
    return bind(op, lambda tensor: tensors[tensor], kind=kind, rate=Rate(1e-4)).run


class Pool:
    """Memory that all cases share: tensors of one dtype are cut from it, one region per letter.

    On a CPU it is an arena, as in a step: kernels are faster in its huge pages.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        scale = _CUDA_SCALE if device.type == "cuda" else 1
        self.region_bytes = {name: scale * size for name, size in _REGION_BYTES.items()}
        self.sizes = _CUDA_SIZES if device.type == "cuda" else SIZES
        self._regions = {name: self._region(size // 4) for name, size in self.region_bytes.items()}

    def _region(self, count: int) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.rand(count, device=self.device).to(self.dtype)
        memory = Arena(count * self.dtype.itemsize).bytes_at(0, count * self.dtype.itemsize)
        return memory.view(self.dtype).copy_(torch.rand(count))

    def cut(self, region: str, *shape: int) -> torch.Tensor:
        """Cut a contiguous tensor from the start of region "a", "b" (read) or "o" (written)."""
        return self._regions[region][: prod(shape)].view(shape)

    def index(self, count: int, limit: int) -> torch.Tensor:
        """Draw ``count`` row numbers below ``limit``, int64, in no order."""
        return torch.randint(limit, (count,), device=self.device)


_Spec = tuple[str, Sequence[Any], Sequence[torch.Tensor]]
_Make = Callable[[Pool, int], _Spec]


def rate_cases(pool: Pool) -> Iterator[Case]:
    """Make a case for each rate in bytes/s and each size."""
    makers = _MAKERS if pool.device.type == "cpu" else {**_MAKERS, **_GPU_MAKERS}
    for key, make in makers.items():
        for size in _SLOW_SIZES if key in _SLOW else pool.sizes:
            name, args, outs = make(pool, size)
            work = sum(_touched(t) for t in (*_tensors(args), *outs))
            if key in ("gather", "index_select"):
                work = 2 * _touched(outs[0]) + _touched(args[-1])
            if name == _STEP:
                work += sum(_touched(t) for i, t in enumerate(args) if i != 1)
            yield Case(key, float(work), float(work), bind_call(name, args, outs, _NAMED.get(key)))


def cold_cases(cases: Sequence[Case]) -> list[Case]:
    """Cases of ``rate_cases`` that are timed with operands from memory, too."""
    min_work, max_work = _COLD_SIZES
    return [case for case in cases if case.key in _MAKERS and 0.5 * min_work <= case.work <= 1.5 * max_work]


def rounded(value: float) -> float:
    """Round to four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def flush_bytes() -> tuple[int, int]:
    """Bytes of the last level of cache, and of the copy that leaves nothing of operands in it; 0 where nobody says."""
    shared = min(_MOST_CACHE_BYTES, cache_bytes(3) or cache_bytes(2))
    return shared, int(_FLUSHES * shared) // 2


#: Rates that are measured in bfloat16 too, and at which sizes.
_LOW_KEYS = (
    "elementwise", "elementwise.strided", "transcendental", "pow", "silu", "silu_backward", "gelu", "gelu_backward",
    "gelu.tanh", "gelu_backward.tanh", "reduction", "softmax", "_softmax_backward_data", "norm",
    "native_layer_norm_backward", "gather", "embedding_dense_backward", "copy", "copy.strided", "cat", "random",
)  # fmt: skip
_LOW_SIZES = (16 * KiB, 128 * KiB, 1 * MiB, 8 * MiB)


def low_cases(pool: Pool, wide: Pool) -> Iterator[Case]:
    """Make cases of the classes that a bfloat16 step consists of, casts and updates of master weights included."""
    suffix = str(pool.dtype).removeprefix("torch.")
    for key in _LOW_KEYS:
        for size in _LOW_SIZES if key not in _SLOW else _LOW_SIZES[:3]:
            name, args, outs = _MAKERS[key](pool, size)
            work = float(sum(_touched(t) for t in (*_tensors(args), *outs)))
            if key == "gather":
                work = 2.0 * _touched(outs[0]) + _touched(args[-1])
            yield Case(f"{key}.{suffix}", work, work, bind_call(name, args, outs, _NAMED.get(key)))
    for size in _LOW_SIZES:
        rows, width = _rows(size, 2)
        yield _cast(f"_to_copy.{suffix}", pool.cut("a", rows, width), wide.cut("o", rows, width))
        yield _cast(f"_to_copy.{suffix}", wide.cut("a", rows, width), pool.cut("o", rows, width), add=1)
        yield _master_update(f"step.{suffix}", pool, wide, size)


def _cast(key: str, source: torch.Tensor, target: torch.Tensor, add: int = 0) -> Case:
    work = float(_touched(source) + _touched(target))
    return Case(key, work + add, work, bind_call("aten._to_copy.default", (source,), (target,)))


def _master_update(key: str, pool: Pool, wide: Pool, size: int) -> Case:
    """Case of an update of float32 masters and moments by a gradient of the pool's dtype: 30 bytes an element."""
    rows, width = _rows(size, 7)
    moments = torch.zeros(2, rows, width)
    args = (pool.cut("o", rows, width), pool.cut("a", rows, width), moments[0], moments[1], torch.zeros(()))
    run = bind_call(_STEP, args, named={"master": wide.cut("o", rows, width)})
    work = 30.0 * rows * width
    return Case(key, work, work, run)


def runs_case(pool: Pool) -> Case:
    """Case of many short runs of memory: four heads of 32 elements times a table of 32, for each of 2048 tokens."""
    tokens = 2048
    table = pool.cut("b", tokens, 1, 32)
    run = bind_call("aten.mul.Tensor", (pool.cut("a", tokens, 4, 32), table), (pool.cut("o", tokens, 4, 32),))
    return Case("runs", float(tokens), float(tokens), run)


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)


def _touched(tensor: torch.Tensor) -> int:
    return prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s) * tensor.element_size()


def _rows(size: int, arrays: int, width: int = _ROW) -> tuple[int, int]:
    """Shape (rows, width) of each of ``arrays`` fp32 tensors that take ``size`` bytes together."""
    elements = max(16, size // (4 * arrays))
    width = min(width, elements)
    return max(1, elements // width), width


def _unary(name: str, *rest: Any) -> _Make:
    def make(pool: Pool, size: int) -> _Spec:
        shape = _rows(size, 2)
        return f"aten.{name}", (pool.cut("a", *shape), *rest), (pool.cut("o", *shape),)

    return make


def _binary(name: str, *rest: Any) -> _Make:
    def make(pool: Pool, size: int) -> _Spec:
        shape = _rows(size, 3)
        return f"aten.{name}", (pool.cut("a", *shape), pool.cut("b", *shape), *rest), (pool.cut("o", *shape),)

    return make


def _square(size: int, arrays: int) -> int:
    return max(4, int((size / (4 * arrays)) ** 0.5))


def _transposed_binary(pool: Pool, size: int) -> _Spec:
    side = _square(size, 3)
    return "aten.mul.Tensor", (pool.cut("a", side, side), pool.cut("b", side, side).t()), (pool.cut("o", side, side),)


def _transposed_copy(pool: Pool, size: int) -> _Spec:
    side = _square(size, 2)
    return "aten.clone.default", (pool.cut("a", side, side).t(),), (pool.cut("o", side, side),)


def _cat(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 2, 64)
    half = (pool.cut("a", rows, width).narrow(1, 0, width // 2), pool.cut("b", rows, width).narrow(1, 0, width // 2))
    return "aten.cat.default", (half, -1), (pool.cut("o", rows, width // 2 * 2),)


def _reduce(name: str, dim: int) -> _Make:
    def make(pool: Pool, size: int) -> _Spec:
        rows, width = _rows(size, 1)
        out = (rows, 1) if dim else (1, width)
        return f"aten.{name}", (pool.cut("a", rows, width), (dim,), True), (pool.cut("o", *out),)

    return make


def _vector_norm(pool: Pool, size: int) -> _Spec:
    return "aten.linalg_vector_norm.default", (pool.cut("a", *_rows(size, 1)), 2.0), (pool.cut("o", 1).view(()),)


def _softmax_backward(name: str) -> _Make:
    return _binary(name, -1, Literal("dtype", "float32"))


def _nll(pool: Pool, size: int) -> tuple[tuple[torch.Tensor, torch.Tensor, None, int, int], torch.Tensor]:
    rows, width = _rows(size, 1, 2048)
    target = pool.index(rows, width)
    return (pool.cut("a", rows, width), target, None, 1, -100), torch.ones((), device=pool.device)


def _nll_forward(pool: Pool, size: int) -> _Spec:
    args, weight = _nll(pool, size)
    return "aten.nll_loss_forward.default", args, (torch.empty_like(weight), torch.empty_like(weight))


def _nll_backward(pool: Pool, size: int) -> _Spec:
    args, weight = _nll(pool, size // 2)
    out = pool.cut("o", *args[0].shape)
    return "aten.nll_loss_backward.default", (torch.ones_like(weight), *args, weight), (out,)


def _layer_norm(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 2)
    affine = torch.ones(2, width, device=pool.device)
    stats = torch.empty(2, rows, 1, device=pool.device)
    args = (pool.cut("a", rows, width), (width,), affine[0], affine[1], 1e-5)
    return "aten.native_layer_norm.default", args, (pool.cut("o", rows, width), stats[0], stats[1])


def _layer_norm_backward(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 3)
    affine = torch.ones(4, width, device=pool.device)
    stats = torch.ones(2, rows, 1, device=pool.device)
    args = (pool.cut("a", rows, width), pool.cut("b", rows, width), (width,), stats[0], stats[1], affine[0], affine[1])
    outs = (pool.cut("o", rows, width), affine[2], affine[3])
    return "aten.native_layer_norm_backward.default", (*args, (True, True, True)), outs


def _rms_norm(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 2)
    args = (pool.cut("a", rows, width), (width,), torch.ones(width, device=pool.device), 1e-5)
    return "aten._fused_rms_norm.default", args, (pool.cut("o", rows, width), torch.empty(rows, 1, device=pool.device))


def _rms_norm_backward(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 3)
    weight, of_weight = torch.ones(2, width, device=pool.device)
    rstd = torch.ones(rows, 1, device=pool.device)
    args = (pool.cut("a", rows, width), pool.cut("b", rows, width), (width,), rstd, weight, (True, True))
    return "aten._fused_rms_norm_backward.default", args, (pool.cut("o", rows, width), of_weight)


def _embedding(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 2)
    table = pool.cut("a", pool.region_bytes["a"] // 4 // width, width)
    return "aten.embedding.default", (table, pool.index(rows, len(table))), (pool.cut("o", rows, width),)


def _embedding_backward(pool: Pool, size: int) -> _Spec:
    """Operation that scatters gradients into a table with four times as many rows as there are tokens."""
    tokens, width = _rows(size, 5)
    args = (pool.cut("a", tokens, width), pool.index(tokens, 4 * tokens), 4 * tokens, -1, False)
    return "aten.embedding_dense_backward.default", args, (pool.cut("o", 4 * tokens, width),)


def _index_add(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 3)
    args = (pool.cut("a", rows, width), 0, pool.index(rows, rows), pool.cut("b", rows, width))
    return "aten.index_add.default", args, (pool.cut("o", rows, width),)


def _topk(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 1, 64)
    count = min(8, width)
    values, places = pool.cut("o", rows, count), torch.empty(rows, count, dtype=torch.int64, device=pool.device)
    return "aten.topk.default", (pool.cut("a", rows, width), count), (values, places)


def _sort(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 4, 256)
    places = torch.empty(rows, width, dtype=torch.int64, device=pool.device)
    return "aten.sort.default", (pool.cut("a", rows, width),), (pool.cut("o", rows, width), places)


def _dropout(pool: Pool, size: int) -> _Spec:
    rows, width = _rows(size, 2)
    mask = torch.empty(rows, width, dtype=torch.bool, device=pool.device)
    return "aten.native_dropout.default", (pool.cut("a", rows, width), 0.1, True), (pool.cut("o", rows, width), mask)


def _update(pool: Pool, size: int) -> _Spec:
    """Operation of seven passes of an fp32 tensor: reads weight, gradient, two moments; writes all but the gradient."""
    rows, width = _rows(size, 7)
    moments = torch.zeros(2, rows, width, device=pool.device)
    step = torch.zeros((), device=pool.device)
    return _STEP, (pool.cut("o", rows, width), pool.cut("a", rows, width), moments[0], moments[1], step), ()


# Key of each rate: a cost class, or one operation that differs much from its class.
_MAKERS: dict[str, _Make] = {
    "elementwise": _binary("mul.Tensor"),
    "elementwise.strided": _transposed_binary,
    "transcendental": _unary("sigmoid.default"),
    "exp": _unary("exp.default"),
    "tanh": _unary("tanh.default"),
    "pow": _unary("pow.Tensor_Scalar", 2),
    "rsqrt": _unary("rsqrt.default"),
    "silu": _unary("silu.default"),
    "silu_backward": _binary("silu_backward.default"),
    "gelu": _unary("gelu.default"),
    "gelu_backward": _binary("gelu_backward.default"),
    "gelu.tanh": _unary("gelu.default"),
    "gelu_backward.tanh": _binary("gelu_backward.default"),
    "reduction": _reduce("sum.dim_IntList", 1),
    "reduction.strided": _reduce("sum.dim_IntList", 0),
    "linalg_vector_norm": _vector_norm,
    "softmax": _unary("_softmax.default", -1, False),
    "_softmax_backward_data": _softmax_backward("_softmax_backward_data.default"),
    "_log_softmax": _unary("_log_softmax.default", -1, False),
    "_log_softmax_backward_data": _softmax_backward("_log_softmax_backward_data.default"),
    "nll_loss_forward": _nll_forward,
    "nll_loss_backward": _nll_backward,
    "norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "gather": _embedding,
    "scatter": _index_add,
    "embedding_dense_backward": _embedding_backward,
    "copy": _unary("clone.default"),
    "copy.strided": _transposed_copy,
    "cat": _cat,
    "sort": _sort,
    "topk": _topk,
    "random": _dropout,
    "step": _update,
}
#: Those of kernels that only a GPU has.
_GPU_MAKERS: dict[str, _Make] = {"_fused_rms_norm": _rms_norm, "_fused_rms_norm_backward": _rms_norm_backward}


#: Arguments by name of rates that are of one form of an operation (``Kernel.form``).
_NAMED = {key: {"approximate": "tanh"} for key in ("gelu.tanh", "gelu_backward.tanh")}

#: What two events of CUDA can tell apart.
_TICK_S = 5e-7


class Stopwatch:
    """Times many cases, each call after other work, as it would be inside a step.

    A call that repeats at once finds its operands and even its code in the nearest cache and is up to five times faster
    than in a step, so a copy that is larger than a core's cache runs before each. Every round times each case, so that
    a busy moment hits them alike; a sample in which the process lost a processor is taken again. One thread is timed by
    its processor time, which waiting for a shared core does not lengthen.
    """

    def __init__(self, cases: Sequence[Case], device: torch.device, disturbance_bytes: int = 0) -> None:
        self.cases = list(cases)
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        source = torch.zeros((disturbance_bytes or _disturbance_bytes(device.type)) // 4, device=device)
        self._disturb = partial(torch.empty_like(source).copy_, source)
        self._sample = self._sample_on_gpu if device.type == "cuda" else self._sample_on_cpu
        self._samples = [self._warm_sample(case) for case in self.cases]

    def _warm_sample(self, case: Case) -> list[float]:
        """Take one sample, after a call that loads code and scratch."""
        case.run()
        return [self._sample(case)]

    def _sample_on_cpu(self, case: Case) -> float:
        run, clock, seconds = case.run, self._clock, 0.0
        for _ in range(_TAKES):
            self._disturb()
            losses = _lost_processors()
            start = clock()
            run()
            seconds = clock() - start
            if _lost_processors() == losses:
                break
        return seconds

    def _sample_on_gpu(self, case: Case) -> float:
        """Time a case by the GPU's own clock, between two events, in seconds."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._disturb()
        start.record()
        case.run()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1e3, _TICK_S)

    def begin_again(self) -> list[list[float]]:
        """Forget the samples but for the first of each case; returns all that there were."""
        samples = self._samples
        self._samples = [mine[:1] for mine in samples]
        return samples

    def samples(self) -> list[list[float]]:
        """Copy all samples there are."""
        return [list(mine) for mine in self._samples]

    def resume_from(self, samples: list[list[float]]) -> None:
        """Go on with samples that ``samples`` or ``begin_again`` returned."""
        self._samples = samples

    def run(self, seconds: float, max_rounds: int = 31, repeats: int = 5) -> int:
        """Time rounds until ``seconds`` are over; returns the most samples that a case has.

        Args:
            repeats: Samples in a round of a case that is short. One that takes very long has its first only.
        """
        end = time.monotonic() + seconds
        counts = [repeats if s[0] < _SHORT_S else int(s[0] < _LONG_S) for s in self._samples]
        for _ in range(max_rounds):
            for case, count, samples in zip(self.cases, counts, self._samples, strict=True):
                if time.monotonic() > end:
                    break
                samples.extend(self._sample(case) for _ in range(count))
        return max(map(len, self._samples))

    def seconds(self, *, quiet: bool) -> list[float]:
        """Seconds of one call of each case: the mean of its samples, or the lower quartile beside others' work.

        A step adds up its operations as they come, so it takes the sum of their means; medians add up to 2 to 5% less
        (11 runs of ``benchmarks/predictions``). Beside others' work the mean would be theirs.
        """
        return [_mean(samples) if quiet else sorted(samples)[len(samples) // 4] for samples in self._samples]


def _mean(samples: Sequence[float]) -> float:
    """Mean in which the largest twentieth of the samples, but one of three at least, count as the one before them."""
    ordered = sorted(samples)
    cut = max(1, len(ordered) // 20) if len(ordered) > 2 else 0
    untrimmed = ordered[: len(ordered) - cut]
    return (sum(untrimmed) + cut * untrimmed[-1]) / len(ordered)


def _lost_processors() -> int:
    """Times that a thread of this process had to leave its processor to another."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _disturbance_bytes(kind: str) -> int:
    """Bytes to write before each sample: on a CPU at least what two of its cores have as their own."""
    most = _DISTURBANCE_BYTES[kind]
    if kind != "cpu" or not (shared := cache_bytes(3)):
        return most
    return min(most, max(2 * cache_bytes(2), int(_SHARED_CACHE_SHARE * shared)))


class StepWork:
    """Call of one product and three passes on memory that is in no cache, in about the shares of a step's time.

    What a step computes on comes from memory for the most part, on the way that the bytes of a disk take, too: beside
    this reads came at 2.12 and writes at 5.0 GB/s, both ways at 1.51 and 1.59, beside ``product_and_pass``, whose
    operands stay in cache, at 2.25 and 5.3, 1.57 and 1.82. Passes take longer beside transfers by more than products,
    so both are timed.

    Attributes:
        passes_s: Seconds that passes took in all calls so far.
    """

    def __init__(self) -> None:
        self.passes_s = 0.0
        self._memory = Arena(_WORK_BYTES).bytes_at(0, _WORK_BYTES).view(torch.float32).view(-1, 512, 1024)
        self._memory.uniform_()
        self._left, self._out = torch.rand(512, 512), torch.empty(512, 1024)
        self._turns = cycle(range(0, len(self._memory), 4))

    def __call__(self) -> None:
        """Compute once."""
        first = next(self._turns)
        torch.mm(self._left, self._memory[first], out=self._out)
        begun = time.perf_counter()
        for block in range(first, first + 3):
            torch.mul(self._memory[block], 1.0, out=self._memory[block + 1])
        self.passes_s += time.perf_counter() - begun


def product_and_pass() -> Callable[[], object]:
    """Make a call of one product and one pass over memory, in about the shares they have in a training step."""
    a, b, out = torch.rand(512, 512), torch.rand(512, 1024), torch.empty(512, 1024)

    def run() -> None:
        torch.mm(a, b, out=out)
        torch.mul(out, 0.5, out=out)

    return run
