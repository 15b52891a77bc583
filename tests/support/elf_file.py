"""Writes small ELF files: shared objects of any architecture that ask for libraries and versions and do nothing."""

from __future__ import annotations

import struct
from collections.abc import Sequence

X86_64, AARCH64, CUDA = 62, 183, 190


class _Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        place = len(self.data)
        self.data += text.encode() + b"\0"
        return place


def shared_object(
    machine: int = AARCH64,
    needed: Sequence[str] = (),
    wants: Sequence[str] = (),
    defines: Sequence[str] = (),
    *,
    stripped: bool = False,
) -> bytes:
    """A shared object's bytes: `needed` are DT_NEEDED, `wants` and `defines` versions as GLIBC_2.17.

    `stripped` is one without section headers, which a loader does not need: it has only a PT_DYNAMIC.
    """
    strings, names = _Strings(), _Strings()
    dynamic = b"".join(struct.pack("<qQ", 1, strings.add(name)) for name in needed) + struct.pack("<qQ", 0, 0)
    aux = b"".join(
        struct.pack("<IHHII", 0, 0, 2 + number, strings.add(version), 16 if number + 1 < len(wants) else 0)
        for number, version in enumerate(wants)
    )
    want = struct.pack("<HHIII", 1, len(wants), strings.add("libc.so.6"), 16, 0) + aux if wants else b""
    define = b"".join(
        struct.pack("<HHHHIII", 1, 0, 1 + number, 1, 0, 20, 28 if number + 1 < len(defines) else 0)
        + struct.pack("<II", strings.add(version), 0)
        for number, version in enumerate(defines)
    )
    # name, type, content, link to the strings, entries, size of an entry
    sections = [
        (".dynstr", 3, strings.data, 0, 0, 0),
        (".dynamic", 6, dynamic, 1, 0, 16),
        (".gnu.version_r", 0x6FFFFFFE, want, 1, 1 if wants else 0, 0),
        (".gnu.version_d", 0x6FFFFFFD, define, 1, len(defines), 0),
    ]
    placed, body = [], b""
    for name, kind, content, link, info, entry in sections:
        if content:
            placed.append((names.add(name), kind, 64 + len(body), len(content), link, info, entry))
            body += content + b"\0" * (-len(content) % 8)
    name = names.add(".shstrtab")
    placed.append((name, 3, 64 + len(body), len(names.data), 0, 0, 0))
    body += names.data + b"\0" * (-len(names.data) % 8)
    table = struct.pack("<IIQQQQIIQQ", *([0] * 10))
    for name, kind, offset, size, link, info, entry in placed:
        table += struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, link, info, 8, entry)
    if stripped:
        segment = struct.pack("<IIQQQQQQ", 2, 4, 64 + 56, 0, 0, len(dynamic), len(dynamic), 8)
        header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
        header += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
        return header + segment + dynamic
    count = len(placed) + 1
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, count, count - 1
    )
    return header + body + table
