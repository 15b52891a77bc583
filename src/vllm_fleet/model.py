"""What a model's config.json says about its engines: how they split, whom they may pass KV to, what fits.

Everything here is tolerant: of a model, or a key, that is not known here nothing is said.
Read in vLLM 0.32.0 and 0.33.0, which agree unless a line says otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_fleet.kv import (
    ELEMENT_BYTES,
    count,
    has_windows,
    keeps_state,
    kv_bytes_per_token,
    language_model,
    own_dtype,
)

SOURCES = {
    "heads": "vllm/config/model.py, verify_with_parallel_config",
    "kv-heads": "vllm/model_executor/layers/linear.py, QKVParallelLinear",
    "widths": "vllm/model_executor/layers/linear.py, divide; fused_moe/config.py, FusedMoEConfig",
    "fp8-blocks": "vllm/model_executor/layers/quantization/utils/fp8_utils.py, validate_fp8_block_shape",
    "layers": "vllm/distributed/utils.py, get_pp_indices; NIXL connector, register_kv_caches",
    "no-experts": "vllm/config/model.py, _verify_with_expert_parallelism",
    "eplb-experts": "vllm/model_executor/layers/fused_moe/layer.py, FusedMoEFactory",
    "uneven-experts": "vllm/model_executor/layers/fused_moe/expert_map_manager.py, determine_expert_map",
    "kv-replicated": "NIXL connector, base_worker.py, _validate_remote_agent_handshake",
    "kv-nvfp4": "NIXL connector of vLLM 0.33.0, base_worker.py, _validate_remote_agent_handshake",
    "block-size": "NIXL connector, block_size_ratio and _validate_remote_agent_handshake",
    "hybrid-pipeline": "NIXL connector, base_worker.py, NixlBaseConnectorWorker",
}
"""Where vLLM enforces each kind of finding."""

FAMILIES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm_moe_dsa",
        "gpt_oss",
        "kimi_k2",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
    }
)
"""model_type of models whose layers are attention (full, windowed or latent) and a gated MLP or experts."""
MLP_IS_EXPERT = frozenset({"gpt_oss", "minimax_m2", "mixtral"})
"""Those whose intermediate_size is the width of an expert."""
ATTENTION, DENSE, SHARED = "attn", "mlp.down_proj", "shared_expert"
"""What the names of a part's modules contain, in a list of modules that are not quantized."""
UNSCALED_ROPE = (None, "default", "yarn", "llama3", "deepseek_yarn", "deepseek_llama_scaling", "mrope")
"""Types of RoPE with which max_position_embeddings is the longest sequence as it stands."""
MOST_LAYERS = 10_000
"""A num_hidden_layers beyond it is no model's."""
SMALLEST_FP8_BLOCK = 32
MXFP4, NVFP4 = 4.25 / 8, 4.5 / 8
"""Bytes of a weight with its share of the scales: one byte for 32 weights, for 16."""
DEFAULT_UTILIZATION = 0.92
"""vLLM's gpu_memory_utilization, unless set."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: its kind, a key of SOURCES, and a sentence without a full stop."""

    kind: str
    what: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of the fullest GPU of an engine, in bytes. Activations and CUDA graphs come on top.

    `kv_bytes` is that of one sequence of `tokens` tokens; both are None where no simple formula holds.
    """

    weights_bytes: int
    kv_bytes: int | None
    tokens: int | None
    budget_bytes: int
    fits: bool
    sentence: str


class Latent(NamedTuple):
    """Sizes of multi-head latent attention (MLA)."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model's language part. None: not known here, or the model has no such thing.

    `known` says whether the model is of FAMILIES; only then are moe_layers (the indexes of layers with
    experts) and the widths: of a dense layer's MLP, of all shared experts of a layer together, of one expert.
    `kv_heads` is None for MLA. `experts` is 0 for none, None where config.json speaks of experts in a way not
    known here.
    """

    known: bool
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    latent: Latent | None
    experts: int | None
    moe_layers: frozenset[int] | None
    dense_width: int | None
    shared_width: int | None
    expert_width: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape that a config.json describes."""
        text = language_model(config)
        family = str(text.get("model_type"))
        known = family in FAMILIES
        layers = count(text, "num_hidden_layers")
        layers = layers if layers and layers <= MOST_LAYERS else None
        hidden, heads = count(text, "hidden_size"), count(text, "num_attention_heads")
        mla = text.get("kv_lora_rank") is not None
        as_many = known and text.get("num_key_value_heads") is None
        kv_heads = heads if as_many else count(text, "num_key_value_heads")
        head_dim = count(text, "head_dim") or (hidden // heads if hidden and heads else None)
        experts = _experts(text)
        moe_layers = _moe_layers(text, layers, experts) if known else None
        some_dense = layers is not None and moe_layers is not None and len(moe_layers) < layers
        width = count(text, "intermediate_size")
        expert_width = width if family in MLP_IS_EXPERT else count(text, "moe_intermediate_size")
        return cls(
            known=known,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=None if mla else kv_heads,
            head_dim=None if mla else head_dim,
            latent=_latent(text) if mla else None,
            experts=experts,
            moe_layers=moe_layers,
            dense_width=width if some_dense else None,
            shared_width=_shared_width(text, expert_width) if moe_layers else None,
            expert_width=expert_width if moe_layers else None,
        )

    @property
    def attention_width(self) -> int | None:
        """Width of what attention's output projection reads."""
        size = self.latent.value if self.latent else self.head_dim
        return self.heads * size if self.heads and size else None


def parallel_findings(
    config: Mapping[str, Any],
    *,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    eplb_redundant: int | None = None,
) -> list[Finding]:
    """What vLLM refuses when an engine of this shape starts. SOURCES says where.

    Only uneven-experts is not refused by vLLM itself: some ranks get one expert more and set the pace, and
    all-to-all kernels such as DeepEP's want equal numbers.

    Args:
        config: the model's config.json.
        tp: tensor_parallel_size.
        pp: pipeline_parallel_size.
        dp: data_parallel_size.
        expert_parallel: enable_expert_parallel.
        eplb_redundant: num_redundant_experts of eplb_config; None where enable_eplb is off.

    """
    shape, ranks = Shape.of(config), tp * dp
    found = []
    if shape.heads and shape.heads % tp:
        what = f"{shape.heads} attention heads do not divide by tensor_parallel_size {tp}"
        found.append(Finding("heads", what))
    if shape.kv_heads and shape.kv_heads % tp and tp % shape.kv_heads:
        what = (
            f"of {shape.kv_heads} KV heads and tensor_parallel_size {tp} neither is a multiple of the other"
        )
        found.append(Finding("kv-heads", what))
    if shape.layers and shape.layers < pp:
        what = f"{shape.layers} layers are fewer than the {pp} stages of pipeline_parallel_size"
        found.append(Finding("layers", what))
    if expert_parallel:
        found += _expert_findings(shape.experts, ranks, eplb_redundant)
    # Expert parallel over tensor- and data-parallel ranks, vLLM keeps shared experts whole on each rank.
    shared_over = 1 if expert_parallel and dp > 1 else tp
    found += _width_findings(config, shape, tp, shared_over, 1 if expert_parallel else ranks)
    return found


def transfer_findings(
    config: Mapping[str, Any],
    *,
    prefill_tp: int,
    decode_tp: int,
    prefill_pp: int = 1,
    prefill_block_size: int | None = None,
    decode_block_size: int | None = None,
    kv_dtype: str | None = None,
) -> list[Finding]:
    """What NIXL refuses between a prefill and a decode engine because of the model. SOURCES says where.

    All but hybrid-pipeline, which keeps the prefill engine from starting, shows at the first request. It is
    assumed that one tensor-parallel size divides the other. MLA keeps the same KV on every rank, so nothing
    about heads concerns it. Block sizes are judged where both are set; attention kernels that cut blocks into
    smaller ones may accept what is reported.
    """
    found = []
    kv_heads, state = Shape.of(config).kv_heads, keeps_state(config)
    gathers = bool(kv_heads) and not state and prefill_tp > decode_tp
    if kv_heads and gathers and prefill_tp > kv_heads:
        what = (
            f"the prefill engine's {prefill_tp} tensor-parallel ranks are more than the decode engine's "
            f"{decode_tp} and more than the model's {kv_heads} KV heads"
        )
        found.append(Finding("kv-replicated", what))
    if kv_heads and str(kv_dtype).startswith("nvfp4"):
        given, taken = max(1, kv_heads // prefill_tp), max(1, kv_heads // decode_tp)
        if given != taken:
            what = (
                f"{kv_dtype} KV of {given} heads a rank for prefill would be {taken} heads a rank for decode"
            )
            found.append(Finding("kv-nvfp4", what))
    if prefill_block_size and decode_block_size:
        sizes = f"block_size is {prefill_block_size} for prefill and {decode_block_size} for decode"
        if decode_block_size % prefill_block_size:
            found.append(Finding("block-size", f"{sizes}, which is no multiple of it"))
        elif gathers and decode_block_size != prefill_block_size:
            what = f"{sizes}, and the prefill engine has more tensor-parallel ranks"
            found.append(Finding("block-size", what))
    if prefill_pp > 1 and (state or has_windows(config)):
        what = (
            f"pipeline_parallel_size is {prefill_pp}, and some layers of the model do not keep all tokens' KV"
        )
        found.append(Finding("hybrid-pipeline", what))
    return found


def weights_bytes(config: Mapping[str, Any], dtype: str | None = None) -> int | None:
    """Bytes of a model's weights, or None for a model not known here.

    The language part's alone. Norms, biases, sparse attention's indexers and draft (MTP) layers are left out.

    Args:
        config: the model's config.json.
        dtype: vLLM's dtype; None or "auto" means the model's own.

    """
    parts = _parts(config, dtype)
    return parts.bytes_on_gpu(range(parts.layers), 1, parts.experts) if parts else None


def memory_estimate(
    config: Mapping[str, Any],
    *,
    gpu_bytes: int,
    tp: int,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    eplb_redundant: int | None = None,
    max_model_len: int | None = None,
    kv_dtype: str | None = None,
    dtype: str | None = None,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
) -> Estimate | None:
    """Whether weights and the KV of one full sequence fit, or None for a model not known here.

    vLLM refuses to start where they do not (kv_cache_utils.py, _check_enough_kv_cache_memory). Experts are
    divided over all tp x dp ranks, with expert parallelism in whole ones; other weights over the tp ranks of
    each data-parallel rank; layers over the pipeline. KV heads are copied where there are more ranks than
    heads, MLA's KV always.

    Args:
        config: the model's config.json.
        gpu_bytes: memory of one GPU.
        tp: tensor_parallel_size.
        pp: pipeline_parallel_size.
        dp: data_parallel_size.
        expert_parallel: enable_expert_parallel.
        eplb_redundant: num_redundant_experts of eplb_config; None where enable_eplb is off.
        max_model_len: None means the model's own.
        kv_dtype: vLLM's kv_cache_dtype; None or "auto" means that of the weights.
        dtype: vLLM's dtype; None or "auto" means the model's own.
        gpu_memory_utilization: the share of a GPU that vLLM takes.

    """
    parts = _parts(config, dtype)
    if parts is None:
        return None
    tokens = max_model_len or _longest_sequence(config)
    per_token = _kv_bytes_per_token(config, kv_dtype, dtype)
    sequence = tokens * per_token if tokens and per_token else None
    experts = parts.experts / (tp * dp)
    if expert_parallel:
        experts = math.ceil((parts.experts + (eplb_redundant or 0)) / (tp * dp))
    weights, kv = max(
        (
            (parts.bytes_on_gpu(stage, tp, experts), parts.kv_on_gpu(sequence or 0, stage, tp))
            for stage in _stages(parts.layers, pp)
        ),
        key=sum,
    )
    budget = int(gpu_bytes * gpu_memory_utilization)
    needs = f"weights {_gib(weights)}"
    if sequence:
        needs += f" + KV of one sequence of {tokens} tokens {_gib(kv)} = {_gib(weights + kv)}"
    else:
        needs += " (KV cache not estimated)"
    return Estimate(
        weights_bytes=weights,
        kv_bytes=kv if sequence else None,
        tokens=tokens if sequence else None,
        budget_bytes=budget,
        fits=weights + kv <= budget,
        sentence=f"{needs} of {_gib(budget)} ({gpu_memory_utilization:g} x {_gib(gpu_bytes)})",
    )


# --- splitting ------------------------------------------------------------------------------------


def _expert_findings(experts: int | None, ranks: int, redundant: int | None) -> Iterator[Finding]:
    if experts == 0:
        yield Finding("no-experts", "enable_expert_parallel is set, and the model has no experts")
    elif experts and redundant is not None and (experts + redundant) % ranks:
        what = f"{experts} experts and {redundant} redundant ones do not divide by {ranks} ranks"
        yield Finding("eplb-experts", what)
    elif experts and redundant is None and experts % ranks:
        yield Finding("uneven-experts", f"{experts} experts do not divide by {ranks} expert-parallel ranks")


def _width_findings(
    config: Mapping[str, Any], shape: Shape, tp: int, shared_over: int, experts_over: int
) -> Iterator[Finding]:
    """Whether each rank gets whole columns of every MLP, and whole blocks of FP8 weights that have blocks."""
    quantization = _quantization(config)
    block = _fp8_block(quantization) if shape.known else None
    for name, part, width, ranks in (
        ("intermediate_size", DENSE, shape.dense_width, tp),
        ("the width of the shared experts", SHARED, shape.shared_width, shared_over),
        ("the width of attention's output", ATTENTION, shape.attention_width, tp),
    ):
        if not width or ranks == 1:
            continue
        if width % ranks:
            if part != ATTENTION:  # whose width divides where the heads do
                yield Finding("widths", f"{name}, {width}, does not divide by tensor_parallel_size {ranks}")
        elif block and width // ranks % block[1] and not _spares(quantization, part, shape):
            yield _cut_blocks(name, width, ranks, block)
    name, width, ranks = "the width of an expert", shape.expert_width, experts_over
    if not width:
        return
    if width % ranks:
        yield Finding("widths", f"{name}, {width}, does not divide by the {ranks} ranks that share it")
    elif block and _cuts_experts(width // ranks, shape.hidden or 0, block):
        yield _cut_blocks(name, width, ranks, block)


def _cuts_experts(width: int, hidden: int, block: tuple[int, int]) -> bool:
    """Whether blocks are cut for good: vLLM makes those of experts smaller, to a limit (oracle/fp8.py)."""
    return any(width % side for side in block) and math.gcd(*block, width, hidden) < SMALLEST_FP8_BLOCK


def _cut_blocks(name: str, width: int, ranks: int, block: tuple[int, int]) -> Finding:
    each = f"{name}, {width}, over {ranks} ranks is {width // ranks} each"
    return Finding(
        "fp8-blocks", f"{each}, no whole number of the {block[0]} x {block[1]} blocks of FP8 weights"
    )


def _fp8_block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block of FP8 weights that has one scale."""
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    rows, columns = (side if isinstance(side, int) and side > 0 else None for side in block)
    return (rows, columns) if rows and columns else None


# --- reading config.json --------------------------------------------------------------------------


def _experts(text: Mapping[str, Any]) -> int | None:
    keys = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
    found = next(filter(None, (count(text, key) for key in keys)), None)
    speaks = any("expert" in key or "moe" in key or key == "block_configs" for key in map(str, text))
    return found or (None if speaks or not count(text, "num_attention_heads") else 0)


def _moe_layers(text: Mapping[str, Any], layers: int | None, experts: int | None) -> frozenset[int] | None:
    if not layers or experts is None:
        return None
    if not experts:
        return frozenset()
    if "n_routed_experts" in text and "first_k_dense_replace" not in text:
        return None  # some of the first layers are dense, and how many is a default of the model's code
    first, every = text.get("first_k_dense_replace") or 0, text.get("moe_layer_freq") or 1
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
    if not all(isinstance(value, int) and value >= 0 for value in (first, every, step)):
        return None
    if not isinstance(dense, list):
        return None
    return frozenset(
        layer
        for layer in range(first, layers)
        if layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _shared_width(text: Mapping[str, Any], expert_width: int | None) -> int | None:
    if (shared := count(text, "n_shared_experts")) and expert_width:
        return shared * expert_width
    return count(text, "shared_expert_intermediate_size")


def _latent(text: Mapping[str, Any]) -> Latent | None:
    rank, value = count(text, "kv_lora_rank"), count(text, "v_head_dim")
    nope, rope = count(text, "qk_nope_head_dim"), count(text, "qk_rope_head_dim")
    if not (rank and value and nope and rope):
        return None
    return Latent(count(text, "q_lora_rank"), rank, nope, rope, value)


def _longest_sequence(config: Mapping[str, Any]) -> int | None:
    """The model's own max_model_len, or None where it follows from more than max_position_embeddings."""
    text = language_model(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    plain = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in UNSCALED_ROPE
    return count(text, "max_position_embeddings") if plain else None


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Parts:
    """Bytes of the parts of a model that are split differently over GPUs; all but `embedding` of one layer.

    Attention is in three: what is divided by heads, by KV heads (so copied where there are more ranks than KV
    heads), and what every rank has whole (MLA's projections into the latent space).
    """

    layers: int
    moe_layers: frozenset[int]
    experts: int
    kv_heads: int  # 1 for MLA, whose KV is one for all heads
    heads: float
    keys_values: float
    latent: float
    dense: float
    shared: float
    expert: float  # one
    router: float
    embedding: float
    tied: bool

    def bytes_on_gpu(self, stage: range, tp: int, experts: float) -> int:
        """Bytes of weights on one GPU that has the layers of `stage`, and `experts` experts of each."""
        moe = len(self.moe_layers.intersection(stage))
        attention = self.heads / tp + self.keys_values / min(tp, self.kv_heads) + self.latent
        with_experts = self.shared / tp + self.router + self.expert * experts
        ends = (0 in stage) + (self.layers - 1 in stage)
        embeddings = 1 if self.tied and ends else ends  # the first stage's, and the output's of the last
        return round(
            len(stage) * attention
            + moe * with_experts
            + (len(stage) - moe) * self.dense / tp
            + embeddings * self.embedding / tp
        )

    def kv_on_gpu(self, kv_bytes: int, stage: range, tp: int) -> int:
        """What one GPU holds of the KV of all layers, `kv_bytes`."""
        return round(kv_bytes * len(stage) / self.layers / min(tp, self.kv_heads))


def _parts(config: Mapping[str, Any], dtype: str | None) -> _Parts | None:
    """The parts of a model of FAMILIES, or None."""
    shape, text, quantization = Shape.of(config), language_model(config), _quantization(config)
    layers, hidden, moe_layers = shape.layers, shape.hidden, shape.moe_layers
    vocab, attention = count(text, "vocab_size"), _attention(shape)
    plain = _element_bytes(config, dtype)
    quantized = _quantized_bytes(quantization) if quantization else plain
    if not (layers and hidden and vocab and attention and plain and quantized) or moe_layers is None:
        return None
    if (len(moe_layers) < layers and not shape.dense_width) or (moe_layers and not shape.expert_width):
        return None
    attention_bytes, dense_bytes, shared_bytes = (
        plain if _spares(quantization, part, shape) else quantized for part in (ATTENTION, DENSE, SHARED)
    )
    experts = shape.experts if moe_layers and shape.experts else 0
    return _Parts(
        layers=layers,
        moe_layers=moe_layers,
        experts=experts,
        kv_heads=shape.kv_heads or 1,
        heads=attention[0] * attention_bytes,
        keys_values=attention[1] * attention_bytes,
        latent=attention[2] * attention_bytes,
        dense=3 * hidden * (shape.dense_width or 0) * dense_bytes,
        shared=3 * hidden * (shape.shared_width or 0) * shared_bytes,
        expert=3 * hidden * (shape.expert_width or 0) * quantized,
        router=hidden * experts * plain,
        embedding=vocab * hidden * plain,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings"))),
    )


def _attention(shape: Shape) -> tuple[int, int, int] | None:
    """Parameters of a layer's attention: divided by heads, by KV heads, and whole on every rank."""
    heads, hidden, latent = shape.heads, shape.hidden, shape.latent
    if heads and hidden and latent:
        queries = (latent.q_rank or hidden) * heads * (latent.nope + latent.rope)
        keys_values = latent.kv_rank * heads * (latent.nope + latent.value)
        whole = hidden * (latent.kv_rank + latent.rope + (latent.q_rank or 0))
        return queries + keys_values + heads * latent.value * hidden, 0, whole
    if heads and hidden and shape.kv_heads and shape.head_dim:
        return 2 * hidden * heads * shape.head_dim, 2 * hidden * shape.kv_heads * shape.head_dim, 0
    return None


def _element_bytes(config: Mapping[str, Any], dtype: str | None) -> int | None:
    """Bytes of a weight that is not quantized. Unless told otherwise, vLLM halves float32 checkpoints."""
    own = dtype in (None, "", "auto")
    size = ELEMENT_BYTES.get(str(own_dtype(config) if own else dtype).removeprefix("torch."))
    return min(size, 2) if own and size else size


def _kv_bytes_per_token(config: Mapping[str, Any], kv_dtype: str | None, dtype: str | None) -> int | None:
    """As kv_bytes_per_token, with the dtype that vLLM gives the KV cache."""
    if kv_dtype not in (None, "", "auto"):
        return kv_bytes_per_token(config, kv_dtype)
    if any(_quantization(config).get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
        return None  # it follows from the checkpoint
    size = _element_bytes(config, dtype)
    return kv_bytes_per_token(config, "float32" if size == 4 else "float16") if size else None


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the checkpoint is quantized; empty for not at all."""
    found = config.get("quantization_config") or language_model(config).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _quantized_bytes(quantization: Mapping[str, Any]) -> float | None:
    """Bytes of a quantized weight with its share of the scales, or None for a method not known here."""
    match str(quantization.get("quant_method")).lower():
        case "fp8":
            return 1
        case "mxfp4":
            return MXFP4
        case "modelopt" | "modelopt_fp4":
            inner = quantization.get("quantization")
            algorithm = (inner if isinstance(inner, Mapping) else quantization).get("quant_algo")
            return {"FP8": 1, "NVFP4": NVFP4}.get(str(algorithm).upper())
        case "awq" | "gptq":
            return _grouped_bytes(quantization, "bits")
        case "compressed-tensors":
            groups = quantization.get("config_groups")
            groups = list(groups.values()) if isinstance(groups, Mapping) else []
            weights = (
                groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], Mapping) else None
            )
            return _grouped_bytes(weights, "num_bits") if isinstance(weights, Mapping) else None
    return None


def _grouped_bytes(weights: Mapping[str, Any], bits_key: str) -> float | None:
    """Bytes of a weight where each group of them has a scale of two bytes, or of one (NVFP4)."""
    bits, group = count(weights, bits_key), count(weights, "group_size")
    if bits == 4 and weights.get("type") == "float":
        return NVFP4
    return bits / 8 + (2 / group if group else 0) if bits and bits <= 8 else None


def _spares(quantization: Mapping[str, Any], part: str, shape: Shape) -> bool:
    """Whether quantization leaves a part out, in all layers."""
    if quantization.get("quant_method") == "mxfp4":  # vLLM has it for experts only
        return True
    names: set[str] = set()
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        listed = quantization.get(key)
        names.update(map(str, listed if isinstance(listed, list) else ()))
    hits = {name for name in names if part in name and not name.endswith("norm")}
    layers = {number.group() if (number := re.search(r"\d+", name)) else None for name in hits}
    return None in layers or len(layers) >= (shape.layers or MOST_LAYERS)


def _stages(layers: int, pp: int) -> Iterator[range]:
    """The layers of each pipeline stage, as vLLM gives them out (get_pp_indices)."""
    sizes = [layers // pp] * pp
    for back in range(2, layers % pp + 2):
        sizes[-back] += 1
    start = 0
    for size in sizes:
        yield range(start, start + size)
        start += size


def _gib(size: float) -> str:
    return f"{round(size / GIB, 1):g} GiB"
