"""Rules against the optimizers that their authors or PyTorch ship, and against formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from pytorch_optimizer.optimizer.soap import SOAP as PublishedSOAP

from lading.errors import ConfigError
from lading.optim.adamw import AdamW
from lading.optim.muon import COEFFICIENTS, Muon, MuonRule, orthogonal, orthogonal_stack
from lading.optim.roots import RootError, eigen_root, newton_root
from lading.optim.rule import Rule, StatePlace, fresh, update_matrix
from lading.optim.shampoo import Shampoo, ShampooRule
from lading.optim.soap import SOAP, SOAPRule
from lading.runtime.members import PieceRule

SHAPES = [(12, 20), (20, 12), (16, 16), (1, 8)]
RULES: list[Rule] = [
    MuonRule(Muon()),
    MuonRule(Muon(dtype="float32", coefficients="polar-express", nesterov=False, scale="match-rms-adamw")),
    ShampooRule(Shampoo(frequency=3, eps=1e-6)),
    SOAPRule(SOAP(frequency=3)),
]


def drawn(shape: tuple[int, int], updates: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(shape[0] * 100 + shape[1])
    return torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(updates)]


def run(rule: Rule, param: torch.Tensor, grads: list[torch.Tensor], lr: float) -> torch.Tensor:
    moved = param.clone()
    held, whole = fresh(rule, (param.shape[0], param.shape[1]), param.dtype)
    for number, grad in enumerate(grads, 1):
        update_matrix(rule, moved, grad, held, whole, lr=lr, update=number)
    return moved


def run_optimizer(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: list[torch.Tensor]):
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [("original", None), ("match-rms-adamw", "match_rms_adamw")])
def test_muon_is_torchs_to_the_bit(shape: tuple[int, int], nesterov: bool, ours: str, theirs: str | None):
    param, grads = drawn(shape, 6)
    settings = Muon(nesterov=nesterov, scale=ours)  # pyright: ignore[reportArgumentType]
    leaf = torch.nn.Parameter(param.clone())
    reference = torch.optim.Muon([leaf], lr=0.02, nesterov=nesterov, adjust_lr_fn=theirs)
    assert torch.equal(run(MuonRule(settings), param, grads, 0.02), run_optimizer(reference, leaf, grads))


def polar_express(matrix: np.ndarray, steps: int) -> np.ndarray:
    """Algorithm 1 of https://arxiv.org/abs/2505.16932, in float64 and on singular values."""
    raw = [
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    ]
    safe = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in raw] + [(1.875, -1.25, 0.375)] * steps
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / (np.linalg.norm(matrix) * 1.01 + 1e-7)
    for a, b, c in safe[:steps]:
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 3e-2)])
def test_polar_express_is_its_authors(shape: tuple[int, int], steps: int, dtype: str, tolerance: float):
    matrix = drawn(shape, 0)[0]
    settings = Muon(coefficients="polar-express", steps=steps, dtype=dtype)  # pyright: ignore[reportArgumentType]
    found = orthogonal(matrix, settings.iteration, settings.eps, getattr(torch, dtype)).double().numpy()
    assert np.abs(found - polar_express(matrix.double().numpy(), steps)).max() < tolerance


def muon_in_float64(param: np.ndarray, grads: list[np.ndarray], s: Muon, lr: float) -> np.ndarray:
    """Jordan, https://kellerjordan.github.io/posts/muon/, with the scale of Liu et al., arXiv:2502.16982."""
    rows, columns = param.shape
    scale = {"original": max(1, rows / columns) ** 0.5, "match-rms-adamw": 0.2 * max(rows, columns) ** 0.5, "none": 1.0}
    momentum = np.zeros_like(param)
    for g in grads:
        momentum = s.momentum * momentum + (1 - s.momentum) * g
        ahead = (1 - s.momentum) * g + s.momentum * momentum if s.nesterov else momentum
        if s.coefficients == "polar-express":
            direction = polar_express(ahead, s.steps)
        else:
            left, values, right = np.linalg.svd(ahead, full_matrices=False)
            values = values / np.linalg.norm(ahead)
            for _ in range(s.steps):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            direction = (left * values) @ right
        param = param * (1 - lr * s.weight_decay) - lr * scale[s.scale] * direction
    return param


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("coefficients", ["jordan", "polar-express"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match-rms-adamw", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 4e-2)])
def test_muon_is_its_formula(
    shape: tuple[int, int], coefficients: str, nesterov: bool, scale: str, dtype: str, tolerance: float
):
    settings = Muon(coefficients=coefficients, nesterov=nesterov, scale=scale, dtype=dtype)  # pyright: ignore[reportArgumentType]
    param, grads = drawn(shape, 8)
    found = run(MuonRule(settings), param, grads, 0.02).double().numpy()
    expected = muon_in_float64(param.double().numpy(), [g.double().numpy() for g in grads], settings, 0.02)
    assert np.abs(found - expected).max() < tolerance * np.abs(expected - param.double().numpy()).max()


@pytest.mark.parametrize("shape", [(12, 20), (7,), (3, 4, 5)])
def test_adamw_is_torchs_to_the_bit(shape: tuple[int, ...]):
    settings = AdamW(lr=3e-3, beta1=0.8, beta2=0.95, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator)
    leaf, rule = torch.nn.Parameter(param.clone()), PieceRule(settings)
    held = {name: torch.zeros(shape) for name in rule.state_specs(shape)}
    reference = torch.optim.AdamW([leaf], lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, foreach=False, fused=False)
    for update in range(1, 7):
        leaf.grad = torch.randn(shape, generator=generator)
        rule.step(param, leaf.grad, held, lr=3e-3, update=update)
        reference.step()
        assert torch.equal(param, leaf.detach())


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_iterations_make_orthogonal(name: str):
    matrix = drawn((24, 40), 0)[0]
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    settings = Muon(coefficients=name, steps=8 if name == "polar-express" else 5, dtype="float32")
    found = orthogonal(matrix, settings.iteration, settings.eps, torch.float32)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.65
    assert float(values.max()) < 1.25
    # Polar Express goes all the way; the others stop in a band around 1.
    assert float((found - left @ right).abs().max()) < (2e-3 if name == "polar-express" else 0.25)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_soap_is_the_published_one(shape: tuple[int, int]):
    param, grads = drawn(shape, 25)
    leaf = torch.nn.Parameter(param.clone())
    published = run_optimizer(PublishedSOAP([leaf], lr=3e-3), leaf, grads)
    # The published code keeps the first moment in the weights' basis: the same but for rounding.
    assert float((run(SOAPRule(SOAP()), param, grads, 3e-3) - published).abs().max()) < 1e-4 * float(
        (published - param).abs().max()
    )


def shampoo_in_float64(param: np.ndarray, grads: list[np.ndarray], s: Shampoo, lr: float) -> np.ndarray:
    """Shi et al., arXiv:2309.06497, algorithm 2 with the norm of Adam, of the filtered gradient, or its own."""
    rows, columns = param.shape
    left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
    mean, square = np.zeros_like(param), np.zeros_like(param)
    roots = (left, right)
    sides = [n <= s.max_preconditioner_dim for n in param.shape]
    for t, g in enumerate(grads, 1):
        left, right = s.beta2 * left + (1 - s.beta2) * g @ g.T, s.beta2 * right + (1 - s.beta2) * g.T @ g
        mean, square = s.beta1 * mean + (1 - s.beta1) * g, s.beta2 * square + (1 - s.beta2) * g * g
        bias = 1 - s.beta2**t
        if t == s.start or (t > s.start and t % s.frequency == 0):
            taken: list[np.ndarray] = []
            for factor, has_factor in zip((left, right), sides, strict=True):
                values, vectors = np.linalg.eigh(factor / bias)
                power = -1 / (2 * sum(sides)) if has_factor else 0  # of a side without factor: 1
                taken.append((vectors * (values - min(values[0], 0) + s.eps) ** power) @ vectors.T)
            roots = (taken[0], taken[1])
        filtered = mean / (1 - s.beta1**t)
        grafted = filtered / (np.sqrt(square / bias) + s.grafting_eps) if s.grafting == "adam" else filtered
        found = grafted if t < s.start or not any(sides) else roots[0] @ filtered @ roots[1]
        found = found if s.grafting == "none" else found * np.linalg.norm(grafted) / np.linalg.norm(found)
        param = param * (1 - lr * s.weight_decay) - lr * found
    return param


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("start", [1, 8])
@pytest.mark.parametrize("root", ["eigen", "newton"])
@pytest.mark.parametrize("grafting", ["adam", "sgd", "none"])
def test_shampoo_is_its_formula(shape: tuple[int, int], start: int, root: str, grafting: str):
    settings = Shampoo(beta2=0.99, eps=1e-2, weight_decay=0.1, frequency=4, start=start, root=root, grafting=grafting)  # pyright: ignore[reportArgumentType]
    param, grads = drawn(shape, 20)
    found = run(ShampooRule(settings), param, grads, 1e-2).numpy()
    expected = shampoo_in_float64(param.double().numpy(), [g.double().numpy() for g in grads], settings, 1e-2)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected - param.numpy()).max()


@pytest.mark.parametrize(("limit", "sides"), [(19, {"left"}), (20, {"left", "right"}), (11, set())])
@pytest.mark.parametrize("grafting", ["adam", "none"])
def test_shampoo_leaves_out_factors_above_a_limit(limit: int, sides: set[str], grafting: str):
    """Neither states, work nor scratch have them; what is left has the root of its number."""
    options = {"beta2": 0.99, "eps": 1e-2, "frequency": 4, "grafting": grafting}
    settings = Shampoo(max_preconditioner_dim=limit, **options)  # pyright: ignore[reportArgumentType]
    param, grads = drawn((12, 20), 12)
    found = run(ShampooRule(settings), param, grads, 1e-2).numpy()
    expected = shampoo_in_float64(param.double().numpy(), [g.double().numpy() for g in grads], settings, 1e-2)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected - param.numpy()).max()
    assert {"left", "right"} & settings.state_specs(12, 20).keys() == sides
    assert [n for _, n in settings.work(12, 20).eigen] == [{"left": 12, "right": 20}[side] for side in sorted(sides)]
    turned = run(ShampooRule(settings), param.T.contiguous(), [g.T.contiguous() for g in grads], 1e-2).numpy()
    assert np.abs(turned.T - expected).max() < 1e-3 * np.abs(expected - param.numpy()).max()


def test_both_roots_agree():
    factor = drawn((24, 60), 0)[0]
    factor = factor @ factor.T / 60
    by_eigenvalues, by_newton = eigen_root(factor, 4, 1e-6), newton_root(factor, 4, 1e-6)
    assert float((by_eigenvalues - by_newton).abs().max()) < 1e-4 * float(by_eigenvalues.abs().max())
    whole = torch.linalg.matrix_power(by_newton.double(), 4) @ factor.double()
    assert float((whole - torch.eye(24)).abs().max()) < 1e-3


def test_a_root_that_cannot_be_taken_is_said():
    with pytest.raises(RootError, match=r"factor of 3 rows.*ending below 1e-3.*larger eps"):
        newton_root(torch.diag(torch.tensor([1.0, 1.0, -1.0])), 4, 1e-12)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_pieces_give_the_bits_of_the_whole(rule: Rule):
    """``pre`` and ``post`` on pieces of any shape, ``direction`` on what was put together."""
    (rows, columns), cuts = (
        (12, 20),
        [(slice(0, 5), slice(0, 20)), (slice(5, 12), slice(0, 7)), (slice(5, 12), slice(7, 20))],
    )
    param, grads = drawn((rows, columns), 5)
    expected = run(rule, param, grads, 0.02)
    pieces = [param[cut].clone() for cut in cuts]
    states = rule.settings.state_specs(rows, columns)
    elementwise = [name for name, state in states.items() if state.place is StatePlace.ELEMENTWISE]
    held = [{name: torch.zeros(piece.shape) for name in elementwise} for piece in pieces]
    _, whole = fresh(rule, (rows, columns), torch.float32)
    for update, grad in enumerate(grads, 1):
        matrix = torch.empty(rows, columns, dtype=rule.travels or torch.float32)
        for cut, own in zip(cuts, held, strict=True):
            matrix[cut] = rule.pre(grad[cut].contiguous(), own, update)
        direction = rule.direction(matrix, whole, update)
        for cut, piece in zip(cuts, pieces, strict=True):
            rule.post(piece, direction[cut].contiguous(), (rows, columns), lr=0.02, update=update)
    for cut, piece in zip(cuts, pieces, strict=True):
        assert torch.equal(piece, expected[cut])


def test_a_matrix_cut_in_two_is_another_update():
    """The negative control: what is not given the whole matrix computes something else."""
    param, grads = drawn((12, 20), 3)
    halves = torch.cat(
        [run(RULES[1], param[:6], [g[:6] for g in grads], 0.02), run(RULES[1], param[6:], [g[6:] for g in grads], 0.02)]
    )
    assert not torch.allclose(halves, run(RULES[1], param, grads, 0.02), atol=1e-3)


@pytest.mark.parametrize("rule", [*RULES, ShampooRule(Shampoo(grafting="sgd"))])
def test_states_are_as_many_as_a_plan_counts(rule: Rule):
    states = rule.settings.state_specs(12, 20).values()
    cut, whole = (
        sum(int(np.prod(s.shape)) for s in states if s.place is held)
        for held in (StatePlace.ELEMENTWISE, StatePlace.WHOLE)
    )
    assert rule.settings.state_elements(12, 20) == (cut, whole)


@pytest.mark.parametrize("due", [Shampoo(frequency=5).takes_roots, SOAP(frequency=5).turns_bases])
def test_staggered_matrices_take_turns(due: Callable[[int, int], bool]):
    """Of five matrices one is due at each update; together they would make every fifth step long."""
    assert [[shift for shift in range(5) if due(update, shift)] for update in range(10, 15)] == [
        [0],
        [4],
        [3],
        [2],
        [1],
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_is_made_orthogonal_as_its_matrices_are(shape: tuple[int, int]):
    matrices, steps = drawn(shape, 3)[1], COEFFICIENTS["you"]
    alone = torch.stack([orthogonal(matrix, steps, 1e-7, torch.float32) for matrix in matrices])
    torch.testing.assert_close(orthogonal_stack(torch.stack(matrices), steps, 1e-7, torch.float32), alone)


def test_work_counts_the_cube():
    square, long = Muon().work(64, 64), Muon().work(64, 640)
    assert square.flops == 5 * (4 * 64**3 + 2 * 64**3)
    assert long.flops == 5 * (4 * 64 * 64 * 640 + 2 * 64**3)
    assert SOAP(frequency=1).work(64, 64).flops > SOAP(frequency=10).work(64, 64).flops


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Muon(momentum=1.5), "muon: expected momentum from 0 to 1, got 1.5"),
        (lambda: Muon(coefficients="jordon"), "expected coefficients to be one of jordan, polar-express, you"),
        (lambda: Shampoo(frequency=0), "shampoo: expected frequency >= 1"),
        (lambda: SOAP(eps=-1.0), "soap: expected eps from 0 to 1"),
    ],
)
def test_settings_that_cannot_be(made, message: str):
    with pytest.raises(ConfigError, match=message):
        made()
