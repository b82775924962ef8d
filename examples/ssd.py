"""SSD, the detector of MLPerf's first benchmarks, finds discs, rectangles and triangles.

It needs no code: `task=detection` trains torchvision's detectors, here SSDlite with random weights. For your own
images, set `data.dataset=coco` and `data.path`, and `model.pretrained=true` for a backbone trained on ImageNet.

    python examples/ssd.py
"""

import tempfile

import paceline

# Changes to the recipe `shapes-maskrcnn`, which generates the images.
OVERRIDES = {
    "model.name": "torchvision:ssdlite320_mobilenet_v3_large",
    "data.detection.generated.samples": 400,
    "data.detection.generated.evaluation_samples": 40,
    "data.detection.generated.objects": 2,  # in each image
    "train.duration": "3 epochs",
    "train.ema": 0.97,
    "batch.global_size": 4,
    "optimizer.lr": 0.002,
    "schedule.warmup": "5%",
    "evaluate.every": "3 epochs",
    "evaluate.batch_size": 10,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("shapes-maskrcnn", overrides=OVERRIDES, run_dir=f"{folder}/run", quiet=True)
    box_map, box_map50 = result.metrics["box_map"], result.metrics["box_map50"]
    print(f"mAP {box_map:.1f} %, at an overlap of 0.5 {box_map50:.1f} %, after {result.summary.step} steps")
    assert box_map50 > 40, f"expected more than 40 %, found {box_map50:.1f} %"
