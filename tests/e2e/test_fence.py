"""A host that is not the fleet's gets answers from the front, and nothing else; until it is a controller."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from conftest import ask
from lab import FRONT, ROOT

CONTROL = "http://198.18.40.2:30010/admission"
ALICE, BOB = "alice-has-the-key-of-the-lab", "bob-has-another-key-of-the-lab"
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


def asked(key, **body):
    """Status and text of a completion over TLS, which the lab's CA vouches for."""
    context = ssl.create_default_context(cafile=ROOT / ".lab/ca.pem")
    request = urllib.request.Request(
        f"{FRONT.replace('http:', 'https:')}/v1/completions",
        json.dumps({"model": "tiny", "prompt": "Hello"} | body).encode(),
        {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    try:
        with urllib.request.urlopen(request, timeout=180, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def stream_until_refused(key):
    """Status and text of long streams, one after the other; the last is the one that was refused."""
    seen = []
    for _ in range(50):
        seen.append(asked(key, max_tokens=3000, ignore_eos=True, stream=True))
        if seen[-1][0] != 200:
            break
    return seen


def everything(outcome):
    return {f"{address}:{port}": outcome for address, port in FENCED}


@pytest.fixture(scope="module")
def deployed(fleet):
    fleet.deploy()
    ask(f"{CONTROL}/open", path="")  # a run that was cut off may have closed it
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


def test_a_controller_connects_and_neither_engines_nor_admission_notice(deployed, changed_inventory):
    engines = {name: deployed.containers()[name] for name in ("rack1-04", "rack1-05")}
    trainer = changed_inventory(fleet_controllers=["198.18.40.1", "198.18.40.9"])
    assert deployed.play("fence", inventory=trainer).rc == 0
    assert dialed(deployed) == everything(CONNECTED)
    # haproxy's own list is the router phase's.
    assert post(deployed, f"{CONTROL}/open")[0] == 403
    done = deployed.play("router", inventory=trainer)
    assert done.rc == 0, done.output[-4000:]
    assert ask(f"{CONTROL}/close", path="") == {"admission": "closed", "in_flight": 0}
    done = deployed.play("site", inventory=trainer)
    assert (done.rc, sum(counters["changed"] for counters in done.recap.values())) == (2, 0)
    assert "Admission is closed at the front" in done.words
    status, body = post(deployed, f"{FRONT}/v1/completions", model="tiny", prompt="Hello", max_tokens=1)
    assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
    assert post(deployed, f"{CONTROL}/open") == [200, {"admission": "open", "in_flight": 0}]
    assert ask(FRONT, prompt="Hello", max_tokens=1)["usage"]["completion_tokens"] == 1
    again = deployed.play("fence", inventory=trainer)
    assert {counters["changed"] for counters in again.recap.values()} == {0}
    assert {name: deployed.containers()[name] for name in engines} == engines
    # It may connect until nothing of the plan before runs.
    assert deployed.play("fence").rc == 0
    assert dialed(deployed) == everything(CONNECTED)
    assert deployed.play("fence", "-e", "fence_step=narrow").rc == 0
    assert dialed(deployed) == everything(REFUSED)


def test_tls_and_clients_keys_that_change_under_an_open_stream(deployed, changed_inventory, tmp_path):
    keys, lab = tmp_path / "keys.yml", ROOT / ".lab"
    inventory = changed_inventory(
        fleet_tls_certificate=str(lab / "front.pem"),
        fleet_tls_ca=str(lab / "ca.pem"),
        fleet_client_keys=str(keys),
    )

    def clients(**known):
        keys.write_text(yaml.safe_dump(known))
        keys.chmod(0o600)
        done = deployed.play("router", "-v", "--diff", inventory=inventory)
        assert done.rc == 0, done.output[-4000:]
        for secret in (ALICE, BOB, "PRIVATE KEY"):
            assert secret not in done.output

    keys.write_text(f"alice: {ALICE}\n")
    keys.chmod(0o644)
    refused = deployed.play("router", inventory=inventory)
    assert refused.rc != 0
    assert f"Run: chmod 600 {keys}" in refused.words
    assert ALICE not in refused.output

    clients(alice=ALICE)
    assert asked(ALICE, max_tokens=4)[0] == 200
    assert [asked(key, max_tokens=4)[0] for key in ("", BOB)] == [401, 401]
    with ThreadPoolExecutor() as pool:
        streams = pool.submit(stream_until_refused, ALICE)
        clients(bob=BOB)
        assert [asked(key, max_tokens=4)[0] for key in (ALICE, BOB)] == [401, 200]
    *whole, refused = streams.result()
    assert refused[0] == 401
    assert {(status, text.rstrip().rsplit("\n", 1)[-1]) for status, text in whole} == {(200, "data: [DONE]")}
    journal = deployed.run("rack1-router", "journalctl -u haproxy --since -5min --no-pager")
    # One stream was open when the worker that knows bob alone took over.
    served = "client=alice ip=198.18.40.1 method=POST path=/v1/completions status=200"
    assert served in journal.rsplit("New worker", 1)[1]
    places = "/etc/haproxy /etc/systemd /run/systemd /var/log"
    for secret in (ALICE, BOB):
        assert secret not in journal
        assert deployed.run("rack1-router", f"grep -rl {secret} {places} || true") == ""


def test_a_fleet_that_is_removed_takes_its_fence_along(deployed):
    for name in HOSTS:
        deployed.run(name, "nft add table inet theirs")
    assert deployed.play("remove").rc == 0
    for name in HOSTS:
        assert deployed.run(name, "nft list tables | grep -c vllm_fleet; true") == "0"
        deployed.run(name, "nft list table inet theirs && nft delete table inet theirs")
        left = deployed.run(name, "ls -d /etc/vllm-fleet /etc/systemd/system/*fence* 2>/dev/null; true")
        assert left == ""
