"""The command line `vllm-fleet`. Only `rollout` touches hosts: it calls their engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vllm_fleet.loading import Loaded
    from vllm_fleet.problems import Problem, Rule

RIGHT, PROBLEMS, USAGE = 0, 1, 2
SHOWN_PAIRS = 64
RULES_INTRODUCTION = """\
# Rules

Made by `vllm-fleet rules --markdown`; a test compares the two.

An error refuses the inventory, a warning does not. A rule that may be overridden is overridden with a
reason, of 10 to 500 characters:

```yaml
fleet_rule_overrides:
  memory: runs with these sizes on such a host
```

What the rule finds is then told with that reason and refuses nothing. `tests/bad_fleets/RULE.yml` is a fleet
that the rule refuses; what would be right is written beside the wrong line."""

app = typer.Typer(
    help="Judges an Ansible inventory of vLLM engines, shows what would be deployed, and controls what runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Inventory = Annotated[
    list[str],
    typer.Option("--inventory", "-i", help="Inventory file or directory; may be given several times."),
]
ExtraVars = Annotated[
    list[str] | None,
    typer.Option("--extra-vars", "-e", help="key=value, YAML/JSON, or @file, as for ansible-playbook."),
]
VaultFiles = Annotated[
    list[str] | None,
    typer.Option("--vault-password-file", help="File with the vault password, or a script that prints it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def validate(
    inventory: Inventory,
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
    as_json: Json = False,  # noqa: FBT002  typer makes an option of it
) -> None:
    """Check an inventory against every rule. Exit 0: right, 1: problems, 2: wrong usage."""
    loaded = _load(inventory, extra_vars, vault_password_file, as_json)
    from vllm_fleet.planning import check

    fleet, engines = check(loaded.hosts, loaded.groups)
    found = loaded.all_problems(fleet.problems.all())
    _finish(found, as_json, {})
    if not as_json:
        hosts = len({host for engine in engines for host in engine.hosts})
        counts = " on ".join(
            f"{count} {word}{'' if count == 1 else 's'}"
            for count, word in ((len(engines), "engine"), (hosts, "host"))
        )
        sys.stdout.write(f"The inventory is right: {counts}.\n")


@app.command()
def rules(
    as_json: Json = False,  # noqa: FBT002
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/reference/rules.md.")] = False,  # noqa: FBT002
) -> None:
    """List every rule an inventory is judged by: id, what must hold, why, what to do."""
    from dataclasses import asdict

    from vllm_fleet.rules import RULES

    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown exclude each other.")
    if as_json:
        sys.stdout.write(json.dumps([asdict(rule) for rule in RULES], indent=2, ensure_ascii=False) + "\n")
        return
    if as_markdown:
        sys.stdout.write(_markdown(RULES))
        return
    for rule in RULES:
        kind = f"{rule.severity.value}{', may be overridden' if rule.overridable else ''}"
        sys.stdout.write(
            f"{rule.id} ({kind})\n  {rule.sentence}\n  why:    {rule.reason}\n"
            f"  source: {rule.source}\n  remedy: {rule.remedy}\n\n"
        )


@app.command()
def check(
    inventory: Inventory,
    recorded: Annotated[
        Path, typer.Option("--recorded", help="Folder with HOST.json, as playbooks/check.yml records it.")
    ],
    accept: Annotated[
        list[str] | None, typer.Option("--accept", help="ID=REASON of a failure that is all right.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all findings as JSON.", dir_okay=False)
    ] = None,
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
) -> None:
    """Judge recorded observations of hosts. Exit 0: no check fails, 1: one does, 2: wrong usage."""
    from vllm_fleet.host_check import report

    if not recorded.is_dir():
        raise typer.BadParameter(f"{recorded} is no folder.")
    try:
        accepted = report.accepted(dict(word.partition("=")[::2] for word in accept or []))
    except report.AcceptError as error:
        raise typer.BadParameter(str(error)) from None
    result, found = _plan(inventory, extra_vars, vault_password_file, as_json=False)
    _finish(found, as_json=False, more={})
    if result is None:
        return
    files = {host: recorded / f"{host}.json" for host in result["hosts"]}
    texts = {
        host: file.read_text(encoding="utf-8", errors="replace")
        for host, file in files.items()
        if file.is_file()
    }
    findings = report.judge(result, texts, accepted)
    if json_file:
        _write(json_file, json.dumps(report.document(findings), indent=2, ensure_ascii=False) + "\n")
    sys.stdout.write("\n".join(report.table(findings)) + "\n")
    if report.failed(findings):
        raise typer.Exit(PROBLEMS)


@app.command()
def checks(
    as_json: Json = False,  # noqa: FBT002
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/reference/checks.md.")] = False,  # noqa: FBT002
) -> None:
    """List every check of the hosts: id, what must hold, why, what to do."""
    from dataclasses import asdict

    from vllm_fleet.host_check.checks import CHECKS

    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown exclude each other.")
    if as_json:
        sys.stdout.write(json.dumps([asdict(one) for one in CHECKS], indent=2, ensure_ascii=False) + "\n")
        return
    if as_markdown:
        from vllm_fleet.host_check.report import markdown

        sys.stdout.write(markdown())
        return
    for one in CHECKS:
        sys.stdout.write(
            f"{one.id} ({one.level.value})\n  {one.sentence}\n  why:    {one.reason}\n"
            f"  source: {one.source}\n  remedy: {one.remedy}\n\n"
        )


def _markdown(rules: Sequence[Rule]) -> str:
    """The reference of all rules. A rule's heading is its id, and so its anchor."""
    kinds: dict[str, list[str]] = {}
    parts = []
    for rule in rules:
        kind = f"{rule.severity.value}{', may be overridden' if rule.overridable else ''}".capitalize()
        kinds.setdefault(kind, []).append(f"[{rule.id}](#{rule.id})")
        facts = f"- {kind}\n- Why: {rule.reason}\n- Known from: {rule.source}\n- What to do: {rule.remedy}"
        parts += [f"## {rule.id}", rule.sentence, facts]
    index = [f"{kind}: {', '.join(links)}." for kind, links in kinds.items()]
    return "\n\n".join([RULES_INTRODUCTION, *index, *parts]) + "\n"


@app.command()
def plan(
    inventory: Inventory,
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
    as_json: Json = False,  # noqa: FBT002
    as_mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,  # noqa: FBT002
) -> None:
    """Show what would be deployed: engines, ports and pairs. Exit 0: right, 1: problems, 2: wrong usage."""
    if as_json and as_mermaid:
        raise typer.BadParameter("--json and --mermaid exclude each other.")
    result, found = _plan(inventory, extra_vars, vault_password_file, as_json)
    _finish(found, as_json, {"plan": _without_secrets(result)})
    if result is None or as_json:
        return
    if as_mermaid:
        from vllm_fleet.picture import mermaid

        sys.stdout.write(mermaid(result))
    else:
        _show(result)


@app.command()
def show(
    inventory: Inventory,
    svg: Annotated[Path, typer.Option("--svg", help="The file to write.", dir_okay=False)],
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
) -> None:
    """Draw what would be deployed: racks, hosts, GPUs, engines, ranks, ports. Exit 0, 1 and 2 as for plan."""
    result, found = _plan(inventory, extra_vars, vault_password_file, as_json=False)
    _finish(found, as_json=False, more={})
    if result is None:
        return
    from vllm_fleet.picture import svg as draw

    _write(svg, draw(result))
    sys.stdout.write(f"{svg}\n")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}.") from None


@app.command()
def diff(
    inventory: Annotated[
        list[str], typer.Option("--inventory", "-i", help="The inventory before, then the one after.")
    ],
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Show what a change of the inventory would start, stop and restart. Exit 0, 1 and 2 as for plan."""
    if len(inventory) != 2:
        raise typer.BadParameter("give two inventories: -i BEFORE -i AFTER.")
    from vllm_fleet.comparison import change_lines, compare

    plans = []
    for one in inventory:
        result, found = _plan([one], extra_vars, vault_password_file, as_json)
        if _refused(found):
            _finish(found, as_json, {"inventory": one, "changes": None})
        plans.append(result)
    before, after = plans
    changes = compare(before or {}, after or {})
    if as_json:
        document = {"ok": True, "changes": [change.as_dict() for change in changes]}
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(change_lines(changes)) + "\n")


def _plan(
    inventory: list[str],
    extra_vars: list[str] | None,
    vault_files: list[str] | None,
    as_json: bool,  # noqa: FBT001
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """The plan, None where the inventory is refused, and every problem."""
    loaded = _load(inventory, extra_vars, vault_files, as_json)
    from vllm_fleet.planning import plan as make_plan

    result, problems = make_plan(loaded.hosts, loaded.groups)
    found = loaded.all_problems(problems)
    return None if _refused(found) else result, found


def _without_secrets(plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """The plan for showing: values of the operator's own environment variables are hidden."""
    from vllm_fleet.problems import HIDDEN

    for host in plan["hosts"].values() if plan else ():
        for member in host["members"]:
            member["env"] |= dict.fromkeys(member["operator_env"], HIDDEN)
    return plan


def _load(
    inventory: list[str],
    extra_vars: list[str] | None,
    vault_files: list[str] | None,
    as_json: bool,  # noqa: FBT001
) -> Loaded:
    for file in [*inventory, *(vault_files or [])]:
        if not Path(file).exists():
            raise typer.BadParameter(f"{file} does not exist.")
    try:
        from vllm_fleet.loading import OptionError, UnreadableError, load
    except Exception as error:  # noqa: BLE001  Ansible reads ansible.cfg while it is imported, and may refuse it
        raise typer.BadParameter(f"Ansible cannot start: {' '.join(str(error).split())}") from None

    try:
        return load(inventory, extra_vars or [], vault_files or [])
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    except UnreadableError as error:
        _print(error.problems.all(), as_json, {})
        raise typer.Exit(PROBLEMS) from None


def _refused(problems: list[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _finish(problems: list[Problem], as_json: bool, more: dict[str, Any]) -> None:  # noqa: FBT001
    """Print what was found; leave with 1 if the inventory is refused."""
    _print(problems, as_json, more)
    if _refused(problems):
        raise typer.Exit(PROBLEMS)


def _print(problems: list[Problem], as_json: bool, more: dict[str, Any]) -> None:  # noqa: FBT001
    """The problems as text on stderr, or as JSON, with everything else, on stdout."""
    from vllm_fleet.problems import text_of

    found = [problem.as_dict() for problem in problems]
    if as_json:
        document = {"ok": not _refused(problems), "problems": found} | more
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    elif found:
        sys.stderr.write(text_of(found) + "\n")


def _show(plan: dict[str, Any]) -> None:
    """The plan as tables. Colours are rich's choice: only on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_fleet.proof import proof_ends, proof_pairs, proof_rounds

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width, and a name cut into pieces cannot be searched for

    def table(title: str, headings: list[str], rows: list[list[Any]]) -> None:
        drawn = Table(title=title, title_justify="left")
        for heading in headings:
            drawn.add_column(heading, overflow="fold")
        for row in rows:
            # As they are: rich would take the brackets of an IPv6 address for markup.
            drawn.add_row(*(Text(str(cell)) for cell in row))
        console.print(drawn)

    hosts = plan["hosts"]
    members = {member["name"]: member for host in hosts.values() for member in host["members"]}
    headings = ["engine", "role", "hosts", "GPUs", "TP", "PP", "DP", "EP", "URL", "side channel"]
    rows = [
        [
            *(engine["name"], engine["role"]),
            *_places(engine, members),
            *(engine[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")),
            *("yes" if engine["enable_expert_parallel"] else "", engine["url"], engine["side_channel"] or ""),
        ]
        for engine in plan["engines"]
    ]
    table("Engines", headings, rows)
    headless = [members[name] for engine in plan["engines"] for name in engine["members"][1:]]
    if headless:
        rows = [
            [
                *(member["name"], member["rank"], member["address"], _numbers(member["data_parallel_ranks"])),
                _numbers(member["devices"]),
            ]
            for member in headless
        ]
        table("Headless members", ["member", "node", "address", "DP ranks", "GPUs"], rows)
    rows = [[name, use["port"], use["purpose"]] for name, host in hosts.items() for use in host["ports"]]
    table("Ports", ["host", "port", "purpose"], rows)
    prefills, decodes = (len(proof_ends(plan, role)) for role in ("prefill", "decode"))
    if 0 < prefills * decodes <= SHOWN_PAIRS:
        pairs, turns = proof_pairs(plan), proof_rounds(plan)
        rows = [[number, pairs[index]["name"]] for number, turn in enumerate(turns, 1) for index in turn]
        table(f"Pairs in {len(turns)} round(s)", ["round", "pair"], rows)
    elif prefills:
        what = f"{prefills} prefill and {decodes} decode ranks"
        console.print(f"{what}: {prefills * decodes} pairs in {max(prefills, decodes)} rounds.")
    model = plan["model"]
    console.print(f"Model {model['served_name']} from {model['path']}; KV over {plan['kv_transport']}.")
    console.print(f"Front: {plan['router']['url']}")


def _places(engine: dict[str, Any], members: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Where an engine runs: its hosts, and the GPUs it has on each of them."""
    if engine["external"]:
        return "(external)", str(engine["gpus"])
    hosts, gpus = engine["hosts"], _numbers(members[engine["name"]]["devices"])
    return (hosts[0], gpus) if len(hosts) == 1 else (f"{hosts[0]} ... {hosts[-1]}", f"{len(hosts)} x {gpus}")


def _numbers(numbers: list[int]) -> str:
    """Consecutive numbers as first-last."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


@app.command()
def rollout(
    action: Annotated[
        str,
        typer.Argument(
            help="status, pause, resume, sleep, wake, abort, reset, peers, weights_info, prepare_update or "
            "set_version."
        ),
    ],
    version: Annotated[
        str | None, typer.Argument(help="Of set_version: what the weights are called.")
    ] = None,
    inventory: Annotated[
        list[str] | None,
        typer.Option("--inventory", "-i", help="Inventory file or directory; may be given several times."),
    ] = None,
    plan_file: Annotated[
        str | None,
        typer.Option("--plan", metavar="FILE", help="What `vllm-fleet plan --json` printed; - is stdin."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="Of pause and sleep: keep (as it is), wait or abort requests that run.")
    ] = None,
    level: Annotated[
        int | None, typer.Option(help="Of sleep: 1 (as it is) or 2, which throws the weights away.")
    ] = None,
    tags: Annotated[
        list[str] | None, typer.Option(help="Of wake: weights, kv_cache; may be given twice. Both as it is.")
    ] = None,
    recompute: Annotated[  # noqa: FBT002
        bool, typer.Option("--recompute", help="Of reset: compute requests that run again.")
    ] = False,
    allow_mixed: Annotated[  # noqa: FBT002
        bool, typer.Option("--allow-mixed", help="Of resume and prepare_update: weights of several versions.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that one call may take; fleet_control_timeout as it is.")
    ] = None,
    extra_vars: ExtraVars = None,
    vault_password_file: VaultFiles = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Pause, sleep, wake or resume all engines, in order. Exit 0: all are there, 1: not, 2: wrong usage."""
    from vllm_fleet.rollout import Fleet, Rollout, RolloutError

    if (inventory is None) == (plan_file is None):
        raise typer.BadParameter("give either an inventory (-i) or a plan (--plan).")
    options = {"version": version, "mode": mode, "level": level, "tags": tags or None}
    options |= {"recompute": recompute or None, "allow_mixed": allow_mixed or None}
    if plan_file is not None:
        document = _read_plan(plan_file)
    else:
        document, found = _plan(inventory or [], extra_vars, vault_password_file, as_json)
        if document is None:
            _finish(found, as_json, {})

    def progress(line: str) -> None:
        sys.stderr.write(line + "\n")

    try:
        result = Rollout(Fleet.from_plan(document), timeout, progress).perform(action, options)
    except RolloutError as error:
        raise typer.BadParameter(str(error)) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"Interrupted. Calls that were made go on; run {action} again to finish it.\n")
        raise typer.Exit(PROBLEMS) from None
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(result.lines()) + "\n")
    raise typer.Exit(RIGHT if result.ok else PROBLEMS)


def _read_plan(file: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise typer.BadParameter(
            f"{file} is not JSON; `vllm-fleet plan -i INVENTORY --json` prints a plan."
        ) from None


def main() -> None:
    """Entry point of the `vllm-fleet` command."""
    app()
