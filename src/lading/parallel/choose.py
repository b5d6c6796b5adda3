"""Choose: which atoms of a segment are cut over which axis of a layout.

A weight whose input is whole is cut by columns: along the outermost atom of its result that nothing needs whole and
that a later product contracts, or a loss over the vocabulary exchanges (heads before head size; within each part of a
fused product). The product that contracts a cut atom is then cut by rows without a choice of its own. An embedding of
tokens is cut by its vocabulary, experts by their number and within. What enters and leaves a segment is whole, but for
its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from lading.ir.graph import Op, OpKind, Phase, Role
from lading.ir.opkinds import base_name
from lading.parallel.atoms import Lineage, setting
from lading.parallel.contractions import product_operands

TENSOR, EXPERT_TENSOR, EXPERT, CONTEXT = "tp", "etp", "ep", "cp"


@dataclass(frozen=True)
class Axes:
    """Axes of a layout that decide how a segment is cut; degrees do not, beyond being more than 1.

    Attributes:
        tp, cp, ep, etp: Whether the axis has more than one rank (``etp`` cuts an expert itself).
        sp: Tokens are cut over tp ranks wherever nothing else is.
        cp_comm: "ring", "all_gather" or "all_to_all".
        regather: Backward gathers tokens again for gradients of weights instead of keeping what forward gathered.
    """

    tp: bool = False
    cp: bool = False
    ep: bool = False
    etp: bool = False
    sp: bool = False
    cp_comm: str = "ring"
    regather: bool = True


@dataclass
class CutAxes:
    """Axis of each cut atom; ``kv`` are heads of keys that fewer query heads share, ``words`` vocabularies.

    ``experts`` are numbers of experts, cut or not; ``heads`` are query heads.
    """

    axis: dict[int, str] = field(default_factory=lambda: {})
    kv: set[int] = field(default_factory=set[int])
    words: set[int] = field(default_factory=set[int])
    experts: set[int] = field(default_factory=set[int])
    heads: set[int] = field(default_factory=set[int])


def is_token(lineage: Lineage, atom: int) -> bool:
    """Whether an atom runs over the tokens of a sequence (or of all sequences)."""
    return "s" in lineage.atoms.size(atom).symbols


def choose(lineage: Lineage, axes: Axes) -> CutAxes:
    """Choose the axes by which atoms are cut, in one walk over forward."""
    choice, segment = CutAxes(), lineage.segment
    borders = (*segment.enters, *segment.leaves)
    border = {leaf for tensor in borders for leaf in lineage.leaves(tensor)}
    ends, expert_ends = _ends(lineage, choice)
    ends -= set(lineage.atoms.leaves(tuple(lineage.normed))) - choice.heads - choice.kv
    ends -= expert_ends  # rows go to experts whole
    parameters = {t.storage for t in segment.tensors if t.role is Role.PARAMETER}
    for op in segment.ops:
        if op.phase is Phase.BACKWARD:
            continue
        if op.kind is OpKind.MATMUL:
            grouped = base_name(op.name) == "_grouped_mm"
            _choose_product(lineage, op, axes, choice, (border, expert_ends if grouped else ends, parameters))
        elif base_name(op.name) == "embedding" and axes.tp:
            _choose_embedding(lineage, op, choice, border)
    return choice


def _choose_embedding(lineage: Lineage, op: Op, choice: CutAxes, border: set[int]) -> None:
    weight, index = op.inputs[:2]
    words = lineage.atoms.leaves(lineage.dims[weight][0])
    are_tokens = lineage.segment.tensors[index].role is Role.INPUT  # tokens, not positions that are counted
    if (
        are_tokens
        and any(is_token(lineage, leaf) for leaf in lineage.leaves(index))
        and not border & set(words)
        and len(words) == 1
    ):
        choice.axis[words[0]] = TENSOR
        choice.words.add(words[0])


def _ends(lineage: Lineage, choice: CutAxes) -> tuple[set[int], set[int]]:
    """Atoms that are contracted with a weight, exchanged by a loss, or shared heads of attention.

    Returns:
        Those, and those that are contracted with weights of experts.
    """
    ends: set[int] = set()
    expert_ends: set[int] = set()
    segment = lineage.segment
    parameters = {t.storage for t in segment.tensors if t.role is Role.PARAMETER}
    for op in segment.ops:
        if op.phase is Phase.BACKWARD:
            continue
        if op.kind is OpKind.MATMUL:
            places = product_operands(op, [len(lineage.dims[t]) for t in op.inputs])
            weight_places = [p for p in places if segment.tensors[op.inputs[p]].storage in parameters]
            if not weight_places and len(lineage.dims[op.outputs[0]]) == 3:  # batched: each head by itself
                choice.heads.update(lineage.atoms.leaves(lineage.dims[op.outputs[0]][0]))
            for place in weight_places:
                result = set(lineage.leaves(op.outputs[0]))
                chosen = expert_ends if base_name(op.name) == "_grouped_mm" else ends
                chosen.update(leaf for leaf in lineage.leaves(op.inputs[place]) if leaf not in result)
        elif op.kind is OpKind.ATTENTION:
            queries, keys = (lineage.atoms.leaves(lineage.dims[t][1]) for t in op.inputs[:2])
            ends.update(keys)
            choice.kv.update(set(keys) - set(queries))
            choice.heads.update(queries)
        elif base_name(op.name) == "_log_softmax":
            words = lineage.atoms.leaves(lineage.dims[op.outputs[0]][cast(int, setting(op, "dim"))])
            ends.update(words)
            choice.words.update(words)
    return ends, expert_ends


def _choose_product(
    lineage: Lineage, op: Op, axes: Axes, choice: CutAxes, known: tuple[set[int], set[int], set[int]]
) -> None:
    border, ends, parameters = known
    places = product_operands(op, [len(lineage.dims[t]) for t in op.inputs])
    weights = [op.inputs[p] for p in places if lineage.segment.tensors[op.inputs[p]].storage in parameters]
    if len(weights) != 1:
        return
    weight, grouped = weights[0], base_name(op.name) == "_grouped_mm"
    if grouped:
        group = lineage.atoms.leaves(lineage.dims[weight][0])
        choice.experts.update(group)
        if axes.ep:
            choice.axis.update(dict.fromkeys(group[:1], EXPERT))
    axis = EXPERT_TENSOR if grouped else TENSOR
    if not (axes.etp if grouped else axes.tp):
        return
    atoms_on_axis = {leaf for leaf, on in choice.axis.items() if on == axis}
    if atoms_on_axis & {*lineage.leaves(weight), *lineage.leaves(op.outputs[0])}:
        return
    result = set(lineage.leaves(op.outputs[0]))
    for leaf in lineage.leaves(weight):
        if leaf in result and (cut := _cuttable(lineage, leaf, border, ends)):
            choice.axis.update(dict.fromkeys(cut, axis))
            return


def _cuttable(lineage: Lineage, leaf: int, border: set[int], ends: set[int]) -> list[int]:
    """The atom, or one in each of its parts; none if it has to stay whole."""
    if lineage.atoms.is_whole(leaf) or leaf in border or is_token(lineage, leaf):
        return []
    parts = lineage.atoms.parts(leaf)
    if not parts:
        return [leaf] if leaf in ends else []
    chosen: list[int] = []
    for part in parts:
        first: list[int] = []
        for atom in lineage.atoms.leaves(part):
            first = first or _cuttable(lineage, atom, border, ends)
        if not first:
            return []
        chosen.extend(first)
    return chosen
