"""What a router says about its engines, compared with what was declared; answers recorded from a real router."""

import json
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.basic import AnsibleModule

UNIT = "vllm-router@a.service"
P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8101"
PD = {"mode": "pd", "prefill": [P], "decode": [D]}
MIXED = {"mode": "mixed", "workers": [P, D]}


class FakeRouter:
    def __init__(self, server, data):
        self.server = server
        server.answer = self._answer
        self.pages = {
            "/v1/completions": {"choices": [{"text": " hi", "finish_reason": "length"}]},
            "/v1/chat/completions": {"choices": [{"message": {"content": "hi"}, "finish_reason": "length"}]},
        }
        self.status = {}
        self.unavailable = 0
        """Requests that are answered 503 first."""
        self.asked = []
        self._data = data

    def speaks(self, mode):
        for name in ("readiness", "workers"):
            self.pages[f"/{name}"] = json.loads(self._data(f"router-{mode}-{name}.json"))

    def _answer(self, path, _body):
        self.asked.append(path)
        if self.unavailable:
            self.unavailable -= 1
            return 503, {"error": "No available workers: 0 prefill, 1 decode"}
        return self.status.get(path, 200), self.pages[path]


@pytest.fixture
def router(fake_server, data):
    fake = FakeRouter(fake_server(), data)
    fake.speaks("pd")
    return fake


@pytest.fixture
def check(run_module, router, systemd):
    systemd.unit(UNIT)
    systemd.journal = "listening\npanicked"
    defaults = {"url": router.server.url, "served_name": "tiny", "timeout": 0.2, "unit": UNIT}
    return lambda **params: run_module("router_ready", **{**defaults, **params})


def test_a_router_with_the_declared_engines_passes(check, router):
    result = check(**PD)
    assert result["readiness"]["prefill"] == {"healthy": 1, "total": 1}
    assert {"url": P, "role": "prefill", "healthy": True} in result["workers"]
    assert result["answers"] == {"/v1/completions": " hi"}


def test_a_mixed_router_too(check, router):
    router.speaks("mixed")
    assert len(check(**MIXED)["workers"]) == 2


def test_it_can_look_at_http_alone_and_in_check_mode(run_module, router):
    result = run_module("router_ready", check=True, url=router.server.url, served_name="tiny", **PD)
    assert result["answers"]


@pytest.mark.parametrize(
    ("declared", "seen"),
    [
        ({"prefill": [P, "http://h:1"]}, "1 of 1 prefill engines healthy where 2 are declared"),
        ({"decode": []}, "1 of 1 decode engines healthy where 0 are declared"),
    ],
)
def test_a_router_that_counts_other_engines_is_never_ready(check, declared, seen):
    message = check(**{**PD, **declared})["msg"]
    assert "not ready after 0.2 s" in message
    assert seen in message


def test_an_engine_too_many_is_seen_although_enough_are_healthy(check, router):
    router.pages["/readiness"]["decode"] = {"healthy": 1, "total": 2}
    assert "1 of 2 decode engines healthy where 1 are declared" in check(**PD)["msg"]


def test_an_unready_router_is_shown_with_its_answer(check, router):
    router.pages["/readiness"] = {"status": "not ready", "prefill": {"healthy": 0, "total": 1}}
    router.status["/readiness"] = 503
    message = check(**PD)["msg"]
    assert "answered 503: 0 of 1 prefill engines healthy where 1 are declared" in message
    assert message.endswith("panicked")


def test_every_difference_between_the_lists_is_named(check, router):
    router.pages["/readiness"] = {"prefill": {"healthy": 2, "total": 2}, "decode": {"healthy": 2, "total": 2}}
    router.pages["/workers"]["workers"] = [
        {"url": P, "worker_type": "decode", "is_healthy": True},
        {"url": D, "worker_type": "decode", "is_healthy": False},
        {"url": "http://old:1", "worker_type": "prefill", "is_healthy": True},
    ]
    message = check(mode="pd", prefill=[P, "http://new:1"], decode=[D, "http://new:2"])["msg"]
    for seen in (
        "http://new:1 (prefill) is missing",
        "http://new:2 (decode) is missing",
        "http://old:1 (prefill) is not declared",
        f"{P} is decode instead of prefill",
        f"{D} is unhealthy",
    ):
        assert seen in message


@pytest.mark.parametrize("page", [{}, {"workers": None}, {"workers": [{}]}, {"workers": ["x"]}])
def test_a_list_of_workers_that_cannot_be_read_is_shown(check, router, page):
    router.pages["/workers"] = page
    assert "without a usable list of workers" in check(**PD)["msg"]


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ({}, "answered 200 without a choice"),
        ({"choices": []}, "answered 200 without a choice"),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, "answered 200 but no text"),
        ({"choices": [{"text": "x", "finish_reason": "error"}]}, "no text (finish_reason 'error')"),
    ],
)
def test_a_200_without_text_does_not_count(check, router, answer, seen):
    router.pages["/v1/completions"] = answer
    assert seen in check(**PD)["msg"]


def test_an_error_from_the_pair_is_shown(check, router):
    router.pages["/v1/completions"] = {"error": "Decode request failed"}
    router.status["/v1/completions"] = 500
    assert 'answered 500: {"error": "Decode request failed"}' in check(**PD)["msg"]


def test_a_router_that_died_fails_at_once_with_its_log(check, systemd, router):
    router.status["/readiness"] = 503
    systemd.unit(UNIT, {}, {"ActiveState": "activating", "SubState": "auto-restart", "ExecMainStatus": "101"})
    message = check(**PD, timeout=60)["msg"]
    assert "died and is about to be started again" in message
    assert "exit status 101" in message
    assert message.endswith("listening\npanicked")


def test_the_front_gives_a_completion_and_a_chat(check):
    result = check(front=True, unit=None)
    assert result["answers"] == {"/v1/completions": " hi", "/v1/chat/completions": "hi"}


def test_a_front_without_chat_fails(check, router):
    router.pages["/v1/chat/completions"] = {
        "choices": [{"message": {"content": None}, "finish_reason": "stop"}]
    }
    assert "No answer came through the front" in check(front=True, unit=None)["msg"]


def test_a_front_whose_router_has_not_found_an_engine_yet_is_asked_again(check, router):
    router.unavailable = 2
    assert check(front=True, unit=None, timeout=30)["answers"]
    assert router.asked == ["/v1/completions"] * 3 + ["/v1/chat/completions"]
    router.unavailable = 1000
    assert "answered 503: " in check(front=True, unit=None, timeout=0.6)["msg"]


def test_no_other_answer_of_the_front_is_waited_for(check, router):
    router.status["/v1/completions"] = 500
    assert "answered 500: " in check(front=True, unit=None, timeout=60)["msg"]
    assert router.asked == ["/v1/completions"]


def test_the_mode_is_required_for_a_router(check):
    assert "mode" in check()["msg"]


def ranks_of(router, *urls):
    """The router lists ranks for the decode, as vllm-router 0.1.17 does."""
    router.pages["/readiness"]["decode"] = {"healthy": len(urls), "total": len(urls)}
    (decode,) = (w for w in router.pages["/workers"]["workers"] if w["url"] == D)
    others = [w for w in router.pages["/workers"]["workers"] if w["url"] != D]
    router.pages["/workers"]["workers"] = others + [decode | {"url": url} for url in urls]


def test_an_engine_of_several_ranks_is_a_worker_for_each_or_one(check, router):
    assert "failed" not in check(**PD, ranks={D: 2}), "as one worker"
    ranks_of(router, f"{D}@0", f"{D}@1")
    assert "failed" not in check(**PD, ranks={D: 2})
    assert "2 of 2 decode engines healthy where 1 are declared" in check(**PD)["msg"]
    assert "2 of 2 decode engines healthy where 3 are declared" in check(**PD, ranks={D: 3})["msg"]


def test_other_ranks_than_the_engines_are_named(check, router):
    ranks_of(router, f"{D}@0", f"{D}@2")
    assert f"{D}@1 (decode) is missing; {D}@2 (decode) is not declared" in check(**PD, ranks={D: 2})["msg"]


def test_the_front_is_asked_with_the_key_that_a_file_holds(check, router, tmp_path):
    key, seen = "k" * 64, []
    (tmp_path / "front.key").write_text(f"{key}\n")
    answer = router.server.answer

    def keep(path, body):
        seen.append(router.server.request.headers.get("Authorization"))
        return answer(path, body)

    router.server.answer = keep
    result = check(front=True, unit=None, key_file=str(tmp_path / "front.key"))
    assert seen == [f"Bearer {key}"] * 2
    assert key not in json.dumps(result)
    router.server.answer = lambda _path, _body: (401, f"no client has {key}")
    refused = check(front=True, unit=None, key_file=str(tmp_path / "front.key"))
    assert "answered 401" in refused["msg"]
    assert key not in json.dumps(refused)


def test_a_key_that_is_not_there_is_told(check, router):
    result = check(front=True, unit=None, key_file="/nowhere/front.key")
    assert "The front's key cannot be read from /nowhere/front.key: No such file" in result["msg"]
    assert not router.server.asked


def test_a_certificate_is_judged_by_the_ca_that_is_given(check, router, tmp_path, monkeypatch):
    program = Path(__file__).parents[3] / "roles/lab_hosts/files/certificates.py"
    for folder in ("own", "other"):
        subprocess.run([sys.executable, program, tmp_path / folder, "127.0.0.1"], check=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own/front.pem")
    router.server.socket = context.wrap_socket(router.server.socket, server_side=True)
    url = router.server.url.replace("http:", "https:")
    warned = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _self, text: warned.append(text))
    for days, told in ((30, 0), (366, 1)):
        monkeypatch.setattr("router_ready.CERTIFICATE_DAYS", days)
        assert not check(front=True, unit=None, url=url, ca=str(tmp_path / "own/ca.pem")).get("failed")
        assert len(warned) == told
    assert re.match(r"The front's certificate ends on 20\d\d-\d\d-\d\d, in 36[45] days", warned[0])
    for ca in (None, str(tmp_path / "other/ca.pem")):
        message = check(front=True, unit=None, url=url, ca=ca)["msg"]
        assert "has a certificate that cannot be believed" in message
    elsewhere = url.replace("127.0.0.1", "localhost")
    message = check(front=True, unit=None, url=elsewhere, ca=str(tmp_path / "own/ca.pem"))["msg"]
    assert "Hostname mismatch" in message
