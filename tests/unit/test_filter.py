"""The filters, in Ansible itself and with wrong input."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from fleets import lab

FOLDER = Path(__file__).parents[2] / "plugins" / "filter"
BIN = Path(sys.executable).parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE")} | {
    "ANSIBLE_FILTER_PLUGINS": str(FOLDER),
    "ANSIBLE_LOCALHOST_WARNING": "false",
}


def load_filters():
    spec = importlib.util.spec_from_file_location("fleet_filters", FOLDER / "fleet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FilterModule().filters()


FILTERS = load_filters()


def evaluate(tmp_path, hosts, groups, expressions, *options):
    """Each expression's value, computed by ansible-playbook on localhost."""
    children = {name: {"hosts": dict.fromkeys(members)} for name, members in groups.items() if name != "all"}
    inventory = {"all": {"hosts": hosts, "children": children}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    out = tmp_path / "out.json"
    copy = {"content": "{{ [" + ", ".join(expressions) + "] | to_json }}", "dest": str(out)}
    play = [{"hosts": "localhost", "gather_facts": False, "connection": "local", "tasks": [{"copy": copy}]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    command = [str(BIN / "ansible-playbook"), "-i", "hosts.yml", "play.yml", *options]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def test_other_filters_do_not_wait_for_the_inventory_model():
    """Ansible loads all of them for each task and host that uses any."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, FOLDER / "fleet.py"], check=True)


def test_ansible_computes_the_same_plan(tmp_path):
    fleet = lab()
    plan = fleet.plan()
    fleet.hosts["bystander"] = {"ansible_host": "nowhere.example"}
    check = "(hostvars | fleet_check(groups))"
    results = evaluate(
        tmp_path, fleet.hosts, fleet.groups,
        [check, f"{check}.plan | fleet_router_arguments('a')",
         f"{check}.plan | fleet_registration('prefill-rack1-04-0', {{'rack1-04': 'sha256:1'}})",
         f"{check}.plan | fleet_registration_problems({{}})",
         "{'num_hidden_layers': 2} | fleet_kv_bytes_per_token('float16')", f"{check}.problems | fleet_problem_text",
         f"{check}.plan | fleet_proof_pairs | map(attribute='name')",
         f"{check}.plan | fleet_status_table({{}}, [])"],
    )  # fmt: skip
    assert results[0] == {"plan": json.loads(json.dumps(plan)), "problems": [], "text": ""}
    assert results[1][:4] == ["--host", "127.0.0.1", "--port", "30001"]
    assert results[2]["engine"] == "prefill-rack1-04-0"
    assert len(results[3]) == 2
    assert results[4:6] == [None, ""]
    assert results[6] == ["prefill-rack1-04-0 -> decode-rack1-05-0"]
    assert [line.split()[0] for line in results[7]] == ["engine", "prefill-rack1-04-0", "decode-rack1-05-0"]


def test_the_host_check_in_ansible(tmp_path):
    fleet = lab()
    check = "(hostvars | fleet_check(groups)).plan"
    questions, recordings, result = evaluate(
        tmp_path, fleet.hosts, fleet.groups,
        [f"{check} | fleet_host_questions('rack1-04', {{}})", f"{check} | fleet_host_recordings(hostvars)",
         f"{check} | fleet_host_check({{'rack1-04': {{'failed': 'no route'}}}}, {{'answers': 'a test without hosts'}})"],
    )  # fmt: skip
    assert questions["observe"]["model"] == "/srv/models/tiny"
    assert [one["port"] for one in questions["reach"]["listeners"]] == [8000, 5600, 60999]
    assert recordings == {}
    assert result["document"]["ok"] is True
    assert "accepted because: a test without hosts" in result["text"]


def test_what_was_registered_is_what_is_recorded():
    seen = {"__host_check_observed": {"observed": {"schema": 1}, "changed": False}}
    reach = {"__host_check_opened": {"listeners": [1]}, "__host_check_dialed": {"dials": [2]}}
    gone = {"__host_check_observed": {"unreachable": True, "msg": "no route"}}
    hostvars = {"rack1-04": seen | reach, "rack1-05": gone, "rack1-router": {"__host_check_recording": "{"}}
    assert FILTERS["fleet_host_recordings"](lab().plan(), hostvars) == {
        "rack1-04": {"observed": {"schema": 1}, "listeners": [1], "dials": [2]},
        "rack1-05": {"failed": "no route"},
        "rack1-router": "{",
    }


def test_the_filters_of_the_host_check_say_what_they_want():
    plan = lab().plan()
    for wrong, says in (
        (lambda: FILTERS["fleet_host_questions"](plan, "nowhere", {}), "the plan has no host 'nowhere'"),
        (lambda: FILTERS["fleet_host_questions"](plan, "rack1-04", {"x": "y"}), "'x' is no check"),
        (lambda: FILTERS["fleet_host_check"](plan, {}, {"x": "y"}), "'x' is no check"),
        (lambda: FILTERS["fleet_host_check"](plan, [], {}), "got list"),
        (lambda: FILTERS["fleet_host_recordings"](plan, 5), "got int"),
        (lambda: FILTERS["fleet_host_recordings"]({}, {}), "expected the plan"),
    ):
        with pytest.raises(AnsibleFilterError, match=says):
            wrong()


def test_ansible_gets_every_problem_with_its_place(tmp_path):
    fleet = lab().pool("decode", args={"port": 1})
    fleet.hosts["rack1-04"] |= {"fleet_prot": 1, "fleet_address": "{{ nowhere }}"}
    fleet.hosts["rack1-05"] |= {
        "fleet_net_device": "{{ 'eth' ~ 0 }}",
        "fleet_pool_overrides": {"x": "{{ nope }}"},
    }
    (result,) = evaluate(
        tmp_path, fleet.hosts, fleet.groups, ["hostvars | fleet_check(groups)"], "-e", "fleet_x=1"
    )
    assert result["plan"] is None
    assert {(p["rule"], p["variable"]) for p in result["problems"]} == {
        ("value-unreadable", "fleet_address"),
        ("value-unreadable", "fleet_pool_overrides"),
        ("unknown-variable", "fleet_prot"),
        ("unknown-variable", "fleet_x"),
        ("owned-argument", "fleet_pools.decode.args.port"),
    }
    assert all(problem["what"] in result["text"] for problem in result["problems"])
    (port,) = (p for p in result["problems"] if p["rule"] == "owned-argument")
    assert "hosts.yml:" in port["origin"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fleet_check", (1, {})),
        ("fleet_check", ({}, [])),
        ("fleet_check", ({"a": 1}, {})),
        ("fleet_problem_text", ("x",)),
        ("fleet_problem_text", ([1],)),
        ("fleet_problem_text", ([{}],)),
        ("fleet_kv_bytes_per_token", ([],)),
        ("fleet_kv_bytes_per_token", ({}, 1)),
        ("fleet_registration", ({}, "e", {})),
        ("fleet_registration", (None, "e", {})),
        ("fleet_registration", (lab().plan(), "e", {})),
        ("fleet_registration", (lab().plan(), "decode-rack1-05-0", "sha256:1")),
        ("fleet_registration", (lab().plan(), "decode-rack1-05-0", {"rack1-04": "sha256:1"})),
        ("fleet_registration_problems", (lab().plan(), [])),
        ("fleet_proof_pairs", ({"schema": 2, "engines": []},)),
        ("fleet_proof_rounds", ({"schema": 2, "engines": []},)),
        ("fleet_status_table", ([], {}, [])),
        ("fleet_status_table", (lab().plan(), [], [])),
        ("fleet_status_table", (lab().plan(), {"rack1-04": "down"}, [])),
        ("fleet_status_table", (lab().plan(), {}, {})),
        ("fleet_router_arguments", (lab().plan(), "c")),
        ("fleet_router_arguments", (lab().plan(), 1)),
    ],
)
def test_wrong_input_is_one_sentence(name, arguments):
    with pytest.raises(AnsibleFilterError) as error:
        FILTERS[name](*arguments)
    assert str(error.value).startswith(name)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_every_filter_is_documented(tmp_path):
    command = [str(BIN / "ansible-doc"), "-t", "filter", "-j", *FILTERS]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    documented = json.loads(done.stdout)
    assert documented.keys() == FILTERS.keys()
    assert all(entry["doc"] and entry["examples"] and entry["return"] for entry in documented.values())
