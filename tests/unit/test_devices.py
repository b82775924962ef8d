"""Does the table of devices say what their makers do?"""

import pytest

from paceline.errors import RecipeError
from paceline.host.devices import DEVICES, find_device, recognise


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_a_device_is_known_by_what_its_driver_calls_it(reported: str, name: str) -> None:
    assert getattr(recognise(reported), "name", None) == name


@pytest.mark.parametrize(
    "reported", ["NVIDIA L40S", "NVIDIA GeForce RTX 3080", "NVIDIA H100 NVL", "NVIDIA A100-PCIE-40GB"]
)
def test_others_are_not_taken_for_them(reported: str) -> None:
    assert recognise(reported) is None


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(RecipeError, match=r"'a101' is not known\. Did you mean 'a100'"):
        find_device("a101")


def test_matrix_units_are_as_fast_as_their_clock_and_number() -> None:
    # Multiprocessors x GHz x fused multiply-adds per clock (fp16, dense), from the architectures' white papers.
    for name, gigahertz, per_clock in (("v100-16gb", 1.53, 512), ("a100-80gb", 1.41, 1024), ("h100", 1.83, 2048)):
        device = find_device(name)
        peak = device.multiprocessors * gigahertz * 1e9 * per_clock * 2
        assert device.peak("fp16") == pytest.approx(peak, rel=0.01)


def test_a_peak_halves_with_twice_the_bits() -> None:
    for device in DEVICES.values():
        peaks = device.flops_per_second
        if "fp8" in peaks:
            assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.01)
        assert "bf16" not in peaks or peaks["bf16"] == peaks["fp16"]
