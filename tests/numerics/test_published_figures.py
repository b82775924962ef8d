"""Do our formulas give what was published? Each with its input as printed, its tolerance and its source."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.metrics.critical_batch import examples_ratio, steps_ratio
from paceline_advisor.formulas.catalogue import published
from paceline_advisor.formulas.network import tile_count, wave_count, zero_bytes

# The formulas of the tables, by name.
rule = SimpleNamespace(**{each.name: each.function for each in published()})

# A longer list of the same kind, in JSON, may be named here: then none of its identifiers may be missing below.
LIST = os.environ.get("PACELINE_PUBLISHED_FIGURES", "")

DLE = "NVIDIA/DeepLearningExamples@729963d: "
CONVNETS = DLE + "PyTorch/Classification/ConvNets/"
RESNET50 = CONVNETS + "resnet50v1.5/README.md"
DLRM = DLE + "PyTorch/Recommendation/DLRM/README.md"
TITAN = "pytorch/torchtitan@b5bcd76: benchmarks/llama3_h100_202412_torchtitan.md"
BACKGROUND = "NVIDIA, GPU Performance Background User's Guide"
MATMUL = "NVIDIA, Matrix Multiplication Background User's Guide"
ZERO = "Rajbhandari et al., arXiv:1910.02054, figure 1"
MCCANDLISH = "McCandlish et al., arXiv:1812.06162, appendix D"
HESTNESS = "Hestness et al., arXiv:1712.00409"
GOYAL = "Goyal et al., arXiv:1706.02677"
FFCV = "libffcv/ffcv-imagenet@4dd291a: README.md, assets/agg.csv"
AIRBENCH = "KellerJordan/cifar10-airbench@f1c599c"
DAWNBENCH = "stanford-futuredata/dawn-bench-entries@fb27b82: fastai_resnet50_p3_16_machine_pytorch"
MLPERF4 = "mlcommons/training_results_v4.0@6fe9543: NVIDIA, h200_ngc24.04_mxnet"
MOSAIC = "mlcommons/training_results_v2.0@8437fbb: MosaicML; mosaicml.com/blog/mlperf-2022"

REFERENCE_EPOCHS = (36, 35, 34, 34, 36, 35, 35, 35, 35, 37, 35, 35, 35, 36, 35)
LLAMA3 = rule.flops_per_token(8_030_261_248, 32, 32, 128, 8192, embedding_parameters=525_336_576)
FFCV_TIMES = {"first_seconds": 26.6, "epoch_seconds": (49.05, 65.1), "switch_seconds": 13.6, "final_seconds": 3.4}


@dataclass(frozen=True)
class Figure:
    """``within`` is relative, and 0 means the very same."""

    name: str
    ours: float
    published: float
    within: float
    source: str


FIGURES = (
    Figure("dle-rn50-a100-amp-scale", rule.speedup(16621, 2470), 6.72, 0.01, RESNET50),
    Figure("dle-rn50-a100-tf32-scale", rule.speedup(7248, 938), 7.72, 0.01, RESNET50),
    Figure("dle-rn50-a100-amp-speedup1", rule.speedup(2470, 938), 2.63, 0.01, RESNET50),
    Figure("dle-rn50-a100-amp-speedup8", rule.speedup(16621, 7248), 2.29, 0.01, RESNET50),
    Figure("dle-rn50-v100-amp-scale", rule.speedup(8322, 1200), 6.93, 0.01, RESNET50),
    Figure("dle-rnxt-a100-amp-scale", rule.speedup(7925, 1211), 6.54, 0.01, CONVNETS + "resnext101-32x4d/README.md"),
    Figure(
        "dle-sernxt-a100-amp-scale", rule.speedup(5779, 855), 6.75, 0.01, CONVNETS + "se-resnext101-32x4d/README.md"
    ),
    Figure("dle-dlrm-ttt", rule.time_speedup(387, 276), 1.40217, 1e-4, DLRM),
    Figure("dle-dlrm-ttt-v100", rule.time_speedup(7090, 2297), 3.08663, 1e-4, DLRM),
    Figure(
        "titan-asynctp", rule.speedup(942.4, 809.8), 1.16, 0.01, "torchtitan: asyncTP_llama3_h100_2025-06_torchtitan.md"
    ),
    Figure("titan-mfu-eager", rule.mfu(5762, LLAMA3, 989e12), 0.33, 0.03, TITAN),
    Figure("titan-mfu-compile", rule.mfu(6667, LLAMA3, 989e12), 0.39, 0.03, TITAN),
    Figure("a100-peak-fp16", rule.peak_flops_per_second(108, 1.41, 1024) / 1e12, 312, 0.005, BACKGROUND),
    Figure("a100-peak-tf32", rule.peak_flops_per_second(108, 1.41, 512) / 1e12, 156, 0.005, BACKGROUND),
    Figure("ai-linear-512", rule.gemm_intensity(4096, 512, 1024), 315, 0.002, BACKGROUND),
    Figure("ai-linear-1", rule.gemm_intensity(4096, 1, 1024), 1, 0.01, BACKGROUND),
    Figure("ai-relu", rule.elementwise_intensity(), 0.25, 1e-9, BACKGROUND),
    Figure("ai-gemm-8192", rule.gemm_intensity(8192, 8192, 8192), 2730, 0.001, MATMUL),
    Figure("tiles-256", tile_count(256, 256, 128, 128), 4, 0, MATMUL),
    Figure("tiles-1792", tile_count(1792, 1792, 256, 128), 98, 0, MATMUL),
    Figure("waves-1792", wave_count(98, 108), 1, 0, MATMUL),
    Figure("zero-0", zero_bytes(7.5e9, 0, 64) / 1e9, 120, 0.001, ZERO),
    Figure("zero-1", zero_bytes(7.5e9, 1, 64) / 1e9, 31.4, 0.002, ZERO),
    Figure("adam16-70b", rule.adam_mixed_precision_bytes(70e9) / 1e12, 1.12, 0.001, ZERO),
    Figure("kort-selective-save", rule.selective_recompute_saving(96, 2048, 12288), 0.7, 0.01, "arXiv:2205.05198"),
    Figure("mcc-S-250", steps_ratio(1000, 250), 5, 0, MCCANDLISH),
    Figure("mcc-E-250", examples_ratio(1000, 250), 1.25, 0, MCCANDLISH),
    Figure("mcc-hyperbola", rule.hyperbola(steps_ratio(1000, 250), examples_ratio(1000, 250)), 1, 1e-12, MCCANDLISH),
    Figure("mcc-adaptive-svhn", rule.adaptive_gain_of_power(0.5), 0.96, 1e-12, MCCANDLISH),
    Figure("hestness-07", rule.error_reduction(0.07), 0.149, 0.005, HESTNESS),
    Figure("hestness-07-halve", rule.data_factor_to_divide_error(0.07), 19972, 0.001, HESTNESS),
    Figure("hestness-35", rule.error_reduction(0.35), 0.553, 0.002, HESTNESS),
    *(
        Figure(f"goyal-lr-{batch}", rule.linear_rate(batch), rate, 1e-9, GOYAL + ", figure 3")
        for batch, rate in ((128, 0.05), (512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6))
    ),
    Figure("goyal-lr-8192", rule.linear_rate(8192), 3.2, 1e-9, GOYAL + ", figure 3"),
    Figure("goyal-lr-32768", rule.linear_rate(32768), 12.8, 1e-9, GOYAL + ", figure 3"),
    Figure("goyal-lr-65536", rule.linear_rate(65536), 25.6, 1e-9, GOYAL + ", figure 3"),
    Figure("goyal-eff", rule.efficiency_of_step_growth(1.12), 0.9, 0.01, GOYAL + ", section 5.5"),
    Figure("dle-lr-1024", rule.nvidia_rate(1024), 1.024, 1e-9, RESNET50),
    Figure("dle-lr-2048", rule.nvidia_rate(2048), 2.048, 1e-9, RESNET50),
    Figure("dle-lr-4096", rule.nvidia_rate(4096), 4.096, 1e-9, RESNET50),
    Figure("dle-wd", rule.nvidia_weight_decay(), 3.0517578125e-05, 1e-12, RESNET50),
    Figure(
        "dle-warmup-e0", rule.nvidia_warmup(0, 8, 2.048), 0.256, 1e-9, CONVNETS + "image_classification/optimizers.py"
    ),
    Figure("ffcv-88", rule.progressive_resizing_minutes(epochs=(71, 17), **FFCV_TIMES), 77.2, 0.005, FFCV),
    Figure("ffcv-16", rule.progressive_resizing_minutes(epochs=(12, 4), **FFCV_TIMES), 14.9, 0.005, FFCV),
    Figure("dle-90e-1gpu-tf32", rule.training_hours(938), 36, 0.1, RESNET50),
    Figure("dle-90e-1gpu-amp", rule.training_hours(2470), 14, 0.1, RESNET50),
    Figure("dle-90e-1gpu-fp32-v100", rule.training_hours(367), 92, 0.1, RESNET50),
    Figure("dle-90e-ceil-938", rule.nvidia_printed_hours(938), 36, 0, RESNET50),
    Figure("dle-90e-ceil-16621", rule.nvidia_printed_hours(16621), 3, 0, RESNET50),
    Figure("fastai-cost", rule.cost(1085.18, 391.68), 118.07, 0.001, DAWNBENCH),
    Figure("fastai-18min", rule.minutes(1085.18), 18, 0.01, DAWNBENCH),
    Figure("composer-17pct", rule.time_saved(28.7, 23.8), 0.17, 0.01, "mosaicml.com/blog/mlperf-2022"),
    Figure("airbench94-steps", rule.steps(50_000, 2000, 8), 200, 0, AIRBENCH + ": airbench94_muon.py"),
    Figure("airbench-rn18-ratio", rule.time_speedup(420, 27.3), 15.4, 0.01, AIRBENCH + ": README.md"),
    Figure("myrtle-dawn", rule.dawnbench_seconds(79, 7, 2), 74, 0, "davidcpage/cifar10-fast@f79e8b8: README.md"),
    Figure("mlperf-h200", rule.olympic_mean((12.0191, 12.0239, 12.0339, 12.04, 12.0224)), 12.0268, 1e-5, MLPERF4),
    Figure(
        "mlperf-mosaic-base", rule.olympic_mean((111.6539, 110.4596, 110.5382, 110.5208, 110.4804)), 110.5, 5e-4, MOSAIC
    ),
    Figure(
        "mlperf-mosaic-methods", rule.olympic_mean((23.5536, 24.1001, 23.5456, 24.5397, 23.7118)), 23.8, 0.001, MOSAIC
    ),
    Figure(
        "mlperf-rcp-3264",
        rule.reference_convergence_ratio(REFERENCE_EPOCHS, 35),
        1.0043956043956044,
        1e-9,
        "mlcommons/training_results_v2.1@158189d: NVIDIA, dgxa100_ngc22.04_mxnet, scaling.json",
    ),
    Figure("mlperf-h200-ips", rule.images_per_second(35, 12.0268), 62141, 0.001, MLPERF4),
    Figure("dcp-async", rule.time_speedup(148.8, 6.3), 23.62, 0.001, "pytorch.org/blog/reducing-checkpointing-times"),
    Figure(
        "elastic-128", rule.global_batch_size(32, 4) == rule.global_batch_size(8, 16), True, 0, "pytorch.org: elastic"
    ),
    Figure("keskar-F2", rule.generalization_gap(64.02, 59.45), 4.57, 1e-6, "arXiv:1609.04836, table 2"),
    Figure(
        "flag-mxnet-speedup",
        rule.contradicts(2.18, 3410.52, 1055.78),
        True,
        0,
        DLE + "MxNet/Classification/RN50v1.5/README.md",
    ),
    Figure("flag-effb4-superlinear", rule.is_superlinear(641, 36, 8), True, 0, CONVNETS + "efficientnet/README.md"),
)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_published_figure_is_reproduced(figure: Figure) -> None:
    assert figure.source
    if figure.within == 0:
        assert figure.ours == figure.published
    else:
        assert figure.ours == pytest.approx(figure.published, rel=figure.within, abs=0)


@pytest.mark.skipif(not LIST, reason="PACELINE_PUBLISHED_FIGURES names no list of figures")
def test_no_figure_of_the_list_is_left_out() -> None:
    ours = {each.name: each for each in FIGURES}
    for entry in json.loads(Path(LIST).read_text()):
        figure = ours.pop(entry["id"])
        assert figure.published == entry["published"], entry["id"]
        assert figure.within <= entry["tolerance"], entry["id"]
    assert not ours
