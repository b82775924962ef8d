"""The turns of a program's loop: what happens before its body, after it, and when the loop ends."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.publish import BackgroundWriter
from paceline.checkpoint.state import Registry
from paceline.checkpoint.store import CheckpointStore, checkpoint_name
from paceline.data.batch import Batch, mapped, tensors_in
from paceline.data.loaders.pytorch import explain_worker_deaths
from paceline.data.objects.keyed import seed_generators
from paceline.data.order import evaluation_slices
from paceline.data.random_draws import derive_seed
from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import ControlFlags, Heartbeat
from paceline.errors import CheckpointError, LoopError, RunDirectoryError, StoppedError, TrainingError
from paceline.learning.copies import FingerprintCollector
from paceline.learning.losses import LossWatcher, described
from paceline.learning.observer import NetworkObserver
from paceline.loop.kept import ADVICE, Kept
from paceline.loop.leaving import left_on_purpose
from paceline.loop.opening import LoopSubject, SampleStream
from paceline.loop.scores import Scores, modes_restored
from paceline.metrics.accumulator import Metric
from paceline.parsing.arguments import tensor
from paceline.parsing.units import counted, format_count
from paceline.records.events import EvaluationEvent, ObservationEvent, Status, StepEvent, StopEvent
from paceline.records.ledger import LedgerWriter, ledger_path
from paceline.records.run_directory import write_json
from paceline.telemetry.clock import build_step_clock
from paceline.telemetry.display import RunProgress
from paceline.telemetry.meter import PHASES
from paceline.trainer.build import build_publisher, build_recorder
from paceline.trainer.evaluate import Evaluation
from paceline.trainer.listeners import TRACE_VARIABLE
from paceline.trainer.nonfinite import check_loss, check_outcome, check_results
from paceline.trainer.observing import LearningListener
from paceline.trainer.process_settings import StopRequest, restore_random_states
from paceline.trainer.saved_run import SavedRun
from paceline.trainer.saving import finish_mirroring, finish_saving, restore, save_checkpoint
from paceline.trainer.step_stats import Progress, Window
from paceline.trainer.train import record_end, record_failure, record_start, write_pages

if TYPE_CHECKING:
    from paceline.trainer.tracing import StepTracer

# What the body does in a step is its own affair: the clock sees only what is around it.
_UNSEEN = frozenset({"forward", "backward", "communication", "optimizer", "ema"})
_MOST_WAITING = 100  # turns that a save waits for gradients that differ between ranks
_AGREED_LATE = 1  # turns


@dataclass(kw_only=True)
class LoopRun(SavedRun):
    """What is saved and recorded of a program's loop."""

    kept: Kept

    def models(self) -> dict[str, nn.Module]:
        """Return the kept modules by name."""
        return self.kept.modules()

    def sync_buffers(self) -> None:
        """Give all ranks the buffers of the first."""
        self.collectives.broadcast_tensors(buffer for each in self.models().values() for buffer in each.buffers())

    @property
    def unmeasured(self) -> frozenset[str]:
        """Phases that only the body could tell apart."""
        return _UNSEEN


class Votes:
    """What the ranks ask for, agreed one turn late, so that none waits for it."""

    def __init__(self, collectives: Collectives) -> None:
        several = collectives.world.world_size > 1
        # On the host, whatever the device is: nothing has to wait for it.
        self._group: Any = torch.distributed.new_group(backend="gloo") if several else None
        self._cast: tuple[Any, torch.Tensor] | None = None

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Cast this turn's flags, and return those of the turn before; with one rank, this turn's."""
        if self._group is None:
            return flags
        votes = torch.tensor(flags, dtype=torch.float32)
        previous, work = self._cast, torch.distributed.all_reduce(votes, group=self._group, async_op=True)
        self._cast = work, votes
        if previous is None:
            return ControlFlags()
        previous[0].wait()
        return ControlFlags(*(vote > 0 for vote in previous[1].tolist()))

    def finish(self) -> None:
        """Wait for the last votes: no rank may leave before the others have read them."""
        if self._cast is not None:
            self._cast[0].wait()


class Turns:
    """The turns of the loop on this rank.

    Args:
        subject: The opened run.
        kept: What the program gave to keep.

    Attributes:
        run: What is saved and recorded; exists once the loop has begun.
        phase: ``before``, ``body``, ``evaluation`` or ``over``: where the program is.
        thread: The thread that the body runs in; likewise.
    """

    run: LoopRun
    thread: int

    def __init__(self, subject: LoopSubject, kept: Kept) -> None:
        self.subject, self.kept, self.phase = subject, kept, "before"
        self._batch: Batch | None = None
        self._loss: torch.Tensor | None = None
        self._logged: dict[str, torch.Tensor] = {}
        self._evaluations: list[tuple[EvaluationEvent, dict[str, float], Metric | None]] = []
        self._learning: LearningListener | None = None
        self._network: nn.Module | None = None
        self._observing = contextlib.ExitStack()
        self._tracer: StepTracer | None = None
        self._observed: dict[str, Mapping[str, Any]] = {}
        self._not_finite: set[str] = set()
        self._wanted, self._waited = ControlFlags(), 0

    def take(self) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each step and its batch, and end the step when the body is through."""
        self.thread = threading.get_ident()
        run = self.run = self._build()
        if self.subject.decision.completed:
            self._load_completed()
            return
        with explain_worker_deaths(), run.stop:
            try:
                ending = self._begin()
                slices = run.geometry.stream(run.progress.position, run.plan.total_steps, run.world)
                batches = self.subject.source.backend.batches(slices)
                while not ending:
                    batch = self._next(batches)
                    self.phase = "body"
                    with self._observing:
                        yield run.progress.step + 1, batch
                    self.phase = "before"
                    ending = self._end_turn(self._agreed())
                self._finish(ending)
            except GeneratorExit:
                self._leave(sys._getframe().f_back)  # noqa: SLF001  # the program's frame, which the loop was in
                return
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self.phase = "over"
        if self.subject.given.replay:
            raise SystemExit(0)
        if ending == "signal":
            raise SystemExit(StoppedError.exit_code)

    # Beginning

    def _build(self) -> LoopRun:
        subject, kept = self.subject, self.kept
        world, directory, decision = subject.world, subject.directory, subject.decision
        ledger = LedgerWriter(ledger_path(directory.ledger, world.rank))
        progress = Progress(begun=subject.started)
        parameters = sum(each.numel() for module in kept.modules().values() for each in module.parameters())
        run = LoopRun(
            recipe=subject.recipe,
            identity=decision.identity,
            plan=replace(subject.plan, parameters=parameters),
            world=world,
            device=subject.device,
            collectives=subject.collectives,
            directory=directory,
            geometry=subject.geometry,
            progress=progress,
            window=Window(subject.collectives, ledger, subject.device, pop_logged=self._pop_logged),
            clock=build_step_clock(subject.device.type),
            heartbeat=Heartbeat(),
            recorder=build_recorder(subject, ledger, progress),
            display=subject.display,
            stop=StopRequest(),
            components=Registry(ADVICE),
            writer=BackgroundWriter(),
            publisher=build_publisher(subject, {}, {}),
            mirroring=subject.mirroring,
            kept=kept,
        )
        run.clock.measures_under({"world_size": world.world_size, "device": run.plan.device_name})
        for name, component in kept.components().items():
            run.components.add(name, component)
        for name, own in (("progress", run.progress), ("window", run.window), ("clock", run.clock)):
            run.components.add(name, own)
        if (setting := os.environ.get(TRACE_VARIABLE)) is not None:
            from paceline.trainer.tracing import StepTracer  # ordinary runs do not need it

            self._tracer = StepTracer(
                run, _as_one(kept.modules()), kept.optimizers, subject.source.samples.path, setting
            )
        return run

    def _begin(self) -> str:
        run, subject = self.run, self.subject
        self.votes = Votes(run.collectives)
        restore(run, subject.decision.choice, resumes=subject.decision.resumes)
        plan = run.plan
        record_start(run, subject.loaded.name)
        if subject.impurity:
            message = f"{subject.impurity}: after a resume, the samples are not the same as without a stop."
            self._say("impure_data", message)
        for notice in (*subject.loaded.notices, *subject.decision.notices):
            run.display.message(notice)
        run.display.start(
            RunProgress(plan.total_steps, run.progress.step, plan.epochs, plan.sample_name),
            title=f"{subject.loaded.name} in {run.directory.root}",
            lines=[
                f"{plan.device_name}, {counted(plan.world_size, 'process')}",
                f"{format_count(plan.train_samples)} samples, {format_count(plan.total_steps)} steps",
            ],
        )
        if run.world.is_first:
            write_json(run.directory.plan, plan.to_tree())  # with the parameters, which are known now
        self.kept.watch()
        self._observe_learning()
        run.clock.start()
        return "duration" if run.progress.position >= plan.total_steps else ""

    def _observe_learning(self) -> None:
        """On the first rank: observe a network that one optimizer trains. Several may work against one another."""
        optimizers, world = self.kept.optimizers, self.run.world
        if not world.is_first or len(optimizers) != 1 or self.kept.is_compiled:
            return
        trained = {id(each) for group in optimizers[0].param_groups for each in group["params"]}
        modules = {
            name: each for name, each in self.kept.modules().items() if trained & {id(one) for one in each.parameters()}
        }
        if not modules:
            return
        self._network = _as_one(modules)
        observer = NetworkObserver(self._network, hooked=True)
        self._learning = LearningListener(observer, self.run.progress, self.run.plan.total_steps)
        # The program may drop the gradients at the end of its body.
        optimizers[0].register_step_pre_hook(lambda *_: observer.after_backward())

    def _load_completed(self) -> None:
        """Load the weights of a run that has nothing left to do, for what the program does with them."""
        run, store = self.run, CheckpointStore(self.run.directory.checkpoints)
        self.phase = "over"
        path = run.collectives.on_rank_zero(lambda: store.newest_complete()[0])
        if path is not None:
            run.components.restore(read_components(path, chunks={}))
        run.display.message(f"the run in {run.directory.root} is complete ({format_count(run.progress.step)} steps)")
        run.recorder.close()
        self.subject.close()

    # A turn

    def _next(self, batches: Iterator[Batch]) -> Any:
        run = self.run
        with run.clock.span("data_wait"):
            self._batch = next(batches)
        with run.clock.span("h2d"):
            batch = self.move(self._batch.inputs)
        key = run.recipe.seed, run.progress.position + 1, run.world.rank, 0
        seed_generators(*key, domain="training")
        if run.device.type != "cpu":
            torch.get_device_module(run.device).manual_seed(derive_seed(*key))
        self.kept.begin_turn()
        if self._learning is not None and self._network is not None:
            self._learning.begin_step()
            self._observing.enter_context(self._learning.around_forward(self._network, self._batch))
        if self._tracer is not None:
            self._tracer.begin_step()
            self._observing.enter_context(self._tracer.around_backward(self._batch))
            self._observing.enter_context(self._tracer.around_forward(_as_one(self.kept.modules()), self._batch))
        return batch

    def move(self, batch: Any) -> Any:
        """Return a batch on the device, as the program's ``collate`` made it."""
        device = self.subject.device
        if device.type == "cpu":
            return batch
        if callable(move := getattr(batch, "to", None)) and not isinstance(batch, torch.Tensor):
            return move(device)
        return mapped(lambda tensor: tensor.to(device, non_blocking=True), batch)

    def _agreed(self) -> ControlFlags:
        run = self.run
        stop = run.stop.requested or run.writer.has_failed
        stop = stop or (run.mirroring is not None and run.mirroring.has_failed)
        is_due = run.world.is_first and not run.writer.is_busy and run.publisher.cadence.is_due()
        return self.votes.agreed(ControlFlags(stop=stop, save=is_due))

    def _end_turn(self, agreed: ControlFlags) -> str:
        """End the step; returns why the loop ends, or an empty string."""
        run, plan, progress = self.run, self.run.plan, self.run.progress
        self._count()
        # A vote that was cast before the last save asks for that one.
        is_new = run.saved_position < 0 or progress.position - run.saved_position > _AGREED_LATE
        found_best = run.best is not None and progress.best["position"] == progress.position
        saves = run.due("checkpoint") or (agreed.save and is_new) or found_best
        self._wanted = ControlFlags(stop=self._wanted.stop or agreed.stop, save=self._wanted.save or saves)
        is_over = progress.position >= plan.end
        if not (is_over or any(self._wanted)):
            return ""
        waits = self._waits(saves=found_best and not is_over)
        if waits and not (is_over or found_best):
            return ""
        self._save()
        self._wanted = self._wanted._replace(save=waits)  # once more, with the optimizer's step
        if is_over:
            return "duration" if progress.position >= plan.total_steps else "until"
        return "signal" * (self._wanted.stop and not waits)

    def _count(self) -> None:
        assert self._batch is not None
        run, progress = self.run, self.run.progress
        run.window.add(self._loss, self._batch)
        run.window.end_step(stepped=True)
        progress.advance(stepped=True)
        self._batch = self._loss = None
        run.clock.end_step(run.plan.step_samples(progress.position - 1))
        run.display.advance(progress.step)
        if self._tracer is not None:
            self._tracer.on_step_end(progress.step)
        if run.due("log"):
            self._write_step()
        if self._evaluations:
            # An earlier evaluation, which may never be repeated, counts only with what is finite.
            earlier = progress.last.get("model", {})
            progress.last = {"model": {name: each for name, each in earlier.items() if math.isfinite(each)}}
            for each in self._evaluations:
                self._record(*each)
            check_results(None, progress.last, run.recorder)
            self._evaluations.clear()

    def _waits(self, *, saves: bool) -> bool:
        """Whether to save later, because gradients wait for their optimizer that cannot be saved.

        Args:
            saves: Whether this step is saved anyway.
        """
        waits = self.kept.cannot_save_gradients(self.run.collectives)
        self._waited = (self._waited + 1) * waits
        waits = self._waited % _MOST_WAITING > 0
        if self._waited and (saves or not waits):
            message = "gradients that are sparse, or differ between ranks, wait for their optimizer when step"
            message += f" {self.run.progress.step} is saved, and a run that resumes from it loses them"
            self._say("pending_gradients", f"{message}; call optimizer.step() more often, or before an evaluation.")
        return waits

    def _save(self) -> None:
        run = self.run
        if changed := self.kept.take_unkept():
            message = f"{', '.join(changed)} changed, but is not kept, so that a resumed run loses the change"
            self._say("unkept", f"{message}; give it to loop.prepare or loop.keep.")
        save_checkpoint(run)

    def _say(self, incident: str, message: str) -> None:
        self.run.recorder.incident(incident, message)

    # Records

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of this step; the caller has checked their names."""
        for name, given in values.items():
            value = tensor(name, given, error=LoopError)
            if value.numel() != 1:
                raise LoopError(
                    f"log({name}=…) takes one number, found a tensor of shape {list(value.shape)}; log its mean.",
                    key=name,
                    value=list(value.shape),
                )
            if name == "loss":
                self._loss = value.reshape(()).float()
                if self._tracer is not None:
                    self._tracer.after_loss(self._loss)
            else:
                self._logged[name] = value.reshape(())

    def _pop_logged(self) -> dict[str, torch.Tensor]:
        logged, self._logged = self._logged, {}
        return logged

    def _write_step(self) -> None:
        run, plan, progress = self.run, self.run.plan, self.run.progress
        with run.clock.span("logging"):
            run.collectives.on_rank_zero(partial(run.directory.check_in_place, before_saving=False))
            timings = run.clock.drain()
            totals = run.window.drain()
            self._check_logged(totals.logged)
            norm = totals.logged.pop("grad_norm", None)
            for event in () if self._learning is None else self._learning.events():
                run.recorder.write(event)
            rates = [each.param_groups[0].get("lr", 0.0) for each in self.kept.optimizers]
            run.recorder.write(
                StepEvent(
                    **progress.here,
                    epoch=plan.epoch_of(progress.position - 1) + 1,
                    samples=plan.samples_before(progress.position),
                    loss=totals.loss,
                    lr=float(rates[0]) if rates else 0.0,
                    grad_norm=norm,
                    timings={**timings, **{f"{phase}_seconds": None for phase in _UNSEEN & {*PHASES}}},
                    metrics=totals.logged,
                    details={"logged": sorted(totals.logged)},
                )
            )
            if run.mirroring is not None:
                run.mirroring.report(run.recorder)
            run.recorder.flush()
        check_loss(totals.loss, run)

    def _check_logged(self, logged: Mapping[str, float]) -> None:
        wrong = {name: each for name, each in logged.items() if not math.isfinite(each)}
        for name in wrong.keys() - self._not_finite:
            message = f"the mean of {name} was {wrong[name]} by step {self.run.progress.step}; look at what you log."
            self._say("nonfinite_metric", message)
        self._not_finite |= wrong.keys()

    def _record(self, evaluation: EvaluationEvent, found: dict[str, float], chosen_by: Metric | None) -> None:
        run, progress, split = self.run, self.run.progress, evaluation.split
        run.recorder.write(evaluation)
        if details := self._observed.pop(split, None):
            run.recorder.write(
                ObservationEvent(step=evaluation.step, position=evaluation.position, split=split, details=details)
            )
        prefix = "" if split == "validation" else f"{split}_"
        named = {f"{prefix}{key}": value for key, value in found.items()}
        results = {"model": progress.last.get("model", {}) | named}
        if chosen_by is not None:
            progress.take_results({"model": found}, chosen_by)
        progress.last = results

    @contextlib.contextmanager
    def evaluate(self, source: SampleStream, name: str, *, highest: str | None, lowest: str | None) -> Iterator[Scores]:
        """Score held-out samples; the record follows that of the step."""
        best = lowest if highest is None else highest
        chosen_by = None if best is None else Metric(name=best, higher_is_better=highest is not None)
        run, samples, started = self.run, len(source.samples), time.perf_counter()
        modules, position = self.kept.modules(), run.progress.position + 1
        if self.phase != "body":
            raise LoopError("an evaluation begins in the body of the loop; enter it with `with` where you make it.")
        self.phase = "evaluation"
        self._observing.close()  # its losses are not those of the step
        watcher, prints = LossWatcher(), FingerprintCollector()
        try:
            with run.clock.paused(), restore_random_states(run.device.type):
                run.sync_buffers()
                batches = source.backend.batches(evaluation_slices(samples, run.plan.global_batch_size, run.world))
                scores = Scores(
                    batches=batches if self._learning is None else _noted(batches, prints),
                    samples=samples,
                    device=run.device,
                    collectives=run.collectives,
                    move=self.move,
                )
                watched = contextlib.nullcontext() if self._network is None else watcher.around(self._network)
                with modes_restored(modules, self.kept.replicas), watched:
                    yield scores
                scores.finish(best)
        finally:
            self.phase = "body"
        event = EvaluationEvent(
            step=run.progress.step + 1,
            position=position,
            epoch=run.plan.epoch_of(position - 1) + 1,
            split=name,
            weights="model",
            samples=samples,
            seconds=time.perf_counter() - started,
            metrics=scores.results,
        )
        if self._learning is not None:
            losses = described(watcher.drain())
            found = Evaluation(samples=samples, results={}, broken=(), losses=losses, prints=prints.prints())
            self._observed[name] = self._learning.for_evaluation(found)
        self._evaluations.append((event, scores.results, chosen_by))

    def load_best(self) -> int:
        """Load the weights of the best evaluation into the kept modules; returns its step. A collective.

        Raises:
            LoopError: If none was the best.
        """
        store, modules = CheckpointStore(self.run.directory.checkpoints), self.kept.modules()
        best = self.run.collectives.on_rank_zero(store.read_best)
        if best is None:
            raise LoopError("load_best: no evaluation is the best; give evaluation(…) highest= or lowest=.")
        states = read_components(store.directory / checkpoint_name(best.step), list(modules))
        components = self.kept.components()
        for name in modules:
            components[name].load_state_dict(dict(states[name]))
        return best.step

    # Ending

    def _finish(self, ending: str) -> None:
        run = self.run
        status: Status = "completed" if ending == "duration" else "stopped"
        try:
            finish_saving(run)
            finish_mirroring(run)
            if status == "completed":
                check_outcome(None, run)
            else:
                reason = run.stop.signal_name or "another process was asked"
                run.recorder.write(StopEvent(**run.progress.here, reason="break" if ending == "break" else reason))
            self.votes.finish()
            summary = record_end(run, status, ending, self._digest)
        except (RunDirectoryError, CheckpointError) as error:
            # What was asked for was right, and then the disk failed.
            raise TrainingError(str(error)) from error
        run.writer.close()
        run.clock.close()
        run.recorder.close()
        write_pages(run, self.subject.options.report)
        if learning := summary.details.get("learning"):
            run.display.message(f"warning: {learning['sentence']}")
        run.display.message(f"{status} after {format_count(run.progress.step)} steps in {run.directory.root}")
        run.display.close()
        self.subject.close()

    def _leave(self, frame: FrameType | None) -> None:
        """End a loop that the body left: with ``break`` or ``return`` after this step, or with an error."""
        run, step = self.run, self.run.progress.step + 1
        if not left_on_purpose(frame):
            self._fail(TrainingError(f"the body of the loop raised an error in step {step}"))
            return
        try:
            said, saves = "that step counts", True
            if self.kept.may_have_changed:
                self._count()
            else:
                said = "that step does not count, since no optimizer has taken one"
                # They may hold a part of that step, which a resumed run computes again.
                saves = not any(run.collectives.gather(self.kept.has_waiting_gradients))
            message = f"the body left the loop in step {step} with break or return: {said}; run it again to go on."
            self._say("left_loop", message)
            if run.progress.position and saves:
                self._waits(saves=True)
                self._save()
            self._finish("break")
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        run = self.run
        record_failure(run, error, self.subject, self._digest)
        run.display.close()
        self.subject.__exit__(type(error), error, error.__traceback__)

    def _digest(self) -> dict[str, str]:
        return {"model": self.kept.sha256()}


def _as_one(modules: dict[str, nn.Module]) -> nn.Module:
    return next(iter(modules.values())) if len(modules) == 1 else nn.ModuleDict(modules)


def _noted(batches: Iterator[Batch], prints: FingerprintCollector) -> Iterator[Batch]:
    for batch in batches:
        prints.add(tensors_in(batch.inputs))
        yield batch
