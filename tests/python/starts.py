"""How tests make engines, and the optimizers that they give them."""

import torch
from device import DEVICE
from plain import loss_of, settings, train_plain

import ballast

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.2),
    "adam_decoupled": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.2, decoupled_weight_decay=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}
WINDOWS = [2, 1, 3]


def start(model, stage=2, optimizer=None, **options):
    more = options.pop("more", {})
    given = (
        {} if optimizer is not None or "optimizer" in more else {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    return ballast.initialize(
        model=model, optimizer=optimizer, config=settings(stage, **given, **more), device=DEVICE, **options
    )


SGD = {"type": "SGD", "params": {"lr": 0.1}}


def placed(model, stage=3, placement="device", folder=None, **more):
    return ballast.initialize(
        model=model, config=settings(stage, placement, folder, optimizer=SGD, **more), device=DEVICE
    )[0]


def plainly(model, windows, world=1, loss=loss_of):
    return train_plain(model, torch.optim.SGD(model.parameters(), lr=0.1), windows, world, loss)
