"""Put what plans render into one folder, so that `run.py` can start it where Ansible is not.

    python tests/gpu/pack.py -i inventory/h200 FOLDER [--address ADDRESS]

The folder gets `commit`, and one folder for each of VARIANTS and SHARED: plan.json, router.json (the router's command line), proof.json (what the
module kv_proof is asked), observe.json (what host_observe is asked), and for each member the files that land on its host.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Run as a program, it finds these nowhere else: so the imports below come after it (E402).
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/support")]

import rendering  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from gpu import shapes  # noqa: E402
from gpu.shapes import MODELS  # noqa: E402
from vllm_fleet.cli import app  # noqa: E402
from vllm_fleet.host_check.report import questions  # noqa: E402
from vllm_fleet.proof import proof_pairs, proof_rounds  # noqa: E402
from vllm_fleet.routing import router_arguments  # noqa: E402

ARGS = {"max_model_len": 20480}
EAGER = ARGS | {"enforce_eager": True}
FABRIC = EAGER | {"enable_cumem_allocator": True}
EXPERTS = {
    "path": "/srv/models/qwen3-30b-a3b-shape",
    "served_name": "qwen3-30b-a3b-shape",
    "config": shapes.config("qwen3-30b-a3b", MODELS["qwen3-30b-a3b-shape"][1]),
}


def pool(role: str, gpus: int, args: dict[str, Any] = EAGER, **more: Any) -> dict[str, Any]:
    """A pool whose engines have so many GPUs each."""
    return {"role": role, "hosts": "gpu", "gpus": gpus, "args": args, **more}


def pair(args: dict[str, Any]) -> dict[str, Any]:
    """A prefill and a decode of one GPU each."""
    return {role: pool(role, 1, args) for role in ("prefill", "decode")}


# Of a GPU that two engines share; what is left takes their contexts.
HALF = EAGER | {"gpu_memory_utilization": 0.42}
RANKS = {"data_parallel_size": 2, "enable_expert_parallel": True}
VARIANTS: dict[str, dict[str, Any]] = {
    # The inventory as it is, compiled and with CUDA graphs: what the figures are of.
    "pair": {},
    "ordinary": {"fleet_pools": {"serve": pool("mixed", 1, ARGS, engines_per_host=2)}},
    "cached": {"fleet_pools": pair(EAGER), "fleet_kv_mapping": "cached"},
    "per_transfer": {"fleet_pools": pair(EAGER), "fleet_kv_mapping": "per_transfer"},
    # The memory that engines on different hosts have.
    "fabric": {"fleet_pools": pair(FABRIC), "fleet_kv_mapping": "per_transfer"},
    "rollouts": {"fleet_pools": pair(EAGER), "fleet_profile": "rl"},
    "experts": {"fleet_model": EXPERTS, "fleet_pools": {"serve": pool("mixed", 2, **RANKS)}},
    "experts_one": {
        "fleet_model": EXPERTS,
        "fleet_pools": {"serve": pool("mixed", 1, engines_per_host=1)},
    },
    "uneven": {
        "fleet_gpus_per_host": 4,
        "fleet_pools": {
            "prefill": pool("prefill", 1, ARGS, engines_per_host=2),
            "decode": pool("decode", 2, ARGS),
        },
    },
    "wide": {
        "fleet_gpus_per_host": 4,
        "fleet_model": EXPERTS,
        "fleet_pools": {"prefill": pool("prefill", 2, ARGS), "decode": pool("decode", 2, ARGS, **RANKS)},
    },
}
SHARED: dict[str, dict[str, Any]] = {
    "shared": {"fleet_pools": pair(HALF)},
    "shared_64": {"fleet_pools": pair(HALF | {"block_size": 64})},
    "shared_rollouts": {"fleet_pools": pair(HALF), "fleet_profile": "rl"},
}
"""Of these all engines get GPU 0, which no plan does: for what a machine with one GPU can show."""


def main() -> int:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("-i", "--inventory", required=True)
    parser.add_argument(
        "--address", default="198.18.40.11", help="of the machine; run.py adds it to loopback"
    )
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "commit").write_text(subprocess.check_output(commit, text=True))
    for name, variables in (VARIANTS | SHARED).items():
        words = ["plan", "--json", "-i", asked.inventory, "-e", f"ansible_host={asked.address}"]
        # In this process: it is what makes Ansible's plugins known, which the templates need.
        result = CliRunner().invoke(app, [*words, "-e", json.dumps(variables)])
        if result.exit_code:
            sys.stderr.write(f"{name}: {result.output}")
            return 1
        plan = json.loads(result.stdout)["plan"]
        write(asked.folder / name, share(plan) if name in SHARED else plan)
    return 0


def share(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan of one host whose engines are all on its first GPU."""
    (host,) = plan["hosts"].values()
    host["gpus"] = 1
    for member in host["members"]:
        member["devices"] = [0]
        # Where it finds no NVLink, UCX reads even the same GPU's memory over TCP, unless it is told so.
        member["env"] |= {"CUDA_VISIBLE_DEVICES": "0", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
        member["container_options"]["devices"].remove("nvidia.com/gpu=1")
    return plan


def write(folder: Path, plan: dict[str, Any]) -> None:
    """One variant."""
    (host,) = plan["hosts"]
    files = {
        "plan.json": json.dumps(plan, indent=2),
        "router.json": json.dumps(["vllm-router", *router_arguments(plan, "a")]),
        "proof.json": json.dumps(proof(plan)),
        "observe.json": json.dumps(questions(plan, host)["observe"]),
    }
    for member in plan["hosts"][host]["members"]:
        for name, text in rendering.rendered(plan, member).items():
            files[f"members/{member['name']}/{name}"] = text
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def proof(plan: dict[str, Any]) -> dict[str, Any]:
    """The parameters that the role kv_proof gives to its module, but for those that follow from the model."""
    return {
        "pairs": proof_pairs(plan),
        "rounds": proof_rounds(plan),
        "model": plan["model"]["served_name"],
        "transport": plan["kv_transport"],
        "floor_gbps": plan["kv_floor_gbps"],
        "floor_min_bytes": plan["kv_floor_min_bytes"],
        **{key: plan["proof"][key] for key in ("prompt_words", "prefix_tokens", "tokens")},
    }


if __name__ == "__main__":
    sys.exit(main())
