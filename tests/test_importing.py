"""Weights that other tools saved begin a run: to the bit, within its budget, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import RunConfig, load_run
from lading.errors import ConfigError, StorageError
from lading.export import export_run
from lading.importing import import_run
from lading.models.reference import build_model
from lading.models.weight_files import FileTensor, StackedTensor, WeightFiles
from lading.runtime.resident import PeakMeter
from lading.train import train_run
from lading.units import MiB
from tests.ranks import run_ranks
from tests.runs import write_run
from tests.test_train_ranks import written

hf = pytest.importorskip("transformers")

LLAMA = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {
    "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "gelu",
}  # fmt: skip
#: Reference model, its sizes, and the model of transformers that is its twin.
TWINS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "llama": (
        {"dim": 32, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64},
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    ),
    "gpt": (
        {"dim": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 64, "vocab_size": 256},
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)),
    ),
    "moe": (
        {
            "dim": 32, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 64,
            "num_experts": 11, "num_active": 2, "rope_theta": 1e6,
        },
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=11)),
    ),
}  # fmt: skip


def saved(name: str, folder: Path, *, max_shard_size: str = "20KB") -> Any:
    """Save a model of transformers with random weights as shards; returns it."""
    torch.manual_seed(1)
    made = TWINS[name][1]().eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(folder, max_shard_size=max_shard_size)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return made


def run_of(root: Path, model: str, *settings: str) -> RunConfig:
    file = write_run(root)
    lines = [line for line in file.read_text().splitlines() if not line.startswith(("model", "checkpoint"))]
    file.write_text("\n".join(lines))
    common = ["optimization={steps=2, warmup_steps=0}", "memory.budget=100%", "memory.policy=keep-all"]
    return load_run(file, [f"model={model}", *common, *settings])


def table(name: str, **changed: Any) -> str:
    sizes = TWINS[name][0] | changed
    text = ", ".join(f"{key}={str(value).lower()}" for key, value in sizes.items())
    return f'{{name="{name}", sizes={{{text}}}}}'


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_reference_model_begins_with_the_weights_of_its_twin(name: str, tmp_path: Path) -> None:
    """The same logits, but for rounding, and the export is the same files' values to the bit."""
    theirs = saved(name, tmp_path / "theirs")
    run = run_of(tmp_path, table(name))
    checkpoint = open_checkpoint(import_run(run, tmp_path / "theirs"))
    assert checkpoint.step == 0
    model = build_model(name, **TWINS[name][0]).eval()
    named = dict(model.named_parameters())
    model.load_state_dict({name: checkpoint.read(name) for name in named}, strict=False)
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
    states = {key for key in checkpoint.tensors if key.endswith((".exp_avg", ".exp_avg_sq"))}
    assert len(states) == 2 * len(named)
    assert not any(checkpoint.read(key).any() for key in states)
    again = type(theirs).from_pretrained(export_run(Path(run.out), tmp_path / "again"))
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_an_export_is_imported_again(tmp_path: Path) -> None:
    """A model of 16 bits whose embedding is tied, by folders whose names are not plain."""
    saved("gpt", tmp_path / "theirs")
    run = run_of(tmp_path, table("gpt"), "optimization.precision=bf16")
    first = open_checkpoint(import_run(run, tmp_path / "theirs"))
    assert not {"head.weight", "tokens.weight"} <= first.tensors.keys()  # tied
    (tmp_path / "größe 2").mkdir()
    export = export_run(Path(run.out), tmp_path / "größe 2" / "the export")
    other = run_of(tmp_path / "größe 2", table("gpt"), "optimization.precision=bf16")
    again = open_checkpoint(import_run(other, export))
    assert {name: saved.digest for name, saved in again.tensors.items()} == {
        name: saved.digest for name, saved in first.tensors.items()
    }


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_as_if_it_had_begun_with_the_folder(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of transformers, of which one run names the folder and the other its configuration alone."""
    saved("llama", tmp_path / "theirs")
    dropped = f'{{name="{tmp_path}/theirs"}}', f'{{name="{tmp_path}/theirs/config.json"}}'
    settings = [f"optimization.precision={precision}", f"out={tmp_path}/begun"]
    whole = train_run(run_of(tmp_path, dropped[0], *settings)).losses
    other = tmp_path / "other"
    other.mkdir()
    run = run_of(other, dropped[1], f"optimization.precision={precision}", f"data.source={tmp_path}/text")
    assert main(["import", str(tmp_path / "theirs"), str(other / "run.toml"), *overrides(run)]) == 0
    said = capsys.readouterr().out
    assert "weights from" in said
    assert "train from there with: lading train" in said
    assert train_run(run, resume=True).losses == whole
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        import_run(run, tmp_path / "theirs")


def overrides(run: RunConfig) -> list[str]:
    """Settings of ``run_of`` for the command line."""
    return [
        f'model={{name="{run.model.name}"}}', "optimization={steps=2, warmup_steps=0}", "memory.budget=100%",
        "memory.policy=keep-all", f"optimization.precision={run.optimization.precision}",
        f"data.source={run.data.source}",
    ]  # fmt: skip


@pytest.mark.long
def test_weights_come_in_pieces_beside_values_that_are_all_there(tmp_path: Path) -> None:
    """The file has one tensor of 16 MiB in bfloat16, the run the same in float32 with two moments on the disk."""
    sizes = {"dim": 512, "num_layers": 1, "num_heads": 4, "max_seq_len": 64, "vocab_size": 16384}
    theirs = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2 | {"vocab_size": 16384, "n_embd": 512, "n_layer": 1}))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs", max_shard_size="2MB")
    values = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    del theirs
    files = WeightFiles(tmp_path / "theirs")
    numbers = FileTensor(files, "transformer.wte.weight", (torch.float32,))
    meter = PeakMeter()
    before, read = meter.now_bytes(), 0
    for chunk in numbers.chunks(0, 16384 * 512 * 4):
        read += chunk.nbytes
    assert read == 16384 * 512 * 4
    assert meter.peak_bytes() - before < 4 * MiB
    meter.close()
    text = ", ".join(f"{key}={value}" for key, value in sizes.items())
    run = run_of(tmp_path, f'{{name="gpt", sizes={{{text}}}}}')
    path = import_run(run, tmp_path / "theirs")
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("tokens.weight"), values["transformer.wte.weight"].float())
    assert torch.equal(checkpoint.read("layers.0.qkv.weight"), values["transformer.h.0.attn.c_attn.weight"].t().float())


#: Models whose experts transformers stacks and saves apart, and their sizes.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 12}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {"num_experts": 11, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {"num_experts": 11, "moe_intermediate_size": 16, "head_dim": 8}),
}


def saved_mixture(name: str, folder: Path) -> Any:
    """As ``saved``, of a mixture of experts."""
    torch.manual_seed(1)
    config, sizes = MIXTURES[name]
    made = getattr(hf, name)(getattr(hf, config)(**LLAMA | sizes))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(folder, max_shard_size="20KB")
    return made


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.mark.long
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_files_hold_apart_are_stacked_and_exported_apart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of ``from_pretrained``, and the tensors of ``save_pretrained``; none is read whole."""
    theirs = saved_mixture(name, tmp_path / "theirs")
    files = tensors_in(tmp_path / "theirs")
    assert sum(".experts.10." in key for key in files) == 2 * 3
    monkeypatch.setattr(WeightFiles, "read", lambda *_: pytest.fail("read whole"))
    run = run_of(tmp_path, f'{{name="{tmp_path}/theirs/config.json"}}')
    checkpoint = open_checkpoint(import_run(run, tmp_path / "theirs"))
    monkeypatch.undo()
    for key, value in type(theirs).from_pretrained(tmp_path / "theirs").named_parameters():
        assert torch.equal(checkpoint.read(key), value), key
    exported = export_run(Path(run.out), tmp_path / "again", shard_bytes=20_000)
    again = tensors_in(exported)
    assert again.keys() == files.keys()
    assert [key for key, value in files.items() if not torch.equal(again[key], value)] == []
    loaded, info = type(theirs).from_pretrained(exported, output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_a_stack_is_read_in_pieces_from_any_byte(tmp_path: Path) -> None:
    """Twelve tensors of 2 MiB in bfloat16 as one of 48 MiB in float32: six experts of two halves."""
    parts = {f"experts.{number}.w{half}": torch.randn(1024, 1024).bfloat16() for number in range(6) for half in (1, 3)}
    save_file(parts, tmp_path / "model.safetensors")
    whole = torch.stack([torch.cat([parts[f"experts.{n}.w1"], parts[f"experts.{n}.w3"]]).float() for n in range(6)])
    files = WeightFiles(tmp_path)
    stack = StackedTensor(tuple(FileTensor(files, key, (torch.float32,)) for key in parts), 2)
    assert stack.shape == whole.shape
    for low, high in ((0, 64), (4 << 20, 12 << 20), ((4 << 20) - 8, (4 << 20) + 8), ((48 << 20) - 4, 48 << 20), (8, 8)):
        data = b"".join(stack.chunks(low, high))
        assert data == whole.view(-1)[low // 4 : high // 4].numpy().tobytes()
    half = b"".join(stack.bytes_as("bfloat16")(0, 4 << 20))
    assert half == whole[0].bfloat16().view(torch.uint8).numpy().tobytes()
    del whole, data, half, parts
    meter = PeakMeter()
    before, read = meter.now_bytes(), 0
    for chunk in stack.chunks(0, 48 << 20):
        read += chunk.nbytes
    assert read == 48 << 20
    assert meter.peak_bytes() - before < 4 * MiB
    meter.close()


@pytest.mark.long
def test_experts_that_are_not_all_there_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    saved_mixture("MixtralForCausalLM", folder)
    tensors, index = tensors_in(folder), folder / "model.safetensors.index.json"
    run = run_of(tmp_path, f'{{name="{folder}/config.json"}}')
    listed = json.loads(index.read_text())
    gate = "model.layers.1.block_sparse_moe.experts.{}.w1.weight"
    places = listed["weight_map"]
    places[gate.format(3)] = next(each for each in places.values() if each != places[gate.format(3)])
    index.write_text(json.dumps(listed))
    assert f"expected '{gate.format(3)}' in it, as {index.name} says" in refused(run, folder)
    for file in (*folder.glob("*.safetensors"), index):
        file.unlink()

    def told(**changed: torch.Tensor | None) -> str:
        other = {name: tensor.clone() for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(other, folder / "model.safetensors")
        return refused(run, folder)

    moved = told(**{gate.format(3): None, gate.format(12): tensors[gate.format(3)]})
    assert f"numbered 0 to 11, found {gate.format(4)} in the place of number 3 of {gate.format(0)}" in moved
    assert f"found none in the place of number 11 of {gate.format(0)}" in told(**{gate.format(11): None})
    assert (
        "of another shape: model.layers.1.mlp.experts.gate_up_proj (expected (12, 96, 32), found (13, 96, 32))"
        in told(**{gate.format(12).replace("w1", part): tensors[gate.format(0)] for part in ("w1", "w3")})
    )


def refused(run: RunConfig, folder: Path) -> str:
    with pytest.raises((ConfigError, StorageError)) as error:
        import_run(run, folder)
    assert latest_checkpoint(Path(run.out) / "checkpoints") is None
    return str(error.value)


@pytest.mark.long
def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    saved("llama", folder)
    run = run_of(tmp_path, table("llama"))
    config = json.loads((folder / "config.json").read_text())

    def told(**changed: Any) -> str:
        (folder / "config.json").write_text(json.dumps(config | changed))
        return refused(run, folder)

    assert "expected hidden_act 'silu', as the run's model computes, found 'gelu'" in told(hidden_act="gelu")
    assert "rope_parameters" in told(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert "expected mlp_bias False" in told(mlp_bias=True)
    assert "expected num_hidden_layers 2" in told(num_hidden_layers=3)
    assert "expected model_type 'llama'" in told(model_type="mistral")
    assert "expected max_position_embeddings 64" in told(max_position_embeddings=32)
    (folder / "config.json").unlink()
    assert "expected config.json beside the weights" in refused(run, folder)
    assert "expected a folder of safetensors" in refused(run, tmp_path / "nowhere")
    assert "expected model.safetensors or model.safetensors.index.json" in refused(run, tmp_path)


@pytest.mark.long
def test_names_that_differ_are_listed_before_anything_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    made = saved("llama", folder)
    config = (folder / "config.json").read_text()
    for file in folder.iterdir():
        file.unlink()
    (folder / "config.json").write_text(config)
    run = run_of(tmp_path, table("llama"))
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}

    def told(**changed: torch.Tensor | None) -> str:
        other = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(other, folder / "model.safetensors")
        return refused(run, folder)

    assert "missing: norm.weight" in told(**{"model.norm.weight": None})
    assert "not expected: model.extra" in told(**{"model.extra": torch.zeros(2)})
    assert "of another shape: model.norm.weight (expected (32,), found (31,))" in told(
        **{"model.norm.weight": torch.zeros(31)}
    )
    save_file(tensors, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-5])
    assert "expected a safetensors file at" in refused(run, folder)
    # What older versions saved besides is passed over, and names of the inner model alone are found.
    inner = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file({**inner, "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, folder / "model.safetensors")
    assert open_checkpoint(import_run(run, folder)).step == 0


def test_tied_weights_of_which_files_have_two_must_be_equal(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    made = saved("gpt", folder)
    config = (folder / "config.json").read_text()
    for file in folder.iterdir():
        file.unlink()
    (folder / "config.json").write_text(config)
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    run = run_of(tmp_path, table("gpt"))
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, folder / "model.safetensors")
    assert "are one parameter of the run's model and differ" in refused(run, folder)
    save_file(tensors, folder / "model.safetensors")
    assert open_checkpoint(import_run(run, folder)).step == 0


OWN = """
import torch
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.register_buffer("scale", torch.ones(16))
    def forward(self, tokens_BT):
        return self.head(self.tokens(tokens_BT) * self.scale)
def build():
    return Own()
"""


def test_a_model_of_ones_own_takes_tensors_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import imported_model  # type: ignore[import-not-found]

    theirs = {name: tensor.clone() for name, tensor in imported_model.build().state_dict().items()}
    (tmp_path / "theirs").mkdir()
    save_file(theirs, tmp_path / "theirs" / "model.safetensors")
    run = run_of(tmp_path, '{name="imported_model:build"}')
    checkpoint = open_checkpoint(import_run(run, tmp_path / "theirs"))
    assert all(torch.equal(checkpoint.read(name), value) for name, value in theirs.items())
    save_file({**theirs, "other": torch.zeros(1)}, tmp_path / "theirs" / "model.safetensors")
    assert "not expected: other" in refused(dataclasses.replace(run, out=f"{tmp_path}/second"), tmp_path / "theirs")


def _on_ranks(rank: int, root: str) -> None:
    run = load_run(Path(root) / "run.toml", [*settings_of_ranks(Path(root)), "layout='dp2,zero3'"])
    import_run(run, Path(root) / "theirs")


def settings_of_ranks(root: Path) -> list[str]:
    return [
        f"model={table('llama')}", "optimization={steps=2, warmup_steps=0}", "memory.policy=keep-all",
        "memory.budget=100%", f"out={root}/ranks",
    ]  # fmt: skip


@pytest.mark.slow
def test_ranks_import_what_one_process_does(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    written(tmp_path)
    run_ranks(_on_ranks, 2, str(tmp_path))
    run = load_run(tmp_path / "run.toml", [*settings_of_ranks(tmp_path), f"out={tmp_path}/alone"])
    one, other = (
        open_checkpoint(import_run(run, tmp_path / "theirs")),
        latest_checkpoint(tmp_path / "ranks/checkpoints"),
    )
    assert other is not None
    ranks = open_checkpoint(other)
    assert one.tensors.keys() == ranks.tensors.keys()
    assert [name for name in one.tensors if not torch.equal(one.read(name), ranks.read(name))] == []
