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
The last block may be shorter, as in bitsandbytes; torchao keeps such a parameter's states in float32. Codes count from
that of zero (those of torchao with sign, but for their lowest seven bits turned over), so that what was never written
is zero: elements with which shards are filled up, too.
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
#: Place of zero among the levels with sign; a code is a level's place with these bits turned over.
_ZERO = 127
_DECADES = 7


def random_bits(
    values: torch.Tensor, gradients: torch.Tensor, step: torch.Tensor, out: torch.Tensor, spare: torch.Tensor
) -> torch.Tensor:
    """Hash float32 weights, gradients and the number of the update to 32 bits each. See [Note: random rounding].

    Args:
        step: Scalar.
        out, spare: int32, of the shape of ``values``; the second is overwritten.
    """
    number = step.to(torch.int32).mul_(_FIRST).bitwise_xor_(_SECOND).bitwise_or_(1)
    torch.add(values.view(torch.int32), gradients.view(torch.int32), alpha=_UNSIGNED, out=out).mul_(number)
    return out.bitwise_xor_(torch.bitwise_right_shift(out, 15, out=spare)).mul_(_THIRD)


def round_at_random(wide: torch.Tensor, bits: torch.Tensor, place: torch.Tensor, spare: torch.Tensor) -> None:
    """Round float32 numbers to bfloat16 ones in ``place``, by the low 16 of random ``bits``.

    Args:
        wide: Numbers, which are overwritten.
        spare: int32, of their shape, overwritten.
    """
    cut = wide.view(torch.int32)
    cut.add_(torch.bitwise_and(bits, _LOW_BITS, out=spare)).bitwise_and_(~_LOW_BITS)
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
    """Levels by code; the least number of each level; and by 16 bits the level behind that of the least such number.

    Two numbers that begin with the same 16 bits have levels that differ by one at most.
    """
    values = levels(signed=signed)
    starts = _next_starts(values)
    first = torch.arange(1 << 16, dtype=torch.int32)
    last_bits = (first >> 15) * _LOW_BITS  # of negative numbers the least is the one farthest from zero
    smallest = ((first << 16) | last_bits).view(torch.float32).nan_to_num_(0.0)
    behind = torch.bucketize(smallest, starts, right=True, out_int32=True) + 1
    ends = torch.tensor([torch.inf])
    by_code = values[torch.arange(256) ^ _ZERO] if signed else values
    return by_code.to(device), torch.cat([-ends, starts, ends]).to(device), behind.to(device)


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


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, *, signed: bool, out: torch.Tensor, spare: torch.Tensor
) -> torch.Tensor:
    """Make the float32 numbers, in ``out``, that codes stand for.

    Args:
        codes: (elements,), uint8.
        scales: (blocks,), float32.
        spare: (elements,), int32, overwritten.
    """
    torch.index_select(_tables(signed, codes.device)[0], 0, spare.copy_(codes), out=out)
    for part, scale in _by_blocks(out, scales):
        part.mul_(scale)
    return out


def quantize(
    numbers: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    signed: bool,
    spare: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write numbers as codes and scales. See [Note: codes].

    Args:
        numbers: (elements,), float32, overwritten.
        spare: Two of (elements,), int32, overwritten.
    """
    begins, codes_found = spare
    sizes = torch.abs(numbers, out=codes_found.view(torch.float32))
    for (part, scale), (size, _) in zip(_by_blocks(numbers, scales), _by_blocks(sizes, scales), strict=True):
        torch.amax(size, 1, keepdim=True, out=scale)
        part.div_(scale.clamp_(min=_LEAST_SCALE))
    _, starts, behind = _tables(signed, numbers.device)
    bits = numbers.view(torch.int32)
    torch.bitwise_right_shift(bits, 16, out=begins).bitwise_and_(_LOW_BITS)
    torch.index_select(behind, 0, begins, out=codes_found)
    numbers.sub_(torch.index_select(starts, 0, codes_found, out=begins.view(torch.float32)))
    codes_found.add_(torch.bitwise_right_shift(bits, 31, out=bits))  # one level less of what lies below its start
    codes.copy_(codes_found.bitwise_xor_(_ZERO) if signed else codes_found)


def _by_blocks(numbers: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of whole blocks, (blocks, BLOCK), with their scales, (blocks, 1), and of a shorter last one."""
    num_full_blocks = numbers.numel() // BLOCK
    split = num_full_blocks * BLOCK
    pairs = [(numbers[:split].view(num_full_blocks, BLOCK), scales[:num_full_blocks].view(num_full_blocks, 1))]
    return (
        [*pairs, (numbers[split:].view(1, -1), scales[num_full_blocks:].view(1, 1))]
        if split < numbers.numel()
        else pairs
    )
