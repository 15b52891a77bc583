"""How large the KV cache of a model is, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}

NOT_ONE_KIND = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "index_topk",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
"""Keys of models that keep more, or something else, than one kind of KV for each token."""


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str | None = None) -> int | None:
    """Bytes of KV cache that one token takes in all layers together, or None where no simple formula holds.

    Args:
        config: the model's config.json.
        dtype: vLLM's kv_cache_dtype or dtype; None or "auto" means the model's own.

    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    own = config.get("dtype") or config.get("torch_dtype")
    chosen = own if dtype in (None, "", "auto") else dtype
    size = ELEMENT_BYTES.get(str(chosen).removeprefix("torch."))
    layers = _count(config, "num_hidden_layers")
    if size is None or layers is None or not _every_layer_alike(config):
        return None
    if config.get("kv_lora_rank") is not None:
        rank, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
        return layers * (rank + rope) * size if rank and rope else None
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads") or heads
    hidden = _count(config, "hidden_size")
    head_dim = _count(config, "head_dim") or (hidden // heads if hidden and heads else None)
    return 2 * layers * kv_heads * head_dim * size if kv_heads and head_dim else None


def _every_layer_alike(config: Mapping[str, Any]) -> bool:
    """Whether each layer keeps full attention's KV of every token."""
    kinds = config.get("layer_types") or []
    windowed = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    return not (
        any(config.get(key) for key in NOT_ONE_KIND)
        or not isinstance(kinds, list)
        or any(kind != "full_attention" for kind in kinds)
        or windowed
        or config.get("is_encoder_decoder")
        or config.get("num_kv_shared_layers")
    )


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
