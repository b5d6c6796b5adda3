"""``lading export``: what a run trained, as other libraries read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from lading.cli.options import Trust, flag
from lading.report.lines import fitted
from lading.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write the trained model of a run as safetensors, for from_pretrained."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder, such as out/llama.")]
    to: Annotated[Path, arg(metavar="FOLDER", help="Folder to make.")]
    max_shard_size: Annotated[str, arg(metavar="SIZE", help="Largest size of one file.")] = "5GB"
    best: Annotated[FlagCreatePairsOff[bool], flag("Take the checkpoint of the lowest validation loss.")] = False
    trust: Trust = False

    def run(self) -> None:
        """Export the newest checkpoint, or the best."""
        shard_bytes = parse_bytes(self.max_shard_size, "--max-shard-size")
        from lading.export import OWN_CONFIG, export_run

        folder = export_run(self.folder, self.to, shard_bytes=shard_bytes, best=self.best)
        print(f"wrote {folder}")
        if (folder / OWN_CONFIG).is_file():
            sentence = f"from_pretrained cannot load it, as transformers has no such model: {OWN_CONFIG} has its name"
            print(fitted(f"{sentence} and sizes, model.safetensors its weights"))
