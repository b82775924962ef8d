"""Choose precision, threads and compilation of a run, and check what this machine supports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import setting_error
from paceline.parsing.units import counted
from paceline.plan.facts import DataFacts, MachineFacts, NetworkFacts
from paceline.recipe.schema import Recipe

# A size with fewer forward passes than this is not worth the compilation time.
_MIN_COMPILED_FRACTION = 0.05

_MODE = "model.compile_mode"
WITH_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of ``model.compile_mode`` that record CUDA graphs."""
_WITH_TIMING = ("max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiled parts of a run.

    Attributes:
        compile: Back-end and mode of torch.compile, or ``off``.
        compiled_train_sizes: Sizes, in samples, of compiled micro-batches; others run uncompiled.
        compiled_evaluation_sizes: The same for evaluation.
    """

    compile: str = "off"
    compiled_train_sizes: tuple[int, ...] = ()
    compiled_evaluation_sizes: tuple[int, ...] = ()


def training_sizes(samples: int, global_batch_size: int, logical_ranks: int) -> Counter[int]:
    """Count the micro-batches of each size in an epoch, over all processes."""
    full, remainder = divmod(samples, global_batch_size)
    part, larger = divmod(remainder, logical_ranks)
    sizes = Counter({global_batch_size // logical_ranks: full * logical_ranks})
    sizes.update({part + 1: larger, part: logical_ranks - larger})
    return Counter({size: count for size, count in sizes.items() if size and count})


def evaluation_sizes(samples: int, batch_size: int) -> Counter[int]:
    """Count the evaluation batches of each size, over all processes."""
    full, remainder = divmod(samples, batch_size)
    return Counter({size: count for size, count in ((batch_size, full), (remainder, 1)) if size and count})


def plan_compilation(
    recipe: Recipe, machine: MachineFacts, data: DataFacts, parts: Sequence[int], world_size: int
) -> Compiled:
    """Determine which parts are compiled.

    Args:
        recipe: The recipe.
        machine: Facts of the machine.
        data: Facts of the data.
        parts: Micro-batches of a step over all processes, for each batch size.
        world_size: Processes.

    Raises:
        RecipeError: If the mode is not available here, or does not work with the rest of the recipe.
    """
    model = recipe.model
    if not model.compile:
        return Compiled()
    if model.compile_backend != "inductor" and model.compile_mode != "default":
        raise setting_error(
            _MODE,
            model.compile_mode,
            f"is a mode of inductor, and has no effect with model.compile_backend={model.compile_backend}; leave one "
            "of the two out.",
        )
    _check_graphs(recipe, machine.device, max(parts) // world_size)
    if model.compile_mode in _WITH_TIMING and (recipe.train.deterministic or recipe.parallel.exact):
        setting = "train.deterministic" if recipe.train.deterministic else "parallel.exact"
        raise setting_error(
            _MODE,
            model.compile_mode,
            "picks the kernels that benchmark fastest, which can differ between launches, and "
            f"{setting}=true requires the same sums each time; use {_MODE}=default.",
        )
    trained = training_sizes(data.train_samples, recipe.batch.global_size, parts[0])
    scored = evaluation_sizes(data.evaluation_samples, resolve_evaluation_batch(recipe))
    # Batches of many shapes would each need a graph.
    evaluated = recipe.evaluate.every is not None and recipe.data.evaluation_shape == "square"
    return Compiled(
        compile=f"{model.compile_backend}, {model.compile_mode}",
        compiled_train_sizes=_frequent_sizes(trained),
        compiled_evaluation_sizes=_frequent_sizes(scored) if evaluated else (),
    )


def _frequent_sizes(sizes: Mapping[int, int]) -> tuple[int, ...]:
    threshold = _MIN_COMPILED_FRACTION * sum(sizes.values())
    return tuple(sorted((size for size, count in sizes.items() if count >= threshold), reverse=True))


def _check_graphs(recipe: Recipe, device: str, accumulation_steps: int) -> None:
    """Refuse CUDA graphs if they are unavailable, or would overwrite tensors that are still needed."""
    mode = recipe.model.compile_mode
    objections = {
        f"which need a CUDA device, and this run is on {device}": (device != "cuda", ""),
        f"and each replay overwrites the last one's gradients: those of {accumulation_steps} micro-batches "
        "per step cannot be added up": (accumulation_steps > 1, ", or a larger batch.micro_size"),
        "each of which holds memory for one size of image, and data.progressive has several": (
            recipe.data.progressive.start_size is not None,
            ", or data.progressive.start_size=off",
        ),
        "and parallel.exact collects each gradient in its own memory": (recipe.parallel.exact, ""),
    }
    instead = "default" if mode == "reduce-overhead" else "max-autotune-no-cudagraphs"
    for reason, (applies, alternative) in objections.items():
        if applies and mode in WITH_GRAPHS:
            raise setting_error(_MODE, mode, f"records CUDA graphs, {reason}; use {_MODE}={instead}{alternative}.")


def without_slow_bf16(machine: MachineFacts, network: NetworkFacts | None) -> MachineFacts:
    """Return the machine, without fast bf16 if it computes this network faster in fp32."""
    if network is None or not network.is_depthwise or machine.device != "cpu" or not machine.fast_bf16:
        return machine
    return without_bf16(machine, "many of its products are depthwise convolutions, which CPUs compute faster in fp32")


def without_bf16(machine: MachineFacts, reason: str) -> MachineFacts:
    """Return the machine as if it had no fast bf16, so that ``train.precision=auto`` is fp32."""
    return replace(machine, fast_bf16=False, reasons=machine.reasons | {"fast_bf16": reason})


def resolve_precision(recipe: Recipe, machine: MachineFacts) -> str:
    """Return the numerics of ``train.precision``."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "bf16" if machine.fast_bf16 else "fp32"


def resolve_float32_matmul(recipe: Recipe, machine: MachineFacts) -> str:
    """Return the fp32 matmul precision: ``train.float32_matmul``, or ``default`` for torch's default.

    Raises:
        RecipeError: If this machine does not support it.
    """
    requested = recipe.train.float32_matmul
    if requested == "auto":
        return "default"
    feature = {"high": "tf32", "medium": "bf16_products"}.get(requested, "")
    if reason := machine.lacks.get(feature):
        raise setting_error("train.float32_matmul", requested, f"has no effect here: {reason}; use auto or highest.")
    return requested


def resolve_channels_last(recipe: Recipe, machine: MachineFacts, *, is_useful: bool = True) -> bool:
    """Return the memory format of ``model.channels_last``; by default only if the task supports it."""
    requested = recipe.model.channels_last
    return is_useful and machine.device in ("cpu", "cuda", "xpu") if requested == "auto" else requested


def resolve_threads(recipe: Recipe, machine: MachineFacts, local_world_size: int) -> tuple[int, str]:
    """Return the CPU threads per process, ``parallel.threads``, and the reason."""
    requested = recipe.parallel.threads
    if requested != "auto":
        return requested, ""
    if recipe.parallel.exact and machine.device == "cpu":
        return 1, "parallel.exact: sums over one thread do not depend on the number of processes"
    if machine.assigned_cores is not None:
        reason = "the physical cores that parallel.affinity gives it, or fewer (OMP_NUM_THREADS)"
        return min(machine.assigned_cores, machine.threads or machine.assigned_cores), reason
    share = max(1, machine.cores // local_world_size)
    if machine.threads not in (None, share):
        return machine.threads, "as OMP_NUM_THREADS says"
    return share, f"{counted(machine.cores, 'core')} for {counted(local_world_size, 'process')} here"


def resolve_evaluation_batch(recipe: Recipe) -> int:
    """Return the samples per evaluation batch; never a function of the number of processes."""
    requested = recipe.evaluate.batch_size
    return min(256, recipe.batch.global_size) if requested == "auto" else requested


def explain_compute(recipe: Recipe, machine: MachineFacts) -> dict[str, str]:
    """Explain by dotted key the machine-dependent choices that the recipe leaves open."""
    device = machine.device
    is_faster = resolve_channels_last(recipe, machine)
    return {
        "parallel.device": ("no usable GPU was found" if device == "cpu" else f"a {device} device was found"),
        "train.precision": machine.reasons.get("fast_bf16", ""),
        "train.float32_matmul": (
            "torch's default: TF32 for convolutions, fp32 for matrix products" if device == "cuda" else "fp32"
        ),
        "model.channels_last": (
            f"convolutions on {device} have kernels for it" if is_faster else f"{device} gains nothing by it"
        ),
        "evaluate.batch_size": "independent of the number of processes, so that every sample gets the same score",
    }
