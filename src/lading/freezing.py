"""Freezing: which leading layers of a model are trained no more, and a cache of what they compute.

The rules are functions of numbers. ``by_gradient_norm`` is the published one (PipeTransformer, He et al. 2021,
https://arxiv.org/abs/2102.03161, section 3.1), ``by_percentile`` that of the code released with it
(``freeze/auto_freeze.py`` of github.com/Distributed-AI/PipeTransformer).
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lading.catalog.load import as_machine
from lading.errors import ConfigError, check_number
from lading.files import cannot_read, cannot_write
from lading.ir.machine import Machine
from lading.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lading.trainer import Trainer

#: Batches whose forward is timed before it is decided whether reading pays; the first warms up.
_TIMED = 3


def by_gradient_norm(frozen: int, norms: Sequence[float], alpha: float) -> int:
    """Number of leading layers to freeze: up to the layer with the smallest gradient, at most a share of the rest.

    With ``L`` layers, ``min(frozen + alpha (L - frozen), argmin of norms over the layers not yet frozen)``, where
    layers count from 1 and the first term is rounded down.

    Args:
        frozen: Number of layers that are frozen now.
        norms: L2 norm of each layer's gradient; those of frozen layers are not looked at.
        alpha: Largest share of the layers not yet frozen that freezes at once, in [0, 1].
    """
    if frozen >= len(norms):
        return frozen
    smallest = min(range(frozen, len(norms)), key=lambda layer: norms[layer]) + 1
    return min(int(frozen + alpha * (len(norms) - frozen)), smallest)


def by_percentile(frozen: int, norms: Sequence[float], before: Sequence[float], percentile: float) -> int:
    """Number of leading layers to freeze: up to the first whose gradient changes as much as a percentile of the rest.

    A layer's change is ``|before - now| / before``, 0 where its gradient is 0. The layer that reaches the percentile
    is frozen too, as in the released code; layers that are frozen stay so, which that code does not see to.

    Args:
        frozen: Number of layers that are frozen now.
        norms: L1 norm of each layer's gradient now.
        before: Their norms when this was asked last.
        percentile: In [0, 100], interpolated linearly between layers.
    """
    if frozen >= len(norms):
        return frozen
    pairs = list(zip(before, norms, strict=True))[frozen:]
    changes = [abs(then - now) / then if now and then else 0.0 for then, now in pairs]
    limit = float(np.percentile(changes, percentile))
    return frozen + next(number for number, change in enumerate(changes, 1) if change >= limit)


class Freezing:
    """Leading layers of a model that freeze while it is trained, by one of three rules.

    Args:
        model: Model that is trained.
        layers: Its layers in the order of the forward, each a module or several (``(model.tokens, model.layers[0])``).
            What is in none of them is always trained.
        epochs: Number of frozen leading layers from an epoch on, by the epoch, counted from 0: ``{1: 6, 3: 8}``.
        alpha: The published rule, ``by_gradient_norm``.
        percentile: The rule of the released code, ``by_percentile``.

    Attributes:
        frozen: Number of leading layers that are frozen.
        needs_norms: Whether the last step of each epoch has to take the norms of its gradients (``step(norms=True)``).

    Raises:
        ConfigError: not one rule, or one that means nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Iterable[torch.nn.Module | Iterable[torch.nn.Module]],
        *,
        epochs: Mapping[int, int] | None = None,
        alpha: float | None = None,
        percentile: float | None = None,
    ) -> None:
        rules = {"epochs": epochs, "alpha": alpha, "percentile": percentile}
        if len(chosen := [name for name, rule in rules.items() if rule is not None]) != 1:
            raise ConfigError(
                f"Freezing: expected one of epochs, alpha and percentile, got {' and '.join(chosen) or 'none'}"
            )
        self._layers = [[layer] if isinstance(layer, torch.nn.Module) else [*layer] for layer in layers]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        check_number("alpha", alpha or 0.0, 0, 1, closed=True)
        check_number("percentile", percentile or 0.0, 0, 100, closed=True)
        counts = [count for _, count in sorted((epochs or {}).items())]
        if [*sorted({0, *counts})] != [*dict.fromkeys((0, *counts))] or max((0, *counts)) > len(self._layers):
            raise ConfigError(
                f"epochs: expected numbers of frozen layers that grow, up to {len(self._layers)}, as so many layers "
                f"are given, got {epochs}"
            )
        most = max((0, *counts)) if epochs is not None else len(self._layers) - (alpha is not None and alpha < 1)
        frozen_at_most = {id(p) for layer in self._layers[:most] for module in layer for p in module.parameters()}
        if frozen_at_most.issuperset(trained := {id(p) for p in model.parameters() if p.requires_grad}) and trained:
            raise ConfigError(
                f"Freezing: expected something that is always trained, found every trained parameter in the {most} "
                "layers that may freeze; leave the last layer out"
            )
        self._epochs, self._alpha, self._percentile = epochs, alpha, percentile
        self.needs_norms = epochs is None
        self.frozen, self._before = 0, list[float]()

    def advance(self, epoch: int, trainer: Trainer) -> bool:
        """Freeze the layers that are due before an epoch; all ranks call this.

        Args:
            epoch: Number of the epoch that is about to begin, from 0.
            trainer: Trainer of the model, which has ended the epoch before.

        Returns:
            Whether layers froze: pause the trainer, capture and plan again, and resume.

        Raises:
            ConfigError: as ``Trainer.gradient_norms``.
        """
        due = self.frozen
        if self._epochs is not None:
            due = max((count for since, count in self._epochs.items() if since <= epoch), default=0)
        elif epoch and self._alpha is not None:
            norms = [hypot(*layer_norms) for layer_norms in self._by_layer(trainer.gradient_norms(2))]
            due = by_gradient_norm(due, norms, self._alpha)
        elif epoch and self._percentile is not None:
            norms = [sum(layer_norms) for layer_norms in self._by_layer(trainer.gradient_norms(1))]
            due = by_percentile(due, norms, self._before, self._percentile) if self._before else 0
            self._before = norms
        before, self.frozen = self.frozen, max(self.frozen, due)
        self._freeze()
        return self.frozen > before

    def _by_layer(self, norms: Mapping[str, float]) -> list[list[float]]:
        """Norms of the parameters of each layer; none of frozen ones."""
        parameters = [dict.fromkeys(p for module in layer for p in module.parameters()) for layer in self._layers]
        return [[norms[self._names[id(p)]] for p in layer if self._names[id(p)] in norms] for layer in parameters]

    def _freeze(self) -> None:
        for layer in self._layers[: self.frozen]:
            for module in layer:
                module.requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """State to go on from, for the ``meta`` of a checkpoint."""
        return {"frozen": self.frozen, "norms": self._before}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: its layers are frozen now; capture and plan after this."""
        self.frozen, self._before = state["frozen"], [*state["norms"]]
        self._freeze()


class PrefixCache:
    """Outputs of a frozen prefix by sample, in memory and then on disk, so that later epochs skip its forward.

    A batch is read where all of its samples are there, and computed where one is not. Reading is predicted from the
    machine's rates and compared with the forward as it is measured; what would not pay is not kept, and ``verdict``
    says why. The first batch that is read is computed, too: where a bit differs, nothing is kept.

    Args:
        prefix: Frozen module, from a batch of inputs to a batch of outputs (samples, ...); a copy of it is made now, so
            pause the trainer first. It runs in plain PyTorch, with the bits of the step that it is taken out of.
        machine: Machine as ``lading.plan`` takes it, for the rates of memory and of the disk.
        memory: Bytes of outputs that may lie in memory ("500MB").
        disk: Bytes that may lie in a file, where the machine has a tier of kind "file".
        folder: Folder of that file, which goes with the process.

    Attributes:
        verdict: What was decided, and why, in words.
        hits, misses: Samples that were read, and that were computed.

    Raises:
        ConfigError: the prefix is trained, or the machine has no such tier.
    """

    def __init__(
        self,
        prefix: torch.nn.Module,
        machine: Machine | str | Path,
        *,
        memory: str | float,
        disk: str | float = 0,
        folder: str | Path = ".",
    ) -> None:
        if trained := [name for name, parameter in prefix.named_parameters() if parameter.requires_grad]:
            raise ConfigError(f"PrefixCache: expected a frozen prefix, found that {trained[0]} is trained; freeze it")
        machine = as_machine(machine)
        tier = next((tier for tier in machine.tiers if tier.name == machine.swap_tier), None)
        self._room = {"memory": parse_bytes(memory, "memory"), "disk": parse_bytes(disk, "disk")}
        if self._room["disk"] and tier is None:
            raise ConfigError(f"disk: expected a machine with a tier of kind 'file', got {machine!r}; leave it out")
        self._prefix, self._folder = copy.deepcopy(prefix), Path(folder)
        self._bandwidth = {"memory": machine.device.memory_bandwidth_bytes_per_s / 2}  # read here, written there
        self._latency_s = {"memory": machine.device.op_overhead_s}
        if tier is not None:
            self._bandwidth["disk"], self._latency_s["disk"] = tier.read_bytes_per_s, tier.latency_s
        self._inputs: dict[int, int] = {}  # checksum of each sample's inputs
        self._rows: dict[int, torch.Tensor | int] = {}  # of each sample, the output or its place in the file
        self._file: Any = None
        self._forwards_s, self._like = list[float](), torch.empty(0)
        self._is_checked, self._keeps = False, True
        self.hits, self.misses = 0, 0
        self.verdict = "not decided yet"

    def __call__(self, ids: Sequence[int] | torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of the prefix for a batch.

        Args:
            ids: Number of each sample, the same in every epoch, as an indexed data set has them.
            inputs: Inputs of the samples, (samples, ...), on the CPU.

        Raises:
            ConfigError: outputs would differ from epoch to epoch: the prefix draws random numbers or changes its
                buffers, or a sample has other inputs than before.
            StorageError: the file cannot be written or read.
        """
        keys = [int(number) for number in ids]
        if len(keys) != len(inputs):
            raise ConfigError(f"ids: expected a number for each of {len(inputs)} samples, got {len(keys)}")
        if not self._keeps:
            return self._computed(inputs)
        self._check_inputs(keys, inputs)
        if not all(key in self._rows for key in keys):
            outputs = self._computed(inputs)
            self.misses += len(keys)
            self._keep(keys, outputs)
            return outputs
        outputs = self._read(keys)
        if not self._is_checked:
            self._is_checked, computed = True, self._computed(inputs)
            if not torch.equal(computed, outputs):
                self._drop("not kept: the outputs of a sample depend on the samples that are in its batch")
                return computed
        self.hits += len(keys)
        return outputs

    def _computed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the prefix, which has to give the same again."""
        random = torch.get_rng_state()
        versions = [buffer._version for buffer in self._prefix.buffers()]
        started = time.perf_counter()
        with torch.no_grad():
            outputs = self._prefix(inputs)
        self._forwards_s.append((time.perf_counter() - started) / max(1, len(inputs)))
        changed = "changes its buffers" if versions != [b._version for b in self._prefix.buffers()] else ""
        drawn = "" if torch.equal(random, torch.get_rng_state()) else "draws random numbers"
        if drawn or changed:
            raise ConfigError(
                f"PrefixCache: expected a prefix whose outputs stay the same, found one that {drawn or changed}, as "
                "dropout and running statistics do in training; put it into eval() mode before it is captured, or go "
                "without a cache"
            )
        if not isinstance(outputs, torch.Tensor) or len(outputs) != len(inputs) or outputs.device.type != "cpu":
            raise ConfigError(f"PrefixCache: expected outputs on the CPU, one a sample, got {type(outputs).__name__}")
        return outputs

    def _check_inputs(self, keys: Sequence[int], inputs: torch.Tensor) -> None:
        for key, row in zip(keys, inputs.contiguous(), strict=True):
            checksum = zlib.crc32(_bytes_of(row))
            if self._inputs.setdefault(key, checksum) != checksum:
                raise ConfigError(
                    f"PrefixCache: expected the inputs of sample {key} as they were before, found others: data is "
                    "augmented, or ids are not those of samples; go without a cache"
                )

    def _keep(self, keys: Sequence[int], outputs: torch.Tensor) -> None:
        """Put outputs where there is room, unless reading them would take longer than computing them."""
        self._like = outputs[0]
        if self.verdict == "not decided yet" and len(self._forwards_s) >= _TIMED:
            self._decide(min(self._forwards_s[1:]))
        for key, row in zip(keys, outputs, strict=True):
            place = next((place for place, room in self._room.items() if room >= row.nbytes), None)
            if place is None or key in self._rows or not self._keeps:
                continue
            self._room[place] -= row.nbytes
            self._rows[key] = row.clone() if place == "memory" else self._written(row)

    def _decide(self, forward_s: float) -> None:
        size = self._like.nbytes
        reads = {place: self._latency_s[place] + size / rate for place, rate in self._bandwidth.items()}
        reason = f"a sample of {format_bytes(size)} is computed in {format_seconds(forward_s)}"
        reason += "".join(f", read from {place} in {format_seconds(reads[place])}" for place in reads)
        slow = [place for place in reads if self._room[place] and reads[place] >= forward_s]
        self._room |= dict.fromkeys(slow, 0)
        if "memory" in slow or (slow and not any(isinstance(row, torch.Tensor) for row in self._rows.values())):
            self._drop(f"not kept, as reading would not pay: {reason}")
            return
        self.verdict = f"kept{' in memory alone' if slow else ''}: {reason}"
        self._rows = {key: row for key, row in self._rows.items() if not slow or isinstance(row, torch.Tensor)}

    def _drop(self, why: str) -> None:
        self._keeps, self.verdict = False, why
        self._rows.clear()
        self._inputs.clear()
        if self._file is not None:
            self._file.close()

    def _written(self, row: torch.Tensor) -> int:
        """Write a row at the end of the file; returns where."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115  as long as this
                weakref.finalize(self, self._file.close)
            at = self._file.seek(0, os.SEEK_END)
            self._file.write(_bytes_of(row.contiguous()))
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        return at

    def _read(self, keys: Sequence[int]) -> torch.Tensor:
        outputs = self._like.new_empty((len(keys), *self._like.shape))
        for key, target in zip(keys, outputs, strict=True):
            place = self._rows[key]
            if isinstance(place, torch.Tensor):
                target.copy_(place)
                continue
            try:
                os.preadv(self._file.fileno(), [_bytes_of(target)], place)
            except OSError as error:
                raise cannot_read(self._folder, error) from error
        return outputs


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
