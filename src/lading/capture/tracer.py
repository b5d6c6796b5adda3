"""Tracer: a dispatch mode above the fake-tensor mode that writes down every operation as eager would run it.

It sees the storages that operations create, mutate and alias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

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
    "attribute": "it writes in place to a tensor that is neither a parameter, a buffer nor part of the batch; "
    "use register_buffer, or the out-of-place form",
    "trainable": "it uses a trainable tensor that is not registered with its module; assign it as an nn.Parameter "
    "or keep it in an nn.ParameterList",
    "again": "it draws random numbers in the backward pass; switch the model's own activation checkpointing off, "
    "as the plan decides what is recomputed",
    "sparse": "its result is sparse or a lazy conjugate; use dense real arithmetic "
    "(cos and sin for rotations, Embedding(sparse=False))",
}


class Tracer(TorchDispatchMode):
    """Records every operation that creates or mutates a storage.

    Args:
        outside: What runs when no module's forward does, for messages.
    """

    def __init__(self, outside: str = "the loss") -> None:
        super().__init__()
        self.outside = outside
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
        self._check_real(func, args, kwargs)
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

    def _check_real(self, func: Any, args: Any, kwargs: Any) -> None:
        """Tensors nobody declared are constants: they are neither trained nor written."""
        if any(not isinstance(t, FakeTensor) for t in _mutated(func, args, kwargs)):
            raise CaptureError(self._refusal(func, _ADVICE["attribute"]))
        tensors = (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor))
        if torch.is_grad_enabled() and any(t.requires_grad and not isinstance(t, FakeTensor) for t in tensors):
            raise CaptureError(self._refusal(func, _ADVICE["trainable"]))

    def _refusal(self, func: Any, advice: str) -> str:
        return f"cannot capture {func} in {self._place()}: {advice}"

    def _place(self) -> str:
        """The running module, for people."""
        inside = bool(self.modules) or self.phase is Phase.BACKWARD
        return f"module {self._module()!r}" if self._module() else "the model itself" if inside else self.outside

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
            newest = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]
            self._node_modules.setdefault(newest, module)
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            self._constant(out, args[0])
            return
        made = [t for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)]
        for t in made:
            self._check_dense(func, t)
        mutated = _mutated(func, args, kwargs)
        new = [t for t in made if t.untyped_storage()._cdata not in self._storage_ids]
        if not new and not mutated:
            return  # a view: derived again from its storage wherever that lies
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        call = (tuple(map(self._encode, args)), tuple((k, self._encode(v)) for k, v in sorted(kwargs.items())))
        inputs = tuple(dict.fromkeys(map(self.tensor_id, read)))
        is_random = _is_random(func, args, kwargs)
        if is_random and self.phase is Phase.BACKWARD:
            raise CaptureError(self._refusal(func, _ADVICE["again"]))
        if mutated and (functional := self._functional(func, args, kwargs, mutated)):
            func, new, mutated = functional, mutated, []
            del self._storage_ids[args[0].untyped_storage()._cdata]  # what it writes becomes a new storage
        for t in new:
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
            raise CaptureError(self._refusal(func, _ADVICE["sparse"]))
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
            data = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage()).numpy().tobytes()
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
                f"{self._place()} uses a tensor of shape {tuple(t.shape)} that is neither a "
                "parameter, a buffer nor part of the batch; register it with register_buffer or pass it in the batch"
            )
        self._constant(t, real)

    def _encode(self, arg: Any) -> Arg:
        if isinstance(arg, torch.Tensor):
            return Ref(self.tensor_id(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(self._encode(item) for item in arg)
        if isinstance(arg, float) and not isfinite(arg):
            return Literal("float", repr(arg))
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        for kind, cls in _LITERALS.items():
            if isinstance(arg, cls):
                return Literal(kind, str(arg).removeprefix("torch."))
        raise CaptureError(f"{self._place()}: an operation takes a {type(arg).__name__}; pass tensors and numbers only")

    def graph(
        self, fakes: Mapping[str, torch.Tensor], inputs: list[tuple[str, torch.Tensor]], loss: torch.Tensor
    ) -> StepGraph:
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
        _check_constants(graph)
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


def _check_constants(graph: StepGraph) -> None:
    """A constant is there in every step as it was captured, so nothing may write it."""
    for op in graph.ops:
        for t in op.mutates:
            if graph.storages[graph.storage_of(t)].role is Role.CONSTANT:
                place = f"module {op.module!r}" if op.module else "the model itself or the loss"
                raise CaptureError(
                    f"{op.name} in {place} writes a constant of shape {graph.tensors[t].shape} in place; "
                    "use the out-of-place form, or torch.full and torch.zeros instead of torch.tensor"
                )


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
