"""The registry: runs, answers on the fleet's network, and takes images without a password."""

from __future__ import annotations

import urllib.request

from lab import REGISTRY, assert_running, converge, fetch, host, kept, main_pid, run

GATE = "rack1-router"
CONFIG = "/etc/docker/registry/config.yml"


def test_the_unit_runs() -> None:
    assert_running(GATE, "docker-registry")
    assert host(GATE).socket("tcp://198.18.40.2:5000").is_listening
    assert not host(GATE).socket("tcp://0.0.0.0:5000").is_listening


def test_it_answers_the_workstation_and_the_engine_hosts() -> None:
    assert fetch(f"{REGISTRY}/v2/") == {}
    # Bash alone: these hosts need no HTTP client.
    ask = "exec 3<>/dev/tcp/198.18.40.2/5000; printf 'GET /v2/ HTTP/1.0\\r\\n\\r\\n' >&3; head -1 <&3"
    assert " 200 " in run("rack1-04", f'bash -c "{ask}"')


def test_it_takes_an_upload_without_a_password() -> None:
    begin = urllib.request.Request(f"{REGISTRY}/v2/molecule/blobs/uploads/", method="POST")
    with urllib.request.urlopen(begin, timeout=10) as answer:
        assert answer.status == 202
        place = answer.headers["Location"]
    with urllib.request.urlopen(urllib.request.Request(place, method="DELETE"), timeout=10) as answer:
        assert answer.status == 204


def test_a_configuration_that_was_changed_by_hand_is_mended_and_taken() -> None:
    with kept(GATE, CONFIG, then="true"):
        run(GATE, f"sed -i 's/^  level: .*/  level: error/' {CONFIG}")
        before = main_pid(GATE, "docker-registry")
        assert converge("image_registry").changed(GATE) > 0
        assert main_pid(GATE, "docker-registry") not in (0, before)
        assert fetch(f"{REGISTRY}/v2/") == {}
