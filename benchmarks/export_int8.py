"""What do int8 and bf16 cost in accuracy, and which of ONNX Runtime's ways of rounding costs least?

    python benchmarks/export_int8.py RUN [RUN ...]

Each run is one of image classification whose data are where its recipe says. Its weights are exported in fp32 and
rounded in each way; all are scored by ONNX Runtime (bf16 by the network itself) on the same held-out images.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import torch
from hardware import write_result
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from paceline.checkpoint.weights import read_weights
from paceline.inference.export import ExportRequest, export
from paceline.inference.export_onnx import OnnxSession, SampleImages, calibration_images
from paceline.inference.predict import load_predictor

CALIBRATIONS = {"min-max": CalibrationMethod.MinMax, "entropy": CalibrationMethod.Entropy}


def accuracy(network: Any, images: SampleImages) -> float:
    """Top-1 in percent."""
    right = [network(batch).argmax(dim=1) for batch in images.batches(images.held_out)]
    return 100 * float((torch.cat(right) == images.labels).double().mean())


def images_per_second(network: OnnxSession, images: SampleImages, size: int = 32) -> float:
    """Of one core's time, not of the clock's, so that other work on the machine counts little; the middle of nine."""
    batch = images.normalize(images.held_out[:size]).contiguous()
    times = []
    for _ in range(10):
        started = time.process_time()
        for _ in range(5):
            network(batch)
        times.append(time.process_time() - started)
    return 5 * size / sorted(times[1:])[4]


def measure(run: Path, scratch: Path) -> dict[str, Any]:
    """All ways of one run."""
    whole, prepared = scratch / "whole.onnx", scratch / "prepared.onnx"
    export(ExportRequest(target=run, output=whole, form="onnx"))
    saved = read_weights(run)
    images = calibration_images(saved, (), trust_code=False)
    rows = {"fp32": row(whole, images)}
    rounded = scratch / "bf16.safetensors"
    export(ExportRequest(target=run, output=rounded, quantize="bf16"))
    network = load_predictor(rounded).network
    with torch.inference_mode():
        top1 = accuracy(network, images)
    rows["bf16 weights"] = {"top1_accuracy": top1, "bytes": rounded.stat().st_size}
    quant_pre_process(whole, prepared, skip_symbolic_shape=True)
    for (name, method), symmetric, reduced in itertools.product(CALIBRATIONS.items(), (False, True), (False, True)):
        if name != "min-max" and (symmetric or reduced):
            continue  # one thing is changed at a time
        path = scratch / "int8.onnx"
        batches = ({"images": each.numpy()} for each in images.batches(images.calibration))
        quantize_static(
            prepared,
            path,
            SimpleNamespace(get_next=partial(next, batches, None)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=reduced,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=method,
            extra_options={"ActivationSymmetric": symmetric},
        )
        kind = "signed" if symmetric else "unsigned"
        rows[f"int8 static, {name}, {kind} activations{', 7 bits of weights' if reduced else ''}"] = row(path, images)
        path.unlink()
    path = scratch / "dynamic.onnx"
    try:
        quantize_dynamic(without_shapes(whole, scratch / "bare.onnx"), path, weight_type=QuantType.QUInt8)
        rows["int8 dynamic"] = row(path, images)
    except Exception as error:  # noqa: BLE001  # whatever ONNX Runtime raises of a network that it cannot round so
        print(f"int8 dynamic of {run}: {error}")
    data, recipe = saved.description("data"), saved.description("recipe")
    return {
        "network": recipe["model"]["name"],
        "data": data["dataset"],
        "image_size": data["image_size"],
        "held_out_images": len(images.labels),
        "calibration_images": len(images.calibration),
        "ways": rows,
    }


def without_shapes(source: Path, path: Path) -> Path:
    """A copy without the shapes in between, which dynamic rounding infers anew and finds to differ."""
    model = onnx.load(source)
    del model.graph.value_info[:]
    onnx.save(model, path)
    return path


def row(path: Path, images: SampleImages) -> dict[str, float]:
    """Accuracy, size and speed of one file."""
    network = OnnxSession(path)
    return {
        "top1_accuracy": accuracy(network, images),
        "bytes": path.stat().st_size,
        "images_per_second": images_per_second(network, images),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    found = []
    for run in runs:
        with tempfile.TemporaryDirectory() as scratch:
            found.append(measure(run, Path(scratch)))
    clock = "images/s of a core's time at batches of 32, the middle of nine rounds"
    lines = [f"Top-1 on held-out images; one thread; {clock}.", ""]
    for each in found:
        lines += [
            f"## {each['network']} on {each['data']}, {each['image_size']} pixels, {each['held_out_images']} images",
            "",
            "| stored as | top-1 | size | images/s |",
            "|---|---|---|---|",
        ]
        for name, variant in each["ways"].items():
            speed = f"{variant['images_per_second']:,.0f}" if "images_per_second" in variant else ""
            lines.append(f"| {name} | {variant['top1_accuracy']:.2f} % | {variant['bytes'] / 1e6:.2f} MB | {speed} |")
        lines.append("")
    write_result("export_int8", {"runs": found}, lines)


if __name__ == "__main__":
    main()
