"""Models of transformers: built from a configuration, their weights read from safetensors one tensor at a time.

A configuration or folder is read from this machine's disk only, and no code that lies beside it is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lading.config import ModelConfig
from lading.errors import ConfigError, StorageError

Sink = Callable[[str, torch.Tensor], None]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

#: Task -> the table of transformers that lists its classes by model type, and what a class of its own ends with.
_AUTO = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "contrastive": "MODEL_MAPPING_NAMES",
}


def read_config(model: ModelConfig) -> Any:
    """The configuration that a model's name is the path of, with ``sizes`` in it.

    Raises:
        ConfigError: transformers is missing, there is no such configuration, or a size is no setting of it.
    """
    path = Path(model.name)
    auto = _transformers().AutoConfig
    try:
        data = json.loads((path / "config.json" if model.weights else path).read_text())
        config = auto.for_model(**data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.name {model.name!r}: expected the config.json of a model: {error}") from error
    for key, value in model.sizes.items():
        if not hasattr(config, key):
            raise ConfigError(f"model.sizes: {key!r} is no setting of a {type(config).__name__}")
        setattr(config, key, value)
    return config


def task_of(model: ModelConfig, config: Any) -> str:
    """What a model learns, if "auto": what its configuration's architecture is made for.

    Raises:
        ConfigError: transformers has no model for it.
    """
    if model.task != "auto":
        return model.task
    named = (getattr(config, "architectures", None) or [""])[0]
    for task in _AUTO:
        table = _classes(task)
        if named in table.values() or (not named and config.model_type in table):
            return task
    if hasattr(_transformers(), named or "-"):
        return "own"
    raise ConfigError(
        f"model.name {model.name!r}: transformers has no model {named or 'of type ' + config.model_type}; name one of "
        "its classes in the configuration: architectures = ['ViTForImageClassification']"
    )


def build_from(model: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model with initial weights drawn from torch's generator, in training mode.

    Args:
        dtype: Of its parameters, whatever the files hold; torch's default dtype now.

    Raises:
        ConfigError: no such model in transformers, or none of its kind for the task.
    """
    config = read_config(model)
    task = task_of(model, config)
    named = (getattr(config, "architectures", None) or [""])[0]
    table = _classes(task) if task != "own" else {}
    name = named if named in table.values() or task == "own" else table.get(config.model_type, "")
    made = getattr(_transformers(), name if isinstance(name, str) else name[0], None)
    if made is None:
        raise ConfigError(f"model.task {task!r}: transformers has no such model of type {config.model_type!r}")
    config.dtype = dtype
    return made(config).train()


def load_weights(model: ModelConfig, module: torch.nn.Module, sink: Sink) -> list[str]:
    """Hand the weights of the model's folder on, by the first name of each parameter and buffer, one after another.

    Only what one of them is made of is in memory at a time. Names and layouts of older files are converted as
    transformers does. A tensor that the model does not save (a table it computes) is passed over.

    Args:
        module: From ``build_from``; its tensors may be fake.
        sink: Called with each name and value, in the parameter's dtype; it must copy what it keeps.

    Returns:
        The first names of the parameters that the files lack, which ``model.new_head`` allows.

    Raises:
        ConfigError: the files are of another model; names what is missing, not expected or of another shape.
        StorageError: a file is damaged.
    """
    files, names = _Files(Path(model.weights)), tied_names(module)
    matched, strangers = _matched(files, module)
    wanted = {names[name][0]: tensor for name, tensor in module.state_dict().items()}
    ties: dict[str, str] = {}  # first name -> the name under which its value was found
    misshapen: list[str] = []
    for first, mapping in matched.items():
        for target, value in _converted(mapping, first, module).items():
            name = names[target][0]
            if tuple(value.shape) != tuple(wanted[name].shape):
                misshapen.append(f"{target} (expected {tuple(wanted[name].shape)}, found {tuple(value.shape)})")
            elif not misshapen:
                _check_tie(ties, name, target, value, files)
                sink(name, value.to(wanted[name].dtype))
    missing = sorted(wanted.keys() - ties.keys()) if not misshapen else []
    if not model.new_head or misshapen or not ties:
        _check(model, strangers, misshapen, missing)
    return missing


def weights_dtype(model: ModelConfig) -> str:
    """The dtypes of the folder's files, as text: ``"bfloat16"``."""
    files = _Files(Path(model.weights))
    return ", ".join(sorted({files.dtype(key) for key in files.names()}))


def tied_names(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer, by each of them."""
    groups: dict[int, list[str]] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("a Hugging Face model needs transformers: pip install 'lading[hf]'") from error
    return transformers


def _classes(task: str) -> Mapping[str, Any]:
    """Model type -> class name, of all models of transformers for a task."""
    _transformers()
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, _AUTO[task])


class _Files:
    """The tensors of a folder's safetensors files; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for name in self._names():
            try:
                # Read, not mapped: pages of a mapped file would count as memory of the run.
                self._files[name] = safe_open(folder / name, framework="pt", backend="pread")
            except (OSError, SafetensorError) as error:
                raise StorageError(f"expected a safetensors file at {folder / name}: {error}") from error
            self._where.update(dict.fromkeys(self._files[name].keys(), name))

    def _names(self) -> list[str]:
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise ConfigError(f"model.name: expected {SINGLE} or {INDEX} in {self.folder}, found neither")
            return [SINGLE]
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if any(Path(name).name != name for name in names):
                raise ValueError(f"a file outside the folder: {names}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"expected the index of safetensors files at {index}: {error}") from error
        return names

    def names(self) -> list[str]:
        return sorted(self._where)

    def dtype(self, key: str) -> str:
        return str(self._files[self._where[key]].get_slice(key).get_dtype())

    def read(self, key: str) -> torch.Tensor:
        name = self._where[key]
        try:
            return self._files[name].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{self.folder / name}: cannot read {key!r}: {error}") from error


def _matched(files: _Files, module: Any) -> tuple[dict[str, Any], list[str]]:
    """For each parameter, what transformers makes it of; and the keys it knows no parameter for."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    saved = module.state_dict()
    known = {**saved, **dict(module.named_buffers())}  # some buffers are computed and not saved
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    ignored = [*(module._keys_to_ignore_on_load_unexpected or ())]
    matched: dict[str, Any] = {}
    strangers: list[str] = []
    for key in sorted(files.names(), key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, known)
        if target not in saved and key in saved:
            target, pattern = key, None
        if target in saved:
            made_of = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(key, target)
            mapping = matched.setdefault(target, made_of)
            mapping.add_tensor(target, key, pattern or key, partial(files.read, key))
        elif target not in known and not any(re.search(rule, target) for rule in ignored):
            strangers.append(key)
    return matched, strangers


def _converted(mapping: Any, first: str, module: Any) -> dict[str, torch.Tensor]:
    """The values of the parameters that a mapping makes, its tensors read now."""
    made = mapping.convert(first, model=module, config=module.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by value: experts are stacked in the order of their names."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _check_tie(ties: dict[str, str], name: str, target: str, value: torch.Tensor, files: _Files) -> None:
    """Two names of one parameter must not bring two values."""
    before = ties.setdefault(name, target)
    if before != target and not torch.equal(files.read(before), value):
        raise ConfigError(
            f"{files.folder}: {before!r} and {target!r} are one parameter in config.json and differ in the files; "
            "set tie_word_embeddings = false in model.sizes"
        )


def _check(model: ModelConfig, strangers: list[str], misshapen: list[str], missing: list[str]) -> None:
    """Refuse files that are not the model's."""
    wrong = {"of another shape": misshapen, "missing": missing, "not expected": strangers}
    texts = [f"{what}: {', '.join(names[:3])}{_more(names)}" for what, names in wrong.items() if names]
    if not texts:
        return
    advice = "give the model.task that the files are for"
    if not misshapen:
        advice += ", or model.new_head = true to draw what is missing and leave out what is not expected"
    raise ConfigError(f"{model.name}: expected the weights of its config.json, found {'; '.join(texts)}; {advice}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
