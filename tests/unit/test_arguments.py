"""Engine arguments against the records, and against what vLLM's own parsers said (golden/arguments-VERSION.json)."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from argument_verdicts import asked
from by_path import load
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, field_validator, model_validator
from pydantic.dataclasses import dataclass

from vllm_fleet.arguments import (
    RECORDS,
    Finding,
    canonical_name,
    check_argument,
    config_file,
    record,
    records,
)

ROOT = Path(__file__).parents[2]
OLD, NEW = record("0.32.0"), record("0.33.0")


def verdicts(version: str) -> dict[str, str]:
    golden = json.loads((Path(__file__).parent / "golden" / f"arguments-{version}.json").read_text())
    return {name: letters for letters, names in golden.items() for name in names}


def refused(finding: Finding | None) -> bool:
    return finding is not None and finding.kind in ("unknown", "value")


# --- Against vLLM's own parser ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", records())
def test_nothing_is_refused_that_vllm_takes(version):
    known, said = record(version), verdicts(version)
    assert asked(known).keys() == said.keys()
    wrong = [
        (name, value)
        for name, values in asked(known).items()
        for value, letter in zip(values, said[name], strict=True)
        if letter == "y" and refused(check_argument(known, name, value))
    ]
    assert not wrong


@pytest.mark.parametrize("version", records())
def test_what_vllm_refuses_or_drops_is_refused(version):
    """Everything but what only vLLM can know: rules of its configurations, and 8k inside JSON that is text."""
    known, said = record(version), verdicts(version)
    missed = [
        (name, value)
        for name, argument in known.arguments.items()
        for value, letter in zip(asked(known)[name], said[name], strict=True)
        if letter != "y"
        and not refused(check_argument(known, name, value))
        and not (value == [] and argument.nargs == "+")  # dropped, and so the default
        and (name, value) != ("mm_processor_device", "cuda")  # the parser with a GPU takes it
    ]
    assert all(known.arguments[name].kind in ("config", "lora") for name, _ in missed)
    assert all(value == '{"a": 8k}' or isinstance(value, dict) or "{" in value for _, value in missed)
    strangers = [name for name, letters in said.items() if name.endswith(".no_such_key") and letters]
    assert len(strangers) > 15
    for name in strangers:
        assert check_argument(known, name, 1).what.endswith("has no key no_such_key")


@pytest.mark.parametrize("version", records())
def test_what_would_become_the_name_of_the_model_is_refused(version):
    known, said = record(version), verdicts(version)
    words = [
        (name, value)
        for name, values in asked(known).items()
        for value, letter in zip(values, said[name], strict=True)
        if letter == "m"
    ]
    assert ("enable_prefix_caching", "true") in words
    assert ("max_num_seqs", ["8", "16"]) in words
    assert all(check_argument(known, name, value) for name, value in words)


# --- The records --------------------------------------------------------------------------------------------------


def test_the_versions_on_record():
    assert records() == ("0.32.0", "0.33.0")
    assert record("0.32.0+cpu") == OLD
    assert record("9.9.9") is None
    assert record("../arguments/0.32.0") is None
    assert OLD.made["package"] == "vllm 0.32.0+cpu"
    assert NEW.made["requires"] == ["torch==2.14.0"]
    assert (len(OLD.arguments), len(NEW.arguments)) == (316, 320)


def test_versions_are_in_order(monkeypatch, tmp_path):
    for name in ("0.10.0.json", "0.9.1.json", "0.9.0.json", "README.md"):
        (tmp_path / name).touch()
    monkeypatch.setattr("vllm_fleet.arguments.RECORDS", tmp_path)
    assert records() == ("0.9.0", "0.9.1", "0.10.0")


def test_what_is_recorded_of_an_argument():
    length = OLD.arguments["max_model_len"]
    assert (length.kind, length.default, length.choices) == ("int_or_auto", None, None)
    assert OLD.arguments["max_lora_rank"].choices == [1, 8, 16, 32, 64, 128, 256, 320, 512]
    assert OLD.arguments["mm_processor_device"].choices == ["auto", "cpu", "cuda"]
    assert OLD.arguments["quantization"].short == ["q"]
    assert OLD.arguments["enable_prefix_caching"].off == ["no_enable_prefix_caching"]
    assert NEW.arguments["enable_prefix_caching"].off == [
        "no_enable_prefix_caching",
        "disable_prefix_caching",
    ]
    assert OLD.arguments["eplb_config"].default_text == "EPLBConfig()"
    assert OLD.arguments["kv_transfer_config"].keys["kv_port"] == ["int"]
    assert [name for name, argument in OLD.arguments.items() if argument.kind == "any"] == ["device_ids"]


def test_the_acceptance_test_of_the_image_knows_the_records():
    tree = ast.parse((ROOT / "images/vllm-nixl/rootfs/usr/local/bin/vllm-acceptance").read_text())
    (known,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARGUMENTS"
    )
    digests = {}
    for version in records():
        arguments = json.loads((RECORDS / f"{version}.json").read_text())["arguments"]
        digests[version] = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()
    assert known == digests


# --- Findings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        ("max_num_sequences", 8, ("unknown", "vLLM 0.32.0 has no argument max_num_sequences", "Write max_num_seqs.")),
        ("max-num-seq", 8, ("abbreviated", "max_num_seq is only the beginning of max_num_seqs", "Write max_num_seqs.")),
        ("disable-prefix-caching", True, ("unknown", "vLLM 0.32.0 has no argument disable_prefix_caching", "Write enable_prefix_caching.")),
        ("nonsense", 8, ("unknown", "vLLM 0.32.0 has no argument nonsense", None)),
        ("q", "awq", ("unknown", "-q is for a command line, and vLLM reads these arguments from a file", "Write quantization.")),
        ("max_num_seqs", "many", ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("max_num_seqs", True, ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("max_num_seqs", False, ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("max_num_seqs", 8.0, ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("max_num_seqs", [8, 16], ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("max_model_len", "32x", ("value", "in vLLM 0.32.0 max_model_len takes a whole number, one with a unit such as 32k, -1 or auto", None)),
        ("enable_lora", "yes", ("value", "in vLLM 0.32.0 enable_lora takes true or false", None)),
        ("cudagraph_capture_sizes", ["a"], ("value", "in vLLM 0.32.0 cudagraph_capture_sizes takes a whole number, or a list of them", None)),
        ("runner", "generates", ("value", "in vLLM 0.32.0 runner takes one of auto, draft, generate, pooling", "Write generate.")),
        ("max_lora_rank", 7, ("value", "in vLLM 0.32.0 max_lora_rank takes one of 1, 8, 16, 32, 64, 128, 256, 320, 512", None)),
        ("allowed_origins", ["a", "b"], ("value", "in vLLM 0.32.0 allowed_origins takes a mapping, or JSON as text", "Write the list as JSON, in quotes.")),
        ("tokenizer", "-x", ("value", "in vLLM 0.32.0 tokenizer takes no text that begins with a dash", None)),
        ("eplb_config", {"windw_size": 8}, ("unknown", "in vLLM 0.32.0 eplb_config has no key windw_size", "Write window_size.")),
        ("eplb_config.windw_size", 8, ("unknown", "in vLLM 0.32.0 eplb_config has no key windw_size", "Write window_size.")),
        ("eplb-config.window-size", 8, ("unknown", "in vLLM 0.32.0 eplb_config has no key window-size", "Write window_size.")),
        ("eplb_config.window_size", "x", ("value", "in vLLM 0.32.0 eplb_config.window_size takes a whole number", None)),
        ("eplb_config.policy", "x", ("value", "in vLLM 0.32.0 eplb_config.policy takes one of default", None)),
        ("eplb_config", '{"policy": "x"}', ("value", "in vLLM 0.32.0 eplb_config.policy takes one of default", None)),
        ("kv_events_config.publisher", True, ("value", "in vLLM 0.32.0 kv_events_config.publisher takes one of null, zmq", None)),
        ("attention_config.hisparse_config.x", 1, ("unknown", "in vLLM 0.32.0 attention_config.hisparse_config has no key x", None)),
        ("attention_config.hisparse_config", 1, ("value", "in vLLM 0.32.0 attention_config.hisparse_config takes a mapping or null", None)),
        ("max_num_seqs.x", 1, ("value", "in vLLM 0.32.0 max_num_seqs takes a whole number", None)),
        ("log_config_file", "/x", ("deprecated", "vLLM 0.32.0 says: --log-config-file is deprecated and will be removed in v0.33.0", "Use --logging-config.pylogging_config_file instead.")),
        ("disable_cascade_attn", "x", ("value", "in vLLM 0.32.0 disable_cascade_attn takes true or false", None)),
    ],
)  # fmt: skip
def test_findings(name, value, finding):
    assert check_argument(OLD, name, value) == Finding(*finding)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "32k"), ("max_model_len", " 32k "), ("max_model_len", "Auto"), ("max_model_len", -1), ("max_num_batched_tokens", "1.5k"),
        ("enable_prefix_caching", False), ("no-enable-prefix-caching", True), ("aggregate_engine_logging", False),
        ("hf_token", True), ("moe_backend", "FlashInfer-TRTLLM"), ("speculative_config", {"method": "x"}),
        ("hf_overrides", {"a": {"b": 1}}), ("hf_overrides.a.b", 1), ("allowed_origins", '["*"]'),
        ("eplb_config.log_balancedness", True), ("eplb_config.window_size", "8k"), ("eplb_config", {"window_size": "8"}),
        ("eplb_config", '{"window_size": 8k}'), ("kv_events_config.replay_endpoint", None), ("middleware", ["a.b"]),
        ("lora_modules", ["a=/b", '{"name": "a", "path": "/b"}']), ("collect_detailed_traces", ["all", "model"]),
        ("compilation_config.cudagraph_mode", "FULL"), ("max_lora_rank", "8"), ("cudagraph_capture_sizes", 8),
        ("additional_config", "x"), ("tokenizer", 5), ("quantization", "None"),
    ],
)  # fmt: skip
def test_nothing_is_found(name, value):
    assert check_argument(OLD, name, value) is None


def test_a_new_version_judges_by_its_own_record():
    assert check_argument(NEW, "disable_prefix_caching", value=True) is None  # a spelling of 0.33
    assert check_argument(NEW, "mamba_cache_mode", "none").kind == "deprecated"
    assert check_argument(OLD, "mamba_cache_mode", "none") is None
    assert check_argument(OLD, "watchdog_config", {}).kind == "unknown"
    assert check_argument(NEW, "watchdog_config", {}) is None


def test_a_secret_is_not_quoted():
    for value in ("s3cret", ["s3cret", "s3cret"], {"s3cret": 1}, "-s3cret"):
        for name in ("hf_token", "max_num_seqs", "runner", "enable_lora"):
            assert "s3cret" not in str(check_argument(OLD, name, value))


@given(
    st.sampled_from([*OLD.arguments, "eplb_config.window_size", "kv_transfer_config.x.y", "foo", "max_"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8) | st.from_regex(r"\s*-?[0-9_]{1,4}(\.[0-9]+)?[kmgtKMGT]?\s*", fullmatch=True),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
)  # fmt: skip
def test_any_value_gets_an_answer(name, value):
    finding = check_argument(OLD, name, value)
    assert finding is None or "\n" not in finding.what
    written = config_file(OLD, {name: value})
    assert config_file(OLD, written) == written
    if not refused(finding):
        assert not any(refused(check_argument(OLD, *item)) for item in written.items())


def test_a_number_too_long_for_python_is_refused():
    assert check_argument(OLD, "max_num_seqs", "9" * 5000).kind == "value"
    assert check_argument(OLD, "max_model_len", "9" * 300 + "t").kind == "value"
    assert config_file(OLD, {"eplb_config.window_size": "9" * 5000}) == {
        "eplb_config": {"window_size": "9" * 5000}
    }


# --- What is written for vLLM to read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "written"),
    [
        ({"max-num-seqs": 8, "hf_overrides": {"a": False}}, {"max_num_seqs": 8, "hf_overrides": {"a": False}}),
        ({"enable_lora": True, "enable-prefix-caching": False}, {"enable_lora": True, "no_enable_prefix_caching": True}),
        ({"no_enable_lora": True}, {"no_enable_lora": True}),
        ({"no_enable_lora": False}, {"enable_lora": True}),
        ({"headless": False, "grpc": True}, {"grpc": True}),
        ({"max_num_seqs": False, "foo": False}, {"max_num_seqs": False, "foo": False}),  # refused anyway
        ({"eplb_config.log_balancedness": True}, {"eplb_config": {"log_balancedness": True}}),
        ({"eplb-config.window_size": "8k", "eplb_config": {"policy": "default"}}, {"eplb_config": {"policy": "default", "window_size": 8000}}),
        ({"eplb_config.window_size": "8K", "eplb_config": '{"policy": "default"}'}, {"eplb_config": {"policy": "default", "window_size": 8192}}),
        ({"hf_overrides.a.b": 1, "hf_overrides.a.c": '{"d": 2}', "hf_overrides.e": "x"}, {"hf_overrides": {"a": {"b": 1, "c": {"d": 2}}, "e": "x"}}),
        ({"hf_overrides.a": 1, "hf_overrides.a.b": 2}, {"hf_overrides": {"a": {"b": 2}}}),
        ({"hf_overrides": {"a": {"b": 1}}, "hf_overrides.a": {"c": 2}}, {"hf_overrides": {"a": {"b": 1, "c": 2}}}),
    ],
)  # fmt: skip
def test_the_file(args, written):
    before = json.dumps(args)
    assert config_file(OLD, args) == written
    assert json.dumps(args) == before


def test_the_file_of_a_version_with_another_spelling():
    assert config_file(NEW, {"enable_uvicorn_access_log": False}) == {"disable_uvicorn_access_log": True}
    assert config_file(NEW, {"disable_uvicorn_access_log": False}) == {"no_disable_uvicorn_access_log": True}


def test_the_file_without_a_record():
    args = {"enable-lora": False, "enable_eplb": True, "foo": 1, "eplb_config.use_async": False}
    assert config_file(None, args) == {
        "no_enable_lora": True, "enable_eplb": True, "foo": 1, "eplb_config": {"use_async": False},
    }  # fmt: skip


def test_canonical_names():
    assert canonical_name(NEW, "disable-expert-parallel") == "enable_expert_parallel"
    assert canonical_name(OLD, "no_enable_expert_parallel") == "enable_expert_parallel"
    assert canonical_name(OLD, "eplb-config.a-b.c") == "eplb_config"
    assert canonical_name(OLD, "no-such") == "no_such"
    assert canonical_name(None, "enable-lora") == "enable_lora"


# --- The script that makes a record -------------------------------------------------------------------------------

recorder = load(ROOT / "images/vllm-nixl/rootfs/usr/local/bin/vllm-arguments")


def optional_type(return_type: Any) -> Any:
    """As vLLM wraps what reads a word."""

    def _optional_type(word: str) -> Any:
        return return_type(word)

    return _optional_type


@dataclass(config=ConfigDict(extra="forbid"))
class Inner:
    on: bool = True


@dataclass(config=ConfigDict(extra="forbid"))
class Settings:
    count: int | None = None
    mode: Literal["a", "b"] | int = "a"
    names: list[str] = dataclasses.field(default_factory=list)
    inner: Inner | None = None
    cleaned: int = 0
    special: Annotated[int, "more"] = 0
    path: Path | None = None
    later: int = dataclasses.field(init=False, default=0)

    @field_validator("cleaned", mode="before")
    @classmethod
    def _clean(cls, value: Any) -> Any:
        return value


@dataclass(config=ConfigDict(extra="forbid"))
class Rewriting:
    count: int = 0

    @model_validator(mode="before")
    @classmethod
    def _rewrite(cls, value: Any) -> Any:
        return value


def parse_dataclass(word: str, cls: type = Settings) -> None:
    """As vLLM reads a configuration."""


class EnableDisable(argparse.BooleanOptionalAction):
    """As 0.33 adds --disable-x to --enable-x."""

    negative_option_strings = ("--no-enable-x", "--disable-x")

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self.option_strings = [*self.option_strings, "--disable-x"]


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    parser._deprecated = set()
    return parser


@pytest.mark.parametrize(
    ("words", "options", "entry"),
    [
        (["--x"], {"type": int, "default": 1}, {"kind": "int", "default": 1}),
        (["--x", "-x", "--also-x"], {}, {"kind": "text", "default": None, "aliases": ["also_x"], "short": ["x"]}),
        (["--x"], {"type": optional_type(float)}, {"kind": "float", "optional": True, "default": None}),
        (["--x"], {"type": json.loads, "default": {1}}, {"kind": "json", "default": [1]}),
        (["--x"], {"type": str, "nargs": "+", "choices": ["a"]}, {"kind": "text", "nargs": "+", "choices": ["a"], "default": None}),
        (["--x"], {"nargs": 2}, {"kind": "any", "default": None}),
        (["--x"], {"type": lambda word: word.lower().replace("-", "_")}, {"kind": "text", "normalized": True, "default": None}),
        (["--x"], {"type": lambda word: word.split(",")}, {"kind": "any", "default": None}),
        (["--x"], {"action": "store_true"}, {"kind": "switch", "default": False}),
        (["--x"], {"action": "store_true", "default": None}, {"kind": "any", "default": None}),
        (["--x"], {"action": argparse.BooleanOptionalAction, "default": None}, {"kind": "flag", "default": None, "off": ["no_x"]}),
        (["--enable-x"], {"action": EnableDisable}, {"kind": "flag", "default": None, "off": ["no_enable_x", "disable_x"]}),
        (["--x"], {"default": argparse.SUPPRESS}, {"kind": "text", "default": None, "default_text": "not set"}),
        (["--x"], {"default": Path()}, {"kind": "text", "default": None, "default_text": "PosixPath()"}),
        (["--x"], {"help": "Whether to allow deprecated things."}, {"kind": "text", "default": None}),
        (["--x"], {"help": "X.\n\nDeprecated: it\ngoes.\n\nMore."}, {"kind": "text", "default": None, "deprecated": "Deprecated: it goes."}),
        (["--x"], {"help": "--x is deprecated. Use y."}, {"kind": "text", "default": None, "deprecated": "--x is deprecated. Use y."}),
    ],
)  # fmt: skip
def test_an_argument_is_recorded(parser, words, options, entry):
    parser.add_argument(*words, **options)
    assert recorder.arguments_of(parser) == {words[0].lstrip("-").replace("-", "_"): entry}


def test_a_configuration_is_recorded(parser):
    parser.add_argument("--x", type=optional_type(parse_dataclass), default=Settings())
    assert recorder.arguments_of(parser)["x"] == {
        "kind": "config",
        "optional": True,
        "default": None,
        "default_text": "Settings()",
        "keys": {
            "cleaned": [],
            "count": ["int", "null"],
            "inner": [{"keys": {"on": ["bool"]}}, "null"],
            "mode": [{"choices": ["a", "b"]}, "int"],
            "names": ["list"],
            "path": [],
            "special": [],
        },
    }
    assert recorder.keys_of(Rewriting) is None


def test_choices_of_both_devices_are_recorded():
    cpu, cuda = (
        {"kind": "text", "choices": ["auto", "cpu"]},
        {"kind": "text", "choices": ["auto", "cpu", "cuda"]},
    )
    assert recorder.both(cpu, cuda) == cuda
    assert recorder.both(cpu, cpu) == cpu
    with pytest.raises(SystemExit, match="differ in more than choices"):
        recorder.both({"kind": "text"}, {"kind": "int"})
