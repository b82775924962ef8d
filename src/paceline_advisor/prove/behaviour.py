"""Are the samples, the modes and the draws of training what they should be?"""

from __future__ import annotations

from operator import itemgetter

import torch

from paceline_advisor.prove.evidence import Evidence
from paceline_advisor.prove.network import Dropout, dropouts
from paceline_advisor.prove.notes import MicroBatchNote, Observed, alike
from paceline_advisor.prove.reference import parts_of
from paceline_advisor.prove.verdict import Check, Question, named

_MOST_TRIED = 8
# Until two differ: a layer that drops whole samples may well do the same twice.
_DRAWS = 16


def order(evidence: Evidence) -> Check:
    """Each sample once in each epoch, in an order of its own."""
    question = Question(
        name="order",
        compared="two epochs: each sample once in each, in different orders",
        advice="Samples are repeated, left out, or come in the same order in every epoch: build the stream from the "
        "slices that the geometry gives, which depend on the epoch.",
    )
    wanted = set(range(evidence.sizes.samples))
    for run in evidence.as_asked:
        epochs = [
            [
                sample
                for note in run.micro_batches
                if _epoch(evidence, note) == epoch
                for sample in (*note.ids, *note.broken)
            ]
            for epoch in range(2)
        ]
        for number, ids in enumerate(epochs, start=1):
            missing = len(wanted - set(ids))
            surplus = len(ids) - len(set(ids) & wanted)
            if (missing or surplus) and run.went_past(number * evidence.sizes.steps_per_epoch - 1):
                found = f"{run.name}: in epoch {number}, {missing} samples are missing and {surplus} are too many"
                return question.measured(missing + surplus, found=found)
        if epochs[0] == epochs[1] != []:
            return question.measured(len(wanted), found=f"{run.name}: both epochs have the same order")
    return question.measured(0)


def samples(evidence: Evidence) -> Check:
    """The same samples with the same contents in every run; varied anew in each epoch, if the recipe varies them."""
    question = Question(
        name="samples",
        compared="each step's samples and their contents, in every run",
        advice="What a sample is depends on the micro-batch, the process, or a random state: key what is drawn for "
        "it by seed, epoch and sample, as Paceline's own augmentation is.",
    )
    mixes = evidence.recipe.data.mix.mixup > 0 or evidence.recipe.data.mix.cutmix > 0
    # What is mixed has partners in its micro-batch.
    others = evidence.as_asked if mixes else evidence.runs
    wanted = _by_step(evidence.asked)
    for run in others:
        found = _by_step(run)
        apart = [step for step in wanted if not _same(found.get(step, []), wanted[step])]
        if apart and not run.trouble:
            text = f"{run.name}: step {apart[0] + 1} has other samples, or other contents, than in one process"
            return question.measured(len(apart), found=text)
    is_cropped = evidence.recipe.data.augment.crop != "none" and "data.augment.crop" not in evidence.plans[1].unused
    if is_cropped and not _varies(evidence):
        return question.failed(f"data.augment.crop={evidence.recipe.data.augment.crop} gives the same in every epoch")
    return question.measured(0)


def parameters(evidence: Evidence) -> Check:
    """Every trainable parameter takes part in the loss."""
    question = Question(
        name="parameters",
        compared="trainable parameters, and those that ever got a gradient",
        advice="Use them in the loss, remove them, or set requires_grad=False: they never learn, and runs of several "
        "processes refuse them.",
    )
    steps = evidence.asked.ranks[0].steps
    unused = [name for name in steps[0].without_gradient if all(name in step.without_gradient for step in steps)]
    return question.measured(len(unused), found=f"without a gradient: {named(unused)}" if unused else "")


def training_mode(evidence: Evidence) -> Check:
    """Training mode where it is learned, evaluation mode where it is scored, and back."""
    question = Question(
        name="training-mode",
        compared="each module's mode where it learns and where it is scored",
        advice="Something calls eval() or train() and does not put back what was: whoever evaluates restores each "
        "module's mode; a model's factory returns it in training mode.",
    )
    for run in evidence.as_asked:
        for rank, notes in enumerate(run.ranks):
            if not notes.micro_batches:
                continue
            first = notes.micro_batches[0].evaluating
            for note in notes.micro_batches:
                changed = sorted(set(note.evaluating) ^ set(first))
                if "" in note.evaluating or changed:
                    which = "the network" if "" in note.evaluating else named(changed)
                    text = f"{run.name}, rank {rank}, step {note.step + 1}: {which} was not in its training mode"
                    wrong = sum("" in each.evaluating or each.evaluating != first for each in notes.micro_batches)
                    return question.measured(wrong, found=text)
            if any(score.training for score in notes.scores):
                return question.failed(f"{run.name}, rank {rank}: the network was scored in training mode")
    still = evidence.asked.ranks[0].micro_batches[0].evaluating
    return question.measured(0, found=f"in evaluation mode throughout: {named(still)}" if still else "")


def dropout(evidence: Evidence) -> Check:
    """Everything that is to drop something does, and not the same at every step."""
    question = Question(
        name="dropout",
        compared="two draws of each dropout; random state of each forward pass",
        advice="A dropout is configured but does nothing, or does the same at every step: call the module, leave it "
        "in training mode, and let it draw from torch's generator.",
    )
    places = dropouts(evidence.plain.network)
    if not places:
        asked = [key for key, value in evidence.recipe.model.options.items() if _asks_for_dropout(key, value)]
        if asked and not _varies_by_itself(evidence):
            return question.failed(f"model.options.{asked[0]} has no effect: nothing is dropped")
        return question.not_applicable("the network has no dropout")
    for run in evidence.as_asked:
        notes = run.micro_batches
        evaluating = sorted({name for note in notes for name in note.evaluating} & {each.name for each in places})
        if evaluating:
            return question.measured(len(evaluating), found=f"{run.name}: in evaluation mode: {named(evaluating)}")
        if len({note.generator for note in notes}) < len(notes):
            return question.failed(f"{run.name}: several micro-batches draw the same random numbers")
    inert = _inert(evidence, places)
    text = f"without effect: {named([each.title for each in inert])}" if inert else ""
    return question.measured(len(inert), found=text)


def _epoch(evidence: Evidence, note: MicroBatchNote) -> int:
    return note.step // evidence.sizes.steps_per_epoch


def _by_step(run: Observed) -> dict[int, list[tuple[int, str]]]:
    found: dict[int, list[tuple[int, str]]] = {}
    for note in run.micro_batches:
        found.setdefault(note.step, []).extend(zip(note.ids, note.contents, strict=True))
    # Those of one length may share a micro-batch, and so come in another order where there are more of these.
    return {step: sorted(each, key=itemgetter(0)) for step, each in found.items()}


def _same(found: list[tuple[int, str]], wanted: list[tuple[int, str]]) -> bool:
    pairs = list(zip(found, wanted, strict=False))
    return len(found) == len(wanted) and all(one[0] == two[0] and alike(one[1], two[1]) for one, two in pairs)


def _varies(evidence: Evidence) -> bool:
    contents: dict[int, set[str]] = {}
    for note in evidence.asked.micro_batches:
        for sample, content in zip(note.ids, note.contents, strict=True):
            contents.setdefault(sample, set()).add(content)
    return any(len(each) > 1 for each in contents.values())


def _asks_for_dropout(key: str, value: object) -> bool:
    return "drop" in key and isinstance(value, int | float) and 0 < value < 1


def _varies_by_itself(evidence: Evidence) -> bool:
    """Whether the loss of the same micro-batch depends on the random state."""
    plain, batch = evidence.plain, parts_of(evidence.asked.batches, 0)[0]
    with torch.no_grad():
        first = plain.loss(batch, 0).item()
        return any(plain.loss(batch, seed).item() != first for seed in range(1, _DRAWS))


def _inert(evidence: Evidence, places: list[Dropout]) -> list[Dropout]:
    """The dropouts that change no loss, all others being off; a network that draws otherwise too cannot be asked."""
    evidence.plain.shake()
    for each in places:
        each.set(0.0)
    found = [] if _varies_by_itself(evidence) else _inert_alone(evidence, places)
    for each in places:
        each.set(each.probability)
    return found


def _inert_alone(evidence: Evidence, places: list[Dropout]) -> list[Dropout]:
    def is_inert(each: Dropout) -> bool:
        each.set(0.5)
        varies = _varies_by_itself(evidence)
        each.set(0.0)
        return not varies

    layers = [each for each in places if each.is_layer]
    inert = [each for each in layers[:: -(-len(layers) // _MOST_TRIED) or 1] if is_inert(each)]
    active = [each.name for each in layers if each not in inert]
    # A number beside the layers that were made with it need not be read again.
    numbers = [each for each in places if not each.is_layer and not any(each.is_around(name) for name in active)]
    return inert + [each for each in numbers[:_MOST_TRIED] if is_inert(each)]
