"""Pictures of a plan: SVG of its machines, Mermaid of its flow. Pure, and the same text for the same plan."""

from __future__ import annotations

import math
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fleet.relay import relay_hosts

LETTERS = {"prefill": "P", "decode": "D", "mixed": "M"}

# --- Mermaid --------------------------------------------------------------------------------------

EDGES = 12
"""More edges than this of one kind are drawn from pool to pool."""
CLASSES = {"prefill": "fill:#77aadd", "decode": "fill:#ee8866", "mixed": "fill:#bbcc33"}


def mermaid(plan: Mapping[str, Any]) -> str:
    """A Mermaid flowchart: clients, front, router, engines by pool with their members, and where KV flows."""
    router = plan["router"]
    slots = [f"{name} (port {slot['port']})" for name, slot in sorted(router["slots"].items())]
    lines = [
        "flowchart LR",
        f"  clients([{_label('clients')}])",
        f"  subgraph routerhost[{_label(router['host'], router['address'])}]",
        f"    front[{_label('front', router['url'])}]",
        f"    router[{_label('router', f'slot {" or ".join(slots)}')}]",
        "  end",
    ]
    pools: dict[tuple[str, str | None, bool], list[tuple[str, Mapping[str, Any]]]] = {}
    for number, engine in enumerate(plan["engines"]):
        key = engine["role"], engine["pool"], engine["external"]
        pools.setdefault(key, []).append((f"e{number}", engine))
    members = _members(plan)
    nodes: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {}
    for number, ((role, pool, external), engines) in enumerate(pools.items()):
        title = f"external {role} engines" if external else f"pool {pool}: {role}"
        lines.append(f"  subgraph p{number}[{_label(title, _count(len(engines), 'engine'))}]")
        for node, engine in engines:
            lines += _engine_nodes(node, engine, members.get(engine["name"], []), plan["accelerator"])
        lines.append("  end")
        groups.setdefault(role, []).append(f"p{number}")
        nodes.setdefault(role, []).extend(node for node, _ in engines)
    lines += ["  clients --> front", "  front --> router"]
    every = [node for role in nodes.values() for node in role]
    every = every if len(every) <= EDGES else [group for role in groups.values() for group in role]
    lines += [f"  router --> {node}" for node in every]
    if len(nodes.get("prefill", [])) * len(nodes.get("decode", [])) > EDGES:
        nodes = groups
    kv = _label(f"KV over {plan['kv_transport']}")
    lines += [f"  {p} -.->|{kv}| {d}" for p in nodes.get("prefill", []) for d in nodes.get("decode", [])]
    lines += [f"  classDef {role} {CLASSES[role]},stroke:#333333,color:#111111" for role in nodes]
    for role in nodes:
        names = [node for (own, *_), engines in pools.items() if own == role for node, _ in engines]
        lines.append(f"  class {','.join(names)} {role}")
    return "\n".join(lines) + "\n"


def _engine_nodes(
    node: str, engine: Mapping[str, Any], members: Sequence[tuple[str, Mapping[str, Any]]], accelerator: str
) -> Iterator[str]:
    """A node for an engine; where it spans hosts, a subgraph with a node for each member."""
    label = _label(engine["name"], engine["url"], _sizes(engine))
    if len(members) < 2:
        where = _devices(members[0][1], accelerator) if members else "run by others"
        yield f"    {node}[{_label(engine['name'], engine['url'], _sizes(engine), where)}]"
        return
    yield f"    subgraph {node}[{label}]"
    for host, member in members:
        text = _label(member["name"], f"{host}, {_devices(member, accelerator)}", *_dp_ranks(engine, member))
        yield f"      {node}m{member['rank']}[{text}]"
    yield "    end"


def _label(*lines: str) -> str:
    """Lines as a quoted label. Mermaid writes a character as #CODE; and reads Markdown after a backtick."""
    return '"' + "<br/>".join("".join(map(_entity, _clean(line))) for line in lines if line) + '"'


def _entity(character: str) -> str:
    return f"#{ord(character)};" if character in '#"`&<>\\' else character


# --- what a plan says, in words -------------------------------------------------------------------


def _members(plan: Mapping[str, Any]) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Engine -> (host, member) in rank order."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for host, told in plan["hosts"].items():
        for member in told["members"]:
            found.setdefault(member["engine"], []).append((host, member))
    return {name: sorted(members, key=lambda pair: pair[1]["rank"]) for name, members in found.items()}


def _clean(text: str) -> str:
    """Without the characters that XML has no place for and nobody sees."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _sizes(engine: Mapping[str, Any]) -> str:
    kinds = (("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"))
    sizes = [(short, engine[f"{kind}_parallel_size"]) for short, kind in kinds]
    words = [f"{short} {size}" for short, size in sizes if size > 1 or short == "TP"]
    return ", ".join(words + ["EP"] * bool(engine["enable_expert_parallel"]))


def _span(numbers: Sequence[int]) -> str:
    """`5600-5603` for consecutive numbers, else `1, 3`."""
    if len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _device(accelerator: str) -> str:
    return "GPU" if accelerator == "cuda" else "slot"


def _devices(member: Mapping[str, Any], accelerator: str) -> str:
    return f"{_device(accelerator)}{'s' * (len(member['devices']) > 1)} {_span(member['devices'])}"


def _dp_ranks(engine: Mapping[str, Any], member: Mapping[str, Any]) -> list[str]:
    return [f"DP {_span(member['data_parallel_ranks'])}"] if engine["data_parallel_size"] > 1 else []


def ranks(engine: Mapping[str, Any], member: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """(dp, pp, tp) rank of each of the member's GPUs.

    vLLM numbers tensor-parallel ranks first, then pipeline stages. Where a data-parallel rank spans hosts, a
    member goes on where the one before it ended.
    """
    tp, size = (
        engine["tensor_parallel_size"],
        engine["tensor_parallel_size"] * engine["pipeline_parallel_size"],
    )
    before = member["rank"] * len(member["devices"])
    return [
        (member["data_parallel_ranks"][index // size], *divmod((before + index) % size, tp))
        for index in range(len(member["devices"]))
    ]


# --- SVG ------------------------------------------------------------------------------------------

COLOURS = (
    ("#77aadd", "#225588"),
    ("#ee8866", "#aa4422"),
    ("#eedd88", "#887711"),
    ("#ffaabb", "#bb4466"),
    ("#44bb99", "#117755"),
    ("#bbcc33", "#667700"),
    ("#99ddff", "#2288aa"),
    ("#aaaa00", "#555500"),
)
"""Fill and outline: Paul Tol's light scheme, told apart by the colour-blind, for dark text on it."""
STRIPES = ("", "M-2 10L10 -2M-2 2L2 -2M6 10L10 6", "M0 4H8", "M4 0V8", "M-2 -2L10 10M-2 6L2 10M6 -2L10 2")
"""Paths in white over the colour, in a square of 8; engines after the eighth have the next one."""
DASHES = ("", "6 2", "2 2")
"""Outlines, for engines after the last stripes. Then all begins again, and only the names differ."""

ROWS, COLUMNS = 18, 4
"""Hosts in a column, and columns side by side."""
CELL, CELL_HEIGHT, GAP, CELLS = 54, 40, 4, 8
WORDS_HEIGHT, CHIP = 28, 17
PAD, LANE, SIDEBAR = 10, 10, 360
NAME_LIMIT, WORDS_LIMIT = 260, 290
INK, GREY, LINE, PANEL, PAPER = "#1a1a1a", "#555555", "#999999", "#f3f4f6", "#ffffff"
WIDE, NARROW = frozenset("mwMW@%"), frozenset("fijlrt !'(),-./:;[]|")

type _Ranks = tuple[int, int, int]
type _Use = tuple[Mapping[str, Any], _Ranks] | None
"""The engine of a GPU and the GPU's (dp, pp, tp) ranks in it; None where no engine has it."""


@dataclass(frozen=True, slots=True)
class _Style:
    """How an engine looks everywhere in the picture."""

    colour: str
    outline: str
    pattern: str
    dash: str

    def attributes(self) -> dict[str, object]:
        """Of a shape."""
        fill = f"url(#{self.pattern})" if self.pattern else self.colour
        return {"fill": fill, "stroke": self.outline, "stroke-width": 1.5, **self.dashed()}

    def dashed(self) -> dict[str, object]:
        """Of a line."""
        return {"stroke-dasharray": self.dash} if self.dash else {}

    def halo(self) -> dict[str, object]:
        """Of a text: stripes do not run through its letters."""
        around = {"stroke": self.colour, "stroke-width": 3, "paint-order": "stroke"}
        return around if self.pattern else {}


PLAIN = _Style(PAPER, INK, "", "")


@dataclass(frozen=True, slots=True)
class _Lane:
    """Where the line beside the hosts runs that joins an engine's members."""

    engine: str
    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class _Column:
    """Hosts below each other, all of one rack."""

    title: str
    hosts: Sequence[str]
    lanes: Sequence[_Lane]


def svg(plan: Mapping[str, Any]) -> str:
    """A self-contained SVG: left clients, router, external engines and a legend; right racks, hosts, GPUs."""
    return _Drawing(plan).draw()


class _Drawing:
    """Draws a plan. Lengths are pixels; a text's place is its baseline."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan = plan
        self.root = ET.Element("svg")
        self.engines = {engine["name"]: engine for engine in plan["engines"] if not engine["external"]}
        self.styles = self._define_styles()
        hosts = plan["hosts"]
        # What has neither an engine nor a place is the router's host, the registry's and the like.
        self.placed = {name: host for name, host in hosts.items() if host["members"] or host["rack"]}
        self.others = [name for name in hosts if name not in self.placed]
        self.columns = list(_columns(self.placed))
        members = [member for host in hosts.values() for member in host["members"]]
        names = [(name, 12, True) for name in self.placed]
        addresses = [(host["address"], 10, False) for host in self.placed.values()]
        self.name_width = min(_widest([*names, *addresses]), NAME_LIMIT)
        cells = (len(self._devices(host)) for host in self.placed.values())
        self.cells = min(max(cells, default=0), CELLS)
        words = [(text, size, size == 12) for member in members for text, size in self._words(member)]
        words += [(self._idle(name), 10, False) for name, host in self.placed.items() if not host["members"]]
        self.words_width = min(_widest(words), WORDS_LIMIT) + CHIP + 5
        self.words_across = 1 + any(len(host["members"]) > 2 for host in hosts.values())
        self.host_width = (
            PAD * 3
            + self.name_width
            + self.cells * (CELL + GAP)
            + self.words_across * (self.words_width + PAD)
        )
        lanes = max((lane.number + 1 for column in self.columns for lane in column.lanes), default=0)
        self.column_width = self.host_width + PAD * 2 + lanes * LANE

    def draw(self) -> str:
        """The whole file."""
        left, top = PAD * 2.0 + SIDEBAR + 40, 70.0
        width = left + min(max(len(self.columns), 1), COLUMNS) * (self.column_width + PAD) + PAD
        self._draw_title(width - PAD * 4)
        lower, router = self._draw_sidebar(PAD * 2, top)
        bottom = top
        for number, column in enumerate(self.columns):
            line, across = divmod(number, COLUMNS)
            if line and across == 0:
                top = bottom + PAD
            bottom = max(bottom, self._draw_column(left + across * (self.column_width + PAD), top, column))
        if self.columns:
            self._draw_arrow((PAD * 2 + SIDEBAR, router), (left - 4, router))
        height = max(lower, bottom) + PAD * 2
        frame = {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": width,
            "height": height,
            "viewBox": f"0 0 {_written(width)} {_written(height)}",
            "role": "img",
            "font-family": "sans-serif",
        }
        for name, value in frame.items():
            self.root.set(name, _written(value))
        title = ET.Element("title")
        title.text = f"Fleet of {_clean(self.plan['model']['served_name'])}"
        self.root[:0] = [title, ET.Element("rect", {"width": "100%", "height": "100%", "fill": PAPER})]
        ET.indent(self.root, " ")
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(self.root, encoding="unicode") + "\n"

    def _define_styles(self) -> dict[str, _Style]:
        definitions = _add(self.root, "defs")
        styles: dict[str, _Style] = {}
        for number, name in enumerate(self.engines):
            rest, colour = divmod(number, len(COLOURS))
            dash, stripe = divmod(rest, len(STRIPES))
            fill, outline = COLOURS[colour]
            pattern = f"c{colour}s{stripe}" if stripe else ""
            if pattern and dash == 0:
                drawn = _add(
                    definitions, "pattern", id=pattern, width=8, height=8, patternUnits="userSpaceOnUse"
                )
                _add(drawn, "rect", width=8, height=8, fill=fill)
                _add(drawn, "path", d=STRIPES[stripe], stroke=PAPER, stroke_width=2, fill="none")
            styles[name] = _Style(fill, outline, pattern, DASHES[dash % len(DASHES)])
        return styles

    def _draw_title(self, limit: float) -> None:
        model, image = self.plan["model"], self.plan["image"]
        hosts = sum(bool(host["members"]) for host in self.plan["hosts"].values())
        counts = [f"{_count(len(self.engines), 'engine')} on {_count(hosts, 'host')}"]
        if self.plan["accelerator"] == "cuda":
            counts.append(_count(sum(engine["gpus"] for engine in self.engines.values()), "GPU"))
        if others := len(self.plan["engines"]) - len(self.engines):
            counts.append(_count(others, "external engine"))
        title = f"{model['served_name']}: {', '.join(counts)}"
        _text(self.root, PAD * 2, 32, title, 18, limit=limit, bold=True)
        about = f"model {model['path']}, image {image['name']} ({image['variant']})"
        _text(self.root, PAD * 2, 52, about, 11, limit=limit, fill=GREY)

    # The left side: each function takes a place and returns the lower edge of what it drew.

    def _draw_sidebar(self, x: float, y: float) -> tuple[float, float]:
        """Returns the height of the router's middle as well."""
        router = self.plan["router"]
        upper = self._draw_box(x, y, "clients", "Clients", [])[1]
        y = upper + 24
        self._draw_arrow((x + SIDEBAR / 2, upper), (x + SIDEBAR / 2, y - 4))
        lines = [f"on {router['host']}, {router['address']}", f"front {router['url']}"]
        lines += [
            f"slot {name}: port {slot['port']}, metrics {slot['metrics_port']}"
            for name, slot in sorted(router["slots"].items())
        ]
        lower = self._draw_box(x, y, "router", "Router", lines)[1]
        middle = (y + lower) / 2
        y = self._draw_external(x, lower + PAD)
        return self._draw_others(x, self._draw_legend(x, y)), middle

    def _draw_external(self, x: float, y: float) -> float:
        others = [engine for engine in self.plan["engines"] if engine["external"]]
        if not others:
            return y
        group, lower = self._draw_box(
            x, y, "external", "External engines", [], WORDS_HEIGHT * len(others) + 10
        )
        line = y + 41
        for engine in others:
            entry = _group(group, "entry", engine=engine["name"])
            _chip(entry, x + PAD, line - 12, LETTERS[engine["role"]], PLAIN)
            words = (engine["name"], 12, INK), (f"{engine['url']}, {_sizes(engine)}", 10, GREY)
            for number, (text, size, fill) in enumerate(words):
                place = x + PAD + CHIP + 5, line + 13 * number
                _text(entry, *place, text, size, limit=SIDEBAR - PAD * 2 - CHIP - 5, fill=fill)
            line += WORDS_HEIGHT
        return lower + PAD

    def _draw_legend(self, x: float, y: float) -> float:
        roles = dict.fromkeys(engine["role"] for engine in self.plan["engines"])
        lines = [", ".join(f"{LETTERS[role]}: {role}" for role in roles)]
        if self.plan["mode"] == "pd":
            lines.append(f"KV over {self.plan['kv_transport']} from each prefill to each decode")
        lines.append("dp, pp, tp: the rank in its engine")
        if any(column.lanes for column in self.columns):
            lines.append("line beside hosts: the members of one engine")
        group, lower = self._draw_box(x, y, "legend", "Legend", lines, 20 * len(self.engines) + 4)
        line = lower - 20 * len(self.engines) + 5
        for name, engine in self.engines.items():
            entry = _group(group, "entry", engine=name)
            _chip(entry, x + PAD, line - 12, LETTERS[engine["role"]], self.styles[name])
            over = f", {engine['nnodes']} hosts" if engine["nnodes"] > 1 else ""
            about = _sizes(engine) + over
            limit = SIDEBAR - PAD * 3 - CHIP - 5 - _width(about, 10)
            _text(entry, x + PAD + CHIP + 5, line, name, 11, limit=limit)
            _text(entry, x + SIDEBAR - PAD, line, about, 10, fill=GREY, anchor="end")
            line += 20
        return lower + PAD

    def _draw_others(self, x: float, y: float) -> float:
        lines = [f"{name}, {self.plan['hosts'][name]['address']}{self._jobs(name)}" for name in self.others]
        return self._draw_box(x, y, "others", "Hosts without engines", lines)[1] if lines else y

    def _draw_box(
        self, x: float, y: float, kind: str, title: str, lines: Sequence[str], more: float = 0
    ) -> tuple[ET.Element, float]:
        """A box with lines of text and `more` pixels below them; returns it and its lower edge."""
        height = 28 + 14 * len(lines) + 6 * bool(lines) + more
        group = _group(self.root, kind)
        _add(group, "rect", x=x, y=y, width=SIDEBAR, height=height, fill=PANEL, stroke=LINE, rx=5)
        _text(group, x + PAD, y + 19, title, 13, bold=True)
        for number, line in enumerate(lines):
            _text(group, x + PAD, y + 37 + 14 * number, line, 10, limit=SIDEBAR - PAD * 2, fill=GREY)
        return group, y + height

    def _draw_arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """To the right or down."""
        (x, y), (to_x, to_y) = start, end
        back = f"{_written(to_x - 5)} {_written(to_y - 5)}"
        other = f"{_written(to_x - 5)} {_written(to_y + 5)}"
        if x == to_x:
            other = f"{_written(to_x + 5)} {_written(to_y - 5)}"
        tip = f"{_written(to_x)} {_written(to_y)}"
        path = f"M{_written(x)} {_written(y)}L{tip}M{back}L{tip}L{other}"
        _add(self.root, "path", d=path, fill="none", stroke=GREY, stroke_width=1.5)

    # The right side.

    def _draw_column(self, x: float, y: float, column: _Column) -> float:
        """Returns its lower edge."""
        group = _group(self.root, "rack")
        panel = _add(
            group, "rect", x=x, y=y, width=self.column_width, height=0, fill=PANEL, stroke=LINE, rx=5
        )
        top = y + PAD
        if column.title:
            _text(group, x + PAD, y + 20, column.title, 13, limit=self.column_width - PAD * 2, bold=True)
            top = y + 30
        marks: dict[tuple[str, int], float] = {}
        for host in column.hosts:
            top += self._draw_host(group, x + PAD, top, host, marks) + 5
        panel.set("height", _written(top + 5 - y))
        edge = x + PAD + self.host_width
        for lane in column.lanes:
            at = edge + (lane.number + 0.8) * LANE
            points = [marks[lane.engine, rank] for rank in lane.ranks]
            path = f"M{_written(at)} {_written(points[0])}V{_written(points[-1])}"
            path += "".join(f"M{_written(edge)} {_written(point)}H{_written(at)}" for point in points)
            style = self.styles[lane.engine]
            line = {"fill": "none", "stroke": style.outline, "stroke_width": 2.5, **style.dashed()}
            _add(_group(group, "members", engine=lane.engine), "path", d=path, **line)
        return top + 5

    def _draw_host(
        self, parent: ET.Element, x: float, y: float, name: str, marks: dict[tuple[str, int], float]
    ) -> float:
        """Returns the box's height. `marks` learns at which height each (engine, rank) is."""
        host = self.placed[name]
        devices, members = self._devices(host), host["members"]
        tall = -(-len(devices) // CELLS) * (CELL_HEIGHT + GAP) - GAP
        words = -(-len(members) // self.words_across) * WORDS_HEIGHT
        height = max(tall + 10, words + 8, 38)
        middle = y + height / 2
        group = _group(parent, "host", host=name)
        if host["ports"]:
            _add(group, "title").text = _clean(
                ", ".join(f"{use['port']} {use['purpose']}" for use in host["ports"])
            )
        _add(group, "rect", x=x, y=y, width=self.host_width, height=height, fill=PAPER, stroke=LINE, rx=4)
        _text(group, x + PAD, middle - 2, name, 12, limit=self.name_width, bold=True)
        _text(group, x + PAD, middle + 13, host["address"], 10, limit=self.name_width, fill=GREY)
        left = x + PAD * 2 + self.name_width
        for index, (device, use) in enumerate(devices.items()):
            line, column = divmod(index, CELLS)
            place = left + column * (CELL + GAP), middle - tall / 2 + line * (CELL_HEIGHT + GAP)
            self._draw_device(group, *place, name, device, use)
        left += self.cells * (CELL + GAP) + PAD
        if not members:
            _text(group, left, middle + 4, self._idle(name), 10, limit=self.words_width, fill=GREY)
        for index, member in enumerate(members):
            line, across = divmod(index, self.words_across)
            place = left + across * (self.words_width + PAD), middle - words / 2 + line * WORDS_HEIGHT
            self._draw_member(group, *place, member)
            mark = place[1] + WORDS_HEIGHT * (across + 1) / (self.words_across + 1)
            marks[member["engine"], member["rank"]] = mark
        return height

    def _draw_member(self, parent: ET.Element, x: float, y: float, member: Mapping[str, Any]) -> None:
        group = _group(parent, "member", engine=member["engine"], rank=member["rank"])
        _chip(group, x, y + 4, LETTERS[member["role"]], self.styles[member["engine"]])
        for number, (text, size) in enumerate(self._words(member)):
            place = x + CHIP + 5, y + 12 + 13 * number
            fill, limit = (GREY if number else INK), self.words_width - CHIP - 5
            _text(group, *place, text, size, limit=limit, bold=not number, fill=fill)

    def _draw_device(self, parent: ET.Element, x: float, y: float, host: str, device: int, use: _Use) -> None:
        words, kind, style = [f"{_device(self.plan['accelerator'])} {device}", "free"], "free", PLAIN
        data: dict[str, object] = {"host": host, "device": device}
        look: dict[str, object] = {"fill": PAPER, "stroke": LINE, "stroke-dasharray": "3 2"}
        if use is not None:
            engine, (dp, pp, tp) = use
            kind, style = "gpu", self.styles[engine["name"]]
            data["engine"], look = engine["name"], style.attributes()
            stage = f"pp{pp} " if engine["pipeline_parallel_size"] > 1 else ""
            words[1:] = [f"dp{dp}", f"{stage}tp{tp}"]
        group = _group(parent, kind, **data)
        _add(group, "rect", x=x, y=y, width=CELL, height=CELL_HEIGHT, rx=3, **look)
        first = y + CELL_HEIGHT / 2 + 3.5 - 6 * (len(words) - 1)
        for number, text in enumerate(words):
            place = x + CELL / 2, first + 12 * number
            fill = GREY if use is None else INK
            _text(group, *place, text, 9.5, bold=not number, anchor="middle", fill=fill, more=style.halo())

    # What is written where.

    def _devices(self, host: Mapping[str, Any]) -> dict[int, _Use]:
        """GPU -> its use. Whether a host without engines has GPUs, nobody has judged."""
        used = {
            device: (self.engines[member["engine"]], rank)
            for member in host["members"]
            for device, rank in zip(
                member["devices"], ranks(self.engines[member["engine"]], member), strict=True
            )
        }
        every = sorted({*range(host["gpus"] or 0), *used}) if used else []
        return {device: used.get(device) for device in every}

    def _words(self, member: Mapping[str, Any]) -> tuple[tuple[str, int], tuple[str, int]]:
        """Two lines of (text, size) beside the GPUs."""
        number = self.engines[member["engine"]]["nnodes"]
        words = [f"member {member['rank']} of {number}"] if number > 1 else []
        words += [f"HTTP {member['http_port']}"] if member["head"] else []
        words += [f"NIXL {_span(member['side_channel_ports'])}"] if member["side_channel_ports"] else []
        return (member["name"], 12), (", ".join(words), 10)

    def _idle(self, host: str) -> str:
        return f"no engine{self._jobs(host)}"

    def _jobs(self, host: str) -> str:
        """What a host without engines is for."""
        router, registry = self.plan["router"], self.plan["registry"]
        jobs = ["router"] if router["host"] == host else []
        jobs += [f"relay {self.plan['relay']['port']}"] if host in relay_hosts(self.plan) else []
        jobs += [f"registry {registry['port']}"] if registry and registry["host"] == host else []
        return f": {', '.join(jobs)}" if jobs else ""


def _columns(hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[_Column]:
    """Racks in the order of their first host, then the hosts without a rack; at most 18 hosts a column."""
    racks: dict[str | None, list[str]] = {}
    for name, host in hosts.items():
        racks.setdefault(host["rack"], []).append(name)
    for rack in sorted(racks, key=lambda rack: rack is None):
        for start in range(0, len(racks[rack]), ROWS):
            names = racks[rack][start : start + ROWS]
            title = f"Rack {rack}{', continued' * bool(start)}" if rack else ""
            yield _Column(title, names, _lanes(names, hosts))


def _lanes(names: Sequence[str], hosts: Mapping[str, Mapping[str, Any]]) -> list[_Lane]:
    """For each engine with several members on these hosts, the first lane that is free beside them."""
    places: dict[str, list[tuple[int, int]]] = {}
    for row, name in enumerate(names):
        for member in hosts[name]["members"]:
            places.setdefault(member["engine"], []).append((row, member["rank"]))
    ends: list[int] = []
    lanes = []
    for engine, members in places.items():
        if len(members) > 1:
            first, last = members[0][0], members[-1][0]
            number = next((number for number, end in enumerate(ends) if end < first), len(ends))
            ends[number : number + 1] = [last]
            lanes.append(_Lane(engine, tuple(rank for _, rank in members), number))
    return lanes


# Shapes.


def _add(parent: ET.Element, tag: str, /, **attributes: object) -> ET.Element:
    """An element; `stroke_width` is written as stroke-width."""
    written = {name.replace("_", "-"): _written(value) for name, value in attributes.items()}
    return ET.SubElement(parent, tag, written)


def _group(parent: ET.Element, kind: str, **data: object) -> ET.Element:
    return _add(parent, "g", **{"class": kind}, **{f"data_{name}": value for name, value in data.items()})


def _chip(parent: ET.Element, x: float, y: float, letter: str, style: _Style) -> None:
    """The engine's colour with the letter of its role."""
    _add(parent, "rect", x=x, y=y, width=CHIP, height=CHIP, rx=3, **style.attributes())
    _text(parent, x + CHIP / 2, y + 12.5, letter, 11, bold=True, anchor="middle", more=style.halo())


def _text(
    parent: ET.Element,
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    limit: float | None = None,
    bold: bool = False,
    anchor: str = "start",
    fill: str = INK,
    more: Mapping[str, object] | None = None,
) -> None:
    """Text that is cut in its middle where it is wider than `limit`; then all of it is the tool tip."""
    text = _clean(text)
    attributes: dict[str, object] = {"x": x, "y": y, "font-size": size, "fill": fill, **(more or {})}
    attributes |= {"font-weight": "bold"} if bold else {}
    attributes |= {"text-anchor": anchor} if anchor != "start" else {}
    drawn = _add(parent, "text", **attributes)
    drawn.text = text if limit is None else _shortened(text, size, limit, bold=bold)
    if drawn.text != text:
        _add(drawn, "title").text = text


def _width(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a text is; rather too much, because every machine has another sans-serif."""
    em = 0.0
    for character in text:
        if character in WIDE or unicodedata.east_asian_width(character) in "WF":
            em += 1.0
        elif character in NARROW:
            em += 0.42
        else:
            em += 0.78 if character.isupper() else 0.64
    return em * size * (1.1 if bold else 1)


def _widest(texts: Iterable[tuple[str, float, bool]]) -> int:
    return max((math.ceil(_width(text, size, bold=bold)) for text, size, bold in texts), default=0)


def _shortened(text: str, size: float, limit: float, *, bold: bool) -> str:
    """The text with its middle left out where it is wider than `limit`: names differ at their ends."""
    kept, short = len(text), text
    while kept > 2 and _width(short, size, bold=bold) > limit:
        kept -= 1
        short = f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}"
    return short


def _written(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else _clean(str(value))
