"""Filters over vllm_fleet: they judge types, copy values into plain objects and call the package."""

from __future__ import annotations

from collections.abc import Mapping

from ansible.errors import AnsibleFilterError

from vllm_fleet.inventory import PREFIX
from vllm_fleet.kv import kv_bytes_per_token
from vllm_fleet.loading import Loaded, compute
from vllm_fleet.planning import plan
from vllm_fleet.problems import Problems, plain, text_of
from vllm_fleet.proof import proof_pairs
from vllm_fleet.registration import compare_registrations, registration, stale_engines
from vllm_fleet.routing import router_arguments
from vllm_fleet.status import status_rows, status_table


def fleet_check(hostvars, groups):
    _require(hostvars, Mapping, "fleet_check", "hostvars, a mapping of hosts to variables")
    _require(groups, Mapping, "fleet_check", "groups, a mapping of groups to hosts")
    problems = Problems()
    hosts = {}
    for host in hostvars:
        variables = hostvars[host]
        _require(variables, Mapping, "fleet_check", f"a mapping as the variables of {host}")
        hosts[plain(host)] = found = {}
        for name in variables:
            if name.startswith(PREFIX) or name == "ansible_host":
                compute(plain(host), name, lambda: variables[name], None, found, problems)  # noqa: B023  called at once
    loaded = Loaded(hosts, plain(groups), problems)
    result, judged = plan(loaded.hosts, loaded.groups)
    found = [problem.as_dict() for problem in loaded.all_problems(judged)]
    refused = any(problem["severity"] == "error" for problem in found)
    return {"plan": None if refused else result, "problems": found, "text": text_of(found)}


def fleet_problem_text(problems):
    _require(problems, list, "fleet_problem_text", "the list of problems that fleet_check gives")
    for problem in problems:
        _require(problem, Mapping, "fleet_problem_text", "problems as mappings")
    try:
        return text_of(plain(problems))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_problem_text: a problem has no {error}.") from None


def fleet_kv_bytes_per_token(config, dtype=None):
    _require(config, Mapping, "fleet_kv_bytes_per_token", "a model's config.json as a mapping")
    if dtype is not None:
        _require(dtype, str, "fleet_kv_bytes_per_token", "dtype as text")
    return kv_bytes_per_token(plain(config), plain(dtype))


def fleet_registration(plan, engine, image_id):
    _require_plan(plan, "fleet_registration")
    _require(engine, str, "fleet_registration", "the engine's name")
    _require(image_id, str, "fleet_registration", "the image id as text")
    try:
        return registration(plain(plan), plain(engine), plain(image_id))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_registration: the plan has no engine {error}.") from None


def fleet_registration_problems(plan, facts):
    _require_plan(plan, "fleet_registration_problems")
    _require(facts, Mapping, "fleet_registration_problems", "a mapping of hosts to their local facts")
    return compare_registrations(plain(plan), plain(facts))


def fleet_stale_engines(plan, facts):
    _require_plan(plan, "fleet_stale_engines")
    _require(facts, Mapping, "fleet_stale_engines", "a mapping of hosts to their local facts")
    return stale_engines(plain(plan), plain(facts))


def fleet_proof_pairs(plan):
    _require_plan(plan, "fleet_proof_pairs")
    return proof_pairs(plain(plan))


def fleet_status_table(plan, hostvars, workers):
    _require_plan(plan, "fleet_status_table")
    _require(hostvars, Mapping, "fleet_status_table", "the variables of the engine hosts that could be reached")
    _require(workers, list, "fleet_status_table", "the router's workers as a list")
    hosts = {host: _learned(variables) for host, variables in hostvars.items() if "status_health" in variables}
    return status_table(status_rows(plain(plan), plain(hosts), plain(workers)))


def _learned(variables):
    units = {
        done["member"]["name"]: "{ActiveState}/{SubState}, {NRestarts} restarts".format(
            **dict(line.split("=", 1) for line in done["stdout_lines"])
        )
        for done in variables["status_units"]["results"]
    }
    health = {
        done["member"]["name"]: "ok" if done["status"] == 200 else f"{done['status']}: {done['msg'].splitlines()[0][:60]}"  # noqa: PLR2004
        for done in variables["status_health"]["results"]
    }
    return {"local": variables["ansible_facts"].get("ansible_local", {}), "units": units, "health": health}


def fleet_router_arguments(plan, slot):
    _require_plan(plan, "fleet_router_arguments")
    _require(slot, str, "fleet_router_arguments", "a slot, a or b")
    try:
        return router_arguments(plain(plan), plain(slot))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_router_arguments: the plan has no {error}.") from None


def _require(value, kind, name, what):
    if not isinstance(value, kind):
        raise AnsibleFilterError(f"{name}: expected {what}, got {type(value).__name__}.")


def _require_plan(value, name):
    _require(value, Mapping, name, "the plan that fleet_check gives")
    if value.get("schema") != 1 or not isinstance(value.get("engines"), list):
        raise AnsibleFilterError(f"{name}: expected the plan that fleet_check gives, got another mapping.")


class FilterModule:
    def filters(self):
        return {
            function.__name__: function
            for function in (
                fleet_check,
                fleet_kv_bytes_per_token,
                fleet_problem_text,
                fleet_proof_pairs,
                fleet_registration,
                fleet_registration_problems,
                fleet_router_arguments,
                fleet_stale_engines,
                fleet_status_table,
            )
        }
