"""What a user is told: nearest names, and exit codes that tell a mistake from a failure."""

from __future__ import annotations

from paceline import errors
from paceline.errors import NotFiniteError, PacelineError, StoppedError, TrainingError, did_you_mean


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
