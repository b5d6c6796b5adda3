"""``lading doctor``: what this host has for Lading, what it lacks, and what that costs."""

from __future__ import annotations

import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from lading import __version__
from lading.cli.options import flag
from lading.errors import LadingError
from lading.files import host_cache
from lading.report.lines import fitted
from lading.runtime.host import host_id, memory_bytes, usable_bytes
from lading.units import GiB, format_bytes

#: Packages a run needs, and what each is for.
_REQUIRED = {
    "torch": "nothing runs",
    "numpy": "nothing runs",
    "safetensors": "no weights are read",
    "rich": "no tables",
    "tyro": "no command line",
    "highspy": "no plan is made",
}
#: Packages that may be missing: what that costs, and the extra that installs them.
_OPTIONAL = {
    "transformers": ("no Hugging Face models", "hf"),
    "tokenizers": ("text is read byte by byte only", "hf"),
    "pyarrow": ("Parquet is not read", "data"),
    "tensorboard": ("logging.tensorboard is refused", "logging"),
    "wandb": ("logging.wandb is refused", ""),
}
_OLDEST_TORCH = (2, 11)
_OLD_PROBE_DAYS = 90


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check this host: what Lading needs, what is missing, and what that costs."""

    folder: Annotated[Path, arg(metavar="FOLDER", help="Folder on the disk that a run would use.")] = Path()
    json: Annotated[FlagCreatePairsOff[bool], flag("Print JSON.")] = False

    def run(self) -> None:
        """Print every finding."""
        findings = doctor(self.folder)
        report = "\n".join(fitted(str(finding), hang=24) for finding in findings)
        print(json.dumps(as_json(findings), indent=2) if self.json else report, flush=True)
        check(findings)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at on this host.

    Attributes:
        state: "ok"; "lacking" costs something; "bad" keeps Lading from running.
        cost: Price of a state other than "ok", and what mends it.
    """

    name: str
    state: Literal["ok", "lacking", "bad"]
    found: str
    cost: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8} {self.name:<14} {self.found}" + (f"  [{self.cost}]" if self.cost else "")


def doctor(folder: Path) -> list[Finding]:
    """Look at everything Lading needs; ``folder`` is on the disk that swap files and checkpoints would go to."""
    findings = [*_software(), *_packages()]
    if all(finding.state != "bad" for finding in findings):
        findings += _torch()
    return [*findings, *_memory(), *_disk(folder), *_probes(folder), _compiler()]


def check(findings: list[Finding]) -> None:
    """Raise if a finding keeps Lading from running.

    Raises:
        ConfigError: one does.
    """
    if bad := [finding for finding in findings if finding.state == "bad"]:
        raise LadingError(f"Lading cannot run here: {'; '.join(f'{f.name} {f.found} ({f.cost})' for f in bad)}")


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """Convert findings to plain values."""
    return [asdict(finding) for finding in findings]


def _software() -> Iterator[Finding]:
    yield Finding(name="lading", state="ok", found=__version__)
    new = sys.version_info >= (3, 11)
    cost = "" if new else "Lading needs Python 3.11 or newer"
    yield Finding(name="python", state="ok" if new else "bad", found=platform.python_version(), cost=cost)
    linux = sys.platform == "linux"
    cost = "" if linux else "memory is measured and disks are used on Linux only; planning works"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding(name="system", state="ok" if linux else "lacking", found=system, cost=cost)


def _installed(name: str) -> str:
    """Version of an installed package; "" if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _packages() -> Iterator[Finding]:
    for name, without in _REQUIRED.items():
        version = _installed(name)
        cost = "" if version else f"{without}: pip install {name}"
        if name == "torch" and version and tuple(map(int, version.split(".")[:2])) < _OLDEST_TORCH:
            cost = f"Lading needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer"
        yield Finding(name=name, state="bad" if cost else "ok", found=version or "missing", cost=cost)
    for name, (without, extra) in _OPTIONAL.items():
        version = _installed(name)
        mend = f"pip install 'lading[{extra}]'" if extra else f"pip install {name}"
        cost = "" if version else f"{without}: {mend}"
        yield Finding(name=name, state="ok" if version else "lacking", found=version or "missing", cost=cost)
    if version := _installed("ortools"):
        cost = "it and highspy cannot be imported in one process: plan in a process without it"
        yield Finding(name="ortools", state="lacking", found=version, cost=cost)


def _torch() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    blas = "MKL" if torch.backends.mkl.is_available() else "another than MKL"
    oneapi = ", oneDNN" if torch.backends.mkldnn.is_available() else ""
    description = f"{torch.get_num_threads()} of {cores} processors, BLAS {blas}{oneapi}"
    few = torch.get_num_threads() < cores
    cost = "a run with threads = 0 uses all processors; OMP_NUM_THREADS is not looked at" if few else ""
    yield Finding(name="threads", state="ok", found=description, cost=cost)
    capability = torch.backends.cpu.get_cpu_capability()
    quick = bool(torch.cpu._is_avx512_bf16_supported())  # pyright: ignore[reportPrivateUsage]
    cost = "" if quick else "bf16 products are several times slower than fp32 here: use precision = 'fp32' on this CPU"
    description = f"{host_id().partition(' | ')[0]}, {capability}, {'' if quick else 'no '}bf16 instructions"
    yield Finding(name="cpu", state="ok" if quick else "lacking", found=description, cost=cost)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding(name="gpu", state="ok", found=f"{names}, CUDA {torch.version.cuda}")
    else:
        why = "torch has no CUDA" if torch.version.cuda is None else f"torch has CUDA {torch.version.cuda}, no driver"
        cost = "runs compute on the CPU; plans for GPUs of the catalog are simulated"
        yield Finding(name="gpu", state="lacking", found=f"none ({why})", cost=cost)


def _memory() -> Iterator[Finding]:
    usable, total = usable_bytes(), memory_bytes()
    description = f"{format_bytes(usable)} of {format_bytes(total)} usable"
    small = usable < 2 * GiB
    cost = "a process with torch and a plan takes about 0.4 GiB of it" if small else ""
    yield Finding(name="memory", state="lacking" if small else "ok", found=description, cost=cost)
    from lading.runtime.resident import PeakMeter

    meter = PeakMeter()
    meter.close()
    cost = "" if meter.exact else "peaks are sampled every 2 ms: short ones can be missed"
    description = "kept by the kernel, resettable" if meter.exact else "/proc/self/clear_refs cannot be written"
    yield Finding(name="peak meter", state="ok" if meter.exact else "lacking", found=description, cost=cost)


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
        direct = _direct(folder)
    except OSError as error:
        cost = "nothing can be written there: give --folder"
        yield Finding(name="disk", state="bad", found=f"{folder}: {error.strerror}", cost=cost)
        return
    description = f"{folder.absolute()}, {format_bytes(free)} free, {'O_DIRECT' if direct else 'no O_DIRECT'}"
    cost = "" if direct else "swap goes through the page cache: slower, and memory of others is taken for it"
    if free < 2 * GiB:
        cost = "too little for optimizer states and checkpoints of most models"
    yield Finding(name="disk", state="lacking" if cost else "ok", found=description, cost=cost)


def _direct(folder: Path) -> bool:
    """Whether files in a folder can be written past the page cache.

    Raises:
        OSError: they cannot be written at all.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="lading-doctor-") as file, mmap.mmap(-1, 4096) as page:
        try:
            direct = os.open(file.name, os.O_RDWR | getattr(os, "O_DIRECT", 0))
        except OSError:
            return False
        try:
            return os.pwrite(direct, page, 0) == 4096 and hasattr(os, "O_DIRECT")
        except OSError:
            return False
        finally:
            os.close(direct)


def _probes(folder: Path) -> Iterator[Finding]:
    """Findings on the measurements of this host that a run with machine = "probe" would use."""
    from lading.catalog.load import load_machine

    cost = "the first run on this disk measures for about a minute, or: lading probe"
    cache = host_cache(folder)
    device, torch_version = folder.absolute().stat().st_dev if folder.exists() else -1, _installed("torch")
    for path in sorted(cache.glob(f"cpu-*-threads-folder-{device}-torch-{torch_version}.toml")):
        try:
            machine = load_machine(path)
            days = (date.today() - date.fromisoformat(machine.date)).days
        except (LadingError, ValueError) as error:
            yield Finding(name="probe", state="lacking", found=f"{path}: {error}", cost="delete the file")
            continue
        if machine.host_id != host_id():
            yield Finding(name="probe", state="lacking", found=f"{path} is of another host", cost=cost)
        elif days > _OLD_PROBE_DAYS:
            old = "predictions may be off: delete the file to measure again"
            yield Finding(name="probe", state="lacking", found=f"{path}, {days} days old", cost=old)
        else:
            yield Finding(name="probe", state="ok", found=f"{path}, {days} days old")
    if not list(cache.glob(f"cpu-*-threads-folder-{device}-torch-{torch_version}.toml")):
        yield Finding(name="probe", state="lacking", found=f"none of this host in {cache}", cost=cost)


def _compiler() -> Finding:
    compiler_path = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "")
    cost = "" if compiler_path else "torch.compile has no C++ compiler to call on the CPU"
    return Finding(
        name="compiler", state="ok" if compiler_path else "lacking", found=compiler_path or "none", cost=cost
    )
