"""What lands on the hosts of every recipe, as golden files: `python tests/unit/render_recipes.py` writes them anew.

One folder for each kind of member: pool, slot, size, and whether it is a head. Look at the difference before you accept it: each is
what engines run with.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from typer.testing import CliRunner

from vllm_fleet.cli import app

ROOT = Path(__file__).parents[2]
INVENTORY = ROOT / "inventory"
GOLDEN = Path(__file__).parent / "golden/recipes"
ROLE = ROOT / "roles/vllm_engine"
FILES = {
    "engine.env": "engine.env.j2",
    "engine.yaml": "engine.yaml.j2",
    "vllm-engine.service": "vllm-engine.service.j2",
}
IMAGE = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
REVISION = "(revision)"
"""The revision changes with every line of the templates, and says nothing to a reader."""


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
    """Path below the recipe's golden folder -> text, rendered from the real templates with the role's own variables."""
    result = CliRunner().invoke(app, ["plan", "-i", str(INVENTORY / recipe), "--json"])
    plan = json.loads(result.stdout)["plan"]
    role = {}
    for path in ("defaults/main.yml", "vars/main.yml"):
        role |= yaml.safe_load((ROLE / path).read_text())
    of_role = {
        name: trust_as_template(value) if isinstance(value, str) else value for name, value in role.items()
    }
    texts = {}
    for member in kinds(plan):
        variables = {
            **of_role,
            "member": member,
            "vllm_engine_plan": plan,
            "vllm_engine_image_id": IMAGE,
            "__vllm_engine_revision": REVISION,
        }
        templar = Templar(DataLoader(), variables)
        for name, template in FILES.items():
            path = json.dumps(str(ROOT / "templates" / template))
            lookup = f"{{{{ lookup('ansible.builtin.template', {path}) }}}}"
            texts[f"{member['name']}/{name}"] = templar.template(trust_as_template(lookup))
    return texts


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
