"""What an engine was planned as, beside what is seen of the running one. Nothing here asks anybody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.fleet_metrics import Sample, label

COMMAND_LINE = "its command line"
DEFAULT = "vLLM's default"

# Arguments for which the plan has a word of its own.
FIELDS = {"served_model_name": "served_name", "kv_transfer_config.kv_role": "kv_role"}
SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "dpl": "data_parallel_size_local",
    "dpr": "data_parallel_start_rank",
    "dpn": "data_parallel_rank",
    "dpa": "data_parallel_address",
    "dpp": "data_parallel_rpc_port",
    "dpb": "data_parallel_backend",
    "n": "nnodes",
    "r": "node_rank",
    "ep": "enable_expert_parallel",
}
DEFAULTS: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "headless": False,
}
# Unset, these follow from the model; an engine's arguments then say nothing about them.
FROM_THE_MODEL = ("max_model_len", "block_size", "kv_cache_dtype")
# Where `vllm_config` of /server_info?config_format=json has them (read in vLLM 0.32.0, and asked of it).
SERVER_INFO = {
    "model": ("model_config", "model"),
    "served_name": ("model_config", "served_model_name"),
    "max_model_len": ("model_config", "max_model_len"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "data_parallel_size": ("parallel_config", "data_parallel_size"),
    "data_parallel_size_local": ("parallel_config", "data_parallel_size_local"),
    "nnodes": ("parallel_config", "nnodes"),
    "enable_expert_parallel": ("parallel_config", "enable_expert_parallel"),
    "kv_role": ("kv_transfer_config", "kv_role"),
    "block_size": ("cache_config", "block_size"),
    "kv_cache_dtype": ("cache_config", "cache_dtype"),
}
CACHE_CONFIG = "vllm:cache_config_info"
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)($|_)", re.IGNORECASE
)


class IdentityError(Exception):
    """Something from which nothing can be read about an engine; the text says what it is."""


@dataclass(frozen=True)
class Sighting:
    """A value of a running engine, and who says so."""

    name: str
    value: Any
    source: str


def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments in the plan's words; `a: {b: 1}` and `a.b: 1` alike become `{"a.b": 1}`."""
    result: dict[str, Any] = {}
    for key, value in arguments.items():
        argument, dot, inner = key.partition(".")
        name = argument.replace("-", "_") + dot + inner
        if isinstance(value, Mapping) and value:
            result.update(flat({f"{name}.{part}": held for part, held in value.items()}))
        else:
            result[FIELDS.get(name, name)] = value
    return result


def command_line(argv: list[str]) -> dict[str, Any]:
    """The arguments of a `vllm serve`, flat."""
    options: list[tuple[str, list[Any]]] = [("model", [])]
    for word in argv[argv.index("serve") + 1 :]:
        if word.startswith("-") and not word[1:2].isdigit():
            name, given, value = word.lstrip("-").partition("=")
            options.append((SHORT.get(name, name), [_decoded(value)] if given else []))
        else:
            options[-1][1].append(_decoded(word))
    arguments: dict[str, Any] = {}
    for name, values in options:
        if values:
            arguments[name] = values[0] if len(values) == 1 else values
        elif name.startswith("no-"):
            arguments[name[len("no-") :]] = False
        elif name != "model":
            arguments[name] = True
    return flat(arguments)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def config_file(text: str) -> dict[str, Any]:
    """The arguments in a file as the fleet writes it, one `name: JSON value` a line, flat."""
    arguments = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, value = line.partition(":")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            raise IdentityError(f"line {number} is not `name: JSON value`, as the fleet writes it") from None
    return flat(arguments)


def from_arguments(line: Mapping[str, Any], file: Mapping[str, Any], file_name: str) -> dict[str, Sighting]:
    """What a process was started with, by name; the command line wins over the file, as in vLLM."""
    seen = {name: Sighting(name, value, file_name) for name, value in file.items()}
    seen.update({name: Sighting(name, value, COMMAND_LINE) for name, value in line.items()})
    return seen


def parallel_sizes(seen: Mapping[str, Sighting]) -> list[Sighting]:
    """The local data-parallel size and the number of hosts, which arguments may leave to vLLM to derive.

    Data parallelism over hosts goes without `nnodes`: the ranks of each host tell how many hosts there are.
    """
    sizes = {name: _number(seen.get(name)) for name in ("data_parallel_size", "nnodes")}
    per_host = seen.get("data_parallel_size_local") or Sighting(
        "data_parallel_size_local", max(sizes["data_parallel_size"] // sizes["nnodes"], 1), DEFAULT
    )
    if "nnodes" in seen and sizes["nnodes"] > 1:
        return [per_host, seen["nnodes"]]
    hosts = sizes["data_parallel_size"] // _number(per_host)
    return [per_host, Sighting("nnodes", max(hosts, 1), per_host.source)]


def _number(sighting: Sighting | None) -> int:
    return sighting.value if sighting and isinstance(sighting.value, int) and sighting.value > 0 else 1


def unset(names: Iterable[str], seen: Mapping[str, Sighting]) -> list[Sighting]:
    """What a process has where it was started without an argument."""
    return [
        Sighting(name, DEFAULTS.get(name), DEFAULT if name in DEFAULTS else "its arguments")
        for name in names
        if name not in seen
    ]


def from_models(answer: Mapping[str, Any], served_name: str | None) -> list[Sighting]:
    """What /v1/models says: the names, and the path and the length behind the one that is looked for."""
    data = answer.get("data")
    models = [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []
    if not models:
        raise IdentityError("it lists no model")
    source = "/v1/models"
    model = next((model for model in models if model.get("id") == served_name), models[0])
    return [
        Sighting("served_name", [model.get("id") for model in models], source),
        *(
            Sighting(name, model[key], source)
            for name, key in (("model", "root"), ("max_model_len", "max_model_len"))
            if model.get(key) is not None
        ),
    ]


def from_server_info(answer: Mapping[str, Any]) -> list[Sighting]:
    """What /server_info?config_format=json says; a field that this vLLM does not have is left out."""
    config = answer.get("vllm_config")
    if not isinstance(config, dict) or not isinstance(config.get("parallel_config"), dict):
        raise IdentityError("it has no vllm_config.parallel_config")
    source = "/server_info"
    seen = {}
    for name, (section, key) in SERVER_INFO.items():
        if section not in config:
            continue
        values = config[section]
        if isinstance(values, dict) and key in values:
            seen[name] = Sighting(name, values[key], source)
        elif values is None:  # an engine without KV transfer
            seen[name] = Sighting(name, None, source)
    if "nnodes" in seen and "data_parallel_size_local" in seen:
        seen.update({sighting.name: sighting for sighting in parallel_sizes(seen)})
    return list(seen.values())


def from_metrics(samples: list[Sample]) -> list[Sighting]:
    """What the /metrics of any engine say: its data-parallel ranks, its cache, and whether NIXL is there."""
    ranks = {sample.labels.get("engine") for sample in samples if sample.name == CACHE_CONFIG}
    if not ranks:
        raise IdentityError(f"it has no {CACHE_CONFIG}")
    source = "/metrics"
    seen = [Sighting("data_parallel_size", len(ranks), source)]
    for name, key in (("block_size", "block_size"), ("kv_cache_dtype", "cache_dtype")):
        value = label(samples, CACHE_CONFIG, key)
        if value is not None:
            seen.append(Sighting(name, value, source))
    if not any(sample.name.startswith("vllm:nixl_") for sample in samples):
        seen.append(Sighting("kv_role", None, "/metrics, which has none of NIXL's"))
    return seen


def compare(planned: Mapping[str, Any], sightings: Iterable[Sighting]) -> list[str]:
    """One sentence for each value that is not the planned one, with both sides and who says so."""
    sources: dict[str, list[str]] = {}
    for sighting in sightings:
        name, seen = sighting.name, sighting.value
        # By their text, because environments and metrics have nothing else.
        if name not in planned or show(planned[name]) == show(seen):
            continue
        # An engine may be served under more names than the planned one.
        if name == "served_name" and isinstance(seen, list) and planned[name] in seen:
            continue
        sides = ("(hidden)", "(hidden)") if secret(name) else (show(planned[name]), show(seen))
        what = f"{name}: the plan says {sides[0]}, the running engine has {sides[1]}"
        sources.setdefault(what, []).append(sighting.source)
    return [f"{what} (from {' and '.join(said)})" for what, said in sources.items()]


def unplanned(planned: Mapping[str, Any], seen: Mapping[str, Sighting]) -> list[str]:
    """One sentence for each argument that a process was started with and the plan does not know."""
    return [
        f"{name}: the plan does not set it, the running engine has "
        f"{'(hidden)' if secret(name) else show(sighting.value)} (from {sighting.source})"
        for name, sighting in seen.items()
        if name not in planned
    ]


def show(value: Any) -> str:
    if value is None:
        return "nothing"
    return value if isinstance(value, str) and value else json.dumps(value, sort_keys=True)


def secret(name: str) -> bool:
    return any(SECRET_NAME.search(part) for part in name.split("."))
