"""A proxy for one prefill and one decode request over NIXL: the opt-in alternative to vllm-router."""
