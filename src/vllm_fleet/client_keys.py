"""The clients of a fleet: names and keys in a file of the operator's. The front is told hashes alone."""

from __future__ import annotations

import hashlib
import re

import yaml

OWN = "vllm-fleet"
"""The name under which the fleet's own checks ask."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,22}")
"""Shorter than any key, so that the two the wrong way round are no client."""
KEY = re.compile(r"[!-~]{24,512}")
"""One word that nobody guesses: its hash is not salted."""
TEXT = "tag:yaml.org,2002:str"


def read(text: str, path: str, mode: str) -> tuple[dict[str, str], list[str]]:
    """Name -> SHA-256 of the key in hex, and what is wrong with the file.

    Problems name lines and quote none: what stands where a name should may be a key.

    Args:
        text: YAML, a mapping of names to keys.
        path: where the file is, for the problems.
        mode: its permissions in octal, such as 0600.

    """
    problems = []
    if int(mode, 8) & 0o077:
        problems.append(f"{path} has mode {mode}, so others can read the keys. Run: chmod 600 {path}")
    try:
        # Nodes, because they have their lines, and a mapping keeps one of two equal names.
        found = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        return {}, [*problems, f"{path}{where} is no YAML. Write one line for each client: NAME: KEY"]
    if not isinstance(found, yaml.MappingNode) or not found.value:
        return {}, [*problems, f"{path} names no client. Write one line for each: NAME: KEY"]
    clients: dict[str, str] = {}
    lines: dict[tuple[str, str], int] = {}
    for name, key in found.value:
        line = name.start_mark.line + 1
        if name.tag != TEXT or not NAME.fullmatch(name.value) or name.value == OWN:
            problems.append(
                f"{path}, line {line} needs a name of at most 23 letters, digits and . _ -, and not {OWN}"
            )
            continue
        if key.tag != TEXT or not KEY.fullmatch(key.value):
            problems.append(
                f"{path}, line {line} has no key of one word of 24 to 512 characters, in quotes. "
                "Make one with: openssl rand -hex 32"
            )
            continue
        for what, value in (("name", name.value), ("key", key.value)):
            if (first := lines.setdefault((what, value), line)) != line:
                problems.append(
                    f"{path}, lines {first} and {line} have the same {what}. Give one of them another"
                )
        clients[name.value] = hashlib.sha256(key.value.encode()).hexdigest()
    return ({}, problems) if problems else (clients, [])
