"""The file of the clients' keys: what is read, what is refused, and that no message shows a key."""

from __future__ import annotations

import hashlib

import pytest

from vllm_fleet.client_keys import read

ONE, TWO = "1" * 32, "a-key/of.some+other=form:" + "2" * 8
HEX = "abcdef12" * 8
PATH = "/srv/keys.yml"


def test_names_and_hashes_are_read():
    keys, problems = read(f"alice: '{ONE}'\nbob-2.x: {TWO}\n", PATH, "0600")
    assert problems == []
    assert keys == {
        "alice": hashlib.sha256(ONE.encode()).hexdigest(),
        "bob-2.x": hashlib.sha256(TWO.encode()).hexdigest(),
    }


@pytest.mark.parametrize("mode", ["0644", "0640", "0604", "0660", "0700"])
def test_a_file_that_others_may_read_is_refused_with_what_mends_it(mode):
    keys, problems = read(f"alice: {TWO}\n", PATH, mode)
    if mode == "0700":
        assert (len(keys), problems) == (1, [])
        return
    assert keys == {}
    assert problems == [f"{PATH} has mode {mode}, so others can read the keys. Run: chmod 600 {PATH}"]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "names no client"),
        ("{}", "names no client"),
        (TWO, "names no client"),
        (f"- {TWO}", "names no client"),
        (f"alice: {TWO}\n bob: [", "line 2 is no YAML"),
        (f"{TWO}: alice", "client number 1 needs a name"),
        (f"{HEX}: alice", "client number 1 needs a name"),
        (f"a: {TWO}\nvllm-fleet: x{TWO}", "client number 2 needs a name"),
        (f"'a b': {TWO}", "client number 1 needs a name"),
        (f"? [{TWO}]\n: {TWO}", "line 1 is no YAML"),
        ("alice: short", "the key of alice is not one word of 24"),
        (f"alice: {ONE}", "the key of alice is not one word of 24"),  # a number, whose zeros YAML would drop
        (f"alice: {TWO} {TWO}", "the key of alice is not one word of 24"),
        (f"alice: {{key: {TWO}}}", "the key of alice is not one word of 24"),
        ("alice:", "the key of alice is not one word of 24"),
        (f"alice: {TWO}\nbob: {TWO}", "alice and bob have the same key"),
    ],
)
def test_what_is_wrong_is_told_without_a_key(text, seen):
    keys, problems = read(text, PATH, "0600")
    assert keys == {}
    assert len(problems) == 1
    assert seen in problems[0]
    assert problems[0].startswith(PATH)
    for secret in (ONE, TWO, HEX, "short"):
        assert secret not in problems[0]
