"""Load the object that `package.module:name` refers to, in custom code or an installed package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, did_you_mean
from paceline.plugins.extras import extra_of

# Their models are named like references, `torchvision:resnet18`, but are not custom code.
_LIBRARIES = ("torchvision", "transformers")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting_code() -> Iterator[None]:
    """Allow code named by stored recipes: the user gave ``--trust-code``, or trains the recipe."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_code_trusted() -> bool:
    """Whether this is inside :func:`trusting_code`."""
    return _trusted.get()


def is_reference(name: str) -> bool:
    """True for ``package.module:attribute``, false for a registered name such as ``torchvision:resnet18``."""
    module, colon, attribute = name.partition(":")
    if module in _LIBRARIES:
        return False
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def is_ours(module: str) -> bool:
    """Whether a module or reference is Paceline's: its top package is ``paceline``, or begins with ``paceline_``."""
    return f"{module.partition(':')[0]}.".startswith(("paceline.", "paceline_"))


def is_same_class(first: str, second: str) -> bool:
    """Whether two references name one class; one of Paceline's own keeps its name when it moves."""
    return first == second or (is_ours(first) and is_ours(second) and first.split(":")[1:] == second.split(":")[1:])


def call_reference(key: str, reference: str, target: Any, error: type[PacelineError], *arguments: Any) -> Any:
    """Call an object that a recipe names; errors from its own code pass through.

    Args:
        key: The recipe's key, for the message.
        reference: The reference it contains.
        target: The object that it refers to.
        error: The class of errors.
        arguments: The arguments of the call.

    Raises:
        PacelineError: As ``error``, if the object cannot be called with these arguments: it is of the wrong kind.
    """
    try:
        return target(*arguments)
    except TypeError as mismatch:
        if mismatch.__traceback__ is not None and mismatch.__traceback__.tb_next is not None:
            raise  # inside the called code
        types = ", ".join(type(each).__name__ for each in arguments)
        raise error(
            f"{key}={reference} cannot be called with ({types}): {mismatch}. Name a factory for {key}."
        ) from None


def load_reference(reference: str, error: type[PacelineError], *, installed: bool = False) -> Any:
    """Import and return the object of a reference.

    Args:
        reference: ``package.module:name``.
        error: The class of errors.
        installed: Whether an installed package registers it; custom code may also be in the current directory, which is
            searched after the installed libraries.

    Raises:
        PacelineError: As ``error``, if the module or the attribute does not exist.
    """
    module_name, _, attribute = reference.partition(":")
    current_dir = str(Path.cwd())
    if not installed and current_dir not in sys.path:
        sys.path.append(current_dir)  # after the libraries, which a file of the same name must not shadow
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}.") or extra_of(missing.name):
            raise
        condition = "be importable" if installed else f"be importable or be in {current_dir}"
        raise error(f"'{reference}': there is no module '{missing.name}'; it must {condition}.") from None
    if not hasattr(module, attribute):
        hidden = Path(current_dir, *module_name.split(".")).with_suffix(".py")
        if hidden.is_file() and not hidden.samefile(getattr(module, "__file__", None) or sys.executable):
            raise error(
                f"'{reference}': another module '{module_name}' hides {hidden}; rename that file, and give its "
                "new name."
            )
        raise error(
            f"'{reference}': module '{module_name}' has no '{attribute}'.{did_you_mean(attribute, dir(module))}"
        )
    return getattr(module, attribute)
