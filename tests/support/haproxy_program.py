"""The haproxy that tests of the front run. scripts/setup installs it; without it they fail, and are not skipped."""

from __future__ import annotations

import os
import shutil


def haproxy_program() -> str:
    """Its path: Debian has it in /usr/sbin, which is not on everybody's PATH."""
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    assert found, "These tests run haproxy, which is not installed. Run scripts/setup, which installs it."
    return found
