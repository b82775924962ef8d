#!/usr/bin/env bash
# A first evening: from an untidy folder of photos to a network with scores for each class, in six commands.
#
# The photos are drawn here: shapes of five classes, the largest with twenty times as many images as the smallest. Some
# are rotated by EXIF or in CMYK, three are broken, three of train/ are in val/ too, and a film and an empty folder lie
# about.
#
#     bash examples/first_evening.sh [IMAGES OF THE LARGEST CLASS, default 400]
set -euo pipefail
largest=${1:-400}
evening=$(mktemp -d)
trap 'rm -rf "$evening"' EXIT
cd "$evening"

python - "$largest" <<'EOF'
import importlib.util
import random
import shutil
import sys
from pathlib import Path

from PIL import Image, ImageDraw

random.seed(0)
SHARES = {"arrow_down": 1, "arrow_up": 2, "circle": 4, "cross": 8, "square": 20}


def drawn(name):
    """A shape of random colour, size and place on a speckled background."""
    width, height = random.randrange(90, 140), random.randrange(90, 140)
    ends = [(0, 110), (150, 256)]
    random.shuffle(ends)
    back, fore = (tuple(random.randrange(*each) for _ in range(3)) for each in ends)
    picture = Image.new("RGB", (width, height), back)
    draw = ImageDraw.Draw(picture)
    size = random.randrange(26, 40)
    x, y = random.randrange(size, width - size), random.randrange(size, height - size)
    draw.point([(random.randrange(width), random.randrange(height)) for _ in range(300)], fore)
    if name == "circle":
        draw.ellipse((x - size, y - size, x + size, y + size), fore)
    elif name == "square":
        draw.rectangle((x - size, y - size, x + size, y + size), fore)
    elif name == "cross":
        draw.line((x - size, y, x + size, y), fore, size // 2)
        draw.line((x, y - size, x, y + size), fore, size // 2)
    else:
        tip = size if name == "arrow_down" else -size
        draw.polygon([(x - size, y - tip), (x + size, y - tip), (x, y + tip)], fore)
    return picture


def save(picture, path, kind):
    """Every fourth image as a phone or a print shop would have it."""
    if kind == 0:  # upside down, with the remark in EXIF that it is
        exif = Image.Exif()
        exif[0x0112] = 3
        picture.rotate(180).save(path, exif=exif)
    elif kind == 1:
        picture.convert("CMYK").save(path)
    elif kind == 2 and importlib.util.find_spec("pillow_heif"):
        import pillow_heif

        pillow_heif.from_pillow(picture).save(path.with_suffix(".heic"))
    else:
        picture.save(path)


for part, most in (("train", int(sys.argv[1])), ("val", int(sys.argv[1]) // 4), ("new", 20)):
    for name, share in SHARES.items():
        folder = Path("new" if part == "new" else f"photos/{part}/{name}")
        folder.mkdir(parents=True, exist_ok=True)
        # For scoring, classes are of one size.
        for number in range(most * (share if part == "train" else 4) // 20):
            save(drawn(name), folder / f"{name}-{number:03}.jpg", number % 12)
train = Path("photos/train")
for number in (3, 4, 5):
    shutil.copy(train / f"square/square-{number:03}.jpg", f"photos/val/square/copy-{number}.jpg")
whole = (train / "cross/cross-003.jpg").read_bytes()
(train / "cross/half.jpg").write_bytes(whole[: len(whole) // 2])
(train / "circle/nothing.jpg").touch()
(train / "square/page.jpg").write_text("<html>404 Not Found</html>")
(train / "square/movie.mp4").write_bytes(random.randbytes(5000))
(train / "unsorted").mkdir()
EOF

paceline() { # says what follows, then runs it; the installed command does the same
    printf '\n$ paceline %s\n' "$*"
    python -m paceline "$@"
}

echo "1. What is wrong with the folder? (Exit code 1: something is.)"
paceline check-data photos || test $? -eq 1

echo "2. Move what cannot be used out of the way, and the three images in val/ that are in train/ too."
paceline check-data photos --quarantine aside

echo "3. Train. The folder is enough: it draws all classes equally often by itself. An evening is short."
paceline train photos/ train.duration="$((25 * largest)) samples" --run-dir run

echo "4. How good is it, class by class?"
paceline evaluate run --per-class --predictions answers.csv

echo "5. Label new photos."
paceline predict run new --top-k 1 --output new.csv

echo "6. Take the network elsewhere. (run/report.html is the report; nothing has to be running to open it.)"
paceline export run --format safetensors --output network.safetensors

python - <<'EOF'
import csv
from pathlib import Path

with open("answers.csv") as file:
    rows = list(csv.DictReader(file))
recall = {}
for folder in sorted(Path("photos/train").iterdir()):
    own = [row["prediction"] == row["target"] for row in rows if row["target_class"] == folder.name]
    recall[folder.name] = 100 * sum(own) / len(own)
mean = sum(recall.values()) / len(recall)
worst = min(recall, key=recall.get)
with open("new.csv") as file:
    new = [row["path"].startswith(f"new/{row['label']}-") for row in csv.DictReader(file)]
found = 100 * sum(new) / len(new)
print(f"\nof each class, {mean:.0f} % were found ({worst}: {recall[worst]:.0f} %), of the new photos {found:.0f} %")
assert len(recall) == 5, f"expected five classes, found {recall}"
assert mean > 40, f"expected twice the 20 % of chance of each class, found {mean:.0f} %"
assert found > 40, f"expected twice the 20 % of chance of the new photos, found {found:.0f} %"
assert Path("run/report.html").is_file() and Path("network.safetensors").is_file()
EOF
