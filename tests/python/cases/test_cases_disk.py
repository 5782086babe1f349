"""Faults that are about swap files themselves."""

import glob
import os
import resource

import pytest
import torch
import torch.distributed as dist
from case import case
from device import DEVICE, seeded
from expect import bit_equal, error_of, expect_equal
from models import Zoo, lin
from usage import resident, small_pages

import ballast

ON_DISK = ("nvme", "allnvme")
ALL_ON_DISK = {"stages": (3,), "placements": ("allnvme",), "world": 1}


@case(placements=ON_DISK)
def test_case_23(trial):
    """DeepSpeed#1070, #2006, #7712: sizes that are no multiple of a block broke swapping."""
    sizes = [1, 127, 129, 1025, 262_145] + [12_500_000] * (trial.cell.stage == 3)
    model = lin({f"n{size}.p": (size,) for size in sizes})
    generator = seeded(1)
    want = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            want[name] = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(want[name])
    session = trial.start(model, zero_optimization={"sub_group_size": 1_000_000})
    for name, value in want.items():
        parameter = model.get_parameter(name)
        assert bit_equal(session.value(name), value), name
        moment = value * 3
        ballast.safe_set_full_optimizer_state(parameter, moment, "exp_avg_sq")
        ballast.safe_set_full_grad(parameter, moment)
    for name, value in want.items():
        assert bit_equal(session.state("exp_avg_sq", name), value * 3), name
        assert torch.allclose(session.grad(name), value * 3), name
        assert bit_equal(session.value(name), value), f"{name} behind the others' writes"
        assert bit_equal(model.get_parameter(name).detach() * 1, value), f"{name} as the model sees it"


@case(placements=ON_DISK)
def test_case_23_tiny(trial):
    """All parameters are tiny."""
    shapes = {"a.p": (1,), "b.p": (), "c.p": (2,)}
    session = trial.start(lin(shapes))
    session.window({name: trial.shared(1) for name in shapes})
    for name in shapes:
        session.expect_value(-0.05, name)


def _train_and_spoil(trial, file, spoil, signs):
    """Rank 0's file is spoilt between two steps: no later step may use it, and every rank must end with an error; rank
    0's names the file and one of the signs."""
    session = trial.start(Zoo(), zero_optimization=Zoo.LEAF, comm_timeout_seconds=20)

    def train(step):
        session.backward(step, 0, trial.rank)
        return int(session.step().applied)

    expect_equal(sum(train(step) for step in range(3)), 3)
    session.engine.synchronize()
    if trial.rank == 0:
        (path,) = glob.glob(os.path.join(trial.swap, "*-r0-*", file))
        spoil(path)
    dist.barrier()
    after = 0
    with pytest.raises(RuntimeError):
        for step in range(3, 8):
            after += train(step)
        session.engine.synchronize()
    assert after <= 1, "the step under way had been agreed on, no later one may be"
    cause = error_of(ballast.Error, session.engine.step)
    if trial.rank == 0:
        assert file in cause and "chunk " in cause and "rank 0" in cause and any(sign in cause for sign in signs), cause
    trial.seen.clear()  # ranks end at different calls
    trial.sessions.pop().engine.destroy()
    trial.start(lin(1))  # the process survives its engine


def _truncate(path):
    os.truncate(path, 0)


def _fill_with_zeros(path):
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


@case(placements=ON_DISK)
def test_case_35(trial):
    """DeepSpeed#1627: a swap file that was cut off between two steps."""
    _train_and_spoil(
        trial, "optimizer.swap", _truncate, ["ends too early", "checksum"]
    )  # a write behind the step may follow


@case(placements=ON_DISK)
def test_case_45(trial):
    """A swap file overwritten by zeros of equal size was trained on."""
    _train_and_spoil(trial, "optimizer.swap", _fill_with_zeros, ["checksum"])


@case(stages=(3,), placements=("allnvme",))
def test_case_45_parameters(trial):
    """The same with the file of parameters."""
    _train_and_spoil(trial, "parameters.swap", _fill_with_zeros, ["checksum"])


@case(placements=ON_DISK)
def test_case_35_full(trial):
    """DeepSpeed#1627: a disk with room for less than the states, on one rank, found at the start by all."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trial.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        error = error_of(ballast.Error, lambda: trial.start(lin(1_000_000), comm_timeout_seconds=20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if trial.rank == 0:
        assert ".swap" in error and "File too large" in error, error
    dist.barrier()
    trial.start(lin(1))  # the processes go on


def _start_error(trial, **zero):
    """What comes of the settings; "" if the engine starts."""
    config = trial.settings(zero_optimization=zero)
    try:
        engine, *_ = ballast.initialize(model=lin({"a.p": (100_000,), "b.p": (5,)}), config=config, device=DEVICE)
    except ballast.Error as error:
        return str(error)
    engine.destroy()
    return ""


@case(**ALL_ON_DISK)
def test_case_36(trial):
    """DeepSpeed#3506, #3062: a parameter larger than the swap buffer, or a path that is none, failed in the midst of a
    run."""
    small = _start_error(trial, offload_param={"max_in_cpu": 0, "buffer_size": 99_999})
    assert "unit a: 100032 elements" in small and "buffer_size = 99999" in small, small
    expect_equal(_start_error(trial, offload_param={"max_in_cpu": 0, "buffer_size": 100_032}), "")

    folder = os.path.join(trial.swap, "a folder with spaces")
    os.mkdir(folder)
    file = os.path.join(folder, "file")
    with open(file, "w") as out:
        out.write("text")
    wrong_paths = [os.path.join(folder, "missing"), file, "/proc/self"]  # nobody can write in the last
    for section in ("offload_optimizer", "offload_gradients", "offload_param"):
        absent = _start_error(trial, **{section: {"nvme_path": None}})
        assert f"zero_optimization.{section}.nvme_path" in absent, absent
        for wrong in wrong_paths:
            error = _start_error(trial, **{section: {"nvme_path": wrong}})
            assert "nvme_path" in error and wrong in error, error
        expect_equal(_start_error(trial, **{section: {"nvme_path": folder}}), "")
    os.remove(file)
    os.rmdir(folder)
    trial.start(lin(1))  # for the ranks to compare


@case(world=1, placements=ON_DISK, dtypes=("fp32", "bf16"))
def test_case_37(trial):
    """DeepSpeed#8075, #5700, #6630: descriptors and memory grew with every step."""
    with small_pages():
        session = trial.start(Zoo(), zero_optimization=Zoo.LEAF)
        for step in range(200):
            session.backward(step, 0, trial.rank)
            assert session.engine.step().applied
            if step == 20:
                early = len(os.listdir("/proc/self/fd")), resident()
        expect_equal(len(os.listdir("/proc/self/fd")), early[0])
        late = resident()
    assert late <= 1.01 * early[1], (early[1], late)


@case(placements=("host", "nvme", "allhost", "allnvme"))
def test_case_37_pinned(trial):
    """DeepSpeed#6630: pinned memory was a multiple of what it held. Without an accelerator nothing is pinned, and what
    the host holds is what is stored there and at most a tenth more."""
    elements = 400_000
    for pin in (False, True):
        zero = {"offload_optimizer": {"pin_memory": pin}, "sub_group_size": 20_000}
        session = trial.start(lin({"a.p": (elements,)}), zero_optimization=zero)
        session.window(dict.fromkeys(["a.p"], trial.shared(1)))
        session.expect_value(-0.05, "a.p")
        if not trial.cell.on_disk:
            share = elements / (trial.world if trial.cell.stage >= 1 else 1)
            held = session.engine.memory()["optimizer/host"][1]
            assert 12 * share <= held <= 1.1 * 12 * share, (held, share)
