"""Muon of one matrix: momentum, made orthogonal by an iteration of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from lading.optim.rule import (
    MatrixCase,
    MatrixRule,
    Rule,
    States,
    StateSpec,
    UpdateWork,
    check_choices,
    check_ranges,
    move,
)

if TYPE_CHECKING:
    import torch

#: What oneDNN takes for a product of 16-bit numbers on one thread. Measured: 132100 bytes at most, torch 2.13.
_PRODUCT_BYTES = 136 << 10
#: What torch turns a matrix through that does not lie row by row: 60 by 60 elements.
_TURNED_BYTES = 16 << 10
#: Of algorithm 1 of arXiv:2505.16932; the last goes on.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)


def _within_bf16(steps: Sequence[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Scale coefficients by the room that algorithm 1 leaves for rounding.

    That is 1.01 in the norm, and in what each step but the last gets.
    """

    def smaller(step: tuple[float, float, float], by: float) -> tuple[float, float, float]:
        return step[0] / by, step[1] / by**3, step[2] / by**5

    first, *middle, last = steps
    return smaller(first, 1.01**2), *(smaller(step, 1.01) for step in middle), last


#: Coefficients (a, b, c) of the steps X <- a X + (b A + c A^2) X, with A = X X^T, by name; the last goes on.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Jordan, https://kellerjordan.github.io/posts/muon/
    "jordan": ((3.4445, -4.7750, 2.0315),),
    # Amsel, Persson, Musco, Gower, https://arxiv.org/abs/2505.16932, algorithm 1.
    "polar-express": _within_bf16(_POLAR_EXPRESS),
    # You, in modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Muon(MatrixRule):
    """Momentum, made orthogonal (Jordan, https://kellerjordan.github.io/posts/muon/); as ``torch.optim.Muon``.

    Attributes:
        coefficients: Coefficients of the iteration: "jordan", "polar-express" or "you".
        scale: Factor of an update of a matrix of m rows and n columns: "original", sqrt(max(1, m / n));
            "match-rms-adamw", 0.2 sqrt(max(m, n)); "none".
        dtype: Number format of the iteration.
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    coefficients: str = "jordan"
    steps: int = 5
    eps: float = 1e-7
    scale: Literal["original", "match-rms-adamw", "none"] = "original"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    default_lr: ClassVar[float] = 1e-3
    usual_lr: ClassVar[float] = 0.02
    counts: ClassVar[bool] = False
    #: Momentum (12), look-ahead (12), rounding (6), norm and division (6), decay (8), step (18, with a copy of the
    #: direction), as counted in ``lading.runtime.update_kernels``.
    elementwise_bytes: ClassVar[float] = 62.0

    def __post_init__(self) -> None:
        check_ranges(
            "muon",
            {
                "momentum": (self.momentum, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "steps": (self.steps, 1, 99),
                "eps": (self.eps, 0, 1),
            },
        )
        check_choices(
            "muon",
            self,
            {
                "coefficients": tuple(COEFFICIENTS),
                "scale": ("original", "match-rms-adamw", "none"),
                "dtype": ("bfloat16", "float32"),
            },
        )

    @property
    def iteration(self) -> tuple[tuple[float, float, float], ...]:
        """Coefficients (a, b, c) of each step of the iteration."""
        schedule = COEFFICIENTS[self.coefficients]
        return tuple(schedule[min(step, len(schedule) - 1)] for step in range(self.steps))

    def scaled(self, rows: int, columns: int) -> float:
        """Factor of the learning rate for a matrix of (rows, columns)."""
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "match-rms-adamw" else 1.0

    @property
    def product_dtype(self) -> str:
        """Number format of the iteration's products."""
        return self.dtype

    @property
    def travels(self) -> str:
        """Number format that gradients travel in: the iteration's, as it begins by rounding to that."""
        return self.dtype

    def state_specs(self, rows: int, columns: int) -> Mapping[str, StateSpec]:
        """Shape of the momentum."""
        return {"momentum": StateSpec((rows, columns))}

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Work of the iteration: a step is two products with the short side a, 2 a a b each, and one of 2 a^3."""
        a, b = sorted((rows, columns))
        return UpdateWork(((self.steps, a, a, b), (self.steps, a, a, a), (self.steps, a, b, a)), passes=4)

    def shared_work(self, part: int, short: int, long: int) -> tuple[int, UpdateWork] | None:
        """Work of each of several ranks that share a matrix: some rows of each product of a step."""
        return self.steps, UpdateWork(((1.0, part, short, long), (1.0, part, short, short), (1.0, part, long, short)))

    def workspace_elements(self, rows: int, columns: int) -> int:
        """Elements of scratch for one matrix: two of its size and two squares of its shorter side."""
        return 2 * rows * columns + 2 * min(rows, columns) ** 2

    def scratch_bytes(self, case: MatrixCase) -> int:
        """Bytes that an update allocates: the look-ahead of some rows, its rounding and widening; or a product's."""
        low = self.dtype == "bfloat16"
        bytes_each = 8 + 4 * low if case.rounds else 4 + 2 * low + 4 * case.widens
        elementwise = min(case.rows, case.rows_at_once) * case.columns * bytes_each
        elementwise += _TURNED_BYTES if case.is_turned else 0
        copied = 2 * case.rows * case.columns if case.rows > case.columns else 0  # an operand that is not row by row
        return max(elementwise, copied + case.threads * _PRODUCT_BYTES if low else 0)

    def maths(self, shift: int = 0, *, shared: bool = False) -> Rule:
        """Make the arithmetic of the iteration; nothing is due now and then."""
        return MuonRule(self, shared=shared)


def orthogonal(
    matrix: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Make a matrix U S V^T nearly orthogonal, U V^T, by Newton-Schulz iteration in ``dtype``.

    Args:
        matrix: (rows, columns).
        coefficients: (a, b, c) of each step X <- a X + (b A + c A^2) X, with A = X X^T.
        eps: Least norm to divide by.
    Source: Jordan, https://kellerjordan.github.io/posts/muon/; the same kernels in the same order as
    ``torch.optim.Muon`` where ``dtype`` is bfloat16.
    """
    import torch

    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(dtype, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def orthogonal_stack(
    matrices: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Make matrices (number, rows, columns) orthogonal as ``orthogonal`` does, in batched products.

    Bits are those of batched kernels, which may sum in another order: results differ from ``orthogonal`` by rounding.
    """
    import torch

    tall = matrices.size(1) > matrices.size(2)
    x = matrices.to(dtype, copy=True)
    x = x.mT if tall else x
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def row_blocks(rows: int) -> list[slice]:
    """Cut a matrix's rows into blocks for products that ranks share: multiples of 64, sixteen at most."""
    size = 64 * max(1, -(-rows // (64 * 16)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class MuonRule:
    """``lading.optim.rule.Rule`` of Muon, bit-equal to ``torch.optim.Muon`` with its settings.

    With ``shared``, products are taken by blocks of rows on one rank, too; each has the bits of its own, which need not
    be those of the product as a whole.
    """

    def __init__(self, settings: Muon, *, shared: bool = False) -> None:
        import torch

        self.settings, self.shared = settings, shared
        self._dtype: torch.dtype = getattr(torch, settings.dtype)

    @property
    def travels(self) -> torch.dtype | None:
        """Number format that gradients travel in: the iteration's, as it begins by rounding to that."""
        return self._dtype

    def pre(self, grad: torch.Tensor, held: States, update: int) -> torch.Tensor:
        """Update the momentum; returns it, a step ahead with Nesterov."""
        momentum = held["momentum"]
        momentum.lerp_(grad, 1 - self.settings.momentum)
        ahead = grad.lerp(momentum, self.settings.momentum) if self.settings.nesterov else momentum
        return ahead.to(self._dtype)

    def direction(self, matrix: torch.Tensor, whole: States, update: int) -> torch.Tensor:
        """Make a matrix orthogonal by the iteration."""
        if self.shared:
            return self.by_blocks(matrix, self.blocks(min(matrix.shape)), lambda product: product)
        return orthogonal(matrix, self.settings.iteration, self.settings.eps, self._dtype)

    def directions(self, matrices: torch.Tensor) -> torch.Tensor:
        """Make matrices (number, rows, columns) orthogonal in one iteration of batched products."""
        return orthogonal_stack(matrices, self.settings.iteration, self.settings.eps, self._dtype)

    def direction_within(self, matrix: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Orthogonalize a matrix in given memory; the result lies in ``matrix`` or in ``room``.

        Args:
            matrix: (rows, columns), overwritten.
            room: Scratch for another such matrix and two squares of the shorter side.
        """
        import torch

        tall = matrix.shape[0] > matrix.shape[1]
        a, b = min(matrix.shape), max(matrix.shape)
        places = (room[: a * b].view(a, b), matrix.reshape(-1).view(a, b))
        gram, mixed = (room[a * b + n * a * a :][: a * a].view(a, a) for n in (0, 1))
        iterate = matrix.T if tall else matrix
        iterate.div_(iterate.norm().clamp(min=self.settings.eps))
        for turn, (ca, cb, cc) in enumerate(self.settings.iteration):
            torch.mm(iterate, iterate.T, out=gram)
            torch.addmm(gram, gram, gram, beta=cb, alpha=cc, out=mixed)
            iterate = torch.addmm(iterate, mixed, iterate, beta=ca, out=places[turn % 2])
        return iterate.T if tall else iterate

    def blocks(self, rows: int) -> list[slice]:
        """Blocks of the short side's rows that ranks may share."""
        return row_blocks(rows)

    def by_blocks(
        self, matrix: torch.Tensor, own: Sequence[slice], meet: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Run the iteration, of which this rank computes some rows of each product.

        Args:
            matrix: (rows, columns), the same on all that share it.
            own: Blocks of rows.
            meet: From a product with these rows, the product with all.
        """
        import torch

        tall = matrix.size(0) > matrix.size(1)
        x = (matrix.T if tall else matrix).to(self._dtype, copy=True).contiguous()
        x.div_(x.norm().clamp(min=self.settings.eps))
        for a, b, c in self.settings.iteration:
            gram = x.new_empty(x.size(0), x.size(0))
            for rows in own:
                torch.mm(x[rows], x.T, out=gram[rows])
            gram = meet(gram)
            following = torch.empty_like(x)
            for rows in own:
                factor = torch.addmm(gram[rows], gram[rows], gram, beta=b, alpha=c)
                torch.addmm(x[rows], factor, x, beta=a, out=following[rows])
            x = meet(following)
        return x.T if tall else x

    def post(
        self, param: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], *, lr: float, update: int
    ) -> None:
        """Decay the weights, then move them along the direction."""
        param.mul_(1 - lr * self.settings.weight_decay)
        move(param, direction, -lr * self.settings.scaled(*shape))

    def work(self, rows: int, columns: int) -> UpdateWork:
        """Products and passes of the iteration."""
        return self.settings.work(rows, columns)
