"""One JSON object a line on stdout, for the journal."""

from __future__ import annotations

import json
from typing import Any


def log(event: str, **told: Any) -> None:
    """Write what is not None."""
    line = {"event": event} | {name: value for name, value in told.items() if value is not None}
    print(json.dumps(line), flush=True)
