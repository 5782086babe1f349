"""Orders of calls: how forwards, backwards, step() and reads may mix inside a window."""

import math

import torch
from case import case
from expect import expect_equal, expect_near, expect_reason, expect_same
from models import Zoo, lin

ALL = ("fp32", "bf16", "fp16")


@case(dtypes=ALL)
def test_case_10(trial):
    """transformers#22143, gpt-neox#308: samples were counted by micro-batch, and a run stopped inside a window lost
    count."""
    session = trial.start(lin(4), steps=2)
    two = trial.shared(2)
    session.window(two, two)
    session.expect_value(-0.0666667)
    session.backward(two)
    if trial.cell.managed:
        expect_reason(session.step(), "mid-window")
    engine = session.engine
    expect_equal(engine.global_steps, 1)
    expect_equal(engine.micro_steps, 3 if trial.cell.managed else 2)  # the caller's are counted when its window ends
    expect_equal(engine.global_samples, 4)
    session.expect_value(-0.0666667)


@case(dtypes=ALL)
def test_case_11(trial):
    """DeepSpeed#3539, #8135: a second backward over one graph was lost, or counted as a micro-batch."""
    for drop_first in (False, True):
        session = trial.start(lin(4))
        once = session.engine(trial.shared(1))
        session.backward_of(once, retain_graph=True)
        if drop_first:
            session.engine.zero_grad()
        session.backward_of(once * 2)
        report = session.step()
        expect_reason(report, "applied")
        expect_near(report.grad_norm, 4 if drop_first else 6)
        session.expect_value(-0.0666667 if drop_first else -0.075)


def _train(trial, model, session, steps, micro_batches, between=lambda step, k: None):
    for step in range(steps):
        for k in range(micro_batches):
            session.backward(step, k, trial.rank)
            if session.managed or k + 1 == micro_batches:
                session.step()
            between(step, k)


def _moments(session):
    found = {}
    for name, parameter in session.model.named_parameters():
        if parameter.requires_grad:
            found[name] = session.value(name).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key} of {name}"] = session.state(key, name).clone()
    return found


@case(dtypes=ALL)
def test_case_12(trial):
    """DeepSpeed#8043, #6557: an evaluation inside a window, in another module order, changed what the window summed."""
    seen = []
    for evaluate in (False, True):
        model = Zoo()
        session = trial.start(model, steps=2, zero_optimization=Zoo.LEAF)

        def look(step, k):
            if not evaluate or k == 1:
                return
            with torch.no_grad() if step % 2 else torch.inference_mode():
                for i in range(3):
                    assert model.backwards_through_blocks(step, 5 + i, trial.rank).isfinite().all()

        _train(trial, model, session, 3, 2, look)
        seen.append(_moments(session))
    expect_same(*seen)


@case(dtypes=ALL, managed=(False,))
def test_case_13(trial):
    """Two forwards before their backwards: one of the two was lost."""
    session = trial.start(lin({"a.p": (4,), "b.p": (4,)}))
    first = session.engine({"a.p": trial.shared(1), "b.p": 1})
    second = session.engine({"b.p": trial.shared(2), "a.p": 1})
    session.backward_of(first)
    session.backward_of(second)
    expect_near(session.step().grad_norm, 2 * math.sqrt(13))
    session.expect_value(-0.0666667, "a.p")
    session.expect_value(-0.075, "b.p")

    seen = []
    for both_first in (False, True):
        session = trial.start(Zoo(), zero_optimization=Zoo.LEAF)
        for step in range(3):
            losses = [session.engine(step, 0, trial.rank)]
            if both_first:
                losses.append(session.engine(step, 1, trial.rank))
            session.backward_of(losses[0])
            session.backward_of(losses[1] if both_first else session.engine(step, 1, trial.rank))
            session.step()
        seen.append(session.masters())
    expect_same(*seen)


def _step_without_backward(trial):
    session = trial.start(lin(4))
    engine = session.engine

    def nothing_happens(value, steps):
        report = session.step()
        expect_reason(report, "empty window")
        expect_equal(report.grad_norm, 0)
        expect_equal(engine.get_global_grad_norm(), 0)
        expect_equal(engine.was_step_applied(), False)
        expect_equal(report.micro_batches, 0)
        expect_equal(engine.global_steps, steps)
        session.expect_value(value)

    nothing_happens(0, 0)
    session.window(trial.shared(1))
    session.expect_value(-0.05)
    nothing_happens(-0.05, 1)
    nothing_happens(-0.05, 1)
    session.expect_state("exp_avg", 0.1)
    session.window(trial.shared(1))
    session.expect_value(-0.10)

    session.backward(trial.shared(5))  # dropped, so that the window is empty again
    engine.zero_grad()
    expect_reason(session.step(), "empty window")
    session.expect_value(-0.10)


@case()
def test_case_14(trial):
    """A step() with nothing to apply crashed, applied the last update again, or reported an old norm."""
    _step_without_backward(trial)


@case(dtypes=("bf16", "fp16"))
def test_case_41(trial):
    """The same with masters beside the parameters."""
    _step_without_backward(trial)


@case(dtypes=ALL, managed=(True,))
def test_case_49(trial):
    """A window of K backwards is one window, whoever counts it: parameters, moments and norms."""
    seen = []
    for managed in (True, False):
        session = trial.start(
            Zoo(), steps=3, managed_gradient_accumulation=managed, gradient_clipping=0.3, zero_optimization=Zoo.LEAF
        )
        norms = []
        for step in range(3):
            for k in range(3):
                session.backward(step, k, trial.rank)
                if managed or k == 2:
                    report = session.step()
            norms.append((report.grad_norm, report.clip_factor))
        expect_equal(session.engine.global_steps, 3)
        seen.append({**_moments(session), "norms": torch.tensor(norms, dtype=torch.float64)})
    expect_same(*seen)
