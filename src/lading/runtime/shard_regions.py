"""Regions: this rank's regions of tensors that are sharded, and the ranks that hold the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lading.errors import ConfigError
from lading.ir.routes import ShardRegion


def shared_mesh(mesh: DeviceMesh | None, params: Sequence[torch.Tensor]) -> DeviceMesh | None:
    """Mesh of all ranks that hold parameters; None where they have none, so that it is all ranks.

    Args:
        mesh: Mesh that the user gives; None for the largest of the parameters'.
    Raises:
        ConfigError: this rank or some parameter lies outside it, or its dims have no names.
    """
    meshes = list(dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor)))
    requested, mesh = mesh, mesh or max(meshes, key=lambda m: m.size(), default=None)
    if mesh is None:
        return None
    ranks = set(mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise ConfigError(f"expected a mesh with this rank, {dist.get_rank()}, got mesh= of ranks {sorted(ranks)}")
    for other_mesh in meshes:
        if outside := sorted(set(other_mesh.mesh.flatten().tolist()) - ranks):
            raise ConfigError(
                f"expected parameters on ranks of mesh= {sorted(ranks)}, found some on {outside}, too"
                if requested is not None
                else "the parameters' meshes do not lie in one of them; give mesh=, the ranks that share the work"
            )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ConfigError("expected a mesh whose dims have names; give init_device_mesh mesh_dim_names")
    return mesh


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    """Numbers of a mesh's ranks within the job; without a mesh of all ranks, or of this process alone."""
    if mesh is not None:
        with unset_fake_temporarily():  # a model may be cut on fake tensors, its mesh is real
            return mesh.mesh.flatten().tolist()
    return list(range(dist.get_world_size())) if dist.is_initialized() else [0]


def process_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Process group of a mesh, flattened where it has several dims; None for all ranks."""
    if mesh is None:
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def region_of(param: torch.Tensor) -> ShardRegion:
    """Region of a parameter that lies on this rank: its offset and shape within the whole."""
    if not isinstance(param, DTensor):
        return ShardRegion((0,) * param.ndim, tuple(param.shape))
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return ShardRegion(tuple(offset), tuple(shape))


def piece(tensor: torch.Tensor, region: ShardRegion) -> torch.Tensor:
    """Piece of a tensor on this rank, in the shape of its region, which FSDP2 and DTensors without elements lack."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local if local.shape == region.shape else local.reshape(region.shape)


def gradient(param: torch.Tensor, region: ShardRegion) -> torch.Tensor | None:
    """Piece of a parameter's gradient on this rank, sharded as the parameter is; None without a gradient."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return None if grad is None else piece(grad, region)
