"""Moments: bytes on a device and in the tiers behind it when a run is most in need of them, five moments in all.

[Note: what PyTorch does]
Read in torch 2.13 (torch/distributed/checkpoint). To *start*, parameters are made on the meta device and filled, and
the optimizer's states are made by a first update with gradients of zeros (``_init_optim_state`` in state_dict.py), so
that parameters, all their gradients and the states are there at once, however short a time a step has all gradients. To
*save* in pieces (``dcp.save``), a rank copies its tensors to the host one after another, 10 MB ahead of what is written
(``per_thread_copy_ahead`` of FileSystemWriter); with ``dcp.async_save`` a copy of all of them is made in host memory
before training goes on (staging.py, ``StateDictStager``). To save whole (``full_state_dict`` with ``cpu_offload``),
every parameter and state is gathered on the device, one at a time, and the first rank keeps all of them on the host
(_state_dict_utils.py, ``ranks_only``), each once however many ranks have it. Gradients are there meanwhile: torchtitan
drops them when the next step begins (train.py, ``train_step`` at 000204a), Megatron-LM has buffers for good. To
*resume*, the states are made as at the start, then pieces are read into tensors on the host, one at a time, and copied
into the states that are there (``FileSystemReader.read_data``); a whole checkpoint is read on the first rank and sent
out tensor by tensor (``broadcast_from_rank0``).

[Note: what Megatron-LM does]
Its writer of torch's format copies all that a rank writes to the host before it writes any of it, also when it does not
go on training (megatron/core/dist_checkpointing/strategies/filesystem_async.py at 00caa53, ``preload_tensors``). It is
read as torch reads, into the states that are there (strategies/torch.py, ``TorchDistLoadShardedStrategy.load``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.graph import Role

MOMENTS = ("start", "step", "longest", "save", "resume")
SAVES = ("sharded", "async", "gathered")
#: What a checkpoint has.
_SAVED = (Role.PARAMETER, Role.OPTIMIZER_STATE)
#: Of ``FileSystemWriter``, copied ahead of what is written.
_AHEAD_BYTES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """Bytes that one rank of a pipeline stage holds.

    Attributes:
        roles: Bytes by role at the peak of a step.
        gradient_bytes: Bytes of all gradients that the rank keeps on the device, at once.
        longest_bytes: Bytes at the peak of a step of the longest batch.
        piece_bytes: Bytes of the largest state of one parameter that the rank keeps.
        whole_bytes: Bytes of that state gathered.
        stage_bytes: Bytes of all parameters and states of the stage, each once.
        shares: Devices whose parts of the host's memory the rank has to itself that keeps a whole checkpoint.
        host_tier: Name of the tier that checkpoints are copied to, the host's memory; "" where nothing is known of it.
        behind_tier: Name of the tier that something lies in between uses; "" where nothing does.
        lower_tier_roles: Bytes by role of what lies there.
        stages_all: Checkpoints are copied to the host whole before they are written ([Note: what Megatron-LM does]).
    """

    roles: Mapping[Role, int]
    gradient_bytes: int
    longest_bytes: int
    piece_bytes: int
    whole_bytes: int
    stage_bytes: int
    shares: float = 1.0
    host_tier: str
    behind_tier: str = ""
    lower_tier_roles: Mapping[Role, int] = field(default_factory=lambda: {})
    stages_all: bool = False


def moments_of(held: RankBytes, save: str = "sharded") -> dict[str, dict[str, int]]:
    """Count the bytes of a rank by moment and tier ([Note: what PyTorch does]).

    Args:
        save: How checkpoints are written: "sharded" in pieces, "async" in pieces beside training, "gathered" whole.
    Raises:
        ConfigError: no such way.
    """
    if save not in SAVES:
        raise ConfigError(f"expected checkpoints that are {', '.join(SAVES)}, got {save!r}")
    device_states = _saved(held.roles)
    states = device_states + max(held.gradient_bytes, held.roles.get(Role.GRADIENT, 0))
    whole = ceil(held.stage_bytes / held.shares)
    every = device_states + (_saved(held.lower_tier_roles) if held.behind_tier == held.host_tier else 0)
    pieces = device_states if held.stages_all else min(device_states, held.piece_bytes + _AHEAD_BYTES)
    piece = held.whole_bytes if save == "gathered" else 0
    device = {
        "start": states,
        "step": sum(held.roles.values()),
        "longest": held.longest_bytes,
        "save": states + piece,
        "resume": states + piece,
    }
    copied = {
        "start": held.piece_bytes,
        "save": {"sharded": pieces, "async": every, "gathered": whole}[save],
        "resume": whole if piece else 2 * held.piece_bytes,
    }
    return {moment: {DEVICE: device[moment], **_lower_tier_bytes(held, copied.get(moment, 0))} for moment in MOMENTS}


def _lower_tier_bytes(rank_bytes: RankBytes, copied_bytes: int) -> dict[str, int]:
    """Add up bytes by tier behind the device: copies in the host's memory, and what lies behind it between uses."""
    tiers = {rank_bytes.host_tier: copied_bytes} if rank_bytes.host_tier else {}
    if rank_bytes.behind_tier:
        tiers[rank_bytes.behind_tier] = tiers.get(rank_bytes.behind_tier, 0) + sum(rank_bytes.lower_tier_roles.values())
    return tiers


def _saved(roles: Mapping[Role, int]) -> int:
    return sum(roles.get(role, 0) for role in _SAVED)


def binding(peaks: Mapping[str, Mapping[str, int]], room_bytes: Mapping[str, int]) -> tuple[str, str, float]:
    """Name the need nearest to its room, or farthest over it: (moment, tier, share of the room).

    Args:
        peaks: Bytes needed by moment and tier, the device among them.
        room_bytes: Bytes that there are by tier; one that is not there, or 0, binds nothing.
    """
    shares = [
        (moment, tier, needed / room_bytes[tier])
        for moment in MOMENTS
        for tier, needed in peaks[moment].items()
        if room_bytes.get(tier)
    ]
    return max(shares, key=lambda row: row[2])


def over_bytes(peaks: Mapping[str, Mapping[str, int]], room_bytes: Mapping[str, int]) -> int:
    """Bytes by which the binding need is over its room; 0 or less where all fit."""
    moment, tier, _ = binding(peaks, room_bytes)
    return peaks[moment][tier] - room_bytes[tier]
