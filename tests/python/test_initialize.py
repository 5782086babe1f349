"""What initialize() takes over: optimizers, groups, configurations, data; against torch.optim."""

import argparse
import json

import pytest
import torch
from device import DEVICE
from plain import Net, assert_close, loss_of, masters, settings, tokens, train_engine, train_plain
from ranks import run
from starts import OPTIMIZERS, WINDOWS, start

import ballast


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_is_taken_over(name, stage):
    plain, model = Net(), Net()
    want = train_plain(plain, OPTIMIZERS[name](plain.parameters()), WINDOWS)
    engine, *_ = start(model, stage, OPTIMIZERS[name](model.parameters()))
    assert_close(train_engine(engine, WINDOWS), want)
    engine.destroy()
    assert_close(dict(model.named_parameters()), want)


def make_groups(model):
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "lr": 0.05, "weight_decay": 0.0}], lr=0.01, weight_decay=0.3
    )


def _groups_on_a_rank(rank, stage):
    engine, optimizer, _, _ = start(model := Net(), stage, make_groups(model))
    assert engine.get_lr() == [0.01, 0.05]
    train_engine(engine, WINDOWS[:1], rank)
    optimizer.param_groups[1]["lr"] = 0.2
    optimizer.param_groups[0]["lr"] *= 0.5
    for step in (1, 2):
        for number in range(WINDOWS[step]):
            engine.backward(loss_of(engine, tokens(step, number, rank)) / WINDOWS[step])
        assert engine.step().lr == [0.005, 0.2]
    return {name: value.clone() for name, value in masters(engine).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_groups_and_rates_changed_in_param_groups(stage):
    plain = Net()
    optimizer = make_groups(plain)

    def change():
        optimizer.param_groups[1]["lr"] = 0.2
        optimizer.param_groups[0]["lr"] = 0.005

    want = train_plain(plain, optimizer, WINDOWS, world=2, after=change)
    for got in run(2, _groups_on_a_rank, stage):
        assert_close(got, want, 5e-6)


def test_states_of_an_optimizer_that_has_run():
    plain, model = Net(), Net()
    for name in ("adamw", "momentum"):
        optimizer, old = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
        train_plain(plain, optimizer, [2, 1])
        train_plain(model, old, [2, 1])
        engine, *_ = start(model, 3, old)
        assert_close(train_engine(engine, WINDOWS), train_plain(plain, optimizer, WINDOWS))
        engine.destroy()


def test_model_parameters_in_other_forms():
    def rates(give, **more):
        return start(model := Net(), model_parameters=give(model), more=more)[0].get_lr()

    assert rates(lambda m: m.named_parameters()) == [0.1]
    rest = lambda m: [p for p in m.parameters() if p is not m.unused]
    assert rates(lambda m: [{"params": m.unused, "lr": 0.3}, {"params": rest(m)}]) == [0.3, 0.1]
    assert rates(lambda m: (m.requires_grad_(False), [])[1]) == [0.1]


def test_parameters_that_are_no_numbers_to_train(tmp_path):
    def make(step):
        model = Net()
        model.order = torch.nn.Parameter(torch.arange(3) * step, requires_grad=False)
        return start(model, 3)[0]

    make(1).save_checkpoint(tmp_path)
    engine = make(2)
    engine.load_checkpoint(tmp_path)
    assert engine.module.order.tolist() == [0, 1, 2]


def test_model_parameters_as_groups():
    plain, model = Net(), Net()
    want = train_plain(plain, make_groups(plain), WINDOWS)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "lr": 0.05, "weight_decay": 0.0},
    ]
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3}}}
    engine, *_ = start(model, 3, model_parameters=groups, more=more)
    assert_close(train_engine(engine, WINDOWS), want)


def test_an_optimizer_from_a_callable():
    plain, model = Net(), Net()
    want = train_plain(plain, OPTIMIZERS["sgd"](plain.parameters()), WINDOWS)
    engine, *_ = start(model, 1, OPTIMIZERS["sgd"])
    assert_close(train_engine(engine, WINDOWS), want)


def test_configurations_by_path_and_by_arguments(tmp_path):
    config = settings(3, optimizer={"type": "Adam", "params": {"lr": 0.25}}, train_micro_batch_size_per_gpu=4)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    for given in ({"config": path}, {"config": str(path)}, {"args": argparse.Namespace(deepspeed_config=str(path))}):
        engine, *_ = ballast.initialize(model=Net(), device=DEVICE, **given)
        assert engine.get_lr() == [0.25] and engine.zero_optimization_stage() == 3
        assert engine.train_batch_size() == 4 and engine.gradient_accumulation_steps() == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="its ranks train on the CPU")
def test_ranks_from_the_environment(tmp_path):
    """As torchrun starts them: no process group, and one that init_distributed makes."""
    import os
    import socket
    import subprocess
    import sys

    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from plain import *\n"
        "import torch.distributed as dist\n"
        "if sys.argv[2] == 'made': ballast.init_distributed('gloo')\n"
        "model = Net()\n"
        "config = settings(2, optimizer={'type': 'SGD', 'params': {'lr': 0.1}})\n"
        "engine = ballast.initialize(model=model, config=config, device='cpu')[0]\n"
        "train_engine(engine, [2, 1], engine.global_rank)\n"
        "print(engine.world_size, dist.is_initialized(), masters(engine)['embed.weight'].sum().item())\n"
        "engine.destroy()\n"
    )
    folder = os.path.dirname(os.path.abspath(__file__))
    want = (
        train_plain(plain := Net(), torch.optim.SGD(plain.parameters(), lr=0.1), [2, 1], world=2)["embed.weight"]
        .sum()
        .item()
    )
    for how in ("none", "made"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, folder, how],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in ranks:
            said, _ = rank.communicate(timeout=100)
            size, made, total = said.split()
            assert (rank.returncode, size, made) == (0, "2", str(how == "made"))
            assert float(total) == pytest.approx(want, abs=1e-4)


def test_one_rank_without_a_launcher():
    import torch.distributed as dist

    ballast.init_distributed("gloo")
    try:
        assert dist.get_world_size() == 1
        engine, *_ = start(Net(), 3)
        assert engine.world_size == 1
        assert_close(
            train_engine(engine, WINDOWS), train_plain(plain := Net(), OPTIMIZERS["sgd"](plain.parameters()), WINDOWS)
        )
    finally:
        dist.destroy_process_group()


def _loader_on_a_rank(rank):
    data = torch.utils.data.TensorDataset(torch.arange(24))
    engine, _, loader, _ = start(Net(), training_data=data, more={"train_micro_batch_size_per_gpu": 3})
    with torch.device("cpu"):  # where DistributedSampler has its generator
        return sorted(int(x) for (batch,) in loader for x in batch)


def test_training_data_is_shared_out():
    first, second = run(2, _loader_on_a_rank)
    assert sorted(first + second) == list(range(24))


class Odd(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda m: {"optimizer": torch.optim.Adam(m.parameters(), amsgrad=True)}, ["amsgrad=True", "group 0"]),
        (lambda m: {"optimizer": torch.optim.RMSprop(m.parameters())}, ["RMSprop", "Adam, AdamW or SGD"]),
        (lambda m: {"optimizer": Odd(m.parameters())}, ["Odd"]),
        (
            lambda m: {"optimizer": torch.optim.SGD([m.embed.weight], lr=1)},
            ["blocks.0.weight", "requires_grad_(False)"],
        ),
        (lambda m: {"optimizer": torch.optim.SGD(Net().parameters(), lr=1)}, ["no parameter of the model"]),
        (lambda m: {"model_parameters": [m.embed.weight]}, ["model_parameters lacks", "blocks.0.bias"]),
        (lambda m: {"model_parameters": [*m.parameters(), m.unused]}, ["twice", "unused"]),
        (lambda m: {"optimizer": lambda parameters: None}, ["None"]),
        (lambda m: {"config": {"zero_optimisation": {}}}, ["zero_optimisation", "zero_optimization"]),
        (lambda m: {"config": {"x": {1}}}, ["isn't JSON"]),
        (lambda m: {"config": 3}, ["dict or a path", "int"]),
        (lambda m: {"config": None}, ["no configuration"]),
        (
            lambda m: {"optimizer": torch.optim.SGD(m.parameters(), lr=1), "config": {"optimizer": {"type": "Adam"}}},
            ["two optimizers"],
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused(make, words):
    model = Net()
    with pytest.raises(ballast.ConfigError) as error:
        ballast.initialize(model=model, device=DEVICE, **{"config": {}, **make(model)})
    for word in words:
        assert word in str(error.value)
    assert isinstance(error.value, ValueError) and isinstance(error.value, ballast.Error)


class Hidden(torch.nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def _around_itself():
    model = Hidden(first=torch.nn.Linear(3, 3), inner=Hidden(second=torch.nn.Linear(3, 3)))
    model.inner.parent = model
    return model


@pytest.mark.parametrize(
    "make, words",
    [
        (_around_itself, ["inner.parent is a Hidden", "part of itself"]),
        (lambda: Hidden(x=torch.nn.Sequential(torch.nn.LazyLinear(4))), ["x.0.weight of a LazyLinear", "run a batch"]),
        (lambda: Hidden(x=torch.nn.LazyBatchNorm1d(affine=False)), ["x.running_mean of a LazyBatchNorm1d"]),
    ],
)
def test_modules_that_cannot_be_taken_over_are_refused(make, words):
    model = make()
    with pytest.raises(ballast.UseError) as error:
        start(model, 3)
    for word in words:
        assert word in str(error.value)


def test_a_lazy_module_that_has_run_and_one_that_stands_twice_train():
    twice = torch.nn.LazyLinear(3)
    model = torch.nn.Sequential(twice, torch.nn.Sequential(twice))
    model(torch.ones(2, 3))
    plain = torch.nn.Sequential(linear := torch.nn.Linear(3, 3), torch.nn.Sequential(linear))
    plain.load_state_dict(model.state_dict())
    engine, *_ = start(model, 3)
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(masters(engine), dict(plain.named_parameters()))


def test_a_loop_that_calls_the_given_optimizer_trains():
    plain, model = Net(), Net()
    want = train_plain(plain, OPTIMIZERS["adamw"](plain.parameters()), WINDOWS)
    client = OPTIMIZERS["adamw"](model.parameters())
    engine, *_ = start(model, 3, client)
    for step, length in enumerate(WINDOWS):
        for number in range(length):
            (loss_of(model, tokens(step, number)) / length).backward()
        client.step()
        client.zero_grad()
    assert_close(masters(engine), want)


def test_no_optimizer_at_all_is_said():
    with pytest.warns(UserWarning, match="AdamW with lr 0.001"):
        ballast.initialize(model=Net(), config={}, device=DEVICE)


def test_errors_speak_python(tmp_path):
    engine, *_ = start(Net())
    loss = loss_of(engine, tokens(0, 0))
    for wrong, word in ((loss.detach(), r"torch\.no_grad\(\)"), (1.0, "float"), (torch.ones(3), "one number")):
        with pytest.raises(ballast.UseError, match=word):
            engine.backward(wrong)
    with pytest.raises(ballast.UseError, match="'name'"):
        ballast.safe_get_full_fp32_param("name")
    with pytest.raises(ballast.UseError, match="not its class"):
        ballast.initialize(model=Net, config={}, device=DEVICE)
    with pytest.raises(ballast.UseError, match="first argument is args"):
        ballast.initialize(Net(), {})
    with pytest.raises(ballast.ConfigError, match="two configurations"):
        ballast.initialize(argparse.Namespace(deepspeed_config="x"), Net(), config={})
    with pytest.raises(OSError, match="none"):
        engine.load_checkpoint(tmp_path / "none")
    engine.save_checkpoint(tmp_path, 100)
    assert (tmp_path / "100").is_dir() and engine.load_checkpoint(tmp_path, 100)[0].endswith("/100")
    engine.destroy()
    with pytest.raises(ballast.UseError, match=r"destroy\(\)"):
        engine.backward(loss)
    with ballast.zero.Init(min_numel=0):
        model = Net()
    torch.nn.init.zeros_(model.head.weight)
    with pytest.raises(ballast.UseError, match=r"^\[engine.materialize\] \[zero.Init\].*embed.weight"):
        ballast.initialize(model=model, config=settings(3), device=DEVICE)


def test_a_report_travels():
    import pickle

    engine, *_ = start(Net())
    engine.backward(loss_of(engine, tokens(0, 0)))
    report = engine.step()
    copy = pickle.loads(pickle.dumps(report))
    for name in ("applied", "reason", "grad_norm", "clip_factor", "loss_scale", "micro_batches", "weight", "lr"):
        assert getattr(copy, name) == getattr(report, name)


def test_what_changes_after_the_start_is_refused():
    engine, optimizer, _, _ = start(model := Net(), 2, OPTIMIZERS["adamw"](model.parameters()))
    engine.backward(loss_of(engine, tokens(0, 0)))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ballast.UseError, match="weight_decay"):
        engine.step()
    optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.raises(ballast.UseError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ballast.UseError, match="save_checkpoint"):
        optimizer.state_dict()
    with pytest.raises(ballast.UseError, match="closures"):
        optimizer.step(lambda: None)
    members = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = members[:-1]
    with pytest.raises(ballast.UseError, match=f"group 0: {len(members) - 1} now, {len(members)} at the start"):
        engine.step()
    optimizer.param_groups[0]["params"] = members
    assert engine.step().applied


def test_an_optimizer_that_was_taken_over_has_no_states_to_save_or_load():
    client = OPTIMIZERS["adamw"]((model := Net()).parameters())
    before = client.state_dict()
    engine, *_ = start(model, 2, client)
    with pytest.raises(ballast.UseError, match="engine.save_checkpoint"):
        client.state_dict()
    with pytest.raises(ballast.UseError, match="engine.load_checkpoint"):
        client.load_state_dict(before)
    client.param_groups = list(client.param_groups)
    with pytest.raises(ballast.UseError, match="other param_groups"):
        engine.step()


def test_an_engine_that_has_ended_leaves_the_next_one_alone():
    first, *_ = start(model := Net(), 3)
    first.destroy()
    second, *_ = start(model, 3)
    first.destroy()
    with ballast.zero.GatheredParameters(model.unused, modifier_rank=0):
        model.unused.data.zero_()
    assert torch.equal(masters(second)["unused"], torch.zeros(3))


def test_the_backend_of_a_group_of_several():
    from ballast.distributed import _backend_of

    assert _backend_of("gloo", "cpu") == _backend_of("cpu:gloo,cuda:nccl", "cpu") == "gloo"
    assert _backend_of("cpu:gloo,cuda:nccl", "cuda") == _backend_of("nccl", "cuda") == "nccl"
    for group, kind in (("fake", "cpu"), ("cuda:nccl", "cpu"), ("cpu:mpi,cuda:nccl", "cpu")):
        with pytest.raises(ballast.UseError, match="nccl or gloo"):
            _backend_of(group, kind)


def test_a_name_that_is_missing_says_what_to_do_instead():
    engine, *_ = start(Net())
    with pytest.raises(AttributeError, match="no_sync"):
        engine.allreduce_gradients()
    with pytest.raises(AttributeError, match="from_deepspeed"):
        engine.no_such_thing
    assert engine.frozen is engine.module.frozen  # the module's own


@pytest.mark.parametrize(
    "statement, words",
    [
        ("from ballast import comm", "comm: use `torch.distributed`"),
        ("import ballast.comm as dist", "comm: use `torch.distributed`"),
        ("from ballast.ops.adam import FusedAdam", "ops: .*torch.optim"),
        ("from ballast.utils import set_z3_leaf_modules", "utils.set_z3_leaf_modules: .*leaf_module.names"),
        ("from ballast.zero import Init, TiledLinear", "zero.TiledLinear: .*torch.nn.Linear"),
        ("import ballast.nothing", "No module named 'ballast.nothing'"),
        ("from ballast.zero import nothing", "cannot import name 'nothing'"),
    ],
)
def test_an_import_that_is_missing_says_what_to_do_instead(statement, words):
    with pytest.raises(ImportError, match=words):
        exec(statement)


def test_the_engine_reports_what_it_did():
    config = {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 4,
        "managed_gradient_accumulation": True,
    }
    engine, *_ = start(Net(), more=config)
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()
    for number in range(3):
        assert engine.is_gradient_accumulation_boundary() == (number == 1)
        engine.backward(loss_of(engine, tokens(0, number)))
        report = engine.step()
        assert report.applied == engine.was_step_applied() == (number == 1)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples) == (1, 3, 0, 8)
    assert (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ) == (8, 4, 2)
    assert report.reason == "mid-window"
    with pytest.raises(ballast.UseError):
        engine.backward(torch.ones(()))
    engine.destroy()
    with pytest.raises(ballast.UseError, match="has ended"):
        engine.step()
