"""Train and score Ultralytics' smallest detector from scratch: its published weights must be downloaded.

python detection_ultralytics.py FOLDER SIZE EPOCHS OUT.json SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ultralytics import YOLO

folder, size, epochs, out, seed = sys.argv[1:6]
model = YOLO("yolo11n.yaml")
given = {"imgsz": int(size), "device": "cpu"}
model.train(data=f"{folder}/data.yaml", epochs=int(epochs), workers=0, seed=int(seed), plots=False, **given)
found = []
for result in model.predict(f"{folder}/images/val", conf=0.001, max_det=100, verbose=False, **given):
    boxes = result.boxes
    for (left, top, right, bottom), label, sure in zip(
        boxes.xyxy.tolist(), boxes.cls.tolist(), boxes.conf.tolist(), strict=True
    ):
        box = {"bbox": [left, top, right - left, bottom - top], "category_id": int(label), "score": sure}
        found.append({"image_id": int(Path(result.path).stem), **box})
Path(out).write_text(json.dumps(found))
