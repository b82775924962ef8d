"""A generative adversarial network: two networks, two optimizers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 2) * 0.3 + 1)
loader = DataLoader(dataset, batch_size=24, shuffle=True)
generator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
opt_g = torch.optim.Adam(generator.parameters(), 1e-2)
opt_c = torch.optim.Adam(critic.parameters(), 1e-2)
step = 0
for epoch in range(4):
    for (real,) in loader:
        step += 1
        fake = generator(torch.randn(len(real), 8))
        loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        loss_g = F.softplus(-critic(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        print("step", step, flush=True)
