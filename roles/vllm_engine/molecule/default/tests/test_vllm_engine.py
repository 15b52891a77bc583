"""Engines: run as planned, registered, and only those that have to are restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab import ENGINES, ROOT, assert_running, complete, containers, converge, host, play, refused, run

FOLDER = "/etc/vllm-fleet/engines"
UNITS = "/etc/systemd/system"
POOLS: dict[str, Any] = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())["fleet_pools"]
# A second engine on the prefill's host; its ports are 16 above the first one's.
TWO_POOLS = POOLS | {"second": POOLS["decode"] | {"hosts": "prefill"}}
SECOND, SECOND_PORT = "second-rack1-04-1", 8016


@pytest.fixture(scope="module")
def as_converged() -> str:
    """The containers of rack1-04, none of which a test may stop or restart."""
    before = containers("rack1-04")
    assert ENGINES["rack1-04"] in before
    return before


def second_container() -> str:
    """The line of the second engine's container."""
    [line] = [line for line in containers("rack1-04").splitlines() if SECOND in line]
    return line


@pytest.mark.parametrize(("name", "engine"), ENGINES.items())
def test_the_unit_runs_and_the_engine_generates(name: str, engine: str) -> None:
    assert_running(name, f"vllm-engine-{engine}")
    address = f"198.18.40.{name[-1]}"
    assert complete(f"http://{address}:8000")["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(("name", "engine"), ENGINES.items())
def test_its_settings_are_its_own(name: str, engine: str) -> None:
    there = host(name)
    assert there.file(f"{FOLDER}/{engine}").mode == 0o700
    environment = there.file(f"{FOLDER}/{engine}/engine.env")
    assert (environment.mode, environment.user, environment.group) == (0o600, "root", "root")
    running = there.check_output(f"docker exec vllm-engine-{engine} env").splitlines()
    assert set(environment.content_string.splitlines()) <= set(running)


@pytest.mark.parametrize(("name", "engine"), ENGINES.items())
def test_it_is_registered_as_what_runs(name: str, engine: str) -> None:
    fact = json.loads(run(name, f"cat /etc/ansible/facts.d/vllm-engine-{engine}.fact"))
    assert (fact["schema"], fact["engine"], fact["url"]) == (1, engine, f"http://198.18.40.{name[-1]}:8000")
    assert fact["image_ids"][name] == run(
        name, f"docker inspect --format '{{{{.Image}}}}' vllm-engine-{engine}"
    )


def test_a_port_that_is_taken_is_refused(as_converged: str) -> None:
    squat = f"python3 -m http.server --bind 198.18.40.4 {SECOND_PORT}"
    run("rack1-04", f"systemd-run --quiet --unit=squatter {squat}")
    try:
        run("rack1-04", f"timeout 10 sh -c 'until ss -Hltn | grep -q :{SECOND_PORT}; do sleep 0.2; done'")
        seen = refused("vllm_engine", only="rack1-04", fleet_pools=TWO_POOLS)
    finally:
        run("rack1-04", "systemctl stop squatter")
    assert f"rack1-04: a port that the plan gives to {SECOND} ({SECOND_PORT}, " in seen
    assert "Nothing was written or started on this host." in seen
    assert containers("rack1-04") == as_converged


def test_only_the_engine_that_changed_is_restarted(as_converged: str) -> None:
    """The second engine is not given the time to get ready: whom the role restarts is seen before."""
    late = refused("vllm_engine", only="rack1-04", fleet_pools=TWO_POOLS, vllm_engine_start_timeout=2)
    assert f"Not ready after 2 s (the time-out is 2 s): {SECOND}" in late
    assert not host("rack1-04").file(f"/etc/ansible/facts.d/vllm-engine-{SECOND}.fact").exists
    first = second_container()
    run("rack1-04", f"echo '# by hand' >> {UNITS}/vllm-engine-{SECOND}.service")
    refused("vllm_engine", only="rack1-04", fleet_pools=TWO_POOLS, vllm_engine_start_timeout=2)
    assert second_container() != first
    assert as_converged in containers("rack1-04")


def test_an_engine_that_is_removed_leaves_nothing_and_the_other_one_stays(as_converged: str) -> None:
    removed = play(Path(__file__).parents[1] / "remove.yml", vllm_engine_keep=[ENGINES["rack1-04"]])
    assert removed.rc == 0, removed.output
    assert run("rack1-04", f"ls -d {FOLDER}/{SECOND} {UNITS}/*{SECOND}* 2>/dev/null || true") == ""
    assert containers("rack1-04") == as_converged


def test_an_image_that_is_not_there_is_refused_before_anything_stops(as_converged: str) -> None:
    before = containers("rack1-05")
    image = "sha256:" + "0" * 64
    seen = refused("vllm_engine", only="rack1-05", vllm_engine_image_id=image)
    assert f"rack1-05: the image {image} that the engines run is not on this host" in seen
    assert containers("rack1-05") == before
    assert converge("vllm_engine").changed("rack1-05") == 0
    assert containers("rack1-04") == as_converged
