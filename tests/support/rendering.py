"""The files of a member as they land on its host, rendered from the real templates with the role's own variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

ROOT = Path(__file__).parents[2]
ROLE = ROOT / "roles/vllm_engine"
FILES = {
    "engine.env": "engine.env.j2",
    "engine.yaml": "engine.yaml.j2",
    "vllm-engine.service": "vllm-engine.service.j2",
}
IMAGE = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
REVISION = "(revision)"
"""The revision changes with every line of the templates, and says nothing to a reader."""


def rendered(plan: dict[str, Any], member: dict[str, Any]) -> dict[str, str]:
    """File name -> text."""
    role = {}
    for path in ("defaults/main.yml", "vars/main.yml"):
        role |= yaml.safe_load((ROLE / path).read_text())
    variables = {
        name: trust_as_template(value) if isinstance(value, str) else value for name, value in role.items()
    }
    variables |= {
        "member": member,
        "vllm_engine_plan": plan,
        "vllm_engine_image_id": IMAGE,
        "__vllm_engine_revision": REVISION,
    }
    templar = Templar(DataLoader(), variables)
    texts = {}
    for name, template in FILES.items():
        path = json.dumps(str(ROOT / "templates" / template))
        lookup = f"{{{{ lookup('ansible.builtin.template', {path}) }}}}"
        texts[name] = templar.template(trust_as_template(lookup))
    return texts
