"""The fault injector of the end-to-end tests does what its name says."""

import random

import kv_proxy
import pytest
from ansible.module_utils.fleet_http import fetch, fetch_json
from ansible.module_utils.fleet_proof import make_prompts

TRANSFER = {"do_remote_prefill": True}


@pytest.fixture
def upstream(fake_server):
    server = fake_server()
    server.answer = lambda _path, _body: (200, {"kv_transfer_params": TRANSFER, "id": 1})
    return server


def through(upstream, fault, body):
    with kv_proxy.KvProxy(upstream.url, fault).running() as proxy:
        answer = fetch(f"{proxy.url}/v1/completions", body)
    return upstream.asked[-1][1], answer


def test_wrong_kv_changes_the_code_of_transfers_only(upstream):
    upstream.answer = lambda _path, _body: (200, "{}")
    prompt = make_prompts(random.Random(1), 30).original
    sent, _ = through(upstream, "wrong-kv", {"prompt": prompt, "kv_transfer_params": TRANSFER})
    before, after = prompt.split(" "), sent["prompt"].split(" ")
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [3]
    sent, _ = through(upstream, "wrong-kv", {"prompt": prompt})
    assert sent == {"prompt": prompt}


def test_strip_and_ignore_take_the_parameters_out_of_answers_and_requests(upstream):
    with kv_proxy.KvProxy(upstream.url, "strip").running() as proxy:
        assert fetch_json(f"{proxy.url}/v1/completions", {"kv_transfer_params": TRANSFER}) == {"id": 1}
    assert upstream.asked[-1][1] == {"kv_transfer_params": TRANSFER}
    with kv_proxy.KvProxy(upstream.url, "ignore").running() as proxy:
        assert (
            fetch_json(f"{proxy.url}/v1/completions", {"prompt": "x", "kv_transfer_params": TRANSFER})["id"]
            == 1
        )
    assert upstream.asked[-1][1] == {"prompt": "x"}


def test_an_upstream_that_is_down_is_a_502():
    with kv_proxy.KvProxy("http://127.0.0.1:9", "strip").running() as proxy:
        assert fetch(f"{proxy.url}/health").status == 502
