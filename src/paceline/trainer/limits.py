"""What will a plan's loader processes ask of this machine, and has it got that?"""

from __future__ import annotations

from paceline.data.image.shapes import LARGEST_RATIO
from paceline.data.preflight import Findings, Loading, look_at_machine
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe


def look_for_limits(plan: Plan, recipe: Recipe) -> Findings:
    """Compare a plan with this machine; nothing is found of tasks that do not say how they load their samples."""
    loading = _loading(plan, recipe)
    return Findings() if loading is None else look_at_machine(loading)


def _loading(plan: Plan, recipe: Recipe) -> Loading | None:
    facts = {name: plan.data.get(name) for name in ("workers", "channels", "image_size", "evaluation_size")}
    known = {name: value for name, value in facts.items() if isinstance(value, int)}
    if len(known) < len(facts) or known["workers"] == 0:
        return None
    evaluation = 0
    if plan.evaluation_samples > 0 and plan.evaluate_every_steps is not None:
        ratio = LARGEST_RATIO if "evaluation_shapes" in plan.data else 1
        evaluation = plan.evaluation_batch_size * known["channels"] * known["evaluation_size"] ** 2 * ratio
    return Loading(
        processes=plan.local_world_size,
        workers=known["workers"],
        prefetch=recipe.data.prefetch,
        train_batch_bytes=plan.micro_batch_size * known["channels"] * known["image_size"] ** 2,
        evaluation_batch_bytes=evaluation,
    )
