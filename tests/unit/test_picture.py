"""The pictures show every engine, GPU and member of a plan, once, readably, whatever their names are."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from fleets import gpu, lab
from plans import engine, external, long_names, many, mixture, plan, two_hosts, wide_ep

from vllm_fleet.picture import EDGES, mermaid, ranks, svg

SVG = "{http://www.w3.org/2000/svg}"


def spanning():
    """A real plan with an engine over two hosts."""
    fleet = gpu(prefill=["p1", "p2"], decode=["d1", "d2"]).pool("decode", gpus=16)
    return fleet.everywhere(fleet_socket_ifname="eth0", fleet_rack="r1").plan()


def one_host():
    engines = [
        engine("m", "mixed", ["h1"], [0, 1], tp=2),
        engine("m", "mixed", ["h1"], [3]),
    ]
    return plan(engines, {"h1": None}, gpus=None)


def large():
    """More hosts than fit in a column, and more columns than fit beside each other; one of them without engines."""
    names = [f"h{i:03}" for i in range(100)]
    engines = [engine("m", "mixed", [name], tp=4) for name in names[:-1]]
    return plan(engines, {name: "one" if i < 20 else None for i, name in enumerate(names)})


PLANS = {
    "two hosts": two_hosts,
    "wide EP": wide_ep,
    "wide EP over racks": lambda: wide_ep(2),
    "an engine a GPU": many,
    "an engine a GPU, 8 a host": lambda: many(3, 8),
    "16 GPUs a host": lambda: many(2, 16),
    "mixture": mixture,
    "long names": long_names,
    "one host": one_host,
    "large": large,
    "lab": lambda: lab().plan(),
    "spanning": spanning,
    "no engines": lambda: plan([], {}, externals=[external("x", "mixed", "http://192.0.2.1:1")]),
}
every_plan = pytest.mark.parametrize("a_plan", [make() for make in PLANS.values()], ids=list(PLANS))


def parsed(a_plan):
    return ET.fromstring(svg(a_plan))


def groups(root, kind):
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == kind]


def texts(element):
    """What is written, without tool tips."""
    return [text.text for text in element.iter(f"{SVG}text")]


def rect(group):
    found = group.find(f"{SVG}rect")
    return tuple(float(found.get(name)) for name in ("x", "y", "width", "height"))


def own(a_plan):
    return {one["name"]: one for one in a_plan["engines"] if not one["external"]}


def members(a_plan):
    return [(host, member) for host, told in a_plan["hosts"].items() for member in told["members"]]


# --- completeness ---------------------------------------------------------------------------------


@every_plan
def test_every_gpu_of_every_member_is_drawn_once(a_plan):
    drawn = [
        (g.get("data-host"), int(g.get("data-device")), g.get("data-engine"))
        for g in groups(parsed(a_plan), "gpu")
    ]
    expected = [
        (host, device, member["engine"]) for host, member in members(a_plan) for device in member["devices"]
    ]
    assert Counter(drawn) == Counter((host.replace("\x07", "?"), *rest) for host, *rest in expected)


@every_plan
def test_free_gpus_of_hosts_with_engines_are_drawn(a_plan):
    drawn = {(g.get("data-host"), int(g.get("data-device"))) for g in groups(parsed(a_plan), "free")}
    expected = set()
    for name, host in a_plan["hosts"].items():
        used = {device for member in host["members"] for device in member["devices"]}
        if used:
            expected |= {(name, device) for device in range(host["gpus"] or 0) if device not in used}
    assert drawn == expected


@every_plan
def test_every_engine_is_in_the_legend_and_engines_of_others_in_a_box_of_their_own(a_plan):
    root = parsed(a_plan)
    (legend,) = groups(root, "legend")
    assert [entry.get("data-engine") for entry in groups(legend, "entry")] == list(own(a_plan))
    others = [one for one in a_plan["engines"] if one["external"]]
    boxes = groups(root, "external")
    assert len(boxes) == bool(others)
    entries = groups(boxes[0], "entry") if boxes else []
    assert [texts(entry)[0] for entry in entries] == [one["role"][0].upper() for one in others]


@every_plan
def test_every_member_is_named_once_with_its_role_and_colour(a_plan):
    root = parsed(a_plan)
    drawn = {(g.get("data-engine"), int(g.get("data-rank"))): g for g in groups(root, "member")}
    assert len(drawn) == len(groups(root, "member")) == len(members(a_plan))
    for _, member in members(a_plan):
        group = drawn[member["engine"], member["rank"]]
        letter, name, about = texts(group)
        assert letter == member["role"][0].upper()
        assert shows(name, member["name"])
        assert (f"HTTP {member['http_port']}" in about) == member["head"]


@every_plan
def test_every_host_is_drawn_once(a_plan):
    root = parsed(a_plan)
    placed = [group.get("data-host") for group in groups(root, "host")]
    others = [line.split(",")[0] for box in groups(root, "others") for line in texts(box)[1:]]
    assert Counter(placed + others) == Counter(list(a_plan["hosts"]))


def shows(text, name):
    """Whether a text is a name, or what is left of it around an ellipsis."""
    name = name.replace("\x07", "?")
    start, cut, end = text.partition("…")
    return name.startswith(start) and name.endswith(end) if cut else text == name


# --- ranks ----------------------------------------------------------------------------------------


def label(root, host, device):
    (found,) = [
        group
        for group in groups(root, "gpu") + groups(root, "free")
        if (group.get("data-host"), group.get("data-device")) == (host, str(device))
    ]
    return texts(found)


def test_ranks_of_a_data_parallel_engine():
    root = parsed(wide_ep())
    assert label(root, "rack1-03", 0) == ["GPU 0", "dp0", "tp0"]
    assert label(root, "rack1-18", 3) == ["GPU 3", "dp63", "tp0"]
    assert label(root, "rack1-01", 2) == ["GPU 2", "dp0", "tp2"]


def test_ranks_of_stages_and_of_tensor_parallelism_over_hosts():
    root = parsed(mixture())
    assert label(root, "a2", 3) == ["GPU 3", "dp0", "pp0 tp3"]
    assert label(root, "a3", 1) == ["GPU 1", "dp0", "pp1 tp1"]
    assert label(root, "b1", 7) == ["GPU 7", "dp0", "tp15"]
    assert label(root, "b2", 5) == ["GPU 5", "dp2", "tp1"]
    assert label(root, "b2", 6) == ["GPU 6", "free"]


def test_ranks_of_stages_within_data_parallel_ranks():
    one, ((_, first), (_, second)) = _engine_over_two()
    assert ranks(one, first) == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert [rank[0] for rank in ranks(one, second)] == [2, 2, 2, 2, 3, 3, 3, 3]
    assert [rank[1:] for rank in ranks(one, second)] == [rank[1:] for rank in ranks(one, first)]


def _engine_over_two():
    a_plan = plan([engine("d", "decode", ["a", "b"], range(8), tp=2, pp=2)], dict.fromkeys("ab"))
    return a_plan["engines"][0], members(a_plan)


def test_the_labs_slots_are_no_gpus():
    root = parsed(two_hosts())
    assert label(root, "rack1-04", 0) == ["slot 0", "dp0", "tp0"]
    assert texts(root)[0] == "tiny: 2 engines on 2 hosts"


# --- what is written ------------------------------------------------------------------------------


def test_the_title_counts():
    assert texts(parsed(mixture()))[0] == "tiny: 7 engines on 7 hosts, 42 GPUs, 2 external engines"


def test_the_router():
    (box,) = groups(parsed(two_hosts()), "router")
    assert texts(box) == [
        "Router",
        "on rack1-router, 10.0.0.3",
        "front http://10.0.0.3:30000",
        "slot a: port 30001, metrics 29001",
        "slot b: port 30002, metrics 29002",
    ]


def test_the_engines_of_others():
    (box,) = groups(parsed(mixture()), "external")
    assert texts(box)[1:] == [
        "P",
        "theirs-p",
        "http://192.0.2.7:9000, TP 8",
        "D",
        "theirs-d",
        "http://[2001:db8::7]:9000, TP 4",
    ]


def test_the_members_of_an_engine_over_hosts():
    (first, *_, last) = [
        g for g in groups(parsed(wide_ep()), "member") if g.get("data-engine") == "decode-rack1-03-0"
    ]
    assert texts(first)[1:] == ["decode-rack1-03-0", "member 0 of 16, HTTP 8000, NIXL 5600-5603"]
    assert texts(last)[1:] == ["decode-rack1-03-0.15", "member 15 of 16, NIXL 5660-5663"]


def test_the_legend():
    (box,) = groups(parsed(wide_ep()), "legend")
    assert texts(box) == [
        "Legend",
        "P: prefill, D: decode",
        "KV over nvlink from each prefill to each decode",
        "dp, pp, tp: the rank in its engine",
        "line beside hosts: the members of one engine",
        *("P", "prefill-rack1-01-0", "TP 4"),
        *("P", "prefill-rack1-02-0", "TP 4"),
        *("D", "decode-rack1-03-0", "TP 1, DP 64, EP, 16 hosts"),
    ]
    assert texts(*groups(parsed(one_host()), "legend"))[1:3] == [
        "M: mixed",
        "dp, pp, tp: the rank in its engine",
    ]


def test_all_ports_of_a_host_are_its_tool_tip():
    (host,) = [group for group in groups(parsed(spanning()), "host") if group.get("data-host") == "d1"]
    title = host.find(f"{SVG}title").text
    assert "8000 HTTP of decode-d1-0" in title
    assert "20001 rendezvous of decode-d1-0" in title


def test_hosts_without_engines():
    root = parsed(large())
    (box,) = groups(root, "others")
    assert texts(box)[1:] == ["h099, 10.0.0.100", "rack1-router, 10.0.0.101: router, registry 5000"]
    racked = plan([], {"spare": "A", "r": "A"}, router="r")
    drawn = [texts(group) for group in groups(parsed(racked), "host")]
    assert [text[-1] for text in drawn] == ["no engine", "no engine: router, registry 5000"]


# --- layout ---------------------------------------------------------------------------------------


def box_of(text):
    """(left, top, right, bottom) of a text, roughly as wide as in DejaVu Sans and Arial."""
    size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
    em = sum(0.95 if letter in "mwMW" else 0.35 if letter in "ijlt.,: '|-/" else 0.6 for letter in text.text)
    width = em * size * (1.08 if text.get("font-weight") else 1)
    left = x - width * {"middle": 0.5, "end": 1}.get(text.get("text-anchor"), 0)
    return left, y - size * 0.75, left + width, y + size * 0.2


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def corners(group):
    x, y, width, height = rect(group)
    return x, y, x + width, y + height


def inside(inner, outer):
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def overlapping(boxes):
    """Pairs that overlap; sorted by their upper edge, so that only neighbours are compared."""
    boxes = sorted(boxes, key=lambda pair: pair[1][1])
    for index, (name, box) in enumerate(boxes):
        for other, below in itertools.islice(boxes, index + 1, None):
            if below[1] >= box[3]:
                break
            if overlap(box, below):
                yield name, other


@every_plan
def test_no_text_runs_into_another_one_or_out_of_the_picture(a_plan):
    root = parsed(a_plan)
    boxes = [(text.text, box_of(text)) for text in root.iter(f"{SVG}text")]
    assert list(overlapping(boxes)) == []
    canvas = 0, 0, float(root.get("width")), float(root.get("height"))
    assert [text for text, box in boxes if not inside(box, canvas)] == []
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


@every_plan
def test_text_stays_in_its_box(a_plan):
    root = parsed(a_plan)
    for kind in ("gpu", "free", "host", "rack", "clients", "router", "external", "legend", "others"):
        for group in groups(root, kind):
            for text in group.iter(f"{SVG}text"):
                assert inside(box_of(text), corners(group)), (kind, text.text)


@every_plan
def test_boxes_stay_apart_and_in_the_boxes_around_them(a_plan):
    root = parsed(a_plan)
    for kinds in (("gpu", "free"), ("host",), ("rack", "clients", "router", "external", "legend", "others")):
        boxes = [(kind, corners(group)) for kind in kinds for group in groups(root, kind)]
        assert list(overlapping(boxes)) == []
    for outer, inner in (("rack", "host"), ("host", "gpu"), ("host", "free")):
        for group in groups(root, outer):
            assert all(inside(corners(child), corners(group)) for child in groups(group, inner))
    gpus = [("gpu", corners(group)) for kind in ("gpu", "free") for group in groups(root, kind)]
    names = [(t.text, box_of(t)) for group in groups(root, "host") for t in group.findall(f"{SVG}text")]
    names += [(t.text, box_of(t)) for group in groups(root, "member") for t in group.iter(f"{SVG}text")]
    assert [pair for pair in overlapping(gpus + names) if pair != ("gpu", "gpu")] == []


@every_plan
def test_text_is_large_enough(a_plan):
    assert min(float(text.get("font-size")) for text in parsed(a_plan).iter(f"{SVG}text")) >= 9


@pytest.mark.parametrize("a_plan", [wide_ep(), wide_ep(2), many(), mixture()])
def test_the_canvas_is_sensible(a_plan):
    root = parsed(a_plan)
    assert float(root.get("width")) < 2300
    assert float(root.get("height")) < 1900


def test_a_rack_of_18_hosts_is_one_column():
    (rack,) = groups(parsed(wide_ep()), "rack")
    assert texts(rack)[0] == "Rack nvl72-1"
    assert len(groups(rack, "host")) == 18


def test_racks_and_then_hosts_without_one_in_columns_of_18():
    racks = groups(parsed(large()), "rack")
    assert [len(groups(rack, "host")) for rack in racks] == [18, 2, 18, 18, 18, 18, 7]
    assert [texts(rack)[0] for rack in racks] == [
        "Rack one",
        "Rack one, continued",
        "h020",
        "h038",
        "h056",
        "h074",
        "h092",
    ]
    places = [rect(rack)[:2] for rack in racks]
    assert len({y for _, y in places[:4]}) == len({y for _, y in places[4:]}) == 1
    assert [x for x, _ in places[4:]] == [x for x, _ in places[:3]]


# --- engines in sight -----------------------------------------------------------------------------


def look(group):
    """What tells engines apart in the first shape of a group."""
    shape = group.find(f"{SVG}rect")
    return shape.get("fill"), shape.get("stroke"), shape.get("stroke-dasharray")


@every_plan
def test_an_engine_looks_the_same_everywhere(a_plan):
    root = parsed(a_plan)
    (legend,) = groups(root, "legend")
    looks = {entry.get("data-engine"): look(entry) for entry in groups(legend, "entry")}
    for group in groups(root, "gpu") + groups(root, "member"):
        assert look(group) == looks[group.get("data-engine")]


def test_72_engines_look_different():
    (legend,) = groups(parsed(many()), "legend")
    looks = [look(entry) for entry in groups(legend, "entry")]
    assert len(set(looks)) == 72
    assert not any("url" in fill for fill, *_ in looks[:8])


@every_plan
def test_every_pattern_that_is_used_is_defined_once(a_plan):
    root = parsed(a_plan)
    used = set(re.findall(r"url\(#(\w+)\)", svg(a_plan)))
    assert Counter(pattern.get("id") for pattern in root.iter(f"{SVG}pattern")) == Counter(used)


def lines_of(root, name):
    """The lines beside hosts of an engine: (x, [y of each member], lowest and highest point)."""
    found = []
    for group in groups(root, "members"):
        if group.get("data-engine") == name:
            path = group.find(f"{SVG}path").get("d")
            ((x, top, bottom),) = re.findall(r"^M([\d.]+) ([\d.]+)V([\d.]+)", path)
            ticks = re.findall(r"M[\d.]+ ([\d.]+)H([\d.]+)", path)
            assert {end for _, end in ticks} == {x}
            found.append((float(x), [float(y) for y, _ in ticks], (float(top), float(bottom))))
    return found


def test_a_line_joins_the_members_of_an_engine():
    root = parsed(wide_ep())
    ((_, ys, (top, bottom)),) = lines_of(root, "decode-rack1-03-0")
    hosts = [corners(group) for group in groups(root, "host")][2:]
    assert len(ys) == 16
    assert all(box[1] < y < box[3] for box, y in zip(hosts, ys, strict=True))
    assert (top, bottom) == (ys[0], ys[-1])
    assert lines_of(root, "prefill-rack1-01-0") == []


def test_an_engine_over_two_racks_has_a_line_in_each():
    assert [len(ys) for _, ys, _ in lines_of(parsed(wide_ep(2)), "decode-rack1-03-0")] == [7, 9]


def test_lines_that_would_meet_run_beside_each_other():
    root = parsed(mixture())
    ((p, _, _),), ((d, _, _),) = lines_of(root, "p-a2-0"), lines_of(root, "d-a2-4")
    assert abs(p - d) >= 8
    apart = plan(
        [engine("d", "decode", ["a", "b"]), engine("d", "decode", ["c", "d"])], dict.fromkeys("abcd")
    )
    assert len({lines_of(parsed(apart), name)[0][0] for name in ("d-a-0", "d-c-0")}) == 1


def test_a_lane_is_free_again_after_the_last_engine_in_it():
    over = ("ab", "ce", "df")
    root = parsed(plan([engine("d", "decode", pair, [0]) for pair in over], dict.fromkeys("abcdef")))
    first, second, third = (lines_of(root, f"d-{pair[0]}-0")[0][0] for pair in over)
    assert first == second < third


@every_plan
def test_lines_stay_between_hosts_and_the_edge_of_the_rack(a_plan):
    for rack in groups(parsed(a_plan), "rack"):
        edge = max(corners(host)[2] for host in groups(rack, "host"))
        for engine_name in {group.get("data-engine") for group in groups(rack, "members")}:
            assert all(edge < x < corners(rack)[2] for x, _, _ in lines_of(rack, engine_name))


def test_members_side_by_side_have_ticks_of_their_own():
    engines = [engine("d", "decode", ["a", "b"], [gpu]) for gpu in range(4)]
    root = parsed(plan(engines, dict.fromkeys("ab")))
    ys = [y for one in range(4) for _, ys, _ in lines_of(root, f"d-a-{one}") for y in ys]
    assert len(set(ys)) == 8


# --- names and safety -----------------------------------------------------------------------------


def test_names_are_text_and_no_markup():
    text = svg(long_names())
    root = ET.fromstring(text)
    odd = '<b>&"it\'s" #1; `x`</b>\\n?'
    assert f"Rack {odd}" in texts(root)
    assert odd in texts(*groups(root, "external"))
    assert not list(root.iter(f"{SVG}b"))
    assert "\x07" not in text


def test_a_name_that_is_cut_keeps_both_ends_and_is_whole_in_its_tool_tip():
    root = parsed(long_names())
    name = "rack-42-tray-07.compute.datacentre-north-3.example.internal"
    (text,) = [t for t in root.iter(f"{SVG}text") if any(title.text == name for title in t)]
    start, end = text.text.split("…")
    assert len(start) > 8
    assert len(end) > 8
    assert name.startswith(start)
    assert name.endswith(end)


@every_plan
def test_the_file_needs_nothing_else(a_plan):
    text = svg(a_plan)
    root = ET.fromstring(text)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "defs", "pattern", "g", "rect", "path", "text"}
    assert not re.search(r"href|@import|url\((?!#)|<!|javascript", re.sub(r">[^<]*<", "><", text))
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on")]
    assert root.get("font-family") == "sans-serif"


@pytest.mark.parametrize("make", PLANS.values(), ids=list(PLANS))
def test_the_same_plan_gives_the_same_bytes(make):
    assert svg(make()) == svg(make())
    assert mermaid(make()) == mermaid(make())


# --- Mermaid --------------------------------------------------------------------------------------

LABEL = r'"(?:[^"#`&<>\\]|#\d+;|<br/>)+"'
FORMS = {
    "start": r"flowchart LR",
    "node": rf"(?P<node>\w+)(?:\[{LABEL}\]|\(\[{LABEL}\]\))",
    "open": rf"subgraph (?P<group>\w+)\[{LABEL}\]",
    "end": r"end",
    "edge": rf"(?P<a>\w+) (?:-->|-\.->\|(?P<text>{LABEL})\|) (?P<b>\w+)",
    "look": r"classDef \w+ [\w:#,]+",
    "class": r"class (?P<names>[\w,]+) \w+",
}


def chart(a_plan):
    """The lines of a chart, read with the part of Mermaid's grammar that is used: [(form, match)]."""
    read = []
    for line in mermaid(a_plan).splitlines():
        found = [
            (form, match) for form, pattern in FORMS.items() if (match := re.fullmatch(rf" *{pattern}", line))
        ]
        assert len(found) == 1, line
        read += found
    return read


def edges(read, kv):
    return [(match["a"], match["b"]) for form, match in read if form == "edge" and bool(match["text"]) == kv]


@every_plan
def test_the_chart_is_well_formed(a_plan):
    read = chart(a_plan)
    assert [form for form, _ in read].index("start") == 0
    depth = 0
    names = []
    for form, match in read:
        depth += {"open": 1, "end": -1}.get(form, 0)
        assert 0 <= depth <= 2
        names += [match["node"]] if form == "node" else [match["group"]] if form == "open" else []
    assert depth == 0
    assert len(names) == len(set(names))
    used = {name for form, match in read if form == "edge" for name in (match["a"], match["b"])}
    used |= {name for form, match in read if form == "class" for name in match["names"].split(",")}
    assert used <= set(names)


@every_plan
def test_every_engine_and_every_member_is_in_the_chart(a_plan):
    text = mermaid(a_plan)
    numbers = {one["name"]: f"e{number}" for number, one in enumerate(a_plan["engines"])}
    for one in own(a_plan).values():
        assert f"[{quoted(one['name'], one['url'])}" in text
    for _, member in members(a_plan):
        if own(a_plan)[member["engine"]]["nnodes"] > 1:
            assert f"{numbers[member['engine']]}m{member['rank']}[{quoted(member['name'])}" in text


def quoted(*lines):
    return '"' + "<br/>".join(lines) + "<br/>"


def test_a_small_chart():
    assert mermaid(two_hosts()).splitlines()[:18] == [
        "flowchart LR",
        '  clients(["clients"])',
        '  subgraph routerhost["rack1-router<br/>10.0.0.3"]',
        '    front["front<br/>http://10.0.0.3:30000"]',
        '    router["router<br/>slot a (port 30001) or b (port 30002)"]',
        "  end",
        '  subgraph p0["pool prefill: prefill<br/>1 engine"]',
        '    e0["prefill-rack1-04-0<br/>http://10.0.0.1:8000<br/>TP 1<br/>slot 0"]',
        "  end",
        '  subgraph p1["pool decode: decode<br/>1 engine"]',
        '    e1["decode-rack1-05-0<br/>http://10.0.0.2:8000<br/>TP 1<br/>slot 0"]',
        "  end",
        "  clients --> front",
        "  front --> router",
        "  router --> e0",
        "  router --> e1",
        '  e0 -.->|"KV over tcp"| e1',
        "  classDef prefill fill:#77aadd,stroke:#333333,color:#111111",
    ]


def test_an_engine_over_hosts_shows_its_members():
    text = mermaid(wide_ep())
    assert 'subgraph e2["decode-rack1-03-0<br/>http://10.0.0.3:8000<br/>TP 1, DP 64, EP"]' in text
    assert 'e2m15["decode-rack1-03-0.15<br/>rack1-18, GPUs 0-3<br/>DP 60-63"]' in text
    assert edges(chart(wide_ep()), kv=True) == [("e0", "e2"), ("e1", "e2")]


def test_many_edges_are_drawn_from_pool_to_pool():
    def pd(prefills, decodes):
        names = [f"h{i}" for i in range(prefills + decodes)]
        engines = [
            engine("pd"[i >= prefills], ("prefill", "decode")[i >= prefills], [h])
            for i, h in enumerate(names)
        ]
        return chart(plan(engines, dict.fromkeys(names)))

    assert len(edges(pd(3, 4), kv=True)) == EDGES == 12
    assert edges(pd(1, 13), kv=True) == edges(pd(13, 1), kv=True) == [("p0", "p1")]
    routed = [edge for edge in edges(pd(6, 6), kv=False) if edge[0] == "router"]
    assert len(routed) == 12
    assert [b for a, b in edges(pd(6, 7), kv=False) if a == "router"] == ["p0", "p1"]
    assert edges(pd(6, 6), kv=True) == [("p0", "p1")]


def test_engines_of_others_are_pools_of_their_own():
    text = mermaid(mixture())
    assert '["external prefill engines<br/>1 engine"]' in text
    assert set(edges(chart(mixture()), kv=True)) == {(p, d) for p in ("p0", "p2") for d in ("p1", "p3")}


def test_ordinary_engines_exchange_no_kv():
    assert edges(chart(one_host()), kv=True) == []
    assert ("router", "e0") in edges(chart(one_host()), kv=False)


def test_names_mean_nothing_to_mermaid():
    text = mermaid(long_names())
    assert "#60;b#62;#38;#34;it's#34; #35;1; #96;x#96;#60;/b#62;#92;n?" in text
