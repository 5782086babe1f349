"""Orders of use: sharded parameters fault in wherever a model touches them, and ranks that diverge learn of it."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from case import case
from cells import merge
from expect import ScalarAdam, digest, expect_equal, expect_near, expect_reason, expect_same
from models import lin
from torch.utils.checkpoint import checkpoint

import ballast

ALL = ("fp32", "bf16", "fp16")


@case(managed=(False,))
def test_case_31(trial):
    """DeepSpeed#5606, #7965: overlapped reductions read gradients that were still being written."""
    on_device = trial.cell.placement == "device"
    steps = 10 if on_device else 2  # on NVMe a step moves 50 MB a rank each way
    elements = 1_000_003
    names = [f"layer{i}.p" for i in range(8)]
    ramp = torch.arange(elements).remainder(7) + float(trial.rank)  # integers, other by rank

    def train(overlap, bucket):
        zero = {
            "overlap_comm": overlap,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "sub_group_size": 200_000,
        }
        session = trial.start(lin({name: (elements,) for name in names}), zero_optimization=zero)
        for step in range(steps):
            if step % 5 == trial.rank:
                time.sleep(0.005)  # out of step
            session.backward({name: ramp * (i + 1) for i, name in enumerate(names)})
            expect_reason(session.step(), "applied")
        masters = session.masters()
        trial.sessions.pop().engine.destroy()
        return masters

    first = train(True, 500_000_000)
    expect_same(train(False, 1_500_000), first)
    if on_device:
        expect_same(train(True, 1_500_000), first)
        expect_same(train(True, 500_000_000), first)  # again
    trial.see("layer3.p", digest(first["layer3.p"]))
    adam = ScalarAdam()
    for _ in range(steps):
        value = adam.step(3.5)  # element 3 of layer 0: (3 + 4) / 2
    expect_near(first["layer0.p"][3].item(), value, 1e-5)


class TwoLayers(torch.nn.Module):
    """Two layers that a step uses in an order of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * 0.1 - 0.3)

    def forward(self, order, value):
        h = torch.full((2, 3), value, dtype=self.a.weight.dtype)
        for layer in order:
            h = torch.tanh((self.a if layer == "A" else self.b)(h))
        return h.float().square().sum()


@case(managed=(True,))
def test_case_32(trial):
    """DeepSpeed#1227, #3599: a layer used several times, or in another order than in the first step, was read
    ungathered."""
    power = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(power.weight, 2)
    session = trial.start(power)
    y = session.engine(session.engine(session.engine(torch.ones(1, 1))))
    expect_equal(y.item(), 8)
    session.backward_of(y.sum())
    session.expect_grad(12, "weight")
    expect_near(session.step().grad_norm, 12)

    def train(**zero):
        session = trial.start(TwoLayers(), zero_optimization=zero)
        for order in ("AB", "BA", "A", "ABB", "ABB", "BA"):
            session.backward(order, 0.5 + 0.25 * trial.rank)
            expect_reason(session.step(), "applied")
        return session.masters()

    expected = train(stage=0, offload_param=None)
    for prefetch, live in ((0, 0), (1_000_000, 0), (1_000_000, 1_000_000)):
        expect_same(train(stage3_prefetch_bucket_size=prefetch, stage3_max_live_parameters=live), expected)


class Adapted(torch.nn.Module):
    """A frozen layer in bf16 with a trained adapter in fp32 beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * 0.02 - 0.3)
        self.base.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.base(x.bfloat16()).float() + self.adapter(x))


class Recomputed(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Adapted() for _ in range(2))
        self.reentrant = reentrant  # None: keeps its activations

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().sum()


@case(managed=(True,))
def test_case_33(trial):
    """DeepSpeed#8148, #7462: recomputation at stage 3 read parameters that had left, or cast frozen ones."""

    def train(reentrant, **zero):
        model = Recomputed(reentrant)
        session = trial.start(model, zero_optimization={"stage3_max_live_parameters": 0, **zero})
        seen = {}
        for step in range(3):
            session.backward(torch.full((2, 6), 0.1 * (step + 1) + trial.rank, requires_grad=True))
            for name in ("blocks.0.adapter.weight", "blocks.1.adapter.bias"):
                seen[f"{name} in step {step}"] = session.grad(name).clone()
            session.step()
        for name, parameter in model.named_parameters():
            frozen = "base" in name
            expect_equal(parameter.dtype, torch.bfloat16 if frozen else torch.float32, name)
            expect_equal(parameter.requires_grad, not frozen, name)
        return seen

    expected = train(None, stage=0, offload_param=None)
    for reentrant in (False, True):
        expect_same(train(reentrant), expected)


@case(dtypes=ALL)
def test_case_34(trial):
    """DeepSpeed#7998, #8262: ranks that used different experts gathered different layers and hung."""
    model = lin({"trunk.p": (5,), "moe.e0.p": (4,), "moe.e1.p": (4,), "moe.e2.p": (4,)})
    session = trial.start(model, zero_optimization={"leaf_module": {"name_suffixes": ["moe"]}})
    e0, e1, e2 = ScalarAdam(), ScalarAdam(), ScalarAdam()
    for step in range(3):
        # Two experts on rank 0, another one on rank 1, and in the last step nobody's expert 1.
        if trial.rank == 0:
            experts = {"moe.e0.p": 2, "moe.e2.p": 6}
        else:
            experts = {"moe.e1.p": 4} if step < 2 else {"moe.e0.p": 0}
        session.window({"trunk.p": trial.shared(1), **experts})
        session.expect_value(e0.step(1), "moe.e0.p")
        session.expect_value(e1.step(2) if step < 2 else e1.value, "moe.e1.p")
        session.expect_value(e2.step(3), "moe.e2.p")
    session.expect_value(-0.15, "trunk.p")


@case(managed=(True,))
def test_case_34_resident(trial):
    """A unit that is resident may be used more often on one rank than on another."""
    for threshold in (0, 1000):
        session = trial.start(
            lin({"a.p": (4,), "b.p": (4,)}), zero_optimization={"stage3_param_persistence_threshold": threshold}
        )
        for value in (-0.075, -0.15, -0.225):
            session.backward({"a.p": (1, 2, 2) if trial.rank == 0 else 1, "b.p": trial.shared(3)})
            session.step()
            session.expect_value(value, "a.p")
            session.expect_value(value, "b.p")


@contextlib.contextmanager
def operators_may_fail():
    """An operator on a parameter that couldn't be gathered throws too; the engine's next call tells the cause."""
    try:
        yield
    except ballast.Error:
        raise
    except RuntimeError:
        pass


def _expect_divergence(trial, calls, parts):
    """Every rank must end with an error that holds all parts, long before the timeout."""
    began = time.monotonic()
    with pytest.raises(ballast.CommError) as caught:
        calls()
    assert time.monotonic() - began < 30
    for part in parts:
        assert part in str(caught.value), f"no {part!r} in: {caught.value}"
    trial.sessions.pop().engine.destroy()
    trial.start(lin(1))  # the process survives its engine


@case(stages=(3,))
def test_case_34_units(trial):
    """Ranks that used different layers waited for each other for ever."""
    session = trial.start(lin({"left.p": (4,), "right.p": (4,)}))

    def diverge():
        loss = torch.ones((), requires_grad=True)
        with operators_may_fail():
            loss = session.engine({"left.p" if trial.rank == 0 else "right.p": 1})
        with operators_may_fail():
            session.backward_of(loss)
        session.engine.step()

    _expect_divergence(trial, diverge, ["left", "right"])


@case(stages=(3,), managed=(False,))
def test_case_50_stage_3(trial):
    """At stage 3 every backward is everybody's: other numbers of them are an error that shows both."""
    session = trial.start(lin(4))

    def diverge():
        for k in range(1 if trial.rank == 0 else 3):
            with operators_may_fail():
                session.backward(k + 1, weight=1)
        session.engine.step()

    _expect_divergence(trial, diverge, ["after 1 backwards", "backward() number 2"])


_PROGRAM = """
import ballast, os, torch
experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 20}
config = {"managed_gradient_accumulation": False, "comm_timeout_seconds": 30, "zero_optimization": zero}
engine, *_ = ballast.initialize(model=experts, config=config, device="cpu")
for expert in (0, 1, int(os.environ["RANK"])):
    engine.backward(experts[expert](torch.ones(1, 4)).sum())
    engine.step()
"""


def test_case_34_programs():
    """The same as programs that catch nothing: each must end by itself, with a status that isn't zero."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    programs = []
    for rank in range(2):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = merge(
            dict(os.environ), {**place, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        )
        programs.append(
            subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        for program in programs:
            error = program.communicate(timeout=60)[1]
            assert program.returncode == 1, error
            assert "rank 0: gather of unit 0" in error and "rank 1: gather of unit 1" in error, error
    finally:
        for program in programs:
            program.kill()
