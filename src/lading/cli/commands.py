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
from lading.report.lines import fitted, line_columns
from lading.units import format_bytes, format_seconds, parse_bytes

RunFile = Annotated[Positional[Path], arg(metavar="RUN.toml", help="Run file, such as examples/llama.toml.")]
Overrides = Annotated[
    Positional[tuple[str, ...]],
    arg(
        metavar="[KEY=VALUE ...]",
        help="Settings that replace those of the file, such as optimization.steps=20.",
        help_behavior_hint="",
    ),
]
MachineName = Annotated[
    str | None,
    arg(
        metavar="NAME|FILE",
        help="Machine: a name of the catalog (rtx4090, h100, cpu), or a file that lading probe wrote.",
        help_behavior_hint="(default: the run's, else this host)",
    ),
]
TraceFile = Annotated[
    Path | None,
    arg(metavar="FILE.pftrace", help="Also write a timeline that ui.perfetto.dev opens.", help_behavior_hint=""),
]
SnapshotFile = Annotated[
    Path | None,
    arg(
        metavar="FILE.pickle",
        help="Also write what memory holds over the step, for pytorch.org/memory_viz.",
        help_behavior_hint="",
    ),
]
PlanFile = Annotated[
    Path | None, arg(metavar="FILE", help="Train as this plan of lading plan says.", help_behavior_hint="")
]
MaybeRunFile = Annotated[
    Positional[Path | None],
    arg(metavar="[RUN.toml]", help="Run file, such as examples/llama.toml; or give --plan.", help_behavior_hint=""),
]
Resume = Annotated[
    FlagCreatePairsOff[bool],
    arg(help="Go on from the newest checkpoint in the run's out folder.", help_behavior_hint=""),
]


NoCache = Annotated[
    FlagCreatePairsOff[bool],
    arg(help="With a run file: plan anew, and do not use the cache of plans.", help_behavior_hint=""),
]


def _optional(metavar: str, text: str) -> object:
    """An option that changes nothing when it is left out."""
    return arg(metavar=metavar, help=text, help_behavior_hint="")


_MODEL = "Model: a name of the catalog ({}, ...), module:function of your own, or a Hugging Face config.json."
OptimizerName = Annotated[
    Literal["adamw", "muon", "shampoo", "soap"] | None,
    _optional("NAME", "Optimizer of the weight matrices: adamw (the default), muon, shampoo or soap."),
]


class Command(Protocol):
    """What every command is."""

    def run(self) -> None:
        """Do it, printing the result."""
        ...


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Say whether a run fits a machine, what it needs, and what would make it fit.

    Give a run file, or a model by name.

    A size has a unit: 24GB is 24 times 10^9 bytes, 24GiB is 24 times 2^30.
    """

    run_file: Annotated[
        Positional[Path | None], _optional("[RUN.toml]", "Run file, such as examples/llama.toml; or give --model.")
    ] = None
    overrides: Overrides = ()
    model: Annotated[
        str | None,
        _optional("NAME", _MODEL.format("llama3-70b, gpt2")),
    ] = None
    machine: MachineName = None
    device: Annotated[
        str | None, _optional("SIZE", "Memory of the device (the GPU, or the CPU), if not the machine's.")
    ] = None
    host: Annotated[str | None, _optional("SIZE", "Memory of the host behind a GPU, if not the machine's.")] = None
    disk: Annotated[str | None, _optional("SIZE", "Space on the disk, if not the machine's.")] = None
    budget: Annotated[
        str | None,
        _optional(
            "SIZE", "Device memory that a step may use; or a share such as 50% of what keeping everything needs."
        ),
    ] = None
    batch: Annotated[int | None, _optional("N", "Sequences that are computed at once: a micro-batch.")] = None
    seq: Annotated[int | None, _optional("N", "Tokens of a sequence.")] = None
    accumulation: Annotated[int | None, _optional("N", "Micro-batches whose gradients are added up for one step.")] = (
        None
    )
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        _optional("fp32|bf16", "Number format. With --model, bf16 where the device has it."),
    ] = None
    keep: Annotated[
        int | None, _optional("N", "Checkpoints that stay on disk while another is written. 0 saves none.")
    ] = None

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
            machine=self.machine or run.machine,
            device=self.device,
            host=self.host,
            disk=self.disk,
            budget=self.budget or (None if self.model is not None else run.memory.budget),
            disk_budget=None if self.model is not None else run.memory.disk_budget,
        )
        result = fit_run(run, hardware, self.model or "")
        print(fitted(str(result)), flush=True)
        if result.error is not None:
            raise result.error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan a run inside its memory budget, or spread a model over many devices.

    With a run file: keep, recompute or move every tensor between two uses.

    With --model: rank the ways to spread it (layouts).

    Options are for --model, but for --out (both) and --no-cache (run files).
    """

    run_file: Annotated[
        Positional[Path | None], _optional("[RUN.toml]", "Run file, such as examples/llama.toml; or give --model.")
    ] = None
    overrides: Overrides = ()
    out: Annotated[Path, arg(metavar="FILE", help="File to write the plan to.")] = Path("plan.json")
    model: Annotated[str | None, _optional("NAME", _MODEL.format("llama3-70b"))] = None
    machine: Annotated[
        str | None,
        _optional(
            "NAME|FILE", "What each device is (h100, ...), or a list of unlike devices (laptop-and-server, ...)."
        ),
    ] = None
    devices: Annotated[int | None, _optional("N", "Number of devices.")] = None
    global_batch: Annotated[int | None, _optional("N", "Sequences of one step, on all devices together.")] = None
    seq: Annotated[
        int | None, _optional("N", "Tokens of a sequence. If not given, the model's longest, but at most 8192.")
    ] = None
    stack: Annotated[
        str | None, _optional("NAME|FILE", "Software that trains: megatron-core, torchtitan-compile, ...")
    ] = None
    network: Annotated[
        str | None, _optional("WORDS", 'Network between nodes, if not the machine\'s: "4x 200 Gb/s HDR", ...')
    ] = None
    precision: Annotated[
        str | None,
        _optional(
            "NAMES",
            "Number format of matrix products: bf16 (if not given), fp32, fp16, fp8, mxfp8 or nvfp4. Several "
            "(bf16,fp8) or any lets the search choose.",
        ),
    ] = None
    pin: Annotated[
        UseAppendAction[tuple[str, ...]],
        _optional(
            "KEY=VALUE",
            "Fix one choice of the layout, such as tp=8. Can be repeated. Keys: dp, tp, cp, pp, ep, etp, vpp, "
            "micro_batch (or mb), sp (yes, no), zero (0 to 3), shard, cp_comm, schedule, recompute (none, selective, "
            "full), recompute_layers, recompute_modules, precision, offload (none, optimizer, parameters), "
            "offload_to (host, disk).",
        ),
    ] = ()
    optimizer: OptimizerName = None
    price: Annotated[float | None, _optional("PRICE", "Price of one device for an hour, in any currency.")] = None
    top: Annotated[int, arg(metavar="N", help="Number of layouts to show.")] = 10
    longest: Annotated[int | None, _optional("N", "Tokens of the longest sequence; a batch of it must fit too.")] = None
    save: Annotated[
        Literal["sharded", "async", "gathered"],
        arg(
            help="How checkpoints are written: every rank its own part, the same while training goes on, or all by "
            "one rank."
        ),
    ] = "sharded"
    budget: Annotated[
        str | None, _optional("SIZE", "Memory of each device that may be used, such as 40GB. If not given, all of it.")
    ] = None
    unshard: Annotated[
        Literal["residency", "reverse-greedy", "zero2", "zero3"],
        arg(help="Where each rank has a part of the parameters (zero 3): how to choose those that stay whole."),
    ] = "residency"
    tree: Annotated[
        FlagCreatePairsOff[bool],
        arg(help="Show the memory of every module at the peak, for layouts with zero 3.", help_behavior_hint=""),
    ] = False
    json: Annotated[Path | None, _optional("FILE.json", "Also write the figures as JSON (docs/plan-json.md).")] = None
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
        print_plan(prepared.plan, prepared.graph, Console(width=line_columns()))
        prepared.plan.save(self.out)
        print(f"wrote {self.out}")


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Predict the time and the memory of one training step.

    Give a run file or a plan; or --model, to predict a model on many devices.

    Options are for --model, but for --trace, --snapshot (both) and --no-cache.
    """

    source: Annotated[
        Positional[Path | None], _optional("[RUN.toml|PLAN.json]", "Run file or plan; or give --model.")
    ] = None
    overrides: Overrides = ()
    trace: TraceFile = None
    snapshot: SnapshotFile = None
    model: Annotated[
        str | None,
        _optional("NAME", _MODEL.format("llama3-405b, gpt3-175b")),
    ] = None
    machine: Annotated[
        str | None, _optional("NAME|FILE", "What each device is: a name of the catalog (h100, ...) or a machine file.")
    ] = None
    devices: Annotated[
        int | None,
        _optional("N", "Number of devices. Those beyond what the layout names are replicas (data parallel)."),
    ] = None
    layout: Annotated[
        str | None,
        _optional(
            "LAYOUT",
            "How the model is spread, such as tp8,cp2,pp16,vpp8,sp,zero1,mb1,gb2048: tensor, context and pipeline "
            "parallel, chunks of a stage, sequence parallel, ZeRO stage, sequences of a micro-batch and of a step. "
            "Also recompute=full, offload=optimizer+activations.",
        ),
    ] = None
    seq: Annotated[int | None, _optional("N", "Tokens of a sequence.")] = None
    stack: Annotated[
        str, arg(metavar="NAME|FILE", help="Software that trains: megatron-core, torchtitan-compile, ...")
    ] = "default"
    network: Annotated[
        str | None, _optional("WORDS", 'Network between nodes, if not the machine\'s: "4x 200 Gb/s HDR", ...')
    ] = None
    lora: Annotated[int | None, _optional("RANK", "Train LoRA adapters of this rank beside frozen weights.")] = None
    qlora: Annotated[int | None, _optional("RANK", "As --lora, with frozen weights of 4 bits.")] = None
    optimizer: OptimizerName = None
    price: Annotated[float | None, _optional("PRICE", "Price of one device for an hour, in any currency.")] = None
    jitter: Annotated[
        float | None, _optional("SHARE", "By how much equal work varies, such as 0.02. Every rank is then simulated.")
    ] = None
    straggler: Annotated[
        float | None, _optional("FACTOR", "One device takes so many times as long to compute, such as 1.5.")
    ] = None
    slow_link: Annotated[
        float | None, _optional("FACTOR", "The links of one device take so many times as long, such as 2.")
    ] = None
    mtbf: Annotated[
        float | None,
        _optional("HOURS", "Mean time between failures of one device: says what share of a long run is useful."),
    ] = None
    storage: Annotated[
        str | None, _optional("SIZE", "With --mtbf, bytes a second at which checkpoints are written, such as 2TB.")
    ] = None
    restart: Annotated[float | None, _optional("SECONDS", "With --mtbf, time from a failure to the next step.")] = None
    growth: Annotated[
        int | None, _optional("N", "Also double the replicas up to so many devices, and show what a device loses.")
    ] = None
    report: Annotated[Path | None, _optional("FILE.html", "Also write a report for the browser.")] = None
    json: Annotated[Path | None, _optional("FILE.json", "Also write the figures as JSON.")] = None
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
        print(fitted(timeline_text(timeline)))
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
    """Train a run: plan it first, or follow a plan that was made before."""

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

        print(fitted(str(train_run(what, resume=self.resume, cache=not self.no_cache))))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write report.html: what a run did beside what was predicted."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder, such as out/llama.")]

    def run(self) -> None:
        """Write report.html into the folder."""
        if not self.folder.is_dir():
            raise ConfigError(f"expected the out folder of a run, got {str(self.folder)!r}, which is no folder")
        from lading.summary import write_run_report

        print(f"wrote {write_run_report(self.folder)}")


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the trained model of a run as safetensors, for from_pretrained."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder, such as out/llama.")]
    to: Annotated[Path, arg(metavar="FOLDER", help="Folder to make.")]
    shard: Annotated[str, arg(metavar="SIZE", help="Largest size of one file.")] = "5GB"

    def run(self) -> None:
        """Export the newest checkpoint."""
        shard_bytes = parse_bytes(self.shard, "--shard")
        from lading.export import OWN_CONFIG, export_run

        folder = export_run(self.folder, self.to, shard_bytes=shard_bytes)
        print(f"wrote {folder}")
        if (folder / OWN_CONFIG).is_file():
            said = f"from_pretrained cannot load it, as transformers has no such model: {OWN_CONFIG} has its name"
            print(fitted(f"{said} and sizes, model.safetensors its weights"))


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure this host in about a minute: matrix products, memory and disk.

    The file it writes is what --machine and the machine of a run file take.
    """

    out: Annotated[Path, arg(metavar="FILE", help="File to write the machine to.")] = Path("machine.toml")
    folder: Annotated[Path, arg(metavar="FOLDER", help="A folder on the disk to measure.")] = Path()
    ranks: Annotated[int, arg(metavar="N", help="Also measure communication among up to so many processes.")] = 1

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
    """Check this host: what Lading needs, what is missing, and what that costs."""

    folder: Annotated[Path, arg(metavar="FOLDER", help="Folder on the disk that a run would use.")] = Path()
    json: Annotated[FlagCreatePairsOff[bool], arg(help="Print JSON.", help_behavior_hint="")] = False

    def run(self) -> None:
        """Print every finding."""
        from lading.cli.doctor import as_json, check, doctor

        findings = doctor(self.folder)
        said = "\n".join(fitted(str(finding), hang=24) for finding in findings)
        print(json.dumps(as_json(findings), indent=2) if self.json else said, flush=True)
        check(findings)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Measure this host, plan, train and compare a small model, with no download."""

    out: Annotated[Path, arg(metavar="FOLDER", help="Folder that everything is written to.")] = Path("out/demo")
    budget: Annotated[
        str,
        arg(
            metavar="SIZE",
            help="Memory to train in: a size such as 256MB, or a share of what keeping everything needs.",
        ),
    ] = "50%"
    seconds: Annotated[float, arg(metavar="SECONDS", help="Train for about so long.")] = 60.0
    optimizer: Annotated[
        Literal["adamw", "muon", "shampoo", "soap"], arg(help="Optimizer of the weight matrices; AdamW moves the rest.")
    ] = "adamw"

    def run(self) -> None:
        """Run the demonstration and print its verdict."""
        MemoryConfig(budget=self.budget)
        if not 0 < self.seconds < 1e6:
            raise ConfigError(f"--seconds: expected a time above 0, got {self.seconds}")
        from lading.cli.demo import demo

        print(fitted(str(demo(self.out, self.budget, self.seconds, self.optimizer))))


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
