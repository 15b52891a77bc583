"""What lands on the hosts of every recipe is what was reviewed: golden/recipes, written by render_recipes.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from render_recipes import GOLDEN, recipes, rendered

OF_BOTH_SIDES = ("UCX_TLS", "UCX_CUDA_IPC_ENABLE_MNNVL", "UCX_CUDA_IPC_CACHE")


def kept(recipe: str) -> dict[str, str]:
    """The golden files of a recipe; not those of recipes in folders below it."""
    folder = GOLDEN / recipe
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.glob("*/*") if path.is_file()
    }


@pytest.mark.parametrize("recipe", recipes())
def test_what_lands_on_the_hosts_is_what_was_reviewed(recipe):
    assert rendered(recipe) == kept(recipe), "look at it, then run: python tests/unit/render_recipes.py"


def test_nothing_is_kept_of_a_recipe_that_is_gone():
    folders = {path.parents[1].relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("engine.env")}
    assert folders == set(recipes())


@pytest.mark.parametrize("recipe", recipes())
def test_both_sides_of_a_pair_have_the_same_ucx(recipe):
    sides = set()
    for name, text in kept(recipe).items():
        if name.endswith("engine.env"):
            env = dict(line.split("=", 1) for line in text.splitlines())
            sides.add(tuple(env.get(variable) for variable in OF_BOTH_SIDES))
    assert len(sides) == 1


@pytest.mark.parametrize("recipe", recipes())
def test_arguments_are_yaml_with_vllms_spelling(recipe):
    for name, text in kept(recipe).items():
        if Path(name).name == "engine.yaml":
            assert not [key for key in yaml.safe_load(text) if "_" in key]
