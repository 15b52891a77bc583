"""The config.json of well known models, without what nothing here reads.

From the models' own config.json, compared with public copies of them: Megatron model arguments in THUDM/slime
(Qwen3), DeepSeek's README_WEIGHTS.md, OpenAI's GPTOSSConfig, transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

type Config = dict[str, Any]

QWEN2_5_0_5B: Config = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768,
    "use_sliding_window": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN3_8B: Config = {
    "model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
LLAMA_3_1_70B: Config = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
QWEN3_30B_A3B: Config = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN3_235B_A22B: Config = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
    "num_hidden_layers": 94,
}  # fmt: skip
FP8: Config = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": FP8,
    "rope_scaling": {"factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS_120B: Config = {
    "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_local_experts": 128, "sliding_window": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}  # fmt: skip
QWEN3_NEXT: Config = {
    "model_type": "qwen3_next", "full_attention_interval": 4, "hidden_size": 2048, "num_attention_heads": 16,
    "num_experts": 512, "num_hidden_layers": 48, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
PUBLISHED: dict[str, tuple[Config, float]] = {
    "Qwen2.5-0.5B": (QWEN2_5_0_5B, 0.49e9),
    "Qwen3-8B": (QWEN3_8B, 8.2e9),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5e9),
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9),
    "Llama-3.1-70B": (LLAMA_3_1_70B, 70.6e9),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235e9),
    "gpt-oss-120b": (GPT_OSS_120B, 116.8e9),
}
"""Models and the number of parameters their authors publish, draft (MTP) layers not counted."""
