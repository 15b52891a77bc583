"""The config.json of the models that are made: those of published ones, but for the vocabulary."""

from __future__ import annotations

from typing import Any

COMMON = {
    "vocab_size": 512,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-30b-a3b": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}

MODELS = {"qwen3-8b-shape": ("qwen3-8b", 36), "qwen3-30b-a3b-shape": ("qwen3-30b-a3b", 8)}
"""Folder of /srv/models -> shape, and layers: eight of the mixture of experts are enough to see all ranks work."""


def config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """Of one shape, with fewer layers if so many are wanted."""
    return SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
