"""Tasks that a model of transformers learns: from text one loss each, on the batches of ``runtime.framing``.

From arrays it learns the loss of its own forward.

Shapes: B batch, T tokens, V vocabulary, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional as F

from lading.errors import ConfigError

Batch = Mapping[str, torch.Tensor]

#: Label of a position that is not to be predicted.
IGNORED = -100
#: Cosine similarities are multiplied by this before their softmax, as sentence-transformers does.
SIMILARITY_SCALE = 20.0


def causal_lm_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of each next token; ``{"tokens": (B, T + 1)}``."""
    tokens = batch["tokens"]
    logits_BTV = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens[:, 1:].flatten())


def masked_lm_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the masked tokens; ``{"tokens": (B, T), "labels": (B, T)}``."""
    logits_BTV = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def seq2seq_lm_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the text that follows; ``{"tokens": (B, T), "labels": (B, T)}``."""
    logits_BTV = model(input_ids=batch["tokens"], labels=batch["labels"]).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten())


def classification_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the class; ``{"tokens": (B, T), "mask": (B, T), "labels": (B,)}``.

    Attention gets the whole mask: from one of padding, transformers would choose a kernel by whether a batch has any.
    """
    length = batch["mask"].shape[1]
    mask_B1TT = batch["mask"].bool()[:, None, None, :].expand(-1, 1, length, -1)
    if any(getattr(module, "is_causal", False) for module in model.modules()):
        mask_B1TT = mask_B1TT & torch.ones(length, length, dtype=torch.bool).tril()
    logits_BC = model(input_ids=batch["tokens"], attention_mask=mask_B1TT).logits
    return F.cross_entropy(logits_BC, batch["labels"])


def contrastive_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of finding, for each text, the one that follows it; ``{"first": (B, T), "second": (B, T)}``.

    A text is the mean of its tokens' last hidden states; similarity is the cosine.

    Source: Henderson et al. 2017 (arXiv:1705.00652); MultipleNegativesRankingLoss of sentence-transformers.
    """
    hidden_BTD = model(input_ids=torch.cat([batch["first"], batch["second"]])).last_hidden_state
    first_BD, second_BD = F.normalize(hidden_BTD.mean(1), dim=-1).chunk(2)
    scores_BB = first_BD @ second_BD.T * SIMILARITY_SCALE
    return F.cross_entropy(scores_BB, torch.arange(len(scores_BB)))


def own_loss(model: Any, batch: Batch) -> Any:
    """Loss that the model's forward gives, called with the batch as arguments by name.

    Raises:
        ConfigError: it gives none.
    """
    out = model(**batch)
    if not hasattr(out, "to_tuple"):  # no output of transformers: a scalar or several
        return out
    if out.get("loss") is None:
        raise ConfigError(
            f"data.inputs: expected what {type(model).__name__} takes its loss from (mostly 'labels'), got "
            f"{', '.join(batch)}, for which it gives no loss"
        )
    return out["loss"].mean()


LOSSES: Mapping[str, Callable[[Any, Batch], torch.Tensor]] = MappingProxyType(
    {
        "causal-lm": causal_lm_loss,
        "masked-lm": masked_lm_loss,
        "seq2seq-lm": seq2seq_lm_loss,
        "classification": classification_loss,
        "contrastive": contrastive_loss,
        "own": own_loss,
    }
)
