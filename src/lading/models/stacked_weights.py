"""Parameters that files hold in parts: the experts of a layer, which transformers stacks and published files do not.

``experts.0.w1.weight``, ``experts.0.w3.weight``, ``experts.1.w1.weight`` and so on, laid one after another, are the
bytes of ``experts.gate_up_proj``. Which names are put together, and in which order, transformers' own conversions say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lading.errors import ConfigError


def is_stack(converter: Any) -> bool:
    """Whether a conversion of transformers lays tensors one after another: all of number 0, all of number 1, and on."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    if type(converter) is not WeightConverter or converter.quantization_operation is not None:
        return False
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if kinds == [(MergeModulelist, 0)]:
        return len(converter.source_patterns) == 1
    return kinds == [(MergeModulelist, 0), (Concatenate, 1)]


def in_order(converter: Any, keys: Mapping[str, Sequence[str]], where: Path, target: str) -> list[str]:
    """List the keys of a stack as its tensors lie one after another.

    Args:
        keys: Keys in the files by the pattern that they match, ordered by their numbers.
        where: Folder of the files, for the error.
        target: Name of the parameter.

    Raises:
        ConfigError: the numbers are not those from 0 on, each once for each pattern; names the first that is off.
    """
    columns = [keys[pattern] for pattern in converter.source_patterns if pattern in keys]
    longest = max(columns, key=len)
    parts = zip(*(key.split(".") for key in longest), strict=False)
    at = next((place for place, column in enumerate(parts) if len({*column}) > 1), 0)  # where the number stands
    for column in columns:
        for number in range(len(longest)) if len(longest) > 1 else ():
            key_at = column[number] if number < len(column) else "none"
            if key_at.split(".")[at : at + 1] != [str(number)]:
                raise ConfigError(
                    f"{where}: expected the tensors that are stacked to {target} to be numbered 0 to "
                    f"{len(longest) - 1}, found {key_at} in the place of number {number} of {column[0]}; download "
                    "the files again"
                )
    return [key for row in zip(*columns, strict=True) for key in row]


class SavedNames:
    """Names under which transformers saves a model's parameters, where those are other names than the model's own."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[list[str], tuple[int, ...]]:
        """List the tensors that a parameter is saved as, which lie in it one after another, and the shape of each.

        What transformers saves in another way stays a tensor of the parameter's name, which it reads too.

        Args:
            shape: Lengths of the parameter.
        """
        from transformers.core_model_loading import apply_converters, apply_renamings

        renamings, converters = self._back
        renamed, pattern = apply_converters(name, [back for back, _ in converters])
        if pattern is None:
            names, part_shape = [apply_renamings(name, renamings)], shape
        else:
            back, forward = next(pair for pair in converters if pattern in pair[0].source_patterns)
            if not is_stack(forward) or shape[1] % len(back.target_patterns):
                return [name], shape
            head, _, tail = renamed.partition(back.target_patterns[0])
            names = [
                apply_renamings(head + target.replace("*", str(number)) + tail, renamings)
                for number in range(shape[0])
                for target in back.target_patterns
            ]
            part_shape = (shape[1] // len(back.target_patterns), *shape[2:])
        return (names, part_shape) if all(self._read_as(key) == name for key in names) else ([name], shape)

    @cached_property
    def _forward(self) -> list[Any]:
        """Conversions with which transformers reads the model; of a model that was not read, it adds no prefixes."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        rules = get_model_conversion_mapping(self._module, add_legacy=False)
        return [rule for rule in rules if not isinstance(rule, PrefixChange)]

    @cached_property
    def _back(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Renamings that save, and conversions, each with the one that it is the inverse of."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        pairs = [(rule.reverse_transform(), rule) for rule in reversed(self._forward)]
        renamings = [back for back, _ in pairs if isinstance(back, WeightRenaming)]
        return renamings, [pair for pair in pairs if isinstance(pair[0], WeightConverter)]

    def _read_as(self, key: str) -> str:
        """Name of the parameter that a key of a file is read as."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [rule for rule in self._forward if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self._forward if isinstance(rule, WeightConverter)]
        return rename_source_key(key, renamings, converters, self._module.base_model_prefix, self._named_tensors)[0]

    @cached_property
    def _named_tensors(self) -> dict[str, Any]:
        return {**self._module.state_dict(), **dict(self._module.named_buffers())}
