"""An inventory means to vllm-fleet what it means to ansible-playbook."""

from __future__ import annotations

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.parsing.vault import VaultLib, VaultSecret
from ansible.template import Templar
from ansible.vars.manager import VariableManager

from vllm_fleet.inventory import PREFIX
from vllm_fleet.loading import UnreadableError, load
from vllm_fleet.planning import plan
from vllm_fleet.problems import plain

ALL = """\
fleet_model: {path: /srv/models/tiny, served_name: tiny}
fleet_accelerator: cpu
fleet_kv_transport: tcp
fleet_gpus_per_host: 2
fleet_pools:
  prefill: {role: prefill, hosts: prefill, gpus: 1}
  decode:
    role: decode
    hosts: decode
    gpus: 1
"""
HOSTS = """\
all:
  children:
    prefill: {hosts: {"p[01:03]": }}
    decode: {hosts: {d1: {fleet_address: 10.0.0.9}}}
    router: {hosts: {r1: {ansible_host: 10.0.0.10}}}
    registry: {hosts: {r1: }}
    rack: {children: {prefill: , decode: }, vars: {fleet_net_device: eth1}}
"""


@pytest.fixture
def write(tmp_path):
    """Writes files of an inventory; gives the inventory's path."""

    def write(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path = path if "." in path.name else path.with_suffix(".yml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path / "hosts.yml")

    return write


def judged(loaded):
    result, problems = plan(loaded.hosts, loaded.groups)
    return result, [problem.as_dict() for problem in loaded.all_problems(problems)]


def test_hosts_have_the_variables_that_ansible_gives_them(write):
    hosts = write(
        hosts=HOSTS,
        group_vars__all=ALL + "fleet_start_timeout: 1\nbase: 10.0.0",
        group_vars__rack="fleet_start_timeout: 2\nfleet_gpus_per_host: 4",
        group_vars__prefill="fleet_start_timeout: 3\nfleet_address: '{{ base }}.{{ inventory_hostname[-1] }}'",
        host_vars__p02="fleet_start_timeout: 4\nfleet_gpus_per_host: '{{ 2 * 4 }}'",
        host_vars__d1="fleet_gpus_per_host: '{{ hostvars.p02.fleet_gpus_per_host }}'",
    )
    extra = ["fleet_front_port=31000", '{"fleet_kv_floor_gbps": 0.5}']
    loaded = load([hosts], extra)
    # Ansible's own way, with the same -e options still in force.
    loader = DataLoader()
    inventory = InventoryManager(loader, [hosts])
    manager = VariableManager(loader, inventory)
    manager._hostvars = None
    for name, host in inventory.hosts.items():
        variables = manager.get_vars(host=host) | {"hostvars": loaded.hosts}
        templar = Templar(loader=loader, variables=variables)
        expected = {
            key: plain(templar.template(value))
            for key, value in variables.items()
            if key.startswith(PREFIX) or key == "ansible_host"
        }
        assert plain(loaded.hosts[name]) == expected
    assert plain(loaded.hosts["p02"])["fleet_gpus_per_host"] == 8
    assert plain(loaded.hosts["p02"])["fleet_start_timeout"] == 4
    assert plain(loaded.hosts["p03"])["fleet_address"] == "10.0.0.3"
    assert plain(loaded.hosts["d1"])["fleet_front_port"] == "31000"
    assert loaded.groups["rack"] == ["p01", "p02", "p03", "d1"]


def test_an_ini_inventory_is_cast_once(write, tmp_path):
    write(group_vars__all=ALL)
    (tmp_path / "hosts").write_text(
        "[prefill]\np[1:2] fleet_gpus_per_host=4\n[decode]\nd1 ansible_host=10.0.0.9\n[router]\nr1 ansible_host=10.0.0.10\n[registry]\nr1\n"
        "[prefill:vars]\nfleet_pool_overrides={'prefill': {'tensor_parallel_size': '2'}}\n"
        "[all:vars]\nfleet_port_stride=32\nfleet_front_port='31000'\n"
        "[prefill]\np1 ansible_host=10.0.0.1\np2 ansible_host=10.0.0.2\n"
    )
    result, problems = judged(load([str(tmp_path / "hosts")]))
    assert result is not None, problems
    assert [engine["tensor_parallel_size"] for engine in result["engines"]] == [2, 2, 1]
    assert result["router"]["url"] == "http://10.0.0.10:31000"


def test_a_problem_says_the_file_and_line_that_set_the_value(write, tmp_path):
    hosts = write(
        hosts=HOSTS.replace("10.0.0.9", "127.0.0.1"),
        group_vars__all=ALL + "    args:\n      port: 1\n    gpsu: 1\nfleet_prot: 1\n",
        host_vars__p01="fleet_address: 10.0.0.1\nfleet_gpus_per_host: x",
        host_vars__p02="fleet_address: 10.0.0.1",
        host_vars__p03="fleet_address: 10.0.0.3\nfleet_pool_overrides:\n  prefill:\n    env:\n      UCX_TLS: x",
    )
    _, problems = judged(load([hosts]))
    assert {(p["variable"], p["origin"].removeprefix(f"{tmp_path}/")) for p in problems} == {
        ("fleet_pools.decode.args.port", "group_vars/all.yml:12"),
        ("fleet_pools.decode.gpsu", "group_vars/all.yml:13"),
        ("fleet_prot", "group_vars/all.yml:14"),
        ("fleet_gpus_per_host", "host_vars/p01.yml:2"),
        ("fleet_address", "host_vars/p02.yml:1"),
        ("fleet_address", "hosts.yml:4"),
        ("fleet_pool_overrides.prefill.env.UCX_TLS", "host_vars/p03.yml:5"),
    }


def test_what_cannot_be_computed_is_one_problem_and_not_also_missing(write):
    hosts = write(
        hosts=HOSTS,
        group_vars__all=ALL + "fleet_start_timeout: '{{ nowhere }}'\n",
        group_vars__prefill="fleet_address: '{{ nowhere.at.all }}'\nfleet_gpus_per_host: '{{ 1 / 0 }}'",
    )
    _, problems = judged(load([hosts]))
    problems.sort(key=lambda problem: problem["variable"])
    assert [(p["rule"], p["variable"]) for p in problems] == [
        ("value-unreadable", "fleet_address"),
        ("value-unreadable", "fleet_gpus_per_host"),
        ("value-unreadable", "fleet_start_timeout"),
    ]
    assert problems[0]["hosts"] == ["p01", "p02", "p03"]
    assert problems[0]["origin"].endswith("prefill.yml:1")
    assert "nowhere" in problems[0]["what"]


def encrypted(text: str) -> str:
    return VaultLib().encrypt(text, VaultSecret(b"open sesame")).decode()


def test_a_vaulted_value_and_a_vaulted_file_are_read_with_the_password(write, tmp_path):
    inline = encrypted("fd00::4").replace("\n", "\n  ")
    hosts = write(
        hosts=HOSTS,
        group_vars__all=ALL,
        host_vars__p01=f"fleet_address: !vault |\n  {inline}\n",
        host_vars__p02=encrypted("fleet_address: 10.0.0.2\n"),
        host_vars__p03="fleet_address: 10.0.0.3",
    )
    (tmp_path / "password").write_text("open sesame\n")
    result, problems = judged(load([hosts], vault_password_files=[str(tmp_path / "password")]))
    assert result is not None, problems
    assert [engine["url"] for engine in result["engines"][:2]] == [
        "http://[fd00::4]:8000",
        "http://10.0.0.2:8000",
    ]


def test_a_vaulted_value_without_a_password_is_a_problem_of_that_value(write):
    inline = encrypted("10.0.0.1").replace("\n", "\n  ")
    hosts = write(
        hosts=HOSTS, group_vars__all=ALL, group_vars__prefill=f"fleet_address: !vault |\n  {inline}\n"
    )
    _, problems = judged(load([hosts]))
    assert [(p["rule"], p["variable"]) for p in problems] == [("value-unreadable", "fleet_address")]
    assert problems[0]["origin"].endswith("prefill.yml:1")


def test_a_vaulted_value_is_never_printed(write, tmp_path):
    inline = encrypted("not-an-address").replace("\n", "\n  ")
    hosts = write(
        hosts=HOSTS, group_vars__all=ALL, group_vars__prefill=f"fleet_address: !vault |\n  {inline}\n"
    )
    (tmp_path / "password").write_text("open sesame")
    _, problems = judged(load([hosts], vault_password_files=[str(tmp_path / "password")]))
    assert [(p["rule"], p["value"]) for p in problems] == [("address-literal", "(hidden)")]


def test_a_vaulted_file_without_a_password_is_one_message_that_names_it(write):
    hosts = write(hosts=HOSTS, group_vars__all=ALL, host_vars__p02=encrypted("fleet_address: 10.0.0.2\n"))
    with pytest.raises(UnreadableError) as error:
        load([hosts])
    (problem,) = error.value.problems.all()
    assert "p02.yml" in f"{problem.what} {problem.place.origin}"
    assert "vault" in problem.what.lower()


@pytest.mark.parametrize(
    ("text", "what"),
    [("all: [", "YAML"), ("all:\n  hosts: {a: 1}\n b: 2", "YAML"), ("- a list", ""), ("", "")],
)
def test_a_broken_inventory_is_one_message_that_names_the_place(write, text, what):
    hosts = write(hosts=text)
    with pytest.raises(UnreadableError) as error:
        load([hosts])
    (problem,) = error.value.problems.all()
    assert "hosts.yml" in f"{problem.what} {problem.place.origin}"
    assert what in problem.what


def test_one_broken_file_in_a_directory_is_not_passed_over(write, tmp_path):
    write(hosts=HOSTS, group_vars__all=ALL, more="all: [")
    with pytest.raises(UnreadableError) as error:
        load([str(tmp_path)])
    (problem,) = error.value.problems.all()
    assert "more.yml" in problem.place.origin


def test_a_broken_variables_file_is_one_message_that_names_the_line(write):
    hosts = write(hosts=HOSTS, group_vars__all="fleet_model: {\nx: [")
    with pytest.raises(UnreadableError) as error:
        load([hosts])
    (problem,) = error.value.problems.all()
    assert "all.yml" in f"{problem.what} {problem.place.origin}"


def test_extra_variables_may_come_from_a_file(write, tmp_path, monkeypatch):
    hosts = write(hosts=HOSTS, group_vars__all=ALL, more="fleet_front_port: 31000")
    monkeypatch.chdir(tmp_path)
    assert plain(load([hosts], ["@more.yml"]).hosts["r1"])["fleet_front_port"] == 31000
    assert "fleet_front_port" not in load([hosts]).hosts["r1"], "options must not outlive their command"


def test_variables_beside_the_working_directory_have_no_say(write, tmp_path, monkeypatch):
    hosts = write(hosts=HOSTS, group_vars__all=ALL, elsewhere__group_vars__all="fleet_foo: 1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "fleet_foo" not in load([hosts]).hosts["r1"]
