"""Reading a Prometheus text page."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


class MetricsError(Exception):
    """A page that is not Prometheus text, or lacks what was asked for."""


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    samples = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _SAMPLE.match(line.strip())
        try:
            name, labels, value = match.groups()  # type: ignore[union-attr]
            number = float(value)
        except (AttributeError, ValueError):
            raise MetricsError(f"the line {line[:120]!r} is not a Prometheus sample") from None
        samples.append(Sample(name, dict(_LABEL.findall(labels or "")), number))
    return samples


def total(samples: list[Sample], name: str) -> float | None:
    """The sum over all label sets, e.g. over the ranks of a data-parallel engine; None when absent."""
    values = [sample.value for sample in samples if sample.name == name and not math.isnan(sample.value)]
    return sum(values) if values else None


def label(samples: list[Sample], name: str, key: str) -> str | None:
    return next((s.labels[key] for s in samples if s.name == name and key in s.labels), None)
