"""Families that read text: decoders, encoders, encoder-decoders, mixtures of experts, state-space models."""

from __future__ import annotations

from typing import Any

from benchmarks.capture.family import Family, hugging_face, masked_tokens, tokens

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Sizes by the names most configurations know.
SIZES: dict[str, Any] = _SPECIAL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = DECODER | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _decoder(name: str, prefix: str, *, kind: str = "decoder", **sizes: Any) -> Family:
    return hugging_face(name, kind, f"{prefix}ForCausalLM", f"{prefix}Config", tokens, **DECODER | sizes)


def _encoder(name: str, prefix: str, **sizes: Any) -> Family:
    return hugging_face(name, "encoder", f"{prefix}ForMaskedLM", f"{prefix}Config", masked_tokens, **SIZES | sizes)


def _pair(name: str, prefix: str, **sizes: Any) -> Family:
    return hugging_face(
        name, "encoder-decoder", f"{prefix}ForConditionalGeneration", f"{prefix}Config", masked_tokens, **sizes
    )


BART = _SPECIAL | {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
#: A layer that is dropped at random makes every step another program.
NO_DROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

DECODERS = [
    _decoder("llama", "Llama"),
    _decoder("llama, biases, tied, linear rope", "Llama", attention_bias=True, tie_word_embeddings=True,
             rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    _decoder("llama, eager attention", "Llama", attn_implementation="eager", attention_dropout=0.1),
    _decoder("mistral, sliding window", "Mistral", sliding_window=4),
    _decoder("ministral", "Ministral", sliding_window=4),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3"),
    _decoder("gemma", "Gemma"),
    _decoder("gemma2", "Gemma2", sliding_window=4),
    hugging_face("gemma3", "decoder", "Gemma3ForCausalLM", "Gemma3TextConfig", tokens,
                 **DECODER | {"sliding_window": 4}),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3"),
    hugging_face("gpt2", "decoder", "GPT2LMHeadModel", "GPT2Config", tokens,
                 **_SPECIAL | {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    _decoder("gpt_neo", "GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=4),
    _decoder("gpt_neox", "GPTNeoX"),
    _decoder("gptj", "GPTJ", rotary_dim=8),
    _decoder("gpt_bigcode", "GPTBigCode"),
    _decoder("opt", "OPT", ffn_dim=48, word_embed_proj_dim=32),
    _decoder("bloom", "Bloom"),
    hugging_face("falcon", "decoder", "FalconForCausalLM", "FalconConfig", tokens, **SIZES),
    hugging_face("falcon, alibi, grouped", "decoder", "FalconForCausalLM", "FalconConfig", tokens, **SIZES, alibi=True,
                 new_decoder_architecture=True, num_kv_heads=2),
    _decoder("mpt", "Mpt", d_model=32, n_heads=4, n_layers=2),
    _decoder("olmo", "Olmo"),
    _decoder("olmo2", "Olmo2"),
    _decoder("olmo3", "Olmo3"),
    _decoder("granite", "Granite"),
    _decoder("stablelm", "StableLm"),
    _decoder("cohere", "Cohere"),
    _decoder("cohere2", "Cohere2", sliding_window=4),
    _decoder("starcoder2", "Starcoder2"),
    _decoder("codegen", "CodeGen", rotary_dim=8),
    _decoder("glm", "Glm"),
    _decoder("glm4", "Glm4"),
    _decoder("nemotron", "Nemotron"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("persimmon", "Persimmon"),
    hugging_face("ctrl", "decoder", "CTRLLMHeadModel", "CTRLConfig", tokens,
        **_SPECIAL | {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "dff": 48, "n_positions": 64}),
    _decoder("biogpt", "BioGpt"),
    _decoder("xglm", "XGLM", d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
    _decoder("helium", "Helium"),
    _decoder("exaone4", "Exaone4", sliding_window=4),
    _decoder("ernie4_5", "Ernie4_5"),
    _decoder("seed_oss", "SeedOss"),
    _decoder("arcee", "Arcee"),
    _decoder("apertus", "Apertus"),
    _decoder("bitnet", "BitNet"),
    _decoder("diffllama", "DiffLlama"),
    hugging_face("openai-gpt", "decoder", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", tokens,
                 **SIZES | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
]  # fmt: skip

ENCODERS = [
    _encoder("bert", "Bert"),
    _encoder("roberta", "Roberta"),
    _encoder("camembert", "Camembert"),
    _encoder("xlm-roberta", "XLMRoberta"),
    _encoder("distilbert", "DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    _encoder("albert", "Albert", embedding_size=16),
    _encoder("electra", "Electra", embedding_size=16),
    _encoder("deberta", "Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
    _encoder("deberta-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    _encoder("modernbert", "ModernBert", cls_token_id=1, sep_token_id=2, local_attention=4),
    _encoder("mpnet", "MPNet"),
    _encoder("convbert", "ConvBert", embedding_size=32, head_ratio=2, num_groups=1),
    hugging_face("funnel", "encoder", "FunnelForMaskedLM", "FunnelConfig", masked_tokens, vocab_size=64,
                 block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48, num_decoder_layers=1),
    _encoder("fnet", "FNet"),
    _encoder("roformer", "RoFormer"),
    _encoder("squeezebert", "SqueezeBert", embedding_size=32, q_groups=1, k_groups=1, v_groups=1,
             post_attention_groups=1,
             intermediate_groups=1, output_groups=1),
    _encoder("mobilebert", "MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _encoder("megatron-bert", "MegatronBert"),
    _encoder("nystromformer", "Nystromformer", num_landmarks=10, segment_means_seq_len=10),
    _encoder("rembert", "RemBert", input_embedding_size=16, output_embedding_size=16),
    _encoder("longformer", "Longformer", attention_window=4),
    _encoder("big_bird", "BigBird", attention_type="original_full"),
    _encoder("reformer", "Reformer", is_decoder=False, attn_layers=["local", "local"], axial_pos_embds=False,
             attention_head_size=8, feed_forward_size=48, local_attn_chunk_length=5, hash_seed=0),
    _encoder("ibert", "IBert"),
    _encoder("eurobert", "EuroBert"),
    hugging_face("xlnet", "encoder", "XLNetLMHeadModel", "XLNetConfig", tokens,
                 **_SPECIAL | {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    hugging_face("xlm", "encoder", "XLMWithLMHeadModel", "XLMConfig", tokens,
                 **_SPECIAL | {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    hugging_face("flaubert", "encoder", "FlaubertWithLMHeadModel", "FlaubertConfig", tokens,
                 **_SPECIAL | {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4}),
]  # fmt: skip

PAIRS = [
    _pair("t5", "T5", **T5),
    _pair("t5, gated", "T5", **T5 | {"feed_forward_proj": "gated-gelu"}),
    _pair("mt5", "MT5", **T5),
    _pair("umt5", "UMT5", **T5),
    _pair("longt5", "LongT5", **T5 | {"local_radius": 3}),
    _pair("switch_transformers", "SwitchTransformers", **T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1,
          "num_sparse_decoder_layers": 1, "num_decoder_layers": 2}),
    _pair("bart", "Bart", **BART),
    _pair("mbart", "MBart", **BART),
    _pair("pegasus", "Pegasus", **BART),
    _pair("pegasus_x", "PegasusX", **BART | {"num_global_tokens": 2, "block_size": 4}),
    _pair("blenderbot", "Blenderbot", **BART),
    _pair("blenderbot-small", "BlenderbotSmall", **BART),
    _pair("m2m_100", "M2M100", **BART | NO_DROP),
    _pair("plbart", "PLBart", **BART),
    _pair("bigbird_pegasus", "BigBirdPegasus", **BART | {"attention_type": "original_full"}),
    _pair("led", "LED", **{k: v for k, v in BART.items() if k != "max_position_embeddings"} | {"attention_window": 4,
          "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}),
    _pair("nllb-moe", "NllbMoe", **BART | NO_DROP | {"num_experts": 4, "encoder_sparse_step": 2,
          "decoder_sparse_step": 2}),
    hugging_face("marian", "encoder-decoder", "MarianMTModel", "MarianConfig", masked_tokens, **BART),
    hugging_face("fsmt", "encoder-decoder", "FSMTForConditionalGeneration", "FSMTConfig", masked_tokens,
                 **BART | {"langs": ["a", "b"], "src_vocab_size": 64, "tgt_vocab_size": 64}),
    hugging_face("prophetnet", "encoder-decoder", "ProphetNetForConditionalGeneration", "ProphetNetConfig",
                 masked_tokens,
                 **_SPECIAL | {"vocab_size": 64, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2,
                 "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                 "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 2}),
]  # fmt: skip

MIXTURES = [
    _decoder("mixtral", "Mixtral", kind="mixture", num_local_experts=4, num_experts_per_tok=2),
    _decoder("qwen2_moe", "Qwen2Moe", kind="mixture", **EXPERTS | {"num_experts": 4,
             "shared_expert_intermediate_size": 24}),
    _decoder("qwen3_moe", "Qwen3Moe", kind="mixture", **EXPERTS | {"num_experts": 4}),
    _decoder("qwen3_next", "Qwen3Next", kind="mixture", **EXPERTS | {"num_experts": 4, "num_hidden_layers": 4,
             "shared_expert_intermediate_size": 24, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    _decoder("olmoe", "Olmoe", kind="mixture", num_experts=4, num_experts_per_tok=2),
    _decoder("phimoe", "Phimoe", kind="mixture", num_local_experts=4),
    _decoder("deepseek_v2", "DeepseekV2", kind="mixture", **EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1,
             "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
             "qk_nope_head_dim": 8,
             "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    _decoder("deepseek_v3", "DeepseekV3", kind="mixture", **EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1,
             "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
             "qk_nope_head_dim": 8,
             "v_head_dim": 8, "head_dim": 4, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4}),
    _decoder("gpt_oss", "GptOss", kind="mixture", num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
    _decoder("granitemoe", "GraniteMoe", kind="mixture", num_local_experts=4, num_experts_per_tok=2),
    _decoder("jetmoe", "JetMoe", kind="mixture", num_local_experts=4, num_experts_per_tok=2, kv_channels=8,
             num_key_value_heads=2),
    _decoder("glm4_moe", "Glm4Moe", kind="mixture", **EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1,
             "n_group": 1, "topk_group": 1}),
    _decoder("ernie4_5_moe", "Ernie4_5_Moe", kind="mixture", **EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    _decoder("minimax", "MiniMax", kind="mixture", num_local_experts=4, block_size=5),
    hugging_face("llama4", "mixture", "Llama4ForCausalLM", "Llama4TextConfig", tokens, **DECODER |
             {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8}),
]  # fmt: skip

STATES = [
    _decoder("mamba", "Mamba", kind="state-space", state_size=4),
    _decoder("mamba2", "Mamba2", kind="state-space", state_size=4, num_heads=4, head_dim=16, n_groups=2, chunk_size=4),
    _decoder("falcon_mamba", "FalconMamba", kind="state-space", state_size=4),
    _decoder("rwkv", "Rwkv", kind="state-space", attention_hidden_size=32, context_length=64),
    _decoder("jamba", "Jamba", kind="state-space", num_hidden_layers=4, num_experts=4, attn_layer_period=2,
             attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4,
             use_mamba_kernels=False),
    _decoder("bamba", "Bamba", kind="state-space", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
             mamba_d_state=4, mamba_chunk_size=4),
    _decoder("recurrent_gemma", "RecurrentGemma", kind="state-space", num_hidden_layers=3, lru_width=32,
             attention_window_size=4),
    _decoder("granitemoehybrid", "GraniteMoeHybrid", kind="state-space", layer_types=["mamba", "attention"],
             num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24, mamba_n_heads=4, mamba_d_head=16,
             mamba_d_state=4, mamba_chunk_size=4),
    _decoder("falcon_h1", "FalconH1", kind="state-space", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8,
             mamba_d_state=4,
             mamba_chunk_size=4, mamba_n_groups=1),
    _decoder("lfm2", "Lfm2", kind="state-space", layer_types=["conv", "full_attention"]),
]  # fmt: skip

TEXT: list[Family] = [*DECODERS, *ENCODERS, *PAIRS, *MIXTURES, *STATES]
