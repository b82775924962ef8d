"""Ultralytics' first lesson on a folder of photos, from scratch: its published weights come from the network only.

python evening_ultralytics.py PHOTOS SIZE EPOCHS - OUT.json SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ultralytics import YOLO

photos, size, epochs, _, out, seed = sys.argv[1:7]
model = YOLO("yolo11n-cls.yaml")
model.train(data=photos, imgsz=int(size), epochs=int(epochs), batch=32, device="cpu", workers=2, seed=int(seed))
Path(out).write_text(json.dumps({"top1_accuracy": 100 * float(model.val(data=photos).top1)}))
