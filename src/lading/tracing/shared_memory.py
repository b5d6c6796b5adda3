"""Memory that parameters and buffers of a model share, or tensors of a batch, where a step changes one of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lading.errors import CaptureError
from lading.ir.graph import StepGraph
from lading.tracing.batches import input_leaves


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the storage that a tensor is in, of a fake tensor too."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  torch has no public one


def check_apart(
    model: torch.nn.Module, batch: Any, graph: StepGraph, constants: Sequence[tuple[str, torch.Tensor]] = ()
) -> None:
    """Refuse parameters and buffers, or entries of a batch, with elements in common, as a plan has each in its place.

    One object under several names is one parameter. What no step changes may be shared. Warns of a batch that the step
    changes in place.

    Args:
        constants: Tensors that the step read as such, with what to call them.

    Raises:
        CaptureError: the step changes one of them, and names both; or one is expanded, so that its elements are one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(length > 1 and not stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CaptureError(
                f"{name}: expected memory of its own for each element, found an expanded tensor, whose strides are "
                f"{tuple(tensor.stride())}; register its contiguous()"
            )
    written = {graph.storage_of(tensor) for op in graph.ops for tensor in op.mutates}
    changed = {name for p in graph.parameters if p.gradient is not None for name in p.names}
    changed |= {name for name, tensor in graph.buffers if graph.storage_of(tensor) in written}
    if pair := _changed_pair((*model.named_parameters(), *model.named_buffers()), changed):
        raise CaptureError(
            f"{pair[1]}: expected memory of its own, found elements of {pair[0]} in it, so that a step changes both by "
            "changing either; give both modules the same Parameter, which ties them (b.weight = a.weight, not .data), "
            "or clone() one"
        )
    if pair := _changed_pair((*model.named_parameters(), *model.named_buffers(), *constants), changed):
        name, constant = sorted(pair, key=lambda tensor_name: tensor_name not in changed)
        raise CaptureError(
            f"expected a constant of the step ({constant}), found the memory of {name}, which the step changes, by "
            f"another name (.data, .detach(), a view): read the model's {name} where it is used, or clone() it"
        )
    changed = {name for name, tensor in graph.inputs[0] if graph.storage_of(tensor) in written}
    if changed and (pair := _changed_pair(input_leaves(batch), changed)):
        raise CaptureError(
            f"batch entry {pair[1]!r}: expected memory of its own, as the step changes {min(changed)!r} in place, "
            f"found elements of {pair[0]!r} in it; clone() one, or change it out of place"
        )
    if changed:
        warnings.warn(
            f"the step changes batch entry {min(changed)!r} in place: a planned step changes its own copy, so what you "
            "give keeps its values, where plain PyTorch would leave others in it; change it out of place, if you read "
            "it or give it again after the step",
            stacklevel=4,
        )


def _changed_pair(named: Iterable[tuple[str, torch.Tensor]], changed: set[str]) -> tuple[str, str] | None:
    """Find two tensors with elements in common of which one is changed."""
    sharing: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if tensor.numel() and tensor.layout is torch.strided:
            sharing.setdefault(storage_of(tensor), []).append((name, tensor))
    for members in sharing.values():
        ordered = sorted(members, key=lambda member: _extent(member[1])[0])
        for index, (name, tensor) in enumerate(ordered):
            for other_name, another in ordered[index + 1 :]:
                if _extent(another)[0] >= _extent(tensor)[1]:
                    break
                if not changed.isdisjoint((name, other_name)) and _overlap(tensor, another):
                    return name, other_name
    return None


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a storage have elements in common."""
    (low, high), (begin, end) = _extent(one), _extent(other)
    if max(low, begin) >= min(high, end):
        return False
    if one.element_size() != other.element_size() or all(tensor.is_contiguous() for tensor in (one, other)):
        return True
    start = min(low, begin) // one.element_size()
    is_covered = torch.zeros(max(high, end) // one.element_size() - start, dtype=torch.bool)
    is_covered.as_strided(one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(is_covered.as_strided(other.shape, other.stride(), other.storage_offset() - start).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.element_size()
    return low, low + (last + 1) * tensor.element_size()
