"""What converted command lines come to, for the tests of both importers."""

from __future__ import annotations

from pathlib import Path

from paceline.host.world import World
from paceline.plan import DataFacts, MachineFacts, Plan, make
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline_ops.imports.draft import Conversion


def load(conversion: Conversion, folder: Path) -> LoadedRecipe:
    """The recipe, written and read back."""
    path = folder / "recipe.yaml"
    path.write_text(conversion.to_yaml(), encoding="utf-8")
    return load_recipe(path)


def plan_of(loaded: LoadedRecipe, processes: int) -> Plan:
    """On ImageNet's numbers, on machines with as many GPUs; no key is in vain."""
    data = DataFacts(train_samples=1281167, evaluation_samples=50000)
    machine = MachineFacts(device="cuda", device_name="a GPU", fast_bf16=True, cores=8)
    world = World(world_size=processes, local_world_size=min(8, processes))
    plan = make(loaded.recipe, world=world, data=data, machine=machine)
    assert loaded.checked(plan.unused).notices == ()
    return plan


def check_keys(conversion: Conversion, keys: dict[str, object], folder: Path) -> None:
    """Nothing is refused, the recipe can be read, and has these values by their dotted keys."""
    assert conversion.refused == ()
    for dotted, expected in keys.items():
        found: object = conversion.tree
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        assert found == expected, dotted
    load(conversion, folder)
