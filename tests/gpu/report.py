"""Write what run.py measured into the documentation: the tables of docs/benchmarks.md and the plot docs/gpu-itl.svg.

    python tests/gpu/report.py [RESULTS]

RESULTS is a results.json; without it, the newest of tests/gpu/results. A run that is not valid is written down as that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE, PLOT = ROOT / "docs/benchmarks.md", ROOT / "docs/gpu-itl.svg"
BEGIN, END = "<!-- tests/gpu/report.py writes from here -->", "<!-- to here -->"
FLEETS = {"pair": "prefill + decode", "ordinary": "two ordinary engines"}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown, with an empty one after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"|{'|'.join(_cell(cell) for cell in line)}|" for line in lines] + [""]


def _cell(value: Any) -> str:
    """A dash where nothing was measured, nothing where nothing could be."""
    return " - " if value is None else f" {value} " if value != "" else " "


def report(results: dict[str, Any]) -> str:
    """All tables, each with its heading."""
    done = results["scenarios"]
    gpus, versions = results["gpus"], results["versions"]
    parts = [f"{name} {version}" for name, version in versions.items()]
    lines = [
        f"On {results['date']}: {len(gpus)}x {gpus[0]}, {', '.join(parts)}.",
        "",
    ]
    for section in (
        _loads,
        _overhead,
        _starts,
        _mappings,
        _sleep,
        _gate,
        _experts,
        _tokens,
        _proofs,
        _left_out,
    ):
        lines += section(done)
    return "\n".join(lines)


def _loads(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### Prefill and decode against the same GPUs as ordinary engines", "")
    head = (
        "prompt",
        "requests/s",
        "fleet",
        "TTFT p50, ms",
        "p99",
        "ITL p50, ms",
        "p99",
        "tokens/s",
        "KV, GB/s",
    )
    runs = {
        (load["prompt_tokens"], load["rate"], fleet): load
        for fleet in FLEETS
        for load in done.get(fleet, {}).get("loads", [])
    }
    rows: list[list[Any]] = []
    for (length, rate, fleet), load in sorted(
        runs.items(), key=lambda run: (run[0][:2], run[0][2] != "pair")
    ):
        row = [length, rate, FLEETS[fleet]]
        if load["invalid"]:
            rows.append([*row, f"invalid: {'; '.join(load['invalid'])}", *[""] * 5])
            continue
        times = [load[kind][share] for kind in ("ttft_ms", "itl_ms") for share in ("p50", "p99")]
        rows.append(
            [
                *row,
                *(f"{value:.1f}" for value in times),
                f"{load['output_tokens_per_second']:.0f}",
                load["kv_gbps"],
            ]
        )
    yield from table(head, rows)
    yield from (f"![ITL p99 against the rate of requests]({PLOT.name})", "")


def _overhead(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### What the router adds", "")
    rows = []
    for fleet, name in FLEETS.items():
        if "overhead" in done.get(fleet, {}):
            ways = done[fleet]["overhead"]["ms"]
            rows.append(
                [name, *(ways[way][share] for way in ("direct", "router") for share in ("p50", "p99"))]
            )
    yield from table(("8 tokens after 64, ms", "direct p50", "p99", "through the router p50", "p99"), rows)


def _starts(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### Start, by phase", "")
    starts = [
        (f"{scenario}: {engine}", told)
        for scenario in ("pair", "ordinary", "experts", "rollouts", "cached")
        for engine, told in done.get(scenario, {}).get("start", {}).items()
    ]
    names = list(dict.fromkeys(phase for _, told in starts for phase in told["phases"]))
    # In the order of a start: the longest list has all of them.
    names = max(([*told["phases"]] for _, told in starts), key=len, default=names)
    rows = [
        [engine, *(told["phases"].get(name) for name in names), told["seconds"]] for engine, told in starts
    ]
    yield from table(("seconds", *names, "all"), rows)


def _mappings(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### fleet_kv_mapping, and a prefill that stops while its decode lives", "")
    kinds = {
        "cached": "cached",
        "per_transfer": "per_transfer",
        "fabric": "per_transfer, fabric memory",
    }
    seen = {words: done[kind] for kind, words in kinds.items() if "rates" in done.get(kind, {})}
    if not seen:
        return
    first = next(iter(seen.values()))
    rows: list[list[Any]] = [
        [f"rate of {rate['mb_each']:.0f} MB, GB/s", *(one["rates"][number]["gbps"] for one in seen.values())]
        for number, rate in enumerate(first["rates"])
    ]
    rows += [
        [
            "TTFT p50 / p99 at 4 requests/s of 4,096 tokens, ms",
            *(_quantiles(one["load"]["ttft_ms"]) for one in seen.values()),
        ],
        ["MiB in use on the stopped prefill's GPU", *(f"{one['left_mib']:,}" for one in seen.values())],
        [
            "the check before a start",
            *(
                "free" if one["memory_check"]["free"] else "refuses, and names the decode"
                for one in seen.values()
            ),
        ],
        ["the prefill started alone", *(_alone(one) for one in seen.values())],
        ["both started again, s", *(_both(one) for one in seen.values())],
        ["the pair is back, s, with the start that fails", *(one["back_seconds"] for one in seen.values())],
        ["rate afterwards, 604 MB, GB/s", *(one["rate_after"]["gbps"] for one in seen.values())],
    ]
    yield from table(("", *seen), rows)


def _quantiles(found: dict[str, float]) -> str:
    return f"{found['p50']:.0f} / {found['p99']:.0f}"


def _alone(one: dict[str, Any]) -> str:
    if "restart_alone" in one:
        return f"{max(told['seconds'] for told in one['restart_alone'].values())} s"
    return f"ends after {one['restart_failed']['seconds']} s"


def _both(one: dict[str, Any]) -> float | None:
    return max((told["seconds"] for told in one.get("restart_both", {}).values()), default=None)


def _sleep(done: dict[str, Any]) -> Iterator[str]:
    told = done.get("rollouts", {})
    if "steps" not in told:
        return
    yield from ("### Sleep and wake, `vllm-fleet rollout` on both engines", "")
    rows = [
        [
            step["action"],
            step["seconds"],
            *(f"{used:,}" for used in step["used_mib"]),
            "" if step["ok"] else step["message"],
        ]
        for step in told["steps"]
    ]
    yield from table(("action", "seconds", "MiB used, GPU 0", "GPU 1", ""), rows)
    rows = [["before", "", told["rate"]["gbps"], "", ""]]
    for level in (1, 2):
        after = told[f"level_{level}"]
        words = [_compared(after[who]) for who in ("prefill", "pair")]
        rows.append([f"after level {level}", after["first_request"], after["rate"]["gbps"], *words])
    yield from table(
        (
            "",
            "first request",
            "KV of 604 MB, GB/s",
            "tokens of the prefill alone, against before",
            "of the pair",
        ),
        rows,
    )


def _compared(one: dict[str, Any]) -> str:
    if one["same"]:
        return f"same; log probabilities within {one['noise']:g}"
    near = "far apart" if one["gap"] is None else f"equally likely to within {one['gap']:g}"
    return f"part at token {one['at'] + 1}: the two are {near}"


def _gate(done: dict[str, Any]) -> Iterator[str]:
    told = done.get("gate", {})
    if "proof" not in told:
        return
    yield from ("### The gate: sleep mode without an IMEX channel", "")
    found = "; ".join(f"{one['check']} ({one['level']}): {one['seen']}" for one in told["channel_findings"])
    rows = [
        ["the host check, before", found or "nothing"],
        ["KV of 604 MB, GB/s", told["rate"]["gbps"]],
        [
            "the proof",
            "passed" if told["proof"]["passed"] else told["proof"]["table"][-1].split("  ")[1].strip(),
        ],
        [
            "it says",
            next((words.strip() for words in told["proof"]["msg"].split("; ") if "floor" in words), ""),
        ],
    ]
    yield from table(("", "seen"), rows)


def _experts(done: dict[str, Any]) -> Iterator[str]:
    told = done.get("experts", {})
    if "tokens_by_rank" not in told:
        return
    yield from ("### Qwen3-30B-A3B's shape, 8 layers: one engine with DP 2 and EP 2", "")
    rows = [
        [
            f"rank {number}",
            int(told["requests_by_rank"][str(number)]),
            f"{rank['same']} of {rank['prompts']}",
            ", ".join(f"{one['gap']:g}" for one in rank["parted"]) or "-",
        ]
        for number, rank in enumerate(told["tokens_by_rank"])
    ]
    yield from table(
        (
            "",
            "requests",
            "answers of 24 tokens as of one engine on one GPU",
            "where they part, the two tokens' log probabilities differ by",
        ),
        rows,
    )


def _tokens(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### The same tokens", "")
    whose = {
        "pair": "through router, prefill and decode, against the prefill alone",
        "ordinary": "of two ordinary engines",
        "rollouts": "the pair with sleep mode, against its prefill alone",
    }
    rows = []
    for scenario, words in whose.items():
        if told := done.get(scenario, {}).get("tokens"):
            other = sum(not one["same"] for one in told["altered"])
            rows.append(
                [
                    words,
                    f"{told['same']} of {told['prompts']}",
                    told["noise"],
                    f"{other} of {len(told['altered'])}",
                ]
            )
    yield from table(
        (
            "answers of 24 tokens to 2,000",
            "same",
            "log probabilities differ by at most",
            "other, if the first token of the prompt is",
        ),
        rows,
    )


def _proofs(done: dict[str, Any]) -> Iterator[str]:
    yield from ("### All proofs", "")
    rows = []
    for scenario, told in done.items():
        found = {key: told[key] for key in ("proof", "proof_after") if key in told}
        found |= {key: told[key]["proof"] for key in ("level_1", "level_2") if key in told}
        for when, one in found.items():
            cells = [cell.strip() for cell in one["table"][-1].split("  ") if cell.strip()]
            why = one["msg"].partition(": the tokens")[2].partition(":")[0]
            reason = f"the tokens{why}" if why else "" if one["passed"] else "the rate"
            rows.append([scenario, when.replace("_", " "), *cells[1:5], reason])
    yield from table(("scenario", "when", "verdict", "prompt", "KV", "rate", "because"), rows)


def _left_out(done: dict[str, Any]) -> Iterator[str]:
    out = {
        name: told.get("skipped") or told.get("error", "").strip().rpartition("\n")[2]
        for name, told in done.items()
    }
    missing = [name for name in ("uneven", "wide") if name not in done]
    words = [f"`{name}`: {why}" for name, why in out.items() if why] + [
        f"`{name}`: not run" for name in missing
    ]
    if words:
        yield from (f"Not measured: {'; '.join(words)}.", "")


# --- the plot -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PANEL, GAP, BOTTOM = 820, 340, 56, 64, 330, 80, 48
STYLE = """
svg { background: #ffffff } text { font: 12px sans-serif; fill: #24292f } .title { font-weight: bold; font-size: 14px }
.grid { stroke: #d0d7de } .pair { stroke: #0b6e99 } .ordinary { stroke: #b3541e } .line { fill: none; stroke-width: 2.5 }
circle.pair { fill: #0b6e99 } circle.ordinary { fill: #b3541e }
text.pair, text.ordinary { stroke: #ffffff; stroke-width: 3px; paint-order: stroke } text.pair { fill: #0b6e99 } text.ordinary { fill: #b3541e }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .pair { stroke: #5cb8e6 } .ordinary { stroke: #f0a060 }
  circle.pair { fill: #5cb8e6 } circle.ordinary { fill: #f0a060 } text.pair, text.ordinary { stroke: #0d1117 }
  text.pair { fill: #5cb8e6 } text.ordinary { fill: #f0a060 }
}
"""


def plot(results: dict[str, Any]) -> str:
    """ITL p99 against the rate of requests, a panel for each prompt length; invalid runs are left out."""
    points: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for fleet in FLEETS:
        for load in results["scenarios"].get(fleet, {}).get("loads", []):
            if not load["invalid"]:
                lines = points.setdefault(load["prompt_tokens"], {})
                lines.setdefault(fleet, []).append((load["rate"], load["itl_ms"]["p99"]))
    every = [point for lines in points.values() for line in lines.values() for point in line]
    top = max((10 * (int(value) // 10 + 1) for _, value in every), default=10)
    most = max((rate for rate, _ in every), default=1)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>ITL p99 against the rate of requests</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">Time between tokens, p99, in ms: lower is better</text>',
    ]
    for number, fleet in enumerate(FLEETS):
        x = LEFT + 440 + 160 * number
        drawn.append(
            f'<circle class="{fleet}" cx="{x - 10}" cy="18" r="4"/><text class="{fleet}" x="{x}" y="22">{FLEETS[fleet]}</text>'
        )
    for number, (length, lines) in enumerate(sorted(points.items())):
        drawn += _panel(LEFT + number * (PANEL + GAP), length, lines, top, most)
    return "\n".join([*drawn, "</svg>", ""])


def _panel(
    left: int, length: int, lines: dict[str, list[tuple[float, float]]], top: int, most: float
) -> Iterator[str]:
    lower = HEIGHT - BOTTOM

    def place(rate: float, value: float) -> tuple[float, float]:
        return round(left + PANEL * rate / (most + 1), 1), round(lower - (lower - TOP) * value / top, 1)

    yield f'<text x="{left}" y="{TOP - 16}">prompts of {length:,} tokens</text>'
    for value in range(0, top + 1, 10):
        y = place(0, value)[1]
        yield f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value}</text>'
    for rate in sorted({rate for line in lines.values() for rate, _ in line}):
        yield f'<text x="{place(rate, 0)[0]}" y="{lower + 18}" text-anchor="middle">{rate:g}</text>'
    yield f'<text x="{left + PANEL / 2}" y="{lower + 38}" text-anchor="middle">requests per second</text>'
    for fleet, line in lines.items():
        placed = [place(*point) for point in sorted(line)]
        yield f'<polyline class="line {fleet}" points="{" ".join(f"{x},{y}" for x, y in placed)}"/>'
        for (x, y), (rate, value) in zip(placed, sorted(line), strict=True):
            higher = all(value >= other for kind in lines.values() for at, other in kind if at == rate)
            yield f'<circle class="{fleet}" cx="{x}" cy="{y}" r="4"/>'
            yield f'<text class="{fleet}" x="{x}" y="{y - 9 if higher else y + 18}" text-anchor="middle">{value:.1f}</text>'


# --- files ----------------------------------------------------------------------------------------


def newest() -> Path:
    """The results that the documentation is of."""
    return max(RESULTS.glob("*.json"))


def page(text: str, results: dict[str, Any]) -> str:
    """A page with its generated part written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{report(results)}\n{END}{after}"


def main() -> None:
    """Write both files."""
    results = json.loads((Path(sys.argv[1]) if sys.argv[1:] else newest()).read_text())
    PAGE.write_text(page(PAGE.read_text(), results))
    PLOT.write_text(plot(results))


if __name__ == "__main__":
    main()
