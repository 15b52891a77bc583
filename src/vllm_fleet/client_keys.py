"""The clients of a fleet: names and keys in a file of the operator's. The front is told hashes alone."""

from __future__ import annotations

import hashlib
import re

import yaml

OWN = "vllm-fleet"
"""The name under which the fleet's own checks ask."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
"""Shorter than a key: where somebody wrote the two the wrong way round, no message shows one."""
KEY = re.compile(r"[!-~]{24,512}")
"""One word that nobody guesses: its hash is not salted."""


def read(text: str, path: str, mode: str) -> tuple[dict[str, str], list[str]]:
    """Name -> SHA-256 of the key in hex, and what is wrong with the file; no problem says a key.

    Args:
        text: YAML, a mapping of names to keys.
        path: where the file is, for the problems.
        mode: its permissions in octal, such as 0600.

    """
    problems = []
    if int(mode, 8) & 0o077:
        problems.append(f"{path} has mode {mode}, so others can read the keys. Run: chmod 600 {path}")
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        return {}, [*problems, f"{path}{where} is no YAML. Write one line for each client: NAME: KEY"]
    if not isinstance(found, dict) or not found:
        return {}, [*problems, f"{path} names no client. Write one line for each: NAME: KEY"]
    owners: dict[str, str] = {}
    for number, (name, key) in enumerate(found.items(), start=1):
        if not isinstance(name, str) or not NAME.fullmatch(name) or name == OWN:
            problems.append(
                f"{path}: client number {number} needs a name of at most 40 letters, digits and . _ -, "
                f"and not {OWN}"
            )
        elif not isinstance(key, str) or not KEY.fullmatch(key):
            problems.append(
                f"{path}: the key of {name} is not one word of 24 to 512 characters, in quotes. "
                "Make one with: openssl rand -hex 32"
            )
        elif (first := owners.setdefault(key, name)) != name:
            problems.append(f"{path}: {first} and {name} have the same key. Make one of them a new one")
    if problems:
        return {}, problems
    return {name: hashlib.sha256(key.encode()).hexdigest() for key, name in owners.items()}, []
