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

STATE = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
"""Keys of models some of whose layers keep a state instead of KV: Mamba, linear attention."""


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str | None = None) -> int | None:
    """Bytes of KV cache that one token takes in all layers together, or None where no simple formula holds.

    Args:
        config: the model's config.json.
        dtype: vLLM's kv_cache_dtype or dtype; None or "auto" means the model's own.

    """
    text = language_model(config)
    chosen = own_dtype(config) if dtype in (None, "", "auto") else dtype
    size = ELEMENT_BYTES.get(str(chosen).removeprefix("torch."))
    layers = count(text, "num_hidden_layers")
    if size is None or layers is None or not _every_layer_alike(text):
        return None
    if text.get("kv_lora_rank") is not None:
        rank, rope = count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim")
        return layers * (rank + rope) * size if rank and rope else None
    heads = count(text, "num_attention_heads")
    kv_heads = count(text, "num_key_value_heads") or heads
    hidden = count(text, "hidden_size")
    head_dim = count(text, "head_dim") or (hidden // heads if hidden and heads else None)
    return 2 * layers * kv_heads * head_dim * size if kv_heads and head_dim else None


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: multimodal models nest it."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def own_dtype(config: Mapping[str, Any]) -> Any:
    """The dtype the checkpoint was written in, as config.json names it; None where it does not say."""
    text = language_model(config)
    return next(
        filter(None, (part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype"))), None
    )


def keeps_state(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a state instead of KV: Mamba, linear attention."""
    text = language_model(config)
    return any(text.get(key) for key in STATE) or any(
        kind == "linear_attention" or not kind.endswith("attention") for kind in _layer_types(text)
    )


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep the KV of the last tokens only."""
    text = language_model(config)
    uses = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    return uses or any(kind in ("sliding_attention", "chunked_attention") for kind in _layer_types(text))


def count(config: Mapping[str, Any], key: str) -> int | None:
    """The positive whole number under `key`, or None."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _every_layer_alike(text: Mapping[str, Any]) -> bool:
    """Whether each layer keeps full attention's KV of every token."""
    kinds = text.get("layer_types") or []
    return not (
        keeps_state(text)
        or has_windows(text)
        or not isinstance(kinds, list)
        or any(kind != "full_attention" for kind in kinds)
        or text.get("index_topk")
        or text.get("is_encoder_decoder")
        or text.get("num_kv_shared_layers")
    )


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    kinds = text.get("layer_types")
    return [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
