"""playbooks/check.yml itself, by ansible-playbook, over recordings: it touches no host, and finds every failure of the table.

The other faults are judged by the same code, in test_faults.py, and need no ansible-playbook of their own.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from host_faults import RDMA_TABLE, TABLE, D, P, R
from host_records import ROOT, plan_of, recordings

from vllm_fleet.host_check.report import judge, table

INVENTORY = "gb200-two-trays"
TOO_MANY = 8  # batches; more means that faults get in each other's way


def play(folder: Path, *words: str, **variables):
    """Exit status, output on one line, findings."""
    out = folder / "out.json"
    variables = {"host_check_recorded": str(folder), "host_check_json": str(out)} | variables
    command = [
        Path(sys.executable).parent / "ansible-playbook",
        "-i",
        ROOT / "inventory" / INVENTORY,
        ROOT / "playbooks/check.yml",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE")} | {
        "ANSIBLE_NOCOLOR": "1"
    }
    done = subprocess.run(
        [*command, "-e", json.dumps(variables), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    found = json.loads(out.read_text()) if out.exists() else None
    return done.returncode, " ".join(output.split()), found


def write(folder: Path, records) -> Path:
    for host, what in records.items():
        (folder / f"{host}.json").write_text(what if isinstance(what, str) else json.dumps(what))
    return folder


def bad(plan, records):
    found = defaultdict(set)
    for finding in judge(plan, records, {}):
        if finding.level in ("fail", "warn"):
            found[finding.check.id].update(finding.hosts)
    return found


def batches(plan, faults):
    """Faults that are found side by side, so that not each needs a run of its own: (faults, records)."""
    left = list(faults)
    while left:
        records, expected, taken = recordings(plan), {}, []
        for fault in left:
            tried = copy.deepcopy(records)
            try:
                fault.change(tried)
            except (AssertionError, KeyError, TypeError, AttributeError, ValueError):
                continue  # what it changes is changed already
            wanted = {check: set(hosts) for check, hosts in fault.found.items()}
            apart = expected.keys().isdisjoint(wanted) and bad(plan, tried) == expected | wanted
            shown = "\n".join(table(judge(plan, tried, {})))
            if apart and all(one.seen in shown for one in [*taken, fault]):
                records, expected, taken = tried, expected | wanted, [*taken, fault]
        assert taken, left
        left = [fault for fault in left if fault not in taken]
        yield taken, records


@pytest.mark.parametrize(("transport", "faults"), [("nvlink", TABLE), ("rdma", RDMA_TABLE[:1])])
def test_every_failure_of_the_table_is_found_and_told(transport, faults, tmp_path):
    plan = plan_of(INVENTORY, f"fleet_kv_transport={transport}")
    for number, (taken, records) in enumerate(batches(plan, faults)):
        assert number < TOO_MANY
        folder = tmp_path / str(number)
        folder.mkdir()
        code, output, found = play(write(folder, records), fleet_kv_transport=transport)
        fails = any(fault.level == "fail" for fault in taken)
        assert (code != 0, found["ok"]) == (fails, not fails), output
        rows = defaultdict(set)
        for row in found["findings"]:
            if row["level"] in ("fail", "warn"):
                rows[row["check"]].update(row["hosts"])
                assert row["remedy"] in output
                assert f"{row['level'].upper()} {row['check']} {', '.join(row['hosts'])}" in output
        assert rows == {check: set(hosts) for fault in taken for check, hosts in fault.found.items()}
        for fault in taken:
            assert fault.seen in output, fault.what


def test_healthy_hosts_pass(tmp_path, records):
    code, output, found = play(write(tmp_path, records))
    assert (code, found["ok"]) == (0, True), output
    assert "checks, 3 hosts:" in output
    assert "unreachable=0 failed=0" in output


def test_an_accepted_failure_passes_and_an_unknown_one_is_refused(tmp_path, records):
    del records[R]
    write(tmp_path, records)
    reason = "the gate is being installed today"
    code, output, found = play(tmp_path, "--check", host_check_accept={"answers": reason})
    assert (code, found["ok"]) == (0, True), output
    assert f"accepted because: {reason}" in output
    code, output, _ = play(tmp_path, host_check_accept={"anwsers": reason})
    assert code != 0
    assert "'anwsers' is no check" in output


def test_the_hosts_of_the_faults_are_those_of_the_recipe():
    assert list(plan_of(INVENTORY)["hosts"]) == [P, D, R]
