"""The questions that are asked of a program, each answered from its undisturbed, killed and resumed runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, Literal

from paceline_advisor import Json, frozen, named
from paceline_advisor.conform.description import Description
from paceline_advisor.conform.runs import Kill, LaunchedRun, Weights
from paceline_advisor.conform.samples import READ_AHEAD, ProgramEpochs, SampleDifference, ids_of
from paceline_advisor.conform.trace import Read

Verdict = Literal["passed", "failed", "not_applicable"]
_ROUNDING = 1e-6  # relative difference of float32 numbers that were added in another order
_TIMES_THE_SPREAD = 10


@frozen
class ConformCheck:
    """One question and its answer.

    Attributes:
        name: The question.
        processes: Processes of the program.
        verdict: The answer.
        evidence: What was found, with the numbers of samples; or why it cannot be asked.
        repeated: Uses of a sample after its first, in the epoch after a resume.
        missing: Samples never used in that epoch.
        repeat: A line for the shell that repeats a failed check, in an empty directory.
    """

    name: str
    processes: int
    verdict: Verdict
    evidence: str
    repeated: int | None = None
    missing: int | None = None
    repeat: str = ""

    def to_json(self) -> Json:
        """Return the check as JSON, without numbers that it does not have."""
        return {name: each for name, each in asdict(self).items() if each not in (None, "")}


class NotAskedError(Exception):
    """A question that cannot be asked; the message says why."""


@frozen
class ProgramEvidence:
    """The runs of a program with one number of processes.

    Attributes:
        description: The program's description.
        processes: Their number.
        first: An undisturbed run.
        second: Another one.
        kills: Runs that were killed and resumed.
        weights: Final weights of an undisturbed or resumed run.
    """

    description: Description
    processes: int
    first: LaunchedRun
    second: LaunchedRun
    kills: tuple[Kill, ...]
    weights: Callable[[LaunchedRun], Weights | None]

    @property
    def epochs(self) -> ProgramEpochs:
        """The epochs of the undisturbed run.

        Raises:
            NotAskedError: If they are not known.
        """
        try:
            return ProgramEpochs.of(self.first.trace, self.description.epochs, self.description.epoch)
        except ValueError as error:
            raise NotAskedError(str(error)) from None

    @property
    def is_repeatable(self) -> bool:
        """Whether two undisturbed runs use the same samples in the same order."""
        return dict(self.first.trace.units) == dict(self.second.trace.units)

    def resumed(self) -> list[Kill]:
        """Return the kills that were outside a save and whose resumed run ended well.

        Raises:
            NotAskedError: If there is none.
        """
        if not self.kills:
            raise NotAskedError(f"nothing was saved as {self.description.checkpoints} before the end of the training")
        if not (found := [kill for kill in self.kills if not kill.is_torn and kill.resumed.code == 0]):
            raise NotAskedError("no resumed run came to its end")
        return found

    def positions(self, kill: Kill) -> list[int]:
        """Return how many units were used up to each checkpoint before a kill, the newest last; 0 if there is none.

        Raises:
            NotAskedError: If the steps of its name do not divide the units.
        """
        steps = self.description.steps
        if "{step}" in self.description.checkpoints and steps:
            whole, rest = divmod(self.epochs.total, steps)
            if rest:
                raise NotAskedError(f"{self.epochs.total} units are not {steps} equal steps: report used(ids)")
            return [0, *(step * whole for step in kill.steps)]
        return [0, *(save[self.first.trace.kind] for save in kill.before.trace.saves)]

    def difference(self, kill: Kill) -> tuple[int, SampleDifference]:
        """Return the position of a kill's checkpoint, and the first epoch that differs.

        Raises:
            NotAskedError: If samples were read that the program may have skipped.
        """
        epochs, at = self.epochs, self.positions(kill)[-1]
        again = len(kill.resumed.trace.units.get(0, ())) - (epochs.total - at)
        if not self.first.trace.used and again > epochs.per_epoch // READ_AHEAD:
            raise NotAskedError(f"{again} samples were read again, and used or skipped: report used(ids) to ask this")
        return epochs.best(kill.before.trace, kill.resumed.trace, epochs.near(at, self.first.trace.kind))


# ------------------------------------------------------------------------------------------------ undisturbed


def epoch_samples(evidence: ProgramEvidence) -> ConformCheck:
    """Whether each epoch of the undisturbed run holds each sample as described."""
    epochs, kind = evidence.epochs, evidence.description.epoch
    if kind == "drawn":
        raise NotAskedError("the description says that samples are drawn at random")
    if _same_on_ranks(epochs):
        raise NotAskedError("every rank used the same samples, see same_batch_on_ranks")
    problems = []
    for number in range(epochs.epochs):
        found = Counter(ids_of(epochs.epoch(number)))
        twice = sorted((name for name in found if found[name] > 1), key=str)
        never = sorted(epochs.universe - found.keys(), key=str)
        if twice and kind != "pad":
            problems.append(f"epoch {number}: {len(twice)} samples used more than once ({_list(twice)})")
        if never and kind != "drop":
            problems.append(f"epoch {number}: {len(never)} samples never used ({_list(never)})")
    size = f"{epochs.epochs} epochs of {len(epochs.universe)} samples"
    return _answer(evidence, "epoch_samples", problems, f"{size}: each as described ({kind})", evidence.first.shown)


def same_batch_on_ranks(evidence: ProgramEvidence) -> ConformCheck:
    """Whether ranks share the samples of a step, or all use the same."""
    if evidence.processes == 1:
        raise NotAskedError("one process")
    epochs = evidence.epochs
    count, total = _same_on_ranks(epochs), epochs.total
    first = _list(epochs.units[0][0])
    problems = [f"all ranks used the same samples in {count} of {total} batches, the first: {first}"] if count else []
    return _answer(evidence, "same_batch_on_ranks", problems, "ranks used other samples", evidence.first.shown)


def _same_on_ranks(epochs: ProgramEpochs) -> int:
    """Return in how many batches all ranks used the same samples, if it is most of them."""
    if len(epochs.units) == 1:
        return 0
    same = sum(
        len({tuple(sorted(ids, key=str)) for ids in batch}) == 1 for batch in zip(*epochs.units.values(), strict=False)
    )
    return same if 2 * same > epochs.total else 0


def evaluation_samples(evidence: ProgramEvidence) -> ConformCheck:
    """Whether evaluations count each sample equally often."""
    trace = evidence.first.trace
    counts = trace.scored or trace.scored_reads
    if not counts:
        raise NotAskedError("no evaluation was watched")
    fewest = min(counts.values())
    more = sorted((name for name in counts if counts[name] > fewest), key=str)
    if more and not trace.scored:
        raise NotAskedError(f"{len(more)} samples were read more often than others: report used(ids, 'evaluation')")
    whole = {*range(trace.held_out or 0)}
    never = sorted(whole - counts.keys()) if counts.keys() <= whole else []
    problems = [f"{len(more)} samples counted more often than others ({_list(more)})"] if more else []
    problems += [f"{len(never)} samples never counted ({_list(never)})"] if never else []
    passed = f"{len(counts)} samples, each counted {fewest} times"
    return _answer(evidence, "evaluation_samples", problems, passed, evidence.first.shown)


def random_state(evidence: ProgramEvidence) -> ConformCheck:
    """Whether random draws of the data set are repeated for other samples, in other epochs, or after a resume."""
    reads = evidence.first.trace.training_reads
    repeat = evidence.first.shown
    if not any(read.draws for read in reads) and not evidence.description.random:
        raise NotAskedError("the data set draws no random numbers from the generators of Python, NumPy or torch")
    problems = [*_shared_draws(reads, reads, "")]
    if evidence.description.random:
        by_id = defaultdict(list)
        for read in reads:
            by_id[read.id].append(read.digest)
        fixed = [name for name, digests in by_id.items() if len(digests) > 1 and len({*digests}) == 1]
        if 2 * len(fixed) > len(by_id):
            some = _list(sorted(fixed, key=str))
            problems.append(f"{len(fixed)} samples were the same in every epoch ({some})")
    for kill in evidence.kills:
        if not kill.is_torn and not problems and kill.before.trace.save_times:
            before = [read for read in kill.before.trace.training_reads if read.t < kill.before.trace.save_times[-1]]
            problems += _shared_draws(before, kill.resumed.trace.training_reads, f"{kill.moment}: after the resume, ")
            repeat = kill.repeat
    return _answer(evidence, "random_state", problems, f"{len(reads)} reads, none with the draws of another", repeat)


def _shared_draws(first: Sequence[Read], second: Sequence[Read], when: str) -> Iterator[str]:
    """Yield, for each generator, how many reads began and ended with the state of another sample's read."""
    for kind in sorted({kind for read in (*first, *second) for kind in read.draws}):
        old: dict[str, Read] = {}
        for read in first:
            if kind in read.draws:
                old.setdefault(read.draws[kind], read)
        pairs = [
            (old[read.draws[kind]], read)
            for read in second
            if read.draws.get(kind) in old and old[read.draws[kind]].id != read.id
        ]
        if len(pairs) > 1:  # one alone may be a data set that sets its seed itself
            one, other = pairs[0]
            place = "another rank" if one.rank != other.rank else "the same process"
            place = "another process of its rank" if one.rank == other.rank and one.pid != other.pid else place
            yield (
                f"{when}{len(pairs)} reads drew what {kind} had drawn for other samples: {other.id} as {one.id}, "
                f"read by {place}"
            )


# ------------------------------------------------------------------------------------------------ killed and resumed


def resumes(evidence: ProgramEvidence) -> ConformCheck:
    """Whether the resume command works."""
    if not evidence.kills:
        evidence.resumed()
    failed = [kill for kill in evidence.kills if not kill.is_torn and kill.resumed.code]
    problems = [f"{kill.moment}: exit code {kill.resumed.code}: {kill.resumed.message}" for kill in failed]
    return _answer(evidence, "resumes", problems, _moments(evidence.kills), *(kill.repeat for kill in failed))


def samples_after_resume(evidence: ProgramEvidence) -> ConformCheck:
    """Whether the epoch of a resume, and those after it, hold each sample as in an undisturbed run."""
    kills, epochs = evidence.resumed(), evidence.epochs
    if epochs.is_drawn and not evidence.is_repeatable:
        raise NotAskedError("samples are drawn at random, and two undisturbed runs draw others")
    problems, failed = [], []
    for kill in kills:
        at, found = evidence.difference(kill)
        left, length = epochs.total - at, len(kill.resumed.trace.units.get(0, ()))
        if found:
            failed.append((kill, found))
            unit = "batches" if evidence.first.trace.used else "samples"
            length_text = f"; {length} {unit} after the resume instead of {left}" if length != left else ""
            problems.append(
                f"{kill.moment}, resumed after {at} {unit}: in epoch {found.epoch}, {found.repeated} repeated "
                f"({_list(found.twice) or 'none'}), {found.missing} never used "
                f"({_list(found.never) or 'none'}){length_text}"
            )
    passed = f"{_moments(kills)}: none repeated, none missing"
    worst = max(
        (found for _, found in failed), key=lambda each: each.repeated + each.missing, default=SampleDifference()
    )
    check = _answer(evidence, "samples_after_resume", problems, passed, *(kill.repeat for kill, _ in failed))
    return _with(check, repeated=worst.repeated, missing=worst.missing)


def order_after_resume(evidence: ProgramEvidence) -> ConformCheck:
    """Whether samples after a resume come in the order of the undisturbed run."""
    kills, epochs = evidence.resumed(), evidence.epochs
    if not evidence.is_repeatable:
        raise NotAskedError("two undisturbed runs have different orders")
    problems, failed = [], []
    for kill in kills:
        at, _ = evidence.difference(kill)
        joined = epochs.joined(kill.before.trace, kill.resumed.trace, at)
        other = [number for number, units in joined.items() if units != epochs.epoch(number)]
        if other:
            failed.append(kill)
            problems.append(f"{kill.moment}: epochs {_list(other)} are in another order than undisturbed")
    return _answer(
        evidence,
        "order_after_resume",
        problems,
        f"{_moments(kills)}: as undisturbed",
        *(kill.repeat for kill in failed),
    )


def values_after_resume(evidence: ProgramEvidence) -> ConformCheck:
    """Whether numbers such as the learning rate continue as in the undisturbed run."""
    first, second = evidence.first.trace.values, evidence.second.trace.values
    if not first:
        raise NotAskedError("the program reports no value(name, step, number)")
    problems, failed = [], []
    for kill in evidence.resumed():
        for name, whole in first.items():
            both = whole.keys() & second[name].keys()
            spread = max(filter(isfinite, (abs(whole[step] - second[name][step]) for step in both)), default=0)
            limit = max(
                _TIMES_THE_SPREAD * spread, _ROUNDING * max(filter(isfinite, map(abs, whole.values())), default=0)
            )
            found = kill.resumed.trace.values[name]
            wrong = [step for step in sorted(found) if step in whole and not _near(found[step], whole[step], limit)]
            beyond = [step for step in sorted(found) if step not in whole]
            if wrong:
                step = wrong[0]
                failed.append(kill)
                problems.append(f"{kill.moment}: {name} at step {step} is {found[step]:g}, undisturbed {whole[step]:g}")
            elif beyond or not found:
                failed.append(kill)
                problems.append(
                    f"{kill.moment}: {name} has "
                    + (f"step {beyond[0]}, which the undisturbed run has not" if beyond else "no value")
                )
    passed = f"{named(sorted(first))} as undisturbed"
    return _answer(evidence, "values_after_resume", problems, passed, *(kill.repeat for kill in failed))


def _near(first: float, second: float, limit: float) -> bool:
    """Whether two numbers differ by no more than a limit, or are the same infinity or not-a-number."""
    return repr(first) == repr(second) or abs(first - second) <= limit


def weights_after_resume(evidence: ProgramEvidence) -> ConformCheck:
    """Whether final weights after a resume are those of an undisturbed run."""
    kills = evidence.resumed()
    try:
        first, second = evidence.weights(evidence.first), evidence.weights(evidence.second)
    except ValueError as error:
        raise NotAskedError(str(error)) from None
    if first is None or second is None:
        raise NotAskedError("no weights file is described, or the program does not write it")
    if not evidence.is_repeatable:
        raise NotAskedError("two undisturbed runs use samples in different orders")
    spread = _distance(first, second)
    if not isfinite(spread):
        raise NotAskedError("the weights of two undisturbed runs are not finite numbers, or differ in names or shapes")
    problems, failed, largest = [], [], 0.0
    for kill in kills:
        distance = _distance(first, _weights_or_none(evidence, kill.resumed))
        largest = max(largest, distance)
        if not distance <= max(_TIMES_THE_SPREAD * spread, _ROUNDING):
            failed.append(kill)
            problems.append(
                f"{kill.moment}: relative distance {distance:.2g} from the undisturbed weights; two undisturbed runs: "
                f"{spread:.2g}"
            )
    equal = "bit-identical" if largest == 0 else f"relative distance at most {largest:.2g}"
    passed = f"{_moments(kills)}: {equal}; two undisturbed runs: {spread:.2g}"
    return _answer(evidence, "weights_after_resume", problems, passed, *(kill.repeat for kill in failed))


def _weights_or_none(evidence: ProgramEvidence, run: LaunchedRun) -> Weights | None:
    try:
        return evidence.weights(run)
    except ValueError:
        return None


def _distance(first: Weights, second: Weights | None) -> float:
    """Return the norm of the difference, relative to that of the first; infinite for other names or shapes, or none."""
    import numpy as np

    if second is None or {name: each.shape for name, each in first.items()} != {
        name: each.shape for name, each in second.items()
    }:
        return float("inf")
    gaps = [np.linalg.norm(np.subtract(first[name], second[name], dtype=np.float64)) for name in first]
    size = np.linalg.norm([np.linalg.norm(each.astype(np.float64)) for each in first.values()])
    return float(np.linalg.norm(gaps)) / max(float(size), 1e-30)


def kill_during_save(evidence: ProgramEvidence) -> ConformCheck:
    """Whether a whole checkpoint is left after a kill within a save, and is resumed."""
    if not evidence.kills:
        evidence.resumed()
    kill = next((kill for kill in evidence.kills if kill.is_torn), None)
    if kill is None or kill.torn is None:
        raise NotAskedError("no kill hit a save")
    if kill.resumed.code and evidence.resumed():
        problems = [
            f"{kill.torn} cut short: the resume ends with exit code {kill.resumed.code}: {kill.resumed.message}"
        ]
        return _answer(evidence, "kill_during_save", problems, "", kill.repeat)
    if any(evidence.difference(each)[1] for each in evidence.resumed()):
        raise NotAskedError("samples differ after any resume, see samples_after_resume")
    epochs, kind = evidence.epochs, evidence.first.trace.kind
    positions = sorted({*evidence.positions(kill), len(kill.before.trace.units[0])}, reverse=True)
    candidates = [near for each in positions if each for near in epochs.near(each, kind)]
    at = evidence.positions(kill)[-1]
    position, found = epochs.best(kill.before.trace, kill.resumed.trace, [*candidates, 0])
    problems = []
    if found:
        problems = [f"{kill.torn} cut short: {found.repeated} samples repeated, {found.missing} never used"]
    elif position == 0 and at:
        problems = [f"{kill.torn} cut short: the resume began again, although a checkpoint had been saved after {at}"]
    passed = f"{kill.torn} cut short: resumed after {position} of {epochs.total}"
    return _answer(evidence, "kill_during_save", problems, passed, kill.repeat)


CHECKS = (
    epoch_samples,
    same_batch_on_ranks,
    evaluation_samples,
    random_state,
    resumes,
    samples_after_resume,
    order_after_resume,
    values_after_resume,
    weights_after_resume,
    kill_during_save,
)


def ask(evidence: ProgramEvidence) -> Iterator[ConformCheck]:
    """Yield the answer to each question."""
    for check in CHECKS:
        try:
            yield check(evidence)
        except NotAskedError as reason:
            yield ConformCheck(
                name=check.__name__, processes=evidence.processes, verdict="not_applicable", evidence=str(reason)
            )


def _answer(evidence: ProgramEvidence, name: str, problems: Sequence[str], passed: str, *repeat: str) -> ConformCheck:
    return ConformCheck(
        name=name,
        processes=evidence.processes,
        verdict="failed" if problems else "passed",
        evidence="; ".join(problems) or passed,
        repeat=repeat[0] if problems and repeat else "",
    )


def _with(check: ConformCheck, **numbers: int) -> ConformCheck:
    return ConformCheck(**{**vars(check), **numbers})


def _moments(kills: Iterable[Kill]) -> str:
    return ", ".join(kill.moment for kill in kills if not kill.is_torn)


def _list(names: Iterable[Any]) -> str:
    """Return the first ids, and how many more there are."""
    return named([str(name) for name in names], 8)
