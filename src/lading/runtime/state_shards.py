"""Pieces of one tensor that lie on one rank, for ``torch.distributed.checkpoint``: any regions, on any ranks.

What a rank has of an elementwise state is a region of its parameter, or several: so a checkpoint knows the state by the
parameter's name and shape, whoever held which part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lading.errors import ConfigError
from lading.ir.routes import ShardRegion


class Pieces(torch.Tensor):
    """A tensor of which this rank has some regions; for saving and loading, not for arithmetic."""

    parts: dict[ShardRegion, torch.Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, parts: Mapping[ShardRegion, torch.Tensor]) -> Pieces:
        """Make one of a tensor of ``shape``; parts have their region's shape, and share memory with what is saved."""
        first = next(iter(parts.values()))
        wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        assert isinstance(wrapper, Pieces)
        wrapper.parts = dict(parts)
        return wrapper

    def __init__(self, shape: torch.Size, parts: Mapping[ShardRegion, torch.Tensor]) -> None:
        """Do nothing: ``__new__`` has made it."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Pieces({tuple(self.shape)}, {sorted(self.parts)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Pieces:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Pieces, (self.shape, self.parts)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copy it, as checkpoints that save while training goes on do; refuse to compute anything with it."""
        if func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
            return Pieces(args[0].shape, {region: func(part) for region, part in args[0].parts.items()})
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            parts = args[0].parts.items()
            return Pieces(
                args[0].shape, {region: part.new_empty(part.shape, **(kwargs or {})) for region, part in parts}
            )
        raise NotImplementedError(f"{func}: expected a whole tensor, got pieces of one; load them by a checkpoint")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(region.offset)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(region), properties=TensorProperties.create_from_tensor(part), size=self.shape
                ),
            )
            for region, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(region) for region in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for region, part in self.parts.items():
            if torch.Size(region.offset) == index.offset:
                return part
        raise ValueError(f"{index.fqn}: expected a piece at one of {sorted(self.parts)}, asked for {index.offset}")


def _chunk(region: ShardRegion) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(region.offset), sizes=torch.Size(region.shape))


def check_states(name: str, into: Mapping[str, torch.Tensor], of: Mapping[str, torch.Tensor] | None) -> None:
    """Make sure that ``of`` has the states to be copied into ``into``.

    Raises:
        ConfigError: other states, or of other shapes, or other pieces.
    """
    if of is None or set(of) != set(into):
        found_keys = "nothing" if of is None else ", ".join(sorted(of))
        raise ConfigError(f"the states of {name}: expected {', '.join(sorted(into))}, found {found_keys}")
    for key, tensor in into.items():
        if tuple(of[key].shape) != tuple(tensor.shape):
            raise ConfigError(f"{name}: expected {key} of shape {tuple(tensor.shape)}, got {tuple(of[key].shape)}")
        regions = [sorted(state.parts) if isinstance(state, Pieces) else "all of it" for state in (tensor, of[key])]
        if regions[0] != regions[1]:
            raise ConfigError(
                f"{name}: expected {regions[0]} of {key}, got {regions[1]}; states of another way of reducing "
                "gradients or another plan come by torch.distributed.checkpoint"
            )


def take_over(into: torch.Tensor, of: torch.Tensor) -> None:
    """Copy one state from ``of``, which ``check_states`` has accepted."""
    if isinstance(into, Pieces) and isinstance(of, Pieces):
        for region, part in into.parts.items():
            part.copy_(of.parts[region])
    else:
        into.copy_(of)
