"""Are the rates, the average, the buffers and the metrics of a run what they should be?"""

from __future__ import annotations

import math

from paceline.optim.schedules import LearningRate
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_events
from paceline.records.run_directory import RunDirectory
from paceline_advisor.prove.evidence import Evidence
from paceline_advisor.prove.notes import Observed
from paceline_advisor.prove.verdict import Check, Question, sure

# A rate is one multiplication; an average is some hundred additions; a score may be in float32.
_LIMIT_RATE = 1e-12
_LIMIT_AVERAGE = 1e-9
_LIMIT_METRIC = 1e-5
_NO_END = "no run came to its end; see run"


def learning_rate(evidence: Evidence) -> Check:
    """The recipe's rate, scaled by its own rule and by nothing else."""
    question = Question(
        name="learning-rate",
        compared="each step's rate, and the schedule's peak, against the recipe",
        advice="The rate is scaled once too often: optimizer.lr is for the global batch as given, whatever the number "
        "of processes and micro-batches.",
    )
    worst, found = 0.0, ""
    for where, rate, wanted in [*_rates_used(evidence), *_peaks(evidence)]:
        gap = sure(abs(rate - wanted) / wanted if wanted else abs(rate))
        if gap > worst:
            worst, found = (
                gap,
                f"{where}: {rate:.6g} instead of {wanted:.6g}, {rate / wanted if wanted else 0:.3g} times",
            )
    return question.measured(worst, _LIMIT_RATE, found=found if worst > _LIMIT_RATE else "")


def moving_average(evidence: Evidence) -> Check:
    """The average of the weights after each optimizer step, by its definition."""
    decay = evidence.recipe.train.ema
    question = Question(
        name="moving-average",
        compared="the saved average against its definition",
        advice="The moving average is not updated, or more than once a step, or from other weights than those after "
        "the step.",
    )
    if decay is None:
        return question.not_applicable("train.ema=off")
    worst, found = 0.0, ""
    if all(run.trouble for run in evidence.as_asked):
        return question.not_applicable(_NO_END)
    for run in evidence.as_asked:
        wanted = run.average()
        if run.trouble:
            continue
        if wanted is None:
            return question.failed(f"{run.name}: no optimizer step was seen")
        trained = run.saved("model")
        saved = {key: each for key, each in run.saved("ema").items() if key in wanted}
        # What the weights have moved since the average began is what it could be wrong by.
        scale = max((trained[key].double() - wanted[key].double()).abs().max().item() for key in saved)
        apart = max((saved[key].double() - wanted[key].double()).abs().max().item() for key in saved)
        gap = sure(apart / scale if scale else apart)
        if gap > worst:
            worst, found = gap, f"{run.name}: off by {gap:.2g} of the way between average and weights"
    limit = _LIMIT_AVERAGE if evidence.nature.double else 1e-4
    return question.measured(worst, limit, found=found if worst > limit else "")


def buffers(evidence: Evidence) -> Check:
    """The same buffers on every process where they count."""
    run = evidence.several
    question = Question(
        name="buffers",
        compared="BatchNorm statistics on all processes, scored and saved",
        advice="Each process has statistics of its own where they are scored or saved: what is scored then depends on "
        "who scores it. Register them as buffers, and let the trainer make them equal.",
    )
    if run is None:
        return question.not_applicable(evidence.alone)
    if not any(True for _ in evidence.plain.network.buffers()):
        return question.not_applicable("the network has no buffers")
    if run.trouble:
        return question.not_applicable(f"{run.name}: {run.trouble}")
    seen: dict[tuple[int, str], set[str]] = {}
    for notes in run.ranks:
        for score in notes.scores:
            seen.setdefault((score.position, score.weights), set()).add(score.buffers)
        seen.setdefault((len(notes.steps), "the saved model"), set()).add(notes.final_buffers)
    apart = [place for place, digests in seen.items() if len(digests) > 1]
    text = f"they differ after step {apart[0][0]} ({apart[0][1]})" if apart else ""
    return question.measured(len(apart), found=text)


def metric(evidence: Evidence) -> Check:
    """What an evaluation says of weights, against the same weights scored sample by sample."""
    question = Question(
        name="metric",
        compared="the last evaluation against its samples scored one by one",
        advice="A mean of batch means, or samples that were padded or left out: score() returns one value for each "
        "sample, and the trainer divides once.",
    )
    if not evidence.sizes.evaluation_samples:
        return question.not_applicable("nothing is evaluated")
    worst, found = 0.0, ""
    if all(run.trouble for run in evidence.as_asked):
        return question.not_applicable(_NO_END)
    for run in evidence.as_asked:
        if run.trouble:
            continue
        for weights, samples, values in _evaluations(run):
            wanted = evidence.sizes.evaluation_samples - _unreadable(run)
            surplus = samples - wanted or _scored_twice(run, weights)
            if surplus:
                text = f"{run.name}, {weights}: {surplus:+d} samples were counted"
                return question.measured(abs(surplus), found=text)
            for name, true in evidence.plain.metrics(run.saved(weights)).items():
                value = math.nan if values.get(name) is None else values[name]
                gap = sure(abs(value - true) / max(abs(true), 1.0))
                if gap > worst:
                    worst, found = gap, f"{run.name}, {weights}: {name} is {value:.6g}, sample by sample {true:.6g}"
    return question.measured(worst, _LIMIT_METRIC, found="" if worst <= _LIMIT_METRIC else found)


def ended(evidence: Evidence) -> Check:
    """Every run came to its end."""
    question = Question(
        name="run",
        compared="the steps of each short run",
        advice="A run of this recipe does not come to its end; the checks above say what was found until then.",
    )
    for run in evidence.runs:
        taken = len(run.ranks[0].steps) if run.ranks else 0
        if run.trouble or taken != evidence.sizes.steps:
            text = run.trouble or f"{taken} steps instead of {evidence.sizes.steps}"
            return question.failed(f"{run.name}: {text}")
    return question.measured(0)


def _rates_used(evidence: Evidence) -> list[tuple[str, float, float]]:
    """Where, the rate of a group and the rate wanted, for every step of every run."""
    grouped = evidence.recipe.optimizer.groups or evidence.recipe.optimizer.layer_decay is not None
    batch = evidence.sizes.global_batch
    return [
        (f"{run.name}, step {number}", rate, _peak(run.recipe, batch) * (factor if grouped else 1.0))
        for run in evidence.runs
        for notes in run.ranks
        for number, step in enumerate(notes.steps, start=1)
        for rate, factor in step.rates
    ]


def _peaks(evidence: Evidence) -> list[tuple[str, float, float]]:
    """The same for the step at which the recipe's own schedule, not shortened, is at its peak."""
    found = []
    for count, plan in evidence.plans.items():
        top = _top_step(evidence.recipe, plan)
        if top is not None:
            rate = LearningRate.of(evidence.recipe.schedule, plan)(top)
            # By then the batch may have grown.
            batch = plan.epochs.phase_at(top).global_batch_size
            wanted = _peak(evidence.recipe, min(batch, plan.train_samples))
            found.append((f"the schedule with {count} process{'es' * (count > 1)}, step {top + 1}", rate, wanted))
    return found


def _top_step(recipe: Recipe, plan: Plan) -> int | None:
    top = plan.warmup_steps - (1 if recipe.schedule.name == "one_cycle" else 0)
    reaches = top < plan.total_steps and all(each > top for each in plan.milestone_steps)
    return top if reaches else None


def _peak(recipe: Recipe, batch: int) -> float:
    asked = recipe.optimizer
    ratio = 1.0 if asked.lr_reference_batch is None else batch / asked.lr_reference_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[asked.lr_scaling]
    return asked.lr * factor


def _unreadable(run: Observed) -> int:
    """How many held-out samples were left out because they could not be read."""
    incidents = read_events(RunDirectory(run.run_dir).events, kinds={"incident"})
    return sum(event["incident"] == "broken_sample" and event.get("split") == "validation" for event in incidents)


def _scored_twice(run: Observed, weights: str) -> int:
    """How many samples of the last evaluation had been scored in it before, on any process."""
    scores = [score for notes in run.ranks for score in notes.scores if score.weights == weights]
    last = max((score.position for score in scores), default=0)
    ids = [sample for score in scores if score.position == last for sample in score.ids]
    return len(ids) - len(set(ids))


def _evaluations(run: Observed) -> list[tuple[str, int, dict[str, float]]]:
    """Weights, samples and metrics of a run's last evaluation."""
    events = list(read_events(RunDirectory(run.run_dir).events, kinds={"evaluation"}))
    last = max((event["step"] for event in events), default=0)
    return [(event["weights"], event["samples"], dict(event)) for event in events if event["step"] == last]
