"""What `paceline.fit` says, before the first step, of data, networks and losses that a resume would not repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden_sentences import raises
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import paceline
from paceline.errors import RunDirectoryError
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.tasks.given_objects import fingerprint, gather
from paceline.tasks.objects import Fit

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1)
TRAIN, HELD_OUT = (X[:40], Y[:40]), (X[40:], Y[40:])
QUICK = {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.report": False, "telemetry.trackers": []}


def task(*, workers: int | str = "auto", **given: Any) -> Fit:
    arguments: dict[str, Any] = {"model": Linear(), "train_set": TRAIN, "held_out": HELD_OUT, "loss": F.mse_loss}
    overrides: dict[str, Any] = {"task": "fit", "data.workers": workers, "batch.global_size": 20, "objects": {}}
    return Fit(load_recipe(None, overrides).recipe, gather(**(arguments | given)))


# Networks and losses with a state that no checkpoint holds


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 1), nn.BatchNorm1d(1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.drop(self.norm(self.layer(self.changed(x))))
        return answer.squeeze(1)

    def changed(self, x: Tensor) -> Tensor:
        return x


class Buffer(Linear):
    mean: Tensor

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5), persistent=persistent)

    def changed(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(dim=0), 0.1)
        return x - self.mean


class Step(Linear):
    step = 0

    def changed(self, x: Tensor) -> Tensor:
        self.step += 1
        return x if self.step > 1000 else 2 * x


class WithMean(nn.Linear):
    mean = torch.zeros(5)


class Plain(Linear):
    layer: WithMean

    def __init__(self) -> None:
        super().__init__()
        self.layer = WithMean(5, 1)

    def changed(self, x: Tensor) -> Tensor:
        self.layer.mean = 0.9 * self.layer.mean + 0.1 * x.mean(dim=0)
        return x - self.layer.mean


class FirstBatch(Linear):
    mean: Tensor | None = None

    def changed(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(dim=0)
        return x * (1 + self.mean)


class OwnDraws(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(0)

    def __deepcopy__(self, memo: Any) -> Any:
        other = OwnDraws()
        other.load_state_dict(self.state_dict())
        return other

    def changed(self, x: Tensor) -> Tensor:
        return x + torch.rand(5, generator=self.draws)


class Statistics(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def changed(self, x: Tensor) -> Tensor:
        return x * (1 + self.found.setdefault("mean", x.mean(dim=0)))


class Averager:
    mean = 0.0

    def __call__(self, x: Tensor) -> float:
        self.mean += 0.1 * (float(x.mean()) - self.mean)
        return self.mean


class Inside(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.averager = Averager()

    def changed(self, x: Tensor) -> Tensor:
        return x - self.averager(x)


class Scaled:
    def __init__(self) -> None:
        self.scale = torch.ones(())

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, targets)
        self.scale = 0.9 * self.scale + 0.1 * loss.detach()
        return loss / self.scale


class ScaledModule(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, targets)
        self.scale.lerp_(loss.detach(), 0.1)
        return loss / self.scale


def counting() -> Callable[..., Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(outputs, targets) * (1 + 1 / calls)

    return loss


def warned(caplog: pytest.LogCaptureFixture, **given: Any) -> str:
    made = task(**given)
    before = fingerprint(vars(made.objects.loss)) if isinstance(made.objects.loss, Scaled) else ""
    made.check_network(made.build_model())
    assert before in ("", fingerprint(vars(made.objects.loss))), "the loss that was given has changed"
    return caplog.text


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"model": Buffer()}, "model.mean changes in each forward pass"),
        ({"model": Step()}, "model.step"),
        ({"model": Plain()}, "model.layer.mean"),
        ({"model": FirstBatch()}, "model.mean"),
        ({"model": OwnDraws()}, "model.draws"),
        ({"model": Statistics()}, "model.found"),
        ({"model": Inside()}, "Averager.mean"),
        ({"loss": Scaled()}, "Scaled.scale changes with each call of the loss"),
        ({"loss": Scaled().__call__}, "Scaled.scale"),
        ({"loss": ScaledModule()}, "ScaledModule.scale"),
        ({"loss": counting()}, "calls"),
    ],
)
def test_a_state_that_is_not_saved_is_named(caplog: pytest.LogCaptureFixture, given: Any, name: str) -> None:
    said = warned(caplog, **given)
    assert name in said
    assert said.count("is in no checkpoint: make it") == 1
    assert "will not repeat this run exactly" in said


class Cache(Linear):
    """Keeps what follows from the size of its input, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.table = 0, torch.zeros(0, 5)

    def changed(self, x: Tensor) -> Tensor:
        if len(x) > self.longest:
            self.longest = len(x)
            self.table = torch.arange(5.0) * torch.ones(len(x), 1)
        return x + self.table[: len(x)]


class Recorded(Linear):
    """Keeps its newest answer, and a list of means, for those who want to look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.newest, self.means = torch.zeros(()), list[float]()

    def changed(self, x: Tensor) -> Tensor:
        self.newest = x * torch.rand(5)
        self.means.append(float(x.mean()))
        return x


class Extra(Step):
    def get_extra_state(self) -> int:
        return self.step

    def set_extra_state(self, state: int) -> None:
        self.step = state


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": Buffer(persistent=True)},
        {"model": Cache()},
        {"model": Recorded()},
        {"model": Extra()},
        {"loss": nn.HuberLoss()},
        {"loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1])},
    ],
)
def test_a_state_that_is_saved_or_a_cache_is_not_named(caplog: pytest.LogCaptureFixture, given: Any) -> None:
    assert "is in no checkpoint" not in warned(caplog, **given)


# Data


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = X[i] + torch.rand(5), Y[i]
        return self.kept[i]


class Seeks(Augmented):
    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def __getitem__(self, i: int) -> Any:
        self.file.seek(20 * i)
        return torch.frombuffer(bytearray(self.file.read(20)), dtype=torch.float32), Y[i]


def test_samples_that_keep_their_draws_are_named(caplog: pytest.LogCaptureFixture) -> None:
    task(train_set=Augmented()).data_facts(World())
    assert "train_set[0] keeps the random draws of its first read" in caplog.text


def test_an_open_file_is_not_shared(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(X.numpy().tobytes() + bytes(10_000))
    data = Seeks(path)
    assert task(train_set=data).data_facts(World()).description["workers"] == 0
    assert not caplog.text
    for given in ({"train_set": data, "workers": 2}, {"train_set": DataLoader(data, num_workers=2)}):
        caplog.clear()
        assert task(**given).data_facts(World()).description["workers"] == 2
        assert f"train_set[0] is read from the open file '{path}'" in caplog.text
        assert "or give workers=0" in caplog.text
    data.file.close()


# What a completed run was trained with

W = 1.0


def scale(loss: Tensor) -> Tensor:
    return W * loss


def by_helper(outputs: Tensor, targets: Tensor) -> Tensor:
    return scale(F.mse_loss(outputs, targets))


@pytest.mark.parametrize("value", [2.0, "text", (1, 2), torch.ones(2)], ids=["number", "text", "tuple", "tensor"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: W * F.mse_loss(outputs, targets),
        lambda outputs, targets: sum(W * (a - b) for a, b in zip(outputs, targets, strict=True)),
        lambda outputs, targets: [x for x in (outputs, targets) if any(W * each for each in x)],
        by_helper,
    ],
    ids=["lambda", "generator", "nested", "helper"],
)
def test_values_that_a_loss_reads_are_in_its_digest(monkeypatch: pytest.MonkeyPatch, loss: Any, value: Any) -> None:
    before = fingerprint(loss)
    assert fingerprint(loss) == before
    monkeypatch.setitem(globals(), "W", value)
    now = fingerprint(loss)
    assert now != before
    assert now.partition("-")[0] == before.partition("-")[0], "runs of earlier versions have only this part"


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def collate_otherwise(samples: list[Any]) -> Any:
    return default_collate(samples[::-1])


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("loss", {}, {}),
        ("collate", {"collate": collate}, {"collate": collate_otherwise}),
        ("schedule_interval", {"schedule": stepped}, {"schedule": stepped, "schedule_interval": "epoch"}),
        (
            "weights",
            {"weights": np.ones(40, int)},
            {"weights": np.arange(1, 41)},
        ),
    ],
)
def test_a_completed_run_is_not_given_for_another(
    runs: Path, monkeypatch: pytest.MonkeyPatch, key: str, before: Any, now: Any
) -> None:
    def run(**given: Any) -> Any:
        loss = lambda outputs, targets: W * F.mse_loss(outputs, targets, reduction="none")  # noqa: E731  # as people do
        arguments: Any = {
            "model": Linear,
            "train_set": TRAIN,
            "loss": loss,
            "epochs": 1,
            "quiet": True,
            "batch_size": 20,
        }
        return paceline.fit(**(arguments | given), run_dir=runs / "run", overrides=QUICK)

    result = run(**before)
    assert run(**before).was_complete
    if key == "loss":
        monkeypatch.setitem(globals(), "W", 3.0)
    with raises(RunDirectoryError, key=key, path=result.run_dir):
        run(**now)
