"""Software of the user's own, measured: a script's blocks, loss, optimizer and exchange between ranks as it runs them.

[Note: a script of software]
The script is a Python file that the user names, with these names at its top level:

    block(width)             required: a module that takes and gives (rows, tokens, width), such as ``MyBlock(width)``
    prepare(model)           what is done to a model before it trains: compile it, wrap it. It gives what is called: a
                             module, or an engine with ``backward(loss)`` and ``step()``, as DeepSpeed's
    optimizer(parameters)    a ``torch.optim.Optimizer``; without it ``torch.optim.AdamW(parameters)``
    loss(logits, targets)    of (tokens, vocabulary) and (tokens,); without it ``torch.nn.functional.cross_entropy``
    all_gather(whole, part)  how it gathers what ranks have a part of; without it torch.distributed's
    product(a, b)            its product in 8 bits of two bfloat16 matrices; without it scaled float8 of torch
    like                     the set of switches to begin with, as --stack takes it; "torch-eager-cpu"
    layout                   how ranks share the model, as --layout says it beside dp: "zero0", "zero2", "zero3"
    widths                   of a small, a middle and a large block: (64, 256, 512)
    framework                what it is called

It is run once in each process, with ``__name__`` other than "__main__": a training script may be given if it has these
names and begins to train under ``if __name__ == "__main__"`` only.

[Note: others on the host] While a model trains, its ranks add up the seconds that they work; what the processors worked
beyond these others took. Measured beside others, steps say nothing: on four ranks of two processors, of which others
took half, they were twice as long. So such a case trains again, and of all the quietest counts.

[Note: one model in a process] Nothing is set that plain PyTorch has not set, and each model trains in processes of its
own, as in the user's run: its step depends on what else lives in its process, whose heap gives pages back or keeps them
by what was freed before. One model of 89 ms took 143 beside larger ones. The cases run in order, back and in order
again, so that a host whose speed drifts is as fast for all of them, and of the three the median counts: with two, one
case that was 15% slower for two seconds moved predictions of other models on two ranks by 10%.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lading.errors import ConfigError, did_you_mean
from lading.runtime.probe import QUIET, LoadMeter
from lading.runtime.probe_processes import group_of, in_processes, write_measured, write_refused

_FUNCTIONS = ("block", "prepare", "optimizer", "loss", "all_gather", "product")
_SETTINGS: Mapping[str, Any] = {
    "like": "torch-eager-cpu",
    "layout": "zero0",
    "widths": (64, 256, 512),
    "framework": "",
}
_LAYOUTS = ("zero0", "zero2", "zero3")
#: Operations whose own time is that of products, and of fused attention.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkl::_mkl_linear", "mkldnn::_linear_pointwise",
             "aten::mkldnn_convolution", "aten::convolution_backward", "aten::_grouped_mm")  # fmt: skip
_ATTENTION = "aten::_scaled_dot_product"
#: Codes with which a signal ends this process, whatever code it runs at that moment.
_SIGNALLED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
_FEWEST, _MOST, _PROFILED = 5, 60, 3
#: Bytes of the gathered tensor; rows, columns and depth of the product in 8 bits.
GATHERED_BYTES = 8 << 20
SQUARE = 512
#: Bytes of a tensor whose memory no process has had before.
_FRESH_BYTES = 64 << 20
_Found = TypeVar("_Found")
#: What to change where a process that trains ends.
_ADVICE = "leave out what ends a process that trains (os._exit, exit, a signal, memory that the host has not)"
#: How often a case trains at most while others load the host.
TRIES = 3


@dataclass(frozen=True)
class ProfileCase:
    """Sizes of a small model that is measured.

    Attributes:
        name: What it says most of: "small", "loss", "middle", "large", ...
        rows: Sequences of a rank's batch.
    """

    name: str
    width: int
    blocks: int
    rows: int
    tokens: int
    vocabulary: int


@dataclass(frozen=True)
class Timing:
    """Median seconds of a step's parts on the slowest rank, and of the operations in it by the profiler.

    Attributes:
        pass_s: Forward, loss and backward, with what ranks exchange in it.
        update_s: What is behind: the optimizer, and what an engine does besides.
        products_s, attention_s: Products and fused attention of forward and backward.
        profiled_s: The pass of the steps that the profiler looked at, which it makes longer; 0 where it is not known.
        events: Number of operations that the profiler saw.
        others: Share of the processors that others took meanwhile ([Note: others on the host]).
    """

    pass_s: float
    update_s: float
    products_s: float
    attention_s: float
    profiled_s: float = 0.0
    events: float = 0.0
    others: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.pass_s + self.update_s

    @staticmethod
    def median(timings: Sequence[Timing]) -> Timing:
        """Pick the one of an odd number whose step is the median."""
        return sorted(timings, key=lambda timing: timing.step_s)[len(timings) // 2]


@dataclass(frozen=True)
class Measured:
    """Result of measuring software among some ranks.

    Attributes:
        timings: One for each case.
        gather_s: Seconds of gathering ``GATHERED_BYTES``; 0 on one rank.
        fresh_s: Seconds of a byte of memory that the system gives anew, while all ranks ask for some.
        product_s: Seconds of a product of ``SQUARE`` in 8 bits, and in bfloat16; () where there is none.
        no_product: Reason why there is none.
    """

    timings: tuple[Timing, ...]
    gather_s: float = 0.0
    product_s: tuple[float, ...] = ()
    no_product: str = ""
    fresh_s: float = 0.0

    @property
    def other_load(self) -> float:
        """Largest share of the processors that others took while a case trained."""
        return max((timing.others for timing in self.timings), default=0.0)


def cases(widths: Sequence[int]) -> tuple[ProfileCase, ...]:
    """Make the cases: the host's work is most of the first two, the loss's of the third, kernels' of the others; in
    the fourth these find little in cache, and what is done to parameters and gradients counts most, as tokens are few.
    """
    small, middle, large = widths
    return (
        ProfileCase("small", small, 6, 1, 16, 64),
        ProfileCase("one block", small, 1, 1, 16, 64),
        ProfileCase("loss", small, 1, 4, 128, 4096),
        ProfileCase("few tokens", large, 3, 1, 64, 64),
        ProfileCase("middle", middle, 3, 4, 128, 1024),
        ProfileCase("large", large, 2, 2, 256, 1024),
    )


class ProbeModel(nn.Module):
    """Model of equal blocks between token embeddings and a head: tokens (rows, tokens) -> logits with a vocabulary."""

    def __init__(self, case: ProfileCase, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.layers = nn.ModuleList(block(case.width) for _ in range(case.blocks))
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute logits of every token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class UserSoftware:
    """Names of a script ([Note: a script of software]), checked, and what stands for those it lacks.

    Args:
        path: The script, which is run.
    Raises:
        ConfigError: no such file, it raised, or a name is missing or not what it should be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ConfigError(f"--software: expected a Python file with a function block(width), got {str(path)!r}")
        hint = (
            'it is run with __name__ other than "__main__", so put what begins to train under if __name__ == "__main__"'
        )
        names = self._called("the script itself", lambda: runpy.run_path(str(path), run_name="lading_software"), hint)
        self.functions: dict[str, Callable[..., Any]] = {name: names[name] for name in _FUNCTIONS if name in names}
        for name, function in self.functions.items():
            if not callable(function):
                raise ConfigError(f"{path}: expected {name} to be a function, got {type(function).__name__}")
        if "block" not in self.functions:
            function_names = sorted(
                name for name, value in names.items() if callable(value) and not name.startswith("_")
            )
            raise ConfigError(
                f"{path}: expected a function block(width) at its top level that makes a module of (rows, tokens, "
                f"width) to the same, as in: def block(width): return MyBlock(width); got functions and classes "
                f"{', '.join(function_names)[:200] or 'none'}{did_you_mean('block', function_names)}"
            )
        self.like, self.layout, self.widths, self.framework = (
            names.get(name, default) for name, default in _SETTINGS.items()
        )
        self._check()

    def _check(self) -> None:
        path = self.path
        for name in ("like", "layout", "framework"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{path}: expected {name} to be a text, got {getattr(self, name)!r:.60}")
        if self.layout not in _LAYOUTS:
            raise ConfigError(f"{path}: expected layout to be one of {', '.join(_LAYOUTS)}, got {self.layout!r:.60}")
        if self.layout != "zero0" and "prepare" not in self.functions:
            raise ConfigError(f"{path}: layout is {self.layout}: expected a function prepare(model) that shards it so")
        self.framework = self.framework or path.stem
        whole = isinstance(self.widths, list | tuple) and all(type(width) is int for width in self.widths)
        if not whole or len(self.widths) != 3 or not 0 < self.widths[0] < self.widths[1] < self.widths[2]:
            raise ConfigError(f"{path}: expected widths of three ascending numbers, got {self.widths!r:.60}")

    @property
    def read(self) -> str:
        """Sentence on which names were read from the script, and what stands for the others."""
        missing = [name for name in _FUNCTIONS if name not in self.functions]
        return f"{self.path}: read {', '.join(self.functions)}; torch's own for {', '.join(missing) or 'nothing'}"

    def _called(self, what: str, call: Callable[[], Any], hint: str = "") -> Any:
        """Call something of the script; what it raises becomes an error that names it, and its line.

        Args:
            hint: What to change, where it is another thing than the line says.
        """
        try:
            return call()
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code in _SIGNALLED:
                raise
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == str(self.path)]
            where = f" in line {lines[-1]}" if lines else ""
            advice = hint if hint and not isinstance(error, SyntaxError) else "mend it there"
            raise ConfigError(
                f"{self.path}: {what} raised {type(error).__name__}{where}: {error!s:.300}; {advice}"
            ) from error

    def block(self, width: int) -> nn.Module:
        """Make a block and check that it keeps the shape of its input, in float32."""
        made = self._called(f"block({width})", lambda: self.functions["block"](width))
        if not isinstance(made, nn.Module):
            raise ConfigError(f"{self.path}: expected block({width}) to give a torch.nn.Module, got {type(made)}")
        if wrong := {p.dtype for p in made.parameters()} - {torch.float32}:
            raise ConfigError(f"{self.path}: expected parameters of block({width}) in float32, got {wrong}")
        x = torch.zeros(1, 16, width)
        with torch.no_grad():
            y = self._called(f"block({width}) on (1, 16, {width})", lambda: made(x))
        shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        if shape != tuple(x.shape):
            raise ConfigError(f"{self.path}: expected block({width}) to map {tuple(x.shape)} to the same, got {shape}")
        return made

    def prepare(self, model: nn.Module, ranks: int) -> Any:
        """Apply the script's ``prepare``; without one, replicas are DistributedDataParallel's."""
        if "prepare" in self.functions:
            made = self._called("prepare(model)", lambda: self.functions["prepare"](model))
            if not callable(made):
                raise ConfigError(f"{self.path}: expected prepare(model) to give what is called, got {type(made)}")
            return made
        return DistributedDataParallel(model) if ranks > 1 else model

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of a model."""
        make: Callable[..., Any] = self.functions.get("optimizer", torch.optim.AdamW)
        made = self._called("optimizer(parameters)", lambda: make(parameters))
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"{self.path}: expected optimizer(parameters) to give an Optimizer, got {type(made)}")
        return made

    def loss(self, model: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Mean loss of ``{"tokens": (rows, tokens + 1)}``, as ``lading.capture`` takes it."""
        tokens = batch["tokens"]
        compute: Callable[..., Any] = self.functions.get("loss", F.cross_entropy)
        return compute(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class ScriptTraining:
    """One model in training as a script's software runs it.

    Args:
        model: As it was built; it is prepared here.
        batch: What the loss takes.
        loss: (model, batch) -> loss.
    """

    def __init__(self, software: UserSoftware, model: nn.Module, batch: Any, loss: Callable[..., Any]) -> None:
        self.software, self.batch, self.loss = software, batch, loss
        self.model = software.prepare(model, dist.get_world_size())
        parts = [callable(getattr(self.model, name, None)) for name in ("backward", "step")]
        self.engine: Any = self.model if all(parts) else None
        if any(parts) and not all(parts):
            raise ConfigError(f"{software.path}: what prepare(model) gives has one of backward and step, not both")
        self.optimizer = software.optimizer(list(self.model.parameters())) if self.engine is None else None

    def step(self) -> tuple[float, float]:
        """Run a step; gives seconds of forward, loss and backward, and of what is behind."""
        started = time.perf_counter()
        loss = self.loss(self.model, self.batch)
        if self.engine is not None:
            self.engine.backward(loss)
        else:
            loss.backward()
        middle = time.perf_counter()
        if self.engine is not None:
            self.engine.step()
        elif self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return middle - started, time.perf_counter() - middle

    def check_together(self) -> None:
        """Refuse replicas that drifted apart, whose gradients nobody reduced.

        Raises:
            ConfigError: parameters differ between ranks.
        """
        whole = [p for p in self.model.parameters() if type(p.data) is torch.Tensor]
        mine = torch.stack([p.detach().double().sum() for p in whole]) if whole else torch.zeros(1)
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.allclose(low, high, rtol=1e-6, atol=1e-6):
            raise ConfigError(
                f"{self.software.path}: replicas differ after their first steps: expected prepare(model) to reduce "
                f"gradients over the {dist.get_world_size()} ranks, as DistributedDataParallel(model) does"
            )


@dataclass(frozen=True)
class ProfiledRanks:
    """Processes that train together over gloo.

    Attributes:
        ranks: How many, >= 1.
        threads: Threads of each.
        seconds: Time for their steps; starting, compiling and warming up come on top.
    """

    ranks: int
    threads: int
    seconds: float


def measure(path: Path, asked: Sequence[ProfileCase], groups: Sequence[ProfiledRanks]) -> list[Measured]:
    """Measure the software of a script, each case in processes of its own ([Note: one model in a process]).

    Each case trains in all groups one after another, so that a host whose speed drifts is as fast for all of them.

    Returns:
        What was measured of each group.
    Raises:
        ConfigError: the script is not what it should be, says how.
    """
    order = [*range(len(asked)), *reversed(range(len(asked))), *range(len(asked))]
    measurements: list[list[list[Measured]]] = [[[] for _ in asked] for _ in groups]
    for turn, number in enumerate(order):
        besides = turn == len(order) - 1  # what is no step, beside the last case
        for group, passes in zip(groups, measurements, strict=True):
            given = (str(path.resolve()), asked[number], besides, group.threads, group.seconds / len(order))
            run = partial(_answer, group.ranks, given)
            passes[number].append(quietest(run, lambda answer: answer.other_load))
    return [
        replace(passes[-1][-1], timings=tuple(Timing.median([one.timings[0] for one in turns]) for turns in passes))
        for passes in measurements
    ]


def quietest(run: Callable[[], _Found], others: Callable[[_Found], float]) -> _Found:
    """Run a measurement, and again while others load the host; the quietest ([Note: others on the host]).

    Args:
        others: Share of the processors that others took during a result.
    """
    best = run()
    for _ in range(TRIES - 1):
        if others(best) <= QUIET:
            break
        best = min(best, run(), key=others)
    return best


def _answer(ranks: int, given: tuple[object, ...]) -> Measured:
    answer = json.loads(in_training_processes(_run, ranks, *given))
    timings = tuple(Timing(**timing) for timing in answer.pop("timings"))
    return Measured(timings, **{**answer, "product_s": tuple(answer["product_s"])})


def in_training_processes(run: Callable[..., None], ranks: int, *given: object) -> str:
    """Run a function in fresh processes that train, as ``lading.runtime.probe_processes.in_processes``."""
    multiprocessing.set_forkserver_preload([__name__, "torch._dynamo"])  # which optimizers import, in seconds
    return in_processes(run, ranks, *given, advice=_ADVICE, method="forkserver")


def _run(
    rank: int, ranks: int, folder: str, path: str, case: ProfileCase, besides: bool, threads: int, seconds: float
) -> None:
    """Run one process; the first writes what was measured."""
    torch.set_num_threads(threads)
    with in_group(rank, ranks, folder):
        try:
            measured = _measured(UserSoftware(Path(path)), case, rank, besides, seconds)
        except Exception as error:  # of the script's code, called by torch's
            message = f"{path}: training in it raised {type(error).__name__}: {error!s:.400}"
            write_refused(folder, rank, str(error) if isinstance(error, ConfigError) else message)
            raise
        write_measured(folder, json.dumps(asdict(measured)))


@contextmanager
def in_group(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """Be one rank of a gloo group that meets in a folder; frameworks find the ranks in the environment too."""
    ours, all_of = str(rank), str(ranks)
    os.environ.update(RANK=ours, LOCAL_RANK=ours, WORLD_SIZE=all_of, LOCAL_WORLD_SIZE=all_of)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler prints that it begins and ends
    with group_of(rank, ranks, folder):
        yield


def _measured(software: UserSoftware, case: ProfileCase, rank: int, besides: bool, seconds: float) -> Measured:
    timings = (timing_of(_training(software, case, rank), seconds),)
    if not besides:
        return Measured(timings)
    fresh_s = _fresh_s()
    if dist.get_world_size() > 1:
        return Measured(timings, _gather_s(software), fresh_s=fresh_s)
    product, reason = _product_s(software)
    return Measured(timings, 0.0, product, reason, fresh_s)


def _training(software: UserSoftware, case: ProfileCase, rank: int) -> ScriptTraining:
    torch.manual_seed(0)
    model = ProbeModel(case, software.block)
    return ScriptTraining(software, model, batch_of(case, rank), software.loss)


def batch_of(case: ProfileCase, seed: int) -> dict[str, torch.Tensor]:
    """Draw tokens of a case."""
    draw = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(case.vocabulary, (case.rows, case.tokens + 1), generator=draw)}


def timing_of(training: ScriptTraining, seconds: float) -> Timing:
    """Time steps of a model for so many seconds, and what the profiler says of a few.

    Raises:
        ConfigError: replicas differ.
    """
    for _ in range(2):
        training.step()
    if dist.get_world_size() > 1:
        training.check_together()
    begun = time.perf_counter()
    training.step()
    rounds = max(_FEWEST, min(_MOST, int(seconds / _slowest([time.perf_counter() - begun])[0])))
    looked = {rounds * number // _PROFILED for number in range(_PROFILED)}  # spread, as the host's speed drifts
    steps: list[tuple[float, ...]] = []
    operations: list[tuple[float, ...]] = []
    meter, worked = LoadMeter(), time.process_time()
    for number in range(rounds):
        if number in looked:
            operations.append(_operations_s(training))
            training.step()  # the first behind the profiler is not as the others
        dist.barrier()
        steps.append(training.step())
    others = _measure_other_load(meter, time.process_time() - worked)
    parts = [
        statistics.median(part) for parts_of_steps in (steps, operations) for part in zip(*parts_of_steps, strict=True)
    ]
    pass_s, update_s, products_s, attention_s, profiled_s, events = _slowest(parts)
    return Timing(pass_s, update_s, products_s, attention_s, profiled_s, events, others)


def _measure_other_load(meter: LoadMeter, worked_s: float) -> float:
    """Share of the processors that no rank took while a meter ran; 0 where the system does not say.

    Args:
        worked_s: Seconds that this rank worked meanwhile.
    """
    worked = torch.tensor(worked_s, dtype=torch.float64)
    dist.all_reduce(worked)
    return _slowest([meter.share(float(worked)) or 0.0])[0]


def _slowest(seconds: Sequence[float]) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _operations_s(training: ScriptTraining) -> tuple[float, ...]:
    """Seconds of one step that products and fused attention take by torch's profiler, of its pass, and operations."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pass_s, _ = training.step()
    products = attention = 0.0
    events = 0
    for event in profiler.key_averages():
        events += event.count
        if event.key in _PRODUCTS:
            products += event.self_cpu_time_total
        elif event.key.startswith(_ATTENTION):
            attention += event.self_cpu_time_total
    return products / 1e6, attention / 1e6, pass_s, float(events)


def _median_s(call: Callable[[], object], rounds: int = 15) -> float:
    call()
    seconds: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _fresh_s() -> float:
    """Seconds by which writing a byte takes longer where the system gives its memory anew, on the slowest rank."""
    seconds: list[float] = []
    for _ in range(15):
        dist.barrier()
        started = time.perf_counter()
        tensor = torch.empty(_FRESH_BYTES, dtype=torch.uint8).fill_(1)
        middle = time.perf_counter()
        tensor.fill_(2)
        seconds.append(middle - started - (time.perf_counter() - middle))
    return max(0.0, _slowest([statistics.median(seconds) / _FRESH_BYTES])[0])


def _gather_s(software: UserSoftware) -> float:
    """Seconds of gathering a tensor of which each rank has a part; the rank that comes last waits for nobody."""
    ranks = dist.get_world_size()
    part = torch.rand(GATHERED_BYTES // 4 // ranks)
    whole = torch.empty(part.numel() * ranks)
    torchs = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
    gather: Callable[..., Any] = software.functions.get("all_gather", torchs)
    seconds: list[float] = []
    for _ in range(15):
        dist.barrier()
        seconds.append(_timed_call(lambda: gather(whole, part)))
    if not torch.equal(whole.view(ranks, -1)[dist.get_rank()], part):
        raise ConfigError(f"{software.path}: expected all_gather(whole, part) to put this rank's part in its place")
    return _slowest([statistics.median(seconds)])[0]


def _timed_call(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _product_s(software: UserSoftware) -> tuple[tuple[float, ...], str]:
    """Seconds of a product in 8 bits and in bfloat16, or why there is none."""
    a, b = (torch.rand(SQUARE, SQUARE, dtype=torch.bfloat16) for _ in range(2))
    low: Callable[..., Any] = software.functions.get("product", _scaled_product)
    try:
        made = low(a, b)
    except Exception as error:
        if "product" in software.functions:
            raise ConfigError(
                f"{software.path}: product(a, b) raised {type(error).__name__}: {error!s:.300}"
            ) from error
        return (), f"torch {torch.__version__} has no product in 8 bits here: {str(error).splitlines()[0]:.120}"
    wide = torch.mm(a, b)
    if made.shape != wide.shape or not torch.allclose(made.float(), wide.float(), rtol=0.1, atol=0.1 * SQUARE**0.5):
        raise ConfigError(f"{software.path}: expected product(a, b) to be near a @ b, got something else")
    return (_median_s(lambda: low(a, b)), _median_s(lambda: torch.mm(a, b))), ""


def _scaled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product in float8 with a scale for each matrix, casts included, as torchao's tensorwise recipe."""
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max
    scales = [matrix.abs().max().float().clamp(min=1e-12) / most for matrix in (a, b)]
    low = [(matrix.float() / scale).to(kind) for matrix, scale in zip((a, b), scales, strict=True)]
    multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(low[0], low[1].t().contiguous().t(), scales[0], scales[1], out_dtype=torch.bfloat16)
