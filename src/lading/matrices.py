"""Optimizers of whole matrices on stock modules: plain, DDP, FSDP2, HSDP, tensor parallel, and these together.

>>> optimizer = lading.optim.Muon(
...     [{"params": hidden}, {"params": rest, "rule": AdamW(lr=3e-4)}], lr=0.02, mesh=mesh
... )
>>> loss.backward(); optimizer.step()

Which rank owns which matrix is planned (``lading.planner.owners``), how pieces get there follows from the placements of
DTensors (``lading.ir.routes``), and a step is ``lading.runtime.matrix_route``.
"""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lading.errors import ConfigError
from lading.ir.routes import Moves, ShardRegion, WholeMatrix, micro_groups, moves_of, pieces, wholes_of
from lading.optim.registry import matrix_rule, rule_names
from lading.optim.rule import MatrixRule, Rule, StatePlace, States, StateSpec, dtype_of
from lading.planner.owners import DirectionCosts, Matrix, Owners, assign, spread_turns
from lading.runtime.exchange import Report, Team, Traffic, Verdict, agree, agree_done, all_finite
from lading.runtime.gangs import shares
from lading.runtime.in_flight import Early, Late, Moving, run
from lading.runtime.live import LiveSettings, Setting, digest
from lading.runtime.matrix_route import MatrixRoute, ReplicaRoute
from lading.runtime.members import How, OptimizerMember, PieceRule, facts_of, groups_of, members_of, rules_of, split
from lading.runtime.optimizer_hooks import before_reading, when_final
from lading.runtime.shard_regions import gradient, piece, process_group, ranks_of, region_of, shared_mesh
from lading.runtime.state_shards import Pieces, check_states, take_over


class MatrixOptimizer(torch.optim.Optimizer):
    """Optimizer, as torch's, of rules that need whole matrices.

    Attributes:
        skipped: Number of steps that were not taken as a gradient was not finite; nothing moved.
        owners: Ranks that compute each matrix, with the bound (``lading.planner.owners.Owners``); None with no matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: MatrixRule,
        lr: float,
        *,
        mesh: DeviceMesh | None = None,
        model: nn.Module | None = None,
        how: How | None = None,
    ) -> None:
        """Make an optimizer; every rank of the mesh makes it alike.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either; a group may have its own ``rule`` (also
                ``lading.AdamW``, for what is no matrix), ``lr``, and ``parts``: rows of the parts of a fused matrix.
            rule: Rule of groups that name none.
            lr: Learning rate of groups that name none.
            mesh: Ranks that share the work; None for the mesh of the parameters, or all ranks where they have none.
            model: The outermost module, cut as it will be, where exchanges overlap with it.
            how: Settings of how steps are run.
        Raises:
            ConfigError: a parameter that is no matrix under a rule for matrices; ranks that differ in what they have.
        """
        how = how or How()
        entries, rules = groups_of(params, rule, lr)
        super().__init__(entries, {"lr": lr, "parts": ()})
        self.defaults["momentum"] = 0.0  # schedules that cycle it look for it here, and write their own into groups
        self.how = how
        self.moves: Moves | None = None
        self.skipped = 0
        numbered = enumerate(zip(self.param_groups, rules, strict=True))
        self._members = [m for number, (group, r) in numbered for m in members_of(number, group, r)]
        mesh = shared_mesh(mesh, [m.param for m in self._members])
        self._call = f"lading.optim.{type(self).__name__}"
        self._live = LiveSettings(self.param_groups, rules, reduces=how.reduces)
        facts = facts_of(self._members, how)
        self._live.current = self._live.agree(self._call, ranks_of(mesh), facts, how.timeout_s)
        self._team = Team.of(process_group(mesh))
        with _uncollected():
            self._set_up(model)

    def _set_up(self, model: nn.Module | None) -> None:
        """Find matrices, plan their owners, and make routes, states and hooks."""
        how = self.how
        self._wholes = [matrix for number, m in enumerate(self._members) for matrix in self._wholes_of(number, m)]
        self._check_names()
        self._rules = rules_of(self._wholes, self._members, how)
        holdings = self._holdings()
        self._regions = [row[self._team.rank] for row in holdings]
        self._costs = DirectionCosts.of(how.machine)
        self._items = [self._item(number) for number in range(len(self._wholes))]
        self.owners = self._planned()
        ranks = self.owners.ranks if self.owners else ()
        owner = [gang[0] for gang in ranks]
        self._route = self._routed(holdings, ranks, self._travelling(owner, model))
        self._whole = {number: self._fresh(number) for number, rank in enumerate(owner) if rank == self._team.rank}
        for member in self._members:
            self._begin(member)
        self._show_owned()
        self._early, self._late = Early(self._route, self._prepared, self._blank), Late(self._device)
        self._handles: list[RemovableHandle] = []
        self._hook(model)

    def report(self) -> str:
        """Describe owners in words: loads, whole states and bytes sent, each beside a lower bound for any owners."""
        return self._costs.report(self.owners, self.moves) if self.owners else "no matrices"

    @property
    def traffic(self) -> Traffic:
        """Counts of what this rank has sent so far."""
        return self._route.traffic

    def _wholes_of(self, number: int, member: OptimizerMember) -> list[WholeMatrix]:
        """Parts of a parameter that have an owner each."""
        param = member.param
        if self.how.reduces and isinstance(param, DTensor):
            raise ConfigError(
                f"{member.name}: expected replicas under reduces, got a DTensor, whose gradient is reduced"
            )
        if member.is_matrix:
            return wholes_of(number, member.name, param.shape, member.group["parts"])
        return (
            [WholeMatrix(member.name, number, ShardRegion((0,) * param.ndim, tuple(param.shape)))]
            if self.how.reduces
            else []
        )

    def _check_names(self) -> None:
        for names in ([m.name for m in self._members], [matrix.name for matrix in self._wholes]):
            if twice := sorted(name for name, count in Counter(names).items() if count > 1):
                raise ConfigError(f"expected parameters of different names, found {twice[0]!r} more than once")

    def _holdings(self) -> list[list[ShardRegion]]:
        """Regions that every rank has of every parameter, by parameter and rank; the same list on all ranks."""
        everyone = self._team.gather([region_of(m.param) for m in self._members])
        return [[regions[number] for regions in everyone] for number in range(len(self._members))]

    def _planned(self) -> Owners | None:
        if not self._wholes:
            return None
        items = self._items
        planned = spread_turns(items, assign(items, self._team.ranks, cap_bytes=self.how.state_cap_bytes))
        digest = hashlib.sha256(repr(planned.ranks).encode()).hexdigest()
        if len(set(self._team.gather(digest))) > 1:
            raise ConfigError("ranks planned different owners: expected equal versions of Lading on every rank")
        return planned

    def _routed(
        self, holdings: list[list[ShardRegion]], ranks: Sequence[tuple[int, ...]], travelling: list[list[int]]
    ) -> MatrixRoute | ReplicaRoute:
        if self.how.reduces:
            pairs = list(zip(self._wholes, self._rules, strict=True))
            return ReplicaRoute(pairs, ranks, travelling, self._team, batched=self.how.batched)
        wholes = [(matrix, cast(Rule, rule)) for matrix, rule in zip(self._wholes, self._rules, strict=True)]
        routes = pieces(self._wholes, holdings, [gang[0] for gang in ranks])
        self.moves = moves_of(routes, self._team.ranks)
        return MatrixRoute(wholes, ranks, travelling, routes, self._team, batched=self.how.batched)

    def _travelling(self, owner: list[int], model: nn.Module | None) -> list[list[int]]:
        """Groups in the order in which backward or forward comes to them; what cannot begin early is a group apart."""
        order, unhooked = list(range(len(owner))), []
        if model is not None:
            place = {id(parameter): place for place, parameter in enumerate(model.parameters())}
            places = [place.get(id(member.param), -1) for member in self._members]
            order.sort(key=lambda n: places[self._wholes[n].parameter], reverse=self.how.under_backward)
        if self.how.under_backward:
            hooked = self._hooked
            unhooked = [n for n in order if self._wholes[n].parameter not in hooked]
            order = [n for n in order if self._wholes[n].parameter in hooked]
        seconds = [self._items[number].seconds for number in order]
        most = max(1, self.how.groups - bool(unhooked))
        groups = micro_groups(seconds, [owner[number] for number in order], most)
        return [[order[place] for place in group] for group in groups] + ([unhooked] if unhooked else [])

    @property
    def _hooked(self) -> set[int]:
        """Numbers of the parameters whose gradient is told as it becomes final."""
        members = enumerate(self._members)
        final = {n for n, m in members if self.how.reduces or (m.is_matrix and isinstance(m.param, DTensor))}
        return {number for number in final if self._members[number].param.requires_grad}

    def _hook(self, model: nn.Module | None) -> None:
        if (self.how.overlap == "step") != (model is None):
            expected = "model=, the outermost module" if model is None else "another overlap with model="
            raise ConfigError(f"expected {expected}, got overlap {self.how.overlap!r}")
        if self.how.under_backward and not self._hooked:
            raise ConfigError(
                f"expected overlap step or forward, got {self.how.overlap}: no matrix is a DTensor that needs a "
                "gradient, and replicas that hold reduced gradients send none to owners"
            )
        if model is not None:
            parameters = {n: self._members[n].param for n in {matrix.parameter for matrix in self._wholes}}
            self._handles += before_reading(model, parameters, self._late)
        if self.how.under_backward:
            hooked = {n: (self._members[n].param, self._regions[n]) for n in self._hooked}
            self._handles += when_final(hooked, self._early.arrived)

    def _states_of(self, number: int) -> dict[str, StateSpec]:
        """Specifications of a matrix's states that lie with its owner, by name."""
        matrix, rule = self._wholes[number], self._rules[number]
        specs = (
            rule.state_specs(matrix.region.shape)
            if isinstance(rule, PieceRule)
            else rule.settings.state_specs(*matrix.rows_columns)
        )
        return {name: state for name, state in specs.items() if self.how.reduces or state.place is StatePlace.WHOLE}

    def _fresh(self, number: int) -> States:
        param = self._members[self._wholes[number].parameter].param
        return {
            name: torch.zeros(state.shape, dtype=dtype_of(state, param.dtype), device=param.device)
            for name, state in self._states_of(number).items()
        }

    def _item(self, number: int) -> Matrix:
        matrix, rule = self._wholes[number], self._rules[number]
        dtype = self._members[matrix.parameter].param.dtype
        owned_bytes = sum(_bytes(state.shape, dtype_of(state, dtype)) for state in self._states_of(number).values())
        if isinstance(rule, PieceRule):
            return Matrix(
                matrix.name, self._costs.elements(matrix.region.size), matrix.region.size, state_bytes=owned_bytes
            )
        turn = getattr(rule, "shift", 0) % getattr(rule.settings, "frequency", 1)
        settings, shape = rule.settings, matrix.rows_columns
        return Matrix(
            matrix.name, self._costs.matrix(settings, *shape), matrix.region.size, state_bytes=owned_bytes, turn=turn,
            shared_s=self._costs.shared(settings, *shape, shares(rule, shape)),
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, once.

        Raises:
            ValueError: a parameter has a gradient on some ranks only, or one that was changed after it had been sent,
                or none has one; on every rank, and nothing has moved.
            ConfigError: ``param_groups`` has a key that is not read, a value that cannot be or cannot change, or others
                on some rank; on every rank, and nothing has moved.
            RuntimeError: an owner could not compute a direction.
        """
        self.finish()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {number: gradient(m.param, self._regions[number]) for number, m in enumerate(self._members)}
        gradients = {number: grad for number, grad in grads.items() if grad is not None}
        settings = self._live.read_or_error(begun=bool(self._early.moving))
        verdict = self._agreed(gradients, settings)
        if verdict.error or not verdict.finite or not verdict.settled:
            self._early.drop(verdict.max_sent_groups)
        if verdict.error:
            raise ValueError(verdict.error)
        if isinstance(settings, ConfigError) or not verdict.settled:  # all know that something is wrong: now, what
            settings = self._live.agree(f"{self._call}.step", self._team.members, {}, self.how.timeout_s, settings)
        self._follow(settings)
        if not verdict.finite:
            self.skipped += 1
            return loss
        self._move(gradients)
        return loss

    def _follow(self, settings: list[Setting]) -> None:
        """Compute with these settings from now on; what is still to land lands with those of before."""
        if settings == self._live.current:
            return
        self.finish()
        self._live.current = settings
        for member in self._members:
            cast(Any, member.rule).settings = settings[member.number].rule
        for matrix, rule in zip(self._wholes, self._rules, strict=True):
            cast(Any, rule).settings = settings[self._members[matrix.parameter].number].rule

    def _agreed(
        self, gradients: Mapping[int, torch.Tensor], settings: list[Setting] | ConfigError, *, steps: bool = True
    ) -> Verdict:
        has = {m.name: number in gradients for number, m in enumerate(self._members)}
        early_changes = self._early.changed(gradients)
        changed = {m.name: early_changes.get(number, False) for number, m in enumerate(self._members)}
        finite = all_finite(list(gradients.values())) if self.how.skip_nonfinite else None
        settings_digest = None if isinstance(settings, ConfigError) else digest(settings)
        report = Report(has, changed, finite, self._early.groups, steps, settings_digest)
        return agree(report, len(self._route.groups), self._team, self._device)

    def _move(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Move matrices by their owners, and what is no matrix here, while the first matrices travel."""
        flights, moving, groups = self._early.take()
        for number, moving_parameter in moving.items():
            for key, value in self._local_states(number).items():
                value.copy_(moving_parameter.next_states[key])
        elsewhere = {matrix.parameter for matrix in self._wholes}
        for number in gradients.keys() & elsewhere - moving.keys():
            moving[number] = self._moving(number, gradients[number], self._local_states(number))
        num_sent = len(flights)
        for group in range(groups, len(self._route.groups)):
            flights.extend(self._route.flights(group, moving))
        ahead = len(flights) if self.how.overlap == "both" else min(1, len(flights))
        for flight in flights[num_sent:ahead]:
            flight.send()
        rates = {number: self._live.current[self._members[number].number].lr for number in gradients}
        for number in sorted(gradients.keys() - elsewhere):
            self._move_here(number, gradients[number], rates[number])
        for number in gradients:
            self.state[self._members[number].param]["step"] += 1
        if self.how.overlap == "both":
            flights.reverse()
        run(flights, max(num_sent, ahead), self._whole, rates, late=self.how.under_forward)
        if self.how.under_forward:
            self._late.keep(flights)
        if any(self._may_fail(number, moving) for number in range(len(self._wholes))):
            self._agree_done()

    def _may_fail(self, number: int, moving: Mapping[int, Moving]) -> bool:
        """Whether a matrix is decomposed at this update, which may fail; all ranks know."""
        rule, parameter = self._rules[number], self._wholes[number].parameter
        if isinstance(rule, PieceRule) or parameter not in moving:
            return False
        return rule.settings.decomposes(moving[parameter].update, getattr(rule, "shift", 0))

    def _agree_done(self) -> None:
        """Raise on all ranks if a decomposition failed on one; do nothing where there are none to fail."""
        try:
            agree_done(self._route.failures, self._team, self._device)
        except RuntimeError:
            self.finish()
            raise

    def _move_here(self, number: int, grad: torch.Tensor, rate: float) -> None:
        member = self._members[number]
        assert isinstance(member.rule, PieceRule)
        member.rule.step(
            piece(member.param, self._regions[number]),
            grad,
            self._local_states(number),
            lr=rate,
            update=self._next(number),
        )

    def _moving(self, number: int, grad: torch.Tensor, states: States) -> Moving:
        """Make what travels of a parameter from its gradient; updates its elementwise ``states``."""
        member, update = self._members[number], self._next(number)
        if not self.how.reduces:
            assert not isinstance(member.rule, PieceRule)
            grad = member.rule.pre(grad, states, update)
        return Moving(piece(member.param, self._regions[number]), grad, self._regions[number], states, update)

    @torch.no_grad()
    def _prepared(self, number: int) -> Moving:
        """Make what travels of a parameter under backward: its states move once the step is taken."""
        settings = None if self._early.moving else self._live.read_or_error(begun=False)
        if isinstance(settings, list):  # what is wrong is told to all by the step
            self._follow(settings)
        grad = gradient(self._members[number].param, self._regions[number])
        assert grad is not None
        return self._moving(number, grad, {key: value.clone() for key, value in self._local_states(number).items()})

    def _blank(self, number: int) -> Moving:
        """Make zeros that travel as ``_prepared`` does."""
        param = piece(self._members[number].param, self._regions[number])
        rule = self._members[number].rule
        dtype = None if self.how.reduces or isinstance(rule, PieceRule) else rule.travels
        return Moving(param, torch.zeros_like(param, dtype=dtype), self._regions[number], {}, self._next(number))

    def _next(self, number: int) -> int:
        """Number of a parameter's next update, from 1."""
        return int(self.state[self._members[number].param]["step"]) + 1

    @property
    def _device(self) -> torch.device:
        return self._members[0].param.device

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context for all backwards of a step but the last, where exchanges begin under backward.

        Not needed where FSDP2 does not reduce then, by ``set_requires_gradient_sync(False)``.
        """
        self._early.last = False
        try:
            yield
        finally:
            self._early.last = True

    def finish(self) -> None:
        """End the last step where it ends under the next forward; for those who read parameters before."""
        self._late.finish()

    def close(self) -> None:
        """Give the parameters up, before another optimizer takes them over; on all ranks at once.

        Ends the last step, gives up what no step followed, and takes the hooks off the model.
        """
        self.finish()
        self._give_up()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _give_up(self) -> None:
        if self._early.stirred:
            verdict = self._agreed({}, self._live.current, steps=False)
            self._early.drop(verdict.max_sent_groups)
            if verdict.ranks_disagree:
                raise ValueError(verdict.error)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch's; gives up what a backward without a step has sent, on all ranks at once."""
        self._give_up()
        super().zero_grad(set_to_none)

    def _begin(self, member: OptimizerMember) -> None:
        """Make this rank's elementwise states of a parameter, before the first update."""
        param, state = member.param, self.state[member.param]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name, kind in self._cut_states(member).items():
            state[name] = torch.zeros_like(param, dtype=dtype_of(kind, param.dtype), requires_grad=False)

    def _cut_states(self, member: OptimizerMember) -> dict[str, StateSpec]:
        """Specifications of a parameter's states that lie as it does, by name."""
        if self.how.reduces:
            return {}
        rule, shape = member.rule, member.param.shape
        is_of_pieces = isinstance(rule, PieceRule)
        kinds = rule.state_specs(tuple(shape)) if is_of_pieces else rule.settings.state_specs(*shape[-2:])
        return {name: kind for name, kind in kinds.items() if kind.place is StatePlace.ELEMENTWISE}

    def _local_states(self, number: int) -> States:
        """Pieces of a parameter's elementwise states on this rank, by name."""
        member = self._members[number]
        state, kinds = self.state[member.param], self._cut_states(member)
        return {key: piece(state[key], self._regions[number]) for key in kinds}

    def state_dict(self) -> dict[str, Any]:
        """States in torch's form, by parameters' numbers, and groups.

        Give ``{"optimizer": optimizer}``, or what ``get_optimizer_state_dict(model, optimizer)`` makes of it, to
        ``torch.distributed.checkpoint``, to save and to load. Elementwise states are placed as their parameters, or are
        pieces of them with their owners; whole ones are there on their owner alone, so that another number of ranks,
        mesh, plan, or way of reducing gradients finds what it needs. So ``full_state_dict`` has all of Muon's states,
        but of SOAP's and Shampoo's only what one rank owns, which other ranks refuse to load.
        """
        self.finish()
        return super().state_dict()

    def _show_owned(self) -> None:
        """Put states that lie with this rank among torch's, which checkpoints see; they share memory."""
        owned_regions: dict[tuple[int, str], dict[ShardRegion, torch.Tensor]] = {}
        for number, states in self._whole.items():
            matrix, kinds = self._wholes[number], self._states_of(number)
            member = self._members[matrix.parameter]
            place = matrix.name.removeprefix(member.name).replace(".", "/")  # torch flattens names at dots
            for key, value in states.items():
                if kinds[key].place is StatePlace.WHOLE:
                    self.state[member.param][key + place] = value
                else:
                    owned_regions.setdefault((matrix.parameter, key), {})[matrix.region] = value.view(
                        matrix.region.shape
                    )
        for (parameter, key), parts in owned_regions.items():
            param = self._members[parameter].param
            self.state[param][key] = Pieces(param.shape, parts)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over states from ``state_dict`` of an optimizer of the same parameters and rules, grouped alike.

        Parameters may be numbered, as torch's optimizers do it, or named, as ``set_optimizer_state_dict`` does.

        Raises:
            ConfigError: a parameter, a matrix that this rank owns, or one of its states is missing, or parameters were
                others or grouped otherwise; nothing has been taken over.
        """
        saved, groups = state_dict.get("state", {}), state_dict.get("param_groups", [])
        self._live.check_loadable(groups)
        keys = [key for group in groups for key in group["params"]]
        states_by_name = {m.name: saved.get(key) for key, m in zip(keys, self._members, strict=True)}
        for member in self._members:
            states = states_by_name[member.name]
            if states is not None or member.param.requires_grad:  # torch leaves out what is frozen
                check_states(member.name, self.state[member.param], states)
        self._give_up()  # it was made with the states of before
        for member in self._members:
            for key, value in (states_by_name[member.name] or {}).items():
                take_over(self.state[member.param][key], value)
        self._live.load(groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does while an optimizer is made; refuse one afterwards.

        Raises:
            ConfigError: the optimizer is made already; owners are planned for all parameters at once.
        """
        if hasattr(self, "_members"):
            raise ConfigError("expected all parameters when a matrix optimizer is made; make another with all of them")
        super().add_param_group(param_group)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the collector of cycles: it would walk all objects there are, again and again, while 100,000 are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache
def optimizer_class(rule: type[MatrixRule]) -> type[MatrixOptimizer]:
    """Make the ``MatrixOptimizer`` of one rule, called as torch's optimizers are.

    Its arguments are parameters, ``lr``, ``mesh`` and ``model`` as of ``MatrixOptimizer``, and by name the settings of
    the rule and of ``How``.
    """

    def __init__(
        self: MatrixOptimizer, params: Iterable[Any], lr: float = rule.default_lr, *,
        mesh: DeviceMesh | None = None, model: nn.Module | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        rule_made, handling = split(rule, settings)
        MatrixOptimizer.__init__(self, params, rule_made, lr, mesh=mesh, model=model, how=handling)

    doc = (
        f"{rule.__name__} (``{rule.__module__}``) of matrices that ranks share; see ``MatrixOptimizer``.\n\n"
        "Products are taken, and gradients of matrices travel, in the number format of the rule's ``dtype`` where it "
        "has one: Muon's is bfloat16 as in ``torch.optim.Muon``, whatever parameters are, and dtype='float32' keeps "
        "float32. States have the parameters' own, or float32 where the rule says so."
    )
    return type(rule.__name__, (MatrixOptimizer,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


def __getattr__(name: str) -> type[MatrixOptimizer]:
    """Find the optimizer of a rule for matrices that comes with Lading, by the name of its settings' class."""
    for rule_name in rule_names(parameters=False):
        rule = matrix_rule(rule_name)
        if rule.__name__ == name:
            return optimizer_class(rule)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return dtype.itemsize * int(torch.Size(shape).numel())
