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


@dataclass(frozen=True, slots=True)
class _FormatCost:
    """What an update takes beside its operands because of a format: as ``ParameterRule`` has it."""

    temporaries: int = 0
    passes: float = 0.0
    calls: int = 0


_COSTS: Mapping[str, _FormatCost] = {
    "auto": _FormatCost(),
    "fp32": _FormatCost(2),  # weight and gradient of 16 bits are widened
    "bf16": _FormatCost(7, 25.0, 20),
    "8bit": _FormatCost(8, 31.0, 30),
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
        if self.states not in (known := get_args(StateFormat)):
            hint = did_you_mean(str(self.states), known)
            raise ConfigError(f"states: expected one of {', '.join(known)}, got {self.states!r}{hint}")

    @property
    def temporaries(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # each format has its own
        """Numbers that ``update`` allocates for each element."""
        return _COSTS[self.states].temporaries

    @property
    def passes(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Times an update reads or writes an element besides operands once each, as far as that takes time."""
        return _COSTS[self.states].passes

    @property
    def calls(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Operations that an update makes, for each run of ``AT_ONCE`` elements; 0 for one kernel."""
        return _COSTS[self.states].calls

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
        if self.states == "auto":
            self.move(param, grad, states["exp_avg"], states["exp_avg_sq"], lr=lr, step=step)
            return
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        flat = {name: _in_memory(state) for name, state in states.items()}
        self._move_stored(_in_memory(param), _in_memory(grad), flat, lr=lr, step=step)

    def _move_stored(
        self, param: torch.Tensor, grad: torch.Tensor, states: States, *, lr: float, step: torch.Tensor
    ) -> None:
        """Widen all to float32, or the parameter's float64, move it, and write it back; tensors are (elements,)."""
        import torch

        from lading.optim import low_bit

        dtype = torch.promote_types(param.dtype, torch.float32)
        moved, seen = param.to(dtype), grad.to(dtype)
        is_coded = self.states == "8bit"
        bits = low_bit.random_bits(moved.float(), seen.float(), step) if self.states == "bf16" else None
        wide: list[torch.Tensor] = []
        for name in _MOMENTS:
            stored = states[name]
            if is_coded:
                stored = low_bit.dequantize(stored, states[name + _SCALE], signed=name == _MOMENTS[0])
            wide.append(stored.to(dtype))
        self.move(moved, seen, *wide, lr=lr, step=step)
        for name, moment in zip(_MOMENTS, wide, strict=True):
            if is_coded:
                low_bit.quantize(moment.float(), states[name], states[name + _SCALE], signed=name == _MOMENTS[0])
            elif bits is not None:
                low_bit.round_at_random(moment.float(), bits, states[name])
                bits = torch.bitwise_right_shift(bits, 16, out=bits)
            elif moment is not states[name]:
                states[name].copy_(moment)
        if moved is not param:
            param.copy_(moved)

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


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements, which lie without holes, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
