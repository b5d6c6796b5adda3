"""Request, StepRequest and Prediction: what is asked in names and numbers, one step of it, and what that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, cast

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.graph import DTYPE_BYTES
from lading.ir.layout import ALONE, Layout, parse_layout
from lading.ir.stack import Stack
from lading.optim.registry import DEFAULT, is_for_matrices, rule_class
from lading.optim.rule import ParameterRule

TASKS = ("pretrain", "sft", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model by the family of its blocks and its sizes.

    Attributes:
        family: Family of tables in the catalog: "gpt", "llama", "moe", "mla-moe", "nemotron", "dit", "wan", "mamba2",
            ...
        symbols: Sizes by the tables' names: h, f, n, k, d, v, e, a, g, fs, qr, kr, dn, dr, dv; "window" for tokens that
            a windowed attention sees; "whole" (1) where attention has no causal mask, as an encoder's; "latent" for the
            width experts work in, if not h; "biased" (1) where experts have biases and clamped gates; ms, mh, md, mg
            for the state, heads, head size and groups of a state-space block.
        blocks: Runs of equal blocks from first to last: ("block", 32), or ("dense", 3), ("moe", 58), or kinds of a
            hybrid ("mamba", "attention", "mlp", "moe"); "window" and "full" where attention alternates.
        tied: Embedding and head are one parameter.
        predict_ahead: Extra blocks with a head each that predict further tokens (MTP).
        parameters: As the source prints, 0 if it does not: to check against, never to compute with.
    """

    family: str
    symbols: Mapping[str, int]
    blocks: tuple[tuple[str, int], ...]
    tied: bool = False
    predict_ahead: int = 0
    parameters: float = 0.0

    @property
    def layers(self) -> int:
        """Number of blocks in all."""
        return sum(count for _, count in self.blocks)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Question that a plan or a simulation answers, in names and numbers; what is left out is chosen or taken as usual.

    A run, a model on a cluster and a model on unlike devices are asked for alike; a saved plan holds what it was made
    for.

    Attributes:
        model: Name in the catalog, "module:function", or the path of a configuration; "" for a captured graph.
        graph_fingerprint: Hash of the whole step of a captured graph, no update deferred and nothing on the host; ""
            for a model by name.
        machine: Name, or path of a file: of a machine, or of a list of unlike devices.
        machine_table: The whole machine, as its TOML would say it, where a run is planned for it.
        machine_fingerprint: Hash of what it costs, of a plan that was made.
        host_id: The computer that the machine was measured on; "" for one of the catalog, which may be any.
        devices: How many; 0 for what the layout says. Those beyond the layout are replicas.
        budgets: Bytes that may be used by tier, or by device where devices are unlike; what is not named is free.
        global_batch: Sequences of a step; 0 for what the layout says.
        seq_len: Tokens of a sequence; 0 for the model's own.
        longest: Tokens of the longest sequence, for the memory of that batch; 0 for ``seq_len``.
        training: A step; else one forward pass, which is placed on unlike devices only.
        layout: How the model is spread, as ``lading.ir.layout.Layout`` prints; a search makes the layout itself.
        pins: Choices of the layout that a search may not make, by the names of ``Layout``.
        precisions: Number formats of products that may be chosen; () for the layout's.
        units: Most modules that a captured model is cut in, to be placed; 0 for single operations; None for the
            catalog's table of the model.
        stack: Name of the software.
        network: What links nodes; "" for what the machine has by itself.
        lora, qlora: Rank of adapters that are trained beside frozen weights, of 4 bits for the second; 0 for none.
        optimizer: Name of a rule (``lading.optim.registry``); one for matrices moves those of blocks.
        optimizer_settings: Its settings by name; its own where they are left out.
        matrices: ``lading.grouping.Matrices`` as a table, where a rule moves matrices of a run.
        settings: ``clip_norm``, ``master_weights`` and ``compile`` (1.0 or 0.0) of a run, and what was measured of this
            step's kernels and of saving it, bytes.
        save: How checkpoints of a cluster are written (``lading.memory.moments``).
        policy: Name of what chooses.
        top: Layouts that a search simulates and that fit; ``proven`` of them are the best of all.
        run: The configuration of the run, where it was made from one.
    """

    model: str = ""
    graph_fingerprint: str = ""
    machine: str
    machine_table: dict[str, Any] = field(default_factory=lambda: {})
    machine_fingerprint: str = ""
    host_id: str = ""
    devices: int = 0
    budgets: dict[str, int] = field(default_factory=lambda: {})
    global_batch: int = 0
    seq_len: int = 0
    longest: int = 0
    training: bool = True
    layout: str = ""
    pins: dict[str, Any] = field(default_factory=lambda: {})
    precisions: tuple[str, ...] = ()
    units: int | None = None
    stack: str = "default"
    network: str = ""
    lora: int = 0
    qlora: int = 0
    optimizer: str = DEFAULT
    optimizer_settings: dict[str, Any] = field(default_factory=lambda: {})
    matrices: dict[str, Any] | None = None
    settings: dict[str, float] = field(default_factory=lambda: {})
    save: str = "sharded"
    policy: str = ""
    top: int = 64
    proven: int = 1
    run: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if min(self.lora, self.qlora) < 0 or (self.lora and self.qlora):
            raise ConfigError(f"expected one rank above 0, got --lora {self.lora} and --qlora {self.qlora}")
        for name in ("top", "proven"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if min(self.units or 0, self.seq_len) < 0:
            raise ConfigError(
                f"expected units and a sequence length of 0 or more, got {self.units or 0} and {self.seq_len}"
            )
        pins = {key: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for key, v in self.pins.items()}
        object.__setattr__(self, "pins", pins)  # JSON has lists only

    @property
    def budget_bytes(self) -> int:
        """Memory of a device that may be used; 0 for all of it."""
        return self.budgets.get(DEVICE, 0)

    @property
    def asked_layout(self) -> Layout:
        """Layout that is asked for: replicas fill the devices.

        A step is one micro-batch of each replica, or two for each stage, unless more is asked for.

        Raises:
            ConfigError: the layout cannot be, has what only a pipeline has, or takes another number of devices.
        """
        layout = parse_layout(self.layout, self.devices)
        if layout.pp == 1 and (layout.vpp > 1 or layout.schedule != ALONE.schedule):
            raise ConfigError(
                "layout: expected a schedule and chunks of a rank (vpp) in a pipeline only, got "
                f"{self.layout!r}; add pp2"
            )
        if self.global_batch:
            return replace(layout, global_batch=self.global_batch)
        if layout.global_batch:
            return layout
        return replace(layout, global_batch=layout.dp * layout.micro_batch * (2 * layout.pp if layout.pp > 1 else 1))


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A training step to be simulated: a model in one layout, with all that a Request names looked up.

    Attributes:
        name: Name of the request, for messages.
        seq_len: Tokens of a sequence.
        machine: Name in the catalog.
        network: What links nodes, in the source's words; "" for what the machine has by itself.
        ranks_per_node: Devices of one host; 0 for what the machine has.
        near: What links the devices of a node, in the source's words; "" for what the machine has by itself.
        stack: Software, the request's own settings included.
        task: "pretrain", "sft", "lora" (frozen weights: no gradients of weights, a tiny optimizer) or "qlora" (frozen
            weights of 4 bits, too).
        lora_rank: Rank of the adapters, for "lora" and "qlora".
        trains_embeddings: Embedding and head are trained in full beside the adapters.
        packed_tokens: Mean tokens that attend to each other in a packed sequence; 0 where all do.
        dropout: Probability; 0 where there is none.
        alibi: Attention adds a bias by distance (unfused kernels read it).
        linear_dtype: How fp8 matrices are scaled, one of ``lading.ir.stack.SCALINGS``; "" as the software does it.
        high_precision_layers: Blocks kept in 16 bits though ``layout.precision`` is lower.
        async_tp: Tensor-parallel collectives are cut into pieces that run beside the products.
        schedule_detail: Variant of the schedule, as the source calls it: "ZB-2p", ...
        embedding_is_layer: Pipeline stages count embedding and head as one layer each when they are balanced.
        edge_layers_fewer: Blocks that the first and last stage have fewer than the others, each.
        stage_layers: Blocks of each stage of the pipeline (pp x vpp), in order of forward; () for as even as can be,
            or as the two settings above say. The first and the last stage may have none.
        optimizer: Name of a rule (``lading.optim.registry``), its settings by default; one for matrices moves
            those of blocks, and AdamW the rest.
        assumed: What the source does not say and was taken for granted.
        unread: Fields and words of the source that were not understood; each widens the interval.
        clocks_untold: The devices run at a limit of power that is not their boards', so slower than predicted by an
            unknown factor.
        first_reading: No row of the source was compared with a prediction before, so its words may mean something else.
        unstated: What a step depends on and the source does not say; each widens the interval alike.
        otherwise: How many times as long the step is where what the source does not say is not as it was assumed, such
            as a micro-batch; the interval reaches as much further on that side.
    """

    name: str
    model: Architecture
    seq_len: int
    machine: str
    layout: Layout
    stack: Stack
    network: str = ""
    ranks_per_node: int = 0
    near: str = ""
    task: str = "pretrain"
    lora_rank: int = 0
    trains_embeddings: bool = False
    packed_tokens: int = 0
    dropout: float = 0.0
    alibi: bool = False
    linear_dtype: str = ""
    high_precision_layers: int = 0
    async_tp: bool = False
    schedule_detail: str = ""
    embedding_is_layer: bool = False
    edge_layers_fewer: int = 0
    stage_layers: tuple[int, ...] = ()
    optimizer: str = DEFAULT
    assumed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()
    clocks_untold: bool = False
    first_reading: bool = False
    otherwise: float = 1.0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"request {self.name}: task must be one of {', '.join(TASKS)}, got {self.task!r}")
        kind = rule_class(self.optimizer)
        if self.seq_len < 1:
            raise ConfigError(f"request {self.name}: seq_len must be >= 1, got {self.seq_len}")
        if not 0 < self.otherwise < inf:
            raise ConfigError(f"request {self.name}: otherwise must be a factor above 0, got {self.otherwise}")
        self._check_stage_layers()
        stack = self.stack.in_precision(self.layout.precision)
        if self.linear_dtype:
            stack = replace(stack, low_scaling=self.linear_dtype)
        if self.optimizer != DEFAULT and issubclass(kind, ParameterRule):
            rule = kind()
            stack = replace(stack, moments=rule.moments, update_passes=rule.passes, foreach=False)
            assumed = _assumed_of(self.optimizer, rule)
            object.__setattr__(self, "assumed", tuple(dict.fromkeys((*self.assumed, *assumed))))
        object.__setattr__(self, "stack", stack)
        object.__setattr__(self, "layout", self._in_buckets(stack))

    def _check_stage_layers(self) -> None:
        """Refuse counts of blocks that no pipeline has; whether there is one for each stage is seen in the layout.

        Raises:
            ConfigError: a count is not a whole number, or is of no blocks between the ends; they do not add up to the
                model's; another setting divides the blocks, too.
        """
        counts, blocks = self.stage_layers, self.model.layers
        if not counts:
            return
        are_integers = all(type(count) is int for count in counts)
        if not are_integers or min(counts) < 0 or 0 in counts[1:-1] or sum(counts) != blocks:
            raise ConfigError(
                f"request {self.name}: expected stage_layers of whole numbers that add up to the model's {blocks} "
                f"blocks, at least 1 each between the first and the last stage, got {counts!r}"
            )
        if self.edge_layers_fewer or self.embedding_is_layer:
            raise ConfigError(
                f"request {self.name}: expected stage_layers alone, got edge_layers_fewer {self.edge_layers_fewer} and "
                f"embedding_is_layer {self.embedding_is_layer} with it; leave them out"
            )
        object.__setattr__(self, "stage_layers", tuple(counts))

    def _in_buckets(self, stack: Stack) -> Layout:
        """Layout with the buckets of gradients that the software makes, where it has its own and none were chosen."""
        layout, ranks = self.layout, self.layout.dp * self.layout.cp
        cut = layout.zero >= (2 if layout.is_pipeline else 3)
        if layout.bucket_bytes or cut or ranks == 1 or not (stack.bucket_elements and stack.overlap_grad_reduce):
            return layout
        elements = max(stack.bucket_elements, stack.bucket_elements_per_rank * ranks)
        return replace(layout, bucket_bytes=int(elements * DTYPE_BYTES[stack.gradient_dtype]))

    @property
    def moves_matrices(self) -> bool:
        """Whether the optimizer's rule moves whole matrices of blocks, and AdamW the rest."""
        return is_for_matrices(self.optimizer)

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.layout.micro_batches * self.layout.micro_batch * self.layout.dp * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted seconds and bytes of a training step.

    Attributes:
        step_s: Seconds of a step.
        low_s, high_s: Interval that the measured time is said to lie in.
        peak_bytes: Largest sum of live tensors on any rank, as an allocator counts it; 0 if not predicted.
        rank_bytes: Such a sum of each pipeline rank, first to last; () if not predicted.
        low_bytes, high_bytes: Interval of ``peak_bytes``; ``fits`` goes by the upper end.
        tier_bytes: Largest sum on any rank of each tier behind the device; ``fits`` asks for room there too.
        reserved_bytes: What the allocator holds at its peak, slack included; 0 if not predicted.
        fits: Whether ``high_bytes`` and what the process needs besides fit the device.
        residual: Factor for the software stack that ``step_s`` contains: what no cause explains yet, fitted on rows.
        shares: Named shares of the step.
        assumed: What was taken for granted on the way.
    """

    step_s: float
    low_s: float
    high_s: float
    peak_bytes: int = 0
    rank_bytes: tuple[int, ...] = ()
    low_bytes: int = 0
    high_bytes: int = 0
    tier_bytes: dict[str, int] = field(default_factory=lambda: {})
    reserved_bytes: int = 0
    fits: bool = True
    residual: float = 1.0
    shares: Mapping[str, float] = field(default_factory=lambda: {})
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low_s <= self.step_s <= self.high_s < float("inf"):
            raise ConfigError(
                f"prediction: expected 0 < low_s <= step_s <= high_s, got {self.low_s}, {self.step_s}, {self.high_s}"
            )


def _assumed_of(name: str, rule: ParameterRule) -> tuple[str, ...]:
    """Say what is taken for granted of a rule that moves every parameter."""
    timed = f"{name}: timed by the bytes of its states as AdamW is; no such step was measured on a cluster"
    if not rule.whole:
        return (timed,)
    return timed, f"{name}: its factors, and what ranks tell each other of parameters that are cut, are not counted"
