"""Models of transformers: built from a configuration, their weights read from safetensors one tensor at a time.

A configuration or folder is read from this machine's disk only, and no code that lies beside it is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lading.config import ModelConfig
from lading.errors import CaptureError, ConfigError, LadingError
from lading.files import parse_json
from lading.models.common import MOST_REPEATED, check_repeated
from lading.models.stacked_weights import in_order, is_stack
from lading.models.weight_files import (
    FileTensor,
    StackedTensor,
    WeightFiles,
    equal_numbers,
    one_line_message,
    shortened,
)
from lading.permissions import check_path

#: Settings that count what a model, or its configuration, has an object for each of; and how many there may be.
_REPEATED = (
    (
        re.compile(r"^(?!.*(size|dim|length|capacity))(.*_)?(layers?|blocks?|depths?|experts?|stages?|groups?)(_|$)"),
        MOST_REPEATED,
    ),
    (re.compile(r"^num_labels$"), 100 * MOST_REPEATED),
)

#: Takes a name and its value, of which it copies what it keeps.
Sink = Callable[[str, torch.Tensor], None]
#: Takes a name and what reads its value.
Fill = Callable[[str, FileTensor | StackedTensor], None]

#: Task -> the table of transformers that lists its classes by model type, and what a class of its own ends with.
_AUTO = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "contrastive": "MODEL_MAPPING_NAMES",
}


def read_config(model: ModelConfig) -> Any:
    """Read the configuration that a model's name is the path of, with ``sizes`` in it.

    Raises:
        ConfigError: transformers is missing, there is no such configuration, or a size is no setting of it.
    """
    path = Path(model.name)
    check_path(path, "model.name")
    auto = _transformers().AutoConfig
    try:
        data = _floats(parse_json((path / "config.json" if model.weights else path).read_bytes(), finite=False))
        if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
            raise ValueError('it is no object with a "model_type" in words')
        _check_repeated(data)
        _check_kernels(data)
        config = auto.for_model(**data)
    except Exception as error:  # each class of transformers checks its settings in its own way
        raise ConfigError(
            f"model.name {model.name!r}: expected the config.json of a model: {one_line_message(error)}"
        ) from error
    _check_repeated(model.sizes)
    for key, value in model.sizes.items():
        if not hasattr(config, key):
            raise ConfigError(f"model.sizes: {key!r} is no setting of a {type(config).__name__}")
        try:
            setattr(config, key, value)
        except Exception as error:
            raise ConfigError(f"model.sizes: {key!r} cannot be {value!r}: {one_line_message(error)}") from error
    return config


def _check_repeated(settings: Mapping[str, Any]) -> None:
    """Refuse a configuration with more layers or the like than can be built: classes make lists of that length.

    Raises:
        ConfigError: names the setting.
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_repeated(value)
        for pattern, most in _REPEATED:
            if pattern.search(key):
                for item in value if isinstance(value, list) else (value,):
                    check_repeated(key, item, most)


def _check_kernels(settings: object) -> None:
    """Refuse a configuration that names kernels of the Hub, which transformers would fetch and run.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(settings, list):
        for item in settings:
            _check_kernels(item)
    for key, value in settings.items() if isinstance(settings, dict) else ():
        named = list(value.values()) if isinstance(value, dict) else [value]
        if str(key).endswith("_implementation") and any(isinstance(name, str) and "/" in name for name in named):
            raise ConfigError(
                f"{key}: expected an implementation that transformers has, such as 'sdpa', got {shortened(value)}, "
                "which is code on the Hub; take it out"
            )
        _check_kernels(value)


def task_of(model: ModelConfig, config: Any) -> str:
    """Task that a model learns; if "auto", the one its configuration's architecture is made for.

    Raises:
        ConfigError: transformers has no model for it.
    """
    if model.task != "auto":
        return model.task
    named = _architecture(model, config)
    for task in _AUTO:
        table = _classes(task)
        if named in table.values() or (not named and config.model_type in table):
            return task
    if _class_of(named) is not None:
        return "own"
    raise ConfigError(
        f"model.name {model.name!r}: transformers has no model {named or 'of type ' + config.model_type}; name one of "
        "its classes in the configuration: architectures = ['ViTForImageClassification']"
    )


def build_from(model: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build the model with initial weights drawn from torch's generator, in training mode.

    Args:
        dtype: Dtype of its parameters, whatever the files hold; torch's default dtype now.

    Raises:
        ConfigError: no such model in transformers, or none of its kind for the task.
    """
    config = read_config(model)
    task = task_of(model, config)
    named = _architecture(model, config)
    table = _classes(task) if task != "own" else {}
    name = named if named in table.values() or task == "own" else table.get(config.model_type, "")
    model_class = _class_of(name if isinstance(name, str) else name[0])
    if model_class is None:
        raise ConfigError(f"model.task {task!r}: transformers has no such model of type {config.model_type!r}")
    config.dtype = dtype
    try:
        return model_class(config).train()
    except CaptureError as error:
        raise CaptureError(f"model.name {model.name!r}: {error}") from error
    except Exception as error:  # what a constructor says of sizes that do not go together
        raise ConfigError(
            f"model.name {model.name!r}: transformers cannot build a {model_class.__name__} of it: "
            f"{one_line_message(error)}; mend its config.json, or model.sizes"
        ) from error


def load_weights(
    model: ModelConfig, module: torch.nn.Module, sink: Sink, *, fill: Fill | None = None, folder: str = ""
) -> list[str]:
    """Hand the weights of a folder to ``sink``, by the first name of each parameter and buffer, in turn.

    Only what one of them is made of is in memory at a time. Names and layouts of older files are converted as
    transformers does. A tensor that the model does not save (a table it computes) is passed over.

    Args:
        module: Module from ``build_from``; its tensors may be fake.
        sink: Called with each name and value, in the parameter's dtype; it must copy what it keeps.
        fill: Called instead with each name and what reads its value, where that is a tensor of the files as it is, but
            for its dtype, or several of them one after another, as the experts of a layer are.
        folder: Folder of the weights; "" is the model's own.

    Returns:
        The first names of the parameters that the files lack, which ``model.new_head`` allows.

    Raises:
        ConfigError: the files are of another model; names what is missing, not expected or of another shape.
        StorageError: a file is damaged.
    """
    files, names = WeightFiles(Path(folder or model.weights)), tied_names(module)
    matched, strangers = _matched(files, module)
    targets = {names[name][0]: tensor for name, tensor in module.state_dict().items()}
    ties: dict[str, str] = {}  # first name -> the name under which its value was found
    misshapen: list[str] = []

    def fits(target: str, shape: tuple[int, ...]) -> bool:
        expected = tuple(targets[names[target][0]].shape)
        if shape != expected:
            misshapen.append(f"{target} (expected {expected}, found {shape})")
        return not misshapen

    for first, (mapping, keys) in matched.items():
        name = names[first][0]
        numbers = _as_it_lies(files, first, mapping, keys, targets[name].dtype)
        if fill is not None and numbers is not None:
            if fits(first, numbers.shape):
                _check_tie(ties, name, first, numbers, matched, files)
                fill(name, numbers)
            continue
        for target, value in _converted(mapping, first, module).items():
            name = names[target][0]
            if fits(target, tuple(value.shape)):
                _check_tie(ties, name, target, value, matched, files)
                sink(name, value.to(targets[name].dtype))
    missing = sorted(targets.keys() - ties.keys()) if not misshapen else []
    if not model.new_head or misshapen or not ties:
        _check(model, strangers, misshapen, missing)
    return missing


def weights_dtype(model: ModelConfig, folder: str = "") -> str:
    """Name the dtypes of a folder's files, as text: ``"BF16"``; "" is the model's own."""
    files = WeightFiles(Path(folder or model.weights))
    return ", ".join(sorted({files.dtype(key) for key in files.names()}))


def tied_names(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each name of a parameter or buffer to all of its names."""
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


def _floats(value: Any) -> Any:
    """Replace the numbers that transformers writes as ``{"__float__": "Infinity"}`` in parsed JSON."""
    if isinstance(value, dict):
        number = value.get("__float__") if len(value) == 1 else None
        if number in ("Infinity", "-Infinity", "NaN"):
            return float(number)
        return {key: _floats(inner) for key, inner in value.items()}
    return [_floats(inner) for inner in value] if isinstance(value, list) else value


def _architecture(model: ModelConfig, config: Any) -> str:
    """Name of the first class that a configuration names; "" if it names none."""
    named = getattr(config, "architectures", None)
    if not named:
        return ""
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ConfigError(
            f"model.name {model.name!r}: expected names of classes as architectures, got {shortened(named)}; such as "
            "architectures = ['LlamaForCausalLM']"
        )
    return named[0]


def _class_of(name: str) -> Any:
    """Class of models that transformers has by that name; None if there is none."""
    model_class = getattr(_transformers(), name, None) if name.isidentifier() else None
    return (
        model_class
        if isinstance(model_class, type) and issubclass(model_class, _transformers().PreTrainedModel)
        else None
    )


#: Keys of the files that a parameter is made of, by the pattern of transformers' conversion that they match.
_Keys = dict[str, list[str]]


def _matched(files: WeightFiles, module: Any) -> tuple[dict[str, tuple[Any, _Keys]], list[str]]:
    """Match parameters to keys of the files: how transformers makes each, of which; list keys without a parameter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    saved = module.state_dict()
    known_tensors = {**saved, **dict(module.named_buffers())}  # some buffers are computed and not saved
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    ignored = [*(module._keys_to_ignore_on_load_unexpected or ())]
    matched: dict[str, tuple[Any, _Keys]] = {}
    strangers: list[str] = []
    for key in sorted(files.names(), key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, known_tensors)
        if target not in saved and key in saved:
            target, pattern = key, None
        if target in saved:
            made_of = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(key, target)
            mapping, keys = matched.setdefault(target, (made_of, {}))
            keys.setdefault(pattern or key, []).append(key)
            mapping.add_tensor(target, key, pattern or key, partial(files.read, key))
        elif target not in known_tensors and not any(re.search(rule, target) for rule in ignored):
            strangers.append(key)
    return matched, strangers


def _as_it_lies(
    files: WeightFiles, target: str, mapping: Any, keys: _Keys, dtype: torch.dtype
) -> FileTensor | StackedTensor | None:
    """Reader of a parameter that is one tensor of the files, or a stack of several; None if it is neither.

    Raises:
        ConfigError: tensors of a stack are missing.
    """
    if is_stack(mapping):
        ordered = in_order(mapping, keys, files.folder, target)
        if len({files.shape(key) for key in ordered}) == 1 and files.shape(ordered[0]):
            return StackedTensor(tuple(FileTensor(files, key, (dtype,)) for key in ordered), len(keys))
        return None
    (first, *others), *more = keys.values()
    return FileTensor(files, first, (dtype,)) if not others and not more and _only_renames(mapping) else None


def _converted(mapping: Any, first: str, module: Any) -> dict[str, torch.Tensor]:
    """Make the values of the parameters that a mapping makes, reading its tensors now."""
    try:
        converted = mapping.convert(first, model=module, config=module.config)
    except LadingError:
        raise
    except Exception as error:  # tensors of shapes that do not go together
        raise ConfigError(
            f"model.name: cannot make {first} of the tensors in the files: {one_line_message(error)}"
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sorting key that orders numbers by value: experts are stacked in the order of their names."""
    numbers = [part.isascii() and part.isdecimal() and len(part) < 19 for part in key.split(".")]
    return [(0, int(part), "") if n else (1, 0, part) for n, part in zip(numbers, key.split("."), strict=True)]


def _only_renames(mapping: Any) -> bool:
    """Whether a parameter is one tensor of the files as it is."""
    from transformers.core_model_loading import WeightRenaming

    return type(mapping) is WeightRenaming and mapping.quantization_operation is None


def _check_tie(
    ties: dict[str, str],
    name: str,
    target: str,
    value: torch.Tensor | FileTensor | StackedTensor,
    matched: Mapping[str, tuple[Any, _Keys]],
    files: WeightFiles,
) -> None:
    """Refuse files in which two names of one parameter bring two values."""
    before = ties.setdefault(name, target)
    if before == target:
        return
    keys = matched[before][1] if before in matched else {before: [before]}
    key = next(iter(keys.values()))[0]
    if isinstance(value, torch.Tensor):
        is_same = torch.equal(files.read(key), value)
    else:
        tied_tensor = _as_it_lies(files, before, *matched[before], value.dtype) if before in matched else None
        is_same = equal_numbers(value, tied_tensor or FileTensor(files, key, (value.dtype,)))
    if not is_same:
        raise ConfigError(
            f"{files.folder}: {before!r} and {target!r} are one parameter in config.json and differ in the files; "
            "set tie_word_embeddings = false in model.sizes"
        )


def check_found(what: str, strangers: list[str], misshapen: list[str], missing: list[str], advice: str) -> None:
    """Refuse files that are not a model's.

    Args:
        what: Beginning of the error: which weights were expected, and where.
        advice: End of it: what to change.

    Raises:
        ConfigError: there are strangers, or tensors are missing or of another shape.
    """
    wrong = {"of another shape": misshapen, "missing": missing, "not expected": strangers}
    texts = [f"{fault}: {', '.join(names[:3])}{_count_of_unlisted(names)}" for fault, names in wrong.items() if names]
    if texts:
        raise ConfigError(f"{what}, found {'; '.join(texts)}; {advice}")


def _check(model: ModelConfig, strangers: list[str], misshapen: list[str], missing: list[str]) -> None:
    """Refuse files that are not those of a model of transformers."""
    advice = "give the model.task that the files are for"
    if not misshapen:
        advice += ", or model.new_head = true to draw what is missing and leave out what is not expected"
    check_found(f"{model.name}: expected the weights of its config.json", strangers, misshapen, missing, advice)


def _count_of_unlisted(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
