"""fastai's first lesson on a folder of photos: `fine_tune` from weights, else `fit_one_cycle` from scratch.

With "verify", files that are no whole images are deleted first, as its lesson does.

    python evening_fastai.py PHOTOS SIZE EPOCHS WEIGHTS|- OUT.json SEED [verify]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fastai.vision.all import (
    ImageDataLoaders,
    Resize,
    accuracy,
    aug_transforms,
    get_image_files,
    resnet18,
    set_seed,
    verify_images,
    vision_learner,
)
from safetensors.torch import load_file

photos, size, epochs, weights, out, seed = sys.argv[1:7]
set_seed(int(seed))
if sys.argv[7:] == ["verify"]:
    verify_images(get_image_files(photos)).map(Path.unlink)
dls = ImageDataLoaders.from_folder(
    photos, train="train", valid="val", item_tfms=Resize(int(size)), batch_tfms=aug_transforms(), bs=32, num_workers=2
)
if weights == "-":
    learner = vision_learner(dls, resnet18, metrics=accuracy, pretrained=False)
    with learner.no_bar():
        learner.fit_one_cycle(int(epochs))
else:
    learner = vision_learner(dls, "tf_efficientnet_lite0", metrics=accuracy, pretrained=False)
    learner.model[0].model.load_state_dict(load_file(weights), strict=False)  # all but the classifier
    with learner.no_bar():
        learner.fine_tune(int(epochs))
with learner.no_bar():
    answers, labels = learner.get_preds()
right = (answers.argmax(1) == labels).float()
recalls = {name: 100 * float(right[labels == at].mean()) for at, name in enumerate(dls.vocab)}
Path(out).write_text(json.dumps({"top1_accuracy": 100 * float(right.mean()), "recalls": recalls}))
