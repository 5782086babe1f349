"""Threads, forks, garbage collection and the end of the interpreter around an engine."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from device import DEVICE
from plain import Net, assert_close, loss_of, masters, tokens, train_engine
from ranks import run
from starts import placed as start, plainly

import ballast


def _with_threads(rank, stage, placement):
    engine = start(Net(), stage, placement)

    def in_a_thread(work):
        failures = []

        def guarded():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]

    for step, length in enumerate([2, 1, 3]):
        for number in range(length):

            def forward_backward(number=number):
                loss = loss_of(engine, tokens(step, number, rank)) / length
                loss.backward() if number % 2 else engine.backward(loss)

            in_a_thread(forward_backward)
        in_a_thread(engine.step)
    return masters(engine)


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "host")])
def test_each_call_from_another_thread(stage, placement):
    want = plainly(Net(), [2, 1, 3], world=2)
    for got in run(2, _with_threads, stage, placement):
        assert_close(got, want, 5e-6)


def test_a_waiting_engine_leaves_other_threads_running():
    """Rank 0 is in step() while rank 1 comes late: threads of rank 0 go on meanwhile."""
    ticks, _ = run(2, _late, 2)
    assert ticks >= 5


def _late(rank, stage):
    import time

    engine = start(Net(), stage)
    loss = loss_of(engine, tokens(0, 0, rank))
    count = 0
    over = threading.Event()

    def tick():
        nonlocal count
        while not over.wait(0.05):
            count += 1

    ticker = threading.Thread(target=tick)
    if rank == 1:
        time.sleep(1)
    ticker.start()
    engine.backward(loss)
    engine.step()
    over.set()
    ticker.join()
    return count


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return tokens(index, 0)[0]


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_workers_of_a_data_loader(how, placement, tmp_path):
    if how == "fork" and DEVICE != "cpu":
        pytest.skip("PyTorch makes no tensor on a GPU in a forked worker")
    engine = start(Net(), 3, placement, tmp_path)
    loader = torch.utils.data.DataLoader(Windows(), batch_size=4, num_workers=2, multiprocessing_context=how)
    for batch in loader:
        engine.backward(loss_of(engine, batch))
        assert engine.step().applied
    assert engine.global_steps == 2


def test_a_forked_child_that_ends_harms_nothing(tmp_path):
    engine = start(Net(), 3, "nvme", tmp_path)
    train_engine(engine, [1])
    before = masters(engine)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    for name, value in masters(engine).items():
        assert torch.equal(value, before[name])
    train_engine(engine, [1])


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_a_forked_child_cannot_use_the_engine(placement, tmp_path):
    engine = start(Net(), 3, placement, tmp_path)
    train_engine(engine, [1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.step()
        except ballast.UseError as error:
            code = 0 if "forked child" in str(error) else 2
        try:
            ballast.safe_get_full_fp32_param(engine.module.head.weight)
            code = 3
        except ballast.UseError:
            pass
        del engine
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train_engine(engine, [1])


def _in_a_forked_child(work):
    """What work() raised there, as text; it may take 20 seconds."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        torch.set_num_threads(1)  # as a data loader's worker: OpenMP's threads are its parent's
        try:
            text = f"gave {work()!r}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text
    return text


# PyTorch has no use of a GPU in a forked child: its own error comes first.
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="a forked child can't use a GPU")
# Where a unit may be away on one rank: with its update behind step(), or sharded.
AWAY = [(2, "host"), (3, "host"), (3, "nvme")]


@on_the_cpu
@pytest.mark.parametrize("stage, placement", AWAY)
def test_a_forward_in_a_forked_child(stage, placement, tmp_path):
    """As a dataset's that calls the model. The first operator that needs a unit which isn't there says so."""
    engine = start(Net(), stage, placement, tmp_path)
    train_engine(engine, [1])
    engine.backward(loss_of(engine, tokens(1, 0)))
    engine.step()  # behind which updates may still run
    by_engine = _in_a_forked_child(lambda: loss_of(engine, tokens(2, 0)).item())
    assert by_engine.startswith("UseError: [engine.fork]") and "forked child" in by_engine
    by_module = _in_a_forked_child(lambda: loss_of(engine.module, tokens(2, 0)).item())
    assert by_module.startswith("RuntimeError: [params.fork] unit") and "forked child" in by_module
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss_of(plain, tokens(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(masters(engine), dict(plain.named_parameters()))


def _forward_in_a_child(rank):
    engine = start(Net(), 3)
    train_engine(engine, [1], rank)
    text = _in_a_forked_child(lambda: loss_of(engine, tokens(2, 0)).item())
    train_engine(engine, [1], rank)
    return text, engine.global_steps


@on_the_cpu
def test_a_forward_in_a_forked_child_of_a_rank():
    for text, steps in run(2, _forward_in_a_child):
        assert text.startswith("UseError: [engine.fork]") and steps == 2


@pytest.mark.parametrize("stage, placement", [(0, "device"), *AWAY])
def test_each_call_in_a_forked_child(stage, placement, tmp_path):
    engine = start(Net(), stage, placement, tmp_path)
    train_engine(engine, [1])
    weight = engine.module.embed.weight
    loss = loss_of(engine, tokens(1, 0))
    zeros = torch.zeros(11, 7)

    def gathered():
        with ballast.zero.GatheredParameters([weight]):
            pass

    for work in (
        engine.step,
        engine.zero_grad,
        engine.synchronize,
        engine.offload_states,
        engine.no_sync,
        engine.destroy,
        gathered,
        lambda: engine.global_steps,
        lambda: engine.backward(loss),
        lambda: engine.save_checkpoint(tmp_path / "saved"),
        lambda: engine.load_checkpoint(tmp_path / "saved"),
        lambda: ballast.safe_get_full_fp32_param(weight),
        lambda: ballast.safe_set_full_grad(weight, zeros),
    ):
        assert _in_a_forked_child(work).startswith("UseError: [engine.fork]")
    assert not (tmp_path / "saved").exists()
    engine.backward(loss)
    assert engine.step().applied


@pytest.mark.parametrize("stage, placement", AWAY)
def test_contexts_that_a_forked_child_ends(stage, placement, tmp_path):
    engine = start(Net(), stage, placement, tmp_path)
    train_engine(engine, [1])
    before = masters(engine)
    with ballast.zero.GatheredParameters([engine.module.embed.weight], modifier_rank=0), engine.no_sync():
        contexts = ballast.zero.GatheredParameters([engine.module.blocks[0].weight], modifier_rank=0), engine.no_sync()
        for context in contexts:
            context.__enter__()
        assert (
            _in_a_forked_child(lambda: [context.__exit__(None, None, None) for context in contexts])
            == "gave [None, None]"
        )
        for context in contexts:
            context.__exit__(None, None, None)
    for name, value in masters(engine).items():
        assert torch.equal(value, before[name])


def _run_alone(program, *arguments):
    """In a process of its own, with what plain.py has."""
    start = "import os, sys; sys.path.insert(0, sys.argv.pop())\nfrom plain import *\n"
    here = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, "-c", start + program, *map(str, arguments), here]
    environment = {**os.environ, "BALLAST_TEST_DEVICE": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("stage, placement", AWAY)
def test_a_forked_child_whose_interpreter_ends(stage, placement, tmp_path):
    program = (
        "torch.set_num_threads(1)\n"
        "given = settings(int(sys.argv[1]), *sys.argv[2:4])\n"
        "engine = ballast.initialize(model=Net(), config=given, device='cpu')[0]\n"
        "train_engine(engine, [2, 1])\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(7)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "train_engine(engine, [1])\n"
        "print(code, engine.global_steps)\n"
    )
    done = _run_alone(program, stage, placement, tmp_path)
    assert (done.returncode, done.stdout) == (0, "7 3\n"), done.stderr


def test_a_forked_child_ends_engines_of_its_own(tmp_path):
    """Forked before there were any threads, as a fork server does."""
    program = (
        "torch.set_num_threads(1)\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "engine = ballast.initialize(model=Net(), config=settings(3, 'nvme', sys.argv[1]), device='cpu')[0]\n"
        "assert os.listdir(sys.argv[1])\n"
        "del engine\n"
        "os._exit(len(os.listdir(sys.argv[1])))\n"
    )
    done = _run_alone(program, tmp_path)
    assert done.returncode == 0, done.stderr


def _collected_on_one_rank(rank, stage):
    """Rank 0 drops its engine, rank 1 keeps it: nobody waits for the other."""
    import time

    engine = start(Net(), stage)
    train_engine(engine, [2], rank)
    begin = time.monotonic()
    if rank == 1:
        _kept.append(engine)
    del engine
    gc.collect()
    return time.monotonic() - begin


_kept: list = []  # by a rank's process


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_is_collected_waits_for_nobody(stage):
    assert max(run(2, _collected_on_one_rank, stage)) < 10


def test_a_module_whose_engine_is_gone_says_so():
    engine = start(model := Net(), 3, "host")
    del engine
    gc.collect()
    with pytest.raises(RuntimeError, match="keep the engine while its module is used, or end it on all ranks") as error:
        loss_of(model, tokens(0, 0))
    assert "another error" not in str(error.value)


def test_engines_come_and_go():
    def usage():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

    for placement in ("device", "host"):
        for number in range(12):
            engine = start(Net(), 3, placement)
            train_engine(engine, [1])
            if number % 2:
                engine.destroy()
            del engine
            if number == 3:
                before = usage()
        # Eight engines later; a thread may take a moment to be gone.
        assert all(now <= then + 3 for now, then in zip(usage(), before))


def test_an_engine_that_nobody_ends(tmp_path):
    """The interpreter ends, with threads and files of an engine still there."""
    program = (
        "engine = ballast.initialize(model=Net(), config=settings(3, 'nvme', sys.argv[1]), device='cpu')[0]\n"
        "train_engine(engine, [2, 1])\n"
        "print('over')\n"
    )
    done = _run_alone(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert os.listdir(tmp_path) == []
