"""The router's command line."""

from __future__ import annotations

import pytest
from fleets import lab

from vllm_fleet.routing import router_arguments


def flags(argv, name):
    """All values that follow a flag."""
    return [argv[i + 1] for i, word in enumerate(argv) if word == name]


def test_prefill_and_decode_engines_are_one_url_a_flag():
    argv = router_arguments(lab(prefill=["p1", "p2"], decode=["d1"]).plan(), "a")
    assert "--vllm-pd-disaggregation" in argv
    assert flags(argv, "--kv-connector") == ["nixl"]
    assert flags(argv, "--prefill") == ["http://198.18.40.2:8000", "http://198.18.40.3:8000"]
    assert flags(argv, "--decode") == ["http://198.18.40.1:8000"]
    assert "--worker-urls" not in argv
    assert not any(word.endswith("/") for word in argv)


def test_mixed_engines_are_worker_urls():
    pools = {"serve": {"role": "mixed", "hosts": "prefill", "gpus": 1}}
    argv = router_arguments(lab(prefill=["a", "b"], decode=["a"]).everywhere(fleet_pools=pools).plan(), "a")
    assert argv[argv.index("--worker-urls") + 1 :] == ["http://198.18.40.1:8000", "http://198.18.40.2:8000"]
    assert not {"--vllm-pd-disaggregation", "--prefill", "--decode", "--kv-connector"} & set(argv)


def test_the_slots_share_no_port_and_listen_on_loopback_only():
    a, b = (router_arguments(lab().plan(), slot) for slot in "ab")
    assert (flags(a, "--port"), flags(a, "--prometheus-port")) == (["30001"], ["29001"])
    assert (flags(b, "--port"), flags(b, "--prometheus-port")) == (["30002"], ["29002"])
    for argv in (a, b):
        assert flags(argv, "--host") == flags(argv, "--prometheus-host") == ["127.0.0.1"]
    with pytest.raises(KeyError):
        router_arguments(lab().plan(), "c")


def test_the_operators_flags_are_added_and_win_over_defaults():
    args = {"policy": "cache_aware", "max-concurrent-requests": 10, "enable-igw": True, "quiet": False}
    plan = lab().everywhere(fleet_router_args=args, fleet_request_timeout=60).plan()
    argv = router_arguments(plan, "a")
    assert flags(argv, "--policy") == ["cache_aware"]
    assert flags(argv, "--max-concurrent-requests") == ["10"]
    assert flags(argv, "--request-timeout-secs") == ["60"]
    assert "--enable-igw" in argv
    assert "--quiet" not in argv
    assert all(isinstance(word, str) for word in argv)
