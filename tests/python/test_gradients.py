"""Gradients that no backward of the engine's brought: assigned to .grad, or given by name."""

import pytest
import torch
from device import seeded
from plain import Net, assert_close, loss_of, masters, tokens
from ranks import run
from starts import placed as start, plainly

import ballast


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "host")])
def test_a_gradient_assigned_by_hand_is_refused(stage, placement):
    engine = start(model := Net(), stage, placement)
    model.blocks[1].bias.grad = torch.ones(7)
    with pytest.raises(ballast.UseError, match=r"blocks\.1\.bias; .*ballast\.safe_set_full_grad\(param, value\)"):
        engine.step()
    assert torch.equal(model.blocks[1].bias.grad, torch.ones(7)) and engine.global_steps == 0
    engine.zero_grad()
    assert model.blocks[1].bias.grad is None
    engine.backward(loss_of(engine, tokens(0, 0)))
    assert engine.step().applied
    assert_close(masters(engine), plainly(Net(), [1]))


def test_a_gradient_that_a_backward_adds_to_is_part_of_the_window():
    """As autograd adds to .grad."""
    engine, plain = start(model := Net(), 2), Net()
    for one in (model, plain):
        one.blocks[1].bias.grad = torch.arange(7.0)
    engine.backward(loss_of(engine, tokens(0, 0)))
    engine.step()
    loss_of(plain, tokens(0, 0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(masters(engine), dict(plain.named_parameters()))


def _estimates(model, step):
    """Gradients as an evolution strategy gives them; none of the frozen parameter, and none of some."""
    generator = seeded(step)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name != "unused"]
    return {name: torch.randn(model.get_parameter(name).shape, generator=generator) for name in names}


def _by_name(rank, stage, placement, folder):
    engine = start(model := Net(), stage, placement, folder, gradient_clipping=2.0)
    norms = []
    for step in range(3):
        for name, value in _estimates(model, step).items():
            ballast.safe_set_full_grad(model.get_parameter(name), value)
        report = engine.step()
        assert report.applied and report.micro_batches == 0
        norms.append(report.grad_norm)
    return masters(engine), norms


@pytest.mark.parametrize("stage, placement", [(0, "device"), (2, "host"), (3, "device"), (3, "nvme")])
def test_gradients_given_by_name_train_without_a_backward(stage, placement, tmp_path):
    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    norms = []
    for step in range(3):
        for name, value in _estimates(plain, step).items():
            plain.get_parameter(name).grad = value
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 2.0).item())
        optimizer.step()
        optimizer.zero_grad()
    for got, measured in run(2, _by_name, stage, placement, str(tmp_path)):
        assert_close(got, dict(plain.named_parameters()))
        assert measured == pytest.approx(norms, rel=1e-5)
