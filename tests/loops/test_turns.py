"""When things are due, how a loop is left, what it closes, and objects whose state changes its shape."""

from __future__ import annotations

import copy
import io
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from golden_sentences import raises
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm

import paceline
from paceline.errors import CheckpointError, LoopError
from paceline.parsing.units import Duration

POINTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
QUIET = {"telemetry.trackers": [], "telemetry.report": False}
Make = Callable[..., paceline.Loop]


@pytest.fixture
def make(runs: Path) -> Iterator[Make]:
    """Make loops of ten steps, and release their directories."""
    made: list[paceline.Loop] = []

    def loop(run: str = "run", **options: Any) -> paceline.Loop:
        settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "device": "cpu", "overrides": QUIET} | options
        made.append(paceline.Loop(runs / run, POINTS, checkpoint_every="3 steps", **settings))
        return made[-1]

    yield loop
    for each in made:
        each._subject.close()


def prepared(loop: paceline.Loop, module: Any = None) -> Callable[[Any], None]:
    """Prepare a module and its optimizer; returns what takes a step."""
    model = loop.prepare(nn.Linear(4, 1) if module is None else module)
    optimizer = loop.keep(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    return step


def summary_of(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "run" / "summary.json").read_text())
    return found


# ------------------------------------------------------------------------------------------- what is due


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("0.5 epochs", [2, 5, 8, 10, 12, 15]),
        ("0.3 epochs", [2, 3, 4, 6, 8, 9, 10, 12, 13, 15]),
        ("1.4 steps", [1, 3, 4, 6, 7, 8, 10, 11, 13, 14, 15]),
        ("4 steps", [4, 8, 12, 15]),
        ("1 epoch", [5, 10, 15]),
        ("9%", [1, 3, 4, 5, 7, 8, 9, 11, 12, 14, 15]),
    ],
)
def test_what_is_due_falls_on_the_steps_of_the_same_interval_in_a_recipe(
    every: str, expected: list[int], make: Make
) -> None:
    loop, due = make(epochs=3), []
    plan = loop._subject.plan
    interval = Duration.parse(every)
    moments = plan.epochs.due_steps(interval, plan.total_steps)
    fixed = range(0, 16, plan.epochs.steps_in(interval, plan.total_steps))
    assert {*(moments or fixed[1:]), 15} == set(expected)
    prepared(loop)
    for step, _ in loop:
        due += [step] * loop.due(every)
        if step == 7:
            break
    loop = make(epochs=3)
    prepared(loop)
    for step, _ in loop:
        due += [step] * loop.due(every)
    # Step 7 was left before the optimizer stepped, and is repeated.
    assert sorted(due) == sorted(expected + [7] * (7 in expected))


def test_samples_are_due_when_they_were_used(make: Make) -> None:
    loop = make(batch_size=12)  # steps of 12, 12, 12 and 4 samples
    prepared(loop)
    assert [step for step, _ in loop if loop.due("20 samples")] == [2, 4, 6, 8]


# -------------------------------------------------------------------------------------- held-out samples


def test_an_evaluation_set_that_is_made_anew_replaces_the_one_before(make: Make) -> None:
    earlier = children()  # of other tests, which share this process
    loop = make(workers=1)
    prepared(loop)
    workers = []
    for _ in loop:
        for name in ("validation", "other"):
            with loop.evaluation(TensorDataset(POINTS[:8]), name=name) as scores:
                for (batch,) in scores:
                    scores.add(error=batch[:, 0])
        workers.append(children() - earlier)
    assert len(set(map(len, workers))) == 1, workers
    assert workers[0]
    assert not children() & set.union(*workers)


def test_one_evaluation_set_under_two_names_is_read_by_one(make: Make) -> None:
    loop, held_out = make(workers=1), TensorDataset(POINTS[:8])
    prepared(loop)
    for step, _ in loop:
        before = children()
        with loop.evaluation(held_out, name=f"step_{step}") as scores:
            for (batch,) in scores:
                scores.add(error=batch[:, 0])
        assert step == 1 or children() == before


def test_evaluation_sets_under_new_names_leave_few_processes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.loop.opening._MOST_HELD_OUT", 2)
    loop, counts = make(workers=1), list[int]()
    prepared(loop)
    for step, _ in loop:
        with loop.evaluation(TensorDataset(POINTS[:8]), name=f"step_{step}") as scores:
            for (batch,) in scores:
                scores.add(error=batch[:, 0])
        counts.append(len(children()))
    assert counts[1:] == counts[1:2] * 9


def children() -> set[int]:
    return {int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


# ---------------------------------------------------------------------------------------- leaving a loop


class Wrapped:
    """An iterable around a loop, as libraries write them."""

    def __init__(self, loop: paceline.Loop) -> None:
        self.loop = loop

    def __iter__(self) -> Wrapped:
        self.steps = iter(self.loop)
        return self

    def __next__(self) -> Any:
        return next(self.steps)


def guarded(loop: paceline.Loop) -> Iterator[Any]:
    for each in loop:
        try:  # noqa: SIM105  # its bytecode raises the error again
            yield each
        except ValueError:
            pass


WRAPPERS: dict[str, Callable[[paceline.Loop], Any]] = {
    "tqdm": lambda loop: tqdm(loop, disable=True),
    "a live tqdm": lambda loop: tqdm(loop, file=io.StringIO()),
    "an automatic tqdm": lambda loop: auto_tqdm(loop, file=io.StringIO()),
    "enumerate": enumerate,
    "enumerate of tqdm": lambda loop: enumerate(tqdm(loop, disable=True)),
    "zip": lambda loop: zip(loop, itertools.count(), strict=False),
    "islice": lambda loop: itertools.islice(loop, 5),
    "a class": Wrapped,
    "a generator": guarded,
    "an expression": lambda loop: (each for each in loop),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_break_through_what_is_around_the_loop_is_a_stop(name: str, make: Make, runs: Path) -> None:
    loop = make()
    take = prepared(loop)
    left = 5
    for _ in WRAPPERS[name](loop):
        take(POINTS)
        left -= 1
        if not left and name != "islice":
            break
    assert (summary_of(runs)["status"], summary_of(runs)["step"]) == ("stopped", 5)
    assert (runs / "run" / "checkpoints" / "step-00000005").is_dir()
    loop = make()
    take = prepared(loop)
    assert [step for step, _ in loop] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_error_through_what_is_around_the_loop_is_a_failure(name: str, make: Make, runs: Path) -> None:
    loop = make()
    take = prepared(loop)

    def body() -> None:
        left = 5
        for _ in WRAPPERS[name](loop):
            take(POINTS)
            left -= 1
            if not left:
                try:
                    raise KeyError("body")
                except ValueError:
                    pass

    with pytest.raises(KeyError):
        body()
    assert (summary_of(runs)["status"], summary_of(runs)["step"]) == ("failed", 4)


HELD = """
import torch, paceline
loop = paceline.Loop("run", torch.randn(40, 4), batch_size=8, epochs=2)
steps = enumerate(loop)
for _, (step, batch) in steps:
    if step == 5:
        {end}
"""


@pytest.mark.parametrize(("end", "status", "step"), [("break", "stopped", 5), ("raise KeyError(step)", "failed", 4)])
def test_a_loop_that_is_still_held_ends_with_the_program(end: str, status: str, step: int, runs: Path) -> None:
    (runs / "mine.py").write_text(HELD.format(end=end))
    words = [sys.executable, str(runs / "mine.py")]
    done = fork_server.run(words, cwd=runs, capture_output=True, text=True, timeout=280)
    assert done.returncode == (status == "failed"), done.stderr
    assert (summary_of(runs)["status"], summary_of(runs)["step"]) == (status, step)
    assert (runs / "run" / "checkpoints" / "step-00000005").is_dir() == (status == "stopped")


# ------------------------------------------------------------------------------- states of another shape


class Growing(nn.Module):
    """A module with a buffer that grows; it may take one of another length."""

    def __init__(self, takes_any: bool) -> None:
        super().__init__()
        self.linear, self.takes_any = nn.Linear(4, 1), takes_any
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, batch: torch.Tensor) -> Any:
        self.seen = torch.cat([self.seen, batch.detach()])
        return self.linear(batch)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if self.takes_any:
            self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class Queue:
    """An object with a state that fills."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Extra(Queue, nn.Module):
    """A module that fills what torch calls its extra state."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rows = []

    state_dict, load_state_dict = nn.Module.state_dict, nn.Module.load_state_dict  # type: ignore[assignment]

    def get_extra_state(self) -> Any:
        return {"rows": self.rows}

    def set_extra_state(self, state: Any) -> None:
        self.rows = state["rows"]


@pytest.mark.parametrize("kind", [Queue, Extra])
def test_a_state_that_grows_is_resumed(kind: Any, make: Make) -> None:
    for begins in (True, False):
        loop = make()
        growing = Growing(takes_any=True)
        take, queue = prepared(loop, growing), loop.keep(kind())
        for step, batch in loop:
            take(batch)
            queue.rows.append(torch.full((step,), step))
            if begins and step == 5:
                break
    assert growing.seen.shape == (80, 4)
    assert [len(each) for each in queue.rows] == list(range(1, 11))


class Late(nn.Linear):
    """A module that makes a buffer in its first pass."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.register_buffer("seen", batch.detach())
        return super().forward(batch)


class Copied(Queue):
    """An object that copies what it loads into what it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.rows, state["rows"], strict=True):
            mine.copy_(saved)


@pytest.mark.parametrize(("module", "kind"), [(Late(4, 1), Queue), (None, Copied)])
def test_states_that_are_not_there_yet_are_one_sentence(module: Any, kind: Any, make: Make) -> None:
    for begins in (True, False):
        loop = make()
        take, queue = prepared(loop, copy.deepcopy(module)), loop.keep(kind())
        if not begins:
            with raises(CheckpointError):
                next(iter(loop))
            return
        for step, batch in loop:
            take(batch)
            queue.rows.append(batch[0])
            if step == 5:
                break


def test_a_parameter_may_change_its_shape_in_the_body(make: Make, runs: Path) -> None:
    loop = make(overrides=QUIET | {"telemetry.log_every": "1 steps"})
    module = nn.Linear(4, 1)
    take = prepared(loop, module)
    for step, batch in loop:
        take(batch)
        if step == 2:
            module.weight.data, module.weight.grad = torch.ones(2, 4), None
            module.bias.data, module.bias.grad = torch.ones(2), None
            loop._kept.optimizers[0].state.clear()
    assert summary_of(runs)["status"] == "completed"


class WithoutRate(torch.optim.Optimizer):
    """An optimizer that has no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        pass


def test_an_optimizer_may_have_no_learning_rate(make: Make, runs: Path) -> None:
    loop = make()
    optimizer = loop.keep(WithoutRate(loop.prepare(nn.Linear(4, 1)).parameters()))
    for _ in loop:
        optimizer.step()
    assert summary_of(runs)["status"] == "completed"


def test_states_that_do_not_fit_are_one_sentence(make: Make) -> None:
    loop = make()
    take = prepared(loop, Growing(takes_any=False))
    for step, batch in loop:
        take(batch)
        if step == 5:
            break
    loop = make()
    prepared(loop, Growing(takes_any=False))
    with raises(CheckpointError):
        next(iter(loop))
    loop = make()
    loop.prepare(Growing(takes_any=True))
    with raises(CheckpointError):
        next(iter(loop))


def test_a_parameter_group_that_was_added_in_the_body_is_to_be_added_before(make: Make) -> None:
    def train(loop: paceline.Loop, *, early: bool, late: bool) -> None:
        model, head = loop.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
        optimizer = loop.keep(torch.optim.SGD(model.parameters(), 0.01))
        if early:
            optimizer.add_param_group({"params": head.parameters()})
        for step, (batch,) in loop:
            if late and step == 2:
                optimizer.add_param_group({"params": head.parameters()})
            (model(batch) + head(batch)).square().mean().backward()
            optimizer.step()
            if step == 5 and late:
                break

    train(make(), early=False, late=True)
    with raises(CheckpointError):
        train(make(), early=False, late=False)
    train(make(), early=True, late=False)


def test_what_a_kept_schedule_holds_is_kept(make: Make, runs: Path) -> None:
    loop = make()
    take = prepared(loop)
    [optimizer] = loop._kept.optimizers
    parts: list[Any] = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    inner = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])
    schedule = loop.keep(torch.optim.lr_scheduler.ChainedScheduler([inner], optimizer))
    for _, batch in loop:
        take(batch)
        schedule.step()
    assert "unkept" not in (runs / "run" / "events.jsonl").read_text()


class Unmade(nn.Module):
    """A module that does not call the constructor of its base class."""

    def __init__(self) -> None:
        pass


class UnmadeOptimizer(torch.optim.Optimizer):
    """Likewise an optimizer."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [], "lr": 0.1}]


@pytest.mark.parametrize(("method", "made"), [("prepare", Unmade), ("keep", Unmade), ("keep", UnmadeOptimizer)])
def test_objects_without_what_their_base_class_makes_are_refused(method: str, made: Any, make: Make) -> None:
    held, loop = made(), make()
    with raises(LoopError, key=method):
        getattr(loop, method)(held)
    take = prepared(loop)
    assert len([take(batch) for _, batch in loop]) == 10, "the loop passes over it"


def test_a_module_without_shapes_is_refused(make: Make) -> None:
    with raises(LoopError, key="prepare"):
        make().prepare(nn.LazyLinear(1))


# ------------------------------------------------------------------------------ at a wrong time or place


CALLS: dict[str, Callable[[paceline.Loop], Any]] = {
    "log": lambda loop: loop.log(loss=1.0),
    "due": lambda loop: loop.due("1 epoch"),
    "evaluation": lambda loop: loop.evaluation(POINTS),
    "prepare": lambda loop: loop.prepare(nn.Linear(1, 1)),
    "keep": lambda loop: loop.keep(Queue()),
    "load_best": lambda loop: loop.load_best(),
}


def in_a_thread(call: Callable[[], Any]) -> BaseException | None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # handed over
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    return found[0] if found else None


def raise_it(error: BaseException | None) -> None:
    assert error is not None
    raise error


def test_calls_from_another_thread_than_the_body(make: Make) -> None:
    loop = make()
    prepared(loop)
    for _ in loop:
        for name, call in CALLS.items():
            error = in_a_thread(lambda call=call: call(loop))  # type: ignore[misc]
            with raises(LoopError, key=name):
                raise_it(error)


def test_calls_after_a_loop_that_failed(make: Make) -> None:
    loop = make()
    prepared(loop)
    with pytest.raises(KeyError):
        [{}[step] for step, _ in loop]
    for name, call in CALLS.items():
        with raises(LoopError, **({"key": name} if name != "load_best" else {})):
            call(loop)
    with raises(LoopError):
        iter(loop)
    assert loop.epoch == 1


def test_calls_inside_an_evaluation(make: Make) -> None:
    loop = make()
    prepared(loop)
    for _ in loop:
        late = loop.evaluation(POINTS)
        with loop.evaluation(POINTS) as scores:
            for (batch,) in scores:
                scores.add(error=batch[:, 0])
            for name in ("prepare", "keep", "load_best"):
                with raises(LoopError, key=name):
                    CALLS[name](loop)
            with raises(LoopError), late:
                pass
        kept = loop.evaluation(POINTS)
    with raises(LoopError), kept:
        pass


def test_the_epoch_before_the_first_turn(make: Make) -> None:
    loop = make()
    prepared(loop)
    steps = iter(loop)
    assert loop.epoch == 1
    assert [step for step, _ in steps] == [*range(1, 11)]


def test_a_loop_runs_in_a_thread(make: Make, runs: Path) -> None:
    loop = make()
    take = prepared(loop)
    assert in_a_thread(lambda: [take(batch) for _, batch in loop]) is None
    assert summary_of(runs)["status"] == "completed"
