# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"]
# # Lab 1: Scaling training
#
# Why train on more than one device, and what does a larger batch change?

# %% tags=["setup"]
import torch

from paceline.labs import exercise, use_style

use_style()

# %% [markdown]
# **Exercise 1.1.** Write the gradient of the mean squared error of `y = w * x` with respect to `w`.


# %% tags=["exercise"]
def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over all samples of d/dw (w x - y)^2."""
    raise NotImplementedError


# %% tags=["check"]
with exercise("1.1"):
    found = gradient(torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert torch.allclose(torch.as_tensor(found), torch.tensor(7.0)), "the mean over the two samples is (2 + 12) / 2"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The square of <code>w x - y</code> has the derivative <code>2 (w x - y) x</code>; take its mean.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (2 * (w * x - y) * x).mean()


# %%
print(f"gradient at w = 1: {gradient(torch.tensor(1.0), torch.ones(4), torch.zeros(4)):.1f}")
