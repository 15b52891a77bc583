"""Modules run on hosts without the package: what both must know alike stands twice, and is compared here."""

from __future__ import annotations

from ansible.module_utils import fleet_identity

from vllm_fleet.inventory import SHORT_ARGS
from vllm_fleet.problems import SECRET_NAME


def test_the_modules_on_the_hosts_hide_what_the_package_hides():
    theirs = fleet_identity.SECRET_NAME
    assert (theirs.pattern, theirs.flags) == (SECRET_NAME.pattern, SECRET_NAME.flags)


def test_the_modules_on_the_hosts_read_short_arguments_as_the_package_does():
    assert fleet_identity.SHORT.items() <= SHORT_ARGS.items()
