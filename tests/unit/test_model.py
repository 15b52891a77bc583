"""What a config.json says about an engine: figures known from real models, and vLLM's rules at their edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import (
    DEEPSEEK_V3,
    FP8,
    GPT_OSS_120B,
    LLAMA_3_1_70B,
    PUBLISHED,
    QWEN2_5_0_5B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    QWEN3_NEXT,
)

from vllm_fleet.model import (
    SOURCES,
    Shape,
    memory_estimate,
    parallel_findings,
    transfer_findings,
    weights_bytes,
)

GIB = 2**30
GB200 = 185 * GIB
CONFIGS = [config for config, _ in PUBLISHED.values()] + [QWEN3_NEXT]
UNKNOWN = {
    "model_type": "of_tomorrow",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}
SIZES = {
    "tp": st.integers(1, 64),
    "pp": st.integers(1, 16),
    "dp": st.integers(1, 64),
    "expert_parallel": st.booleans(),
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def quantized(config, **quantization):
    return config | {"quantization_config": quantization}


def parallel(config, **sizes):
    return [finding.kind for finding in parallel_findings(config, **({"tp": 1} | sizes))]


def transfer(config, prefill_tp, decode_tp, **more):
    findings = transfer_findings(config, prefill_tp=prefill_tp, decode_tp=decode_tp, **more)
    return [finding.kind for finding in findings]


def estimate(config, **more):
    return memory_estimate(config, **({"gpu_bytes": GB200, "tp": 1} | more))


# --- what vLLM refuses at start -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sizes", "kinds"),
    [
        (QWEN2_5_0_5B, {"tp": 2}, []),
        (QWEN2_5_0_5B, {"tp": 4}, ["heads"]),
        (QWEN2_5_0_5B, {"tp": 7}, ["kv-heads", "widths"]),
        (QWEN3_8B, {"tp": 16}, []),
        (QWEN3_8B, {"tp": 64}, ["heads"]),
        (QWEN3_8B, {"tp": 3}, ["heads", "kv-heads"]),
        (QWEN3_8B | {"num_attention_heads": 48, "intermediate_size": 12288}, {"tp": 6}, ["kv-heads"]),
        (QWEN3_8B | {"num_attention_heads": 48, "intermediate_size": 12288}, {"tp": 24}, []),
        (without(QWEN3_8B, "num_key_value_heads"), {"tp": 32}, []),
        (without(QWEN3_8B, "num_key_value_heads") | {"intermediate_size": 12300}, {"tp": 8}, ["widths"]),
        (QWEN3_8B, {"pp": 36}, []),
        (QWEN3_8B, {"pp": 37}, ["layers"]),
        (QWEN3_8B, {"dp": 3}, []),
        (QWEN3_8B, {"dp": 2, "expert_parallel": True}, ["no-experts"]),
        (QWEN3_8B | {"num_experts": None}, {"dp": 2, "expert_parallel": True}, []),
        ({}, {"expert_parallel": True}, []),
        (DEEPSEEK_V3, {"tp": 16, "expert_parallel": True, "dp": 2}, []),
        (DEEPSEEK_V3 | {"num_key_value_heads": 3}, {"tp": 4, "expert_parallel": True}, []),
        (DEEPSEEK_V3, {"dp": 32, "expert_parallel": True}, []),
        (DEEPSEEK_V3, {"dp": 72, "expert_parallel": True}, ["uneven-experts"]),
        (DEEPSEEK_V3, {"dp": 72, "expert_parallel": True, "eplb_redundant": 32}, []),
        (DEEPSEEK_V3, {"dp": 72, "expert_parallel": True, "eplb_redundant": 0}, ["eplb-experts"]),
        (DEEPSEEK_V3, {"tp": 2, "dp": 36, "expert_parallel": True, "eplb_redundant": 31}, ["eplb-experts"]),
        (DEEPSEEK_V3, {"dp": 72}, ["widths"]),
        (QWEN3_30B_A3B, {"dp": 5}, ["widths"]),
        (QWEN3_30B_A3B, {"dp": 5, "expert_parallel": True}, ["uneven-experts"]),
        (QWEN3_30B_A3B | {"intermediate_size": 6143}, {"tp": 4}, []),
        (QWEN3_30B_A3B | {"intermediate_size": 6143, "mlp_only_layers": [0]}, {"tp": 4}, ["widths"]),
        (QWEN3_30B_A3B | {"intermediate_size": 6143, "decoder_sparse_step": 2}, {"tp": 4}, ["widths"]),
        (QWEN3_30B_A3B | {"shared_expert_intermediate_size": 6}, {"tp": 4}, ["widths"]),
        (QWEN3_30B_A3B | {"shared_expert_intermediate_size": 6}, {"tp": 4, "expert_parallel": True}, ["widths"]),
        (
            QWEN3_30B_A3B | {"shared_expert_intermediate_size": 6},
            {"tp": 4, "dp": 2, "expert_parallel": True},
            [],
        ),
        (GPT_OSS_120B | {"num_attention_heads": 128}, {"tp": 128}, ["widths"]),
        (UNKNOWN, {"tp": 3}, ["heads", "kv-heads"]),
        (without(UNKNOWN, "num_key_value_heads"), {"tp": 3}, ["heads"]),
        (UNKNOWN | {"intermediate_size": 7}, {"tp": 8}, []),
        ({"text_config": UNKNOWN, "model_type": "sees_too"}, {"tp": 3}, ["heads", "kv-heads"]),
        ({"model_type": "qwen3_vl", "text_config": QWEN3_8B}, {"tp": 64}, ["heads"]),
        ({}, {"tp": 7, "pp": 3}, []),
    ],
)  # fmt: skip
def test_how_an_engine_may_be_split(config, sizes, kinds):
    assert parallel(config, **sizes) == kinds


@pytest.mark.parametrize(
    ("config", "sizes", "kinds"),
    [
        (QWEN3_30B_A3B, {"tp": 4}, []),  # 192 of an expert's 768 columns: vLLM makes the blocks 64 wide
        (QWEN3_30B_A3B, {"tp": 8}, []),  # 96: 32 wide
        (QWEN3_30B_A3B, {"tp": 16}, ["fp8-blocks"]),  # 48
        (QWEN3_30B_A3B, {"tp": 16, "expert_parallel": True}, []),
        (QWEN3_30B_A3B, {"tp": 2, "dp": 8}, ["fp8-blocks"]),
        (QWEN3_8B, {"tp": 16}, []),
        (QWEN3_8B, {"tp": 32}, []),  # 12288 and 4096, over 32 both whole
        (QWEN3_8B | {"intermediate_size": 11008}, {"tp": 4}, ["fp8-blocks"]),
        (QWEN3_8B | {"head_dim": 64}, {"tp": 32}, ["fp8-blocks"]),
        (QWEN3_8B | {"intermediate_size": 11010}, {"tp": 1}, []),
        (DEEPSEEK_V3, {"tp": 32, "expert_parallel": True}, ["fp8-blocks", "fp8-blocks"]),
        (DEEPSEEK_V3, {"tp": 32, "dp": 2, "expert_parallel": True}, ["fp8-blocks"]),
    ],
)
def test_blocks_of_fp8_weights_are_whole_on_each_rank(config, sizes, kinds):
    assert parallel(quantized(config, **FP8), **sizes) == kinds


def test_only_fp8_in_blocks_has_blocks():
    narrow = QWEN3_8B | {"intermediate_size": 11008}
    assert parallel(quantized(narrow, quant_method="fp8"), tp=4) == []
    assert parallel(quantized(narrow, **FP8 | {"quant_method": "awq"}), tp=4) == []
    for block in ([128, 0], [128], [128, 128, 128], 128):
        assert parallel(quantized(narrow, **FP8 | {"weight_block_size": block}), tp=4) == []
    assert parallel(quantized(UNKNOWN | {"head_dim": 64}, **FP8), tp=32) == []
    assert parallel(quantized(narrow, **FP8, modules_to_not_convert=["mlp.down_proj"]), tp=4) == []


@pytest.mark.parametrize("layers", [36, 35])
def test_a_part_is_spared_from_quantization_where_all_its_layers_are(layers):
    spared = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(layers)]
    config = quantized(QWEN3_8B | {"head_dim": 64}, **FP8, modules_to_not_convert=spared)
    assert parallel(config, tp=32) == ([] if layers == 36 else ["fp8-blocks"])


def test_a_norm_that_is_not_quantized_says_nothing_of_its_part():
    config = quantized(QWEN3_8B | {"head_dim": 64}, **FP8, modules_to_not_convert=["self_attn.q_norm"])
    assert parallel(config, tp=32) == ["fp8-blocks"]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_heads_are_shared_out_as_vllm_does_it(heads, kv_heads, tp):
    """QKVParallelLinear: `divide` raises where it leaves a remainder."""
    config = UNKNOWN | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    kv_whole = tp % kv_heads == 0 if tp >= kv_heads else kv_heads % tp == 0
    assert parallel(config, tp=tp) == ["heads"] * (heads % tp > 0) + ["kv-heads"] * (not kv_whole)


def test_a_finding_names_the_numbers():
    (heads,) = parallel_findings(LLAMA_3_1_70B | {"num_key_value_heads": 6, "intermediate_size": 24}, tp=12)[
        :1
    ]
    assert heads.what == "64 attention heads do not divide by tensor_parallel_size 12"
    (uneven,) = parallel_findings(DEEPSEEK_V3, tp=1, dp=72, expert_parallel=True)
    assert uneven.what == "256 experts do not divide by 72 expert-parallel ranks"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN3_30B_A3B, {0, 1, 2, 3, 4}),
        (QWEN3_30B_A3B | {"decoder_sparse_step": 2}, {1, 3}),
        (QWEN3_30B_A3B | {"mlp_only_layers": [1, 9]}, {0, 2, 3, 4}),
        (without(QWEN3_30B_A3B, "decoder_sparse_step", "mlp_only_layers"), {0, 1, 2, 3, 4}),
        (DEEPSEEK_V3, {3, 4}),
        (DEEPSEEK_V3 | {"first_k_dense_replace": 0, "moe_layer_freq": 2}, {0, 2, 4}),
        (GPT_OSS_120B, {0, 1, 2, 3, 4}),
        (QWEN3_8B, set()),
        (QWEN3_NEXT, None),
    ],
)
def test_which_of_five_layers_have_experts(config, layers):
    assert Shape.of(config | {"num_hidden_layers": 5}).moe_layers == layers


def test_shared_experts_are_one_mlp():
    assert Shape.of(DEEPSEEK_V3 | {"n_shared_experts": 3}).shared_width == 3 * 2048
    assert Shape.of(QWEN3_30B_A3B | {"shared_expert_intermediate_size": 5}).shared_width == 5
    assert Shape.of(QWEN3_30B_A3B).shared_width is None


# --- what NIXL refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "prefill_tp", "decode_tp", "kinds"),
    [
        (QWEN3_8B, 8, 4, []),
        (QWEN3_8B, 16, 16, []),
        (QWEN3_8B, 8, 16, []),
        (QWEN3_8B, 16, 32, []),
        (QWEN3_8B, 16, 8, ["kv-replicated"]),
        (QWEN3_30B_A3B, 8, 4, ["kv-replicated"]),
        (QWEN3_30B_A3B, 4, 2, []),
        ({"text_config": QWEN3_30B_A3B}, 8, 4, ["kv-replicated"]),
        (GPT_OSS_120B, 16, 4, ["kv-replicated"]),
        (DEEPSEEK_V3, 16, 1, []),
        (QWEN3_NEXT, 8, 4, []),
        ({}, 8, 4, []),
    ],
)
def test_prefill_ranks_with_copies_of_kv_heads(config, prefill_tp, decode_tp, kinds):
    assert transfer(config, prefill_tp, decode_tp) == kinds


@pytest.mark.parametrize(
    ("config", "prefill", "decode", "kinds"),
    [
        (QWEN3_8B, (2, 16), (2, 32), []),
        (QWEN3_8B, (2, 16), (4, 32), []),
        (QWEN3_8B, (2, 32), (2, 16), ["block-size"]),
        (QWEN3_8B, (4, 16), (2, 32), ["block-size"]),
        (QWEN3_8B, (4, 16), (2, 16), []),
        (QWEN3_8B, (4, None), (2, 32), []),
        (QWEN3_8B, (4, 16), (2, None), []),
        (DEEPSEEK_V3, (4, 64), (2, 128), []),
        (DEEPSEEK_V3, (4, 128), (4, 64), ["block-size"]),
        (QWEN3_NEXT, (4, 16), (2, 32), []),
    ],
)
def test_block_sizes_of_a_pair(config, prefill, decode, kinds):
    sizes = {"prefill_block_size": prefill[1], "decode_block_size": decode[1]}
    assert transfer(config, prefill[0], decode[0], **sizes) == kinds


@pytest.mark.parametrize(
    ("config", "pp", "kinds"),
    [
        (QWEN3_8B, 2, []),
        (QWEN2_5_0_5B, 2, []),
        (DEEPSEEK_V3, 4, []),
        (DEEPSEEK_V3 | {"index_topk": 2048}, 4, []),
        (GPT_OSS_120B, 1, []),
        (GPT_OSS_120B, 2, ["hybrid-pipeline"]),
        (QWEN3_8B | {"sliding_window": 4096, "use_sliding_window": True}, 2, ["hybrid-pipeline"]),
        (QWEN3_8B | {"layer_types": ["chunked_attention"]}, 2, ["hybrid-pipeline"]),
        (QWEN3_8B | {"layer_types": ["full_attention", "linear_attention"]}, 2, ["hybrid-pipeline"]),
        (QWEN3_8B | {"layer_types": ["full_attention", "conv"]}, 2, ["hybrid-pipeline"]),
        (QWEN3_NEXT, 2, ["hybrid-pipeline"]),
    ],
)
def test_a_prefill_pipeline_needs_layers_that_all_keep_all_tokens(config, pp, kinds):
    assert transfer(config, 2, 2, prefill_pp=pp) == kinds


@pytest.mark.parametrize(
    ("config", "prefill_tp", "decode_tp", "kv_dtype", "kinds"),
    [
        (QWEN3_8B, 2, 4, "nvfp4", ["kv-nvfp4"]),
        (QWEN3_8B, 2, 4, "nvfp4_4over6", ["kv-nvfp4"]),
        (QWEN3_8B, 4, 4, "nvfp4", []),
        (QWEN3_8B, 8, 16, "nvfp4", []),  # one head a rank on both sides
        (QWEN3_8B, 2, 4, "fp8", []),
        (QWEN3_8B, 2, 4, None, []),
        (DEEPSEEK_V3, 2, 4, "nvfp4", []),
    ],
)
def test_heads_in_nvfp4_stay_together(config, prefill_tp, decode_tp, kv_dtype, kinds):
    assert transfer(config, prefill_tp, decode_tp, kv_dtype=kv_dtype) == kinds


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "parameters"), PUBLISHED.values(), ids=list(PUBLISHED))
def test_parameters_are_those_published(config, parameters):
    counted = weights_bytes(without(config, "quantization_config")) / 2
    assert counted == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("q_lora_rank", "queries"), [(1536, 1536 * (7168 + 128 * 192)), (None, 7168 * 128 * 192)]
)
def test_a_layer_with_latent_attention(q_lora_rank, queries):
    dense = without(DEEPSEEK_V3, "quantization_config") | {"q_lora_rank": q_lora_rank}
    one, two = (weights_bytes(dense | {"num_hidden_layers": layers}) for layers in (1, 2))
    others = 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168 + 3 * 7168 * 18432
    assert (two - one) / 2 == queries + others


def test_a_quantized_checkpoint_is_as_large_as_its_files():
    assert weights_bytes(GPT_OSS_120B) == pytest.approx(60.8 * GIB, rel=0.01)  # OpenAI's model card
    assert weights_bytes(quantized(GPT_OSS_120B, quant_method="mxfp4")) == weights_bytes(GPT_OSS_120B)
    assert weights_bytes(DEEPSEEK_V3) == pytest.approx(671e9, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "bytes_each"),
    [
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.515625),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}, 0.5625),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}, 0.5625),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}}}}, 1),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {}}}, None),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, None),
        ({"quant_method": "bitsandbytes"}, None),
        ({"quant_method": "awq", "bits": 40}, None),
        ({"bits": 4}, None),
    ],
)  # fmt: skip
def test_bytes_of_a_quantized_weight(quantization, bytes_each):
    embeddings = 2 * 151936 * 4096
    layers = weights_bytes(QWEN3_8B) / 2 - embeddings
    expected = None if bytes_each is None else pytest.approx(layers * bytes_each + embeddings * 2, rel=1e-6)
    assert weights_bytes(quantized(QWEN3_8B, **quantization)) == expected


def test_what_is_not_quantized_keeps_its_size():
    whole, both = weights_bytes(QWEN3_8B), quantized(QWEN3_8B, quant_method="fp8")
    attention = 36 * 4096 * 128 * 2 * (32 + 8)
    spared = quantized(QWEN3_8B, quant_method="fp8", ignored_layers=["re:.*self_attn.*"])
    assert weights_bytes(spared) - weights_bytes(both) == attention
    shared = QWEN3_30B_A3B | {"shared_expert_intermediate_size": 1000}
    spared = quantized(shared, quant_method="fp8", ignore=["re:.*shared_experts.*"])
    assert (
        weights_bytes(spared) - weights_bytes(quantized(shared, quant_method="fp8")) == 48 * 3 * 2048 * 1000
    )
    assert weights_bytes(both) < whole


@pytest.mark.parametrize(
    ("change", "dtype", "expected"),
    [
        ({}, None, 2), ({}, "auto", 2), ({}, "float32", 4), ({}, "torch.float16", 2), ({}, "int3", None),
        ({"torch_dtype": "float32"}, None, 2), ({"torch_dtype": "float32"}, "float32", 4),
        ({"torch_dtype": None}, None, None), ({"torch_dtype": None, "dtype": "float16"}, None, 2),
    ],
)  # fmt: skip
def test_bytes_of_a_plain_weight(change, dtype, expected):
    parameters = weights_bytes(QWEN3_8B) // 2
    assert weights_bytes(QWEN3_8B | change, dtype) == (expected and parameters * expected)


@pytest.mark.parametrize(
    "config",
    [
        {},
        UNKNOWN,
        QWEN3_NEXT,
        QWEN3_8B | {"model_type": ["qwen3"]},
        *(
            without(QWEN3_8B, key)
            for key in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
        ),
        without(QWEN3_8B, "num_attention_heads"),
        QWEN3_8B | {"num_key_value_heads": "8"},
        QWEN3_8B | {"num_hidden_layers": 10_001},
        without(QWEN3_30B_A3B, "moe_intermediate_size"),
        without(QWEN3_30B_A3B, "num_experts"),
        QWEN3_30B_A3B | {"mlp_only_layers": 1},
        QWEN3_30B_A3B | {"decoder_sparse_step": "1"},
        without(DEEPSEEK_V3, "first_k_dense_replace"),
        without(DEEPSEEK_V3, "v_head_dim"),
    ],
)
def test_of_a_model_not_known_nothing_is_said(config):
    assert weights_bytes(config) is None
    assert estimate(config) is None


def test_the_language_part_of_a_model_that_sees_is_counted():
    seeing = {"model_type": "qwen3_vl", "text_config": without(QWEN3_8B, "torch_dtype"), "vision_config": {}}
    assert weights_bytes(seeing | {"torch_dtype": "bfloat16"}) == weights_bytes(QWEN3_8B)
    assert weights_bytes(seeing | {"dtype": "bfloat16", "quantization_config": FP8}) < weights_bytes(QWEN3_8B)
    tied = seeing | {"text_config": without(QWEN3_8B, "tie_word_embeddings"), "tie_word_embeddings": True}
    assert weights_bytes(QWEN3_8B) - weights_bytes(tied) == 2 * 151936 * 4096


def test_one_sentence_has_all_the_numbers():
    found = estimate(QWEN3_30B_A3B, gpu_bytes=180 * GIB, tp=2)
    assert found.sentence == (
        "weights 28.4 GiB + KV of one sequence of 40960 tokens 1.9 GiB = 30.3 GiB of 165.6 GiB (0.92 x 180 GiB)"
    )
    assert found.tokens == 40960
    assert found.kv_bytes == 40960 * 98304 / 2
    assert found.budget_bytes == int(180 * GIB * 0.92)
    assert found.fits


def test_where_the_kv_cache_has_no_formula_the_weights_are_judged_alone():
    found = estimate(GPT_OSS_120B, gpu_bytes=80 * GIB)
    assert found.sentence == "weights 60.7 GiB (KV cache not estimated) of 73.6 GiB (0.92 x 80 GiB)"
    assert (found.kv_bytes, found.tokens, found.fits) == (None, None, True)
    assert not estimate(GPT_OSS_120B, gpu_bytes=65 * GIB).fits


def test_it_fits_up_to_the_last_byte():
    needed = sum((estimate(QWEN3_8B).weights_bytes, estimate(QWEN3_8B).kv_bytes))
    assert estimate(QWEN3_8B, gpu_bytes=needed, gpu_memory_utilization=1).fits
    assert not estimate(QWEN3_8B, gpu_bytes=needed - 1, gpu_memory_utilization=1).fits
    assert not estimate(QWEN3_8B, gpu_bytes=needed).fits


@pytest.mark.parametrize(
    ("change", "more", "tokens"),
    [
        ({}, {}, 40960),
        ({}, {"max_model_len": 8000}, 8000),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, 40960),
        ({"rope_parameters": {"rope_type": "default"}}, {}, 40960),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"max_model_len": 8000}, 8000),
        ({"max_position_embeddings": None}, {}, None),
        ({"sliding_window": 4096, "use_sliding_window": True}, {"max_model_len": 8000}, None),
    ],
)
def test_length_of_a_full_sequence(change, more, tokens):
    assert estimate(QWEN3_8B | change, **more).tokens == tokens


@pytest.mark.parametrize(
    ("change", "more", "bytes_per_token"),
    [
        ({}, {}, 147456),
        ({}, {"kv_dtype": "auto"}, 147456),
        ({}, {"kv_dtype": "fp8"}, 73728),
        ({}, {"dtype": "float32"}, 294912),
        ({}, {"dtype": "float32", "kv_dtype": "bfloat16"}, 147456),
        ({"torch_dtype": "float32"}, {}, 147456),
        ({"quantization_config": FP8}, {}, 147456),
        ({"quantization_config": FP8 | {"kv_cache_scheme": {"num_bits": 8}}}, {}, None),
        ({"quantization_config": FP8 | {"kv_cache_scheme": {"num_bits": 8}}}, {"kv_dtype": "fp8"}, 73728),
        ({}, {"kv_dtype": "nvfp4"}, None),
        ({}, {"tp": 4}, 36864),
        ({}, {"tp": 8}, 18432),
        ({}, {"tp": 16}, 18432),
        ({}, {"pp": 4}, 36864),
        ({}, {"dp": 8}, 147456),
    ],
)
def test_kv_of_a_token_on_one_gpu(change, more, bytes_per_token):
    found = estimate(QWEN3_8B | change, max_model_len=1000, **more)
    assert found.kv_bytes == (bytes_per_token and bytes_per_token * 1000)


def test_latent_kv_is_whole_on_every_rank():
    assert estimate(DEEPSEEK_V3, tp=8, max_model_len=1000).kv_bytes == 70272 * 1000


def test_a_data_parallel_rank_has_all_but_the_experts():
    one = 3 * 7168 * 2048
    experts = 58 * 256 * one
    rest = weights_bytes(DEEPSEEK_V3) - experts
    for sizes in ({"dp": 32}, {"dp": 32, "expert_parallel": True}):
        assert estimate(DEEPSEEK_V3, **sizes).weights_bytes == pytest.approx(rest + experts / 32, abs=1)
    uneven = estimate(DEEPSEEK_V3, dp=72, expert_parallel=True).weights_bytes
    assert uneven == pytest.approx(rest + 58 * 4 * one, abs=1)  # 256 over 72: some have four
    redundant = estimate(DEEPSEEK_V3, dp=32, expert_parallel=True, eplb_redundant=32).weights_bytes
    assert redundant == pytest.approx(rest + 58 * 9 * one, abs=1)


def test_ranks_beyond_the_kv_heads_hold_copies():
    keys_values = 2 * 36 * 2 * 4096 * 8 * 128
    copies = estimate(QWEN3_8B, tp=32).weights_bytes
    assert copies == pytest.approx((weights_bytes(QWEN3_8B) - keys_values) / 32 + keys_values / 8, abs=1)


def test_latent_projections_are_whole_on_every_rank():
    whole = 61 * 7168 * (1536 + 512 + 64)
    router = 58 * 7168 * 256 * 2
    split = weights_bytes(DEEPSEEK_V3) - whole - router
    assert estimate(DEEPSEEK_V3, tp=8).weights_bytes == pytest.approx(split / 8 + whole + router, abs=1)


@pytest.mark.parametrize(
    ("layers", "pp", "fullest"),
    [(36, 1, 36), (36, 4, 9), (37, 4, 10), (3, 2, 2), (4, 4, 1), (5, 4, 2)],
)
def test_the_fullest_stage_of_a_pipeline_counts(layers, pp, fullest):
    config = QWEN3_8B | {"num_hidden_layers": layers, "vocab_size": 1}
    found = estimate(config, pp=pp, max_model_len=1000)
    assert found.kv_bytes == 4096 * 1000 * fullest
    layer = 2 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 12288)
    assert found.weights_bytes == pytest.approx(layer * fullest, abs=4 * 4096)


def test_embeddings_are_at_both_ends_of_a_pipeline():
    two = QWEN3_8B | {"num_hidden_layers": 2, "intermediate_size": 1}
    tied = two | {"tie_word_embeddings": True}
    embedding = 2 * 151936 * 4096
    assert weights_bytes(two) - weights_bytes(tied) == embedding
    assert estimate(two, pp=2).weights_bytes == estimate(tied, pp=2).weights_bytes
    assert estimate(two, pp=2).weights_bytes * 2 == weights_bytes(two)


def test_layers_left_over_are_not_given_to_the_last_stage():
    """One, one, two and one: the output's embedding is at the end."""
    layer = 2 * (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 12288)
    found = estimate(QWEN3_8B | {"num_hidden_layers": 5}, pp=4)
    assert found.weights_bytes == layer + 2 * 151936 * 4096


# --- whatever comes -------------------------------------------------------------------------------

VALUES = st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=3) | st.lists(
    st.text(max_size=2) | st.integers(-1, 3), max_size=2
) | st.dictionaries(st.sampled_from(["quant_method", "weight_block_size", "rope_type", "weights", "bits"]), st.text(max_size=3) | st.lists(st.integers(-1, 128), max_size=2), max_size=2)  # fmt: skip


@given(
    st.sampled_from(CONFIGS),
    st.dictionaries(st.sampled_from(sorted({*DEEPSEEK_V3, *GPT_OSS_120B, *QWEN3_30B_A3B, "text_config"})), VALUES),
    st.fixed_dictionaries(SIZES),
)  # fmt: skip
def test_any_config_is_judged_without_an_error(config, change, sizes):
    config = config | change
    findings = parallel_findings(config, **sizes, eplb_redundant=1)
    findings += transfer_findings(
        config, prefill_tp=sizes["tp"], decode_tp=sizes["dp"], prefill_pp=sizes["pp"]
    )
    assert {finding.kind for finding in findings} <= set(SOURCES)
    found = estimate(config, **sizes)
    assert found is None or found.weights_bytes >= 0


@given(st.sampled_from([config for config, _ in PUBLISHED.values()]), st.fixed_dictionaries(SIZES))
def test_the_gpus_of_an_engine_hold_the_model_at_least_once(config, sizes):
    found = estimate(config, **sizes)
    gpus = sizes["tp"] * sizes["pp"] * sizes["dp"]
    assert found.weights_bytes * gpus >= weights_bytes(config) * 0.999
    assert found.weights_bytes <= weights_bytes(config) + 1


@given(st.sampled_from([QWEN3_8B, LLAMA_3_1_70B, QWEN3_235B_A22B, DEEPSEEK_V3]), st.fixed_dictionaries(SIZES))
def test_more_tensor_parallel_ranks_need_no_more_memory_each(config, sizes):
    one, two = estimate(config, **sizes), estimate(config, **sizes | {"tp": 2 * sizes["tp"]})
    assert two.weights_bytes + two.kv_bytes <= one.weights_bytes + one.kv_bytes
