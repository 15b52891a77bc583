"""pd-relay beside the router, in front of the same real engines."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from conftest import DECODE, write_inventory
from lab import FRONT, ROOT

RELAY = "http://198.18.40.2:30020"
ENGINES = {"prefill": "http://198.18.40.4:8000", "decode": "http://198.18.40.5:8000"}
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
SAMPLINGS = ({"temperature": 0}, {"temperature": 1, "seed": 11})


def on_the_routers_host(groups) -> None:
    groups["relay"] = {"hosts": {"rack1-router": None}}


@pytest.fixture(scope="module")
def relay(fleet, tmp_path_factory) -> Path:
    """The inventory of the lab's fleet for rollouts with a relay beside its router, deployed."""
    changed = {"fleet_profile": "rl", "fleet_controllers": ["198.18.40.1"]}
    inventory = write_inventory(tmp_path_factory.mktemp("relay"), on_the_routers_host, **changed)
    fleet.deploy(inventory=inventory)
    return inventory


def post(url: str, body: dict, method: str = "POST") -> tuple[int, bytes]:
    """Status and content."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def generated(url: str, path: str, body: dict) -> tuple[list, list]:
    """Text pieces and token ids of an answer, streamed or not."""
    status, content = post(url + path, body)
    assert status == 200, content
    if body["stream"]:
        *events, done = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
    else:
        events = [content]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice.get("text") or "" for choice in choices)
    return text, [token for choice in choices for token in choice.get("token_ids") or []]


def prompt(seed: int) -> str:
    """Some hundred tokens that no engine has seen in this run."""
    drawn = random.Random(f"{seed} {time.time()}")
    return "".join(drawn.choice("abcdefgh ijkl") for _ in range(700))


def metric(engine: str, name: str) -> float:
    with urllib.request.urlopen(f"{ENGINES[engine]}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if re.match(rf"vllm:{name}[{{ ]", line)]
    assert found, f"{engine} has no metric {name}"
    return sum(float(line.split()[-1]) for line in found)


def idle() -> bool:
    """No request, and no block of KV cache in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(engine, name) for engine in ENGINES for name in names)


def until(holds, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.5)


def test_a_second_run_changes_nothing_and_status_shows_it(fleet, relay):
    done = fleet.play("relay", inventory=relay)
    assert done.rc == 0, done.output[-6000:]
    assert all(counters["changed"] == 0 for counters in done.recap.values()), done.output[-6000:]
    assert f"Relay {RELAY}: serves" in fleet.play("status", inventory=relay).words


def test_it_runs_without_any_right(fleet, relay):
    pid = fleet.run(
        "rack1-router", "docker top pd-relay -o pid,args | awk '/[p]d_relay/ {print $1}' | tail -n 1"
    )
    status = fleet.run("rack1-router", f"cat /proc/{pid}/status")
    assert re.search(r"^Uid:\s+65534\s", status, re.MULTILINE), status
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_through_router_and_relay_the_tokens_are_the_same(relay, sampling, stream):
    for seed in range(3):
        text = prompt(seed)
        ids = [random.Random(text).randrange(20, 500) for _ in range(300)]
        bodies = {
            COMPLETIONS: {
                "model": "tiny",
                "prompt": text,
                "max_tokens": 12,
                "return_token_ids": True,
                **sampling,
            },
            GENERATE: {"token_ids": ids, "sampling_params": {"max_tokens": 12, **sampling}},
        }
        for path, body in bodies.items():
            before = metric("decode", "nixl_bytes_transferred_sum")
            through_relay = generated(RELAY, path, body | {"stream": stream})
            assert metric("decode", "nixl_bytes_transferred_sum") > before, "the decode made the KV itself"
            assert through_relay == generated(FRONT, path, body | {"stream": stream})
            assert len(through_relay[1]) == 12


def test_a_prefill_that_gives_no_kv_transfer_is_told(relay):
    """The router is none: it answers 200, with the words of its decode."""
    body = {"model": "tiny", "prompt": prompt(4), "max_tokens": 2}
    with relay_on_this_machine(prefill=FRONT) as url:
        status, content = post(url + COMPLETIONS, body)
    assert status == 502
    assert "no kv_transfer_params: KV transfer is not engaged" in json.loads(content)["error"]["message"]


def test_what_the_engines_would_answer_wrongly_is_refused(relay):
    for more in ({"prompt": ["a", "b"]}, {"n": 2}):
        assert post(RELAY + COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 2} | more)[0] == 400
    # As the engine says of itself.
    for sampling in (None, [], "x", {"extra_args": "x"}):
        body = {"token_ids": [1, 2], "sampling_params": sampling}
        assert post(ENGINES["prefill"] + GENERATE, body)[0] == post(RELAY + GENERATE, body)[0] == 400
    body = {"token_ids": [21, 22], "sampling_params": {"extra_args": None, "max_tokens": 2}}
    assert post(RELAY + GENERATE, body)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_leaves_nothing_behind(relay, stream):
    until(idle, 60)
    body = {"model": "tiny", "prompt": prompt(5), "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    with socket.create_connection(("198.18.40.2", 30020)) as client:
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        until(lambda: metric("decode", "num_requests_running") > 0, 30)
    until(idle, 20)  # less than the lease of what nobody fetches, which is 30 s


class relay_on_this_machine:  # noqa: N801  used as a function
    """A relay from source before the lab's engines, which looks at them more often than a fleet's."""

    def __init__(self, **workers: str) -> None:
        self.workers = ENGINES | workers

    def __enter__(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [f"--{role}={url}" for role, url in self.workers.items()]
        words += [f"--port={port}", "--health-interval=0.5", "--health-timeout=1"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "images/pd-relay/src")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pd_relay", *words], env=environment, stdout=subprocess.DEVNULL
        )
        url = f"http://127.0.0.1:{port}"
        until(lambda: health(url)[0] == 200, 20)
        return url

    def __exit__(self, *_error: object) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=40) == 0


def health(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    except OSError:
        return 0, {}


def test_its_health_is_that_of_the_engines(fleet, relay):
    with relay_on_this_machine() as url:
        fleet.run("rack1-05", f"docker pause vllm-engine-{DECODE}")
        try:
            until(lambda: health(url)[0] == 503, 20)
            assert health(url)[1]["missing"] == ["decode"]
            status, content = post(url + COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 2})
            assert (status, "no healthy decode" in content.decode()) == (503, True)
        finally:
            fleet.run("rack1-05", f"docker unpause vllm-engine-{DECODE}")
        until(lambda: health(url)[0] == 200, 20)
        assert post(url + COMPLETIONS, {"model": "tiny", "prompt": "a", "max_tokens": 2})[0] == 200


def test_broadcasts_reach_every_engine_and_are_told(relay):
    for verb in ("/pause?mode=keep", "/resume"):
        status, content = post(RELAY + verb, {})
        assert status == 200
        told = {"ok": True, "status": 200, "error": None}
        assert json.loads(content) == dict.fromkeys(ENGINES.values(), told)
        with urllib.request.urlopen(f"{ENGINES['decode']}/is_paused", timeout=10) as answer:
            assert json.load(answer) == {"is_paused": verb.startswith("/pause")}


def test_workers_are_changed_by_controllers_alone(fleet, relay):
    assert post(RELAY + "/workers", {"url": ENGINES["decode"], "worker_type": "decode"})[0] == 409
    assert post(f"{RELAY}/workers/{quote('http://198.18.40.9:1', safe='')}", {}, "DELETE")[0] == 404
    # The workstation's relay has no controllers.
    with relay_on_this_machine() as url:
        assert post(url + "/pause", {})[0] == 403


def test_without_its_group_it_is_removed(fleet, relay, changed_inventory):
    done = fleet.play("relay", inventory=changed_inventory(fleet_profile="rl"))
    assert done.rc == 0, done.output[-6000:]
    assert fleet.host("rack1-router").run("systemctl cat pd-relay.service || docker inspect pd-relay").rc != 0
    assert health(RELAY)[0] == 0
