"""Optimizer states in fewer bits: bfloat16 that is rounded at random, and codes of 8 bits with a scale for each block.

[Note: random rounding] A moment that changes by less than half a unit of its last place stays as it is if it is rounded
to the nearest number, step after step. Rounded up with the probability of what is cut off, it is right in the mean. The
random bits of an element are a hash of the bits of its own weight and gradient and of the number of the update: so they
depend on nothing that a plan, a tier, a cut into parts or shards, or an interruption changes, and no generator has a
state to be saved. Elements that are alike in weight and gradient are rounded alike.

[Note: codes] Block-wise dynamic quantization (Dettmers et al., https://arxiv.org/abs/2110.02861): each run of ``BLOCK``
elements, in the order of memory, has the largest magnitude in it as float32 scale, and each element a code, the nearest
of 256 levels between -1 and 1 (0 and 1 for what has no sign), which are the closer the smaller they are. The levels are
those of torchao's ``OptimState8bit`` and of bitsandbytes, and which of two is nearest is torchao's answer to the bit.
The last block may be shorter, as in bitsandbytes; torchao keeps such a parameter's states in float32.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from lading.optim.moment_rule import BLOCK

#: Odd multipliers, as signed numbers of 32 bits, of which products and shifts make a hash (xxHash's primes).
_FIRST, _SECOND, _THIRD = 0x9E3779B1 - (1 << 32), 0x85EBCA77 - (1 << 32), 0xC2B2AE3D - (1 << 32)
#: Multiplier of a gradient's bits, twice the first: no sign is left, as zeros may have either.
_UNSIGNED = 2 * 0x9E3779B1 - (1 << 32)
_LOW_BITS = 0xFFFF
#: Least scale of a block, as torchao has it: of zeros alone it is this.
_LEAST_SCALE = 1e-12
_DECADES = 7


def random_bits(values: torch.Tensor, gradients: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Hash float32 weights, gradients and the number of the update to 32 bits each. See [Note: random rounding].

    Args:
        step: Scalar.
    Returns:
        int32, of the shape of ``values``.
    """
    number = step.to(torch.int32).mul_(_FIRST).bitwise_xor_(_SECOND).bitwise_or_(1)
    bits = torch.add(values.view(torch.int32), gradients.view(torch.int32), alpha=_UNSIGNED).mul_(number)
    return bits.bitwise_xor_(bits >> 15).mul_(_THIRD)


def round_at_random(wide: torch.Tensor, bits: torch.Tensor, place: torch.Tensor) -> None:
    """Round float32 numbers, which are overwritten, to bfloat16 ones in ``place``, by the low 16 of random ``bits``."""
    cut = wide.view(torch.int32)
    cut.add_(bits & _LOW_BITS).bitwise_and_(~_LOW_BITS)
    place.copy_(wide)


def levels(*, signed: bool) -> torch.Tensor:
    """Make the 256 levels that codes stand for, in ascending order, float32.

    The numbers of each decade, down to 1e-7, are the means of equal parts of it, twice as many in each as in the one
    below; then zero and one. See [Note: codes].
    """
    decades: list[torch.Tensor] = []
    for decade in range(_DECADES):
        ends = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
        decades.append((ends[:-1] + ends[1:]) / 2 * 10 ** (decade - _DECADES + 1))
    numbers = torch.cat(decades)
    negative = [-numbers] if signed else []
    return torch.cat([*negative, numbers, torch.tensor([0.0, 1.0])]).sort().values


@lru_cache(maxsize=8)
def _tables(signed: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels; the least number of each code's next; and by a number's first 16 bits the code of the least such number.

    Two numbers that begin with the same 16 bits have codes that differ by one at most.
    """
    known = levels(signed=signed)
    starts = _next_starts(known)
    first = torch.arange(1 << 16, dtype=torch.int32)
    last_bits = (first >> 15) * _LOW_BITS  # of negative numbers the least is the one farthest from zero
    least = ((first << 16) | last_bits).view(torch.float32).nan_to_num_(0.0)
    codes = torch.bucketize(least, starts, right=True, out_int32=True)
    starts = torch.cat([starts, torch.tensor([torch.inf])])
    return known.to(device), starts.to(device), codes.to(device)


def _next_starts(known: torch.Tensor) -> torch.Tensor:
    """Find for each level but the last the least float32 that is as near to the next one, or nearer, as torchao says.

    It asks ``number - level >= (next - level) * 0.5``, each operation rounded.
    """
    low, high = known[:-1], known[1:]
    lower, upper = (_ordered(end.view(torch.int32).long()) for end in (low, high))
    for _ in range(32):
        middle = (lower + upper) // 2
        number = _ordered(middle).to(torch.int32).view(torch.float32)
        is_next = number - low >= (high - low) * 0.5
        lower, upper = torch.where(is_next, lower, middle), torch.where(is_next, middle, upper)
    return _ordered(upper).to(torch.int32).view(torch.float32)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """Turn float32's bits, int64, to integers in the order of the numbers, or back."""
    return torch.where(bits < 0, -(1 << 31) - bits, bits)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Make the float32 numbers that codes, (elements,) of uint8, stand for; ``scales`` has one float32 a block."""
    made = _tables(signed, codes.device)[0].index_select(0, codes.int())
    for part, scale in _by_blocks(made, scales):
        part.mul_(scale)
    return made


def quantize(numbers: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Write numbers, (elements,) of float32, which are overwritten, as codes and scales. See [Note: codes]."""
    for part, scale in _by_blocks(numbers, scales):
        torch.linalg.vector_norm(part, torch.inf, dim=1, keepdim=True, out=scale)
        part.div_(scale.clamp_(min=_LEAST_SCALE))
    _, starts, first = _tables(signed, numbers.device)
    begins = (numbers.view(torch.int32) >> 16).bitwise_and_(_LOW_BITS)
    found = first.index_select(0, begins)
    found.add_(numbers >= torch.index_select(starts, 0, found, out=begins.view(torch.float32)))
    codes.copy_(found)


def _by_blocks(numbers: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of whole blocks, (blocks, BLOCK), with their scales, (blocks, 1), and of a shorter last one."""
    whole = numbers.numel() // BLOCK
    split = whole * BLOCK
    pairs = [(numbers[:split].view(whole, BLOCK), scales[:whole].view(whole, 1))]
    return [*pairs, (numbers[split:].view(1, -1), scales[whole:].view(1, 1))] if split < numbers.numel() else pairs
