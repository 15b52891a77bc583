"""Acceptance test of the image `vllm-nixl`: the locked versions are there and import, and the CLI runs.

The arguments of `vllm serve` are those on record, by which an inventory is judged.
"""

import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess

ARGUMENTS = {  # vLLM's version: sha256 of the arguments in src/vllm_fleet/vllm_arguments/VERSION.json
    "0.32.0": "fdbe430fe434fc0271f3abb865afd37df1dafa96e6306d7067736295f9dc9a00",
    "0.33.0": "f5c5659db293411016c05a985d2686bb1365e5720577089cb3a9ce0b7cf3870f",
}

problems = []
for pin in os.environ["LOCK"].split():
    name, _, version = pin.partition("==")
    try:
        seen = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        seen = "nothing"
    if seen != version:
        problems.append(f"{name}: {version} is locked, {seen} is installed")

backends = [
    name for name in ("nixl-cu12", "nixl-cu13") if list(importlib.metadata.Distribution.discover(name=name))
]
if backends != ["nixl-cu13"]:
    problems.append(f"exactly nixl-cu13 is wanted as NIXL's backend, found {backends or 'none'}")

for module in ("torch", "nixl", "vllm", "vllm_router", "transformers"):
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  whatever a broken closure raises
        problems.append(f"import {module}: {type(error).__name__}: {error}")

for words in (["--version"], ["serve", "--help=all"]):
    done = subprocess.run(["vllm", *words], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        problems.append(f"vllm {' '.join(words)}: status {done.returncode}: {done.stderr[-2000:]}")
    elif words[0] == "serve" and "--kv-transfer-config" not in done.stdout:
        problems.append("vllm serve --help=all does not know --kv-transfer-config")

done = subprocess.run(["vllm-arguments"], capture_output=True, text=True, timeout=300, check=False)
if done.returncode:
    problems.append(f"vllm-arguments: status {done.returncode}: {done.stderr[-2000:]}")
else:
    record = json.loads(done.stdout)
    digest = hashlib.sha256(json.dumps(record["arguments"], sort_keys=True).encode()).hexdigest()
    if ARGUMENTS.get(record["version"]) != digest:
        problems.append(
            f"the arguments of vLLM {record['version']} have the digest {digest}, which is not on record; "
            "record them again, as docs/images.md says"
        )

if problems:
    raise SystemExit("the image is not accepted:\n  " + "\n  ".join(problems))
