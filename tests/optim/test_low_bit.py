"""States in fewer bits: codes that are torchao's, rounding that is right in the mean, and updates of plain PyTorch."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from lading.errors import ConfigError
from lading.optim import low_bit
from lading.optim.adam import Adam
from lading.optim.adamw import AdamW
from lading.optim.low_bit import levels
from lading.optim.moment_rule import BLOCK, MomentRule
from lading.optim.plain import PlainOptimizer
from lading.optim.rule import AT_ONCE

FORMATED: list[MomentRule] = [
    *(AdamW(beta1=0.8, beta2=0.95, weight_decay=0.1, states=states) for states in ("fp32", "bf16", "8bit")),
    Adam(beta1=0.8, beta2=0.95, weight_decay=0.1, states="8bit"),
]
#: SHA-256 of the bytes of torchao's maps, float32: ``torchao.optim.subclass_8bit.get_qmap_signed()`` and its sibling.
SIGNED = "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c"
UNSIGNED = "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398"


def as_torchao(numbers: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Codes of numbers of at most 1 by the rule of torchao, one comparison with each of all levels."""
    known = levels(signed=signed)  # in ascending order
    down = (numbers[:, None] >= known).sum(1).sub(1).clamp(min=0)
    up = (down + 1).clamp(max=255)
    rounds_up = numbers - known[down] >= (known[up] - known[down]) * 0.5
    return torch.where(rounds_up, up, down) ^ (127 if signed else 0)  # so that zero is code 0


def spare(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.int32)


def random_bits(values: torch.Tensor, gradients: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return low_bit.random_bits(values, gradients, step, spare(values), spare(values))


def rounded_at_random(numbers: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    place = torch.empty(numbers.shape, dtype=torch.bfloat16)
    low_bit.round_at_random(numbers.clone(), bits, place, spare(numbers))
    return place.float()


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    return low_bit.dequantize(codes, scales, signed=signed, out=torch.empty(codes.shape), spare=spare(codes))


def codes_of(numbers: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-numbers.numel() // BLOCK)
    codes, scales = torch.zeros(numbers.numel(), dtype=torch.uint8), torch.zeros(blocks)
    low_bit.quantize(numbers.clone(), codes, scales, signed=signed, spare=(spare(numbers), spare(numbers)))
    return codes, scales


@pytest.mark.parametrize(("signed", "digest"), [(True, SIGNED), (False, UNSIGNED)])
def test_levels_are_those_of_torchao_and_bitsandbytes(signed: bool, digest: str) -> None:
    known = levels(signed=signed)
    assert known.shape == (256,)
    assert bool((known.diff() > 0).all())
    assert hashlib.sha256(known.numpy().tobytes()).hexdigest() == digest


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_levels_as_torchao_rounds(signed: bool) -> None:
    """Of numbers at and beside every level and every mean of two, and of random ones of every size."""
    known = levels(signed=signed)
    edges = torch.cat([known, (known[1:] + known[:-1]) / 2, torch.tensor([0.0, -0.0 if signed else 0.0])])
    beside = [edges]
    for way in (torch.tensor(2.0), torch.tensor(-2.0)):
        beside += [near := torch.nextafter(edges, way), torch.nextafter(near, way)]
    torch.manual_seed(0)
    drawn = torch.randn(20_000) * 10 ** torch.empty(20_000).uniform_(-9, 0)
    numbers = torch.cat([*beside, drawn]).clamp(-1 if signed else 0, 1)
    numbers = torch.cat([numbers, torch.zeros(-len(numbers) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    one = torch.ones(len(numbers), 1)  # of which each block has one, so that its scale is 1
    numbers = torch.cat([numbers, one], 1).flatten()
    codes, scales = codes_of(numbers, signed=signed)
    assert bool((scales == 1).all())
    assert torch.equal(codes.long(), as_torchao(numbers, signed=signed))
    assert torch.equal(dequantize(codes, scales, signed=signed), known[codes.long() ^ (127 if signed else 0)])


def test_each_block_has_its_scale_and_the_last_may_be_short() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(2 * BLOCK + 7) * 1e-3
    numbers[:BLOCK] *= 1e6
    codes, scales = codes_of(numbers, signed=True)
    blocks = numbers.split(BLOCK)
    assert scales.tolist() == [block.abs().max().item() for block in blocks]
    for block, scale, code in zip(blocks, scales, codes.split(BLOCK), strict=True):
        assert torch.equal(code.long(), as_torchao(block / scale, signed=True))
    near = dequantize(codes, scales, signed=True)
    assert bool(((near - numbers).abs() <= 0.0071 * scales.repeat_interleave(BLOCK)[: len(numbers)]).all())


def test_zeros_stay_zeros_and_what_is_no_number_is_seen() -> None:
    zeros = torch.zeros(BLOCK)
    for signed in (True, False):
        assert torch.equal(dequantize(*codes_of(zeros, signed=signed), signed=signed), zeros)
        fresh = dequantize(torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(1), signed=signed)
        assert torch.equal(fresh, zeros)  # states before the first update
    broken = torch.randn(2 * BLOCK)
    broken[3] = math.nan
    near = dequantize(*codes_of(broken, signed=True), signed=True)
    assert bool(near[:BLOCK].isnan().all())
    assert bool(near[BLOCK:].isfinite().all())


@pytest.mark.parametrize("half", [0, 16])
def test_random_rounding_is_right_in_the_mean(half: int) -> None:
    """Over elements in one update; over updates for one element, whose weight and gradient stay as they are."""
    torch.manual_seed(0)
    values, gradients = torch.randn(1 << 16), torch.randn(1 << 16)
    weights = torch.tensor([0.1, -0.02, 1.5e-3, 0.25])  # the last has few bits
    still = torch.stack([random_bits(weights, torch.zeros(4), torch.tensor(float(n))) for n in range(1, 4097)])
    for share in (1 / 64, 0.3, 0.5, 0.9):
        low, high = torch.tensor(1.0), torch.tensor(1.0 + 2**-7)
        number = low + share * (high - low)

        def rounded(bits: torch.Tensor, number: torch.Tensor = number) -> torch.Tensor:
            return rounded_at_random(number.expand(bits.shape), bits >> half)

        together = rounded(random_bits(values, gradients, torch.tensor(3.0)))
        for got, count in ((together, 1 << 16), *((each, 4096) for each in rounded(still).unbind(1))):
            assert set(got.tolist()) <= {low.item(), high.item()}
            ups = (got == high).float().mean().item()
            assert abs(ups - share) < 5 * (share * (1 - share) / count) ** 0.5


def test_what_bfloat16_has_is_kept_whatever_the_bits() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf, 2.0**-126]).repeat(64)
    assert torch.equal(rounded_at_random(exact, torch.full(exact.shape, -1, dtype=torch.int32)), exact)


def test_random_bits_ask_for_no_sign_of_a_zero() -> None:
    weights, step = torch.randn(64), torch.tensor(5.0)
    assert torch.equal(random_bits(weights, torch.zeros(64), step), random_bits(weights, -torch.zeros(64), step))
    assert not torch.equal(random_bits(weights, torch.zeros(64), step), random_bits(weights, torch.zeros(64), step + 1))


def reference(rule: MomentRule, param: torch.nn.Parameter, states: dict[str, torch.Tensor], step: int) -> None:
    """Update by torch's own optimizer on moments that are widened before and narrowed after."""
    wide = {name: states[name].float() for name in ("exp_avg", "exp_avg_sq")}
    if rule.states == "8bit":
        for name, codes in (("exp_avg", states["exp_avg"]), ("exp_avg_sq", states["exp_avg_sq"])):
            scales = states[f"{name}_scale"].repeat_interleave(BLOCK)[: codes.numel()]
            is_signed = name == "exp_avg"
            wide[name] = levels(signed=is_signed)[codes.long() ^ (127 if is_signed else 0)] * scales
    kind = torch.optim.AdamW if isinstance(rule, AdamW) else torch.optim.Adam
    numbers = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps, "weight_decay": rule.weight_decay}
    optimizer = kind([param], lr=rule.lr, fused=True, **numbers)
    optimizer.state[param] = {"step": torch.tensor(float(step - 1)), **wide}
    assert param.grad is not None
    bits = random_bits(param.detach(), param.grad, torch.tensor(float(step)))
    optimizer.step()
    for number, name in enumerate(("exp_avg", "exp_avg_sq")):
        now = optimizer.state[param][name]
        if rule.states == "8bit":
            scales = torch.stack([block.abs().max() for block in now.split(BLOCK)]).clamp(min=1e-12)
            states[f"{name}_scale"] = scales
            scaled = now / scales.repeat_interleave(BLOCK)[: now.numel()]
            states[name] = as_torchao(scaled, signed=name == "exp_avg").to(torch.uint8)
        elif rule.states == "bf16":
            cut = now.view(torch.int32)
            ups = ((cut & 0xFFFF) + ((bits >> 16 * number) & 0xFFFF)) >> 16
            states[name] = ((cut & ~0xFFFF) + (ups << 16)).view(torch.float32).bfloat16()
        else:
            states[name] = now


@pytest.mark.parametrize("rule", FORMATED, ids=str)
def test_updates_are_torchs_on_widened_states_to_the_bit(rule: MomentRule) -> None:
    torch.manual_seed(0)
    count = 16 * BLOCK + 3
    start = torch.randn(count)
    ours, theirs, param = start.clone(), torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    plain = rule.plain([param])
    specs = rule.state_specs((count,))
    states = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    wanted = {name: state.clone() for name, state in states.items()}
    for step in range(1, 6):
        grad = torch.randn(count) * torch.linspace(1e-4, 2, count)
        theirs.grad, param.grad = grad.clone(), grad.clone()
        rule.update(ours, grad, states, lr=rule.lr, step=torch.tensor(float(step)))
        reference(rule, theirs, wanted, step)
        plain.step()
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, param)
        for name, state in states.items():
            assert torch.equal(state, wanted[name]), name
            assert torch.equal(state, plain.state[param][name]), name
    assert isinstance(plain, PlainOptimizer)


@pytest.mark.parametrize("rule", FORMATED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_at_whole_blocks_give_the_bits_of_the_whole(rule: MomentRule, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    count = 64 * BLOCK + 5
    start, specs = torch.randn(count).to(dtype), rule.state_specs((count,))

    def updated(size: int) -> list[torch.Tensor]:
        param = start.clone()
        states = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        drawn = torch.Generator().manual_seed(1)
        for step in (1.0, 2.0, 3.0):
            grad = torch.randn(count, generator=drawn).to(dtype)
            for at in range(0, count, size):
                parts = {
                    name: state[at // specs[name].block : -(-(at + size) // specs[name].block)]
                    for name, state in states.items()
                }
                rule.update(param[at : at + size], grad[at : at + size], parts, lr=1e-2, step=torch.tensor(step))
        return [param, *states.values()]

    whole = updated(count)
    assert not torch.equal(whole[0], start)
    for size in (1024, 16 * 1024):
        assert all(map(torch.equal, updated(size), whole)), size


@pytest.mark.parametrize("rule", FORMATED, ids=str)
def test_a_parameter_may_lie_in_any_order(rule: MomentRule) -> None:
    """As a convolution's weight, channels last, whose gradient does not: blocks follow the parameter's memory."""
    torch.manual_seed(0)
    start, grad = torch.randn(32, 16, 3, 3), torch.randn(32, 16, 3, 3)
    turned = torch.nn.Parameter(start.to(memory_format=torch.channels_last))
    flat = torch.nn.Parameter(start.permute(0, 2, 3, 1).flatten())
    turned.grad, flat.grad = grad, grad.permute(0, 2, 3, 1).flatten()
    for param in (turned, flat):
        optimizer = rule.plain([param])
        optimizer.step()
        optimizer.step()
    assert turned.grad.stride() != turned.stride()
    assert torch.equal(turned.detach().permute(0, 2, 3, 1).flatten(), flat.detach())


def test_small_parameters_keep_float32_and_large_ones_a_quarter() -> None:
    rule = AdamW(states="8bit")
    assert rule.of_size(4095) == AdamW(states="fp32")
    assert rule.of_size(4096) == rule
    specs = rule.state_specs((64, 65))
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "exp_avg": ((64, 65), "uint8"),
        "exp_avg_sq": ((64, 65), "uint8"),
        "exp_avg_scale": ((17,), "float32"),
        "exp_avg_sq_scale": ((17,), "float32"),
    }
    bytes_each = 4 * rule.state_numbers((1024, 1024)) / 1024**2
    assert bytes_each == 2 * (1 + 4 / 256)
    assert 4 * AdamW(states="bf16").state_numbers((1024, 1024)) / 1024**2 == 4


def test_pieces_that_are_worked_on_at_once_are_whole_blocks() -> None:
    assert all(size % BLOCK == 0 for size in AT_ONCE.values())


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_another_format_is_refused_by_its_choices(kind: type[MomentRule]) -> None:
    with pytest.raises(ConfigError, match=r"states: expected one of auto, fp32, bf16, 8bit, got '8bits'.*'8bit'"):
        kind(states="8bits")  # pyright: ignore[reportArgumentType]


def test_pieces_of_ranks_are_refused() -> None:
    param = torch.ones(64, 64)
    with pytest.raises(ConfigError, match=r"expected AdamW with states .auto. on pieces .*, got '8bit'"):
        AdamW(states="8bit").update_piece(param, param, {}, lr=1e-3, update=1)
