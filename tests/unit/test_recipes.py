"""Every inventory of this repository is right, and is the fleet that its README describes."""

from __future__ import annotations

import ipaddress
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_fleet.cli import app
from vllm_fleet.proof import proof_pairs, proof_rounds

INVENTORY = Path(__file__).parents[2] / "inventory"
FOLDERS = sorted(path.parent for path in INVENTORY.rglob("hosts.yml"))
DOCUMENTATION = [ipaddress.ip_network(f"{net}/24") for net in ("192.0.2.0", "198.51.100.0", "203.0.113.0")]

type Kind = tuple[str, int, int, int, int, bool]
# name: (engines: {(role, TP, DP, hosts of an engine, GPUs of an engine, EP): how many}, hosts with engines, warnings)
# fmt: off
EXPECTED: dict[str, tuple[dict[Kind, int], int, list[str]]] = {
    "lab": ({("prefill", 1, 1, 1, 1, False): 1, ("decode", 1, 1, 1, 1, False): 1}, 2, []),
    "examples/two-hosts": ({("prefill", 8, 1, 1, 8, False): 1, ("decode", 8, 1, 1, 8, False): 1}, 2, []),
    "qwen2.5-0.5b-smoke": ({("prefill", 1, 1, 1, 1, False): 1, ("decode", 1, 1, 1, 1, False): 1}, 1, []),
    "h200": ({("prefill", 1, 1, 1, 1, False): 1, ("decode", 1, 1, 1, 1, False): 1}, 1, []),
    "h200-8gpu": ({("prefill", 2, 1, 1, 2, False): 2, ("decode", 2, 1, 1, 2, False): 2}, 1, []),
    "qwen3-30b-a3b": ({("prefill", 1, 1, 1, 1, False): 2, ("decode", 1, 2, 1, 2, True): 1}, 1, []),
    "mixed-tp": (
        {("prefill", 4, 1, 1, 4, False): 4, ("decode", 4, 1, 1, 4, False): 2, ("decode", 8, 1, 1, 8, False): 1},
        4, ["tensor-parallel-equal"],
    ),
    "gb200-two-trays": ({("prefill", 4, 1, 1, 4, False): 1, ("decode", 4, 1, 1, 4, False): 1}, 2, []),
    "two-engines-a-tray": ({("prefill", 2, 1, 1, 2, False): 4, ("decode", 2, 1, 1, 2, False): 4}, 4, []),
    "rl-rollouts": ({("prefill", 1, 1, 1, 1, False): 4, ("decode", 1, 4, 1, 4, True): 1}, 2, []),
    "gb200-wide-ep": ({("prefill", 1, 4, 1, 4, True): 2, ("decode", 1, 64, 16, 64, True): 1}, 18, []),
}
# fmt: on


def name_of(folder: Path) -> str:
    return folder.relative_to(INVENTORY).as_posix()


def judged(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The plan, and the ids of the rules that warn."""
    result = CliRunner().invoke(app, ["plan", "-i", str(folder), "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0, document["problems"]
    return document["plan"], [problem["rule"] for problem in document["problems"]]


@pytest.fixture(params=FOLDERS, ids=name_of)
def folder(request) -> Path:
    return request.param


@pytest.fixture
def wide() -> dict[str, Any]:
    return judged(INVENTORY / "gb200-wide-ep")[0]


def test_each_is_the_fleet_that_it_should_be(folder):
    engines, hosts, warnings = EXPECTED[name_of(folder)]
    plan, found = judged(folder)
    kinds: dict[Kind, int] = {}
    for engine in plan["engines"]:
        kind = (
            engine["role"], engine["tensor_parallel_size"], engine["data_parallel_size"], engine["nnodes"],
            engine["gpus"], engine["enable_expert_parallel"],
        )  # fmt: skip
        kinds[kind] = kinds.get(kind, 0) + 1
    assert (kinds, len(plan["engine_hosts"]), found) == (engines, hosts, warnings)


def test_all_are_expected():
    assert {name_of(folder) for folder in FOLDERS} == EXPECTED.keys()


def test_a_copy_elsewhere_is_the_same_fleet(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "mine")
    assert judged(copy)[0]["engines"] == judged(folder)[0]["engines"]


def test_addresses_are_those_for_documentation(folder):
    plan, _ = judged(folder)
    if name_of(folder) != "lab":
        for host in plan["hosts"].values():
            assert any(ipaddress.ip_address(host["address"]) in network for network in DOCUMENTATION)


def test_the_model_is_judged(folder, tmp_path):
    """With a model of 7 attention heads, which no engine of TP 2 or more can have, or of no experts."""
    configs = list(folder.glob("group_vars/*.json"))
    if name_of(folder) in ("lab", "examples/two-hosts"):
        assert not configs
        return
    copy = shutil.copytree(folder, tmp_path / "mine")
    (config,) = copy.glob("group_vars/*.json")
    assert config.stem == Path(judged(copy)[0]["model"]["path"]).name
    config.write_text(json.dumps({"num_attention_heads": 7, "num_hidden_layers": 1}))
    result = CliRunner().invoke(app, ["validate", "-i", str(copy), "--json"])
    found = {problem["rule"] for problem in json.loads(result.stdout)["problems"]}
    if name_of(folder) in ("qwen2.5-0.5b-smoke", "h200"):
        assert found == set()  # TP 1, dense: nothing of it can be wrong
    else:
        assert found & {"attention-heads", "no-experts"}
        assert result.exit_code == 1


def test_each_model_fits_only_where_it_should(folder):
    """On GPUs of 1 GiB the rule about memory refuses every recipe that has a model's config.json."""
    result = CliRunner().invoke(
        app, ["validate", "-i", str(folder), "--json", "-e", "fleet_gpu_memory_gib=1"]
    )
    found = {problem["rule"] for problem in json.loads(result.stdout)["problems"]}
    assert ("memory" in found) == bool(list(folder.glob("group_vars/*.json")))


def test_each_has_a_readme_and_is_listed(folder):
    name = name_of(folder)
    listed = (INVENTORY / "README.md").read_text()
    assert f"`{name}`" in listed or f"({name})" in listed
    if name not in ("lab", "examples/two-hosts"):
        readme = (folder / "README.md").read_text()
        measured = name == "h200"
        assert (
            "Measured, as plain processes" if measured else "Not measured: no such hardware was at hand."
        ) in readme
        assert "Change for yours:" in readme


def test_the_wide_decode_engine_has_four_ranks_on_each_of_sixteen_trays(wide):
    (decode,) = (engine for engine in wide["engines"] if engine["role"] == "decode")
    trays = [f"rack1-{number:02}" for number in range(1, 17)]
    assert decode["hosts"] == trays
    members = {member["name"]: member for host in wide["hosts"].values() for member in host["members"]}
    ranks = [members[name]["data_parallel_ranks"] for name in decode["members"]]
    assert ranks == [list(range(first, first + 4)) for first in range(0, 64, 4)]
    assert wide["hosts"]["rack1-16"]["address"] == "192.0.2.116"
    assert {wide["hosts"][tray]["rack"] for tray in trays} == {"rack1"}


def test_the_wide_fleet_is_proved_rank_by_rank(wide):
    assert (len(proof_pairs(wide)), len(proof_rounds(wide))) == (8 * 64, 64)


def test_two_engines_of_a_tray_have_other_gpus_and_ports():
    plan, _ = judged(INVENTORY / "two-engines-a-tray")
    first, second = plan["hosts"]["rack1-01"]["members"]
    assert (first["devices"], first["http_port"]) == ([0, 1], 8000)
    assert (second["devices"], second["http_port"]) == ([2, 3], 8032)
