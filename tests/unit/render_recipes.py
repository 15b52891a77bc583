"""What lands on the hosts of every recipe, as golden files: `python tests/unit/render_recipes.py` writes them anew.

One folder for each kind of member: pool, slot, size, and whether it is a head. Look at the difference before you accept it: each is
what engines run with.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from vllm_fleet.cli import app

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/support"))  # where this file is run and not imported by a test

import rendering  # noqa: E402

INVENTORY = ROOT / "inventory"
GOLDEN = Path(__file__).parent / "golden/recipes"


def recipes() -> list[str]:
    """Every inventory of the repository, by its folder."""
    return sorted(path.parent.relative_to(INVENTORY).as_posix() for path in INVENTORY.rglob("hosts.yml"))


def kinds(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first member of each kind."""
    seen = set()
    for host in plan["hosts"].values():
        for member in host["members"]:
            kind = member["pool"], tuple(member["devices"]), member["head"]
            if kind not in seen:
                seen.add(kind)
                yield member


def rendered(recipe: str) -> dict[str, str]:
    """Path below the recipe's golden folder -> text."""
    result = CliRunner().invoke(app, ["plan", "-i", str(INVENTORY / recipe), "--json"])
    plan = json.loads(result.stdout)["plan"]
    return {
        f"{member['name']}/{name}": text
        for member in kinds(plan)
        for name, text in rendering.rendered(plan, member).items()
    }


def main() -> None:
    """Write all golden files anew."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for recipe in recipes():
        for name, text in rendered(recipe).items():
            path = GOLDEN / recipe / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
