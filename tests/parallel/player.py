"""Plays all ranks of a layout in one process: each operation on every rank, collectives by hand on lists of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import torch
from tools.rank_graphs import DimShards, RankGraph, rank_graph

from lading.ir.graph import Arg, Literal, Op, Phase, Ref, Role
from lading.ir.layout import Layout
from lading.ir.table import ModelTable, SegmentTensor
from lading.parallel.chunks import chunks
from lading.tracing.fused import WholeKernels  # noqa: F401  (registers the whole norms)

Env = dict[int, torch.Tensor]
RankTensor = SegmentTensor[DimShards]
#: Collectives of rows that are sorted by expert, as ``lading.ir.work.Collective`` names them.
_AS_COUNTED = {
    "send_rows": "all_to_all",
    "return_rows": "all_to_all",
    "gather_rows": "all_gather",
    "scatter_rows": "reduce_scatter",
}
Place = Mapping[str, int]


def ranks_of(layout: Layout) -> list[dict[str, int]]:
    """Where each rank of a pipeline stage stands on the axes."""
    places: list[dict[str, int]] = []
    whole = layout.expert_tp == 1 and layout.tp > 1  # experts are spread over tp ranks too
    for dp, cp, tp in product(range(layout.dp), range(layout.cp), range(layout.tp)):
        over = (dp * layout.cp + cp) * layout.tp + tp if whole else dp * layout.cp + cp
        experts = {"ep": over % layout.ep, "others": over // layout.ep, "etp": 0 if whole else tp}
        places.append({"dp": dp, "cp": cp, "tp": tp, **experts})
    return places


@dataclass
class Player:
    """Ranks of one stage in lockstep.

    Attributes:
        places: Of each rank on each axis.
        moved: (operation, axis, elements) of each collective, as the first rank sees it.
    """

    places: Sequence[Place]
    degrees: Mapping[str, int]
    moved: list[tuple[str, str, int]] = field(default_factory=lambda: [])

    def elements(self, tensor: RankTensor, rank: int, dim: int) -> list[int]:
        return tensor.dims[dim].elements(self.places[rank], self.degrees)

    def shard(self, whole: torch.Tensor, tensor: RankTensor, rank: int) -> torch.Tensor:
        """What a rank has of a tensor that is whole."""
        for dim in range(whole.dim()):
            whole = whole.index_select(dim, torch.tensor(self.elements(tensor, rank, dim)))
        return whole

    def group(self, rank: int, axis: str) -> list[int]:
        """Ranks that differ on one axis only, in its order."""
        same = {"tp": ("dp", "cp"), "etp": ("dp", "cp"), "cp": ("dp", "tp"), "ep": ("others", "etp")}[axis]
        mine = [r for r, p in enumerate(self.places) if all(p[a] == self.places[rank][a] for a in same)]
        return sorted(mine, key=lambda r: self.places[r][axis])

    def run(self, graph: RankGraph, envs: Sequence[Env], *, backward: bool) -> None:
        """All operations of forward, or of backward."""
        for op in graph.ops:
            if (op.phase is Phase.BACKWARD) is not backward:
                continue
            if op.name.startswith("lading."):
                results = self.between(graph, op, envs)
            else:
                results = [called(graph, op, env) for env in envs]
            for env, result in zip(envs, results, strict=True):
                self.keep(graph, op, env, result)

    def keep(self, graph: RankGraph, op: Op, env: Env, result: Any) -> None:
        made = result if isinstance(result, (tuple, list)) else (result,)
        for t, value in zip(op.results, made, strict=False):
            if t is not None:
                expected = [dim.length for dim in graph.tensors[t].dims]
                assert len(expected) == value.dim(), (op, expected, value.shape)
                assert all(n in (-1, m) for n, m in zip(expected, value.shape, strict=True)), (
                    op,
                    expected,
                    value.shape,
                )
                for source in op.inputs:  # one number is one memory
                    if graph.tensors[source].storage == graph.tensors[t].storage:
                        assert value.untyped_storage().data_ptr() == env[source].untyped_storage().data_ptr(), op
                env[t] = value

    def between(self, graph: RankGraph, op: Op, envs: Sequence[Env]) -> list[Any]:
        """An operation that asks where a rank stands."""
        how = getattr(self, "do_" + op.name.partition(".")[2])
        return [how(graph, op, envs, rank) for rank in range(len(envs))]

    # Between ranks.

    def count(self, op: Op, rank: int, tensor: torch.Tensor) -> None:
        if rank == 0 and tensor.is_floating_point():  # a few numbers of rows go with the rows
            axis, name = next(arg for arg in op.args if isinstance(arg, str)), op.name.partition(".")[2]
            self.moved.append((_AS_COUNTED.get(name, name), axis, tensor.numel()))

    def do_all_reduce(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        parts = [envs[r][op.inputs[0]] for r in self.group(rank, str(op.args[1]))]
        self.count(op, rank, parts[0])
        stacked = torch.stack(parts)
        return stacked.amax(0) if op.args[2] == "max" else stacked.sum(0, dtype=stacked.dtype)

    def do_all_gather(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        source, made = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
        sizes = [len(self.elements(made, rank, d)) for d in range(len(made.dims))]
        result = envs[rank][op.inputs[0]].new_zeros(sizes)
        for r in self.group(rank, str(op.args[1])):
            result[self.within(made, source, rank, r)] = envs[r][op.inputs[0]]
        self.count(op, rank, result)
        return laid_like(envs[rank][op.inputs[0]], result)

    def within(self, whole: RankTensor, part: RankTensor, rank: int, other: int) -> tuple[torch.Tensor, ...]:
        """Where the elements that ``other`` has of ``part`` stand in what ``rank`` has of ``whole``."""
        places: list[list[int]] = []
        for dim in range(len(whole.dims)):
            at = {element: i for i, element in enumerate(self.elements(whole, rank, dim))}
            places.append([at[element] for element in self.elements(part, other, dim)])
        return tuple(torch.meshgrid(*map(torch.tensor, places), indexing="ij"))

    def do_reduce_scatter(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        source, made = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
        total = torch.stack([envs[r][op.inputs[0]] for r in self.group(rank, str(op.args[1]))]).sum(0)
        self.count(op, rank, total)
        return laid_like(envs[rank][op.inputs[0]], total[self.within(source, made, rank, rank)])

    def counts(self, envs: Sequence[Env], ends: int, ranks: Sequence[int]) -> list[list[int]]:
        """Rows of each rank for each expert."""
        return [torch.diff(envs[r][ends], prepend=envs[r][ends].new_zeros(1)).tolist() for r in ranks]

    def do_send_rows(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        """Rows for the experts of a rank: by expert, then by the rank they come from."""
        rows, ends = op.inputs
        ranks = self.group(rank, "ep")
        counts = self.counts(envs, ends, ranks)
        self.count(op, rank, envs[rank][rows])
        split = [envs[r][rows].split(c) for r, c in zip(ranks, counts, strict=True)]
        each = len(counts[0]) // len(ranks)
        first = self.places[rank]["ep"] * each
        return torch.cat([split[i][e] for e in range(first, first + each) for i in range(len(ranks))])

    def do_return_rows(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        rows, ends = op.inputs
        ranks = self.group(rank, "ep")
        counts = self.counts(envs, ends, ranks)
        each = len(counts[0]) // len(ranks)
        mine = ranks.index(rank)
        blocks_back: list[torch.Tensor] = []
        for owner, r in enumerate(ranks):
            blocks = [counts[i][e] for e in range(owner * each, (owner + 1) * each) for i in range(len(ranks))]
            blocks_back.extend(envs[r][rows].split(blocks)[mine :: len(ranks)])
        result = torch.cat(blocks_back)
        self.count(op, rank, result)
        return result

    def do_gather_rows(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        rows, ends = op.inputs
        ranks = self.group(rank, str(op.args[2]))
        counts = self.counts(envs, ends, ranks)
        split = [envs[r][rows].split(c) for r, c in zip(ranks, counts, strict=True)]
        result = torch.cat([split[i][e] for e in range(len(counts[0])) for i in range(len(ranks))])
        self.count(op, rank, result)
        return result

    def do_scatter_rows(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        rows, ends = op.inputs
        ranks = self.group(rank, str(op.args[2]))
        counts = self.counts(envs, ends, ranks)
        total = torch.stack([envs[r][rows] for r in ranks]).sum(0)
        self.count(op, rank, total)
        blocks = total.split([counts[i][e] for e in range(len(counts[0])) for i in range(len(ranks))])
        return torch.cat(blocks[ranks.index(rank) :: len(ranks)])

    def do_expert_ends(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        ranks = self.group(rank, "ep")
        total = torch.tensor(self.counts(envs, op.inputs[0], ranks)).sum(0)
        each = len(total) // len(ranks)
        first = self.places[rank]["ep"] * each
        return total[first : first + each].cumsum(0).to(torch.int32)

    # Of a rank by itself.

    def do_shard(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        source, made = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
        whole = envs[rank][op.inputs[0]]
        return laid_like(whole, whole[self.within(source, made, rank, rank)])

    def do_spread(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        source, made = graph.tensors[op.inputs[0]], graph.tensors[op.outputs[0]]
        part = envs[rank][op.inputs[0]]
        result = part.new_zeros([len(self.elements(made, rank, d)) for d in range(part.dim())])
        result[self.within(made, source, rank, rank)] = part
        return result

    def words(self, graph: RankGraph, tensor: int, dim: int, rank: int, index: torch.Tensor) -> tuple[Any, Any]:
        """Numbers of words among a rank's, and which of them it has."""
        words = self.elements(graph.tensors[tensor], rank, dim)
        here = (index >= words[0]) & (index <= words[-1])
        return torch.where(here, index - words[0], 0), here

    def do_embedding(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        weight, index = (envs[rank][t] for t in op.inputs)
        local, here = self.words(graph, op.inputs[0], 0, rank, index)
        return weight[local] * here[..., None]

    def do_embedding_backward(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        grad, index = (envs[rank][t] for t in op.inputs)
        local, here = self.words(graph, op.outputs[0], 0, rank, index)
        made = grad.new_zeros((len(self.elements(graph.tensors[op.outputs[0]], rank, 0)), grad.shape[-1]))
        return made.index_add(0, local.flatten(), (grad * here[..., None]).flatten(0, -2))

    def do_row_max(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        return envs[rank][op.inputs[0]].amax(-1)

    def do_row_sum(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        scores, most = (envs[rank][t] for t in op.inputs)
        return (scores - most[..., None]).exp().sum(-1)

    def do_log_softmax(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        scores, most, total = (envs[rank][t] for t in op.inputs)
        return scores - (most + total.log())[..., None]

    def do_pick(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        scores, target = (envs[rank][t] for t in op.inputs)
        local, here = self.words(graph, op.inputs[0], 1, rank, target)
        return scores.gather(1, local[:, None])[:, 0] * here

    def do_nll_loss(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> Any:
        picked, target = (envs[rank][t] for t in op.inputs)
        assert op.args[2] == 1, "a mean"
        counted = target.ne(cast(int, op.args[3]))
        return -(picked * counted).sum() / counted.sum(), counted.sum().to(picked.dtype)

    def do_nll_row_sum(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        grad, target, count = (envs[rank][t] for t in op.inputs)
        return -target.ne(cast(int, op.args[3])).to(grad.dtype) * grad / count

    def do_nll_loss_backward(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        grad, scores, target, count = (envs[rank][t] for t in op.inputs)
        local, here = self.words(graph, op.inputs[1], 1, rank, target)
        each = -(here & (target != op.args[4])).to(grad.dtype) * grad / count
        return torch.zeros_like(scores).scatter(1, local[:, None], each[:, None])

    def do_log_softmax_backward(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        grad, result, total = (envs[rank][t] for t in op.inputs)
        return grad - result.exp() * total[..., None]

    def do_causal_mask(self, graph: RankGraph, op: Op, envs: Sequence[Env], rank: int) -> torch.Tensor:
        mask = graph.tensors[op.outputs[0]]
        queries, keys = (torch.tensor(self.elements(mask, rank, d)) for d in (0, 1))
        seen = keys[None, :] <= queries[:, None]
        return torch.zeros(seen.shape, dtype=envs[rank][op.inputs[0]].dtype).masked_fill(~seen, float("-inf"))


def laid_like(source: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """The same values with the dims in memory in the order that they have in ``source``, which views rely on."""
    order = sorted(range(source.dim()), key=lambda dim: -source.stride(dim))
    return torch.empty_permuted(made.shape, order, dtype=made.dtype).copy_(made)


_ON_CPU = {"aten._fused_rms_norm.default": "lading", "aten._fused_rms_norm_backward.default": "lading"}


def called(graph: RankGraph, op: Op, env: Env) -> Any:
    """One of torch's operations on a rank's tensors."""
    namespace, packet, overload = op.name.split(".")
    function = getattr(getattr(getattr(torch.ops, _ON_CPU.get(op.name, namespace)), packet), overload)

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return env[arg.tensor]
        if isinstance(arg, Literal):
            return {"dtype": getattr(torch, arg.value, None), "device": arg.value, "layout": torch.strided,
                    "memory_format": getattr(torch, arg.value, None)}[arg.kind]  # fmt: skip
        return [value(item) for item in arg] if isinstance(arg, tuple) else arg

    with torch.no_grad():
        return function(*map(value, op.args), **{key: value(arg) for key, arg in op.kwargs})


@dataclass
class Played:
    """Loss and whole gradients, as the mean over replicas, tokens and micro-batches gives them."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    moved: list[tuple[str, str, int]]


class Step:
    """A step of a model by the ranks of a layout."""

    def __init__(self, table: ModelTable, model: torch.nn.Module, layout: Layout, tokens: int) -> None:
        self.layout, self.table = layout, table
        sizes = {**table.symbols, "s": tokens}
        self.graphs = [rank_graph(segment, sizes, layout) for segment in table.segments]
        self.player = Player(ranks_of(layout), self.graphs[0].degrees)
        self.values = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self.instances = [(i, at) for i, count in enumerate(table.counts) for at in range(count)]
        self.gradients: dict[str, torch.Tensor] = {}

    def named(self, segment: int, at: int, name: str) -> str:
        """A parameter's or buffer's name in the model."""
        run = self.table.segments[segment].name.partition(".")[0]
        before = sum(c for s, c in zip(self.table.segments[:segment], self.table.counts, strict=False)
                     if s.name.partition(".")[0] == run)  # fmt: skip
        local = f"{run}.{before + at}.{name}"
        return local if local in self.values else name

    def start(self, segment: int, at: int, batches: Sequence[Mapping[str, torch.Tensor]]) -> list[Env]:
        """What each rank has of parameters, buffers and its replica's batch."""
        graph = self.graphs[segment]
        made = {t for op in graph.ops for t in op.outputs}
        envs: list[Env] = []
        for rank, place in enumerate(self.player.places):
            env: Env = {}
            for t, tensor in enumerate(graph.tensors):
                if t in made or not tensor.name:
                    continue
                if tensor.role is Role.INPUT:
                    env[t] = batches[place["dp"]][tensor.name]
                else:
                    value = self.values[self.named(segment, at, tensor.name)].detach()
                    env[t] = self.player.shard(value, tensor, rank)
            envs.append(env)
        return envs

    def run(self, batches: Sequence[Sequence[Mapping[str, torch.Tensor]]]) -> Played:
        """Every micro-batch forward and backward; ``batches`` by micro-batch and replica."""
        losses = [self.micro_batch(replicas, 1 / len(batches)) for replicas in batches]
        return Played(torch.stack(losses).mean(), self.gradients, self.player.moved)

    def stages(self) -> list[list[int]]:
        """Instances of each stage of the pipeline."""
        if not self.layout.is_pipeline:
            return [list(range(len(self.instances)))]
        stages: list[list[int]] = []
        at = 0
        for rank in chunks(self.table, self.layout):
            (chunk,) = rank
            count = sum(n for _, n in chunk)
            stages.append(list(range(at, at + count)))
            at += count
        return stages

    def micro_batch(self, replicas: Sequence[Mapping[str, torch.Tensor]], share: float) -> torch.Tensor:
        envs = [self.start(*instance, replicas) for instance in self.instances]
        order = [(stage, i) for stage, owned in enumerate(self.stages()) for i in owned]
        for (stage, i), after in zip(order, [*order[1:], None], strict=True):
            graph = self.graphs[self.instances[i][0]]
            self.player.run(graph, envs[i], backward=False)
            if after is not None:
                self.hand_on(graph.leaves, self.graphs[self.instances[after[1]][0]].enters, envs[i], envs[after[1]],
                             sends=after[0] != stage)  # fmt: skip
        for (stage, i), before in zip(reversed(order), [*reversed(order[:-1]), None], strict=True):
            graph = self.graphs[self.instances[i][0]]
            self.player.run(graph, envs[i], backward=True)
            self.add_gradients(i, envs[i], share)
            if before is not None:
                self.hand_on(graph.leaves_back, self.graphs[self.instances[before[1]][0]].enters_back, envs[i],
                             envs[before[1]], sends=before[0] != stage)  # fmt: skip
        last = self.graphs[self.instances[-1][0]]
        assert last.loss is not None
        return torch.stack([env[last.loss] for env in envs[-1]]).mean()

    def hand_on(
        self, leaves: Sequence[int], enters: Sequence[int], one: list[Env], other: list[Env], *, sends: bool
    ) -> None:
        for left, entered in zip(leaves, enters, strict=True):
            for mine, theirs in zip(one, other, strict=True):
                theirs[entered] = mine[left].clone() if sends else mine[left]
            if sends:
                self.player.moved.append(("send", "pp", one[0][left].numel()))

    def add_gradients(self, instance: int, envs: list[Env], share: float) -> None:
        """Each rank's gradients come to their places in the whole: summed over tp ranks where they are parts of a sum,
        else alike on all that have them; averaged over replicas and context-parallel ranks."""
        segment, at = self.instances[instance]
        graph = self.graphs[segment]
        for parameter in graph.parameters:
            if parameter.gradient is None:
                continue
            name = self.named(segment, at, graph.tensors[parameter.tensor].name)
            whole, tensor = self.values[name], graph.tensors[parameter.gradient]
            total = torch.zeros_like(whole)
            groups: dict[tuple[int, int], torch.Tensor] = {}
            for rank, place in enumerate(self.player.places):
                key = (place["dp"], place["cp"])
                mine = torch.zeros_like(whole)
                where = [torch.tensor(self.player.elements(tensor, rank, d)) for d in range(whole.dim())]
                where = torch.meshgrid(*where, indexing="ij")
                mine[where] = envs[rank][parameter.gradient]
                apart = parameter.is_expert and self.layout.expert_tp == 1  # tp ranks have different experts
                if parameter.summed or apart or key not in groups:
                    groups[key] = groups.get(key, 0) + mine
                else:
                    there = torch.zeros_like(whole, dtype=torch.bool)
                    there[where] = True
                    same = there & (groups[key] != 0)
                    torch.testing.assert_close(groups[key][same], mine[same], rtol=1e-4, atol=1e-6)
                    groups[key] = torch.where(there, mine, groups[key])
            for part in groups.values():
                total += part * share / len(groups)
            self.gradients[name] = self.gradients.get(name, 0) + total
