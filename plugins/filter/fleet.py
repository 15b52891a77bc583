"""Filters over vllm_fleet: they judge types, copy values into plain objects and call the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from vllm_fleet.gpu_memory import judge
from vllm_fleet.identity import expected_external, expected_members
from vllm_fleet.kv import kv_bytes_per_token
from vllm_fleet.problems import Problems, plain, text_of
from vllm_fleet.proof import proof_pairs, proof_rounds
from vllm_fleet.registration import compare_registrations, registration
from vllm_fleet.relay import relay_arguments
from vllm_fleet.routing import router_arguments
from vllm_fleet.status import learned, status_rows, status_table


def fleet_check(hostvars: Any, groups: Any) -> dict[str, Any]:
    # Ansible loads this file anew for each task and host that uses any filter; these imports take 0.1 s.
    from vllm_fleet.inventory import PREFIX
    from vllm_fleet.loading import Loaded, compute
    from vllm_fleet.planning import plan

    _require(hostvars, Mapping, "fleet_check", "hostvars, a mapping of hosts to variables")
    _require(groups, Mapping, "fleet_check", "groups, a mapping of groups to hosts")
    problems = Problems()
    hosts: dict[str, dict[str, Any]] = {}
    for host in hostvars:
        variables = hostvars[host]
        _require(variables, Mapping, "fleet_check", f"a mapping as the variables of {host}")
        computed = hosts.setdefault(plain(host), {})
        for name in variables:
            if name.startswith(PREFIX) or name == "ansible_host":
                compute(plain(host), name, lambda: variables[name], None, computed, problems)  # noqa: B023  called at once
    loaded = Loaded(hosts, plain(groups), problems)
    result, judged = plan(loaded.hosts, loaded.groups)
    found = [problem.as_dict() for problem in loaded.all_problems(judged)]
    refused = any(problem["severity"] == "error" for problem in found)
    return {"plan": None if refused else result, "problems": found, "text": text_of(found)}


def fleet_client_keys(text: Any, path: Any, mode: Any) -> dict[str, Any]:
    from vllm_fleet.client_keys import read

    for value, what in ((text, "the text of the file"), (path, "its path"), (mode, "its mode")):
        _require(value, str, "fleet_client_keys", what)
    keys, problems = read(plain(text), plain(path), plain(mode))
    return {"keys": keys, "problems": problems}


def fleet_problem_text(problems: Any) -> str:
    _require(problems, list, "fleet_problem_text", "the list of problems that fleet_check gives")
    for problem in problems:
        _require(problem, Mapping, "fleet_problem_text", "problems as mappings")
    try:
        return text_of(plain(problems))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_problem_text: a problem has no {error}.") from None


def fleet_kv_bytes_per_token(config: Any, dtype: Any = None) -> int | None:
    _require(config, Mapping, "fleet_kv_bytes_per_token", "a model's config.json as a mapping")
    if dtype is not None:
        _require(dtype, str, "fleet_kv_bytes_per_token", "dtype as text")
    return kv_bytes_per_token(plain(config), plain(dtype))


def fleet_registration(plan: Any, engine: Any, image_ids: Any) -> dict[str, Any]:
    _require_plan(plan, "fleet_registration")
    _require(engine, str, "fleet_registration", "the engine's name")
    _require(image_ids, Mapping, "fleet_registration", "a mapping of hosts to the ids of their images")
    try:
        return registration(plain(plan), plain(engine), plain(image_ids))
    except KeyError as error:
        raise AnsibleFilterError(
            f"fleet_registration: the plan has no engine, or image_ids no host {error}."
        ) from None


def fleet_registration_problems(plan: Any, facts: Any) -> list[str]:
    _require_plan(plan, "fleet_registration_problems")
    _require(facts, Mapping, "fleet_registration_problems", "a mapping of hosts to their local facts")
    return compare_registrations(plain(plan), plain(facts))


def fleet_proof_pairs(plan: Any) -> list[dict[str, Any]]:
    _require_plan(plan, "fleet_proof_pairs")
    return proof_pairs(plain(plan))


def fleet_proof_rounds(plan: Any) -> list[list[int]]:
    _require_plan(plan, "fleet_proof_rounds")
    return proof_rounds(plain(plan))


def fleet_expected_members(plan: Any, host: Any, registrations: Any) -> list[dict[str, Any]]:
    name = "fleet_expected_members"
    _require_plan(plan, name)
    _require(host, str, name, "the host's name")
    _require(registrations, Mapping, name, "a mapping of hosts to their local facts")
    try:
        return expected_members(plain(plan), plain(host), plain(registrations))
    except KeyError as error:
        raise AnsibleFilterError(f"{name}: the plan has no host {error}.") from None


def fleet_expected_external(plan: Any) -> list[dict[str, Any]]:
    _require_plan(plan, "fleet_expected_external")
    return expected_external(plain(plan))


def fleet_status_table(plan: Any, hostvars: Any, workers: Any, states: Any = ()) -> list[str]:
    name = "fleet_status_table"
    _require_plan(plan, name)
    _require(hostvars, Mapping, name, "a mapping of hosts to what playbooks/status.yml learned there")
    _require(workers, list, name, "the router's workers as a list")
    _require(states, Sequence, name, "the engines' states as a list")
    hosts = {}
    for host, variables in hostvars.items():
        _require(variables, Mapping, name, f"a mapping as the variables of {host}")
        if "status_health" in variables:  # it could be reached
            local = variables["ansible_facts"].get("ansible_local", {})
            results = [variables[register]["results"] for register in ("status_units", "status_health")]
            hosts[plain(host)] = learned(plain(local), *plain(results))
    return status_table(status_rows(plain(plan), hosts, plain(workers), plain(states)))


def fleet_changes(plan: Any, hostvars: Any, workers: Any) -> list[str]:
    from vllm_fleet.comparison import change_lines, compare_running

    name = "fleet_changes"
    _require_plan(plan, name)
    _require(hostvars, Mapping, name, "a mapping of hosts to what playbooks/diff.yml learned there")
    _require(workers, list, name, "the URLs of the router's workers as a list")
    registrations, running = {}, {}
    for host, variables in hostvars.items():
        _require(variables, Mapping, name, f"a mapping as the variables of {host}")
        if "diff_running" in variables:  # it could be reached
            registrations[plain(host)] = plain(variables["ansible_facts"].get("ansible_local", {}))
            running[plain(host)] = dict(
                line.split("=", 1) for line in plain(variables["diff_running"]["stdout_lines"])
            )
    return change_lines(compare_running(plain(plan), registrations, running, plain(workers)))


def fleet_host_questions(plan: Any, host: Any, accept: Any) -> dict[str, Any]:
    from vllm_fleet.host_check.report import AcceptError, accepted, questions

    name = "fleet_host_questions"
    _require_plan(plan, name)
    _require(host, str, name, "the host's name")
    try:
        accepted(plain(accept))
        return questions(plain(plan), plain(host))
    except AcceptError as error:
        raise AnsibleFilterError(str(error)) from None
    except KeyError as error:
        raise AnsibleFilterError(f"{name}: the plan has no host {error}.") from None


def fleet_host_recordings(plan: Any, hostvars: Any) -> dict[str, Any]:
    name = "fleet_host_recordings"
    _require_plan(plan, name)
    _require(hostvars, Mapping, name, "hostvars, with what the role host_check registered")
    recordings = {}
    for host in plain(plan)["hosts"]:
        variables = hostvars.get(host, {})
        if "__host_check_recording" in variables:
            recordings[host] = plain(variables["__host_check_recording"])
        elif "__host_check_observed" in variables:
            recordings[host] = _recording(
                *(
                    plain(variables.get(f"__host_check_{step}") or {})
                    for step in ("observed", "opened", "dialed")
                )
            )
    return recordings


def _recording(observed: dict[str, Any], opened: dict[str, Any], dialed: dict[str, Any]) -> dict[str, Any]:
    if "observed" not in observed:
        return {"failed": str(observed.get("msg", "it was not looked at"))}
    return {
        "observed": observed["observed"],
        "listeners": opened.get("listeners"),
        "dials": dialed.get("dials"),
    }


def fleet_host_check(plan: Any, recordings: Any, accept: Any) -> dict[str, Any]:
    from vllm_fleet.host_check.report import AcceptError, accepted, document, judge, table

    name = "fleet_host_check"
    _require_plan(plan, name)
    _require(recordings, Mapping, name, "a mapping of hosts to what was recorded there")
    try:
        findings = judge(plain(plan), plain(recordings), accepted(plain(accept)))
    except AcceptError as error:
        raise AnsibleFilterError(str(error)) from None
    return {"document": document(findings), "text": "\n".join(table(findings))}


def fleet_router_arguments(plan: Any, slot: Any) -> list[str]:
    _require_plan(plan, "fleet_router_arguments")
    _require(slot, str, "fleet_router_arguments", "a slot, a or b")
    try:
        return router_arguments(plain(plan), plain(slot))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_router_arguments: the plan has no {error}.") from None


def fleet_relay_arguments(plan: Any, host: Any) -> list[str]:
    _require_plan(plan, "fleet_relay_arguments")
    _require(host, str, "fleet_relay_arguments", "the host's name")
    try:
        return relay_arguments(plain(plan), plain(host))
    except KeyError as error:
        raise AnsibleFilterError(f"fleet_relay_arguments: the plan has no {error}.") from None


def fleet_fence_union(wanted: Any, in_force: Any) -> dict[str, Any]:
    from vllm_fleet.fence import union

    name = "fleet_fence_union"
    for fence in (wanted, in_force):
        _require(fence, Mapping, name, "ports, side_channel_ports, callers and peers as a mapping")
    try:
        return union(plain(wanted), plain(in_force))
    except KeyError as error:
        raise AnsibleFilterError(f"{name}: a fence has no {error}.") from None


def fleet_gpu_memory(plan: Any, member: Any, result: Any, limit: Any) -> dict[str, Any]:
    name = "fleet_gpu_memory"
    _require_plan(plan, name)
    _require(member, str, name, "the member's name")
    _require(result, Mapping, name, "the result of a command")
    _require(limit, int, name, "MiB as a number")
    try:
        return judge(plain(plan), plain(member), plain(result), plain(limit))
    except KeyError as error:
        raise AnsibleFilterError(f"{name}: the plan has no member {error}.") from None


def _require(value: Any, kind: type, name: str, what: str) -> None:
    if not isinstance(value, kind):
        raise AnsibleFilterError(f"{name}: expected {what}, got {type(value).__name__}.")


def _require_plan(value: Any, name: str) -> None:
    _require(value, Mapping, name, "the plan that fleet_check gives")
    if value.get("schema") != 1 or not isinstance(value.get("engines"), list):
        raise AnsibleFilterError(f"{name}: expected the plan that fleet_check gives, got another mapping.")


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            function.__name__: function
            for function in (
                fleet_check,
                fleet_client_keys,
                fleet_kv_bytes_per_token,
                fleet_problem_text,
                fleet_proof_pairs,
                fleet_proof_rounds,
                fleet_registration,
                fleet_registration_problems,
                fleet_expected_members,
                fleet_expected_external,
                fleet_changes,
                fleet_fence_union,
                fleet_gpu_memory,
                fleet_host_check,
                fleet_host_questions,
                fleet_host_recordings,
                fleet_relay_arguments,
                fleet_router_arguments,
                fleet_status_table,
            )
        }
