"""On a GPU of the table, the records say which share of its peak a run reaches, and the weights are as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.host.devices import recognise
from paceline.models.flops import WorkCounter
from paceline.trainer import utilisation

ON_GPU = {"parallel.device": "cuda", "telemetry.log_every": "1 steps", "train.precision": "bf16"}


@pytest.fixture
def device() -> Any:
    found = recognise(torch.cuda.get_device_name())
    if found is None or found.peak("bf16") is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the table of devices, or has no bf16")
    return found


def test_records_have_it(device: Any, train_tiny: Callable[..., Any], events: Callable[..., Any]) -> None:
    result = train_tiny("gpu", ON_GPU)
    (said,) = (each for each in events(result.run_dir, "measurement") if each["what"] == "flops")
    assert said["peak_flops_per_second"] == device.peak("bf16")
    assert all(0 < each["mfu"] < 1 for each in events(result.run_dir, "step") if each["mfu"] is not None)
    assert 0 < result.summary.mfu < 1


def test_it_moves_no_weight(device: Any, train_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {**ON_GPU, "train.deterministic": True}
    with_it = train_tiny("with", fixed)
    monkeypatch.setattr(utilisation, "recognise", lambda _: None)
    assert train_tiny("without", fixed).summary.weights_sha256 == with_it.summary.weights_sha256


def test_a_real_step_counts_as_a_fake_one_does() -> None:
    """cuDNN's and flash attention's operators are known here too."""
    import timm

    for name in ("resnet18", "vit_tiny_patch16_224"):
        found = []
        for where in ("cuda", "meta"):
            with torch.device(where):
                network, images = timm.create_model(name), torch.zeros(2, 3, 224, 224)
            with WorkCounter(network) as counter:
                network(images).sum().backward()
            found.append(counter.work)
        assert found[0].uncounted == ()
        assert found[0].model_flops == found[1].model_flops
