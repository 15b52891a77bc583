"""How long each phase of an engine's start took, read from its own log (vLLM 0.33.0)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

STAMP = re.compile(r"(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) ")
PHASES = (
    ("Python, configuration, engine process", "Initializing a V1 LLM engine"),
    ("NCCL, model, weights", "Model loading took"),
    ("torch.compile", "torch.compile took"),
    ("memory profile", "GPU KV cache size"),
    ("KV cache, NIXL registration", "JIT kernel warmup starting"),
    ("warm-up, CUDA graphs", "init engine ("),
    ("API server", "Starting vLLM server on"),
)
"""Phase -> what the log says at its end. A phase whose words are missing (torch.compile when eager) counts to the next."""
LAST = "first token"


def phases(log: Iterable[str], started: float, ready: float) -> dict[str, float]:
    """Phase -> seconds, in the order of the start. The log's times are whole seconds.

    Args:
        log: lines since the process was started.
        started: when that was, as `time.time` gives it.
        ready: when the engine had generated its first token.

    """
    ends: dict[str, float] = {}
    year = time.localtime(started).tm_year
    for line in log:
        stamp = STAMP.search(line)
        for name, words in PHASES:
            if stamp and words in line:
                # Of several ranks, the last one's.
                ends[name] = time.mktime(time.strptime(f"{year}-{stamp[1]}", "%Y-%m-%d %H:%M:%S"))
    found, begin = {}, started
    for name, _ in PHASES:
        if name in ends:
            found[name] = round(max(ends[name] - begin, 0), 1)
            begin = max(ends[name], begin)
    return found | {LAST: round(ready - begin, 1)}
