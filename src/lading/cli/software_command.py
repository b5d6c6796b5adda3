"""``lading software``: the sets of switches that predictions know, and what each switch does to one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from lading.cli.options import MODEL_HELP, optional
from lading.report.lines import fitted

if TYPE_CHECKING:
    from lading.ir.stack import Stack

#: What a switch is tried on where nothing is given: a step with each axis that most software cuts.
_LAYOUT = "dp4,tp2,zero1,mb1,gb32"
#: The same for software that has no ZeRO-1, as stock PyTorch.
_SHARDED_LAYOUT = "dp4,tp2,zero2,mb1,gb32"
_SMALL = 0.0005


@dataclass(frozen=True, kw_only=True)
class SoftwareCommand:
    """List software as sets of switches, and what each switch does to a prediction.

    Without a name, all sets. A switch is set otherwise behind the name: megatron-like,attention=unfused,hidden.tp=0.6
    """

    name: Annotated[
        Positional[str], arg(metavar="[NAME|FILE]", help="Software to look at.", help_behavior_hint="(default: all)")
    ] = ""
    model: Annotated[str, optional("NAME", MODEL_HELP.format("llama3-8b, gpt3-175b"))] = "llama3-8b"
    machine: Annotated[str, optional("NAME|FILE", "Machine that the step runs on: h100, a100, ...")] = "h100"
    layout: Annotated[str | None, optional("LAYOUT", "Layout of the step, as of lading simulate.")] = None
    seq: Annotated[int | None, optional("N", "Tokens of a sequence.")] = None

    def run(self) -> None:
        """Print the sets, or the switches of one."""
        from lading.catalog.stacks import stack_by_name, stack_names

        if not self.name:
            print(fitted(sets_text([stack_by_name(name) for name in stack_names()]), hang=4))
            return
        stack = stack_by_name(self.name)
        print(fitted(switches_text(stack), hang=4))
        print(fitted(self._effects(self.layout or (_SHARDED_LAYOUT if stack.drops_gradients else _LAYOUT)), hang=4))

    def _effects(self, layout: str) -> str:
        from lading.clusters import step_of
        from lading.ir.request import Request
        from lading.sim.simulate import simulate
        from lading.sim.switches import effects_of
        from lading.units import format_seconds

        effect_request = Request(
            model=self.model, machine=self.machine, layout=layout, seq_len=self.seq or 0, stack=self.name
        )
        request, table = step_of(effect_request)
        figures = simulate(request, table).prediction
        lines = [
            f"A step of {self.model} on {self.machine}, {request.layout}, takes {format_seconds(figures.step_s)} "
            f"({format_seconds(figures.low_s)} to {format_seconds(figures.high_s)}). With a switch set otherwise:"
        ]
        small = 0
        for effect in effects_of(request, table):
            subject = f"  {effect.switch} = {format_switch(effect.other_value)}, not {format_switch(effect.value)}"
            if effect.change is None:
                lines.append(f"{subject}: cannot be: {effect.reason}")
            elif abs(effect.change) < _SMALL:
                small += 1
            else:
                lines.append(f"{subject}: {effect.change:+.1%}")
        return "\n".join([*lines, f"  {small} more switches change it by less than {_SMALL:.2%}"])


def sets_text(stacks: list[Stack]) -> str:
    """Describe sets of switches, by class: the defaults of each first, then frameworks."""
    lines: list[str] = []
    for kind in dict.fromkeys(stack.kind for stack in stacks):
        lines.append(kind)
        for stack in sorted((s for s in stacks if s.kind == kind), key=lambda s: (bool(s.framework), s.name)):
            fitted_text = f"; steps seen on {', '.join(stack.fitted)}" if stack.fitted else "; no step seen"
            lines.append(f"  {stack.name}: {stack.title}{fitted_text if stack.framework else ''}")
    return "\n".join(lines)


def switches_text(stack: Stack) -> str:
    """Describe the switches of one set, each with its source."""
    lines = [f"{stack.name}: {stack.title}; of class {stack.kind}" + (f", {stack.framework}" * bool(stack.framework))]
    for field in dataclasses.fields(stack):
        if field.name in ("name", "title", "kind", "framework", "sources"):
            continue
        value = getattr(stack, field.name)
        source = stack.sources.get(field.name)
        lines.append(f"  {field.name} = {format_switch(value)}" + (f"  ({source})" if source else ""))
    return "\n".join(lines)


def format_switch(value: Any) -> str:
    """A switch's value as a stack's file would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        table: dict[str, Any] = value
        return "{" + ", ".join(f"{key} = {format_switch(item)}" for key, item in sorted(table.items())) + "}"
    if isinstance(value, tuple):
        items: tuple[Any, ...] = value
        return "[" + ", ".join(map(str, items)) + "]"
    return str(value) or '""'
