"""Members of an optimizer of whole matrices: its parameters, their rules, and settings of how its steps are run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from lading import __version__
from lading.errors import ConfigError
from lading.ir.routes import WholeMatrix
from lading.optim.rule import MatrixRule, ParameterRule, Rule, StackedRule, States, StateSpec
from lading.runtime.agreement import ARRIVAL_S, Facts

#: Of a group of parameters; the last two are what users call it, and what torch's schedules keep there.
_KEYS = frozenset(("params", "rule", "lr", "parts", "name", "initial_lr"))


@dataclass(frozen=True, kw_only=True)
class How:
    """Settings of how a step is run.

    Attributes:
        groups: Most all-to-alls in each direction that it is cut into.
        stagger: Spread what is due every so many updates (roots, bases) over the updates between, matrix by matrix, and
            give owners as much of it at each. When a matrix's turn is does not depend on who owns it.
        reduces: Gradients are each rank's own: owners take their mean over ranks, hold all states and send results to
            every replica (ZeRO-1), in the bytes of a reduce-scatter and an all-gather. Not with DDP, which reduces
            already, and not with DTensors.
        skip_nonfinite: Leave out a step in which a gradient is not finite, on every rank.
        share: Several ranks may compute one matrix, of a rule that can be shared (Muon), as where they are more than
            matrices. Its products are then taken by blocks of rows, on one rank, too: any number of ranks gives the
            same bits, which on some processors differ in rounding from those without.
        batched: An owner computes its matrices of one shape in batched products, of a rule that can (Muon): many
            experts' small matrices take as many launches as one. Numbers differ in rounding from those without, and
            with the number of ranks, as owners stack what they own; not with ``share``.
        state_cap_bytes: Most bytes on one rank of states that lie with owners.
        machine: Machine of each rank, a name in the catalog or what ``lading probe`` wrote: owners are planned by
            seconds there, decompositions, launches and what ranks of a shared matrix tell each other included; "" plans
            by operations.
        overlap: What exchanges may hide under, beside the step itself; with ``model=``. "backward": a group's gradients
            travel as soon as they are final, which clipping and unscaling would be too late for. "forward": ``step``
            returns once directions travel, and whoever gathers or runs a module waits for those of its parameters;
            whoever reads parameters in another way calls ``finish`` first. "both": both.
        timeout_s: Seconds within which all ranks are to come where they compare what they were given.
    """

    groups: int = 4
    overlap: Literal["step", "backward", "forward", "both"] = "step"
    stagger: bool = False
    reduces: bool = False
    skip_nonfinite: bool = True
    share: bool = False
    batched: bool = False
    state_cap_bytes: int | None = None
    machine: str = ""
    timeout_s: float = ARRIVAL_S

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"expected groups >= 1, got {self.groups}")
        if self.batched and self.share:
            raise ConfigError(
                "expected batched or share, got both: what is shared has the same bits on any number of ranks, what "
                "is batched has not"
            )
        if self.overlap not in ("step", "backward", "forward", "both"):
            raise ConfigError(f"expected overlap step, backward, forward or both, got {self.overlap!r}")

    @property
    def under_backward(self) -> bool:
        """Whether gradients travel before the step."""
        return self.overlap in ("backward", "both")

    @property
    def under_forward(self) -> bool:
        """Whether directions may travel after the step."""
        return self.overlap in ("forward", "both")


class PieceRule:
    """A ``ParameterRule`` applied to the pieces that ranks have of a parameter; no direction of a whole is needed."""

    def __init__(self, settings: ParameterRule) -> None:
        self.settings = settings

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """States of a piece of this shape, by name."""
        return self.settings.state_specs(shape)

    def step(self, param: torch.Tensor, grad: torch.Tensor, held: States, *, lr: float, update: int) -> None:
        """Move a piece of the parameter; ``update`` counts from 1."""
        self.settings.update_piece(param, grad, held, lr=lr, update=update)


@dataclass(frozen=True)
class OptimizerMember:
    """One parameter of an optimizer, with its group, its group's number, and the rule that moves it.

    Attributes:
        group: Entry of ``param_groups``, which has its learning rate.
    """

    name: str
    param: torch.Tensor
    group: dict[str, Any]
    number: int
    settings: MatrixRule | ParameterRule
    rule: Rule | PieceRule

    @property
    def is_matrix(self) -> bool:
        return not isinstance(self.rule, PieceRule)


def groups_of(params: Iterable[Any], rule: MatrixRule, lr: float) -> tuple[list[Any], list[MatrixRule | ParameterRule]]:
    """Split parameters into groups as torch takes them, and the rule of each.

    Raises:
        ConfigError: a group has what nobody reads, or something else for a rule.
    """
    entries = list(params)
    if not entries or not isinstance(entries[0], dict):
        return entries, [rule]
    rules = [cast("MatrixRule | ParameterRule", group.get("rule", rule)) for group in entries]
    for group, group_rule in zip(entries, rules, strict=True):
        if unknown := sorted(group.keys() - _KEYS):
            raise ConfigError(
                f"a group of parameters: expected {', '.join(sorted(_KEYS))}, got {unknown[0]!r}; settings of a rule, "
                "as weight_decay, go into the group's rule="
            )
        if not isinstance(group_rule, MatrixRule | ParameterRule):
            raise ConfigError(f"a group's rule: expected a rule of lading.optim, as lading.AdamW, got {group_rule!r}")
    rates = [r.lr if isinstance(r, ParameterRule) else lr for r in rules]
    return [
        {"lr": rate, **{key: value for key, value in group.items() if key != "rule"}}
        for group, rate in zip(entries, rates, strict=True)
    ], rules


def members_of(number: int, group: dict[str, Any], rule: MatrixRule | ParameterRule) -> list[OptimizerMember]:
    names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
    maths = maths_of(rule)
    return [
        OptimizerMember(name, p, group, number, rule, maths) for name, p in zip(names, group["params"], strict=True)
    ]


def facts_of(members: Sequence[OptimizerMember], how: How) -> Facts:
    """List what must be alike on all ranks: parameters, how steps run, versions; not the settings of groups."""
    parameters = {
        m.name: f"{str(m.param.dtype).removeprefix('torch.')} {tuple(m.param.shape)} of group {m.number}"
        + (f", parts {tuple(m.group['parts'])}" if m.group["parts"] else "")
        + ("" if m.param.requires_grad else ", frozen")
        for m in members
    }
    return {
        "parameters": {"": f"{len(parameters)} parameters", **parameters},
        "step": dataclasses.asdict(how),
        "versions": {"lading": __version__, "torch": torch.__version__},
    }


def split(kind: type[Any], settings: dict[str, Any]) -> tuple[Any, How]:
    """Split keyword settings into a rule of class ``kind`` and how its steps are run.

    Raises:
        ConfigError: a setting that neither has.
    """
    of_rule, ways = ({f.name for f in dataclasses.fields(k)} for k in (kind, How))
    for key in settings:
        if key not in of_rule | ways:
            raise ConfigError(
                f"unknown setting {key!r} of {kind.__name__}; expected {', '.join(sorted(of_rule | ways))}"
            )
    handling = How(**{key: value for key, value in settings.items() if key in ways})
    return kind(**{key: value for key, value in settings.items() if key in of_rule}), handling


def maths_of(rule: MatrixRule | ParameterRule, shift: int = 0, *, shared: bool = False) -> Rule | PieceRule:
    return rule.maths(shift, shared=shared) if isinstance(rule, MatrixRule) else PieceRule(rule)


def rules_of(wholes: Sequence[WholeMatrix], members: Sequence[OptimizerMember], how: How) -> list[Rule | PieceRule]:
    """Rule of each matrix; when staggered, matrices of one shape take turns in the order of their names.

    Raises:
        ConfigError: matrices are to be batched, and no rule can.
    """
    turns: dict[tuple[int, ...], int] = {}
    shifts: dict[str, int] = {}
    for matrix in sorted(wholes, key=lambda w: w.name):
        shifts[matrix.name] = turns.get(matrix.region.shape, 0)
        turns[matrix.region.shape] = shifts[matrix.name] + 1
    settings = [members[matrix.parameter].settings for matrix in wholes]
    rules = [maths_of(s, shifts[w.name] * how.stagger, shared=how.share) for s, w in zip(settings, wholes, strict=True)]
    if how.batched and not any(isinstance(rule, StackedRule) for rule in rules):
        names = ", ".join(sorted({type(rule.settings).__name__ for rule in rules})) or "no matrix"
        raise ConfigError(f"expected a rule whose matrices can be batched, as Muon's, got {names}; leave batched out")
    return rules
