"""Import: the first checkpoint of a run from weights that other tools have saved; the inverse of ``lading.export``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lading.checkpoint.store import NEWEST
from lading.config import RunConfig
from lading.errors import ConfigError
from lading.ir.plan import Plan
from lading.models.weight_files import WeightFiles
from lading.resuming import meta_of, position_of
from lading.run import initial_values
from lading.train import begun, opened_data, trainer_of
from lading.units import format_bytes


def import_run(what: RunConfig | Plan, folder: Path, *, cache: bool = False) -> Path:
    """Make a run's first checkpoint from a folder of safetensors; ``lading train --resume`` goes on from it.

    The run is planned, or follows a plan, and its values are read straight into the plan's tiers. A tensor of the files
    that is a parameter as it is comes in pieces of 1 MiB, of which each rank of a job reads its own. One that is
    turned, or made of several, is whole in memory while it is read. Parameters have the run's dtype. Masters, and
    buffers that are not saved, begin as in training.

    Args:
        folder: Folder of one model.safetensors, or several and their index. A reference model, and one of
            transformers, needs config.json beside them; any other model takes tensors of its own names.
        cache: As ``lading.train.train_run`` takes it.

    Returns:
        Folder of the checkpoint.

    Raises:
        ConfigError: the run has checkpoints already, or the files are of another model; says in what. Nothing is
            written then.
        StorageError: a file is damaged, or the disk is full.
    """
    if not folder.is_dir():
        raise ConfigError(f"expected a folder of safetensors, found none at {str(folder)!r}")
    WeightFiles(folder)  # refuses before the run is planned
    with begun(what, resume=False, cache=cache) as (prepared, ranks, resume):
        run, out = prepared.run, Path(prepared.run.out)
        if resume:
            raise ConfigError("expected ranks that are started once, found a launcher's second try; import again")
        if not run.checkpoint.saves:
            raise ConfigError(
                "checkpoint: expected a run that saves, as a plan counts no memory for it otherwise, got every_steps 0 "
                "and at_end false; set one of them"
            )
        data, _ = ranks.opened(partial(opened_data, run, prepared.step.initial.model))
        meta = meta_of(run, data, ranks, position_of(run, None, ranks))
        with trainer_of(prepared, ranks) as trainer, ranks.ending_together():
            values = partial(initial_values, run, prepared.step.initial, fill=trainer.fill, folder=str(folder))
            for note in trainer.initialize(values):
                print(note, flush=True)
            path = trainer.save(out / NEWEST, meta=meta, keep=run.checkpoint.keep)
            peak, budget = trainer.peak_bytes, trainer.plan.budgets["device"]
        print(f"took {format_bytes(peak)} of memory, of a budget of {format_bytes(budget)}", flush=True)
        ranks.by_first(lambda: str(prepared.plan.save(out / "plan.json")))  # where train and export look for it
        return path
