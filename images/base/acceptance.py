"""Acceptance test of the image `base`: the release and the packages that the other images count on."""

import pathlib
import shutil
import sys

release = pathlib.Path("/etc/os-release").read_text()
assert "VERSION_CODENAME=bookworm" in release, f"not Debian 12: {release}"
assert sys.version_info[:2] == (3, 11), (
    f"the engine's wheels are locked for Python 3.11, this is {sys.version}"
)
for program in ("ip", "numactl", "dpkg"):
    assert shutil.which(program), f"{program} is missing"
