"""What members on GPUs are started with: which device, namespace, allocator and variable when, and when not."""

from __future__ import annotations

from typing import Any

import pytest
from fleets import Fleet, gpu

CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
MNNVL = "UCX_CUDA_IPC_ENABLE_MNNVL"
SLEEP = {"enable_sleep_mode": True}
CUMEM = {"enable_cumem_allocator": True}
EXTERNAL = {"role": "decode", "url": "http://198.51.100.7:8000", "tensor_parallel_size": 4}


def two_hosts(transport: str = "nvlink") -> Fleet:
    """A prefill and a decode engine of 4 GPUs, on hosts of their own."""
    return gpu(prefill=["p"], decode=["d"]).everywhere(fleet_kv_transport=transport)


def one_host(transport: str = "nvlink") -> Fleet:
    """Both on one host of 8 GPUs."""
    return gpu(prefill=["a"], decode=["a"]).everywhere(fleet_kv_transport=transport)


def members(fleet: Fleet) -> list[dict[str, Any]]:
    return [member for host in fleet.plan()["hosts"].values() for member in host["members"]]


def gpus(member: dict[str, Any]) -> list[int]:
    prefix = "nvidia.com/gpu="
    devices = member["container_options"]["devices"]
    return [int(device.removeprefix(prefix)) for device in devices if device.startswith(prefix)]


def other_devices(member: dict[str, Any]) -> list[str]:
    return [d for d in member["container_options"]["devices"] if not d.startswith("nvidia.com/")]


# --- The transport ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "tls", "devices", "capabilities", "wants"),
    [
        ("nvlink", "cuda_ipc,cuda_copy,sm,self,tcp", [CHANNEL], [], ["nvidia-imex.service"]),
        ("rdma", "rc,cuda_copy,cuda_ipc,sm,self,tcp", ["/dev/infiniband"], ["IPC_LOCK"], []),
        ("tcp", "tcp,cuda_copy", [], [], []),
    ],
)
def test_the_transport_decides(transport, tls, devices, capabilities, wants):
    for member in members(two_hosts(transport)):
        options, env = member["container_options"], member["env"]
        assert (env["UCX_TLS"], env.get(MNNVL)) == (tls, "y" if transport == "nvlink" else None)
        assert gpus(member) == [0, 1, 2, 3]
        assert other_devices(member) == devices
        assert (options["capabilities"], options["pid"], options["wants"]) == (capabilities, None, wants)
        assert options["ulimits"] == ["memlock=-1:-1", "nofile=1048576:1048576"]
        assert member["args"].get("enable_cumem_allocator") is (True if transport == "nvlink" else None)
        assert env.keys().isdisjoint({"UCX_CUDA_IPC_CACHE", "CUDA_VISIBLE_DEVICES", "NCCL_MNNVL_ENABLE"})


@pytest.mark.parametrize(
    ("args", "channel", "pid"),
    [
        # Plain memory: legacy handles, which need one PID namespace.
        (({}, {}), False, "host"),
        # Fabric memory: the channel, on both sides of a pair, and no namespace.
        ((SLEEP, SLEEP), True, None),
        ((CUMEM, CUMEM), True, None),
        # One of each: what is plain still needs the namespace.
        ((SLEEP, {}), True, "host"),
        (({}, CUMEM), True, "host"),
    ],
)
def test_on_one_host_memory_decides_between_namespace_and_channel(args, channel, pid):
    fleet = one_host().everywhere(fleet_kv_mapping="per_transfer")
    for pool, of_pool in zip(("prefill", "decode"), args, strict=True):
        fleet.pool(pool, args=of_pool)
    for member in members(fleet):
        assert other_devices(member) == ([CHANNEL] if channel else [])
        assert member["container_options"]["pid"] == pid
        # Inside one host neither the daemon nor the multi-node path plays a part.
        assert member["container_options"]["wants"] == []
        assert MNNVL not in member["env"]


def test_on_one_host_nothing_is_allocated_otherwise_than_the_operator_says():
    assert [m["args"].get("enable_cumem_allocator") for m in members(one_host())] == [None, None]


def test_who_maps_memory_of_a_peer_on_its_host_sees_the_peers_gpus_and_uses_its_own():
    seen = [(gpus(m), m["env"]["CUDA_VISIBLE_DEVICES"]) for m in members(one_host())]
    assert seen == [(list(range(8)), "0,1,2,3"), (list(range(8)), "4,5,6,7")]
    assert {m["env"]["CUDA_DEVICE_ORDER"] for m in members(one_host())} == {"PCI_BUS_ID"}


@pytest.mark.parametrize("transport", ["rdma", "tcp"])
def test_with_another_transport_engines_of_one_host_see_their_own_gpus_alone(transport):
    for member in members(one_host(transport)):
        assert gpus(member) == member["devices"]
        assert member["container_options"]["pid"] is None
        assert "CUDA_VISIBLE_DEVICES" not in member["env"]


def test_engines_of_one_role_have_nothing_to_map_of_each_other():
    fleet = two_hosts().pool("prefill", engines_per_host=2)
    assert [gpus(member) for member in members(fleet)] == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert {member["container_options"]["pid"] for member in members(fleet)} == {None}


def test_the_second_host_brings_what_nvlink_between_hosts_needs_to_all():
    fleet = gpu(prefill=["a"], decode=["a", "b"]).everywhere(fleet_kv_transport="nvlink")
    for member in members(fleet):
        assert member["args"]["enable_cumem_allocator"] is True
        assert (other_devices(member), member["env"][MNNVL]) == ([CHANNEL], "y")
        # All of it is fabric memory, so the two on host a need no common namespace, but each other's GPUs.
        assert member["container_options"]["pid"] is None
    assert [len(gpus(member)) for member in members(fleet)] == [8, 8, 4]


def test_an_engine_of_somebody_else_counts_as_another_host():
    pools = {"prefill": {"role": "prefill", "hosts": "prefill", "gpus": 4}}
    fleet = gpu(prefill=["a"], decode=["a"]).everywhere(
        fleet_pools=pools, fleet_external_engines={"x": EXTERNAL}
    )
    (member,) = members(fleet)
    assert (member["args"]["enable_cumem_allocator"], other_devices(member)) == (True, [CHANNEL])


def test_ordinary_engines_map_nothing():
    pools = {"serve": {"role": "mixed", "hosts": "decode", "gpus": 4, "engines_per_host": 2}}
    for member in members(gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_pools=pools)):
        assert (gpus(member), other_devices(member)) == (member["devices"], [])
        assert "enable_cumem_allocator" not in member["args"]
        assert not any(name.startswith(("UCX_", "NCCL_")) for name in member["env"])


OTHER_IMAGE = {"fleet_image_reference": f"registry.example/vllm@sha256:{'0' * 64}"}


@pytest.mark.parametrize(
    ("variables", "args", "found"),
    [
        ({}, {}, {"mapping-awake"}),
        ({}, CUMEM, {"mapping-awake"}),
        ({}, SLEEP, set()),
        ({"fleet_kv_mapping": "cached"}, {}, set()),
        ({"fleet_kv_transport": "tcp"}, {}, set()),
        ({"fleet_profile": "rl"}, {}, set()),
        # One layer's memory stays there, and not all of it.
        (OTHER_IMAGE | {"fleet_image_vllm_version": "0.32.0"}, {}, set()),
        (OTHER_IMAGE | {"fleet_image_vllm_version": "0.33.0"}, {}, {"mapping-awake"}),
    ],
)
def test_mapping_per_transfer_is_for_engines_that_sleep(variables, args, found):
    fleet = two_hosts().everywhere(**({"fleet_kv_mapping": "per_transfer"} | variables))
    assert rules_of(fleet.pool("prefill", args=args).pool("decode", args=args)) == found


def test_mapping_per_transfer_is_told_to_both_sides():
    fleet = two_hosts().everywhere(fleet_kv_mapping="per_transfer")
    assert [member["env"]["UCX_CUDA_IPC_CACHE"] for member in members(fleet)] == ["n", "n"]


@pytest.mark.parametrize(
    ("transport", "variables", "device"),
    [
        ("nvlink", {}, None),
        ("nvlink", {"fleet_socket_ifname": "eth0"}, "eth0"),
        ("tcp", {"fleet_socket_ifname": "eth0"}, "eth0"),
        # The NICs of RDMA are others.
        ("rdma", {"fleet_socket_ifname": "eth0"}, None),
        ("rdma", {"fleet_socket_ifname": "eth0", "fleet_net_device": "mlx5_0:1"}, "mlx5_0:1"),
        ("nvlink", {"fleet_socket_ifname": "eth0", "fleet_net_device": "eth1"}, "eth1"),
    ],
)
def test_ucx_takes_the_interface_of_the_ranks_where_it_needs_tcp(transport, variables, device):
    fleet = two_hosts(transport).everywhere(**variables)
    assert {member["env"].get("UCX_NET_DEVICES") for member in members(fleet)} == {device}


# --- Engines over several hosts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "said"), [("nvlink", ("1", "1")), ("rdma", ("0", None))])
def test_nccl_is_told_of_nvlink_between_the_hosts_of_an_engine(transport, said):
    fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(
        fleet_socket_ifname="eth0", fleet_kv_transport=transport
    )
    fleet.pool("decode", gpus=16, data_parallel_size=16)
    for member in members(fleet):
        told = member["env"].get("NCCL_MNNVL_ENABLE"), member["env"].get("NCCL_CUMEM_ENABLE")
        assert told == (said if member["role"] == "decode" else (None, None))


def test_an_ordinary_engine_over_hosts_wants_imex_for_its_ranks():
    pools = {"serve": {"role": "mixed", "hosts": "decode", "gpus": 16}}
    fleet = gpu(prefill=["p"], decode=["a", "b"]).everywhere(fleet_socket_ifname="eth0", fleet_pools=pools)
    for member in members(fleet):
        assert other_devices(member) == [CHANNEL]
        assert member["container_options"]["wants"] == ["nvidia-imex.service"]


# --- NUMA, caches, the runtime ------------------------------------------------------------------------------------


def test_each_gpu_is_bound_to_the_node_that_the_host_says():
    fleet = one_host().everywhere(fleet_numa_nodes=[0, 0, 0, 0, 1, 1, 1, 1]).pool("prefill", gpus=6)
    fleet.pool("decode", gpus=2)
    bound = [(m["args"]["numa_bind"], m["args"]["numa_bind_nodes"]) for m in members(fleet)]
    assert bound == [(True, [0, 0, 0, 0, 1, 1]), (True, [1, 1])]
    assert {tuple(m["container_options"]["capabilities"]) for m in members(fleet)} == {("SYS_NICE",)}


@pytest.mark.parametrize(
    ("args", "capabilities"),
    [
        ({"numa_bind": False}, []),
        ({"numa-bind": True}, ["SYS_NICE"]),
        ({"numa_bind": True, "numa_bind_cpus": ["0-3"]}, ["SYS_NICE"]),
    ],
)
def test_an_operator_who_binds_otherwise_is_not_contradicted(args, capabilities):
    fleet = two_hosts("tcp").everywhere(fleet_numa_nodes=[0] * 8).pool("prefill", args=args)
    member = next(member for member in members(fleet) if member["role"] == "prefill")
    assert "numa_bind_nodes" not in member["args"]
    assert member["container_options"]["capabilities"] == capabilities


def test_without_nodes_nothing_is_bound():
    for member in members(two_hosts()):
        assert not any(name.startswith("numa") for name in member["args"])
        assert "SYS_NICE" not in member["container_options"]["capabilities"]


def test_what_engines_compile_is_kept_in_the_mounted_folder():
    for member in members(two_hosts()):
        cache = member["container_options"]["cache"]
        assert member["env"]["HOME"] == cache
        for name in ("CUTE_DSL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            assert member["env"][name].startswith(f"{cache}/")


def test_an_image_cannot_ask_the_older_runtime_for_more_gpus():
    assert {member["env"]["NVIDIA_VISIBLE_DEVICES"] for member in members(two_hosts("tcp"))} == {"void"}


# --- Rules --------------------------------------------------------------------------------------------------------


def rules_of(fleet: Fleet) -> set[str]:
    return {problem["rule"] for problem in fleet.judge()[1]}


def test_the_allocator_may_be_off_where_kv_stays_on_its_host():
    off = {"enable_cumem_allocator": False}
    assert rules_of(one_host().pool("decode", args=off)) == set()
    assert rules_of(two_hosts().pool("decode", args=off)) == {"nvlink-allocator"}
    # vLLM 0.33 switches it on again for sleep mode.
    both = two_hosts().everywhere(fleet_kv_mapping="per_transfer").pool("decode", args=off | SLEEP)
    assert rules_of(both) == set()


def test_nvlink_between_hosts_may_be_off_where_kv_stays_on_its_host():
    env = {MNNVL: "n"}
    for fleet, found in ((one_host(), set()), (two_hosts(), {"transport-environment"})):
        assert rules_of(fleet.pool("prefill", env=env).pool("decode", env=env)) == found


@pytest.mark.parametrize(("args", "refused"), [({}, True), (CUMEM, False), (SLEEP, False)])
def test_expandable_segments_need_the_allocator_on_one_host_too(args, refused):
    fleet = one_host().everywhere(fleet_kv_mapping="per_transfer" if args == SLEEP else "cached")
    fleet.pool("decode", args=args, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert rules_of(fleet) == ({"expandable-segments"} if refused else set())


def test_ucx_variables_that_only_tell_of_it_may_differ():
    assert rules_of(two_hosts().pool("decode", env={"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"})) == set()
    differing = (
        two_hosts().pool("decode", env={"UCX_RNDV_THRESH": 1}).pool("prefill", env={"UCX_RNDV_THRESH": 2})
    )
    assert rules_of(differing) == {"ucx-equal"}


@pytest.mark.parametrize("nodes", [[0, 1], [0] * 9, []])
def test_each_gpu_of_a_host_has_one_numa_node(nodes):
    fleet = two_hosts()
    fleet.hosts["d"]["fleet_numa_nodes"] = nodes
    (problem,) = fleet.judge()[1]
    assert (problem["rule"], problem["hosts"], problem["variable"]) == (
        "numa-nodes",
        ["d"],
        "fleet_numa_nodes",
    )


def test_a_numa_node_is_a_number():
    assert rules_of(two_hosts().everywhere(fleet_numa_nodes=[0] * 7 + [True])) == {"wrong-value"}
