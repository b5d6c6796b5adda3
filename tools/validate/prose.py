"""Prose: settings of a layout that only a row's notes state, one clause each.

A field always counts before the notes. A clause that denies what it names ("no offload", "gradient checkpointing off",
"recompute not stated") states nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tools.validate.rows import Row

_DENIED = re.compile(
    r"\b(?:no|not|none|without|w/o|neither|nor|never|off|false|disabled?|instead of|unlike|than|vs\.?|compared|"
    r"unstated|unknown|assum\w*|if|baseline|would|could|untested)\b|n't\b|-free\b"
)
_CLAUSES = re.compile(r"[;|]|\.(?=\s|$)|,(?=\s)")
_CHECKPOINTING = r"(?:(?:activation|gradient|grad|act) ?(?:re)?(?:check\w*|comput\w*)|recomput\w*|\bac\b)"
#: (field, words in a clause, value of the field; None is the match itself), in order: the first of a field counts.
_STATED: tuple[tuple[str, str, str | None], ...] = (
    ("activation_checkpointing", rf"selective {_CHECKPOINTING}|{_CHECKPOINTING} selective|\bsac\b", "selective"),
    (
        "activation_checkpointing",
        rf"full {_CHECKPOINTING}|{_CHECKPOINTING}:? ?(?:enabled|on\b|true|used|everywhere|full)|with {_CHECKPOINTING}|"
        rf"(?:every|each|all) (?:layer|block)s? (?:is |are )?(?:recomputed|checkpointed)|"
        rf"(?:uses?|using|enables?|\+) {_CHECKPOINTING}|^ *(?:activation|gradient|grad) checkpointing *$",
        "full",
    ),
    (
        "offload",
        r"\S*(?:cpu|host|nvme|ssd)[-_ ]?offload\w*[^;]*|.*\boffload\w* [^;]*\b(?:cpu|host|nvme|ssd)\b",
        None,
    ),
    ("offload", r"(?:stage ?[123]|zero[- ]?[123])(?: with)? (?:cpu )?offload\b", "optimizer to cpu"),
    (
        "optimizer",
        r"\b(?:paged_?)?(?:8 ?-?bit )adam\w*|adamw?[- _]?8 ?-?bit|\b(?:bnb )?paged_adamw?\w*|"
        r"\b(?:adafactor|lion|sgd|muon|shampoo|soap)(?: optimizer| \()|"
        r"optimizer(?: is|:)? (?:adafactor|lion|sgd|muon|shampoo|soap)\b|"
        r"deepspeedcpuadam|\bcpu ?adam\b",
        None,
    ),
    ("task", r"\bq-?lora\b(?: \(?r(?:ank)? ?=? ?\d+)?|\b(?:lora|peft)\b(?: \(?r(?:ank)? ?=? ?\d+)?", None),
    ("task", r"full[- ](?:parameter )?fine-?tun\w*|\bsft\b|supervised fine-?tun\w*", "sft"),
    (
        "sharding",
        r"zero[- ]?(?:stage[- ]?)?[123]\b|\b(?:full_shard|shard_grad_op|no_shard)\b|\b[fh]sdp2?\b|\bddp\b",
        None,
    ),
    ("sharding", r"ici_fsdp_parallelism[ =:]+(?!1\b)-?\d+", "fsdp"),
    ("fsdp", r"sharding[-_ ]parallel[-_ ]degree[ =:]+(\d+)", None),
    (
        "precision",
        r"^(?:bf16|bfloat16|fp16|fp8|mxfp8|nvfp4|fp32)(?: mixed)?(?: precision)?$|"
        r"\b(?:bf16|bfloat16|fp16|fp8|fp32)[ -](?:mixed|training|precision)\b",
        None,
    ),
)
#: Fields that say the same, of which one is enough.
_SAME = {"sharding": ("sharding", "zero_stage", "fsdp")}


def clauses_of(notes: str) -> Iterator[str]:
    """Clauses of notes in lower case, those that deny or doubt something left out."""
    for clause in _CLAUSES.split(notes):
        lowered = clause.strip().lower()
        if lowered and not _DENIED.search(lowered):
            yield lowered


def stated_in_notes(row: Row) -> tuple[dict[str, Any], list[str]]:
    """Fields of the layout that are not stated and that the notes state, and a sentence on each."""
    found: dict[str, Any] = {}
    said: list[str] = []
    clauses = list(clauses_of(row.notes))
    for name, words, value in _STATED:
        if name in found or any(row.layout.get(other) is not None for other in _SAME.get(name, (name,))):
            continue
        matches = [match for clause in clauses if (match := re.search(words, clause))]
        if not matches or (name == "precision" and len({match[0] for match in matches}) > 1):
            continue
        found[name] = value or (int(matches[0][1]) if name == "fsdp" else matches[0][0].strip())
        said.append(f"{name} {found[name]!r}: the notes say {matches[0][0].strip()!r}")
    return found, said


def contradicted(row: Row, nothing: Callable[[str], bool]) -> list[str]:
    """Sentences on what notes say is moved off the device, where the field says that nothing is."""
    if "offload" not in row.layout or not nothing(str(row.layout["offload"])):
        return []
    words = next(words for name, words, _ in _STATED if name == "offload")
    matches = (re.search(words, clause) for clause in clauses_of(row.notes) if "activation" not in clause)
    return [f"notes say {match[0].strip()!r}, layout.offload says nothing is moved" for match in matches if match]
