"""Published throughputs on one and on several GPUs, to hold predictions against; no figure of ours is in here.

All are of NVIDIA DeepLearningExamples at commit 729963dd47e7c8bd462ad10bfac7a7b0b604e6dd, but for the last one. Batch
sizes that a table does not print are those of the scripts that it names.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row: a rate on several GPUs beside that on one.

    Attributes:
        table: Which table, and so whose training loop.
        network: A shipped recipe, or one of ``SHAPES``.
        cluster: A name of :mod:`paceline_advisor.clusters`.
        precision: fp32 (on A100 TF32), fp16 (mixed, with a loss scaler) or bf16 (mixed, without).
        batch: Samples of one GPU's pass.
        passes: In a step.
        one_passes: Passes in a step of the one GPU.
        one: Rate of one GPU.
        gpus: Of the other rate.
        rate: That rate.
    """

    table: str
    network: str
    cluster: str
    precision: str
    batch: int
    one: float
    gpus: int
    rate: float
    passes: int = 1
    one_passes: int = 1


@dataclass(frozen=True)
class Shape:
    """A network that no recipe builds: as many equal tensors.

    Attributes:
        tensors: Parameter tensors, counted by hand from the architecture.
        parameters: As its table or paper prints.
    """

    tensors: int
    parameters: float


SHAPES = {
    "bert_large": Shape(393, 335e6),
    "ssd300_resnet50": Shape(183, 22.9e6),
    "transformer_xl_base": Shape(190, 192e6),
    "jasper_10x5": Shape(327, 333e6),
    "bart_large": Shape(511, 406e6),
    "quartznet_15x5": Shape(358, 18.9e6),
    # Those below are counted roughly, from the papers' layers.
    "bert_base": Shape(201, 110e6),
    "efficientdet_d0": Shape(430, 3.9e6),
    "gnmt": Shape(44, 160.7e6),
    "mask_rcnn_resnet50": Shape(120, 44e6),
    "nnunet_2d": Shape(100, 41e6),
    "nnunet_3d": Shape(90, 31e6),
    "ssd320_resnet50": Shape(250, 34e6),
    "tacotron2": Shape(83, 28.2e6),
    "tft": Shape(300, 1.1e6),
    "transformer_big": Shape(185, 210e6),
    "transformer_xl_large": Shape(240, 257e6),
    "unet_medical": Shape(46, 31e6),
    "waveglow": Shape(938, 268e6),
}


def _rows(table: str, network: str, *lines: tuple[str, str, int, float, int, float]) -> list[Published]:
    return [
        Published(
            table=table, network=network, cluster=cluster, precision=numbers, batch=batch, one=one, gpus=n, rate=rate
        )
        for cluster, numbers, batch, one, n, rate in lines
    ]


# PyTorch/Classification/ConvNets/*/README.md, "Training performance"; batch sizes from configs.yml.
CONVNETS = [
    *_rows(
        *("PyTorch ConvNets", "resnet50"),
        ("dgx-a100", "fp32", 256, 938, 8, 7248),
        ("dgx-a100", "fp16", 256, 2470, 8, 16621),
        ("dgx-1", "fp32", 112, 367, 8, 2855),
        ("dgx-1", "fp16", 256, 1200, 8, 8322),
        ("dgx-1-32gb", "fp32", 112, 356, 8, 2766),
        ("dgx-1-32gb", "fp16", 256, 1156, 8, 8056),
    ),
    *_rows(
        *("PyTorch ConvNets", "resnext101_32x4d"),
        ("dgx-a100", "fp32", 128, 456, 8, 3471),
        ("dgx-a100", "fp16", 128, 1211, 8, 7925),
        ("dgx-1", "fp32", 64, 147, 8, 1133),
        ("dgx-1", "fp16", 128, 587, 8, 4065),
        ("dgx-1-32gb", "fp32", 64, 144, 8, 1108),
        ("dgx-1-32gb", "fp16", 128, 565, 8, 3863),
    ),
    *_rows(
        *("PyTorch ConvNets", "seresnext101_32x4d"),
        ("dgx-a100", "fp32", 128, 395, 8, 2991),
        ("dgx-a100", "fp16", 128, 855, 8, 5779),
        ("dgx-1", "fp32", 64, 132, 8, 1004),
        ("dgx-1", "fp16", 112, 443, 8, 2971),
        ("dgx-1-32gb", "fp32", 64, 130, 8, 992),
        ("dgx-1-32gb", "fp16", 112, 427, 8, 2925),
    ),
]

# Seen when the causes were looked for.
SEEN = [
    *_rows(
        *("PyTorch EfficientNet", "efficientnet_b0"),
        ("dgx-a100", "fp32", 256, 1078, 8, 8193),
        ("dgx-a100", "fp32", 256, 1078, 16, 16137),
        ("dgx-a100", "fp16", 256, 2489, 8, 16652),
        ("dgx-a100", "fp16", 256, 2489, 16, 29332),
        ("dgx-1", "fp32", 64, 655, 8, 4672),
        ("dgx-1", "fp16", 128, 1301, 8, 7789),
        ("dgx-1-32gb", "fp32", 128, 646, 8, 4937),
        ("dgx-1-32gb", "fp16", 256, 1401, 8, 8615),
    ),
    # Its one-GPU rows on DGX-1 32 GB (36 and 89 images/s, 17.6 times as many on 8) contradict themselves.
    *_rows(
        *("PyTorch EfficientNet", "efficientnet_b4"),
        ("dgx-a100", "fp32", 64, 157, 8, 1223),
        ("dgx-a100", "fp32", 64, 157, 16, 2417),
        ("dgx-a100", "fp32", 64, 157, 32, 4813),
        ("dgx-a100", "fp32", 64, 157, 64, 9146),
        ("dgx-a100", "fp16", 128, 331, 8, 2570),
        ("dgx-a100", "fp16", 128, 331, 16, 4813),
        ("dgx-a100", "fp16", 128, 331, 32, 9425),
        ("dgx-a100", "fp16", 128, 331, 64, 18900),
        ("dgx-1", "fp32", 16, 83, 8, 616),
        ("dgx-1", "fp16", 32, 204, 8, 1366),
    ),
    *_rows(
        *("TensorFlow ConvNets", "resnet50"),
        ("dgx-a100-40gb", "fp32", 256, 909, 8, 7000),
        ("dgx-a100-40gb", "fp16", 256, 2375, 8, 17400),
        ("dgx-1", "fp32", 128, 412, 8, 3170),
        ("dgx-1", "fp16", 256, 1270, 8, 9510),
        ("dgx-2", "fp32", 128, 432, 16, 6500),
        ("dgx-2", "fp16", 256, 1300, 16, 17250),
    ),
    *_rows(
        *("TensorFlow ConvNets", "resnext101_32x4d"),
        ("dgx-a100-40gb", "fp32", 128, 371, 8, 2854),
        ("dgx-a100-40gb", "fp16", 256, 1132, 8, 8500),
        ("dgx-1", "fp32", 64, 166, 8, 1210),
        ("dgx-1", "fp16", 128, 566, 8, 4160),
        ("dgx-2", "fp32", 64, 170, 16, 2500),
        ("dgx-2", "fp16", 128, 572, 16, 7750),
    ),
    *_rows(
        *("TensorFlow ConvNets", "seresnext101_32x4d"),
        ("dgx-a100-40gb", "fp32", 128, 342, 8, 2610),
        ("dgx-a100-40gb", "fp16", 256, 975, 8, 7230),
        ("dgx-1", "fp32", 64, 152, 8, 1120),
        ("dgx-1", "fp16", 96, 475, 8, 3360),
        ("dgx-2", "fp32", 64, 158, 16, 2270),
        ("dgx-2", "fp16", 96, 472, 16, 6580),
    ),
    *_rows(
        *("MXNet ResNet-50", "resnet50"),
        ("dgx-a100", "fp32", 512, 1055.78, 4, 4182.30),
        ("dgx-a100", "fp32", 512, 1055.78, 8, 8247.44),
        ("dgx-a100", "fp16", 512, 3410.52, 4, 13442.66),
        ("dgx-a100", "fp16", 512, 3410.52, 8, 26673.72),
        ("dgx-1", "fp32", 96, 384, 2, 763),
        ("dgx-1", "fp32", 96, 384, 4, 1513),
        ("dgx-1", "fp32", 96, 384, 8, 3005),
        ("dgx-1", "fp16", 192, 1376, 2, 2768),
        ("dgx-1", "fp16", 192, 1376, 4, 5357),
        ("dgx-1", "fp16", 192, 1376, 8, 10723),
        ("dgx-2", "fp32", 128, 417, 8, 3223),
        ("dgx-2", "fp32", 128, 417, 16, 6338),
        ("dgx-2", "fp16", 256, 1492, 8, 11368),
        ("dgx-2", "fp16", 256, 1492, 16, 21484),
    ),
    *_rows(
        *("Paddle ResNet-50", "resnet50"),
        ("dgx-a100", "fp32", 256, 1024, 8, 8013),
        ("dgx-a100", "fp16", 256, 2897, 8, 23874),  # more than eight times one GPU's
    ),
]

# Taken after the causes were fixed; parts of BERT's tables had been come across before.
UNSEEN = [
    *_rows(
        *("PyTorch BERT-large SQuAD", "bert_large"),
        ("dgx-a100", "fp32", 32, 61.5, 8, 469.8),
        ("dgx-a100", "fp16", 32, 110.5, 8, 846.7),
        ("dgx-1-32gb", "fp32", 8, 12, 8, 85.5),
        ("dgx-1-32gb", "fp16", 16, 52, 8, 382),
    ),
    *(
        Published(
            table="PyTorch BERT-large pre-training, sequences of 128",
            network="bert_large",
            cluster="dgx-a100",
            precision="fp16",
            batch=256,
            one=580,
            gpus=8 * nodes,
            rate=rate,
            passes=32 // nodes,
        )
        for nodes, rate in ((1, 4553), (2, 9191), (8, 35774), (16, 70555), (32, 138294))
    ),
    *(
        Published(
            table="PyTorch BERT-large pre-training, sequences of 512",
            network="bert_large",
            cluster="dgx-a100",
            precision="fp16",
            batch=32,
            one=210,
            gpus=8 * nodes,
            rate=rate,
            passes=128 // nodes,
        )
        for nodes, rate in ((1, 1648), (2, 3291), (4, 6464), (8, 13005), (16, 25570), (32, 49663))
    ),
    *_rows(
        *("PyTorch SSD300", "ssd300_resnet50"),
        ("dgx-a100", "fp32", 64, 364.27, 4, 1432.73),
        ("dgx-a100", "fp32", 64, 364.27, 8, 2838.76),
        ("dgx-a100", "fp16", 64, 662.91, 4, 2581.24),
        ("dgx-a100", "fp16", 64, 662.91, 8, 5252.84),
        ("dgx-a100", "fp32", 128, 377.18, 8, 2967.23),
        ("dgx-a100", "fp16", 128, 724.41, 8, 5733.98),
        ("dgx-1", "fp32", 32, 107.22, 4, 419.54),
        ("dgx-1", "fp32", 32, 107.22, 8, 840.35),
        ("dgx-1", "fp16", 32, 296.80, 4, 1115.59),
        ("dgx-1", "fp16", 32, 296.80, 8, 2153.96),
        ("dgx-1", "fp16", 64, 322.81, 8, 2520.50),
    ),
    # Rates in tokens, 192 of them to a sequence.
    *_rows(
        *("PyTorch Transformer-XL base", "transformer_xl_base"),
        ("dgx-a100-40gb", "fp32", 32 * 192, 41527, 2, 77625),
        ("dgx-a100-40gb", "fp32", 32 * 192, 41527, 8, 305933),
        ("dgx-a100-40gb", "fp16", 32 * 192, 59961, 2, 113238),
        ("dgx-a100-40gb", "fp16", 32 * 192, 59961, 8, 449890),
        ("dgx-1", "fp32", 16 * 192, 13981, 8, 97005),
        ("dgx-1", "fp16", 16 * 192, 26639, 8, 170532),
        ("dgx-1", "fp16", 32 * 192, 36692, 8, 258648),
    ),
    *_rows(
        *("PyTorch Jasper", "jasper_10x5"),
        ("dgx-a100", "fp32", 32, 42.18, 8, 310.10),
        ("dgx-a100", "fp16", 32, 64.32, 8, 470.09),
        ("dgx-a100", "fp32", 64, 49.64, 8, 371.41),
        ("dgx-a100", "fp16", 64, 75.59, 8, 547.91),
        ("dgx-1", "fp32", 16, 10.71, 8, 78.23),
        ("dgx-1", "fp16", 16, 27.87, 8, 193.89),
        ("dgx-2", "fp32", 32, 13.46, 16, 188.14),
        ("dgx-2", "fp16", 32, 38.94, 16, 515.90),
        ("dgx-2", "fp16", 64, 43.86, 16, 567.47),
    ),
    *_rows(
        *("TensorFlow 2 EfficientNet", "efficientnet_b0"),
        ("dgx-a100", "fp16", 1024, 3454, 8, 20647),
        ("dgx-a100", "fp16", 1024, 3454, 16, 40644),
        ("dgx-1-32gb", "fp32", 256, 752, 8, 4504),
        ("dgx-1-32gb", "fp16", 512, 868, 8, 4880),
    ),
    *_rows(
        *("TensorFlow 2 EfficientNet", "efficientnet_b4"),
        ("dgx-a100", "fp32", 80, 165, 8, 1308),
        ("dgx-a100", "fp32", 80, 165, 64, 9473),
        ("dgx-a100", "fp16", 160, 470, 8, 3550),
        ("dgx-a100", "fp16", 160, 470, 64, 25455),
        ("dgx-1-32gb", "fp32", 32, 79, 8, 570),
        ("dgx-1-32gb", "fp32", 32, 79, 64, 3568),
        ("dgx-1-32gb", "fp16", 64, 211, 8, 1258),
        ("dgx-1-32gb", "fp16", 64, 211, 64, 8643),
    ),
]


def _quartznet(cluster: str, numbers: str, batch: int, one: float, *others: tuple[int, int, float]) -> list[Published]:
    return [
        Published(
            table="PyTorch QuartzNet",
            network="quartznet_15x5",
            cluster=cluster,
            precision=numbers,
            batch=batch,
            one=one,
            gpus=gpus,
            rate=rate,
            passes=passes,
        )
        for gpus, passes, rate in others
    ]


# Taken when no constant was left that had been chosen with sight of several GPUs. BART's passes are not printed: one.
LATER = [
    *_rows(
        *("PyTorch BART pre-training, sequences of 128", "bart_large"),
        ("dgx-a100", "fp32", 100, 202.53, 8, 1556.23),
        ("dgx-a100", "fp32", 100, 202.53, 160, 31067.96),
        ("dgx-a100", "fp32", 100, 202.53, 320, 61538.46),
        ("dgx-a100", "bf16", 200, 326.53, 8, 2572.86),
        ("dgx-a100", "bf16", 200, 326.53, 160, 52459.02),
        ("dgx-a100", "bf16", 200, 326.53, 320, 97028.51),
    ),
    *_rows(
        *("PyTorch BART pre-training, sequences of 512", "bart_large"),
        ("dgx-a100", "fp32", 16, 41.35, 8, 317.85),
        ("dgx-a100", "fp32", 16, 41.35, 160, 5953.49),
        ("dgx-a100", "fp32", 16, 41.35, 320, 11636.36),
        ("dgx-a100", "bf16", 32, 69.31, 8, 549.67),
        ("dgx-a100", "bf16", 32, 69.31, 160, 10520.54),
        ("dgx-a100", "bf16", 32, 69.31, 320, 19948.05),
    ),
    *_quartznet("dgx-a100", "fp32", 48, 78.89, (4, 6, 303.16), (8, 3, 576.37)),
    *_quartznet("dgx-a100", "fp16", 48, 89.69, (4, 6, 343.06), (8, 3, 644.27)),
    *_quartznet("dgx-a100", "fp32", 72, 79.01, (4, 4, 304.47), (8, 2, 583.31)),
    *_quartznet("dgx-a100", "fp16", 72, 88.70, (4, 4, 341.95), (8, 2, 651.60)),
    *_quartznet("dgx-2", "fp32", 24, 44.65, (4, 12, 170.18), (8, 6, 330.53), (16, 3, 616.51)),
    *_quartznet("dgx-2", "fp16", 24, 67.95, (4, 12, 258.56), (8, 6, 495.52), (16, 3, 872.99)),
    *_quartznet("dgx-2", "fp16", 48, 67.49, (4, 6, 254.58), (8, 3, 477.87)),
]


def _wide() -> list[Published]:
    """Return the rows of ``scaling_rows.csv``: twenty more families, with the batches of their tables or scripts.

    Rates in tokens, audio samples or spectrogram frames have batches in the same unit: 48 tokens per sentence pair of
    GNMT, 384 per sequence of Transformer-XL large, 8,000 audio samples per segment of WaveGlow, about 560 frames per
    utterance of Tacotron 2. Passes of one GPU follow from a fixed global batch, where a table has one.
    """
    whole = ("batch", "passes", "one_passes", "gpus")
    with Path(__file__).with_name("scaling_rows.csv").open(newline="", encoding="utf-8") as file:
        return [
            Published(
                **{key: row[key] for key in ("table", "network", "cluster", "precision")},
                **{key: int(row[key]) for key in whole},
                one=float(row["one"]),
                rate=float(row["rate"]),
            )
            for row in csv.DictReader(file)
        ]


WIDE = _wide()

# Goyal et al., arXiv:1706.02677: ResNet-50, 32 images on each of 8 to 352 P100 in Caffe2, fp32; a step of 44 servers
# takes 12 % longer than that of one (section 5.5: "about 90 %" of 8 to 256). 90 epochs in one hour on 256 GPUs: 8192
# images in 0.256 s, and so about 0.23 s on one server.
GOYAL_STEP_SECONDS = 0.256 * 0.9
GOYAL_EFFICIENCY = {256: 0.90, 352: 1 / 1.12}
