"""Options that several commands share: the input (a run, or a model on devices), and files to write.

A command is a frozen dataclass whose fields are its arguments and whose ``run`` does the work. Options that go together
are a dataclass of their own, which the help shows as a group. Whatever is slow to import is imported inside ``run``, so
that ``--help`` answers at once and without torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from tyro.conf import FlagCreatePairsOff, Positional, arg

from lading.config import STDLIB, SYNTHETIC, RunConfig, run_from_dict
from lading.errors import ConfigError
from lading.ir.plan import Plan, PlanKind
from lading.optim.registry import DEFAULT, rule_names
from lading.permissions import check_path

if TYPE_CHECKING:
    from lading.ir.request import Request


class Command(Protocol):
    """A command of ``lading`` with its arguments."""

    def run(self) -> None:
        """Do the command's work, printing the result."""
        ...


def optional(metavar: str, text: str) -> object:
    """Declare an option that changes nothing when it is left out."""
    return arg(metavar=metavar, help=text, help_behavior_hint="")


def flag(text: str) -> object:
    """Declare an option without a value."""
    return arg(help=text, help_behavior_hint="")


MODEL_HELP = "Model: a name of the catalog ({}, ...), module:function of your own, or a Hugging Face config.json."
RunFile = Annotated[
    Positional[Path | None], optional("[RUN.toml]", "Run file, such as examples/llama.toml; or give --model.")
]
Overrides = Annotated[
    Positional[tuple[str, ...]],
    optional("[KEY=VALUE ...]", "Settings that replace those of the run file, such as optimization.steps=20."),
]
TraceFile = Annotated[Path | None, optional("FILE.pftrace", "Also write a timeline that ui.perfetto.dev opens.")]
JsonFile = Annotated[Path | None, optional("FILE.json", "Also write the figures as JSON.")]
_EACH, _WHOLE = ", ".join(rule_names(matrices=False)), " or ".join(rule_names(parameters=False))
Trust = Annotated[
    FlagCreatePairsOff[bool],
    flag(
        "Trust what is read: import code that a file names (module:function), and follow its paths wherever they lead."
    ),
]
SeqLen = Annotated[
    int | None, optional("N", "Tokens of a sequence. If not given, the model's longest, but at most 8192.")
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """With a run file:"""

    no_cache: Annotated[FlagCreatePairsOff[bool], flag("Plan anew, and do not use the cache of plans.")] = False


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Instead of a run file, a model on many devices:"""

    model: Annotated[str | None, optional("NAME", MODEL_HELP.format("llama3-70b, gpt3-175b"))] = None
    machine: Annotated[
        str | None,
        optional(
            "NAME|FILE",
            "What each device is: a name of the catalog (h100, rtx4090, ...) or a machine file. To plan, also a list "
            "of unlike devices (laptop-and-server, ...).",
        ),
    ] = None
    devices: Annotated[int | None, optional("N", "Number of devices; with a run file, ranks to plan it for.")] = None
    global_batch: Annotated[int | None, optional("N", "Sequences of one step, on all devices together.")] = None
    seq: SeqLen = None
    stack: Annotated[
        str | None, optional("NAME|FILE", "Software that trains: megatron-core, torchtitan-compile, ...")
    ] = None
    network: Annotated[
        str | None, optional("WORDS", 'Network between nodes, if not the machine\'s: "4x 200 Gb/s HDR", ...')
    ] = None
    optimizer: Annotated[
        str | None,
        optional("NAME", f"Optimizer: {_EACH} of all weights, {_WHOLE} of the weight matrices; {DEFAULT} by default."),
    ] = None
    price: Annotated[float | None, optional("PRICE", "Price of one device for an hour, in any currency.")] = None

    def request(self, **more: Any) -> Request:
        """Make the request that these options ask for; those left out keep the defaults of a request.

        Args:
            more: Further fields of the request; None for those left out.
        Raises:
            ConfigError: no model or machine, a count below 1, or a price below 0.
        """
        from lading.ir.request import Request

        if self.model is None or self.machine is None:
            raise ConfigError("expected --machine NAME next to --model, such as --machine h100")
        if self.price is not None and self.price < 0:
            raise ConfigError(f"--price: expected a price of a device for an hour, 0 or more, got {self.price:g}")
        counts = {"--devices": self.devices, "--global-batch": self.global_batch, "--seq": self.seq}
        for option, number in counts.items():
            if number is not None and number < 1:
                raise ConfigError(f"{option}: expected at least 1, got {number}")
        names = ("model", "machine", "devices", "global_batch", "stack", "network", "optimizer")
        settings = {name: getattr(self, name) for name in names} | {"seq_len": self.seq, **more}
        return Request(**{name: value for name, value in settings.items() if value is not None})


def check_asked(source: Path | None, expected: str, model: ModelOptions) -> None:
    """Refuse a command line without input, or with both a run and a model.

    Args:
        source: The file that was given.
        expected: Kinds of files that may be given.
    Raises:
        ConfigError: neither a file nor --model, or both.
    """
    if (source is None) == (model.model is None):
        if source is not None:
            raise ConfigError(f"expected {expected} or --model NAME, got both {source} and --model {model.model}")
        option = first_given(model)
        beside = f" next to {option}" if option else ""
        raise ConfigError(f"expected {expected} or --model NAME{beside}, got neither")


def first_given(*groups: Any, but: tuple[str, ...] = ()) -> str | None:
    """Name the first option whose value is not its default; None if there is none.

    Args:
        groups: Dataclasses whose fields are options.
        but: Fields to skip.
    """
    for group in groups:
        for option in dataclasses.fields(group):
            if option.name not in but and getattr(group, option.name) != option.default:
                return f"--{option.name.replace('_', '-')}"
    return None


def refuse_beside(source: Path, *groups: Any) -> None:
    """Refuse options that mean something with --model only.

    Raises:
        ConfigError: one of them is given next to ``source``.
    """
    if option := first_given(*groups):
        raise ConfigError(f"{option} belongs to --model, got it next to {source}; leave it out, or give --model NAME "
                          f"instead of {source}")  # fmt: skip


def refuse_run_options(options: RunOptions, overrides: tuple[str, ...], beside: str) -> None:
    """Refuse what means something with a run file only.

    Raises:
        ConfigError: settings or ``--no-cache`` are given next to something else.
    """
    if overrides:
        raise ConfigError(f"settings replace those of a RUN.toml, got {overrides[0]!r} next to {beside}; leave it out")
    if options.no_cache:
        raise ConfigError(
            f"--no-cache belongs to RUN.toml, whose plan may be one of the cache; got it next to {beside}"
        )


def check_targets(**targets: Path | None) -> None:
    """Refuse files that cannot be written, before any work is done for them.

    Args:
        targets: File of each option by the option's name; None where it is not given.
    Raises:
        ConfigError: a folder does not exist, or two options name one file.
    """
    option_by_path: dict[Path, str] = {}
    for name, path in targets.items():
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"expected a file in a folder that exists, got {str(path)!r}; make its folder first")
        if path in option_by_path:
            raise ConfigError(
                f"--{option_by_path[path]} and --{name}: expected different files, got {str(path)!r} twice"
            )
        option_by_path[path] = name


def check_paths(what: RunConfig | Plan) -> None:
    """Refuse a run, or a plan of one, that reads or writes where the user did not grant it.

    Raises:
        ConfigError: says which setting (``lading.permissions``).
    """
    if isinstance(what, Plan):
        if what.request.run is None:
            return  # refused as no run
        what = run_from_dict(what.request.run, "the plan's run")
    check_path(what.out, "out")
    sources = {"data.source": what.data.source, "validation.source": what.validation.source if what.validation else ""}
    for name, path in {"memory.folder": what.memory.folder, **sources}.items():
        if path and path not in (STDLIB, SYNTHETIC):
            check_path(path, name)


def load_plan(path: Path, overrides: tuple[str, ...]) -> Plan:
    """Read the saved plan of a run.

    Raises:
        ConfigError: settings stand next to it, it is the plan of something else, or it is damaged.
    """
    if overrides:
        raise ConfigError(
            f"a plan fixes its run: expected no settings next to {path}, got {overrides[0]!r}; plan again: "
            f"lading plan RUN.toml {overrides[0]}"
        )
    plan = Plan.load(path)
    if plan.kind is PlanKind.CLUSTER:
        raise ConfigError(
            f"{path}: expected the plan of a run, got that of a cluster; give its layout to lading simulate --model: "
            f"--layout {plan.layout}"
        )
    if plan.kind is PlanKind.PLACEMENT:
        raise ConfigError(
            f"{path}: expected the plan of a run, got a placement; simulate it with: lading place --plan {path}"
        )
    return plan
