"""Choose the parallel strategy, and check whether a model replica fits each device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import RecipeError, setting_error
from paceline.optimizers import OF_MATRICES, RULES
from paceline.parsing.units import format_bytes
from paceline.plan.facts import MachineFacts, NetworkFacts, ParameterNumbers
from paceline.recipe.layers import either
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer

# Fraction of a device's memory that a replica's state may use; the rest is for activations and library overhead.
_STATE_FRACTION = 0.7
_FP32_BYTES = 4


def choose_strategy(
    recipe: Recipe,
    world_size: int,
    parts: Sequence[int],
    network: NetworkFacts | None,
    machine: MachineFacts,
) -> tuple[str, dict[str, str]]:
    """Choose the strategy, with reasons by dotted key.

    Args:
        recipe: The recipe.
        world_size: Processes.
        parts: Micro-batches of a step over all processes, for each batch size.
        network: Facts of the network; without them ``auto`` is ``ddp`` with several processes, and may become ``fsdp``.
        machine: The machine.

    Raises:
        RecipeError: If the requested one does not fit the processes or the rest of the recipe.
    """
    requested = recipe.parallel.strategy
    reasons = {}
    if recipe.parallel.exact:
        _check_exact(recipe)
        reasons["parallel.strategy"] = (
            "parallel.exact: gradients are summed in one fixed tree for any number of processes"
        )
        reasons["parallel.exact"] = _cost_of_exact(max(parts), world_size)
        strategy = "exact"
    elif requested != "auto":
        _check_processes(requested, world_size)
        strategy = requested
    else:
        numbers = None if network is None else network.parameters
        strategy, reasons["parallel.strategy"] = choose_automatically(
            *(recipe, numbers, world_size, machine.memory_bytes)
        )
    if strategy == "fsdp":
        check_sharding(recipe, world_size)
    if network is not None:
        _check_noise_scale(recipe, strategy, min_parts=min(parts))
    _check_verify(recipe, strategy, machine.device)
    return strategy, reasons


def _check_exact(recipe: Recipe) -> None:
    if recipe.parallel.strategy != "auto":
        raise RecipeError(
            f"parallel.exact=true sums gradients in its own order, and parallel.strategy={recipe.parallel.strategy} "
            "does not; leave the strategy at auto, or turn exactness off.",
            key="parallel.exact",
            value=True,
        )
    if recipe.parallel.unused_parameters == "allow":
        raise setting_error(
            "parallel.unused_parameters",
            "allow",
            "does not work with parallel.exact=true, which sums a gradient of every trainable parameter; freeze unused "
            "ones (model.frozen).",
        )


def _check_processes(requested: str, world_size: int) -> None:
    if requested == "single" and world_size > 1:
        problem = f"with {world_size} processes; use ddp, fsdp, auto, or one process."
    elif requested in ("ddp", "fsdp") and world_size == 1:
        problem = "has no effect with one process; use auto, or --processes 2 or more."
    else:
        return
    raise setting_error("parallel.strategy", requested, problem)


def choose_automatically(
    recipe: Recipe, numbers: ParameterNumbers | None, world_size: int, memory_bytes: int | None
) -> tuple[str, str]:
    """Return the strategy for ``auto``, with the reason: replicas if they leave room for activations.

    Args:
        recipe: The recipe, which determines the state per parameter.
        numbers: Number of parameters; None if not known yet.
        world_size: Processes.
        memory_bytes: Memory of each process's device; None if unknown.
    """
    if world_size == 1:
        return "single", "1 process"
    if numbers is None or memory_bytes is None:
        return "ddp", f"{world_size} processes"
    replica = replica_bytes(recipe, numbers)
    shard = replica / (world_size if recipe.parallel.shard_size == "all" else recipe.parallel.shard_size)
    state = f"a replica's weights, gradients, optimizer state and average take {_gigabytes(replica)}"
    memory = f"of the {_gigabytes(memory_bytes)} that a process has"
    if replica <= _STATE_FRACTION * memory_bytes:
        return "ddp", f"{world_size} processes; {state} {memory}, and the rest is left for activations"
    each = f"sharded over the processes it is {_gigabytes(shard)} each, plus activations"
    return "fsdp", f"{state}, more than {_STATE_FRACTION:.0%} {memory}; {each}"


def replica_bytes(recipe: Recipe, numbers: ParameterNumbers) -> int:
    """Return the memory of one complete copy of the training state and its gradients, all in fp32.

    These are the first three of the four uses of memory (weights, gradients, optimizer state), and the moving average;
    the fourth, activations, depends on the batch (Rajbhandari et al. 2019, section 3.1).
    """
    averaged = 0 if recipe.train.ema is None else numbers.every
    numbers_kept = numbers.every + averaged + numbers.trained * (1 + optimizer_state_numbers(recipe.optimizer))
    return numbers_kept * _FP32_BYTES


def check_sharding(recipe: Recipe, world_size: int) -> None:
    """Check that the recipe's other choices work with sharded weights.

    Raises:
        RecipeError: Naming the first choice that does not.
    """
    model, optimizer, precision = recipe.model, recipe.optimizer, recipe.train.precision
    size = recipe.parallel.shard_size
    unsupported = "does not work with parallel.strategy=fsdp yet; leave it out, or use parallel.strategy=ddp."
    objections = {
        f"parallel.shard_size={size} does not divide {world_size} processes into groups of two or more; give a divisor "
        "of their number, or all for one group.": size != "all" and (size < 2 or world_size % size > 0),
        "model.compile=true does not work with parallel.strategy=fsdp yet, which gathers weights inside the compiled "
        "code; turn it off, or use parallel.strategy=ddp.": model.compile,
        f"model.unfreeze {unsupported}": model.unfreeze,
        f"model.freeze_after {unsupported}": model.freeze_after,
        "parallel.unused_parameters=allow does not work with parallel.strategy=fsdp, where all processes gather the "
        "same "
        "weights at the same time; use all parameters, freeze the others, or use parallel.strategy=ddp.": (
            recipe.parallel.unused_parameters == "allow"
        ),
        f"optimizer.name={optimizer.name} needs whole matrices, but parallel.strategy=fsdp shards them; use "
        f"{either(name for name in RULES if name not in OF_MATRICES)}, or parallel.strategy=ddp.": (
            optimizer.name in OF_MATRICES
        ),
        f"optimizer.clip_adaptive={optimizer.clip_adaptive} compares whole rows, which parallel.strategy=fsdp may "
        "shard; use optimizer.clip_norm or clip_value, or parallel.strategy=ddp.": (
            optimizer.clip_adaptive is not None
        ),
        "train.precision=fp16 scales the loss by the gradients of one process, but parallel.strategy=fsdp shards them; "
        "use bf16, or parallel.strategy=ddp.": precision == "fp16",
        "parallel.gather_dtype=bf16 computes in bf16, and train.precision=fp32 does not; use train.precision=bf16, or "
        "gather fp32.": recipe.parallel.gather_dtype == "bf16" and precision == "fp32",
    }
    if message := next((objection for objection, applies in objections.items() if applies), None):  # its key is first
        raise RecipeError(message, key=message.split()[0].partition("=")[0])


def _check_noise_scale(recipe: Recipe, strategy: str, *, min_parts: int) -> None:
    """Check that some process holds the gradient of less than the whole batch, which the noise scale needs.

    Args:
        recipe: The recipe, which says whether the noise scale is requested.
        strategy: The parallel strategy.
        min_parts: Smallest number of micro-batches per step, over all processes and epochs.

    Raises:
        RecipeError: With what to change, if none does.
    """
    if recipe.telemetry.noise_scale is None:
        return
    key, value = "telemetry.noise_scale", recipe.telemetry.noise_scale
    if strategy == "fsdp":
        raise setting_error(
            key,
            value,
            "compares the gradient of a micro-batch with the whole batch's, but with parallel.strategy=fsdp no process "
            "holds its own whole gradient; use parallel.strategy=ddp, or turn it off.",
        )
    if min_parts < 2:
        batch = recipe.batch.global_size
        half = next((size for size in range(batch // 2, 0, -1) if batch % size == 0), 1)
        remedy = f"set batch.micro_size={half}, use several processes, " if batch > 1 else "use a larger batch "
        raise setting_error(
            key,
            value,
            f"compares the gradients of a step's micro-batches, and here a step is one micro-batch of {batch} samples; "
            f"{remedy}or leave it off and run `paceline noise-scale`, which splits the batch itself.",
        )


def _check_verify(recipe: Recipe, strategy: str, device: str) -> None:
    """Check that a step can be computed again bit for bit from a checkpoint, if that is wanted."""
    if (every := recipe.verify.every) is None:
        return
    varies = device != "cpu" and not recipe.train.deterministic
    lacks = {
        "compares whole replicas, and parallel.strategy=fsdp has none; use parallel.strategy=ddp": strategy == "fsdp",
        f"compares bits, which {device} repeats only with train.deterministic=true; set it": varies,
        "needs checkpoints, and checkpoint.every=off saves none; set it": recipe.checkpoint.every is None,
    }
    if problem := next((each for each, applies in lacks.items() if applies), None):
        raise setting_error("verify.every", every, f"{problem}, or leave verify.every out.")


def optimizer_state_numbers(optimizer: Optimizer) -> int:
    """Return how many numbers an optimizer keeps per parameter; assumed for an optimizer of another package."""
    if optimizer.uses_sgd_for_rest:
        return 1
    return optimizer.rule.state_numbers + (optimizer.has("momentum") and optimizer.momentum > 0)


def exact_gradient_count(logical_ranks: int, world_size: int) -> int:
    """Return the maximum number of gradients that a process of an exact run holds."""
    per_process = logical_ranks // world_size
    depth = math.ceil(math.log2(per_process))
    # One being computed, and the partial sums of a process's leaves; more if those are not an aligned power of two.
    return 2 + (depth if per_process & (per_process - 1) == 0 else 2 * depth - 1)


def _cost_of_exact(logical_ranks: int, world_size: int) -> str:
    memory = f"memory for up to {exact_gradient_count(logical_ranks, world_size)} gradients per process"
    if world_size == 1:
        return f"it costs {memory}, where there would be one"
    return (
        f"it costs {memory}, where ddp holds one, and the time of their exchange, which ddp hides behind the backward "
        "pass (measured in docs/guide/several-processes.md)"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else format_bytes(size)
