"""A trainer's launcher attaches to a fleet of the profile rl, as vime does to external engines.

The launcher here follows vime's rules: it finds out what runs from /server_info, takes a `kv_producer` for a prefill, a
`kv_consumer` for a decode and anything else for an ordinary engine, compares what it would have started with what runs
(a mapping as a subset), and refuses at the first difference. Then it sends token ids to the router and gets token ids.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import Fleet, ask
from lab import FRONT, ROOT, fetch

pytestmark = pytest.mark.e2e

KINDS = {"kv_producer": "prefill", "kv_consumer": "decode"}
SECTIONS = {
    "tensor_parallel_size": "parallel_config",
    "pipeline_parallel_size": "parallel_config",
    "data_parallel_size": "parallel_config",
    "nnodes": "parallel_config",
    "node_rank": "parallel_config",
    "max_model_len": "model_config",
    "served_model_name": "model_config",
}
WANTED = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "max_model_len": 4096,
    "served_model_name": "tiny",
    "weight_transfer_config": {"backend": "nccl"},
}
TOKENS = list(range(3, 300))


@dataclass(frozen=True)
class Found:
    """An engine as the launcher finds it."""

    url: str
    kind: str
    bootstrap_port: int | None
    config: dict[str, Any]

    def differences(self, wanted: dict[str, Any]) -> list[str]:
        """What the launcher would have started otherwise, strictly."""
        wrong = []
        for name, value in wanted.items():
            seen = self.config[SECTIONS[name]][name] if name in SECTIONS else self.config[name]
            if isinstance(value, dict):
                same = isinstance(seen, dict) and value.items() <= seen.items()
            else:
                same = seen == value
            if not same:
                wrong.append(f"{name} is {seen!r}, not {value!r}")
        return wrong


def discover(url: str) -> Found:
    """What the launcher learns of an engine; it knows nothing but the address."""
    info = fetch(f"{url}/server_info?config_format=json")
    transfer = info["vllm_config"]["kv_transfer_config"] or {}
    return Found(
        url,
        KINDS.get(transfer.get("kv_role"), "regular"),
        info["vllm_env"].get("VLLM_NIXL_SIDE_CHANNEL_PORT"),
        info["vllm_config"],
    )


def generate(url: str, **sampling: Any) -> list[int]:
    """Token ids in, token ids out."""
    answer = ask(
        url,
        "/inference/v1/generate",
        token_ids=TOKENS,
        sampling_params={"max_tokens": 12, "temperature": 0, "detokenize": False} | sampling,
    )
    return answer["choices"][0]["token_ids"]


def fetched_bytes(decode: Found) -> float:
    """KV that the decode has fetched so far."""
    with urllib.request.urlopen(f"{decode.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    lines = [line for line in lines if line.startswith("vllm:nixl_bytes_transferred_sum")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def engines(fleet: Fleet, rl_inventory) -> list[Found]:
    """The engines, from the addresses that `vllm-fleet plan` gives to a launcher."""
    fleet.deploy(inventory=rl_inventory)
    command = [ROOT / ".venv/bin/vllm-fleet", "plan", "-i", rl_inventory, "--json"]
    plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["plan"]
    return [discover(engine["url"]) for engine in plan["engines"]]


def test_each_engine_is_what_its_launcher_takes_it_for(engines):
    assert [(found.kind, found.bootstrap_port) for found in engines] == [("prefill", 5600), ("decode", 5600)]


def test_they_are_what_the_launcher_would_have_started_and_anything_else_is_seen(engines):
    for found in engines:
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[found.kind]
        transfer = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": role}}
        assert found.differences(WANTED | transfer) == []
        assert found.differences(
            {"tensor_parallel_size": 2, "weight_transfer_config": {"backend": "ipc"}}
        ) == [
            "tensor_parallel_size is 1, not 2",
            "weight_transfer_config is {'backend': 'nccl'}, not {'backend': 'ipc'}",
        ]


def test_token_ids_go_in_and_out_through_the_router_with_kv_from_the_prefill(engines):
    decode = next(found for found in engines if found.kind == "decode")
    before = fetched_bytes(decode)
    through_router = generate(FRONT)
    assert fetched_bytes(decode) > before
    assert through_router == generate(decode.url)
    assert len(through_router) == 12
    # Without max_tokens vLLM generates up to the model's length.
    assert len(generate(FRONT, max_tokens=3)) == 3
