"""What is a secret is decided in two places that cannot share code."""

from __future__ import annotations

from pathlib import Path

from by_path import load

from vllm_fleet.problems import SECRET_NAME

ROOT = Path(__file__).parents[2]


def test_the_modules_on_the_hosts_hide_what_the_package_hides():
    theirs = load(ROOT / "plugins" / "module_utils" / "fleet_identity.py").SECRET_NAME
    assert (theirs.pattern, theirs.flags) == (SECRET_NAME.pattern, SECRET_NAME.flags)
