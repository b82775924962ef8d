"""Load the object that `package.module:name` names, a user's own or an installed package's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, did_you_mean

# Their models are named like references, `torchvision:resnet18`, and are no code of one's own.
_LIBRARIES = ("torchvision", "transformers")
_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


@contextmanager
def trusting_code() -> Iterator[None]:
    """Accept the code that stored recipes name: the user gave ``--trust-code``, or trains the recipe."""
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


def call_reference(key: str, reference: str, made: Any, error: type[PacelineError], *arguments: Any) -> Any:
    """Call an object that a recipe names; errors from its own code pass through.

    Args:
        key: The recipe's key, for the message.
        reference: What it names.
        made: The object that the reference stands for.
        error: The class of errors.
        arguments: What it is called with.

    Raises:
        PacelineError: As ``error``, if the object cannot be called with these arguments: it is of another kind.
    """
    try:
        return made(*arguments)
    except TypeError as wrong:
        if wrong.__traceback__ is not None and wrong.__traceback__.tb_next is not None:
            raise  # within the code that was called
        given = ", ".join(type(each).__name__ for each in arguments)
        raise error(f"{key}={reference} cannot be called with ({given}): {wrong}. Name a factory for {key}.") from None


def load_reference(reference: str, error: type[PacelineError], *, installed: bool = False) -> Any:
    """Import and return the object that a reference stands for.

    Args:
        reference: ``package.module:name``.
        error: The class of errors.
        installed: Whether a package registers it; a user's own may lie in the current directory too, which is searched
            after the installed libraries.

    Raises:
        PacelineError: As ``error``, if the module or the attribute does not exist.
    """
    module_name, _, attribute = reference.partition(":")
    here = str(Path.cwd())
    if not installed and here not in sys.path:
        sys.path.append(here)  # after the libraries, which a file of the same name must not replace
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            raise
        where = "be importable" if installed else f"be importable or be in {here}"
        raise error(f"'{reference}': there is no module '{missing.name}'; it must {where}.") from None
    if not hasattr(module, attribute):
        hidden = Path(here, *module_name.split(".")).with_suffix(".py")
        if hidden.is_file() and not hidden.samefile(getattr(module, "__file__", None) or sys.executable):
            raise error(
                f"'{reference}': another module '{module_name}' hides {hidden}; rename that file, and give its "
                "new name."
            )
        raise error(
            f"'{reference}': module '{module_name}' has no '{attribute}'.{did_you_mean(attribute, dir(module))}"
        )
    return getattr(module, attribute)
