"""Commands that predict several GPUs: each dataclass holds the options of one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from paceline.command import Output, Shape, command
from paceline.errors import RecipeError
from paceline.parsing.units import TimeSpan
from paceline_advisor import frozen
from paceline_advisor.commands import Count, OptionalCount, RecipeCommand
from paceline_advisor.measured_rate import MeasuredRate

_MOST_DEVICES = 1_000_000


@frozen
class ClusterOptions(RecipeCommand):
    """Options of `scale` and `plan`: the cluster, and the speed of one device on it."""

    batch_per_gpu: Annotated[
        OptionalCount,
        "Give each GPU N samples, so that the step grows with the number of GPUs (weak scaling), as in published "
        "tables. Without it they share the recipe's global batch (strong scaling).",
    ] = None
    cluster: Annotated[
        str | None,
        Shape(metavar="NAME|FILE"),
        "dgx-1, dgx-2, dgx-a100, dgx-h100, 8xh200, p4d, ethernet-10g, ... or your own YAML file "
        "(docs/guide/scaling.md); default: this machine.",
    ] = None
    price_per_gpu_hour: Annotated[
        float | None, Gt(0), Shape(metavar="DOLLARS"), "Instead of the cluster's, if any."
    ] = None
    shared_node: Annotated[
        bool, "Pay only for the GPUs used; without it whole nodes are paid for, as clouds rent them."
    ] = False
    samples: Annotated[OptionalCount, "Training samples per epoch, if the data is not here."] = None
    throughput: Annotated[float | None, Gt(0), Shape(metavar="RATE"), "One GPU's samples per second."] = None
    step_seconds: Annotated[
        float | None, Gt(0), Shape(metavar="S"), "One GPU's step time, instead of --throughput."
    ] = None
    one_gpu_batch: Annotated[
        OptionalCount, "Samples of the step measured for that figure; larger shares take several passes."
    ] = None
    gpus_measured: Annotated[
        MeasuredRate | None,
        Shape(metavar="K:RATE", parse=MeasuredRate.parse),
        "Samples per second that K GPUs reached together: scales the costs of several GPUs to it.",
    ] = None
    loop: Annotated[
        Literal["paceline", "nvidia-convnets"],
        "Training loop: ours, or NVIDIA's published one, to check its tables.",
    ] = "paceline"
    cpu_ms_per_sample: Annotated[
        float | None,
        Ge(0),
        Shape(metavar="MS"),
        "CPU time for reading and augmenting a sample; 0 if the CPU does not do it.",
    ] = None

    @property
    def has_figure(self) -> bool:
        """Whether the user gives the speed of one device."""
        return self.throughput is not None or self.step_seconds is not None

    def scale(self, sizes: tuple[int, ...]) -> Scale:
        """The prediction for some numbers of devices, with every strategy."""
        return Scale(**{each.name: getattr(self, each.name) for each in fields(ClusterOptions)}, world_sizes=sizes)

    def __post_init__(self) -> None:
        if self.one_gpu_batch is not None and not self.has_figure:
            raise RecipeError("--one-gpu-batch needs --throughput or --step-seconds; add one of them.")
        if self.throughput is not None and self.step_seconds is not None:
            raise RecipeError("--throughput and --step-seconds mean the same thing; give one of them.")
        if self.step_seconds is not None and self.one_gpu_batch is None and self.batch_per_gpu is None:
            raise RecipeError("--step-seconds needs the samples of a step; add --one-gpu-batch.")


@command("scale", runs="paceline_advisor.scaling.study:scale", group="Before a run", place=2)
@frozen
class Scale(ClusterOptions):
    """Predict scaling over GPUs, and measure it where possible.

    Samples per second, efficiency, hours and cost are predicted with DDP and FSDP. The prediction starts from one
    device's speed: yours (--throughput, --step-seconds), measured here if the cluster is this machine or has its GPU,
    or else the bound from the GPU's peak and memory. The cost of more devices is computed from the cluster's links, the
    network's layers and the host's work. The range held 90 % of the published rates of networks that were left out of
    the fit.

    Without a recipe, --parameters describes a network that is not at hand, and --batches fits the critical batch size
    to a table of runs.

    Examples:
      paceline scale digits --world-sizes 1,2 --measure
      paceline scale resnet50 --cluster dgx-a100 --throughput 2470 --batch-per-gpu 256
      paceline scale resnet50 --cluster my-cluster.yaml --step-seconds 0.11 --one-gpu-batch 256 --world-sizes 8,64
      paceline scale --parameters 335e6 --cluster dgx-a100 --throughput 110 --batch-per-gpu 32 --gpus-measured 4:425
      paceline scale --batches epochs-to-target.csv --at 8192
    """

    recipe: Annotated[str, Shape(metavar="[RECIPE]", argument=True, recipe=True)] = ""

    world_sizes: Annotated[
        tuple[int, ...], Ge(1), Shape(metavar="N,..."), "Numbers of GPUs, or of processes on CPUs."
    ] = (1, 2, 4, 8)
    strategy: Annotated[Literal["both", "ddp", "fsdp"], "Strategies to predict."] = "both"
    parameters: Annotated[
        float | None,
        Ge(1),
        Shape(metavar="N"),
        "Parameters of a network that no recipe builds; with --cluster, --batch-per-gpu and one GPU's speed.",
    ] = None
    batches: Annotated[
        Path | None,
        Shape(metavar="TABLE", path="file"),
        "Fit steps against batch size to a CSV file with the columns batch and epochs, steps or samples to the target.",
    ] = None
    at: Annotated[
        tuple[int, ...], Ge(1), Shape(metavar="N,...", only="batches"), "Batches to predict from that table."
    ] = ()
    measure: Annotated[bool, "Run the recipe here in these sizes too, and print what was predicted."] = False
    rounds: Annotated[OptionalCount, "Rounds per measurement (default: 5)."] = None
    output: Output = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices, ascending."""
        measured = set() if self.gpus_measured is None else {self.gpus_measured.gpus}
        return tuple(sorted({*self.world_sizes, *measured}))

    @property
    def strategies(self) -> tuple[Literal["ddp", "fsdp"], ...]:
        """The strategies to predict."""
        return ("ddp", "fsdp") if self.strategy == "both" else (self.strategy,)

    def __post_init__(self) -> None:
        super().__post_init__()
        subjects = {"RECIPE": self.recipe, "--parameters": self.parameters, "--batches": self.batches}
        given = [name for name, value in subjects.items() if value]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RecipeError(f"found {found} to predict from; give one of RECIPE, --parameters and --batches.")
        if self.batches is not None:
            own = {"recipe", "batches", "at", "output"}
            others = [
                each.name for each in fields(self) if each.name not in own and getattr(self, each.name) != each.default
            ]
            if others:
                names = ["KEY=VALUE" if name == "overrides" else f"--{name.replace('_', '-')}" for name in others]
                raise RecipeError(f"--batches fits a table alone, without {', '.join(names)}; leave out all but --at.")
        if max(self.sizes) > _MOST_DEVICES:
            raise RecipeError(
                f"{max(self.sizes)} GPUs are too many to predict; ask for at most {_MOST_DEVICES:,} (--world-sizes, "
                "--gpus-measured)."
            )
        if self.parameters is not None:
            needed = {
                "--cluster": self.cluster is not None,
                "--batch-per-gpu": self.batch_per_gpu is not None,
                "one GPU's --throughput": self.has_figure,
            }
            if missing := [name for name, is_given in needed.items() if not is_given]:
                raise RecipeError(f"--parameters also needs {', '.join(missing)}; add {missing[0]}.")
            if self.measure or self.overrides:
                raise RecipeError("--measure and KEY=VALUE need a recipe; leave them out with --parameters.")
        if self.rounds is not None and self.has_figure and not self.measure:
            raise RecipeError("--rounds has no effect here: nothing is measured without --measure. Leave it out.")


@command("plan", runs="paceline_advisor.scaling.planning:plan_training", group="Before a run", place=1)
@frozen
class PlanTraining(ClusterOptions):
    """Choose the number of GPUs for a deadline or a budget.

    It finds the cheapest training that meets a deadline, or the fastest within a budget, with GPUs, strategy, global
    batch, learning rate, hours and cost. Deadline and budget are compared with the upper end of the prediction's range.
    Nothing is changed: the recipe's batch and learning rate stay unless you ask for a rule. Passes are as large as the
    GPU's memory allows, by what `paceline estimate` says.

    Exits with 1 if no configuration meets the target (the closest is shown), and without a figure of one GPU, as a
    bound decides nothing.

    Examples:
      paceline plan resnet50 --cluster dgx-a100 --throughput 2470 --one-gpu-batch 256 --deadline 3h
      paceline plan resnet50 --cluster p4d --throughput 2300 --one-gpu-batch 256 --budget 150
      paceline plan resnet50 --cluster p4d --throughput 2300 --batch-per-gpu 256 --lr-rule linear --deadline 1h
    """

    deadline: Annotated[
        TimeSpan | None, Shape(metavar="TIME", parse=TimeSpan.parse), "Maximum training time: 8h, 90 minutes, 2d."
    ] = None
    budget: Annotated[float | None, Gt(0), Shape(metavar="DOLLARS"), "Maximum cost."] = None
    most_gpus: Annotated[Count, "Maximum number of GPUs to consider."] = 256
    lr_rule: Annotated[
        Literal["none", "linear", "sqrt"],
        "Learning-rate rule for a larger batch; none leaves it to the recipe's optimizer.lr_scaling.",
    ] = "none"

    @property
    def deadline_hours(self) -> float | None:
        """The deadline in hours."""
        return None if self.deadline is None else self.deadline.seconds / 3600

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deadline is None and self.budget is None:
            raise RecipeError("plan needs a goal: give --deadline, for example 8h, --budget in dollars, or both.")
        if self.lr_rule != "none" and self.batch_per_gpu is None:
            raise RecipeError(
                f"--lr-rule={self.lr_rule} has no effect with a fixed global batch; add --batch-per-gpu, which lets it "
                "grow, or leave it out."
            )
