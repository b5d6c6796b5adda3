"""Models by name: sizes of well-known models, as data with a source.

A file in models/ holds ``name``, ``model`` (a key of ``lading.config.MODELS``), ``title``, ``source`` (of the sizes),
optionally ``context`` (the longest sequence, where the model takes any) and ``assumption`` (how it differs from the
original), and the table ``sizes``. A model that is simulated but not built here has ``family`` (of
``lading.catalog.tables``) in the place of ``model``; its sizes go by the symbols of the family's table.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from typing import Any

from lading.config import MODELS, ModelConfig, RunConfig
from lading.errors import ConfigError, did_you_mean
from lading.inputs import CATALOG_MODELS, catalog_models

#: Models whose tables of positions are as long as asked for; they need no ``max_seq_len`` beyond the sequence.
_ROTARY = ("llama", "moe")
_DEFAULT_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Well-known model of the catalog.

    Attributes:
        model: Reference model that it is; "" for one that is only simulated.
        family: Family of its table, where there is no reference model.
        title, source: Full name, and where its sizes are from.
        context: Longest sequence in tokens; 0 where ``sizes`` say it, or where it has no meaning.
        assumption: Ways in which the reference model differs from the original; "" if it does not.
    """

    name: str
    title: str
    source: str
    model: str = ""
    family: str = ""
    context: int = 0
    assumption: str = ""
    sizes: dict[str, int | float | bool] = field(default_factory=lambda: {})

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sequence that the model takes."""
        if self.model == "dit":
            return (int(self.sizes["image_size"]) // int(self.sizes["patch_size"])) ** 2
        return self.context or int(self.sizes["max_seq_len"])

    @property
    def default_tokens(self) -> int:
        """Tokens of a sequence when none are asked for."""
        return min(_DEFAULT_TOKENS, self.max_tokens)

    def config(self, sequence_length: int) -> ModelConfig:
        """Configure the model for sequences of so many tokens.

        Raises:
            ConfigError: longer than it takes, or the model is only simulated.
        """
        if not self.model:
            buildable = [name for name in model_names() if named_model(name).model]
            raise ConfigError(
                f"{self.name}: expected a model that can be built ({', '.join(buildable)}); "
                "this one can be simulated only"
            )
        if sequence_length > self.max_tokens:
            raise ConfigError(
                f"{self.name}: expected a sequence of at most {self.max_tokens} tokens, got {sequence_length}"
            )
        rotary = {"max_seq_len": sequence_length} if self.model in _ROTARY else {}
        return ModelConfig(name=self.model, sizes={**self.sizes, **rotary})


def model_names() -> tuple[str, ...]:
    """Names of the catalog's models, sorted."""
    return catalog_models()


def resolved(run: RunConfig) -> RunConfig:
    """Exchange a run's model of the catalog for the reference model and the sizes that it stands for.

    Raises:
        ConfigError: the sequence is longer than the model takes.
    """
    if run.model.name in MODELS or run.model.name not in model_names():
        return run
    config = named_model(run.model.name).config(run.data.sequence_length)
    sizes = {**config.sizes, **run.model.sizes}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, name=config.name, sizes=sizes))


def named_model(name: str) -> NamedModel:
    """Look up a model of the catalog.

    Raises:
        ConfigError: no such name; the nearest is given.
    """
    names = model_names()
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"expected a model ({', '.join(names)}), 'module:function', or the path of a config.json or of its folder, "
            f"got {name!r}{hint}"
        )
    data: dict[str, Any] = tomllib.loads((CATALOG_MODELS / f"{name}.toml").read_text(encoding="utf-8"))
    model = NamedModel(**data)
    if model.name != name or bool(model.family) == (model.model in MODELS):
        raise ConfigError(
            f"catalog/models/{name}.toml: expected this name, and a family or a model among {', '.join(MODELS)}"
        )
    return model
