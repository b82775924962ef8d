"""The main loop of a run, from its first batch to its last save; read it from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paceline.data.batch import Batch
from paceline.data.loaders.pytorch import explain_worker_deaths
from paceline.distributed.strategy import ControlFlags
from paceline.trainer.nonfinite import check_results
from paceline.trainer.run import Run
from paceline.trainer.run_records import write_evaluation, write_step
from paceline.trainer.saving import finish_saving, save_checkpoint
from paceline.trainer.step import train_step
from paceline.trainer.verifying import StepVerifier
from paceline.trainer.warmup import check_first_batch, warm_up


def fit(run: Run) -> str:
    """Train from the current position to the end, or to an agreed stop; returns why it ended."""
    with run.watchdog.watching(), explain_worker_deaths():
        batches = check_first_batch(run, warm_up(run, run.train_batches()))
        for look in run.previews:
            batches = look(batches)
        return _fit(run, batches)


def _fit(run: Run, batches: Iterator[Batch]) -> str:
    plan, progress = run.plan, run.progress
    ending = run.ending(ControlFlags())  # a resumed run may already be at its end
    verifier = StepVerifier(run)
    run.clock.start()
    while not ending:
        stepped = train_step(run, batches)
        progress.advance(stepped=stepped)
        run.guard.report(run.collectives, run.recorder, run.last_good)
        run.clock.end_step(plan.step_samples(progress.position - 1), run.load)
        batches = verifier.after_step(batches)
        run.display.advance(progress.step)
        run.callbacks("on_step_end", progress.step)

        run.heartbeat.enter("record")
        if run.due("log"):
            write_step(run)
        if run.due("evaluate"):
            run.heartbeat.enter("evaluate")
            evaluate(run)
        agreed = run.strategy.agreed(run.control_flags())
        ending = run.ending(agreed)
        if ending == "patience" and not run.due("log"):
            write_step(run)  # the last record; the plan could not foresee that the run ends here
        if run.checkpoint_due(agreed) or ending:
            run.heartbeat.enter("save")
            save_checkpoint(run)
            run.callbacks("on_checkpoint", progress.step)
    run.heartbeat.enter("save")
    finish_saving(run)
    return ending


def evaluate(run: Run) -> None:
    """Evaluate a run's current weights, and record the result."""
    if run.plan.evaluation_samples == 0:
        return
    with run.clock.paused():
        started = time.perf_counter()
        run.strategy.sync_buffers(list(run.models().values()))
        evaluation = run.evaluator(run.scored)
        run.progress.take_results(evaluation.results, run.best_metric())
        write_evaluation(run, evaluation, seconds=time.perf_counter() - started)
        check_results(run.task, evaluation.results, run.recorder)
        run.callbacks("on_evaluation", run.progress.step, evaluation.results)
