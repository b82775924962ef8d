"""What will the loader processes of a run, or of scoring, ask of this machine, and has it got that?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.image.pipeline import LARGEST_RATIO
from paceline.data.preflight import Findings, Loading, look_at_machine
from paceline.recipe.plan import DataFacts, Plan, resolve_evaluation_batch
from paceline.recipe.schema import Recipe
from paceline.world import World


def look_for_limits(plan: Plan, recipe: Recipe) -> Findings:
    """Compare a plan with this machine; nothing is found of tasks that do not say how they load their samples."""
    scores = plan.evaluation_samples > 0 and plan.evaluate_every_steps is not None
    scored = plan.evaluation_batch_size if scores else 0
    return _look(plan.data, recipe, plan.local_world_size, trained=plan.micro_batch_size, scored=scored)


def look_for_limits_of_scoring(facts: DataFacts, recipe: Recipe, world: World) -> Findings:
    """The same of weights that are scored on their own."""
    scored = resolve_evaluation_batch(recipe, {})
    return _look(facts.description, recipe, world.local_world_size, trained=0, scored=scored)


def _look(data: Mapping[str, Any], recipe: Recipe, processes: int, *, trained: int, scored: int) -> Findings:
    """Compare batches of so many images with this machine."""
    if data.get("backend") != "pytorch":
        return Findings()  # DALI's workers are threads, and what is in memory has none
    facts = {name: data.get(name) for name in ("workers", "channels", "image_size", "evaluation_size")}
    known = {name: value for name, value in facts.items() if isinstance(value, int)}
    if len(known) < len(facts):
        return Findings()
    ratio = LARGEST_RATIO if "evaluation_shapes" in data else 1
    return look_at_machine(
        Loading(
            processes=processes,
            workers=known["workers"],
            prefetch=recipe.data.prefetch,
            train_batch_bytes=trained * known["channels"] * known["image_size"] ** 2,
            evaluation_batch_bytes=scored * known["channels"] * known["evaluation_size"] ** 2 * ratio,
        )
    )
