"""What a loop cannot do is one sentence, and what it cannot see it says once."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import raises
from torch import nn

import paceline
from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.weights import weights_sha256
from paceline.errors import DataError, LoopError, PacelineError, RecipeError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.loop.kept import Kept
from paceline.reports.audit import audit_run
from paceline_advisor.commands import Drill
from paceline_advisor.drill.study import shortened

POINTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
QUIET = {"telemetry.trackers": [], "telemetry.report": False}


class Points(torch.utils.data.Dataset[Any]):
    """Points with noise, which is drawn when they are read."""

    def __init__(self, points: torch.Tensor = POINTS) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index] + 0.1 * torch.randn(4) + random.random() + float(np.random.random())


class Unmeasured(Points):
    """Points whose number is not known."""

    def __init__(self, found: float | Exception) -> None:
        self.found = found

    def __len__(self) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Endless(torch.utils.data.IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Counting(Points):
    """Points that differ each time that they are read."""

    read = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        return self.points[index] + self.read


Make = Callable[..., paceline.Loop]


HELD_OUT = Points()


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """A loop that has not begun, with a module and its optimizer."""
    loop = paceline.Loop(tmp_path_factory.mktemp("waiting"), HELD_OUT, batch_size=8, epochs=2, overrides=QUIET)
    yield loop, *prepared(loop)
    loop._subject.close()


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[paceline.Loop]:
    """A loop in its first turn."""
    loop = paceline.Loop(tmp_path_factory.mktemp("begun"), HELD_OUT, batch_size=8, epochs=2, overrides=QUIET)
    prepared(loop)
    for _ in loop:
        yield loop
        break


@pytest.fixture
def make(runs: Path) -> Iterator[Make]:
    """Make loops, and release their directories."""
    made: list[paceline.Loop] = []

    def loop(data: Any = None, *, run: Any = "run", **options: Any) -> paceline.Loop:
        settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "device": "cpu", "overrides": QUIET} | options
        made.append(
            paceline.Loop(runs / run if isinstance(run, str) else run, Points() if data is None else data, **settings)
        )
        return made[-1]

    yield loop
    for each in made:
        each._subject.close()


def prepared(loop: paceline.Loop) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = loop.prepare(nn.Linear(4, 1))
    return model, loop.keep(torch.optim.SGD(model.parameters(), 0.01))


def train(loop: paceline.Loop, until: int | None = None, *, before: bool = False) -> nn.Module:
    model, optimizer = prepared(loop)
    for step, batch in loop:
        if before and step == until:
            break
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.log(loss=loss)
        if step == until:
            break
    return model


def summary_of(runs: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs / "run" / "summary.json").read_text())
    return found


def incidents(runs: Path) -> dict[str, str]:
    lines = map(json.loads, (runs / "run" / "events.jsonl").read_text().splitlines())
    return {each["incident"]: each["message"] for each in lines if each["event"] == "incident"}


def saved_steps(runs: Path) -> list[int]:
    events = map(json.loads, (runs / "run" / "events.jsonl").read_text().splitlines())
    return [each["step"] for each in events if each["event"] == "checkpoint"]


@pytest.mark.parametrize(
    ("options", "kind", "key"),
    [
        ({"run": 5}, LoopError, "run_dir"),
        ({"batch_size": 64}, LoopError, "batch_size"),
        ({"batch_size": "20"}, LoopError, "batch_size"),
        ({"batch_size": True}, LoopError, "batch_size"),
        ({"epochs": "3"}, LoopError, "epochs"),
        ({"epochs": float("nan")}, LoopError, "epochs"),
        ({"epochs": 0.01}, LoopError, "epochs"),
        ({"seed": -1}, LoopError, "seed"),
        ({"seed": None}, LoopError, "seed"),
        ({"seed": 2**63}, LoopError, "seed"),
        ({"workers": 1.5}, LoopError, "workers"),
        ({"workers": 10_000}, LoopError, "workers"),
        ({"collate": 3}, LoopError, "collate"),
        ({"checkpoint_every": "often"}, LoopError, "checkpoint_every"),
        ({"checkpoint_every": None}, LoopError, "checkpoint_every"),
        ({"device": "gpu"}, LoopError, "device"),
        ({"overrides": ["a"]}, LoopError, "overrides"),
        ({"overrides": {"optimizer.lr": 1}}, LoopError, "optimizer.lr"),
        ({"overrides": {"checkpoint.kep": 3}}, LoopError, "checkpoint.kep"),
        ({"overrides": {"checkpoint.keep": "three"}}, LoopError, "checkpoint.keep"),
        ({"data": []}, DataError, "dataset"),
        ({"data": Endless()}, DataError, "dataset"),
        ({"data": Unmeasured(40.0)}, DataError, "dataset"),
        ({"data": Unmeasured(RuntimeError("not counted yet"))}, DataError, "dataset"),
        ({"data": (each for each in POINTS)}, DataError, "dataset"),
    ],
)
def test_arguments_that_cannot_be_used(
    options: dict[str, Any], kind: type[PacelineError], key: str, make: Make, runs: Path
) -> None:
    with raises(kind, key=key):
        make(**options)
    assert not list(runs.glob("run/*"))


def test_numbers_and_devices_of_other_libraries_are_taken(make: Make) -> None:
    loop = make(batch_size=np.int64(8), epochs=np.float32(2), device=torch.device("cpu"))
    assert (loop.total_steps, loop.epoch) == (10, 1)


class Stateful:
    """An object with a state, and none to be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda loop, model, optimizer: loop.log(loss=1.0), "log"),
        (lambda loop, model, optimizer: loop.due("1 epoch"), "due"),
        (lambda loop, model, optimizer: loop.evaluation(Points()), "evaluation"),
        (lambda loop, model, optimizer: loop.load_best(), "load_best"),
        (lambda loop, model, optimizer: loop.prepare(model), "prepare"),
        (lambda loop, model, optimizer: loop.prepare(optimizer), "prepare"),
        (lambda loop, model, optimizer: loop.prepare(nn.Linear), "prepare"),
        (lambda loop, model, optimizer: loop.prepare(loop.keep(nn.Linear(1, 1))), "prepare"),
        (lambda loop, model, optimizer: loop.keep(model), "keep"),
        (lambda loop, model, optimizer: loop.keep(optimizer), "keep"),
        (lambda loop, model, optimizer: loop.keep(3), "keep"),
        (lambda loop, model, optimizer: loop.keep(Stateful()), "keep"),
        (lambda loop, model, optimizer: loop.keep(torch.optim.SGD), "keep"),
    ],
)
def test_calls_before_the_loop(call: Callable[..., object], key: str, waiting: tuple[Any, ...]) -> None:
    with raises(LoopError, key=key):
        call(*waiting)


@pytest.mark.parametrize(
    ("call", "kind", "fields"),
    [
        (lambda loop: loop.prepare(nn.Linear(1, 1)), LoopError, {"key": "prepare"}),
        (lambda loop: loop.keep(nn.Linear(1, 1)), LoopError, {"key": "keep"}),
        (iter, LoopError, {}),
        (lambda loop: loop.log(epoch=1), LoopError, {"key": "epoch"}),
        (lambda loop: loop.log(a="x"), LoopError, {"key": "a", "value": "x"}),
        (lambda loop: loop.log(a=None), LoopError, {"key": "a"}),
        (lambda loop: loop.log(loss={"a": 1}), LoopError, {"key": "loss"}),
        (lambda loop: loop.log(a=1j), LoopError, {"key": "a"}),
        (lambda loop: loop.log(a=10**30), LoopError, {"key": "a"}),
        (lambda loop: loop.log(a=torch.zeros(2)), LoopError, {"key": "a", "value": [2]}),
        (lambda loop: loop.due("banana"), LoopError, {"key": "due", "value": "banana"}),
        (lambda loop: loop.due(5), LoopError, {"key": "due", "value": 5}),
        (lambda loop: loop.due("0 steps"), LoopError, {"key": "due", "value": "0 steps"}),
        (lambda loop: loop.evaluation([]), DataError, {"key": "held_out"}),
        (lambda loop: loop.evaluation(5), DataError, {"key": "held_out"}),
        (lambda loop: loop.evaluation(Points(), name=5), LoopError, {"key": "name", "value": 5}),
        (lambda loop: loop.evaluation(Points(), highest="a", lowest="b"), LoopError, {"key": "highest"}),
    ],
)
def test_calls_in_the_body(
    call: Callable[[Any], object], kind: type[PacelineError], fields: dict[str, Any], begun: paceline.Loop
) -> None:
    with raises(kind, **fields):
        call(begun)


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        (lambda count: {"error": torch.zeros(count - 1)}, "error", 7),
        (lambda count: {"error": 0.5}, "error", 1),
        (lambda count: {"error": torch.zeros(count, 2)}, "error", 16),
        (lambda count: {"error": "x"}, "error", "x"),
        (lambda count: {"error": ["x"] * count}, "error", ["x"] * 8),
        (lambda count: {"error": None}, "error", None),
        (lambda count: {"epoch": torch.zeros(count)}, "epoch", None),
    ],
)
def test_scores_that_cannot_be_added(
    values: Callable[[int], dict[str, Any]], key: str, value: Any, begun: paceline.Loop
) -> None:
    with raises(LoopError, key=key, value=value), begun.evaluation(HELD_OUT) as scores:
        for batch in scores:
            scores.add(**values(len(batch)))


def test_evaluations_that_are_incomplete(make: Make) -> None:
    loop = make()
    prepared(loop)
    for _ in loop:
        with raises(LoopError, key="error", value=8), loop.evaluation(Points()) as scores:
            scores.add(error=torch.zeros(len(next(iter(scores)))))
        with raises(LoopError), loop.evaluation(Points()):
            pass
        with raises(LoopError, key="correct"), loop.evaluation(Points(), highest="correct") as scores:
            for batch in scores:
                scores.add(error=torch.zeros(len(batch)))
        with loop.evaluation(Points()) as scores:
            with raises(LoopError):
                loop.evaluation(Points())
            with raises(LoopError):
                scores.add(error=torch.zeros(8))
            for batch in scores:
                scores.add(error=torch.zeros(len(batch)))
    with raises(LoopError):
        iter(loop)
    with raises(LoopError, key="due"):
        loop.due("1 epoch")
    with raises(LoopError):
        loop.load_best()
    assert loop.epoch == 2


def test_two_loops_in_one_process(make: Make) -> None:
    first, second = train(make(run="a")), train(make(run="b"))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_a_value_that_is_not_finite_is_named_once(make: Make, runs: Path) -> None:
    loop = make(overrides={**QUIET, "telemetry.log_every": "1 steps"})
    prepared(loop)
    for step, _ in loop:
        loop.log(distance=float("nan") if step in (3, 4) else 1.0)
        if step == 5:
            with loop.evaluation(Points()) as scores:
                for batch in scores:
                    scores.add(error=torch.zeros(len(batch)))
    lines = [each for each in (runs / "run" / "events.jsonl").read_text().splitlines() if "nonfinite" in each]
    assert len(lines) == 1
    assert "distance was nan by step 3" in incidents(runs)["nonfinite_metric"]
    assert summary_of(runs)["status"] == "completed"


def test_scores_that_were_not_finite_once_do_not_fail_a_loop(make: Make, runs: Path) -> None:
    loop = make()
    prepared(loop)
    for step, _ in loop:
        if step in (3, 5, 10):
            for name, value in (("probe", math.nan), ("validation", 2.0))[step != 3 :]:
                with loop.evaluation(Points(), name=name) as scores:
                    for batch in scores:
                        scores.add(error=torch.full((len(batch),), value))
    assert "probe error (model weights) is nan" in incidents(runs)["nonfinite_metric"]
    assert summary_of(runs)["status"] == "completed"
    assert summary_of(runs)["metrics"]["last"] == {"model": {"error": 2.0}}


@pytest.mark.parametrize("logs", [False, True])
def test_a_loop_whose_last_scores_are_not_finite_fails(logs: bool, make: Make, runs: Path) -> None:
    loop = make()
    prepared(loop)
    with raises(TrainingError):
        for _ in loop:
            if logs:
                loop.log(loss=1.0)
            if loop.due("1 epoch"):
                with loop.evaluation(Points()) as scores:
                    for batch in scores:
                        scores.add(error=batch[:, 0] * float("nan"))
    assert summary_of(runs)["status"] == "failed"


def test_a_drill_says_what_to_do_instead(make: Make, runs: Path) -> None:
    train(make())
    with raises(RecipeError, key="task", value="own_loop", path=runs / "run"):
        shortened(Drill(recipe=str(runs / "run")))


def scored(loop: paceline.Loop, values: list[float], until: int | None = None, **chosen: str) -> nn.Module:
    """Train with an evaluation after each step, with a given result."""
    model, optimizer = prepared(loop)
    for step, batch in loop:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        with loop.evaluation(Points(), **chosen) as scores:
            for part in scores:
                scores.add(value=torch.full((len(part),), values[step - 1]))
        if step == until:
            break
    return model


@pytest.mark.parametrize(("chosen", "best"), [("highest", 4), ("lowest", 7)])
def test_the_checkpoint_of_the_best_evaluation_is_kept(chosen: str, best: int, make: Make, runs: Path) -> None:
    values = [1.0, 2.0, 3.0, 9.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0]
    keeping = {**QUIET, "checkpoint.keep": 1}
    model = scored(make(overrides=keeping), values, until=8, **{chosen: "value"})
    evaluations = (runs / "run" / "events.jsonl").read_text().count('"event": "evaluation"')
    assert evaluations == 8  # with that of the step that broke out
    loop = make(overrides=keeping)
    model = scored(loop, values, **{chosen: "value"})
    final = {name: each.clone() for name, each in model.state_dict().items()}
    folder = runs / "run" / "checkpoints"
    assert sorted(each.name for each in folder.glob("step-*")) == [f"step-{best:08d}", "step-00000010"]
    assert summary_of(runs)["metrics"]["best"]["value"] == values[best - 1]
    assert loop.load_best() == best
    saved = read_components(folder / f"step-{best:08d}")["model"]
    assert all(torch.equal(each, saved[name]) for name, each in model.state_dict().items())
    again, _ = prepared(loop := make(overrides=keeping))
    assert list(loop) == []
    assert all(torch.equal(each, final[name]) for name, each in again.state_dict().items())
    assert loop.load_best() == best
    assert all(torch.equal(each, saved[name]) for name, each in again.state_dict().items())


def test_another_start_in_the_directory(make: Make, runs: Path) -> None:
    loop = make()
    with pytest.raises(RunDirectoryError, match="another process is training"):
        make()
    train(loop, until=7)
    for options, found in (
        ({"seed": 1}, "has seed 0, and here it is 1"),
        ({"batch_size": 4}, "has batch_size 8, and here it is 4"),
        ({"data": Points(POINTS[:39])}, "has data set of length 40, and here it is 39"),
        ({"data": Points(POINTS + 1)}, "started with another data set"),
    ):
        with pytest.raises(RunDirectoryError, match=found):
            make(**options)
    train(make())
    assert summary_of(runs)["status"] == "completed"
    assert audit_run(runs / "run").passed


def test_the_directory_of_another_kind_of_run(make: Make, train_tiny: Any, runs: Path) -> None:
    train_tiny("other")
    with pytest.raises(RunDirectoryError, match=r"not of paceline\.Loop"):
        make(run="other")


@pytest.mark.parametrize(("before", "steps"), [(True, 6), (False, 7)])
def test_a_body_that_breaks_out_is_told_and_goes_on(before: bool, steps: int, make: Make, runs: Path) -> None:
    train(make(), until=7, before=before)
    stopped = summary_of(runs)
    assert (stopped["status"], stopped["step"]) == ("stopped", steps)
    assert "with break or return" in incidents(runs)["left_loop"]
    train(make())
    train(make(run="whole"))
    whole = json.loads((runs / "whole" / "summary.json").read_text())
    assert summary_of(runs)["weights_sha256"] == whole["weights_sha256"]
    assert audit_run(runs / "run").passed


def accumulated(loop: paceline.Loop, until: int | None = None) -> nn.Module:
    """Train with a step of the optimizer in each third turn, and leave the body before one."""
    model, optimizer = prepared(loop)
    for step, batch in loop:
        model(batch).square().mean().backward()
        if step == until:
            break
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_what_a_body_that_breaks_out_has_accumulated_is_not_added_twice(make: Make, runs: Path) -> None:
    accumulated(make(checkpoint_every="3 steps"), until=5)
    accumulated(make(checkpoint_every="3 steps"))
    accumulated(make(run="whole", checkpoint_every="3 steps"))
    whole = json.loads((runs / "whole" / "summary.json").read_text())
    assert summary_of(runs)["weights_sha256"] == whole["weights_sha256"]


def test_an_error_in_the_body_leaves_the_state_before_it(make: Make, runs: Path) -> None:
    loop = make(checkpoint_every="2 steps")
    prepared(loop)

    def body() -> None:
        for step, _ in loop:
            if step == 6:
                raise KeyError("body")

    with pytest.raises(KeyError):
        body()
    failed = summary_of(runs)
    assert (failed["status"], failed["step"]) == ("failed", 5)
    assert "left_loop" not in incidents(runs)
    assert sorted(each.name for each in (runs / "run" / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_complete_loop_has_no_turns_and_the_final_weights(make: Make) -> None:
    final = train(make()).state_dict()
    again, _ = prepared(loop := make())
    assert list(loop) == []
    assert all(torch.equal(each, final[name]) for name, each in again.state_dict().items())


def test_what_changes_without_being_kept_is_named_once(make: Make, runs: Path) -> None:
    loop = make(checkpoint_every="2 steps")
    model, frozen = loop.prepare(nn.Linear(4, 1)), nn.Linear(4, 1)
    forgotten = torch.optim.Adam(model.parameters())
    inner = nn.Sequential(nn.BatchNorm1d(4))
    for _, batch in loop:
        forgotten.zero_grad()
        (model(inner(batch)) - frozen(batch)).square().mean().backward()
        forgotten.step()
    message = incidents(runs)["unkept"]
    assert sorted(message.partition(" changed")[0].split(", ")) == ["Adam", "Sequential"]


def test_an_impure_data_set_is_named(make: Make, runs: Path) -> None:
    train(make(Counting()))
    assert "dataset[0] differs each time that it is read" in incidents(runs)["impure_data"]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("killed", [3, 5])
def test_gradients_that_wait_for_their_optimizer_are_saved(to_none: bool, killed: int, make: Make, runs: Path) -> None:
    def accumulate(loop: paceline.Loop, last: int | None = None) -> None:
        model, early = loop.prepare(nn.Linear(4, 1), nn.Linear(4, 1))
        parameters = [*model.parameters(), *early.parameters()]
        optimizer = loop.keep(torch.optim.SGD(parameters, 0.01, momentum=0.9))
        for step, batch in loop:
            if step == last:
                raise KeyError(step)
            (early if step < 3 else model)(batch).square().mean().backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)

    every = {"checkpoint_every": "1 steps"}
    with pytest.raises(KeyError):
        accumulate(make(**every), last=killed)
    accumulate(make(**every))
    accumulate(make(run="whole", **every))
    whole = json.loads((runs / "whole" / "summary.json").read_text())
    assert summary_of(runs)["weights_sha256"] == whole["weights_sha256"]
    assert summary_of(runs)["resumes"] == 1


def test_gradients_that_differ_between_ranks_wait() -> None:
    class Ranks:
        """Two ranks, of which this is the first."""

        world = World(rank=0, world_size=2)
        other = ""

        def gather(self, mine: str) -> list[str]:
            return [mine, self.other or mine]

    kept, model = Kept(), nn.Linear(4, 1)
    ranks: Any = Ranks()  # only what is asked of the collectives
    kept.keep(optimizer := torch.optim.SGD(model.parameters(), 0.01))
    model(POINTS).mean().backward()
    assert not kept.cannot_save_gradients(ranks)
    ranks.other = "something else"
    assert kept.cannot_save_gradients(ranks)
    ranks.other = weights_sha256({})  # of a rank that has none
    assert kept.cannot_save_gradients(ranks)
    optimizer.step()
    assert not kept.cannot_save_gradients(ranks)
    model(POINTS).mean().backward()  # as for the critic, in the loss of the generator
    assert not kept.cannot_save_gradients(ranks)
    kept.begin_turn()
    saved = kept.components()["optimizer"].state_dict
    assert all(each is not None for each in saved()["gradients"].values())
    assert kept.cannot_save_gradients(ranks)
    assert saved()["gradients"] == {0: None, 1: None}


def test_a_save_waits_for_sparse_gradients_for_a_hundred_steps(make: Make, runs: Path) -> None:
    loop = make(torch.arange(40), batch_size=1, epochs=3, checkpoint_every="1 steps")
    words = loop.prepare(nn.Embedding(40, 2, sparse=True))
    optimizer = loop.keep(torch.optim.SGD(words.parameters(), 0.01))
    for step, (ids,) in loop:
        words(ids).square().mean().backward()
        if step > 105:
            optimizer.step()
            optimizer.zero_grad()
    assert "when step 100 is saved" in incidents(runs)["pending_gradients"]
    assert saved_steps(runs) == [100, *range(106, 121)]


def test_the_best_checkpoint_is_saved_while_gradients_wait(make: Make, runs: Path) -> None:
    def train(loop: paceline.Loop) -> None:
        words = loop.prepare(nn.Embedding(12, 2, sparse=True))
        optimizer = loop.keep(torch.optim.SGD(words.parameters(), 0.01))
        for step, (ids,) in loop:
            words(ids).square().mean().backward()
            if step % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            with loop.evaluation(torch.arange(2), highest="value") as scores:
                for batch in scores:
                    scores.add(value=torch.full((len(batch[0]),), {4: 1.0, 7: 2.0}.get(step, 0.0)))
            if step == 7:
                signal.raise_signal(signal.SIGTERM)

    options: dict[str, Any] = {"batch_size": 1, "epochs": 1, "checkpoint_every": "1 epoch"}
    options["overrides"] = {**QUIET, "checkpoint.keep": 1}
    with pytest.raises(SystemExit):
        train(make(torch.arange(12), **options))
    assert saved_steps(runs) == [1, 4, 7, 8]
    assert "when step 7 is saved" in incidents(runs)["pending_gradients"]
    train(loop := make(torch.arange(12), **options))
    assert saved_steps(runs) == [1, 4, 7, 8, 12]
    assert loop.load_best() == 7


def test_draws_depend_on_seed_and_step_alone(make: Make) -> None:
    def draws(loop: paceline.Loop, noise: int) -> list[tuple[float, ...]]:
        prepared(loop)
        drawn: list[tuple[float, ...]] = []
        for _, batch in loop:
            drawn.append((float(torch.rand(())), random.random(), float(np.random.random()), float(batch.sum())))
            torch.rand(noise)
        return drawn

    first = draws(make(run="a"), 1)
    assert first == draws(make(run="b", workers=2), 7)
    assert first != draws(make(run="c", seed=1), 1)
    assert len({each for row in first for each in row}) == 4 * len(first)


def test_the_digest_is_over_all_modules_by_name(make: Make, runs: Path) -> None:
    import hashlib

    loop = make()
    loop.prepare(nn.Linear(4, 2), nn.BatchNorm1d(3))
    for _ in loop:
        pass
    (newest,) = sorted((runs / "run" / "checkpoints").glob("step-*"))[-1:]
    digest, components = hashlib.sha256(), read_components(newest)
    for name in ("BatchNorm1d", "Linear"):
        for key, value in sorted(components[name].items()):
            digest.update(key.encode() + value.numpy().tobytes())
    assert summary_of(runs)["weights_sha256"] == digest.hexdigest()
