"""Acceptance test of the image `engine-base`, run where its architecture is this machine's.

Python, the accounts and certificates, the libraries and the compilers are those of a working Debian.
"""

import json
import os
import pathlib
import pwd
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile

spec = json.loads(os.environ["SPEC"])
release = pathlib.Path("/etc/os-release").read_text()
assert f"VERSION_CODENAME={spec['suite']}" in release, f"not Debian's {spec['suite']}: {release}"
assert f"{sys.version_info[0]}.{sys.version_info[1]}" == spec["python"], (
    f"the wheels are locked for Python {spec['python']}, this is {sys.version}"
)
assert os.confstr("CS_GNU_LIBC_VERSION") == f"glibc {spec['glibc']}", os.confstr("CS_GNU_LIBC_VERSION")
for program in ("ip", "numactl", "sh", "awk", "dpkg"):
    assert shutil.which(program), f"{program} is missing"
assert pwd.getpwuid(0).pw_name == "root"
assert (
    ssl.create_default_context(cafile="/etc/ssl/certs/ca-certificates.crt").cert_store_stats()["x509_ca"]
    > 100
)
assert subprocess.run(["dpkg", "-s", "libibverbs1"], capture_output=True, check=True)

# What Triton and torch do at run time: compile against Python's headers, and load it.
SOURCE = (
    '#include <Python.h>\nextern "C" int version() { return PY_MAJOR_VERSION * 100 + PY_MINOR_VERSION; }\n'
)
with tempfile.TemporaryDirectory() as folder:
    source, library = pathlib.Path(folder, "a.cpp"), pathlib.Path(folder, "a.so")
    source.write_text(SOURCE)
    include = sysconfig.get_path("include")
    for compiler in ("c++", "g++", "gcc", "cc"):
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", "-o", library, source], check=True)
    import ctypes

    assert ctypes.CDLL(str(library)).version() == sys.version_info[0] * 100 + sys.version_info[1]
for library in ("libnuma.so.1", "libibverbs.so.1", "librdmacm.so.1", "libgomp.so.1"):
    ctypes.CDLL(library)
