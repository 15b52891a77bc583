"""Routers: a change is a candidate in the free slot; one that does not get ready leaves no trace."""

from __future__ import annotations

from lab import assert_running, converge, host, main_pid, other, refused, router_slot, run

GATE = "rack1-router"
PORTS = {"a": 30001, "b": 30002}
CHANGED = {"fleet_router_args": {"policy": "random"}}


def unit(slot: str) -> str:
    return f"vllm-router@{slot}.service"


def workers(slot: str) -> dict[str, str]:
    """URL -> role of the engines that the router in a slot knows, asked on its host."""
    ask = (
        "import json, urllib.request as r; "
        f"w = json.load(r.urlopen('http://127.0.0.1:{PORTS[slot]}/workers'))['workers']; "
        "print(' '.join(x['url'] + '=' + x['worker_type'] for x in w))"
    )
    return dict(word.split("=") for word in run(GATE, f'python3 -c "{ask}"').split())


def test_one_router_runs_and_knows_exactly_the_engines() -> None:
    slot = router_slot()
    assert_running(GATE, unit(slot))
    assert workers(slot) == {"http://198.18.40.4:8000": "prefill", "http://198.18.40.5:8000": "decode"}
    assert not host(GATE).service(unit(other(slot))).is_running


def test_it_is_confined_and_on_loopback_only() -> None:
    slot = router_slot()
    shown = run(GATE, f"systemctl show --property=DynamicUser,ProtectSystem,NoNewPrivileges {unit(slot)}")
    assert set(shown.splitlines()) == {"DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes"}
    assert run(GATE, f"systemd-analyze verify {unit(slot)} 2>&1") == ""
    assert host(GATE).socket(f"tcp://127.0.0.1:{PORTS[slot]}").is_listening
    assert not host(GATE).socket(f"tcp://0.0.0.0:{PORTS[slot]}").is_listening


def test_a_change_is_a_candidate_in_the_free_slot_and_the_old_router_is_retired_after_it() -> None:
    old = router_slot()
    new, pid = other(old), main_pid(GATE, unit(old))
    assert converge("vllm_router", retire=False, **CHANGED).changed(GATE) > 0
    assert main_pid(GATE, unit(old)) == pid
    assert main_pid(GATE, unit(new)) > 0
    assert "--policy random" in run(GATE, f"systemctl cat {unit(new)}")
    assert workers(new) == workers(old)
    # Now the one that serves is the candidate, as after a switch of the front: the other is retired.
    moved = converge("vllm_router", "--extra-vars", f"router_slot={new}", **CHANGED)
    assert moved.changed(GATE) > 0
    run(GATE, f"timeout 30 sh -c 'while systemctl is-active --quiet {unit(old)}; do sleep 0.2; done'")
    assert router_slot() == new
    # And back, so that the lab is as its inventory says.
    converge("vllm_router")
    assert router_slot() == old
    run(GATE, f"timeout 30 sh -c 'while systemctl is-active --quiet {unit(new)}; do sleep 0.2; done'")
    assert "--policy round_robin" in run(GATE, f"systemctl cat {unit(old)}")


def test_a_candidate_whose_engines_refuse_is_removed_and_the_router_stays() -> None:
    slot = router_slot()
    pid = main_pid(GATE, unit(slot))
    seen = refused("vllm_router", fleet_http_port_base=8100, vllm_router_start_timeout=4)
    assert "The router is not ready after 4 s" in seen
    assert f"The candidate router in slot {other(slot)} was removed" in seen
    assert main_pid(GATE, unit(other(slot))) == 0
    assert not host(GATE).file(f"/etc/systemd/system/{unit(other(slot))}").exists
    assert (router_slot(), main_pid(GATE, unit(slot))) == (slot, pid)
    assert len(workers(slot)) == 2
