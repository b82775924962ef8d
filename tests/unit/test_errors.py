"""What a user is told: nearest names, and exit codes that tell a mistake from a failure."""

from __future__ import annotations

import pickle

import pytest

from paceline import errors
from paceline.errors import (
    CheckpointError,
    NotFiniteError,
    PacelineError,
    StoppedError,
    TrainingError,
    VersionError,
    data_error,
    did_you_mean,
    setting_error,
)
from paceline.parsing.units import Duration


def test_the_nearest_names_are_given() -> None:
    assert did_you_mean("momentun", ["lr", "momentum", "nesterov"]) == " Did you mean 'momentum'?"
    assert did_you_mean("resnet19", ["resnet18", "vit", "resnet10"]) == " Did you mean 'resnet18' or 'resnet10'?"
    assert did_you_mean("resnet19", ["resnet18", "resnet10"], count=1) == " Did you mean 'resnet18'?"
    assert did_you_mean("xyz", []) == did_you_mean("xyz", ["entirely", "different"]) == ""
    # They are compared as they are and not as they are shown.
    shown = "a.very.long.way.to.{}".format
    assert did_you_mean("momentun", ["lr", "momentum"], shown=shown) == f" Did you mean '{shown('momentum')}'?"
    assert did_you_mean(shown("momentun"), ["lr", "momentum"], shown=shown) == ""


def test_a_mistake_exits_with_2_and_a_failed_run_with_1() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, PacelineError)]
    assert len(kinds) > 5
    for kind in kinds:
        own = {StoppedError: 75, NotFiniteError: 1}
        assert kind("x").exit_code == own.get(kind, 1 if issubclass(kind, TrainingError) else 2)


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (setting_error("batch.micro_size", 3, "is odd."), "batch.micro_size=3 is odd.", ("batch.micro_size", 3, None)),
        (
            setting_error("schedule.warmup", Duration(10, "percent"), "is long."),
            "schedule.warmup='10%' is long.",
            ("schedule.warmup", Duration(10, "percent"), None),
        ),
        (data_error("a.csv", "is empty."), "'a.csv' is empty.", (None, None, "a.csv")),
        (CheckpointError("one", "two", path="a"), "one\ntwo", (None, None, "a")),
        (VersionError.of("a", 3), str(VersionError.of("a", 3)), (None, 3, "a")),
    ],
)
def test_fields_and_lines_survive_the_way_to_another_process(
    error: PacelineError, message: str, fields: tuple[object, ...]
) -> None:
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert (type(each), str(each)) == (type(error), message)
        assert (each.key, each.value, each.path) == fields
