"""The host check on the lab's hosts: it passes, leaves nothing behind, and finds what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab import ENGINES, converge, play, refused, run

ROOT = Path(__file__).parents[5]
ROLE = ROOT / "roles/host_check/molecule/default/converge.yml"
WEIGHTS = "/srv/models/tiny/model.safetensors"
HASHES = "/var/lib/vllm-fleet/model-hashes.json"


def findings(folder: Path, **variables: Any) -> list[dict[str, Any]]:
    """What the role finds, whether it fails or not."""
    out = folder / "findings.json"
    play(ROLE, host_check_json=str(out), **variables)
    found: list[dict[str, Any]] = json.loads(out.read_text())["findings"]
    return found


def failing(found: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Check -> hosts."""
    return {row["check"]: row["hosts"] for row in found if row["level"] == "fail"}


def listening(host: str) -> str:
    return run(host, "ss -Hltn")


def test_it_passes_and_says_what_does_not_apply() -> None:
    done = converge("host_check")
    assert "FAIL" not in done.output
    assert "Do not apply, because no CUDA engine is planned there: driver, " in done.words
    assert all(counters["changed"] == 0 for counters in done.recap.values())


def there() -> set[str]:
    """What is in the folders that the fleet may write to."""
    return set(
        run(
            "rack1-04", "find /var/lib/vllm-fleet /etc/vllm-fleet /usr/local/lib 2>/dev/null || true"
        ).splitlines()
    )


def test_no_port_stays_open_that_an_engine_needs() -> None:
    before = {host: listening(host) for host in ENGINES}
    converge("host_check")
    for host in ENGINES:
        for port in (8000, 5600):
            assert (f":{port} " in listening(host)) == (f":{port} " in before[host])


def test_the_models_hashes_are_kept_and_nothing_else() -> None:
    for host in ENGINES:
        run(host, f"rm -f {HASHES}")
    before = there()
    converge("host_check", "--check")
    assert there() == before
    converge("host_check")
    assert there() - before <= {HASHES, str(Path(HASHES).parent)}
    assert WEIGHTS in json.loads(run("rack1-04", f"cat {HASHES}"))


def test_what_is_recorded_is_judged_the_same(tmp_path: Path) -> None:
    found = findings(tmp_path, host_check_record=str(tmp_path / "seen"))
    again = findings(tmp_path, host_check_recorded=str(tmp_path / "seen"))
    assert again == found


def test_a_truncated_file_of_weights_is_found(tmp_path: Path) -> None:
    run("rack1-05", f"cp -p {WEIGHTS} /root/kept && truncate --size=-1 {WEIGHTS}")
    try:
        found = findings(tmp_path)
    finally:
        run("rack1-05", f"mv /root/kept {WEIGHTS}")
    assert failing(found) == {"model-files": ["rack1-05"], "same-model": ["rack1-05"]}
    [row] = [row for row in found if row["check"] == "model-files" and row["level"] == "fail"]
    assert "model.safetensors has " in row["seen"]


def test_a_port_that_a_stranger_has_is_found() -> None:
    run("rack1-router", "systemd-run --quiet --unit=stranger python3 -m http.server 31000 && sleep 1")
    try:
        seen = refused("host_check", fleet_front_port=31000)
    finally:
        run("rack1-router", "systemctl stop stranger")
    assert "FAIL ports rack1-router port 31000 (front) is taken by python3 (pid " in seen
    assert "what to do: Stop that program, or move the fleet's ports" in seen


@pytest.mark.parametrize("wrong", ["nonsense", "xid"])
def test_a_wrong_acceptance_is_refused(wrong: str) -> None:
    assert wrong in refused("host_check", host_check_accept={wrong: "short"})
