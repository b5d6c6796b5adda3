"""Machines of runs: one of the catalog, a file, or this host, measured."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import partial
from pathlib import Path

import torch

from lading.alone import num_ranks, rank_number, ranks_here
from lading.catalog.load import load_machine, machine_from_dict, machine_names, machine_to_toml, save_machine
from lading.config import RunConfig, processors
from lading.files import host_cache, make_folder
from lading.ir.machine import KERNEL_BYTES, Machine
from lading.permissions import check_path
from lading.runtime.host import host_id
from lading.runtime.probe import probe, probe_processors


def machine_of(run: RunConfig) -> Machine:
    """Find the machine a run names; "probe" is this host's CPU and the run's disk, measured now if they never were."""
    if run.machine != "probe":
        if run.machine not in machine_names():
            check_path(run.machine, "machine")
        return load_machine(run.machine)
    folder = Path(run.memory.folder or run.out)
    check_path(folder, "memory.folder" if run.memory.folder else "out")
    make_folder(folder)
    name = f"cpu-{run.num_threads}-threads-folder-{folder.stat().st_dev}-torch-{torch.__version__}.toml"
    path = host_cache(folder) / name
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

    In a job of several ranks the first measures its host, then all of them what joins them, and the first writes.

    Args:
        path: Machine file to write.
        threads: Compute threads to measure with; None keeps torch's setting, and in a job takes all processors, as
            torchrun sets one thread a rank, and others wait while the first measures.
        seconds: Time to spend on one process; ranks take about twice as long.
        ranks: Most processes to measure together: what they share, and collectives among them; 1 measures neither, but
            in a job those of its ranks that are on one host.
    """
    count = num_ranks()[0]
    threads = threads if threads or count == 1 else processors()
    measured = partial(_probed, folder, threads, seconds, device)
    if count == 1:
        machine = measured(ranks)
    else:
        from lading.runtime.job import by_first_rank, start_job
        from lading.runtime.probe_ranks import probe_job

        start_job(count)
        text = by_first_rank("lading probe", lambda: machine_to_toml(measured(max(ranks, ranks_here()))))
        machine = machine_from_dict(tomllib.loads(text), "the machine of rank 0")
        curves, busy = probe_job(seconds / 5)
        shared, source = machine.processes, f"measured {machine.date} over gloo among {count} ranks of a job"
        if shared is not None:
            busy_processors = {name: processors * ranks_here() / count for name, processors in busy.items()}
            shared = dataclasses.replace(shared, busy={**shared.busy, **busy_processors})
        machine = dataclasses.replace(
            machine,
            collectives={**machine.collectives, **curves},
            processes=shared,
            sources={**machine.sources, "collectives": source},
        )
    if rank_number() == 0:
        make_folder(path.parent)
        save_machine(machine, path)
    return machine


def _probed(folder: Path, threads: int | None, seconds: float, device: str | None, ranks: int) -> Machine:
    """Measure this host alone, and what up to so many processes of it share."""
    make_folder(folder)
    machine = probe(folder=folder, threads=threads, seconds=seconds, device=device, progress=print)
    if ranks == 1:
        return machine
    from lading.runtime.probe_ranks import probe_ranks
    from lading.runtime.probe_sharing import probe_sharing

    share = max(1, (threads or torch.get_num_threads()) // ranks)
    of_rank, sources = None, dict(machine.sources)
    if machine.device.kind == "cpu" and machine.device.num_threads != share:
        of_rank, busy = probe_processors(share, 0.7 * seconds, print)
        if busy:
            sources["processes.device.load"] = busy
            print(busy)
    print(f"collectives among 2 to {ranks} processes, and what they share")
    collectives_source = (
        f"measured {machine.date} over gloo, mean of all but the slowest tenth, each after some computing"
    )
    sharing = f"measured {machine.date} over gloo, mean of the faster half"
    return dataclasses.replace(
        machine,
        collectives=probe_ranks(ranks, seconds / 5),
        processes=dataclasses.replace(probe_sharing(ranks, folder, seconds / 4, share), device=of_rank),
        sources={**sources, "collectives": collectives_source, "processes": sharing},
    )
