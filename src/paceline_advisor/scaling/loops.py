"""What does a training loop ask of its host? Ours, and the published one whose throughput tables can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from paceline.clusters import Cluster
from paceline_advisor.formulas.parallel_step import HOST_SECONDS, OWN_HOST_SECONDS, Host


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop beside its devices.

    Attributes:
        name: What it is asked for by.
        waits: How often in a step its host waits for the device, by precision: in fp32 and TF32, bf16, fp16.
        seconds_per_sample: Time of one core for reading and varying an image, all cores at work.
        seconds_per_tensor: What wrapping a network in DDP adds to the host's work for each parameter tensor.
        loaders_per_device: Loader processes of each device, by cluster; others take as many as there are cores.
        source: Where this stands.
    """

    name: str
    waits: Mapping[str, int]
    seconds_per_sample: float
    seconds_per_tensor: float = HOST_SECONDS
    loaders_per_device: Mapping[str, int] = field(default_factory=dict)
    source: str

    def host(self, cluster: Cluster, precision: str, *, decodes: bool, seconds_per_sample: float | None) -> Host:
        """Its host on a cluster.

        Args:
            cluster: Where it runs.
            precision: In which numbers.
            decodes: Whether samples are decoded as they are needed.
            seconds_per_sample: What the user says it takes, if anything.
        """
        usual = self.seconds_per_sample if decodes else 0.0
        return Host(
            # Where processes compute on the cores, the host is the device: it does everything itself.
            waits=1 if cluster.shares_cores else self.waits[precision],
            seconds_per_tensor=self.seconds_per_tensor,
            seconds_per_sample=usual if seconds_per_sample is None else seconds_per_sample,
            loaders_per_device=self.loaders_per_device.get(cluster.name),
            cores_per_device=cluster.cores_per_device,
            shares_cores=cluster.shares_cores,
        )


LoopName = Literal["paceline", "nvidia-convnets"]
LOOPS: Mapping[str, Loop] = MappingProxyType(
    {
        "paceline": Loop(
            name="paceline",
            waits={"fp32": 0, "bf16": 0, "fp8": 0, "fp16": 1},
            seconds_per_sample=1.37e-3,
            seconds_per_tensor=OWN_HOST_SECONDS,
            source="the loop waits for fp16's overflow check only; benchmarks/results/input-pipeline-folder, ddp-host",
        ),
        # Two waits: the step's own synchronize, and in mixed precision the gradient scaler's check. Images by
        # torchvision and Pillow, as long as they take in our benchmark.
        "nvidia-convnets": Loop(
            name="nvidia-convnets",
            waits={"fp32": 1, "bf16": 2, "fp8": 2, "fp16": 2},
            seconds_per_sample=2.65e-3,
            loaders_per_device={"dgx-1": 8, "dgx-1-32gb": 8, "dgx-2": 8, "dgx-a100": 10, "dgx-a100-40gb": 10},
            source="NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: image_classification/training.py, "
            "configs.yml; benchmarks/results/input-pipeline-folder",
        ),
    }
)
