"""What holds for every table of the catalog under every layout that it can have."""

import pytest

from lading.catalog.tables import stored_table, table_families
from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.layout import Layout, parse_layout
from lading.ir.work import Collective, Product, RankSegment, Stage
from lading.parallel.memory import segment_memory
from lading.parallel.ranks import rank_segment
from lading.parallel.recompute import recomputed

SIZES = {"b": 2, "s": 512, "h": 256, "n": 16, "k": 8, "d": 16, "f": 512, "v": 1024, "e": 16, "a": 2, "g": 128, "t": 64}
LAYOUTS = ("dp1", "tp4", "tp4,sp", "cp2,cp_comm=all_gather", "tp2,sp,cp2", "tp2,sp,dp4,ep4", "tp2,sp,dp4,ep8,etp1")
_SAME_LENGTHS = (OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.NORM)


def segments(family: str, layout: Layout) -> list[RankSegment]:
    stored = stored_table(family)
    sizes = {name: SIZES.get(name, 32) for name in stored.symbols}
    return [rank_segment(segment, sizes, layout) for segment in stored.segments]


def flops(found: list[RankSegment]) -> int:
    products = [k.detail for segment in found for k in segment.kernels if isinstance(k.detail, Product)]
    return sum(2 * p.m * p.n * p.k * p.groups for p in products)


def check_shapes(segment: RankSegment) -> None:
    """Activations of one operation are as long as each other, or 1, in every dim; tables of positions may be longer."""
    for kernel in segment.kernels:
        if kernel.kind in _SAME_LENGTHS:
            tensors = [segment.tensors[t] for t in (*kernel.inputs, *kernel.outputs)]
            shapes = [t.shape for t in tensors if t.role is not Role.PARAMETER or len(t.shape) == 1]
            for dims in zip(*(reversed(shape) for shape in shapes), strict=False):
                assert len(set(dims) - {1}) <= 1, kernel


def check_dataflow(segment: RankSegment) -> None:
    """Nothing is read before it is there; every collective has bytes; views of one storage fit into it."""
    given = {t.storage for t in segment.tensors if t.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.CONSTANT)}
    there = given | {segment.tensors[t].storage for t in segment.enters}
    made = {segment.tensors[t].storage for k in segment.kernels for t in k.outputs}
    for kernel in segment.kernels:
        if kernel.stage is Stage.FORWARD:
            read = {segment.tensors[t].storage for t in kernel.inputs}
            assert read <= there | (read - made), kernel
        there |= {segment.tensors[t].storage for t in kernel.outputs}
        if isinstance(kernel.detail, Collective):
            assert kernel.detail.size_bytes > 0, kernel
    for mode in ("none", "selective", "full"):
        memory = segment_memory(segment, recomputed(segment, mode))
        assert memory.backward_peak >= memory.saved >= 0


@pytest.mark.slow
@pytest.mark.parametrize("family", table_families())
def test_a_family_under_every_layout(family: str):
    whole = flops(segments(family, Layout()))
    for text in LAYOUTS:
        layout = parse_layout(text)
        try:
            found = segments(family, layout)
        except ConfigError as error:
            if layout.cp == 1 or "fused attention" not in str(error):
                raise
            continue
        for segment in found:
            check_shapes(segment)
            check_dataflow(segment)
        ranks = layout.tp * layout.cp
        assert flops(found) * ranks >= whole * 0.999  # no work is lost; some is done on every rank
        if layout.sp and family not in ("dit", "wan"):  # modulations and texts are worked on by all
            assert flops(found) * ranks == pytest.approx(whole, rel=1e-3)
