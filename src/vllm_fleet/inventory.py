"""What an inventory says about a fleet, typed. Reading it reports every problem and keeps what is right."""

from __future__ import annotations

import difflib
import ipaddress
import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from vllm_fleet import profile, rules
from vllm_fleet.problems import HIDDEN, SECRET_NAME, Path, Problems, Rule, is_secret, origin, plain, shown
from vllm_fleet.profile import Profile

PREFIX = "fleet_"
ROUTER_GROUP = "router"
REGISTRY_GROUP = "registry"
RELAY_GROUP = "relay"

type IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
type Accelerator = Literal["cuda", "cpu"]
type Transport = Literal["nvlink", "rdma", "tcp"]
type Role = Literal["prefill", "decode", "mixed"]

ROLES: tuple[str, ...] = get_args(Role.__value__)
IMAGE_VARIANTS = {"cuda": "arm64-cu13", "cpu": "cpu"}
IMAGE_ARCHITECTURES = {"arm64-cu13": "arm64", "amd64-cu13": "amd64", "cpu": "amd64"}
"""What the hosts of each variant are, in docker's words."""
VLLM_VERSIONS = {"arm64-cu13": "0.33.0", "amd64-cu13": "0.33.0", "cpu": "0.32.0"}
"""What the image of each variant holds (images/vllm-nixl)."""
SHM_SIZES = {"cuda": "16g", "cpu": "1g"}
KV_FLOORS_GBPS = {"nvlink": 10.0, "rdma": 2.0, "tcp": 0.005}
"""GB/s below which a pair's KV moved over something slower than what was declared."""

OWNED_ARGS: dict[str, str] = {
    "model": "fleet_model.path",
    "model_tag": "fleet_model.path",
    "served_model_name": "fleet_model.served_name",
    "host": "fleet_address",
    "port": "fleet_http_port_base",
    "tensor_parallel_size": "the pool's gpus or tensor_parallel_size",
    "pipeline_parallel_size": "the pool's pipeline_parallel_size",
    "data_parallel_size": "the pool's data_parallel_size",
    "enable_expert_parallel": "the pool's enable_expert_parallel",
    "kv_transfer_config": "fleet_kv_transport",
    "config": "the pool's args",
    "device_ids": "the pool's gpus",
    "headless": "the pool's gpus",
    "nnodes": "the pool's gpus",
    "node_rank": "the pool's gpus",
    "master_addr": "fleet_address",
    "master_port": "fleet_engine_port_base",
}
"""vLLM arguments the plan derives, and what to use instead. All data_parallel_* are owned besides."""
REFUSED_ARGS = {
    "api_key": "probes, proof and router ask the engines without a key",
    "disable_log_stats": "the proof reads the engines' counters",
    "ssl_ca_certs": "probes, proof and router speak plain HTTP with the engines",
    "ssl_certfile": "probes, proof and router speak plain HTTP with the engines",
    "ssl_keyfile": "probes, proof and router speak plain HTTP with the engines",
    "uds": "probes, proof and router reach the engines by address and port",
}
"""vLLM arguments with which an engine could never be found ready, and why."""
OTHER_URLS = frozenset(
    {
        "data_parallel_hybrid_lb",
        "data_parallel_external_lb",
        "data_parallel_multi_port_external_lb",
        "data_parallel_rank",
        "data_parallel_start_rank",
    }
)
"""vLLM arguments that give an engine several URLs."""
SHORT_ARGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dpl": "data_parallel_size_local",
    "dpr": "data_parallel_start_rank",
    "dpn": "data_parallel_rank",
    "dpa": "data_parallel_address",
    "dpp": "data_parallel_rpc_port",
    "dpb": "data_parallel_backend",
    "dph": "data_parallel_hybrid_lb",
    "dpe": "data_parallel_external_lb",
    "dpm": "data_parallel_multi_port_external_lb",
    "n": "nnodes",
    "r": "node_rank",
    "ep": "enable_expert_parallel",
}

OWNED_ENV = frozenset(
    {
        "TENSOR_PARALLEL_SIZE",
        "PIPELINE_PARALLEL_SIZE",
        "DATA_PARALLEL_SIZE",
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_TARGET_DEVICE",
        "UCX_TLS",
        "UCX_NET_DEVICES",
        "UCX_CUDA_IPC_CACHE",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
    }
)

OWNED_ROUTER_ARGS = frozenset(
    {
        "host",
        "port",
        "prometheus_host",
        "prometheus_port",
        "prefill",
        "decode",
        "worker_urls",
        "vllm_pd_disaggregation",
        "pd_disaggregation",
        "kv_connector",
        "worker_startup_timeout_secs",
        "worker_startup_check_interval",
        "request_timeout_secs",
        "intra_node_data_parallel_size",
        "service_discovery",
    }
)


def _no_bool(value: Any) -> Any:
    """`true` is no number, although Python and so pydantic would read it as 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")  # noqa: TRY004  pydantic turns only ValueError into a problem
    return value


def _env_text(value: Any) -> Any:
    """Numbers become their text; a boolean has no agreed text in an environment."""
    if isinstance(value, bool):
        raise ValueError('must be text: write "1" or "true", quoted, as the program expects it')  # noqa: TRY004
    return str(value) if isinstance(value, int | float) else value


def _argument(value: Any) -> Any:
    """Anything YAML can say, except what JSON cannot (infinity) and null, which says nothing."""
    if value is None:
        raise ValueError("must have a value; leave the argument out for vLLM's default")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if item is not None:
            _argument(item)
    return value


def _scalar(value: Any) -> Any:
    """One word of a command line, or a flag that is there or not."""
    if isinstance(value, dict | list):
        raise ValueError("must be one value: text, a number, true or false")  # noqa: TRY004
    # It becomes part of a unit file: no character that systemd takes for its own, and no second word.
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9._:/,+=@-]+", value):
        raise ValueError("must be one word of letters, digits and . _ : / , + = @ -")
    return _argument(value)


def _network(value: Any) -> Any:
    """An address or a network, as it is usually written."""
    try:
        network = ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError as error:
        why = "it has host bits set" if "host bits" in str(error) else "it is neither"
        raise ValueError(f"must be an IP address or a network such as 10.0.0.0/24; {why}") from None
    return str(network.network_address if network.num_addresses == 1 else network)


def _client_path(value: Any) -> Any:
    """A path that can be compared as it is: no dot segments, no empty ones, nothing encoded."""
    if not isinstance(value, str) or not re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)+", value):
        raise ValueError(
            "must be a path such as /v1/embeddings: words of letters, digits and . _ ~ - after a slash each"
        )
    return value


def _local_path(value: Any) -> Any:
    """A file of the workstation; relative ones would depend on where a command is run."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise ValueError("must be an absolute path on the workstation, such as {{ inventory_dir }}/NAME")
    return value


type Network = Annotated[str, BeforeValidator(_network)]
type LocalPath = Annotated[str, BeforeValidator(_local_path)]
type ClientPath = Annotated[str, BeforeValidator(_client_path)]
type Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=4096)]
type PortNumber = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=65535)]
type NumaNode = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=1023)]
type Seconds = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=7 * 24 * 3600)]
type Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]+$", max_length=255)]
type EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
type EnvValue = Annotated[str, BeforeValidator(_env_text), Field(pattern=r"^[^\n\r\x00]*$")]
type ArgName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]*$")]
type Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=10, max_length=500)]
type Arg = Annotated[Any, BeforeValidator(_argument)]
type ImageReference = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", max_length=500)]
type RouterArg = Annotated[Any, BeforeValidator(_scalar)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Model):
    """The model every engine serves: its folder on the hosts and the name clients use."""

    path: Annotated[str, Field(max_length=1024)]
    served_name: Word
    config: dict[str, Any] | None = None
    """Its config.json, as data: with it more can be judged before a host is touched."""


class Sizes(_Model):
    """What a pool and a host's override of it have in common."""

    gpus: Count | None = None
    tensor_parallel_size: Count | None = None
    engines_per_host: Count | None = None
    pipeline_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    nnodes: Count | None = None
    args: dict[ArgName, Arg] = {}
    env: dict[EnvName, EnvValue] = {}


class Pool(Sizes):
    """Engines of one role and shape on the hosts of one inventory group."""

    role: Role
    hosts: Word
    enable_expert_parallel: bool = False


class External(_Model):
    """An engine that somebody else runs: checked, proved and routed to, never started, stopped or healed."""

    role: Role
    url: Annotated[str, Field(pattern=r"^http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$")]
    tensor_parallel_size: Count
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    max_model_len: Annotated[int, BeforeValidator(_no_bool), Field(ge=1)] | None = None


class RouterSlot(_Model):
    """The loopback ports of one of the two routers."""

    port: PortNumber
    metrics_port: PortNumber


class RouterSlots(_Model):
    """The two routers: one serves, the other is free for a candidate."""

    a: RouterSlot = RouterSlot(port=30001, metrics_port=29001)
    b: RouterSlot = RouterSlot(port=30002, metrics_port=29002)


class FleetVars(_Model):
    """The fleet-wide variables without their prefix. Times are seconds, rates GB/s."""

    model: ModelSpec
    accelerator: Accelerator
    kv_transport: Transport
    profile: Profile = "serving"
    """What the engines are for: clients, or rollouts, whose trainer pauses, updates and resumes them."""
    controllers: list[Network] = []
    """Who besides the fleet's hosts may reach engines: trainers, and what else controls or scrapes them."""
    fence: bool = True
    """Whether nftables rules of the project's own keep everybody else from engines and side channels."""
    kv_mapping: Literal["cached", "per_transfer"] | None = None
    """Whether a decode keeps a prefill's memory mapped, or maps it for each transfer; None: the profile's."""
    pools: dict[str, Pool]
    external_engines: dict[str, External] = {}
    rule_overrides: dict[str, Reason] = {}
    http_port_base: PortNumber = 8000
    side_channel_port_base: PortNumber = 5600
    engine_port_base: PortNumber = 20000
    ephemeral_ports: Annotated[str, Field(pattern=r"^[1-9][0-9]{3,4}-[1-9][0-9]{3,4}$")] = "32768-60999"
    port_stride: Count = 16
    front_port: PortNumber = 30000
    control_port: PortNumber = 30010
    client_paths: list[ClientPath] = []
    """What clients may POST to besides what is known to generate."""
    client_keys: LocalPath | None = None
    """YAML, name: key. Without it the front asks for none."""
    tls_certificate: LocalPath | None = None
    """PEM: the front's certificate, those between it and its CA, and its key. Without it: plain HTTP."""
    tls_ca: LocalPath | None = None
    """PEM by which the fleet's own checks judge the certificate; None: by what their host trusts."""
    tls_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+$", max_length=253)] | None = None
    """The name in the certificate; None: the address of the router's host."""
    router_slots: RouterSlots = RouterSlots()
    router_args: dict[ArgName, RouterArg] = {}
    registry_port: PortNumber = 5000
    relay_port: PortNumber = 30020
    relay_architecture: Literal["amd64", "arm64"] | None = None
    """What the hosts of the group relay are; None: what the engines' are."""
    start_timeout: Seconds = 1200
    request_timeout: Seconds | None = None
    """None: the profile's."""
    control_timeout: Seconds = 900
    """For each call that pauses, puts to sleep, wakes or resumes an engine."""
    shm_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*[bkmgBKMG]?$")] | None = None
    kv_floor_gbps: (
        Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=10000, allow_inf_nan=False)] | None
    ) = None
    kv_floor_min_bytes: Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=2**50)] = 64 * 2**20
    proof_prompt_words: Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=10**6)] = 1500
    proof_prefix_tokens: Count = 8
    proof_tokens: Count = 16
    image: Annotated[str, Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*(/[a-z0-9]+([._-][a-z0-9]+)*)*$")] = (
        "vllm-nixl"
    )
    image_variant: Literal["arm64-cu13", "amd64-cu13", "cpu"] | None = None
    image_source: Literal["registry", "archive", "build"] = "registry"
    image_reference: ImageReference | None = None
    image_vllm_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+[0-9A-Za-z.+]*$")] | None = None


class HostVars(_Model):
    """The variables of one host without their prefix."""

    address: str | None = None
    gpus_per_host: Count | None = None
    gpu_memory_gib: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=10000)] | None = None
    rack: Word | None = None
    socket_ifname: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = None
    net_device: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@,-]{1,255}$")] | None = None
    numa_nodes: list[NumaNode] | None = None
    """The CPU-bearing NUMA node of each GPU, in the order of their ids."""
    pool_overrides: dict[str, Sizes] = {}


FLEET_WIDE = frozenset(PREFIX + name for name in FleetVars.model_fields)
PER_HOST = frozenset(PREFIX + name for name in HostVars.model_fields)
# The role whose prefix is the fleet's own: its variables are judged by its argument spec, not here.
ROLE_VARIABLES = frozenset(
    f"fleet_front_{name}"
    for name in (
        "backend",
        "client_keys",
        "control_listen",
        "control_sources",
        "drain_timeout",
        "listen",
        "open_paths",
        "paths",
        "request_timeout",
        "serving",
        "slot",
        "slots",
        "socket",
        "tls_ca",
        "tls_certificate",
    )
)
KNOWN = FLEET_WIDE | PER_HOST | ROLE_VARIABLES


@dataclass(frozen=True, slots=True)
class Host:
    """One host of the fleet. `address` is None where it is missing or wrong, which was reported."""

    name: str
    vars: HostVars
    address: IPAddress | None
    raw: Mapping[str, Any]

    def socket_ifname(self, transport: Transport) -> str | None:
        """The interface that ranks on several hosts talk over. Over TCP it is the KV cache's, unless set."""
        return self.vars.socket_ifname or (self.vars.net_device if transport == "tcp" else None)

    def ucx_net_devices(self, transport: Transport) -> str | None:
        """The devices that UCX may use. Beside NVLink it needs TCP, over the ranks' interface, unless set."""
        return self.vars.net_device or (self.vars.socket_ifname if transport != "rdma" else None)


@dataclass(slots=True)
class Fleet:
    """A fleet as far as it could be read.

    `vars` lacks what was wrong; `pools` holds the pools that are right, in the operator's order, and `hosts`
    the hosts of the fleet in inventory order. `raw` is the reference value of each fleet-wide variable.
    """

    vars: FleetVars
    pools: dict[str, Pool]
    hosts: dict[str, Host]
    groups: dict[str, list[str]]
    raw: dict[str, Any]
    problems: Problems

    def report(self, rule: Rule, what: str, path: Path, **rest: Any) -> None:
        """Add a problem whose place is a fleet-wide variable."""
        self.problems.add(rule, what, path=path, source=self.raw.get(str(path[0])), **rest)

    @property
    def kv_mapping(self) -> Literal["cached", "per_transfer"]:
        """How a decode maps a prefill's memory."""
        return self.vars.kv_mapping or profile.KV_MAPPINGS[self.vars.profile]

    @property
    def request_timeout(self) -> int:
        """Seconds that the longest request may take."""
        return self.vars.request_timeout or profile.REQUEST_TIMEOUTS[self.vars.profile]

    @property
    def vllm_version(self) -> str:
        """What the engines' image holds."""
        return self.vars.image_vllm_version or VLLM_VERSIONS[self.image_variant]

    @property
    def image_variant(self) -> str:
        """The architecture and accelerator that the engines' image is for."""
        return self.vars.image_variant or IMAGE_VARIANTS[self.vars.accelerator]

    @property
    def routers(self) -> list[str]:
        """Hosts of the group `router`."""
        return self.groups.get(ROUTER_GROUP, [])

    @property
    def relays(self) -> list[str]:
        """Hosts of the group `relay`: the relay is off without one."""
        return self.groups.get(RELAY_GROUP, [])

    @property
    def registries(self) -> list[str]:
        """Hosts of the group `registry`; none where the image goes another way."""
        return self.groups.get(REGISTRY_GROUP, []) if self.vars.image_source == "registry" else []


PLACEHOLDERS: dict[str, Any] = {
    "model": ModelSpec(path="/", served_name="-"),
    "accelerator": "cuda",
    "kv_transport": "tcp",
    "pools": {},
}
"""Stand in for required variables that are missing or wrong, so that the rest can still be judged. A fleet
with a problem never becomes a plan, so they are seen by no one."""

NOT_SET = "not set"
SPECIFIC_TYPES = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "dict_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
}


def read(hosts: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Sequence[str]]) -> Fleet:
    """Read the fleet variables of all hosts.

    Args:
        hosts: host name -> its variables `fleet_*` and `ansible_host`, in inventory order; values may carry
            Ansible's tags. Other variables are ignored.
        groups: group name -> its hosts.

    """
    problems = Problems()
    _check_names(hosts, problems)
    raw, reference_hosts = _references(hosts)
    plain_raw = {name: plain(value) for name, value in raw.items()}
    _check_agreement(hosts, raw, plain_raw, reference_hosts, problems)

    values = {name.removeprefix(PREFIX): value for name, value in plain_raw.items()}
    raw_pools = values.get("pools")
    if isinstance(raw_pools, dict):
        values["pools"] = {}
    fleet_vars = _variables(FleetVars, values, raw, problems)
    problems.overrides.update(fleet_vars.rule_overrides)
    fleet = Fleet(
        fleet_vars, {}, {}, {name: list(members) for name, members in groups.items()}, raw, problems
    )
    _check_model_path(fleet, values.get("model"))
    _check_router_args(fleet, values.get("router_args"))
    used = [*fleet.routers, *fleet.registries, *fleet.relays]
    for name, raw_pool in (raw_pools if isinstance(raw_pools, dict) else {}).items():
        path = ("fleet_pools", name)
        _check_pool_contents(raw_pool, path, raw, problems)
        pool = _pool(raw_pool, path, raw, problems)
        if pool is not None:
            fleet.pools[name] = pool
        if isinstance(raw_pool, dict) and isinstance(raw_pool.get("hosts"), str):
            used += fleet.groups.get(raw_pool["hosts"], [])

    in_use = dict.fromkeys(used)
    in_order = [name for name in hosts if name in in_use] + [name for name in in_use if name not in hosts]
    _check_presence(in_order, hosts, plain_raw, reference_hosts, problems)
    for name in in_order:
        fleet.hosts[name] = _host(name, hosts.get(name, {}), raw_pools, problems)
    return fleet


def _suggestion(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely means, as a remedy. A prefix all share says nothing."""
    short = {key.removeprefix(PREFIX): key for key in known}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), sorted(short), n=1)
    return f"Did you mean {short[close[0]]}?" if close else None


def _check_names(hosts: Mapping[str, Mapping[str, Any]], problems: Problems) -> None:
    for host, variables in hosts.items():
        for name, value in variables.items():
            if name.startswith(PREFIX) and name not in KNOWN:
                problems.add(
                    rules.UNKNOWN_VARIABLE,
                    "no variable of vllm-fleet has this name",
                    path=(plain(name),),
                    value=value,
                    host=host,
                    source=value,
                    origin=origin(name),
                    remedy=_suggestion(name, KNOWN),
                )


def _references(hosts: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Each fleet-wide variable's value on the first host that has it, and that host."""
    raw: dict[str, Any] = {}
    where: dict[str, str] = {}
    for host, variables in hosts.items():
        for name, value in variables.items():
            if name in FLEET_WIDE and name not in raw:
                raw[name], where[name] = value, host
    return raw, where


def _check_agreement(
    hosts: Mapping[str, Mapping[str, Any]],
    raw: dict[str, Any],
    plain_raw: dict[str, Any],
    where: dict[str, str],
    problems: Problems,
) -> None:
    for host, variables in hosts.items():
        for name, value in variables.items():
            # Hosts of one group share the very object, so the comparison is rarely made.
            if name not in FLEET_WIDE or value is raw[name]:
                continue
            for path, here, there in _differences(plain(value), plain_raw[name], (plain(name),)):
                secret = is_secret(value, path) or is_secret(raw[name], path)
                what = f"{shown(here)} here, {shown(there)} on {where[name]}"
                if secret:
                    what = f"not the value that {where[name]} has"
                problems.add(rules.DIFFERS, what, path=path, value=here, host=host, source=value)


def _check_presence(
    in_use: list[str],
    hosts: Mapping[str, Mapping[str, Any]],
    plain_raw: dict[str, Any],
    where: dict[str, str],
    problems: Problems,
) -> None:
    for host in in_use:
        for name in sorted(plain_raw.keys() - hosts.get(host, {}).keys()):
            problems.add(rules.DIFFERS, f"{NOT_SET} here, but set on {where[name]}", path=(name,), host=host)


def _differences(here: Any, there: Any, path: Path) -> list[tuple[Path, Any, Any]]:
    """The innermost values that differ. 16 and "16" do not: a value may come from INI or `-e`."""
    if isinstance(here, dict) and isinstance(there, dict):
        return [
            difference
            for key in here | there
            for difference in _differences(here.get(key, NOT_SET), there.get(key, NOT_SET), (*path, key))
        ]
    return [] if here == there or str(here) == str(there) else [(path, here, there)]


def _variables[M: (FleetVars, HostVars)](
    cls: type[M], values: dict[str, Any], raw: Mapping[str, Any], problems: Problems, host: str | None = None
) -> M:
    """Variables as a model. What is wrong is reported and replaced by its default or a placeholder."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        bad = {str(item["loc"][0]) for item in error.errors()}
        _report_errors(error, cls, (), raw, problems, host)
    usable = {name: value for name, value in values.items() if name not in bad}
    return cls.model_validate({name: PLACEHOLDERS[name] for name in bad if name in PLACEHOLDERS} | usable)


def _pool(value: Any, path: Path, raw: Mapping[str, Any], problems: Problems) -> Pool | None:
    """A pool, or None for one that is wrong, which is reported."""
    try:
        return Pool.model_validate(value)
    except ValidationError as error:
        _report_errors(error, Pool, path, raw, problems)
        return None


def _report_errors(
    error: ValidationError,
    cls: type[BaseModel],
    base: Path,
    raw: Mapping[str, Any],
    problems: Problems,
    host: str | None = None,
) -> None:
    """Report what pydantic found in the value at `base`; without a base the model is one of variables."""
    for item in error.errors(include_url=False):
        loc = tuple(step for step in item["loc"] if step != "[key]")
        path = (*base, *loc) if base else (PREFIX + str(loc[0]), *loc[1:])
        value, remedy = item["input"], None
        if item["type"] == "extra_forbidden":
            known = _keys_at(cls, loc[:-1])
            rule, what = rules.UNKNOWN_KEY, f"no such key; known are {', '.join(sorted(known))}"
            remedy = _suggestion(str(loc[-1]), known)
        elif item["type"] == "missing":
            rule, what, value = rules.MISSING, NOT_SET, None
        else:
            rule, what = rules.WRONG_VALUE, _sentence(item)
        source = raw.get(str(path[0]))
        problems.add(rule, what, path=path, value=value, host=host, source=source, remedy=remedy)


def _keys_at(cls: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """The keys a mapping may have, `loc` steps below a model."""
    annotation: Any = cls
    for step in loc:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[str(step)].annotation
        else:
            annotation = get_args(annotation)[-1]  # what a mapping holds
    return list(annotation.model_fields)


def _sentence(item: Any) -> str:
    """Pydantic's finding as a sentence's end, such as `must be a whole number`."""
    if item["type"] in SPECIFIC_TYPES:
        return SPECIFIC_TYPES[item["type"]]
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "string_pattern_mismatch":
        return f"must match {item['ctx']['pattern']}"
    if item["type"] == "literal_error":
        return f"must be {item['ctx']['expected']}"
    message = str(item["msg"])
    return message.removeprefix("Input ").replace("should ", "must ")


def _check_model_path(fleet: Fleet, model: Any) -> None:
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str):
        return
    # It becomes part of a unit file and of a container mount: no character that either takes for its own.
    if path == "/" or path != posixpath.normpath(path) or not re.fullmatch(r"/[A-Za-z0-9._/+=@-]+", path):
        fleet.report(
            rules.MODEL_PATH,
            "not a normalized absolute path of letters, digits and . _ / + = @ -",
            ("fleet_model", "path"),
            value=path,
        )


def _check_router_args(fleet: Fleet, args: Any) -> None:
    seen: dict[str, str] = {}
    for name in args if isinstance(args, dict) else ():
        if (twin := seen.setdefault(name.replace("-", "_"), name)) != name:
            what = f"the same argument as {twin}"
            fleet.report(rules.REPEATED_ARGUMENT, what, ("fleet_router_args", name), value=args[name])
        if name.replace("-", "_") in OWNED_ROUTER_ARGS:
            fleet.report(
                rules.OWNED_ROUTER_ARGUMENT,
                "the plan derives this flag",
                ("fleet_router_args", name),
                value=args[name],
            )


def argument_name(key: str) -> str:
    """The argument that a key of `args` names: with underscores, and long."""
    name = key.lstrip("-").replace("-", "_")
    return SHORT_ARGS.get(name, name)


def is_owned(key: str) -> bool:
    """Whether an argument is not the operator's to set in `args`."""
    name = argument_name(key)
    owned = name in REFUSED_ARGS or name.partition(".")[0] in OWNED_ARGS
    return owned or name.startswith("data_parallel")


def _check_pool_contents(
    pool: Any, path: Path, raw: Mapping[str, Any], problems: Problems, host: str | None = None
) -> None:
    """What a pool or an override must leave to the plan. Plain data, so a broken pool is checked as well."""
    if not isinstance(pool, dict):
        return

    def report(rule: Rule, what: str, *steps: str, value: Any, remedy: str | None = None) -> None:
        where = (*path, *steps)
        problems.add(
            rule,
            what,
            path=where,
            value=value,
            host=host,
            remedy=remedy,
            source=raw.get(str(where[0])),
        )

    seen: dict[str, str] = {}
    for key, value in pool["args"].items() if isinstance(pool.get("args"), dict) else ():
        name = argument_name(key)
        if name in seen:
            report(rules.REPEATED_ARGUMENT, f"the same argument as {seen[name]}", "args", key, value=value)
        seen[name] = key
        if SECRET_NAME.search(name) and name not in REFUSED_ARGS:
            what = "it would be in a file, in `--diff` and in logs; vLLM reads secrets from the environment"
            report(
                rules.REFUSED_ARGUMENT, what, "args", key, value=HIDDEN, remedy="Set it in `env`, encrypted."
            )
        if name in REFUSED_ARGS:
            report(rules.REFUSED_ARGUMENT, REFUSED_ARGS[name], "args", key, value=value)
        owner = OWNED_ARGS.get(name.split(".", 1)[0])
        if name in OTHER_URLS:
            report(rules.ONE_URL, "the engine would have several URLs", "args", key, value=value)
        elif owner or name.startswith("data_parallel"):
            remedy = f"Remove it; it follows from {owner or OWNED_ARGS['data_parallel_size']}."
            what = "the plan derives this argument"
            report(rules.OWNED_ARGUMENT, what, "args", key, value=value, remedy=remedy)
    _check_pool_env(pool, report)


def _check_pool_env(pool: Mapping[str, Any], report: Callable[..., None]) -> None:
    for key, value in pool["env"].items() if isinstance(pool.get("env"), dict) else ():
        if key == "VLLM_API_KEY":
            report(rules.REFUSED_ARGUMENT, REFUSED_ARGS["api_key"], "env", key, value=value)
        if key in OWNED_ENV:
            report(rules.OWNED_ENVIRONMENT, "the plan derives this variable", "env", key, value=value)


def _host(name: str, variables: Mapping[str, Any], raw_pools: Any, problems: Problems) -> Host:
    raw = {key: value for key, value in variables.items() if key in PER_HOST or key == "ansible_host"}
    values = {key.removeprefix(PREFIX): plain(value) for key, value in raw.items() if key in PER_HOST}
    host_vars = _variables(HostVars, values, raw, problems, name)
    overrides = values.get("pool_overrides")
    for pool, override in overrides.items() if isinstance(overrides, dict) else ():
        path = ("fleet_pool_overrides", pool)
        _check_pool_contents(override, path, raw, problems, name)
        if isinstance(raw_pools, dict) and pool not in raw_pools:
            problems.add(
                rules.UNKNOWN_POOL,
                "no such pool in fleet_pools",
                path=path,
                value=override,
                host=name,
                source=raw["fleet_pool_overrides"],
                remedy=_suggestion(pool, raw_pools),
            )
    return Host(name, host_vars, _address(name, variables, problems), raw)


def _address(name: str, variables: Mapping[str, Any], problems: Problems) -> IPAddress | None:
    """The host's address: fleet_address, else ansible_host where that is an IP address."""
    variable = "fleet_address" if "fleet_address" in variables else "ansible_host"
    value = plain(variables.get(variable))

    def report(rule: Rule, what: str) -> None:
        problems.add(rule, what, path=(variable,), value=value, host=name, source=variables.get(variable))

    if value is None:
        problems.add(
            rules.ADDRESS_MISSING,
            "neither fleet_address nor ansible_host is set",
            path=("fleet_address",),
            host=name,
        )
        return None
    try:
        # ip_address() takes integers as well; an inventory's 10 is no address.
        address = ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        if variable == "fleet_address":
            report(rules.ADDRESS_INVALID, "not an IP address")
        else:
            report(rules.ADDRESS_MISSING, "fleet_address is not set, and ansible_host is not an IP address")
        return None
    if why := usable_address(address):
        report(rules.ADDRESS_UNUSABLE, why)
        return None
    return address


def usable_address(address: IPAddress | str) -> str | None:
    """Why other hosts cannot reach an address, or None where they may. A name is not judged."""
    if isinstance(address, str):
        if address.lower() == "localhost":
            return "a loopback name"
        try:
            address = ipaddress.ip_address(address)
        except ValueError:
            return None
    for kind in ("loopback", "unspecified", "multicast"):
        if getattr(getattr(address, "ipv4_mapped", None) or address, f"is_{kind}"):
            return f"a{'n' if kind == 'unspecified' else ''} {kind} address"
    if address == ipaddress.ip_address("255.255.255.255"):
        return "the broadcast address"
    if getattr(address, "scope_id", None) or (address.version == 6 and address.is_link_local):
        return "a link-local address, which needs an interface and cannot be in a URL"
    return None
