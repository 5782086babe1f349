"""What the accumulation window means, without ranks, shards, dtypes or placements: the engine's calls in plain
PyTorch. One object stands for all ranks; all arithmetic is in double precision, the update is torch.optim's."""

import math
from collections import namedtuple

import torch

Report = namedtuple("Report", "reason grad_norm clip_factor micro_batches weight", defaults=(0.0, 1.0, 0, 0.0))


class WindowModel:
    def __init__(self, world, managed, steps, clip, start):
        """start: {name: fp64 tensor}. clip: 0 for none."""
        self.world, self.managed, self.steps, self.clip = world, managed, steps, clip
        self.values = {name: torch.nn.Parameter(value) for name, value in start.items()}
        self._adam = torch.optim.Adam(self.values.values(), lr=0.1, betas=(0.9, 0.999), eps=1.0)
        self._said = None  # the caller's word on the boundary, kept until the next
        self.global_steps = self.skipped_steps = self.global_samples = self.micro_steps = 0
        self.zero_grad()

    def zero_grad(self):
        self.sums = {}  # weighted, over all contributions
        self._backwards = [0] * self.world
        self._micro_batches = 0  # managed: step() calls that found a new backward on some rank
        self._new = False  # some rank has run one since the last step()
        self._scaling = None
        self._weight = 0.0

    def backward(self, rank, gradients, scaling, weight):
        """One rank's. gradients: of the parameters that its graph reaches. scaling: "mean", "sum" or "weights"."""
        self._scaling = scaling
        factor = weight if scaling == "weights" else 1
        self._weight += weight if scaling == "weights" else 0
        for name, gradient in gradients.items():
            contribution = gradient * factor
            self.sums[name] = self.sums[name] + contribution if name in self.sums else contribution
        self._backwards[rank] += 1
        self._new = True

    @property
    def empty(self):
        return not any(self._backwards)

    @property
    def boundary(self):
        full = self._micro_batches + 1 >= self.steps if self._said is None else self._said
        return full or not self.managed

    def set_boundary(self, boundary):
        self._said = boundary

    def gradient_divisor(self):
        """Of what is shown inside the window: as if it got the configured length."""
        return self._normaliser(self.steps)

    def _normaliser(self, micro_batches):
        if self._scaling == "weights":
            return self._weight
        return self.world * (1 if self._scaling == "sum" else micro_batches)

    def step(self):
        if self.managed:
            self._micro_batches += self._new
            self.micro_steps += self._new
        else:
            self.micro_steps += max(self._backwards)
        self._new = False
        micro_batches = self._micro_batches if self.managed else max(self._backwards)
        counted = {"micro_batches": micro_batches, "weight": self._weight}
        if self.empty:
            return Report("empty window", **counted)
        full = self._micro_batches >= self.steps if self._said is None else self._said
        if self.managed and not full:
            return Report("mid-window", **counted)
        normaliser = self._normaliser(self._micro_batches if self.managed else self.steps)
        if normaliser == 0:  # all weights are 0: nothing to learn from
            self.zero_grad()
            return Report("empty window", **counted)
        report = self._update(normaliser, counted)
        self.global_steps += 1
        self.skipped_steps += report.reason != "applied"
        self.global_samples += self.world * self.steps
        self.zero_grad()
        return report

    def _update(self, normaliser, counted):
        gradients = {name: total / normaliser for name, total in self.sums.items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        if not math.isfinite(norm):
            return Report("non-finite gradient", norm, **counted)
        factor = self.clip / (norm + 1e-6) if 0 < self.clip < norm else 1.0
        for name, value in self.values.items():
            value.grad = gradients[name] * factor if name in gradients else None
        self._adam.step()
        return Report("applied", norm, factor, **counted)
