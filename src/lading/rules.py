"""Rules of optimizers as data: what moves a parameter, with which numbers, and what work it is for one matrix.

The mathematics is in ``lading.optim``; plans and costs need only what is here. Learning rates are not: they change with
the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lading.errors import ConfigError

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
    """With the room that algorithm 1 leaves for rounding: 1.01 in the norm, and in what each step but the last gets."""

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


def _within(rule: str, low_high: dict[str, tuple[float, float, float]]) -> None:
    for key, (value, low, high) in low_high.items():
        if not low <= value <= high:
            limits = f">= {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
            raise ConfigError(f"{rule}: expected {key} {limits}, got {value}")


@dataclass(frozen=True)
class Work:
    """What one update of one matrix asks of a device.

    Attributes:
        products: (times, m, n, k): so many products of (m, k) by (k, n).
        eigen: (times, n): decompositions of symmetric matrices of n rows; QR and roots count as what they cost.
        passes: Times all elements of the matrix are read or written.
    """

    products: tuple[tuple[float, int, int, int], ...]
    eigen: tuple[tuple[float, int], ...] = ()
    passes: float = 0.0

    @property
    def flops(self) -> float:
        """A multiply-add counts as two; a decomposition as 9 n^3 (Golub and Van Loan, Matrix Computations, 8.3)."""
        products = sum(2 * times * m * n * k for times, m, n, k in self.products)
        return products + sum(9 * times * n**3 for times, n in self.eigen)


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Momentum, made orthogonal (Jordan, https://kellerjordan.github.io/posts/muon/); as ``torch.optim.Muon``.

    Attributes:
        coefficients: Of the iteration: "jordan", "polar-express" or "you".
        scale: Of an update of a matrix of m rows and n columns: "original", sqrt(max(1, m / n)); "match-rms-adamw",
            0.2 sqrt(max(m, n)); "none".
        dtype: The iteration's.
    """

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    coefficients: str = "jordan"
    steps: int = 5
    eps: float = 1e-7
    scale: Literal["original", "match-rms-adamw", "none"] = "original"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        _within(
            "muon",
            {
                "momentum": (self.momentum, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "steps": (self.steps, 1, 99),
                "eps": (self.eps, 0, 1),
            },
        )
        for key, allowed in (
            ("coefficients", tuple(COEFFICIENTS)),
            ("scale", ("original", "match-rms-adamw", "none")),
            ("dtype", ("bfloat16", "float32")),
        ):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"muon: expected {key} to be one of {', '.join(allowed)}, got {getattr(self, key)!r}")

    @property
    def iteration(self) -> tuple[tuple[float, float, float], ...]:
        """Coefficients of each step."""
        known = COEFFICIENTS[self.coefficients]
        return tuple(known[min(step, len(known) - 1)] for step in range(self.steps))

    def scaled(self, rows: int, columns: int) -> float:
        """Factor of the learning rate for a matrix."""
        if self.scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "match-rms-adamw" else 1.0

    def state_elements(self, rows: int, columns: int) -> tuple[int, int]:
        """Elements of states that are cut as the matrix is, and of those that lie whole with its owner."""
        return rows * columns, 0

    def work(self, rows: int, columns: int) -> Work:
        """A step is two products with the short side a, 2 a a b each, and one of 2 a^3."""
        a, b = sorted((rows, columns))
        return Work(((self.steps, a, a, b), (self.steps, a, a, a), (self.steps, a, b, a)), passes=4)


@dataclass(frozen=True, kw_only=True)
class Shampoo:
    """Gradients between inverse roots of their second moments by rows and columns (Gupta et al., arXiv:1802.09568).

    Factors, filtering, bias corrections and grafting are those of Shi et al., arXiv:2309.06497.

    Attributes:
        beta1, beta2: Decay of the filtered gradient and of both factors.
        eps: Added to the factors' eigenvalues.
        root: "eigen" by decomposition, or "newton" by coupled iteration.
        frequency: Updates between two times the roots are taken.
        start: The first update with roots; before it, what is grafted counts alone.
        grafting: Whose norm an update has: "adam", "sgd" (the filtered gradient's) or "none".
        grafting_eps: Of "adam".
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-12
    weight_decay: float = 0.0
    root: Literal["eigen", "newton"] = "eigen"
    frequency: int = 10
    start: int = 1
    grafting: Literal["adam", "sgd", "none"] = "adam"
    grafting_eps: float = 1e-8

    def __post_init__(self) -> None:
        _within(
            "shampoo",
            {
                "beta1": (self.beta1, 0, 1 - 1e-12),
                "beta2": (self.beta2, 0, 1 - 1e-12),
                "eps": (self.eps, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "frequency": (self.frequency, 1, math.inf),
                "start": (self.start, 1, math.inf),
            },
        )
        for key, allowed in (("root", ("eigen", "newton")), ("grafting", ("adam", "sgd", "none"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(
                    f"shampoo: expected {key} to be one of {', '.join(allowed)}, got {getattr(self, key)!r}"
                )

    def takes_roots(self, update: int, shift: int = 0) -> bool:
        """Whether the roots are taken at this update, counted from 1; ``shift`` staggers matrices."""
        return update == self.start or (update > self.start and (update + shift) % self.frequency == 0)

    def state_elements(self, rows: int, columns: int) -> tuple[int, int]:
        """None is cut: factors and roots, what is filtered, and Adam's second moment where its norm is grafted."""
        return 0, 2 * (rows**2 + columns**2) + (2 if self.grafting == "adam" else 1) * rows * columns

    def work(self, rows: int, columns: int) -> Work:
        """Mean over updates; roots by Newton count as decompositions."""
        products = ((1.0, rows, rows, columns), (1.0, columns, columns, rows), (1.0, rows, columns, rows))
        roots = tuple((1.0 / self.frequency, n) for n in (rows, columns))
        again = tuple((1.0 / self.frequency, n, n, n) for n in (rows, columns))
        return Work((*products, (1.0, rows, columns, columns), *again), roots, passes=8)


@dataclass(frozen=True, kw_only=True)
class SOAP:
    """Adam in the eigenbasis of Shampoo's factors (Vyas et al., https://arxiv.org/abs/2409.11321).

    Attributes:
        beta1, beta2: Decay of Adam's moments, in the eigenbasis.
        factor_beta: Decay of both factors.
        frequency: Updates between two power iterations of the bases.
    """

    beta1: float = 0.95
    beta2: float = 0.95
    factor_beta: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    frequency: int = 10

    def __post_init__(self) -> None:
        _within(
            "soap",
            {
                "beta1": (self.beta1, 0, 1 - 1e-12),
                "beta2": (self.beta2, 0, 1 - 1e-12),
                "factor_beta": (self.factor_beta, 0, 1 - 1e-12),
                "eps": (self.eps, 0, 1),
                "weight_decay": (self.weight_decay, 0, math.inf),
                "frequency": (self.frequency, 1, math.inf),
            },
        )

    def turns_bases(self, update: int, shift: int = 0) -> bool:
        """Whether the bases are turned after this update, counted from 1; ``shift`` staggers matrices."""
        return (update + shift) % self.frequency == 0

    def state_elements(self, rows: int, columns: int) -> tuple[int, int]:
        """None is cut: factors and bases, and both moments."""
        return 0, 2 * (rows**2 + columns**2) + 2 * rows * columns

    def work(self, rows: int, columns: int) -> Work:
        """Mean over updates: into and out of the basis, and the moment when it turns; factors; QR now and then."""
        times = 2 + 2 / self.frequency
        sides = ((times, rows, columns, rows), (times, rows, columns, columns))
        factors = ((1.0, rows, rows, columns), (1.0, columns, columns, rows))
        turned = tuple((1.0 / self.frequency, n, n, n) for n in (rows, columns))
        return Work((*sides, *factors, *turned), tuple((0.15 / self.frequency, n) for n in (rows, columns)), passes=10)


MatrixRule = Muon | Shampoo | SOAP
RuleName = Literal["muon", "shampoo", "soap"]


def make_rule(name: str, settings: Mapping[str, object]) -> MatrixRule:
    """A rule by its name.

    Raises:
        ConfigError: no such rule or setting, or one of another type or out of range.
    """
    kinds: dict[str, type[Muon] | type[Shampoo] | type[SOAP]] = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP}
    if name not in kinds:
        raise ConfigError(f"rule: expected one of {', '.join(kinds)}, got {name!r}")
    known = {field.name: type(field.default) for field in fields(kinds[name])}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"settings: unknown {key!r} of {name}; expected one of {', '.join(known)}")
        if type(value) is not known[key] and not (known[key] is float and type(value) is int):
            raise ConfigError(f"settings: expected {key} of {name} as {known[key].__name__}, got {value!r}")
    return kinds[name](**settings)  # pyright: ignore[reportArgumentType]
