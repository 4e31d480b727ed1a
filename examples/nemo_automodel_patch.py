"""Patch nemo_automodel with this package and compute one loss through its MDLM strategy.

pip install --no-deps nemo-automodel==0.7.0 && pip install transformers pyyaml
python examples/nemo_automodel_patch.py
"""

import torch
from nemo_automodel.recipes.dllm.strategy import MDLMStrategy

from dllm_kernels.integrations import nemo_automodel

VOCABULARY, MASK = 100, 99


def main():
    """Patch, compute the loss, unpatch; return the module of the loss that the strategy created."""
    print(nemo_automodel.patch())
    strategy = MDLMStrategy()
    loss_fn = strategy.create_loss_fn({})
    ids, loss_mask = torch.randint(0, MASK, (2, 16)), torch.ones(2, 16)
    options = {"eps": 1e-3, "block_size": None, "half_life_ratio": None}
    noisy, noise_mask, p_mask = strategy.apply_corruption(ids, loss_mask, MASK, **options)
    embedding = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    supervised = int(loss_mask.sum())  # masked or not
    loss = loss_fn(embedding(noisy), ids, noise_mask, p_mask, loss_mask, num_diffusion_tokens=supervised)
    loss.total_loss.backward()
    print(f"loss {loss.total_loss:.3f} by {type(loss_fn).__module__}")
    nemo_automodel.unpatch()
    return type(loss_fn).__module__


if __name__ == "__main__":
    main()
