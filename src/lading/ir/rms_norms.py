"""RMS norms: those that ``torch.nn.functional.rms_norm`` ran operation by operation on a CPU, found in a captured step.

On a GPU the same function is one kernel forward and one backward. What a model writes in operations of its own stays as
it is, also where it computes the same: eager runs it so on a GPU, too. So does a norm that a model's own checkpointing
runs again in backward. The two are told apart by what only torch's own function leaves: ``add.Scalar`` for epsilon
(Python's ``+`` is ``add.Tensor``), and for 16 bits a cast of the result by ``type_as``, which names a layout.

Source: aten/src/ATen/native/layer_norm.cpp, rms_norm_composite; its backward is autograd's (torch 2.11 to 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from lading.ir.graph import Arg, Op, Phase, Ref, StepGraph

_HALF = frozenset({"bfloat16", "float16"})
_FORWARD, _BACKWARD = (Phase.FORWARD, Phase.LOSS), (Phase.BACKWARD,)
_CAST, _MUL = "aten._to_copy.default", "aten.mul.Tensor"


@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """One norm: ``out = x * rstd * weight`` with ``rstd = rsqrt(mean(x^2) + epsilon)`` over the last dims.

    Attributes:
        forward, backward: Its operations, in program order; none of what they hand each other is read by others.
        x, out: Tensors of one shape and dtype.
        rstd: Tensor of the reciprocal roots, in the dtype in which a GPU keeps them: float32, or x's own if wider.
        weight: Tensor of the shape of the last dims and the dtype of x; None without.
        dims: Shape of the last dims.
        grad: Gradient of out; None where backward has none.
        of_x, of_weight: Gradients that backward makes; None for one that nobody asked for.
        other_gradient, total: Gradient of x by others that read it, to which backward adds its own in two parts, and
            the last operation of it, which makes the sum; ``of_x`` is then the tensor of the sum. None where it adds to
            nothing.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    x: int
    out: int
    rstd: int
    weight: int | None
    dims: tuple[int, ...]
    epsilon: float
    grad: int | None = None
    of_x: int | None = None
    of_weight: int | None = None
    other_gradient: int | None = None
    total: int | None = None


class _NoNormError(Exception):
    """Operations that were looked at are no such norm."""


def rms_norms(graph: StepGraph) -> list[RmsNorm]:
    """Find every norm of a step, in program order."""
    finder = _Finder(graph)
    norms: list[RmsNorm] = []
    for index, op in enumerate(graph.ops):
        if op.name == "aten.rsqrt.default" and op.phase in _FORWARD:
            try:
                norms.append(finder.norm(index))
            except _NoNormError:
                continue
    return norms


class _Finder:
    """Walks a graph from what is written to what reads it, by storage: views between operations do not matter."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph, self.ops = graph, graph.ops
        self.writers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for index, op in enumerate(graph.ops):
            for storage in graph.writes(op):
                self.writers.setdefault(storage, []).append(index)
            for storage in dict.fromkeys(graph.storage_of(t) for t in op.inputs):
                self.readers.setdefault(storage, []).append(index)

    def norm(self, root: int) -> RmsNorm:
        """Find the norm around a reciprocal root.

        Raises:
            _NoNormError: it is in none.
        """
        added = self.writer(self.ops[root].args[0], "aten.add.Scalar")
        mean = self.writer(self.ops[added].args[0], "aten.mean.dim")
        squared = self.writer(self.ops[mean].args[0], "aten.pow.Tensor_Scalar")
        wide = self.tensor(self.ops[squared].args[0])
        epsilon, dims = self.ops[added].args[1], self._dims(self.ops[mean], wide)
        _need(self.ops[squared].args[1] == 2 and isinstance(epsilon, float))
        rstd = self.ops[root].outputs[0]
        scaled = self.mul(rstd, wide, _FORWARD)
        out, weight, forward = self._result(scaled, dims)
        x, widened = self._narrow(wide, out)
        forward = sorted((*widened, squared, mean, added, root, *forward))
        if weight is not None:
            _need(self.graph.tensors[weight].dtype == self.graph.tensors[x].dtype)
        rms_norm = RmsNorm(
            forward=tuple(forward), backward=(), x=x, out=out, rstd=rstd, weight=weight, dims=dims,
            epsilon=float(epsilon),  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        rms_norm = _Backward(self, rms_norm, wide, self.ops[scaled].outputs[0]).completed()
        self._check_closed(rms_norm)
        return rms_norm

    def _dims(self, mean: Op, wide: int) -> tuple[int, ...]:
        """Shape of the last dims, over which a mean is taken that keeps them."""
        shape = self.graph.tensors[wide].shape
        over = mean.args[1]
        _need(isinstance(over, tuple) and mean.args[2:] == (True,) and not mean.kwargs)
        assert isinstance(over, tuple)
        _need(sorted(over) == list(range(len(shape) - len(over), len(shape))))  # pyright: ignore[reportArgumentType]
        return shape[len(shape) - len(over) :]

    def _result(self, scaled: int, dims: tuple[int, ...]) -> tuple[int, int | None, tuple[int, ...]]:
        """Result of a norm from its multiplication by the roots on: its tensor, the weight, and the operations."""
        steps, weight = [scaled], None
        at = self.ops[scaled].outputs[0]
        after = [i for i in self.readers_in(at, _FORWARD) if self.ops[i].name == _MUL]
        factor = self.other_factor(after[0], at) if len(after) == 1 else None
        if factor is not None and self.graph.tensors[factor].shape == dims:
            weight = factor
            steps.append(after[0])
            at = self.ops[after[0]].outputs[0]
        casts = [i for i in self.readers_in(at, _FORWARD) if self.ops[i].name == _CAST]
        if len(casts) == 1 and "layout" in dict(self.ops[casts[0]].kwargs) and self._is_half(casts[0]):
            steps.append(casts[0])
            at = self.ops[casts[0]].outputs[0]
        return at, weight, tuple(steps)

    def _narrow(self, wide: int, out: int) -> tuple[int, tuple[int, ...]]:
        """Tensor that a norm is taken of, widened to float32 where the result has 16 bits, and that widening."""
        tensors = self.graph.tensors
        if tensors[out].dtype not in _HALF:
            _need(tensors[wide].dtype == tensors[out].dtype)
            return wide, ()
        cast = self.writer(Ref(wide), _CAST)
        x = self.tensor(self.ops[cast].args[0])
        _need(tensors[x].dtype == tensors[out].dtype and tensors[x].shape == tensors[wide].shape)
        return x, (cast,)

    def _check_closed(self, norm: RmsNorm) -> None:
        """Refuse a norm of which others read, or change, what its operations hand each other."""
        norm_ops = {*norm.forward, *norm.backward}
        norm_storages = {self.graph.storage_of(t) for t in (norm.out, norm.of_x, norm.of_weight) if t is not None}
        for index in norm_ops:
            _need(not self.ops[index].mutates)
            for storage in self.graph.writes(self.ops[index]):
                _need(self.writers[storage] == [index] or storage in norm_storages)
                _need(storage in norm_storages or norm_ops.issuperset(self.readers.get(storage, ())))

    def readers_in(self, tensor: int, phases: tuple[Phase, ...]) -> list[int]:
        """Operations of some phases that read a tensor's storage."""
        return [i for i in self.readers.get(self.graph.storage_of(tensor), ()) if self.ops[i].phase in phases]

    def mul(self, left: int, right: int, phases: tuple[Phase, ...]) -> int:
        """The one multiplication of two tensors by each other.

        Raises:
            _NoNormError: there are none or several.
        """
        factors = {self.graph.storage_of(left), self.graph.storage_of(right)}
        products = [
            i
            for i in self.readers_in(left, phases)
            if self.ops[i].name == _MUL and {self.graph.storage_of(t) for t in self.ops[i].inputs} == factors
        ]
        _need(len(products) == 1)
        return products[0]

    def other_factor(self, mul: int, tensor: int) -> int | None:
        """The tensor by which a multiplication multiplies one of this storage; None for a number or the same."""
        mine = self.graph.storage_of(tensor)
        factors = [t for t in self.ops[mul].inputs if self.graph.storage_of(t) != mine]
        return factors[0] if len(factors) == 1 and len(self.ops[mul].inputs) == 2 else None

    def _is_half(self, index: int) -> bool:
        return self.graph.tensors[self.ops[index].outputs[0]].dtype in _HALF

    def writer(self, arg: Arg, name: str) -> int:
        """The one operation that writes an argument, which has this name.

        Raises:
            _NoNormError: there is no such one.
        """
        writers = self.writers.get(self.graph.storage_of(self.tensor(arg)), [])
        _need(len(writers) == 1 and self.ops[writers[0]].name == name)
        return writers[0]

    @staticmethod
    def tensor(arg: Arg) -> int:
        _need(isinstance(arg, Ref))
        assert isinstance(arg, Ref)
        return arg.tensor


class _Backward:
    """Finds the backward of a norm: what autograd runs for the operations of its forward.

    Args:
        norm: What was found forward.
        wide: Tensor of x in the dtype in which it is computed.
        scaled: Tensor of x times the roots.
    """

    def __init__(self, finder: _Finder, norm: RmsNorm, wide: int, scaled: int) -> None:
        self.finder, self.forward, self.wide, self.scaled = finder, norm, wide, scaled
        self.steps: list[int] = []
        self.other_gradient: int | None = None
        self.total: int | None = None

    def completed(self) -> RmsNorm:
        """Complete the norm by its backward, which may have none.

        Raises:
            _NoNormError: something of the backward is not as autograd does it.
        """
        norm = self.forward
        of_weight, grad_of = self._of_weight()
        of_x, scaled_by = self._of_x()
        grads = {g for g in (grad_of, scaled_by) if g is not None}
        if not grads:
            return norm
        _need(len(grads) == 1)
        grad = self._narrow(grads.pop())
        return replace(
            norm, backward=tuple(sorted(self.steps)), grad=grad, of_x=of_x, of_weight=of_weight,
            other_gradient=self.other_gradient, total=self.total,
        )  # fmt: skip

    def _of_weight(self) -> tuple[int | None, int | None]:
        """Gradient of the weight, and the gradient of the result that it is made from; None without."""
        ops, norm = self.finder.ops, self.forward
        if norm.weight is None:
            return None, None
        muls = self.finder.readers_in(self.scaled, _BACKWARD)
        if not muls:
            return None, None
        mul = muls[0]
        _need(len(muls) == 1 and ops[mul].name == _MUL)
        grad = self.finder.other_factor(mul, self.scaled)
        summed = self._next(mul, "aten.sum.dim_IntList")
        self.steps += [mul, summed]
        gradient = ops[summed].outputs[0]
        if self._is_half():
            cast = self._next(summed, _CAST)
            self.steps.append(cast)
            gradient = ops[cast].outputs[0]
        _need(prod(self.finder.graph.tensors[gradient].shape) == prod(norm.dims) and grad is not None)
        return gradient, grad

    def _of_x(self) -> tuple[int | None, int | None]:
        """Gradient of x, and the gradient of the result that it is made from; None without."""
        ops, norm = self.finder.ops, self.forward
        readers = self.finder.readers_in(norm.rstd, _BACKWARD)
        if not readers:
            return None, None
        _need(len(readers) == 2)
        by_name = {ops[i].name: i for i in readers}
        _need(set(by_name) == {_MUL, "aten.pow.Tensor_Scalar"})
        direct, cubed = by_name[_MUL], by_name["aten.pow.Tensor_Scalar"]
        weighted = self.finder.other_factor(direct, norm.rstd)
        _need(weighted is not None and ops[cubed].args[1] == 3)
        assert weighted is not None
        by_x = self.finder.mul(weighted, self.wide, _BACKWARD)
        chain = self._chain(
            by_x, "aten.sum.dim_IntList", ("aten.mul.Scalar", -0.5), _MUL, ("aten.div.Scalar", prod(norm.dims)), _MUL,
            "aten.add.Tensor",
        )  # fmt: skip
        _need(self._next(cubed, _MUL) == chain[2])
        powers = [i for i in self.finder.readers_in(self.wide, _BACKWARD) if ops[i].name == "aten.pow.Tensor_Scalar"]
        _need(len(powers) == 1 and ops[powers[0]].args[1] == 1.0)
        doubled = self._next(powers[0], "aten.mul.Scalar")
        _need(ops[doubled].args[1] == 2.0 and self._next(doubled, _MUL) == chain[4])
        self._add_up(direct, chain[5])
        self.steps += [direct, cubed, by_x, *chain, powers[0], doubled]
        gradient = ops[chain[5]].outputs[0]
        if self._is_half():
            cast = self._next(chain[5], _CAST)
            self.steps.append(cast)
            gradient = ops[cast].outputs[0]
        return gradient, self._unweighted(weighted)

    def _add_up(self, direct: int, total: int) -> None:
        """Check that the two parts of x's gradient are added, to each other or to what others have made of it."""
        first = self._next(direct, "aten.add.Tensor")
        if first == total:
            return
        _need(self._next(first, "aten.add.Tensor") == total and not self._is_half())
        self.other_gradient = self.finder.other_factor(first, self.finder.ops[direct].outputs[0])
        _need(self.other_gradient is not None)
        self.total = total
        self.steps.append(first)

    def _unweighted(self, weighted: int) -> int:
        """Gradient of the result, of which ``weighted`` is the product with the weight if there is one."""
        norm = self.forward
        if norm.weight is None:
            return weighted
        mul = self.finder.writer(Ref(weighted), _MUL)
        grad = self.finder.other_factor(mul, norm.weight)
        _need(grad is not None and self.finder.mul(grad, norm.weight, _BACKWARD) == mul)
        assert grad is not None
        self.steps.append(mul)
        return grad

    def _narrow(self, grad: int) -> int:
        """Gradient of the result before it was widened to float32, where the result has 16 bits."""
        if not self._is_half():
            return grad
        cast = self.finder.writer(Ref(grad), _CAST)
        self.steps.append(cast)
        return self.finder.tensor(self.finder.ops[cast].args[0])

    def _chain(self, start: int, *names: str | tuple[str, float]) -> list[int]:
        """Operations of these names, each the one reader of the one before; some with a number as second argument."""
        chain: list[int] = []
        for name in names:
            op_name, number = name if isinstance(name, tuple) else (name, None)
            start = self._next(start, op_name)
            _need(number is None or self.finder.ops[start].args[1] == number)
            chain.append(start)
        return chain

    def _next(self, index: int, name: str) -> int:
        """The one operation that reads what another makes; it has this name."""
        (storage,) = self.finder.graph.writes(self.finder.ops[index])
        readers = self.finder.readers.get(storage, [])
        _need(len(readers) == 1 and self.finder.ops[readers[0]].name == name)
        return readers[0]

    def _is_half(self) -> bool:
        return self.finder.graph.tensors[self.forward.out].dtype in _HALF


def _need(holds: bool) -> None:
    if not holds:
        raise _NoNormError
