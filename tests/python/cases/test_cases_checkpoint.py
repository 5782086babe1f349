"""What was saved and taken up again, mostly by other processes: faults in which something of a run stayed behind, or
something else came back."""

import contextlib
import math
import os
import resource
import tempfile

import torch
import torch.distributed as dist
from case import case
from device import DEVICE
from expect import ScalarAdam, bit_equal, error_of, expect_equal, expect_near, expect_reason, expect_same
from models import lin

import ballast

ALL = ("fp32", "bf16", "fp16")


@contextlib.contextmanager
def log_lines():
    """What this process writes to standard error meanwhile, the library's own lines too; a list that holds them at the
    end."""
    lines = []
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines.extend(file.read().decode().splitlines())


@case(lives=2, dtypes=ALL, managed=(True,))
def test_case_10_load(trial):
    """transformers#22143, gpt-neox#308: a window that was pending at the save was applied half after the load, or its
    samples were counted twice."""
    two = trial.shared(2)
    if trial.life == 0:
        session = trial.start(lin(4), steps=2)
        for _ in range(3):
            session.backward(two)
            session.step()
        session.expect_value(-0.0666667)
        with log_lines() as lines:
            session.engine.save_checkpoint(trial.save, client_state={"micro_steps": session.engine.micro_steps})
        if trial.rank == 0:
            assert any("will miss 1 micro-batch " in line for line in lines), lines
        session.backward(two)
        expect_reason(session.step(), "applied")  # the save left the running window alone
        session.expect_value(-0.1333333)
        return
    session = trial.start(lin(4, start=7), steps=4)
    folder, state = session.engine.load_checkpoint(trial.save)
    expect_equal(folder, os.path.join(trial.save, "global_step1"))
    session.expect_value(-0.0666667)
    expect_equal(session.engine.global_samples, 2 * trial.world)
    expect_equal(session.engine.micro_steps, state["micro_steps"] - 1)
    for k in range(4):
        session.backward(two)
        expect_reason(session.step(), "applied" if k == 3 else "mid-window")
    session.expect_value(-0.1333333)


@case(lives=2, dtypes=("fp16",), managed=(True,))
def test_case_19_schedule(trial):
    """DeepSpeed#4344, Lightning#11188: the configured schedule came back at another step than the optimizer."""
    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.11, "warmup_num_steps": 10, "warmup_type": "linear"}
    schedule = {"type": "WarmupLR", "params": {**params, "last_batch_iteration": 0}}  # .01 t
    session = trial.start(lin(4, start=7 * trial.life), scheduler=schedule)
    if trial.life == 0:
        for _ in range(2):
            expect_reason(session.window(math.inf), "non-finite gradient")
    else:
        session.engine.load_checkpoint(trial.save)
        expect_equal(session.engine.skipped_steps, 2)
    for value in ((-0.005, -0.015, -0.03), (-0.05, -0.075))[trial.life]:
        session.window(trial.shared(1))
        session.expect_value(value)
    if trial.life == 0:
        session.engine.save_checkpoint(trial.save)


@case(lives=2, dtypes=ALL)
def test_case_24_travel(trial):
    """DeepSpeed#7050, #7906: groups got each other's state behind a trip to the host and to a file."""
    model = lin({"a": (3,), "b": (5,), "c": (7,), "d": (2,)}, start=1 + trial.life)
    groups = [{"params": [model.a, model.c]}, {"params": [model.b, model.d], "lr": 0.01, "weight_decay": 0.5}]
    session = trial.start(model, given={"optimizer": torch.optim.AdamW(groups, lr=0.1, eps=1.0, weight_decay=0.0)})
    if trial.life == 1:
        session.engine.load_checkpoint(trial.save)
        session.engine.offload_states()
        session.engine.reload_states()
    session.window({name: trial.shared(1) for name in "abcd"})
    for name, values in zip("abcd", ((0.95, 0.90), (0.99, 0.98005)) * 2):
        session.expect_value(values[trial.life], name)
    if trial.life == 0:
        session.engine.offload_states()
        session.engine.reload_states()
        session.engine.save_checkpoint(trial.save)


def _moments_come_back(trial):
    session = trial.start(lin(4, start=7 * trial.life))
    adam = ScalarAdam()
    values = [adam.step(c) for c in (1, 2, 4, -8)]
    expect_near(values[-1], -0.1653874)
    if trial.life == 0:
        for c, value in zip((1, 2, 4), values):
            session.window(trial.shared(c))
            session.expect_value(value)
        session.engine.save_checkpoint(trial.save)
    else:
        session.engine.load_checkpoint(trial.save)
    session.expect_state("exp_avg", 0.1 * (0.81 * 1 + 0.9 * 2 + 4))
    # torch's fused kernel for CUDA rounds beta2 to fp32 before it takes 1 - beta2: 1.3e-5 of the moment.
    rounds = DEVICE != "cpu" and trial.cell.placement == "device"
    beta2 = torch.tensor(0.999, dtype=torch.float32).item() if rounds else 0.999
    session.expect_state("exp_avg_sq", (1 - beta2) * (beta2**2 * 1 + beta2 * 4 + 16), tolerance=1e-7)
    session.expect_state("step", 3, tolerance=0)
    if trial.life == 1:
        session.window(trial.shared(-8))
        session.expect_value(values[-1])


@case(lives=2, dtypes=ALL)
def test_case_26(trial):
    """DeepSpeed#7786, #5263: moments or step count started anew in the process that went on."""
    _moments_come_back(trial)


@case(lives=2, placements=("nvme", "allnvme"), dtypes=("bf16", "fp32"))
def test_case_47(trial):
    """The same with optimizer states on NVMe."""
    _moments_come_back(trial)


@case(dtypes=ALL)
def test_case_27(trial):
    """DeepSpeed#762, #1322, #4141: weights that were loaded alone were overwritten by the old masters in the next
    step."""
    trial.start(lin(4, start=5)).engine.save_checkpoint(trial.save)
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        session = trial.start(lin(4, start=0.9))
        session.engine.load_checkpoint(trial.save, **options)
        session.expect_value(5)
        session.window(trial.shared(1))
        session.expect_value(4.95)


@case(world=3, lives=2, dtypes=ALL)
def test_case_28_load(trial):
    """DeepSpeed#3090, #2413, #3407: frozen weights came back rounded, flat, or not at all, tied names apart; the
    exported file had other shapes."""
    shapes = {f"unit{i // 2}.p{i}": (2 * i + 1, 3) for i in range(6)}
    frozen = list(shapes)[1::2]
    start = {name: 1 / 3 + (0.1, 9)[trial.life] * i for i, name in enumerate(shapes)}
    session = trial.start(lin(shapes, start, frozen, ties=[("unit0.p0", "last.tied")]))
    written = os.path.join(trial.save, "everything.pt")
    if trial.life == 0:
        session.window({"unit0.p0": trial.shared(1), "last.tied": trial.shared(1), "unit1.p2": trial.shared(2)})
        session.engine.save_checkpoint(trial.save)
        everything = session.everything()
        if trial.rank == 0:
            torch.save(everything, written)
        session.engine.save_16bit_model(trial.save)
    else:
        session.engine.load_checkpoint(trial.save)
        want = torch.load(written)
        expect_same(session.everything(), want)
        exported = torch.load(os.path.join(trial.save, "pytorch_model.bin"))
        expect_equal(set(exported), {*shapes, "last.tied"})
        for name, shape in shapes.items():
            expect_equal(exported[name].shape, shape)
            assert bit_equal(exported[name], want[f"seen {name}"]), name
        assert bit_equal(exported["last.tied"], exported["unit0.p0"])
        assert bit_equal(session.value("last.tied"), session.value("unit0.p0"))
        session.window({"last.tied": trial.shared(1), "unit1.p2": trial.shared(2)})


@case(lives=2, placements=("nvme", "allnvme"), dtypes=ALL)
def test_case_29(trial):
    """DeepSpeed#7613, #6963: a checkpoint held names of swap files instead of what was in them."""
    session = trial.start(lin(1000, start=7 * trial.life))
    written = os.path.join(trial.save, "everything.pt")
    if trial.life == 0:
        for c in (1, 3):
            session.window(trial.shared(c))
        session.engine.save_checkpoint(trial.save)
    else:
        session.engine.load_checkpoint(trial.save)  # the first engine has taken its swap files with it
    for c in (-2, 5):
        session.window(trial.shared(c))
    everything = session.everything()
    if trial.life == 1:
        expect_same(everything, torch.load(written))
    elif trial.rank == 0:
        torch.save(everything, written)


@case()
def test_case_38(trial):
    """torchtitan#1311, DeepSpeed#801: what couldn't be loaded was passed over in silence, or one rank waited for the
    others."""
    session = trial.start(lin(4, start=1))
    engine, folder = session.engine, trial.save

    def expect_error(parts, call):
        error = error_of(ballast.IoError, call)
        for part in parts:
            assert part in error, f"no {part!r} in: {error}"
        trial.see(parts[0], error)  # equal on all ranks
        session.expect_value(1, tolerance=0)

    expect_error(["latest", folder], lambda: engine.load_checkpoint(folder))
    expect_error(["nowhere"], lambda: engine.load_checkpoint(os.path.join(folder, "nowhere")))
    engine.save_checkpoint(folder, "one")
    expect_error(["two", "there are: one"], lambda: engine.load_checkpoint(folder, "two"))
    last = trial.world - 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    if trial.rank == last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # the tests may run as root, whom no permission stops
    try:
        expect_error([f"rank {last}", "File too large"], lambda: engine.save_checkpoint(folder, "two"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    expect_equal(sorted(os.listdir(folder)), ["latest", "one"])
    dist.barrier()
    shard = os.path.join(folder, "one", "rank-00000-of-00002.safetensors")
    if trial.rank == 0:
        os.remove(shard)
    dist.barrier()
    expect_error([os.path.basename(shard), "No such file"], lambda: engine.load_checkpoint(folder))
    session.window(trial.shared(1))
    session.expect_value(0.95)
