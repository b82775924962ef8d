"""Lightning's Trainer with a plain DataLoader: it saves every five steps and resumes with ``ckpt_path``."""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import Samples

from paceline.conform import used, watched

CONFORM = {
    "start": "{python} {here}/lightning_trainer.py",
    "resume": "{python} {here}/lightning_trainer.py --resume",
    "epochs": 3,
    "steps": 48,
    "checkpoints": "saved/step={step}.ckpt",
    "weights": "final.pt",
    "packages": ["lightning", "torch"],
}


class Linear(L.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        used(batch["number"])
        return torch.nn.functional.cross_entropy(self.layer(batch["x"]), batch["labels"])

    def configure_optimizers(self):
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


L.seed_everything(1)
saves = ModelCheckpoint("saved", "{step}", every_n_train_steps=5, save_top_k=-1)
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[saves],
)
found = sorted(Path("saved").glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
model = Linear()
loader = torch.utils.data.DataLoader(watched(Samples()), batch_size=4, shuffle=True)
trainer.fit(model, loader, ckpt_path=found[-1] if "--resume" in sys.argv and found else None)
torch.save(model.layer.state_dict(), "final.pt")
