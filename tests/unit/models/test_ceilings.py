"""Is each product held against the peak of the numbers that it is really computed in?"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline.host.devices import find_device
from paceline.models.ceilings import Ceilings, ceilings_of, tf32_of
from paceline.models.flops import StepWork, WorkCounter
from paceline.plan import Plan


def _step(network: nn.Module, inputs: torch.Tensor) -> StepWork:
    with WorkCounter(network) as counter:
        network(inputs).sum().backward()
    return counter.work


CONVOLUTION = _step(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 8, 8))
ATTENTION = _step(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(2, 5, 16))


def _plan(precision: str, matmul: str) -> Plan:
    plan = object.__new__(Plan)
    for name, value in {"precision": precision, "float32_matmul": matmul, "fp8_layers": ()}.items():
        object.__setattr__(plan, name, value)
    return plan


@pytest.mark.parametrize(
    ("device", "matmul", "convs", "products"),
    [
        ("a100", "default", "tf32", "fp32"),
        ("a100", "highest", "fp32", "fp32"),
        ("a100", "high", "tf32", "tf32"),
        ("a100", "medium", "tf32", "tf32"),
        ("v100", "default", "fp32", "fp32"),
        ("v100", "high", "fp32", "fp32"),
    ],
)
def test_fp32_is_multiplied_as_the_plan_lets_the_device(device: str, matmul: str, convs: str, products: str) -> None:
    for found, expected in ((CONVOLUTION, convs), (ATTENTION, products)):
        ceilings = ceilings_of(_plan("fp32", matmul), find_device(device), found)
        assert ceilings.precision == expected
        assert ceilings.flops_by_precision(found.model_works) == {expected: found.model_flops}


def test_torch_lets_gpus_do_what_is_assumed_of_its_default() -> None:
    # The two switches behind train.float32_matmul=auto, in a process where nobody has touched them.
    asked = "import torch; print(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split() == ["highest", "True"]
    assert tf32_of("default") == tf32_of("auto") == "convolutions"


def test_a_network_of_both_kinds_has_both_peaks() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10))
    found = _step(network, torch.randn(2, 3, 8, 8))
    ceilings = Ceilings(find_device("a100"), "convolutions")
    linear = 3 * 2 * 2 * 288 * 10
    assert ceilings.flops_by_precision(found.model_works) == {"tf32": found.model_flops - linear, "fp32": linear}
