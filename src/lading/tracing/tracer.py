"""Tracer: a dispatch mode above the fake-tensor mode that writes down every operation as eager would run it.

It sees the storages that operations create, mutate and alias.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lading.alone import ADVICE, is_of_ranks
from lading.errors import CaptureError
from lading.ir.frozen import ReadTensor
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
from lading.tracing.attributes import sample_of, version_of
from lading.tracing.fakes import FakeRunner, flat_tensors
from lading.tracing.interpret import answer_of
from lading.tracing.shared_memory import storage_of
from lading.units import format_bytes

_ATEN = torch.ops.aten

#: Attention that torch's own table does not have: the CPU's, and that of tables (``lading.tracing.fused``).
_FORWARD = frozenset(
    {"aten::_scaled_dot_product_flash_attention_for_cpu", "lading::_scaled_dot_product_flash_attention"}
)
_BACKWARD = frozenset(f"{name}_backward" for name in _FORWARD)
#: Batch norms that update their running statistics (arguments 3 and 4) though their schema does not say so, and the
#: position of the flag that makes them.
_HIDDEN_BUFFERS = {"native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5}
#: Most bytes of the memory of which a constant is a part.
_LIMIT_BYTES = 1 << 28
#: Operations that find infinities and what is not a number, and those that put such answers together.
_ANOMALIES = frozenset({"aten.isinf.default", "aten.isnan.default"})
_JOINING = frozenset({
    "aten.any.default", "aten.any.dim", "aten.bitwise_or.Tensor", "aten.logical_or.default",
}) | _ANOMALIES  # fmt: skip
#: Draws from [0, 1).
_UNIT_DRAWS = frozenset({"aten.rand.default", "aten.rand_like.default"})
_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_DEVICE = torch.ops.prim.device.default
_CONJ = torch.ops.aten._conj.default
_ZERO_TANGENT = torch.ops.aten._efficientzerotensor.default
_ASSERT = torch.ops.aten._assert_async.msg
_ADVICE = {
    "data": "its result depends on tensor values; use a form with static shapes "
    "(torch.where, masks; for experts config._experts_implementation='grouped_mm')",
    "number": "Python reads a tensor's value there (.item(), float(), if); keep it a tensor, "
    "with torch.where for a choice, and return what is to be seen from the loss",
    "chance": "it decides at random what runs next, so steps differ; switch the dropping of layers off (layerdrop=0)",
    "operator": "it has no fake-tensor rule; register one with torch.library.register_fake",
    "attribute": "it writes in place to a tensor that is neither a parameter, a buffer nor part of the batch; "
    "use register_buffer, or the out-of-place form",
    "trainable": "it uses a trainable tensor that is not registered with its module; assign it as an nn.Parameter "
    "or keep it in an nn.ParameterList; two models of one loss are one nn.ModuleDict, with one optimizer and a capture "
    "for each loss (docs/own-loop.md)",
    "again": "it draws random numbers in the backward pass; switch the model's own activation checkpointing off, "
    "as the plan decides what is recomputed",
    "sparse": "its result is sparse or a lazy conjugate; use dense real arithmetic "
    "(cos and sin for rotations, Embedding(sparse=False))",
    "forward mode": "it differentiates forward (torch.func.jvp, torch.autograd.forward_ad), which no planned step "
    "does; use torch.autograd.grad with create_graph=True",
    "seeded": "the step has set torch's random generator before (torch.manual_seed, torch.random.fork_rng), and would "
    "have to in each step; make such numbers outside and register_buffer them, or give them in the batch",
    "geometry": "it gives a parameter, a buffer or a tensor of the batch another shape in place; "
    "use the out-of-place form",
    "memory": "it gives a tensor other memory; make a new tensor instead (torch.empty, torch.cat)",
    "opaque": "it hands its backward a workspace of its own making; run its module under "
    "torch.backends.mkldnn.flags(enabled=False)",
    "_pack_padded_sequence": "lengths decide what runs; give the RNN padded sequences: what it makes before the "
    "padding is the same in one direction, and a loss leaves padding out (ignore_index, or a mask); for two directions "
    "make batches of one length, a capture for each",
    "_ctc_loss": "its table is as long as the longest target of a batch; use a CTC of tensor operations on padded "
    "targets, such as that of docs/own-model.md",
}
#: Kernels whose results under autograd are not those without it.
_OPAQUE = frozenset({"aten::mkldnn_rnn_layer"})


class Tracer(TorchDispatchMode):
    """Records every operation that creates or mutates a storage.

    Args:
        outside: Name of what runs when no module's forward does, for messages.
        views: Receives each view as (number of operations before it, the view as an operation); None drops them.
    """

    def __init__(self, outside: str = "the loss", views: list[tuple[int, Op]] | None = None) -> None:
        super().__init__()
        self.outside = outside
        self.views = views
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.failed_in = ""  # the module in which an error arose, for messages
        self.storages: list[Storage] = []
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.read_tensors: list[tuple[torch.Tensor, ReadTensor]] = []  # that nobody declared
        self._read_ids: set[int] = set()
        self._real_storages: set[int] = set()  # of such tensors, and of the fake ones that stand for them
        self._storage_ids: dict[int, int] = {}
        self._tensor_ids: dict[Tensor, int] = {}
        self._alive: list[Any] = []  # storages stay alive so that their addresses stay unique
        self._node_modules: dict[int, str] = {}
        self._owners: dict[int, str] = {}
        self._declared: set[int] = set()
        self._fakes = FakeRunner()
        self._generator_state = torch.get_rng_state()
        self._trace = Trace(self.storages, self.tensors, self.ops)

    def declare(
        self,
        fakes: Mapping[str, torch.Tensor],
        inputs: list[tuple[str, torch.Tensor]],
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """Register what exists before the step; ``values`` are the real tensors of the inputs."""
        self._declared.update(map(id, (*fakes.values(), *(tensor for _, tensor in inputs))))
        for name, tensor in fakes.items():
            role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
            self._new_storage(tensor, name, role)
            self._owners.setdefault(id(tensor), name.rpartition(".")[0])
        for name, tensor in inputs:
            self._new_storage(tensor, name, Role.INPUT)
            if not isinstance(values[name], FakeTensor):
                self._trace.inputs[self.tensor_id(tensor)] = values[name]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: no wrapper is needed that keeps torch.compile out of every call, as nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if is_of_ranks(func):
            raise CaptureError(self._refusal(func, ADVICE))
        kwargs = kwargs or {}
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        if func is _ZERO_TANGENT:
            raise CaptureError(self._refusal(func, _ADVICE["forward mode"]))
        if func is _CONJ:  # a lazy view in eager; every reader but a product makes the same numbers from it
            func = torch.ops.aten._conj_physical.default
        tensors = list(flat_tensors((args, kwargs)))
        mutated = written(func, args, kwargs)
        self._check_real(func, tensors, mutated)
        moved = self._moved(func, args)
        try:
            out = self._fakes.run(func, args, kwargs, tensors)
        except _DATA_DEPENDENT as error:
            return self._data_dependent(func, args, kwargs, error)
        except _UNSUPPORTED as error:
            raise CaptureError(self._refusal(func, _ADVICE["operator"])) from error
        except RuntimeError as error:
            raise CaptureError(self._refusal(func, f"the operation itself failed: {error}")) from error
        if moved is not None:
            self._record_moved(func, args, moved)
        elif func.namespace != "prim":
            self._record(func, args, kwargs, out, tensors, mutated)
        return out

    def _data_dependent(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Result of an operation that must see values, where they are known.

        Raises:
            CaptureError: they are not, so it cannot be captured.
        """
        name = func._schema.name
        if name == "aten::index" and (plain := self._plain_indices(args[1])) is not None:
            return self.__torch_dispatch__(func, (), (args[0], plain), kwargs)
        if name == "aten::_local_scalar_dense" and self._trace.is_never(self.tensor_id(args[0])):
            return False
        tensors = list(flat_tensors((args, kwargs)))
        values = self._known(tensors)
        if values is None and name == "aten::_local_scalar_dense":
            return self._number_of_batch(func, args[0], error)
        if values is None:
            advice = _ADVICE.get(name.removeprefix("aten::"), _ADVICE["data"])
            raise CaptureError(self._refusal(func, advice)) from error
        with unset_fake_temporarily():
            real = dict(zip(map(id, tensors), values, strict=True))
            out = func(*_exchanged(args, real), **_exchanged(kwargs, real))
        if isinstance(out, (tuple, list)):
            return type(out)(map(self._constant_from, out))
        return self._constant_from(out) if isinstance(out, torch.Tensor) else out

    def _number_of_batch(self, func: Any, tensor: torch.Tensor, error: Exception) -> int | bool:
        """Truth or integer of this batch; records an operation that makes sure the next batches give the same.

        Where a model asks whether its numbers are still finite, they are, until that operation says otherwise.
        """
        if self._trace.is_draw(self.tensor_id(tensor)):
            raise CaptureError(self._refusal(func, _ADVICE["chance"])) from error
        values = None if tensor.dtype.is_floating_point else self._known([tensor], batch=True)
        healthy = values is None and self._trace.is_anomaly(self.tensor_id(tensor))
        if (values is None and not healthy) or self.phase is Phase.BACKWARD:
            raise CaptureError(self._refusal(func, _ADVICE["number"])) from error
        number: int | bool = False
        if values is not None:
            with unset_fake_temporarily():
                number = int(values[0]) if tensor.dtype is not torch.bool else bool(values[0])
        is_equal = self.__torch_dispatch__(torch.ops.aten.eq.Scalar, (), (tensor, number))
        message = f"expected a batch for which {self.place()} reads {number}, as captured; capture again for this one"
        if healthy:
            message = f"expected finite numbers in {self.place()}, found others, which the model would mend"
        self.__torch_dispatch__(_ASSERT, (), (is_equal, message))
        return number

    def _known(self, tensors: list[torch.Tensor], *, batch: bool = False) -> list[torch.Tensor] | None:
        """Real values of tensors that follow from constants, or with ``batch`` also from the batch; None if unknown."""
        ids = [self.tensor_id(t) for t in tensors]
        with unset_fake_temporarily():
            return self._trace.values(ids, batch=batch)

    def _plain_indices(self, indices: Any) -> list[torch.Tensor | None] | None:
        """Indices with known masks turned into positions, as the kernel itself takes them."""
        plain: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                plain.append(index)
                continue
            values = self._known([index])
            if values is None:
                return None
            with unset_fake_temporarily():
                positions = [column.contiguous() for column in values[0].nonzero().unbind(1)]
            plain.extend(map(self._constant_from, positions))
        return plain

    def _constant_from(self, real: torch.Tensor) -> torch.Tensor:
        """Make a fake tensor that stands for known values."""
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
        self._constant(fake, real)
        return fake

    def _check_real(self, func: Any, tensors: list[torch.Tensor], mutated: list[torch.Tensor]) -> None:
        """Refuse to train or write a tensor that nobody declared: such tensors are constants."""
        if any(not isinstance(t, FakeTensor) or storage_of(t) in self._real_storages for t in mutated):
            raise CaptureError(self._refusal(func, _ADVICE["attribute"]))
        if all(type(t) is FakeTensor or isinstance(t, FakeTensor) for t in tensors):
            return
        if torch.is_grad_enabled() and any(t.requires_grad and not isinstance(t, FakeTensor) for t in tensors):
            raise CaptureError(self._refusal(func, _ADVICE["trainable"]))

    def _moved(self, func: Any, args: Any) -> int | None:
        """Id of the tensor whose geometry the operation is about to change in place; None for any other operation."""
        return self.tensor_id(args[0]) if func._schema.is_mutable and moves_view(func) else None

    def _record_moved(self, func: Any, args: Any, before: int) -> None:
        """Record a view in place: nothing is written, but the tensor has another geometry from now on."""
        self._check_size(func, args[0].untyped_storage())
        after = self.tensor_id(args[0])
        if id(args[0]) in self._declared and after != before:
            raise CaptureError(self._refusal(func, _ADVICE["geometry"]))
        if self.views is not None:
            form, others = out_of_place(func), tuple(map(self._encode, args[1:]))
            view = (form, self._phase(), (Ref(before), *others), (), (before,), (after,), (after,), (), self._module())
            self.views.append((len(self.ops), Op(*view, OpKind.COPY)))

    def _check_size(self, func: Any, storage: torch.UntypedStorage) -> None:
        """Refuse an operation that changed the size of a storage."""
        number = self._storage_ids.get(storage._cdata)
        if number is None or self.storages[number].size_bytes != storage.nbytes():
            raise CaptureError(self._refusal(func, _ADVICE["memory"]))

    def _refusal(self, func: Any, advice: str) -> str:
        return f"cannot capture {func} in {self.place()}: {advice}"

    def place(self) -> str:
        """Name of the running module, for messages."""
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

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, read: list[torch.Tensor], mutated: list[torch.Tensor]
    ) -> None:
        is_random, module = self._is_random(func, args, kwargs), self._module()
        self._remember(module)
        if func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default):
            self._constant(out, args[0])
            return
        results = list(flat_tensors(out))
        self._note_reads(read)  # before what is made is seen to be new
        self._check_memory(func, results, mutated)
        new = [t for t in results if t.untyped_storage()._cdata not in self._storage_ids]
        is_view = not new and not mutated and func is not _ASSERT
        if is_view and self.views is None:
            return  # derived again from its storage wherever that lies
        call = (tuple(map(self._encode, args)), tuple((k, self._encode(v)) for k, v in sorted(kwargs.items())))
        inputs = tuple(dict.fromkeys(map(self.tensor_id, read)))
        if is_view:
            ids = tuple(map(self.tensor_id, results))
            view = Op(str(func), self._phase(), *call, inputs, ids, ids, (), module, OpKind.COPY)
            self.views.append((len(self.ops), view))  # pyright: ignore[reportOptionalMemberAccess]
            return
        if mutated and (functional := self._functional(func, args, kwargs, mutated)):
            func, new, mutated = functional, mutated, []
            del self._storage_ids[args[0].untyped_storage()._cdata]  # what it writes becomes a new storage
        for t in new:
            role = Role.GRADIENT if self.phase is Phase.BACKWARD else Role.ACTIVATION
            self._new_storage(t, f"{module or 'loss'}.{func.overloadpacket.__name__}.{len(self.ops)}", role)
        flat_out = list(out) if isinstance(out, (tuple, list)) else [out]
        new_ids = {id(t) for t in new}
        outputs, writes = tuple(dict.fromkeys(map(self.tensor_id, new))), tuple(map(self.tensor_id, mutated))
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

    def _check_memory(self, func: Any, made: list[torch.Tensor], mutated: list[torch.Tensor]) -> None:
        """Refuse results whose elements overlap, and writes that change the size of what they write."""
        for t in made:
            self._check_dense(func, t)
        for t in mutated:
            self._check_size(func, t.untyped_storage())

    def _is_random(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operation draws numbers.

        Raises:
            CaptureError: it does in backward, or it is of a kind that cannot be captured.
        """
        if func._schema.name in _OPAQUE:
            raise CaptureError(self._refusal(func, _ADVICE["opaque"]))
        is_random = draws(func, args, kwargs)
        if is_random and self.phase is Phase.BACKWARD:
            raise CaptureError(self._refusal(func, _ADVICE["again"]))
        if is_random:
            self._check_generator(func)
        return is_random

    def _check_generator(self, func: Any) -> None:
        """Check that the step has not set torch's generator: fake tensors draw no number, so it is as it was.

        Raises:
            CaptureError: it has.
        """
        with unset_fake_temporarily():
            if not torch.equal(torch.get_rng_state(), self._generator_state):
                raise CaptureError(self._refusal(func, _ADVICE["seeded"]))

    def _remember(self, module: str) -> None:
        """Remember which module the newest autograd node belongs to, for the operations of its backward."""
        if self.phase is Phase.FORWARD:
            newest = torch.autograd._get_sequence_nr() - 1  # pyright: ignore[reportPrivateImportUsage]
            self._node_modules.setdefault(newest, module)

    def _functional(self, func: Any, args: Any, kwargs: Any, mutated: list[torch.Tensor]) -> Any:
        """Run the out-of-place form of an in-place operation on a whole temporary, so that it can be recomputed.

        None where the operation must stay in place: it is random, writes only part of its storage, writes what lives on
        (a parameter, a buffer, the batch), or its out-of-place form gives another dtype.
        """
        target = mutated[0]
        storage = self.storages[self._storage_ids[target.untyped_storage()._cdata]]
        name, storage_bytes = func._schema.name.split("::")[1], target.untyped_storage().nbytes()
        if len(mutated) > 1 or target is not args[0] or draws(func, args, kwargs) or not name.endswith("_"):
            return None
        if (
            storage.role not in (Role.ACTIVATION, Role.GRADIENT)
            or target.numel() * target.element_size() != storage_bytes
        ):
            return None
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
        form = getattr(packet, func._overloadname, None) if func.namespace == "aten" and packet is not None else None
        if form is None:
            return None
        result = form(*args, **kwargs)
        is_like_target = (result.dtype, result.shape, result.stride()) == (target.dtype, target.shape, target.stride())
        return form if is_like_target else None

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
        """Register ``t`` as a constant with the values of ``real``, made from numbers or a module's plain attribute."""
        with unset_fake_temporarily():
            dense = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(real)
            data = torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage()).numpy().tobytes()
        self._new_storage(t, f"constant.{len(self.storages)}", Role.CONSTANT, data)

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether the values of a tensor are the same in every step."""
        return self._known([t]) is not None

    def has_read(self, t: torch.Tensor) -> bool:
        """Whether an operation took a tensor that nobody declared, which is alive still."""
        return id(t) in self._read_ids

    def lives_on(self, t: torch.Tensor) -> bool:
        """Whether a tensor views what was there before the step."""
        role = self.storages[self.tensors[self.tensor_id(t)].storage].role
        return role not in (Role.ACTIVATION, Role.GRADIENT)

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
        """Register a tensor nobody declared: a constant if its values are known.

        Raises:
            CaptureError: they are not known.
        """
        real = t.constant if isinstance(t, FakeTensor) else t
        if real is None:
            self._read_ids.add(id(t))
            raise CaptureError(
                f"{self.place()} uses a tensor of shape {tuple(t.shape)} that is neither a "
                "parameter, a buffer nor part of the batch; register it with register_buffer or pass it in the batch"
            )
        if isinstance(t, FakeTensor):
            self._read_ids.add(id(t))
            self._constant(t, real)
            return
        mode = detect_fake_mode()
        with unset_fake_temporarily():
            self._whole_constant(t)
        self._real_storages.add(storage_of(t))
        if mode is not None:  # operations see another tensor in its place, in whose memory views of it lie
            storage_of_fake = mode.from_tensor(t).untyped_storage()
            self._alive.append(storage_of_fake)
            self._storage_ids[storage_of_fake._cdata] = self._storage_ids[storage_of(t)]
            self._real_storages.add(storage_of_fake._cdata)

    def _note_reads(self, tensors: list[torch.Tensor]) -> None:
        """Take note of tensors nobody declared that the step reads, with what tells later whether they were written."""
        for t in tensors:
            if isinstance(t, FakeTensor) or id(t) in self._read_ids:
                continue
            self._read_ids.add(id(t))
            self.tensor_id(t)
            with unset_fake_temporarily():
                read = ReadTensor(weakref.ref(t), version_of(t), sample_of(t), self._said(t))
            self.read_tensors.append((t, read))

    def _said(self, t: torch.Tensor) -> str:
        return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}, read in {self.place()}"

    def _whole_constant(self, t: torch.Tensor) -> None:
        """Register the whole memory in which a tensor lies as a constant, since other views of it may be read, too.

        Raises:
            CaptureError: that is a large one, of which the tensor is a small part.
        """
        if t.is_conj() or t.is_neg() or t.layout is not torch.strided:
            self._constant(t, t)
            return
        storage = t.untyped_storage()
        if storage.nbytes() > max(_LIMIT_BYTES, 2 * t.numel() * t.element_size()):
            raise CaptureError(
                f"expected a constant with memory of its own ({self._said(t)}), found a view of "
                f"{format_bytes(storage.nbytes())}, all of which would be a constant of the step; clone() it"
            )
        data = torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy().tobytes()
        self._new_storage(t, f"constant.{len(self.storages)}", Role.CONSTANT, data)

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
        raise CaptureError(f"{self.place()}: an operation takes a {type(arg).__name__}; pass tensors and numbers only")

    def graph(
        self,
        fakes: Mapping[str, torch.Tensor],
        inputs: list[tuple[str, torch.Tensor]],
        losses: Mapping[str, torch.Tensor],
    ) -> StepGraph:
        """Make the StepGraph of all that was recorded, not yet folded."""
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
        graph = StepGraph(
            storages=tuple(storages),
            tensors=tuple(self.tensors),
            ops=tuple(self.ops),
            parameters=parameters,
            buffers=tuple(buffers.items()),
            inputs=(leaves,),
            losses=tuple(map(self.tensor_id, losses.values())),
            loss_names=tuple(losses),
        )
        graph.validate()
        _check_constants(graph)
        return graph

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


def _check_constants(graph: StepGraph) -> None:
    """Refuse a graph that writes a constant, which is there in every step as it was captured."""
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


def _exchanged(value: Any, real: Mapping[int, torch.Tensor]) -> Any:
    """Exchange each tensor among arguments for its real value."""
    if isinstance(value, torch.Tensor):
        return real[id(value)]
    if isinstance(value, dict):
        return {key: _exchanged(item, real) for key, item in value.items()}
    return type(value)(_exchanged(item, real) for item in value) if isinstance(value, (list, tuple)) else value


class Trace:
    """A recording so far (the tracer's own lists, read only), which answers what models ask while they run.

    Models ask for numbers: the largest of some positions, whether a mask masks anything. Where neither a parameter, a
    buffer nor a random number takes part, the answer is found by running the operations it depends on. From constants
    alone it is the same in every step; from the batch it is not, so whoever asks records a check.
    """

    def __init__(self, storages: list[Storage], tensors: list[Tensor], ops: list[Op]) -> None:
        self.storages, self.tensors, self.ops = storages, tensors, ops
        self.inputs: dict[int, torch.Tensor] = {}

    def values(self, wanted: Sequence[int], *, batch: bool = False) -> list[torch.Tensor] | None:
        """Compute real values of graph tensors; None if they are not known. To be called with no mode active.

        Args:
            batch: Whether values that follow from the batch at hand will do.
        """
        answer = answer_of(self.storages, self.tensors, self.ops, wanted, self.inputs if batch else ())
        return None if answer is None else answer.values(self.inputs)

    def is_never(self, tensor: int) -> bool:
        """Whether a tensor asks if a number drawn from [0, 1) lies below zero: a layer that is never dropped."""
        writer = self._writer(tensor)
        limit = None if writer is None or len(writer.args) < 2 else writer.args[1]
        return self.is_draw(tensor) and isinstance(limit, (int, float)) and limit <= 0

    def is_anomaly(self, tensor: int) -> bool:
        """Whether a tensor asks if any number is infinite or not a number, which models do to mend it."""
        writer = self._writer(tensor)
        if writer is None or writer.name not in _JOINING or not writer.inputs:
            return False
        return writer.name in _ANOMALIES or all(map(self.is_anomaly, writer.inputs))

    def is_draw(self, tensor: int) -> bool:
        """Whether a tensor asks if a number drawn from [0, 1) lies below a limit."""
        writer = self._writer(tensor)
        if writer is None or writer.name != "aten.lt.Scalar":
            return False
        drawn = self._writer(writer.inputs[0])
        return drawn is not None and drawn.name in _UNIT_DRAWS

    def _writer(self, tensor: int) -> Op | None:
        storage = self.tensors[tensor].storage
        for op in reversed(self.ops):
            if any(self.tensors[t].storage == storage for t in (*op.outputs, *op.mutates)):
                return op
        return None


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return True


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors among the arguments that the operation writes, as its schema says or hides."""
    name = func._schema.name.removeprefix("aten::")
    if name in _HIDDEN_BUFFERS and args[_HIDDEN_BUFFERS[name]]:
        return [t for t in args[3:5] if t is not None]
    if not func._schema.is_mutable or moves_view(func):
        return []
    values: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return list(flat_tensors(values))


def moves_view(func: Any) -> bool:
    """Whether the operation gives its first argument another geometry and writes no element (``transpose_``)."""
    return torch.Tag.inplace_view in func.tags


def out_of_place(func: Any) -> str:
    """Name of the operation that returns a new view where ``func`` changes its argument."""
    name = func.overloadpacket.__name__.removesuffix("_")
    return f"aten.{name}.{'int' if name == 'transpose' else func._overloadname}"


def op_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOP of ``func(*args, **kwargs)``; 0 for operations that are not products or attention.

    Attention counts the full square of scores, causal or not, as torch's counter does.
    """
    packet = func.overloadpacket
    if func._schema.name in _FORWARD:
        return _attention_flops(args[0], args[1], args[2], of_queries=1, of_values=1)
    if func._schema.name in _BACKWARD:
        return _attention_flops(args[1], args[2], args[3], of_queries=3, of_values=2)
    if packet is getattr(_ATEN, "_grouped_mm", None):
        rows, inner = args[0].shape[-2:]
        return 2 * int(rows) * int(inner) * int(args[1].shape[-1])
    if packet is _ATEN.convolution_backward and args[9] > 1:  # torch's own formula counts every pair of channels
        flops = 2 * args[0].numel() * args[2][0].numel()
        return flops * sum(args[10][:2])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def _attention_flops(q: Any, k: Any, v: Any, *, of_queries: int, of_values: int) -> int:
    """FLOP of products that pair every query with every key, as many as said along a width of q and along one of v.

    Keys and values may have fewer heads than queries, which torch's own counter refuses before 2.13.

    Args:
        q: Queries of shape (batch, heads, length, width); ``k`` and ``v`` likewise.
    """
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return 2 * int(pairs) * (of_queries * int(q.shape[3]) + of_values * int(v.shape[3]))
