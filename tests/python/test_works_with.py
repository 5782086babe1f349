"""PyTorch's own machinery around an engine: each part gives what it gives without one."""

import copy
import multiprocessing
import os
import threading

import pytest
import torch
from plain import Net, assert_close, loss_of, masters, settings, tokens, train_engine, train_plain
from ranks import run
from torch.utils.checkpoint import checkpoint

import ballast

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def start(model, stage=3, placement="device", folder=None, **more):
    return ballast.initialize(model=model, config=settings(stage, placement, folder, optimizer=SGD, **more), device="cpu")[0]


def plainly(model, windows, world=1, loss=loss_of):
    return train_plain(model, torch.optim.SGD(model.parameters(), lr=0.1), windows, world, loss)


class Recomputed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + checkpoint(lambda y, block=block: torch.tanh(block(y)) * self.frozen, x, use_reentrant=self.reentrant)
        return self.head(x)


def _recomputed(rank, stage, placement, reentrant, folder):
    engine = start(Recomputed(reentrant), stage, placement, folder)
    got = train_engine(engine, [2, 1, 3], rank)
    assert engine.micro_steps == 6
    return got


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "host"), (3, "nvme")])
def test_activation_checkpointing(stage, placement, reentrant, tmp_path):
    want = plainly(Net(), [2, 1, 3], world=2)
    for got in run(2, _recomputed, stage, placement, reentrant, str(tmp_path)):
        assert_close(got, want, 5e-6)


def test_every_parameter_inside_reentrant_checkpoints():
    class Inside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x.square().mean()

    engine, plain = start(Inside()), Inside()
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        engine(x).backward()
        plain(x).backward()
    assert engine.step().micro_batches == 2
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    assert_close(masters(engine), dict(plain.named_parameters()))


class Square(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        if Square.fails:
            raise KeyError("broken on purpose")
        return 2 * gradient * context.saved_tensors[0]


@pytest.mark.parametrize("form", ["engine", "plain"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_autograd_functions_and_their_errors(stage, form):
    def loss(model, batch):
        return Square.apply(model(batch[:, :-1])).mean()

    def backward(value):
        engine.backward(value) if form == "engine" else value.backward()

    want = plainly(Net(), [2, 1], loss=loss)
    engine = start(Net(), stage)
    Square.fails = True
    try:
        with pytest.raises(KeyError, match="broken on purpose"):
            backward(loss(engine, tokens(0, 0)))
    finally:
        Square.fails = False
    engine.zero_grad()
    assert_close(train_engine(engine, [2, 1], loss=loss), want)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_in_forward_leaves_everything_usable(stage):
    class Failing(Net):
        fails = False

        def forward(self, tokens):
            y = super().forward(tokens)
            if self.fails:
                raise ValueError("broken on purpose")
            return y

    want = plainly(Net(), [2, 1])
    engine = start(Failing(), stage)
    engine.backward(loss_of(engine, tokens(0, 0)) / 2)
    engine.module.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        engine(tokens(0, 1))
    engine.module.fails = False
    engine.backward(loss_of(engine, tokens(0, 1)) / 2)
    engine.step()
    engine.backward(loss_of(engine, tokens(1, 0)))
    engine.step()
    assert_close(masters(engine), want)


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "host")])
def test_autocast(stage, placement):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    assert_close(train_engine(start(Net(), stage, placement), [2, 1], loss=loss), plainly(Net(), [2, 1], loss=loss), 1e-4)


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "host")])
def test_compiled_by_aot_eager(stage, placement):
    torch._dynamo.reset()
    want = plainly(Net(), [2, 1])
    model = Net()
    engine = start(model, stage, placement)
    compiled = torch.compile(model, backend="aot_eager")
    for step, length in enumerate([2, 1]):
        for number in range(length):
            engine.backward(loss_of(compiled, tokens(step, number)) / length)
        engine.step()
    assert_close(masters(engine), want, 1e-5)


class Fused(torch.nn.Module):
    """Its parameters are read by generated kernels alone, in graphs of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.RMSNorm(64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(x * layer.weight)
            torch._dynamo.graph_break()
        return x.square().mean()


def test_inductor_sees_gathered_and_updated_parameters():
    """A compiled graph is one operator to the engine: its parameters come before it and stay until its end."""
    for stage, placement in ((3, "device"), (3, "host"), (2, "host")):
        torch._dynamo.reset()
        config = settings(stage, placement, optimizer=SGD)
        if stage == 3:
            config["zero_optimization"].update(stage3_max_live_parameters=1, stage3_prefetch_bucket_size=0)
        model, plain = Fused(), Fused()
        engine = ballast.initialize(model=model, config=config, device="cpu")[0]
        compiled = torch.compile(model, backend="inductor")
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = torch.randn(5, 64)
        for _ in range(3):
            engine.backward(compiled(x))
            engine.step()
            plain(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(masters(engine), dict(plain.named_parameters()), 1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "nvme")])
def test_generation_between_backwards(stage, placement, mode, tmp_path):
    def generate(model):
        model.eval()
        with mode():
            text = tokens(9, 9)[:1, :2]
            for _ in range(4):
                text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
        model.train()
        return text

    engine, plain = start(Net(), stage, placement, tmp_path), Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        for number in range(2):
            engine.backward(loss_of(engine, tokens(step, number)) / 2)
            (loss_of(plain, tokens(step, number)) / 2).backward()
            assert torch.equal(generate(engine), generate(plain))
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(masters(engine), dict(plain.named_parameters()))


def _actor_and_critic(rank, stage, placement, folder):
    actor, critic = start(Net(1), stage, placement, folder), start(Net(2), stage, placement, folder)
    for step in range(2):
        for number in range(2):
            actor.backward(loss_of(actor, tokens(step, number, rank)) / 2)
            (loss_of(critic, tokens(step, number, rank)) / 2).backward()
        critic.step()
        actor.step()
    return masters(actor), masters(critic)


@pytest.mark.parametrize("stage, placement", [(1, "device"), (2, "host"), (3, "nvme")])
def test_an_actor_and_a_critic(stage, placement, tmp_path):
    want = [plainly(Net(seed), [2, 2], world=2) for seed in (1, 2)]
    for both in run(2, _actor_and_critic, stage, placement, str(tmp_path)):
        for got, wanted in zip(both, want):
            assert_close(got, wanted, 5e-6)


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


def test_parameters_that_come_late_are_refused():
    engine = start(model := Net(), 2)
    model.blocks[1] = torch.nn.Linear(7, 7)
    engine.backward(loss_of(engine, tokens(0, 0)))
    with pytest.raises(ballast.UseError, match="blocks.1.weight"):
        engine.step()


def _in_fake_mode(model, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty_like(x))


AROUND = {
    "fake tensors": _in_fake_mode,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "hessian": lambda model, x: torch.func.hessian(lambda y: model(y).sum())(x[0]),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "export": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.parametrize("what", AROUND)
def test_parameters_come_as_they_are_inside_modes_and_transforms(what):
    """Gathering is the engine's own work, whatever the operator that asks for it is part of."""
    plain = torch.nn.Linear(6, 6)
    model = copy.deepcopy(plain)
    engine = start(model, 3, "host")
    x = torch.randn(4, 6)
    AROUND[what](model, x)
    assert torch.equal(model(x), plain(x))
    engine.backward(engine(x).sum())
    assert engine.step().applied


def test_a_copy_made_before_is_apart():
    model = Net()
    twin = copy.deepcopy(model)
    engine = start(model)
    train_engine(engine, [2])
    assert_close(dict(twin.named_parameters()), dict(Net().named_parameters()), 0)
    assert_close(train_engine(start(twin), [2]), masters(engine), 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_by_plain_backward(stage):
    def train(form):
        engine = start(Net(), stage, fp16={"enabled": True, "initial_scale_power": 10})
        for step in range(3):
            for number in range(2):
                loss = loss_of(engine, tokens(step, number)).float()
                engine.backward(loss) if form == "engine" else loss.backward()
            assert engine.step().applied
        with pytest.raises(RuntimeError, match="loss scale"):
            loss_of(engine.module, tokens(0, 0)).backward()
        return masters(engine)

    # Not to the bit: what lies between the loss and the module's outputs is computed without the scale.
    assert_close(train("plain"), train("engine"), 1e-3)


def test_states_leave_the_device_and_come_back():
    engine = start(Net(), 2)
    engine.backward(loss_of(engine, tokens(0, 0)))
    before = masters(engine)
    engine.offload_states(include=["optim_states", "lp_params"])
    with pytest.raises(ballast.UseError, match="reload_states"):
        engine.step()
    loss_of(engine, tokens(1, 1))  # an operator brings its unit back
    engine.reload_states()
    for name, value in masters(engine).items():
        assert torch.equal(value, before[name])
    assert engine.step().applied
    with pytest.raises(ballast.UseError, match="no such kind"):
        engine.offload_states(["everything"])


def _collected_on_one_rank(rank, stage):
    """Rank 0 drops its engine, rank 1 keeps it: nobody waits for the other."""
    import gc
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
    import subprocess
    import sys

    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from plain import *\n"
        "engine = ballast.initialize(model=Net(), config=settings(3, 'nvme', sys.argv[1]), device='cpu')[0]\n"
        "train_engine(engine, [2, 1])\n"
        "print('over')\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert os.listdir(tmp_path) == []
