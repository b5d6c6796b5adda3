"""Resuming: which of its checkpoints a run goes on from, whether it is still that run, and what if one is damaged.

A run goes on from its newest checkpoint, or from the one that it is given (``resume_from``). A damaged one is never
passed over: what a user has lost then, steps or a disk, is the user's to know. The error reads the older ones until one
is whole, and names the command that goes on from it. What a run saved later than where it goes on is of steps that have
not happened any more, so it is set aside first: no later start goes on from there, and nothing deletes it.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lading.alone import launcher, num_ranks
from lading.checkpoint.store import (
    BEST,
    NEWEST,
    Checkpoint,
    clear_leftovers,
    open_checkpoint,
    read_checkpoint,
    run_checkpoints,
    set_aside,
)
from lading.config import RunConfig, run_to_dict
from lading.errors import ConfigError, DamagedCheckpoint
from lading.run_ranks import RunRanks
from lading.runtime.data import Dataset, from_the_beginning
from lading.runtime.epochs import DataPosition

#: Keys of a checkpoint's meta: of a best one the loss, and what it was measured on; how far layers are frozen; how far
#: data without replacement were read.
VALIDATION, FREEZING, POSITION = "validation", "freezing", "data.position"

#: Settings with which a run may go on otherwise than it began, beside numbers of its optimizer.
_CHANGEABLE = frozenset(
    f"optimization.{key}"
    for key in (
        "steps",
        "schedule",
        "warmup_steps",
        "clip_norm",
        "accumulation",
        "micro_batches",
        "compile",
        "matrices.lr",
    )
) | {"ranks"}


#: Format of the optimizer's states, which are saved in it.
_STATES = "optimization.optimizer.states"


def resumed_path(
    run: RunConfig, data: Dataset | None, ranks: RunRanks, *, resume: bool, resume_from: str | Path = ""
) -> str:
    """Path of the checkpoint to go on from: the newest, or the one given; "" starts afresh.

    Args:
        data: Data to compare with those of the checkpoint; None compares none.

    Raises:
        ConfigError: there are checkpoints and ``resume`` is false, settings are others than were saved, or the one
            given is none of this run.
        DamagedCheckpoint: it is damaged; says how to go on from an older one.
    """
    out = Path(run.out)
    path = _checkpoint_of_run(out, Path(resume_from)) if resume_from else newest_of(out)
    if path is None:
        return ""
    if not resume:
        raise ConfigError(
            f"{out} holds checkpoints of an earlier run (newest {path.name}); give --resume, or another out"
        )
    with naming_an_older_one():
        checkpoint = open_checkpoint(path)
    changes = _changes(run, checkpoint, data, ranks)
    others = {"threads"} if "ranks" in changes else set[str]()
    changed = [text for key, text in changes.items() if not (_may_change(key) or key in others)]
    if changed:
        raise ConfigError(f"{path} was saved with another {', '.join(changed)}; set it back, or use another out folder")
    return str(path)


def newest_of(out: Path) -> Path | None:
    """Find the newest checkpoint of a run, be it one that was due or the best one; None without any."""
    return next(iter(run_checkpoints(out / NEWEST)), None)


def _checkpoint_of_run(out: Path, given: Path) -> Path:
    """Find a checkpoint that is given among those of a run."""
    paths = run_checkpoints(out / NEWEST)
    path = next((path for path in paths if path.resolve() == given.resolve()), None)
    if path is None:
        path_texts = ", ".join(f"{path}" for path in paths) or "none"
        raise ConfigError(
            f"expected a checkpoint of the run in {out} to resume from ({path_texts}), got {str(given)!r}"
        )
    return path


def take_over(out: Path, given: str | Path) -> str:
    """Take over the folder of a run from jobs that are gone: what they left aside is deleted.

    A run with nothing left to train saves no more, and saving alone would not delete it.

    Args:
        given: Checkpoint to go on from in place of the newest; "" for that.

    Returns:
        What ``go_back`` says.

    Raises:
        ConfigError, DamagedCheckpoint, StorageError: as ``go_back``. OSError: a folder cannot be read.
    """
    for folder in (out / NEWEST, out / BEST):
        if folder.is_dir():
            clear_leftovers(folder)
    return go_back(out, given) if given else ""


def go_back(out: Path, given: str | Path) -> str:
    """Make a checkpoint of a run its newest: all of it is verified, then those of later steps are set aside.

    Returns:
        What was set aside, in words; "" where nothing was.

    Raises:
        ConfigError: it is none of this run. DamagedCheckpoint: it is damaged. StorageError: one cannot be renamed.
    """
    path = _checkpoint_of_run(out, Path(given))
    with naming_an_older_one(), read_checkpoint(path) as checkpoint:
        checkpoint.verify()
    paths = run_checkpoints(out / NEWEST)
    aside = [str(set_aside(newer)) for newer in paths[: paths.index(path)]]
    if not aside:
        return ""
    return f"set aside, as the run goes on from {path}: {', '.join(aside)}; delete them when nobody needs them"


@contextmanager
def naming_an_older_one(plan: Path | None = None) -> Generator[None]:
    """Let the error of a damaged checkpoint say how a run goes on from an older one that is whole.

    Args:
        plan: Plan of the run, for the command; None where it may be another's.
    """
    try:
        yield
    except DamagedCheckpoint as error:
        if not error.older:
            raise
        way = f"--resume-from {shlex.quote(error.older)}"
        start = f"{launcher(num_ranks()[0])}lading train --plan {shlex.quote(str(plan))} " if plan is not None else ""
        text = f"{error}; go on from there with: {start}{way}" + ("" if start else ", in place of --resume")
        raise DamagedCheckpoint(text, older=error.older, errno=error.errno) from error


def going_on_words(out: Path) -> str:
    """Say how to go on with a run that was stopped."""
    if (newest := newest_of(out)) is None:
        return "nothing is saved"
    start = launcher(num_ranks()[0])
    return f"saved in {newest}\ngo on with: {start}lading train --plan {shlex.quote(str(out / 'plan.json'))} --resume"


def _changes(run: RunConfig, checkpoint: Checkpoint, data: Dataset | None, ranks: RunRanks) -> dict[str, str]:
    """Settings that are not as when the checkpoint was saved, by dotted key, in words."""
    usual = {"ranks": 1, _STATES: "auto"}  # those of older checkpoints, and of rules without formats
    current, before = {**usual, **meta_of(run, data, ranks)}, {**usual, **checkpoint.meta}
    beside = {VALIDATION, FREEZING, POSITION, *([] if data is not None else ["data.source"])}
    keys = (current.keys() | before.keys()) - beside
    return {
        k: f"{k} (was {before.get(k)!r}, is {current.get(k)!r})"
        for k in sorted(keys)
        if before.get(k) != current.get(k)
    }


def _may_change(key: str) -> bool:
    """Whether a run may go on with another value: of how parameters move, but not of which states they have."""
    is_number = key.startswith("optimization.optimizer.") and key not in ("optimization.optimizer.rule", _STATES)
    return key in _CHANGEABLE or is_number


def resuming_words(run: RunConfig, newest: Checkpoint | None, ranks: RunRanks) -> str:
    """Say from where a run goes on, and with which settings changed."""
    if newest is None:
        return f"no checkpoint in {run.out}: starting from the beginning"
    steps = run.optimization.steps
    if newest.step >= steps:
        return f"the run had ended after step {newest.step}; a larger optimization.steps than {steps} goes on"
    changes = _changes(run, newest, None, ranks)
    changes_text = f", with another {', '.join(changes.values())}" if changes else ""
    return f"going on after step {newest.step} of {steps}, from {newest.path}{changes_text}"


def position_of(run: RunConfig, newest: Checkpoint | None, ranks: RunRanks) -> DataPosition:
    """Tell how far a run has read its data when it begins, or goes on from a checkpoint.

    Raises:
        StorageError: the checkpoint does not say it.
    """
    fresh = from_the_beginning(run.data, run.optimization.accumulation * ranks.replicas)
    if newest is None or run.data.sampling == "random":
        return fresh
    before = DataPosition.from_dict(newest.meta.get(POSITION), str(newest.path))
    return before.going_on(newest.step, fresh.step_samples)


def meta_of(run: RunConfig, data: Dataset | None, ranks: RunRanks, at: DataPosition | None = None) -> dict[str, Any]:
    """Everything that the losses of a run depend on, by dotted key."""
    config = run_to_dict(run)
    settings = _flat({key: config[key] for key in ("model", "data", "optimization", "seed")})
    source = f"content {data.fingerprint}" if data is not None else ""
    share = {"validation.share": run.validation.share} if run.validation and run.validation.share else {}
    count = {"ranks": ranks.count} if ranks.count > 1 else {}
    if not run.optimization.micro_batches:
        del settings["optimization.micro_batches"]
    if run.data.sampling == "random":
        del settings["data.sampling"]
    elif at is not None:
        settings[POSITION] = at.to_dict()
    settings |= _flat({"freeze": config["freeze"]}) if run.freeze else {}
    return {**settings, **share, **count, "data.source": source, "threads": run.num_threads}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
