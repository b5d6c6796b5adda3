"""Stack: the software that runs a layout: what is fused, launched, overlapped and kept in which dtype.

The same layout runs at different speeds on Megatron of 2021 and on FSDP under torch.compile; the stack says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import ARCHITECTURES

FUSIONS = ("eager", "fused", "compiled")
ATTENTIONS = (
    *("unfused", "masked", "flash1", "triton", "flash2", "flash2-package", "flex", "flash3", "flash4"),
    *("cudnn", "cudnn9", "cudnn9-mxfp8"),
)
HOST_UPDATES = ("fused", "cpu-adam", "loop")
#: Passes of torch/optim/adamw.py, ``_multi_tensor_adamw`` (decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
#: addcdiv 4), beyond the seven of one kernel.
FOREACH_PASSES = 13
DISPATCHERS = ("alltoall", "allgather", "deepep")
#: How operands of 8 bits are scaled: by last steps' largest element, the tensor's own, a row's, or a block's of 128.
SCALINGS = ("delayed", "tensorwise", "rowwise", "block")
#: Classes of software: what one that is not known is taken for.
KINDS = ("eager-torch", "compiled-torch", "megatron-like", "deepspeed-like")
#: Collectives that a factor of ``in_situ`` may be for, among any ranks or, as in "all_reduce.4", among so many.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
#: What a factor of ``in_situ`` may be for: causes of kernels, the optimizer, and collectives.
FACTORS = ("products", "low-precision products", "attention", "memory-bound", "loss", "optimizer", *COLLECTIVES)
#: In which numbers are always kept; of others "" leaves it to the products.
_STORED = ("gradient_dtype", "moments_dtype")
#: Parts of a block that "fused" software may run operation by operation all the same.
PARTS = ("rope", "swiglu", "gradients", "gelu", "gelu-erf")
#: How software is known on an architecture: steps were seen; its switches are named, or only its class.
FITTED, SWITCHES, GUESSED = "fitted", "switches only", "guessed"


def _is_factor(name: str) -> bool:
    op, _, ranks = name.partition(".")
    return name in FACTORS or (op in COLLECTIVES and ranks.isdecimal() and len(ranks) < 7 and int(ranks) > 1)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Software stack: the switches that costs depend on.

    Attributes:
        kind: Class of software that it belongs to, one of ``KINDS``.
        framework: Framework that it is a version of; "" for the defaults of a class, which are of none.
        fusion: Operations that are fused: none ("eager"), what Megatron and Transformer Engine have kernels for
            ("fused"), or all between products ("compiled").
        attention: Kernel of attention; "unfused" is two products and a softmax, "masked" PyTorch's memory-efficient
            kernel under a mask that is a tensor, "triton" the first FlashAttention in Triton, "flex" FlexAttention,
            "flash2-package" FlashAttention-2 of its own package, on Blackwell another than PyTorch's "flash2",
            "flash4" FlashAttention-4, "cudnn9" cuDNN's from 9.2x on, "cudnn9-mxfp8" the same on operands of 8 bits.
        launch_s: Seconds the host takes to launch one kernel, framework included.
        collective_launch_s: Seconds the host takes to launch a collective.
        block_s: Seconds of the host for each pass (forward, recompute, backward) of a block besides: module calls,
            saving and restoring the states of random generators.
        module_s: Seconds of the host for each product and attention of a pass, the experts' apart.
        product_bytes_per_s: Rate at which operands and results of products of a running step come from memory and go
            there, on processors: a product takes the root of the sum of squares of its own time and of its bytes at
            this rate. 0 where its own time says all.
        block_wait_s: Seconds of each pass of a block in which the device stands still however far ahead the host is.
        collective_wait_s: Standard deviation of when ranks come to a collective inside a block: all wait for the last.
        experts_s: Seconds of the host for each pass of routed experts: counting tokens, waiting for the counts,
            permuting.
        fused_loss: Cross-entropy works on the logits as they are, with "fused" one kernel forward and one backward, not
            passes over fp32 logits; in "eager" only its memory is counted so.
        fused_permute: Rows go to their experts' order and back in one kernel each way.
        fused_experts: What is between the two products of experts is inside their kernels, casts included.
        gradient_placeholders: Gradients of a block's weights are added to the main ones inside the product; autograd
            gets a placeholder for each shape of weight, kept for good (Transformer Engine).
        unfused: Parts of a block, of ``PARTS``, whose operations run one by one where others are fused: rotary
            embedding, gate times value of a gated MLP, and gradients of weights, which a pass adds up where products
            do not. In "eager", GELU written in operations of PyTorch: "gelu" by its tanh, "gelu-erf" by erf.
        random_flop: FLOP in fp32 whose time a random number of dropout takes, where a compiler's own code draws it and
            not a kernel that waits for memory.
        eager_norms: RMSNorms are operations of Python in fp32, as in transformers, not one kernel.
        tf32: Products of fp32 operands run on tensor cores, which round these to TF32
            (``torch.backends.cuda.matmul.allow_tf32``).
        launch_blocking: The host waits for each kernel (CUDA_LAUNCH_BLOCKING=1): its time adds up with the device's.
        cuda_graphs: Kernels are replayed, not launched.
        gradient_dtype: In which gradients are accumulated and reduced.
        gather_dtype: In which cut parameters are gathered; "" means that of the products.
        own_sums: Gradients of micro-batches are added up in buckets of the engine's as they come, not by autograd, but
            at stage 1 of ZeRO.
        master_weights: Whether a copy of the parameters in fp32 is kept beside them.
        moments: Numbers of the size of a parameter that the optimizer keeps: Adam two, SGD none, or one with momentum.
        update_passes: Times that an update reads or writes a parameter's element besides value, gradient and moments.
        foreach: AdamW runs as torch's foreach kernels, which go over tensors of a parameter's size ``FOREACH_PASSES``
            times more than one fused kernel does; other rules and updates on the host have passes of their own.
        moments_dtype: Number format of these.
        parameters_dtype: Number format of the parameters themselves: "float32" where autocast casts them in every use.
        autocast: Where fp32 parameters are whole, activations are in the formats of torch.autocast: the residual stream
            and norms in fp32 (``lading.parallel.autocast``).
        overlap_grad_reduce, overlap_param_gather: Run beside computing.
        bucket_elements, bucket_elements_per_rank: Parameters whose gradients are reduced together beside backward: so
            many, or so many for each rank that they are reduced over, whichever is more; 0 for a block's each.
        gathers: How often a block's cut parameters are gathered where it is recomputed: 2, for forward and for
            backward with what is recomputed; 3 where recomputing releases them again.
        gather_copy_bytes, reduce_copy_bytes: Moved on the device for each cut parameter when it is gathered, and when
            its gradient is reduced: copies out of and into the buffers of the collectives.
        pieces: Collectives in which a block's cut parameters are gathered and their gradients reduced.
        gather_rank_s: Seconds of the host for each rank and piece of a gather of cut parameters, where what comes is a
            list of a tensor for each rank, each copied out by a kernel of its own.
        broadcasts: Parameters whose states alone are cut (ZeRO 1) are sent after the step by a broadcast from each rank
            that updated some, where they are not gathered beside computing.
        reduces_whole: Largest stage of ZeRO whose gradients are summed on every rank (all-reduce), though each keeps
            a shard of them.
        hidden: Share, by axis ("tp", "cp", "ep", "pp"), of the collectives inside a block that runs beside computing; 0
            where not given.
        dispatcher: How tokens reach experts.
        imbalance: Tokens of the busiest expert's rank, over the mean.
        in_situ: Time of a running step's kernels over that of the same kernels alone (clocks, cold caches, releases of
            libraries other than those measured), by architecture ("hopper", or "cpu" of processors), or of one of
            ``FACTORS`` ("hopper.attention", "cpu.all_reduce.4" among four ranks). "loss" is beside "memory-bound",
            "low-precision products" of processors beside the same products in their own format.
        fitted: Architectures on which steps of this software were seen.
        parameter_s: Seconds of the host for each tensor of parameters in a step: hooks, copies and lists of the
            optimizer; an expert's weights are tensors of their own. What the device needs for the optimizer hides it.
        reduced_parameter_s: Seconds of the host beyond that for each tensor of parameters whose gradient is reduced
            over processes of one host: DistributedDataParallel's hooks, and the gradient's place in a bucket.
        host_update: Implementation of an update on the host: "fused" (torch's fused AdamW), "cpu-adam" (DeepSpeed's and
            Megatron-Core's: as fast, and the 16-bit copy of the parameters is written beside), or "loop" (torch's
            operations one after another).
        host_optimizer: Share of what the host's memory allows for the bytes of such an update (``cost.hosting``) that
            software reaches, with its norms and copies within the host; 0 for that of its implementation.
        gradient_copies: Times that a step on processors copies all gradients into one buffer, scales it there and
            copies it back, as DeepSpeed's engine does (runtime/engine.py, ``allreduce_and_copy``). The buffer is made
            anew in each step.
        fresh_bytes_per_s: Rate at which the system gives a process memory anew (page faults), by how many processes
            ask at once ("1", "2"); what they ask for beyond processors takes turns. {} where that takes no time.
        step_s: Seconds of a step besides: data, logging, host work of the optimizer.
        scatter_sends: Activations that a pipeline sends are cut over the tensor-parallel ranks where they hold the
            same: each sends its part, and the parts are gathered behind.
        megatron_order: Interleaved pipelines warm up as Megatron's do, not as torch's.
        adapter_dtype: Number format of adapters (LoRA); "" for that of the weights.
        adapter_autocast: Products with fp32 adapters run in 16 bits, as under autocast; else they are fp32 themselves.
        adapter_modules: Last names of modules whose products have adapters; () for all.
        adapter_dropout: Whether inputs of adapters are dropped out.
        quantizer: Library that makes 16-bit weights of 4 bits under Q-LoRA: "gptq" (AutoGPTQ in PyTorch's kernels),
            "nf4" (bitsandbytes); "" where there is none.
        merges: Modules whose projections of one input are one matrix though nothing else is fused.
        regathers: With sequence parallel, backward gathers tokens again (Megatron) instead of keeping what forward
            gathered (torch's ``parallelize_module``).
        fp32_rings: With context parallel gradients of keys and values go round the ring in fp32, also where keys met by
            all-gather (torch's ``context_parallel``).
        early_stop: Full recompute stops once all is there that backward reads, as torch's own does.
        blocks_ahead: Where a block's experts are gathered apart, all that the next block gathers is asked for when a
            block begins (torchtitan); False leaves it to FSDP2, which asks for experts when their module begins.
        drops_gradients: Gradients come as backward makes them and go after the update (``zero_grad`` of PyTorch); else
            they have buffers that are always there.
        cuts_in_pipeline: Gradients and parameters may be cut in a pipeline (zero 2 and 3), as PyTorch's FSDP2 can.
        zeros: How far states may be cut over replicas, as stages of ZeRO.
        recompute_choices: Parts of a block that it recomputes alone besides attention's core, as ``recompute_modules``
            names them: "layernorm", "layernorm+mlp". A search of layouts tries each that the model has.
        low_precisions: Recipes of products with fewer than 16 bits that it has: "fp8", "mxfp8", "nvfp4".
        low_scaling: How operands of 8 bits are scaled, one of ``SCALINGS``, where a run does not say.
        fused_casts: One kernel casts an operand along its rows and columns, and weights are cast once a step
            (Transformer Engine); else a pass for each way in every use, as torch.compile makes them (torchao).
        keeps_low: What products in fewer than 16 bits read again in backward is kept in these bits.
        clips: The gradients' norm is limited in each step.
        vocabulary_padding: A vocabulary is rounded up to a multiple of this times the tensor-parallel ways.
        dropout: Probability in GPTs where a run does not say; families after them have none.
        packed_tokens: Mean tokens of the examples packed into a sequence of fine-tuning where a run does not say; 0
            where it is not packed.
        sequence_parallel: Tensor parallel comes with sequence parallel where a run does not say.
        sources: Where each setting comes from, by key.
    """

    name: str
    title: str
    kind: str = "megatron-like"
    framework: str = ""
    fusion: str = "fused"
    attention: str = "flash2"
    launch_s: float = 6e-6
    collective_launch_s: float = 25e-6
    block_s: float = 0.0
    module_s: float = 0.0
    product_bytes_per_s: float = 0.0
    block_wait_s: float = 0.0
    collective_wait_s: float = 0.0
    experts_s: float = 0.0
    fused_loss: bool = False
    fused_permute: bool = False
    fused_experts: bool = False
    gradient_placeholders: bool = False
    unfused: tuple[str, ...] = ()
    random_flop: float = 0.0
    eager_norms: bool = False
    tf32: bool = False
    launch_blocking: bool = False
    cuda_graphs: bool = False
    gradient_dtype: str = "float32"
    gather_dtype: str = ""
    own_sums: bool = False
    master_weights: bool = True
    moments: int = 2
    update_passes: float = 0.0
    foreach: bool = False
    moments_dtype: str = "float32"
    parameters_dtype: str = ""
    autocast: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    bucket_elements: float = 0.0
    bucket_elements_per_rank: float = 0.0
    gathers: int = 2
    gather_copy_bytes: float = 0.0
    reduce_copy_bytes: float = 0.0
    pieces: int = 1
    gather_rank_s: float = 0.0
    broadcasts: bool = False
    reduces_whole: int = 0
    hidden: dict[str, float] = field(default_factory=lambda: {})
    dispatcher: str = "alltoall"
    imbalance: float = 1.0
    in_situ: dict[str, float] = field(default_factory=lambda: {})
    fitted: tuple[str, ...] = ()
    parameter_s: float = 0.0
    reduced_parameter_s: float = 0.0
    host_update: str = "cpu-adam"
    host_optimizer: float = 0.0
    gradient_copies: float = 0.0
    fresh_bytes_per_s: dict[str, float] = field(default_factory=lambda: {})
    step_s: float = 0.0
    scatter_sends: bool = False
    megatron_order: bool = False
    regathers: bool = True
    fp32_rings: bool = False
    early_stop: bool = False
    blocks_ahead: bool = True
    adapter_dtype: str = ""
    adapter_autocast: bool = True
    adapter_dropout: bool = False
    adapter_modules: tuple[str, ...] = ()
    quantizer: str = ""
    merges: tuple[str, ...] = ()
    drops_gradients: bool = False
    cuts_in_pipeline: bool = False
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    recompute_choices: tuple[str, ...] = ()
    low_precisions: tuple[str, ...] = ()
    low_scaling: str = "delayed"
    fused_casts: bool = True
    keeps_low: bool = False
    clips: bool = True
    vocabulary_padding: int = 1
    dropout: float = 0.0
    packed_tokens: int = 0
    sequence_parallel: bool = False
    sources: dict[str, str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        words = {"kind": KINDS, "fusion": FUSIONS, "attention": ATTENTIONS, "dispatcher": DISPATCHERS}
        for key, allowed in {**words, "host_update": HOST_UPDATES, "low_scaling": SCALINGS}.items():
            if getattr(self, key) not in allowed:
                value = getattr(self, key)
                raise ConfigError(f"stack {self.name}: {key} must be one of {', '.join(allowed)}, got {value!r}")
        if unknown := [part for part in self.unfused if part not in PARTS]:
            raise ConfigError(f"stack {self.name}: unfused has parts of {', '.join(PARTS)}; got {unknown[0]!r:.60}")
        for key in (
            "launch_s",
            "collective_launch_s",
            "block_s",
            "block_wait_s",
            "collective_wait_s",
            "experts_s",
            "gather_rank_s",
            "random_flop",
            "step_s",
            "gradient_copies",
        ):
            if getattr(self, key) < 0:
                raise ConfigError(f"stack {self.name}: {key} must be >= 0, got {getattr(self, key)}")
        for key, rate in self.fresh_bytes_per_s.items():
            if not (key.isdecimal() and len(key) < 7 and int(key) > 0 and 0 < rate < inf):
                raise ConfigError(
                    f"stack {self.name}: fresh_bytes_per_s must have rates above 0 by numbers of processes, such as "
                    f'"1" or "2", got {key[:20]!r} = {rate}'
                )
        for key in (*_STORED, "gather_dtype", "parameters_dtype", "adapter_dtype"):
            value = getattr(self, key)
            if value not in DTYPE_BYTES and (value or key in _STORED):
                raise ConfigError(f"stack {self.name}: {key} must be one of {', '.join(DTYPE_BYTES)}, got {value!r}")
        self._check_in_situ()
        if type(self.moments) is not int or self.moments < 0:
            raise ConfigError(f"stack {self.name}: moments must be 0, 1, 2, ..., got {self.moments}")
        if self.reduces_whole not in (0, 1, 2, 3):
            raise ConfigError(
                f"stack {self.name}: reduces_whole must be a stage of ZeRO, 0 to 3, got {self.reduces_whole}"
            )
        if not 0 <= self.host_optimizer <= 1:
            raise ConfigError(f"stack {self.name}: host_optimizer must be a share in [0, 1], got {self.host_optimizer}")
        if unknown := [axis for axis in self.hidden if axis not in ("tp", "cp", "ep", "pp")]:
            raise ConfigError(f"stack {self.name}: hidden: expected axes of tp, cp, ep and pp, got {unknown[0]!r:.60}")
        if self.imbalance < 1 or any(not 0 <= share <= 1 for share in self.hidden.values()):
            raise ConfigError(f"stack {self.name}: imbalance must be >= 1 and each of hidden in [0, 1]")

    def _check_in_situ(self) -> None:
        for key in self.in_situ:
            architecture, dot, factor_name = key.partition(".")
            if architecture not in (*ARCHITECTURES, "cpu") or (dot and not _is_factor(factor_name)):
                known_keys = (
                    f"{', '.join((*ARCHITECTURES, 'cpu'))}, or one of these with .{', .'.join(FACTORS)}, a collective "
                    "with its number of ranks behind, as in .all_reduce.4"
                )
                raise ConfigError(f"stack {self.name}: in_situ has factors for {known_keys}; got {key[:60]!r}")
        if any(not 0.1 < factor < 10 for factor in self.in_situ.values()):
            raise ConfigError(f"stack {self.name}: each of in_situ must be in (0.1, 10), got {self.in_situ}")

    def in_precision(self, precision: str) -> Stack:
        """Adapt the stack to products in ``precision``: in fp32 all is fp32, and no parameter has a master."""
        if precision != "fp32":
            return self
        wide = "float32"
        return replace(self, parameters_dtype=wide, gradient_dtype=wide, gather_dtype=wide, master_weights=False)

    def evidence_on(self, architecture: str) -> str:
        """How the software is known on devices of an architecture: FITTED, SWITCHES or GUESSED."""
        if architecture in self.fitted:
            return FITTED
        return SWITCHES if self.framework else GUESSED

    def in_situ_of(self, architecture: str, cause: str) -> float:
        """Factor by which kernels of one cause take longer in a running step on an architecture."""
        return self.in_situ.get(f"{architecture}.{cause}", self.in_situ.get(architecture, 1.0))

    def in_situ_among(self, architecture: str, op: str, ranks: int) -> float:
        """Factor by which a collective among some ranks takes longer in a running step.

        Where it was measured among several numbers of ranks, that of the next smaller one holds, without one that of
        any ranks, and without that of the smallest.
        """
        head = f"{architecture}.{op}"
        measured = {
            int(key.rpartition(".")[2]): factor for key, factor in self.in_situ.items() if key.startswith(f"{head}.")
        }
        if fewer := [count for count in measured if count <= ranks]:
            return measured[max(fewer)]
        return self.in_situ.get(head, measured[min(measured)] if measured else 1.0)

    def sentence(self) -> str:
        """Name the stack, and say what of its communication runs beside computing and what computing waits for."""
        hidden = {} if self.launch_blocking else self.hidden
        shares = {
            "reducing gradients": float(self.overlap_grad_reduce),
            "gathering cut parameters": float(self.overlap_param_gather),
            "tensor parallel": hidden.get("tp", 0.0),
            "context parallel": hidden.get("cp", 0.0),
            f"expert parallel ({self.dispatcher})": hidden.get("ep", 0.0),
            "sends of a pipeline": hidden.get("pp", 0.0),
        }
        beside = [
            communication if share == 1 else f"{share:.0%} of {communication}"
            for communication, share in shares.items()
            if share
        ]
        alone = [communication for communication, share in shares.items() if not share]
        if "sends of a pipeline" in alone:  # a rank with several chunks has another to compute
            alone[-1] += " with one chunk a rank"
        parts_texts = [
            f"{heading}: {', '.join(of)}" for heading, of in (("beside computing", beside), ("waited for", alone)) if of
        ]
        return f"software stack {self.name} ({self.title}); {'; '.join(parts_texts)}"
