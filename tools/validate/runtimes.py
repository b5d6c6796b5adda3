"""Runtimes that are not PyTorch's: which of them a row ran on, in which version, and what follows of it.

What the field of the framework names counts before all other words, because a source may compare frameworks. Words that
deny or compare ("without XLA", "twice as fast as Keras", "XLA off") name nothing that ran.
"""

from __future__ import annotations

import re
from typing import Any

from tools.validate.rows import Row

_DENIED_BEHIND = re.compile(
    r"[^\s,;|()]+(?: v?\d[\d.]*)? ?(?:is |are |was |were |[=:] ?)?"
    r"(?:off|disabled|false|unused|not (?:used|enabled|available|supported|installed))\b"
)
_DENIED_AHEAD = re.compile(
    r"(?<![-\w])(?:no|not|without|w/o|unlike|instead of|than|faster|slower|(?:fast|slow) as|vs\.?|versus|"
    r"compared (?:with|to))(?![-\w])[^;|,()]*"
)
#: Software on PyTorch, as the field of a framework names it.
_ON_PYTORCH = r"megatron|pytorch|\bfsdp|deepspeed|transformers|lightning|colossal"
#: Software with a runtime of its own: the name of a source's report on another says nothing of it.
_OWN_RUNTIME = r"\boneflow\b|\btensorflow\b|\bkeras\b|\bmindspore\b|\bmxnet\b"
_ON_JAX = r"\bjax\b|\bflax\b|maxtext|paxml|\bt5x\b|\beasylm\b|\balpa\b|axlearn|levanter"
_TENSORFLOW = re.compile(r"\b(?:tensorflow|tf)(?:[-=/ (v]*(\d+)(?:\.(\d+))?)?(?![\w])")
#: Software whose attention is that of its own layers, products and a softmax: praxis layers/attentions.py
#: (DotProductAttention), keras layers/attention/multi_head_attention.py before 3.7 (end of 2024; keras-team/keras pulls
#: 20448 and 20489), whatever its backend.
_IN_LAYERS = r"\bpaxml\b|\bt5x\b|\beasylm\b|\bkeras\b"
_KERAS_FUSED, _KERAS_FUSED_YEAR = (3, 7), 2025
_KERAS = re.compile(r"\bkeras[-=/ (v]*(\d+)\.(\d+)")


#: FLOP of a random number in XLA's code for GPUs. Dropout made BERT-base 1.41 times as long on a V100 and 1.21 times on
#: a T4, where it cost PyTorch 9% (pytorch/xla issues 3868 and 3352): 820 to 1,390 and 930 FLOP a number by Philox, 240
#: to 470 by ThreeFry, by the lengths of 256 to 512 tokens that the other speeds there fit. Assumption: between both.
#: Without each of four outside sources 600 to 800 fits the others.
_XLA_RANDOM_FLOP = 600.0


def affirmed(words: str) -> str:
    """Words in lower case, without those that are denied, switched off or only compared with."""
    return _DENIED_AHEAD.sub(" ", _DENIED_BEHIND.sub(" ", words.lower()))


def _named(row: Row) -> str:
    return affirmed(str(row.layout.get("framework", "")))


def has_own_runtime(row: Row) -> bool:
    """Whether the field of the framework names software with a runtime that is not PyTorch's."""
    return re.search(_OWN_RUNTIME, _named(row)) is not None


def words_of_runtime(row: Row, text: str) -> str:
    """Words that may name a runtime: the framework's alone where that runs on PyTorch, else all, denials left out."""
    named = _named(row)
    return named if re.search(_ON_PYTORCH, named) else f"{named} | {affirmed(text)}"


def rounds_by_default(row: Row) -> bool:
    """Whether a row's framework rounds fp32 operands of products to TF32 by itself.

    JAX does (jax.lax.Precision, DEFAULT), and TensorFlow from 2.4 on
    (tf.config.experimental.enable_tensor_float_32_execution: "enabled by default").
    """
    named = _named(row)
    if re.search(_ON_JAX, named):
        return True
    told = _TENSORFLOW.search(named)
    if told is None:
        return False
    return int(told[1] or 2) > 2 or (int(told[1] or 2) == 2 and int(told[2] or 4) >= 4)


def has_attention_in_layers(row: Row, text: str, year: int) -> bool:
    """Whether attention is products and a softmax of the framework's own layers.

    Args:
        year: Of the row's source; 0 where it has none.
    """
    words = words_of_runtime(row, text)
    if not re.search(_IN_LAYERS, words):
        return False
    if "keras" not in words:
        return True
    if version := _KERAS.search(words):
        return (int(version[1]), int(version[2])) < _KERAS_FUSED
    return year < _KERAS_FUSED_YEAR


def switches_of_runtime(row: Row, text: str) -> dict[str, Any]:
    """Operations that a framework has no kernel for and XLA would fuse, and random numbers that XLA draws.

    keras-hub's norms (models/mistral/mistral_layer_norm.py, gemma/rms_normalization.py) and TensorFlow 1's GELU
    (google-research/bert modeling.py, gelu) are operations one by one.
    """
    named = _named(row)
    settings: dict[str, Any] = {}
    if "keras" in named and re.search(r"(?:py|\b)torch\b", named):
        settings["eager_norms"] = True
    told, xla = _TENSORFLOW.search(named), re.search(r"\bxla\b", affirmed(f"{named} | {text}"))
    if told and told[1] == "1" and not xla:
        settings["unfused"] = ("gelu",)
    if (told and xla) or re.search(_ON_JAX, named):
        settings["random_flop"] = _XLA_RANDOM_FLOP
    return settings
