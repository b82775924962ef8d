"""64 samples that tell their number, for the programs of this folder."""

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Random vectors, the same for each number."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": torch.tensor(i % 2), "number": torch.tensor(i)}
