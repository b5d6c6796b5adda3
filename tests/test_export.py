"""An export is loaded by the tools it is for, and holds the trained values to the bit."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from lading.checkpoint.state import tensor_source
from lading.checkpoint.store import latest_checkpoint, open_checkpoint, save_checkpoint
from lading.cli.main import main
from lading.config import load_run, run_to_dict
from lading.errors import StorageError
from lading.export import export_run
from lading.models.reference import build_model
from lading.prepare import plan_run
from lading.train import train_plain, train_run
from tests.models.test_hugging_face import saved
from tests.plans import some_plan
from tests.power_cuts import DiskLog
from tests.runs import write_run
from tests.test_files import nothing_fits

hf = pytest.importorskip("transformers")

STEPS = 3


def run_of(root: Path, name: str, *settings: str) -> Any:
    """A short run of another model than the usual one."""
    file = write_run(root)
    text = file.read_text().splitlines()
    file.write_text("\n".join(line for line in text if not line.startswith(("model", "checkpoint"))))
    common = [f"model.name={name}", f"optimization.steps={STEPS}", "checkpoint.every_steps=2"]
    return load_run(file, [*common, "optimization.warmup_steps=0", "memory.budget=100%", *settings])


SLOW = ("LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration", "BertModel")


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_from_pretrained_loads_what_was_trained(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "before")
    config = tmp_path / "before" / "config.json"
    # Without a cache, transformers looks at the values of positions to find packed sequences.
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 32, "use_cache": False}))
    root = tmp_path / "run"
    root.mkdir()
    run = run_of(root, str(tmp_path / "before"), "data.sequence_length=8", f"data.source={root}/digits")
    (root / "digits").write_bytes(bytes(range(1, 31)) * 9)
    losses = train_run(run).losses
    assert losses == train_plain(run, root).losses
    assert main(["export", run.out, "--to", str(tmp_path / "after"), "--max-shard-size", "8KB"]) == 0
    assert len(list((tmp_path / "after").glob("model-*-of-*.safetensors"))) > 1
    after = getattr(hf, name).from_pretrained(tmp_path / "after")
    newest = latest_checkpoint(Path(run.out) / "checkpoints")
    assert newest is not None
    trained = open_checkpoint(newest)
    parameters = dict(after.named_parameters())
    assert all(torch.equal(trained.read(key), value) for key, value in parameters.items())
    before = getattr(hf, name).from_pretrained(tmp_path / "before")
    assert any(not torch.equal(value, parameters[key]) for key, value in before.named_parameters())
    tied = [getattr(module.config, "tie_word_embeddings", False) for module in (before, after)]
    assert tied[0] == tied[1]
    again = run_of_exported(tmp_path, str(tmp_path / "after"))
    assert again.step.initial.model.state_dict().keys() == after.state_dict().keys()  # and it can be trained on


def run_of_exported(root: Path, name: str) -> Any:
    other = root / "again"
    other.mkdir()
    (other / "digits").write_bytes(bytes(range(1, 31)) * 9)
    return plan_run(run_of(other, name, "data.sequence_length=8", f"data.source={other}/digits"))


#: Sizes of reference models that transformers has under another name, and the name.
TWINS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {}, "GPT2LMHeadModel"),
    ("gpt", {"tied": False, "hidden_dim": 48, "dropout": 0.3}, "GPT2LMHeadModel"),
    ("llama", {}, "LlamaForCausalLM"),
    ("llama", {"num_kv_heads": 2, "tied": True, "rope_theta": 500.0, "norm_eps": 1e-3, "head_size": 16},
     "LlamaForCausalLM"),
    ("llama", {"qk_norm": True, "num_kv_heads": 2}, "Qwen3ForCausalLM"),
    ("moe", {"num_experts": 3, "num_active": 2}, "MixtralForCausalLM"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "twin"), TWINS)
def test_a_reference_model_is_loaded_as_the_one_of_transformers(
    name: str, sizes: dict[str, Any], twin: str, tmp_path: Path
) -> None:
    """The same logits, but for rounding: rotations and norms are written in other operations there."""
    run, model = saved_reference(tmp_path, name, sizes)
    assert main(["export", run.out, "--to", str(tmp_path / "after"), "--max-shard-size", "8KB"]) == 0
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "after", output_loading_info=True)
    assert type(loaded).__name__ == twin
    assert not any(info.values())
    tokens = torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        expected, found = model(tokens), loaded.eval()(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_full_disk(tmp_path: Path) -> None:
    """Nothing is left where the export was to be, and the next one works."""
    run, _ = saved_reference(tmp_path, "gpt", {})
    before = sorted(tmp_path.iterdir())
    with (
        nothing_fits(),
        pytest.raises(StorageError, match=r"cannot export to .*after: .*File too large; free"),
    ):
        export_run(Path(run.out), tmp_path / "after")
    assert sorted(tmp_path.iterdir()) == before
    assert (export_run(Path(run.out), tmp_path / "after") / "config.json").is_file()


def test_a_power_cut(tmp_path: Path) -> None:
    """At any moment the export is whole or not there, with what transformers writes; once it is said, it is there."""
    run, _ = saved_reference(tmp_path, "gpt", {})
    (tmp_path / "disk").mkdir()
    log = DiskLog(tmp_path / "disk")
    with log.on():
        target = export_run(Path(run.out), tmp_path / "disk" / "exports" / "after", shard_bytes=40_000)
        log.mark("exported")
    whole = {f"exports/after/{path.name}": path.read_bytes() for path in target.iterdir()}
    assert len(whole) > 3
    there = list[bool]()
    for tree, promises in log.states(random.Random(0)):
        there.append("exports/after" in tree)
        assert there[-1] or not promises
        assert not there[-1] or whole.items() <= tree.items()
    assert 0 < sum(there) < len(there)


def saved_reference(root: Path, name: str, sizes: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    """A run of a reference model with a checkpoint of random weights, and the model that has them."""
    run = run_of(root, name, "model.sizes.dim=32", "model.sizes.num_heads=4", "model.sizes.num_layers=2")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, sizes=run.model.sizes | sizes))
    model = build_model(name, **run.model.sizes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    out = Path(run.out)
    out.mkdir()
    some_plan(run=run_to_dict(run)).save(out / "plan.json")
    first = {id(tensor): tensor_source(key, tensor) for key, tensor in reversed(list(model.named_parameters()))}
    save_checkpoint(out / "checkpoints", 1, list(first.values()), {}, keep=1)
    return run, model


@pytest.mark.parametrize("name", ["dit"])
def test_a_model_that_transformers_lacks_is_its_name_and_sizes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.sizes.dim=32", "model.sizes.num_heads=2", "model.sizes.num_layers=1"]
    settings += ["model.sizes.image_size=8", "data.sequence_length=16", "data.source=synthetic"]
    run = run_of(tmp_path, name, *settings)
    planned = train_run(run)
    assert planned.losses == train_plain(run, tmp_path).losses
    folder = tmp_path / "after"
    assert main(["export", run.out, "--to", str(folder)]) == 0
    assert "from_pretrained cannot load it, as transformers has no such model" in capsys.readouterr().out
    assert not (folder / "config.json").exists()
    facts = json.loads((folder / "lading.json").read_text())
    model = build_model(facts["model"], **facts["sizes"])
    missing, unexpected = load_model(model, folder / "model.safetensors")
    assert (missing, unexpected) == (set(), [])
    newest = latest_checkpoint(Path(run.out) / "checkpoints")
    assert newest is not None
    trained = open_checkpoint(newest)
    assert all(torch.equal(trained.read(key), value) for key, value in model.named_parameters())


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(*arguments: str) -> str:
        assert main(["export", *arguments]) == 2
        return capsys.readouterr().err

    assert "found no plan.json" in message(str(tmp_path), "--to", str(tmp_path / "new"))
    assert "expected a folder that does not exist" in message(str(tmp_path), "--to", str(tmp_path))
    run = run_of(tmp_path, "gpt", "model.sizes.dim=16", "model.sizes.num_heads=1", "model.sizes.num_layers=1")
    plan_run(run).plan.save(tmp_path / "plan.json")
    assert "expected a checkpoint in" in message(str(tmp_path), "--to", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
