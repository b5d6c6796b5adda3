"""Rules of the mean and the mean square of gradients, Adam's and AdamW's, and the formats in which they keep both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from lading.errors import ConfigError, check_number, did_you_mean
from lading.optim.rule import ParameterRule, States, StateSpec

if TYPE_CHECKING:
    import torch

StateFormat = Literal["auto", "fp32", "bf16", "8bit"]
#: Elements that share a scale in 8 bits; and the least elements of a parameter whose states are kept so, as fewer save
#: nothing and are often norms and biases (bitsandbytes, ``min_8bit_size``; torchao has the same).
BLOCK, LEAST_ELEMENTS = 256, 4096
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"


#: Elements that are widened at once by kind of device: few enough for a cache, many enough to hide launches.
_WIDENED = {"cpu": 1 << 18, "cuda": 1 << 22}
#: Numbers of room that an update takes for each of these: weight and gradient of fewer bits, two moments, spare ones.
_ROWS = 6


@dataclass(frozen=True, slots=True)
class _FormatCost:
    """Cost of an update that widens: passes over its elements and calls, as ``ParameterRule`` has them."""

    passes: float = 0.0
    calls: int = 0


#: Calls are counted; passes are what is left, most of it spent in a cache. Measured on 28 November 2026 (AMD
#: EPYC, torch 2.13, quiet): an element takes 3.4 ns in bf16 and 8.5 in 8 bits on one core, 2.5 and 7.6 on two, as one
#: thread looks levels up (``index_select`` of one dim); the fused kernel alone takes 0.77 and 0.64.
_COSTS: Mapping[str, _FormatCost] = {
    "auto": _FormatCost(),
    "fp32": _FormatCost(),
    "bf16": _FormatCost(17.0, 20),
    "8bit": _FormatCost(69.0, 36),
}


@dataclass(frozen=True, kw_only=True)
class MomentRule(ParameterRule):
    """Rule that moves a parameter by the mean of its gradients over the root of their mean square.

    Attributes:
        states: Format of both moments: "auto" is that of the weights that move, as torch's optimizers have it; "fp32";
            "bf16", rounded at random so that small changes count in the mean; "8bit", codes with a float32 scale for
            every 256 elements, of parameters of 4,096 elements or more, the others' in "fp32". Updates widen both to
            float32 and write them back.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    states: StateFormat = "auto"

    planned: ClassVar[tuple[str, ...]] = ("states",)
    counts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("lr", self.lr, 0)
        check_number("beta1", self.beta1, 0, 1)
        check_number("beta2", self.beta2, 0, 1)
        check_number("eps", self.eps, 0, above=True)
        check_number("weight_decay", self.weight_decay, 0)
        if self.states not in (formats := get_args(StateFormat)):
            hint = did_you_mean(str(self.states), formats)
            raise ConfigError(f"states: expected one of {', '.join(formats)}, got {self.states!r}{hint}")

    @property
    def passes(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Times an update reads or writes an element besides operands once each, as far as that takes time."""
        return _COSTS[self.states].passes

    @property
    def calls(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Operations that an update makes, for each run of ``AT_ONCE`` elements; 0 for one kernel."""
        return _COSTS[self.states].calls

    def scratch_numbers(self, elements: int, kind: str) -> int:
        """Room of what is widened at once."""
        return 0 if self.states == "auto" else _ROWS * min(elements, _widened_at_once(kind))

    def moves(self, dtype: str) -> bool:
        """Whether it moves weights of a dtype: updates of states with a format of their own are in float32."""
        return super().moves(dtype) and (self.states == "auto" or dtype != "float64")

    def of_size(self, elements: int) -> Self:
        """Rule that moves a parameter of so many elements: states of small ones are kept in float32, not in 8 bits."""
        return replace(self, states="fp32") if self.states == "8bit" and elements < LEAST_ELEMENTS else self

    def state_specs(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        """Specifications of both moments, and of their scales in 8 bits."""
        dtype = {"auto": "", "fp32": "float32", "bf16": "bfloat16", "8bit": "uint8"}[self.states]
        moments = {name: StateSpec(shape, dtype) for name in _MOMENTS}
        if self.states != "8bit":
            return moments
        blocks = (-(-prod(shape) // BLOCK),)
        return moments | {name + _SCALE: StateSpec(blocks, "float32", block=BLOCK) for name in _MOMENTS}

    def update(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor | None
    ) -> None:
        """Run torch's fused kernel, which walks memory, not indices, on states as they are, or widened.

        Parts give the bits of the whole where each begins at a whole vector of the CPU, 64 elements everywhere, and in
        8 bits at a whole block.
        """
        import torch

        assert step is not None
        if self.states != "auto" and grad.stride() != param.stride():  # as of a parameter that lies channels last
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        if self.states in ("auto", "fp32") and states[_MOMENTS[0]].dtype is param.dtype:
            self.move(param, grad, *(states[name] for name in _MOMENTS), lr=lr, step=step)
            return
        flat = [_in_memory(tensor) for tensor in (param, grad, *states.values())]
        blocks = [1, 1, *(spec.block for spec in self.state_specs((1,)).values())]
        at_once = max(1, min(param.numel(), _widened_at_once(param.device.type)))
        room = torch.empty((_ROWS, at_once), dtype=torch.float32, device=param.device)
        for at in range(0, param.numel(), at_once):
            end = min(at + at_once, param.numel())
            piece_param, piece_grad, *parts = (
                t[at // block : -(-end // block)] for t, block in zip(flat, blocks, strict=True)
            )
            named = dict(zip(states, parts, strict=True))
            self._move_stored(piece_param, piece_grad, named, room[:, : end - at], lr=lr, step=step)

    def _move_stored(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: States,
        room: torch.Tensor,
        *,
        lr: float,
        step: torch.Tensor,
    ) -> None:
        """Widen all to float32, move it, and write it back.

        Args:
            param, grad: (elements,).
            room: (``_ROWS``, elements), float32.
        """
        import torch

        from lading.optim import low_bit

        wide_param, wide_grad, *moments = room[:4]
        spare, second_spare = room[4:].view(torch.int32)
        float_param = param if param.dtype is torch.float32 else wide_param.copy_(param)
        float_grad = grad if grad.dtype is torch.float32 else wide_grad.copy_(grad)
        if self.states == "bf16":
            low_bit.random_bits(float_param, float_grad, step, spare, second_spare)
        for name, moment in zip(_MOMENTS, moments, strict=True):
            if self.states == "8bit":
                scales, is_signed = states[name + _SCALE], name == _MOMENTS[0]
                low_bit.dequantize(states[name], scales, signed=is_signed, out=moment, spare=spare)
            else:
                moment.copy_(states[name])
        self.move(float_param, float_grad, *moments, lr=lr, step=step)
        for name, moment in zip(_MOMENTS, moments, strict=True):
            if self.states == "8bit":
                scales, is_signed = states[name + _SCALE], name == _MOMENTS[0]
                low_bit.quantize(moment, states[name], scales, signed=is_signed, spare=(spare, second_spare))
            elif self.states == "bf16":
                low_bit.round_at_random(moment, spare, states[name], second_spare)
                torch.bitwise_right_shift(spare, 16, out=spare)
            else:
                states[name].copy_(moment)
        if float_param is not param:
            param.copy_(float_param)

    @abstractmethod
    def move(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        lr: float,
        step: torch.Tensor,
    ) -> None:
        """Move a parameter and both moments, all of one dtype, by torch's fused kernel."""


def _widened_at_once(kind: str) -> int:
    return _WIDENED.get(kind, _WIDENED["cpu"])


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, which lie without holes, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
