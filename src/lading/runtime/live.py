"""Live settings: what the groups of parameters of an optimizer say now, read before each of its steps.

A schedule, or the user, writes ``group["lr"]`` or ``group["momentum"]`` between steps, as with torch's optimizers. What
an update is computed with counts from the next step on. What shapes states, what travels or who owns what was planned
when the optimizer was made: it stays, and changing it is an error, as is a key that nobody reads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch

from lading.alone import reducing_wrapper
from lading.errors import ConfigError, did_you_mean
from lading.optim.rule import MatrixRule, ParameterRule
from lading.runtime.agreement import Facts, agree_on

#: Settings that may change between steps.
LIVE = frozenset(("momentum", "nesterov", "weight_decay", "eps", "beta1", "beta2", "factor_beta", "grafting_eps"))
#: What an optimizer itself, its user and torch's schedules keep in a group.
_KEPT = frozenset(("params", "param_names", "name", "parts"))
#: What torch's schedules keep there; with the last two goes a "momentum", of rules that call it beta1, too.
_SCHEDULED = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"))


@dataclass(frozen=True)
class Setting:
    """Rule and learning rate that move a group of parameters in one step."""

    rule: MatrixRule | ParameterRule
    lr: float


class LiveSettings:
    """Settings of groups, as they were when the optimizer was made and as they are.

    Attributes:
        current: Settings that the optimizer computes with; what groups say counts once all ranks have it.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], rules: Sequence[MatrixRule | ParameterRule], *, reduces: bool
    ) -> None:
        """Write the settings of its rule into each group, where they are read from now on.

        Args:
            groups: ``Optimizer.param_groups``, the list itself.
            rules: One for each group.
            reduces: Whether the optimizer reduces gradients, so that nobody else may.
        """
        self._groups, self._made, self._rules = groups, list(groups), list(rules)
        self._params = [list(group["params"]) for group in groups]
        self._parts = [group["parts"] for group in groups]
        self._looks = 2 if reduces else 0  # when it is made, and at the first step: it may be wrapped between
        for group, rule in zip(groups, rules, strict=True):
            group.update(_settings(rule))
        self.current: list[Setting] = []

    def read(self, *, begun: bool = False) -> list[Setting]:
        """Settings that groups have now, in order.

        Args:
            begun: Whether gradients of the step travel already.
        Raises:
            ConfigError: a group has a key that nobody reads, or a value that is out of range or cannot change; or a
                wrapper reduces gradients that the optimizer is to reduce.
        """
        if self._looks:
            self._looks -= 1
            wrapper = reducing_wrapper([param for params in self._params for param in params])
            if wrapper is not None:
                raise ConfigError(
                    "expected gradients of each rank's own under reduces=True, found parameters in a "
                    f"{type(wrapper).__name__}, which reduces them already; leave reduces out, or train the plain one"
                )
        self._check_groups()
        settings = [self._setting(number, group) for number, group in enumerate(self._groups)]
        if begun and any(map(_begins_unlike, settings, self.current)):
            raise ConfigError(
                "param_groups: expected momentum and nesterov to stay from backward to step, as gradients travel under "
                "backward, found others; change them between step and backward"
            )
        return settings

    def read_or_error(self, *, begun: bool) -> list[Setting] | ConfigError:
        """Call ``read``, returning its error for a caller who tells it to all ranks."""
        try:
            return self.read(begun=begun)
        except ConfigError as error:
            return error

    def agree(
        self, call: str, ranks: Sequence[int], facts: Facts, timeout_s: float,
        settings: list[Setting] | ConfigError | None = None,
    ) -> list[Setting]:  # fmt: skip
        """Settings of groups, once all ranks have said the same (``agree_on``).

        Args:
            facts: Other facts that are to be the same.
            settings: Settings as they have been read; None reads them.
        """

        def prepare() -> tuple[list[Setting], Facts]:
            if isinstance(settings, ConfigError):
                raise settings
            settings_now = self.read() if settings is None else settings
            return settings_now, {**facts, "settings": _facts(settings_now)}

        return agree_on(call, ranks, prepare, timeout_s=timeout_s)

    def check_loadable(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Make sure that groups of a checkpoint have the parameters of these, in order.

        Raises:
            ConfigError: they do not.
        """
        sizes = [[len(group["params"]) for group in groups] for groups in (self._groups, saved)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"expected states of groups of {sizes[0]} parameters, found groups of {sizes[1]}; group parameters as "
                "they were"
            )
        for number, (group, saved_group) in enumerate(zip(self._groups, saved, strict=True)):
            is_numbered = all(isinstance(key, int) for key in saved_group["params"])
            names, others = group.get("param_names"), saved_group.get("param_names")
            if is_numbered and names and others and names != others:
                pair = next((a, b) for a, b in zip(names, others, strict=True) if a != b)
                raise ConfigError(
                    f"param_groups[{number}]: expected states of {pair[0]!r}, found those of {pair[1]!r}; give "
                    "parameters in the order in which they were saved"
                )

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take rates, live settings and what schedules keep over from groups of a checkpoint."""
        for group, saved_group, rule in zip(self._groups, saved, self._rules, strict=True):
            loaded = (LIVE & _settings(rule).keys()) | _SCHEDULED
            group.update({key: saved_group[key] for key in loaded if key in saved_group})

    def _check_groups(self) -> None:
        is_same = len(self._groups) == len(self._made) and all(map(_is, self._groups, self._made))
        if not is_same or not all(
            len(group["params"]) == len(params) and all(map(_is, group["params"], params))
            for group, params in zip(self._groups, self._params, strict=True)
        ):
            raise ConfigError(
                "param_groups: expected the groups and parameters that the optimizer was made with, found others; as "
                "owners are planned for all at once, make another optimizer, and take states over with load_state_dict"
            )

    def _setting(self, number: int, group: Mapping[str, Any]) -> Setting:
        rule, place = self._rules[number], f"param_groups[{number}]"
        settings = _settings(rule)
        known_keys = settings.keys() | _KEPT | _SCHEDULED
        cycled = "momentum" in group and "momentum" not in settings and "max_momentum" in group
        if cycled:
            known_keys |= {"momentum"}
        if unknown := [key for key in group if key not in known_keys]:
            hint = did_you_mean(unknown[0], known_keys)
            raise ConfigError(
                f"{place}: expected {', '.join(sorted(known_keys))}, got {unknown[0]!r}, which {type(rule).__name__} "
                f"does not read{hint}"
            )
        if missing := [key for key in (*settings, "lr", "parts") if key not in group]:
            raise ConfigError(f"{place}: expected {missing[0]!r}, found none; put it back")
        fixed = {"parts": self._parts[number], **{key: value for key, value in settings.items() if key not in LIVE}}
        for key, value in fixed.items():
            if group[key] != value:
                raise ConfigError(
                    f"{place}: expected {key} to stay {value!r}, as the optimizer was made, got {group[key]!r}; make "
                    "another optimizer, and take states over with load_state_dict"
                )
        changed = {
            key: _as(f"{place}, {key}", group[key], value)
            for key, value in settings.items()
            if key in LIVE and group[key] != value
        }
        if cycled and "beta1" in settings:
            changed["beta1"] = _as(f"{place}, momentum", group["momentum"], 0.0)
        return Setting(_replaced(place, rule, changed), _rate(place, group["lr"]))


def _facts(settings: Sequence[Setting]) -> dict[str, object]:
    """Settings by name, to be compared between ranks."""
    return {
        f"param_groups[{number}], {key}": value
        for number, setting in enumerate(settings)
        for key, value in {"lr": setting.lr, "rule": type(setting.rule).__name__, **_settings(setting.rule)}.items()
    }


def _begins_unlike(one: Setting, other: Setting) -> bool:
    """Whether settings differ with which ``Rule.pre`` makes what travels under backward."""
    return any(getattr(one.rule, key, None) != getattr(other.rule, key, None) for key in ("momentum", "nesterov"))


def digest(settings: Sequence[Setting]) -> int:
    """Hash settings to 64 bits, which differ where settings do."""
    return int.from_bytes(hashlib.sha256(repr(settings).encode()).digest()[:8], "big")


def _settings(rule: MatrixRule | ParameterRule) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule) if field.name != "lr"}


def _replaced(place: str, rule: MatrixRule | ParameterRule, changed: Mapping[str, Any]) -> MatrixRule | ParameterRule:
    if not changed:
        return rule
    try:
        return replace(rule, **changed)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _as(place: str, value: Any, made: bool | float) -> bool | float:
    """Convert a value to the type of the one that it replaces.

    Raises:
        ConfigError: it is no number, or no truth value, where the other is.
    """
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(made, bool) and isinstance(number, bool):
        return number
    if isinstance(made, bool) or isinstance(number, bool) or not isinstance(number, Real) or math.isnan(number):
        raise ConfigError(
            f"{place}: expected {'True or False' if isinstance(made, bool) else 'a number'}, got {value!r}"
        )
    return float(number)


def _rate(place: str, value: Any) -> float:
    rate = float(_as(f"{place}, lr", value, 0.0))
    if not 0 <= rate < math.inf:
        raise ConfigError(f"{place}: expected lr of 0 or more, got {rate:g}; a schedule must not go below 0")
    return rate


def _is(one: object, other: object) -> bool:
    return one is other
