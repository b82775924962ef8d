"""Check what a task's methods return: a mistake in your own code is one sentence, before the first step."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.data.batch import tensors_in
from paceline.errors import ModelError, PacelineError, RecipeError, did_you_mean
from paceline.metrics.accumulator import Metric
from paceline.plugins.references import is_ours
from paceline.recipe.other_trainers import METHODS
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task


def own_loop(_: Recipe) -> Task:
    """Refuse the recipe of a run whose loop is a program of yours: only that program knows the network.

    Raises:
        RecipeError: Always.
    """
    raise RecipeError(
        "task=own_loop: a program of yours trains this run (paceline.Loop), and only that program knows its network; "
        "run the program again to go on, and load the weights into your module from checkpoints/step-*/*.safetensors.",
        key="task",
        value="own_loop",
    )


def refused(task: Task, found: str, value: Any, expected: str) -> ModelError:
    """Return the error for a task's method that returned the wrong thing, such as ``found="loss returned"``."""
    shown = f"a value of type {type(value).__name__}"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return ModelError(f"{type(task).__name__}.{found} {shown}, but it must be {expected}.")


def refuse_missing(task: Task, found: str, names: Iterable[str], needed: str, name: str) -> None:
    """Refuse a name that is not among ``names``, such as a misspelt key of the scores.

    Raises:
        ModelError: If it is missing; ``found`` and ``needed`` say what the names and the name are.
    """
    if name not in (names := [*map(str, names)]):
        listed = ", ".join(map(repr, names)) or "empty"
        hint = did_you_mean(name, names)
        raise ModelError(f"{type(task).__name__}.{found} {listed}, but {needed} {name!r}; correct one.{hint}")


def checked_loss(task: Task, loss: Any, *, needs_gradient: bool) -> Tensor:
    """Return a loss, the mean over a micro-batch.

    Raises:
        ModelError: If it is not one floating-point number in a tensor, or has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise refused(task, "loss returned", loss, "the micro-batch's mean loss, a tensor of one floating-point number")
    if needs_gradient and not loss.requires_grad:
        raise refused(task, "loss returned", loss, "one with a gradient, computed from the model's answer")
    return loss


def check_scores(task: Task, scores: Any, samples: int) -> None:
    """Check a batch's scores.

    Raises:
        ModelError: If a metric finds no tensor with one row per sample.
    """
    if not isinstance(scores, Mapping):
        raise refused(task, "score returned", scores, "a dict with a tensor of one number per sample for each metric")
    means = [metric for metric in task.metrics if not metric.is_collected]
    divided = {metric.summed for metric in means if metric.per}
    for key in filter(None, (each for metric in means for each in (metric.summed, metric.per))):
        refuse_missing(task, "score returned", scores, "the metrics need", key)
        value = scores[key]
        is_right = isinstance(value, Tensor) and value.ndim and len(value) == samples
        if not is_right or (task.is_own and key not in divided and value.numel() != samples):
            raise refused(task, f"score[{key!r}] is", value, f"a tensor of {samples} numbers here, one per sample")


def check_metrics(task: Task) -> None:
    """Check the type of the metrics, and the headline of your own class.

    Raises:
        ModelError: If they are not a tuple of metrics, or the headline is not among them.
    """
    if not isinstance(task.metrics, tuple | list) or not all(isinstance(each, Metric) for each in task.metrics or [0]):
        raise refused(task, "metrics is", task.metrics, "a tuple of Metric, the loss first")
    names = [each.name for each in task.metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ModelError(f"{type(task).__name__}.metrics has two of the name {twice[0]!r}; rename one.")
    if task.is_own and "headline" in vars(type(task)):
        refuse_missing(task, "metrics are", (each.name for each in task.metrics), "its headline is", task.headline)


class RefusedBroadcast(TorchFunctionMode):
    """Refuses arithmetic of [N] targets with [N, 1] answers, or the reverse, which torch spreads to [N, N].

    What is computed from targets alone, such as their type, counts as targets. Losses of torch may not spread any two
    such tensors, nor targets to answers with more dimensions.

    Args:
        task: Whose method computes.
        method: The method.
        targets: The batch's targets.
    """

    def __init__(self, task: Task, method: str, targets: Any) -> None:
        super().__init__()
        self._where, self._targets = f"{type(task).__name__}.{method}", [*tensors_in(targets)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and check its operands.

        Raises:
            ModelError: If they are spread.
        """
        pair = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        known = [any(each is target for target in self._targets) for each in pair]
        name = func.__name__.strip("_")
        is_loss, compares = name.endswith("loss"), len({*known}) == 2  # targets may be compared with one another
        if len(pair) == 2 and (compares or is_loss) and _SPREADING.fullmatch(name):
            one, other = sorted(pair, key=lambda each: each.ndim)
            is_column = one.ndim == 1 and other.shape == (len(one), 1)
            is_deeper = is_loss and compares and 0 < one.ndim < other.ndim and len(one) == len(other)
            is_spread = is_column or (is_deeper and other.shape[-1] in (1, one.shape[-1]))
            if is_spread and len(one) > 1 and one.is_floating_point():
                example = ", for example with answer.flatten()" * is_column
                shapes = " and ".join(str(list(each.shape)) for each in pair)
                raise ModelError(
                    f"{self._where}: {func.__name__} of an answer and the targets, of shapes {shapes}, would compare "
                    f"each sample with all {len(one)}; give both one shape{example}."
                )
        found = func(*args, **(kwargs or {}))
        if pair and all(known) and isinstance(found, Tensor):
            self._targets.append(found)
        return found


def check_methods(task: Task) -> None:
    """Refuse methods that other trainers call, and nothing here does.

    Raises:
        ModelError: For the first one that your class has, unless another function of it uses the name.
    """
    own = [vars(each) for each in type(task).__mro__ if vars(each).get("is_own")]
    functions = [each for members in own for each in members.values() if isinstance(each, FunctionType)]
    used = {name for each in functions for name in _names(each.__code__)}
    for name in METHODS:
        if name not in used and any(name in members for members in own):
            raise ModelError(
                f"{type(task).__name__}.{name} is never called: here it is {METHODS[name]}. Move or rename it."
            )


_SPREADING = re.compile("[ir]?(true_?)?(sub|subtract|mul|multiply|div|divide)|kl_div|.*loss")
_OF_LOSS = ("loss", "loss_options", "target_threshold", "label_smoothing", "class_weights")
# Names by which code may read these keys, or hand them on.
_READERS = {"recipe", "train", "_loss", "weights_by_class", "mean_class_weight"}


def unused_by_own_loss(task: Task) -> dict[str, str]:
    """Return the loss's keys of `train` if your class overrides `loss` and none of its functions reads them."""
    own = [each for each in type(task).__mro__ if vars(each).get("is_own")]
    if not any("loss" in vars(each) for each in own):
        return {}
    bases = {"super", *(each.__name__ for each in type(task).__mro__)}
    members = [each for kind in own for each in vars(kind).values()]
    members = [inspect.unwrap(getattr(each, "fget", getattr(each, "func", each))) for each in members]
    functions = dict.fromkeys(each for each in members if isinstance(each, FunctionType))
    for function in (queue := [*functions]):
        names = _names(function.__code__)
        if names & _READERS or ("loss" in names and names & bases):
            return {}
        called = [function.__globals__[name] for name in names & function.__globals__.keys()]
        others = (each for each in called if isinstance(each, FunctionType) and not is_ours(each.__module__))
        more = {each for each in others if "site-packages" not in each.__code__.co_filename} - functions.keys()
        queue += more
        functions |= dict.fromkeys(more)
    return {f"train.{key}": f"{type(task).__name__}.loss is your own, and does not read it" for key in _OF_LOSS}


def _names(code: CodeType) -> set[str]:
    """Return the names that a function's code reads, with those of its arguments and of functions inside."""
    inside = (name for each in code.co_consts if isinstance(each, CodeType) for name in _names(each))
    return {*code.co_names, *code.co_varnames[: code.co_argcount], *inside}


def _failure(owner: object, method: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    at = next((each for each in reversed(frames) if "site-packages" not in each.filename), frames[-1])
    where = f"{Path(at.filename).name}, line {at.lineno}"
    return f"{type(owner).__name__}.{method} failed with {type(error).__name__}: {error} ({where})"


@contextmanager
def naming(task: Task, method: str) -> Iterator[None]:
    """Add a sentence to an error of your own task, which keeps its type and traceback."""
    try:
        yield
    except Exception as error:
        if task.is_own and not isinstance(error, PacelineError):
            error.add_note(_failure(task, method, error))
        raise


@contextmanager
def calling(owner: object, method: str, *, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Report an error of your own code by class, method and line.

    Raises:
        ModelError: For one of ``errors``.
    """
    try:
        yield
    except PacelineError:
        raise
    except errors as error:
        raise ModelError(f"{_failure(owner, method, error)}; correct it.") from error
