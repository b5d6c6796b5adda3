"""The commands: one frozen dataclass each, whose fields are its arguments and whose ``run`` does the work.

Whatever is slow to import is imported inside ``run``, so that ``--help`` answers at once and without torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from lading.config import MemoryConfig, RunConfig, load_run
from lading.errors import ConfigError
from lading.ir.plan import Plan as SavedPlan
from lading.ir.reading import plan_kind
from lading.ir.timeline import Timeline
from lading.units import format_bytes, format_seconds, parse_bytes

RunFile = Annotated[Positional[Path], arg(metavar="RUN.toml", help="Configuration of the run.")]
Overrides = Annotated[
    Positional[tuple[str, ...]],
    arg(
        metavar="[KEY=VALUE ...]",
        help="Settings that replace those of the file, such as optimization.steps=20.",
        help_behavior_hint="",
    ),
]
MachineName = Annotated[
    str | None, arg(metavar="NAME|FILE", help="Catalog machine or file.", help_behavior_hint="(default: the run's)")
]
TraceFile = Annotated[
    Path | None, arg(metavar="FILE.pftrace", help="Also write a trace for ui.perfetto.dev.", help_behavior_hint="")
]
SnapshotFile = Annotated[
    Path | None,
    arg(metavar="FILE.pickle", help="Also write a snapshot for pytorch.org/memory_viz.", help_behavior_hint=""),
]
PlanFile = Annotated[Path | None, arg(metavar="PLAN.json", help="Train as this plan says.", help_behavior_hint="")]
MaybeRunFile = Annotated[
    Positional[Path | None],
    arg(metavar="[RUN.toml]", help="Configuration of the run; or give --plan.", help_behavior_hint=""),
]
Resume = Annotated[
    FlagCreatePairsOff[bool],
    arg(help="Go on from the newest complete checkpoint in the run's folder.", help_behavior_hint=""),
]


NoCache = Annotated[
    FlagCreatePairsOff[bool],
    arg(help="Plan anew, not from the cache of plans, nor keep it there.", help_behavior_hint=""),
]


def _optional(metavar: str, text: str) -> object:
    """An option that changes nothing when it is left out."""
    return arg(metavar=metavar, help=text, help_behavior_hint="")


OptimizerName = Annotated[
    Literal["adamw", "muon", "shampoo", "soap"] | None,
    _optional("NAME", "With --model, what moves the matrices of blocks: adamw, muon, shampoo or soap."),
]


class Command(Protocol):
    """What every command is."""

    def run(self) -> None:
        """Do it, printing the result."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Say whether a run, or a model by name, fits a machine; what it needs where; and what would make it fit."""

    run_file: Annotated[
        Positional[Path | None], _optional("[RUN.toml]", "Configuration of the run; or give --model.")
    ] = None
    overrides: Overrides = ()
    model: Annotated[
        str | None,
        _optional("NAME", "llama3-70b, gpt2, ...; module:function; or a Hugging Face configuration."),
    ] = None
    machine: MachineName = None
    device: Annotated[str | None, _optional("SIZE", "Device memory of the machine.")] = None
    host: Annotated[str | None, _optional("SIZE", "Host memory of the machine.")] = None
    disk: Annotated[str | None, _optional("SIZE", "Disk space of the machine.")] = None
    budget: Annotated[
        str | None, _optional("SIZE", "Device memory to plan for, or a share of what keeping everything needs.")
    ] = None
    batch: Annotated[int | None, _optional("N", "Sequences of a micro-batch.")] = None
    seq: Annotated[int | None, _optional("N", "Tokens of a sequence.")] = None
    accumulation: Annotated[int | None, _optional("N", "Micro-batches of a step.")] = None
    precision: Annotated[
        Literal["fp32", "bf16"] | None, _optional("fp32|bf16", "With --model, bf16 where a GPU multiplies it.")
    ] = None
    keep: Annotated[int | None, _optional("N", "Checkpoints that stay while another is written; 0 saves none.")] = None

    def run(self) -> None:
        """Print the fit table."""
        from lading.fit import Hardware, fit_run, precision_for, run_of_model, with_sizes

        if (self.run_file is None) == (self.model is None):
            found = "neither" if self.model is None else "both"
            raise ConfigError(f"expected RUN.toml or --model NAME, got {found}")
        precision = self.precision
        if self.model is not None:
            if self.overrides:
                raise ConfigError(f"settings replace those of a RUN.toml, got {self.overrides[0]!r} next to --model")
            run = run_of_model(self.model, self.seq)
            precision = precision or precision_for(self.machine or run.machine)
        else:
            run = load_run(self.run_file or Path(), self.overrides)
        run = with_sizes(
            run,
            batch=self.batch,
            seq=self.seq,
            accumulation=self.accumulation,
            precision=precision,
            keep=self.keep,
        )
        hardware = Hardware(
            machine=self.machine or run.machine, device=self.device, host=self.host, disk=self.disk, budget=self.budget
        )
        result = fit_run(run, hardware, self.model or "")
        print(result, flush=True)
        if result.error is not None:
            raise result.error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Choose what goes where between its uses inside the budget, or the layout of a model on a cluster."""

    run_file: Annotated[
        Positional[Path | None], _optional("[RUN.toml]", "Configuration of the run; or give --model.")
    ] = None
    overrides: Overrides = ()
    out: Annotated[Path, arg(metavar="FILE", help="Where to write the plan.")] = Path("plan.json")
    model: Annotated[
        str | None, _optional("NAME", "llama3-70b, ...; module:function; or a Hugging Face configuration.")
    ] = None
    machine: Annotated[
        str | None, _optional("NAME|FILE", "With --model, what each device is, or a list of unlike devices.")
    ] = None
    devices: Annotated[int | None, _optional("N", "With --model, how many.")] = None
    global_batch: Annotated[int | None, _optional("N", "With --model, sequences of a step.")] = None
    seq: Annotated[
        int | None, _optional("N", "With --model, tokens of a sequence; else the model's, 8192 at most.")
    ] = None
    stack: Annotated[
        str | None, _optional("NAME|FILE", "With --model, the software stack: megatron-core, torchtitan-compile, ...")
    ] = None
    network: Annotated[str | None, _optional("WORDS", 'With --model, what links nodes: "4x 200 Gb/s HDR", ...')] = None
    precision: Annotated[
        str | None,
        _optional(
            "NAMES",
            "With --model, of products: fp32, fp16, bf16 (if not given), fp8, mxfp8, nvfp4; bf16,fp8 or any to choose.",
        ),
    ] = None
    pin: Annotated[
        UseAppendAction[tuple[str, ...]],
        _optional(
            "KEY=VALUE",
            "With --model, a choice that is made. Can be repeated. Keys: dp, tp, cp, pp, ep, etp, vpp, micro_batch (or "
            "mb), sp (yes, no), zero (0 to 3), shard, cp_comm, schedule, recompute (none, selective, full), "
            "recompute_layers, recompute_modules, precision, offload (none, optimizer, parameters), offload_to (host, "
            "disk).",
        ),
    ] = ()
    optimizer: OptimizerName = None
    price: Annotated[float | None, _optional("PRICE", "With --model, of a device for an hour, in any currency.")] = None
    top: Annotated[int, arg(metavar="N", help="With --model, layouts to show, the best of each mesh.")] = 10
    longest: Annotated[
        int | None, _optional("N", "With --model, tokens of the longest sequence, whose batch must fit too.")
    ] = None
    save: Annotated[
        Literal["sharded", "async", "gathered"],
        arg(
            help="With --model, how checkpoints are written: each rank its pieces, the same while training goes on, or "
            "whole by one rank."
        ),
    ] = "sharded"
    budget: Annotated[
        str | None, _optional("SIZE", "With --model, memory of a device to plan for, such as 40GB; else all.")
    ] = None
    unshard: Annotated[
        Literal["residency", "reverse-greedy", "zero2", "zero3"],
        arg(help="With --model, where parameters are cut: how to choose which stay gathered."),
    ] = "residency"
    tree: Annotated[bool, arg(help="With --model, where parameters are cut: what every tensor has at the peak.")] = (
        False
    )
    json: Annotated[
        Path | None, _optional("FILE.json", "With --model, also write the figures (docs/plan-json.md).")
    ] = None
    no_cache: NoCache = False

    def run(self) -> None:
        """Print the plan and save it."""
        _check_target(self.out)
        if (self.run_file is None) == (self.model is None):
            found = "neither" if self.model is None else "both"
            raise ConfigError(f"expected RUN.toml or --model NAME, got {found}")
        from lading.cli.layouts import OPTIONS, plan_cluster

        if self.run_file is None:
            _check_cache(self.no_cache, "--model")
            if self.json:
                _check_target(self.json)
            return plan_cluster(self)
        for name in OPTIONS:
            if getattr(self, name) != getattr(Plan, name):
                raise ConfigError(f"--{name.replace('_', '-')} belongs to --model, got it next to {self.run_file}")
        run = load_run(self.run_file, self.overrides)
        from rich.console import Console

        from lading.prepare import plan_run
        from lading.report.progress import planning_progress
        from lading.report.table import print_plan

        with planning_progress() as progress:
            prepared = plan_run(run, cache=not self.no_cache, progress=progress)
        print_plan(prepared.plan, prepared.graph, Console())
        prepared.plan.save(self.out)
        print(f"wrote {self.out}")


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Predict one step of a run or of a plan, or of a model by name on a cluster."""

    source: Annotated[
        Positional[Path | None], _optional("[RUN.toml|PLAN.json]", "A run, or a plan made before; or give --model.")
    ] = None
    overrides: Overrides = ()
    trace: TraceFile = None
    snapshot: SnapshotFile = None
    model: Annotated[
        str | None,
        _optional("NAME", "llama3-405b, gpt3-175b, ...; module:function; or a Hugging Face configuration."),
    ] = None
    machine: Annotated[str | None, _optional("NAME|FILE", "With --model, what each device is.")] = None
    devices: Annotated[
        int | None, _optional("N", "With --model, how many; those beyond the layout's are replicas.")
    ] = None
    layout: Annotated[
        str | None,
        _optional(
            "LAYOUT",
            "With --model, such as tp8,cp2,pp16,vpp8,sp,zero1,mb1,gb2048,recompute=full,offload=optimizer+activations.",
        ),
    ] = None
    seq: Annotated[int | None, _optional("N", "With --model, tokens of a sequence.")] = None
    stack: Annotated[str, arg(metavar="NAME|FILE", help="With --model, the software stack.")] = "default"
    network: Annotated[str | None, _optional("WORDS", 'With --model, what links nodes: "4x 200 Gb/s HDR", ...')] = None
    lora: Annotated[
        int | None, _optional("RANK", "With --model, train adapters of this rank beside frozen weights.")
    ] = None
    qlora: Annotated[int | None, _optional("RANK", "With --model, as --lora, with weights of 4 bits.")] = None
    optimizer: OptimizerName = None
    price: Annotated[float | None, _optional("PRICE", "With --model, of a device for an hour.")] = None
    jitter: Annotated[
        float | None, _optional("SHARE", "With --model, what equal work varies by: all ranks one by one.")
    ] = None
    straggler: Annotated[
        float | None, _optional("FACTOR", "With --model, one device computes so many times as long.")
    ] = None
    slow_link: Annotated[
        float | None, _optional("FACTOR", "With --model, one device's links take so many times as long.")
    ] = None
    mtbf: Annotated[
        float | None, _optional("HOURS", "With --model, between failures of one device: goodput of a long run.")
    ] = None
    storage: Annotated[
        str | None, _optional("SIZE", "With --mtbf, what checkpoints are written at in a second, such as 2TB.")
    ] = None
    restart: Annotated[float | None, _optional("SECONDS", "With --mtbf, from a failure to the next step.")] = None
    growth: Annotated[
        int | None, _optional("N", "With --model, replicas doubled up to so many devices, and what each device keeps.")
    ] = None
    report: Annotated[Path | None, _optional("FILE.html", "With --model, also write a report to look at.")] = None
    json: Annotated[Path | None, _optional("FILE.json", "With --model, also write the figures.")] = None
    no_cache: NoCache = False

    def run(self) -> None:
        """Print the predicted step, and write its trace and snapshot if asked."""
        if (self.source is None) == (self.model is None):
            found = "neither" if self.model is None else "both"
            raise ConfigError(f"expected RUN.toml, PLAN.json or --model NAME, got {found}")
        for path in (self.trace, self.snapshot, self.report, self.json):
            if path:
                _check_target(path)
        if self.source is None:
            from lading.cli.clusters import simulate_cluster

            _check_cache(self.no_cache, "--model")
            return simulate_cluster(self)
        scaled = ("jitter", "straggler", "slow_link", "mtbf", "storage", "restart", "growth", "report")
        own = ("machine", "devices", "layout", "seq", "network", "lora", "qlora", "optimizer", "price")
        names = (*own, *scaled, "json")
        for name in names:
            if getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} belongs to --model, got it next to {self.source}")
        what = (_load_plan if self.source.suffix == ".json" else load_run)(self.source, self.overrides)
        from lading.prepare import plan_run, prepare_plan
        from lading.report.progress import planning_progress

        if isinstance(what, RunConfig):
            with planning_progress() as progress:
                prepared = plan_run(what, cache=not self.no_cache, progress=progress)
        else:
            _check_cache(self.no_cache, "a plan")
            prepared = prepare_plan(what)
        timeline = prepared.predicted
        print(timeline_text(timeline))
        if self.trace:
            from lading.report.perfetto import write_trace

            write_trace(self.trace, [timeline])
            print(f"wrote {self.trace}")
        if self.snapshot:
            from lading.report.snapshot import write_snapshot

            write_snapshot(self.snapshot, prepared.program, timeline)
            print(f"wrote {self.snapshot}")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a run, planned first, or exactly as a plan says."""

    run_file: MaybeRunFile = None
    overrides: Overrides = ()
    plan: PlanFile = None
    resume: Resume = False
    no_cache: NoCache = False

    def run(self) -> None:
        """Train and print what happened."""
        if (self.run_file is None) == (self.plan is None):
            found = "neither" if self.plan is None else "both"
            raise ConfigError(f"expected RUN.toml or --plan PLAN.json, got {found}")
        what: RunConfig | SavedPlan
        if self.plan is not None:
            _check_cache(self.no_cache, "--plan")
            what = _load_plan(self.plan, self.overrides)
        else:
            assert self.run_file is not None
            what = load_run(self.run_file, self.overrides)
        from lading.train import train_run

        print(train_run(what, resume=self.resume, cache=not self.no_cache))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the report of a run that has ended, or was stopped."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder.")]

    def run(self) -> None:
        """Write report.html into the folder."""
        if not self.folder.is_dir():
            raise ConfigError(f"expected the out folder of a run, got {str(self.folder)!r}, which is no folder")
        from lading.summary import write_run_report

        print(f"wrote {write_run_report(self.folder)}")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the model that a run trained as safetensors, for from_pretrained and others."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder.")]
    to: Annotated[Path, arg(metavar="FOLDER", help="A folder to make.")]
    shard: Annotated[str, arg(metavar="SIZE", help="Largest file.")] = "5GB"

    def run(self) -> None:
        """Export the newest checkpoint."""
        shard_bytes = parse_bytes(self.shard)
        from lading.export import export_run

        print(f"wrote {export_run(self.folder, self.to, shard_bytes=shard_bytes)}")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure this host: products, memory, disk."""

    out: Annotated[Path, arg(metavar="FILE", help="Where to write the machine.")] = Path("machine.toml")
    folder: Annotated[Path, arg(metavar="FOLDER", help="A folder on the disk to measure.")] = Path()
    ranks: Annotated[int, arg(metavar="N", help="Measure collectives among up to so many processes too.")] = 1

    def run(self) -> None:
        """Measure and write the machine file."""
        _check_target(self.out)
        if self.ranks < 1:
            raise ConfigError(f"--ranks: expected at least 1, got {self.ranks}")
        if not self.folder.is_dir():
            raise ConfigError(f"--folder: expected a folder to measure the disk in, got {str(self.folder)!r}")
        from lading.hosts import probe_to

        probe_to(self.out, self.folder, ranks=self.ranks)
        print(f"wrote {self.out}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this host has for Lading, what it lacks, and what that costs."""

    folder: Annotated[Path, arg(metavar="FOLDER", help="A folder on the disk that a run would use.")] = Path()
    json: Annotated[FlagCreatePairsOff[bool], arg(help="Print JSON.", help_behavior_hint="")] = False

    def run(self) -> None:
        """Print every finding."""
        from lading.cli.doctor import as_json, check, doctor

        findings = doctor(self.folder)
        print(json.dumps(as_json(findings), indent=2) if self.json else "\n".join(map(str, findings)), flush=True)
        check(findings)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Plan, simulate, train and compare a small model on this host, with no download."""

    out: Annotated[Path, arg(metavar="FOLDER", help="Where everything goes.")] = Path("out/demo")
    budget: Annotated[str, arg(metavar="SIZE", help="Device memory: 256MB, or a share of keeping everything.")] = "50%"
    seconds: Annotated[float, arg(metavar="N", help="Train for about so long.")] = 60.0
    optimizer: Annotated[
        Literal["adamw", "muon", "shampoo", "soap"], arg(help="What moves the matrices; AdamW moves the rest.")
    ] = "adamw"

    def run(self) -> None:
        """Run the demonstration and print its verdict."""
        MemoryConfig(budget=self.budget)
        if not 0 < self.seconds < 1e6:
            raise ConfigError(f"--seconds: expected a time above 0, got {self.seconds}")
        from lading.cli.demo import demo

        print(demo(self.out, self.budget, self.seconds, self.optimizer))


def timeline_text(timeline: Timeline) -> str:
    """A step in a few lines: how long, how full, and how busy each stream is."""
    streams = tuple(dict.fromkeys(event.stream for event in timeline.events))
    duration_s = timeline.duration_s
    lines = [f"{timeline.source} step {format_seconds(duration_s)}, device peak {format_bytes(timeline.peak_bytes)}"]
    for stream in streams:
        busy_s = timeline.busy_s(stream)
        share = busy_s / duration_s if duration_s else 0.0
        lines.append(f"  {stream:<12} busy {format_seconds(busy_s):>10}  {share:4.0%}")
    return "\n".join(lines)


def _check_cache(no_cache: bool, beside: str) -> None:
    """Refuse a switch that would have no effect."""
    if no_cache:
        raise ConfigError(
            f"--no-cache belongs to RUN.toml, whose plan may be one of the cache; got it next to {beside}"
        )


def _check_target(path: Path) -> None:
    """Before any work is done for it, refuse a file that cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"expected a file in a folder that exists, got {str(path)!r}; make its folder first")


def _load_plan(path: Path, overrides: tuple[str, ...]) -> SavedPlan:
    if overrides:
        raise ConfigError(
            f"a plan fixes its run: expected no settings next to {path}, got {overrides[0]!r}; plan again"
        )
    try:
        data: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # loading it as a plan says what is wrong
        data = None
    kind = plan_kind(data)
    if kind == "cluster plan":
        raise ConfigError(
            f"{path}: expected the plan of a run, got that of a cluster; give its layout to lading simulate --model: "
            f"--layout {data['layout']}"
        )
    if kind == "placement":
        raise ConfigError(
            f"{path}: expected the plan of a run, got a placement; simulate it with: lading place --plan {path}"
        )
    return SavedPlan.load(path)
