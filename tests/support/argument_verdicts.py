"""What vLLM's own parser says to many values of every argument: the truth that tests/unit/test_arguments.py reads.

    PYTHONPATH=src VLLM_TARGET_DEVICE=cpu PYTHON tests/support/argument_verdicts.py

PYTHON is one that can import vllm. It prints JSON: {letters: names that have them}, a letter for each value that
`asked` tells. y: taken. n: refused. d: dropped, nothing of it reaches the parser. m: a word of it is taken for the
model to serve, which is the only argument without a name. Every value goes the way of a real one: config_file,
YAML, `vllm serve --config`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import yaml

from vllm_fleet.arguments import Record, config_file, record

VALUES = [
    True, False, 0, 1, -1, 8, 4096, 2.0, 2.5, -0.5, 1e-7,
    "", " ", "None", "null", "auto", "AUTO", "many", "8", " 8 ", "+8", "1_000", "2.5", "nan", "1e3",
    "32k", "2K", "1.5k", "1.5K", "5g5", "true", "-", "-1", "-x", "--x", "-x y", "-x.y z", "-0.5",
    "fp8", "FP8", "FLASHINFER-trtllm", "name=path", "a,b", "a=b,c",
    "{}", '{"a": 1}', '{"a": 8k}', "{a}", "[1]", '"text"', "1", '{"size": "8k"}',
    [], [1], ["a"], ["8", "16"], [1, 2], ["-x"], [True], [{"a": 1}], [""], ["auto", "a=b"],
    {}, {"a": 1}, {"a": {"b": [1, None]}}, {"backend": "nccl"},
]  # fmt: skip
KEY_VALUES = [
    True, False, 0, 1, 2, -1, 2.0, 2.5, None, "", "1", "2.5", "true", "x", "auto", "nccl",
    [], ["a"], [1], {}, {"a": 1}, {"a": "b"},
]  # fmt: skip
NAMES = [
    "max_num_sequences", "max_num", "max_model", "max-num-seqs", "gpu_memory", "kv_transfer_conf", "headles", "foo",
    "tp", "q", "sc", "asc", "dcp", "model_tag", "help", "version", "disable_hybrid", "no_max_num_seqs",
    "no_enable_lora", "no_enable_lor", "disable_lora", "enable_uvicorn_access_log", "eplb-config.window_size",
    "eplb_conf.window_size", "eplb_config.window-size", "max_num_seqs.x", "hf_overrides.a.b", "enable_lora.x",
]  # fmt: skip
NAME_VALUES = [8, "8", "x", True, False]


def asked(record: Record) -> dict[str, list]:
    """Names, and the values to try: arguments, keys of configurations, and names that may be none."""
    found = dict.fromkeys(NAMES, NAME_VALUES)
    for name, argument in record.arguments.items():
        known = [*(argument.choices or ()), argument.default]
        found[name] = [*VALUES, *(value for value in known if value is not None)]
        if argument.keys is not None:
            found |= {f"{name}.{key}": KEY_VALUES for key in (*argument.keys, "no_such_key")}
    return found


def main() -> None:
    """Ask the parser."""
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM's log goes to stdout
    from vllm import __version__  # noqa: PLC0415  the tests read VALUES without it
    from vllm.entrypoints.cli import serve  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = FlexibleArgumentParser()
    (command,) = serve.cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    known = record(__version__)
    around = {"model": "/m", "host": "::1", "port": 8000, "seed": 1, "uvicorn_log_level": "info"}

    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as devnull:
        path = Path(folder) / "engine.yaml"

        def verdict(name, value):
            written = config_file(known, {name: value})
            content = {key.replace("_", "-"): item for key, item in (around | written).items()}
            path.write_text(yaml.safe_dump(content))
            words = parser.load_config_file(str(path))
            try:
                with contextlib.redirect_stderr(devnull):
                    parsed = parser.parse_args(
                        ["serve", "--config", str(path), "--tensor-parallel-size", "1"]
                    )
            except (SystemExit, Exception):  # noqa: BLE001  however it refuses
                return "n"
            if parsed.model_tag is not None:
                return "m"
            return "y" if all(f"--{key.replace('_', '-')}" in words for key in written) else "d"

        found: dict[str, list[str]] = {}
        for name, values in asked(known).items():
            found.setdefault("".join(verdict(name, value) for value in values), []).append(name)
    lines = [f"{json.dumps(letters)}: {json.dumps(names)}" for letters, names in sorted(found.items())]
    print("{\n", ",\n".join(lines), "\n}", sep="", file=out)


if __name__ == "__main__":
    main()
