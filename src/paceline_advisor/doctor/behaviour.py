"""Observe the user's task in one small micro-batch, on the CPU and on a temporary copy.

Calls of the user's code to torch are inspected one by one: values that the host reads, tensors created on the host,
debugging aids, loaders. Reading a value costs nothing on the CPU, but the call is the same as on a GPU. Operations
inside torch's own code are not visible.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import paceline
from paceline.data.batch import Batch, tensors_in
from paceline.distributed.device import restore_affinity
from paceline.host.world import World
from paceline.parsing.units import Duration
from paceline.recipe.schema import Recipe, named_code
from paceline.recipe.training import BatchSection
from paceline.tasks.task import Task, build_task
from paceline.trainer.process_settings import restore_globals
from paceline.trainer.subject import Subject
from paceline_advisor import frozen
from paceline_advisor.apply import QUIET, with_values
from paceline_advisor.doctor.anatomy import Anatomy, observe_network
from paceline_advisor.doctor.findings import CodeLine
from paceline_advisor.prove.runs import without_unneeded

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = tuple(f"{Path(paceline.__file__).parent}{each}" for each in (os.sep, "_"))  # and its siblings, paceline_*
# Its detectors read values from the device, which no user can change.
_vision = find_spec("torchvision")
_TORCHVISION = tuple(f"{each}{os.sep}" for each in (_vision and _vision.submodule_search_locations) or ())

# Most of these have results whose length depends on the values.
_OF_THEIR_OWN_NAME = "is_nonzero nonzero argwhere masked_select unique unique_consecutive bincount"
# Functions that need a value on the host, which waits until the device has computed it.
_READS = {
    "item": ".item()",
    "__bool__": "Python asks whether a tensor is true",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "a tensor as an index",
    "__contains__": "value in tensor",
    "__repr__": "print(tensor)",
    "__format__": "a tensor in a text",
    "__array__": "numpy.asarray(tensor)",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
    **{name: name for name in _OF_THEIR_OWN_NAME.split()},
}


_FROM_PYTHON = ("tensor", "as_tensor", "asarray", "scalar_tensor")
_FACTORY_NAMES = (
    "tensor as_tensor scalar_tensor zeros ones empty full rand randn randint randperm arange range linspace logspace "
    "eye tril_indices triu_indices complex normal from_numpy frombuffer asarray"
)
_FACTORIES = frozenset(_FACTORY_NAMES.split())
_MOVES = ("to", "cpu", "cuda")
_LOCATION_ATTRIBUTE = "_paceline_lies_on"


@dataclass(kw_only=True)
class Calls:
    """Calls of the user's code in one micro-batch, by file, line and kind.

    Attributes:
        reads: Device values that the host read.
        made: Tensors that were created on the host without need, or to be copied to the device.
        debugging: Where each enabled debugging aid was noticed, by its name; None if unknown.
        states: Where each changed torch setting is set; None if unknown.
        has_gradient_in_evaluation: Whether scores have an autograd graph.
    """

    reads: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    made: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    debugging: dict[str, CodeLine | None] = field(default_factory=dict)
    states: dict[str, CodeLine | None] = field(default_factory=dict)
    has_gradient_in_evaluation: bool = False


class CallWatcher(TorchFunctionMode):
    """Records calls while active. They run unchanged, except that requests for a GPU get the CPU.

    Args:
        on_device: Tensors that will be on the device: weights, buffers, the batch.
    """

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls = Calls()
        _set_location(list(on_device), "device")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one call and run it."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            result = func(*args, **kwargs)
            _set_location(result, _input_location(args, kwargs))
            return result
        place = place_of(sys._getframe(1))  # noqa: SLF001  # the caller's, which no other function of Python gives
        debugging = self.calls.debugging
        if "anomaly" not in debugging and torch.is_anomaly_enabled():
            debugging["anomaly"] = place
        if "profiler" not in debugging and torch._C._autograd._profiler_enabled():  # noqa: SLF001  # there is no other way to ask
            debugging["profiler"] = place
        location = _input_location(args, kwargs)
        if place is not None:
            if location == "device" and (kind := _host_read(name, args, kwargs)):
                self.calls.reads[place.file, place.line, kind] += 1
            if kind := _host_creation(name, args, kwargs, location):
                self.calls.made[place.file, place.line, kind] += 1
        if name == "cuda" and isinstance(args[0], Tensor):
            result = args[0]
        else:
            result = func(*map(_without_gpu, args), **{key: _without_gpu(each) for key, each in kwargs.items()})
        if name in _MOVES and args and result is args[0]:
            result = result.view_as(result)  # on a GPU it would be another tensor
        _set_location(result, _result_location(name, args, kwargs, location))
        return result


def place_of(frame: FrameType | None) -> CodeLine | None:
    """Return the line outside torch that a call came from; None if that is in Paceline or torchvision."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith((*OURS, *_TORCHVISION)):
        return None
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _host_read(name: str, args: Any, kwargs: Any) -> str:
    """Describe what a call reads from its tensors; empty for nothing."""
    if name in _READS:
        return _READS[name]
    if name == "to" and _is_to_host(args, kwargs):
        return '.to("cpu")'
    if name == "where" and len(args) + len(kwargs) == 1:
        return "torch.where of a condition alone"
    if name == "one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        return "one_hot without num_classes"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        counts = args[1] if len(args) > 1 else kwargs.get("repeats")
        return "repeat_interleave without output_size" if isinstance(counts, Tensor) else ""
    if name == "__getitem__" and _has_mask(args[1]):
        return "a mask as an index"
    if name == "__setitem__" and _has_mask(args[1]) and isinstance(args[2], Tensor) and args[2].numel() > 1:
        return "a mask as an index"
    return ""


def _host_creation(name: str, args: Any, kwargs: Any, location: str) -> str:
    """Describe what a call creates on the host without need, or to be copied to the device; empty for nothing."""
    if (
        name in ("to", "cuda")
        and location == "host"
        and not _is_to_host(args, kwargs)
        and _may_move(name, args, kwargs)
    ):
        return f"a tensor of the host copied by .{name}()"
    if name == "where" and location == "device" and any(_location(each) == "host" for each in _tensors(args)):
        return "a number of the host copied by torch.where"
    if name in _FACTORIES and location == "":
        requested = kwargs.get("device")
        if name in _FROM_PYTHON and requested is not None and not _means_host(requested):
            return f"torch.{name} of Python's values, copied to the device"
        if requested is None and not _is_scalar(name, args):
            return f"torch.{name} without device="
    return ""


def _has_mask(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _is_scalar(name: str, args: Any) -> bool:
    """Whether a tensor is created from a single number, which is passed with a kernel's arguments."""
    return name in _FROM_PYTHON and len(args) > 0 and isinstance(args[0], bool | int | float)


def _is_to_host(args: Any, kwargs: Any) -> bool:
    return any(_means_host(each) for each in (*args[1:], kwargs.get("device")))


def _means_host(device: Any) -> bool:
    """Whether a device is named as the host. A ``torch.device`` may be the run's, which is the CPU here: False."""
    return isinstance(device, str) and device == "cpu"


def _may_move(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call may change the device, not just the dtype."""
    values = (*args[1:], *kwargs.values())
    return name == "cuda" or any(isinstance(each, str | torch.device | Tensor) for each in values)


def _without_gpu(value: Any) -> Any:
    """Return the same arguments, with the CPU in place of a GPU: this inspection runs on the CPU."""
    is_gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] in ("cuda", "xpu", "mps")
    return "cpu" if is_gpu else value


def _input_location(args: Any, kwargs: Any) -> str:
    """Return where a call's tensors are: ``device`` if one is there, else ``made`` or ``host``; empty without tensors.

    Tensors ``made`` on the host were already recorded when they were created.
    """
    locations = [_location(each) for each in _tensors((args, tuple(kwargs.values())))]
    return next((place for place in ("device", "made", "host") if place in locations), "")


def _result_location(name: str, args: Any, kwargs: Any, location: str) -> str:
    if name in ("cpu", "numpy", "tolist") or (name == "to" and _is_to_host(args, kwargs)):
        return "host"
    if name == "cuda" or (name == "to" and _may_move(name, args, kwargs)):
        return "device"
    if location == "" and name in _FACTORIES:
        requested = kwargs.get("device")
        if requested is None and not _is_scalar(name, args):
            return "made"
        return "host" if requested is None or _means_host(requested) else "device"
    return location or "device"


def _location(tensor: Tensor) -> str:
    # Unknown tensors came from C++ code with a gradient, or from numpy without one.
    return getattr(tensor, _LOCATION_ATTRIBUTE, "device" if tensor.requires_grad else "host")


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)


def _set_location(value: Any, location: str) -> None:
    for each in _tensors(value):
        setattr(each, _LOCATION_ATTRIBUTE, location)  # an attribute in Python, which stays with the tensor


def own_files(recipe: Recipe, task: Task, network: nn.Module) -> list[str]:
    """Return the files of the user's code: those that the recipe names, and those of its task and network."""
    modules = {reference.partition(":")[0] for reference in named_code(recipe)}
    kinds = [*type(task).__mro__, *(type(each) for each in network.modules())]
    modules |= {kind.__module__ for kind in kinds}
    files = {getattr(sys.modules.get(name), "__file__", None) or "" for name in modules}
    return sorted(
        file for file in files if file and not file.startswith((*OURS, TORCH)) and "site-packages" not in file
    )


def find_line(files: Iterable[str], pattern: str) -> CodeLine | None:
    """Return the first line whose code, without its comment, matches a regular expression; None if no line does."""
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), start=1):
                if re.search(pattern, line.partition("#")[0]):
                    return CodeLine(file, number, line.strip())
    return None


@frozen
class Loader:
    """A DataLoader created by the user's code.

    Attributes:
        place: Where it was created.
        workers: Number of its worker processes.
        pinned: Whether its batches are in page-locked memory.
        persistent: Whether its workers persist from one epoch to the next.
        drops_last: Whether it drops the last incomplete batch.
    """

    place: CodeLine
    workers: int
    pinned: bool
    persistent: bool
    drops_last: bool


@contextmanager
def watching_loaders() -> Iterator[list[Loader]]:
    """Record every DataLoader created inside, except those of Paceline and torchvision."""
    found: list[Loader] = []
    made = DataLoader.__init__

    @wraps(made)
    def noting(self: DataLoader[Any], *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        place = place_of(sys._getframe(1))  # noqa: SLF001  # the caller's, which no other function of Python gives
        if place is not None:
            found.append(
                Loader(
                    place=CodeLine(place.file, place.line, "DataLoader"),
                    workers=self.num_workers,
                    pinned=self.pin_memory,
                    persistent=self.persistent_workers,
                    drops_last=self.drop_last,
                )
            )

    DataLoader.__init__ = noting  # type: ignore[method-assign]  # put back below
    try:
        yield found
    finally:
        DataLoader.__init__ = made  # type: ignore[method-assign]  # as it was


@contextlib.contextmanager
def preserved_state() -> Iterator[None]:
    """Restore, at the end, all process state that examining a task may change.

    Inside, cuDNN has the settings of a run on a GPU, so that changes by custom code are detected.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # for code that is only inspected
        stack.enter_context(restore_globals())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(restore_affinity())
        cudnn.benchmark, cudnn.enabled, cudnn.deterministic = True, True, False
        yield


# BatchNorm needs more than one; odd, so that the batch size differs from the network's sizes.
_SAMPLES = 3
# Pixels of pictures with objects: the behaviour of code does not depend on the image size, and a full step of a large
# detector takes minutes on a CPU.
_SHORT_SIDE, _LONG_SIDE = 128, 256
_AUTOTUNE = {"cudnn.benchmark": False, "cudnn.enabled": False, "cudnn.deterministic": True}


def behave(recipe: Recipe, *, channels_last: bool) -> tuple[Anatomy, Calls]:
    """Send a few samples of the recipe's data through its task, forward and backward, and record the calls.

    Call this within :func:`~paceline_advisor.doctor.behaviour.preserved_state`.

    Raises:
        PacelineError: If the recipe cannot be run.
        Exception: Whatever the user's code raises.
    """
    task = build_task(small(recipe, channels_last=channels_last))
    if task.has_known_shapes:
        # Paceline's own loader processes need no inspection; the user's do.
        workers = 0 if recipe.data.backend in ("auto", "pytorch") else "auto"
        task = build_task(with_values(task.recipe, {"data.workers": workers}))
    with Subject.open(task.recipe, World(), "network", task=task) as subject:
        stream = subject.pipeline.train_batches(subject.geometry, 0, 1, World())
        return _observe(subject, next(iter(stream)))


def small(recipe: Recipe, *, channels_last: bool) -> Recipe:
    """Return the recipe for one small micro-batch on the CPU."""
    left = without_unneeded(recipe)
    values = {
        **QUIET,
        "model.channels_last": channels_last,
        "model.activation_checkpointing": None,
        "batch": BatchSection(global_size=_SAMPLES),
        "train.duration": Duration(1, "steps"),
        "train.ema": None,
        "evaluate.every": None,
        "parallel.exact": False,
        "parallel.logical_ranks": "auto",
        "parallel.unused_parameters": "allow",
    }
    detection = left.data.detection
    if detection.short_sides is not None:
        sides = tuple(sorted({min(each, _SHORT_SIDE) for each in detection.short_sides}))
        long_side = min(detection.long_side, _LONG_SIDE)
        values |= {"data.detection.short_sides": sides, "data.detection.long_side": long_side}
    return with_values(left, values)


def _observe(subject: Subject, batch: Batch) -> tuple[Anatomy, Calls]:
    network, task = subject.network.train(), subject.task
    watcher = CallWatcher([*network.parameters(), *network.buffers(), *tensors_in(batch.inputs, batch.targets)])

    def step() -> None:
        with watcher:
            # Not loss.backward(): inside an observed call, gradient code would not be visible.
            torch.autograd.backward([task.loss(network, batch)])

    with watcher:
        task.loss(network, batch)
    watcher.calls = Calls()  # only the second pass counts: creating something once and keeping it is fine
    anatomy = observe_network(network, batch, step)
    network.zero_grad(set_to_none=True)
    calls, files = watcher.calls, own_files(subject.recipe, task, network)
    calls.has_gradient_in_evaluation = _scores_with_gradient(task, network, batch)
    if torch.is_anomaly_enabled():
        calls.debugging.setdefault("anomaly", None)
    if "anomaly" in calls.debugging:
        place = find_line(files, r"\bdetect_anomaly\(|\bset_detect_anomaly\(")
        calls.debugging["anomaly"] = place or calls.debugging["anomaly"]
    # cuDNN settings that differ from those set by `preserved_state`.
    calls.states = {
        f"torch.backends.{name}={value}": find_line(files, rf"\b{name}\s*=[^=]")
        for name, value in _AUTOTUNE.items()
        if getattr(cudnn, name.partition(".")[2]) is value
    }
    return anatomy, calls


@torch.no_grad()
def _scores_with_gradient(task: Task, network: nn.Module, batch: Batch) -> bool:
    """Whether a task's scores have gradients although the trainer disables them."""
    network.eval()
    try:
        scores = task.score(task.evaluated(network), batch)
    except Exception:  # noqa: BLE001  # not every task can score a training batch, whose targets may be mixed
        return False
    finally:
        network.train()
    return any(each.requires_grad for each in tensors_in(scores))
