"""Capture: forward, loss and backward of an ``nn.Module`` on fake tensors, as a StepGraph.

A dispatch mode above the fake-tensor mode sees every operation after autograd, exactly as eager would run it, with
the storages it creates, mutates and aliases. Nothing is computed and no memory is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from lading.capture.flops import op_flops
from lading.errors import CaptureError
from lading.ir.fold import fold
from lading.ir.graph import (
    DTYPE_BYTES,
    Arg,
    Literal,
    Op,
    OpKind,
    Parameter,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Tensor,
)
from lading.ir.opkinds import kind_of

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_ADVICE = {
    "data": "its result depends on tensor values; use a form with static shapes "
    "(torch.where, masks; for experts config._experts_implementation='grouped_mm')",
    "operator": "it has no fake-tensor rule; register one with torch.library.register_fake",
}


def capture(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    *,
    accumulation: int = 1,
) -> StepGraph:
    """Record one micro-batch's forward, loss and backward.

    Args:
        model: Any module; real, meta or fake parameters. It is left unchanged.
        batch: Pytree whose tensors give shapes and dtypes; values are not read.
        loss: ``loss(model, batch)`` runs the forward and returns a scalar.
        accumulation: Micro-batches of a step, >= 1; the loss is divided by it, so a step uses the mean.

    Returns:
        The StepGraph of one micro-batch; ``lading.ir.step.expand`` adds accumulation, clipping and the optimizer.

    Raises:
        CaptureError: an operation cannot be captured; says which, in which module, and what to do.
    """
    mode = _fake_mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    tracer = Tracer()
    with mode:
        fakes = _fake_copies(model, mode)
        inputs, fake_batch = _fake_batch(batch, mode)
    tracer.declare(fakes, inputs)
    with mode, tracer, _module_paths(model, tracer):
        value = _call(model, fakes, fake_batch, loss)
        _check_loss(value)
        if accumulation > 1:
            value = value / accumulation
        tracer.phase = Phase.BACKWARD
        value.backward()
    return dataclasses.replace(tracer.graph(fakes, inputs, value), accumulation=accumulation)


def input_leaves(batch: Any) -> list[tuple[str, Any]]:
    """Tensor leaves of a batch by name, in pytree order: the key itself for a flat dict, else the path."""
    leaves, _ = tree_flatten_with_path(batch)
    return [(_leaf_name(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _leaf_name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path) or "batch"


def _check_loss(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise CaptureError(f"expected loss(model, batch) to return a scalar tensor, got {found}; reduce it, e.g. .mean()")
    if not value.requires_grad:
        raise CaptureError("the loss does not depend on any trainable parameter; check requires_grad and torch.no_grad")


class _Step(torch.nn.Module):
    """A model and its loss as one module, so that functional_call can swap the parameters under both."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[torch.nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


def _call(model: torch.nn.Module, fakes: Mapping[str, torch.Tensor], batch: Any, loss: Any) -> torch.Tensor:
    named = {f"model.{name}": tensor for name, tensor in fakes.items()}
    step = _Step(model, loss).train(model.training)
    return torch.func.functional_call(step, named, (batch,))


def _fake_mode_of(model: torch.nn.Module) -> FakeTensorMode | None:
    """The mode of a model that was built from fake tensors, so that its tensors can be used as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            tensor.fake_mode.allow_non_fake_inputs = True
            return tensor.fake_mode
    return None


def _fake_copies(model: torch.nn.Module, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Fresh fake CPU tensors for every parameter and buffer, tied ones shared, by every name."""
    made: dict[int, torch.Tensor] = {}
    fakes: dict[str, torch.Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if id(tensor) not in made:
            made[id(tensor)] = _fake_like(name, tensor)
        fakes[name] = made[id(tensor)]
    return fakes


def _fake_like(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor).__name__ == "DTensor":
        raise CaptureError(f"{name}: expected a dense tensor, got {type(tensor).__name__} ({tensor.layout}); capture before sharding")
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _fake_batch(batch: Any, mode: FakeTensorMode) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    leaves, spec = tree_flatten(batch)
    faked = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu").requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    tree = tree_unflatten(faked, spec)
    return input_leaves(tree), tree


@contextmanager
def _module_paths(model: torch.nn.Module, tracer: Tracer) -> Iterator[None]:
    """Keep ``tracer.modules`` the stack of module paths whose forward is running."""
    def leave(*_: Any) -> None:
        tracer.modules.pop()

    handles: list[Any] = []
    for name, module in model.named_modules():
        enter = partial(_enter, tracer.modules, name)
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(stack: list[str], name: str, *_: Any) -> None:
    stack.append(name)


class Tracer(TorchDispatchMode):
    """Records every operation that creates or mutates a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self._storage_ids: dict[int, int] = {}
        self._tensor_ids: dict[Tensor, int] = {}
        self._alive: list[Any] = []  # storages stay alive so that their addresses stay unique
        self._node_modules: dict[int, str] = {}
        self._owners: dict[int, str] = {}

    def declare(self, fakes: Mapping[str, torch.Tensor], inputs: list[tuple[str, torch.Tensor]]) -> None:
        """Register what exists before the step."""
        for name, tensor in fakes.items():
            role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
            self._new_storage(tensor, name, role)
            self._owners.setdefault(id(tensor), name.rpartition(".")[0])
        for name, tensor in inputs:
            self._new_storage(tensor, name, Role.INPUT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        try:
            out = _run_fake(func, args, kwargs)
        except _DATA_DEPENDENT as error:
            raise CaptureError(self._refusal(func, _ADVICE["data"])) from error
        except _UNSUPPORTED as error:
            raise CaptureError(self._refusal(func, _ADVICE["operator"])) from error
        except RuntimeError as error:
            raise CaptureError(self._refusal(func, f"the operation itself failed: {error}")) from error
        if func.namespace != "prim":
            self._record(func, args, kwargs, out)
        return out

    def _refusal(self, func: Any, advice: str) -> str:
        return f"cannot capture {func} in module {self._module() or '(loss)'!r}: {advice}"

    def _module(self) -> str:
        """Path of the module whose operation runs; in backward, of the forward operation being differentiated."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self.modules[-1] if self.modules else ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(id(variable), "")
        last = self.ops[-1].module if self.ops else ""
        return self._node_modules.get(node._sequence_nr(), last)

    def _phase(self) -> Phase:
        return Phase.LOSS if self.phase is Phase.FORWARD and not self.modules else self.phase

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        module = self._module()
        if self.phase is Phase.FORWARD:
            self._node_modules.setdefault(torch.autograd._get_sequence_nr() - 1, module)
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            self._constant(out, args[0])
            return
        made = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        mutated = _mutated(func, args, kwargs)
        new = [t for t in made if t.untyped_storage()._cdata not in self._storage_ids]
        if not new and not mutated:
            return  # a view: derived again from its storage wherever that lies
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        call = (tuple(map(self._encode, args)), tuple((k, self._encode(v)) for k, v in sorted(kwargs.items())))
        inputs = tuple(dict.fromkeys(map(self.tensor_id, read)))
        is_random = _is_random(func, args, kwargs)
        if mutated and (functional := self._functional(func, args, kwargs, mutated)):
            func, new, mutated = functional, mutated, []
            del self._storage_ids[args[0].untyped_storage()._cdata]  # what it writes becomes a new storage
        for t in new:
            self._check_dense(func, t)
            role = Role.GRADIENT if self.phase is Phase.BACKWARD else Role.ACTIVATION
            self._new_storage(t, f"{module or 'loss'}.{func.overloadpacket.__name__}.{len(self.ops)}", role)
        flat_out = list(out) if isinstance(out, (tuple, list)) else [out]
        new_ids = {id(t) for t in new}
        outputs = tuple(dict.fromkeys(map(self.tensor_id, new)))
        writes = tuple(map(self.tensor_id, mutated))
        self.ops.append(
            Op(
                name=str(func),
                phase=self._phase(),
                args=call[0],
                kwargs=call[1],
                inputs=inputs,
                outputs=outputs,
                results=tuple(self.tensor_id(t) if id(t) in new_ids else None for t in flat_out),
                mutates=writes,
                module=module,
                kind=kind_of(str(func)) or OpKind.ELEMENTWISE,
                flops=op_flops(func, args, kwargs, out),
                bytes_read=sum(self.tensors[t].touched_bytes for t in inputs),
                bytes_written=sum(self.tensors[t].touched_bytes for t in dict.fromkeys((*outputs, *writes))),
                random=is_random,
            )
        )

    def _functional(self, func: Any, args: Any, kwargs: Any, mutated: list[torch.Tensor]) -> Any:
        """The out-of-place form of an in-place operation on a whole temporary, so that it can be recomputed.

        None where the operation must stay in place: it is random, writes only part of its storage, writes what
        lives on (a parameter, a buffer, the batch), or its out-of-place form gives another dtype.
        """
        target = mutated[0]
        storage = self.storages[self._storage_ids[target.untyped_storage()._cdata]]
        name, whole = func._schema.name.split("::")[1], target.untyped_storage().nbytes()
        if len(mutated) > 1 or target is not args[0] or _is_random(func, args, kwargs) or not name.endswith("_"):
            return None
        if storage.role not in (Role.ACTIVATION, Role.GRADIENT) or target.numel() * target.element_size() != whole:
            return None
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        form = getattr(packet, func._overloadname, None) if func.namespace == "aten" and packet is not None else None
        if form is None:
            return None
        result = form(*args, **kwargs)
        same = (result.dtype, result.shape, result.stride()) == (target.dtype, target.shape, target.stride())
        return form if same else None

    def _check_dense(self, func: Any, t: torch.Tensor) -> None:
        if t.layout is not torch.strided or t.is_conj() or t.is_neg():
            raise CaptureError(self._refusal(func, "its result is sparse or a lazy conjugate; use dense real arithmetic"))
        if str(t.dtype).removeprefix("torch.") not in DTYPE_BYTES:
            raise CaptureError(self._refusal(func, f"dtype {t.dtype} is not supported"))

    def _new_storage(self, t: torch.Tensor, name: str, role: Role, data: bytes | None = None) -> None:
        storage = t.untyped_storage()
        if storage._cdata in self._storage_ids:
            return
        self._storage_ids[storage._cdata] = len(self.storages)
        self._alive.append(storage)
        self.storages.append(Storage(name, storage.nbytes(), role, data))

    def _constant(self, t: torch.Tensor, real: torch.Tensor) -> None:
        """``t`` holds the values of ``real``, a tensor made from Python numbers or a plain attribute of a module."""
        with unset_fake_temporarily():
            dense = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(real)
            data = bytes(dense.untyped_storage().tolist())
        self._new_storage(t, f"constant.{len(self.storages)}", Role.CONSTANT, data)

    def tensor_id(self, t: torch.Tensor) -> int:
        """Id of the graph tensor with this storage and geometry."""
        if t.untyped_storage()._cdata not in self._storage_ids:
            self._adopt(t)
        key = Tensor(
            storage=self._storage_ids[t.untyped_storage()._cdata],
            dtype=str(t.dtype).removeprefix("torch."),
            shape=tuple(t.shape),
            stride=tuple(t.stride()),
            offset=int(t.storage_offset()),
        )
        if key not in self._tensor_ids:
            self._tensor_ids[key] = len(self.tensors)
            self.tensors.append(key)
        return self._tensor_ids[key]

    def _adopt(self, t: torch.Tensor) -> None:
        """A tensor nobody declared: a constant if its values are known, otherwise not capturable."""
        real = t.constant if isinstance(t, FakeTensor) else t
        if real is None:
            raise CaptureError(
                f"module {self._module() or '(loss)'!r} uses a tensor of shape {tuple(t.shape)} that is neither a "
                "parameter, a buffer nor part of the batch; register it with register_buffer or pass it in the batch"
            )
        self._constant(t, real)

    def _encode(self, arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            return Ref(self.tensor_id(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(self._encode(item) for item in arg)
        if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
            return Literal("float", repr(arg))
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        for kind, cls in _LITERALS.items():
            if isinstance(arg, cls):
                return Literal(kind, str(arg).removeprefix("torch."))
        raise CaptureError(f"module {self._module() or '(loss)'!r}: an operation takes a {type(arg).__name__}; pass tensors and numbers only")

    def graph(self, fakes: Mapping[str, torch.Tensor], inputs: list[tuple[str, torch.Tensor]], loss: torch.Tensor) -> StepGraph:
        """The finished StepGraph."""
        parameters = tuple(self._parameters(fakes))
        final = {self.tensors[p.gradient].storage for p in parameters if p.gradient is not None}
        storages = [
            dataclasses.replace(s, role=Role.ACTIVATION) if s.role is Role.GRADIENT and i not in final else s
            for i, s in enumerate(self.storages)
        ]
        for parameter in parameters:
            if parameter.gradient is not None:
                at = self.tensors[parameter.gradient].storage
                storages[at] = dataclasses.replace(storages[at], name=f"{parameter.names[0]}.grad")
        buffers = {name: self.tensor_id(t) for name, t in fakes.items() if not isinstance(t, torch.nn.Parameter)}
        leaves = tuple((name, self.tensor_id(t)) for name, t in inputs)
        losses = (self.tensor_id(loss),)
        graph = StepGraph(
            storages=tuple(storages),
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            parameters=parameters,
            buffers=tuple(buffers.items()),
            inputs=(leaves,),
            losses=losses,
        )
        graph.validate()
        return dataclasses.replace(graph, blocks=fold(graph))

    def _parameters(self, fakes: Mapping[str, torch.Tensor]) -> Iterator[Parameter]:
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in fakes.items():
            if isinstance(tensor, torch.nn.Parameter):
                names.setdefault(id(tensor), []).append(name)
                tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            gradient = None if tensor.grad is None else self.tensor_id(tensor.grad)
            yield Parameter(tuple(names[key]), self.tensor_id(tensor), gradient)


#: Batch norms that update their running statistics (arguments 3 and 4) though their schema does not say so, and the
#: position of the flag that makes them.
_HIDDEN_BUFFERS = {"native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5}
_LITERALS: dict[str, type] = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "complex": complex,
}


def _run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """Shapes and storages of an operation's result. Torch's own rule for grouped_mm knows bf16 only."""
    if func is not getattr(torch.ops.aten._grouped_mm, "default", None) or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = a.shape[-2], b.shape[-1]
    if a.dim() == 3 and b.dim() == 3:
        shape: tuple[int, ...] = (a.shape[0], rows, columns)
    else:
        shape = (offsets.shape[0], rows, columns) if a.dim() == b.dim() else (rows, columns)
    unit = 16 // a.element_size()  # the kernel pads rows to 16 bytes
    padded = -(-columns // unit) * unit
    strides = (rows * padded, padded, 1)[-len(shape) :]
    return a.new_empty_strided(shape, strides)


def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def _mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments that the operation writes, as its schema says or hides."""
    name = func._schema.name.removeprefix("aten::")
    if name in _HIDDEN_BUFFERS and args[_HIDDEN_BUFFERS[name]]:
        return [t for t in args[3:5] if t is not None]
    if not func._schema.is_mutable:
        return []
    values: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return [t for t in tree_flatten(values)[0] if isinstance(t, torch.Tensor)]
