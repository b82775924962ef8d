"""Transformers' Trainer: it saves every five steps and resumes with ``resume_from_checkpoint=True``."""

import sys

import torch
from samples import Samples
from transformers import Trainer, TrainingArguments

from paceline.conform import used, watched

CONFORM = {
    "start": "{python} {here}/transformers_trainer.py",
    "resume": "{python} {here}/transformers_trainer.py --resume",
    "epochs": 3,
    "steps": 48,
    "checkpoints": "saved/checkpoint-{step}",
    "weights": "final.pt",
    "packages": ["transformers", "accelerate", "torch"],
}


class Linear(torch.nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x, labels, number):
        """Return the loss of a batch."""
        used(number)
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


settings = TrainingArguments(
    "saved",
    per_device_train_batch_size=4,
    num_train_epochs=3,
    save_strategy="steps",
    save_steps=5,
    report_to=[],
    use_cpu=True,
    seed=1,
    disable_tqdm=True,
    remove_unused_columns=False,
    logging_strategy="no",
)
torch.manual_seed(0)
trainer = Trainer(model=Linear(), args=settings, train_dataset=watched(Samples()))
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
torch.save(trainer.model.state_dict(), "final.pt")
