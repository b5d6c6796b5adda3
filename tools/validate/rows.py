"""Rows: published measurements in JSON lines, read and checked; ``benchmarks/validation/README.md`` has the fields."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lading.errors import ConfigError
from lading.files import parse_json
from lading.ir.stack import Stack

TIERS = ("A", "B", "C")
_NUMBER = (int, float)
_TEXT = (str,)
_FLAG = (bool,)

#: Switches of software that a row may set by their names, with the type of each.
SWITCHES: dict[str, tuple[type, ...]] = {
    field.name: _NUMBER if isinstance(field.default, float) else (type(field.default),)
    for field in dataclasses.fields(Stack)
    if isinstance(field.default, bool | int | float | str) and field.name not in ("name", "title", "kind", "framework")
}

#: Per part, the type of each known field; the first ones of a part must be there (their value may be null).
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "model": {
        **dict.fromkeys(("layers", "hidden", "heads", "seq_len"), _NUMBER),
        **dict.fromkeys(("name", "kind", "arch", "attention", "activation", "note"), _TEXT),
        **dict.fromkeys(("ffn_hidden", "kv_heads", "head_dim", "vocab", "experts", "topk", "params_b"), _NUMBER),
        **dict.fromkeys(("moe_ffn_hidden", "shared_expert_ffn", "first_dense_layers", "moe_latent_size"), _NUMBER),
        **dict.fromkeys(("active_params_b", "mtp_layers", "window", "text_len"), _NUMBER),
        **dict.fromkeys(("mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"), _NUMBER),
        **dict.fromkeys(("gated_mlp", "tied_embeddings"), _FLAG),
    },
    "hardware": {
        "gpu": _TEXT,
        "gpus": _NUMBER,
        "gpus_per_node": _NUMBER,
        **dict.fromkeys(("intra_node_link", "inter_node_link", "gpu_family"), _TEXT),
    },
    "layout": {
        **SWITCHES,
        **dict.fromkeys(("dp", "tp", "pp"), _NUMBER),
        **dict.fromkeys(("cp", "ep", "etp", "vpp", "fsdp", "zero_stage", "micro_batch", "global_batch"), _NUMBER),
        **dict.fromkeys(("first_stage_layers", "last_stage_layers"), _NUMBER),
        **dict.fromkeys(("n_microbatches", "grad_accum"), _NUMBER),
        **dict.fromkeys(("activation_checkpointing", "ac_detail", "precision", "precision_detail", "offload"), _TEXT),
        **dict.fromkeys(("framework", "pp_schedule", "task", "cp_comm", "sharding", "optimizer"), _TEXT),
        **dict.fromkeys(("seq_parallel", "compile", "async_tp", "ep_comm_overlap", "embedding_as_layer"), _FLAG),
    },
    "measured": {
        **dict.fromkeys(("iteration_s", "tokens_per_s_per_gpu", "peak_memory_gib"), _NUMBER),
        **dict.fromkeys(("tflops_per_gpu", "mfu", "hfu", "nvidia_smi_memory_gb", "memory_as_printed_gb"), _NUMBER),
        **dict.fromkeys(("flop_convention", "memory_kind"), _TEXT),
    },
}
_REQUIRED = {
    "model": ("layers", "hidden", "heads", "seq_len"),
    "hardware": ("gpu", "gpus"),
    "layout": ("dp", "tp", "pp"),
    "measured": (),
}
_TOP: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "source", "source_family", "config_key", "tier", "notes", "derived"), _TEXT),
    **dict.fromkeys(("verified", "complete"), _FLAG),
    "qc": (dict,),
}
#: Numbers that count something.
_COUNTS = frozenset(
    (
        *("layers", "hidden", "heads", "seq_len", "ffn_hidden", "kv_heads", "head_dim", "vocab", "experts", "topk"),
        *("window", "moe_ffn_hidden", "shared_expert_ffn", "first_dense_layers", "gpus", "gpus_per_node"),
        *("dp", "tp", "pp", "cp", "ep", "etp", "vpp", "fsdp", "zero_stage", "first_stage_layers", "last_stage_layers"),
        *("micro_batch", "global_batch", "n_microbatches", "grad_accum"),
    )
)
#: Beyond these a value is in another unit than the field's name says.
_LARGEST = {"peak_memory_gib": 4096.0, "nvidia_smi_memory_gb": 4096.0, "iteration_s": 1e5, "tokens_per_s_per_gpu": 1e9}


@dataclass(frozen=True)
class Row:
    """One measured configuration.

    Attributes:
        family: Source of the row; errors are averaged over these.
        key: Equal for repeats of one configuration.
        tier: "A" all is stated, "B" something was inferred, "C" something material is missing.
        model, hardware, layout, measured: Fields as in the file, null ones left out.
        line: Number of the line in the file.
        unread: Fields that are not known, with their values.
    """

    id: str
    source: str
    family: str
    key: str
    tier: str
    notes: str
    model: Mapping[str, Any]
    hardware: Mapping[str, Any]
    layout: Mapping[str, Any]
    measured: Mapping[str, Any]
    line: int
    unread: tuple[str, ...] = ()

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a step: printed, or from tokens/s and the batch; None if neither is known."""
        if "iteration_s" in self.measured:
            return float(self.measured["iteration_s"])
        return self.implied_step_s

    def step_s_of(self, global_batch: int) -> float | None:
        """Measured seconds of a step; where only a rate is printed and no batch is stated, of the given one.

        Args:
            global_batch: Sequences of the step that is predicted.
        """
        rate, devices, tokens = self.measured.get("tokens_per_s_per_gpu"), self.hardware["gpus"], self.model["seq_len"]
        if self.step_s is not None or not rate or not self.layout.get("micro_batch"):
            return self.step_s
        return global_batch * tokens / (rate * devices)

    @property
    def implied_step_s(self) -> float | None:
        """Seconds of a step by tokens/s, the batch and the devices; None if one of them is not known."""
        rate, devices = self.measured.get("tokens_per_s_per_gpu"), self.hardware.get("gpus")
        batch, tokens = self.layout.get("global_batch") or self._implied_batch, self.model.get("seq_len")
        return batch * tokens / (rate * devices) if rate and devices and batch and tokens else None

    @property
    def _implied_batch(self) -> int | None:
        """Sequences of a step by those of a micro-batch and their number, where all replicas are in ``dp``."""
        stated = self.layout
        steps, micro_batch = stated.get("n_microbatches") or stated.get("grad_accum"), stated.get("micro_batch")
        ways = math.prod(int(stated.get(axis) or 1) for axis in ("dp", "tp", "cp", "pp"))
        if not steps or not micro_batch or ways != self.hardware.get("gpus"):
            return None
        return int(stated.get("dp") or 1) * micro_batch * steps


def read_rows(paths: Iterable[Path]) -> tuple[list[Row], list[str]]:
    """Read rows of files of JSON lines, with notes on fields that are not known and were not used.

    Raises:
        ConfigError: a file cannot be read, or a line is not JSON, lacks a field, or has a value of the wrong type or
            unit; names file and line.
    """
    rows: list[Row] = []
    unknown: dict[str, str] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: expected a text file with a JSON object per line: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_row(line, number, f"{path}:{number}", unknown))
    if not rows:
        raise ConfigError(f"expected measurements, got no line in {', '.join(map(str, paths)) or 'no file'}")
    _unique(rows)
    return rows, [f"field {field} is not known and was not used (first at {place})" for field, place in unknown.items()]


def _unique(rows: list[Row]) -> None:
    seen: dict[str, int] = {}
    for row in rows:
        if row.id in seen:
            raise ConfigError(f"line {row.line}: expected an id of its own, got {row.id!r} as in line {seen[row.id]}")
        seen[row.id] = row.line


def _row(line: str, number: int, place: str, unknown: dict[str, str]) -> Row:
    try:
        data: object = parse_json(line.encode())
    except ValueError as error:
        raise ConfigError(f"{place}: expected a JSON object, got: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{place}: expected a JSON object, got {type(data).__name__}")
    fields = cast("dict[str, Any]", data)
    for name in ("id", *_FIELDS):
        if fields.get(name) is None:
            raise ConfigError(f"{place}: missing field {name!r}{_close_match_hint(name, fields)}")
    parts = {name: _part(name, fields[name], place, unknown) for name in _FIELDS}
    top = _checked({k: v for k, v in fields.items() if k not in _FIELDS}, _TOP, "", place, unknown)
    tier = str(top.get("tier", "A"))
    if tier not in TIERS:
        raise ConfigError(f"{place}: tier: expected A, B or C, got {tier!r}")
    family = top.get("source_family") or _family_of(str(top["id"]))
    row = Row(
        id=str(top["id"]),
        source=str(top.get("source", "")),
        family=str(family),
        key=str(top.get("config_key") or _key(parts)),
        tier=tier,
        notes=str(top.get("notes", "")),
        line=number,
        unread=tuple(text for name in _PREDICTED for text in _unread(name, fields[name])),
        **parts,
    )
    _units(row, place)
    return row


#: Parts whose unknown fields change what is predicted, not only what is told of a row.
_PREDICTED = ("model", "hardware", "layout")


def _unread(part: str, fields: Mapping[str, Any]) -> list[str]:
    """Fields of a part that no rule reads, with their values; those of measurements and sources change nothing."""
    unknown = {name: value for name, value in fields.items() if name not in _FIELDS[part] and value is not None}
    return [f"field {part}.{name}: {value!r:.60}" for name, value in unknown.items()]


def _family_of(name: str) -> str:
    """Source of a row that does not name it: its id without the number."""
    return name.rstrip("0123456789").rstrip("-_.") or name


def _key(parts: Mapping[str, Mapping[str, Any]]) -> str:
    text = json.dumps({name: parts[name] for name in ("model", "hardware", "layout")}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _part(name: str, value: object, place: str, unknown: dict[str, str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {name}: expected an object, got {type(value).__name__}")
    fields = cast("dict[str, Any]", value)
    for required in _REQUIRED[name]:
        if required not in fields:
            raise ConfigError(f"{place}: missing field {name}.{required}{_close_match_hint(required, fields)}")
    return _checked(fields, _FIELDS[name], f"{name}.", place, unknown)


def _checked(
    fields: Mapping[str, Any], known: Mapping[str, tuple[type, ...]], prefix: str, place: str, unknown: dict[str, str]
) -> dict[str, Any]:
    """Select the fields that are not null, each of its type; unknown names are noted, misspelled ones are errors."""
    fields = {name: _plain(name, value) for name, value in fields.items()}
    for name, value in fields.items():
        if name not in known:
            near = [n for n in difflib.get_close_matches(name, known, 1, 0.9) if n not in fields]
            if near:
                raise ConfigError(f"{place}: unknown field {prefix}{name}; did you mean {prefix}{near[0]}?")
            unknown.setdefault(f"{prefix}{name}", place)
        elif value is not None and not _is(value, known[name]):
            expected = " or ".join(t.__name__ for t in known[name])
            raise ConfigError(f"{place}: {prefix}{name}: expected {expected}, got {type(value).__name__} {value!r:.60}")
    return {name: value for name, value in fields.items() if value is not None and name in known}


#: Fields of words that frameworks set by a flag as well, and those that they set by a list.
_SWITCHED, _LISTED = ("activation_checkpointing", "offload"), ("ac_detail", "offload")


def _plain(name: str, value: Any) -> Any:
    """A flag or a list of words where a field is words, as words."""
    if name in _SWITCHED and isinstance(value, bool):
        return "yes" if value else "none"
    if name in _LISTED and isinstance(value, list):
        items = cast("list[object]", value)
        return ",".join(items) if all(isinstance(item, str) for item in items) else value  # type: ignore[arg-type]
    return value


def _is(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    if isinstance(value, int) and abs(value) >= 1 << 63:  # no count, and more than a float holds
        return False
    return isinstance(value, types) and not (isinstance(value, float) and math.isnan(value))


def _close_match_hint(name: str, fields: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(name, list(fields), 1)
    return f"; did you mean {matches[0]!r} to be it?" if matches else ""


def _units(row: Row, place: str) -> None:
    for name, largest in _LARGEST.items():
        value = row.measured.get(name)
        if value is not None and not 0 < value <= largest:
            raise ConfigError(
                f"{place}: measured.{name}: expected a positive number in the unit that its name ends on, got {value}"
            )
    for part, names in (("model", _FIELDS["model"]), ("layout", _FIELDS["layout"]), ("hardware", ("gpus",))):
        for name in names:
            value = getattr(row, part).get(name)
            if isinstance(value, _NUMBER) and not isinstance(value, bool) and value < 0:
                raise ConfigError(f"{place}: {part}.{name}: expected a number >= 0, got {value}")
    for part, names in (("model", _COUNTS), ("layout", _COUNTS), ("hardware", _COUNTS)):
        for name in names & getattr(row, part).keys():
            value = getattr(row, part)[name]
            if not float(value).is_integer():
                raise ConfigError(f"{place}: {part}.{name}: expected a whole number, got {value}")
    implied = row.implied_step_s
    if implied is not None and "iteration_s" in row.measured:
        ratio = row.measured["iteration_s"] / implied
        if any(abs(ratio / wrong - 1) < 0.05 for wrong in (1e3, 1e-3, 1e6)):
            raise ConfigError(
                f"{place}: measured.iteration_s: expected seconds, about {implied:.4g} by tokens_per_s_per_gpu, got "
                f"{row.measured['iteration_s']}: milliseconds?"
            )
