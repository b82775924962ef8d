"""Checkpoints for other loops: whole or invisible, exact, and refused by name where a part does not fit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import check_sentence, raises
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from paceline.checkpoints import Checkpoints
from paceline.errors import CheckpointError, PacelineError, RunDirectoryError
from paceline.order import BatchOrder

SOURCES = Path(__file__).parents[2] / "src"


class Training:
    """A network after some steps, and everything that changes with it."""

    def __init__(self, steps: int = 0, width: int = 3) -> None:
        torch.manual_seed(width)
        self.model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.scaler = torch.amp.GradScaler("cpu")
        self.order = BatchOrder(12, 4, seed=1, rank=0, world_size=1)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        torch.manual_seed(self.order.step)
        self.scaler.scale(self.model(torch.randn(4, 2).bfloat16()).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.order.step += 1

    @property
    def parts(self) -> dict[str, Any]:
        return dict(vars(self))

    def weights(self) -> list[Any]:
        return [each.float().tolist() for each in self.model.state_dict().values()]


def saved(folder: Path, *steps: int, **more: Any) -> Training:
    """Save after some steps."""
    training, checkpoints = Training(), Checkpoints(folder)
    while training.order.step < max(steps):
        training.step()
        if training.order.step in steps:
            checkpoints.save(training.order.step, **training.parts, **more)
    checkpoints.wait()
    return training


@pytest.mark.everyday
def test_training_continues_bit_for_bit(tmp_path: Path) -> None:
    first, second = saved(tmp_path, 3), Training()
    assert Checkpoints(tmp_path).load(**second.parts) == second.order.step == 3
    for training in (first, second):
        training.step()
        training.step()
    assert first.weights() == second.weights()
    assert first.schedule.get_last_lr() == second.schedule.get_last_lr()


@pytest.mark.everyday
def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    plain = {"best": float("inf"), "seen": {3: (1, "two", None)}, "noise": torch.randn(3)}
    assert checkpoints.load(**plain) is None
    assert checkpoints.values == plain
    checkpoints.save(4, **plain)
    checkpoints.wait()
    loaded = Checkpoints(tmp_path)
    assert loaded.load(best=0.0, seen={}, noise=torch.zeros(0)) == 4
    assert torch.equal(loaded.values.pop("noise"), plain.pop("noise"))
    assert loaded.values == plain


def test_saved_state_is_that_of_the_call(tmp_path: Path) -> None:
    training, checkpoints = Training(2), Checkpoints(tmp_path)
    before = training.weights()
    checkpoints.save(2, model=training.model)
    training.step()
    checkpoints.wait()
    other = Training()
    Checkpoints(tmp_path).load(model=other.model)
    assert other.weights() == before != training.weights()


def test_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 5):
        checkpoints.save(step, value=step)
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for value in (1, 2):
        checkpoints.save(7, value=value)
    assert (checkpoints.load(value=0), checkpoints.values) == (7, {"value": 2})


def damage_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.everyday
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [damage_a_bit, lambda file: os.truncate(file, file.stat().st_size // 2), Path.unlink],
    ids=["a bit", "half", "gone"],
)
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: Callable[[Path], object]) -> None:
    saved(tmp_path, 2, 3)
    damage(tmp_path / "step-00000003" / name)
    training = Training()
    with pytest.warns(UserWarning, match=r"step-00000002 is loaded instead: .*step-00000003"):
        assert Checkpoints(tmp_path).load(**training.parts) == 2
    assert training.weights() == Training(2).weights()


def test_training_does_not_begin_anew_where_all_are_damaged(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 3)
    damage_a_bit(tmp_path / "saved" / "step-00000003" / "model.safetensors")
    with pytest.warns(UserWarning, match="none is loaded"), pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path / "saved").load(**Training().parts)
    check_sentence(caught.value)


SAVING = """
import os, signal, sys, torch
from paceline.checkpoint import store
from paceline.checkpoints import Checkpoints

write_file, left = store.write_file, [int(sys.argv[2])]

def write_and_die(path, chunks):
    if left[0] == 0:
        path.write_bytes(b"torn")
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return write_file(path, chunks)

store.write_file = write_and_die
Checkpoints(sys.argv[1]).save(2, weights=torch.zeros(1000), more={})
"""


@pytest.mark.everyday
@pytest.mark.parametrize("file", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path: Path, file: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, weights=torch.ones(1000), more={})
    checkpoints.wait()
    command = [sys.executable, "-c", SAVING, str(tmp_path), str(file)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SOURCES)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert any(path.name.startswith(".saving-") for path in tmp_path.iterdir())
    assert checkpoints.load(weights=torch.zeros(0), more={}) == 1
    assert checkpoints.values["weights"].tolist() == [1.0] * 1000
    checkpoints.save(2, weights=torch.zeros(1), more={})
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_wrapped_modules_have_the_names_of_their_own(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    wrapped = Training()
    Checkpoints(tmp_path).load(**{**wrapped.parts, "model": torch.compile(wrapped.model, backend="eager")})
    assert wrapped.weights() == training.weights()


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: {**parts, "optimiser": 1},
        lambda parts: {name: part for name, part in parts.items() if name != "scaler"},
        lambda parts: {**parts, "best": nn.Linear(1, 1)},
        lambda parts: {**parts, "order": 1},
        lambda parts: {**parts, "model": Training(width=4).model},
        lambda parts: {**parts, "order": BatchOrder(13, 4, seed=1, rank=0, world_size=1)},
        lambda parts: {**parts, "order": BatchOrder(12, 4, seed=2, rank=0, world_size=1)},
    ],
)
def test_part_that_does_not_fit_is_refused_and_nothing_is_changed(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    saved(tmp_path, 3, best=1.0)
    training = Training()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).load(**change({**training.parts, "best": 0.0}))
    check_sentence(caught.value)
    assert training.weights() == Training().weights()
    assert training.order.step == 0


def test_a_saved_part_is_left_out_on_request(tmp_path: Path) -> None:
    trained, training = saved(tmp_path, 3, best=1.0), Training()
    parts = dict.fromkeys({**training.parts, "best": 1.0})
    assert Checkpoints(tmp_path).load(**{**parts, "model": training.model}) == 3
    assert training.weights() == trained.weights()


@pytest.mark.parametrize(
    ("use", "error", "fields"),
    [
        (lambda folder: Checkpoints(folder, keep=0), CheckpointError, {"key": "keep", "value": 0}),
        (lambda folder: Checkpoints(folder, keep="3"), CheckpointError, {"key": "keep", "value": "3"}),
        (lambda _: Checkpoints(None), CheckpointError, {"key": "folder"}),
        (lambda folder: Checkpoints(folder).save(-1, best=1), CheckpointError, {"key": "step", "value": -1}),
        (lambda folder: Checkpoints(folder).save("1", best=1), CheckpointError, {"key": "step", "value": "1"}),
        (lambda folder: Checkpoints(folder).save(1, best=object()), CheckpointError, {"key": "best"}),
        (lambda folder: Checkpoints(folder).save(1, model=torch.nn.Linear), CheckpointError, {"key": "model"}),
        (lambda folder: Checkpoints(folder).save(1, part=Odd()), CheckpointError, {"key": "part"}),
        (lambda folder: Checkpoints(folder).save(1, manifest=1), CheckpointError, {}),
        (lambda folder: Checkpoints(folder / "file").save(1, best=1), RunDirectoryError, {}),
        (lambda folder: Checkpoints(folder / "file").load(best=1), PacelineError, {}),
    ],
)
def test_wrong_use_is_refused(
    tmp_path: Path, use: Callable[[Path], object], error: type[PacelineError], fields: dict[str, Any]
) -> None:
    (tmp_path / "file").write_text("")
    with raises(error, **fields):
        use(tmp_path)


class Odd:
    """A part whose state is not a dict."""

    def state_dict(self) -> int:
        return 5

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize("parts", [{"value": 0}, {"value": 0, "rate": 0.1, "modle": None, "model": 1}])
def test_a_name_that_was_not_saved_or_not_given_is_named(tmp_path: Path, parts: dict[str, Any]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model=1, value=0, rate=0.1)
    checkpoints.wait()
    with raises(CheckpointError, key="modle" if "modle" in parts else "model", path="step-00000001"):
        checkpoints.load(**parts)


def test_a_save_that_failed_is_told_by_the_next_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, value=1)
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        checkpoints.save(2, value=torch.zeros(10_000))
        with pytest.raises(CheckpointError, match="Cannot write the checkpoint of step 2"):
            checkpoints.save(3, value=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.load(value=0) == 1


def test_the_last_save_is_finished_at_the_end_of_the_program(tmp_path: Path) -> None:
    program = "import sys; from paceline.checkpoints import Checkpoints; Checkpoints(sys.argv[1]).save(1, value=2)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True)
    assert Checkpoints(tmp_path).load(value=0) == 1
