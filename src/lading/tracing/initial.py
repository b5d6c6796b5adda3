"""Initial values without the memory of a whole model.

A model is built on fake tensors while the operations that would initialise it are recorded. Running them again, in
the same order on the same generator, gives the same bits as building the model for real; each parameter is handed on
and freed as soon as nothing writes or reads it any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lading.alone import import_groupless
from lading.errors import CaptureError
from lading.ir.graph import Op, Storage, Tensor
from lading.tracing.interpret import Interpreter
from lading.tracing.slow_notice import told_if_slow
from lading.tracing.tracer import Tracer

#: What torch's default dtype may be.
_DEFAULTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OVERWRITE = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "copy_", "bernoulli_", "exponential_", "random_", "trunc_normal_"}
)
#: Seed while a constructor is recorded: one that it will not set itself, so that it is seen when it sets one.
_UNLIKELY_SEED = 0x5DEECE66D3B1A7F


@torch.library.custom_op(
    "lading::trunc_normal_", mutates_args=("tensor",), tags=(torch.Tag.nondeterministic_seeded,), device_types="cpu"
)
def _trunc_normal_(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> None:
    """Run ``torch.nn.init.trunc_normal_`` as one operation: it draws until all values lie within the limits."""
    torch.nn.init.trunc_normal_(tensor, mean, std, a, b)


@dataclass(frozen=True)
class Deferred:
    """A model on fake tensors, with the operations that make its values.

    Attributes:
        named: Graph tensor of each parameter and buffer, by its first name.
        generator_states: Index of an operation -> state that the constructor gave torch's random generator before it:
            bytes of ``torch.get_rng_state``, or the index of the operation behind which the generator was in that
            state (-1: before the first). The number of operations stands for the end.
    """

    model: torch.nn.Module
    named: dict[str, int]
    storages: tuple[Storage, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    generator_states: Mapping[int, bytes | int] = field(default_factory=lambda: {})

    def materialize(self, seed: int, sink: Callable[[str, torch.Tensor], None]) -> None:
        """Make every parameter and buffer as ``torch.manual_seed(seed)`` and building the model would.

        Args:
            sink: Called with each name and value, in the order they become final; it must copy what it keeps.
        """
        values = Interpreter(self.storages, self.tensors)
        names: dict[int, list[str]] = {}
        for name, tensor in self.named.items():
            names.setdefault(self.tensors[tensor].storage, []).append(name)
        ending = self._last_uses()
        torch.manual_seed(seed)
        states: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            self._keep_state(-1, states)
            for index, op in enumerate(self.ops):
                self._set_state(index, states)
                with _default_dtype(self._made_dtype(op)):
                    values.run(op)
                self._keep_state(index, states)
                for storage, final in ending.get(index, ()):
                    for name in names.pop(storage, ()) if final else ():
                        sink(name, values.tensor(self.named[name]))
                    values.bytes.pop(storage, None)
            self._set_state(len(self.ops), states)
            for storage in sorted(names):  # constants, which no operation makes
                for name in names[storage]:
                    sink(name, values.tensor(self.named[name]))

    def _keep_state(self, index: int, states: dict[int, torch.Tensor]) -> None:
        """Keep the state of torch's generator behind an operation, where it comes back to it."""
        if index in self.generator_states.values():
            states[index] = torch.get_rng_state()

    def _set_state(self, index: int, states: Mapping[int, torch.Tensor]) -> None:
        """Set torch's generator as the constructor did before an operation."""
        state = self.generator_states.get(index)
        if isinstance(state, bytes):
            torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif state is not None:
            torch.set_rng_state(states[state])

    def keeping(self, names: Collection[str]) -> Deferred:
        """Copy for some parameters and buffers only, without the operations that they do not need.

        All operations stay where a needed one is random, as its numbers depend on those drawn before.
        """
        named = {name: tensor for name, tensor in self.named.items() if name in names}
        needed_storages = {self.tensors[tensor].storage for tensor in named.values()}
        ops: list[Op] = []
        for op in reversed(self.ops):
            if needed_storages.intersection(self.tensors[t].storage for t in (*op.outputs, *op.mutates)):
                needed_storages.update(self.tensors[t].storage for t in op.inputs)
                ops.append(op)
        if any(op.random for op in ops):
            return dataclasses.replace(self, named=named)
        return dataclasses.replace(self, named=named, ops=tuple(reversed(ops)), generator_states={})

    def _made_dtype(self, op: Op) -> torch.dtype:
        """Default dtype of torch when the operation made floats: a factory that was given no dtype took it."""
        dtypes = [getattr(torch, self.tensors[t].dtype) for t in op.outputs]
        return next((dtype for dtype in dtypes if dtype in _DEFAULTS), torch.get_default_dtype())

    def _last_uses(self) -> dict[int, list[tuple[int, bool]]]:
        """Index of operation -> storages that nothing needs after it, each with whether its value is the final one.

        A value that is overwritten as a whole (a module's own initialisation, before the model's) is dropped at once.
        """
        last: dict[int, int] = {}
        ending: dict[int, list[tuple[int, bool]]] = {}
        for index, op in enumerate(self.ops):
            for tensor in dict.fromkeys((*op.inputs, *op.outputs, *op.mutates)):
                storage = self.tensors[tensor].storage
                if storage in last and self._overwrites(op, tensor) and last[storage] != index:
                    ending.setdefault(last[storage], []).append((storage, False))
                last[storage] = index
        for storage, index in last.items():
            ending.setdefault(index, []).append((storage, True))
        return ending

    def _overwrites(self, op: Op, tensor: int) -> bool:
        """Whether the operation sets every byte of the tensor's storage without reading it."""
        name = op.name.split(".")[1]
        view = self.tensors[tensor]
        is_whole_storage = view.size_bytes == self.storages[view.storage].size_bytes
        return name in _OVERWRITE and op.mutates == (tensor,) and is_whole_storage and 0 not in view.stride


@contextmanager
def _whole_trunc_normal() -> Iterator[None]:
    """Record ``torch.nn.init.trunc_normal_`` as one operation, as its loop looks at values."""
    scope = torch.nn.init.__dict__
    loop = scope["_no_grad_trunc_normal_"]

    def drawn(t: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> torch.Tensor:
        if generator is not None:
            return loop(t, mean, std, a, b, generator=generator)
        with torch.no_grad():
            _trunc_normal_(t, float(mean), float(std), float(a), float(b))
        return t

    scope["_no_grad_trunc_normal_"] = drawn
    try:
        yield
    finally:
        scope["_no_grad_trunc_normal_"] = loop


class _ConstructorTracer(Tracer):
    """Records a constructor and where it sets torch's random generator (``torch.manual_seed``, ``fork_rng``).

    Fake tensors draw no numbers. So the generator is moved on by one number for each operation that draws: where an
    operation finds it in another state than the one before left, the constructor has set it. What it may come back to,
    as at the end of ``fork_rng``, are states that it was in before.
    """

    def __init__(self) -> None:
        super().__init__("the model's constructor")
        self.generator_states: dict[int, bytes | int] = {}
        torch.manual_seed(_UNLIKELY_SEED)
        self._newest = _generator_state()
        self._seen = {self._newest: -1}

    def _check_generator(self, func: Any) -> None:
        del func  # setting the generator is refused in no constructor
        with unset_fake_temporarily():
            self.compare_generator()
            torch.rand(())
            self._newest = _generator_state()
        self._seen[self._newest] = len(self.ops)

    def compare_generator(self) -> None:
        """Note the state of torch's generator before the next operation, if the constructor has set it."""
        state = _generator_state()
        if state != self._newest:
            self.generator_states[len(self.ops)] = self._seen.get(state, state)


def _generator_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def defer(build: Callable[[], torch.nn.Module]) -> Deferred:
    """Build a model on fake CPU tensors.

    Raises:
        CaptureError: the constructor needs tensor values or an operation that has no fake rule, or gives parameters
            that it has made another dtype or device.
    """
    import_groupless()
    with torch.random.fork_rng(devices=()):
        tracer = _ConstructorTracer()
        slow = told_if_slow("building the model", lambda: len(tracer.ops))
        with slow, _whole_trunc_normal(), FakeTensorMode(allow_non_fake_inputs=True), tracer:
            model = _built(build)
        tracer.compare_generator()
    named = {n: tracer.tensor_id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    graph = tuple(tracer.storages), tuple(tracer.tensors), tuple(tracer.ops)
    return Deferred(model, named, *graph, tracer.generator_states)


def _built(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    try:
        return build()
    except RuntimeError as error:
        if not str(error).startswith("_apply(): Couldn't swap"):
            raise
        raise CaptureError(
            f"the model's constructor gives parameters another dtype or device once they are made ({error}), as "
            "model.bfloat16() and model.to(...) do: expected parameters that are made as they stay; call "
            "torch.set_default_dtype before it builds them, or pass dtype= where it does"
        ) from error


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
