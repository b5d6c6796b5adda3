"""Layout: how a training step is spread over devices; prints and parses as ``dp64,tp8,cp2,pp16,mb1,gb2048``."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from lading.errors import ConfigError, did_you_mean

PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
RECOMPUTES = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe-v")
OFFLOADS = ("parameters", "optimizer", "activations")
#: Axes along which ranks lie, the farthest first: neighbours differ along the last. Data is spread over two of them:
#: ranks along "shard" cut between them what ZeRO cuts, ranks along "replicate" have the same.
AXES = ("pp", "replicate", "shard", "cp", "tp")
#: Axes of the ranks that cut between them what ZeRO cuts: those that share a sequence do, too.
SHARDED = ("shard", "cp")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Spread of a training step over ``tp * cp * pp * dp`` devices.

    Attributes:
        dp: Replicas that see different data.
        tp, cp, pp: Ways of tensor, context and pipeline parallel.
        ep: Ways over which experts are spread, inside dp * cp (and tp, where experts are not cut: ``etp`` 1).
        etp: Ways an expert itself is cut; 0 means as ``tp``.
        vpp: Model chunks of a pipeline rank.
        sp: Sequence parallel: norms and dropouts are cut over tp ranks along the tokens.
        zero: 0 replicas, 1 optimizer states cut, 2 gradients too, 3 parameters too (FSDP). In a pipeline 2 and 3 are
            the same: gathered once a step, reduced once ([Note: sharded in a pipeline] in lading.program.emit).
        shard: Ranks over which ``zero`` cuts; 0 means all of dp * cp. Smaller is hybrid (HSDP).
        cp_comm: How keys and values meet: "ring", "all_gather" or "all_to_all" (over heads).
        micro_batch: Sequences of a micro-batch of one replica.
        global_batch: Sequences of a step.
        schedule: Order of a pipeline's micro-batches.
        recompute: "none", "selective" (attention's core), or "full".
        recompute_layers: With "full", how many layers of a chunk of a rank are recomputed; -1 all.
        recompute_modules: With "selective", parts of a block recomputed instead of attention's core, by module name.
        offload: States that lie behind the device between uses: "optimizer" (states; the host's processors update
            them), "parameters" (their pieces, with the optimizer's states) or "activations" (what blocks keep for
            backward).
        offload_layers: Blocks of a chunk of a rank whose activations are moved; 0 for all but the last.
        offload_to: Name of a tier of the machine; "" for the nearest that the host's processors work on.
        bucket_bytes: Bytes of gradients that are reduced together, where that runs beside backward; 0 for a block each.
        precision: Number format of products; states and reductions have their own rules in the software stack.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1
    sp: bool = False
    zero: int = 0
    shard: int = 0
    cp_comm: str = "ring"
    micro_batch: int = 1
    global_batch: int = 0
    schedule: str = "1f1b"
    recompute: str = "none"
    recompute_layers: int = -1
    recompute_modules: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    offload_layers: int = 0
    offload_to: str = ""
    bucket_bytes: int = 0
    precision: str = "bf16"

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "cp", "pp", "ep", "vpp", "micro_batch"):
            if getattr(self, key) < 1:
                raise ConfigError(f"layout: {key} must be >= 1, got {getattr(self, key)}")
        for key, allowed in (("precision", PRECISIONS), ("recompute", RECOMPUTES), ("schedule", SCHEDULES)):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"layout: {key} must be one of {', '.join(allowed)}, got {getattr(self, key)!r}")
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"layout: zero must be 0, 1, 2 or 3, got {self.zero}")
        self._check_offload()
        if self.bucket_bytes < 0 or (self.bucket_bytes and self.zero >= (2 if self.is_pipeline else 3)):
            raise ConfigError(
                f"layout: bucket_bytes must be >= 0, and 0 where parameters are cut, whose groups are reduced; got "
                f"{self.bucket_bytes} with zero{self.zero}"
            )
        if self.zero and (self.dp * self.cp) % self.sharding_ranks:
            raise ConfigError(
                f"layout: expected shard to divide dp {self.dp} x cp {self.cp}, got {self.shard}; each replica has as "
                "many shards"
            )
        if self.global_batch and self.global_batch % (self.dp * self.micro_batch):
            raise ConfigError(
                f"layout: a global batch of {self.global_batch} is no multiple of dp {self.dp} x micro-batch "
                f"{self.micro_batch}"
            )
        if (self.dp * self.cp * self.tp) % (self.ep * (self.expert_tp)):
            raise ConfigError(
                f"layout: experts cut {self.ep} x {self.expert_tp} ways do not divide dp {self.dp} x cp {self.cp} x "
                f"tp {self.tp}"
            )

    def _check_offload(self) -> None:
        if unknown := [word for word in self.offload if word not in OFFLOADS]:
            raise ConfigError(f"layout: offload must be of {', '.join(OFFLOADS)}, joined by '+', got {unknown[0]!r}")
        if "parameters" in self.offload and self.zero != 3:
            raise ConfigError(
                f"layout: offload=parameters moves pieces of cut parameters: expected zero3, got zero{self.zero}"
            )
        if self.offload_layers and "activations" not in self.offload:
            raise ConfigError(
                "layout: offload_layers says how many blocks' activations move: expected offload=activations"
            )
        if self.offload_layers < 0:
            raise ConfigError(f"layout: offload_layers must be >= 0, got {self.offload_layers}")
        if self.offload_to and not self.offload:
            raise ConfigError(
                f"layout: offload_to={self.offload_to} moves nothing by itself: expected offload= beside it"
            )

    @property
    def updates_on_host(self) -> bool:
        """Whether the host's processors run the optimizer: its states lie there, with or without the parameters."""
        return "optimizer" in self.offload or "parameters" in self.offload

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def expert_tp(self) -> int:
        """Number of ways in which an expert is cut."""
        return self.etp or self.tp

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each replica in a step."""
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def is_pipeline(self) -> bool:
        """Whether the model runs as stages, on one device or several."""
        return self.pp > 1 or self.vpp > 1

    @property
    def cuts_parameters(self) -> bool:
        """Whether a rank keeps only its shard of parameters between steps; in a pipeline with zero 2 as with 3."""
        return self.zero == 3 or (self.zero == 2 and self.is_pipeline)

    @property
    def sharding_ranks(self) -> int:
        """Number of ranks over which ``zero`` cuts states."""
        return self.shard or self.dp * self.cp

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each of ``AXES``; ranks that share a sequence (cp) cut what ZeRO cuts, too."""
        shards = max(1, self.sharding_ranks // self.cp) if self.zero else 1
        return {"pp": self.pp, "replicate": self.dp // shards, "shard": shards, "cp": self.cp, "tp": self.tp}

    @property
    def shards(self) -> int:
        """Number of ranks that a run cuts between them what ZeRO cuts; 1 where nothing is cut."""
        return self.axes["shard"] * self.cp if self.zero else 1

    def place(self, rank: int) -> dict[str, int]:
        """Number of a rank along each of ``AXES``."""
        place: dict[str, int] = {}
        for axis, count in reversed(self.axes.items()):
            rank, place[axis] = divmod(rank, count)
        return place

    def replica(self, rank: int) -> int:
        """Number of the replica, of ``dp``, that a rank belongs to: all its ranks compute on the same batch."""
        place = self.place(rank)
        return place["replicate"] * self.axes["shard"] + place["shard"]

    def group(self, rank: int, over: str) -> tuple[int, ...]:
        """Ranks, in order, that a collective over some axes joins with this one: all other axes are as its own.

        Args:
            over: Axes joined by "/", as ``across`` has them.
        """
        mine, joined = self.place(rank), over.split("/")
        fixed_axes = [axis for axis in AXES if axis not in joined]
        return tuple(
            peer for peer in range(self.devices) if all(self.place(peer)[axis] == mine[axis] for axis in fixed_axes)
        )

    def across(self, *axes: str) -> tuple[tuple[str, int | str], ...]:
        """Say over which ranks a collective of a step goes: its axes of several ranks, and how many ranks of all."""
        several = [axis for axis in AXES if axis in axes and self.axes[axis] > 1]
        ranks = prod(self.axes[axis] for axis in several)
        return ("over", "/".join(several)), ("ranks", ranks), ("of", self.devices)

    def __str__(self) -> str:
        texts = [
            _text(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return ",".join(texts) or "dp1"


#: Layout of a step that one device runs.
ALONE = Layout()
_SHORT = {"micro_batch": "mb", "global_batch": "gb"}
_LONG = {short: name for name, short in _SHORT.items()}
_WORDS = ("cp_comm", "recompute_modules", "offload", "offload_to")
_NUMBERS = ("recompute_layers", "offload_layers", "bucket_bytes")
_COUNTS = ("dp", "tp", "cp", "pp", "ep", "etp", "vpp", "zero", "shard", "mb", "gb")


def _text(name: str, value: bool | int | str | tuple[str, ...]) -> str:
    if name == "sp":
        return "sp"
    if name in ("precision", "schedule"):
        return str(value)
    if name == "recompute":
        return f"recompute={value}"
    if name in (*_WORDS, *_NUMBERS):
        return f"{name}={'+'.join(map(str, value)) if isinstance(value, tuple) else value}"
    return f"{_SHORT.get(name, name)}{value}"


def parse_layout(text: str, devices: int = 0) -> Layout:
    """Parse a layout as ``str`` prints it; a part is ``tp8``, ``sp``, a precision, a schedule, or ``key=value``.

    Args:
        devices: If not 0 and the text has no ``dp``, there are as many replicas as fill so many devices.
    Raises:
        ConfigError: a part is not known or means nothing, the layout cannot be, or it takes another number of devices.
    """
    fields: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        read = _part(part)
        if repeated := fields.keys() & read.keys():
            raise ConfigError(f"layout: expected {repeated.pop()} once, got it twice in {text}; leave one out")
        fields.update(read)
    if fields.get("shard") and not fields.get("zero"):
        raise ConfigError(
            f"layout: shard says over how many ranks zero cuts: expected zero1, zero2 or zero3 beside it, got {text}"
        )
    replica_ranks = prod(int(fields.get(axis, 1)) for axis in ("tp", "cp", "pp"))
    if not devices and (replica_ranks // int(fields.get("pp", 1))) % int(fields.get("ep", 1)):
        fields.setdefault("dp", fields["ep"])  # experts lie on ranks of several replicas
    if devices and devices % (replica_ranks * int(fields.get("dp", 1))) == 0:
        fields.setdefault("dp", devices // replica_ranks)
    if devices and replica_ranks * int(fields.get("dp", 1)) != devices:
        remedy = (
            "leave dp out"
            if "dp" in fields and not devices % replica_ranks
            else f"{devices} is no multiple of {replica_ranks}"
        )
        raise ConfigError(
            f"expected a layout of {devices} devices, got {text or 'dp1'}, which takes {replica_ranks} for a replica; "
            f"change the number of devices, or the layout: {remedy}"
        )
    return Layout(**fields)


def _part(part: str) -> dict[str, object]:
    if part == "sp":
        return {"sp": True}
    if part in PRECISIONS:
        return {"precision": part}
    if part in SCHEDULES:
        return {"schedule": part}
    if "=" in part:
        key, value = part.split("=", 1)
        if key in _NUMBERS and re.fullmatch(r"-?\d+", value):
            return {key: int(value)}
        if key in ("recompute_modules", "offload"):
            return {key: tuple(value.split("+"))}
        if key in ("recompute", "cp_comm", "offload_to"):
            return {key: value}
    match = re.fullmatch(r"([a-z]+)(\d+)", part)
    if match and match[1] in _COUNTS:
        return {_LONG.get(match[1], match[1]): int(match[2])}
    known_parts = [*_COUNTS, "sp", *PRECISIONS, *SCHEDULES, *(f"{key}=" for key in ("recompute", *_WORDS, *_NUMBERS))]
    hint = did_you_mean(part.rstrip("0123456789"), known_parts)
    raise ConfigError(f"layout: expected parts such as tp8, pp4, sp, bf16, recompute=full, got {part!r}{hint}")
