"""What of a recipe is left when everything is set aside that a proof does without?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.recipe.layers import set_keys, spelled
from paceline.recipe.load import to_tree
from paceline.recipe.plan import Plan
from paceline.recipe.profile import Profile
from paceline.recipe.running import Parallel
from paceline.recipe.schema import Recipe

# What only says how the arithmetic is shared out, on machines that need not be this one.
_OF_OTHER_MACHINES = (
    "strategy",
    "shard_size",
    "shard_modules",
    "reshard_after_forward",
    "gather_dtype",
    "gradient_compression",
    "static_graph",
    "affinity",
)


def neutral(recipe: Recipe) -> Recipe:
    """The recipe without what another machine than this, or another number of processes, may be needed for.

    What it comes to, its steps and rates, is the same.
    """
    here = {key: getattr(Parallel(), key) for key in _OF_OTHER_MACHINES}
    return replace(
        recipe,
        model=replace(recipe.model, compile=False),
        train=replace(recipe.train, precision="fp32", float32_matmul="auto", deterministic=False),
        parallel=replace(recipe.parallel, device="cpu", **here),
        telemetry=replace(recipe.telemetry, profile=Profile()),
    )


def bare(recipe: Recipe) -> Recipe:
    """The same, also without what a short run has no use for, or cannot be told from a mistake in it."""
    found = neutral(recipe)
    # Dropout of the adapters' own: they come after the network was put to rest.
    adapters = replace(found.model.adapters, dropout=0.0)
    return replace(
        found,
        model=replace(
            found.model,
            pretrained=False,
            initialize_from=None,
            initialize_partly=False,
            unfreeze={},
            freeze_after={},
            adapters=adapters,
        ),
        data=replace(found.data, augment=replace(found.data.augment, repeats=1)),
        batch=replace(found.batch, growth={}),
        optimizer=replace(found.optimizer, clip_adaptive=None),
        train=replace(found.train, until=None, nonfinite="stop"),
        evaluate=replace(found.evaluate, patience=None),
    )


def set_aside(recipe: Recipe) -> list[str]:
    """What a recipe asks for, beyond the defaults, that a proof does without, as overrides say it."""
    left, usual = bare(recipe), Recipe()
    return [
        spelled(recipe, key)
        for key in set_keys(to_tree(recipe))
        if key != "parallel.device" and spelled(recipe, key) not in (spelled(left, key), spelled(usual, key))
    ]


def unused(plans: Iterable[Plan]) -> dict[str, str]:
    """The keys that none of a recipe's neutral plans uses, with the reason: but for those that are set aside anyway."""
    first, *others = plans
    aside = ("telemetry.profile.", *(f"parallel.{key}" for key in _OF_OTHER_MACHINES))
    return {
        key: why
        for key, why in first.unused.items()
        if not key.startswith(aside) and all(key in other.unused for other in others)
    }
