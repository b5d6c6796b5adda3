"""Tiny models by rule: any model type of transformers from its default configuration, made small, with inputs to match.

Widths are all divided by one number, so that what was a multiple of another stays one; there are few layers, experts
and tokens. Which sizes and inputs a type takes is found by trying: the first attempt whose step runs in eager stands.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from benchmarks.capture.family import LENGTH, ROWS, VOCABULARY, Batch, Family, drawn, ids, output_loss
from torch import nn

#: Tables of transformers that say which class of a model type does what, the most telling first.
_TABLES = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "DEPTH_ESTIMATION", "MASK_GENERATION",
    "ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING",
    "QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING", "TOKEN_CLASSIFICATION", "TIME_SERIES_PREDICTION",
    "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "BACKBONE",
)  # fmt: skip
_FACTORS = (32, 16, 8, 64, 4)
_MOST_PARAMETERS = 6_000_000
_WIDTH = re.compile(
    r"hidden|(^|_)dims?($|_)|dim$|d_model|d_ff|d_kv|ffn|width|n_embd|n_inner|channels?($|_)|intermediate|embed|lora_rank|"
    r"projection_size|mlp_dim|head_size|filters|lru"
)
_NOT_WIDTH = re.compile(
    r"layers|_act|heads|position|vocab|token|image|patch|window|kernel|stride|num_|ratio|rate|num_channels|in_chans|"
    r"audio_channels|_index|layerdrop|groups|blocks|context|mel|divisor|multiplier|factor|levels|frequency|max_|prob|"
    r"temperature|scale|drop|depth|type|rotary|theta|^input_channels|^in_channels$"
)
_LAYERS = re.compile(
    r"(num|n)_(hidden_|encoder_|decoder_|transformer_|mtp_|backbone_)?(layers?|blocks)$|(encoder|decoder|backbone)_(num_)?(hidden_)?"
    r"layers$|^depth$|^layers$|_num_layers$|_depth$"
)
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$|^num_experts$")


#: What follows from other settings, or numbers layers that are no longer there.
_LEFT_OUT = frozenset({
    "transformers_version", "architectures", "model_type", "torch_dtype", "dtype", "stage_names", "out_features",
    "out_indices", "per_layer_config",
})  # fmt: skip
#: In place of backbones that need another library.
_BACKBONE: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
#: What some types leave to be said.
_MISSING = {"vocab_size": VOCABULARY, "prediction_length": 6, "context_length": 24}


def type_names() -> list[str]:
    """Every model type that transformers knows."""
    return sorted(_config_names())


@cache
def _config_names() -> dict[str, str]:
    return dict(import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES)


def class_names(model_type: str) -> list[str]:
    """Classes of a model type: what it is made for, then the bare model."""
    auto = import_module("transformers.models.auto.modeling_auto")
    tables = [f"MODEL_FOR_{name}_MAPPING_NAMES" for name in _TABLES]
    found: list[str] = []
    for table in (
        *tables,
        "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
        "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    ):
        name = getattr(auto, table, {}).get(model_type, ())
        found += [name] if isinstance(name, str) else list(name)
    return list(dict.fromkeys(found))


def tiny_family(model_type: str) -> Family | str:
    """A family of that type whose step runs in eager; or why there is none."""
    transformers = import_module("transformers")
    config_class = getattr(transformers, _config_names()[model_type])
    reasons: dict[str, str] = {}
    for name in class_names(model_type):
        made = getattr(transformers, name, None)
        if made is None:
            continue
        for sizes in _attempts(config_class):
            try:
                config = config_class(**sizes)
                with torch.device("meta"):
                    count = sum(p.numel() for p in made(config).parameters())
                if count > _MOST_PARAMETERS:
                    reasons.setdefault(name, f"{count} parameters")
                    continue
                family = _with_inputs(model_type, made, config_class, sizes)
            except ImportError as error:  # no attempt can do
                reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                break
            except Exception as error:  # the next attempt may do
                reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            return family
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no model class"


def _with_inputs(model_type: str, made: Any, config_class: Any, sizes: dict[str, Any]) -> Family:
    """The family with the first inputs that the model takes."""

    def build() -> nn.Module:
        return made(config_class(**sizes)).train()

    torch.manual_seed(0)
    model = build()
    failed = ""
    for batch in batches(model):
        try:
            loss = output_loss(model, batch)
            if loss.requires_grad and loss.dim() == 0:
                loss.backward()
                kind = made.__name__
                return Family(
                    name=f"type {model_type}", kind=kind, build=build, batch=partial(dict, batch), loss=output_loss
                )
            failed = failed or "the loss has no gradient"
        except Exception as error:  # other inputs may do
            failed = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    raise ValueError(f"inputs: {failed}")


def _attempts(config_class: Any) -> Iterator[dict[str, Any]]:
    """Sizes to try, in turn."""
    default = config_class().to_dict()
    seen: list[dict[str, Any]] = []
    for image in (64, 32, 0):
        for factor in _FACTORS:
            for heads in (0, 4):
                made = _shrunk(default, factor, image)
                made = _with_heads(made, heads) if heads else made
                if made not in seen:
                    seen.append(made)
                    yield made


def _with_heads(sizes: dict[str, Any], heads: int) -> dict[str, Any]:
    """At most so many heads of attention, everywhere."""
    found: dict[str, Any] = {}
    for key, value in sizes.items():
        if isinstance(value, dict):
            found[key] = _with_heads(value, heads)
        elif (
            isinstance(value, int) and not isinstance(value, bool) and re.search(r"heads$|^n_head$|^num_kv_heads$", key)
        ):
            found[key] = min(value, heads // 2 if re.search(r"key_value|kv", key) else heads)
        else:
            found[key] = value
    return found


def _shrunk(data: dict[str, Any], factor: int, image: int) -> dict[str, Any]:
    layers = 2 if not isinstance(data.get("layer_types"), list) else 4
    depth = next((data[k] for k in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(data.get(k), int)), 0)
    found: dict[str, Any] = {}
    for key, given in data.items():
        value = _repeated(given, layers) if isinstance(given, (list, tuple)) and len(given) == depth > layers else given
        if key in _LEFT_OUT:
            continue
        if isinstance(value, dict) and str(value.get("model_type", "")).startswith("timm"):
            found[key] = _BACKBONE | {"out_indices": [2, 3, 4] if data.get("num_feature_levels", 1) > 1 else [4]}
            continue
        if isinstance(value, dict) and key.endswith("config"):
            found[key] = _shrunk(value, factor, image) | (
                {"model_type": value["model_type"]} if "model_type" in value else {}
            )
        else:
            found[key] = _small(key, value, factor, image, layers)
    _consistent(found)
    return found


def _repeated(values: Any, count: int) -> list[Any]:
    """Shorten what is said for each layer to ``count`` layers: every kind there is, in turn."""
    kinds = list({str(v): v for v in values}.values())
    return [kinds[i % len(kinds)] for i in range(count)]


def _small(key: str, value: Any, factor: int, image: int, layers: int) -> Any:
    """One setting made small."""
    if value is None and key in _MISSING:
        return _MISSING[key]
    if isinstance(value, bool) or value is None:
        return value
    if key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        return 0.0
    if key == "apply_spec_augment":
        return False
    if isinstance(value, int):
        return _small_int(key, value, factor, image, layers)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        if key in ("depths", "blocks_per_stage", "num_block_repeats"):
            return [1] * len(value)
        if key in ("image_size", "video_size", "input_size") and image:
            return [image] * len(value)
        if _WIDTH.search(key) and not _NOT_WIDTH.search(key):
            return [max(4, v // factor) if v > 8 else v for v in value]
        return value
    if isinstance(value, (list, tuple)) and key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(value))
        return [kinds[i % len(kinds)] for i in range(layers)]
    return value


def _small_int(key: str, value: int, factor: int, image: int, layers: int) -> int:
    if key.endswith(("token_id", "token_index", "_token_ids")):
        return value
    if key == "vocab_size" or key.endswith("_vocab_size"):
        return min(value, VOCABULARY)
    if _LAYERS.search(key):
        return min(value, layers)
    if _EXPERTS.search(key):
        return min(value, 4)
    if key == "num_groups":
        return min(value, 4)
    if key in ("n_group", "topk_group", "num_expert_groups"):
        return 1
    if key in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"):
        return min(value, 2)
    if key in ("image_size", "img_size", "pretrain_image_size", "input_size") and image and value > image:
        return image
    if "position_embeddings" in key or key in (
        "n_positions",
        "max_source_positions",
        "max_target_positions",
        "max_seq_len",
    ):
        return min(value, 128)
    if key in ("sliding_window", "attention_window_size", "local_attention"):
        return min(value, 4)
    if value > 8 and _WIDTH.search(key) and not _NOT_WIDTH.search(key):
        return max(4, value // factor)
    return value


def _consistent(sizes: dict[str, Any]) -> None:
    """Ids of special tokens below the vocabulary, each its own."""
    vocabulary = sizes.get("vocab_size", VOCABULARY)
    vocabulary = vocabulary if isinstance(vocabulary, int) else VOCABULARY
    taken: dict[int, int] = {}
    for key, value in sizes.items():
        if key.endswith(("token_id", "token_index")) and type(value) is int and value >= vocabulary:
            sizes[key] = taken.setdefault(value, vocabulary - 1 - len(taken) % (vocabulary - 8))
    if sizes.get("use_timm_backbone"):
        sizes["use_timm_backbone"] = False
    for key in ("num_hidden_layers", "num_layers", "n_layer"):
        if isinstance(sizes.get("layer_types"), list) and key in sizes:
            sizes[key] = len(sizes["layer_types"])


def batches(model: nn.Module) -> Iterator[Batch]:
    """Inputs to try, in turn, by the arguments of the model's forward."""
    named = inspect.signature(model.forward).parameters
    config: Any = model.config
    main = getattr(model, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, (list, tuple)) else main
    text = ids(ROWS, LENGTH, high=40)
    labels = {"labels": text} if "labels" in named else {}
    for image in _images(config) if "pixel_values" in named else ():
        yield from _with_pixels(config, named, image, text)
    if "pixel_values_videos" in named and main == "pixel_values_videos":
        size, frames = (
            _first(config, "image_size", "crop_size", default=64),
            _first(config, "num_frames", "frames_per_clip", default=4),
        )
        yield {main: drawn(ROWS, frames, 3, size, size)}
    if "input_ids" in named:
        yield {"input_ids": text} | labels
        yield {"input_ids": text, "decoder_input_ids": text}
        yield {"input_ids": text, "attention_mask": torch.ones_like(text)} | labels
        yield {"input_ids": text}
    mels = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", default=80)
    for name in ("input_features", "audio_values", "features", "spectrogram"):
        if name in named:
            for shape in (
                (ROWS, 64, mels),
                (ROWS, mels, 64),
                (ROWS, mels, 2 * _first(config, "max_source_positions", default=50)),
            ):
                sound = {name: drawn(*shape)}
                yield sound | ({"labels": ids(ROWS, 3, low=1, high=30)} if "labels" in named else {})
                yield sound | ({"labels": ids(ROWS, low=0, high=2)} if "labels" in named else {})
                yield sound | {"decoder_input_ids": text}
                yield sound | {"attention_mask": torch.ones(ROWS, 64, dtype=torch.int64)}
                yield sound
    if "input_values" in named:
        for shape in ((ROWS, 2000), (ROWS, 1, 3840), (ROWS, 8000), (ROWS, 64, mels)):
            sound = {"input_values": drawn(*shape)}
            yield sound | ({"labels": ids(ROWS, 3, low=1, high=30)} if "labels" in named else {})
            yield sound | ({"labels": ids(ROWS, low=0, high=2)} if "labels" in named else {})
            yield sound
    if "past_values" in named:
        yield from _series(config, named)
    if "inputs_embeds" in named or "hidden_states" in named:
        width = _first(config, "hidden_size", "d_model", default=32)
        yield {"inputs_embeds" if "inputs_embeds" in named else "hidden_states": drawn(ROWS, LENGTH, width)}


def _with_pixels(config: Any, named: Any, image: torch.Tensor, text: torch.Tensor) -> Iterator[Batch]:
    pixels: Batch = {"pixel_values": image}
    if "input_ids" in named:
        marker = _first(config, "image_token_id", "image_token_index", default=-1)
        for count in (0, 4, 16, 1, 9, 64, 2):
            marked = torch.cat([torch.full((ROWS, count), marker), text], dim=1) if count and marker >= 0 else text
            both = pixels | {"input_ids": marked}
            if count and marker < 0:
                break
            if "labels" in named:
                yield both | {"labels": marked}
            if "return_loss" in named:
                yield both | {"return_loss": True}
            yield both
        return
    if "labels" in named:
        yield pixels | {"labels": ids(ROWS, low=0, high=2)}
        yield pixels | {"labels": ids(ROWS, *image.shape[-2:], low=0, high=2)}
        boxes = torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.2, 0.2]])
        yield pixels | {"labels": [{"class_labels": torch.tensor([0, 1]), "boxes": boxes}] * ROWS}
    yield pixels
    if "mask_labels" in named:
        masks = [torch.ones(2, *image.shape[-2:])] * ROWS
        yield pixels | {"mask_labels": masks, "class_labels": [torch.tensor([0, 1])] * ROWS}
    if "decoder_input_ids" in named:
        yield pixels | {"decoder_input_ids": text}


def _images(config: Any) -> Iterator[torch.Tensor]:
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) and channels <= 4 else 3
    size = _first(config, "image_size", "img_size", default=64)
    size = size if isinstance(size, int) else max(size) if isinstance(size, (list, tuple)) else 64
    for side in dict.fromkeys((size, 64, 128, 224)):
        yield drawn(ROWS, channels, side, side)
    frames = _first(config, "num_frames", default=4)
    yield drawn(ROWS, frames, channels, size, size)


def _series(config: Any, named: Any) -> Iterator[Batch]:
    past = _first(config, "context_length", default=24)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    ahead = _first(config, "prediction_length", default=6)
    channels = _first(config, "num_input_channels", "input_size", default=1)
    shape = (channels,) if channels > 1 or "num_input_channels" in vars(config) else ()
    features = getattr(config, "num_time_features", 0)
    batch: Batch = {"past_values": drawn(ROWS, past + lags, *shape)}
    if "past_time_features" in named:
        batch |= {"past_time_features": drawn(ROWS, past + lags, features),
                  "future_time_features": drawn(ROWS, ahead, features),
                  "past_observed_mask": torch.ones(ROWS, past + lags, *shape)}  # fmt: skip
    if "future_values" in named:
        yield batch | {"future_values": drawn(ROWS, ahead, *shape, seed=3)}
    yield batch


def _first(config: Any, *names: str, default: Any) -> Any:
    """The first of these settings in a configuration or the configurations inside it."""
    inner = [
        getattr(config, n)
        for n in ("vision_config", "audio_config", "text_config", "encoder_config", "backbone_config")
        if getattr(config, n, None) is not None
    ]
    for one in (config, *inner):
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
    return default
