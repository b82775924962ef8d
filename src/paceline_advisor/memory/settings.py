"""How is PyTorch's allocator set, by the variable that PyTorch reads too?"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import RecipeError
from paceline_advisor.formulas.caching_allocator import INTERVALS, MIB, Settings

# The second is the older name; PyTorch takes the first if both are there.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# They move what is on the host, or when a call returns, and no block on a device.
_OF_THE_HOST = ("pinned_", "release_lock_on_")
_LIST = re.compile(r"([\w.-]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*(?:,|$)")


def allocator_settings(variables: Mapping[str, str], *, expandable: bool = False) -> tuple[Settings, tuple[str, ...]]:
    """The allocator's settings, and a sentence for each that is asked for and not followed.

    Args:
        variables: The environment.
        expandable: Whether expandable segments are asked for otherwise too.

    Raises:
        RecipeError: If a value is none that PyTorch takes.
    """
    name = next((each for each in VARIABLES if variables.get(each)), VARIABLES[0])
    found: dict[str, str] = _read(name, variables.get(name, ""))
    notices = tuple(_notices(name, found))
    return (
        Settings(
            expandable=expandable or found.get("expandable_segments", "").lower() == "true",
            max_split=None if "max_split_size_mb" not in found else MIB * _number(name, found, "max_split_size_mb"),
            divisions=_divisions(name, found),
        ),
        notices,
    )


def _read(name: str, text: str) -> dict[str, str]:
    text = text.strip()
    found, place = {}, 0
    while place < len(text):
        matched = _LIST.match(text, place)
        if matched is None:
            raise RecipeError(
                f"{name}={text}: PyTorch reads it as key:value,key:value, and '{text[place:]}' is no such."
            )
        found[matched[1]] = matched[2].strip()
        place = matched.end()
        while place < len(text) and text[place] == " ":
            place += 1
    return found


def _number(name: str, found: Mapping[str, str], key: str) -> int:
    if not found[key].isdigit():
        raise RecipeError(f"{name}: {key}:{found[key]} is no whole number; PyTorch takes no other.")
    return int(found[key])


def _divisions(name: str, found: Mapping[str, str]) -> tuple[int, ...]:
    """``roundup_power2_divisions``: one number, or a list of MiB and numbers, where > is all that is larger."""
    key = "roundup_power2_divisions"
    if key not in found:
        return ()
    if not found[key].startswith("["):
        return (_power(name, _number(name, found, key)),) * INTERVALS
    divisions, last = [0] * INTERVALS, -1
    for part in found[key].strip("[]").split(","):
        bound, _, value = (each.strip() for each in part.partition(":"))
        if not value.isdigit() or not (bound == ">" or bound.isdigit()):
            raise RecipeError(f"{name}: {key}:{found[key]} is no list such as [256:1,512:2,>:4].")
        number = _power(name, int(value))
        if bound == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
            continue
        index = min(max(int(bound).bit_length() - 1, 0), INTERVALS - 1)
        if last < 0:
            divisions[:index] = [number] * index
        divisions[index], last = number, index
    return tuple(divisions)


def _power(name: str, number: int) -> int:
    if number & (number - 1):
        raise RecipeError(f"{name}: roundup_power2_divisions takes powers of two, and {number} is none.")
    return number


def _notices(name: str, found: Mapping[str, str]) -> list[str]:
    said = []
    for key, value in found.items():
        if key == "garbage_collection_threshold":
            said.append(
                f"{name}: {key}:{value} gives back what is unused a little earlier than the estimate has it; what fits "
                "stays the same"
            )
        elif key == "backend" and value != "native":
            said.append(f"{name}: backend:{value} is another allocator; the estimate is that of PyTorch's own")
        elif key not in ("expandable_segments", "max_split_size_mb", "roundup_power2_divisions", "backend") and not (
            key.startswith(_OF_THE_HOST)
        ):
            said.append(f"{name}: {key}:{value} is not in the estimate")
    return said
