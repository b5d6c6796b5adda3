"""Understood: what a request was taken to mean, in the units and words of Lading, to be laid beside what was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lading.cost.hosting import update_bytes
from lading.cost.topology import group_of
from lading.ir.machine import Link, Machine
from lading.ir.stack import Stack

if TYPE_CHECKING:
    from lading.ir.request import StepRequest


def understood(request: StepRequest, machine: Machine) -> dict[str, str]:
    """Say by subject what a request means: devices, links, software, number formats, what is kept and moved.

    Args:
        machine: Machine of the request, on its network (``lading.sim.simulate.machine_of``).
    """
    layout, stack, model = request.layout, request.stack, request.model
    by_subject = {
        "devices": f"{layout.devices} x {machine.device.name}",
        "links": "; ".join(_link(link) for link in machine.links) or "none known",
        "software": f"{stack.name}: {stack.fusion}, {stack.attention} attention"
        + (", CUDA graphs" if stack.cuda_graphs else "")
        + (", fused loss" if stack.fused_loss else ""),
        "switches": _switches(stack, expert=layout.ep > 1 or "e" in model.symbols),
        "number formats": _formats(request),
        "optimizer": f"{request.optimizer}, {stack.moments} moments in {stack.moments_dtype}",
        "sequences": f"{layout.global_batch or layout.dp * layout.micro_batch} of {request.seq_len} tokens a step, "
        f"micro-batches of {layout.micro_batch}" + _packing(request),
        "recompute": _recompute(request),
    }
    if request.task in ("lora", "qlora"):
        modules = ", ".join(stack.adapter_modules) or "every product of a block"
        by_subject["adapters"] = f"{request.task} of rank {request.lora_rank} on {modules}"
        by_subject["adapters"] += ", embeddings trained in full" if request.trains_embeddings else ""
    if layout.offload:
        by_subject["offload"] = _offload(request, machine)
    if request.dropout:
        by_subject["dropout"] = f"{request.dropout:g}"
    if machine.links and layout.devices > 1:
        by_subject["groups"] = _groups(request, machine)
    return by_subject


def _link(link: Link) -> str:
    """One link with its rate in bytes a second each way, and who has it."""
    rate = link.bandwidth_bytes_per_s / 1e9
    if link.nics:
        bits = f"{link.nics} x {rate:g} GB/s ({8 * rate:g} Gb/s) {link.kind}"
        return f"{link.name} {bits} for {link.nic_ranks} devices of a node"
    return f"{link.name} {rate:g} GB/s each way among {link.ranks or 'all'} devices"


def _switches(stack: Stack, *, expert: bool) -> str:
    """Say what runs beside computing, and how tokens reach experts."""
    beside = {
        "reduces gradients": float(stack.overlap_grad_reduce),
        "gathers parameters": float(stack.overlap_param_gather),
        **{axis: stack.hidden.get(axis, 0.0) for axis in ("tp", "cp", "ep", "pp")},
    }
    shares = [name if share == 1 else f"{share:.0%} of {name}" for name, share in beside.items() if share]
    sentence = f"beside computing: {', '.join(shares) or 'nothing'}"
    if expert:
        sentence += f"; experts by {stack.dispatcher}, busiest {stack.imbalance:g} of the mean"
    return sentence


def _formats(request: StepRequest) -> str:
    stack, precision = request.stack, request.layout.precision
    scaled = f" ({request.linear_dtype})" if request.linear_dtype else ""
    parameter_format = stack.parameters_dtype or "as products, 16 bits"
    master = ", fp32 masters" if stack.master_weights else ", no masters"
    precise = f"; {request.high_precision_layers} blocks in 16 bits" if request.high_precision_layers else ""
    return (
        f"products {precision}{scaled}; parameters {parameter_format}{master}; gradients {stack.gradient_dtype}; "
        f"gathered {stack.gather_dtype or 'as products'}{precise}"
    )


def _packing(request: StepRequest) -> str:
    if not request.packed_tokens:
        return ", not packed"
    return f", packed of examples of {request.packed_tokens} tokens that attend to themselves"


def _recompute(request: StepRequest) -> str:
    layout = request.layout
    if layout.recompute == "selective":
        return f"selective: {', '.join(layout.recompute_modules) or 'core_attn'}"
    if layout.recompute == "full" and layout.recompute_layers >= 0:
        return f"full, {layout.recompute_layers} layers of a chunk"
    return layout.recompute


def _offload(request: StepRequest, machine: Machine) -> str:
    layout, host = request.layout, machine.host_device
    tier = machine.offload_tier(layout.offload_to)
    sentence = f"{', '.join(layout.offload)} in {tier.name}, {tier.read_bytes_per_s / 1e9:.3g} GB/s to a device"
    if layout.updates_on_host and host is not None:
        sentence += (
            f"; updates by {request.stack.host_update} of {update_bytes(request.stack):g} bytes an element, of "
            f"{host.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s of memory for each rank"
        )
    return sentence


def _groups(request: StepRequest, machine: Machine) -> str:
    """Say how many ranks of each axis are joined by the nearest link."""
    axis_texts: list[str] = []
    for axis in ("tp", "cp", "ep", "pp", "dp"):
        ranks = getattr(request.layout, axis)
        if ranks > 1:
            group = group_of(request.layout, axis, machine)
            axis_texts.append(f"{axis} {group.domain_ranks} of {group.ranks}")
    return f"ranks in one {machine.links[0].name} domain: {', '.join(axis_texts)}" if axis_texts else "one rank"
