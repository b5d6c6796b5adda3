"""Families of diffusers: diffusion transformers, U-nets and autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.capture.family import ROWS, Batch, Family, diffuser, drawn, ids

STEPS = torch.tensor([3, 700])


def image(channels: int = 4, side: int = 8, **more: Any) -> Batch:
    """Noisy latents and their time steps."""
    return {"hidden_states": drawn(ROWS, channels, side, side), "timestep": STEPS} | more


def text(width: int = 16, length: int = 6) -> torch.Tensor:
    """Draw features of a text, as an encoder gives them: (rows, length, width)."""
    return drawn(ROWS, length, width, seed=2)


def video(channels: int = 4, frames: int = 2, side: int = 8, **more: Any) -> Batch:
    """Noisy latents of a film."""
    return {"hidden_states": drawn(ROWS, channels, frames, side, side), "timestep": STEPS} | more


HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
UNET: dict[str, Any] = {
    "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8,
}  # fmt: skip


def _flux_batch(guidance: bool = False) -> Batch:
    return {
        "hidden_states": drawn(ROWS, 16, 4), "encoder_hidden_states": text(), "pooled_projections": drawn(ROWS, 16),
        "timestep": torch.tensor([0.3, 0.7]), "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
    } | ({"guidance": torch.tensor([3.5, 3.5])} if guidance else {})  # fmt: skip


TRANSFORMERS = [
    diffuser("diffusers dit", "diffusion", "DiTTransformer2DModel",
             lambda: image(class_labels=ids(ROWS, low=0, high=10)), **HEADS, in_channels=4, out_channels=8,
             sample_size=8,
             num_embeds_ada_norm=10, norm_num_groups=4),
    diffuser("pixart", "diffusion", "PixArtTransformer2DModel",
             lambda: image(encoder_hidden_states=text(), added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
             **HEADS, in_channels=4, out_channels=8, sample_size=8, cross_attention_dim=16, caption_channels=16,
             use_additional_conditions=False, norm_num_groups=4),
    diffuser("sd3", "diffusion", "SD3Transformer2DModel",
             lambda: image(encoder_hidden_states=text(), pooled_projections=drawn(ROWS, 16)), sample_size=8,
             in_channels=4,
             out_channels=4, patch_size=2, num_layers=2, attention_head_dim=8, num_attention_heads=2,
             joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8),
    diffuser("flux", "diffusion", "FluxTransformer2DModel", _flux_batch, in_channels=4, num_layers=1,
             num_single_layers=1,
             attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
             axes_dims_rope=(4, 4, 8)),
    diffuser("flux, guidance", "diffusion", "FluxTransformer2DModel", lambda: _flux_batch(True), in_channels=4,
             num_layers=1,
             num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
             pooled_projection_dim=16, axes_dims_rope=(4, 4, 8), guidance_embeds=True),
    diffuser("auraflow", "diffusion", "AuraFlowTransformer2DModel",
             lambda: image(encoder_hidden_states=text()) | {"timestep": torch.tensor([0.1, 0.9])}, sample_size=8,
             in_channels=4,
             out_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=2,
             joint_attention_dim=16, caption_projection_dim=16, pos_embed_max_size=16),
    diffuser("sana", "diffusion", "SanaTransformer2DModel", lambda: image(encoder_hidden_states=text()), in_channels=4,
             out_channels=4, **HEADS, num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16,
             caption_channels=16, sample_size=8),
    diffuser("lumina2", "diffusion", "Lumina2Transformer2DModel",
             lambda: image(encoder_hidden_states=text(), encoder_attention_mask=torch.ones(ROWS, 6, dtype=torch.bool)),
             sample_size=8, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=3,
             num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(32, 32, 32), cap_feat_dim=16),
    diffuser("hunyuan-dit", "diffusion", "HunyuanDiT2DModel", lambda: image(
             encoder_hidden_states=text(), encoder_hidden_states_t5=text(length=4),
             text_embedding_mask=torch.ones(ROWS, 6),
             text_embedding_mask_t5=torch.ones(ROWS, 4), image_meta_size=drawn(ROWS, 6), style=torch.zeros(ROWS,
             dtype=torch.int64),
             image_rotary_emb=(drawn(16, 8), drawn(16, 8))) | {"timestep": STEPS.float()}, sample_size=8, patch_size=2,
             in_channels=4, **HEADS, hidden_size=16, cross_attention_dim=16, cross_attention_dim_t5=16,
             pooled_projection_dim=8, text_len=6, text_len_t5=4, activation_fn="gelu-approximate"),
    diffuser("cogview3", "diffusion", "CogView3PlusTransformer2DModel", lambda: image(
             encoder_hidden_states=text(), original_size=torch.full((ROWS, 2), 8.0), target_size=torch.full((ROWS, 2),
             8.0),
             crop_coords=torch.zeros(ROWS, 2)), in_channels=4, **HEADS, out_channels=4, text_embed_dim=16,
             time_embed_dim=8,
             condition_dim=2, pos_embed_max_size=8, sample_size=8),
    diffuser("qwen-image", "diffusion", "QwenImageTransformer2DModel", lambda: {
             "hidden_states": drawn(ROWS, 16, 16), "encoder_hidden_states": text(), "timestep": torch.tensor([0.3,
             0.7]),
             "encoder_hidden_states_mask": torch.ones(ROWS, 6, dtype=torch.int64), "img_shapes": [[(1, 4, 4)]] * ROWS},
             in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
             joint_attention_dim=16, axes_dims_rope=(8, 4, 4)),
    diffuser("wan", "diffusion", "WanTransformer3DModel", lambda: video(encoder_hidden_states=text()), patch_size=(1,
             2, 2),
             num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
             ffn_dim=24,
             num_layers=2, cross_attn_norm=True, rope_max_seq_len=32),
    diffuser("cogvideox", "diffusion", "CogVideoXTransformer3DModel", lambda: {
             "hidden_states": drawn(ROWS, 2, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": text()},
             num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, text_embed_dim=16,
             num_layers=2,
             sample_width=8, sample_height=8, sample_frames=5, max_text_seq_length=6, time_embed_dim=8),
    diffuser("ltx-video", "diffusion", "LTXVideoTransformer3DModel", lambda: {
             "hidden_states": drawn(ROWS, 32, 4), "timestep": STEPS, "encoder_hidden_states": text(),
             "encoder_attention_mask": torch.ones(ROWS, 6, dtype=torch.int64), "num_frames": 2, "height": 4,
             "width": 4},
             in_channels=4, out_channels=4, **HEADS, cross_attention_dim=16, caption_channels=16),
    diffuser("mochi", "diffusion", "MochiTransformer3DModel", lambda: video(
             encoder_hidden_states=text(), encoder_attention_mask=torch.ones(ROWS, 6, dtype=torch.bool)), patch_size=2,
             **HEADS, pooled_projection_dim=8, in_channels=4, text_embed_dim=16, time_embed_dim=8),
    diffuser("hunyuan-video", "diffusion", "HunyuanVideoTransformer3DModel", lambda: video(
             encoder_hidden_states=text(), encoder_attention_mask=torch.ones(ROWS, 6, dtype=torch.int64),
             pooled_projections=drawn(ROWS, 8), guidance=torch.tensor([1.0, 1.0])), in_channels=4, out_channels=4,
             num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1, num_refiner_layers=1,
             patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
             rope_axes_dim=(2, 4, 4)),
    diffuser("allegro", "diffusion", "AllegroTransformer3DModel", lambda: video(
             encoder_hidden_states=text(), encoder_attention_mask=torch.ones(ROWS, 6, dtype=torch.int64)),
             **HEADS | {"attention_head_dim": 24}, in_channels=4, out_channels=4, cross_attention_dim=48,
             sample_width=8,
             sample_height=8, sample_frames=2, caption_channels=16),
    diffuser("latte", "diffusion", "LatteTransformer3DModel", lambda: video(encoder_hidden_states=text()), **HEADS,
             in_channels=4, out_channels=8, sample_size=8, caption_channels=16, cross_attention_dim=16, patch_size=2,
             video_length=2, norm_type="ada_norm_single", norm_elementwise_affine=False),
    diffuser("stable audio", "diffusion", "StableAudioDiTModel", lambda: {
             "hidden_states": drawn(ROWS, 4, 12), "timestep": torch.tensor([0.1, 0.9]), "encoder_hidden_states": text(),
             "global_hidden_states": drawn(ROWS, 1, 16), "rotary_embedding": None}, sample_size=12, in_channels=4,
             **HEADS,
             num_key_value_attention_heads=2, out_channels=4, cross_attention_dim=16, time_proj_dim=16,
             global_states_input_dim=16, cross_attention_input_dim=16),
    diffuser("prior", "diffusion", "PriorTransformer", lambda: {
             "hidden_states": drawn(ROWS, 8), "timestep": STEPS, "proj_embedding": drawn(ROWS, 8),
             "encoder_hidden_states": drawn(ROWS, 7, 8)}, **HEADS, embedding_dim=8, num_embeddings=7,
             additional_embeddings=4),
    diffuser("chroma", "diffusion", "ChromaTransformer2DModel", lambda: {
             k: v for k, v in _flux_batch().items() if k != "pooled_projections"}, in_channels=4, num_layers=1,
             num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16,
             axes_dims_rope=(4, 4, 8),
             approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1),
]  # fmt: skip

NETS = [
    diffuser("unet2d", "u-net", "UNet2DModel", lambda: {"sample": drawn(ROWS, 3, 8, 8), "timestep": STEPS}, **UNET,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
             attention_head_dim=4, dropout=0.1),
    diffuser("unet2d, text", "u-net", "UNet2DConditionModel", lambda: {
             "sample": drawn(ROWS, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": text()}, **UNET,
             down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D",
             "CrossAttnUpBlock2D"),
             cross_attention_dim=16, attention_head_dim=4),
    diffuser("unet3d", "u-net", "UNet3DConditionModel", lambda: {
             "sample": drawn(ROWS, 4, 2, 8, 8), "timestep": STEPS, "encoder_hidden_states": text()}, **UNET,
             down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D",
             "CrossAttnUpBlock3D"),
             cross_attention_dim=16, attention_head_dim=4),
    diffuser("unet1d", "u-net", "UNet1DModel", lambda: {"sample": drawn(ROWS, 14, 16), "timestep": STEPS},
             in_channels=14, out_channels=14, block_out_channels=(8, 16), down_block_types=("DownResnetBlock1D",) * 2,
             up_block_types=("UpResnetBlock1D",), mid_block_type="MidResTemporalBlock1D",
             out_block_type="OutConv1DBlock",
             layers_per_block=1, norm_num_groups=4, use_timestep_embedding=True, act_fn="mish",
             time_embedding_type="positional",
             flip_sin_to_cos=False, freq_shift=1.0),
    diffuser("controlnet", "u-net", "ControlNetModel", lambda: {
             "sample": drawn(ROWS, 4, 8, 8), "timestep": STEPS, "encoder_hidden_states": text(),
             "controlnet_cond": drawn(ROWS, 3, 64, 64), "return_dict": False}, **{k: v for k,
             v in UNET.items() if k != "sample_size"},
             down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=16, attention_head_dim=4,
             conditioning_embedding_out_channels=(8, 8, 16, 16)),
]  # fmt: skip

_KL: dict[str, Any] = {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 4, "sample_size": 16,
}  # fmt: skip
AUTOENCODERS = [
    diffuser("autoencoder-kl", "autoencoder", "AutoencoderKL",
             lambda: {"sample": drawn(ROWS, 3, 16, 16), "sample_posterior": True}, **_KL),
    diffuser("vq", "autoencoder", "VQModel", lambda: {"sample": drawn(ROWS, 3, 16, 16)},
             **{k: v for k, v in _KL.items() if k != "latent_channels"}, latent_channels=4, num_vq_embeddings=16,
             vq_embed_dim=4),
    diffuser("tiny autoencoder", "autoencoder", "AutoencoderTiny", lambda: {"sample": drawn(ROWS, 3, 16, 16)},
             encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8), num_encoder_blocks=(1,
             1, 1, 1),
             num_decoder_blocks=(1, 1, 1, 1)),
    diffuser("autoencoder-dc", "autoencoder", "AutoencoderDC", lambda: {"sample": drawn(ROWS, 3, 16, 16)},
             latent_channels=4, attention_head_dim=4, encoder_block_types=("ResBlock", "EfficientViTBlock"),
             decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
             decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
             encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,))),
    diffuser("autoencoder-kl-temporal", "autoencoder", "AutoencoderKLTemporalDecoder",
             lambda: {"sample": drawn(ROWS, 3, 16, 16), "num_frames": 2}, block_out_channels=(32, 64),
             down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4, layers_per_block=1, sample_size=16),
    diffuser("autoencoder-wan", "autoencoder", "AutoencoderKLWan", lambda: {"sample": drawn(1, 3, 5, 16, 16)},
             base_dim=4, z_dim=4,
             dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]),
]  # fmt: skip

DIFFUSION: list[Family] = [*TRANSFORMERS, *NETS, *AUTOENCODERS]
