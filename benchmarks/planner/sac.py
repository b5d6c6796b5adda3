"""torch's selective activation checkpointing by integer programs (``torch.distributed._tools``), on a captured step.

The pipeline is torch's: per module the operations' bytes and times (``SACStats``), a trade-off curve of bytes discarded
against time (``SACEstimator``), a program that says how much each module discards (``sac_milp``), and one per module
that says which operations it saves (``get_optimal_checkpointing_policy_per_module``). torch collects bytes and times
on fake tensors for a CUDA roofline, and does not run on a host without one; here they are read off the captured step,
so that both sides know the same times. Where torch's accounting would be pessimistic about this step (gradients live
until the end, say), what the step needs is given instead. Needs ``pip install lading[rivals]``.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from lading.ir.fold import block_items
from lading.ir.graph import Phase, Role
from lading.ir.plan import Option
from lading.memory.lifetime import Gap, can_recompute
from lading.planner.residency import StepProblem

Choices = dict[tuple[int, int], Option]
_GIB = 1 << 30
_MS = 1e3


def choices(step: StepProblem, away: Choices, room_bytes: int, limit_s: float) -> Choices | None:
    """Find what torch's programs recompute within ``room_bytes``; None where they find nothing in ``limit_s`` seconds.

    Args:
        away: Persistent storages that are on a lower tier between uses; the rest of them counts all the time.
    """
    from torch.distributed._tools import sac_ilp

    logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.CRITICAL)
    modules = _Modules(step, away)
    with _time_limit(sac_ilp, limit_s):
        discarded, _, peak = sac_ilp.sac_milp(modules.torch_graph(), room_bytes / _GIB)
        if peak < 0:
            return None
        found: Choices = {}
        decide = lru_cache(partial(_decisions, sac_ilp))
        for name, share in discarded.items():
            ops = modules.forward_ops(name)
            for op, saved in zip(ops, decide(modules.key(ops), share), strict=True):
                if not saved:
                    found.update(_recomputed(step, op))
    return found


@contextlib.contextmanager
def _time_limit(sac_ilp: Any, limit_s: float) -> Iterator[None]:
    """Give torch's solver a shorter time limit than the 180 s that it has written down."""
    solver = sac_ilp.PULP_CBC_CMD
    sac_ilp.PULP_CBC_CMD = lambda **options: solver(**{**options, "timeLimit": min(limit_s, options["timeLimit"])})
    try:
        yield
    finally:
        sac_ilp.PULP_CBC_CMD = solver


_Row = tuple[str, float, int, bool]


def _stats(key: tuple[_Row, ...]) -> Any:
    from torch.distributed._tools.sac_estimator import SACStats

    return SACStats(
        func_names=[name for name, *_ in key],
        runtimes=[seconds * _MS for _, seconds, *_ in key],
        memory=[size for _, _, size, _ in key],
        view_like_ops=[],  # the captured step has none
        rand_ops=[i for i, (*_, random) in enumerate(key) if random],
        saved_autograd_ops=[],
        inplace_ops=[],
        force_store_random=True,  # the step never draws a number twice
    )


def _decisions(sac_ilp: Any, key: tuple[_Row, ...], discarded: float) -> list[int]:
    found = sac_ilp.get_optimal_checkpointing_policy_per_module(_stats(key), max(0.0, min(1.0, 1.0 - discarded)))
    return found or [1] * len(key)


def _recomputed(step: StepProblem, op: int) -> Choices:
    """Gaps of an operation's results from forward to backward, where they can be computed again."""
    found: Choices = {}
    for storage in step.graph.op_writes[op]:
        uses = step.lives.uses[storage]
        for start, end in pairwise(uses):
            crosses = step.graph.ops[start].phase is not Phase.BACKWARD and step.graph.ops[end].phase is Phase.BACKWARD
            if crosses and can_recompute(step.graph, step.lives, Gap(storage, start, end, False)):
                found[storage, start] = Option.RECOMPUTE
    return found


class _Modules:
    """The module tree of a step with torch's figures of each module."""

    def __init__(self, step: StepProblem, away: Choices) -> None:
        self.step, self.graph, self.lives = step, step.graph, step.lives
        items = block_items(self.graph.ops)
        names = [_within(op.module, item) for op, item in zip(self.graph.ops, items, strict=True)]
        self.names = ["root" if not name else f"root.{name}" for name in names]
        self.forward = [i for i, op in enumerate(self.graph.ops) if op.phase is Phase.FORWARD]
        self.saved, self.other = self._profiles(away)

    def forward_ops(self, module: str) -> list[int]:
        """Forward operations of a module and what it contains, in order."""
        return [i for i in self.forward if _contains(module, self.names[i])]

    def key(self, ops: list[int]) -> tuple[_Row, ...]:
        """Rows that torch's programs are told of operations: name, seconds, bytes, whether random; the last is free."""
        rows = [
            (
                self.graph.ops[i].name,
                self.step.costs.op_seconds[i],
                sum(self.graph.storages[s].size_bytes for s in self.graph.op_writes[i]),
                self.graph.ops[i].random,
            )
            for i in ops
        ]
        name, seconds, _, random = rows[-1]
        return (*rows[:-1], (name, seconds, 0, random))

    def torch_graph(self) -> Any:
        """torch's tree: one node a module, in the order in which forward enters them."""
        from torch.distributed._tools.ilp_utils import ModuleInfo, parse_module_info

        entered, left = self._orders()
        parents = [name for name in entered if any(other.startswith(f"{name}.") for other in entered)]
        estimated = self._estimated(parents)
        rows: list[Any] = [self._row(name, estimated.get(name)) for name in entered]
        orders = {"fw_pre_order": entered, "fw_post_order": left, "bw_pre_order": left, "bw_post_order": entered}
        return parse_module_info(ModuleInfo(mod_order=orders, mod_stats=rows))  # pyright: ignore[reportArgumentType]

    def _orders(self) -> tuple[list[str], list[str]]:
        """Modules in the order forward enters them (parents first) and leaves them (parents last)."""
        entered: dict[str, None] = {}
        last: dict[str, int] = {}
        for i in self.forward:
            parts = self.names[i].split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                entered.setdefault(name)
                last[name] = i
        called = [name for name in entered if not _is_list(name, entered)]
        depths = {name: -name.count(".") for name in called}
        nested = _preorder(called)
        return nested, sorted(nested, key=lambda name: (last[name], depths[name]))

    def _estimated(self, names: list[str]) -> dict[str, Any]:
        """torch's trade-off curves of the modules that may be checkpointed, once for alike ones."""
        from torch.distributed._tools.sac_estimator import SACEstimator

        first: dict[tuple[_Row, ...], str] = {}
        same: dict[str, str] = {}
        estimator = SACEstimator()
        for name in names:
            key = self.key(self.forward_ops(name))
            if len(key) < 3 or not sum(size for _, _, size, _ in key):
                continue
            same[name] = first.setdefault(key, name)
            if same[name] == name:
                stats = _stats(key)
                estimator.sac_mod_stats[name] = stats
                estimator.sac_mod_greedy_order_meta[name] = estimator._get_greedy_order_meta(stats)
        with contextlib.redirect_stdout(io.StringIO()):
            estimator.pwlf_sac_tradeoff_curve()
        return {name: estimator.sac_mod_tradeoff_stats[other] for name, other in same.items()}

    def _row(self, name: str, curve: Any) -> dict[str, Any]:
        inside = self.forward_ops(name)
        backward = [
            i for i, op in enumerate(self.graph.ops)
            if op.phase not in (Phase.FORWARD, Phase.LOSS) and _contains(name, self.names[i])
        ]  # fmt: skip
        if name == "root":
            backward = list(range(inside[-1] + 1, len(self.graph.ops)))
        made = {s for i in inside for s in self.graph.op_writes[i]}
        output = set(self.graph.op_writes[inside[-1]])
        kept = [s for s in made - output if self._lasts(s, inside[-1])]
        return {
            "fqn": name,
            "param_per_module": 0,  # counted in act_grad_per_module with all else that is there
            "grad_per_module": 0,
            "grad_total": 0,
            "act_fw_per_module": sum(self.graph.storages[s].size_bytes for s in kept),
            "act_bw_per_module": 0,
            "act_grad_per_module": max((self.other[i] for i in backward), default=0),
            "act_total": self.saved[inside[-1]],
            "input_per_module": 0,
            "output_per_module": 0,
            "fw_runtime_per_module": 0.0,
            "bw_runtime_per_module": 0.0,
            "is_leaf": curve is None,
            "sac_runtime": curve.sac_runtime if curve else 0,
            "sac_memory": curve.sac_memory if curve else 0,
            "n_segments": curve.n_segments if curve else 0,
            "slopes": curve.slopes if curve else [],
            "intercepts": curve.intercepts if curve else [],
            "breakpoints": curve.fit_breaks if curve else [],
            "tradeoff_curve": curve.tradeoff_curve if curve else {},
        }

    def _lasts(self, storage: int, position: int) -> bool:
        uses = self.lives.uses[storage]
        return uses[-1] > position and self.graph.ops[uses[-1]].phase is not Phase.FORWARD

    def _profiles(self, away: Choices) -> tuple[list[int], list[int]]:
        """Bytes at each operation when nothing is recomputed: activations of forward, and everything else."""
        count = len(self.graph.ops)
        saved, other = [0] * count, [0] * count
        for storage, uses in enumerate(self.lives.uses):
            size = self.graph.storages[storage].size_bytes
            if not uses or not size:
                continue
            spans = [(uses[0], uses[-1])]
            if storage in self.graph.persistent:
                at_home = (storage, uses[-1]) not in away
                spans = [(0, count - 1)] if at_home else [(use, use) for use in uses]
            made_forward = self.graph.ops[uses[0]].phase is Phase.FORWARD
            activation = made_forward and self.graph.storages[storage].role not in (Role.INPUT, Role.CONSTANT)
            profile = saved if activation and storage not in self.graph.persistent else other
            for first, last in spans:
                for i in range(first, last + 1):
                    profile[i] += size
        return saved, other


def _within(module: str, item: str) -> str:
    """The module of an operation; one that a block calls outside itself (a shared module) counts as the block's."""
    if item and not (module == item or module.startswith(f"{item}.")):
        return item
    return module


def _is_list(name: str, names: Iterable[str]) -> bool:
    """Whether a module is a list of modules, which nobody calls."""
    inside = {other[len(name) + 1 :].split(".")[0] for other in names if other.startswith(f"{name}.")}
    return bool(inside) and all(part.isdigit() for part in inside)


def _contains(module: str, name: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _preorder(names: list[str]) -> list[str]:
    """Names as a tree is entered: each right before what it contains, siblings in the order given."""
    place = {name: index for index, name in enumerate(names)}

    def path(name: str) -> list[int]:
        parts = name.split(".")
        prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        return [place[prefix] for prefix in prefixes if prefix in place]

    return sorted(names, key=path)
