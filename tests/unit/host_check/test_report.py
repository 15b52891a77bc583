"""Accepting, showing and the command line."""

from __future__ import annotations

import json
import re

import pytest
from host_faults import FAULTS, P
from host_records import ROOT
from typer.testing import CliRunner

from vllm_fleet.cli import app
from vllm_fleet.host_check.checks import CHECKS, Level
from vllm_fleet.host_check.report import AcceptError, accepted, document, failed, judge, questions, table

INVENTORY = str(ROOT / "inventory" / "gb200-two-trays")
REASON = "the rack's switches are serviced tomorrow"


def fault(what):
    [found] = [one for one in FAULTS if one.what == what]
    return found


def run(*words):
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def folder(tmp_path, records):
    """Recordings in a folder, as playbooks/check.yml writes them."""
    for host, what in records.items():
        (tmp_path / f"{host}.json").write_text(json.dumps(what))
    return tmp_path


# --- accepting ------------------------------------------------------------------------------------


def test_an_accepted_failure_is_shown_and_no_failure(plan, records):
    fault("the fabric is degraded").change(records)
    assert failed(judge(plan, records, {}))
    findings = judge(plan, records, {"fabric-health": REASON})
    assert not failed(findings)
    assert document(findings)["ok"]
    shown = table(findings)
    assert shown[0].startswith("ACCEPTED  fabric-health  rack1-01  GPU 3: Healthy, bandwidth Degraded")
    assert shown[1].strip() == f"accepted because: {REASON}"
    [row] = [row for row in document(findings)["findings"] if row["level"] == "accepted"]
    assert row["accepted"] == REASON


def test_accepting_one_check_accepts_no_other(plan, records):
    fault("an NVLink is down").change(records)
    assert failed(judge(plan, records, {"fabric-health": REASON}))


def test_what_passes_stays_passed(plan, records):
    levels = {f.level for f in judge(plan, records, dict.fromkeys((c.id for c in CHECKS), REASON))}
    assert levels == {Level.PASS, Level.NOT_APPLICABLE}


@pytest.mark.parametrize(
    ("accept", "says"),
    [
        ({"fabric-helth": REASON}, "'fabric-helth' is no check"),
        ({"xid": "short"}, "xid: the reason must be text of 10 characters or more"),
        ({"xid": " " * 20}, "xid: the reason"),
        ({"xid": None}, "xid: the reason"),
        ({1: REASON}, "1 is no check"),
        (["xid"], "no mapping of check ids to reasons"),
    ],
)
def test_a_wrong_acceptance_is_refused(accept, says):
    with pytest.raises(AcceptError, match=re.escape(says)):
        accepted(accept)


def test_everything_wrong_is_told_at_once():
    with pytest.raises(AcceptError, match=r"'a' is no check .*; 'b' is no check .*; xid: "):
        accepted({"a": REASON, "b": REASON, "xid": ""})


# --- showing --------------------------------------------------------------------------------------


def test_the_worst_comes_first_and_says_what_to_do(plan, records):
    fault("a clock that nobody sets").change(records)
    fault("a GPU is not in the fabric").change(records)
    shown = table(judge(plan, records, {}))
    assert shown[0].startswith("FAIL  fabric-state  rack1-01  GPU 3: State In Progress, Status N/A")
    assert shown[1].startswith("      what to do: Check the fabric manager")
    assert shown[2].startswith("WARN  clock         rack1-01  not synchronized")
    assert re.match(r"\d+ checks, 3 hosts: 1 fail, 1 warn, \d+ pass, \d+ not applicable\.$", shown[5])


def test_the_same_on_many_hosts_is_one_row(plan, records):
    fault("the driver is too old").change(records)
    [row] = [line for line in table(judge(plan, records, {})) if line.startswith("FAIL")]
    assert row == "FAIL  driver  rack1-01, rack1-02  the driver is 575.57.08"


def test_checks_that_do_not_apply_say_why(plan, records):
    shown = "\n".join(table(judge(plan, records, {})))
    assert (
        "Do not apply, because the transport is not rdma, or no engine is planned there: rdma-ports, rdma-devices."
        in shown
    )


def test_the_document_has_every_check_for_every_host(plan, records):
    rows = document(judge(plan, records, {}))["findings"]
    for check in CHECKS:
        hosts = sorted(host for row in rows if row["check"] == check.id for host in row["hosts"])
        assert hosts == sorted(plan["hosts"]), check.id
    assert json.loads(json.dumps(rows)) == rows


def test_a_router_is_not_asked_about_gpus(plan):
    assert questions(plan, "gate-01")["observe"] == {
        "accelerator": "cpu", "model": None, "devices": [], "folders": [], "container": None,
    }  # fmt: skip
    observe = questions(plan, P)["observe"]
    assert (observe["accelerator"], observe["model"]) == ("cuda", "/srv/models/Qwen3-32B")
    assert observe["devices"] == ["/dev/nvidia-caps-imex-channels/channel0"]
    assert observe["container"]["devices"][:2] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]


# --- the command line -----------------------------------------------------------------------------


def test_the_command_judges_a_folder(folder, tmp_path):
    code, shown = run("check", "-i", INVENTORY, "--recorded", str(folder), "--json", str(tmp_path / "out"))
    assert code == 0, shown
    assert json.loads((tmp_path / "out").read_text())["ok"] is True


def test_the_command_fails_with_what_fails(folder, tmp_path):
    (folder / "rack1-02.json").write_text("{")
    words = ("check", "-i", INVENTORY, "--recorded", str(folder), "--json", str(tmp_path / "out"))
    code, shown = run(*words)
    assert code == 1
    assert "FAIL answers rack1-02 could not read its recording: {" in shown
    assert json.loads((tmp_path / "out").read_text())["ok"] is False
    code, shown = run(*words, "--accept", f"answers={REASON}")
    assert code == 0, shown
    assert f"accepted because: {REASON}" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--accept", "nonsense=0123456789"), "is no check"),
        (("--accept", "xid"), "the reason must be"),
        (("--json", "/nowhere/out"), "cannot be written"),
    ],
)
def test_wrong_usage_of_the_command(folder, words, says):
    code, shown = run("check", "-i", INVENTORY, "--recorded", str(folder), *words)
    assert code == 2
    assert says in re.sub(r"[│\s]+", " ", shown)


def test_a_folder_that_is_not_there():
    assert run("check", "-i", INVENTORY, "--recorded", "/nowhere")[0] == 2


def test_the_command_refuses_a_wrong_inventory(folder):
    words = ("check", "-i", INVENTORY, "--recorded", str(folder), "-e", "fleet_prot=1")
    code, shown = run(*words)
    assert (code, "unknown-variable" in shown) == (1, True)


def test_checks_are_listed():
    code, shown = run("checks")
    assert code == 0
    assert all(check.sentence in shown for check in CHECKS)
    code, shown = run("checks", "--json")
    assert [one["id"] for one in json.loads(shown)] == [check.id for check in CHECKS]
    assert run("checks", "--json", "--markdown")[0] == 2


def test_the_reference_of_checks_is_what_the_checks_say():
    reference = ROOT / "docs/reference/checks.md"
    made = CliRunner().invoke(app, ["checks", "--markdown"]).output
    assert made == reference.read_text(), "run `vllm-fleet checks --markdown > docs/reference/checks.md`"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_a_check_says_all_that_a_reader_needs(check):
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
    assert check.sentence.endswith(".")
    assert check.reason.endswith(".")
    assert check.source
    assert check.remedy
    assert check.level in (Level.FAIL, Level.WARN)
