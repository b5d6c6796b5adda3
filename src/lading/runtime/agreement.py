"""Agreement: ranks compare what they were given before they do anything together.

Ranks that follow unlike plans, or cut unlike models, hang in a collective, abort, or train something that nobody asked
for. So each writes facts of what it was given where the others read them, and all go on or none does.

[Note: meeting] Facts pass through the process group's store, not through a collective: a store has a deadline of its
own, says who has not come, and is the same for gloo and NCCL. The first of the ranks compares and writes a verdict; the
first verdict that is written stands, so that every rank does the same, whoever is late. A rank whose own checks fail
writes a verdict too, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from lading.errors import ConfigError

#: Seconds within which all ranks are to come, from when one does.
ARRIVAL_S = 120.0
#: By section, such as "plan", what was given, by name; values are compared by how they print.
Facts = Mapping[str, Mapping[str, object]]

T = TypeVar("T")
_AGREED = "agreed"
#: Seconds between two looks at the store: short at first, as ranks mostly come together.
_SHORTEST_S, _LONGEST_S = 0.002, 0.2
#: Ranks that are named in a message.
_NAMED = 8
#: Elements of a parameter that are hashed one by one, at least.
_SAMPLED = 4096
#: Parts of a printed value: a text, a bracket or a comma, or what lies between.
_PRINTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[{}()\[\],]|[^{}()\[\],'"]+|.""", re.DOTALL)
_CLOSES = {"{": "}", "(": ")", "[": "]"}


def agree_on(
    call: str, ranks: Sequence[int], prepare: Callable[[], tuple[T, Facts]], *, timeout_s: float | None = None
) -> T:
    """Go on only if all ranks were given the same ([Note: meeting]); no collective.

    Args:
        call: What the user called, for messages; it is compared too.
        ranks: The job's numbers of the ranks that are to agree, this one among them; one alone agrees.
        prepare: Checks what this rank was given, and gives the result with its facts; what it raises is told to the
            others.
        timeout_s: Seconds within which all are to come, which the caller lets its user set; None for ``ARRIVAL_S``.
    Returns:
        The result of ``prepare``.
    Raises:
        ConfigError: ranks differ, one has failed, or one has not come; the same message on every rank but the failing.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"{call}: expected timeout_s above 0, got {timeout_s}")
    if len(ranks) < 2 or "fake" in dist.get_backend():  # nobody else is there, as where a job is only tried out
        return prepare()[0]
    meeting = Meeting.of(call, ranks, ARRIVAL_S if timeout_s is None else timeout_s)
    return replace(meeting, can_be_set=timeout_s is not None).agree(prepare)


def run_number(more: int) -> int:
    """Number of runs of the job that this rank has begun, with some more; 0 where a loop of the user's is trained."""
    return distributed_c10d._get_default_store().add(f"lading/runs of {dist.get_rank()}", more)


def structure(model: nn.Module) -> dict[str, str]:
    """Facts of a model's structure: its modules with their settings, and its tensors, without values and devices."""
    modules = {
        f"module {path or 'the model'}": f"{type(module).__qualname__}({_settled(module.extra_repr())})"
        + (" in training" if module.training else " in evaluation")
        for path, module in model.named_modules()
    }
    first: dict[int, str] = {}
    tensors: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        shared = first.setdefault(id(tensor), name)
        tied = f", the same as {shared}" if shared != name else ""
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        cut = f", placed {tensor.placements}" if isinstance(tensor, DTensor) else ""
        tensors[f"tensor {name}"] = (
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{cut}{frozen}{tied}"
        )
    return modules | tensors


def digests(model: nn.Module) -> dict[str, dict[str, str]]:
    """Facts of the values of a model's parameters and buffers: a hash of 64 bits each, the same on any device.

    Buffers that are not saved count too, and running statistics as any: they begin alike, and what each rank's own
    micro-batches make of them later is not compared. Of a DTensor the piece that lies here counts. Every byte is added
    up, as integers, whose sum no order changes; some thousand elements are hashed besides, as the sum of rows that
    changed places stays. A tensor without values (on the meta device, or fake) says that it has none.

    Returns:
        By section, "values" of parameters and "buffers", the hash by name.
    """
    return {
        "values": {name: digest(parameter) for name, parameter in model.named_parameters()},
        "buffers": {name: digest(buffer) for name, buffer in model.named_buffers()},
    }


def digest(tensor: torch.Tensor) -> str:
    """Hash the values of a tensor as ``digests`` does; says so where it has none."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.is_meta or isinstance(local, FakeTensor):
        return "no values"
    if local.layout is not torch.strided:
        return " ".join(digest(part) for part in _dense_parts(local))
    elements = local.contiguous().resolve_conj().resolve_neg().reshape(-1)
    raw, sampled = elements.view(torch.uint8), elements[:: max(1, len(elements) // _SAMPLED)].contiguous()
    words = len(raw) // 8 * 8
    total = raw[:words].view(torch.int64).sum().item() if words else 0
    remaining_bytes = torch.cat([raw[words:], sampled.view(torch.uint8)]).cpu().numpy().tobytes()
    return hashlib.sha256(f"{total} ".encode() + remaining_bytes).hexdigest()[:16]


def _dense_parts(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Indices and values of a sparse tensor, such as the adjacency of a graph."""
    if sparse.layout is torch.sparse_coo:
        entries = sparse.coalesce()
        return entries.indices(), entries.values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse.ccol_indices(), sparse.row_indices(), sparse.values()


def flattened(value: object, name: str = "") -> dict[str, str]:
    """Facts of nested data, as ``dataclasses.asdict`` gives it: one for each number and word, by its path."""
    pairs: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[object, object]", value).items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(cast("Sequence[object]", value)))
    else:
        return {name: repr(value)}
    facts = {name: f"{len(pairs)} entries"}
    for key, item in pairs:
        facts |= flattened(item, f"{name}.{key}" if name else str(key))
    return facts


def ordered(text: str) -> str:
    """Sort what stands in braces in a printed value: a set prints in another order in each process."""
    parts = _PRINTED.findall(text)
    sorted_text, end = _sorted(parts, 0, "")
    return sorted_text if end == len(parts) else text


def _sorted(parts: Sequence[str], start: int, closing: str) -> tuple[str, int]:
    """Text of the parts up to a closing bracket, and the index where they end; -1 where brackets do not match."""
    items, at = [""], start
    while at < len(parts) and parts[at] != closing:
        part = parts[at]
        if part in _CLOSES:
            inside, at = _sorted(parts, at + 1, _CLOSES[part])
            if not 0 < at < len(parts):
                return "", -1
            items[-1] += part + inside + parts[at]
        elif part == "," and closing == "}":
            items.append("")
        else:
            items[-1] += part
        at += 1
    return (", ".join(sorted(map(str.strip, items))) if closing == "}" else items[0]), at


def _settled(text: str) -> str:
    """Take from what a module prints of itself whatever differs between processes for no reason of the user's."""
    return re.sub(r"\b(cuda|xpu|hpu|npu|mtia):\d+", r"\1", re.sub(r"0x[0-9a-fA-F]+", "0x", text))


@dataclass(frozen=True)
class Meeting:
    """One comparison between ranks ([Note: meeting]).

    Attributes:
        call: Name of what the user called.
        ranks: Ranks that are to agree, in order; the first compares.
        rank: Number of this one.
        store: Store of ``torch.distributed``, with keys of this comparison alone.
        timeout_s: Seconds within which all are to come.
        run: Number of the run that they are in, as ``run_number`` has it; 0 where nobody says that a rank has failed.
        can_be_set: Whether the user's call has ``timeout_s``, too.
    """

    call: str
    ranks: tuple[int, ...]
    rank: int
    store: Any
    timeout_s: float
    run: int = 0
    can_be_set: bool = False

    @staticmethod
    def of(call: str, ranks: Sequence[int], timeout_s: float) -> Meeting:
        """Make the next meeting of these ranks, in the store of the job's process group."""
        rank, everyone = dist.get_rank(), tuple(sorted(ranks))
        named = hashlib.sha256(repr(everyone).encode()).hexdigest()[:16]
        try:
            run = run_number(0)
            store = distributed_c10d.PrefixStore(f"lading/{run} {named}", distributed_c10d._get_default_store())
            number = store.add(f"meetings of {rank}", 1)
        except dist.DistNetworkError as error:
            raise lost_store(call, "ranks met") from error
        return Meeting(call, everyone, rank, distributed_c10d.PrefixStore(str(number), store), timeout_s, run)

    def agree(self, prepare: Callable[[], tuple[T, Facts]]) -> T:
        """Go on only if all ranks were given the same, as ``agree_on`` says; returns the result of ``prepare``."""
        try:
            result, facts = prepare()
        except Exception as error:
            self.conclude(f"{self.call}: failed on rank {self.rank}: {error}")
            raise
        verdict = self._verdict({"call": {"": self.call}, **facts})
        if verdict != _AGREED:
            raise ConfigError(verdict)
        return result

    def _verdict(self, mine: Facts) -> str:
        """Tell this rank's facts and learn the verdict: ``_AGREED``, or why not."""
        plain = {section: {key: ordered(str(value)) for key, value in facts.items()} for section, facts in mine.items()}
        written = json.dumps(plain).encode()
        try:
            self.store.set(f"facts {self.rank}", zlib.compress(written, 1))
            self.store.set(f"digest {self.rank}", hashlib.sha256(written).hexdigest())
            verdict = self._lead() if self.rank == self.ranks[0] else self._follow()
            if verdict == _AGREED:
                self.store.delete_key(f"facts {self.rank}")  # the first rank has read what it needs
            return verdict
        except dist.DistNetworkError as error:
            raise lost_store(self.call, "ranks compared what they were given") from error

    def conclude(self, verdict: str) -> str:
        """Write a verdict; returns the one that stands, which is another rank's where that was written before."""
        return bytes(self.store.compare_set("verdict", "", verdict)).decode()

    def _lead(self) -> str:
        """Compare the facts of all ranks once all have come; returns the verdict."""
        if self.wait([f"digest {rank}" for rank in self.ranks], self.timeout_s):
            return self.conclude(self._compared())
        return self.conclude(self._absent())

    def _follow(self) -> str:
        """Wait for the verdict: twice as long where all have come and only the first is late to compare."""
        for _ in range(2):
            if self.wait(["verdict"], self.timeout_s):
                return bytes(self.store.get("verdict")).decode()
            if self._missing():
                break
        return self.conclude(self._absent())

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait for keys, until there is a verdict, a rank has failed or the time is over; returns whether all are."""
        deadline, pause_s = time.monotonic() + timeout_s, _SHORTEST_S
        while not self.store.check(keys):
            if time.monotonic() > deadline or self.store.check(["verdict"]) or self._has_failed():
                return self.store.check(keys)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return True

    def _has_failed(self) -> bool:
        """Whether another rank has failed in this run, and comes no more."""
        return self.run > 0 and distributed_c10d._get_default_store().check([f"lading/failed in {self.run}"])

    def _missing(self) -> list[int]:
        return [rank for rank in self.ranks if not self.store.check([f"digest {rank}"])]

    def _absent(self) -> str:
        missing = self._missing() or [self.ranks[0]]
        longer = "; timeout_s= waits longer" if self.can_be_set else ""
        return (
            f"{self.call}: expected {len(self.ranks)} ranks to call it, {listed(missing)} did not within "
            f"{self.timeout_s:g} s; call it on every rank alike, and see whether that process lives{longer}"
        )

    def _compared(self) -> str:
        digests = dict(
            zip(self.ranks, map(bytes, self.store.multi_get([f"digest {r}" for r in self.ranks])), strict=True)
        )
        if len(set(digests.values())) == 1:
            return _AGREED
        most = Counter(digests.values()).most_common(1)[0][0]  # of equally many, the first rank's
        sides: dict[bytes, list[int]] = {}
        for rank, digest in digests.items():
            sides.setdefault(digest, []).append(rank)
        usual = sides.pop(most)
        expected = self._facts(usual[0])
        differences = [
            _difference(expected, usual[0], self._facts(ranks[0]), ranks) for ranks in list(sides.values())[:3]
        ]
        return (
            f"{self.call}: ranks differ: {'; '.join(differences)}; give every rank the same plan, model (its "
            "values, too) and settings, built by the same versions"
        )

    def _facts(self, rank: int) -> dict[str, dict[str, str]]:
        return json.loads(zlib.decompress(bytes(self.store.get(f"facts {rank}"))))


def _difference(
    expected: Mapping[str, Mapping[str, str]], usual: int, got: Mapping[str, Mapping[str, str]], ranks: Sequence[int]
) -> str:
    """Say in words the first fact in which ranks differ from the usual one, and in how many more they do."""
    different: list[str] = []
    for section in dict.fromkeys((*expected, *got)):
        expected_facts, rank_facts = expected.get(section, {}), got.get(section, {})
        for key in dict.fromkeys((*expected_facts, *rank_facts)):
            if expected_facts.get(key) != rank_facts.get(key):
                name = f"the {section}" + (f", {key}" if key else "")
                different.append(
                    f"{name}: expected {expected_facts.get(key, 'nothing')} as on rank {usual}, "
                    f"got {rank_facts.get(key, 'nothing')}"
                )
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    return f"{listed(ranks)} in {different[0]}{more}"


def lost_store(call: str, while_what: str) -> ConfigError:
    """Make the error of a rank that cannot reach the store of its job any more."""
    return ConfigError(
        f"{call}: lost the process group's store while {while_what}: the process that keeps it, mostly that of rank 0, "
        "has ended; look at its output"
    )


def listed(ranks: Sequence[int]) -> str:
    """Name ranks in a message: "rank 3", "ranks 0, 1", or the first of many and how many more."""
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
