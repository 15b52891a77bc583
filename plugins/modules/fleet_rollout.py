#!/usr/bin/python
from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_rollout
short_description: Pause, sleep, update, wake and resume all engines of a fleet, in order
description:
  - Calls the head of every engine of ours, never through the router, and the front's control port. What
    C(vllm-fleet rollout) does from where it runs, this does from a host of the fleet.
  - Looks afterwards what each engine is in, and fails with all of it unless every one is where it should be.
    Running it again does what is left to do.
  - In check mode it only looks.
options:
  plan:
    description: Of the plan C(profile), C(engines), C(router) and C(timeouts).
    type: dict
    required: true
  action:
    description: What to do.
    type: str
    required: true
    choices:
      [status, pause, resume, sleep, wake, abort, reset, peers, weights_info, prepare_update, set_version]
  mode:
    description: Of C(pause) and C(sleep). What becomes of requests that run; C(keep) if unset.
    type: str
    choices: [keep, wait, abort]
  level:
    description: Of C(sleep). 1 keeps the weights in the hosts' memory, 2 throws them away; 1 if unset.
    type: int
    choices: [1, 2]
  tags:
    description: Of C(wake). Both if unset.
    type: list
    elements: str
    choices: [weights, kv_cache]
  recompute:
    description: Of C(reset). Whether requests that run lose their KV and are computed again.
    type: bool
  allow_mixed:
    description: Of C(resume) and C(prepare_update). Whether weights of several versions are all right.
    type: bool
  version:
    description: Of C(set_version). What the weights are called.
    type: str
  timeout:
    description: Seconds that one call may take. C(plan.timeouts.control) if unset.
    type: float
"""

EXAMPLES = r"""
- name: Free the GPUs for a training step
  fleet_rollout:
    plan: "{{ plan }}"
    action: sleep
    level: 1
"""

RETURN = r"""
lines:
  description: All of it as a table, for people.
  returned: success
  type: list
  elements: str
engines:
  description: Of each engine C(name), C(role), C(url), its ranks, C(state), C(weight_version), C(fault).
  returned: always, but for wrong options
  type: list
  elements: dict
admission:
  description: Whether the front admits requests, C(open) or C(closed).
  returned: always, but for wrong options
  type: str
message:
  description: Why it is not done; empty if it is.
  returned: always, but for wrong options
  type: str
remedy:
  description: What to do then.
  returned: always, but for wrong options
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.fleet_rollout import ACTIONS, LEVELS, MODES, TAGS, Fleet, Rollout, RolloutError

OPTIONS = {
    "mode": {"type": "str", "choices": list(MODES)},
    "level": {"type": "int", "choices": list(LEVELS)},
    "tags": {"type": "list", "elements": "str", "choices": list(TAGS)},
    "recompute": {"type": "bool"},
    "allow_mixed": {"type": "bool"},
    "version": {"type": "str"},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "action": {"type": "str", "required": True, "choices": list(ACTIONS)},
            "timeout": {"type": "float"},
            **OPTIONS,
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        controls = Rollout(Fleet.from_plan(params["plan"]), params["timeout"])
        if module.check_mode:
            result = controls.status()
        else:
            result = controls.perform(params["action"], {name: params[name] for name in OPTIONS})
    except RolloutError as error:
        module.fail_json(msg=str(error))
    if not result.ok:
        module.fail_json(msg="\n".join(result.lines()), **result.as_dict())
    module.exit_json(lines=result.lines(), **result.as_dict())


if __name__ == "__main__":
    main()
