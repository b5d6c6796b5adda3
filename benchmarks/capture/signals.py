"""Families that see or hear: vision, audio, and both with text."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.capture.family import LENGTH, ROWS, Batch, Family, drawn, hugging_face, ids, tokens
from benchmarks.capture.text import BART, SIZES

VIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "num_channels": 3,
}  # fmt: skip
WAVE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False,
    "pad_token_id": 0,
}  # fmt: skip


def image(side: int = 16, *, labels: bool = True) -> Batch:
    """Pixels, and a class each."""
    return {"pixel_values": drawn(ROWS, 3, side, side)} | ({"labels": ids(ROWS, low=0, high=2)} if labels else {})


def pixels(side: int = 16) -> Batch:
    """Pixels alone."""
    return image(side, labels=False)


def sound() -> Batch:
    """Samples and the text they say."""
    return {"input_values": drawn(ROWS, 400), "labels": ids(ROWS, 3, low=1, high=32)}


def spectrum() -> Batch:
    """For whisper: frames of a spectrum and text."""
    return {"input_features": drawn(ROWS, 8, 40), "labels": ids(ROWS, LENGTH)}


def captioned(side: int = 16) -> Batch:
    """Pixels and text, one pair a row."""
    return {"input_ids": ids(ROWS, LENGTH), "pixel_values": drawn(ROWS, 3, side, side), "return_loss": True}


def _classifier(name: str, prefix: str, *, side: int = 16, **sizes: Any) -> Family:
    return hugging_face(
        name, "vision", f"{prefix}ForImageClassification", f"{prefix}Config", partial(image, side), **sizes
    )


def _stages(**sizes: Any) -> dict[str, Any]:
    return {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 1], "hidden_dropout_prob": 0.1} | sizes


VISION = [
    _classifier("vit", "ViT", **VIT),
    _classifier("deit", "DeiT", **VIT),
    _classifier("beit", "Beit", **VIT, drop_path_rate=0.2, use_relative_position_bias=True, vocab_size=16),
    _classifier("data2vec-vision", "Data2VecVision", **VIT, vocab_size=16),
    _classifier("dinov2", "Dinov2", **VIT, drop_path_rate=0.2),
    _classifier("dinov2, registers", "Dinov2WithRegisters", **VIT, num_register_tokens=2),
    hugging_face("dinov3_vit", "vision", "DINOv3ViTModel", "DINOv3ViTConfig", pixels, **VIT),
    _classifier("ijepa", "IJepa", **VIT),
    _classifier("vit_msn", "ViTMSN", **VIT),
    hugging_face("vit_mae", "vision", "ViTMAEForPreTraining", "ViTMAEConfig", pixels, **VIT, decoder_hidden_size=32,
                 decoder_num_attention_heads=4, decoder_num_hidden_layers=1, decoder_intermediate_size=48),
    _classifier("swin", "Swin", side=16, image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                window_size=4, drop_path_rate=0.2),
    _classifier("swinv2", "Swinv2", side=16, image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                window_size=4),
    _classifier("convnext", "ConvNext", side=32, **_stages(num_stages=2, drop_path_rate=0.2)),
    _classifier("convnextv2", "ConvNextV2", side=32, **_stages(num_stages=2)),
    _classifier("resnet", "ResNet", side=32, **_stages(embedding_size=8, layer_type="basic")),
    _classifier("regnet", "RegNet", side=32, **_stages(embedding_size=8, groups_width=4)),
    _classifier("mobilenet_v1", "MobileNetV1", side=32, image_size=32, depth_multiplier=0.25),
    _classifier("mobilenet_v2", "MobileNetV2", side=32, image_size=32, depth_multiplier=0.25),
    _classifier("efficientnet", "EfficientNet", side=32, image_size=32, width_coefficient=0.25, depth_coefficient=0.3,
                hidden_dim=320),
    _classifier("segformer", "Segformer", side=32, depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32],
                sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
                decoder_hidden_size=16),
    _classifier("pvt", "Pvt", side=32, image_size=32, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
                num_attention_heads=[1, 1, 2, 2]),
    _classifier("pvt_v2", "PvtV2", side=32, image_size=32, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16],
                num_attention_heads=[1, 1, 2, 2], mlp_ratios=[2, 2, 2, 2]),
    _classifier("levit", "Levit", side=64, image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[1, 2, 3],
                depths=[1, 1, 1], key_dim=[8, 8, 8]),
    _classifier("poolformer", "PoolFormer", side=32, depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16]),
    _classifier("mobilevit", "MobileViT", side=64, image_size=64, hidden_sizes=[16, 24, 32],
                neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], num_attention_heads=2),
    _classifier("focalnet", "FocalNet", side=32, image_size=32, patch_size=4, embed_dim=16, depths=[1, 1],
                focal_levels=[1, 1], focal_windows=[3, 3]),
    _classifier("bit", "Bit", side=32, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], num_groups=4),
    _classifier("hiera", "Hiera", side=64, image_size=[64, 64], embed_dim=16, depths=[1, 1], num_heads=[1, 2],
                query_stride=[2, 2], masked_unit_size=[8, 8], num_query_pool=1),
    hugging_face("yolos", "vision", "YolosModel", "YolosConfig", pixels, **VIT | {"image_size": [16, 16]},
                 num_detection_tokens=4),
    hugging_face("segformer, segmentation", "vision", "SegformerForSemanticSegmentation", "SegformerConfig",
                 lambda: {"pixel_values": drawn(ROWS, 3, 32, 32), "labels": ids(ROWS, 32, 32, low=0, high=2)},
                 depths=[1, 1], num_encoder_blocks=2, hidden_sizes=[16, 32], sr_ratios=[2, 1], patch_sizes=[7, 3],
                 strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2], decoder_hidden_size=16),
    hugging_face("videomae", "vision", "VideoMAEForVideoClassification", "VideoMAEConfig",
                 lambda: {"pixel_values": drawn(ROWS, 4, 3, 16, 16), "labels": ids(ROWS, low=0, high=2)}, **VIT,
                 num_frames=4),
    hugging_face("timesformer", "vision", "TimesformerForVideoClassification", "TimesformerConfig",
                 lambda: {"pixel_values": drawn(ROWS, 4, 3, 16, 16), "labels": ids(ROWS, low=0, high=2)}, **VIT,
                 num_frames=4),
    hugging_face("sam-vision", "vision", "SamVisionModel", "SamVisionConfig", pixels, **VIT, mlp_dim=48,
                 output_channels=16,
                 window_size=2, global_attn_indexes=[1]),
]  # fmt: skip

AUDIO = [
    hugging_face("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", sound, **WAVE),
    hugging_face("hubert", "audio", "HubertForCTC", "HubertConfig", sound, **WAVE),
    hugging_face("wavlm", "audio", "WavLMForCTC", "WavLMConfig", sound, **WAVE),
    hugging_face("data2vec-audio", "audio", "Data2VecAudioForCTC", "Data2VecAudioConfig", sound,
                 **WAVE | {"num_conv_pos_embeddings": 2}),
    hugging_face("sew", "audio", "SEWForCTC", "SEWConfig", sound, **WAVE, squeeze_factor=2),
    hugging_face("unispeech", "audio", "UniSpeechForCTC", "UniSpeechConfig", sound, **WAVE, num_ctc_classes=32),
    hugging_face("ast", "audio", "ASTForAudioClassification", "ASTConfig",
                 lambda: {"input_values": drawn(ROWS, 32, 16), "labels": ids(ROWS, low=0, high=2)},
                 **{k: v for k, v in VIT.items() if k not in ("image_size", "num_channels")}, num_mel_bins=16,
                 max_length=32,
                 frequency_stride=4, time_stride=4),
    hugging_face("whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig", spectrum,
                 **BART | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}),
    hugging_face("speech_to_text", "audio", "Speech2TextForConditionalGeneration", "Speech2TextConfig",
                 lambda: {"input_features": drawn(ROWS, 40, 8), "labels": ids(ROWS, LENGTH)},
                 **BART | {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64,
                           "max_target_positions": 64}),
    hugging_face("moonshine", "audio", "MoonshineForConditionalGeneration", "MoonshineConfig",
                 lambda: {"input_values": drawn(ROWS, 2000), "labels": ids(ROWS, LENGTH)},
                 **SIZES | {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
                            "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}),
    hugging_face("dac", "audio", "DacModel", "DacConfig", lambda: {"input_values": drawn(ROWS, 1, 640)},
                 encoder_hidden_size=8, decoder_hidden_size=16, downsampling_ratios=[4, 2], n_codebooks=2,
                 codebook_size=8,
                 codebook_dim=4),
    hugging_face("vits", "audio", "VitsModel", "VitsConfig", lambda: {"input_ids": ids(1, 6)}, vocab_size=64),
]  # fmt: skip

_TEXT = dict(SIZES)
_VISION = VIT | {"num_attention_heads": 4}
BOTH = [
    hugging_face("clip", "vision-text", "CLIPModel", "CLIPConfig", captioned, text_config=_TEXT, vision_config=_VISION,
                 projection_dim=16),
    hugging_face("siglip", "vision-text", "SiglipModel", "SiglipConfig", captioned, text_config=_TEXT,
                 vision_config=_VISION),
    hugging_face("chinese_clip", "vision-text", "ChineseCLIPModel", "ChineseCLIPConfig", captioned, text_config=_TEXT,
                 vision_config=_VISION, projection_dim=16),
    hugging_face("altclip", "vision-text", "AltCLIPModel", "AltCLIPConfig", captioned,
                 text_config=_TEXT | {"project_dim": 32},
                 vision_config=_VISION, projection_dim=16),
    hugging_face("groupvit", "vision-text", "GroupViTModel", "GroupViTConfig", captioned, text_config=_TEXT,
                 vision_config=_VISION | {"depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4,
                 2, 0],
                 "hidden_size": 32}, projection_dim=16),
    hugging_face("clap", "audio-text", "ClapTextModelWithProjection", "ClapTextConfig",
                 lambda: {"input_ids": ids(ROWS, LENGTH)}, **SIZES | {"projection_dim": 16}),
    hugging_face("flava", "vision-text", "FlavaImageModel", "FlavaImageConfig", pixels, **VIT),
    hugging_face("vilt", "vision-text", "ViltForMaskedLM", "ViltConfig",
                 lambda: tokens() | {"pixel_values": drawn(ROWS, 3, 16, 16)}, **SIZES | VIT | {"max_image_length": -1}),
    hugging_face("blip", "vision-text", "BlipForConditionalGeneration", "BlipConfig",
                 lambda: tokens() | {"pixel_values": drawn(ROWS, 3, 16, 16)},
                 text_config=_TEXT | {"encoder_hidden_size": 32}, vision_config=_VISION, image_text_hidden_size=16),
    hugging_face("git", "vision-text", "GitForCausalLM", "GitConfig",
                 lambda: tokens() | {"pixel_values": drawn(ROWS, 3, 16, 16)}, **SIZES, vision_config=_VISION),
    hugging_face("layoutlm", "vision-text", "LayoutLMForMaskedLM", "LayoutLMConfig",
                 lambda: tokens() | {"bbox": ids(ROWS, LENGTH, 1, low=0, high=30).expand(-1, -1, 4)}, **SIZES,
                 max_2d_position_embeddings=32),
    hugging_face("llava", "vision-text", "LlavaForConditionalGeneration", "LlavaConfig",
                 lambda: _with_image_tokens(16), text_config=_TEXT | {"model_type": "llama"},
                 vision_config=_VISION | {"model_type": "clip_vision_model"}, image_token_index=5,
                 vision_feature_select_strategy="default"),
    hugging_face("patchtst", "time-series", "PatchTSTForPrediction", "PatchTSTConfig",
                 lambda: {"past_values": drawn(ROWS, 24, 2), "future_values": drawn(ROWS, 6, 2)}, num_input_channels=2,
                 context_length=24, prediction_length=6, patch_length=4, patch_stride=4, d_model=16,
                 num_hidden_layers=2,
                 num_attention_heads=2, ffn_dim=32, loss="mse"),
    hugging_face("patchtsmixer", "time-series", "PatchTSMixerForPrediction", "PatchTSMixerConfig",
                 lambda: {"past_values": drawn(ROWS, 24, 2), "future_values": drawn(ROWS, 6, 2)}, num_input_channels=2,
                 context_length=24, prediction_length=6, patch_length=4, patch_stride=4, d_model=16, num_layers=2,
                 loss="mse"),
    hugging_face("decision_transformer", "time-series", "DecisionTransformerModel", "DecisionTransformerConfig",
                 lambda: {"states": drawn(ROWS, 5, 4), "actions": drawn(ROWS, 5, 2), "rewards": drawn(ROWS, 5, 1),
                          "returns_to_go": drawn(ROWS, 5, 1), "timesteps": ids(ROWS, 5, low=0, high=9)},
                 state_dim=4, act_dim=2, hidden_size=32, n_layer=2, n_head=4, max_ep_len=16),
    hugging_face("esm", "protein", "EsmForMaskedLM", "EsmConfig", tokens, **SIZES, position_embedding_type="rotary",
                 mask_token_id=4),
]  # fmt: skip


def _with_image_tokens(count: int) -> Batch:
    """Text with places for an image's patches."""
    found = ids(ROWS, LENGTH + count, low=6)
    found[:, :count] = 5
    return {"input_ids": found, "labels": found, "pixel_values": drawn(ROWS, 3, 16, 16)}


SIGNALS: list[Family] = [*VISION, *AUDIO, *BOTH]
