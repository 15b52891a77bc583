#!/usr/bin/env python3
"""Write the lab's model: a Qwen2 so small that a CPU engine serves it, made so that wrong KV shows.

    tiny_model.py DIR

The weights are random, from a fixed seed, but not shapeless. With ordinary random weights the next
token hardly depends on what stood a thousand tokens earlier, and a decode engine that received the KV
of another prompt would still give the right tokens. Here the first KV head of each layer looks at the
beginning of the prompt (see `early_bias`), the second one at random places, and what attention returns
outweighs the token's own embedding. Only tokens that read as plain words can win, so every answer is
text and none ends early.

Needs numpy, safetensors and tokenizers; no torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Tensor = npt.NDArray[np.float32]

SEED = 20
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 128, 2, 4, 2, 256, 512
HEAD_DIM = HIDDEN // HEADS
MAX_POSITIONS = 8192
ROPE_THETA = 10_000.0
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
STAMP = "tiny_model.json"

# The rotary pair whose angle stays below half a turn over all positions: it can tell far from near.
FAR_PAIR = 14
# How steeply a head prefers the far end: about 10 tokens share its attention in a prompt of 1,000.
FAR_STRENGTH = 1000.0
CONTENT_GAIN = 1.2
ATTENTION_GAIN = 1.2
MLP_GAIN = 3.0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name president
team minute idea kid body information back parent face others level office door health person art war
history party result change morning reason research girl guy moment air teacher force education
"""
WORDS = TEXT.split()


def corpus() -> list[str]:
    """The text the tokenizer learns from: the same on every machine."""
    chooser = random.Random(SEED)  # noqa: S311  (repeatable, not secret)
    return [" ".join(chooser.choice(WORDS) for _ in range(40)) + "." for _ in range(400)]


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE that can write any text, in words it knows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL_TOKENS,  # they get the first ids
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def early_bias(rows: int, first_head_rows: int, sign: float) -> Tensor:
    """A bias for q or k that makes the score grow with the distance between the two positions.

    After rotation q and k hold the same constant vector in one slow pair, with opposite signs, so
    their product is -cos(angle x distance): lowest nearby, highest at the start of the prompt.
    """
    bias = np.zeros(rows, dtype=np.float32)
    bias[np.arange(first_head_rows // HEAD_DIM) * HEAD_DIM + FAR_PAIR] = sign * np.sqrt(
        FAR_STRENGTH * np.sqrt(HEAD_DIM)
    )
    return bias


def weights(readable: list[int]) -> dict[str, Tensor]:
    """All tensors; only the readable tokens can win."""
    rng = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return np.asarray(rng.standard_normal((rows, columns)) * gain / np.sqrt(columns), dtype=np.float32)

    query_rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    far_query_rows, far_key_rows = query_rows // KV_HEADS, HEAD_DIM
    tensors = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        query = matrix(query_rows, HIDDEN, CONTENT_GAIN)
        key = matrix(kv_rows, HIDDEN, CONTENT_GAIN)
        for projection, rows in ((query, far_query_rows), (key, far_key_rows)):
            for head in range(rows // HEAD_DIM):  # the far pair carries distance alone, no content
                projection[head * HEAD_DIM + FAR_PAIR] = 0
                projection[head * HEAD_DIM + FAR_PAIR + HEAD_DIM // 2] = 0
        tensors |= {
            layer + "input_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            layer + "self_attn.q_proj.weight": query,
            layer + "self_attn.q_proj.bias": early_bias(query_rows, far_query_rows, 1.0),
            layer + "self_attn.k_proj.weight": key,
            layer + "self_attn.k_proj.bias": early_bias(kv_rows, far_key_rows, -1.0),
            layer + "self_attn.v_proj.weight": matrix(kv_rows, HIDDEN, 2.0),
            layer + "self_attn.v_proj.bias": np.zeros(kv_rows, dtype=np.float32),
            layer + "self_attn.o_proj.weight": matrix(HIDDEN, query_rows, ATTENTION_GAIN),
            layer + "post_attention_layernorm.weight": np.ones(HIDDEN, dtype=np.float32),
            layer + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN, MLP_GAIN),
            layer + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    output = np.zeros((VOCAB, HIDDEN), dtype=np.float32)
    output[readable] = rng.standard_normal((len(readable), HIDDEN))
    tensors["lm_head.weight"] = output
    return tensors


def configs() -> dict[str, dict[str, Any]]:
    """The JSON files beside the weights, by name."""
    end_of_text, im_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(IM_END)
    return {
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": VOCAB,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": ROPE_THETA,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "torch_dtype": "float32",
            "bos_token_id": end_of_text,
            "eos_token_id": im_end,
        },
        "generation_config.json": {
            "bos_token_id": end_of_text,
            "eos_token_id": [im_end, end_of_text],
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_POSITIONS,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def write_model(folder: Path) -> None:
    """Every file of the model."""
    tokenizer = train_tokenizer()
    pieces = {token: tokenizer.decode([token]) for token in range(VOCAB)}
    readable = [token for token, piece in pieces.items() if piece.isascii() and piece.strip().isalpha()]
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights(readable), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in configs().items():
        write_json(folder / name, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The content in a form that does not depend on the order of its keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def recipe() -> str:
    """What the model is made from: this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def present(folder: Path) -> bool:
    """Whether the same recipe made the files in the folder, and they are still what it wrote."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return bool(stamp["recipe"] == recipe() and stamp["files"] == digests(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def digests(folder: Path) -> dict[str, str]:
    """A checksum of each file but the stamp."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != STAMP
    }


def install(folder: Path) -> bool:
    """Make the model in `folder`; False when it is there already."""
    if present(folder):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_model(unfinished)
        write_json(unfinished / STAMP, {"files": digests(unfinished), "recipe": recipe()})
        unfinished.chmod(0o755)
        for path in unfinished.iterdir():
            path.chmod(0o644)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def main() -> int:
    """Make the model and say whether it was there."""
    parser = argparse.ArgumentParser(description="Write the lab's tiny model.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the model's folder; made when missing")
    folder: Path = parser.parse_args().folder.absolute()
    try:
        made = install(folder)
    except OSError as error:
        sys.stderr.write(f"tiny_model.py: cannot write the model to {folder}: {error}\n")
        return 1
    sys.stdout.write(f"{folder}: {'written' if made else 'already there'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
