"""Initial values without the memory of a whole model.

A model is built on fake tensors while the operations that would initialise it are recorded. Running them again, in
the same order on the same generator, gives the same bits as building the model for real; each parameter is handed on
and freed as soon as nothing writes or reads it any more.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

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
#: Seed while a constructor is recorded, one more behind each operation: none that it will set itself.
_UNLIKELY_SEED = 0x5DEECE66D3B1A7F
_SEED_ADVICE = (
    "expected one that sets torch's random generator to given numbers, or back to what torch.get_rng_state() returned, "
    "as the seed of the run is not known while it is recorded; give it the number, or torch.manual_seed it with one"
)


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
        kept = frozenset(state for state in self.generator_states.values() if isinstance(state, int))
        with torch.no_grad():
            if -1 in kept:
                states[-1] = torch.get_rng_state()
            for index, op in enumerate(self.ops):
                self._set_state(index, states)
                with _default_dtype(self._made_dtype(op)):
                    values.run(op)
                if index in kept:
                    states[index] = torch.get_rng_state()
                for storage, final in ending.get(index, ()):
                    for name in names.pop(storage, ()) if final else ():
                        sink(name, values.tensor(self.named[name]))
                    values.bytes.pop(storage, None)
            self._set_state(len(self.ops), states)
            for storage in sorted(names):  # constants, which no operation makes
                for name in names[storage]:
                    sink(name, values.tensor(self.named[name]))

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


@contextmanager
def _initial_seed_refused() -> Iterator[None]:
    """Refuse ``torch.initial_seed``: while a constructor is recorded, the seed is not that of the run."""

    def refused() -> int:
        raise CaptureError(f"the model's constructor asks for torch.initial_seed(): {_SEED_ADVICE}")

    scopes = (torch.__dict__, torch.random.__dict__)
    before = [scope["initial_seed"] for scope in scopes]
    for scope in scopes:
        scope["initial_seed"] = refused
    try:
        yield
    finally:
        for scope, function in zip(scopes, before, strict=True):
            scope["initial_seed"] = function


class _ConstructorTracer(Tracer):
    """Records a constructor and where it sets torch's random generator (``torch.manual_seed``, ``fork_rng``).

    Fake tensors draw no numbers. So behind each operation that draws, the generator is given a state that it has
    nowhere else: where the next one finds another, the constructor has set it. Two operations behind the same seed may
    draw unlike many numbers, so a state that followed from the seed would not tell them apart. What the constructor may
    come back to, as at the end of ``fork_rng``, are states that the generator was in before.
    """

    def __init__(self) -> None:
        super().__init__("the model's constructor")
        self.generator_states: dict[int, bytes | int] = {}
        self._seen: dict[bytes, int] = {}  # digest of the state behind an operation -> its index
        self._newest = b""
        self._leave_state(-1)

    def _leave_state(self, index: int) -> None:
        """Give the generator a state of its own behind an operation; the generators of other devices stay."""
        torch.default_generator.manual_seed(_UNLIKELY_SEED + index)
        self._newest = _digest(_generator_state())
        self._seen[self._newest] = index

    def _check_generator(self, func: Any) -> None:
        del func  # setting the generator is refused in no constructor
        with unset_fake_temporarily():
            self.compare_generator()
            self._leave_state(len(self.ops))

    def compare_generator(self) -> None:
        """Note the state of torch's generator before the next operation, if the constructor has set it."""
        state = _generator_state()
        digest = _digest(state)
        if digest != self._newest:
            self.generator_states[len(self.ops)] = self._seen.get(digest, state)

    def _check_real(self, func: Any, tensors: list[torch.Tensor], mutated: list[torch.Tensor]) -> None:
        """Refuse also to compute with a state of the generator, or with a copy of it."""
        if any(not isinstance(t, FakeTensor) and _is_like_state(t) for t in tensors):
            raise CaptureError(f"the model's constructor computes with torch.get_rng_state(): {_SEED_ADVICE}")
        super()._check_real(func, tensors, mutated)


def _generator_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _digest(state: bytes) -> bytes:
    """Digest of a state of the generator, which has kilobytes."""
    return hashlib.blake2b(state, digest_size=16).digest()


def _is_like_state(tensor: torch.Tensor) -> bool:
    """Whether a real tensor may be a state of torch's generator, by its dtype and size."""
    return tensor.dtype is torch.uint8 and tensor.shape == torch.get_rng_state().shape


def defer(build: Callable[[], torch.nn.Module]) -> Deferred:
    """Build a model on fake CPU tensors.

    Raises:
        CaptureError: the constructor needs tensor values, the seed of the run or an operation that has no fake rule, or
            gives parameters that it has made another dtype or device.
    """
    import_groupless()
    with torch.random.fork_rng(devices=()):
        tracer = _ConstructorTracer()
        slow = told_if_slow("building the model", lambda: len(tracer.ops))
        refused = _initial_seed_refused()
        with slow, _whole_trunc_normal(), refused, FakeTensorMode(allow_non_fake_inputs=True), tracer:
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
