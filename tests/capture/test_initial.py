"""Deferred initial values: a model built on fake tensors gets the bits of the real constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.parity import SMALL, own, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lading.errors import CaptureError
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.initial import Deferred, defer
from lading.tracing.trace import capture


class Odd(nn.Module):
    """Buffers and parameters made in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(5, 7)
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.norm = nn.BatchNorm1d(7)
        self.conv = nn.Conv2d(2, 3, 3)
        nn.init.uniform_(self.line.weight).data.erfinv_().clamp_(-1.0, 1.0)
        nn.init.orthogonal_(self.conv.weight)
        self.line.bias = nn.Parameter(torch.linspace(0, 1, 7))
        self.same = self.line.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("listed", torch.tensor([1.5, 2.5]))
        self.register_buffer("counted", torch.from_numpy(np.arange(3)))
        self.register_buffer("drawn", torch.randn(3)[1:].exp())
        self.register_buffer("empty", torch.zeros(0))


class Truncated(nn.Module):
    """Values drawn again and again until all lie within limits, by both ways torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(30, 40)
        nn.init.trunc_normal_(self.line.weight, std=0.02)
        self.far = nn.Parameter(nn.init.trunc_normal_(torch.empty(50), mean=1.0, std=1.0, a=2.0, b=3.0))
        self.some = nn.Parameter(torch.empty(6, 70, dtype=torch.bfloat16))
        nn.init.trunc_normal_(self.some[1:3], a=-1, b=1)
        nn.init.zeros_(self.some[0])
        nn.init.ones_(self.some[3:])
        self.after = nn.Parameter(torch.randn(3))


def vision() -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **sizes))


def hugging_face() -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, **sizes))


def _own(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: build_model(name, **SMALL | {"num_layers": 2} | sizes)


def in_bfloat16() -> nn.Module:
    """Built as a run with precision bf16 is: under another default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _own("llama", num_kv_heads=1)()
    finally:
        torch.set_default_dtype(torch.float32)


def check_same_bits(deferred: Deferred, build: Callable[[], nn.Module], seed: int) -> None:
    """Assert that what is deferred makes the values of the constructor, and leaves torch's generator as that does."""
    values: dict[str, torch.Tensor] = {}
    deferred.materialize(seed, lambda name, value: values.__setitem__(name, value.clone()))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = build()
    expected = dict((*model.named_parameters(), *model.named_buffers()))
    assert values.keys() == set(deferred.named)
    for name, value in values.items():
        assert value.dtype is expected[name].dtype
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), state)  # and what is drawn next is the same too


def _layers(*dims: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(dim, 4) for dim in dims))


def seeded_first() -> nn.Module:
    torch.manual_seed(3)
    return _layers(3, 5)


def seeded_alike_for_each_layer() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        torch.manual_seed(3)
        layers.append(nn.Linear(4, 4))
    return nn.Sequential(*layers)


def forked_for_a_layer() -> nn.Module:
    first = _layers(3, 5)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        middle = _layers(4)
    return nn.Sequential(first, middle, _layers(6, 7))


def put_back_twice() -> nn.Module:
    first, state = _layers(3), torch.get_rng_state()
    second = _layers(3)
    torch.set_rng_state(state)
    third = _layers(3)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, third, _layers(3, 5))


def seeded_last() -> nn.Module:
    model = _layers(3, 5)
    torch.manual_seed(3)
    return model


def forked_with_the_seed_before() -> nn.Module:
    torch.manual_seed(3)
    first = _layers(3)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        middle = nn.Linear(8, 8)  # draws more numbers than the first, in as many operations
    return nn.Sequential(first, middle, _layers(6, 7))


def forked_in_a_fork() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        first = _layers(3)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            second = _layers(4)
            with torch.random.fork_rng(devices=()):
                third = _layers(5)
            fourth = _layers(6)
        fifth = _layers(7)
    return nn.Sequential(first, second, third, fourth, fifth, _layers(8))


SEEDED = (
    seeded_first, seeded_alike_for_each_layer, forked_for_a_layer, forked_with_the_seed_before, forked_in_a_fork,
    put_back_twice, seeded_last,
)  # fmt: skip


@pytest.mark.parametrize("build", SEEDED)
@pytest.mark.parametrize("seed", [0, 5])
def test_a_constructor_may_set_the_generator(build: Callable[[], nn.Module], seed: int) -> None:
    before = torch.get_rng_state()
    deferred = defer(build)
    assert torch.equal(torch.get_rng_state(), before)
    check_same_bits(deferred, build, seed)


def test_some_layers_of_a_constructor_that_sets_the_generator() -> None:
    deferred = defer(forked_for_a_layer)
    check_same_bits(deferred.keeping(["1.0.weight", "2.1.bias"]), forked_for_a_layer, 5)


def seeded_by_the_seed() -> nn.Module:
    torch.manual_seed(torch.initial_seed() + 1)
    return _layers(3)


def seeded_by_the_state() -> nn.Module:
    torch.manual_seed(int(torch.get_rng_state()[:64].sum()))
    return _layers(3)


def put_back_a_copy() -> nn.Module:
    state = torch.get_rng_state().clone()
    first = _layers(3)
    torch.set_rng_state(state)
    return nn.Sequential(first, _layers(3))


@pytest.mark.parametrize("build", [seeded_by_the_seed, seeded_by_the_state, put_back_a_copy])
def test_a_constructor_that_takes_numbers_from_the_generator_itself_is_refused(build: Callable[[], nn.Module]) -> None:
    functions = torch.initial_seed, torch.random.initial_seed
    with pytest.raises(CaptureError, match=r"expected one that sets torch's random generator to given numbers"):
        defer(build)
    assert (torch.initial_seed, torch.random.initial_seed) == functions


@pytest.mark.long
@pytest.mark.parametrize(
    "build",
    [
        _own("gpt", dropout=0.1),
        _own("gpt", tied=False),
        _own("llama", num_kv_heads=1),
        _own("moe"),
        in_bfloat16,
        Odd,
        Truncated,
        vision,
        hugging_face,
    ],
)
@pytest.mark.parametrize("seed", [0, 5])
def test_same_bits_as_the_constructor(build: Callable[[], nn.Module], seed: int) -> None:
    check_same_bits(defer(build), build, seed)


def test_building_takes_no_memory_and_no_random_numbers() -> None:
    state = torch.get_rng_state()
    deferred = defer(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TiB
    assert all(isinstance(p, FakeTensor) for p in deferred.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_deferred_model_is_captured_like_a_real_one() -> None:
    deferred = defer(_own("llama"))
    graph = capture(deferred.model, tokens(), next_byte_loss)
    assert graph.fingerprint == capture(own("llama"), tokens(), next_byte_loss).fingerprint


def test_each_value_is_handed_on_once_and_early() -> None:
    deferred = defer(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    names: list[str] = []
    deferred.materialize(0, lambda name, _: names.append(name))
    assert sorted(names) == sorted(deferred.named)
    layers = [int(name.split(".")[0]) for name in names]
    assert layers == sorted(layers)


def test_a_constructor_that_reads_values_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, int(torch.randint(3, (1,)).item()))

    with pytest.raises(CaptureError, match=r"_local_scalar_dense.* in the model's constructor"):
        defer(Reads)


@pytest.mark.parametrize("change", [torch.nn.Module.bfloat16, lambda model: model.to(torch.float64)])
def test_parameters_that_change_their_dtype_once_made_are_refused(
    change: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    with pytest.raises(CaptureError, match=r"Couldn't swap Linear.*call torch.set_default_dtype before"):
        defer(lambda: change(torch.nn.Sequential(torch.nn.Linear(4, 4))))
