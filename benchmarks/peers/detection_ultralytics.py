"""Train Ultralytics' smallest detector on a folder of COCO's layout, and predict its held-out pictures.

python detection_ultralytics.py FOLDER SIZE EPOCHS OUT.json SEED MORE

It trains from scratch, since published weights must be downloaded. Four steps: convert the annotations, copy the
pictures next to the labels, write data.yaml, train. The settings are its defaults with batches of 8, each of which
is a step (by default 64 pictures are: two steps an epoch of 100), and evaluation after the last epoch only. MORE
is JSON that replaces settings.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from ultralytics import YOLO, settings
from ultralytics.data.converter import convert_coco

folder, size, epochs, out, seed, more = sys.argv[1:]
settings.update({"mlflow": False})  # on by default where it is installed

convert_coco(f"{folder}/annotations", "converted", cls91to80=False)
for part in ("train2017", "val2017"):
    shutil.copytree(f"{folder}/{part}", f"converted/images/{part}")
categories = json.loads(Path(f"{folder}/annotations/instances_train2017.json").read_text())["categories"]
names = {each["id"] - 1: each["name"] for each in categories}
parts = {"path": str(Path("converted").resolve()), "train": "images/train2017", "val": "images/val2017"}
Path("data.yaml").write_text(json.dumps({**parts, "names": names}))

given = {"imgsz": int(size), "device": "cpu"}
chosen = {"batch": 8, "nbs": 8, "val": False, "plots": False, "workers": 0, **json.loads(more)}
model = YOLO(chosen.pop("model", "yolo11n.yaml"))
model.train(data="data.yaml", epochs=int(epochs), seed=int(seed), **chosen, **given)

found = []
for result in model.predict("converted/images/val2017", conf=0.001, max_det=100, verbose=False, **given):
    boxes = result.boxes
    for (left, top, right, bottom), label, sure in zip(
        boxes.xyxy.tolist(), boxes.cls.tolist(), boxes.conf.tolist(), strict=True
    ):
        box = {"bbox": [left, top, right - left, bottom - top], "category_id": int(label) + 1, "score": sure}
        found.append({"image_id": int(Path(result.path).stem), **box})
Path(out).write_text(json.dumps(found))
