"""Every check of the hosts, as data. The judging functions are in `on_host` and `between`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DESIGN = "design of vllm-fleet"
VLLM = "vLLM 0.32.0 and 0.33.0, source"
MEASURED = "measured with vLLM on two H200, NVLink"
LINUX = "Linux"
CUDA = "NVIDIA CUDA Toolkit 13 release notes, driver compatibility"
NVML = "NVIDIA NVML reference, fabric definitions; nvidia-smi -q"
IMEX = "NVIDIA IMEX guide"
VALIDATION = "NVIDIA Health Validation, check catalog"
XID = "NVIDIA Xid catalog; " + VALIDATION
CDI = "NVIDIA Container Toolkit, CDI support; Docker Engine 25 release notes"
GRACE = "NVIDIA Grace performance tuning guide"
UCX = "UCX, cuda_ipc transport; NCCL, MNNVL"
SAFETENSORS = "safetensors format"
DOCKER = "docker run reference"


class Level(StrEnum):
    """What came of a check on a host. Accepted: it failed, and the operator said why that is all right."""

    FAIL = "fail"
    WARN = "warn"
    ACCEPTED = "accepted"
    INFO = "info"
    PASS = "pass"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold on the hosts. The source says where that is known from."""

    id: str
    sentence: str
    reason: str
    source: str
    remedy: str
    level: Level = Level.FAIL
    """What it is when it does not hold, or when it cannot be read whether it does."""


# --- every host -----------------------------------------------------------------------------------

ANSWERS = Check(
    "answers",
    "The host lets itself be looked at.",
    "Nothing can be said about a host that was not seen, and the fleet is deployed as a whole.",
    DESIGN,
    "Make `ansible -i INVENTORY HOST -m ansible.builtin.ping` work.",
)
ADDRESS = Check(
    "address",
    "The host has the address that the inventory gives it.",
    "Engines, side channels and front bind this address and advertise it.",
    "vLLM 0.32.0, VLLM_NIXL_SIDE_CHANNEL_HOST; vllm#27083",
    "Correct fleet_address (or ansible_host) of this host.",
)
ARCHITECTURE = Check(
    "architecture",
    "The host's architecture is that of the image.",
    "A container of another architecture does not start.",
    DESIGN,
    "Set fleet_image_variant to the hosts' architecture.",
)
SYSTEMD = Check(
    "systemd",
    "The host runs systemd.",
    "Engines, router and front are its units.",
    DESIGN,
    "Use a host with systemd.",
)
CLOCK = Check(
    "clock",
    "The host's clock is synchronized.",
    "Logs, metrics and certificates of hosts are compared by time.",
    DESIGN,
    "Run chrony or systemd-timesyncd on the host.",
    Level.WARN,
)
PORTS = Check(
    "ports",
    "The ports of the plan are free, or the fleet's own units have them.",
    "An engine whose port is taken dies while it starts.",
    "vllm#25059, vllm#28498",
    "Stop that program, or move the fleet's ports (fleet_http_port_base, fleet_side_channel_port_base, "
    "fleet_engine_port_base, fleet_front_port, fleet_control_port, fleet_router_slots, fleet_relay_port, fleet_registry_port).",
)

NFTABLES = Check(
    "nftables",
    "The kernel takes nftables rules, where the fleet's ports are fenced.",
    "Without the fence engines in dev mode do not start, and others are open to whoever reaches their host.",
    "nft(8)",
    "Load the kernel's module nf_tables, or set fleet_fence: false where a firewall of yours does the same.",
)

# --- hosts with engines ---------------------------------------------------------------------------

DOCKER_ENGINE = Check(
    "docker",
    "A docker engine answers; for GPUs it is version 25 or newer.",
    "Engines run in it, and GPUs are given to containers as CDI devices.",
    CDI,
    "Install Docker 25 or newer, and start it.",
)
IMAGE_SPACE = Check(
    "image-space",
    "Docker's file system has room for the engine image, where it is not there yet.",
    "A pull that runs out of space fails in the middle.",
    "sizes of the images of this project",
    "Free space on the file system of docker's data, or move it (data-root).",
)
SHARED_MEMORY = Check(
    "shared-memory",
    "The engines' shared memory fits into the host's memory.",
    "It is memory like any other; where there is none left, an engine is killed.",
    DOCKER,
    "Lower fleet_shm_size.",
)
OPEN_FILES = Check(
    "open-files",
    "Docker may open at least 65536 files.",
    "Containers inherit the limit; an engine has a socket for each request and each peer.",
    DOCKER,
    "Set LimitNOFILE=infinity for docker.service.",
    Level.WARN,
)
MODEL_FILES = Check(
    "model-files",
    "The model is complete: config.json, and every file of weights with the size that its header gives.",
    "An engine finds a missing or truncated file after minutes of loading.",
    f"{SAFETENSORS}; sglang#14754",
    "Copy the model to the host again.",
)
MODEL_SPACE = Check(
    "model-space",
    "The model's file system has room for what is missing of its weights.",
    "Copying them would fail in the middle.",
    SAFETENSORS,
    "Free space on the file system of fleet_model.path.",
)
MODEL_HASH = Check(
    "model-hash",
    "The model's files were hashed.",
    "Hosts are compared by the hash.",
    DESIGN,
    "Make the model's files readable; with host_check_hash: full, allow more time (host_check_hash_seconds).",
    Level.WARN,
)

# --- GPUs and their driver ------------------------------------------------------------------------

DRIVER = Check(
    "driver",
    "The NVIDIA driver is 580.65.06 or newer.",
    "The image's CUDA 13 does not start with an older one.",
    CUDA,
    "Install driver R580 or newer and reboot.",
)
OPEN_MODULES = Check(
    "open-modules",
    "The driver's open kernel modules are loaded.",
    "Blackwell GPUs work with no others.",
    "NVIDIA open-gpu-kernel-modules, supported GPUs",
    "Install the open kernel modules (nvidia-open) of the same driver.",
)
DRIVER_LOADED = Check(
    "driver-loaded",
    "The loaded driver is the installed one.",
    "After an update without a reboot nvidia-smi and CUDA refuse to work with the old modules.",
    "NVIDIA driver, NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    "Reboot the host.",
)
GPU_COUNT = Check(
    "gpu-count",
    "The host has as many GPUs as fleet_gpus_per_host says.",
    "A GPU that fell off the bus is missing here first; the plan gives GPUs out by number.",
    VALIDATION,
    "Look for Xid 79 in the kernel's log and service the host, or correct fleet_gpus_per_host.",
)
GPU_MODEL = Check(
    "gpu-model",
    "All GPUs of the host are of one model.",
    "Ranks of an engine divide the work evenly.",
    DESIGN,
    "Use hosts with equal GPUs.",
)
MIG = Check(
    "mig",
    "MIG is off.",
    "A GPU that is divided is no device nvidia.com/gpu=N, and has no NVLink.",
    "NVIDIA MIG user guide",
    "Switch it off: nvidia-smi -i N -mig 0.",
)
PERSISTENCE = Check(
    "persistence",
    "Persistence mode is on.",
    "Without it the driver is unloaded with its last user, and each start initializes the GPUs again.",
    "NVIDIA driver persistence guide",
    "Start nvidia-persistenced.",
    Level.WARN,
)
GPU_MEMORY = Check(
    "gpu-memory",
    "No GPU has memory in use that belongs to no process.",
    "It is still mapped by engines on other hosts (or GPUs) whose peer here has ended, so an engine here would not find "
    "the memory it needs.",
    f"{MEASURED}; vllm#58063",
    "Restart the decodes that this host's prefills served (and prefills of its decodes). If it stays, reset the GPU.",
)
GPU_PROCESSES = Check(
    "gpu-processes",
    "Nobody but the fleet's engines uses the GPUs that the plan gives away.",
    "vLLM refuses to start without the memory it was promised.",
    "vllm#42017",
    "End that process, or take the GPU out of the plan.",
)
ECC = Check(
    "ecc",
    "No GPU has uncorrectable memory errors or waits for a repair.",
    "It works until it touches the broken row, and then kills the engine, or counts wrong where ECC is off.",
    "NVIDIA GPU memory error management",
    "Reset the GPU or reboot the host; if the error comes back, have the GPU replaced.",
)
GPU_RECOVERY = Check(
    "gpu-recovery",
    "No GPU asks for a recovery.",
    "The driver says what it needs: a reset, a reboot, or draining.",
    "nvidia-smi -q, GPU Recovery Action",
    "Do what it asks for.",
)
XID_ERRORS = Check(
    "xid",
    "The kernel's log since the last boot holds no Xid of failing hardware.",
    "The GPU, its memory or its NVLink failed, and will again.",
    XID,
    "Look the number up in NVIDIA's Xid catalog, reset the GPU or reboot; accept it where that was done without a reboot.",
)
NUMA = Check(
    "numa",
    "GPU memory does not show as NUMA nodes without CPUs.",
    "The kernel may put ordinary memory there; with CDMM (NVreg_CoherentGPUMemoryMode=driver) the driver keeps it.",
    "NVIDIA driver R580, CDMM; vllm#38635",
    "Set the option NVreg_CoherentGPUMemoryMode=driver of the module nvidia and reboot.",
    Level.WARN,
)
NUMA_BALANCING = Check(
    "numa-balancing",
    "Automatic NUMA balancing is off on hosts with coherent GPU memory.",
    "It unmaps pages to see who touches them, and stalls GPUs that do.",
    GRACE,
    "Set kernel.numa_balancing=0.",
    Level.WARN,
)
PAGE_SIZE = Check(
    "page-size",
    "The kernel of a Grace host has pages of 64 KiB.",
    "NVIDIA's kernels for Grace have them; with 4 KiB the same memory needs sixteen times the page table entries.",
    GRACE,
    "Install the 64k kernel of the distribution.",
    Level.WARN,
)

# --- NVLink and IMEX ------------------------------------------------------------------------------

FABRIC_STATE = Check(
    "fabric-state",
    "Every GPU has joined the NVLink fabric.",
    "Without it CUDA calls fail or hang on NVSwitch systems.",
    NVML,
    "Check the fabric manager (on a GB200 rack it runs on the switch trays, and they start before the compute trays); "
    "then reboot the host.",
)
FABRIC_HEALTH = Check(
    "fabric-health",
    "The NVLink fabric of every GPU is healthy.",
    "With degraded routes NCCL has crashed from 44 ranks on, and bandwidth is lost.",
    f"{NVML}; nccl#2186",
    "Service the rack's NVLink switches and cables.",
)
FABRIC_CLUSTER = Check(
    "fabric-cluster",
    "Every GPU belongs to a multi-node NVLink domain.",
    "A ClusterUUID of zeros means that NVLink ends at this host, so KV for other hosts would take TCP.",
    NVML,
    "Use hosts of one NVL72 rack, or set fleet_kv_transport to rdma or tcp.",
)
NVLINKS = Check(
    "nvlinks",
    "All NVLinks of every GPU are up.",
    "A GPU with a link down is slower than its peers, which all wait for it.",
    VALIDATION,
    "Reset the GPU; if the link stays down, have host or cable serviced.",
)
NVLINK_PEERS = Check(
    "nvlink-peers",
    "The GPUs of a host reach each other over NVLink.",
    "Tensor parallelism and KV between engines of one host would take PCIe.",
    "nvidia-smi topo -m",
    "Use hosts whose GPUs are connected by NVLink, or set fleet_kv_transport to rdma or tcp.",
)
IMEX_SERVICE = Check(
    "imex-service",
    "nvidia-imex runs.",
    "It carries out the exports of GPU memory between hosts.",
    IMEX,
    "systemctl enable --now nvidia-imex",
)
IMEX_VERSION = Check(
    "imex-version",
    "nvidia-imex is of the driver's version.",
    "It ends when it finds a driver it does not fit.",
    IMEX,
    "Install the package nvidia-imex of the driver's version and restart it while no engine runs.",
)
IMEX_NODES = Check(
    "imex-nodes",
    "The host is in its own IMEX node list.",
    "The service finds its own place in the list by its addresses.",
    IMEX,
    "Write every host of the NVLink domain into /etc/nvidia-imex/nodes_config.cfg and restart nvidia-imex while no engine "
    "runs.",
)
IMEX_DOMAIN = Check(
    "imex-domain",
    "The IMEX domain is UP, and all of its nodes are connected.",
    "Imports of another host's memory fail, and KV takes TCP.",
    f"{IMEX}; dra-driver#1417",
    "See `nvidia-imex-ctl -N` and `journalctl -u nvidia-imex`; a node whose daemon hangs needs a reboot.",
)
IMEX_CHANNEL = Check(
    "imex-channel",
    "The IMEX channel device is there, with the major number of /proc/devices.",
    "Without it KV fell from 62 to 0.4 GB/s, even inside one host, and every answer was still right.",
    f"{MEASURED}; {IMEX}",
    "Set the option NVreg_CreateImexChannel0=1 of the module nvidia, or create the channel with "
    "`nvidia-modprobe -c 0` at each boot.",
)

# --- containers -----------------------------------------------------------------------------------

CDI_DEVICES = Check(
    "cdi-devices",
    "CDI knows every GPU that the plan gives to containers.",
    "docker refuses to start a container with a device that CDI does not know.",
    CDI,
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
)
CDI_FRESH = Check(
    "cdi-fresh",
    "The CDI specification is of the loaded driver.",
    "It names the driver's libraries by version; after an update they are gone, or those of another version.",
    CDI,
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, after each update of the driver (the unit nvidia-cdi-refresh "
    "of the toolkit from 1.18 on does it).",
)
TOOLKIT = Check(
    "toolkit",
    "The NVIDIA Container Toolkit is 1.18 or newer.",
    "From then on it keeps the CDI specification fresh by itself.",
    CDI,
    "Update nvidia-container-toolkit.",
    Level.WARN,
)
CONTAINER_GPUS = Check(
    "container-gpus",
    "CUDA sees the planned GPUs inside a container.",
    "Devices, libraries and permissions are right only if they are so there.",
    CDI,
    "Check the CDI specification, and `docker run --device nvidia.com/gpu=0 ...` by hand.",
)
CONTAINER_DEVICES = Check(
    "container-devices",
    "The device nodes that engines need are there inside a container.",
    "Without the IMEX channel KV silently takes TCP; without /dev/infiniband there is no RDMA.",
    f"{MEASURED}; nccl#1925",
    "Create the device on the host; docker copies it into containers when they start.",
)
CONTAINER_MEMLOCK = Check(
    "container-memlock",
    "Memory may be locked without limit inside a container.",
    "UCX registers memory with devices; with a limit ibv_reg_mr and ibv_create_cq fail.",
    "ucx#8229, ucx#6264",
    "Set LimitMEMLOCK=infinity for docker.service.",
)
CONTAINER_SHM = Check(
    "container-shm",
    "/dev/shm inside a container has the planned size.",
    "vLLM and NCCL keep buffers in it.",
    DOCKER,
    "Check docker's settings; the size is fleet_shm_size.",
)

# --- RDMA -----------------------------------------------------------------------------------------

RDMA_PORTS = Check(
    "rdma-ports",
    "An RDMA device is up: a port that is ACTIVE and LinkUp.",
    "UCX would fall back to TCP.",
    "Linux, /sys/class/infiniband",
    "See `rdma link` and `ibstat`; check cable, switch and subnet manager.",
)
RDMA_DEVICES = Check(
    "rdma-devices",
    "The device nodes of RDMA are there: rdma_cm and a uverbs device.",
    "The engines' containers get them.",
    LINUX,
    "Load the modules rdma_ucm and ib_uverbs.",
)

# --- between hosts --------------------------------------------------------------------------------

SAME_FABRIC = Check(
    "same-fabric",
    "Hosts whose GPUs reach each other's memory are in one NVLink domain and partition.",
    "Between racks or partitions there is no NVLink: NCCL aborts, and KV takes TCP.",
    f"{NVML}; nccl#1769",
    "Put hosts of one ClusterUUID and CliqueId into the fleet, or have the NVLink partition changed.",
)
SAME_IMEX_NODES = Check(
    "same-imex-nodes",
    "These hosts have one IMEX node list, and every host is in it.",
    "Nodes whose lists differ do not talk to each other.",
    IMEX,
    "Copy one /etc/nvidia-imex/nodes_config.cfg to all of them and restart nvidia-imex while no engine runs.",
)
SAME_DRIVER = Check(
    "same-driver",
    "All hosts with GPUs have one driver version.",
    "IMEX refuses nodes of other versions. Where no GPU memory is shared between hosts, it is a warning.",
    IMEX,
    "Install one driver version on all hosts.",
)
SAME_GPU = Check(
    "same-gpu",
    "All hosts with engines have GPUs of one model.",
    "The slowest decides how fast an engine over several hosts is, and a plan has one memory size for all.",
    DESIGN,
    "Use equal hosts.",
    Level.WARN,
)
SAME_IMAGE = Check(
    "same-image",
    "The engines that run now run one image.",
    "Prefill and decode of different vLLM versions refuse each other's KV.",
    "vLLM 0.32.0, NIXL connector, handshake checks",
    "Run playbooks/site.yml.",
    Level.WARN,
)
SAME_MODEL = Check(
    "same-model",
    "All hosts have the same model files.",
    "Prefill and decode with different weights give wrong answers that look right.",
    DESIGN,
    "Copy the model to the hosts that differ again.",
)
SAME_CLOCK = Check(
    "same-clock",
    "The hosts' clocks agree to 10 s.",
    "Logs, metrics and certificates of hosts are compared by time.",
    DESIGN,
    "Run chrony or systemd-timesyncd on all hosts.",
    Level.WARN,
)
REACHABLE = Check(
    "reachable",
    "Every listener of the plan is reached from every host that will dial it.",
    "A firewall between two hosts shows only at the first request, as a handshake that hangs.",
    DESIGN,
    "Open the port between the two hosts; check routes and fleet_address. Where the fence refuses the address that a host "
    "dials from, add it to fleet_controllers.",
)

CHECKS: tuple[Check, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Check))
BY_ID: dict[str, Check] = {check.id: check for check in CHECKS}
