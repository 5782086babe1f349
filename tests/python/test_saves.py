"""What is written of a module: whole, for other programs, and what besides parameters checkpoints hold."""

import importlib.util

import pytest
import torch
from plain import Net, masters, train_engine
from ranks import run
from starts import OPTIMIZERS, start

import ballast


def test_what_the_engine_leaves_alone_is_whole_everywhere(tmp_path):
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.order = torch.nn.Parameter(torch.arange(3), requires_grad=False)

        def get_extra_state(self):
            return {"words": ["any"]}

        def set_extra_state(self, state):
            pass

    engine, *_ = start(model := Odd(), 3)
    with ballast.zero.GatheredParameters(list(model.parameters())):
        assert model.order.tolist() == [0, 1, 2]
    engine.save_16bit_model(tmp_path)
    got = torch.load(tmp_path / "pytorch_model.bin")
    assert got["order"].tolist() == [0, 1, 2] and got["_extra_state"] == {"words": ["any"]}
    with pytest.raises(ballast.UseError, match="_extra_state is a dict"):
        engine.save_16bit_model(tmp_path, "model.safetensors")


class Assigns(Net):
    """Buffers that forward replaces instead of writing to them, and one that comes late."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("late", None)

    def forward(self, tokens):
        self.seen = self.seen + 1
        self.late = torch.cat([self.late, self.seen]) if self.late is not None else self.seen
        return super().forward(tokens)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_are_those_of_the_moment(stage, tmp_path):
    engine, *_ = start(model := Assigns(), stage)
    train_engine(engine, [3])
    engine.save_checkpoint(tmp_path)
    train_engine(engine, [2])
    with pytest.raises(ballast.UseError, match="of other shapes are late"):  # it has grown
        engine.load_checkpoint(tmp_path)
    model.late = model.late[:3] * 0
    engine.load_checkpoint(tmp_path)
    assert model.seen.tolist() == [3] and model.late.tolist() == [1, 2, 3]
    other = Assigns()
    other.late = torch.zeros(3)
    engine, *_ = start(other, stage)
    engine.load_checkpoint(tmp_path)
    assert other.seen.tolist() == [3] and other.late.tolist() == [1, 2, 3]


def _fails_on_one_rank(rank, folder):
    model = _with_counts(1, None)
    engine, *_ = start(model, 3)
    if rank == 1:
        model.first.state = Net
    with pytest.raises(ballast.UseError, match="first, a Counts: a type"):
        engine.save_checkpoint(folder)
    model.first.state = 1
    client_state = {"epoch": object()} if rank == 1 else {}
    with pytest.raises(ballast.UseError, match="client_state isn't JSON"):
        engine.save_checkpoint(folder, client_state=client_state)
    train_engine(engine, [1], rank)
    engine.save_checkpoint(folder, "good")
    return engine.global_steps


def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path):
    assert run(2, _fails_on_one_rank, str(tmp_path)) == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]


class Counts(torch.nn.Module):
    """A part with extra state of any kind."""

    def __init__(self, state=None):
        super().__init__()
        self.state = state

    def forward(self, x):
        return x

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def _with_counts(first, second):
    model = Net()
    model.first, model.blocks[1].second = Counts(first), Counts(second)
    return model


def _extra_states(rank, folder):
    scales = torch.arange(3.0)
    model = _with_counts(
        {"scales": scales, "history": [1, "two", (3.5, None)]}, torch.tensor([1, 2], dtype=torch.uint8)
    )
    engine, *_ = start(model, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    engine, *_ = start(model := _with_counts(None, None), 0)
    assert engine.load_checkpoint(folder)[1] == {"epoch": 4}
    assert model.first.state["scales"].tolist() == [0, 1, 2]
    assert model.first.state["history"] == [1, "two", (3.5, None)]
    assert model.blocks[1].second.state.tolist() == [1, 2]


def test_extra_states_of_modules_come_back(tmp_path):
    run(2, _extra_states, str(tmp_path))
    model = Net()
    model.other = Counts(5)
    engine, *_ = start(model, 3)
    with pytest.warns(UserWarning) as told:
        engine.load_checkpoint(tmp_path)
    texts = [str(one.message) for one in told if "extra state" in str(one.message)]
    assert len(texts) == 2 and "no place for (blocks.1.second, first)" in texts[0] and "(other)" in texts[1]
    assert model.other.state == 5


def test_an_extra_state_that_no_load_could_read_is_refused(tmp_path):
    for state in (Net, lambda: 3, importlib.util.find_spec("json")):
        engine, *_ = start(_with_counts(1, state), 3)
        with pytest.raises(ballast.UseError, match=r"extra state is none that .* \(blocks.1.second, a Counts: a"):
            engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    engine, *_ = start(Net(), 3)
    with pytest.raises(ballast.UseError, match="ballast.extra_state; rename it"):
        engine.save_checkpoint(tmp_path, client_state={"ballast.extra_state": {}})


def test_buffers_that_a_state_dict_leaves_out(tmp_path):
    class Cached(Net):
        def __init__(self, cache):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            if cache is not None:
                self.blocks[0].register_buffer("cache", cache, persistent=False)

    first, *_ = start(model := Cached(torch.full((3,), 7.0)), 3)
    model.seen += 1
    first.save_checkpoint(tmp_path)
    for cache in (torch.full((5,), 2j), None):
        engine, *_ = start(model := Cached(cache), 3)
        engine.load_checkpoint(tmp_path)
        assert model.seen.tolist() == [1, 1]
        assert cache is None or model.blocks[0].cache.tolist() == [2j] * 5
        engine.save_checkpoint(tmp_path, "again")


def _save_whole(rank, folder):
    engine, *_ = start(model := Net(), 3, OPTIMIZERS["adamw"](model.parameters()), more={"bf16": {"enabled": True}})
    train_engine(engine, [1], rank)
    engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "model.safetensors")
    return {name: value.bfloat16() for name, value in masters(engine).items()}


def test_without_safetensors_another_format_is_named(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: find("no_" + name if name == "safetensors" else name, *rest)
    )
    engine, *_ = start(Net(), 3)
    with pytest.raises(ballast.UseError, match="pip install safetensors"):
        engine.save_16bit_model(tmp_path, "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_save_16bit_model(tmp_path):
    want = run(2, _save_whole, str(tmp_path))[0]
    want["head.weight"] = want["embed.weight"]
    got = torch.load(tmp_path / "pytorch_model.bin")
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name].cpu(), want[name].cpu().reshape(got[name].shape)), name
    assert got["head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    Net().bfloat16().load_state_dict(got)
    load_file = pytest.importorskip("safetensors.torch").load_file
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value.cpu(), want[name].cpu()), name
