"""A small Llama on ranks over gloo, cut as a plan says and as stock FSDP2 does, side by side.

Each NAME.json of a folder is a plan; what rank 0 finds of it goes to NAME.out beside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.runtime.loops import LOOPS, SOME_LOOPS, Loop
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.layout import Layout, parse_layout
from lading.ir.plan import Plan, PlanKind, ShardedUnit
from lading.models.gpt import GPT, GptConfig
from lading.models.llama import Llama, LlamaConfig
from lading.models.loss import next_byte_loss
from lading.runtime.apply import apply, stop_counting

SIZES = LlamaConfig(
    vocab_size=512, max_seq_len=64, num_layers=4, dim=64, num_heads=4, num_kv_heads=2, head_size=16, hidden_dim=192
)
GPT_SIZES = GptConfig(vocab_size=512, max_seq_len=64, num_layers=4, dim=64, num_heads=4, hidden_dim=256, tied=False)
STEPS = 2
_RANDOM_BYTES = torch.get_rng_state().nbytes
#: Collectives for which gloo takes buffers of its own, as large as what it is given (``newLikeFlat``).
_OF_GLOO = ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_", "gloo:all_gather")


class _Called(GPT):
    """Whose positions are looked up by calling their module: FSDP2 has no hook where a weight is only read."""

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1]))
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


class Recorder(TorchDispatchMode):
    """Collectives by name, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            self.found.append(f"{self.phase} {name.split('.')[1]}")
        return func(*args, **(kwargs or {}))


def train(
    model: torch.nn.Module, layout: Layout, recorder: Recorder | None, optimizer: torch.optim.Optimizer, *, stock: bool
) -> list[float]:
    """A few steps; this is the whole training loop."""
    draw = torch.Generator().manual_seed(17 + dist.get_rank())
    losses: list[float] = []
    for _ in range(STEPS):
        for number in range(layout.micro_batches):
            tokens = torch.randint(0, 8, (layout.micro_batch, SIZES.max_seq_len + 1), generator=draw)
            if stock:
                last = number == layout.micro_batches - 1
                model.set_is_last_backward(last)
            with recorder or nullcontext():
                if recorder:
                    recorder.phase = "forward"
                loss = next_byte_loss(model, {"tokens": tokens}) / layout.micro_batches
                if recorder:
                    recorder.phase = "backward"
                loss.backward()
            losses.append(float(loss.detach()))
            del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses


def peak_bytes(model: torch.nn.Module, layout: Layout, budget: int) -> int:
    """Most bytes of tensors at once in a step, as the allocator counts them; the least of five steps if over budget.

    Without gloo's own, without what an operation takes only while it runs (``_scratch_of_operations``), and without the
    states of the processor's random numbers that each recomputed block keeps: where the device is another they are in
    host memory.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, layout, None, optimizer, stock=False)  # makes what stays
    states = [t for state in optimizer.state.values() for t in state.values()]
    held = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *states, *model.buffers())]
    start = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())
    peak = start + _most_added(model, layout, optimizer)
    for _ in range(4):  # threads of gloo free late on a busy host
        over = torch.tensor(peak > budget, dtype=torch.int64)
        dist.all_reduce(over)
        if not over:
            break
        peak = min(peak, start + _most_added(model, layout, optimizer))
    return peak


def _most_added(model: torch.nn.Module, layout: Layout, optimizer: torch.optim.Optimizer) -> int:
    with torch.profiler.profile(profile_memory=True) as profiled:
        train(model, layout, None, optimizer, stock=False)
    every = _in_order(profiled.profiler.kineto_results.experimental_event_tree())
    events = [event for event in every if event.tag == torch._C._profiler._EventType.Allocation]
    scratch = _scratch_of_operations(events)
    now = peak = 0
    live: dict[int, int] = {}
    for number, event in enumerate(events):
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            now -= live.pop(address, 0)  # freed by a thread that is not told of
            is_counted = number not in scratch and size != _RANDOM_BYTES and not _within(event, _OF_GLOO)
            live[address] = size if is_counted else 0
            now += live[address]
        else:
            now -= live.pop(address, -size)
        peak = max(peak, now)
    return peak


def _scratch_of_operations(events: Sequence[Any]) -> set[int]:
    """Numbers of the allocations that an operation of torch makes itself and gives back before it ends.

    A plan counts tensors, and what libraries take beside them as a workspace of the device that it is for. On a CPU,
    oneDNN takes it from the same allocator, as much as it takes to block a product for the processor's instructions: at
    the peak of one plan 148,608 bytes with AVX512_BF16, 131,200 with AVX512 alone and none with AVX2, torch 2.13.
    """
    begun: dict[int, int] = {}
    scratch = set[int]()
    for number, event in enumerate(events):
        if event.extra_fields.alloc_size > 0:
            begun[event.extra_fields.ptr] = number
        elif (first := begun.pop(event.extra_fields.ptr, None)) is not None:
            maker, last = events[first].parent, event.parent
            if maker is not None and last is not None and maker.id == last.id and maker.name.startswith("aten::"):
                scratch.add(first)
    return scratch


def _within(event: Any, names: Sequence[str]) -> bool:
    while event is not None:
        if event.name in names:
            return True
        event = event.parent
    return False


def _in_order(events: Any) -> list[Any]:
    found: list[Any] = []
    todo = list(events)
    while todo:
        event = todo.pop()
        found.append(event)
        todo.extend(event.children)
    return sorted(found, key=lambda event: event.start_time_ns)


def built(kind: str = "") -> torch.nn.Module:
    """The small Llama, or a GPT of the same sizes; "compiled" with each block compiled in place, as torchtitan does."""
    torch.manual_seed(5)
    if kind == "gpt":
        return _Called(GPT_SIZES)
    model = _llama()
    if kind == "compiled":
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    return model


def _llama() -> Llama:
    model = Llama(SIZES)
    model.rope.to(torch.bfloat16)  # tables, as what is turned by them; parameters stay in fp32
    for owner in (model, *model.layers):  # a norm that is one kernel on a CPU too, as a GPU has it
        for name in ("norm", "attn_norm", "mlp_norm"):
            if hasattr(owner, name):
                setattr(owner, name, torch.nn.LayerNorm(SIZES.dim, bias=False))
    return model


def compare(plan: Plan, measures: bool, kind: str) -> dict[str, Any]:
    """The plan's run beside stock FSDP2's with a group for each block; ``measures``: its memory too."""
    layout = parse_layout(plan.layout)
    shape = (layout.dp // layout.shard, layout.shard) if layout.shard else (layout.dp,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    stock = _stock(plan, built(kind), mesh)
    ours = Recorder() if kind != "compiled" else None  # nothing is compiled under a dispatch mode
    expected = train(
        stock,
        layout,
        None,
        torch.optim.AdamW(stock.parameters(), lr=1e-2),
        stock=True,
    )
    planned = apply(plan, built(kind), mesh)
    losses = train(planned, layout, ours, torch.optim.AdamW(planned.parameters(), lr=1e-2), stock=False)
    equal = _are_equal(planned, stock)
    return {
        "losses": losses,
        "expected": expected,
        "found": ours.found if ours else [],
        "weights": equal,
        "peak_bytes": peak_bytes(planned, layout, plan.budgets[DEVICE]) if measures else 0,
    }


def _stock(plan: Plan, model: Any, mesh: Any, outer: list[Any] | None = None) -> Any:
    """Cut a model by stock FSDP2, a group for each block and one of ``outer``."""
    dtypes = [getattr(torch, name) if name else None for name in (plan.choices.gather_dtype, plan.choices.reduce_dtype)]
    first = [model.tokens, model.positions] if isinstance(model, GPT) else model.tokens
    outer = outer or [model.norm, model.head]
    for block in (*(() if first in outer else (first,)), *model.layers, outer):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(*dtypes))


def _are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether all weights are, to the bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


def _loops(plan: Plan, names: Iterable[str] = LOOPS) -> dict[str, str]:
    """What comes of each loop on the plan's model: "equal" to stock FSDP2's weights, "unlike", or what was refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outcomes: dict[str, str] = {}
    for name in names:
        loop = LOOPS[name]
        stock, planned = _stock(plan, built(), mesh), apply(plan, built(), mesh)
        loop(Loop(stock, plan.micro_batches, stock=True))
        try:
            loop(Loop(planned, plan.micro_batches, stock=False))
        except ConfigError as error:
            outcomes[name] = str(error)
        else:
            outcomes[name] = "equal" if _are_equal(planned, stock) else "unlike"
        stop_counting(planned)
    return outcomes


class _Adapted(torch.nn.Module):
    """A frozen product with a low-rank one beside it, which is trained."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.base(x_BTD) + self.up(self.down(x_BTD))


class _Seeing(torch.nn.Module):
    """A small Llama behind a frozen tower, whose output is added to every token's."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.vision = torch.nn.Module()
        self.vision.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.vision.forward = self._look
        self.tokens, self.layers, self.norm, self.head = model.tokens, model.layers, model.norm, model.head
        self.rope = model.rope

    def _look(self, x_D: torch.Tensor) -> torch.Tensor:
        for block in self.vision.blocks:
            x_D = block(x_D).tanh()
        return x_D

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.tokens(tokens_BT) + self.vision(torch.ones(64, dtype=self.vision.blocks[0].weight.dtype))
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.rope)
        return self.head(self.norm(x_BTD))


def _tied() -> torch.nn.Module:
    model: Any = built()
    model.head.weight = model.tokens.weight
    return model


def _frozen() -> torch.nn.Module:
    model: Any = built()
    for part in (model.tokens, *model.layers[:2], model.layers[2].attn_norm):
        part.requires_grad_(False)
    return model


def _with_adapters() -> torch.nn.Module:
    model: Any = built().requires_grad_(False)
    for layer in model.layers:
        for owner, name in [
            (m, n) for m in layer.modules() for n, c in m.named_children() if type(c) is torch.nn.Linear
        ]:
            setattr(owner, name, _Adapted(getattr(owner, name)))
    return model


def _seeing() -> torch.nn.Module:
    model = _Seeing(built())
    model.vision.requires_grad_(False)
    return model


#: Models of the plan's modules that are not all trained, or share.
UNLIKE = {"tied": _tied, "frozen": _frozen, "adapters": _with_adapters, "tower": _seeing}
#: Those that are refused where a budget has no room for what they add, and those that try most.
FULL, SOME_UNLIKE = ("tied", "tower"), ("tied", "adapters")


def _unlike(plan: Plan, names: Iterable[str] = UNLIKE) -> dict[str, str]:
    """What comes of training each of ``UNLIKE`` by the plan: "equal" to stock FSDP2's weights, or what was refused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    outcomes: dict[str, str] = {}
    for name in names:
        made = UNLIKE[name]
        try:
            planned = apply(plan, made(), mesh)
        except ConfigError as error:
            outcomes[name] = str(error)
            continue
        model: Any = made()
        outer = [model.tokens, model.norm, model.head] if name == "tied" else [model.norm, model.head]
        stock = _stock(plan, model, mesh, outer)
        for each, is_stock in ((stock, True), (planned, False)):
            Loop(each, plan.micro_batches, stock=is_stock).several()
        outcomes[name] = "equal" if _are_equal(planned, stock) else "unlike"
        stop_counting(planned)
    full = dataclasses.replace(plan.request, budgets={DEVICE: plan.peak_bytes[DEVICE]})
    for name in [each for each in FULL if each in names]:
        try:
            apply(dataclasses.replace(plan, request=full), UNLIKE[name](), mesh)
        except ConfigError as error:
            outcomes[f"full {name}"] = str(error)
    return outcomes


def _counts_no_more(plan: Plan, mesh: Any) -> bool:
    """Whether hooks go when counting is stopped, and the loop may then do as it likes."""
    hooks = _global_optimizer_pre_hooks
    before = len(hooks)
    model, other = apply(plan, built(), mesh), apply(plan, built(), mesh)
    stop_counting(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        next_byte_loss(model, {"tokens": torch.zeros(1, 9, dtype=torch.int64)}).backward()
    optimizer.step()
    there = len(hooks) - before
    stop_counting(other)
    return (there, len(hooks) - before) == (2, 0)  # of the other: counting, and optimizers from before


def _renamed(plan: Plan, mesh: Any) -> bool:
    """Whether a plan is set on a model with other names, as told."""
    model = built()
    model.tok_embeddings = model.tokens
    del model.tokens
    apply(plan, model, mesh, names={"tokens": "tok_embeddings"})
    return isinstance(model.tok_embeddings, FSDPModule)


def _made_unfit() -> list[tuple[torch.nn.Module, dict[str, str]]]:
    """Models that something was done to, or whose names are not known."""
    cut, checkpointed, wrapped = built(), built(), built()
    fully_shard(cut.layers[1])
    checkpointed.layers[2] = checkpoint_wrapper(checkpointed.layers[2])
    wrapped.layers[0] = torch.compile(wrapped.layers[0], backend="eager")
    wider = Llama(dataclasses.replace(SIZES, hidden_dim=200))
    return [(cut, {}), (checkpointed, {}), (wrapped, {}), (wider, {}), (built(), {"tokns": "tok_embeddings"})]


def with_units(plan: Plan, *units: ShardedUnit) -> Plan:
    """The plan with other units."""
    return dataclasses.replace(plan, choices=dataclasses.replace(plan.choices, units=units))


def refused(plan: Plan) -> list[str]:
    """What plans that cannot be say."""
    said: list[str] = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unfit, names in _made_unfit():
        try:
            apply(plan, unfit, mesh, names=names)
        except ConfigError as error:
            said.append(str(error))
    said += ["renamed" if _renamed(plan, mesh) else "", "gone" if _counts_no_more(plan, mesh) else ""]
    first, *others = plan.choices.units
    wrong = [
        with_units(plan, dataclasses.replace(first, modules=("tokenz",)), *others),
        dataclasses.replace(plan, layout="dp64,zero3,gb64"),
        with_units(plan, dataclasses.replace(first, unsharded_bytes=12), *others),
        with_units(plan, *others),
        with_units(plan),
        dataclasses.replace(with_units(plan), layout="dp2,zero2,gb8"),
        dataclasses.replace(with_units(plan), layout="dp2,pp2,zero3,gb8"),
    ]
    for each in wrong:
        try:
            apply(each, built(), mesh)
        except ConfigError as error:
            said.append(str(error))
    model = apply(plan, built(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)  # does not count
    for number in range(3):
        try:
            next_byte_loss(model, {"tokens": tokens}).backward()
            if not number:
                optimizer.step()
        except ConfigError as error:
            said.append(str(error))
    return said


OTHERS: dict[str, Callable[[Plan], Any]] = {
    "refused": refused,
    "loops": _loops,
    "some loops": partial(_loops, names=SOME_LOOPS),
    "unlike": _unlike,
    "some unlike": partial(_unlike, names=SOME_UNLIKE),
}


def compare_plans(rank: int, folder: str) -> None:
    """What one rank finds of each plan in a folder; rank 0 writes it down."""
    for path in sorted(Path(folder).glob("*.json")):
        plan = Plan.load(path, PlanKind.CLUSTER)
        kind, _, case = path.stem.rpartition(".")
        other = OTHERS.get(case)
        found = other(plan) if other else compare(plan, case.startswith("residency"), kind)
        if rank == 0:
            path.with_suffix(".out").write_text(json.dumps(found))
