"""Judge whether a run learns, and name the likeliest cause if it does not; no torch needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.learning.evidence import LearningEvidence, read_evidence
from paceline.learning.figures import (
    accuracy_name,
    dead_rows,
    errors_are_uniform,
    falls_behind,
    figures_of,
    gradients_flow,
    ignores_input,
    in_each_step,
    is_within,
    mean_of,
    shortened,
    trained_share,
)
from paceline.records.run_directory import RunDirectory

# More classes in each place than masks and labels of words have: a vocabulary.
_TOKENS = 50
_NUMBER_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_AT_ZERO = ("gradient", "weight")


@dataclass(frozen=True, kw_only=True)
class LearningFault:
    """What keeps a run from learning, or from learning well.

    Attributes:
        name: Its name, also in the guide.
        cause: What is wrong, as a clause.
        evidence: The figures that show it.
        fix: What to change.
    """

    name: str
    cause: str
    evidence: str
    fix: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.evidence}); {self.fix}."

    def to_json(self) -> dict[str, str]:
        """Return it as one JSON object."""
        return {"name": self.name, "cause": self.cause, "evidence": self.evidence, "fix": self.fix}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a run learns.

    Attributes:
        outcome: The outcome if it is bad, as a sentence without its end; empty otherwise.
        findings: Likely causes, the likeliest first.
    """

    outcome: str = ""
    findings: tuple[LearningFault, ...] = ()

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.outcome}; the records do not show why." if self.outcome else ""
        return f"{self.outcome or 'Learning may suffer'}: {self.findings[0]}"

    def __bool__(self) -> bool:
        return bool(self.outcome or self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {"sentence": str(self), "outcome": self.outcome, "findings": [each.to_json() for each in self.findings]}


def judge_run(run: RunDirectory, warning: str | None = None) -> Judgement:
    """Judge a run from its directory.

    Args:
        run: The directory.
        warning: The run's own warning; None for that of its summary.

    Raises:
        RunDirectoryError: If its records cannot be read.
    """
    return judge(read_evidence(run, warning))


def judge(evidence: LearningEvidence) -> Judgement:
    """Judge a run; nothing is said where the evidence is not clear."""
    if evidence.value("data.dataset") == "synthetic":
        return Judgement()  # nothing can be learned from random labels, and it is not meant to be
    try:
        findings = [found for each in RULES if (found := each(evidence)) is not None]
        return Judgement(outcome=evidence.outcome, findings=tuple(findings))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return Judgement()  # damaged records, which the page or command that shows them reports


Rule = Callable[[LearningEvidence], LearningFault | None]
RULES: list[Rule] = []


def rule(*, cause: str, fix: str, troubled: bool = False) -> Callable[[Callable[[LearningEvidence], str | None]], Rule]:
    """Declare a rule; its name becomes the finding's, and its result is the evidence, None if it does not apply.

    Args:
        cause: What is wrong, as a clause.
        fix: What to change.
        troubled: Whether the rule applies only to runs with a bad outcome.
    """

    def declare(inspect: Callable[[LearningEvidence], str | None]) -> Rule:
        def found(evidence: LearningEvidence) -> LearningFault | None:
            if troubled and not evidence.in_trouble:
                return None
            figures = inspect(evidence)
            if figures is None:
                return None
            return LearningFault(name=inspect.__name__, cause=cause, evidence=figures, fix=fix)

        RULES.append(found)
        return found

    return declare


# In order: what is certain by itself, then what explains a bad outcome, the most specific first.


@rule(
    cause="the loss is given probabilities, and applies softmax or sigmoid to them once more",
    fix="remove the softmax or sigmoid at the network's end, since the loss contains it",
)
def softmax_twice(evidence: LearningEvidence) -> str | None:
    """The loss receives numbers that are probabilities already."""
    for name in ("cross_entropy", "binary_cross_entropy_with_logits"):
        found = figures_of(evidence, name)
        if len(found) < 2 or not all(is_within(each, 0, 1) for each in found):
            continue
        if name == "cross_entropy" and not all((each["off_one"] or 0) < 0.02 for each in found):
            continue
        low, high = min(each["low"] for each in found), max(each["high"] for each in found)
        # The answers of a network that has hardly learned may all lie between 0 and 1.
        if name != "cross_entropy" and low > 0.05 and high < 0.95:
            continue
        if high > low:
            return f"all answers that {name} received are between {low:.3g} and {high:.3g}"
    return None


@rule(
    cause="nll_loss is given numbers that are not logarithms of probabilities",
    fix="use cross_entropy, or apply log_softmax first",
)
def not_log_probabilities(evidence: LearningEvidence) -> str | None:
    """`nll_loss` receives something else than log-probabilities."""
    found = figures_of(evidence, "nll_loss")
    if found and all(each["off_one"] is None or each["off_one"] > 0.1 for each in found):
        return "the probabilities of a sample do not add up to 1"
    return None


@rule(
    cause="the loss is cross-entropy of a single class, which is always 0",
    fix="give the network an output for each class, or use binary_cross_entropy_with_logits",
)
def one_output(evidence: LearningEvidence) -> str | None:
    """Cross-entropy over one class has no gradient."""
    found = figures_of(evidence, "cross_entropy")
    return "the network has one output" if found and all(each["classes"] == 1 for each in found) else None


@rule(
    cause="the answers of the network stop where many targets go on",
    fix="remove the activation at the network's end, or scale the targets into its range",
)
def answers_limited(evidence: LearningEvidence) -> str | None:
    """A ReLU, sigmoid or tanh ends a network whose targets are other numbers."""
    for name in _NUMBER_LOSSES:
        found = [each for each in figures_of(evidence, name) if each.get("target_low") is not None]
        if len(found) < 3 or not all(each["low"] is not None and each["high"] is not None for each in found):
            continue
        low, high = min(each["low"] for each in found), max(each["high"] for each in found)
        ends = sorted(each["high"] for each in found)[len(found) // 2], min(each["target_low"] for each in found)
        mean, std = (mean_of([each[key] for each in found]) for key in ("target_mean", "target_std"))
        # In most steps a limit is reached, and never exceeded.
        is_positive = low >= 0 and sum(each["low"] < 1e-3 * std for each in found) > len(found) / 2
        is_within_one = low >= -1 and 0.98 < ends[0] <= high <= 1
        if is_positive and mean - std < 0 and ends[1] < -0.2 * std:
            return f"none is below 0, and targets reach {ends[1]:.3g}"
        if is_within_one and mean + std > 1.2:
            return f"none is above 1, and targets have a mean of {mean:.3g} and a standard deviation of {std:.3g}"
    return None


@rule(
    cause="all targets are the same",
    fix="look at how the data set makes its targets",
)
def constant_targets(evidence: LearningEvidence) -> str | None:
    """There is nothing to learn."""
    held = list(evidence.held_out.values())
    steps = [found for each in evidence.observations for found in each.get("losses", {}).values()]
    found = [each for each in (*steps, *held) if each]
    if len(steps) < 3 or sum(each["groups"] for each in found) < 200:
        return None
    if all(each["kind"] == "classes" and each["majority"] == 1 for each in found):
        return "one class in all observed samples"
    values = {each["target_mean"] for each in found if each["kind"] == "constant"}
    if len(values) == 1 and all(each["kind"] == "constant" for each in found):
        return f"{values.pop():.3g} in all observed samples"
    return None


@rule(
    cause="the loss has no gradient with respect to the network",
    fix="compute it from the network's answers without detach(), argmax() or rounding",
)
def zero_gradients(evidence: LearningEvidence) -> str | None:
    """No block has a gradient, in any observed step."""
    norms = [block["gradient"] for each in evidence.full for block in each["blocks"].values()]
    is_known = len(evidence.full) > 1 and all(each == 0 for each in norms)
    return f"it was 0 in {len(evidence.full)} observed steps" if is_known else None


@rule(
    cause="layers ran in evaluation mode while the network was trained",
    fix="call the network's train() before each step, or do not call eval() in its code or in the loss",
)
def evaluation_mode(evidence: LearningEvidence) -> str | None:
    """Dropout is off, or BatchNorm uses statistics that training never updates."""
    names = [] if evidence.may_be_intended else in_each_step(evidence, "evaluating")
    return f"{shortened(names)} in each observed step" if names else None


@rule(
    cause="parameters that should be trained receive no gradient",
    fix="use them in the forward pass, without detach() or no_grad(), or freeze them",
)
def without_gradient(evidence: LearningEvidence) -> str | None:
    """Trainable parameters take no part in the loss."""
    names = [] if evidence.may_be_intended else in_each_step(evidence, "without_gradient")
    return shortened(names) if names and len(evidence.full) > 1 else None


@rule(cause="parts of the network never change", fix="give the optimizer all parameters of the network")
def never_updated(evidence: LearningEvidence) -> str | None:
    """Trainable parameters have a gradient and do not move."""
    if len(evidence.full) < 3 or evidence.plan.get("unfreeze_steps") or evidence.may_be_intended:
        return None
    if evidence.moved < 0.001:
        return None  # rather a rate that is far too low
    still = [
        name
        for name, each in evidence.last["blocks"].items()
        if all((one["blocks"].get(name) or each)["moved"] == 0 for one in evidence.full)
        and any((one["blocks"].get(name) or each)["gradient"] for one in evidence.full)
    ]
    return f"{shortened(still)}: no weight has changed since the first step" if still else None


@rule(
    cause="parts of the network begin at 0 and stay there, since no gradient reaches them",
    fix="initialise them with random numbers; only the last layer of a residual branch may begin at 0",
)
def zero_weights(evidence: LearningEvidence) -> str | None:
    """Layers of zeros on both sides of one another receive no gradient."""
    if len(evidence.full) < 3:
        return None
    steps = [each["blocks"] for each in evidence.full]
    still = [name for name in steps[0] if all(one.get(name, {}).get(k) == 0 for one in steps for k in _AT_ZERO)]
    return shortened(still) if still else None


@rule(
    cause="most of the network is frozen at random weights",
    fix="begin from pretrained weights (model.pretrained, model.initialize_from), or freeze less",
)
def frozen_at_random(evidence: LearningEvidence) -> str | None:
    """The frozen parameters were never trained."""
    share = trained_share(evidence)
    has_source = evidence.value("model.pretrained") or evidence.value("model.initialize_from")
    by_recipe = evidence.value("model.frozen") or evidence.value("model.adapters.rank")
    if share is None or share > 0.5 or has_source:
        return None
    if not by_recipe and not evidence.in_trouble and not evidence.has_learned_little:
        return None  # own code may have loaded weights
    return f"{100 * share:.3g} % of its parameters are trained"


@rule(
    cause="the network is called more than once with the same input in a step",
    fix="keep the first answer: each call takes time, and BatchNorm's statistics move twice",
)
def called_twice(evidence: LearningEvidence) -> str | None:
    """Each step computes the same answer twice."""
    calls = [each.get("same_calls", 0) for each in evidence.full]
    return f"{1 + min(calls)} times" if calls and min(calls) > 0 and not evidence.may_be_intended else None


@rule(cause="dropout is very high", fix="lower it: 0.1 to 0.5 is usual")
def dropout(evidence: LearningEvidence) -> str | None:
    """Hardly anything passes a dropout layer."""
    rates = [each.get("dropout") or 0.0 for each in evidence.full]
    return f"a rate of {min(rates):.3g}" if rates and min(rates) >= 0.8 else None


@rule(
    cause="held-out samples are trained on, so the score says little about new ones",
    fix="remove them from one of the two sets; `paceline check-data` lists copies in files",
)
def data_leak(evidence: LearningEvidence) -> str | None:
    """Training samples equal held-out ones."""
    compared, equal = (evidence.copies.get(key, 0) for key in ("compared", "equal"))
    return f"{equal} of {compared} compared" if equal >= 3 and equal >= 0.005 * compared else None


@rule(cause="all inputs of a batch are equal", fix="look at the data set's __getitem__, and at its transforms")
def constant_inputs(evidence: LearningEvidence) -> str | None:
    """The inputs do not differ between samples."""
    spreads = [each["inputs"]["between"] for each in evidence.full if each.get("inputs")]
    known = [each for each in spreads if each is not None]
    return "they do not differ between samples" if known and max(known) <= 1e-7 else None


@rule(
    cause="the held-out classes are numbered in another order than the training classes",
    fix="use one list of class names for both",
)
def classes_permuted(evidence: LearningEvidence) -> str | None:
    """Each class is taken for one other."""
    matrix = evidence.matrix
    if len(matrix) < 3:
        return None
    total = sum(map(sum, matrix))
    right = sum(row[index] for index, row in enumerate(matrix))
    best = sum(max(column) for column in zip(*matrix, strict=True))
    used = sum(1 for column in zip(*matrix, strict=True) if any(column))
    if total < 50 or used < 3 or best / total < right / total + 0.3 or best / total < 0.5:
        return None
    return f"{100 * best / total:.3g} % would be right with the classes renamed, {100 * right / total:.3g} % are"


@rule(
    cause="the held-out samples have other classes than the training samples",
    fix="split the samples at random, not in the order of their classes",
)
def classes_disjoint(evidence: LearningEvidence) -> str | None:
    """No held-out class is ever the answer."""
    matrix, trained = evidence.matrix, evidence.trained
    labels = {index for index, row in enumerate(matrix) if any(row)}
    answers = {index for row in matrix for index, count in enumerate(row) if count}
    if sum(map(sum, matrix)) < 50 or labels & answers or trained is None or not trained.is_above_chance:
        return None
    return f"none of the {len(labels)} held-out classes is among the {len(answers)} classes of its answers"


@rule(
    cause="inputs are far from unit scale",
    fix="normalise them to a mean of 0 and a standard deviation of 1",
)
def input_scale(evidence: LearningEvidence) -> str | None:
    """Large or tiny inputs need another learning rate or initialisation."""
    first, held = evidence.first_fit, evidence.held
    shares = [each.loss_share or 0.0 for each in (first, held) if each is not None]
    if (
        not evidence.in_trouble
        and not any(share > 5 for share in shares[:1])
        and not any(share > 1.5 for share in shares[1:])
    ):
        return None
    figures = [each["inputs"] for each in evidence.full if each.get("inputs")]
    if not figures or figures[0]["std"] is None:
        return None
    mean, std = figures[0]["mean"] or 0.0, figures[0]["std"]
    if std <= 10 and abs(mean) <= 10 and std >= 0.03:
        return None
    return f"mean {mean:.3g}, standard deviation {std:.3g}"


@rule(
    cause="each step makes the training loss larger",
    fix="look for a minus sign before the loss, or maximize=True in the optimizer",
    troubled=True,
)
def loss_rises(evidence: LearningEvidence) -> str | None:
    """The loss grows in small, regular steps: it is maximised."""
    losses = [found["loss"] for each in evidence.full if (found := each.get("losses", {}).get("cross_entropy"))]
    updates = [block["update"] or 0.0 for each in evidence.full for block in each["blocks"].values()]
    is_steady = len(losses) >= 4 and max(updates) <= 0.05 and evidence.moved >= 0.01
    if not is_steady or losses[-1] < 1.5 * losses[0] or not losses[-4] < losses[-2] < losses[-1]:
        return None
    most = f"{100 * max(updates):.2g} %"
    return f"from {losses[0]:.4g} to {losses[-1]:.4g}, and no step changed a part by more than {most}"


@rule(
    cause="gradients are clipped to almost nothing",
    fix="raise optimizer.clip_norm: 1 is usual",
    troubled=True,
)
def clipped(evidence: LearningEvidence) -> str | None:
    """The limit is far below the norm of the gradients."""
    limit = evidence.value("optimizer.clip_norm")
    norms = [math.hypot(*(block["gradient"] or 0.0 for block in each["blocks"].values())) for each in evidence.full]
    if not isinstance(limit, int | float) or not norms or min(norms) < 1000 * limit:
        return None
    return f"to a norm of {limit:.2g}, and theirs was at least {min(norms):.2g}"


@rule(cause="weight decay pulls the weights to 0", fix="lower it: 0.0001 to 0.1 is usual")
def weight_decay(evidence: LearningEvidence) -> str | None:
    """Each step takes more from the weights than it can give."""
    if not (evidence.in_trouble or evidence.has_learned_little) or len(evidence.full) < 2:
        return None
    rate = max((float(each["lr"]) for each in evidence.steps if each.get("lr") is not None), default=0.0)
    decay = 0 if evidence.value("objects.optimizer") else evidence.value("optimizer.weight_decay") or 0
    if decay > 0.5 and rate * decay > 0.02:
        return f"each step takes {100 * rate * decay:.3g} % of them"
    first, last = evidence.full[0]["blocks"], evidence.last["blocks"]
    pairs = [(first[name]["weight"], last[name]["weight"]) for name in first if name in last]
    shares = sorted(now / before for before, now in pairs if before and now is not None)
    if not shares or shares[len(shares) // 2] > 0.1:
        return None
    return f"half of the parts have shrunk to {100 * shares[len(shares) // 2]:.2g} % of their size or less"


@rule(
    cause="the learning rate is far too low",
    fix="raise it; `paceline find-lr` suggests a value",
    troubled=True,
)
def rate_too_low(evidence: LearningEvidence) -> str | None:
    """The weights hardly move."""
    if len(evidence.full) < 2 or not evidence.full[0].get("blocks") or not gradients_flow(evidence):
        return None
    if evidence.moved >= 0.01 or evidence.largest_update >= 3e-5 * max(1, 1000 / evidence.last["step"]) ** 0.5:
        return None
    return f"the weights have moved by {evidence.moved:.2g} of their size in {evidence.last['step']} steps"


@rule(
    cause="the learning rate is too high",
    fix="lower it, or lengthen the warm-up; `paceline find-lr` suggests a value",
    troubled=True,
)
def rate_too_high(evidence: LearningEvidence) -> str | None:
    """Steps are so large that they undo one another."""
    update = evidence.largest_update
    losses = evidence.losses
    exploded = bool(losses) and losses[-1] > 3 * max(min(losses), 0.1) and max(losses) > 3 * losses[0]
    if update > 0.3 or evidence.moved > 5 or (exploded and update > 0.02) or (evidence.warning and update > 0.02):
        return f"one step changed the weights by {100 * update:.3g} % of their size"
    return None


@rule(cause="the run is short", fix="train longer (train.duration)", troubled=True)
def short_run(evidence: LearningEvidence) -> str | None:
    """Nothing can be expected of a few steps."""
    total = 0 if evidence.warning else evidence.last.get("step", 0)
    return f"{total} steps" if 0 < total < 50 and evidence.moved < 0.5 else None


@rule(cause="units of the network are dead", fix="lower the learning rate, or use another activation", troubled=True)
def dead_units(evidence: LearningEvidence) -> str | None:
    """Units whose output is always 0 receive no gradient."""
    found = dead_rows(evidence)
    if not found or ignores_input(evidence):
        return None
    name = max(found, key=lambda each: found[each])
    return f"{100 * found[name]:.3g} % of the rows of {name} had a gradient of 0 in each late observed step"


@rule(
    cause="gradients vanish on their way through the network",
    fix="use residual connections, normalisation layers or another initialisation",
    troubled=True,
)
def vanishing(evidence: LearningEvidence) -> str | None:
    """The first layers receive almost no gradient."""
    ratios = []
    for each in evidence.full:
        norms = [
            one["gradient"] / math.sqrt(max(one["parameters"], 1))
            for one in each["blocks"].values()
            if one["gradient"]  # 0 behind layers that begin at 0
        ]
        if len(norms) > 2 and max(norms) > 0:
            ratios.append(min(norms) / max(norms))
    if len(ratios) < 3 or sorted(ratios)[len(ratios) // 2] > 1e-6:
        return None
    return f"those of one part are {sorted(ratios)[len(ratios) // 2]:.1g} times as large as those of another"


@rule(
    cause="the network's answers do not depend on its input",
    fix="look for dead layers, a rate that is too high, or an input that is not used",
    troubled=True,
)
def constant_answers(evidence: LearningEvidence) -> str | None:
    """All samples of a batch receive the same answer."""
    outputs = evidence.last.get("outputs")
    if not outputs or outputs["between"] is None or outputs["std"] is None:
        return None
    first = evidence.full[0].get("outputs") or {}
    scale = max(abs(outputs["mean"] or 0), outputs["std"], 1e-6)
    if outputs["between"] / scale >= 1e-3 or evidence.largest_update < 1e-5:
        return None
    began = first.get("between")
    if began is not None and began / scale > 1e-2 and evidence.largest_update > 0.05:
        return None  # the rate did this
    return f"they differ by {outputs['between']:.2g} between samples"


@rule(
    cause="targets are far from unit scale",
    fix="divide them by their standard deviation after subtracting their mean",
)
def target_scale(evidence: LearningEvidence) -> str | None:
    """A network begins with answers near 0 and takes many steps to reach large targets."""
    fit, held = evidence.first_fit, evidence.held
    if fit is None or fit.figures["kind"] != "numbers":
        return None
    if not evidence.in_trouble:
        spreads = (0.0, 0.0) if held is None else (held.figures["answer_std"] or 0.0, held.figures["target_std"] or 0.0)
        # The answers follow the targets, and are still far too small.
        if not evidence.has_learned_little or held is None or held.score < 0.5 or spreads[0] > 0.1 * spreads[1]:
            return None
    mean, std = fit.figures["target_mean"] or 0.0, fit.figures["target_std"] or 0.0
    if max(abs(mean), std) <= 20 and std > 1e-3:
        return None
    return f"mean {mean:.3g}, standard deviation {std:.3g}"


@rule(
    cause="held-out inputs are prepared in another way than training inputs",
    fix="use the same normalisation for both",
)
def inputs_differ(evidence: LearningEvidence) -> str | None:
    """The network sees other numbers in evaluation than in training."""
    late = [each["inputs"] for each in evidence.full if each.get("inputs")]
    held = evidence.evaluations[-1] if evidence.evaluations else {}
    if not late or held.get("input_std") is None or not falls_behind(evidence):
        return None
    mean, std = (mean_of([each[key] for each in late]) for key in ("mean", "std"))
    other_mean, other_std = held["input_mean"], held["input_std"]
    shift, ratio = abs(other_mean - mean) / max(std, other_std, 1e-12), other_std / max(std, 1e-12)
    if shift < 0.5 and 0.6 < ratio < 1.7:
        return None
    return (
        f"mean {mean:.3g} and standard deviation {std:.3g} in training, {other_mean:.3g} and {other_std:.3g} held out"
    )


@rule(
    cause="BatchNorm's statistics do not fit the batches",
    fix="use larger batches or a larger momentum, or normalise with GroupNorm or LayerNorm",
)
def batch_statistics(evidence: LearningEvidence) -> str | None:
    """Evaluation uses other statistics than training."""
    figures = evidence.last.get("statistics")
    if not figures or evidence.last["step"] < 40 or not falls_behind(evidence):
        return None
    if (figures["shift"] or 0) < 1 and abs(figures["ratio"] or 0) < 1.5:
        return None
    return f"{figures['name']}: the mean differs by {figures['shift']:.2g} standard deviations"


@rule(
    cause="many labels are likely wrong",
    fix="look at confident mistakes in the report, and at the labels of their files",
)
def labels_partly_wrong(evidence: LearningEvidence) -> str | None:
    """Even the surest answers are often wrong, and spread over all other classes."""
    fit = evidence.held
    if fit is None or not fit.of_classes or fit.groups < 100 or (fit.loss_share or 1) > 0.9:
        return None
    if evidence.in_trouble or not evidence.has_settled or not_log_probabilities(evidence):
        return None
    bins = [each for each in fit.figures["confidence"] if each[0]]
    counts = [count for count, _ in fit.figures["confidence"]]
    confidence = sum((place + 0.5) * count for place, count in enumerate(counts)) / len(counts) / max(sum(counts), 1)
    if confidence < fit.score - 0.25:
        return None  # it has not been trained for long enough to be sure of anything
    half, top, hits = sum(count for count, _ in bins) / 3, 0, 0
    for count, right in reversed(bins):
        if top >= half:
            break
        top, hits = top + count, hits + right
    rest, rest_hits = sum(each[0] for each in bins) - top, sum(each[1] for each in bins) - hits
    if not top or not errors_are_uniform(evidence):
        return None
    sure, other = hits / top, rest_hits / rest if rest else hits / top
    error = math.sqrt(max(sure * (1 - sure), 1e-3) / top)
    if sure > 0.9 - error or sure - other > 0.16:
        return None
    return (
        f"{100 * (1 - sure):.2g} % of the surest third of its answers are wrong, almost as many as of the others, and "
        "these mistakes do not prefer some classes"
    )


@rule(
    cause="your loss falls, and the answers do not become better",
    fix="check that it compares the answers with the targets",
    troubled=True,
)
def loss_ignores_targets(evidence: LearningEvidence) -> str | None:
    """Another loss than torch's is minimised without the targets."""
    late, losses = evidence.trained, evidence.losses
    if late is None or late.figures["loss"] is not None or late.is_above_chance or len(losses) < 4:
        return None
    # By guessing, a loss may fall too, from that of the first random answers.
    return f"from {losses[0]:.4g} to {losses[-1]:.4g}, with {late.reached}" if losses[-1] < 0.3 * losses[0] else None


@rule(
    cause="the labels look unrelated to the inputs",
    fix="check that each label belongs to its input: look at the first batch in the report",
    troubled=True,
)
def labels_unrelated(evidence: LearningEvidence) -> str | None:
    """Nothing else is wrong, and nothing was learned."""
    others = (
        *(softmax_twice, not_log_probabilities, one_output, evaluation_mode, without_gradient, never_updated),
        *(frozen_at_random, dropout, constant_inputs, classes_permuted, constant_answers, rate_too_low),
        *(answers_limited, constant_targets, zero_gradients, zero_weights, classes_disjoint, loss_rises, clipped),
        loss_ignores_targets,
        weight_decay,
        *(rate_too_high, dead_units, vanishing, input_scale, target_scale, inputs_differ, batch_statistics),
    )
    if not evidence.is_at_chance or any(each(evidence) for each in others) or not evidence.full:
        return None
    if evidence.held is None or evidence.held.groups < 50 or evidence.moved < 0.02:
        return None
    if evidence.held.figures.get("labels", 0) > evidence.held.groups and evidence.held.figures["classes"] > _TOKENS:
        return None  # a language model learns slowly, and its text is its labels
    trained = evidence.trained
    if trained is not None and trained.is_above_chance:
        return f"in training it reaches {trained.reached}"
    share = None if trained is None else trained.loss_share
    is_at_prior = share is not None and abs(share - 1) < 0.05
    if not (evidence.has_settled or is_at_prior):
        return None  # it is still learning
    return f"the weights have moved by {100 * evidence.moved:.2g} % of their size, and the gradients are normal"


@rule(
    cause="the run has overfitted",
    fix="stop earlier (train.patience), or use more data, augmentation or weight decay",
)
def overfitted(evidence: LearningEvidence) -> str | None:
    """The held-out score has fallen well below its best while the training loss fell."""
    held, trained = evidence.held, evidence.trained
    name = accuracy_name(evidence)
    if held is None or trained is None or name is None or not held.of_classes:
        return None
    scores = [float(each[name]) / 100 for each in evidence.evaluations if each.get(name) is not None]
    if len(scores) < 3 or max(scores) - scores[-1] < max(3 * held.error, 0.05) or trained.score < held.score + 0.1:
        return None
    best = max(range(len(scores)), key=lambda index: scores[index])
    return f"{100 * scores[best]:.3g} % at step {evidence.evaluations[best]['step']}, {100 * scores[-1]:.3g} % now"
