"""Contrastive learning: two random views of each sample, and the loss of SimCLR over the batch."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __init__(self):
        self.rows = np.random.default_rng(0).normal(size=(160, 8)).astype(np.float32)

    def __len__(self):
        return len(self.rows)

    def view(self, row):
        noise = np.random.normal(scale=0.2, size=8).astype(np.float32)
        return torch.from_numpy(row + noise) * random.choice([0.5, 1.0, 2.0])

    def __getitem__(self, index):
        return self.view(self.rows[index]), self.view(self.rows[index])


torch.manual_seed(0)
loader = DataLoader(Views(), batch_size=24, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
step = 0
for epoch in range(4):
    for first, second in loader:
        step += 1
        both = F.normalize(model(torch.cat([first, second])), dim=1)
        scores = (both @ both.T / 0.5).fill_diagonal_(-torch.inf)
        partners = torch.arange(len(both)).roll(len(first))
        loss = F.cross_entropy(scores, partners)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, flush=True)
