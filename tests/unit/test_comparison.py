"""What a change of the inventory would restart: the engines it reaches, no others, each with its reasons."""

from __future__ import annotations

import copy
import json

import pytest
from fleets import gpu
from plans import engine, external, plan, wide_ep

from vllm_fleet.comparison import CANDIDATE, change_lines, compare, compare_running
from vllm_fleet.registration import registration

P, D = "prefill-a-0", "decode-b-0"
PROVED = {D: ("proof", "prove", [f"the pairs of {D} are proved again"])}


def fleet(prefill=("a",), decode=("b",), p=None, d=None, hosts="abc", externals=(), **more):
    """Prefill and decode engines of four GPUs on a host each; `p` and `d` change the engines."""
    engines = [engine("prefill", "prefill", [host], tp=4, **(p or {})) for host in prefill]
    engines += [engine("decode", "decode", [host], tp=4, **(d or {})) for host in decode]
    return plan(engines, dict.fromkeys(hosts, "A"), externals=externals, router="r", **more)


def spread(hosts=("b", "c", "d"), **more):
    """A decode engine over several hosts."""
    engines = [engine("prefill", "prefill", ["a"], tp=4), engine("decode", "decode", list(hosts), **more)]
    return plan(engines, dict.fromkeys("abcde"), router="r")


def told(changes):
    return [(change.engine, change.action, list(change.reasons)) for change in changes]


def only(changes, name):
    """The reasons of one engine, that must be restarted."""
    (found,) = [change for change in changes if change.engine == name]
    assert found.action == "restart"
    return list(found.reasons)


def test_the_same_plan_changes_nothing():
    assert compare(wide_ep(), wide_ep()) == []
    assert change_lines([]) == ["Nothing would change."]


def test_one_argument_restarts_the_engines_of_its_pool():
    old, new = fleet(d={"args": {"max_num_seqs": 256}}), fleet(d={"args": {"max_num_seqs": 512}})
    assert told(compare(old, new)) == [(D, "restart", ["args.max_num_seqs: 256 -> 512"]), PROVED[D]]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({"args": {}}, {"args": {"seed": 1}}, "args.seed: not set -> 1"),
        ({"args": {"seed": 1}}, {"args": {}}, "args.seed: 1 -> not set"),
        ({"args": {"eager": 1}}, {"args": {"eager": True}}, "args.eager: 1 -> true"),
        (
            {"args": {"config": {"x": {"y": 1}, "z": 0}}},
            {"args": {"config": {"x": {"y": 2}, "z": 0}}},
            "args.config.x.y: 1 -> 2",
        ),
        ({"args": {"l": ["a", "b"]}}, {"args": {"l": ["b", "c"]}}, "args.l: added c, removed a"),
        ({"args": {"l": ["a", "b"]}}, {"args": {"l": ["b", "a"]}}, "args.l: a, b -> b, a"),
        ({"args": {"l": "x" * 200}}, {"args": {"l": 1}}, f"args.l: {'x' * 120}... -> 1"),
        ({"shm_size": "16g"}, {"shm_size": "32g"}, "container_options.shm_size: 16g -> 32g"),
        (
            {"mounts": []},
            {"mounts": [{"source": "/a"}]},
            'container_options.mounts: added {"source": "/a"}',
        ),
    ],
)
def test_what_differs_is_named(old, new, reason):
    assert only(compare(fleet(d=old), fleet(d=new)), D) == [reason]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({}, {"HF_TOKEN": "geheim"}, "env HF_TOKEN added (value hidden)"),
        ({"A": "vertraulich"}, {"A": "geheim"}, "env A changed (value hidden)"),
        ({"A": "geheim"}, {}, "env A removed (value hidden)"),
    ],
)
def test_values_of_the_environment_are_never_shown(old, new, reason):
    changes = compare(fleet(d={"env": old}), fleet(d={"env": new}))
    assert only(changes, D) == [reason]
    everything = json.dumps([change.as_dict() for change in changes]) + "".join(change_lines(changes))
    assert "geheim" not in everything
    assert "vertraulich" not in everything


def test_a_secret_among_arguments_is_not_shown_either():
    old, new = (
        fleet(d={"args": {"hf_token": token, "max_num_batched_tokens": len(token)}})
        for token in ("geheim", "vertraulich")
    )
    old["router"]["args"], new["router"]["args"] = {"api_key": "geheim"}, {"api_key": ["vertraulich"]}
    assert only(compare(old, new), D) == ["args.hf_token: (hidden)", "args.max_num_batched_tokens: 6 -> 11"]
    assert router_of(compare(old, new)) == ["args.api_key: (hidden)", CANDIDATE]
    assert "geheim" not in str(compare(old, new))
    assert "vertraulich" not in str(compare(old, new))


def test_another_way_of_the_image_to_the_hosts_restarts_nothing():
    image = fleet()["image"]
    assert (
        compare(fleet(image=image | {"source": "registry"}), fleet(image=image | {"source": "archive"})) == []
    )


def test_a_new_image_restarts_every_engine():
    old, new = fleet(), fleet(image={"name": "vllm-nixl:2", "variant": "cu13"})
    assert told(compare(old, new)) == [
        (P, "restart", ["image.name: vllm-nixl:1 -> vllm-nixl:2"]),
        (D, "restart", ["image.name: vllm-nixl:1 -> vllm-nixl:2"]),
        ("proof", "prove", [f"the pairs of {P}, {D} are proved again"]),
    ]


def test_more_gpus():
    new = plan(
        [engine("prefill", "prefill", ["a"], tp=4), engine("decode", "decode", ["b"], range(8), tp=8)],
        dict.fromkeys("abc", "A"),
        router="r",
    )
    assert only(compare(fleet(), new), D) == ["tensor_parallel_size: 4 -> 8", "devices: added 4, 5, 6, 7"]


def test_a_host_with_another_address():
    old, new = spread(), spread()
    new["hosts"]["c"]["address"] = "10.9.9.9"
    member = new["hosts"]["c"]["members"][0]
    member["address"] = member["args"]["host"] = member["env"]["VLLM_HOST_IP"] = "10.9.9.9"
    for host in "bcd":
        new["hosts"][host]["members"][0]["fingerprint"] = "new"
    assert told(compare(old, new)) == [
        (D, "restart", ["address: 10.0.0.3 -> 10.9.9.9 (member 1)"]),
        PROVED[D],
    ]


def test_a_member_on_another_host():
    assert only(compare(spread(), spread(("b", "e", "d"))), D) == ["hosts: added e, removed c"]
    assert only(compare(spread(), spread(("b", "d", "c"))), D) == ["hosts: b, c, d -> b, d, c"]


def test_a_member_more():
    reasons = only(compare(spread(("b", "c")), spread()), D)
    assert reasons[:2] == ["data_parallel_size: 8 -> 12", "hosts: added d"]
    assert not any("member" in reason for reason in reasons)


def test_a_difference_of_all_members_is_said_once():
    assert only(compare(spread(), spread(args={"seed": 1})), D) == ["args.seed: not set -> 1"]


def test_a_difference_of_some_members_says_which():
    old, new = spread(), spread()
    for host in "cd":
        new["hosts"][host]["members"][0]["env"]["UCX_NET_DEVICES"] = "eth1"
    for host in "bcd":
        new["hosts"][host]["members"][0]["fingerprint"] = "new"
    assert only(compare(old, new), D) == ["env UCX_NET_DEVICES added (value hidden) (member 1, 2)"]


def test_ports_are_said_once_although_arguments_follow_from_them():
    old, new = fleet(), fleet()
    for name in (P, D):
        one = next(one for one in new["engines"] if one["name"] == name)
        member = new["hosts"][one["head"]]["members"][0]
        one["fixed_ports"]["http"] = member["http_port"] = member["args"]["port"] = 9000
        member["fingerprint"] = "new"
    assert only(compare(old, new), P) == ["ports.http: 8000 -> 9000"]


def test_the_transport_behind_hidden_variables_is_named():
    old, new = fleet(d={"env": {"UCX_TLS": "tcp"}}), fleet(d={"env": {"UCX_TLS": "rc"}}, kv_transport="rdma")
    assert only(compare(old, new), D) == [
        "kv_transport: nvlink -> rdma",
        "env UCX_TLS changed (value hidden)",
    ]
    assert P not in [change.engine for change in compare(old, new)]


def test_a_fingerprint_of_unknown_cause_still_restarts():
    new = fleet()
    new["hosts"]["b"]["members"][0]["fingerprint"] = "new"
    assert only(compare(fleet(), new), D) == ["another version of vllm-fleet made the plan"]


def test_engines_that_come_and_go():
    assert told(compare(fleet(decode=["b"]), fleet(decode=["c"]))) == [
        ("decode-c-0", "start", ["new on c"]),
        ("decode-b-0", "stop", ["no longer in the inventory"]),
        (
            "router",
            "router",
            ["decode: added http://10.0.0.3:8000", "decode: removed http://10.0.0.2:8000", CANDIDATE],
        ),
        ("proof", "prove", ["the pairs of decode-c-0 are proved again"]),
    ]


def test_an_engine_that_is_only_stopped_needs_no_proof():
    changes = compare(fleet(decode=["b", "c"]), fleet(decode=["b"]))
    assert [(change.engine, change.action) for change in changes] == [
        ("decode-c-0", "stop"),
        ("router", "router"),
    ]


def test_ordinary_engines_have_no_pairs():
    old, new = (plan([engine("m", "mixed", ["a"], args=args)], {"a": None}) for args in ({}, {"seed": 1}))
    assert told(compare(old, new)) == [("m-a-0", "restart", ["args.seed: not set -> 1"])]


def test_the_proof_is_said_once_for_many():
    changed = {"args": {"seed": 1}}
    changes = compare(fleet(prefill="abc"), fleet(prefill="abc", p=changed, d=changed))
    assert [list(change.reasons) for change in changes if change.action == "prove"] == [
        ["the pairs of prefill-a-0, prefill-b-0, prefill-c-0 and 1 more are proved again"]
    ]


def router_of(changes):
    (found,) = [change for change in changes if change.action == "router"]
    return list(found.reasons)


def test_the_routers_flags():
    new = fleet(timeouts={"start": 1200, "request": 60})
    new["router"]["args"] = {"policy": "random"}
    assert router_of(compare(fleet(), new)) == [
        "args.policy: not set -> random",
        "timeouts.request: 3600 -> 60",
        CANDIDATE,
    ]
    assert len(compare(fleet(), new)) == 1


def test_urls_in_another_order_are_another_router():
    reasons = router_of(compare(fleet(decode="bc"), fleet(decode="cb")))
    assert reasons == ["decode: the same URLs in another order", CANDIDATE]


def test_a_front_at_another_port_is_told_to_clients():
    new = fleet()
    new["router"] |= {"front_port": 80, "url": "http://10.0.0.4:80"}
    assert router_of(compare(fleet(), new)) == [
        "clients need the new URL: http://10.0.0.4:30000 -> http://10.0.0.4:80"
    ]


def test_a_router_that_moves_loses_its_clients():
    new = fleet()
    new["router"] |= {"host": "c", "url": "http://10.0.0.3:30000", "args": {"policy": "random"}}
    assert router_of(compare(fleet(), new)) == [
        "host: r -> c",
        "args.policy: not set -> random",
        "clients need the new URL: http://10.0.0.4:30000 -> http://10.0.0.3:30000",
    ]


def test_what_restarts_nothing():
    new = fleet(kv_floor_gbps=2.0, timeouts={"start": 60, "request": 3600})
    assert told(compare(fleet(), new)) == [
        ("fleet", "none", ["kv_floor_gbps: 10.0 -> 2.0", "timeouts.start: 1200 -> 60"])
    ]


def test_engines_of_others_are_routed_to_and_proved_but_never_started():
    theirs = external("theirs", "decode", "http://192.0.2.1:9000")
    assert told(compare(fleet(), fleet(externals=[theirs]))) == [
        ("theirs", "none", ["new external engine"]),
        ("router", "router", ["decode: added http://192.0.2.1:9000", CANDIDATE]),
        ("proof", "prove", ["the pairs of theirs are proved again"]),
    ]
    assert told(compare(fleet(externals=[theirs]), fleet())) == [
        ("router", "router", ["decode: removed http://192.0.2.1:9000", CANDIDATE]),
    ]
    larger = theirs | {"tensor_parallel_size": 8}
    assert told(compare(fleet(externals=[theirs]), fleet(externals=[larger]))) == [
        ("theirs", "none", ["tensor_parallel_size: 1 -> 8"]),
        ("proof", "prove", ["the pairs of theirs are proved again"]),
    ]
    assert compare(fleet(externals=[theirs]), fleet(externals=[theirs])) == []


def test_an_engine_that_the_fleet_takes_over_from_others():
    theirs = external(D, "decode", "http://10.0.0.2:8000")
    changes = compare(fleet(decode=[], externals=[theirs]), fleet())
    assert told(changes)[0] == (D, "start", ["new on b"])
    changes = compare(fleet(), fleet(decode=[], externals=[theirs]))
    assert (D, "stop", ["no longer in the inventory"]) in told(changes)


def test_real_plans():
    old = gpu(prefill=["p1", "p2"], decode=["d1", "d2"])
    new = copy.deepcopy(old).pool("decode", args={"max_num_seqs": 512})
    assert told(compare(old.plan(), new.plan())) == [
        ("decode-d1-0", "restart", ["args.max_num_seqs: not set -> 512"]),
        ("decode-d2-0", "restart", ["args.max_num_seqs: not set -> 512"]),
        ("proof", "prove", ["the pairs of decode-d1-0, decode-d2-0 are proved again"]),
    ]
    new = copy.deepcopy(old).pool("decode", gpus=16).everywhere(fleet_socket_ifname="eth0")
    reasons = only(compare(old.plan(), new.plan()), "decode-d1-0")
    assert reasons[:2] == ["tensor_parallel_size: 4 -> 16", "hosts: added d2"]
    assert "ports.link: not set -> 20002" in reasons
    assert not any(reason.startswith("args.") for reason in reasons)
    new = copy.deepcopy(old).everywhere(fleet_http_port_base=9000)
    assert only(compare(old.plan(), new.plan()), "decode-d1-0") == ["ports.http: 8000 -> 9000"]


def test_lines_are_aligned():
    old = fleet(decode="bc", d={"args": {"a": 1, "b": 1}})
    new = fleet(decode="b", d={"args": {"a": 2, "b": 2}})
    assert change_lines(compare(old, new)) == [
        "action   engine      why",
        "restart  decode-b-0  args.a: 1 -> 2",
        "                     args.b: 1 -> 2",
        "stop     decode-c-0  no longer in the inventory",
        "router   router      decode: removed http://10.0.0.3:8000",
        f"                     {CANDIDATE}",
        "prove    proof       the pairs of decode-b-0 are proved again",
    ]


def test_as_json():
    new = fleet(kv_floor_gbps=2.0)
    assert [change.as_dict() for change in compare(fleet(), new)] == [
        {"engine": "fleet", "action": "none", "reasons": ["kv_floor_gbps: 10.0 -> 2.0"]}
    ]


# --- what runs ------------------------------------------------------------------------------------


def applied(a_plan, image_id="sha256:1"):
    """The registrations and the running members of a fleet to which a plan was applied."""
    facts = {host: {"other": {"engine": "diesel"}} for host in a_plan["hosts"]}
    for one in a_plan["engines"]:
        facts[one["head"]][f"vllm-engine-{one['name']}"] = registration(
            a_plan, one["name"], dict.fromkeys(one["hosts"], image_id)
        )
    running = {
        host: {member["name"]: member["fingerprint"] + image_id for member in told["members"]}
        for host, told in a_plan["hosts"].items()
    }
    return facts, running


def urls(a_plan):
    return a_plan["router"]["prefill"] + a_plan["router"]["decode"]


def test_a_fleet_that_runs_as_planned():
    assert compare_running(spread(), *applied(spread()), urls(spread()), "sha256:1") == []
    assert compare_running(spread(), *applied(spread())) == []


def test_a_new_fleet():
    a_plan = spread()
    nothing = {host: {} for host in a_plan["hosts"]}
    assert told(compare_running(a_plan, {}, nothing, [])) == [
        (P, "start", ["not registered on a", "it does not run"]),
        (D, "start", ["not registered on b", "it does not run"]),
        ("router", "router", ["no router serves; one is started"]),
        ("proof", "prove", [f"the pairs of {P}, {D} are proved again"]),
    ]


def test_a_member_that_is_down_restarts_its_engine():
    facts, running = applied(spread())
    running["c"][f"{D}.1"] = ""
    assert told(compare_running(spread(), facts, running)) == [
        (D, "restart", [f"{D}.1 does not run on c"]),
        PROVED[D],
    ]


def test_an_engine_that_is_down():
    facts, running = applied(spread())
    for host in "bcd":
        running[host] = {}
    assert told(compare_running(spread(), facts, running)) == [(D, "start", ["it does not run"]), PROVED[D]]


def test_members_of_different_revisions():
    facts, running = applied(spread())
    running["d"][f"{D}.2"] = "old"
    assert told(compare_running(spread(), facts, running)) == [
        (D, "restart", ["its members run different revisions"]),
        PROVED[D],
    ]


def test_an_engine_of_other_settings():
    facts, running = applied(fleet())
    a_plan = fleet(d={"args": {"seed": 1}})
    assert told(compare_running(a_plan, facts, running)) == [
        (D, "restart", ["other settings; its host keeps only their fingerprint, so which ones is not known"]),
        PROVED[D],
    ]


def test_what_a_registration_tells_is_named():
    facts, running = applied(fleet())
    a_plan = fleet(model={"path": "/srv/models/large", "served_name": "tiny"}, d={"args": {"seed": 1}})
    assert told(compare_running(a_plan, facts, running))[1] == (
        D,
        "restart",
        ["model: /srv/models/tiny -> /srv/models/large"],
    )


def test_another_image():
    changes = compare_running(fleet(), *applied(fleet()), image_id="sha256:2")
    assert told(changes)[:2] == [
        (P, "restart", ["image_ids.a: sha256:1 -> sha256:2"]),
        (D, "restart", ["image_ids.b: sha256:1 -> sha256:2"]),
    ]


def test_of_a_host_that_was_not_reached_nothing_is_claimed():
    facts, running = applied(spread())
    del running["c"]
    assert told(compare_running(spread(), facts, running)) == [
        (D, "none", ["c was not reached: what runs there is not known"])
    ]


def test_engines_that_are_left_over():
    facts, running = applied(spread())
    a_plan = plan([engine("prefill", "prefill", ["a"], tp=4)], dict.fromkeys("abcde"), router="r")
    assert told(compare_running(a_plan, facts, running)) == [
        (
            D,
            "stop",
            ["registered on b", "runs on b", "runs on c", "runs on d", "no longer in the inventory"],
        )
    ]
    running["b"], running["c"], running["d"] = {}, {f"{D}.1": "x"}, {f"{D}.2": ""}
    assert told(compare_running(a_plan, {"a": facts["a"]}, running)) == [
        (D, "stop", ["runs on c", "no longer in the inventory"])
    ]


def test_the_engines_of_the_serving_router():
    facts, running = applied(fleet(decode="bc"))
    old = urls(fleet(decode="b"))
    assert told(compare_running(fleet(decode="bc"), facts, running, [*old, "http://old:1"])) == [
        (
            "router",
            "router",
            ["engines: added http://10.0.0.3:8000", "engines: removed http://old:1", CANDIDATE],
        )
    ]


def test_engines_of_others_are_not_looked_for_on_hosts():
    a_plan = fleet(externals=[external("theirs", "decode", "http://192.0.2.1:9000")])
    assert compare_running(a_plan, *applied(fleet()), urls(a_plan)) == []
