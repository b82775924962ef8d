"""Does the optimizer get the gradient of the mean loss over the step's samples, however the step is cut?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.data.batch import Batch
from paceline_advisor.prove.evidence import Evidence
from paceline_advisor.prove.notes import Observed
from paceline_advisor.prove.reference import Difference, Plain, difference, joined, parts_of
from paceline_advisor.prove.verdict import Check, Question

Groups = Sequence[Sequence[Batch]]
_Gap = tuple[Observed, int, Difference]


def gradient(evidence: Evidence) -> Check:
    """The engine against a plain loop over the same micro-batches."""
    question = Question(
        name="gradient",
        compared="each step's gradient against a plain PyTorch loop's",
        advice="The trainer does not hand the optimizer what the loss says: look for code that changes gradients, "
        "weights the micro-batches or draws random numbers before the loss.",
    )
    return _worst(question, _against_parts(evidence, evidence.asked, evidence.sizes.whole_steps), evidence)


def accumulation(evidence: Evidence) -> Check:
    """One big batch against its micro-batches."""
    sizes, nature = evidence.sizes, evidence.nature
    rest = ""
    if not nature.is_at_rest:
        stilled = [*(["dropout off"] if nature.dropouts else []), *(["BatchNorm frozen"] if nature.norms else [])]
        rest = f" ({', '.join(stilled)})"
    question = Question(
        name="accumulation",
        compared=f"1 and {sizes.micro_batches} micro-batches against one plain pass{rest}",
        advice="A task's loss is the mean over its micro-batch's samples, and the trainer weights it: do not divide by "
        "the number of micro-batches or add up where the mean is meant.",
    )
    if nature.uncomparable:
        return question.not_applicable(nature.uncomparable)
    gaps = [gap for run in (evidence.whole, evidence.parts) for gap in _against_whole(evidence, run, sizes.whole_steps)]
    return _worst(question, gaps, evidence)


def tail(evidence: Evidence) -> Check:
    """An epoch's last step, which has fewer samples."""
    sizes = evidence.sizes
    step = sizes.tail_step
    question = Question(
        name="tail",
        compared=f"an epoch's last {sizes.tail} samples, in parts, against plain PyTorch",
        advice="The last, smaller step of an epoch is dropped or weighted wrongly: divide by the samples that are "
        "there, not by a batch size of the recipe.",
    )
    for run in evidence.runs:
        taken = sum(len(each.ids) + len(each.broken) for each in run.micro_batches if each.step == step)
        if taken != sizes.tail and run.went_past(step):
            return question.failed(f"{run.name}: step {step + 1} took {taken} samples instead of {sizes.tail}")
    gaps = [gap for run in evidence.as_asked for gap in _against_parts(evidence, run, [step])]
    if not evidence.nature.uncomparable:
        gaps += _against_whole(evidence, evidence.parts, [step])
    return _worst(question, gaps, evidence)


def processes(evidence: Evidence) -> Check:
    """Several processes against one."""
    sizes, run = evidence.sizes, evidence.several
    each = sizes.micro_batches // sizes.processes
    question = Question(
        name="processes",
        compared=f"{sizes.processes} processes of {each} micro-batches against a plain loop in one",
        advice="What is computed depends on the number of processes or the rank: look for a world size in the loss, "
        "a learning rate or a batch that is scaled by it, or state that only one process has.",
    )
    if run is None:
        return question.not_applicable(evidence.alone)
    if run.trouble:
        return question.failed(f"the run ended with {run.trouble}")
    apart = [
        number
        for number, notes in enumerate(zip(*(rank.steps for rank in run.ranks), strict=False), start=1)
        if len({note.gradient for note in notes}) > 1
    ]
    if apart:
        return question.failed(f"the processes got different gradients at step {apart[0]}")
    return _worst(question, _against_parts(evidence, run, sizes.whole_steps), evidence)


def _against_whole(evidence: Evidence, run: Observed, steps: Iterable[int]) -> list[_Gap]:
    """Each step against one pass over its samples, as they came in this run: what is mixed has partners in its part."""

    def together(batches: list[Batch]) -> Groups:
        try:
            return [[joined(batches)]]
        except RuntimeError:  # padded to unequal lengths: how to pad them together only the pipeline knows
            return [parts_of(evidence.whole.batches, batches[0].slice.step)]

    return _gaps(run, steps, run, together, evidence.plain_whole)


def _against_parts(evidence: Evidence, run: Observed, steps: Iterable[int]) -> list[_Gap]:
    """Each step against its micro-batches one after the other, as they came in one process.

    Those of a process begin with the same buffers; in an exact run, every one does.
    """
    per_process = 1 if run.recipe.parallel.exact else evidence.sizes.micro_batches // run.processes

    def grouped(batches: list[Batch]) -> Groups:
        groups: dict[int, list[Batch]] = {}
        for batch in batches:
            groups.setdefault(batch.slice.logical_rank // per_process, []).append(batch)
        return list(groups.values())

    return _gaps(run, steps, evidence.asked, grouped, evidence.plain)


def _gaps(
    run: Observed, steps: Iterable[int], source: Observed, grouped: Callable[[list[Batch]], Groups], plain: Plain
) -> list[_Gap]:
    """How far a run's gradients are from a plain loop's, for the steps whose weights were kept.

    Args:
        run: Whose gradients.
        steps: Their numbers, from 0.
        source: The run that the batches are taken from.
        grouped: Turns a step's micro-batches into what the loop goes through.
        plain: The loop.
    """
    found = []
    for step in steps:
        kept, batches = run.step(step), parts_of(source.batches, step)
        if kept is not None and batches:
            weights, gradients = kept
            found.append((run, step, difference(gradients, plain.gradients(weights, grouped(batches)))))
    return found


def _worst(question: Question, gaps: Sequence[_Gap], evidence: Evidence) -> Check:
    if not gaps:
        return question.failed("no such step was taken")
    limit = evidence.nature.limit
    run, step, worst = next((gap for gap in gaps if not gap[2].relative <= limit), gaps[0])
    if worst.relative <= limit:
        return question.measured(max(gap[2].relative for gap in gaps), limit)
    found = f"{run.name}, step {step + 1}: {worst.ratio:.3g} times the gradient wanted, most apart in {worst.where}"
    return question.measured(worst.relative, limit, found=found)
