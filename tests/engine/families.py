"""Small random models of the families that people run, each of its own configuration class."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from skymemory.engine.kv_cache import KNOWS_STATES

WINDOW = 20
_TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
    **_EXPERTS,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 2048}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "OPT": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    "Falcon": ("FalconForCausalLM", "FalconConfig", {}),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", {"pad_token_id": 0}),
    "Phi": ("PhiForCausalLM", "PhiConfig", {"pad_token_id": 0}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2}),
    "Qwen3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 8, "num_experts": 4, **_EXPERTS}),
    "Mistral 0.1": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8, "sliding_window": WINDOW}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {
        "head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {
        "head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": _PLAIN_ROPE,
    }),
    "Qwen2 with a window": ("Qwen2ForCausalLM", "Qwen2Config", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    }),
    "OLMo 3": ("Olmo3ForCausalLM", "Olmo3Config", {"sliding_window": WINDOW}),
    "Cohere 2": ("Cohere2ForCausalLM", "Cohere2Config", {"sliding_window": WINDOW}),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": WINDOW, "pad_token_id": 0}),
    "Llama 4": ("Llama4ForCausalLM", "Llama4TextConfig", {
        "head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 1, 1, 0],
    }),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **_GATED_DELTA, "num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 16,
    }),
    "Qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _GATED_DELTA),
    "Falcon-H1": ("FalconH1ForCausalLM", "FalconH1Config", {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8,
        "mamba_n_groups": 1, "mamba_chunk_size": 8,
    }),
    "Granite 4": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", {
        **_MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    }),
    "Nemotron-H": ("NemotronHForCausalLM", "NemotronHConfig", {
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "head_dim": 8, "chunk_size": 8,
    }),
    "LFM2": ("Lfm2ForCausalLM", "Lfm2Config", {
        "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False,
    }),
    "DeepSeek V2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", _LATENT),
    "DeepSeek V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _LATENT),
}  # fmt: skip
"""Name, class, configuration class and what is not as in all."""


def build(name: str) -> Any:
    """In float32 and eval mode, with weights so large that single tokens turn its choices."""
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
    return model


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bamba": ("BambaForCausalLM", "BambaConfig", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
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
    "Mamba": ("MambaForCausalLM", "MambaConfig", {}),
}
"""Those that do not go on from a cache as they compute at once, or have no attention."""
WITH_STATES = {"Qwen3-Next", "Qwen3.5", "Falcon-H1", "Granite 4", "Nemotron-H", "LFM2"}
"""What is found of them ends where a state was kept."""


def known(name: str) -> bool:
    """Whether the installed transformers has this family, and its states in a form that is served."""
    there = hasattr(transformers, {**FAMILIES, **REFUSED}[name][0])
    return there and (KNOWS_STATES or name not in WITH_STATES)
