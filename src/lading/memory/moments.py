"""Moments: bytes on a device and in its host's memory when a run is most in need of them, five moments in all.

[Note: what PyTorch does]
Read in torch 2.13 (torch/distributed/checkpoint). To *start*, parameters are made on the meta device and filled, and
the optimizer's states are made by a first update with gradients of zeros (``_init_optim_state`` in state_dict.py), so
that all three are there at once. To *save* in pieces (``dcp.save``), a rank copies its tensors to the host one after
another, 10 MB ahead of what is written (``per_thread_copy_ahead`` of FileSystemWriter); with ``dcp.async_save`` all of
them lie in pinned host memory before training goes on (staging.py, ``use_pinned_memory``). To save whole
(``full_state_dict`` with ``cpu_offload``), every parameter and state is gathered on the device, one at a time, and the
first rank keeps all of them on the host (_state_dict_utils.py). To *resume*, pieces are read into tensors on the host,
one at a time, and copied into the states that are already there (``FileSystemReader.read_data``); a whole checkpoint is
read on the first rank and sent out tensor by tensor (``broadcast_from_rank0``). Gradients stay between steps where a
stack keeps a buffer for them; FSDP frees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lading.errors import ConfigError
from lading.ir.graph import Role

MOMENTS = ("start", "step", "longest", "save", "resume")
SAVES = ("sharded", "async", "gathered")
_STATES = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
#: Of ``FileSystemWriter``, copied ahead of what is written.
_AHEAD_BYTES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank of a pipeline stage holds.

    Attributes:
        roles: Bytes by role at the peak of a step.
        longest_bytes: Of the peak of a step of the longest batch.
        piece_bytes: Of the largest state of one parameter that the rank keeps.
        whole_bytes: Of that state gathered.
        ranks: That share the stage's states: what one of them gathers is so many times its own, at most.
        host_bytes: Of what lies on the host all the time.
    """

    roles: Mapping[Role, int]
    longest_bytes: int
    piece_bytes: int
    whole_bytes: int
    ranks: int
    host_bytes: int = 0


def moments_of(held: Held, save: str = "sharded") -> dict[str, dict[str, int]]:
    """Bytes of a rank by moment and tier ([Note: what PyTorch does]).

    Args:
        save: How checkpoints are written: "sharded" in pieces, "async" in pieces beside training, "gathered" whole.
    Raises:
        ConfigError: no such way.
    """
    if save not in SAVES:
        raise ConfigError(f"expected checkpoints that are {', '.join(SAVES)}, got {save!r}")
    states = sum(held.roles.get(role, 0) for role in _STATES)
    kept = states - held.roles.get(Role.GRADIENT, 0)
    every, gathered = kept + held.host_bytes, save == "gathered"
    piece = held.whole_bytes if gathered else held.piece_bytes
    host = {"sharded": min(kept, held.piece_bytes + _AHEAD_BYTES), "async": every, "gathered": every * held.ranks}
    read = every * held.ranks if gathered else 2 * held.piece_bytes
    there = held.host_bytes
    return {
        "start": {"device": states, "host": there + held.piece_bytes},
        "step": {"device": sum(held.roles.values()), "host": there},
        "longest": {"device": held.longest_bytes, "host": there},
        "save": {"device": states + (piece if gathered else 0), "host": there + host[save]},
        "resume": {"device": states + (piece if gathered else 0), "host": there + read},
    }


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a device and its host have for a run.

    Attributes:
        device_bytes: For tensors; ``host_bytes``: of the host, for this device; 0 where it is not known.
    """

    device_bytes: int
    host_bytes: int = 0


def binding(peaks: Mapping[str, Mapping[str, int]], room: Room) -> tuple[str, str, float]:
    """(moment, tier, share of the room) of the need that comes nearest to it, or is farthest over."""
    sizes = {"device": room.device_bytes, "host": room.host_bytes}
    found = [
        (moment, tier, needed / sizes[tier])
        for moment in MOMENTS
        for tier, needed in peaks[moment].items()
        if sizes.get(tier)
    ]
    return max(found, key=lambda row: row[2])


def over_bytes(peaks: Mapping[str, Mapping[str, int]], room: Room) -> int:
    """Bytes by which the binding need is over its room; 0 or less where all fit."""
    moment, tier, _ = binding(peaks, room)
    return peaks[moment][tier] - (room.device_bytes if tier == "device" else room.host_bytes)
