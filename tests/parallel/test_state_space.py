"""State-space layers: a convolution of each channel by itself, heads that are groups, unequal parts of one product."""

from lading.catalog.tables import stored_table
from lading.ir.graph import OpKind, Role
from lading.ir.layout import parse_layout
from lading.ir.work import Collective, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment

B, S, H = 1, 1024, 256
SIZES = {"h": H, "md": 32, "mg": 4, "mr": 4, "ms": 16, "v": 1000, "s": S, "b": B}
INNER, STATES, HEADS = 32 * 4 * 4, 4 * 16, 16


def layer(layout: str) -> RankSegment:
    return rank_segment(stored_table("mamba2").segments[1], SIZES, parse_layout(layout))


def flops(segment: RankSegment) -> int:
    found = [k.detail for k in segment.kernels if isinstance(k.detail, Product)]
    return sum(2 * p.m * p.n * p.k * p.groups for p in found)


def test_groups_are_cut_through_all_parts():
    whole, cut = layer("dp1"), layer("tp4,sp")
    assert flops(cut) * 4 == flops(layer("tp4")) * 4 == flops(whole)
    shapes = {t.name: t.shape for t in cut.tensors if t.role is Role.PARAMETER and t.name}
    assert (2 * INNER // 4 + 2 * STATES // 4 + HEADS // 4, H) in shapes.values()
    channels = INNER // 4 + 2 * STATES // 4
    convolutions = [k for k in cut.kernels if k.kind is OpKind.CONVOLUTION]
    assert cut.tensors[convolutions[0].inputs[0]].shape == (B, channels, S)
    assert len(convolutions) == 2


def test_a_layer_gathers_and_scatters_once():
    found = [k.detail for k in layer("tp4,sp").kernels if k.stage is Stage.FORWARD]
    ops = [(c.op, c.size_bytes) for c in found if isinstance(c, Collective)]
    assert ops == [("all_gather", B * S * H * 2), ("all_reduce", B * S * 4), ("reduce_scatter", B * S * H * 2)]
