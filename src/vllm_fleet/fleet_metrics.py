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
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """All samples of a page; MetricsError for a line that is none."""
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


def total(samples: list[Sample], name: str, **labels: str) -> float | None:
    """The sum over all samples with these labels, e.g. over an engine's ranks; None when there are none."""
    values = [sample.value for sample in _with(samples, name, labels) if not math.isnan(sample.value)]
    return sum(values) if values else None


def label(samples: list[Sample], name: str, key: str, **labels: str) -> str | None:
    """A label's value in the first sample that has it."""
    return next((sample.labels[key] for sample in _with(samples, name, labels) if key in sample.labels), None)


def _with(samples: list[Sample], name: str, labels: dict[str, str]) -> list[Sample]:
    return [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
