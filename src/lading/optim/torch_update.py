"""Any ``torch.optim.Optimizer`` whose update treats elements alone: its own ``step`` moves parameters part by part.

What it keeps of a parameter, and that it treats elements alone, is found by trial (``rule_of_optimizer``), on 256
numbers, before anything else happens: the whole must equal its parts to the bit. Nothing here knows an optimizer by
name, so one from another package serves as well.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from inspect import signature, unwrap
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, cast

from lading.errors import ConfigError, check_type
from lading.optim.registry import name_of
from lading.optim.rule import INSTEAD, ParameterRule, States, StateSpec, check_elementwise, trial_of
from lading.permissions import check_code

if TYPE_CHECKING:
    import torch

_STEP = "step"
#: Learning rate of the trial: a warm-up begins at 0, where nothing would be seen.
_TRIAL_LR = 1e-2
#: Share of its time that reading or writing a number again takes, as a run of elements mostly lies in a cache; and how
#: often a number is touched where elements are set by a mask. Measured: 0.5 to 0.75 for 15 optimizers, and 9, 512 to
#: 2048 rows, torch 2.13 (benchmarks/optimizers/torch_updates.py).
_AGAIN, _BY_MASK = 0.65, 10
#: Updates after those of the trial, of which the last is taken for any later one.
_LATER = 6


@dataclass(frozen=True, kw_only=True)
class TorchUpdate(ParameterRule):
    """Update by a torch optimizer's own code; made by ``rule_of_optimizer``.

    Attributes:
        optimizer: Its class, as "module:Class".
        elementwise: Names of the states that have the parameter's shape, with spaces between.
        scalars: Names of those that are one number, each part of a parameter having its own.
        step_kind: Type of the number of updates among its states: "tensor", "int", or "" where it keeps none.
        seeded: Whether states are made with the optimizer; else its first update makes them.
        temporaries: Numbers that an update allocates for each element.
        passes: Times an update reads or writes an element besides operands once each, as far as that takes time.
        calls: Operations that an update makes.
        numbers: A parameter group without its parameters and its rate, as JSON; "" are those of the class.
    """

    optimizer: str = "torch.optim.sgd:SGD"
    elementwise: str = ""
    scalars: str = ""
    step_kind: str = ""
    seeded: bool = False
    temporaries: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]  # each optimizer has its own
    passes: float = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    calls: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    numbers: str = ""

    planned: ClassVar[tuple[str, ...]] = (
        "optimizer", "elementwise", "scalars", "step_kind", "seeded", "temporaries", "passes", "calls",
    )  # fmt: skip
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_code(self.optimizer, "optimizer")  # here, as updates run on threads, which have no grant of a command

    def moves(self, dtype: str) -> bool:
        """Whether it moves weights of a dtype: the optimizer itself was tried on them."""
        return True

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Shapes of the states; the number of updates is not among them."""
        cut = {name: StateSpec(shape) for name in self.elementwise.split()}
        return cut | {name: StateSpec((), "float32") for name in self.scalars.split()}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Give the optimizer one parameter with its states, and let it step."""
        import torch

        assert step is not None
        stand_in = _stand_in(self.optimizer, self.numbers, get_ident())
        group, number = stand_in.param_groups[0], step.item()
        group["lr"], group["params"] = lr, [param]
        before: dict[str, Any] = {}
        if number > 1 or self.seeded:
            before = dict(states)
            if self.step_kind:
                before[_STEP] = torch.tensor(number - 1) if self.step_kind == "tensor" else int(number) - 1
            stand_in.state[param] = before
        param.grad = grad
        try:
            stand_in.step()
            after = stand_in.state[param]
            for name, place in states.items():
                if after[name] is not place:
                    place.copy_(after[name])
        finally:
            stand_in.state.clear()
            group["params"], param.grad = [], None

    @property
    def switches(self) -> str:
        """Numbers with what is not zero as true: states follow from these alone, and schedules seldom change them."""
        numbers = json.loads(self.numbers or "{}")
        return json.dumps(
            {key: n != 0 if isinstance(n, (int, float)) else type(n).__name__ for key, n in numbers.items()}
        )

    def plain(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """Make the optimizer itself."""
        optimizer = _build_optimizer(self.optimizer, json.loads(self.numbers or "{}"))
        optimizer.param_groups[0]["params"] = list(params)
        return optimizer


def checked_rule(optimizer: object) -> ParameterRule:
    """Make the rule of an optimizer of torch, or return a rule, tried where it does not come with Lading.

    Raises:
        ConfigError: as ``rule_of_optimizer`` and ``check_elementwise``, or it is neither.
    """
    import torch

    if isinstance(optimizer, torch.optim.Optimizer):
        return rule_of_optimizer(optimizer)
    check_type(
        "optimizer", optimizer, ParameterRule,
        "a lading.AdamW or another of lading.optimizer, or an optimizer of torch; what moves matrices is told to "
        "lading.plan",
    )  # fmt: skip
    rule = cast(ParameterRule, optimizer)
    if ":" in name_of(rule):
        check_elementwise(rule)
    return rule


def rule_of_optimizer(optimizer: torch.optim.Optimizer) -> TorchUpdate:
    """Find out by trial what an optimizer keeps of a parameter, and that it treats elements alone.

    Returns:
        The rule of its first parameter group; see ``rules_of_groups``.

    Raises:
        ConfigError: its update does not treat elements alone, or cannot be run part by part; or something runs beside
            it; says why, and what to do.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}:{kind.__qualname__}"
    _refuse_what_runs_beside(optimizer)
    tried: dict[str, TorchUpdate] = {}
    for numbers in {_numbers(name, group): None for group in optimizer.param_groups}:
        rule = _tried_or_refused(name, numbers)
        tried[", ".join(rule.state_specs(()))] = rule
    if len(tried) > 1:
        raise ConfigError(
            f"optimizer: expected every parameter group of {kind.__name__} to keep the same states, got "
            f"{' beside '.join(names or 'none' for names in tried)}; give the groups the same momentum and the like"
        )
    most = {key: max(getattr(rule, key) for rule in tried.values()) for key in ("temporaries", "passes", "calls")}
    first = next(iter(tried.values()))
    return replace(first, **most, **_of_group(name, optimizer.param_groups[0]))


def rules_of_groups(rule: TorchUpdate, optimizer: torch.optim.Optimizer) -> tuple[TorchUpdate, ...]:
    """Rule of each parameter group with the numbers that it has now, whoever changed them.

    Raises:
        ConfigError: a number of a group is none, or something runs beside the step.
    """
    _refuse_what_runs_beside(optimizer)
    return tuple(replace(rule, **_of_group(rule.optimizer, group)) for group in optimizer.param_groups)


def check_states(rule: TorchUpdate) -> None:
    """Try the numbers that a rule has now.

    Raises:
        ConfigError: with them the optimizer keeps other states than were planned.
    """
    planned, states_now = (
        ", ".join(rule_shown.state_specs(())) or "none"
        for rule_shown in (rule, _tried_or_refused(rule.optimizer, rule.numbers))
    )
    if planned != states_now:
        raise ConfigError(
            f"optimizer: expected parameter groups by which {rule.optimizer} keeps the states that were planned, "
            f"{planned}, found one by which it keeps {states_now}: {rule.numbers}; set it back, or plan again and make "
            "another Trainer"
        )


def _tried_or_refused(name: str, numbers: str) -> TorchUpdate:
    try:
        return _tried(name, numbers)
    except ConfigError:
        raise
    except Exception as error:
        kind = import_module("torch.optim").Optimizer
        if isinstance(error, AttributeError) and isinstance(error.obj, kind):  # the trial has no ``__init__``
            raise ConfigError(
                f"optimizer: expected one that goes on from its parameter groups and states alone, {name} reads "
                f"{error.name} of itself; put it into the parameter groups; or {INSTEAD}"
            ) from error
        raise ConfigError(
            f"optimizer: expected one whose update treats elements alone, so that parameters can be moved part by "
            f"part; {name.rpartition(':')[2]} failed on a vector of its own: {type(error).__name__}: {error}; {INSTEAD}"
        ) from error


def _refuse_what_runs_beside(optimizer: torch.optim.Optimizer) -> None:
    """Raise for hooks of an optimizer's step, and for what was put in the place of something of its class.

    A planned step updates each parameter as its gradient is there, by the class's own ``step`` on a part: it calls no
    hook, and sees no attribute of the object.
    """
    of_torch = import_module("torch.optim.optimizer")  # hidden from type checkers behind a class
    state, kind = vars(optimizer), type(optimizer)
    hooks = [
        hook
        for hooks_of_kind in (
            state.get("_optimizer_step_pre_hooks"), state.get("_optimizer_step_post_hooks"),
            of_torch._global_optimizer_pre_hooks, of_torch._global_optimizer_post_hooks,
        )
        for hook in (hooks_of_kind or {}).values()
        if not str(getattr(hook, "__module__", "")).startswith("lading.")  # of ``lading.apply``: looks at its own alone
    ]  # fmt: skip
    if hooks:
        raise ConfigError(
            f"optimizer: expected no hooks of its step, which a planned step does not call, found "
            f"{', '.join(getattr(hook, '__qualname__', repr(hook)) for hook in hooks)}; remove them, clip with "
            "clip_norm=, and run the rest after trainer.step"
        )
    changed = [key for key, value in state.items() if hasattr(kind, key) and value is not getattr(kind, key)]
    if getattr(state.get(_STEP), "_wrapped_by_lr_sched", False) and unwrap(state[_STEP]) is unwrap(kind.step):
        changed.remove(_STEP)  # a schedule of torch counts calls
    if changed:
        raise ConfigError(
            f"optimizer: expected attributes of the class {kind.__name__}, whose step runs on parts of parameters, "
            f"found its own for {', '.join(changed)}; write a class with them, and what is to change into the "
            "parameter groups"
        )


def _of_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(group["lr"], (int, float)):  # arithmetic with a tensor rounds elsewhere
        raise ConfigError(
            f"optimizer: expected a learning rate of {name} that is a number, got a {type(group['lr']).__name__}; a "
            "tensor becomes one by .item()"
        )
    return {"lr": float(group["lr"]), "numbers": _numbers(name, group)}


def _numbers(name: str, group: Mapping[str, Any]) -> str:
    """Write a parameter group without its parameters and its rate, which changes with every step."""
    try:
        return json.dumps({key: value for key, value in group.items() if key not in ("params", "lr", "param_names")})
    except TypeError:
        kinds = ", ".join(
            f"{key} = {value!r}"[:60]
            for key, value in group.items()
            if key not in ("params", "lr") and not _is_text(value)
        )
        raise ConfigError(
            f"optimizer: expected numbers, texts and flags in the parameter groups of {name}, got {kinds}; "
            "tensors become numbers by .item()"
        ) from None


def _is_text(value: object) -> bool:
    """Whether JSON can write a value."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=256)
def _stand_in(name: str, numbers: str, thread: int) -> torch.optim.Optimizer:
    """Make an optimizer of a class without parameters, with a group of these numbers; its own where there are none.

    Args:
        thread: Number of the thread that uses it. An update puts its parameter into it for a while, and updates of one
            step run at the same time on the device and on the host, as do those of trainers on threads of their own.
    """
    import torch

    optimizer = _build_optimizer(name, json.loads(numbers or "{}"))
    if not numbers:  # an operation by itself, as where its memory is measured: a plan has no numbers
        kind: Any = type(optimizer)
        rate = {"lr": _TRIAL_LR} if "lr" in signature(kind.__init__).parameters else {}
        usual = kind([torch.nn.Parameter(torch.zeros(1))], **rate)
        optimizer.defaults, optimizer.param_groups = usual.defaults, [{**usual.param_groups[0], "params": []}]
    return optimizer


def _build_optimizer(name: str, numbers: Mapping[str, Any]) -> torch.optim.Optimizer:
    kind: Any = import_module(name.partition(":")[0])
    for part in name.partition(":")[2].split("."):
        kind = getattr(kind, part, None)
        if kind is None:
            raise ConfigError(f"optimizer: expected {name!r} to be a class that can be imported, found none")
    optimizer = kind.__new__(kind)
    groups = [{"lr": _TRIAL_LR, **numbers, "params": []}]
    optimizer.__setstate__({"defaults": dict(numbers), "state": defaultdict(dict), "param_groups": groups})
    return optimizer


def _tried(name: str, numbers: str) -> TorchUpdate:
    """Run three updates of a small vector, whole and in parts.

    Raises:
        ConfigError: they differ, or leave what cannot be kept for each part.
    """
    import torch

    with torch.inference_mode(False), torch.no_grad():
        param, grads = trial_of(256)
        rule, expected, states = _watched(name, numbers, param, grads)
        initial = _initial(rule, name, param)
        check_elementwise(rule, initial)
        for number, grad in enumerate(grads, 1):
            rule.update(param, grad, initial, lr=_TRIAL_LR, step=torch.tensor(float(number)))
        if not torch.equal(param, expected) or any(not torch.equal(initial[key], states[key]) for key in initial):
            raise ConfigError(
                f"optimizer: expected one that goes on from its parameter groups and states alone, {name} does not; "
                f"{INSTEAD}"
            )
    return rule


def _watched(
    name: str, numbers: str, param: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[TorchUpdate, torch.Tensor, dict[str, torch.Tensor]]:
    """Run the optimizer on a whole vector; returns its rule, and what the parameter and the states become."""
    import torch

    optimizer, trial, seeded = _build_optimizer(name, json.loads(numbers)), param.clone().view(16, 16), False
    group = optimizer.param_groups[0]
    group["params"] = [trial]
    most = 0
    for grad in grads:
        trial.grad = grad.view(16, 16)
        try:
            most = max(most, _worked(optimizer)[0])
        except KeyError:
            if seeded or (state := _seed(name, group)) is None:
                raise
            optimizer.state[trial], seeded = state, True
            most = max(most, _worked(optimizer)[0])
    later = deepcopy(optimizer)  # the first updates of some do less
    late_bytes, touched, calls = [_worked(later) for _ in range(_LATER)][-1]
    most = max(most, late_bytes)
    unread_keys = {key for key, value in group.items() if key != "params"} ^ {"lr", *json.loads(numbers)}
    if unread_keys or json.loads(_numbers(name, group)) != json.loads(numbers):
        raise ConfigError(f"optimizer: expected a step to leave the parameter groups as they are, {name} changes them")
    state = {key: value for key, value in optimizer.state[trial].items() if value is not None}
    step = state.pop(_STEP, None)
    odd = [key for key, value in state.items() if not isinstance(value, torch.Tensor) or value.numel() not in (1, 256)]
    if odd:
        raise ConfigError(
            f"optimizer: expected states of the parameter's shape or of one number, {name} keeps {', '.join(odd)}; "
            f"{INSTEAD}"
        )
    extra_passes = touched // trial.numel() - 3 - 2 * sum(value.numel() > 1 for value in state.values())
    rule = TorchUpdate(
        # A fused kernel may say that it writes a gradient.
        passes=_AGAIN * extra_passes if extra_passes > 1 else 0.0, calls=calls,
        lr=_TRIAL_LR, optimizer=name, numbers=numbers, seeded=seeded, temporaries=-(-most // (4 * param.numel())),
        elementwise=" ".join(key for key, value in state.items() if value.numel() > 1),
        scalars=" ".join(key for key, value in state.items() if value.numel() == 1),
        step_kind="" if step is None else "tensor" if isinstance(step, torch.Tensor) else "int",
    )  # fmt: skip
    return rule, trial.flatten(), {key: value.flatten() if value.dim() else value for key, value in state.items()}


def _initial(rule: TorchUpdate, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """States of a vector before the first update: the optimizer's where it makes them, else zeros."""
    import torch

    seed = _seed(name, {**json.loads(rule.numbers), "lr": rule.lr, "params": [param]}) if rule.seeded else None
    return {
        key: torch.zeros(state.shape) if seed is None else seed[key]
        for key, state in rule.state_specs(tuple(param.shape)).items()
    }


def _seed(name: str, group: Mapping[str, Any]) -> dict[str, Any] | None:
    """States that an optimizer makes for a parameter at once; None if it makes none."""
    import torch

    kind = type(_build_optimizer(name, {}))
    arguments = signature(kind.__init__).parameters
    optimizer = kind(
        [torch.nn.Parameter(group["params"][0].clone())],
        **{key: value for key, value in group.items() if key in arguments and key != "params"},
    )
    return next(iter(optimizer.state.values()), None)


def _worked(optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Let an optimizer step; returns the bytes that its operations made, the numbers they touched, and how many ran."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def numbers(*values: Any) -> int:
        """Elements of tensors, one number for each of a parameter's; a tensor of one number counts nothing."""
        return sum(getattr(t, "numel", int)() for t in tree_leaves(values) if getattr(t, "ndim", 0))

    class OperationCounter(TorchDispatchMode):
        size_bytes = touched = calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = func(*args, **kwargs)
            writes = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
            makes = all(info.alias_info is None for info in func._schema.returns)
            if func.namespace != "aten" or not (makes or any(writes.values())):
                return out  # a view, or a mark of the profiler
            outputs = out if makes else ()
            named_args = {**dict(zip(writes, args, strict=False)), **kwargs}
            written = [value for name, value in named_args.items() if writes[name]]
            by_mask = any(getattr(t, "dtype", None) is torch.bool for t in tree_leaves(named_args.get("indices")))
            self.touched += numbers(written) * (_BY_MASK - 2) if by_mask else numbers(written, outputs)
            self.touched += numbers(named_args)
            self.size_bytes += sum(getattr(t, "nbytes", 0) for t in tree_leaves(outputs))
            self.calls += 1
            return out

    with OperationCounter() as work:
        optimizer.step()
    return work.size_bytes, work.touched, work.calls
