"""What each member of an engine is started with: environment, `vllm serve` arguments, container options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet import placement, profile
from vllm_fleet.inventory import SHM_SIZES, Fleet, Host
from vllm_fleet.kv import keeps_state
from vllm_fleet.placement import DATA_PARALLEL_RPC, LINK, MASTER, Engine

UCX_TLS = {
    ("cpu", "tcp"): "tcp",
    # UCX stages GPU memory through the host for TCP; that needs cuda_copy.
    ("cuda", "tcp"): "tcp,cuda_copy",
    ("cuda", "nvlink"): "cuda_ipc,cuda_copy,sm,self,tcp",
    ("cuda", "rdma"): "rc,cuda_copy,cuda_ipc,sm,self,tcp",
}
CPU_DTYPE = "float32"  # bfloat16 died with SIGILL at the first forward
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ALLOCATOR = "enable_cumem_allocator"
NUMA_ARGS = ("numa_bind", "numa_bind_nodes", "numa_bind_cpus")
IMEX_CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
"""Processes that share memory need the same channel, on all hosts."""
CACHE = "/var/cache/vllm"
"""The folder in the container that survives it."""
ONLY_ON_HEAD = ("api_server_count",)
"""Arguments that `vllm serve --headless` refuses."""


@dataclass(frozen=True, slots=True)
class Nvlink:
    """What KV over NVLink takes in this fleet; nothing of it with another transport.

    It is one for all prefill and decode engines: both sides of a pair must be able to do the same.
    """

    over_hosts: bool = False
    """A prefill and a decode are on different hosts. Only fabric memory can be mapped from another host."""
    fabric: bool = False
    """An engine's KV is fabric memory. Who exports or maps it needs an IMEX channel, also inside one host
    (measured on 2x H200: without one CUDA answers NOT_PERMITTED, and UCX takes TCP, at 0.4 GB/s)."""
    plain: bool = False
    """An engine's KV is a plain allocation, which only processes of one PID namespace can map."""
    shared: frozenset[str] = frozenset()
    """Hosts with both prefill and decode engines: some of their KV does not leave them."""


def nvlink(fleet: Fleet, engines: Sequence[Engine]) -> Nvlink:
    """What KV over NVLink takes. Linear in engines."""
    if fleet.vars.kv_transport != "nvlink":
        return Nvlink()
    transferring = [engine for engine in engines if engine.role in KV_ROLES]
    hosts: dict[str, set[str]] = {role: set() for role in KV_ROLES}
    for engine in transferring:
        hosts[engine.role].update(engine.hosts)
    prefills, decodes = hosts.values()
    # Where an engine of somebody else runs is not known, and it is in no namespace of ours.
    theirs = any(engine.role in KV_ROLES for engine in fleet.vars.external_engines.values())
    over_hosts = len(prefills | decodes) > (0 if theirs else 1)
    fabric = [has_fabric_memory(engine, over_hosts=over_hosts) for engine in transferring]
    return Nvlink(over_hosts, any(fabric), not all(fabric), frozenset(prefills & decodes))


def has_fabric_memory(engine: Engine, *, over_hosts: bool) -> bool:
    """Whether vLLM allocates the engine's KV with its cumem allocator, which sleep mode always does."""
    return bool(engine.args.get("enable_sleep_mode") or engine.args.get(ALLOCATOR, over_hosts))


def environment(fleet: Fleet, engine: Engine, rank: int, links: Nvlink) -> dict[str, str]:
    """The environment of the member on the engine's host number `rank`, sorted by name."""
    v = fleet.vars
    host = fleet.hosts[engine.hosts[rank]]
    address = str(placement.address(fleet, host.name))
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM gives up on a slow rank after 600 s; how long is too long is said once, by the fleet.
        "VLLM_ENGINE_READY_TIMEOUT_S": str(v.start_timeout),
    }
    if v.accelerator == "cpu":
        # OMP threads bound by two engines to the same cores starve both.
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Tensor parallelism compiles a step, also in eager mode: minutes on the cores of a lab.
        env["TORCHDYNAMO_DISABLE"] = "1"
    else:
        env |= _cuda_environment(fleet, engine, links)
    if engine.spans and (interface := host.socket_ifname(v.kv_transport)):
        # gloo takes the address that the host's name resolves to, on Debian 127.0.1.1, unless it is told.
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    if engine.role in KV_ROLES and v.model.config and keeps_state(v.model.config):
        # The only layout of such a state that NIXL transfers.
        env["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    env |= engine.env
    env |= profile.ENVIRONMENT[v.profile]
    env |= {
        "TENSOR_PARALLEL_SIZE": str(engine.shape.tp),
        "PIPELINE_PARALLEL_SIZE": str(engine.shape.pp),
        "DATA_PARALLEL_SIZE": str(engine.shape.dp),
        "VLLM_HOST_IP": address,
    }
    if v.accelerator == "cpu":
        env["VLLM_TARGET_DEVICE"] = "cpu"
    else:
        # GPUs come by CDI. The older NVIDIA runtime, where docker has it, would add what the image asks for.
        env["NVIDIA_VISIBLE_DEVICES"] = "void"
    if (side_channel := placement.side_channel_base(fleet, engine)) is not None:
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "UCX_TLS": UCX_TLS[v.accelerator, v.kv_transport],
        }
        if device := host.ucx_net_devices(v.kv_transport):
            env["UCX_NET_DEVICES"] = device
        if v.accelerator == "cuda" and fleet.kv_mapping == "per_transfer":
            env["UCX_CUDA_IPC_CACHE"] = "n"
        if host.name in links.shared:
            # The container has all GPUs of the host (container_options); in this order with nvidia-smi's ids.
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, engine.devices))
    return dict(sorted(env.items()))


def _cuda_environment(fleet: Fleet, engine: Engine, links: Nvlink) -> dict[str, str]:
    """What the operator may still change in `env`, as far as no rule refuses it."""
    env = {
        # Compilers keep what they made below HOME (vLLM, Triton, FlashInfer, DeepGEMM, TileLang, the driver),
        # but for these two. Kept, a restart does not compile for minutes.
        "HOME": CACHE,
        "CUTE_DSL_CACHE_DIR": f"{CACHE}/cute_dsl",
        "TORCHINDUCTOR_CACHE_DIR": f"{CACHE}/torchinductor",
    }
    if engine.spans and fleet.vars.kv_transport == "nvlink":
        # NCCL would find NVLink between hosts by itself; told so, it fails at once where there is none. From
        # other hosts it maps cuMem's memory alone.
        env |= {"NCCL_CUMEM_ENABLE": "1", "NCCL_MNNVL_ENABLE": "1"}
    elif engine.spans:
        env["NCCL_MNNVL_ENABLE"] = "0"
    if engine.role in KV_ROLES and links.over_hosts:
        # UCX's default is to try; told so, it says in the log that it cannot.
        env["UCX_CUDA_IPC_ENABLE_MNNVL"] = "y"
    return env


def serve_arguments(fleet: Fleet, engine: Engine, rank: int, links: Nvlink) -> dict[str, Any]:
    """What `vllm serve --config` reads, sorted by name. The parallel sizes are in the environment."""
    v = fleet.vars
    host = fleet.hosts[engine.hosts[rank]]
    args: dict[str, Any] = {}
    if v.accelerator == "cpu":
        args["dtype"] = CPU_DTYPE
    else:
        args |= _numa_arguments(host, engine)
    if links.over_hosts and engine.role in KV_ROLES:
        # Plain CUDA allocations cannot be exported over NVLink to another host; KV would silently take TCP.
        args[ALLOCATOR] = True
    if engine.shape.dp > 1:
        # The default is one for each rank. A scrape of /metrics reads ranks x servers files inside a server;
        # with 64 of each that takes longer than Prometheus waits.
        args["api_server_count"] = min(engine.shape.dp, profile.MOST_API_SERVERS[v.profile])
    args |= engine.written
    args |= {
        "model": v.model.path,
        "served_model_name": v.model.served_name,
        "host": str(placement.address(fleet, host.name)),
        "port": placement.http_port(fleet, engine),
    }
    if engine.expert_parallel:
        args["enable_expert_parallel"] = True
    if engine.role in KV_ROLES:
        args["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[engine.role],
            "kv_buffer_device": v.accelerator,
            "kv_load_failure_policy": "fail",
        }
    if engine.spans:
        args |= _over_hosts(fleet, engine, rank)
    if rank:
        args = {name: value for name, value in args.items() if name not in ONLY_ON_HEAD}
    return dict(sorted(args.items()))


def _numa_arguments(host: Host, engine: Engine) -> dict[str, Any]:
    """The NUMA node of each of the engine's GPUs, where the host says them and `args` bind no other way.

    With `numa_bind` alone vLLM finds them itself, also past GPU memories that are nodes without CPUs. But
    where it cannot, on a host with one node or under a CPU affinity, the engine does not start (vLLM 0.33.0,
    numa_utils.py).
    """
    nodes = host.vars.numa_nodes
    if not nodes or not engine.args.keys().isdisjoint(NUMA_ARGS):
        return {}
    return {"numa_bind": True, "numa_bind_nodes": [nodes[device] for device in engine.devices]}


def _over_hosts(fleet: Fleet, engine: Engine, rank: int) -> dict[str, Any]:
    """How the members find each other (vLLM 0.32.0, `vllm serve --help`: Data parallel, Multi-node)."""
    head = str(placement.address(fleet, engine.head))
    args: dict[str, Any] = {"headless": True} if rank else {}
    if engine.shape.dp > 1:
        args |= {
            "data_parallel_size_local": engine.shape.dp_local,
            "data_parallel_address": head,
            "data_parallel_rpc_port": placement.fixed_port(fleet, engine, DATA_PARALLEL_RPC),
        }
        if rank:  # on the head a start rank would switch on hybrid load balancing
            args["data_parallel_start_rank"] = engine.ranks(rank).start
        return args
    return args | {
        "nnodes": engine.shape.nnodes,
        "node_rank": rank,
        "master_addr": head,
        "master_port": placement.fixed_port(fleet, engine, MASTER),
    }


def container_options(fleet: Fleet, engine: Engine, rank: int, links: Nvlink) -> dict[str, Any]:
    """What unit and docker give the member: devices, capabilities, limits, namespaces, memory, mounts."""
    v = fleet.vars
    host = fleet.hosts[engine.hosts[rank]]
    cuda, transfers = v.accelerator == "cuda", engine.role in KV_ROLES
    shares = transfers and host.name in links.shared
    # Between hosts also the ranks of one engine share fabric memory.
    imex = v.kv_transport == "nvlink" and ((transfers and links.fabric) or engine.spans)
    verbs = v.kv_transport == "rdma" and (transfers or engine.spans)
    devices: list[str] = []
    if cuda:
        # To map memory of a peer on its host CUDA needs the peer's GPU in the container (measured on 2x H200:
        # else INVALID_VALUE for plain, NOT_SUPPORTED for fabric memory). CUDA_VISIBLE_DEVICES then says which
        # are the engine's own.
        gpus = range(host.vars.gpus_per_host or 0) if shares else engine.devices
        devices = [f"nvidia.com/gpu={device}" for device in gpus]
    if imex:
        devices.append(IMEX_CHANNEL)
    if verbs:
        devices.append("/dev/infiniband")
    numa = cuda and (_numa_arguments(host, engine) | dict(engine.args)).get("numa_bind")
    return {
        "devices": devices,
        # Where memory is registered with a NIC, and where vLLM binds memory to NUMA nodes.
        "capabilities": [*(["IPC_LOCK"] if verbs else []), *(["SYS_NICE"] if numa else [])],
        # Plain memory is mapped only where the exporter's process is seen: between two PID namespaces CUDA
        # answers INVALID_CONTEXT, also with an IMEX channel. UCX refuses without one, and tries with one.
        # Fabric memory needs the channel and no common namespace. The IPC namespace plays no part.
        # (Measured on 2x H200; UCX 1.23, as in nixl-cu13 1.5.1, and its pull request 11514.)
        "pid": "host" if shares and links.plain else None,
        # Only with GPUs: machines without CAP_SYS_RESOURCE refuse to raise them.
        "ulimits": ["memlock=-1:-1", "nofile=1048576:1048576"] if cuda else [],
        # Without NUMA nodes to be seen, the CPU NIXL worker does not pin every engine to the same core.
        "tmpfs": [] if cuda else ["/sys/devices/system/node"],
        "shm_size": v.shm_size or SHM_SIZES[v.accelerator],
        "mounts": [{"source": v.model.path, "target": v.model.path, "read_only": True}],
        "cache": CACHE if cuda else None,
        # Inside one host the channel does without the daemon.
        "wants": ["nvidia-imex.service"] if imex and (links.over_hosts or engine.spans) else [],
    }


def link(fleet: Fleet, engine: Engine) -> dict[str, Any] | None:
    """How the members of an engine over several hosts watch each other; None for one on a single host."""
    if not engine.spans:
        return None
    return {
        "port": placement.fixed_port(fleet, engine, LINK),
        "head_address": str(placement.address(fleet, engine.head)),
        "members": [
            {"name": engine.member(rank), "host": host, "address": str(placement.address(fleet, host))}
            for rank, host in enumerate(engine.hosts)
        ],
    }


def kv_dtype(fleet: Fleet, decode: Engine, links: Nvlink) -> str | None:
    """What the bytes of an engine's KV follow from, kv_cache_dtype or else dtype. None: the model's own.

    One decode stands for all: NIXL's handshake wants both equal everywhere.
    """
    args = serve_arguments(fleet, decode, 0, links)
    cache = args.get("kv_cache_dtype", "auto")
    return args.get("dtype") if cache == "auto" else cache
