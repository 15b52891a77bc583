"""The life of a fleet, in order: fresh, deployed, disturbed, changed under load, removed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from conftest import DECODE, PAIR, PREFILL, ask, steady_stream
from kv_proxy import KvProxy
from lab import FRONT, LAB

POOLS = yaml.safe_load((LAB / "group_vars" / "all.yml").read_text())["fleet_pools"]
GATEWAY = "198.18.40.1"  # this machine, as the lab's hosts reach it


def prove_pair(fleet, prefill="http://198.18.40.4:8000", decode="http://198.18.40.5:8000", **params):
    """Run the proof's module for the lab's pair, from the router's host."""
    engine = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    pair = {
        "name": PAIR,
        "prefill": engine | {"engine": PREFILL, "url": prefill},
        "decode": engine | {"engine": DECODE, "url": decode},
    }
    shared = {
        "pairs": [pair],
        "rounds": [[0]],
        "model": "tiny",
        "transport": "tcp",
        "bytes_per_token": 1024,
        "floor_gbps": 0.005,
    }
    return fleet.module("rack1-router", "kv_proof", **(shared | params))


def requests_served(engine: str) -> float:
    """Requests that the engine at a URL has finished."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=10) as metrics:
        page = metrics.read().decode()
    return sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.MULTILINE)))


# --- a host without a fleet --------------------------------------------------------------------------------------


def test_a_fleet_is_removed_and_removing_it_again_changes_nothing(fleet):
    assert fleet.play("remove").rc == 0
    again = fleet.play("remove")
    assert again.rc == 0
    assert all(counters["changed"] == 0 for counters in again.recap.values())
    for host in ("rack1-04", "rack1-05", "rack1-router"):
        left = fleet.run(
            host,
            "ls -d /etc/vllm-fleet /etc/systemd/system/vllm-* /etc/ansible/facts.d/vllm-* /opt/vllm-router 2>/dev/null || true",
        )
        assert not left
        assert fleet.run(host, "docker ps -q") == ""


def test_check_mode_on_hosts_without_a_fleet_changes_nothing_and_says_what_it_skips(fleet):
    done = fleet.play("site", "--check", "--diff")
    assert done.rc == 0, done.output[-4000:]
    assert "+ExecStart=/usr/bin/docker run" in done.output
    for skipped in (f"{PREFILL} would be started", "the proof is skipped", "the router phase is skipped"):
        assert skipped in done.words
    assert fleet.run("rack1-04", "ls /etc/systemd/system/vllm-* 2>/dev/null || true") == ""


def test_a_wrong_inventory_is_refused_before_any_host_is_touched(fleet, changed_inventory):
    pools = {**POOLS, "prefill": {**POOLS["prefill"], "gpus": 3, "args": {"port": 1}}}
    wrong = changed_inventory(fleet_pools=pools, fleet_kv_transprot="tcp")
    done = fleet.play("site", inventory=wrong)
    assert done.rc != 0
    assert set(done.recap) == {"localhost"}
    for seen in (
        "fleet_kv_transprot",
        "Did you mean fleet_kv_transport?",
        "fleet_pools.prefill.args.port",
        "group_vars/all.yml:",
    ):
        assert seen in done.words


# --- deployed ----------------------------------------------------------------------------------------------------


def test_site_deploys_proves_and_serves(fleet):
    done = fleet.deploy()
    assert PAIR in done.words
    assert "passed" in done.words
    assert "PHASES" in done.output
    answer = ask(FRONT, prompt="Hello", max_tokens=8, temperature=0)
    alone = ask("http://198.18.40.4:8000", prompt="Hello", max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8


def test_a_second_run_changes_and_restarts_nothing(fleet):
    before = fleet.containers()
    done = fleet.deploy()
    assert {host: counters["changed"] for host, counters in done.recap.items()} == dict.fromkeys(
        done.recap, 0
    )
    assert len(done.recap) == 4
    assert fleet.containers() == before


def without_registry(groups):
    del groups["registry"]


def test_an_archive_in_place_of_the_registry_restarts_nothing(fleet, changed_inventory):
    before = fleet.containers()
    done = fleet.deploy(inventory=changed_inventory(hosts=without_registry, fleet_image_source="archive"))
    assert [counters["changed"] for counters in done.recap.values()] == [0] * 4
    assert fleet.containers() == before


def test_a_host_that_builds_for_itself_runs_its_own_image(fleet, changed_inventory):
    """The image of one host is made of that of the others: the same content, another id, as from a build of its own."""
    before = fleet.containers()
    there = fleet.run("rack1-05", f"docker inspect --format '{{{{.Image}}}}' vllm-engine-{DECODE}")
    command = [sys.executable, LAB.parents[1] / "images/build", "--check", "vllm-nixl:cpu"]
    tag = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)[0]["tag"]
    dockerfile = f"FROM {there}\\nLABEL host=rack1-05\\n"
    fleet.run("rack1-05", f"printf '{dockerfile}' | docker build --quiet --tag {tag} -")
    fleet.run("rack1-04", f"docker tag {there} {tag}")
    inventory = changed_inventory(hosts=without_registry, fleet_image_source="build")
    fleet.deploy(inventory=inventory)
    own = fleet.run("rack1-05", f"docker inspect --format '{{{{.Image}}}}' vllm-engine-{DECODE}")
    assert own != there
    fact = fleet.run("rack1-05", f"cat /etc/ansible/facts.d/vllm-engine-{DECODE}.fact")
    assert json.loads(fact)["image_ids"] == {"rack1-05": own}
    assert fleet.containers()["rack1-04"] == before["rack1-04"]
    again = fleet.deploy("--check", inventory=inventory)
    assert [counters["changed"] for counters in again.recap.values()] == [0] * 4
    fleet.deploy()
    assert there == fleet.run("rack1-05", f"docker inspect --format '{{{{.Image}}}}' vllm-engine-{DECODE}")
    fleet.run("rack1-05", f"docker tag {there} {tag} && docker rmi {own}")


def test_check_mode_on_a_deployed_fleet_changes_nothing(fleet):
    before = fleet.containers()
    done = fleet.play("site", "--check", "--diff")
    assert done.rc == 0, done.output[-4000:]
    assert all(counters["changed"] == 0 for counters in done.recap.values())
    assert "the proof is skipped" in done.words
    assert fleet.containers() == before


@pytest.mark.parametrize(
    ("name", "engine", "address"), [("rack1-04", PREFILL, "198.18.40.4"), ("rack1-05", DECODE, "198.18.40.5")]
)
def test_an_engine_host_is_as_planned(fleet, name, engine, address):
    host = fleet.host(name)
    unit = host.service(f"vllm-engine-{engine}.service")
    assert unit.is_running, host.run(f"journalctl -n 30 -u vllm-engine-{engine}").stdout
    assert unit.is_enabled
    environment = host.file(f"/etc/vllm-fleet/engines/{engine}/engine.env")
    assert (environment.mode, environment.user) == (0o600, "root")
    assert "TENSOR_PARALLEL_SIZE=1" in environment.content_string
    assert f"VLLM_NIXL_SIDE_CHANNEL_HOST={address}\n" in environment.content_string
    fact = json.loads(host.file(f"/etc/ansible/facts.d/vllm-engine-{engine}.fact").content_string)
    assert (fact["engine"], fact["schema"]) == (engine, 1)
    running = host.check_output(f"docker inspect --format '{{{{.Image}}}}' vllm-engine-{engine}")
    assert fact["image_ids"] == {name: running}
    assert fact["url"] == f"http://{address}:8000"
    assert host.socket(f"tcp://{address}:8000").is_listening


def test_the_router_host_is_as_planned(fleet):
    host = fleet.host("rack1-router")
    for unit in ("docker-registry", "haproxy"):
        assert host.service(unit).is_running, host.run(f"journalctl -n 30 -u {unit}").stdout
    active = host.check_output(
        "systemctl list-units --plain --no-legend --state=active 'vllm-router@*'"
    ).split()
    assert len([word for word in active if word.endswith(".service")]) == 1
    shown = host.check_output(
        f"systemctl show --property=DynamicUser,ProtectSystem,NoNewPrivileges {active[0]}"
    )
    assert set(shown.splitlines()) == {"DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes"}
    assert host.check_output(f"systemd-analyze verify {active[0]} 2>&1") == ""
    assert host.socket("tcp://198.18.40.2:30000").is_listening
    # Clients reach routers only through the front.
    assert not host.socket("tcp://0.0.0.0:30001").is_listening
    assert not host.socket("tcp://0.0.0.0:30002").is_listening


def test_status_shows_every_engine_everywhere(fleet):
    done = fleet.play("status")
    assert done.rc == 0
    for engine in (PREFILL, DECODE):
        [row] = [line for line in done.output.splitlines() if line.strip().startswith(f"{engine} ")]
        assert row.split()[3:] == ["yes", "active/running,", "0", "restarts", "ok", "healthy"], row


# --- the proof turns red -----------------------------------------------------------------------------------------


def test_the_proof_passes_and_counts_bytes(fleet):
    [pair] = prove_pair(fleet, floor_min_bytes=1)["pairs"]
    assert pair["verdict"] == "passed", pair
    assert pair["bytes"] >= pair["expected_bytes"] > 0
    assert pair["tokens_equal"]


def test_a_raised_floor_fails(fleet):
    result = prove_pair(fleet, floor_gbps=1e6, floor_min_bytes=1)
    assert result["pairs"][0]["verdict"] == "failed", result
    assert PAIR in result["msg"]
    assert "floor" in result["msg"]


@pytest.mark.parametrize(
    ("fault", "seen"), [("wrong-kv", "the tokens differ"), ("strip", "kv_transfer_params")]
)
def test_wrong_or_no_kv_fails(fleet, fault, seen):
    """The prefill is behind a proxy that swaps the KV, or hides it; engines and transfers are real."""
    with KvProxy("http://198.18.40.4:8000", fault, (GATEWAY, 0)).running() as proxied:
        result = prove_pair(fleet, prefill=proxied.url)
    assert result["pairs"][0]["verdict"] == "failed", result
    assert PAIR in result["msg"]
    assert seen in result["msg"]


# --- disturbed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), [("rack1-05", DECODE), ("rack1-04", PREFILL)])
def test_a_killed_container_is_healed_and_proved_again(fleet, name, engine):
    killed = fleet.run(name, f"docker inspect --format '{{{{.Id}}}}' vllm-engine-{engine}")
    fleet.run(name, f"docker kill vllm-engine-{engine}")
    # systemd starts it again after RestartSec.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = fleet.host(name).run(f"docker inspect --format '{{{{.Id}}}}' vllm-engine-{engine}")
        if seen.rc == 0 and seen.stdout.strip() != killed:
            break
        time.sleep(1)
    done = fleet.play("prove")
    assert done.rc == 0, done.output[-6000:]
    assert PAIR in done.words


def test_a_stopped_prefill_fails_the_proof_naming_the_pair(fleet):
    fleet.run("rack1-04", f"systemctl stop vllm-engine-{PREFILL}")
    try:
        done = fleet.play("prove")
        assert done.rc != 0
        assert PAIR in done.words
        assert "refused" in done.words
    finally:
        fleet.run("rack1-04", f"systemctl start vllm-engine-{PREFILL}")


def test_a_port_that_is_taken_is_named_with_its_program(fleet):
    assert fleet.play("prove").rc == 0  # the prefill of the test before is back
    fleet.run("rack1-05", f"systemctl stop vllm-engine-{DECODE}")
    fleet.run(
        "rack1-05", "systemd-run --quiet --unit=squatter python3 -m http.server --bind 198.18.40.5 8000"
    )
    before = fleet.containers()["rack1-router"]
    try:
        time.sleep(1)
        done = fleet.play("site")
        assert done.rc != 0
        for seen in ("8000", DECODE, "python3"):
            assert seen in done.words
    finally:
        fleet.run("rack1-05", "systemctl stop squatter")
    assert fleet.containers()["rack1-router"] == before
    fleet.deploy()


@pytest.mark.parametrize("cause", ["refused", "killed"])
def test_an_engine_that_dies_while_starting_fails_at_its_first_restart(fleet, changed_inventory, cause):
    """vLLM refuses more context than the model has after some seconds; or somebody kills the container."""
    before = fleet.containers()
    changed = {"max_model_len": 999999} if cause == "refused" else {"max_num_seqs": 4}
    decode = {**POOLS["decode"], "args": {**POOLS["decode"]["args"], **changed}}
    inventory = changed_inventory(fleet_pools={**POOLS, "decode": decode})
    with ThreadPoolExecutor() as pool:
        running_play = pool.submit(fleet.play, "site", inventory=inventory)
        if cause == "killed":
            kill_when_it_starts(fleet, before["rack1-05"].split()[1])
        done = running_play.result()
    assert done.rc != 0
    assert f"Engine {DECODE}" in done.words
    # From the engine's own log, or from systemd's.
    assert ("max_model_len (999999)" if cause == "refused" else "137") in done.words
    # It did not wait for more restarts than the first, nor for the start time-out.
    assert (
        int(fleet.run("rack1-05", f"systemctl show --property=NRestarts --value vllm-engine-{DECODE}")) <= 2
    )
    after = fleet.containers()
    assert (after["rack1-router"], after["rack1-04"]) == (before["rack1-router"], before["rack1-04"])
    fleet.deploy()


def kill_when_it_starts(fleet, old: str) -> None:
    """Kill the decode's container as soon as it is another one than the old."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        seen = fleet.run("rack1-05", "docker ps --no-trunc --quiet")
        if seen and seen != old:
            fleet.run("rack1-05", f"docker kill {seen}")
            return
        time.sleep(1)
    raise AssertionError("the decode was not started again")


def test_a_host_that_does_not_answer_stops_the_play(fleet, changed_inventory):
    before = fleet.containers()

    def add(groups):
        groups["decode"]["hosts"]["rack9-99"] = {"ansible_host": "198.18.40.99"}

    done = fleet.play("site", inventory=changed_inventory(hosts=add))
    assert done.rc != 0
    assert "FAIL answers rack9-99" in done.words
    assert fleet.containers() == before


def test_a_registry_that_cannot_start_stops_the_play(fleet):
    before = fleet.containers()
    fleet.run("rack1-router", "systemctl stop docker-registry")
    fleet.run(
        "rack1-router", "systemd-run --quiet --unit=squatter python3 -m http.server --bind 198.18.40.2 5000"
    )
    try:
        time.sleep(1)
        # The host check sees it first; without the check the role does.
        for playbook, seen in (
            ("site", "port 5000 (registry) is taken by python3"),
            ("images", "docker-registry"),
        ):
            done = fleet.play(playbook)
            assert done.rc != 0
            assert seen in done.words
        assert fleet.containers() == before
        assert ask(FRONT, prompt="still there?", max_tokens=2)["choices"][0]["text"]
    finally:
        fleet.run(
            "rack1-router",
            "systemctl stop squatter; systemctl reset-failed docker-registry; systemctl start docker-registry",
        )


# --- changed under load ------------------------------------------------------------------------------------------


def test_a_second_decode_joins_and_leaves_without_losing_a_request(fleet, changed_inventory):
    def second_decode(groups):
        groups["decode"]["hosts"]["rack1-04"] = {}

    second = "decode-rack1-04-1"
    with steady_stream() as stream:
        fleet.deploy(inventory=changed_inventory(hosts=second_decode))
        joined = stream.sent
        time.sleep(3)
    assert stream.failed == []
    assert joined > 20
    status = fleet.play("status")
    assert second in status.words
    assert "not declared" in status.words
    assert requests_served("http://198.18.40.4:8016") > 0

    with steady_stream() as stream:
        fleet.deploy()
    assert stream.failed == []
    assert fleet.run("rack1-04", "docker ps --format '{{.Names}}'") == f"vllm-engine-{PREFILL}"
    assert fleet.host("rack1-04").run(f"ls /etc/ansible/facts.d/vllm-engine-{second}.fact").rc != 0


def test_the_fleet_is_removed_under_the_same_inventory(fleet):
    assert fleet.play("remove").rc == 0
    with pytest.raises(OSError, match="refused"):
        ask(FRONT, prompt="gone?", max_tokens=1)


# --- ordinary engines --------------------------------------------------------------------------------------------


def test_a_fleet_of_ordinary_engines_serves_from_each_of_them(fleet, changed_inventory):
    args = POOLS["decode"]["args"]
    pools = {
        "left": {"role": "mixed", "hosts": "prefill", "gpus": 1, "args": args},
        "right": {"role": "mixed", "hosts": "decode", "gpus": 1, "args": args},
    }
    inventory = changed_inventory(fleet_pools=pools)
    done = fleet.deploy(inventory=inventory)
    assert "healthy" in done.words
    for number in range(4):
        assert ask(FRONT, prompt=f"ordinary {number}", max_tokens=4)["choices"][0]["text"]
    assert all(requests_served(f"http://198.18.40.{host}:8000") > 0 for host in (4, 5))
    assert fleet.play("remove", inventory=inventory).rc == 0
