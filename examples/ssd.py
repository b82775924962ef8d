"""SSD, the detector of MLPerf's first benchmarks: discs, rectangles and triangles found by torchvision's SSDlite.

It needs no task class: `task=detection` trains torchvision's detectors, here from random weights. For your own
pictures set `data.dataset=coco` and `data.path`, and `model.pretrained=true` for a backbone trained on ImageNet.

    python examples/ssd.py
"""

import shlex
import tempfile

import paceline

OVERRIDES = """model.name=torchvision:ssdlite320_mobilenet_v3_large model.options={}
    data.detection.short_sides=off data.detection.flip=0.5
    data.detection.generated.samples=400 data.detection.generated.evaluation_samples=40
    data.detection.generated.objects=2
    train.duration="3 epochs" train.ema=0.97 batch.global_size=4
    optimizer.name=adamw optimizer.lr=0.002 schedule.name=cosine schedule.warmup="5%"
    evaluate.every="3 epochs" evaluate.batch_size=10 parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        overrides = shlex.split(OVERRIDES)
        result = paceline.train("shapes-maskrcnn", overrides=overrides, run_dir=f"{folder}/run", quiet=True)
    mean, half = (result.metrics[name] for name in ("box_map", "box_map50"))
    print(f"mAP {mean:.1f} %, at an overlap of 0.5 {half:.1f} %, after {result.summary.step} steps")
    assert half > 40, f"expected more than 40 %, found {half:.1f} %"
