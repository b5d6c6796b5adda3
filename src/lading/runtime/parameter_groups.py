"""Parameter groups: the numbers and the states of a torch optimizer while a Trainer moves its parameters."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lading.errors import ConfigError
from lading.ir.graph import StepGraph
from lading.ir.sharding import units_of
from lading.ir.update_ops import rule_of
from lading.optim.rule import ParameterRule
from lading.optim.torch_update import TorchUpdate, check_states, rules_of_groups
from lading.runtime.custody import is_held
from lading.runtime.named import SavedValues, first_few, tensors_of
from lading.runtime.value_layout import Value

_STEP = "step"
#: What a checkpoint has of the groups' numbers, as JSON.
GROUPS = "lading.parameter_groups"
#: Room in a checkpoint for the numbers of a group, twice what AdamW's take, as schedulers add some.
_GROUP_BYTES = 600


def check_given(optimizer: torch.optim.Optimizer | None, rule: ParameterRule) -> None:
    """Refuse a rule whose numbers a torch optimizer has where none is given.

    Raises:
        ConfigError: there is none.
    """
    if optimizer is None and isinstance(rule, TorchUpdate):
        raise ConfigError(
            f"optimizer: expected the {rule.optimizer} that the plan was made for, as its parameter "
            "groups have the numbers, got None; give it to the Trainer too"
        )


def most_bytes(names: Iterable[str], groups: int) -> int:
    """Bytes of a checkpoint that so many groups of parameters with these names take at most."""
    return sum(len(json.dumps(name)) + len(", ") for name in names) + _GROUP_BYTES * groups


class ParameterGroups:
    """A torch optimizer's groups, and the place of each of its states in the step.

    Args:
        optimizer: Optimizer with the model's parameters.
        rule: What ``rule_of_optimizer`` made of it.
        model: Model that is trained.
        graphs: The whole steps of this rank, over the same values.
        stages: In a pipeline the whole step of each rank.

    Raises:
        ConfigError: there is no model, a parameter that is trained is in no group, or states do not fit the plan's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: ParameterRule,
        model: torch.nn.Module | None,
        graphs: Sequence[StepGraph],
        stages: Sequence[StepGraph] = (),
    ) -> None:
        assert isinstance(rule, TorchUpdate)
        if model is None:
            raise ConfigError("optimizer: expected the model that it has the parameters of, got None; give model=")
        self._optimizer, self._rule = optimizer, rule
        self._named = dict(tensors_of(model))
        self._members = self._read_members()
        self._places = _moved(graphs)
        graphs_by_stage = [[stage] for stage in stages] or [graphs]  # in one order on all ranks
        self._trained = [*dict.fromkeys(name for steps in graphs_by_stage for name in _moved(steps))]
        states = (state.name for steps in graphs_by_stage for state in steps[0].states)
        self._masters = {name.removesuffix(".master") for name in states if name.endswith(".master")}
        if missing := [name for name in self._trained if id(self._named[name]) not in self._members]:
            raise ConfigError(
                f"optimizer: expected every parameter that is trained in one of its groups, {first_few(missing)} "
                "are in none; add them, or set their requires_grad to False and capture again"
            )
        self._steps: dict[str, torch.Tensor] = {}
        self._step_dtypes: dict[str, torch.dtype] = {}  # of the optimizer's own numbers of updates
        self._taken: dict[str, dict[str, Any]] = {}  # states of each parameter, as the Trainer has taken them over
        self._switches: set[str] = set()
        names = (name for name, place in self._named.items() if id(place) in self._members)
        self._saved_bytes = most_bytes(names, len(optimizer.param_groups))
        if rule.seeded and self._masters:
            raise ConfigError(f"master_weights: expected an optimizer whose first update makes its states, got {rule}")

    def _read_members(self) -> dict[int, int]:
        groups = enumerate(self._optimizer.param_groups)
        return {id(p): number for number, group in groups for p in group["params"]}

    def rules(self) -> dict[int, TorchUpdate]:
        """Rule of each parameter's group with the numbers that it has now, by the parameter's storage on this rank.

        Raises:
            ConfigError: parameters came, went or changed their group since the Trainer was made, the numbers of one ask
                for other states, or the optimizer was given other states.
        """
        if replaced := [name for name in self._taken if not self._has_taken(name)]:
            raise ConfigError(
                f"optimizer: expected the states that the Trainer has taken over, found others for "
                f"{first_few(replaced)}, of which no step would know; load_state_dict before the Trainer is made, or "
                "trainer.load, or trainer.set_value by the names of single states"
            )
        if self._read_members() != self._members:
            raise ConfigError(
                "optimizer: expected the parameter groups that the Trainer was made with, found others; close it, "
                "capture and plan again, and make another"
            )
        rules = self.numbers()
        return {storage: rules[self._members[id(self._named[name])]] for name, storage in self._places.items()}

    def numbers(self) -> tuple[TorchUpdate, ...]:
        """Rule of each group with the numbers that it has now.

        Raises:
            ConfigError: those of a group ask for other states than were planned.
        """
        rules = rules_of_groups(self._rule, self._optimizer)
        for rule in rules:
            if rule.switches not in self._switches:
                check_states(rule)
                self._switches.add(rule.switches)
        return rules

    def stepped(self) -> None:
        """Tell learning-rate schedulers that the optimizer has made a step."""
        vars(self._optimizer)["_opt_called"] = True  # what torch's own schedulers look at

    def saved(self) -> dict[str, bytes]:
        """Write the numbers of each group, beside the names of its parameters, as a tensor of a checkpoint.

        It has as many bytes in every save, as saves beside training lay their memory out once.

        Raises:
            ConfigError: the groups got numbers for which it has no room.
        """
        numbers = [{**json.loads(rule.numbers), "lr": rule.lr} for rule in self.numbers()]
        text = json.dumps([*zip(self._names_of_groups(), numbers, strict=True)])
        if len(text) > self._saved_bytes:
            raise ConfigError(
                f"optimizer: expected numbers of parameter groups of up to {_GROUP_BYTES} bytes each, got more; leave "
                "numbers out that the optimizer does not use"
            )
        return {GROUPS: text.ljust(self._saved_bytes).encode()}

    def load(self, checkpoint: SavedValues, path: str) -> None:
        """Give the groups the numbers that a checkpoint has of them, as the optimizer's ``load_state_dict`` does.

        Warns where its groups are of other parameters: numbers then stay as they are.

        Args:
            path: Folder of the checkpoint, for the warning.
        """
        saved: list[tuple[list[str], dict[str, Any]]] = json.loads(bytes(checkpoint.read(GROUPS).tolist()))
        if [names for names, _ in saved] != self._names_of_groups():
            warnings.warn(
                f"{path} has learning rates and other numbers of parameter groups with other parameters: "
                "those of this optimizer stay as they are; set them if they are to be others",
                stacklevel=4,
            )
            return
        for group, (_, numbers) in zip(self._optimizer.param_groups, saved, strict=True):
            for key, number in numbers.items():
                group[key] = tuple(number) if isinstance(number, list) else number  # JSON has no tuples

    def _names_of_groups(self) -> list[list[str]]:
        """Names of the model's parameters in each group, in the model's order."""
        groups = [list[str]() for _ in self._optimizer.param_groups]
        for name, place in self._named.items():
            if id(place) in self._members:
                groups[self._members[id(place)]].append(name)
        return groups

    def filled(self) -> dict[str, torch.Tensor]:
        """States that the optimizer has already, by the names of their values."""
        states = {name: self._optimizer.state.get(place, {}) for name, place in self._named.items()}
        rows = ((f"{name}.{key}", value) for name, state in states.items() for key, value in state.items())
        return {name: torch.as_tensor(value) for name, value in rows if value is not None}

    def states(self, values: Mapping[str, Value]) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Tensor]]:
        """List the optimizer's tensors of states by the names of their values.

        What it would make at its first update, it is given now, without memory.

        Returns:
            All of them; and those that have values to take over.

        Raises:
            ConfigError: a parameter with a float32 master has states.
        """
        named: list[tuple[str, torch.Tensor]] = []
        filled: list[torch.Tensor] = []
        for name in self._trained:
            place = self._named[name]
            state: dict[str, Any] = self._optimizer.state[place]
            if name in self._masters:
                if state and float(state.get(_STEP, 1)):
                    raise ConfigError(
                        f"optimizer: expected no states of {name}, which a float32 master of the plan moves, found "
                        f"{', '.join(state)}; go on from a checkpoint of a Trainer"
                    )
                state.clear()  # made with the optimizer; its first update makes those of the master
                continue
            number = state.get(_STEP, bool(state))
            is_double = torch.get_default_dtype() is torch.float64  # which torch's optimizers count updates in, then
            default_dtype = torch.float64 if is_double else torch.float32
            self._step_dtypes[name] = number.dtype if isinstance(number, torch.Tensor) else default_dtype
            self._steps[name] = torch.tensor(float(number), dtype=torch.float32)  # as the plan counts
            if self._rule.step_kind == "tensor":
                state[_STEP] = self._steps[name]
            named.append((f"{name}.{_STEP}", self._steps[name]))
            filled.append(self._steps[name])
            for suffix, spec in self._rule.state_specs(values[name].shape).items():
                if state.get(suffix) is not None:
                    filled.append(state[suffix])
                else:
                    dtype = getattr(torch, values[f"{name}.{suffix}"].dtype)
                    state[suffix] = torch.zeros((), dtype=dtype, device=place.device).expand(spec.shape)
                named.append((f"{name}.{suffix}", state[suffix]))
            self._taken[name] = dict(state)
        return named, filled

    def _has_taken(self, name: str) -> bool:
        """Whether a parameter's states in the optimizer are the tensors that were taken over."""
        state, taken_state = self._optimizer.state.get(self._named[name], {}), self._taken[name]
        return len(state) == len(taken_state) and all(state.get(key) is value for key, value in taken_state.items())

    def values_of_states(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Values that the optimizer's tensors get back; of a number that each part has, the first part's."""
        numbers = [f"{name}.{suffix}" for name in self._trained for suffix in self._rule.scalars.split()]
        first_values = {name: values[name] for name in numbers}
        return {n: Value(v.dtype, (), v.storages[:1], owner=v.owner, owners=v.owners) for n, v in first_values.items()}

    def ended(self) -> None:
        """Leave the optimizer as if its own steps had been made: numbers of updates, no states before the first."""
        for name, step in self._steps.items():
            parameter = self._named[name]
            if is_held(step) or not self._has_taken(name):  # lost, as was said; or the user has loaded others since
                continue
            if not step.item() and not self._rule.seeded:
                self._optimizer.state.pop(parameter, None)
            elif self._rule.step_kind:
                state: dict[str, Any] = self._optimizer.state[parameter]
                state[_STEP] = step.to(self._step_dtypes[name]) if self._rule.step_kind == "tensor" else int(step)
            elif not self._optimizer.state.get(parameter):  # torch has no entry of a parameter without states
                self._optimizer.state.pop(parameter, None)
        self._steps, self._taken = {}, {}


def _moved(graphs: Sequence[StepGraph]) -> dict[str, int]:
    """Storage of each parameter, or of its shard, that a rank's steps move by a rule for elements, by name."""
    graph = graphs[0]
    steps = ((graph_of_op, op) for graph_of_op in graphs for op in graph_of_op.ops)
    rules = ((graph_of_op, op) for graph_of_op, op in steps if isinstance(rule_of(op), ParameterRule))
    moved_storages = {graph_of_op.first_piece(graph_of_op.storage_of(op.inputs[0])) for graph_of_op, op in rules}
    shards = {unit_storage: graph.storage_of(unit.shard) for unit_storage, unit in units_of(graph).items()}
    places = {p.names[0]: graph.storage_of(p.tensor) for p in graph.parameters}
    storage_of = {name: shards.get(storage, storage) for name, storage in places.items()}
    return {name: storage for name, storage in storage_of.items() if storage in moved_storages}
