"""The file of the clients' keys: what is read, what is refused, and that no message shows a key."""

from __future__ import annotations

import hashlib

import pytest

from vllm_fleet.client_keys import read

ONE, TWO = "1" * 32, "a-key/of.some+other=form:" + "2" * 8
HEX = "abcdef12" * 8
SHORT = "9f1c5d9f1c5d9f1c5d9f"
LONG_NAME = "a-name-of-23-characters"
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
        (f"{TWO}: alice", "line 1 needs a name"),
        (f"{HEX}: alice", "line 1 needs a name"),
        (f"{LONG_NAME}x: {TWO}", "line 1 needs a name"),
        (f"a: {TWO}\n\n# b\nvllm-fleet: x{TWO}", "line 4 needs a name"),
        (f"'a b': {TWO}", "line 1 needs a name"),
        (f"1: {TWO}", "line 1 needs a name"),
        (f"? [{TWO}]\n: {TWO}", "line 1 needs a name"),
        (f"one: &a {{alice: {TWO}}}\n<<: *a", "line 2 needs a name"),
        (f"{SHORT}: alice", "line 1 has no key"),  # the wrong way round, and the key too short
        (f"alice: {SHORT}", "line 1 has no key"),
        (f"alice: {ONE}", "line 1 has no key"),  # a number, whose zeros YAML would drop
        (f"bob: {TWO}\nalice: {TWO} {TWO}", "line 2 has no key"),
        (f"alice: {{key: {TWO}}}", "line 1 has no key"),
        ("alice:", "line 1 has no key"),
        (f"alice: {TWO}\n\nbob: {TWO}", "lines 1 and 3 have the same key"),
        (f"alice: {TWO}\nbob: x{TWO}\nalice: y{TWO}", "lines 1 and 3 have the same name"),
        (f"alice: {TWO}\nalice: {TWO}", "lines 1 and 2 have the same name"),
    ],
)
def test_what_is_wrong_is_told_without_a_key(text, seen):
    keys, problems = read(text, PATH, "0600")
    assert keys == {}
    assert seen in " ".join(problems)
    for problem in problems:
        assert problem.startswith(PATH)
        for secret in (ONE, TWO, HEX, SHORT, LONG_NAME):
            assert secret not in problem


def test_a_name_is_shorter_than_a_key():
    assert list(read(f"{LONG_NAME}: {TWO[:24]}", PATH, "0600")[0]) == [LONG_NAME]
    assert read(f"{LONG_NAME}: {TWO[:23]}", PATH, "0600")[0] == {}
