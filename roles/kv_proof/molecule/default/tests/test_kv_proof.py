"""The proof: passes with bytes counted, and fails where KV is slower than its floor."""

from __future__ import annotations

import re

from lab import ENGINES, converge, refused

PAIR = f"{ENGINES['rack1-04']} -> {ENGINES['rack1-05']}"


def test_it_passes_and_shows_the_bytes() -> None:
    done = converge("kv_proof")
    [row] = [line for line in done.output.splitlines() if PAIR in line]
    assert "passed" in row, done.output
    # The prompt has 1500 words or more, and a token of this model has 1 KiB of KV.
    megabytes = re.search(r"(\d+\.\d+) MB", row)
    assert megabytes, row
    assert float(megabytes[1]) > 1


def test_a_raised_floor_fails_and_names_the_pair() -> None:
    seen = refused("kv_proof", fleet_kv_floor_gbps=10000)
    assert PAIR in seen
    assert "floor" in seen
