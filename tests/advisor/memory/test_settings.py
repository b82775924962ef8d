"""What PYTORCH_ALLOC_CONF says of the allocator, and what of it is not followed."""

from __future__ import annotations

import pytest

from paceline.errors import RecipeError
from paceline_advisor.memory.allocator import MIB, AllocatorSettings
from paceline_advisor.memory.job import allocator_settings


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable=True)),
        ("max_split_size_mb:128, expandable_segments:False", AllocatorSettings(max_split=128 * MIB)),
        ("roundup_power2_divisions:4", AllocatorSettings(divisions=(4,) * 16)),
        (
            "roundup_power2_divisions:[1:8,4:2,>:1],max_split_size_mb:64",
            AllocatorSettings(max_split=64 * MIB, divisions=(8, 0, 2, *[1] * 13)),
        ),
        ("pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:True,backend:native", AllocatorSettings()),
    ],
)
def test_settings_are_read_as_pytorch_reads_them(text: str, found: AllocatorSettings) -> None:
    assert allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": text}) == (found, ())
    assert allocator_settings({"PYTORCH_ALLOC_CONF": text}) == (found, ())


def test_the_newer_name_is_heard_and_the_option_too() -> None:
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:32", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_settings(both, expandable=True)[0] == AllocatorSettings(expandable=True, max_split=32 * MIB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.8 frees unused memory slightly"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is another allocator"),
        ("per_process_memory_fraction:0.5", "per_process_memory_fraction:0.5 is not in the estimate"),
    ],
)
def test_what_is_not_followed_is_said_by_its_name(text: str, message: str) -> None:
    _, notices = allocator_settings({"PYTORCH_ALLOC_CONF": text})
    assert len(notices) == 1
    assert notices[0].startswith(f"PYTORCH_ALLOC_CONF: {message}")


@pytest.mark.parametrize(
    "text",
    ["max_split_size_mb", "max_split_size_mb:many", "roundup_power2_divisions:3", "roundup_power2_divisions:[1]"],
)
def test_what_pytorch_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="PYTORCH_ALLOC_CONF"):
        allocator_settings({"PYTORCH_ALLOC_CONF": text})
