"""Small random models of the families that people run, each of its own configuration class."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from skymemory.engine.transformers.kv_cache import KNOWS_STATES

WINDOW = 20
"""Of those with a window, where nothing else is said: longer than a block of the tests, and shorter than a prompt."""
_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Tied weights say the last token again and again, whatever came before."""
_FOUR = {"num_hidden_layers": 4}
_HEAD = {"head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **_EXPERTS}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    **_ROUTED,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "n_ctx": 2048}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_PER_LAYER = {"vocab_size_per_layer_input": 1024, "hidden_size_per_layer_input": 8}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


_LLAMA_3_ROPE = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Llama 3 (its RoPE)": ("LlamaForCausalLM", "LlamaConfig", _LLAMA_3_ROPE),
    "Llama, YaRN": ("LlamaForCausalLM", "LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "Llama, linear RoPE": ("LlamaForCausalLM", "LlamaConfig", _rope("linear", factor=4.0)),
    "Llama, one head of keys, biases": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "Llama, a head of keys for each, tied weights": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "Llama, bfloat16": ("LlamaForCausalLM", "LlamaConfig", {"dtype": "bfloat16"}),
    "Llama, float16": ("LlamaForCausalLM", "LlamaConfig", {"dtype": "float16"}),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_HEAD,
            **_FOUR,
            "attention_chunk_size": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "CWM": ("CwmForCausalLM", "CwmConfig", {**_HEAD, **_MIXED, **_LLAMA_3_ROPE}),
    "Mistral 0.1": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "Mistral 0.1, a window shorter than a block": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "Mistral 0.3": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "Ministral": ("MinistralForCausalLM", "MinistralConfig", {**_HEAD, **_MIXED}),
    "Ministral 3": ("Ministral3ForCausalLM", "Ministral3Config", _HEAD),
    "Mistral 4": ("Mistral4ForCausalLM", "Mistral4Config", _LATENT),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "Qwen2.5, tied weights": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen2 with a window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "Qwen2 MoE": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            **_EXPERTS,
        },
    ),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEAD),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_HEAD, "num_experts": 4, **_EXPERTS}),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_GATED_DELTA,
            "num_experts": 4,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _GATED_DELTA),
    "Qwen3.5 MoE": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            **_GATED_DELTA,
            "num_experts": 4,
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", _HEAD),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**_HEAD, "sliding_window": WINDOW}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_HEAD, **_MIXED}),
    "Gemma 3, a window longer than most": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_HEAD,
            **_MIXED,
            "sliding_window": 100,
        },
    ),
    "Gemma 3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **_HEAD,
            **_PER_LAYER,
            **_FOUR,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
        },
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_HEAD,
            **_PER_LAYER,
            **_MIXED,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
    ),
    "VaultGemma": ("VaultGemmaForCausalLM", "VaultGemmaConfig", {**_HEAD, **_MIXED}),
    "Phi": ("PhiForCausalLM", "PhiConfig", {}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW}),
    "Phi-4": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "Phi-3.5 MoE": ("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _GPT),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "CodeGen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "rotary_dim": 4}),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_HEAD,
            **_MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **_rope("default"),
        },
    ),
    "OPT": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "MPT": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {}),
    "Falcon 40B": ("FalconForCausalLM", "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, ALiBi": ("FalconForCausalLM", "FalconConfig", {"alibi": True, "multi_query": False}),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            **_HEAD,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", {}),
    "Starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": WINDOW}),
    "Cohere": ("CohereForCausalLM", "CohereConfig", {}),
    "Cohere 2": ("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": WINDOW, **_FOUR}),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", {}),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "OLMo 3": ("Olmo3ForCausalLM", "Olmo3Config", {"sliding_window": WINDOW, **_FOUR}),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OLMo hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**_GATED_DELTA, "linear_num_key_heads": 4}),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", _LATENT),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _LATENT),
    "MiniCPM 3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", _LATENT),
    "MiniMax M2": (
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {
            **_HEAD,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
        },
    ),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "Granite MoE": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Granite 4": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 32,
        },
    ),
    "Bamba": ("BambaForCausalLM", "BambaConfig", {**_MAMBA, **_FOUR, "attn_layer_indices": [1, 3]}),
    "Nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_FOUR,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            **_HEAD,
            "chunk_size": 8,
        },
    ),
    "LFM2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "LFM2 MoE": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_dense_layers": 1,
            **_EXPERTS,
        },
    ),
    "Zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
    "Ernie 4.5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", _HEAD),
    "Ernie 4.5 MoE": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
        },
    ),
    "GLM 4": ("Glm4ForCausalLM", "Glm4Config", _HEAD),
    "GLM 4.5": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**_HEAD, **_ROUTED}),
    "GLM 4.7 Flash": ("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", _LATENT),
    "EXAONE 4": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        {
            **_FOUR,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 4,
        },
    ),
    "SmolLM3": ("SmolLM3ForCausalLM", "SmolLM3Config", _FOUR),
    "Seed-OSS": ("SeedOssForCausalLM", "SeedOssConfig", _HEAD),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", _HEAD),
    "Apertus": ("ApertusForCausalLM", "ApertusConfig", {}),
    "Arcee": ("ArceeForCausalLM", "ArceeConfig", {}),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", {**_HEAD, **_ROUTED, "n_shared_experts": 1}),
    "AFM (Arcee Trinity)": (
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {
            **_HEAD,
            "sliding_window": WINDOW,
            "num_experts": 4,
            "num_dense_layers": 1,
            "global_attn_every_n_layers": 2,
            **_EXPERTS,
        },
    ),
}
"""Name, class, configuration class and what is not as in all."""

REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_FOUR,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "RecurrentGemma": (
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {
            **_FOUR,
            "attention_window_size": WINDOW,
        },
    ),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {}),
    "MiniMax 01": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {
            **_HEAD,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "block_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "DeepSeek V3.2": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {
            **_LATENT,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 64,
        },
    ),
    "DeepSeek V4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", {}),
    "MiMo V2 Flash": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        {
            **_HEAD,
            "v_head_dim": 8,
            "sliding_window": WINDOW,
            "n_routed_experts": 4,
            **_EXPERTS,
        },
    ),
    "Moshi": ("MoshiForCausalLM", "MoshiConfig", {**_FOUR, "sliding_window": 64}),
    "Zamba": (
        "ZambaForCausalLM",
        "ZambaConfig",
        {
            **_FOUR,
            "num_key_value_heads": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
        },
    ),
    "RoBERTa": ("RobertaForCausalLM", "RobertaConfig", {"is_decoder": True}),
    "Phi-3, LongRoPE": (
        "Phi3ForCausalLM",
        "Phi3Config",
        _rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64),
    ),
    "Llama, dynamic RoPE": ("LlamaForCausalLM", "LlamaConfig", _rope("dynamic", factor=4.0)),
    "GPT": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", _GPT),
}
"""Those that do not go on from a cache as they compute at once, keep something else in it, or have none."""


def build(name: str) -> Any:
    """In eval mode, in float32 where nothing else is said, with weights so large that single tokens matter."""
    kind, config_kind, options = {**FAMILIES, **REFUSED}[name]
    config = getattr(transformers, config_kind)(**{**_TINY, **options})
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.mul_(5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(getattr(torch, options.get("dtype", "float32")))


WITH_STATES = {
    "Qwen3-Next",
    "Qwen3.5",
    "Qwen3.5 MoE",
    "Falcon-H1",
    "Bamba",
    "Granite 4",
    "Nemotron-H",
    "LFM2",
    "LFM2 MoE",
    "OLMo hybrid",
    "Zamba2",
}
"""What is found of them ends where a state was kept."""


def known(name: str) -> bool:
    """Whether the installed transformers has this family, and its states in a form that is served."""
    there = hasattr(transformers, {**FAMILIES, **REFUSED}[name][0])
    return there and (KNOWS_STATES or name not in WITH_STATES)
