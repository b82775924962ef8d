"""A training loop of your own, with Paceline's order, randomness, checkpoints, ledger, evaluation and records."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from paceline.errors import LoopError
from paceline.parsing.units import Duration

if TYPE_CHECKING:  # a program that only imports the class need not wait for these
    import torch

    from paceline.loop.scores import Scores

T = TypeVar("T")
_LOGGED = ("loss", "grad_norm")


class Loop:
    """Your own training loop, which can be killed at any step and resumes with the same samples and bits.

    Also in several processes: started by torchrun, Slurm, mpirun or Accelerate's launcher, it joins the others. The
    directory is a run's like any other, for `paceline watch`, `report`, `audit` and `resume`::

        loop = paceline.Loop("runs/mine", dataset, batch_size=64, epochs=10, seed=1)
        model = loop.prepare(Net())
        optimizer = loop.keep(torch.optim.AdamW(model.parameters()))
        for step, (images, labels) in loop:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.log(loss=loss)
            if loop.due("1 epoch"):
                with loop.evaluation(held_out) as scores:
                    for images, labels in scores:
                        scores.add(correct=model(images).argmax(1) == labels)

    Each turn of the body is a step. In it, the generators of Python, NumPy and torch are seeded by the run's seed, the
    step and the rank. When it is through, the state may be saved; SIGTERM or SIGINT then end the program with exit code
    75, after a checkpoint. A loop that is complete has no turns, and loads the final state.

    Args:
        run_dir: The run directory. A run that has begun there is resumed.
        dataset: Anything with ``len()`` and ``[i]``, a tuple or dict of tensors, or a DataLoader, which is taken apart.
        batch_size: Samples of a step over all ranks.
        epochs: Length of the loop.
        seed: Keys the order and all random numbers, also those of the weights that you make after this call.
        workers: Loader processes; 0 reads in this one.
        collate: Makes a batch of a list of samples; by default torch's function.
        checkpoint_every: ``auto``, steps or time between checkpoints: ``"500 steps"``, ``"10 minutes"``.
        device: ``auto``, ``cpu``, ``cuda``, ``mps`` or ``xpu``.
        overrides: More settings by their recipe keys: of ``checkpoint``, ``telemetry`` and ``parallel``, such as
            ``{"telemetry.trackers": ["wandb"], "checkpoint.mirror": "s3://bucket/runs/mine"}``.

    Raises:
        PacelineError: For every mistake in the arguments, the data or the directory.
    """

    def __init__(
        self,
        run_dir: str | Path,
        dataset: Any,
        *,
        batch_size: int,
        epochs: float,
        seed: int = 0,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        checkpoint_every: str = "auto",
        device: str = "auto",
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        from paceline.plugins.loading import loading

        with loading():
            from paceline.data.objects.keyed import seed_generators
            from paceline.loop.kept import Kept
            from paceline.loop.opening import Given, LoopSubject
            from paceline.loop.turns import Turns
            from paceline.parsing.arguments import folder, whole

        given = Given(
            run_dir=folder("run_dir", run_dir, error=LoopError),
            data=dataset,
            batch_size=whole("batch_size", batch_size, 1, error=LoopError),
            epochs=epochs,
            seed=whole("seed", seed, error=LoopError),
            workers=whole("workers", workers, error=LoopError),
            collate=collate,
            checkpoint_every=checkpoint_every,
            device=device,
            overrides={} if overrides is None else overrides,
        )
        self._subject = LoopSubject(given)
        self._kept = Kept()
        self._turns = Turns(self._subject, self._kept)
        self._steps: Callable[[], Iterator[tuple[int, Any]] | None] = lambda: None
        self._due: dict[Duration, frozenset[int]] = {}
        seed_generators(given.seed, domain="training")  # for the weights that the program makes now

    @property
    def rank(self) -> int:
        """This process among those of the run; 0 writes the records."""
        return self._subject.world.rank

    @property
    def device(self) -> torch.device:
        """Where batches and prepared modules are."""
        return self._subject.device

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, for a learning rate schedule."""
        return self._subject.plan.total_steps

    @property
    def epoch(self) -> int:
        """The epoch of the current step, from 1."""
        return self._subject.plan.epoch_of(self._position - 1) + 1

    @property
    def _position(self) -> int:
        """The current step, from 1; the last one after the loop."""
        return min(self._turns.run.progress.position + 1, self.total_steps) if self._has_begun else 1

    @overload
    def prepare(self, module: T, /) -> T: ...
    @overload
    def prepare(self, *modules: Any) -> tuple[Any, ...]: ...
    def prepare(self, *modules: Any) -> Any:
        """Move modules to the device, with equal weights on all ranks, and keep their state.

        Where there are ranks, a module with trainable parameters is wrapped in DistributedDataParallel.

        Returns:
            The module, or a tuple of them.

        Raises:
            LoopError: If the loop has begun, or one is not a module.
        """
        self._refuse_late("prepare")
        prepared = [self._kept.prepare(each, self._subject.collectives, self.device) for each in modules]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    @overload
    def keep(self, target: T, /) -> T: ...
    @overload
    def keep(self, *targets: Any) -> tuple[Any, ...]: ...
    def keep(self, *targets: Any) -> Any:
        """Keep the state of optimizers, schedules, averages: anything with ``state_dict`` and ``load_state_dict``.

        Returns:
            The object, or a tuple of them.

        Raises:
            LoopError: If the loop has begun, or one has no state.
        """
        self._refuse_late("keep")
        for each in targets:
            self._kept.keep(each)
        return targets[0] if len(targets) == 1 else targets

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) from where the newest checkpoint left off to the end; steps are counted from 1.

        Raises:
            LoopError: For a second time.
        """
        if self._has_begun:
            raise LoopError("a loop runs once, over all its epochs; leave out the loop around it, or make another.")
        from paceline.loop.leaving import close_at_exit

        steps = self._steps()
        if steps is None:
            made = self._turns.take()
            close_at_exit(made)
            # The same again until the first turn: what is around the loop, such as tqdm's, may ask for it twice.
            steps, self._steps = made, weakref.ref(made)
        return steps

    def log(self, **values: Any) -> None:
        """Record numbers of this step, such as ``loss=loss``; does not wait for the device.

        Step records have their means over the samples of all steps and ranks since the last record. ``loss`` and
        ``grad_norm`` are the records' own.

        Args:
            values: One number each, a tensor or a float.

        Raises:
            LoopError: For a name that records use, or outside of the body.
        """
        from paceline.tasks.task import is_reserved

        self._refuse_outside("log")
        for name in values:
            if name not in _LOGGED and is_reserved(name):
                raise LoopError(f"log({name}=…): step records use that name; choose another.", key=name)
        self._turns.log(values)

    def due(self, every: str) -> bool:
        """Whether something is due in this step: it completes a multiple of a period, or is the last step.

        Args:
            every: ``"1 epoch"``, ``"500 steps"``, ``"10000 samples"`` or ``"10%"`` of the run.

        Raises:
            LoopError: If it is no such duration, or outside of the body.
        """
        self._refuse_outside("due")
        plan = self._subject.plan
        try:
            period = Duration.parse(every)
        except ValueError as error:
            raise LoopError(f"due: {error}.", key="due", value=every) from None
        steps = plan.epochs.steps_in(period, plan.total_steps)
        if steps < 1:
            raise LoopError(f"due('{every}') is less than one step; give at least '1 step'.", key="due", value=every)
        if (due := self._due.get(period)) is None:
            due = self._due[period] = frozenset(plan.epochs.due_steps(period, plan.total_steps))
        return self._position == plan.total_steps or (self._position in due if due else self._position % steps == 0)

    def evaluation(
        self, held_out: Any, *, name: str = "validation", highest: str | None = None, lowest: str | None = None
    ) -> AbstractContextManager[Scores]:
        """Score held-out samples: each once, exact over any number of ranks, and recorded with this step.

        Inside, prepared modules are in evaluation mode and no gradients are computed; modes and random states are
        restored afterwards::

            with loop.evaluation(held_out) as scores:
                for images, labels in scores:
                    scores.add(correct=model(images).argmax(1) == labels)
            accuracy = scores.results["correct"]

        Args:
            held_out: As ``dataset``.
            name: What the records call it; other names than ``validation`` prefix its values in the summary.
            highest: The value whose highest result is the best: the checkpoint at the end of that step is kept, for
                :meth:`load_best`. Evaluate after the optimizer has stepped.
            lowest: Likewise, with the lowest.

        Raises:
            LoopError: Inside another evaluation, outside of the body, or if both are given.
            DataError: If there are no samples.
        """
        if self._turns.phase == "evaluation":
            raise LoopError("an evaluation cannot begin inside another; end the first one before.")
        self._refuse_outside("evaluation")
        if not (name and isinstance(name, str)):
            raise LoopError(f"evaluation has name={name!r}; give text.", key="name", value=name)
        if highest is not None and lowest is not None:
            raise LoopError(f"evaluation has highest={highest} and lowest={lowest}; leave one out.", key="highest")
        source = self._subject.open_held_out(held_out, name)
        return self._turns.evaluate(source, name, highest=highest, lowest=lowest)

    def load_best(self) -> int:
        """After the loop, load the weights of the best evaluation into all kept modules; every rank must call this.

        Returns:
            The step of that evaluation.

        Raises:
            LoopError: Before the loop has ended, or if no evaluation has ``highest`` or ``lowest``.
        """
        if self._turns.phase != "over":
            raise LoopError("load_best comes after the loop; move it there.", key="load_best")
        return self._turns.load_best()

    @property
    def _has_begun(self) -> bool:
        return hasattr(self._turns, "run")

    def _refuse_late(self, method: str) -> None:
        if self._has_begun:
            message = f"{method} comes before the loop, where the state to go on from is loaded; move it there."
            raise LoopError(message, key=method)

    def _refuse_outside(self, method: str) -> None:
        if self._turns.phase not in ("body", "evaluation"):
            raise LoopError(f"{method} belongs in the body of the loop; move it there.", key=method)
        if self._turns.thread != threading.get_ident():
            message = f"{method} was called in another thread than the loop's; call it in the body itself."
            raise LoopError(message, key=method)
