"""Ranks of a configured run: they begin, open data and end together, and the first plans, prints and writes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TypeVar

import torch

from lading import __version__
from lading.alone import agent, launcher, num_ranks, rank_number, restarts
from lading.checkpoint.lock import agents_of
from lading.config import RunConfig, run_to_dict
from lading.errors import BudgetWarning, ConfigError
from lading.files import this_host
from lading.ir.action import DEVICE
from lading.ir.layout import Layout, parse_layout
from lading.ir.plan import Plan
from lading.report.metrics import MetricsLog
from lading.report.progress import Progress, training_progress
from lading.runtime.data import Dataset
from lading.runtime.interrupts import StopRequest

T = TypeVar("T")


@dataclass(frozen=True)
class RunRanks:
    """Ranks that train one run together, of which the first plans, prints and writes; a run alone is a job of one.

    Attributes:
        count: How many.
        rank: Number of this one.
        replicas: Groups of ranks that train on batches of their own; the stages of a pipeline are one.
        replica: Number of the one that this rank belongs to.
        beside: Numbers of the processes of the other ranks on this host, as this one sees them.
    """

    count: int = 1
    rank: int = 0
    replicas: int = 1
    replica: int = 0
    beside: tuple[int, ...] = ()

    @staticmethod
    def of_job() -> RunRanks:
        """Ranks of the job that this process belongs to."""
        count = num_ranks()[0]
        return RunRanks() if count == 1 else RunRanks(count, rank_number())

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that prints and writes."""
        return self.rank == 0

    @property
    def planning_stream(self) -> StringIO | None:
        """Stream that shows how the run is planned: standard error (None) of the first rank alone."""
        return None if self.is_first else StringIO()

    def begin(self, what: RunConfig | Plan, *, resume: bool, resume_from: str = "") -> None:
        """Join the other ranks, if all were given the same.

        Raises:
            ConfigError: they were not, the plan is for another number of ranks, or nothing is known of this machine's.
        """
        layout = self._layout_of(what)
        if layout.devices != self.count:
            source, advice = (
                ("RUN.toml", "set layout") if isinstance(what, RunConfig) else ("--plan PLAN.json", "plan again")
            )
            raise ConfigError(
                f"expected a job of {layout.devices} ranks, as the layout {layout} is for so many, found one of "
                f"{self.count}; start it with: {launcher(layout.devices)}lading train {source}; or {advice}"
            )
        if self.count == 1:
            return
        if isinstance(what, RunConfig) and what.machine == "probe":
            raise ConfigError(
                f"machine: expected a machine file that has the speed of collectives among {self.count} ranks, got "
                f"'probe'; make one with: lading probe --ranks {self.count} --out machine.toml, and set machine"
            )
        from lading.runtime.agreement import agree_on, flattened
        from lading.runtime.job import start_job, start_run

        start_job(self.count)
        start_run()
        request = run_to_dict(what) if isinstance(what, RunConfig) else {"fingerprint": what.fingerprint}
        facts = {
            "run" if isinstance(what, RunConfig) else "plan": flattened(request),
            "command": {"--resume": resume, "--resume-from": resume_from},
            "versions": {"torch": torch.__version__, "lading": __version__},
        }
        agree_on("lading train", range(self.count), lambda: (None, facts))

    def _layout_of(self, what: RunConfig | Plan) -> Layout:
        """Layout that is asked for; one of a file that does not say how many replicas has as many as the job has."""
        if isinstance(what, RunConfig):
            with suppress(ConfigError):  # of another number of ranks
                return parse_layout(what.layout, self.count)
        return parse_layout(what.layout or "")

    def started_again(self, out: Path) -> tuple[bool, bool, tuple[str, ...]]:
        """Tell whether a launcher has started this job before: a rank had failed, or others have joined or left.

        Args:
            out: The run's folder.

        Returns:
            That, whether it had the run's folder then, and the names of the processes that started the job.
        """
        restarts_by_rank = self.gathered((restarts(), agent()))
        agents = tuple(sorted({name for _, name in restarts_by_rank if name}))
        is_restart = bool(self.by_first(lambda: "again" if not set(agents).isdisjoint(agents_of(out)) else ""))
        return is_restart or any(count for count, _ in restarts_by_rank), is_restart, agents

    def processes_here(self) -> tuple[int, ...]:
        """Find the processes of the other ranks on this host; all ranks call this as they begin."""
        if self.count == 1:
            return ()
        names = self.gathered((this_host(), os.getpid()))
        return tuple(process for host, process in names if host == this_host() and process != os.getpid())

    def gathered(self, what: T) -> list[T]:
        """Give all ranks what each of them has, in order; all call this."""
        if self.count == 1:
            return [what]
        import torch.distributed as dist  # which takes most of a second

        by_rank = [what] * self.count
        dist.all_gather_object(by_rank, what)
        return by_rank

    def by_first(self, make: Callable[[], str]) -> str:
        """Let the first rank make a text that all get; what it fails of, all fail of."""
        if self.count == 1:
            return make()
        from lading.runtime.job import by_first_rank

        return json.loads(by_first_rank("lading train", lambda: json.dumps(make())))

    def opened(self, open_data: Callable[[], tuple[Dataset, Dataset | None]]) -> tuple[Dataset, Dataset | None]:
        """Open data on all ranks, where they must be the same: the first makes their copy beside the run.

        Raises:
            ConfigError: ranks have unlike data.
        """
        if self.count == 1:
            return open_data()
        from lading.runtime.agreement import agree_on

        opened_data = list[tuple[Dataset, Dataset | None]]()
        if self.is_first:
            self.by_first(lambda: opened_data.append(open_data()) or "")
        else:
            self.by_first(str)

        def opened() -> tuple[tuple[Dataset, Dataset | None], dict[str, dict[str, object]]]:
            datasets = opened_data[0] if opened_data else open_data()
            return datasets, {"data": {f"content {i}": data and data.fingerprint for i, data in enumerate(datasets)}}

        return agree_on("lading train", range(self.count), opened)

    @contextmanager
    def printing(self) -> Generator[None, None, None]:
        """Keep all ranks but the first from printing."""
        with ExitStack() as stack:
            if not self.is_first:
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield

    @contextmanager
    def recording(
        self, out: Path, plan: Plan, first_step: int, steps: int
    ) -> Generator[tuple[MetricsLog | None, Progress, StopRequest], None, None]:
        """Open what records the steps of a run and shows them, which the first rank does, and listen to signals.

        Args:
            out: Folder of the run.
            plan: Plan of the run, whose largest budget of a rank is shown beside the largest peak.
            first_step: Steps that were run before.
            steps: Steps of the run in all.

        Yields:
            The log of the first rank, None on others; the progress, which others show nowhere; and the request to stop.
        """
        with ExitStack() as stack:
            log = stack.enter_context(MetricsLog(out / "metrics.jsonl")) if self.is_first else None
            budget_bytes = max(each.budgets[DEVICE] for each in (plan, *plan.peers))
            shown = None if self.is_first else stack.enter_context(open(os.devnull, "w"))
            progress = stack.enter_context(training_progress(steps, budget_bytes, shown, first_step=first_step))
            stop = stack.enter_context(StopRequest(tells=self.is_first))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", BudgetWarning)  # said by progress
            yield log, progress, stop

    @contextmanager
    def ending_together(self) -> Generator[None, None, None]:
        """End quietly where another rank has failed before, which says why; may be entered again inside itself.

        Raises:
            SystemExit: in place of an error that follows from another rank's.
        """
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            from lading.runtime.job import is_first_to_fail, tell_launcher

            if is_first_to_fail():
                tell_launcher(error)
                raise
            raise SystemExit(1) from error
