"""What each member of an engine is started with: environment, `vllm serve` arguments, container options."""

from __future__ import annotations

from typing import Any

from vllm_fleet import placement
from vllm_fleet.inventory import SHM_SIZES, Fleet
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
MOST_API_SERVERS = 4
ALLOCATOR = "enable_cumem_allocator"
ONLY_ON_HEAD = ("api_server_count",)
"""Arguments that `vllm serve --headless` refuses."""


def environment(fleet: Fleet, engine: Engine, rank: int) -> dict[str, str]:
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
        # Tensor parallelism compiles a step, also in eager mode, and the image has no compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
    elif engine.spans:
        # NCCL would find NVLink between hosts by itself; told so, it fails at once where there is none.
        env["NCCL_MNNVL_ENABLE"] = "1" if v.kv_transport == "nvlink" else "0"
    if engine.spans and (interface := host.socket_ifname(v.kv_transport)):
        # gloo takes the address that the host's name resolves to, on Debian 127.0.1.1, unless it is told.
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    if engine.role in KV_ROLES and v.model.config and keeps_state(v.model.config):
        # The only layout of such a state that NIXL transfers.
        env["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    env |= engine.env
    env |= {
        "TENSOR_PARALLEL_SIZE": str(engine.shape.tp),
        "PIPELINE_PARALLEL_SIZE": str(engine.shape.pp),
        "DATA_PARALLEL_SIZE": str(engine.shape.dp),
        "VLLM_HOST_IP": address,
    }
    if v.accelerator == "cpu":
        env["VLLM_TARGET_DEVICE"] = "cpu"
    if (side_channel := placement.side_channel_base(fleet, engine)) is not None:
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
            "UCX_TLS": UCX_TLS[v.accelerator, v.kv_transport],
        }
        if device := host.vars.net_device:
            env["UCX_NET_DEVICES"] = device
        if v.accelerator == "cuda" and v.kv_mapping == "per_transfer":
            env["UCX_CUDA_IPC_CACHE"] = "n"
    return dict(sorted(env.items()))


def serve_arguments(fleet: Fleet, engine: Engine, rank: int) -> dict[str, Any]:
    """What `vllm serve --config` reads, sorted by name. The parallel sizes are in the environment."""
    v = fleet.vars
    args: dict[str, Any] = {}
    if v.accelerator == "cpu":
        args["dtype"] = CPU_DTYPE
    if v.kv_transport == "nvlink" and engine.role in KV_ROLES and ALLOCATOR not in engine.args:
        # Plain CUDA allocations cannot be exported over NVLink to another host; KV would silently take TCP.
        args[ALLOCATOR] = True
    if engine.shape.dp > 1:
        # The default is one for each rank. A scrape of /metrics reads ranks x servers files inside a server;
        # with 64 of each that takes longer than Prometheus waits.
        args["api_server_count"] = min(engine.shape.dp, MOST_API_SERVERS)
    args |= engine.written
    args |= {
        "model": v.model.path,
        "served_model_name": v.model.served_name,
        "host": str(placement.address(fleet, engine.hosts[rank])),
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


def container_options(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    """What docker gives the member: devices, ulimits, shared memory, mounts."""
    v = fleet.vars
    devices: list[str] = []
    if v.accelerator == "cuda":
        devices = [f"nvidia.com/gpu={device}" for device in engine.devices]
        if engine.role in KV_ROLES or engine.spans:
            devices += {
                "nvlink": ["/dev/nvidia-caps-imex-channels/channel0"],
                "rdma": ["/dev/infiniband"],
            }.get(v.kv_transport, [])
    return {
        "devices": devices,
        # Only where memory is registered with a device: machines without CAP_SYS_RESOURCE refuse to raise it.
        "ulimits": ["memlock=-1:-1"] if v.accelerator == "cuda" else [],
        # Without NUMA nodes to be seen, the CPU NIXL worker does not pin every engine to the same core.
        "tmpfs": ["/sys/devices/system/node"] if v.accelerator == "cpu" else [],
        "shm_size": v.shm_size or SHM_SIZES[v.accelerator],
        "mounts": [{"source": v.model.path, "target": v.model.path, "read_only": True}],
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


def kv_dtype(fleet: Fleet, decode: Engine) -> str | None:
    """What the bytes of an engine's KV follow from, kv_cache_dtype or else dtype. None: the model's own.

    One decode stands for all: NIXL's handshake wants both equal everywhere.
    """
    args = serve_arguments(fleet, decode, 0)
    cache = args.get("kv_cache_dtype", "auto")
    return args.get("dtype") if cache == "auto" else cache
