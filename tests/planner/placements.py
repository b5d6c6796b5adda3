"""Small placement problems with random numbers."""

from __future__ import annotations

from random import Random

from lading.ir.fleet import Join, Network, network_of
from lading.ir.placement import PlacementProblem, Task, TaskFlow
from lading.planner.placement.tied import Holder, Weight, tie


def network(random: Random, count: int, memory_bytes: int) -> Network:
    """Devices that a link joins pair by pair, or all on one medium."""
    names = [f"d{n}" for n in range(count)]
    speed = {"efficiency": 1.0, "latency_s": random.uniform(0, 2e-3)}
    if random.random() < 0.3:
        medium = random.choice(["shared", "switch"])
        links = [Join(name="all", devices=tuple(names), medium=medium, bandwidth_bytes_per_s=3e8, **speed)]
    else:
        pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
        links = [
            Join(name=f"{a}{b}", devices=(a, b), medium="wire", bandwidth_bytes_per_s=random.uniform(1e8, 2e9), **speed)
            for a, b in pairs
        ]
    return network_of(dict.fromkeys(names, memory_bytes), links)


def chain(
    seed: int, *, count: int = 7, devices: int = 3, memory: float = 1.0, micro_batches: int = 1
) -> PlacementProblem:
    """Tasks one after another; ``memory``: of a device, as a share of what all tasks take."""
    random = Random(seed)
    tasks = _tasks(random, count, devices)
    flows = tuple(TaskFlow(n, (n + 1,), random.randrange(10**4, 10**6)) for n in range(count - 1))
    size = int(memory * sum(t.resident_bytes for t in tasks)) + 2 * 10**6
    return PlacementProblem(f"chain {seed}", tasks, flows, network(random, devices, size), micro_batches)


def training(
    seed: int, *, count: int = 5, devices: int = 3, memory: float = 1.0, micro_batches: int = 1
) -> PlacementProblem:
    """A chain forward and backward, its layers groups; what forward saves stays for backward."""
    random = Random(seed)
    forward = _tasks(random, count, devices, group=True)
    backward = [
        Task(f"{t.name} back", tuple(2 * s for s in t.seconds), group=t.group, backward=True) for t in reversed(forward)
    ]
    last = 2 * count - 1
    flows = [TaskFlow(n, (n + 1,), random.randrange(10**4, 10**6)) for n in range(last)]
    saved = [TaskFlow(n, (last - n,), random.randrange(10**5, 10**6)) for n in range(count)]
    own = {n: flow.size_bytes for n, flow in enumerate(saved)}
    tasks = [Task(t.name, t.seconds, t.resident_bytes, own[n], 0, t.group) for n, t in enumerate(forward)]
    size = int(memory * sum(t.resident_bytes + t.kept_bytes for t in tasks)) + 3 * 10**6
    net = network(random, devices, size)
    return PlacementProblem(f"training {seed}", (*tasks, *backward), (*flows, *saved), net, micro_batches)


def graph(
    seed: int, *, count: int = 6, devices: int = 3, memory: float = 1.0, micro_batches: int = 1
) -> PlacementProblem:
    """Tasks that take from up to two before them; flows may have several targets."""
    random = Random(seed)
    tasks = _tasks(random, count, devices)
    targets: dict[int, list[int]] = {}
    for task in range(1, count):
        for source in random.sample(range(task), min(task, random.choice([1, 2]))):
            targets.setdefault(source, []).append(task)
    flows = tuple(TaskFlow(s, tuple(t), random.randrange(10**4, 10**6)) for s, t in targets.items())
    size = int(memory * sum(t.resident_bytes for t in tasks)) + 2 * 10**6
    return PlacementProblem(f"graph {seed}", tasks, flows, network(random, devices, size), micro_batches)


def _tasks(random: Random, count: int, devices: int, *, group: bool = False) -> tuple[Task, ...]:
    speeds = [random.uniform(0.6, 3) for _ in range(devices)]
    tasks: list[Task] = []
    for number in range(count):
        work = random.uniform(1e-3, 1e-2)
        seconds = tuple(work * speed * random.uniform(0.7, 1.4) for speed in speeds)
        name = f"layer {number}"
        tasks.append(Task(name, seconds, random.randrange(10**6, 10**7), group=name if group else ""))
    return tuple(tasks)


def tied(
    seed: int, *, count: int = 5, devices: int = 3, memory: float = 1.0, micro_batches: int = 1
) -> PlacementProblem:
    """A training chain with updates, whose first and last layers share weights."""
    random = Random(seed)
    plain = training(seed, count=count, devices=devices, memory=memory, micro_batches=micro_batches)
    tasks, flows, last = list(plain.tasks), list(plain.flows), 2 * count - 1
    for number in range(count):
        flows.append(TaskFlow(last - number, (len(tasks),), 0))
        tasks.append(_update(f"update {number}", f"layer {number}", random, devices))
    size, both = random.randrange(10**5, 10**7), _update("tied", "", random, devices).seconds
    holders = (Holder("layer 0", (last,)), Holder(f"layer {count - 1}", (count,)))
    shared = (tie(tasks, flows, holders, Weight(4 * size, size, both)),)
    return PlacementProblem(f"tied {seed}", tuple(tasks), tuple(flows), plain.network, micro_batches, (), shared)


def _update(name: str, group: str, random: Random, devices: int) -> Task:
    seconds = tuple(random.uniform(1e-4, 3e-3) for _ in range(devices))
    return Task(name, seconds, group=group, once_per_step=True)
