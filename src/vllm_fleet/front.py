"""What clients may ask the front for. Paths are compared as a whole and as they were sent.

The router forwards every POST that it does not know to one prefill and one decode, dot segments resolved and
without its query, so `/v1/../sleep` would put a prefill to sleep.

Sources: vllm-router 0.1.17, measured; vLLM 0.32.0 and 0.33.0, routes of vllm/entrypoints.
"""

from __future__ import annotations

from collections.abc import Sequence

HEALTH_PATHS = ("/health", "/liveness", "/readiness")
"""Of the router; for load balancers, which have no key."""
CLIENT_PATHS: dict[str, tuple[str, ...]] = {
    "GET": (*HEALTH_PATHS, "/v1/models"),
    "POST": (
        "/detokenize",
        "/inference/v1/generate",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
    ),
}
"""Method -> what generates, renders, counts or describes."""
CONTROL_PATHS = frozenset(
    {
        # engines
        "/abort_requests",
        "/collective_rpc",
        "/fault_tolerance/apply",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/is_scaling_elastic_ep",
        "/pause",
        "/release_kv_cache_memory",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_profile",
        "/start_weight_update",
        "/stop_profile",
        "/update_weight_version",
        "/update_weights",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/wake_up",
        "/weight_checker",
        # router
        "/add_worker",
        "/finish_session",
        "/flush_cache",
        "/list_workers",
        "/remove_worker",
        "/workers",
    }
)
"""What changes engines or the router, and would reach two of the engines only."""


def client_paths(more: Sequence[str]) -> dict[str, list[str]]:
    """Method -> paths that pass, sorted; `more` are the operator's, for POST."""
    return {
        method: sorted({*paths, *(more if method == "POST" else ())})
        for method, paths in CLIENT_PATHS.items()
    }
