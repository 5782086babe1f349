"""Expectations. Ranks don't run under pytest's assertion rewriting, so they say what they got."""

import hashlib
import math

import pytest
import torch

TOLERANCE = 1e-6


def expect_equal(got, want, what=""):
    assert got == want, f"{what}{': ' if what else ''}got {got!r}, want {want!r}"


def expect_near(got, want, tolerance=TOLERANCE):
    assert abs(got - want) <= tolerance, f"got {got!r}, want {want!r}"


def expect_all(tensor, value, tolerance, what):
    assert tensor is not None, f"{what}: nothing, want {value}"
    if tensor.numel() == 0:
        return
    off = (tensor.double() - value).abs().max().item()
    first = tensor.flatten()[0].item()
    assert off <= tolerance, (
        f"{what}: want {value} in all elements, got {first} in the first, off by {off} in the worst"
    )


def expect_reason(report, reason):
    assert report.reason == reason and report.applied == (reason == "applied"), report


def bit_equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def expect_same(got, want):
    """Two dictionaries of tensors."""
    assert got.keys() == want.keys()
    for label, value in want.items():
        assert bit_equal(got[label], value), f"{label}: {got[label].flatten()[:4]}, want {value.flatten()[:4]}"


def error_of(kind, call):
    """The text of the error that the call must end with."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def _bytes(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor):
    """The same for the same bits, dtype and shape."""
    return hashlib.sha1(_bytes(tensor).numpy()).hexdigest() + f" {tensor.dtype} {list(tensor.shape)}"


class ScalarAdam:
    """The settings' optimizer on one element, in double precision."""

    def __init__(self, value=0.0):
        self.value, self.m, self.v, self.steps = value, 0.0, 0.0, 0

    def step(self, gradient, lr=0.1):
        self.steps += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient * gradient
        m, v = self.m / (1 - 0.9**self.steps), self.v / (1 - 0.999**self.steps)
        self.value -= lr * m / (math.sqrt(v) + 1)
        return self.value
