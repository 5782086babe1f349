"""Non-finite gradients, the loss scale and clipping: what is skipped, what is scaled, and what of it anyone may
notice."""

import math

import torch
from case import case
from expect import ScalarAdam, expect_equal, expect_near, expect_reason, expect_same
from models import lin

ALL = ("fp32", "bf16", "fp16")


def _state(session):
    """What a skipped step must leave alone."""
    found = {"p": session.value().clone()}
    for key in ("exp_avg", "exp_avg_sq", "step"):
        found[key] = session.state(key).clone()
    return {**found, "lr": torch.tensor(session.engine.get_lr(), dtype=torch.float64)}


@case(dtypes=("fp16", "fp32", "bf16"))
def test_case_15(trial):
    """DeepSpeed#8432: an overflow inside a window let the rest of it through, or was noticed once a micro-batch."""
    session = trial.start(lin(4), steps=4 if trial.cell.managed else 1)
    one = trial.shared(1) * (1 if trial.cell.managed else 0.25)
    bad = math.inf if trial.rank == 1 else 1
    for round, value in enumerate((-0.05, -0.10)):
        before = _state(session)
        expect_reason(session.window(one, one, bad, one), "non-finite gradient")
        expect_same(_state(session), before)
        expect_equal(session.engine.skipped_steps, round + 1)
        expect_equal(session.engine.was_step_applied(), False)
        expect_reason(session.window(one, one, one, one), "applied")
        session.expect_value(value)


@case(dtypes=("fp32", "bf16"))
def test_case_16(trial):
    """DeepSpeed#7171, #8035: without a loss scaler nobody looked for infinities, and clipping made NaNs of them."""
    session = trial.start(lin(5), gradient_clipping=1.0)
    clipped = 1 / math.sqrt(5)  # the gradient 1 in 5 elements, clipped to norm 1
    adam = ScalarAdam()
    for bad in (math.inf, math.nan):
        before = _state(session)
        coefficients = torch.ones(5)
        if trial.rank == 1:
            coefficients[3] = bad
        session.backward(coefficients)
        expect_reason(session.step(), "non-finite gradient")
        expect_same(_state(session), before)
        report = session.window(trial.shared(1))
        expect_near(report.grad_norm, math.sqrt(5))
        expect_near(report.clip_factor, clipped)
        session.expect_value(adam.step(clipped))


def _far_apart():
    """Two parameters that lie in shards of different ranks."""
    return lin({"a": (1,), "filler": (4096,), "b": (1,)})


def _three_and_four(trial):
    return {"a": trial.shared(3), "filler": 0, "b": trial.shared(4)}


@case(dtypes=ALL)
def test_case_17(trial):
    """DeepSpeed#5150, #2695, #7839, pytorch#170862: the norm was that of one rank's part, or of the scaled gradient."""
    clipped = trial.start(_far_apart(), gradient_clipping=1.0)
    report = clipped.window(_three_and_four(trial))
    expect_near(report.grad_norm, 5)
    expect_near(report.clip_factor, 0.2)
    clipped.expect_value(-0.1 * 0.6 / 1.6, "a")
    clipped.expect_value(-0.1 * 0.8 / 1.8, "b")

    generous = trial.start(_far_apart(), gradient_clipping=10.0)
    without = trial.start(_far_apart())
    expect_equal(generous.window(_three_and_four(trial)).clip_factor, 1)
    without.window(_three_and_four(trial))
    expect_same(generous.masters(), without.masters())


@case(dtypes=("fp16",))
def test_case_17_growth(trial):
    """The same on a step on which the scale grows: the scaled gradient, or half of it, was applied."""
    session = trial.start(_far_apart(), gradient_clipping=1.0, fp16={"loss_scale_window": 1})
    a, b = ScalarAdam(), ScalarAdam()
    grew = False
    for _ in range(3):
        scale = session.engine.cur_scale
        report = session.window(_three_and_four(trial))
        expect_equal(report.loss_scale, scale)
        expect_near(report.grad_norm, 5)
        session.expect_value(a.step(0.6), "a")
        session.expect_value(b.step(0.8), "b")
        grew = grew or session.engine.cur_scale > scale
    assert grew


@case(dtypes=("fp16",))
def test_case_18(trial):
    """DeepSpeed#1599, #3008, #3553: the scale fell at the first overflow, never recovered, or fell once a
    micro-batch."""
    overflows = (0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1)
    plain = (1024, 1024, 2048, 2048, 1024, 1024, 512, 512, 512, 1024, 1024)
    consecutive = (1024, 1024, 2048, 2048, 1024, 1024, 1024, 1024, 1024, 2048, 2048)
    for is_consecutive, scales in ((False, plain), (True, consecutive)):
        fp16 = {"loss_scale_window": 2, "hysteresis": 2, "consecutive_hysteresis": is_consecutive}
        session = trial.start(lin(4), fp16=fp16)
        expect_equal(session.engine.cur_scale, 1024)
        for step, (overflow, scale) in enumerate(zip(overflows, scales), start=1):
            report = session.window(math.inf if overflow and trial.rank == 0 else 1)
            expect_reason(report, "non-finite gradient" if overflow else "applied")
            expect_equal(session.engine.cur_scale, scale, f"after step {step}, consecutive {is_consecutive}")


@case(dtypes=("fp16",))
def test_case_19(trial):
    """DeepSpeed#4344, Lightning#11188: a skipped step moved the learning rate on, by hand and by a scheduler."""
    good, bad = trial.shared(1), math.inf
    by_hand = trial.start(lin(4))
    applied = 0

    def step_by_hand(pull):
        nonlocal applied
        by_hand.optimizer.param_groups[0]["lr"] = 0.01 * (applied + 1)
        report = by_hand.window(pull)
        applied += report.applied
        expect_near(report.lr[0], 0.01 * (applied + (not report.applied)), 1e-12)
        return report

    for _ in range(2):
        expect_reason(step_by_hand(bad), "non-finite gradient")
    for value in (-0.005, -0.015, -0.03):
        expect_reason(step_by_hand(good), "applied")
        by_hand.expect_value(value)

    def grow(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (t + 1) / 10)

    scheduled = trial.start(lin(4), given={"lr_scheduler": grow})
    for _ in range(2):
        expect_reason(scheduled.window(bad), "non-finite gradient")
        expect_near(scheduled.engine.get_lr()[0], 0.01, 1e-12)
    for value in (-0.005, -0.015, -0.03):
        scheduled.window(good)
        scheduled.expect_value(value)
    scheduled.engine.save_checkpoint(trial.save)
    loaded = trial.start(lin(4, start=7), given={"lr_scheduler": grow})
    loaded.engine.load_checkpoint(trial.save)
    expect_equal(loaded.engine.skipped_steps, 2)
    for value in (-0.05, -0.075):
        loaded.window(good)
        loaded.expect_value(value)


@case(dtypes=("bf16", "fp32", "fp16"))
def test_case_43(trial):
    """Masters hold what the compute dtype can't, and nothing steps before the first step()."""
    session = trial.start(lin(4))
    for value in (-0.05, -0.10, -0.15):
        session.window(trial.shared(1))
        session.expect_value(value, tolerance=1e-7)
    expect_equal(session.engine.global_steps, 3)
    session.expect_state("step", 3, tolerance=0)
    session.expect_state("exp_avg", 0.271)  # 1 - .9**3: three updates, no hidden one
