"""PyTorch's own machinery around an engine: each part gives what it gives without one."""

import copy

import pytest
import torch
from device import DEVICE, seeded
from plain import Net, assert_close, loss_of, masters, settings, tokens, train_engine
from ranks import run
from starts import SGD, placed as start, plainly
from torch.utils.checkpoint import checkpoint

import ballast


class Recomputed(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + checkpoint(
                lambda y, block=block: torch.tanh(block(y)) * self.frozen, x, use_reentrant=self.reentrant
            )
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
        with torch.autocast(DEVICE, torch.bfloat16):
            return loss_of(model, batch)

    assert_close(
        train_engine(start(Net(), stage, placement), [2, 1], loss=loss), plainly(Net(), [2, 1], loss=loss), 1e-4
    )


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
        engine = ballast.initialize(model=model, config=config, device=DEVICE)[0]
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


def _assign_state(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _scripted(model):
    model.unused = None
    model.late = torch.jit.script(torch.nn.Linear(7, 7))


LATE = {
    "blocks.1.weight": lambda model: model.blocks.__setitem__(1, torch.nn.Linear(7, 7)),
    "unused": _assign_state,
    "extra": lambda model: setattr(model, "extra", torch.nn.Parameter(torch.ones(2))),
    "embed.weight": lambda model: setattr(model.embed, "weight", torch.nn.Parameter(torch.ones(11, 7))),
    "late.bias|late.weight": _scripted,
}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", LATE)
def test_parameters_that_come_late_are_refused(stage, name):
    engine = start(model := Net(), stage)
    LATE[name](model)
    engine.backward(loss_of(engine, tokens(0, 0)))
    with pytest.raises(ballast.UseError, match=f"doesn't know \\(({name});"):
        engine.step()


def test_parameters_that_are_frozen_or_known_by_another_name_may_come_late():
    engine = start(model := Net(), 2)
    want = plainly(Net(), [1])
    model.late = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    model.same = model.blocks  # a module that stands in two places
    model.tied = model.unused
    engine.backward(loss_of(engine, tokens(0, 0)))
    assert engine.step().applied
    known = {name: parameter for name, parameter in model.named_parameters() if name in want}
    assert_close({name: ballast.safe_get_full_fp32_param(parameter) for name, parameter in known.items()}, want)


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "host")])
def test_parameters_in_shared_memory(stage, placement):
    """As torch.multiprocessing asks. Where they are away too, when PyTorch's own answer would end the process."""
    engine = start(model := Net(), stage, placement)
    engine.backward(loss_of(engine, tokens(0, 0)))
    engine.step()
    for parameter in model.parameters():
        # Whatever lies on a GPU counts as shared.
        assert parameter.is_shared() == parameter.untyped_storage().is_shared() == parameter.is_cuda
    engine.destroy()
    assert model.unused.is_shared() == model.unused.is_cuda
    other = torch.ones(3, device="cpu")
    assert not other.is_shared()
    assert other.share_memory_().is_shared()


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "nvme")])
def test_a_default_device_is_the_callers_alone(stage, placement, tmp_path):
    """What the engine makes for itself lies where it says; on the meta device it would have no values."""
    with torch.device("cpu"):
        plain, model = Net(), Net()
        batches = [tokens(0, number) for number in range(2)]
        client = torch.optim.SGD(model.parameters(), lr=SGD["params"]["lr"])
    with torch.device("meta"):
        config = settings(stage, placement, tmp_path)
        engine = ballast.initialize(model=model, optimizer=client, config=config, device=DEVICE)[0]
        for batch in batches:
            engine.backward(loss_of(engine, batch) / 2)
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved")
        got = masters(engine)
    assert_close(got, plainly(plain.to(DEVICE), [2]))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_in_channels_last(stage):
    """Parameters become contiguous; values, and the format of what comes out, are those of the model."""

    def make():
        torch.manual_seed(0)
        return torch.nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    x = torch.randn(2, 4, 5, 5, generator=seeded(1)).to(memory_format=torch.channels_last)
    plain, model = make(), make()
    engine = start(model, stage)
    out = engine(x)
    assert model.weight.is_contiguous() and out.is_contiguous(memory_format=torch.channels_last)
    engine.backward(out.square().mean())
    engine.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(masters(engine), dict(plain.named_parameters()))


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
