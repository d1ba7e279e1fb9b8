"""Small models of the shapes that people run, with random weights: of each vLLM keeps another kind of KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Layers with a window between layers without: several groups of vLLM's.
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 96, "query_pre_attn_scalar": 32},
    # Every second layer has a window.
    "gpt_oss": {
        "num_hidden_layers": 4, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 64,
    },
    # All layers have one.
    "mistral": {"num_hidden_layers": 3, "sliding_window": 100},
    # Latent attention.
    "deepseek_v2": {
        "num_hidden_layers": 3, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    # Two linear layers for each of attention, with states.
    "qwen3_next": {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip


def make(family: str, folder: Path) -> Path:
    """A model of this family in ``folder``, with the same weights each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
