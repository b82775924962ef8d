"""Options of the commands that study a recipe or a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from paceline.command import Output, Overrides, Processes, RecipeName, RecipeOrRun, Scratch, Shape, command
from paceline.units import Duration


@command("noise-scale", runs="paceline_advisor.tuning.noise_scale:measure_noise")
@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Measure the gradient noise scale of a recipe or a run: how large a batch pays.

    A run is measured at each of its checkpoints. Nothing is trained and the run is not touched: gradients of parts of a
    batch are compared with those of the whole batch. The critical batch size, beyond which a larger batch costs more
    samples than it saves steps, is of the noise scale's order of magnitude and is given as a range. It grows during
    training: fresh weights say least. To log it during a run, at no extra pass, set telemetry.noise_scale.

    Examples:
      paceline noise-scale digits --steps 100
      paceline noise-scale runs/photos --output noise
      paceline noise-scale resnet50 data.path=IMAGENET --processes 2
    """

    target: RecipeOrRun
    overrides: Overrides = ()
    steps: Annotated[int, Ge(2), "Batches at each set of weights."] = 50
    processes: Processes = None
    output: Output = None
    scratch: Scratch = None


@command("sweep-batch", runs="paceline_advisor.tuning.batch_sweep.report:sweep_batch")
@dataclass(frozen=True, kw_only=True)
class SweepBatch:
    """Train to a target with several batch sizes, and fit where larger ones stop paying.

    Each run is a training of its own in a scratch directory, until the first evaluation that meets the target. Up to
    the knee a larger batch saves steps nearly in proportion; beyond it, it costs samples. The law of both is fitted to
    the runs of each learning rate rule, and the knee is printed with its interval. Runs that miss the target count too.

    A schedule that ends with the run makes the steps depend on its length; schedule.name=constant does not.

    Exits with 1 if no run met the target.

    Examples:
      paceline sweep-batch digits schedule.name=constant --batch-sizes 16,32,64,128,256 --to top1_accuracy=95
      paceline sweep-batch cifar10 data.path=cifar --batch-sizes 64,256,1024 --to top1_accuracy=90 \\
          --lr-rules linear,sqrt --output sweep
    """

    recipe: RecipeName
    overrides: Overrides = ()
    batch_sizes: Annotated[tuple[int, ...], Ge(1), Shape(required=True, metavar="N,..."), "Global batch sizes."]
    to: Annotated[str, Shape(required=True, metavar="METRIC=VALUE"), "The target, for example top1_accuracy=94."]
    lr_rules: Annotated[
        tuple[Literal["constant", "linear", "sqrt", "tuned"], ...],
        Shape(metavar="NAME,..."),
        "How the rate follows the batch, from the recipe's own: constant, linear, sqrt, or tuned, which tries five.",
    ] = ("linear",)
    seeds: Annotated[int, Ge(1), "Runs of each, one seed each."] = 3
    longest: Annotated[
        Duration | None,
        Shape(name="--max", metavar="DURATION"),
        "End a run that has not met the target by then (default: the recipe's train.duration).",
    ] = None
    processes: Annotated[int, Ge(1), "Ranks of each run."] = 1
    output: Annotated[
        Output, "Finished runs are written as they end; the same command with the same directory resumes the sweep."
    ] = None


@command("roofline", runs="paceline_advisor.roofline.study:roofline")
@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Compare a training step with what a device can do, layer by layer.

    The step runs on fake tensors: nothing is computed and no data is read. Times are lower bounds of each operator by
    itself, so a real step takes longer. --json holds all layers.

    Examples:
      paceline roofline resnet50 --device a100
      paceline roofline image_folder model.name=mobilenetv2_100 --device h100 --top 30
      paceline roofline digits --device cpu --json
    """

    recipe: RecipeName
    overrides: Overrides = ()
    device: Annotated[
        str | None,
        Shape(metavar="NAME"),
        "A device by name (h100, a100, v100, t4, …), present or not; cpu measures this one (default: the one here).",
    ] = None
    top: Annotated[int, Ge(1), "Number of layers to show."] = 15
