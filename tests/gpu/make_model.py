"""Write a model of a real one's shape, with random weights from a fixed seed and the lab's tokenizer: no download.

    python tests/gpu/make_model.py SHAPE DIR [--layers N]

Weights are drawn on the GPU, layer by layer, so that 8 billion parameters take seconds. Only tokens that read as plain
words can win, as in the lab's model. Needs torch, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
# Run as a program, it finds these nowhere else: so the imports below come after it (E402).
sys.path += [str(ROOT / "roles/lab_hosts/files"), str(ROOT / "tests")]

import tiny_model  # noqa: E402

from gpu.shapes import SHAPES, config  # noqa: E402

SEED = 20
QUERY_GAIN = 1.0
"""Of the norm before queries meet keys: how wide scores spread. With 4, rounding in bfloat16 decided which token wins, and an
engine did not repeat another's tokens (measured on H200)."""


class Writer:
    """One model, written file by file."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self.files: dict[str, str] = {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.draw = torch.Generator(device=self.device).manual_seed(SEED)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Random, so that what it makes of a vector is about as long."""
        values = torch.randn((rows, columns), generator=self.draw, device=self.device)
        return (values * (gain / columns**0.5)).to(torch.bfloat16).cpu()

    def same(self, size: int, value: float = 1.0) -> torch.Tensor:
        """The weights of a norm."""
        return torch.full((size,), value, dtype=torch.bfloat16)

    def save(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write a file of tensors, and remember it for the index."""
        save_file(tensors, self.folder / file, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(tensors, file))

    def mlp(self, name: str, middle: int) -> dict[str, torch.Tensor]:
        """One gated MLP."""
        hidden = self.config["hidden_size"]
        return {
            f"{name}.gate_proj.weight": self.matrix(middle, hidden),
            f"{name}.up_proj.weight": self.matrix(middle, hidden),
            f"{name}.down_proj.weight": self.matrix(hidden, middle),
        }

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Attention, and an MLP or experts."""
        c, name = self.config, f"model.layers.{number}"
        hidden, head = c["hidden_size"], c["head_dim"]
        queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        tensors = {
            f"{name}.input_layernorm.weight": self.same(hidden),
            f"{name}.post_attention_layernorm.weight": self.same(hidden),
            f"{name}.self_attn.q_norm.weight": self.same(head, QUERY_GAIN),
            f"{name}.self_attn.k_norm.weight": self.same(head),
            f"{name}.self_attn.q_proj.weight": self.matrix(queries, hidden),
            f"{name}.self_attn.k_proj.weight": self.matrix(keys, hidden),
            f"{name}.self_attn.v_proj.weight": self.matrix(keys, hidden, 2.0),
            f"{name}.self_attn.o_proj.weight": self.matrix(hidden, queries),
        }
        if "num_experts" not in c:
            return tensors | self.mlp(f"{name}.mlp", c["intermediate_size"])
        tensors[f"{name}.mlp.gate.weight"] = self.matrix(c["num_experts"], hidden)
        for expert in range(c["num_experts"]):
            tensors |= self.mlp(f"{name}.mlp.experts.{expert}", c["moe_intermediate_size"])
        return tensors

    def write(self) -> None:
        """All files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        layers, hidden, vocabulary = (
            self.config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")
        )
        for number in range(layers):
            self.save(f"model-{number:05}.safetensors", self.layer(number))
        tokenizer = tiny_model.train_tokenizer()
        pieces = {token: tokenizer.decode([token]) for token in range(vocabulary)}
        readable = [token for token, piece in pieces.items() if piece.isascii() and piece.strip().isalpha()]
        output = torch.zeros((vocabulary, hidden), dtype=torch.bfloat16)
        output[readable] = self.matrix(len(readable), hidden)
        self.save(
            f"model-{layers:05}.safetensors",
            {
                "model.embed_tokens.weight": self.matrix(vocabulary, hidden, hidden**0.5),
                "model.norm.weight": self.same(hidden),
                "lm_head.weight": output,
            },
        )
        tokenizer.save(str(self.folder / "tokenizer.json"))
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": self.files}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, content in tiny_model.configs().items():
            if name == "config.json":
                ends = {key: content[key] for key in ("bos_token_id", "eos_token_id")}
                tiny_model.write_json(self.folder / name, self.config | ends)
            else:
                tiny_model.write_json(self.folder / name, content)


def main() -> None:
    """Make the model."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    asked = parser.parse_args()
    Writer(asked.folder, config(asked.shape, asked.layers)).write()


if __name__ == "__main__":
    main()
