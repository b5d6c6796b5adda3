"""Export: the trained model of a run as a folder of safetensors that other tools load.

The folder is what ``from_pretrained`` takes: config.json, one file or shards with their index, and the tokenizer's
files. A model of transformers is written under the names that ``save_pretrained`` gives its tensors, experts apart. A
reference model is written as the model of transformers that computes the same (``lading.models.twins``); where
transformers has none, the folder has the model's name and sizes as lading.json instead, and no config.json.
Tensors go from the checkpoint to the files a few MiB at a time; those that transformers keeps turned, one at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from lading import __version__
from lading.checkpoint.state import TensorSource, checked_sources, source_bytes, tensor_source, write_state
from lading.checkpoint.store import BEST, NEWEST, Checkpoint, latest_checkpoint, read_checkpoint
from lading.config import RunConfig, run_from_dict
from lading.errors import ConfigError, StorageError
from lading.files import write_folder_aside, write_text
from lading.ir.plan import Plan
from lading.models import hugging_face
from lading.models.hugging_face import tied_names
from lading.models.stacked_weights import SavedNames
from lading.models.twins import Twin, twin_of
from lading.models.weight_files import INDEX, SINGLE
from lading.run import build, tokenizer_of
from lading.tracing.initial import defer

#: Instead of config.json where transformers has no such model.
OWN_CONFIG = "lading.json"
#: Files beside a model's weights that its users look for; of a sentence encoder also how it pools.
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "generation_config.json", "chat_template.jinja",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip


def export_run(folder: Path, target: Path, *, shard_bytes: int = 5_000_000_000, best: bool = False) -> Path:
    """Write the model of a checkpoint of a run into ``target``, which appears when it is whole.

    Args:
        folder: The run's out folder.
        shard_bytes: Largest file, but for a tensor that is larger.
        best: Take the checkpoint of the lowest validation loss, not the newest.

    Raises:
        ConfigError: no run there, none of its checkpoints is whole, or ``target`` exists.
        StorageError: a tensor of the checkpoint is damaged, or the disk is full.
    """
    if target.exists():
        raise ConfigError(
            f"--to: expected a folder that does not exist, got {str(target)!r}; remove it or name another"
        )
    run, path = _run_and_checkpoint(folder, best=best)
    module = defer(lambda: build(run.model, run.optimization.precision)).model
    twin = None if run.model.is_hugging_face else twin_of(module)
    names = SavedNames(module) if run.model.is_hugging_face else None
    with read_checkpoint(path) as checkpoint:
        sources = list(_sources(module, checkpoint, twin, names))
        try:
            with write_folder_aside(target) as aside:
                _write_files(aside, sources, shard_bytes, checkpoint.step)
                _write_config(aside, run, module, twin)
        except StorageError:
            raise
        except OSError as error:
            advice = "free some space, or name another folder"
            raise StorageError(f"cannot export to {target}: {error}; {advice}") from error
    return target


def _run_and_checkpoint(folder: Path, *, best: bool) -> tuple[RunConfig, Path]:
    """Settings of a run, and its newest checkpoint or the best."""
    if not (folder / "plan.json").is_file():
        raise ConfigError(f"expected the out folder of a run, found no plan.json in {str(folder)!r}")
    plan = Plan.load(folder / "plan.json")
    if plan.request.run is None:
        raise ConfigError(f"{folder / 'plan.json'} records no run; expected one that lading train wrote")
    checkpoints = folder / (BEST if best else NEWEST)
    path = latest_checkpoint(checkpoints)
    if path is None:
        advice = "validation data (a table [validation] in the run's file)" if best else "checkpoint.at_end true"
        raise ConfigError(f"expected a checkpoint in {checkpoints}, found none; train with {advice}")
    return run_from_dict(plan.request.run, "the plan's run"), path


def _sources(
    module: torch.nn.Module, checkpoint: Checkpoint, twin: Twin | None, names: SavedNames | None
) -> Iterator[TensorSource]:
    """List what the model saves, each once: of tied names the one that ``from_pretrained`` ties the others to."""
    groups, first_names = tied_names(module), set[str]()
    tied = getattr(module, "all_tied_weights_keys", {})
    for name, tensor in module.state_dict().items():
        first = groups[name][0]
        if first in first_names:
            continue
        first_names.add(first)
        alias_saved = next((alias for alias in groups[name] if alias not in tied), first)
        dtype = str(tensor.dtype).removeprefix("torch.")
        saved = checkpoint.tensors.get(first)
        if saved is None or (saved.dtype, saved.shape) != (dtype, tuple(tensor.shape)):
            raise ConfigError(f"{checkpoint.path}: expected {first!r} as {dtype} {tuple(tensor.shape)}, found {saved}")
        if names is not None:
            yield from _parts(checkpoint, first, *names.parts(alias_saved, saved.shape))
        elif twin is None:
            yield alias_saved, dtype, saved.shape, checkpoint.chunks(first)
        elif alias_saved in twin.turned:
            yield twin.names[alias_saved], dtype, saved.shape[::-1], _turned(checkpoint, first)
        else:
            yield twin.names[alias_saved], dtype, saved.shape, checkpoint.chunks(first)


def _parts(checkpoint: Checkpoint, name: str, parts: list[str], shape: tuple[int, ...]) -> Iterator[TensorSource]:
    """List the tensors of one shape that a saved one is cut into along its bytes: itself, or the experts of a stack."""
    saved = checkpoint.tensors[name]
    size = saved.size_bytes // len(parts)
    for number, part in enumerate(parts):
        yield part, saved.dtype, shape, checkpoint.chunks(name, number * size, (number + 1) * size)


def _turned(checkpoint: Checkpoint, name: str) -> Iterator[memoryview]:
    """Yield the bytes of a matrix's transpose; it is read when they are asked for."""
    yield from tensor_source(name, checkpoint.read(name).t())[3]


def _write_files(folder: Path, sources: list[TensorSource], shard_bytes: int, step: int) -> None:
    """Write one file, or shards and their index."""
    shards: list[list[TensorSource]] = [[]]
    for source in sources:
        if shards[-1] and sum(map(source_bytes, shards[-1])) + source_bytes(source) > shard_bytes:
            shards.append([])
        shards[-1].append(source)
    if len(shards) == 1:
        write_state(folder / SINGLE, checked_sources(sources), step)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_state(folder / name, checked_sources(shard), step)
        weight_map.update(dict.fromkeys((source[0] for source in shard), name))
    sizes = {
        "total_parameters": sum(prod(source[2]) for source in sources),
        "total_size": sum(map(source_bytes, sources)),
    }
    write_text(folder / INDEX, json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2))


def _write_config(folder: Path, run: RunConfig, module: torch.nn.Module, twin: Twin | None) -> None:
    """Write config.json, or lading.json, and copy what lay beside the model and its tokenizer."""
    origins: list[Path] = []
    if run.model.is_hugging_face:
        config: Any = hugging_face.read_config(run.model)
        config.architectures = [type(module).__name__]
        config.dtype = next(module.parameters()).dtype
        config.save_pretrained(folder)
        origins.append(Path(run.model.weights or Path(run.model.name).parent))
    else:
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        facts: dict[str, Any] = {"lading_version": __version__, "dtype": dtype}
        if twin is None:
            write_text(
                folder / OWN_CONFIG,
                json.dumps({**facts, "model": run.model.name, "sizes": run.model.sizes}, indent=2) + "\n",
            )
        else:
            write_text(folder / "config.json", json.dumps({**twin.config, **facts}, indent=2) + "\n")
    tokenizer = tokenizer_of(run)
    if tokenizer is not None:
        origins.append(tokenizer if tokenizer.is_dir() else tokenizer.parent)
    for origin in origins:
        for name in _BESIDE:
            if (origin / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(origin / name, folder / name)
