"""Modules run on hosts without the package: what both must know alike stands twice, and is compared here."""

from __future__ import annotations

from pathlib import Path

from by_path import load

from vllm_fleet.inventory import SHORT_ARGS
from vllm_fleet.problems import SECRET_NAME

ROOT = Path(__file__).parents[2]
THEIRS = load(ROOT / "plugins" / "module_utils" / "fleet_identity.py")


def test_the_modules_on_the_hosts_hide_what_the_package_hides():
    theirs = THEIRS.SECRET_NAME
    assert (theirs.pattern, theirs.flags) == (SECRET_NAME.pattern, SECRET_NAME.flags)


def test_the_modules_on_the_hosts_read_short_arguments_as_the_package_does():
    assert THEIRS.SHORT.items() <= SHORT_ARGS.items()
