"""Write what run.py measured into the documentation: the tables of docs/benchmarks.md and the plots beside it.

    python tests/gpu/report.py [RESULTS]

RESULTS is a results.json, and is kept in tests/gpu/results by its date and number of GPUs. Of each number the newest is written down.
A run that is not valid is written down as that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- tests/gpu/report.py writes from here -->", "<!-- to here -->"
NEED_MORE = ("uneven", "wide")
"""Scenarios that need more than two GPUs."""
FLEETS = {"pair": "prefill + decode", "ordinary": "two ordinary engines"}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of Markdown, with an empty one after them."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"|{'|'.join(_cell(cell) for cell in line)}|" for line in lines] + [""]


def _cell(value: Any) -> str:
    """A dash where nothing was measured, nothing where nothing could be."""
    return " - " if value is None else f" {value} " if value != "" else " "


def shown(one: Mapping[str, Any], *cells: Callable[[Any], Any]) -> list[Any]:
    """A run's figures, made by each of the cells; of a run that is not valid the reasons, and no figure."""
    if one["invalid"]:
        return [f"invalid: {'; '.join(one['invalid'])}", *[""] * (len(cells) - 1)]
    return [cell(one) for cell in cells]


def figure(*keys: str, digits: int | None = None) -> Callable[[Any], Any]:
    """A cell with what is found under one key in the other, rounded; None where nothing was measured."""

    def cell(one: Any) -> Any:
        for key in keys:
            one = one.get(key) if one else None
        return one if one is None or digits is None else f"{one:,.{digits}f}"

    return cell


TIMES = [figure(kind, share, digits=1) for kind in ("ttft_ms", "itl_ms") for share in ("p50", "p99")]
RATE = figure("kv_gbps")


def report(results: dict[str, Any]) -> str:
    """All tables, each with its heading."""
    done, parts = results["scenarios"], [f"{name} {version}" for name, version in results["versions"].items()]
    lines = [
        f"### {machine(results)}",
        "",
        f"On {results['date']}: {', '.join(parts)}, commit {results['commit']}.",
        *results.get("notes", []),
        "",
        "What differs from hosts:",
        "",
        *(f"- {words}" for words in results["differs"]),
        f"- besides its own, each process got these variables of the machine: {_environment(results)}",
        "",
    ]
    for section in (
        _verdicts,
        partial(_loads, plotted=plot_of(results).name),
        _overhead,
        _starts,
        _mappings,
        _used_up,
        _sleep,
        _gate,
        _experts,
        _tokens,
        _proofs,
    ):
        lines += section(done)
    return "\n".join(lines)


def machine(results: dict[str, Any]) -> str:
    """Its GPUs."""
    return f"{len(results['gpus'])}x {results['gpus'][0]}"


def _environment(results: dict[str, Any]) -> str:
    told = results["environment"].items()
    return ", ".join(f"`{key}` ({value})" if value == "a path" else f"`{key}={value}`" for key, value in told)


def _verdicts(done: dict[str, Any]) -> Iterator[str]:
    yield from ("#### Scenario by scenario", "")
    rows = []
    for name, told in done.items():
        verdict = "skipped" if "skipped" in told else "ok" if told["ok"] else "not ok"
        why = [told["skipped"]] if "skipped" in told else told["why"]
        if "judged" in told:
            verdict += " (note)"
            why = [*why, f"(note: {told['judged']})"]
        rows.append([f"`{name}`", verdict, told["begun"], told["seconds"], told["commit"], "; ".join(why)])
    if "pair" in done:
        rows += [[f"`{name}`", "not run", None, None, None, ""] for name in NEED_MORE if name not in done]
    yield from table(("scenario", "verdict", "begun", "seconds", "commit", "why"), rows)


def _computes(*scenarios: dict[str, Any]) -> list[str]:
    """A line that says what the engines of scenarios computed with."""
    kinds = {start["computes"] for told in scenarios for start in told.get("start", {}).values()}
    return [f"Engines computed with: {', '.join(sorted(kinds))}.", ""] if kinds else []


def has_loads(done: dict[str, Any]) -> bool:
    """Whether there is something to plot."""
    return any("loads" in done.get(fleet, {}) for fleet in FLEETS)


def _loads(done: dict[str, Any], plotted: str) -> Iterator[str]:
    if not has_loads(done):
        return
    yield from ("#### Prefill and decode against the same GPUs as ordinary engines", "")
    yield from _computes(*(done.get(fleet, {}) for fleet in FLEETS))
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
        "posting KV, ms a transfer",
        "",
    )
    runs = {
        (load["prompt_tokens"], load["rate"], fleet): load
        for fleet in FLEETS
        for load in done.get(fleet, {}).get("loads", [])
    }
    cells = [*TIMES, figure("output_tokens_per_second", digits=0), RATE, figure("post_ms_each")]
    rows = [
        [length, rate, FLEETS[fleet], *shown(load, *cells), load.get("note", "")]
        for (length, rate, fleet), load in sorted(
            runs.items(), key=lambda run: (run[0][:2], run[0][2] != "pair")
        )
    ]
    yield from table(head, rows)
    yield from (f"![ITL p99 against the rate of requests]({plotted})", "")


def _overhead(done: dict[str, Any]) -> Iterator[str]:
    told = {fleet: done[fleet]["overhead"] for fleet in FLEETS if "overhead" in done.get(fleet, {})}
    if not told:
        return
    yield from ("#### What the router adds", "")
    yield from _computes(*(done[fleet] for fleet in told))
    first = next(iter(told.values()))
    cells = [figure("ms", way, share, digits=1) for way in ("direct", "router") for share in ("p50", "p99")]
    head = f"{first['answer']} tokens after {first['tokens']}, ms"
    rows = [[FLEETS[fleet], *shown(one, *cells)] for fleet, one in told.items()]
    yield from table((head, "direct p50", "p99", "through the router p50", "p99"), rows)


def _starts(done: dict[str, Any]) -> Iterator[str]:
    yield from ("#### Start, by phase", "")
    starts = [
        (f"{scenario}: {engine}", told)
        for scenario in (
            "pair",
            "ordinary",
            "experts",
            "rollouts",
            "cached",
            "shared",
            "shared_64",
            "shared_rollouts",
            *NEED_MORE,
        )
        for engine, told in done.get(scenario, {}).get("start", {}).items()
    ]
    # In the order of a start: the longest list has all of them.
    names = max(([*told["phases"]] for _, told in starts), key=len, default=[])
    rows = [
        [
            engine,
            told["computes"],
            told["cache"],
            *(told["phases"].get(name) for name in names),
            told["seconds"],
        ]
        for engine, told in starts
    ]
    yield from table(("seconds", "computes with", "its cache", *names, "all"), rows)


def _mappings(done: dict[str, Any]) -> Iterator[str]:
    kinds = {
        "cached": "cached",
        "per_transfer": "per_transfer",
        "fabric": "per_transfer, fabric memory",
    }
    # One that broke on its way has no column.
    seen = {words: done[kind] for kind, words in kinds.items() if "proof" in done.get(kind, {})}
    if not seen:
        return
    yield from ("#### fleet_kv_mapping, and a prefill that stops while its decode lives", "")
    yield from _computes(*seen.values())
    first = next(iter(seen.values()))
    rows: list[list[Any]] = [
        [
            f"rate of {rate['mb_each']:,.0f} MB, GB/s",
            *(shown(one["rates"][number], RATE)[0] for one in seen.values()),
        ]
        for number, rate in enumerate(first["rates"])
    ]
    load, after = first["load"], first["rate_after"]
    rows += [
        [
            f"TTFT p50 / p99 at {load['rate']} requests/s of {load['prompt_tokens']:,} tokens, ms",
            *(shown(one["load"], _quantiles)[0] for one in seen.values()),
        ],
        ["MiB in use on the stopped prefill's GPU", *(f"{one['left_mib']:,}" for one in seen.values())],
        ["the check before a start", *(_before_start(one["memory_check"]) for one in seen.values())],
        ["the prefill started alone", *(_alone(one) for one in seen.values())],
        ["both started again, s", *(_both(one) for one in seen.values())],
        ["the pair is back, s, with the start that fails", *(one["back_seconds"] for one in seen.values())],
        [
            f"rate afterwards, {after['mb_each']:,.0f} MB, GB/s",
            *(shown(one["rate_after"], RATE)[0] for one in seen.values()),
        ],
    ]
    yield from table(("", *seen), rows)


def _quantiles(load: dict[str, Any]) -> str:
    return " / ".join(str(figure("ttft_ms", share, digits=0)(load) or "-") for share in ("p50", "p99"))


def _before_start(told: dict[str, Any]) -> str:
    if told["free"]:
        return "free"
    named = re.search(r"The decodes: (.+?)\.$", told["text"], re.MULTILINE)
    return f"refuses, and names {named[1]}" if named else "refuses, and names no engine"


def _alone(one: dict[str, Any]) -> str:
    if "restart_alone" in one:
        return f"{max(told['seconds'] for told in one['restart_alone'].values())} s"
    return f"after {one['restart_failed']['seconds']} s: {one['restart_failed']['error']}"


def _both(one: dict[str, Any]) -> float | None:
    return max((told["seconds"] for told in one.get("restart_both", {}).values()), default=None)


def _used_up(done: dict[str, Any]) -> Iterator[str]:
    found = [told for name, told in done.items() if name.startswith("shared") and "used_up" in told]
    if not found:
        return
    yield from ("#### A KV pool that was used up", "", *_computes(*found))
    cells = [figure("descriptors_each", digits=0), figure("post_ms_each"), RATE]
    rows = [
        [
            told["block_size"],
            f"{told['kv_tokens']:,}",
            words,
            *shown(told[when]["rate"], *cells),
            _compared(told[when]["tokens"]),
            "passed" if told[when]["proof"]["passed"] else "failed",
        ]
        for told in found
        for when, words in (("fresh", "fresh"), ("used_up", f"after {told['prompts']} long prompts"))
    ]
    mb = found[0]["fresh"]["rate"]["mb_each"]
    head = ("block_size", "tokens it holds", "pool", f"pieces of {mb:,.0f} MB", "posting, ms", "KV, GB/s")
    yield from table((*head, "tokens, against the prefill alone", "proof"), rows)


def _sleep(done: dict[str, Any]) -> Iterator[str]:
    for scenario, more in (("rollouts", ""), ("shared_rollouts", " that share a GPU")):
        if "steps" in (told := done.get(scenario, {})):
            yield from (f"#### Sleep and wake, `vllm-fleet rollout` on both engines{more}", "")
            yield from _slept(told)


def _slept(told: dict[str, Any]) -> Iterator[str]:
    yield from _computes(told)
    rows = [
        [
            step["action"],
            step["seconds"],
            *(f"{used:,}" for used in step["used_mib"]),
            "" if step["ok"] else step["message"],
        ]
        for step in told["steps"]
    ]
    gpus = [f"GPU {number}" for number, _ in enumerate(told["steps"][0]["used_mib"])]
    yield from table(("action", "seconds", *(f"MiB used, {gpu}" for gpu in gpus), ""), rows)
    rows = [["before", "", *shown(told["rate"], RATE), "", ""]]
    for level in (1, 2):
        if after := told.get(f"level_{level}"):
            words = [_compared(after[who]) for who in ("prefill", "pair")]
            rows.append([f"after level {level}", after["first_request"], *shown(after["rate"], RATE), *words])
    yield from table(
        (
            "",
            "first request",
            f"KV of {told['rate']['mb_each']:,.0f} MB, GB/s",
            "tokens of the prefill alone, against before",
            "of the pair",
        ),
        rows,
    )


def _compared(found: dict[str, Any]) -> str:
    words = f"{found['same']} of {found['prompts']} same; log probabilities within {found['noise']:g}"
    return "; ".join([words, *map(_parting, found["parted"])])


def _parting(one: dict[str, Any]) -> str:
    how = "far apart" if one["gap"] is None else f"as likely to within {one['gap']:g}"
    return f"one parts at token {one['at'] + 1}: the two are {how}"


def _gate(done: dict[str, Any]) -> Iterator[str]:
    told = done.get("gate", {})
    if "proof" not in told or "channel_findings" not in told:
        return
    yield from ("#### The gate: sleep mode without an IMEX channel", "")
    yield from _computes(told)
    found = "; ".join(f"{one['check']} ({one['level']}): {one['seen']}" for one in told["channel_findings"])
    rate = told["rate"]
    rows = [
        ["the host check, before", found or "nothing"],
        [f"KV of {rate['mb_each']:,.0f} MB, GB/s", *shown(rate, RATE)],
        ["the proof", "passed" if told["proof"]["passed"] else "failed"],
        ["it says", "; ".join(told["proof"]["why"])],
    ]
    yield from table(("", "seen"), rows)


def _experts(done: dict[str, Any]) -> Iterator[str]:
    told = done.get("experts", {})
    if "tokens_by_rank" not in told:
        return
    yield from (
        f"#### Qwen3-30B-A3B's shape, {told['layers']} layers: one engine with DP 2 and EP 2",
        "",
        *_computes(told),
    )
    rows = [
        [
            f"rank {number}",
            int(told["requests_by_rank"][number][number]),
            f"{rank['same']} of {rank['prompts']}",
            ", ".join("far" if one["gap"] is None else f"{one['gap']:g}" for one in rank["parted"]) or "-",
            rank["noise"],
        ]
        for number, rank in enumerate(told["tokens_by_rank"])
    ]
    answer = told["tokens_by_rank"][0]["answer"]
    yield from table(
        (
            "",
            "requests",
            f"answers of {answer} tokens as of one engine on one GPU",
            "where they part, the two tokens' log probabilities differ by",
            "else by at most",
        ),
        rows,
    )


def _tokens(done: dict[str, Any]) -> Iterator[str]:
    whose = {
        "pair": "through router, prefill and decode, against the prefill alone",
        "ordinary": "of two ordinary engines",
        "rollouts": "the pair with sleep mode, against its prefill alone",
        "shared_rollouts": "the pair with sleep mode, against its prefill alone, on one GPU",
        "uneven": "two prefills of TP 1 and a decode of TP 2, against the first prefill alone",
        "wide": "a prefill of TP 2 and a decode of DP 2, against the prefill alone",
    }
    found = {
        f"{words}{more}": done[scenario][key]
        for scenario, words in whose.items()
        for key, more in (("tokens", ""), ("tokens_after", ", after the loads"))
        if key in done.get(scenario, {})
    }
    if not found:
        return
    yield from ("#### The same tokens", "")
    rows = [
        [
            words,
            f"{told['same']} of {told['prompts']}",
            told["ties"],
            told["noise"],
            f"{sum(not one['same'] for one in told['altered'])} of {len(told['altered'])}",
        ]
        for words, told in found.items()
    ]
    first = next(iter(found.values()))
    yield from table(
        (
            f"answers of {first['answer']} tokens to {first['asked']:,}",
            "same",
            "ties",
            "log probabilities differ by at most",
            "other, if the first token of the prompt is",
        ),
        rows,
    )


def _proofs(done: dict[str, Any]) -> Iterator[str]:
    yield from ("#### All proofs", "")
    rows = []
    for scenario, told in done.items():
        found = {key: told[key] for key in ("proof", "proof_after") if key in told}
        found |= {
            key: told[key]["proof"] for key in ("fresh", "used_up", "level_1", "level_2") if key in told
        }
        for when, one in found.items():
            lines = one["table"][1:] if one["table"] else [""]
            for number, line in enumerate(lines):
                cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
                cells = (cells[1:5] + [None] * 4)[:4]
                why = "" if number else "; ".join(one["why"])
                rows.append([scenario, when.replace("_", " "), *cells, one.get("attempts"), why])
    yield from table(("scenario", "when", "verdict", "prompt", "KV", "rate", "attempts", "because"), rows)


# --- the plot -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PANEL, GAP, BOTTOM = 820, 380, 56, 88, 330, 80, 64
STYLE = """
.ground { fill: #ffffff } text { font: 12px sans-serif; fill: #24292f } .title { font-weight: bold; font-size: 14px }
.grid { stroke: #d0d7de } .pair { stroke: #0b6e99; fill: #0b6e99 } .ordinary { stroke: #b3541e; fill: #b3541e }
.line { fill: none; stroke-width: 2.5 } circle { stroke-width: 2 } circle.noted { fill: #ffffff }
text.pair, text.ordinary { stroke: #ffffff; stroke-width: 4px; paint-order: stroke }
@media (prefers-color-scheme: dark) {
  .ground, circle.noted { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d }
  .pair { stroke: #5cb8e6; fill: #5cb8e6 } .ordinary { stroke: #f0a060; fill: #f0a060 }
  .line { fill: none } circle.noted { fill: #0d1117 } text.pair, text.ordinary { stroke: #0d1117 }
}
"""
type Point = tuple[float, float, str]
"""Rate, milliseconds, and what is to be known of it."""


def plot(results: dict[str, Any]) -> str:
    """ITL p99 against the rate of requests, a panel for each prompt length; invalid runs are left out."""
    points: dict[int, dict[str, list[Point]]] = {}
    for fleet in FLEETS:
        for load in results["scenarios"].get(fleet, {}).get("loads", []):
            if not load["invalid"] and load["itl_ms"]["p99"] is not None:
                lines = points.setdefault(load["prompt_tokens"], {})
                lines.setdefault(fleet, []).append(
                    (load["rate"], load["itl_ms"]["p99"], load.get("note", ""))
                )
    every = [point for lines in points.values() for line in lines.values() for point in line]
    top = max((10 * (int(value) // 10 + 1) for _, value, _ in every), default=10)
    most = max((rate for rate, _, _ in every), default=1)
    kinds = _computes(*(results["scenarios"].get(fleet, {}) for fleet in FLEETS))[:1]
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>ITL p99 against the rate of requests</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="22">Time between tokens, p99, in ms: lower is better</text>',
        f'<text x="{LEFT}" y="42">{" ".join([f"{machine(results)}, {results['date']}.", *kinds])}</text>',
    ]
    for number, fleet in enumerate(FLEETS):
        x = LEFT + 440 + 160 * number
        drawn.append(
            f'<circle class="{fleet}" cx="{x - 10}" cy="18" r="4"/><text class="{fleet}" x="{x}" y="22">{FLEETS[fleet]}</text>'
        )
    for number, (length, lines) in enumerate(sorted(points.items())):
        drawn += _panel(LEFT + number * (PANEL + GAP), length, lines, top, most)
    notes = list(dict.fromkeys(note for _, _, note in every if note))
    if notes:
        drawn.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">hollow: {escape("; ".join(notes))}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _panel(left: int, length: int, lines: dict[str, list[Point]], top: int, most: float) -> Iterator[str]:
    lower = HEIGHT - BOTTOM

    def place(rate: float, value: float) -> tuple[float, float]:
        return round(left + PANEL * rate / (most + 1), 1), round(lower - (lower - TOP) * value / top, 1)

    yield f'<text x="{left}" y="{TOP - 16}">prompts of {length:,} tokens</text>'
    for value in range(0, top + 1, 10):
        y = place(0, value)[1]
        yield f'<line class="grid" x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value}</text>'
    for rate in sorted({rate for line in lines.values() for rate, _, _ in line}):
        yield f'<text x="{place(rate, 0)[0]}" y="{lower + 18}" text-anchor="middle">{rate:g}</text>'
    yield f'<text x="{left + PANEL / 2}" y="{lower + 36}" text-anchor="middle">requests per second</text>'
    for fleet, line in lines.items():
        placed = " ".join("{},{}".format(*place(rate, value)) for rate, value, _ in sorted(line))
        yield f'<polyline class="line {fleet}" points="{placed}"/>'
    # After all lines, which would cross them; beside a point lines rise to the right, so above it is left of it.
    for fleet, line in lines.items():
        for rate, value, note in sorted(line):
            x, y = place(rate, value)
            higher = all(value >= other for kind in lines.values() for at, other, _ in kind if at == rate)
            kind = f"{fleet} noted" if note else fleet
            yield f'<circle class="{kind}" cx="{x}" cy="{y}" r="4"/>'
            place_of_text = (
                f'x="{x - 4}" y="{y - 10}" text-anchor="end"' if higher else f'x="{x + 4}" y="{y + 18}"'
            )
            yield f'<text class="{fleet}" {place_of_text}>{value:.1f}</text>'


# --- files ----------------------------------------------------------------------------------------


def newest() -> list[dict[str, Any]]:
    """The results that the documentation is of: the newest of each number of GPUs, most GPUs first."""
    of = {len(found["gpus"]): found for found in map(_read, sorted(RESULTS.glob("*.json")))}
    return [of[count] for count in sorted(of, reverse=True)]


def plot_of(results: dict[str, Any]) -> Path:
    """Where its plot is."""
    return PAGE.with_name(f"gpu-itl-{len(results['gpus'])}gpu.svg")


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text()))


def page(text: str, every: Iterable[dict[str, Any]]) -> str:
    """A page with its generated part written anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return "\n".join([f"{before}{BEGIN}\n", *map(report, every), f"{END}{after}"])


def keep(file: Path) -> Path:
    """Put a results.json among those that are kept."""
    results = _read(file)
    kept = RESULTS / f"{results['date']}-{len(results['gpus'])}gpu.json"
    kept.write_text(file.read_text())
    return kept


def main() -> None:
    """Write both files."""
    for file in sys.argv[1:]:
        keep(Path(file))
    every = newest()
    PAGE.write_text(page(PAGE.read_text(), every))
    for results in every:
        if has_loads(results["scenarios"]):
            plot_of(results).write_text(plot(results))


if __name__ == "__main__":
    main()
