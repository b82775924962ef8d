"""On a GPU the clock reads the device's time, not the host's."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.telemetry.clock import build_step_clock, peak_memory_bytes


def busy(matrix: torch.Tensor, times: int) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


def test_device_work_is_measured_where_the_host_returns_at_once() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")
    busy(matrix, 20)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    busy(matrix, 50)
    torch.cuda.synchronize()
    expected = time.perf_counter() - begun

    clock = build_step_clock("cuda", warmup_steps=0)
    clock.start()
    for _ in range(4):
        with clock.span("forward"):
            busy(matrix, 50)
        with clock.span("data_wait"):
            pass  # the host is far ahead of the device: nothing stands still
        clock.end_step(samples=8)
    timings = clock.drain()
    assert timings["forward_seconds"] == pytest.approx(expected, rel=0.2)
    assert timings["step_seconds"] == pytest.approx(expected, rel=0.2)
    assert timings["data_wait_fraction"] == pytest.approx(0, abs=0.01)


def test_a_host_that_waits_for_data_makes_the_device_stand_still() -> None:
    clock = build_step_clock("cuda", warmup_steps=0)
    clock.start()
    for _ in range(4):
        with clock.span("data_wait"):
            time.sleep(0.02)
        clock.end_step(samples=8)
        with clock.paused():
            time.sleep(0.02)
    timings = clock.drain()
    assert timings["data_wait_seconds"] == pytest.approx(0.02, rel=0.1)
    assert timings["step_seconds"] == pytest.approx(0.02, rel=0.1)


def test_peak_memory_is_the_allocator_s() -> None:
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    peak = peak_memory_bytes("cuda")
    assert peak is not None
    assert torch.cuda.max_memory_reserved() >= peak >= block.numel()
