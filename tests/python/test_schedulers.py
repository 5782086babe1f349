"""Learning-rate schedules: torch.optim.lr_scheduler's and the configuration's, through windows and checkpoints."""

import warnings

import pytest
import torch
from plain import Net, assert_close, loss_of, masters, tokens, train_engine, train_plain
from starts import OPTIMIZERS, WINDOWS, start

import ballast


@pytest.mark.parametrize("when", ["before", "after", "given", "callable"])
def test_a_schedule_of_torch(when):
    def make(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    plain, model = Net(), Net()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    want = train_plain(plain, optimizer, WINDOWS, after=make(optimizer).step)
    client = OPTIMIZERS["sgd"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        early = make(client) if when in ("before", "given") else None
        given = {"given": early, "callable": make}.get(when)
        engine, optimizer, _, schedule = start(model, 2, client, lr_scheduler=given)
        late = make(optimizer) if when == "after" else None
        for step, length in enumerate(WINDOWS):
            for number in range(length):
                engine.backward(loss_of(engine, tokens(step, number)) / length)
            engine.step()
            if when in ("before", "after"):
                (early or late).step()
        assert (schedule is not None) == (when in ("given", "callable"))
    assert engine.get_lr() == [0.1 / 8]
    assert_close(masters(engine), want)


def test_a_schedule_of_the_configuration_shows_in_param_groups():
    more = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    }
    engine, optimizer, _, _ = start(Net(), more=more)
    for step in range(3):
        used = engine.get_lr()
        engine.backward(loss_of(engine, tokens(step, 0)))
        assert engine.step().lr == used
    assert optimizer.param_groups[0]["lr"] == engine.get_lr()[0] > used[0]


def test_a_schedule_goes_through_a_checkpoint(tmp_path):
    def make(seed):
        client = OPTIMIZERS["momentum"]((model := Net(seed)).parameters())
        return start(model, 2, client, lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))[0]

    engine = make(0)
    train_engine(engine, [1, 1])
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    other = make(1)
    folder, state = other.load_checkpoint(tmp_path)
    assert folder == str(tmp_path / "global_step2") and state == {"epoch": 3}
    assert other.get_lr() == engine.get_lr() == [0.05 / 4]
    assert other.global_steps == 2
    got, want = train_engine(other, WINDOWS), train_engine(engine, WINDOWS)
    for name in want:
        assert torch.equal(got[name], want[name]), name


SCHEDULES = {
    "multi_step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.5),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=9, cycle_momentum=False),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=2),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=2), torch.optim.lr_scheduler.MultiStepLR(o, [1])], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_go_on_from_a_checkpoint(name, tmp_path):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = SCHEDULES[name](plain)
    given = {"metrics": 1.0} if name == "plateau" else {}
    engine, *_ = start(Net(), lr_scheduler=SCHEDULES[name])
    for step in range(6):
        if step == 2:
            engine.save_checkpoint(tmp_path)
            engine, *_ = start(Net(), lr_scheduler=SCHEDULES[name])
            engine.load_checkpoint(tmp_path)
        want = plain.param_groups[0]["lr"]
        plain.step()
        schedule.step(**given)
        engine.backward(loss_of(engine, tokens(step, 0)))
        assert engine.step(lr_kwargs=given).lr == [want]


def test_a_schedule_that_wants_a_value_gets_it_before_the_update():
    engine, *_ = start(Net(), lr_scheduler=SCHEDULES["plateau"])
    engine.backward(loss_of(engine, tokens(0, 0)))
    with pytest.raises(ballast.UseError, match="metrics"):
        engine.step()
    assert engine.global_steps == 0
    assert engine.step(lr_kwargs={"metrics": 1.0}).applied


def test_a_schedule_of_another_optimizer_is_refused():
    other = OPTIMIZERS["sgd"](Net().parameters())
    model = Net()
    for schedule in (torch.optim.lr_scheduler.StepLR(other, 1), "cosine"):
        with pytest.raises(ballast.ConfigError, match="schedule"):
            start(model, 2, OPTIMIZERS["sgd"](model.parameters()), lr_scheduler=schedule)


def test_schedules_that_keep_notes_in_the_groups():
    plain, model = Net(), Net()
    make = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=10, cycle_momentum=False)
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    want = train_plain(plain, optimizer, WINDOWS, after=make(optimizer).step)
    engine, *_ = start(model, 2, OPTIMIZERS["sgd"](model.parameters()), lr_scheduler=make)
    assert_close(train_engine(engine, WINDOWS), want)
    moving = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=10)
    engine, *_ = start(model := Net(), 2, OPTIMIZERS["momentum"](model.parameters()), lr_scheduler=moving)
    engine.backward(loss_of(engine, tokens(0, 0)))
    with pytest.raises(ballast.UseError, match="cycle_momentum=False"):
        engine.step()
        engine.backward(loss_of(engine, tokens(0, 1)))
        engine.step()


def test_a_class_of_schedules_is_called():
    engine, optimizer, _, schedule = start(
        Net(), 2, OPTIMIZERS["sgd"], lr_scheduler=torch.optim.lr_scheduler.ConstantLR
    )
    assert isinstance(schedule, torch.optim.lr_scheduler.ConstantLR) and schedule.optimizer is optimizer


def test_a_schedule_that_a_callable_does_not_make_is_refused():
    with pytest.raises(ballast.ConfigError, match="made no schedule"):
        start(model := Net(), lr_scheduler=lambda optimizer: None)
    with pytest.raises(ballast.UseError, match="inference mode"), torch.inference_mode():
        start(model)
    start(model)  # nothing of it is left


def test_client_state_comes_back_as_it_was(tmp_path):
    engine, *_ = start(Net(), lr_scheduler=SCHEDULES["multi_step"])
    state = {
        "best": float("inf"),
        "seen": {3: [1, 2], "x": None, ((1, 2), 3): 4},
        "bits": [2**100 + 1, -(2**64), 2**64 - 1, True],
        "lr_scheduler": "mine",
        "__ballast__": {"value": 1.5},
    }
    engine.save_checkpoint(tmp_path, client_state=state)
    assert engine.load_checkpoint(tmp_path)[1] == state
    (tmp_path / "global_step0").rename(tmp_path / "kept")
    assert engine.load_checkpoint(tmp_path, "kept") == (str(tmp_path / "kept"), state)
    for wrong, words in (([1], "is a dict"), ({"x": {1}}, "isn't JSON"), ({"ballast.lr_scheduler": 1}, "rename")):
        with pytest.raises(ballast.UseError, match=words):
            engine.save_checkpoint(tmp_path, client_state=wrong)
