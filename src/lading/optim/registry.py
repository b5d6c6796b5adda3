"""Registry: the rules of optimizers by name, and what a rule's settings look like in a file.

Settings are read without torch. A rule that is not built in is "module:Class", so that anyone can add one from a file
of their own; a class name without a module is one of the table below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

from lading.errors import ConfigError, did_you_mean
from lading.optim.rule import MatrixRule, ParameterRule
from lading.permissions import check_code

#: Rules that come with Lading: for parameters of any shape, and for whole matrices.
_PARAMETERS = MappingProxyType(
    {
        "adamw": "lading.optim.adamw:AdamW",
        "adam": "lading.optim.adam:Adam",
        "sgd": "lading.optim.sgd:SGD",
        "lion": "lading.optim.lion:Lion",
        "adafactor": "lading.optim.adafactor:Adafactor",
    }
)
_MATRICES = MappingProxyType(
    {
        "muon": "lading.optim.muon:Muon",
        "shampoo": "lading.optim.shampoo:Shampoo",
        "soap": "lading.optim.soap:SOAP",
    }
)
#: Made of an optimizer of torch, never by name.
_OF_TORCH = MappingProxyType({"torch": "lading.optim.torch_update:TorchUpdate"})
_BUILT_IN = MappingProxyType({**_PARAMETERS, **_MATRICES, **_OF_TORCH})
#: Moves parameters where nothing is said.
DEFAULT = "adamw"


def rule_names(*, parameters: bool = True, matrices: bool = True) -> tuple[str, ...]:
    """Names of the rules that come with Lading."""
    return (*(_PARAMETERS if parameters else ()), *(_MATRICES if matrices else ()))


def rule_class(name: str, known: Mapping[str, str] = _BUILT_IN) -> type[ParameterRule] | type[MatrixRule]:
    """Look up the settings class of a rule.

    Args:
        name: As in the table, or "module:Class".
        known: Names to tell of where this one is none.
    Raises:
        ConfigError: there is none of this name, or the user did not grant its code (``lading.permissions``).
    """
    module, colon, attribute = _BUILT_IN.get(name, name).partition(":")
    if not colon:
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"rule: expected one of {', '.join(known)}, or 'module:Class' for your own, got {name!r}{hint}"
        )
    if name not in _BUILT_IN:
        check_code(name, "rule")
    try:
        kind: object = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rule: expected a class of optimizer settings named {name!r}, got none: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, ParameterRule | MatrixRule)):
        raise ConfigError(f"rule: expected a subclass of ParameterRule or MatrixRule as {name!r}, got {kind!r}")
    return kind


def parameter_rule(name: str) -> type[ParameterRule]:
    """Look up the settings class of a rule that moves any parameter.

    Raises:
        ConfigError: there is none of this name, or it moves matrices alone.
    """
    kind = rule_class(name, _PARAMETERS)
    if not issubclass(kind, ParameterRule):
        known_rules = ", ".join(_PARAMETERS)
        raise ConfigError(
            f"rule: expected a rule that moves any parameter ({known_rules}), got {name}, which moves whole matrices; "
            "give it in optimization.matrices"
        )
    return kind


def matrix_rule(name: str) -> type[MatrixRule]:
    """Look up the settings class of a rule that moves whole matrices.

    Raises:
        ConfigError: there is none of this name, or it moves any parameter.
    """
    kind = rule_class(name, _MATRICES)
    if not issubclass(kind, MatrixRule):
        known_rules = ", ".join(_MATRICES)
        raise ConfigError(
            f"rule: expected a rule for matrices ({known_rules}), got {name}, which moves any parameter; give it in "
            "optimization.optimizer"
        )
    return kind


def is_for_matrices(name: str) -> bool:
    """Whether a rule moves whole matrices, beside another for the rest.

    Raises:
        ConfigError: there is none of this name.
    """
    return issubclass(rule_class(name), MatrixRule)


def default_rule() -> ParameterRule:
    """Rule that moves parameters where none is named, with its default settings."""
    return cast(ParameterRule, make_rule(DEFAULT, {}))


def name_of(rule: ParameterRule | MatrixRule) -> str:
    """Find the name under which ``rule_class`` has a rule's class."""
    path = f"{type(rule).__module__}:{type(rule).__qualname__}"
    return next((name for name, place in _BUILT_IN.items() if place == path), path)


def make_rule(name: str, settings: Mapping[str, object]) -> ParameterRule | MatrixRule:
    """Make a rule by its name, with these settings.

    Raises:
        ConfigError: no such rule or setting, or one of another type or out of range.
    """
    kind: Any = rule_class(name)
    field_types = {field.name: type(field.default) for field in dataclasses.fields(cast(Any, kind))}
    for key, value in settings.items():
        if key not in field_types:
            raise ConfigError(f"settings: unknown {key!r} of {name}; expected one of {', '.join(field_types)}")
        if type(value) is not field_types[key] and not (field_types[key] is float and type(value) is int):
            raise ConfigError(f"settings: expected {key} of {name} as {field_types[key].__name__}, got {value!r}")
    return kind(**settings)


def optimizer(
    rule: str = DEFAULT, *, lr: float | None = None, settings: Mapping[str, float | bool | str] = MappingProxyType({})
) -> ParameterRule:
    """Make an optimizer for ``lading.plan`` and ``lading.Trainer``, by name.

    Args:
        rule: "adamw", "adam", "sgd", "lion", "adafactor", or "module:Class" for your own.
        lr: Learning rate at its peak; None is the rule's own.
        settings: The others of its class, by name.
    Raises:
        ConfigError: no such rule or setting, or one of another type or out of range.
    """
    parameter_rule(rule)
    return cast(ParameterRule, make_rule(rule, {**settings, **({} if lr is None else {"lr": lr})}))


def rule_to_dict(rule: ParameterRule) -> dict[str, Any]:
    """Write a rule as a table, for files; its name is left out if it is the default's."""
    name, table = name_of(rule), dataclasses.asdict(cast(Any, rule))
    return table if name == DEFAULT else {"rule": name, **table}


def optimizers_with(names: Iterable[str], usual: str) -> str:
    """Name the optimizers whose states are among the tensors of a checkpoint, in words.

    Args:
        usual: Rule to name where several have the same states.
    """
    known_names, states = set(names), dict[str, set[str]]()
    for name in known_names:
        base, _, suffix = name.rpartition(".")
        if suffix not in ("step", "master") and (base in known_names or base.rpartition(".")[0] in known_names):
            states.setdefault(base, set()).add(suffix)
    rules = {name: _names_of_states(rule_class(name)()) for name in rule_names()}
    optimizers: dict[str, None] = {}
    for suffixes in sorted({frozenset(group) for group in states.values()}, key=sorted):
        having = {name: rule_states for name, rule_states in rules.items() if suffixes <= rule_states}
        min_tensors = min(map(len, having.values()), default=0)
        nearest = [name for name, rule_states in having.items() if len(rule_states) == min_tensors]
        candidates = [usual] if usual in nearest else nearest
        optimizers[" or ".join(candidates) or f"a rule with {', '.join(sorted(suffixes))}"] = None
    return " and ".join(sorted(optimizers, key=lambda name: name == usual)) or "no optimizer"


def _names_of_states(rule: ParameterRule | MatrixRule) -> frozenset[str]:
    """Names of the states that a rule keeps, of matrices and of vectors."""
    if isinstance(rule, MatrixRule):
        return frozenset(rule.state_specs(2, 2))
    return frozenset((*rule.state_specs((2, 2)), *rule.state_specs((2,))))
