"""Engines over several hosts, engines of others, and one that only seems to serve; real ones, in the lab."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from conftest import ask, write_inventory
from lab import FRONT, LAB

ARGS = yaml.safe_load((LAB / "group_vars" / "all.yml").read_text())["fleet_pools"]["decode"]["args"]
PREFILL, WIDE = "prefill-rack1-04-0", "decode-rack1-05-1"
HEADLESS = f"{WIDE}.1"
# The decode's ranks are on both hosts, the second one beside the prefill: a host in two pools.
DP_POOLS = {
    "prefill": {"role": "prefill", "hosts": "prefill", "gpus": 1, "args": ARGS},
    "decode": {
        "role": "decode",
        "hosts": "decode",
        "gpus": 2,
        "nnodes": 2,
        "data_parallel_size": 2,
        "args": ARGS,
    },
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "head_dim": 32,
    "mlp_only_layers": [],
}


def on_both_hosts(groups) -> None:
    groups["decode"]["hosts"]["rack1-04"] = {}


def container(fleet, host: str, member: str) -> str:
    """Id of a member's container, empty where there is none."""
    seen = fleet.host(host).run(f"docker inspect --format '{{{{.Id}}}}' vllm-engine-{member}")
    return seen.stdout.strip() if seen.rc == 0 else ""


def died_first(dead: str, member: str) -> str:
    """How the journal of a member names the one that died first."""
    return "this member died first" if dead == member else f"{dead} on 198.18.40."


@pytest.fixture(scope="module")
def wide(fleet, tmp_path_factory) -> Path:
    """The inventory of a prefill and a decode of two data-parallel ranks on two hosts, deployed."""
    inventory = write_inventory(tmp_path_factory.mktemp("wide"), on_both_hosts, fleet_pools=DP_POOLS)
    fleet.play("remove")
    fleet.deploy(inventory=inventory)
    return inventory


def test_every_pair_of_ranks_is_proved(fleet, wide):
    done = fleet.play("prove", inventory=wide)
    assert done.rc == 0, done.output[-6000:]
    assert f"{PREFILL} -> {WIDE} (2 rank pairs) passed" in done.words


def test_the_members_run_as_planned_and_say_so_in_their_journals(fleet, wide):
    for host, member, rank in (("rack1-05", WIDE, "0/2"), ("rack1-04", HEADLESS, "1/2")):
        journal = fleet.run(host, f"journalctl -u vllm-engine-{member} -o cat --no-pager")
        line = next(line for line in journal.splitlines() if line.startswith("[vllm-topo]"))
        for word in (
            f"engine={WIDE}",
            "role=decode",
            f"host={host}",
            f"rank={rank}",
            "tp=1",
            "dp=2",
            f"side_channel=198.18.40.{5 if host == 'rack1-05' else 4}:",
            "image=sha256:",
        ):
            assert word in line
    assert "headless" in fleet.play("status", inventory=wide).words
    facts = json.loads(fleet.run("rack1-05", f"cat /etc/ansible/facts.d/vllm-engine-{WIDE}.fact"))
    assert (facts["data_parallel_size"], facts["hosts"]) == (2, ["rack1-05", "rack1-04"])
    assert fleet.host("rack1-04").run(f"ls /etc/ansible/facts.d/vllm-engine-{HEADLESS}.fact").rc != 0


def test_a_second_run_of_it_changes_nothing(fleet, wide):
    before = [container(fleet, "rack1-05", WIDE), container(fleet, "rack1-04", HEADLESS)]
    done = fleet.deploy(inventory=wide)
    assert all(counters["changed"] == 0 for counters in done.recap.values()), done.output[-6000:]
    assert [container(fleet, "rack1-05", WIDE), container(fleet, "rack1-04", HEADLESS)] == before


@pytest.mark.parametrize(("host", "member"), [("rack1-04", HEADLESS), ("rack1-05", WIDE)])
def test_when_a_member_dies_the_engine_restarts_as_a_whole_and_is_proved_again(fleet, wide, host, member):
    places = (("rack1-05", WIDE), ("rack1-04", HEADLESS))
    before = [container(fleet, *place) for place in places]
    fleet.run(host, f"docker kill vllm-engine-{member}")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        after = [container(fleet, *place) for place in places]
        if all(after) and not set(after) & set(before):
            break
        time.sleep(1)
    else:
        raise AssertionError(f"not both members were started again: {before} -> {after}")
    for other, name in places:
        journal = fleet.run(other, f"journalctl -u vllm-engine-{name} -o cat --no-pager -n 2000")
        assert died_first(member, name) in [line for line in journal.splitlines() if "died first" in line][-1]
        assert (
            json.loads(fleet.run(other, f"cat /etc/vllm-fleet/engines/{name}/died.json"))["member"] == member
        )
    done = fleet.play("prove", inventory=wide)
    assert done.rc == 0, done.output[-6000:]
    assert container(fleet, "rack1-04", PREFILL)


def test_a_member_that_keeps_dying_ends_in_a_failed_state_that_names_it(fleet, wide):
    """Its settings are broken behind the fleet's back; every start takes some seconds to fail."""
    settings = f"/etc/vllm-fleet/engines/{HEADLESS}/engine.yaml"
    fleet.run("rack1-04", f"cp {settings} /root/kept && echo 'no-such-argument: 1' >> {settings}")
    units = (("rack1-05", f"vllm-engine-{WIDE}"), ("rack1-04", f"vllm-engine-{HEADLESS}"))
    try:
        for host, unit in units:
            fleet.run(host, f"systemctl reset-failed {unit}")
        fleet.run("rack1-04", f"docker kill vllm-engine-{HEADLESS}")
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            states = [
                fleet.host(host).run(f"systemctl is-failed {unit}").stdout.strip() for host, unit in units
            ]
            if states == ["failed", "failed"]:
                break
            time.sleep(3)
        assert states == ["failed", "failed"]
        for host, unit in units:
            log = fleet.run(host, f"journalctl -u {unit} -o cat --no-pager -n 400")
            last = [line for line in log.splitlines() if "died first" in line][-1]
            assert died_first(HEADLESS, unit.removeprefix("vllm-engine-")) in last
        assert "no-such-argument" in fleet.run("rack1-04", f"journalctl -u {units[1][1]} --no-pager -n 400")
    finally:
        fleet.run("rack1-04", f"mv /root/kept {settings}")
    fleet.deploy(inventory=wide)


def test_an_engine_that_is_healthy_but_does_not_serve_is_refused(fleet, changed_inventory):
    """A mixture of experts with expert parallelism: on CPUs /health says 200 and the first request kills it."""
    config = json.loads(fleet.run("rack1-05", "cat /srv/models/tiny/config.json"))
    for host in ("rack1-04", "rack1-05"):
        fleet.run(host, "rm -rf /srv/models/moe && cp -r /srv/models/tiny /srv/models/moe")
        fleet.run(host, "rm /srv/models/moe/*.safetensors")
        text = json.dumps(config | MOE)
        fleet.run(host, f"echo '{text}' > /srv/models/moe/config.json")
    pool = {
        "role": "mixed",
        "hosts": "decode",
        "gpus": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "args": ARGS | {"load_format": "dummy"},
    }
    wrong = changed_inventory(
        fleet_pools={"moe": pool},
        fleet_model={"path": "/srv/models/moe", "served_name": "tiny"},
        fleet_rule_overrides={"expert-parallel-needs-gpu": "the test of an engine that only seems to serve"},
    )
    fleet.play("remove")
    done = fleet.play("site", inventory=wrong)
    assert done.rc != 0
    assert "Engine moe-rack1-05-0" in done.words
    with pytest.raises(OSError, match="503"):  # the front is there, and no router behind it
        ask(FRONT, prompt="?", max_tokens=1, timeout=5)
    assert fleet.play("remove", inventory=wrong).rc == 0


def test_one_tensor_parallel_engine_over_two_hosts_serves(fleet, changed_inventory):
    pool = {"role": "mixed", "hosts": "decode", "gpus": 2, "nnodes": 2, "args": ARGS}
    inventory = changed_inventory(hosts=on_both_hosts, fleet_pools={"serve": pool})
    done = fleet.deploy(inventory=inventory)
    assert "serve-rack1-05-0.1" in done.words
    assert ask(FRONT, prompt="two hosts", max_tokens=4)["choices"][0]["text"]
    assert fleet.play("remove", inventory=inventory).rc == 0


def test_engines_of_others_are_proved_and_routed_to_and_left_alone(fleet, changed_inventory):
    """The decode that one fleet runs is an engine of others for the next one."""
    fleet.deploy()
    decode = "decode-rack1-05-0"
    before = container(fleet, "rack1-05", decode)
    external = {"theirs": {"role": "decode", "url": "http://198.18.40.5:8000", "tensor_parallel_size": 1}}
    prefill = {"prefill": DP_POOLS["prefill"]}
    try:
        inventory = changed_inventory(fleet_pools=prefill, fleet_external_engines=external)
        done = fleet.deploy(inventory=inventory)
        assert f"{PREFILL} -> theirs" in done.words
        assert "external" in fleet.play("status", inventory=inventory).words
        assert ask(FRONT, prompt="theirs", max_tokens=4)["choices"][0]["text"]
        assert container(fleet, "rack1-05", decode) == before
        external["theirs"]["tensor_parallel_size"] = 2
        external["theirs"]["max_model_len"] = 123
        wrong = changed_inventory(fleet_pools=prefill, fleet_external_engines=external)
        done = fleet.play("router", inventory=wrong)
        assert done.rc != 0
        assert "theirs" in done.words
        assert "123" in done.words
        assert fleet.play("remove", inventory=inventory).rc == 0
        assert container(fleet, "rack1-05", decode) == before
    finally:
        assert fleet.play("remove").rc == 0
