"""A generative adversarial network: two networks, two optimizers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 2) * 0.3 + 1)
loop = paceline.Loop("run", dataset, batch_size=24, epochs=4, checkpoint_every="3 steps")
generator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
generator, critic = loop.prepare(generator, critic)
opt_g = loop.keep(torch.optim.Adam(generator.parameters(), 1e-2))
opt_c = loop.keep(torch.optim.Adam(critic.parameters(), 1e-2))
for step, (real,) in loop:
    fake = generator(torch.randn(len(real), 8))
    loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()
    loss_g = F.softplus(-critic(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    loop.log(loss_g=loss_g, loss_c=loss_c)
    print("step", step, flush=True)
