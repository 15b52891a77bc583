"""The lab's model: the same bytes each time, never half there."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

SCRIPT = Path(__file__).parents[3] / "roles" / "lab_hosts" / "files" / "tiny_model.py"


def make(folder):
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert make(folder) == f"{folder}: written"
    return folder


def test_the_same_bytes_each_time(model, tmp_path):
    make(tmp_path / "again")
    assert content(tmp_path / "again") == content(model)


def test_a_model_that_is_there_is_left_alone(model):
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert make(model) == f"{model}: already there"
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


@pytest.mark.parametrize("harm", ["truncate", "remove", "add"])
def test_a_model_that_is_not_whole_is_made_again(model, tmp_path, harm):
    folder = tmp_path / "tiny"
    make(folder)
    weights = folder / "model.safetensors"
    if harm == "truncate":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif harm == "remove":
        weights.unlink()
    else:
        (folder / "pytorch_model.bin").write_text("stale")
    assert make(folder) == f"{folder}: written"
    assert content(folder) == content(model)


def test_a_run_cut_off_leaves_no_model(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("tiny_model", SCRIPT)
    tiny_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny_model)

    def broken(*_args, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        tiny_model.install(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, SCRIPT, tmp_path / "file" / "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tiny_model.py: cannot write the model to")
    assert "Traceback" not in done.stderr


def test_only_words_can_be_generated(model):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    head = safetensors.load_file(model / "model.safetensors")["lm_head.weight"]
    possible = [token for token in range(len(head)) if head[token].any()]
    assert len(possible) > 100
    assert all(tokenizer.decode([token]).strip().isalpha() for token in possible)


def test_the_tokenizer_keeps_any_text(model):
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "Ünïcode, code 3f9a: 東京\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == json.loads((model / "config.json").read_text())["vocab_size"]
