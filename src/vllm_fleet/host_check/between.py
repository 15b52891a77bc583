"""The checks that compare hosts.

A host whose own part cannot be read is left out here: its own check says so. None of these passes with fewer
than all of its hosts read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_fleet.host_check import checks, reach, reading
from vllm_fleet.host_check.checks import Check, Level
from vllm_fleet.host_check.judging import (
    ALWAYS,
    ENGINES,
    FABRIC,
    GPU_HOSTS,
    Found,
    Host,
    between,
    right,
    skipped,
    told,
)
from vllm_fleet.host_check.on_host import NODES_FILE, ZEROS, fabric_of, wrong
from vllm_fleet.host_check.reading import UnreadableError
from vllm_fleet.host_check.scope import fabric_groups, fabric_hosts

CLOCK_SECONDS = 10

type Findings = list[tuple[list[str], Found]]


def _read(hosts: list[Host], read: Callable[[Host], str]) -> tuple[dict[str, list[str]], list[str]]:
    """Value -> the hosts that have it, and the hosts where it could not be read."""
    values: dict[str, list[str]] = {}
    unread = []
    for host in hosts:
        try:
            values.setdefault(read(host), []).append(host.name)
        except UnreadableError:
            unread.append(host.name)
    return values, unread


def _equal(check: Check, hosts: list[Host], read: Callable[[Host], str]) -> Findings:
    """All hosts have one value. The odd ones out are named; of two values as frequent, the later."""
    values, unread = _read(hosts, read)
    if len(values) < 2:
        names = [host.name for host in hosts]
        if unread:
            return [(unread, skipped("it could not be read on this host; see its own checks"))]
        if len(hosts) < 2:
            return [(names, skipped("there is one such host"))]
        return [(names, right(next(iter(values))))]
    (common, most), *others = sorted(values.items(), key=lambda item: -len(item[1]))
    found = []
    for value, names in others:
        found.append(
            (
                names,
                wrong(check, f"{value}; on {', '.join(most[:3])}{' and others' * (len(most) > 3)}: {common}"),
            )
        )
    return found


@between(checks.SAME_FABRIC, FABRIC)
def same_fabric(hosts: list[Host]) -> Findings:
    """One ClusterUUID and CliqueId in each group of hosts that reach each other's memory."""

    def fabric(host: Host) -> str:
        found = fabric_of(host)
        shown = ", ".join(f"cluster {uuid} clique {clique}" for uuid, clique in sorted(found))
        if len(found) != 1 or ZEROS in shown:
            raise UnreadableError("not in one fabric, as fabric-cluster says")
        return shown

    by_name = {host.name: host for host in hosts}
    findings: Findings = []
    for group in _groups(hosts):
        findings += _equal(checks.SAME_FABRIC, [by_name[name] for name in group], fabric)
    return findings


def _groups(hosts: list[Host]) -> list[list[str]]:
    """The groups of the fabric, without those that another one holds."""
    names = {host.name for host in hosts}
    groups = [[name for name in group if name in names] for group in fabric_groups(hosts[0].plan)]
    return [
        group
        for number, group in enumerate(groups)
        if group
        and not any(
            set(group) < set(other) or (group == other and at < number) for at, other in enumerate(groups)
        )
    ]


@between(checks.SAME_IMEX_NODES, FABRIC)
def same_imex_nodes(hosts: list[Host]) -> Findings:
    """One list on all, with an address of each of them."""

    def nodes(host: Host) -> str:
        return " ".join(reading.imex_nodes(host.seen.file(NODES_FILE)))

    findings = _equal(checks.SAME_IMEX_NODES, hosts, nodes)
    for other in hosts:
        try:
            own = reading.addresses(other.seen.output("addresses"))
            missing = [host.name for host in hosts if host != other and own.isdisjoint(nodes(host).split())]
        except UnreadableError:
            continue
        if missing:
            seen = f"no address of {other.name} ({', '.join(sorted(own)[:3])}) is in the list"
            findings.append((missing, wrong(checks.SAME_IMEX_NODES, seen)))
    bad = [finding for finding in findings if finding[1].level != Level.PASS]
    return bad or findings


@between(checks.SAME_DRIVER, GPU_HOSTS)
def same_driver(hosts: list[Host]) -> Findings:
    """One version of the loaded driver; where no memory is shared between hosts, others work."""
    findings = _equal(checks.SAME_DRIVER, hosts, lambda host: host.driver.version)
    if fabric_hosts(hosts[0].plan):
        return findings
    return [(names, f._replace(level=Level.WARN) if f.level is Level.FAIL else f) for names, f in findings]


@between(checks.SAME_GPU, GPU_HOSTS)
def same_gpu(hosts: list[Host]) -> Findings:
    """One model of GPU."""
    return _equal(
        checks.SAME_GPU, hosts, lambda host: " ".join(sorted({g.value("Product Name") for g in host.gpus}))
    )


@between(checks.SAME_IMAGE, ENGINES)
def same_image(hosts: list[Host]) -> Findings:
    """The images of the engines that run; nothing to compare where none runs, or where each host builds."""
    if hosts[0].plan["image"]["source"] == "build":
        return [([host.name for host in hosts], skipped("each host builds its own image, with its own id"))]
    images: dict[str, list[str]] = {}
    for host in hosts:
        try:
            own = {member["container"] for member in host.members}
            for name, image in host.containers.values():
                if name in own:
                    images.setdefault(image, []).append(host.name)
        except UnreadableError as error:
            return [([host.name], told(f"could not read which engines run: {error}"))]
    if not images:
        return [([host.name for host in hosts], skipped("no engine runs"))]
    names = [host.name for host in hosts]
    if len(images) == 1:
        return [(names, right(next(iter(images))[:19]))]
    seen = "; ".join(f"{image[:19]} on {', '.join(where[:3])}" for image, where in sorted(images.items()))
    return [(names, wrong(checks.SAME_IMAGE, seen))]


@between(checks.SAME_MODEL, ENGINES)
def same_model(hosts: list[Host]) -> Findings:
    """One hash of the model's files."""

    def model(host: Host) -> str:
        value = host.seen.part("model", "hash")
        if not isinstance(value, str):
            raise UnreadableError("not hashed")
        return f"hash {value[:16]}"

    return _equal(checks.SAME_MODEL, hosts, model)


@between(checks.SAME_CLOCK, ALWAYS)
def same_clock(hosts: list[Host]) -> Findings:
    """How far each clock is from the others. What the question took on its way to the host counts in."""
    offsets: dict[str, float] = {}
    unread: list[str] = []
    for host in hosts:
        try:
            offsets[host.name] = host.seen.number("clock", "host") - host.seen.number("clock", "sent")
        except UnreadableError:
            unread.append(host.name)
    findings: Findings = [(unread, Found("its clock was not read", Level.WARN))] if unread else []
    if offsets:
        middle = sorted(offsets.values())[(len(offsets) - 1) // 2]
        for name, offset in offsets.items():
            if abs(offset - middle) > CLOCK_SECONDS:
                seen = (
                    f"{abs(offset - middle):.0f} s {'ahead of' if offset > middle else 'behind'} the others"
                )
                findings.append(([name], wrong(checks.SAME_CLOCK, seen)))
    return findings or [([host.name for host in hosts], right(f"within {CLOCK_SECONDS} s"))]


# --- reachability ---------------------------------------------------------------------------------


@between(checks.REACHABLE, ALWAYS)
def reachable(hosts: list[Host]) -> Findings:
    """Each connection of the plan: what came of dialing it."""
    plan, by_name = hosts[0].plan, {host.name: host for host in hosts}
    faults: dict[str, list[str]] = {}
    unread: list[str] = []
    starting: list[str] = []
    reached = 0
    for source, target in reach.dials(plan):
        host, other = by_name.get(source), by_name.get(target.host or "")
        if host is None or (target.host and other is None):
            continue  # it was not seen, which its own check says
        outcome = _outcome(host, target)
        there = THERE if outcome == CONNECTED or other is None else _state(other, target)
        if outcome is None or there == UNREAD:
            unread.append(source if outcome is None else target.host or "")
        elif outcome == CONNECTED:
            reached += 1
        elif there == STARTING:
            starting.append(target.host or "")
        elif there == THERE:
            where = f"{target.host}, " if target.host else ""
            faults.setdefault(
                f"{target.purpose} ({where}{target.address}:{target.port}): {outcome}", []
            ).append(source)
    findings: Findings = [
        (sources, wrong(checks.REACHABLE, f"does not reach {place}")) for place, sources in faults.items()
    ]
    if unread:
        seen = "could not read what was opened there, or what came of dialing"
        findings.append((list(dict.fromkeys(unread)), wrong(checks.REACHABLE, seen)))
    if starting:
        seen = "a unit of the fleet runs there and does not listen yet, so its ports could not be dialed"
        findings.append((list(dict.fromkeys(starting)), told(seen)))
    return findings or [([host.name for host in hosts], right(f"{reached} connections"))]


CONNECTED = "connected"
THERE, STARTING, ELSEWHERE, UNREAD = "there", "starting", "told by another check", "unread"
STATES = {
    "listening": THERE,
    "left to its unit": STARTING,
    "the host does not have that address": ELSEWHERE,  # address
}


def _outcome(host: Host, target: reach.Listener) -> str | None:
    """What the module host_reach told about a dial of this host; None where it told nothing."""
    for dialed in host.dials if isinstance(host.dials, list) else []:
        if isinstance(dialed, Mapping) and (dialed.get("address"), dialed.get("port")) == (
            target.address,
            target.port,
        ):
            outcome, greeting = dialed.get("outcome"), dialed.get("greeting")
            if outcome == CONNECTED and greeting not in (None, target.host):
                return f"host {greeting} answers there"
            return outcome if isinstance(outcome, str) else None
    return None


def _state(host: Host, target: reach.Listener) -> str:
    """Whether a port was there to be dialed."""
    try:
        sockets = reading.sockets(host.seen.output("sockets"))
    except UnreadableError:
        return UNREAD
    if any(socket.port == target.port and socket.covers(target.address) for socket in sockets):
        return THERE
    if target.unit == reach.IMEX_UNIT:
        return ELSEWHERE  # imex-service, imex-domain
    for opened in host.listeners if isinstance(host.listeners, list) else []:
        if isinstance(opened, Mapping) and (opened.get("address"), opened.get("port")) == (
            target.address,
            target.port,
        ):
            return STATES.get(str(opened.get("outcome")), THERE)
    return UNREAD
