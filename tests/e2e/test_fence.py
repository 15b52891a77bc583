"""A host that is not the fleet's gets answers from the front, and nothing else; until it is a controller."""

from __future__ import annotations

import json

import pytest
from conftest import ask
from lab import FRONT

STRANGER = "rack1-trainer"
FENCED = (
    ("198.18.40.4", 8000),
    ("198.18.40.5", 8000),
    ("198.18.40.4", 5600),
    ("198.18.40.5", 5600),
    ("198.18.40.2", 30010),
)
HOSTS = ("rack1-04", "rack1-05", "rack1-router")
REFUSED, CONNECTED = "ConnectionRefusedError", "connected"
DIAL = """
import json, socket, sys, time
told = {}
for place in json.loads(sys.argv[1]):
    began = time.monotonic()
    try:
        socket.create_connection(place, timeout=3).close()
        outcome = "connected"
    except OSError as error:
        outcome = type(error).__name__
    told["%s:%d" % tuple(place)] = outcome if time.monotonic() - began < 1 else "only after a while: " + outcome
print(json.dumps(told))
"""
POST = """
import json, sys, urllib.error, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)]))
"""


def there(fleet, code, *words):
    """The JSON that a program prints on the stranger's host."""
    quoted = " ".join(f"'{word}'" for word in words)
    fleet.run(STRANGER, f"cat > /tmp/program.py <<'END'\n{code}\nEND")
    return json.loads(fleet.run(STRANGER, f"python3 /tmp/program.py {quoted}"))


def dialed(fleet):
    """ADDRESS:PORT of each fenced port -> what comes of dialing it from the stranger's host."""
    return there(fleet, DIAL, json.dumps(FENCED))


def post(fleet, url, **body):
    """Status and body of what the stranger is answered."""
    return there(fleet, POST, url, json.dumps(body))


def everything(outcome):
    return {f"{address}:{port}": outcome for address, port in FENCED}


@pytest.fixture(scope="module")
def deployed(fleet):
    fleet.deploy()
    return fleet


def test_a_stranger_gets_answers_from_the_front_and_reaches_nothing_else(deployed):
    assert dialed(deployed) == everything(REFUSED)
    status, body = post(deployed, f"{FRONT}/v1/completions", model="tiny", prompt="Hello", max_tokens=4)
    assert (status, body["usage"]["completion_tokens"]) == (200, 4)
    for path in (
        "/sleep?level=2",
        "/v1/../sleep",
        "//sleep",
        "/%73leep",
        "/pause",
        "/collective_rpc",
        "/workers",
    ):
        status, body = post(deployed, f"{FRONT}{path}")
        assert (status, body["error"]["code"]) == (404, 404), path
    assert ask(FRONT, prompt="Hello", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_controller_connects_and_no_engine_notices(deployed, changed_inventory):
    before = deployed.containers()
    trainer = changed_inventory(fleet_controllers=["198.18.40.1", "198.18.40.9"])
    assert deployed.play("fence", inventory=trainer).rc == 0
    assert dialed(deployed) == everything(CONNECTED)
    # The front's own list is the router phase's.
    assert post(deployed, "http://198.18.40.2:30010/admission/open")[0] == 403
    assert deployed.play("router", inventory=trainer).rc == 0
    assert post(deployed, "http://198.18.40.2:30010/admission/open") == [
        200,
        {"admission": "open", "in_flight": 0},
    ]
    again = deployed.play("fence", inventory=trainer)
    assert {counters["changed"] for counters in again.recap.values()} == {0}
    after = deployed.containers()
    assert {name: after[name] for name in ("rack1-04", "rack1-05")} == {
        name: before[name] for name in ("rack1-04", "rack1-05")
    }
    for phase in ("fence", "router"):
        assert deployed.play(phase).rc == 0
    assert dialed(deployed) == everything(REFUSED)


def test_closed_admission_is_told_to_clients_and_stays_through_a_deployment(deployed):
    control = "http://198.18.40.2:30010/admission"
    assert ask(f"{control}/close", path="") == {"admission": "closed", "in_flight": 0}
    try:
        done = deployed.play("router")
        assert done.rc == 0, done.output[-4000:]
        assert "The front admits no requests" in done.words
        assert {counters["changed"] for counters in done.recap.values()} == {0}
        status, body = post(deployed, f"{FRONT}/v1/completions", model="tiny", prompt="Hello", max_tokens=1)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
    finally:
        assert ask(f"{control}/open", path="") == {"admission": "open", "in_flight": 0}
    assert ask(FRONT, prompt="Hello", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_fleet_that_is_removed_takes_its_fence_along(deployed):
    for name in HOSTS:
        deployed.run(name, "nft add table inet theirs")
    assert deployed.play("remove").rc == 0
    for name in HOSTS:
        assert deployed.run(name, "nft list tables | grep -c vllm_fleet; true") == "0"
        deployed.run(name, "nft list table inet theirs && nft delete table inet theirs")
        left = deployed.run(name, "ls -d /etc/vllm-fleet /etc/systemd/system/*fence* 2>/dev/null; true")
        assert left == ""
