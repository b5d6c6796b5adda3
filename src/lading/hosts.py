"""Machines of runs: one of the catalog, a file, or this host, measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from lading.catalog.load import load_machine, save_machine
from lading.config import RunConfig
from lading.files import make_folder
from lading.ir.machine import KERNEL_BYTES, Machine
from lading.runtime.host import host_id
from lading.runtime.probe import probe


def machine_of(run: RunConfig) -> Machine:
    """Find the machine a run names; "probe" is this host's CPU and the run's disk, measured now if they never were."""
    if run.machine != "probe":
        return load_machine(run.machine)
    folder = Path(run.memory.folder or run.out)
    make_folder(folder)
    name = f"cpu-{run.num_threads}-threads-folder-{folder.stat().st_dev}-torch-{torch.__version__}.toml"
    path = Path.home() / ".cache" / "lading" / name
    if path.is_file():
        machine = load_machine(path)
        if machine.host_id == host_id() and KERNEL_BYTES in machine.sources:
            return machine
    print(f"measuring this host, once, in about a minute; the result is kept in\n{path}", flush=True)
    return probe_to(path, folder, threads=run.num_threads, device="cpu")


def probe_to(
    path: Path,
    folder: Path,
    *,
    threads: int | None = None,
    seconds: float = 50.0,
    device: str | None = None,
    ranks: int = 1,
) -> Machine:
    """Measure this host (its GPU if it has one, or ``device``) and the disk of ``folder``; write the machine file.

    Args:
        path: Machine file to write.
        threads: Compute threads to measure with; None keeps torch's setting.
        seconds: Time to spend.
        ranks: Most processes to measure together: what they share, and collectives among them; 1 measures neither.
    """
    make_folder(folder)
    make_folder(path.parent)
    machine = probe(folder=folder, threads=threads, seconds=seconds, device=device, progress=print)
    if ranks > 1:
        from lading.runtime.probe_ranks import probe_ranks
        from lading.runtime.probe_sharing import probe_sharing

        print(f"collectives among 2 to {ranks} processes, and what they share")
        how = f"measured {machine.date} over gloo, mean of the faster half"
        machine = dataclasses.replace(
            machine,
            collectives=probe_ranks(ranks, seconds / 5),
            processes=probe_sharing(ranks, seconds / 4),
            sources={**machine.sources, "collectives": how, "processes": how},
        )
    save_machine(machine, path)
    return machine
