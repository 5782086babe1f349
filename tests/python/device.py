"""Where the tests' engines train: BALLAST_TEST_DEVICE, else the CPU. Tensors that name no device lie there too."""

import os

import torch

DEVICE = os.environ.get("BALLAST_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)


def seeded(seed):
    return torch.Generator(DEVICE).manual_seed(seed)
