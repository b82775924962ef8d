"""Checks of a proof: samples, modes, gradients, learning rate, average, buffers and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

import torch

from paceline.data.batch import Batch
from paceline.plan.rates import LearningRate
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_events
from paceline.records.run_directory import RunDirectory
from paceline_advisor import named
from paceline_advisor.prove.evidence import (
    Difference,
    Dropout,
    Evidence,
    PlainLoop,
    difference,
    dropouts,
    joined,
    parts_of,
)
from paceline_advisor.prove.recorder import Check, ObservedRun, nan_as_infinite, same_content
from paceline_advisor.prove.runs import FULL_STEPS, STEPS, STEPS_PER_EPOCH, TAIL_STEP

_MOST_TRIED = 8
# Random draws to try: a layer that drops whole samples often does the same twice.
_DRAWS = 16

CHECKS: list[Callable[[Evidence], Check]] = []
_Compare = Callable[[Check, Evidence], Check]


def check(name: str, compared: str, advice: str) -> Callable[[_Compare], _Compare]:
    """Declare a check: its name, what it compares, and what to do if it fails. Checks run in order of declaration."""

    def declare(compare: _Compare) -> _Compare:
        result = Check(name=name, compared=compared, advice=advice)
        CHECKS.append(lambda evidence: compare(result, evidence))
        return compare

    return declare


@check(
    "order",
    "two epochs: each sample once in each, in different orders",
    "Samples are repeated, left out, or have the same order in every epoch: build the stream from the geometry's "
    "slices, which depend on the epoch.",
)
def order(result: Check, evidence: Evidence) -> Check:
    """Each sample once in each epoch, in a different order."""
    expected = set(range(evidence.sizes.samples))
    for run in evidence.unchanged_runs:
        epochs = [
            [
                sample
                for note in run.micro_batches
                if note.step // STEPS_PER_EPOCH == epoch
                for sample in (*note.ids, *note.broken)
            ]
            for epoch in range(2)
        ]
        for number, ids in enumerate(epochs, start=1):
            missing = len(expected - set(ids))
            extra = len(ids) - len(set(ids) & expected)
            if (missing or extra) and run.completed(number * STEPS_PER_EPOCH - 1):
                found = f"{run.name}: in epoch {number}, {missing} samples are missing and {extra} are too many"
                return result.measured(missing + extra, found=found)
        if epochs[0] == epochs[1] != []:
            return result.measured(len(expected), found=f"{run.name}: both epochs have the same order")
    return result.measured(0)


@check(
    "samples",
    "each step's samples and their contents, in every run",
    "A sample's content depends on the micro-batch, the process, or a random state: key its draws by seed, epoch and "
    "sample, as Paceline's own augmentation does.",
)
def samples(result: Check, evidence: Evidence) -> Check:
    """The same samples with the same contents in every run; augmented anew in each epoch, if the recipe augments."""
    mixes = evidence.recipe.data.mix.mixup > 0 or evidence.recipe.data.mix.cutmix > 0
    # Mixed samples have partners in their micro-batch.
    runs = evidence.unchanged_runs if mixes else evidence.runs
    expected = _by_step(evidence.unchanged)
    for run in runs:
        found = _by_step(run)
        differing = [step for step, step_samples in expected.items() if not _same(found.get(step, []), step_samples)]
        if differing and not run.trouble:
            text = f"{run.name}: step {differing[0] + 1} has other samples, or other contents, than in one process"
            return result.measured(len(differing), found=text)
    is_cropped = evidence.recipe.data.augment.crop != "none" and "data.augment.crop" not in evidence.plans[1].unused
    if is_cropped and not _varies(evidence):
        return result.failed(f"data.augment.crop={evidence.recipe.data.augment.crop} gives the same in every epoch")
    return result.measured(0)


@check(
    "parameters",
    "trainable parameters, and those that got a gradient",
    "Use them in the loss, remove them, or set requires_grad=False: they never learn, and runs of several "
    "processes refuse them.",
)
def parameters(result: Check, evidence: Evidence) -> Check:
    """Every trainable parameter gets a gradient in some step."""
    steps = evidence.unchanged.ranks[0].steps
    unused = [name for name in steps[0].without_gradient if all(name in step.without_gradient for step in steps)]
    return result.measured(len(unused), found=f"without a gradient: {named(unused)}" if unused else "")


@check(
    "gradient",
    "each step's gradient against a plain PyTorch loop's",
    "The optimizer does not get the gradient of the loss: look for code that changes gradients, "
    "weights the micro-batches or draws random numbers before the loss.",
)
def gradient(result: Check, evidence: Evidence) -> Check:
    """The trainer against a plain loop over the same micro-batches."""
    return _worst(result, _against_parts(evidence, evidence.unchanged, FULL_STEPS), evidence)


@check(
    "accumulation",
    "",
    "A task's loss is the mean over its micro-batch's samples, and the trainer weights it: do not divide by the number "
    "of micro-batches, or sum instead of averaging.",
)
def accumulation(result: Check, evidence: Evidence) -> Check:
    """Runs with one batch and with micro-batches, each against one plain pass over the whole batch."""
    sizes, probe = evidence.sizes, evidence.probe
    suffix = ""
    if not probe.is_deterministic:
        changes = [*(["dropout off"] if probe.dropouts else []), *(["BatchNorm frozen"] if probe.norms else [])]
        suffix = f" ({', '.join(changes)})"
    result = result.about(f"1 and {sizes.micro_batches} micro-batches against one plain pass{suffix}")
    if probe.incomparable:
        return result.not_applicable(probe.incomparable)
    gaps = [
        gap for run in (evidence.one_batch, evidence.micro_batched) for gap in _against_whole(evidence, run, FULL_STEPS)
    ]
    return _worst(result, gaps, evidence)


@check(
    "tail",
    "",
    "The last, smaller step of an epoch is dropped or weighted wrongly: divide by the actual number of samples, not by "
    "the recipe's batch size.",
)
def tail(result: Check, evidence: Evidence) -> Check:
    """An epoch's last step, which has fewer samples."""
    sizes = evidence.sizes
    step = TAIL_STEP
    result = result.about(f"an epoch's last {sizes.tail} samples, in parts, against plain PyTorch")
    for run in evidence.runs:
        used = sum(len(each.ids) + len(each.broken) for each in run.micro_batches if each.step == step)
        if used != sizes.tail and run.completed(step):
            return result.failed(f"{run.name}: step {step + 1} took {used} samples instead of {sizes.tail}")
    gaps = [gap for run in evidence.unchanged_runs for gap in _against_parts(evidence, run, [step])]
    if not evidence.probe.incomparable:
        gaps += _against_whole(evidence, evidence.micro_batched, [step])
    return _worst(result, gaps, evidence)


@check(
    "processes",
    "",
    "The computation depends on the number of processes or the rank: look for a world size in the loss, "
    "a learning rate or a batch that is scaled by it, or state that only one process has.",
)
def processes(result: Check, evidence: Evidence) -> Check:
    """Several processes against one."""
    sizes, run = evidence.sizes, evidence.distributed
    each = sizes.micro_batches // sizes.processes
    result = result.about(f"{sizes.processes} processes of {each} micro-batches against a plain loop in one")
    if run is None:
        return result.not_applicable(evidence.why_alone)
    if run.trouble:
        return result.failed(f"the run ended with {run.trouble}")
    differing = [
        number
        for number, notes in enumerate(zip(*(rank.steps for rank in run.ranks), strict=False), start=1)
        if len({note.gradient for note in notes}) > 1
    ]
    if differing:
        return result.failed(f"the processes got different gradients at step {differing[0]}")
    return _worst(result, _against_parts(evidence, run, FULL_STEPS), evidence)


@check(
    "learning-rate",
    "each step's rate, and the schedule's peak, against the recipe",
    "The rate is scaled twice: optimizer.lr is for the given global batch, for any number of processes and "
    "micro-batches.",
)
def learning_rate(result: Check, evidence: Evidence) -> Check:
    """Each learning rate is the recipe's, scaled only by the recipe's rule."""
    gaps = [
        (
            abs(rate - expected) / expected if expected else abs(rate),
            f"{where}: {rate:.6g} instead of {expected:.6g}, {rate / expected if expected else 0:.3g} times",
        )
        for where, rate, expected in _rates(evidence)
    ]
    return _largest(result, gaps, _LIMIT_RATE)


@check(
    "moving-average",
    "the saved average against its definition",
    "The moving average is not updated, or more than once a step, or not from the weights after the step.",
)
def moving_average(result: Check, evidence: Evidence) -> Check:
    """The average of the weights after each optimizer step, according to its definition."""
    decay = evidence.recipe.train.ema
    if decay is None:
        return result.not_applicable("train.ema=off")
    gaps, ended_runs = [], [run for run in evidence.unchanged_runs if not run.trouble]
    if not ended_runs:
        return result.not_applicable(_NO_END)
    for run in ended_runs:
        expected = run.average()
        if expected is None:
            return result.failed(f"{run.name}: no optimizer step was seen")
        final = run.saved("model")
        saved = {key: each for key, each in run.saved("ema").items() if key in expected}
        # Errors are relative to the distance between the average and the final weights.
        scale = max((final[key].double() - expected[key].double()).abs().max().item() for key in saved)
        distance = max((saved[key].double() - expected[key].double()).abs().max().item() for key in saved)
        gap = nan_as_infinite(distance / scale if scale else distance)
        gaps.append((gap, f"{run.name}: off by {gap:.2g} of the way between average and weights"))
    return _largest(result, gaps, _LIMIT_AVERAGE if evidence.probe.double else 1e-4)


@check(
    "training-mode",
    "each module's mode in training and in evaluation",
    "Something calls eval() or train() without restoring the mode: code that evaluates must restore each module's "
    "mode; a model's factory returns it in training mode.",
)
def training_mode(result: Check, evidence: Evidence) -> Check:
    """Training mode during training, evaluation mode during scoring, and training mode again."""
    for run in evidence.unchanged_runs:
        for rank, notes in enumerate(run.ranks):
            if not notes.micro_batches:
                continue
            first = notes.micro_batches[0].evaluating
            for note in notes.micro_batches:
                changed = sorted(set(note.evaluating) ^ set(first))
                if "" in note.evaluating or changed:
                    modules = "the network" if "" in note.evaluating else named(changed)
                    text = f"{run.name}, rank {rank}, step {note.step + 1}: {modules} was not in its training mode"
                    count = sum("" in each.evaluating or each.evaluating != first for each in notes.micro_batches)
                    return result.measured(count, found=text)
            if any(score.training for score in notes.scores):
                return result.failed(f"{run.name}, rank {rank}: the network was scored in training mode")
    in_evaluation = evidence.unchanged.ranks[0].micro_batches[0].evaluating
    return result.measured(0, found=f"in evaluation mode throughout: {named(in_evaluation)}" if in_evaluation else "")


@check(
    "dropout",
    "two draws of each dropout; random state of each forward pass",
    "A dropout is configured but does nothing, or does the same at every step: call the module, leave it "
    "in training mode, and let it draw from torch's generator.",
)
def dropout(result: Check, evidence: Evidence) -> Check:
    """Every dropout is active, and differs between steps."""
    modules = dropouts(evidence.plain.network)
    if not modules:
        options = evidence.recipe.model.options.items()
        configured = [
            key for key, value in options if "drop" in key and isinstance(value, int | float) and 0 < value < 1
        ]
        if configured and not _varies_by_itself(evidence):
            return result.failed(f"model.options.{configured[0]} has no effect: nothing is dropped")
        return result.not_applicable("the network has no dropout")
    for run in evidence.unchanged_runs:
        notes = run.micro_batches
        evaluating = sorted({name for note in notes for name in note.evaluating} & {each.name for each in modules})
        if evaluating:
            return result.measured(len(evaluating), found=f"{run.name}: in evaluation mode: {named(evaluating)}")
        if len({note.generator for note in notes}) < len(notes):
            return result.failed(f"{run.name}: several micro-batches draw the same random numbers")
    without_effect = _without_effect(evidence, modules)
    text = f"without effect: {named([each.title for each in without_effect])}" if without_effect else ""
    return result.measured(len(without_effect), found=text)


@check(
    "buffers",
    "BatchNorm statistics on all processes, scored and saved",
    "Each process has its own statistics when they are scored or saved, so the score depends on the process. "
    "Register them as buffers, and let the trainer make them equal.",
)
def buffers(result: Check, evidence: Evidence) -> Check:
    """Every process has the same buffers whenever weights are scored, and at the end of the run."""
    run = evidence.distributed
    if run is None:
        return result.not_applicable(evidence.why_alone)
    if not any(True for _ in evidence.plain.network.buffers()):
        return result.not_applicable("the network has no buffers")
    if run.trouble:
        return result.not_applicable(f"{run.name}: {run.trouble}")
    digests_by_score: dict[tuple[int, str], set[str]] = {}
    for notes in run.ranks:
        for score in notes.scores:
            digests_by_score.setdefault((score.position, score.weights), set()).add(score.buffers)
        digests_by_score.setdefault((len(notes.steps), "the saved model"), set()).add(notes.final_buffers)
    differing = [place for place, digests in digests_by_score.items() if len(digests) > 1]
    text = f"they differ after step {differing[0][0]} ({differing[0][1]})" if differing else ""
    return result.measured(len(differing), found=text)


@check(
    "metric",
    "the last evaluation against its samples scored one by one",
    "Cause: a mean of batch means, or padded or omitted samples. score() returns one value for each "
    "sample, and the trainer divides once.",
)
def metric(result: Check, evidence: Evidence) -> Check:
    """An evaluation of weights, compared with the same weights scored sample by sample."""
    if not evidence.sizes.evaluation_samples:
        return result.not_applicable("nothing is evaluated")
    gaps, ended_runs = [], [run for run in evidence.unchanged_runs if not run.trouble]
    if not ended_runs:
        return result.not_applicable(_NO_END)
    for run in ended_runs:
        for weights, samples, values in _evaluations(run):
            incidents = read_events(RunDirectory(run.run_dir).events, kinds={"incident"})
            unreadable = sum(
                event["incident"] == "broken_sample" and event.get("split") == "validation" for event in incidents
            )
            expected = evidence.sizes.evaluation_samples - unreadable
            extra = samples - expected or _scored_twice(run, weights)
            if extra:
                text = f"{run.name}, {weights}: {extra:+d} samples were counted"
                return result.measured(abs(extra), found=text)
            for name, reference in evidence.plain.metrics(run.saved(weights)).items():
                value = math.nan if values.get(name) is None else values[name]
                text = f"{run.name}, {weights}: {name} is {value:.6g}, sample by sample {reference:.6g}"
                gaps.append((abs(value - reference) / max(abs(reference), 1.0), text))
    return _largest(result, gaps, _LIMIT_METRIC)


@check(
    "run",
    "the steps of each short run",
    "A run of this recipe does not finish; the checks above show what was found so far.",
)
def ended(result: Check, evidence: Evidence) -> Check:
    """Every run took all its steps."""
    for run in evidence.runs:
        steps = len(run.ranks[0].steps) if run.ranks else 0
        if run.trouble or steps != STEPS:
            text = run.trouble or f"{steps} steps instead of {STEPS}"
            return result.failed(f"{run.name}: {text}")
    return result.measured(0)


def _largest(result: Check, gaps: Iterable[tuple[float, str]], limit: float) -> Check:
    """Return the largest difference, with its text if it exceeds the limit."""
    worst, found = max(((nan_as_infinite(gap), text) for gap, text in gaps), key=itemgetter(0), default=(0.0, ""))
    return result.measured(worst, limit, found=found if worst > limit else "")


def _by_step(run: ObservedRun) -> dict[int, list[tuple[int, str]]]:
    found: dict[int, list[tuple[int, str]]] = {}
    for note in run.micro_batches:
        found.setdefault(note.step, []).extend(zip(note.ids, note.contents, strict=True))
    # Samples of one length may share a micro-batch, and so arrive in another order with more processes.
    return {step: sorted(each, key=itemgetter(0)) for step, each in found.items()}


def _same(found: list[tuple[int, str]], expected: list[tuple[int, str]]) -> bool:
    pairs = list(zip(found, expected, strict=False))
    return len(found) == len(expected) and all(
        one[0] == other[0] and same_content(one[1], other[1]) for one, other in pairs
    )


def _varies(evidence: Evidence) -> bool:
    contents: dict[int, set[str]] = {}
    for note in evidence.unchanged.micro_batches:
        for sample, content in zip(note.ids, note.contents, strict=True):
            contents.setdefault(sample, set()).add(content)
    return any(len(each) > 1 for each in contents.values())


def _varies_by_itself(evidence: Evidence) -> bool:
    """Whether the loss of the same micro-batch depends on the random state."""
    plain, batch = evidence.plain, parts_of(evidence.unchanged.batches, 0)[0]
    with torch.no_grad():
        first = plain.loss(batch, 0).item()
        return any(plain.loss(batch, seed).item() != first for seed in range(1, _DRAWS))


def _without_effect(evidence: Evidence, modules: list[Dropout]) -> list[Dropout]:
    """Return dropouts without an effect on the loss while all others are off.

    At most eight layers and eight attributes are tried, and none if the network is random without them.
    """

    def is_inert(each: Dropout) -> bool:
        each.set(0.5)
        varies = _varies_by_itself(evidence)
        each.set(0.0)
        return not varies

    evidence.plain.perturb()
    for each in modules:
        each.set(0.0)
    without_effect: list[Dropout] = []
    if not _varies_by_itself(evidence):
        layers = [each for each in modules if each.is_layer]
        without_effect = [each for each in layers[:: -(-len(layers) // _MOST_TRIED) or 1] if is_inert(each)]
        active = [each.name for each in layers if each not in without_effect]
        # A probability stored next to layers that were created with it may never be read again, so it may be inert.
        numbers = [each for each in modules if not each.is_layer and not any(map(each.is_around, active))]
        without_effect += [each for each in numbers[:_MOST_TRIED] if is_inert(each)]
    for each in modules:
        each.set(each.probability)
    return without_effect


Groups = Sequence[Sequence[Batch]]
_Gap = tuple[ObservedRun, int, Difference]


def _against_whole(evidence: Evidence, run: ObservedRun, steps: Iterable[int]) -> list[_Gap]:
    """Compare each step with one pass over its samples as they arrived: mixed samples have partners there."""

    def as_one_batch(batches: list[Batch]) -> Groups:
        try:
            return [[joined(batches)]]
        except RuntimeError:  # padded to unequal lengths: only the pipeline knows how to pad them together
            return [parts_of(evidence.one_batch.batches, batches[0].slice.step)]

    return _gaps(run, steps, run, as_one_batch, evidence.plain_one_batch)


def _against_parts(evidence: Evidence, run: ObservedRun, steps: Iterable[int]) -> list[_Gap]:
    """Compare each step with its micro-batches one after the other, as they arrived in one process.

    All micro-batches of a process start with the same buffers; in an exact run, all of the step do.
    """
    per_process = 1 if run.recipe.parallel.exact else evidence.sizes.micro_batches // run.processes

    def grouped(batches: list[Batch]) -> Groups:
        groups: dict[int, list[Batch]] = {}
        for batch in batches:
            groups.setdefault(batch.slice.logical_rank // per_process, []).append(batch)
        return list(groups.values())

    return _gaps(run, steps, evidence.unchanged, grouped, evidence.plain)


def _gaps(
    run: ObservedRun,
    steps: Iterable[int],
    source: ObservedRun,
    grouped: Callable[[list[Batch]], Groups],
    plain: PlainLoop,
) -> list[_Gap]:
    """Return the difference of a run's gradients from a plain loop's, for steps whose weights were kept.

    Args:
        run: The run with the gradients.
        steps: Their numbers, from 0.
        source: The run that provides the batches.
        grouped: Groups a step's micro-batches for the loop.
        plain: The loop.
    """
    found = []
    for step in steps:
        kept, batches = run.step(step), parts_of(source.batches, step)
        if kept is not None and batches:
            weights, gradients = kept
            found.append((run, step, difference(gradients, plain.gradients(weights, grouped(batches)))))
    return found


def _worst(result: Check, gaps: Sequence[_Gap], evidence: Evidence) -> Check:
    if not gaps:
        return result.failed("there was no such step")
    limit = evidence.probe.limit
    run, step, worst = next((gap for gap in gaps if not gap[2].relative <= limit), gaps[0])
    if worst.relative <= limit:
        return result.measured(max(gap[2].relative for gap in gaps), limit)
    found = f"{run.name}, step {step + 1}: {worst.ratio:.3g} times the expected gradient, differs most in {worst.where}"
    return result.measured(worst.relative, limit, found=found)


# Allowed relative differences: a learning rate is one multiplication, an average has some hundred additions, and a
# score may be in float32.
_LIMIT_RATE = 1e-12
_LIMIT_AVERAGE = 1e-9
_LIMIT_METRIC = 1e-5
_NO_END = "no run finished; see the check 'run'"


def _rates(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    """Yield where, the learning rate and the expected rate: for every step of every run, and at the schedule's peak."""
    recipe = evidence.recipe
    grouped = recipe.optimizer.groups or recipe.optimizer.layer_decay is not None
    for run in evidence.runs:
        peak_rate = _peak(run.recipe, evidence.sizes.global_batch)
        for notes in run.ranks:
            for number, step in enumerate(notes.steps, start=1):
                for rate, factor in step.rates:
                    yield f"{run.name}, step {number}", rate, peak_rate * (factor if grouped else 1.0)
    for count, plan in evidence.plans.items():
        peak_step = plan.warmup_steps - (1 if recipe.schedule.name == "one_cycle" else 0)
        if peak_step < plan.total_steps and all(each > peak_step for each in plan.milestone_steps):
            rate = LearningRate.of(recipe.schedule, plan)(peak_step)
            # By then the batch may have grown.
            batch = plan.epochs.phase_at(peak_step).global_batch_size
            where = f"the schedule with {count} process{'es' * (count > 1)}, step {peak_step + 1}"
            yield where, rate, _peak(recipe, min(batch, plan.train_samples))


def _peak(recipe: Recipe, batch: int) -> float:
    optimizer = recipe.optimizer
    ratio = 1.0 if optimizer.lr_reference_batch is None else batch / optimizer.lr_reference_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.lr_scaling]
    return optimizer.lr * factor


def _scored_twice(run: ObservedRun, weights: str) -> int:
    """Return how many samples of the last evaluation were scored more than once, on any process."""
    scores = [score for notes in run.ranks for score in notes.scores if score.weights == weights]
    last = max((score.position for score in scores), default=0)
    ids = [sample for score in scores if score.position == last for sample in score.ids]
    return len(ids) - len(set(ids))


def _evaluations(run: ObservedRun) -> list[tuple[str, int, dict[str, float]]]:
    """Return weights, samples and metrics of a run's last evaluation."""
    events = list(read_events(RunDirectory(run.run_dir).events, kinds={"evaluation"}))
    last = max((event["step"] for event in events), default=0)
    return [(event["weights"], event["samples"], dict(event)) for event in events if event["step"] == last]
