import json
import re

import pytest
from ansible.module_utils.fleet_unit import TAIL_BYTES, UnitError, journal_tail, unit_state


def show(**values):
    page = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"} | values
    return lambda _command: (0, "".join(f"{key}={value}\n" for key, value in page.items()), "")


@pytest.mark.parametrize(
    ("values", "trouble"),
    [
        ({}, None),
        ({"ActiveState": "activating", "SubState": "start-pre"}, None),
        ({"NRestarts": "2"}, "NRestarts 0 -> 2"),
        (
            {"ActiveState": "activating", "SubState": "auto-restart", "ExecMainStatus": "137"},
            "died.*exit status 137",
        ),
        (
            {"ActiveState": "failed", "SubState": "failed", "Result": "start-limit-hit"},
            "is failed.*start-limit-hit",
        ),
        ({"ActiveState": "inactive", "SubState": "dead"}, "is inactive"),
        ({"LoadState": "not-found", "ActiveState": "inactive"}, "does not exist on this host"),
    ],
)
def test_what_a_state_means(values, trouble):
    fault = unit_state(show(**values), "x.service").fault(0)
    if trouble is None:
        assert fault is None
    else:
        assert re.search(trouble, fault or "")


def test_restarts_before_the_baseline_do_not_count():
    assert unit_state(show(NRestarts="3"), "x.service").fault(3) is None


def test_systemctl_that_fails_is_a_fault():
    with pytest.raises(UnitError, match=r"x\.service gave no state: Failed to connect to bus"):
        unit_state(lambda _command: (1, "", "Failed to connect to bus"), "x.service")


def journal(*entries):
    """What journalctl says: a message alone, or with the start that it is of."""
    pages = [{"MESSAGE": entry} if isinstance(entry, (str, list)) else entry for entry in entries]
    return lambda _command: (0, "".join(json.dumps(page) + "\n" for page in pages), "")


def test_the_tail_keeps_the_cause_that_stands_far_above():
    lines = [
        "ValueError: No free memory on cuda:0",
        *(f"line {i}" for i in range(100)),
        "See root cause above",
    ]
    tail = journal_tail(journal(*lines), "x")
    assert tail.startswith("ValueError: No free memory on cuda:0\n[...]\n")
    assert tail.endswith("See root cause above")
    assert "line 50" not in tail


def test_the_tail_is_bounded():
    assert len(journal_tail(journal("x" * 100_000), "x")) < TAIL_BYTES + 10


STARTS = [
    {"MESSAGE": "ValueError: of the deployment before", "_SYSTEMD_INVOCATION_ID": "1"},
    {"MESSAGE": "Starting x", "INVOCATION_ID": "2"},  # by systemd
    {"MESSAGE": "died", "_SYSTEMD_INVOCATION_ID": "2"},
    {"MESSAGE": "Starting x", "INVOCATION_ID": "3"},
    {"MESSAGE": [27, 91, 51, 49, 109, 195, 164], "_SYSTEMD_INVOCATION_ID": "3"},
]


@pytest.mark.parametrize(
    ("restarts", "tail"),
    [
        (0, "Starting x\n\x1b[31mä"),
        (1, "Starting x\ndied\nStarting x\n\x1b[31mä"),
    ],
)
def test_the_tail_is_of_the_last_start_and_of_those_that_were_seen_to_fail(restarts, tail):
    assert journal_tail(journal(*STARTS), "x", restarts) == tail


def test_the_tail_is_of_the_whole_unit_where_no_line_tells_its_start():
    assert journal_tail(journal("one", "two\nthree", {"MESSAGE": None}), "x") == "one\ntwo\nthree"


@pytest.mark.parametrize(
    ("answer", "text"), [((0, "", ""), "has nothing from x"), ((1, "", "No access"), "failed: No access")]
)
def test_a_journal_that_says_nothing_is_said(answer, text):
    assert text in journal_tail(lambda _command: answer, "x")
