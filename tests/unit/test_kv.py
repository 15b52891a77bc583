"""KV bytes per token, against figures known from real models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet.kv import kv_bytes_per_token

QWEN3_8B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "head_dim": 128, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "torch_dtype": "float32", "sliding_window": 4096, "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128,
    "num_key_value_heads": 128, "hidden_size": 7168, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (QWEN3_8B, None, 147456),
        (QWEN3_8B, "auto", 147456),
        (QWEN3_8B, "fp8", 73728),
        (QWEN3_8B, "torch.float32", 294912),
        (TINY, None, 1024),
        ({"text_config": TINY, "vision_config": {}}, None, 1024),
        ({"text_config": TINY | {"torch_dtype": None}, "dtype": "bfloat16"}, None, 512),
        (TINY | {"num_key_value_heads": None}, None, 2048),
        (DEEPSEEK_V3, None, 70272),
        ({}, None, None),
        (QWEN3_8B, "nvfp4", None),
        (QWEN3_8B | {"num_hidden_layers": "36"}, None, None),
        (QWEN3_8B | {"sliding_window": 4096}, None, None),
        (QWEN3_8B | {"layer_types": ["full_attention", "linear_attention"]}, None, None),
        (QWEN3_8B | {"full_attention_interval": 4}, None, None),
        (QWEN3_8B | {"layer_types": ["attention", "mamba"]}, None, None),
        (QWEN3_8B | {"layer_types": {}}, None, 147456),
        (QWEN3_8B | {"layer_types": "full_attention"}, None, None),
        (QWEN3_8B | {"layer_types": 36}, None, None),
        (QWEN3_8B | {"is_encoder_decoder": True}, None, None),
        (DEEPSEEK_V3 | {"index_topk": 2048}, None, None),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": None}, None, None),
    ],
)
def test_bytes_per_token(config, dtype, expected):
    assert kv_bytes_per_token(config, dtype) == expected


@given(st.dictionaries(
    st.sampled_from([*QWEN3_8B, *DEEPSEEK_V3, "layer_types", "text_config"]),
    st.none() | st.integers(-2, 2**40) | st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=2),
))  # fmt: skip
def test_any_config_gives_a_number_or_none(config):
    result = kv_bytes_per_token(QWEN3_8B | config)
    assert result is None or result > 0
