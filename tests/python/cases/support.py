"""What the cases share: a model whose gradients a test chooses, the combinations of stage and placement, and sessions, each
one engine under test on one rank.

    @case()
    def test_case_01(trial):
        session = trial.start(lin(4), steps=4)

is one test per stage and placement; its body runs on every rank, in processes of ranks.py."""

import concurrent.futures
import functools
import hashlib
import importlib
import math
import os
import shutil
import tempfile
from dataclasses import dataclass

import pytest
import ranks
import torch
import torch.distributed as dist

import ballast

TOLERANCE = 1e-6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """Where states lie: "device", "host" (optimizer states and sums of gradients), "nvme" (optimizer states in a swap
    file, sums on the host), "allhost" (parameters on the host too, at stage 3), "allnvme" (all that can, in swap files).

    Two kinds of windows, two forms of backward and three dtypes: a cell has one of each, so that every case meets all of
    them somewhere; the full product is tested beside the engine.
    """

    stage: int
    placement: str
    dtype: str = "fp32"
    managed: bool = True
    plain: bool = False  # loss.backward() where it can say what is meant, else engine.backward(loss)

    def __str__(self):
        return f"stage{self.stage}-{self.placement}"

    @property
    def on_disk(self):
        return self.placement in ("nvme", "allnvme")


PLACEMENTS = ("device", "host", "nvme", "allhost", "allnvme")
STAGES = (0, 1, 2, 3)


def cells(stages=STAGES, placements=PLACEMENTS, dtypes=("fp32",), managed=(True, False)):
    made = []
    for stage in stages:
        for index, placement in enumerate(PLACEMENTS):
            if placement not in placements or (placement == "allhost" and stage != 3):
                continue
            turn = stage + index
            made.append(
                Cell(stage, placement, dtypes[turn % len(dtypes)], managed[turn % len(managed)], (stage + turn // 2) % 2 == 1)
            )
    return made


# Cases spend much of their time waiting for sockets, so a few run at once; conftest.py starts what was selected.
_workers = concurrent.futures.ThreadPoolExecutor(6)
_started = {}


def forget_started():
    """Those that haven't begun never will."""
    for future in _started.values():
        future.cancel()
    _started.clear()


def case(world=2, lives=1, managed=(True, False), **which):
    """Makes the body of a case a test in every cell that it holds in. lives: of the processes: body is called once in each,
    with trial.life 0, 1, ..., one after the other, with one folder."""

    def decorate(body):
        @pytest.mark.parametrize("cell", cells(managed=managed, **which), ids=str)
        @functools.wraps(body, assigned=("__module__", "__name__", "__doc__"), updated=())
        def test(cell):
            (_started.pop((body, cell), None) or start(cell)).result()

        def start(cell):
            return _workers.submit(run_case, world, lives, body, cell)

        def start_early(cell):
            _started[body, cell] = start(cell)

        del test.__wrapped__  # pytest would look for the body's arguments
        test.body = body
        test.start_early = start_early
        return test

    return decorate


def run_case(world, lives, body, cell):
    folder = tempfile.mkdtemp(prefix="ballast-case-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        for kind in ("save", "swap"):
            os.mkdir(os.path.join(folder, kind))
        for life in range(lives):
            run = ranks.run if lives == 1 else ranks.run_fresh
            seen = run(world, _play, body.__module__, body.__name__, cell, life, folder)
            for rank in range(1, world):
                assert [entry[0] for entry in seen[rank]] == [entry[0] for entry in seen[0]], f"rank {rank}"
                for mine, first in zip(seen[rank], seen[0]):
                    assert mine == first, f"rank {rank}: {mine}, rank 0: {first}"
            assert seen[0], "nothing was compared between ranks"
            assert os.listdir(os.path.join(folder, "swap")) == [], "swap files were left behind"
    finally:
        shutil.rmtree(folder)


def _play(rank, module, name, cell, life, folder):
    trial = Trial(rank, cell, life, folder)
    try:
        getattr(importlib.import_module(module), name).body(trial)
        trial.finish()
    except BaseException as error:
        raise AssertionError(f"in {cell!r}") from error
    return trial.seen


def settings(cell, swap, steps=1, **changes):
    """A configuration for the cell, `changes` merged over it. Adam with lr 0.1, betas 0.9/0.999, eps 1 and no decay: its
    first update is -0.1*g/(|g|+1), so that a gradient of the wrong size shows, which the usual eps hides. On NVMe chunks are
    as small as they can be and the rings as short, so that they turn many times in a small update."""
    zero = {"stage": cell.stage, "stage3_param_persistence_threshold": 0}
    disk = {"device": "nvme", "nvme_path": swap}
    if cell.placement in ("host", "allhost"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell.placement == "allhost":
        zero["offload_param"] = {"device": "cpu"}
    if cell.on_disk:
        zero["offload_optimizer"] = {**disk, "buffer_count": 2 + cell.stage % 2}
        zero["sub_group_size"] = 64 if cell.dtype == "fp32" else 128
    if cell.placement == "allnvme":
        zero["offload_gradients"] = dict(disk)
        if cell.stage == 3:
            zero["offload_param"] = {**disk, "buffer_count": 2, "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "managed_gradient_accumulation": cell.managed,
        "steps_per_print": 0,
        "comm_timeout_seconds": 60,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1.0}},
        "zero_optimization": zero,
    }
    if cell.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if cell.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10}
    return merge(config, changes)


def merge(config, changes):
    result = dict(config)
    for key, value in changes.items():
        result[key] = merge(result.get(key) or {}, value) if isinstance(value, dict) else value
    return result


# ---- models ----


class Lin(torch.nn.Module):
    """Parameters without arithmetic of their own: a test decides which of them a loss uses and what gradient each gets.
    Dots in a name make child modules, each a unit of its own."""

    def put(self, name, parameter):
        path, _, leaf = name.rpartition(".")
        owner = self
        for part in path.split(".") if path else ():
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(leaf, parameter)

    def forward(self, pull):
        """sum(coefficient * parameter) over what is named: each element's gradient is its coefficient, exactly. A number
        alone is meant for "p"."""
        pull = {"p": pull} if isinstance(pull, (int, float, torch.Tensor)) else pull
        loss = 0
        for name, coefficient in pull.items():
            for one in coefficient if isinstance(coefficient, tuple) else (coefficient,):
                parameter = self.get_parameter(name)
                factor = torch.as_tensor(one, dtype=parameter.dtype)
                loss = loss + (parameter * factor.expand(parameter.shape)).sum()
        return loss


def lin(shapes, start=0.0, frozen=(), ties=()):
    """shapes: {name: shape}, or the length of the one parameter "p". ties: (existing name, second name)."""
    model = Lin()
    for name, shape in ({"p": (shapes,)} if isinstance(shapes, int) else shapes).items():
        value = start[name] if isinstance(start, dict) else start
        model.put(name, torch.nn.Parameter(torch.full(shape, float(value)), requires_grad=name not in frozen))
    for existing, second in ties:
        model.put(second, model.get_parameter(existing))
    return model


class Zoo(torch.nn.Module):
    """Every awkward kind of parameter in one small model: odd sizes, a table tied to the output layer, a frozen layer, ones
    that rest in some windows or run on one rank only, one that nothing uses, zero-dimensional and empty ones."""

    LEAF = {"leaf_module": {"names": ["experts"]}}  # for zero_optimization
    _WORDS, _WIDTH, _HIDDEN = 11, 5, 7

    def __init__(self, seed=1):
        super().__init__()
        linear = torch.nn.Linear
        self.embedding = torch.nn.Embedding(self._WORDS, self._WIDTH)
        self.up = torch.nn.ModuleList(linear(self._WIDTH, self._HIDDEN) for _ in range(3))
        self.down = torch.nn.ModuleList(linear(self._HIDDEN, self._WIDTH) for _ in range(3))
        self.frozen = linear(self._WIDTH, self._WIDTH).requires_grad_(False)
        self.experts = torch.nn.Module()
        self.experts.list = torch.nn.ModuleList(linear(self._WIDTH, self._WIDTH) for _ in range(2))
        self.auxiliary = linear(self._WIDTH, self._WIDTH)
        self.unused = linear(3, 2)
        self.head = linear(self._WIDTH, self._WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = torch.nn.Parameter(torch.ones(()))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 4))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter is not self.gain:
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def _block(self, i, h):
        return h + self.down[i](torch.tanh(self.up[i](h)))

    def forward(self, step, micro_batch, rank):
        """The loss of one micro-batch, a pure function of the arguments. Expert 1 runs on rank 0 alone and in odd steps
        alone; the auxiliary layer rests in every third step."""
        tokens, target = _sample(step, micro_batch, rank)
        h = self.embedding(tokens)
        for i in range(len(self.up)):
            h = self._block(i, h)
        h = h + self.frozen(h)
        h = h + self.experts.list[int(rank == 0 and step % 2 == 1)](h)
        if step % 3 != 1:
            h = h + self.auxiliary(h)
        out = self.head(h) * self.gain + self.nothing.sum()
        return (out.float() - target).square().mean()

    def backwards_through_blocks(self, step, micro_batch, rank):
        h = self.embedding(_sample(step, micro_batch, rank)[0])
        for i in reversed(range(len(self.up))):
            h = self._block(i, h)
        return h


def _sample(step, micro_batch, rank):
    generator = torch.Generator().manual_seed(step * 10007 + micro_batch * 101 + rank + 1)
    return torch.randint(Zoo._WORDS, (2, 3), generator=generator), torch.rand(2, 3, Zoo._WORDS, generator=generator)


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


# ---- one rank's view ----


class Trial:
    def __init__(self, rank, cell, life, folder):
        self.rank, self.cell, self.life = rank, cell, life
        self.world = dist.get_world_size()
        self.save = os.path.join(folder, "save")
        self.swap = os.path.join(folder, "swap")
        self.seen = []  # what must be equal on all ranks
        self.sessions = []

    def shared(self, mean):
        """Another value on every rank, whose mean over the ranks is `mean`."""
        return mean + 2 * self.rank - (self.world - 1)

    def settings(self, steps=1, **changes):
        return settings(self.cell, self.swap, steps, **changes)

    def start(self, model, steps=1, config=None, given=None, **changes):
        """given: further arguments of ballast.initialize."""
        session = Session(self, model, config or self.settings(steps, **changes), given or {})
        self.sessions.append(session)
        return session

    def finish(self):
        for session in self.sessions:
            session.end()
        self.sessions = []


class Session:
    """One engine under test."""

    def __init__(self, trial, model, config, given):
        self.trial, self.model = trial, model
        if "optimizer" in given:
            config = {key: value for key, value in config.items() if key != "optimizer"}
        self.engine, self.optimizer, _, _ = ballast.initialize(model=model, config=config, device="cpu", **given)
        self.managed = config.get("managed_gradient_accumulation", True)

    def backward(self, *inputs, **options):
        self.backward_of(self.engine(*inputs), **options)

    def backward_of(self, loss, **options):
        if self.trial.cell.plain and not options.keys() - {"retain_graph"}:
            loss.backward(**options)
        else:
            self.engine.backward(loss, **options)

    def step(self):
        report = self.engine.step()
        self._see("report", repr([getattr(report, name) for name in _REPORT]))
        return report

    def window(self, *pulls, **options):
        """A whole window. Managed: every micro-batch is followed by step(), and all but the last are mid-window."""
        report = None
        for index, pull in enumerate(pulls):
            self.backward(pull, **options)
            last = index + 1 == len(pulls)
            if not self.managed and not last:
                continue
            assert self.engine.is_gradient_accumulation_boundary() == (last or not self.managed), index
            report = self.step()
            if not last:
                expect_reason(report, "mid-window")
        return report

    def value(self, name="p"):
        return ballast.safe_get_full_fp32_param(self.model.get_parameter(name))

    def grad(self, name="p"):
        return ballast.safe_get_full_grad(self.model.get_parameter(name))

    def state(self, key, name="p"):
        return ballast.safe_get_full_optimizer_state(self.model.get_parameter(name), key)

    def expect_value(self, value, name="p", tolerance=TOLERANCE):
        expect_all(self.value(name), value, tolerance, f"parameter {name}")

    def expect_grad(self, value, name="p", tolerance=TOLERANCE):
        expect_all(self.grad(name), value, tolerance, f"gradient of {name}")

    def expect_state(self, key, value, name="p", tolerance=TOLERANCE):
        expect_all(self.state(key, name), value, tolerance, f"{key} of {name}")

    def masters(self):
        return {name: self.value(name).clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def everything(self):
        """What a checkpoint must bring back, by label."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"full {name}"] = self.value(name).clone()
            found[f"seen {name}"] = parameter.detach().clone()
            if parameter.requires_grad:
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    found[f"{key} of {name}"] = self.state(key, name).clone()
        engine = self.engine
        counts = [engine.global_steps, engine.skipped_steps, engine.global_samples, engine.micro_steps]
        found["counters, rates and scale"] = torch.tensor([*counts, *engine.get_lr(), engine.cur_scale], dtype=torch.float64)
        return found

    def end(self):
        """Compares parameters between ranks, and ends the engine."""
        for name, parameter in self.model.named_parameters():
            self._see(f"master of {name}", _digest(self.value(name)))
            self._see(f"parameter {name}", _digest(parameter.detach().clone()))
        self.engine.destroy()

    def _see(self, label, value):
        self.trial.seen.append((label, value))


_REPORT = ("applied", "reason", "grad_norm", "clip_factor", "loss_scale", "micro_batches", "weight", "lr")


def _digest(tensor):
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha1(flat.numpy().tobytes()).hexdigest() + f" {tensor.dtype} {list(tensor.shape)}"


# ---- expectations ----


# Ranks don't run under pytest's assertion rewriting, so expectations say what they got.


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
    assert off <= tolerance, f"{what}: want {value} in all elements, got {first} in the first, off by {off} in the worst"


def expect_reason(report, reason):
    assert report.reason == reason and report.applied == (reason == "applied"), report


def bit_equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and _digest(a) == _digest(b)


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
