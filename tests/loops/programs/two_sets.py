"""Labelled and unlabelled samples in turn: a step on each, with an average of the weights as the teacher."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, StackDataset

import paceline


class Points(Dataset):
    def __init__(self, seed):
        self.points = torch.randn(160, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + 0.1 * torch.randn(4), (point.sum() > 0).long()


torch.manual_seed(0)
loop = paceline.Loop("run", StackDataset(Points(1), Points(2)), batch_size=24, epochs=4, checkpoint_every="3 steps")
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
teacher = loop.keep(copy.deepcopy(model))
model = loop.prepare(model)
optimizer = loop.keep(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
schedule = loop.keep(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, loop.total_steps))
for step, ((labelled, targets), (unlabelled, _)) in loop:
    optimizer.zero_grad()
    F.cross_entropy(model(labelled), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = teacher(unlabelled)
    F.mse_loss(model(unlabelled), wanted).backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 0.05)
    print("step", step, flush=True)
