"""A made-up step of a 12-block transformer, timed by a toy list scheduler, so that reports have something to show."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.machines import small_machine
from tests.plans import some_plan

from lading.ir.action import Action, ActionKind
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph, Storage, Tensor
from lading.ir.plan import Choice, Option, Plan, PolicyRow
from lading.ir.program import ActionList, Program
from lading.ir.timeline import Event, MemorySample, Timeline
from lading.report.promises import RunSummary
from lading.units import MiB

SHAPES = {
    "attention_norm.weight": (512,), "attention.wq.weight": (512, 512), "attention.wk.weight": (512, 512),
    "attention.wv.weight": (512, 512), "attention.wo.weight": (512, 512), "mlp_norm.weight": (512,),
    "mlp.w1.weight": (1408, 512), "mlp.w2.weight": (512, 1408), "mlp.w3.weight": (1408, 512),
}  # fmt: skip
FORWARD = (
    "rms_norm", "mm", "mm", "mm", "view_as_rope", "mul", "scaled_dot_product_attention", "mm", "add", "rms_norm",
    "mm", "silu", "mm", "mul", "mm", "add",
)  # fmt: skip
BACKWARD = (
    "mm", "mm", "mul", "silu_backward", "mul", "mm", "mm", "mm", "mm", "add", "rms_norm_backward", "add", "mm", "mm",
    "scaled_dot_product_attention_backward", "mul", "mm", "mm", "mm", "mm", "add", "add",
)  # fmt: skip
BUDGET = 640 * MiB


class Builder:
    """Grows a graph and its program together."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.actions: list[Action] = []
        self.choices: list[Choice] = []
        self.resident: list[tuple[int, int]] = []
        self.slots: list[tuple[int, int]] = []
        self.offset = 0

    def storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def place(self, storage: int) -> tuple[int, int]:
        self.offset += -(-self.storages[storage].size_bytes // 4096) * 4096
        return storage, self.offset

    def op(self, name: str, phase: Phase, module: str, output: int | None = None) -> int:
        kind = OpKind.MATMUL if name == "mm" else OpKind.ATTENTION if "attention" in name else OpKind.ELEMENTWISE
        outputs = () if output is None else (output,)
        self.ops.append(Op(f"aten.{name}.default", phase, (), (), (), outputs, outputs, (), module, kind))
        return len(self.ops) - 1

    def act(self, kind: ActionKind, stream: str, **fields: Any) -> int:
        self.actions.append(Action(len(self.actions), kind, stream, **fields))
        return len(self.actions) - 1

    def free(self, storage: int, *, written: bool = False) -> None:
        stream = "disk_write" if written else "compute"
        self.act(ActionKind.FREE, stream, storage=storage, source="device")

    def read(self, storage: int) -> int:
        last = max(a.id for a in self.actions if a.stream == "compute")
        return self.act(
            ActionKind.MOVE, "disk_read", storage=storage, source="disk", target="device",
            places=(self.place(storage),), waits=(last,),
        )  # fmt: skip

    def write(self, storage: int) -> None:
        last = max(a.id for a in self.actions if a.stream == "compute")
        self.act(ActionKind.MOVE, "disk_write", storage=storage, source="device", target="disk", waits=(last,))


def build(blocks: int = 12) -> tuple[Program, tuple[Choice, ...]]:
    """Blocks by turns keep, recompute and move their activations; AdamW states always live on disk."""
    b = Builder(blocks)
    parameters = {
        (layer, name): b.storage(f"layers.{layer}.{name}", 4 * math.prod(shape), Role.PARAMETER)
        for layer in range(blocks)
        for name, shape in SHAPES.items()
    }
    embedding = b.storage("embedding.weight", 4 * 8192 * 512, Role.PARAMETER)
    b.storage("rope", 1 * MiB, Role.BUFFER)
    b.resident = [b.place(s) for s in (*parameters.values(), embedding, embedding + 1)]
    options = [(Option.RECOMPUTE, Option("disk"), Option.KEEP)[layer % 3] for layer in range(blocks)]
    tokens = b.storage("tokens", 64 << 10, Role.INPUT)
    b.act(ActionKind.MOVE, "caller_read", storage=tokens, source="caller", target="device", places=(b.place(tokens),))
    saved = {layer: _forward(b, layer, options[layer]) for layer in range(blocks)}
    loss = b.op("cross_entropy_loss", Phase.LOSS, "", None)
    scratch = b.storage("logits", 64 * MiB, Role.WORKSPACE)
    b.act(ActionKind.COMPUTE, "compute", op=loss, places=(b.place(scratch),))
    b.free(scratch)
    for layer in reversed(range(blocks)):
        gradients = _backward(b, layer, options[layer], saved[layer])
        _step(b, layer, gradients)
    b.free(tokens)
    tensors = tuple(Tensor(i, "float32", (s.size_bytes // 4,), (1,)) for i, s in enumerate(b.storages))
    graph = StepGraph(tuple(b.storages), tensors, tuple(b.ops), (), (), ((),), ())
    program = Program(
        (ActionList().extend(b.actions),), graph, arena_bytes=560 * MiB, workspace_bytes=8 * MiB,
        resident=tuple(b.resident), slots={"disk": tuple(b.slots)}, budgets={"device": BUDGET},
        overhead_bytes=30 * MiB, tiers=small_machine().tiers,
    )  # fmt: skip
    return program, tuple(b.choices)


def _forward(b: Builder, layer: int, option: Option) -> list[int]:
    outputs: list[int] = []
    for number, name in enumerate(FORWARD):
        wide = number in (10, 11, 12, 13)
        module = f"layers.{layer}." + ("attention" if number < 9 else "mlp")
        output = b.storage(f"{module}.{name}_{number}", (6 if wide else 3) * MiB, Role.ACTIVATION)
        b.act(ActionKind.COMPUTE, "compute", op=b.op(name, Phase.FORWARD, module, output), places=(b.place(output),))
        outputs.append(output)
    for output in outputs:
        if option != Option.KEEP:
            if option == Option("disk"):
                b.write(output)
            b.free(output, written=option == Option("disk"))
            b.choices.append(Choice(output, len(b.ops) - 1, len(b.ops) + 200, option))
            if option == Option("disk"):
                b.slots.append((output, len(b.slots) * 8 * MiB))
    return outputs


def _backward(b: Builder, layer: int, option: Option, saved: list[int]) -> list[int]:
    first = next(i for i, op in enumerate(b.ops) if op.module.startswith(f"layers.{layer}."))
    if option == Option("disk"):
        for storage in reversed(saved):
            b.read(storage)
    if option == Option.RECOMPUTE:
        for number, storage in enumerate(saved):
            b.act(ActionKind.RECOMPUTE, "compute", op=first + number, places=(b.place(storage),))
    reads = tuple(a.id for a in b.actions[-len(saved) :] if a.stream == "disk_read")
    gradients = [
        b.storage(f"layers.{layer}.{name}.grad", 4 * math.prod(shape), Role.GRADIENT) for name, shape in SHAPES.items()
    ]
    for number, name in enumerate(BACKWARD):
        module = f"layers.{layer}." + ("mlp" if number < 11 else "attention")
        places = (b.place(gradients[number // 2]),) if number % 2 == 0 and number // 2 < len(gradients) else ()
        op = b.op(name, Phase.BACKWARD, module)
        b.act(ActionKind.COMPUTE, "compute", op=op, places=places, waits=reads if number == 0 else ())
        if number < len(saved):
            b.free(saved[-1 - number])
    return gradients


def _step(b: Builder, layer: int, gradients: list[int]) -> None:
    for (name, shape), gradient in zip(SHAPES.items(), gradients, strict=True):
        states = [
            b.storage(f"layers.{layer}.{name}.{s}", 4 * math.prod(shape), Role.OPTIMIZER_STATE)
            for s in ("exp_avg", "exp_avg_sq")
        ]
        reads = tuple(b.read(s) for s in states)
        step = b.op("adamw", Phase.OPTIMIZER, f"layers.{layer}.{name}")
        b.act(ActionKind.STEP, "compute", op=step, waits=reads)
        b.free(gradient)
        for state in states:
            b.slots.append((state, len(b.slots) * 8 * MiB))
            b.choices.append(Choice(state, len(b.ops), 0, Option("disk")))
            b.write(state)
            b.free(state, written=True)


def schedule(
    program: Program, source: str, seconds: Callable[[Action], float], resident_noise: random.Random | None = None
) -> Timeline:
    """In-order streams, waits, and the memory staircase that follows."""
    free_at: dict[str, float] = defaultdict(float)
    ends: list[float] = []
    events: list[Event] = []
    for action in program.actions:
        start = max([free_at[action.stream], *(ends[w] for w in action.waits)])
        ends.append(start + seconds(action))
        free_at[action.stream] = ends[-1]
        events.append(Event(0, action.stream, action.id, start, ends[-1]))
    events.sort(key=lambda e: (e.start_s, e.action))
    memory = _memory(program, events)
    resident: list[tuple[float, int]] = []
    peak = program.peak_bytes
    if resident_noise is not None:
        device = [s for s in memory if s.tier == "device"]
        for i in range(0, len(device), 7):
            resident.append((device[i].time_s, device[i].total_bytes + round(resident_noise.uniform(24, 36) * MiB)))
        peak = max(b for _, b in resident)
    labels = {a.id: program.label(a) for a in program.actions}
    return Timeline(source, tuple(events), memory, labels, tuple(resident), peak)


def _memory(program: Program, events: list[Event]) -> tuple[MemorySample, ...]:
    storages = program.graph.storages
    device: dict[str, int] = defaultdict(int)
    for storage, _ in program.resident:
        device[storages[storage].role.value] += storages[storage].size_bytes
    disk = {"optimizer_state": sum(s.size_bytes for s in storages if s.role is Role.OPTIMIZER_STATE), "activation": 0}
    samples = [MemorySample(0.0, "device", dict(device)), MemorySample(0.0, "disk", dict(disk))]
    changes: list[tuple[float, int, str, int]] = []
    for event in events:
        action = program.actions[event.action]
        changes += [(event.start_s, 1, "device", s) for s, _ in action.places]
        if action.kind is ActionKind.FREE and action.storage is not None:
            changes.append((event.end_s, 0, "device", action.storage))
        to_or_from_disk = action.kind is ActionKind.MOVE and "disk" in (action.source, action.target)
        if to_or_from_disk and action.storage is not None and storages[action.storage].role is Role.ACTIVATION:
            changes.append((event.end_s, int(action.target == "disk"), "disk", action.storage))
    for time_s, arrives, tier, storage in sorted(changes):
        bytes_by_role = device if tier == "device" else disk
        bytes_by_role[storages[storage].role.value] += (1 if arrives else -1) * storages[storage].size_bytes
        samples.append(MemorySample(time_s, tier, dict(bytes_by_role)))
    return tuple(samples)


def cost(program: Program) -> Callable[[Action], float]:
    """Seconds of an action, without noise."""

    def seconds(action: Action) -> float:
        if action.kind is ActionKind.MOVE and action.storage is not None:
            rate = 1.5e9 if action.target == "disk" else 0.8e9
            return 1e-4 + program.graph.storages[action.storage].size_bytes / rate
        if action.op is None:
            return 0.0
        op = program.graph.ops[action.op]
        if action.kind is ActionKind.STEP:
            return 1.1e-3
        other = 0.3e-3 if "norm" in op.name else 0.12e-3
        return {OpKind.MATMUL: 2.6e-3, OpKind.ATTENTION: 3.1e-3}.get(op.kind, other)

    return seconds


def noisy(seconds: Callable[[Action], float], seed: int = 1) -> Callable[[Action], float]:
    """The same costs as a machine would show them: a few percent slower, with jitter and an outlier now and then."""
    rng = random.Random(seed)
    return lambda action: seconds(action) * rng.lognormvariate(0.04, 0.10) * (4 if rng.random() < 0.002 else 1)


def plan_of(program: Program, choices: tuple[Choice, ...], predicted: Timeline) -> Plan:
    """A plan with five policies."""
    peak = max((s for s in predicted.memory if s.tier == "device"), key=lambda s: s.total_bytes)
    moved = {"disk read": 812 * MiB, "disk write": 644 * MiB}
    step = predicted.duration_s
    rows = (
        PolicyRow(policy="keep-all", fits=False, peak_bytes=1480 * MiB, note="needs 840 MiB more"),
        PolicyRow(policy="recompute-all", fits=False, peak_bytes=701 * MiB, recompute_s=0.41, note="states do not fit"),
        PolicyRow(policy="offload-all", fits=True, peak_bytes=402 * MiB, step_s=step * 1.62, stall_s=0.71,
                  moved_bytes={"disk read": 2210 * MiB, "disk write": 1960 * MiB}),
        PolicyRow(policy="reverse-greedy", fits=True, peak_bytes=633 * MiB, step_s=step * 1.11, stall_s=0.22,
                  recompute_s=0.06, moved_bytes=moved),
        PolicyRow(policy="residency", fits=True, peak_bytes=program.peak_bytes, step_s=step, stall_s=0.082,
                  recompute_s=0.104, moved_bytes=moved, note="LP relaxation, rounded"),
    )  # fmt: skip
    return some_plan(
        graph_fingerprint=program.graph.fingerprint, program=tuple(program.text().splitlines()),
        budgets={"device": BUDGET, "disk": 8 << 30}, gaps=choices, settings={"clip_norm": 1.0}, step_s=step,
        lower_bound_s=step * 0.93, peaks={"step": {"device": program.peak_bytes, "disk": 512 * MiB}},
        bytes_by_role=peak.bytes_by_role, policies=rows,
        assumptions=("reads and writes overlap at the mixed rates that were probed",
                     "a page fault of a fresh arena costs nothing after the first step",
                     "cross_entropy_loss is timed as a memory-bound operation"),
        machine={"name": "laptop"},
    )  # fmt: skip


def metrics_of(steps: int = 150, step_s: float = 1.4, peak_bytes: int = 600 * MiB) -> list[dict[str, Any]]:
    """A loss curve that falls from 5.43 to about 2.5."""
    rng = random.Random(3)
    return [
        {
            "step": step,
            "loss": 2.4 + 3.03 * math.exp(-(step - 1) / 42) + (rng.gauss(0, 0.04) if step > 1 else 0.0),
            "step_s": step_s * rng.lognormvariate(0, 0.03),
            "tokens_per_s": 2048 / step_s * rng.lognormvariate(0, 0.03),
            "memory_bytes": round(peak_bytes * rng.uniform(0.97, 1.0)),
        }
        for step in range(1, steps + 1)
    ]


def run(blocks: int = 12, **changes: Any) -> dict[str, Any]:
    """Everything that ``write_report`` takes but the path; ``changes`` go to the summary."""
    program, choices = build(blocks)
    seconds = cost(program)
    predicted = schedule(program, "predicted", seconds)
    measured = schedule(program, "measured", noisy(seconds), random.Random(2))
    metrics = metrics_of(step_s=measured.duration_s, peak_bytes=measured.peak_bytes)
    fields: dict[str, Any] = {
        "title": "Llama 45M in 640 MiB", "model": "Llama, 12 blocks of width 512, 16 x 128 tokens a step",
        "machine": "laptop", "date": "2026-11-20", "budget_bytes": BUDGET, "keep_all_bytes": 1480 * MiB,
        "plain_peak_bytes": 1515 * MiB, "predicted_step_s": predicted.duration_s,
        "measured_step_s": measured.duration_s, "measured_step_spread_s": 0.061,
        "predicted_peak_bytes": predicted.peak_bytes, "measured_peak_bytes": measured.peak_bytes,
        "identical_to_plain": True, "versions": {"lading": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        "plain_losses": tuple((r["step"], r["loss"] + 0.0) for r in metrics),
        "command": "lading train llama.toml --budget 640MiB --report report.html",
    }  # fmt: skip
    summary = RunSummary(**{**fields, **changes})
    plan = plan_of(program, choices, predicted)
    return {
        "plan": plan, "program": program, "predicted": predicted, "measured": measured, "metrics": metrics,
        "summary": summary,
    }  # fmt: skip
