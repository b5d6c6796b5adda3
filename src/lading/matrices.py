"""Optimizers of whole matrices on stock modules: plain, DDP, FSDP2, HSDP, tensor parallel, and these together.

>>> optimizer = lading.optim.Muon(
...     [{"params": hidden}, {"params": rest, "rule": AdamW(lr=3e-4)}], lr=0.02, mesh=mesh
... )
>>> loss.backward(); optimizer.step()

Which rank owns which matrix is planned (``lading.planner.owners``), how pieces get there follows from the placements of
DTensors (``lading.ir.routes``), and a step is ``lading.runtime.matrices``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lading.config import AdamW
from lading.errors import ConfigError
from lading.ir.routes import Box, Whole, micro_groups, pieces, wholes_of
from lading.optim.adam import AdamWRule
from lading.optim.muon import MuonRule
from lading.optim.rule import Held, Rule, State, States
from lading.optim.shampoo import ShampooRule
from lading.optim.soap import SOAPRule
from lading.planner.owners import Matrix, Owners, assign, spread_turns
from lading.rules import SOAP as SOAPSettings
from lading.rules import MatrixRule
from lading.rules import Muon as MuonSettings
from lading.rules import Shampoo as ShampooSettings
from lading.runtime.exchange import Team, Traffic, agree_finite, agree_presence
from lading.runtime.matrices import MatrixStep, Moving
from lading.runtime.replicas import Replica, ReplicaStep

#: Of one element, beside products: reads and writes of AdamW count for more than its few operations.
_ADAMW_FLOPS = 100.0


@dataclass(frozen=True, kw_only=True)
class How:
    """How a step is run.

    Attributes:
        groups: All-to-alls in each direction that it is cut into, at most.
        stagger: Spread what is due every so many updates (roots, bases) over the updates between, matrix by matrix, and
            give owners as much of it at each. When a matrix's turn is does not depend on who owns it.
        reduces: Gradients are each rank's own: owners take their mean over ranks, hold all states and send results to
            every replica (ZeRO-1), in the bytes of a reduce-scatter and an all-gather. Not with DDP, which reduces
            already, and not with DTensors.
        skip_nonfinite: Leave out a step in which a gradient is not finite, on every rank.
        state_cap_bytes: Most bytes on one rank of states that lie with owners.
    """

    groups: int = 4
    stagger: bool = False
    reduces: bool = False
    skip_nonfinite: bool = True
    state_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"expected groups >= 1, got {self.groups}")


@dataclass(frozen=True)
class _Member:
    """A parameter, the group that has its learning rate, and what moves it."""

    name: str
    param: torch.Tensor
    group: dict[str, Any]
    settings: MatrixRule | AdamW
    rule: Rule | AdamWRule

    @property
    def is_matrix(self) -> bool:
        return not isinstance(self.rule, AdamWRule)


class MatrixOptimizer(torch.optim.Optimizer):
    """``torch.optim.Optimizer`` of rules that need whole matrices.

    Attributes:
        skipped: Steps that were not taken as a gradient was not finite; nothing moved.
        owners: Who computes which matrix, with the bound (``lading.planner.owners.Owners``); None with no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: MatrixRule,
        lr: float,
        *,
        mesh: DeviceMesh | None = None,
        how: How | None = None,
    ) -> None:
        """An optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either; a group may have its own ``rule`` (also
                ``lading.AdamW``, for what is no matrix), ``lr``, and ``parts``: rows of the parts of a fused matrix.
            rule: Of groups that do not say.
            mesh: Ranks that share the work; None for the mesh of the parameters, or all ranks where they have none.
        Raises:
            ConfigError: a parameter that is no matrix under a rule for matrices; ranks that differ in what they have.
        """
        how = how or How()
        given, rules = _groups(params, rule, lr)
        super().__init__(given, {"lr": lr, "parts": ()})
        self.how = how
        self.skipped = 0
        numbered = enumerate(zip(self.param_groups, rules, strict=True))
        self._members = [m for number, (group, r) in numbered for m in _members(number, group, r)]
        self._team = Team.of(_process_group(mesh, [m.param for m in self._members]))
        self._wholes = [whole for number, m in enumerate(self._members) for whole in self._wholes_of(number, m)]
        self._check_names()
        self._rules = self._rules_of_wholes()
        holdings = self._holdings()
        self._boxes = [row[self._team.rank] for row in holdings]
        self.owners = self._planned()
        owner = [gang[0] for gang in self.owners.ranks] if self.owners else []
        self._step = self._routed(holdings, owner)
        self._whole = {number: self._fresh(number) for number, rank in enumerate(owner) if rank == self._team.rank}
        for member in self._members:
            self._begin(member)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far."""
        return self._step.traffic

    def _wholes_of(self, number: int, member: _Member) -> list[Whole]:
        """What of a parameter has an owner."""
        param = member.param
        if self.how.reduces and isinstance(param, DTensor):
            raise ConfigError(
                f"{member.name}: expected replicas under reduces, got a DTensor, whose gradient is reduced"
            )
        if member.is_matrix:
            return wholes_of(number, member.name, param.shape, member.group["parts"])
        return [Whole(member.name, number, Box((0,) * param.ndim, tuple(param.shape)))] if self.how.reduces else []

    def _check_names(self) -> None:
        for names in ([m.name for m in self._members], [whole.name for whole in self._wholes]):
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"expected parameters of different names, found {twice[0]!r} more than once")

    def _rules_of_wholes(self) -> list[Rule | AdamWRule]:
        """Of each matrix; staggered, matrices of one shape take turns in the order of their names."""
        turns: dict[tuple[int, ...], int] = {}
        shifts: dict[str, int] = {}
        for whole in sorted(self._wholes, key=lambda w: w.name):
            shifts[whole.name] = turns.get(whole.box.shape, 0)
            turns[whole.box.shape] = shifts[whole.name] + 1
        settings = [self._members[whole.parameter].settings for whole in self._wholes]
        return [_maths(s, shifts[w.name] * self.how.stagger) for s, w in zip(settings, self._wholes, strict=True)]

    def _holdings(self) -> list[list[Box]]:
        """What every rank has of every parameter; the same list on all of them."""
        mine = [_box(m.param) for m in self._members]
        told = [(m.name, tuple(m.param.shape)) for m in self._members]
        everyone = self._team.gather((told, mine))
        for rank, (other, _) in enumerate(everyone):
            if other != told:
                differs = next((a for a, b in zip(told, other, strict=False) if a != b), "as many")
                raise ConfigError(f"ranks differ in their parameters: rank {rank} does not have {differs}")
        return [[boxes[number] for _, boxes in everyone] for number in range(len(mine))]

    def _planned(self) -> Owners | None:
        if not self._wholes:
            return None
        items = [self._item(number) for number in range(len(self._wholes))]
        planned = spread_turns(items, assign(items, self._team.ranks, cap_bytes=self.how.state_cap_bytes))
        digest = hashlib.sha256(repr(planned.ranks).encode()).hexdigest()
        if len(set(self._team.gather(digest))) > 1:
            raise ConfigError("ranks planned different owners: expected equal versions of Lading on every rank")
        return planned

    def _routed(self, holdings: list[list[Box]], owner: list[int]) -> MatrixStep | ReplicaStep:
        travelling = micro_groups([self._item(number).seconds for number in range(len(owner))], owner, self.how.groups)
        if self.how.reduces:
            return ReplicaStep(list(zip(self._wholes, self._rules, strict=True)), owner, travelling, self._team)
        wholes = [(whole, cast(Rule, rule)) for whole, rule in zip(self._wholes, self._rules, strict=True)]
        return MatrixStep(wholes, owner, travelling, pieces(self._wholes, holdings, owner), self._team)

    def _states_of(self, number: int) -> dict[str, State]:
        """Of a matrix: those that lie with its owner."""
        whole, rule = self._wholes[number], self._rules[number]
        shape = whole.box.shape if isinstance(rule, AdamWRule) else whole.rows_columns
        found = rule.states(cast(Any, shape), self._members[whole.parameter].param.dtype)
        return {name: state for name, state in found.items() if self.how.reduces or state.held is Held.WHOLE}

    def _fresh(self, number: int) -> States:
        device = self._members[self._wholes[number].parameter].param.device
        return {n: torch.zeros(s.shape, dtype=s.dtype, device=device) for n, s in self._states_of(number).items()}

    def _item(self, number: int) -> Matrix:
        whole, rule = self._wholes[number], self._rules[number]
        kept = sum(_bytes(state.shape, state.dtype) for state in self._states_of(number).values())
        if isinstance(rule, AdamWRule):
            return Matrix(whole.name, _ADAMW_FLOPS * whole.box.size, whole.box.size, state_bytes=kept)
        turn = getattr(rule, "shift", 0) % getattr(rule.settings, "frequency", 1)
        return Matrix(whole.name, rule.work(*whole.rows_columns).flops, whole.box.size, state_bytes=kept, turn=turn)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Raises:
            ValueError: a parameter has a gradient on some ranks only.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        has = {m.name: m.param.grad is not None for m in self._members}
        device = self._members[0].param.device
        agree_presence(has, self._team, device)
        gradients = [_gradient(m.param) for m in self._members]
        if self.how.skip_nonfinite and not agree_finite(gradients, self._team, device):
            self.skipped += 1
            return loss
        if isinstance(self._step, ReplicaStep):
            self._step.run(self._replicas(gradients), self._whole)
        else:
            self._step.run(self._moving(gradients), self._whole)
        return loss

    def _replicas(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, Replica]:
        found: dict[int, Replica] = {}
        for number, (member, grad) in enumerate(zip(self._members, gradients, strict=True)):
            if grad is not None:
                _, update = self._held(member)
                found[number] = Replica(member.param, grad, float(member.group["lr"]), update)
        return found

    def _moving(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, Moving]:
        """Matrices on their way; what is none is moved here."""
        moving: dict[int, Moving] = {}
        for number, (member, grad) in enumerate(zip(self._members, gradients, strict=True)):
            if grad is None:
                continue
            held, update = self._held(member)
            local, rate = _local(member.param), float(member.group["lr"])
            if isinstance(member.rule, AdamWRule):
                member.rule.step(local, grad, held, lr=rate, update=update)
                continue
            travels = member.rule.pre(grad, held, update)
            moving[number] = Moving(local, travels, self._boxes[number], rate, update)
        return moving

    def _begin(self, member: _Member) -> None:
        """This rank's elementwise states, before the first update."""
        param, state = member.param, self.state[member.param]
        state["step"] = torch.zeros((), dtype=torch.float32)
        if self.how.reduces:
            return
        for name, kind in member.rule.states(cast(Any, tuple(param.shape[-2:])), param.dtype).items():
            if kind.held is Held.ELEMENTWISE:
                state[name] = torch.zeros_like(param, dtype=kind.dtype, requires_grad=False)

    def _held(self, member: _Member) -> tuple[States, int]:
        """This rank's elementwise states, and the update's number."""
        state = self.state[member.param]
        state["step"] += 1
        return {key: _local(value) for key, value in state.items() if key != "step"}, int(state["step"])

    def state_dict(self) -> dict[str, Any]:
        """States by name; give ``{"optimizer": optimizer}`` to ``torch.distributed.checkpoint``, to save and to load.

        Elementwise states are placed as their parameters; whole ones are there on their owner alone, under the name of
        the matrix, so that another number of ranks, mesh or plan finds what it needs.
        """
        return {
            "elementwise": {m.name: dict(self.state[m.param]) for m in self._members},
            "whole": {self._wholes[number].name: dict(states) for number, states in self._whole.items()},
            "rates": {m.name: float(m.group["lr"]) for m in self._members},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states from ``state_dict`` of an optimizer of the same parameters and rules.

        Raises:
            ConfigError: a parameter, a matrix that this rank owns, or one of its states is missing.
        """
        for member in self._members:
            _take(member.name, self.state[member.param], state_dict.get("elementwise", {}).get(member.name))
            member.group["lr"] = state_dict.get("rates", {}).get(member.name, member.group["lr"])
        for number, states in self._whole.items():
            name = self._wholes[number].name
            _take(name, states, state_dict.get("whole", {}).get(name))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch calls it while an optimizer is made.

        Raises:
            ConfigError: the optimizer is made already; owners are planned for all parameters at once.
        """
        if hasattr(self, "_members"):
            raise ConfigError("expected all parameters when a matrix optimizer is made; make another with all of them")
        super().add_param_group(param_group)


@torch.no_grad()
def _take(name: str, into: dict[str, torch.Tensor], of: dict[str, torch.Tensor] | None) -> None:
    if of is None or set(of) != set(into):
        found = "nothing" if of is None else ", ".join(sorted(of))
        raise ConfigError(f"the states of {name}: expected {', '.join(sorted(into))}, found {found}")
    for key, tensor in into.items():
        if tuple(of[key].shape) != tuple(tensor.shape):
            raise ConfigError(f"{name}: expected {key} of shape {tuple(tensor.shape)}, got {tuple(of[key].shape)}")
        tensor.copy_(of[key])


def _groups(params: Iterable[Any], rule: MatrixRule, lr: float) -> tuple[list[Any], list[MatrixRule | AdamW]]:
    """Groups as torch takes them, and the rule of each."""
    given = list(params)
    if not given or not isinstance(given[0], dict):
        return given, [rule]
    rules = [cast("MatrixRule | AdamW", group.get("rule", rule)) for group in given]
    rates = [r.lr if isinstance(r, AdamW) else lr for r in rules]
    return [
        {"lr": rate, **{key: value for key, value in group.items() if key != "rule"}}
        for group, rate in zip(given, rates, strict=True)
    ], rules


def _members(number: int, group: dict[str, Any], rule: MatrixRule | AdamW) -> list[_Member]:
    names = group.get("param_names") or [f"group {number}, parameter {i}" for i in range(len(group["params"]))]
    maths = _maths(rule)
    return [_Member(name, p, group, rule, maths) for name, p in zip(names, group["params"], strict=True)]


class Muon(MatrixOptimizer):
    """Muon (``lading.rules.Muon``); bit-equal to ``torch.optim.Muon`` on one process and on any number of ranks."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, mesh: DeviceMesh | None = None, **settings: Any):
        """As ``MatrixOptimizer``; other settings are those of ``lading.rules.Muon`` and ``How``."""
        rule, how = _split(MuonSettings, settings)
        super().__init__(params, rule, lr, mesh=mesh, how=how)


class Shampoo(MatrixOptimizer):
    """Shampoo (``lading.rules.Shampoo``)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, mesh: DeviceMesh | None = None, **settings: Any):
        """As ``MatrixOptimizer``; other settings are those of ``lading.rules.Shampoo`` and ``How``."""
        rule, how = _split(ShampooSettings, settings)
        super().__init__(params, rule, lr, mesh=mesh, how=how)


class SOAP(MatrixOptimizer):
    """SOAP (``lading.rules.SOAP``)."""

    def __init__(self, params: Iterable[Any], lr: float = 3e-3, *, mesh: DeviceMesh | None = None, **settings: Any):
        """As ``MatrixOptimizer``; other settings are those of ``lading.rules.SOAP`` and ``How``."""
        rule, how = _split(SOAPSettings, settings)
        super().__init__(params, rule, lr, mesh=mesh, how=how)


def _split(kind: type[Any], settings: dict[str, Any]) -> tuple[Any, How]:
    """The rule, and how its steps are run."""
    own, ways = ({f.name for f in dataclasses.fields(k)} for k in (kind, How))
    for key in settings:
        if key not in own | ways:
            raise ConfigError(f"unknown setting {key!r} of {kind.__name__}; expected {', '.join(sorted(own | ways))}")
    how = How(**{key: value for key, value in settings.items() if key in ways})
    return kind(**{key: value for key, value in settings.items() if key in own}), how


def _maths(rule: MatrixRule | AdamW, shift: int = 0) -> Rule | AdamWRule:
    if isinstance(rule, AdamW):
        return AdamWRule(rule)
    if isinstance(rule, MuonSettings):
        return MuonRule(rule)
    return ShampooRule(rule, shift) if isinstance(rule, ShampooSettings) else SOAPRule(rule, shift)


def _process_group(mesh: DeviceMesh | None, params: Sequence[torch.Tensor]) -> dist.ProcessGroup | None:
    """Of the mesh, flattened where it has several dims."""
    meshes = list(dict.fromkeys(p.device_mesh for p in params if isinstance(p, DTensor)))
    mesh = mesh or max(meshes, key=lambda m: m.size(), default=None)
    if mesh is None:
        return None
    ranks = set(mesh.mesh.flatten().tolist())
    if any(set(other.mesh.flatten().tolist()) - ranks for other in meshes):
        raise ConfigError("the parameters' meshes do not lie in one of them; give mesh=, the ranks that share the work")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.mesh_dim_names is None:
        raise ConfigError("expected a mesh whose dims have names; give init_device_mesh mesh_dim_names")
    return mesh._flatten().get_group()


def _box(param: torch.Tensor) -> Box:
    if not isinstance(param, DTensor):
        return Box((0,) * param.ndim, tuple(param.shape))
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return Box(tuple(offset), tuple(shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's piece, placed as the parameter is."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return None if grad is None else _local(grad)


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return dtype.itemsize * int(torch.Size(shape).numel())
