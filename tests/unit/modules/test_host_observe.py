"""host_observe tells what is there: commands that end, fail, hang or are missing, files, and the model's files."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import host_observe
import pytest

HEADER = {
    "weight": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]},
    "__metadata__": {"format": "pt"},
}


def safetensors(path: Path, data: int = 100, header: object = HEADER) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"x" * data)


@pytest.fixture
def model(tmp_path):
    """A model with two files of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("not hashed")
    for name in ("a.safetensors", "b.safetensors"):
        safetensors(folder / name)
    weights = {"weight": "a.safetensors", "other": "b.safetensors"}
    index = {"metadata": {"total_size": 200}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def observe(run_module, tmp_path, monkeypatch):
    """Run the module with a few commands of its own."""
    monkeypatch.setattr(
        host_observe, "COMMANDS", {"sockets": ["true"], "docker": ["true"], "images": ["true"]}
    )
    cache = tmp_path / "state" / "model-hashes.json"

    def run(**params):
        params = {"accelerator": "cpu", "sent": 5.0, "cache": str(cache)} | params
        result = run_module("host_observe", **params)
        assert result["changed"] is False
        return result["observed"]

    run.cache = cache
    return run


# --- commands -------------------------------------------------------------------------------------


def test_a_command_is_told_as_it_ended():
    assert host_observe.run([sys.executable, "-c", "print('ü'); raise SystemExit(3)"], 5) == {
        "rc": 3, "stdout": "ü\n", "stderr": "",
    }  # fmt: skip


def test_a_command_that_hangs_is_ended():
    began = time.monotonic()
    assert host_observe.run(["sleep", "60"], 0.2)["timed_out"] is True
    assert time.monotonic() - began < 5


def test_a_command_that_is_not_there():
    assert host_observe.run(["no-such-program"], 5)["missing"] is True


def test_commands_speak_english(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert host_observe.run(["sh", "-c", "echo $LC_ALL $LANGUAGE"], 5)["stdout"] == "C C\n"


def test_a_long_output_is_told_as_cut(monkeypatch):
    monkeypatch.setattr(host_observe, "MAX_TEXT", 3)
    ran = host_observe.run(["echo", "abcdef"], 5)
    assert (ran["stdout"], ran["cut"]) == ("abc", True)


def test_the_kernels_log_without_a_match(tmp_path):
    fake = tmp_path / "journalctl"
    fake.write_text("#!/bin/sh\necho '-- No entries --'\nexit 1\n")
    fake.chmod(0o755)
    os.environ["PATH"], path = f"{tmp_path}:{os.environ['PATH']}", os.environ["PATH"]
    try:
        assert host_observe.run(["journalctl"], 5)["rc"] == 0
    finally:
        os.environ["PATH"] = path


def test_every_command_has_a_limit_and_changes_nothing():
    for argv in {**host_observe.COMMANDS, **host_observe.OF_GPUS}.values():
        assert argv[0] in {
            "uname", "getconf", "systemctl", "ip", "ss", "timedatectl", "docker", "nvidia-smi", "journalctl", "nvidia-imex",
            "nvidia-imex-ctl", "nvidia-ctk", "nft",
        }  # fmt: skip
        if argv[0] in ("systemctl", "docker", "timedatectl"):
            assert argv[1] in ("show", "--version", "info", "ps", "image")


def test_what_is_seen_of_this_machine(observe):
    seen = observe(folders=["/nowhere/below"], devices=["/dev/null", "/dev/absent", "/etc/passwd"])
    assert seen["schema"] == 1
    assert "MemTotal" in seen["files"]["/proc/meminfo"]
    assert seen["disks"]["/nowhere/below"]["total"] > 0
    assert seen["devices"]["/dev/null"]["major"] == 1
    assert seen["devices"]["/dev/absent"] is seen["devices"]["/etc/passwd"] is None
    assert seen["clock"]["sent"] == 5.0
    assert abs(seen["clock"]["host"] - time.time()) < 30
    assert seen["model"] is seen["container"] is None


def test_whose_a_listening_process_is(observe, monkeypatch):
    pid = os.getpid()
    monkeypatch.setitem(
        host_observe.COMMANDS,
        "sockets",
        ["echo", f'users:(("python3",pid={pid},fd=3),("gone",pid=999999999,fd=1))'],
    )
    assert list(observe()["processes"]) == [str(pid)]


# --- the model ------------------------------------------------------------------------------------


def test_a_complete_model(observe, model):
    seen = observe(model=str(model))["model"]
    size = (model / "a.safetensors").stat().st_size
    assert seen["files"]["a.safetensors"] == {"size": size, "implied": size}
    assert seen["index"] == {"files": ["a.safetensors", "b.safetensors"], "total_size": 200}
    assert "README.md" not in seen["files"]
    assert len(seen["hash"]) == 64


def test_a_truncated_file_of_weights(observe, model):
    with (model / "b.safetensors").open("r+b") as file:
        file.truncate((model / "b.safetensors").stat().st_size - 1)
    file = observe(model=str(model))["model"]["files"]["b.safetensors"]
    assert file["implied"] == file["size"] + 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 7,
        b"\xff" * 50,
        (10).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
    ],
)
def test_a_file_of_weights_that_is_none(observe, model, content):
    (model / "b.safetensors").write_bytes(content)
    seen = observe(model=str(model))["model"]
    assert "error" in seen["files"]["b.safetensors"]
    assert seen["hash"] is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 1, "b": "x"}}']
)
def test_an_index_that_is_none(observe, model, content):
    (model / "model.safetensors.index.json").write_text(content)
    assert "error" in observe(model=str(model))["model"]["index"]


def test_a_folder_that_is_not_there(observe):
    assert "No such file" in observe(model="/nowhere")["model"]["error"]


def test_other_content_is_another_hash(observe, model):
    first = observe(model=str(model))["model"]["hash"]
    (model / "config.json").write_text("[]")
    assert observe(model=str(model))["model"]["hash"] != first


def test_the_hash_does_not_depend_on_times(observe, model):
    first = observe(model=str(model))["model"]["hash"]
    os.utime(model / "a.safetensors", (1, 1))
    assert observe(model=str(model))["model"]["hash"] == first


def test_what_was_hashed_is_not_read_again(observe, model):
    first = observe(model=str(model))["model"]["hash"]
    kept = json.loads(observe.cache.read_text())
    assert set(map(os.path.basename, kept)) == {
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "model.safetensors.index.json",
    }
    for one in kept.values():
        one["hash"] = "0" * 64
    observe.cache.write_text(json.dumps(kept))
    assert observe(model=str(model))["model"]["hash"] != first  # taken from the file
    os.utime(model / "a.safetensors", (1, 1))
    observe(model=str(model))
    assert json.loads(observe.cache.read_text())[str(model / "a.safetensors")]["hash"] != "0" * 64


@pytest.mark.parametrize("content", ["", "[]", '{"x": 5}', "\x00"])
def test_a_broken_cache_is_no_fault(observe, model, content):
    first = observe(model=str(model))["model"]["hash"]
    observe.cache.write_text(content)
    assert observe(model=str(model))["model"]["hash"] == first


def test_sampled_and_full_read_what_they_say(observe, model):
    size = 3 << 20
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    safetensors(model / "a.safetensors", size, header)
    hashes = {kind: observe(model=str(model), hash=kind)["model"]["hash"] for kind in ("sampled", "full")}
    assert hashes["sampled"] != hashes["full"]
    with (model / "a.safetensors").open("r+b") as file:  # in the first gap between two blocks
        file.seek(8 + len(json.dumps(header)) + host_observe.BLOCK + 100)
        file.write(b"changed")
    assert observe(model=str(model), hash="sampled")["model"]["hash"] == hashes["sampled"]
    assert observe(model=str(model), hash="full")["model"]["hash"] != hashes["full"]
    with (model / "a.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"x2345")
    assert observe(model=str(model), hash="sampled")["model"]["hash"] != hashes["sampled"]


def test_a_disk_that_cannot_be_read_gives_no_hash_and_no_free_space(observe, model, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(host_observe.Model, "_hash_of", fail)
    monkeypatch.setattr(host_observe.os, "statvfs", fail)
    seen = observe(model=str(model))
    assert seen["model"]["hash"] is None
    assert seen["disks"][str(model)] == {"error": "[Errno 5] Input/output error"}


def test_hashing_ends_when_its_time_is_over(observe, model):
    assert observe(model=str(model), hash_seconds=-1)["model"]["hash"] is None


def test_no_hash_where_none_is_wanted(observe, model):
    assert observe(model=str(model), hash="none")["model"]["hash"] is None
    assert not observe.cache.exists()


def test_check_mode_keeps_no_hashes_and_starts_no_container(run_module, observe, model):
    container = {"image": "x", "shm_size": "1g"}
    params = {
        "accelerator": "cpu",
        "sent": 0,
        "cache": str(observe.cache),
        "model": str(model),
        "container": container,
    }
    seen = run_module("host_observe", check=True, **params)["observed"]
    assert len(seen["model"]["hash"]) == 64
    assert not observe.cache.exists()
    assert seen["container"] is None


# --- the container --------------------------------------------------------------------------------


def test_a_container_gets_what_engines_get(observe, monkeypatch, tmp_path):
    fake = tmp_path / "docker"
    fake.write_text(
        f'#!/bin/sh\n[ "$1" = image ] && echo sha256:1 && exit\nprintf "%s\\n" "$@" > {tmp_path}/words\necho "{{}}"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(host_observe.COMMANDS, "images", ["echo", "IMAGE ID\nsha256:9\nsha256:8"])
    container = {
        "devices": ["nvidia.com/gpu=0", "/dev/null"],
        "ulimits": ["memlock=-1:-1"],
        "shm_size": "16g",
    }
    seen = observe(container=container)["container"]
    assert (seen["image"], seen["ran"]["stdout"]) == ("sha256:1", "{}\n")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:9] == [
        "run", "--rm", "--pull=never", "--network=none", "--log-driver=none", "--shm-size=16g", "--device=nvidia.com/gpu=0",
        "--device=/dev/null", "--ulimit=memlock=-1:-1",
    ]  # fmt: skip
    assert words[9:12] == ["--entrypoint=python3", "sha256:9", "-c"]
    assert words[-1] == "/dev/null"


def test_without_an_image_no_container_is_started(observe):
    assert observe(container={"shm_size": "1g"})["container"] == {"image": None}


def test_what_the_container_tells(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "/dev/null", "/dev/absent"])
    exec(host_observe.INSIDE, {})
    told = json.loads(capsys.readouterr().out)
    assert told["devices"] == {"/dev/null": [1, 3], "/dev/absent": None}
    assert "libcuda.so.1" in str(told["gpus"])
    assert told["shm"] > 0


def test_a_folder_of_device_nodes_is_all_of_them(tmp_path):
    for name in ("uverbs0", "rdma_cm"):
        (tmp_path / name).touch()
    assert host_observe.nodes(str(tmp_path)) == [str(tmp_path / "rdma_cm"), str(tmp_path / "uverbs0")]
    assert host_observe.nodes("/dev/null") == ["/dev/null"]
