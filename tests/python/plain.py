"""What the module is compared with: the same training by PyTorch alone, on the whole batch, in one process."""

import json

import torch
from device import DEVICE, seeded

import ballast

PLACEMENTS = ["device", "host", "nvme"]


def settings(stage=0, placement="device", folder=None, **more):
    """A configuration for a stage and a placement of all that it can place."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if placement != "device":
        target = {"device": "cpu"} if placement == "host" else {"device": "nvme", "nvme_path": str(folder)}
        zero["offload_optimizer"] = target
        if stage == 3:
            zero["offload_param"] = target
    merged = {"zero_optimization": zero, "managed_gradient_accumulation": False, "steps_per_print": 0}
    merged.update(more)
    return json.loads(json.dumps(merged))


class Net(torch.nn.Module):
    """Odd sizes, a tied pair, a frozen parameter, one that is never used, and a list of blocks."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 7)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(3))
        self.frozen = torch.nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.frozen
        return self.head(x)


def tokens(step, number, rank=0, size=4):
    return torch.randint(11, (size, 6), generator=seeded(1000 * step + 10 * number + rank), device=DEVICE)


def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def masters(engine):
    return {name: ballast.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


def assert_close(got, want, tolerance=2e-6):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name].cpu(), want[name].detach().cpu(), atol=tolerance, rtol=tolerance, msg=lambda m: f"{name}: {m}"
        )


def train_plain(model, optimizer, windows, world=1, loss=loss_of, after=lambda: None):
    """windows: numbers of backwards. Every rank's micro-batches, averaged."""
    for step, length in enumerate(windows):
        for number in range(length):
            for rank in range(world):
                (loss(model, tokens(step, number, rank)) / (length * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_engine(engine, windows, rank=0, loss=loss_of):
    """The same by the engine, in both forms of backward. Caller-owned windows average too: gas is 1 and each loss carries
    its share."""
    for step, length in enumerate(windows):
        for number in range(length):
            value = loss(engine, tokens(step, number, rank)) / length
            if number % 2 == 0:
                engine.backward(value)
            else:
                value.backward()
        engine.step()
    return masters(engine)
