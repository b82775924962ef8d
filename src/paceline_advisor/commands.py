"""Commands of the advisor: each dataclass holds the options of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import click
from annotated_types import Ge, Gt, Lt

from paceline.cli.options import is_first_process
from paceline.command import (
    JoinedProcesses,
    Output,
    Overrides,
    Processes,
    RecipeName,
    RecipeOrRun,
    Runs,
    Scratch,
    Shape,
    Weights,
    command,
)
from paceline.errors import PacelineError, RecipeError, did_you_mean
from paceline.parsing.units import Duration, parse_bytes
from paceline.recipe.load import LoadedRecipe, load_recipe, refuse_training_overrides
from paceline.recipe.running import Parallel
from paceline.recipe.training import TrainSection
from paceline_advisor import frozen
from paceline_advisor.apply import check_new

Count = Annotated[int, Ge(1)]
OptionalCount = Annotated[int | None, Ge(1)]
NewFile = Annotated[Path | None, Shape(metavar="FILE")]
DeviceName = Annotated[str | None, Shape(metavar="NAME")]


@frozen
class RecipeCommand:
    """A command on a recipe."""

    recipe: RecipeName
    overrides: Overrides = ()

    def load(self) -> LoadedRecipe:
        """Return the recipe with its overrides.

        Raises:
            RecipeError: For a mistake in them.
        """
        return load_recipe(self.recipe, self.overrides)


# ------------------------------------------------------------------------------------------------ before a run


@command("estimate", runs="paceline_advisor.memory.estimate:estimate", group="Before a run", place=0)
@frozen
class Estimate(RecipeCommand):
    """Estimate training memory on any GPU, whether or not you have it.

    It shows the memory of steps and evaluation by cause, and which batches fit which GPUs. The steps run on
    fake tensors: nothing is trained, and no GPU is needed. No data is read; without data.path, typical data is assumed.
    For this machine's CPU, the run's processes are started up to the first step, to measure all of their memory.
    PYTORCH_ALLOC_CONF is respected.

    Exits with 1 if the run does not fit.

    Examples:
      paceline estimate resnet50 --device h100
      paceline estimate deit_small --device a100-40gb --processes 8 batch.micro_size=128
      paceline estimate digits --device cpu --json
    """

    device: Annotated[DeviceName, "A known GPU (h100, a100-80gb, …) or cpu (default: what a run would use)."] = None
    processes: Annotated[
        OptionalCount,
        "Ranks of the estimated run (default: one per GPU, 1 on a CPU or with --device).",
    ] = None
    expandable_segments: Annotated[bool, "As with PYTORCH_ALLOC_CONF=expandable_segments:True."] = False


@command("find-batch", runs="paceline_advisor.memory.find_batch:find_batch", group="Advise", place=2)
@frozen
class FindBatch(RecipeCommand):
    """Find the largest micro-batch that fits, by trying.

    A size fits if it survives two whole steps and an evaluation on all ranks. Sizes are doubled and then bisected; each
    is a real run in its own processes, with optimizer state and moving average, on a few samples that are repeated.
    The global batch and the learning rate stay: smaller micro-batches are accumulated. The estimate of
    `paceline estimate` is printed next to the measurement.

    Examples:
      paceline find-batch resnet50 data.path=IMAGENET
      paceline find-batch digits --processes 2 --memory 1GiB --apply smaller.yaml
    """

    processes: Annotated[
        OptionalCount,
        "Start N ranks on this machine (default: one per GPU, 1 on a CPU). Run it alone, not under torchrun or srun.",
    ] = None
    memory: Annotated[
        int | None,
        Shape(metavar="SIZE", parse=parse_bytes),
        "Memory limit of each process, for example 4GiB (default: a whole GPU, or its share of the free main memory).",
    ] = None
    apply: Annotated[NewFile, "Write the recipe with the micro-batch found."] = None

    def __post_init__(self) -> None:
        check_new(self.apply)


_FEWEST_STEPS = 20
_DEFAULT_STEPS, _DEFAULT_SEEDS = 100, 3


@frozen
class Sweep:
    """Return the settings of a range test.

    Raises:
        RecipeError: If the settings do not fit together.
    """

    lowest: Annotated[float, Gt(0), "Learning rate of the first step."] = 1e-7
    highest: Annotated[float, Gt(0), "Learning rate of the last step."] = 10.0
    steps: Annotated[
        int | None, "Optimizer steps of each test (default: 100, and once more with 400 if these tell nothing)."
    ] = None
    seeds: Annotated[
        int | None,
        Ge(1),
        "Tests, each with another seed, so from other weights and in another order (default: 3, and 9 if the loss is "
        "noisy).",
    ] = None
    shape: Annotated[Literal["exponential", "linear"], "Shape of the rise."] = "exponential"
    smoothing: Annotated[float, Ge(0), Lt(1), "Smoothing factor of the loss."] = 0.98
    divergence: Annotated[
        float, Gt(1), Shape(metavar="FACTOR"), "Stop when the smoothed loss exceeds its minimum by this factor."
    ] = 4.0

    @property
    def planned_steps(self) -> int:
        """Steps of each test."""
        return self.steps or _DEFAULT_STEPS

    @property
    def planned_seeds(self) -> int:
        """Number of tests, before there are more because of noise."""
        return self.seeds or _DEFAULT_SEEDS

    def __post_init__(self) -> None:
        if not (0 < self.lowest < self.highest and math.isfinite(self.highest)):
            raise RecipeError(
                f"a range test from {self.lowest:g} to {self.highest:g} is not possible: it must go from a rate above "
                "0 to a higher one; change --lowest or --highest."
            )
        if self.steps is not None and self.steps < _FEWEST_STEPS:
            raise RecipeError(
                f"a range test of {self.steps} steps is too short; use at least {_FEWEST_STEPS} (--steps)."
            )
        if self.seeds is not None and self.seeds < 1:
            raise RecipeError(f"seeds={self.seeds} is not a number of tests; use at least 1 (--seeds).")
        if self.shape not in ("exponential", "linear"):
            raise RecipeError(f"shape={self.shape!r} is not a shape of a range test; choose exponential or linear.")
        if not 0 <= self.smoothing < 1:
            raise RecipeError(f"smoothing={self.smoothing:g} is not in [0, 1); 0 uses each loss alone.")
        if not self.divergence > 1:
            raise RecipeError(
                f"divergence={self.divergence:g} would end the test at its best loss; use a factor above 1."
            )


@command("find-lr", runs="paceline_advisor.tuning.lr_range:measure", group="Advise", place=1)
@frozen
class FindLr(RecipeCommand, Sweep):
    """Find a learning rate by range tests.

    RECIPE is a shipped name, a YAML file, or a run directory, whose recipe is tested. The first steps are trained with
    a rising learning rate, until the loss diverges, with several seeds. The suggestion is read off the fall of the
    median loss, and printed with the range over the tests, unless you choose another of the six rules. The tests run
    in temporary directories and touch nothing else.

    From trained weights (model.initialize_from=RUN), short trainings with higher rates follow.

    Exits with 1 if the curve has no such point as --suggestion names, or if nothing was learned.

    Examples:
      paceline find-lr digits
      paceline find-lr image_folder data.path=photos model.pretrained=true --highest 1 --output lr
      paceline find-lr mine.yaml --processes 2 --suggestion steepest --apply better.yaml
    """

    processes: JoinedProcesses = None
    suggestion: Annotated[
        Literal["median", "trough", "valley", "steepest", "minimum", "slide"], "Which suggestion --apply writes."
    ] = "median"
    apply: Annotated[NewFile, "Write the recipe with that learning rate."] = None
    output: Output = None

    @property
    def sweep(self) -> Sweep:
        """The settings of the test."""
        return Sweep(**{each.name: getattr(self, each.name) for each in fields(Sweep)})

    def __post_init__(self) -> None:
        if is_first_process():  # the only one that writes files
            check_new(self.apply)
        super().__post_init__()


@command("formulas", runs="paceline_advisor.formulas.catalogue:look_up", group="Study", place=5)
@frozen
class Formulas:
    """Compute a rule of thumb: rooflines, memory, batch sizes, scaling, time.

    Without arguments it describes NAME, and without NAME it lists all. Several values of one argument are separated
    by commas. The end of a name gives the unit of its result; others are shares, ratios or counts.

    Examples:
      paceline formulas
      paceline formulas zero_bytes
      paceline formulas zero_bytes parameters=7.5e9 stage=2 devices=64
      paceline formulas olympic_mean values=12.0191,12.0239,12.0339,12.04,12.0224
    """

    name: Annotated[str | None, Shape(metavar="[NAME]", argument=True)] = None
    arguments: Overrides = ()


# ------------------------------------------------------------------------------------------------ what slows a run


@command("doctor", runs="paceline_advisor.doctor.study:diagnose", group="Advise", place=0)
@frozen
class Doctor(RecipeCommand):
    """Find what limits a run's speed, and measure each change.

    RECIPE may be a run directory. The doctor examines the recipe and its plan, the network's modules on fake tensors,
    and your own code in one micro-batch of a few samples on the CPU, with small images for detection. Each finding
    has its evidence (values, layers, lines of code), the reason with its source, and what to
    change. Nothing is trained or written, except FILE.

    Exits with 1 if something breaks, slows or spoils a run.

    Examples:
      paceline doctor digits
      paceline doctor resnet50 --device a100
      paceline doctor mine.yaml data.workers=4 --measure --apply better.yaml
    """

    device: Annotated[
        DeviceName,
        "Check for this device (a100, t4, cpu, …), present or not (default: the one here).",
    ] = None
    processes: Annotated[
        OptionalCount, "Check a run of N processes (default: 1, or 2 where parallel.strategy needs several)."
    ] = None
    measure: Annotated[bool, "Measure the gain of each change, in short interleaved bursts."] = False
    rounds: Annotated[int, Ge(4), Shape(only="measure"), "Rounds per change with --measure."] = 8
    apply: Annotated[
        NewFile,
        "Write the recipe with all compatible changes that do not alter the training; with --measure, those with a "
        "gain.",
    ] = None

    def __post_init__(self) -> None:
        check_new(self.apply)


def _names(key: str, section: type[Any]) -> Callable[[str], str]:
    """Parse a value of a recipe's key with few choices: an unknown one would only be a row without a result."""
    known = get_args(get_type_hints(section)[key])

    def parse(word: str) -> str:
        if word not in known:
            raise ValueError(f"{word!r} is not a {key}.{did_you_mean(word, known)} Choose from {', '.join(known)}")
        return word

    return parse


def _batch_size(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise ValueError(f"{word!r} is not a batch size; give whole numbers, for example 32,64,128")
    return int(word)


@command(
    "recipe", runs="paceline_advisor.bench.report:bench", files=("benchmark.json", "benchmark.md", "benchmark.html")
)
@frozen
class Bench(RecipeCommand):
    """Measure how fast a recipe trains or answers, and compare.

    Training is measured over batch sizes, devices, precisions and back-ends. Each combination is a separate run in a
    temporary directory; up to four runs take turns. `together` is normal training, `compute` repeats the same batch,
    `data` only loads batches. A combination that cannot run is listed with the reason.

    With --inference the latency of the network is measured by batch size and in MLPerf's scenarios; RECIPE may then be
    a run or a weights file. With --to several runs train until a metric is reached, with their time and cost.

    `paceline bench compare A B` checks whether B is slower than A: see its --help.

    Exits with 1 if nothing could be measured.

    Examples:
      paceline bench digits --batch-sizes 32,64,128
      paceline bench resnet50 data.path=imagenet --precisions fp32,bf16 --backends pytorch,dali --output before
      paceline bench runs/photos --inference --devices cpu,cuda
      paceline bench cifar10_fast data.path=cifar --to top1_accuracy=94 --runs 5 --price-per-hour 3
      paceline bench compare before after
    """

    batch_sizes: Annotated[
        tuple[int, ...],
        Shape(metavar="N,...", parse=_batch_size, without=("to",)),
        "Global batch sizes (default: the recipe's).",
    ] = ()
    devices: Annotated[
        tuple[str, ...],
        Shape(metavar="NAME,...", parse=_names("device", Parallel), without=("to",)),
        "cpu, cuda, ... (default: the recipe's).",
    ] = ()
    precisions: Annotated[
        tuple[str, ...],
        Shape(metavar="NAME,...", parse=_names("precision", TrainSection), without=("to",)),
        "fp32, bf16, ... (default: the recipe's).",
    ] = ()
    backends: Annotated[
        tuple[str, ...],
        Shape(metavar="NAME,...", without=("inference", "to")),
        "Data back-ends: pytorch, dali, ... (default: the recipe's).",
    ] = ()
    parts: Annotated[
        tuple[Literal["together", "compute", "data"], ...],
        Shape(metavar="NAME,...", without=("inference", "to")),
        "together, compute, data.",
    ] = ("together", "compute", "data")
    rounds: Annotated[Count, Shape(without=("inference", "to")), "Rounds per combination."] = 5
    seconds: Annotated[float, Ge(0.01), Shape(without=("to",)), "Measured time per round."] = 2.0
    launches: Annotated[Count, Shape(without=("inference", "to")), "Repeat everything in new processes."] = 1
    processes: Annotated[Count, Shape(without=("inference",)), "Ranks of each run."] = 1
    inference: Annotated[bool, "Measure inference speed; RECIPE may then be a run."] = False
    weights: Annotated[Weights, Shape(only="inference")] = "auto"
    to: Annotated[
        str | None, Shape(metavar="METRIC=VALUE"), "Train until an evaluation reaches a target: top1_accuracy=94."
    ] = None
    runs: Annotated[Count, Shape(only="to"), "Runs with --to, each with its own seed."] = 5
    price_per_hour: Annotated[float | None, Ge(0), Shape(only="to"), "Price of the machine, for the cost of --to."] = (
        None
    )
    output: Annotated[Path | None, Shape(metavar="DIR"), "Write JSON, Markdown and a plot there."] = None

    def __post_init__(self) -> None:
        if self.inference and self.to is not None:
            raise RecipeError("--inference and --to measure two different things; give one of them.")


@command("compare", runs="paceline_advisor.bench.report:compare_results")
@frozen
class BenchCompare:
    """Tell whether B is slower than A: two results of `paceline bench --output`, or two run directories.

    A is what it was, B what it is now.

    Exits with 1 if anything is significantly slower by more than the tolerance. If the evidence is insufficient, it
    says so and exits with 0.

    Examples:
      paceline bench compare before after
      paceline bench compare runs/monday runs/tuesday --tolerance 2
    """

    a: Path
    b: Path
    tolerance: Annotated[float, Ge(0), Shape(metavar="PERCENT"), "How much slower B may be."] = 5.0
    confidence: Annotated[
        float,
        Gt(50),
        Lt(100),
        Shape(metavar="PERCENT"),
        "Confidence that two equal results pass, over all lines together.",
    ] = 95.0


class _BenchGroup(click.Group):
    """`bench RECIPE` measures, `bench compare A B` compares: the first word decides."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the name of the subcommand that the words leave out."""
        if not args or args[0] not in (*self.commands, "--help", "-h"):
            args = ["recipe", *args]
        elif args[0] in ("--help", "-h"):
            args = ["recipe", "--help"]
        return super().parse_args(ctx, args)


@command("bench", group="Study", place=0)
def bench() -> click.Group:
    """Measure how fast a recipe trains or answers, and compare."""
    from paceline.cli.derive import click_command

    made = _BenchGroup("bench", help=bench.__doc__)
    for each in (Bench, BenchCompare):
        made.add_command(click_command(each))
    return made


# ------------------------------------------------------------------------------------------------ is it right?


@command("prove", runs="paceline_advisor.prove.study:prove", group="Verify", place=5)
@frozen
class Prove(RecipeCommand):
    """Prove that a recipe computes what it says, also with your own code.

    The recipe is trained for a few steps in several ways and compared with plain PyTorch. One process with one batch a
    step, with micro-batches, and several processes must learn the same; the order of samples, learning rate, moving
    average, modes, dropout, buffers and metrics must match the recipe. It runs on the CPU, in float64 if the network
    can, in a temporary directory; nothing of yours is written.

    Exits with 1 if a check failed.

    Examples:
      paceline prove digits
      paceline prove digits task=mine:MyTask --processes 4
      paceline prove image_folder data.path=photos --json
    """

    processes: Annotated[Count, "Compare with a run of N processes; 1 skips this."] = 2


@command("drill", runs="paceline_advisor.drill.study:drill", group="Verify", place=6)
@frozen
class Drill(RecipeCommand):
    """Kill and disturb runs of a recipe, and check that nothing is lost.

    Short runs are killed, stopped, starved and damaged, and each is compared with an undisturbed one. Everything
    happens in a temporary directory; nothing of yours is written. With several processes the runs are exact, so that
    their number may change.

    Exits with 1 if a fault caused any loss.

    Examples:
      paceline drill digits
      paceline drill image_folder data.path=photos --processes 2
      paceline drill digits --only kill-all,disk-full --keep
    """

    processes: Annotated[Count, "Ranks of a run."] = 1
    steps: Annotated[Count, "Length of a run."] = 40
    only: Annotated[tuple[str, ...], Shape(metavar="NAME[,NAME]..."), "Try these faults only."] = ()
    keep: Annotated[bool, "Keep the scratch directory, and print its path."] = False


@command("conform", runs="paceline_advisor.conform.study:conform", group="Verify", place=4)
@frozen
class Conform:
    """Kill and resume anybody's training program, and list the samples it loses.

    PROGRAM describes it: a folder with conform.yaml, a YAML file, or a Python file with CONFORM = {...}. The program
    runs undisturbed twice, is killed in the middle of epochs and of a save, and is resumed by its own command, in
    temporary directories. In the program, only the data set is wrapped: paceline.conform.watched(dataset).

    Exits with 0 if nothing was found, 1 if a check failed, and 3 if nothing could be asked.

    Examples:
      paceline conform examples/conform/lightning_trainer.py
      paceline conform program.py --processes 1,2,3 --json
    """

    program: Annotated[Path, Shape(argument=True)]
    processes: Annotated[
        tuple[int, ...],
        Ge(1),
        Shape(metavar="N,..."),
        "Processes to try (default: 1, and 2 if the program takes several).",
    ] = ()
    python: Annotated[Path | None, Shape(metavar="FILE"), "Interpreter of the program (default: this one)."] = None
    output: Output = None


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"'{text}' is not two steps, the first before the second, such as 20:40")
    return range(int(first), int(last))


@command("verify", runs="paceline_advisor.replay.verify:verify", group="Verify", place=1)
@frozen
class Verify:
    """Compute stretches of RUN again, and compare every bit.

    A stretch lies between two checkpoints. It is trained again in a temporary directory, from the recipe and the data,
    with as many processes as the run had; model, moving average, optimizer, buffers, ledger, logged losses and scores
    are compared. By default three stretches drawn at random, and the last. On another kind of processor or with other
    versions, numbers are compared within a tolerance. Nothing of the run is changed.

    Exits with 0 if all is equal, 1 if something differs, and 3 if that cannot be told here.

    Examples:
      paceline verify runs/photos
      paceline verify runs/photos --all --json
      paceline verify runs/photos --step 2000:4000
    """

    run: Annotated[Path, Shape(recipe=True)]
    segments: Annotated[OptionalCount, "Stretches to draw, in addition to the last (default: 3)."] = None
    all: Annotated[bool, Shape(without=("segments", "step", "seed")), "Compute every stretch again."] = False
    step: Annotated[
        range | None,
        Shape(metavar="A:B", parse=_steps, without=("segments", "seed")),
        "Compute the stretches again that hold these steps.",
    ] = None
    seed: Annotated[int | None, Ge(0), "Seed of the draw (default: another one each time; it is printed)."] = None
    tolerance: Annotated[
        float | None,
        Gt(0),
        "Relative difference of a tensor that counts as equal, wherever it is computed (default: none on the same kind "
        "of processor, threads and versions).",
    ] = None


@command("diff", runs="paceline_advisor.replay.diff:diff", group="Verify", place=2)
@frozen
class Diff:
    """Find the first step at which two runs differ, where in it, and why.

    Checkpoints, records and samples are compared first. If something differs, both runs are trained again from their
    last equal checkpoint, in temporary directories, and compared step by step: samples, outputs of modules, gradients
    and weights. Causes are ranked, with evidence: recipe, data, code, environment, order, or an operator that is not
    deterministic. Neither run is changed.

    Exits with 0 if the runs are equal, 1 if they differ, and 3 if they share nothing to compare.

    Examples:
      paceline diff runs/before runs/after
      paceline diff runs/before runs/after --json
    """

    a: Annotated[Path, Shape(metavar="RUN_A", recipe=True)]
    b: Annotated[Path, Shape(metavar="RUN_B", recipe=True)]
    output: Output = None


@command("seen", runs="paceline_advisor.replay.seen:look", group="Verify", place=3)
@frozen
class Seen:
    """List the steps of each RUN that used SAMPLE, and the checkpoints that were saved before any use.

    SAMPLE is a file of the data, the end of its path, another copy of the file, or the number of the sample. Steps come
    from the ledger; the data are opened only to find a name.

    Exits with 3 if the data of a run are not here, or have changed.

    Examples:
      paceline seen photos/cat/017.jpg runs/photos
      paceline seen 17 runs/a runs/b --json
    """

    sample: Annotated[str, Shape(argument=True)]
    runs: Annotated[tuple[Path, ...], Shape(metavar="RUN...", argument=True, recipe=True)]


@command("record", runs="paceline_advisor.replay.record:record", group="Use", place=5)
@frozen
class Record:
    """Say what the model of RUN was trained on.

    Data with their digests, classes and licence texts, what the ledger proves, recipe, software, machine, weights, and
    the runs that it continues.

    Examples:
      paceline record runs/photos --output photos.html
    """

    run: Annotated[Path, Shape(recipe=True)]
    output: Annotated[Path | None, Shape(metavar="FILE.html"), "Also write it as one page."] = None


# ------------------------------------------------------------------------------------------------ go back


@command("rewind", runs="paceline_advisor.replay.rewind:rewind", group="Train", place=2)
@frozen
class Rewind:
    """Go back to a checkpoint of RUN; what comes after is set aside, never deleted.

    `paceline resume RUN` then trains on from there, also if the run was finished. What comes after is kept in
    RUN/.set-aside as a complete run directory; a line says how to bring it back.

    Examples:
      paceline rewind runs/photos --to 2000
    """

    run: Path
    to: Annotated[int, Ge(1), Shape(metavar="STEP", required=True), "Step of the checkpoint."]


# ------------------------------------------------------------------------------------------------ studies

Measure = Literal["curve", "surface", "trajectory", "sharpness", "curvature", "line"]


def _samples(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"{text!r} is not a number of samples; give a whole number of at least 2, or all")
    return int(text)


@command("landscape", runs="paceline_advisor.landscape.study:explore", group="Study", place=4)
@frozen
class Landscape:
    """Plot the loss around a run's weights, and measure sharpness.

    RUN is a run directory, a checkpoint or a safetensors file; for two, the path between them is plotted too.
    Curves and surfaces follow random directions, scaled filter by filter; a trajectory follows a run's checkpoints;
    sharpness is Keskar's, curvature the largest eigenvalue of the Hessian. Nothing in a run directory is
    changed. Several processes share the points.

    Examples:
      paceline landscape runs/digits --output landscapes/digits
      paceline landscape runs/small-batch runs/large-batch
      paceline landscape runs/digits --measure sharpness,curvature --samples all --processes 2
    """

    runs: Runs
    measure: Annotated[
        tuple[Measure, ...],
        Shape(metavar="WHAT,..."),
        "Any of curve, surface, trajectory, sharpness, curvature, and line (between two runs). Default: all for one "
        "run; sharpness and curvature for several, and for two also the line.",
    ] = ()
    split: Annotated[
        Literal["train", "validation"],
        "Samples for the loss. Training samples are processed like held-out ones, without augmentation.",
    ] = "train"
    samples: Annotated[
        int | None, Shape(metavar="N|all", parse=_samples), "Maximum samples per split, the same for each seed."
    ] = 1024
    batch_norm: Annotated[
        Literal["recomputed", "stored"] | None,
        "Statistics of each batch, as in training (the default), or those that the run stored.",
    ] = None
    points: Annotated[int, Ge(3), "Points of a curve or of the line."] = 21
    grid: Annotated[int, Ge(3), "Points of a surface's side."] = 11
    reach: Annotated[
        float,
        Gt(0),
        Shape(name="--range", metavar="LENGTH"),
        "Extent of curves and surfaces; at 1, each filter has moved by its norm.",
    ] = 1.0
    epsilon: Annotated[
        tuple[float, ...], Gt(0), Lt(1), Shape(metavar="SIZE,..."), "Box sizes for Keskar's sharpness."
    ] = (1e-3, 5e-4)
    iterations: Annotated[Count, "L-BFGS-B iterations from each start."] = 10
    subspace: Annotated[
        OptionalCount, Shape(metavar="P"), "Restrict that search to a random subspace of P dimensions."
    ] = None
    products: Annotated[int, Ge(2), "Maximum Hessian-vector products."] = 40
    tolerance: Annotated[
        float, Gt(0), Shape(metavar="SHARE"), "Maximum residual of the top eigenvalue, as a share of it."
    ] = 0.01
    seed: Annotated[int, Ge(0), "Seed of directions and samples."] = 0
    weights: Weights = "auto"
    best: Annotated[bool, "Use the best checkpoint of a run directory instead of the newest."] = False
    processes: JoinedProcesses = None
    output: Output = None

    @property
    def targets(self) -> tuple[Path, ...]:
        """The runs among the words."""
        return tuple(Path(each) for each in self.runs if "=" not in each or Path(each).exists())

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides among the words."""
        return tuple(each for each in self.runs if Path(each) not in self.targets)

    def asks_for(self, what: Measure) -> bool:
        """Whether a measurement is requested, by name or by default."""
        one: tuple[Measure, ...] = ("curve", "surface", "trajectory", "sharpness", "curvature")
        several: tuple[Measure, ...] = ("sharpness", "curvature", "line")
        return what in (self.measure or (one if len(self.targets) == 1 else several))

    def __post_init__(self) -> None:
        targets, requested = self.targets, {*self.measure}
        if not targets:
            raise PacelineError(
                "no run was named, only overrides; give a run directory, a checkpoint or a weights file."
            )
        refuse_training_overrides(self.overrides)
        for target in targets:
            if self.output is not None and self.output.resolve().is_relative_to(target.resolve()):
                raise PacelineError(
                    f"--output={self.output} is inside the run '{target}', which is only read; give another folder."
                )
        if "line" in requested and len(targets) != 2:
            count = "1 run was" if len(targets) == 1 else f"{len(targets)} runs were"
            raise PacelineError(f"--measure line is the path from one run to another, but {count} given; give two.")
        unused = {
            "--points": self.points != Landscape.points and not {"curve", "line"} & requested,
            "--grid": self.grid != Landscape.grid and not {"surface", "trajectory"} & requested,
            "--range": self.reach != Landscape.reach and not {"curve", "surface"} & requested,
            "--epsilon": self.epsilon != Landscape.epsilon and "sharpness" not in requested,
            "--subspace": self.subspace is not None and "sharpness" not in requested,
        }
        if requested and (option := next((each for each, is_unused in unused.items() if is_unused), None)):
            raise PacelineError(f"{option} has no effect on --measure {','.join(self.measure)}; leave it out.")


@command("noise-scale", runs="paceline_advisor.tuning.noise_scale:measure_noise", group="Study", place=2)
@frozen
class NoiseScale:
    """Measure the gradient noise scale: how large a batch still pays.

    A run is measured at each of its checkpoints. Nothing is trained and the run is not touched: gradients of parts of a
    batch are compared with those of the whole batch. The critical batch size, beyond which a larger batch costs more
    samples than it saves steps, is given as a range: it was 0.125 to 0.75 of the noise scale in published supervised
    tasks. If the range spans a decade, the steps that narrow it are printed. It grows during training, so fresh weights
    tell least. To log it during a run, without extra passes, set telemetry.noise_scale.

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


@command("sweep-batch", runs="paceline_advisor.tuning.batch_sweep:sweep_batch", group="Study", place=3)
@frozen
class SweepBatch(RecipeCommand):
    """Train to a target with several batch sizes; fit where larger ones stop paying.

    Each run trains in a scratch directory until the first evaluation that meets the target. Up to
    the knee a larger batch saves steps nearly in proportion; beyond it, it costs samples. The law of both is fitted to
    the runs of each learning rate rule, and the knee is printed with its interval. Runs that miss the target count too.

    A schedule that ends with the run makes the steps depend on its length; schedule.name=constant does not.

    Exits with 1 if no run met the target.

    Examples:
      paceline sweep-batch digits schedule.name=constant --batch-sizes 16,32,64,128,256 --to top1_accuracy=95
      paceline sweep-batch cifar10 data.path=cifar --batch-sizes 64,256,1024 --to top1_accuracy=90 \\
          --lr-rules linear,sqrt --output sweep
    """

    batch_sizes: Annotated[tuple[int, ...], Ge(1), Shape(required=True, metavar="N,..."), "Global batch sizes."]
    to: Annotated[str, Shape(required=True, metavar="METRIC=VALUE"), "The target, for example top1_accuracy=94."]
    lr_rules: Annotated[
        tuple[Literal["constant", "linear", "sqrt", "tuned"], ...],
        Shape(metavar="NAME,..."),
        "How the learning rate scales with the batch from the recipe's: constant, linear, sqrt, or tuned, which tries "
        "five.",
    ] = ("linear",)
    seeds: Annotated[Count, "Runs per size, one seed each."] = 3
    longest: Annotated[
        Duration | None,
        Shape(name="--max", metavar="DURATION"),
        "End a run that misses the target by then (default: the recipe's train.duration).",
    ] = None
    processes: Annotated[Count, "Ranks of each run."] = 1
    output: Annotated[
        Output, "Finished runs are written as they end; the same command with the same directory resumes the sweep."
    ] = None


@command(
    "tune",
    runs="paceline_advisor.tuning.tune:tune",
    files=("tune.json", "tune.html", "trials.log"),
    group="Advise",
    place=3,
)
@frozen
class Tune(RecipeCommand):
    """Search for better recipe values with Optuna; each trial is a run.

    FILE maps recipe keys to a list of choices, or to {low: A, high: B}, with log: true or step: C if wanted:

      optimizer.lr: {low: 0.001, high: 0.3, log: true}
      batch.global_size: [32, 64, 128]

    Trials are compared by evaluate.metric at their last evaluation. One below the median of the others at the same
    evaluation is stopped, with a checkpoint. After a kill the same command resumes the search and its current run; a
    larger --trials extends it. Needs the extra `tune`.

    Exits with 1 if no trial finished.

    Examples:
      paceline tune digits --search search.yaml --trials 20
      paceline tune image_folder data.path=photos --search search.yaml --trials 40 --output runs/tune-photos
    """

    search: Annotated[Path, Shape(required=True, metavar="FILE", path="local"), "Search space, as YAML."]
    trials: Annotated[Count, "Trials in total, including earlier ones."] = 20
    processes: Annotated[Count, "Ranks of each run."] = 1
    output: Annotated[Path, Shape(metavar="DIR"), "Runs, journal and result."] = Path("runs/tune")


@command("roofline", runs="paceline_advisor.roofline.study:roofline", group="Study", place=1)
@frozen
class Roofline(RecipeCommand):
    """Compare a training step with a device's limits, layer by layer.

    The step runs on fake tensors: nothing is computed and no data is read. Times are lower bounds per operator, so a
    real step takes longer. --json holds all layers.

    Examples:
      paceline roofline resnet50 --device a100
      paceline roofline image_folder model.name=mobilenetv2_100 --device h100 --top 30
      paceline roofline digits --device cpu --json
    """

    device: Annotated[
        DeviceName,
        "A device by name (h100, a100, v100, t4, …), present or not; cpu measures this one (default: the one here).",
    ] = None
    top: Annotated[Count, "Number of layers to show."] = 15
    output: Output = None
