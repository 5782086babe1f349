"""What the gradient of a window is: every contribution of every rank, each counted once and divided once."""

import math

import pytest
from case import case
from expect import expect_equal, expect_near, expect_reason
from models import lin

import ballast

ALL = ("fp32", "bf16", "fp16")
LEAF = {"leaf_module": {"names": ["experts"]}}


@case(dtypes=ALL)
def test_case_01(trial):
    """DeepSpeed#6550, #7967: only the first or the last micro-batch arrived, or gradients of old windows stayed."""
    session = trial.start(lin(4), steps=4 if trial.cell.managed else 1)
    share = 1 if trial.cell.managed else 1 / 4
    r = (trial.rank + 1) * share
    for value in (-0.0789474, -0.1578947, -0.2368421):
        report = session.window(r, 2 * r, 3 * r, 4 * r)
        expect_reason(report, "applied")
        expect_near(report.grad_norm, 7.5)
        expect_equal(session.engine.get_global_grad_norm(), report.grad_norm)
        expect_equal(report.micro_batches, 4)
        session.expect_value(value)


@case(dtypes=ALL, managed=(False,))
def test_case_02(trial):
    """DeepSpeed#7981, open-instruct#1498: a window whose length the caller alone knows lost its early backwards."""
    r = trial.rank + 1

    def run(session, backwards, gradient, value):
        report = session.window(*((k + 1) * r for k in range(backwards)))
        expect_near(report.grad_norm, 2 * gradient)
        expect_equal(report.micro_batches, backwards)
        session.expect_value(value)

    run(trial.start(lin(4)), 4, 15, -0.09375)
    session = trial.start(lin(4))
    run(session, 1, 1.5, -0.06)
    run(session, 3, 9, -0.133087)
    run(session, 2, 4.5, -0.2072454)


@case(dtypes=ALL)
def test_case_03(trial):
    """DeepSpeed#545, #861, #1273: a parameter used on one rank or in one micro-batch only hung or was divided wrongly;
    one that rests was updated from its old moments."""
    session = trial.start(lin({"a": (4,), "b": (4,)}), steps=2)
    report = session.window({"a": 1, "b": 8} if trial.rank == 0 else {"a": 1}, {"a": 1})
    expect_near(report.grad_norm, 4.472136)
    session.expect_value(-0.05, "a")
    session.expect_value(-0.0666667, "b")

    session = trial.start(lin({"a": (4,), "b": (4,)}), steps=2)
    both, other = {"a": trial.shared(1), "b": trial.shared(1)}, {"b": trial.shared(1)}
    session.window(both, both)
    session.expect_value(-0.05, "a")
    session.window(other, other)
    session.expect_value(-0.05, "a")
    session.expect_state("exp_avg", 0.1, "a")
    session.expect_state("exp_avg_sq", 0.001, "a")
    session.expect_state("step", 1, "a", 0)
    session.expect_value(-0.10, "b")
    session.window(both, both)
    session.expect_value(-0.10, "a")
    session.expect_value(-0.15, "b")


@case()
def test_case_03_units(trial):
    """The same with units of their own; at stage 3 such units belong to a leaf."""
    model = lin({"trunk.p": (5,), "experts.a.p": (4,), "experts.b.p": (4,)})
    session = trial.start(model, steps=2, zero_optimization=LEAF)
    for b in (-0.0666667, -0.1333333):
        one = {"trunk.p": trial.shared(1), "experts.a.p": 1}
        report = session.window({**one, "experts.b.p": 8} if trial.rank == 0 else one, one)
        expect_near(report.grad_norm, 5)  # sqrt(5*1 + 4*1 + 4*2*2)
        session.expect_value(b, "experts.b.p")
    session.expect_value(-0.10, "trunk.p")
    session.expect_value(-0.10, "experts.a.p")


@case(dtypes=("bf16",), managed=(False,))
def test_case_04(trial):
    """DeepSpeed#1800, #2352, #8056: small contributions vanished in a bf16 accumulator that nobody had asked for."""
    asked_for = (("fp32", 3.0, -0.06), ("bf16", 2.0, -0.05))
    for accumulator, norm, value in asked_for if trial.cell.placement == "device" else asked_for[:1]:
        session = trial.start(lin(4), data_types={"grad_accum_dtype": accumulator})
        session.backward(1)
        for _ in range(256):
            session.backward(2.0**-9)
        expect_near(session.step().grad_norm, norm)
        session.expect_value(value)


@case(dtypes=ALL)
def test_case_05(trial):
    """accelerate#3533, transformers#45305, DeepSpeed#8245: the loss was divided twice, or not at all."""
    one = trial.shared(1)
    scaled = trial.start(lin(4), steps=4)
    expect_near(scaled.window(one, one, one, one).grad_norm, 2)
    scaled.expect_value(-0.05)

    unscaled = trial.start(lin(4), steps=4)
    expect_near(unscaled.window(one, one, one, one, scale_wrt_gas=False).grad_norm, 8)
    unscaled.expect_value(-0.08)

    twice = trial.start(lin(4), steps=2)  # the engine's output, and the inner module's beside it
    # A plain loss.backward() learns fp16's loss scale from what the engine's own call returns.
    inner = twice.engine if trial.cell.plain and trial.cell.dtype == "fp16" else twice.engine.module
    for k in range(2):
        twice.backward_of(twice.engine(one) + inner(1))
        if trial.cell.managed or k == 1:
            report = twice.step()
    expect_near(report.grad_norm, 4)
    twice.expect_value(-0.0666667)


@case(dtypes=ALL)
def test_case_06(trial):
    """transformers#34191: a mean of means isn't the mean over the tokens."""
    tokens, gradient = ((1, 1), (3, 5))[trial.rank]
    by_weight = trial.start(lin(4), steps=2)
    report = by_weight.window(gradient, gradient, weight=tokens)
    expect_near(report.grad_norm, 8)
    expect_equal(report.weight, 8)
    by_weight.expect_value(-0.08)
    if trial.cell.managed:
        return
    by_hand = trial.start(lin(4))
    share = trial.world * tokens * gradient / 8
    expect_near(by_hand.window(share, share).grad_norm, 8)
    by_hand.expect_value(-0.08)


@case(dtypes=ALL, managed=(False,))
def test_case_07(trial):
    """DeepSpeed#8184: gradients were lost or counted twice with overlap, and a manual boundary corrupted the window."""
    for overlap in (True, False):
        session = trial.start(lin(4), zero_optimization={"overlap_comm": overlap})
        session.backward(1 if trial.rank == 0 else 3)
        assert session.engine.is_gradient_accumulation_boundary()
        for boundary in (False, True):
            with pytest.raises(ballast.UseError, match="set_gradient_accumulation_boundary"):
                session.engine.set_gradient_accumulation_boundary(boundary)
        session.expect_grad(2)
        expect_near(session.step().grad_norm, 4)
        session.expect_value(-0.0666667)


@case(dtypes=ALL)
def test_case_08(trial):
    """pytorch#73784, #98494: what was collected under no_sync was lost or arrived unreduced."""
    first, second = 1 + 2 * trial.rank, 2 + 2 * trial.rank
    session = trial.start(lin(4), steps=2)
    with session.engine.no_sync():
        session.backward(first)
        with pytest.raises(ballast.UseError, match="no_sync"):
            session.engine.step()
    if trial.cell.managed:
        expect_reason(session.step(), "mid-window")
    session.backward(second)
    expect_near(session.step().grad_norm, 5)
    session.expect_value(-0.0714286)

    session = trial.start(lin(4), steps=2)
    with session.engine.coalesce_grad_reduction():
        session.backward(first - 1)
        session.backward(1)
    if trial.cell.managed:
        session.step()
    session.backward(second)
    expect_near(session.step().grad_norm, 5)
    session.expect_value(-0.0714286)


@case(dtypes=ALL, managed=(True,))
def test_case_09(trial):
    """transformers#22082, DeepSpeed#7439: an epoch that ends inside a window lost its last micro-batch or mixed it
    up."""
    session = trial.start(lin(4), steps=2)
    for first, norm, value in ((1, 3, -0.06), (3, 7, -0.1291199), (5, 11, -0.2039690)):
        expect_near(session.window(trial.shared(first), trial.shared(first + 1)).grad_norm, norm)
        session.expect_value(value)
    for after_its_last_backward in (False, True):
        closing = trial.start(lin(4), steps=2)
        closing.backward(trial.shared(5))
        if after_its_last_backward:
            expect_reason(closing.step(), "mid-window")
        closing.engine.set_gradient_accumulation_boundary(True)
        report = closing.step()
        expect_near(report.grad_norm, 10)
        expect_equal(report.micro_batches, 1)
        closing.expect_value(-0.1 * 5 / 6)


@case(dtypes=ALL)
def test_case_40(trial):
    """Parts of a model that take turns, each in a micro-batch of its own: a peer lost one's gradient or gave it to the
    other."""
    for unit in ("", ".p"):  # in one unit, in two
        a, b = "a" + unit, "b" + unit
        session = trial.start(lin({a: (4,), b: (4,)}), steps=2)
        report = session.window({a: trial.shared(2)}, {b: trial.shared(4)})
        expect_near(report.grad_norm, 2 * math.sqrt(5))
        session.expect_value(-0.05, a)
        session.expect_value(-0.0666667, b)


@case(dtypes=ALL)
def test_case_44(trial):
    """The caller's own scaling holds for every kind of scalar loss, the engine's own output included."""
    c = trial.shared(1)
    losses = (
        lambda engine: engine(c),
        lambda engine: engine(c).reshape(1),
        lambda engine: engine(c).float(),
        lambda engine: engine(c) * 1.0,
        lambda engine: (engine.module.p * c).unbind()[0] + (engine.module.p * c)[1:].sum(),
    )
    for loss in losses:
        session = trial.start(lin(4), steps=2)
        for k in range(2):
            session.backward_of(loss(session.engine), scale_wrt_gas=False)
            if trial.cell.managed or k == 1:
                report = session.step()
        expect_near(report.grad_norm, 4)
        session.expect_value(-0.0666667)


@case(dtypes=ALL)
def test_case_48(trial):
    """Heads that take turns: a part that rests keeps its value, moments and step count."""
    session = trial.start(lin({"trunk.p": (7,), "a.p": (3,), "b.p": (5,)}), steps=2)
    for head, c, trunk, a, b in (
        ("a.p", 1, -0.05, -0.05, 0),
        ("b.p", 3, -0.10, -0.05, -0.075),
        ("a.p", 1, -0.15, -0.10, -0.075),
    ):
        uses = {"trunk.p": trial.shared(1), head: trial.shared(c)}
        session.window(uses, uses)
        session.expect_value(trunk, "trunk.p")
        session.expect_value(a, "a.p")
        session.expect_value(b, "b.p")


@case(stages=(0, 1, 2), managed=(False,))
def test_case_50(trial):
    """Ranks that ran different numbers of backwards hung, or paired one rank's backward with another's."""
    session = trial.start(lin(4))
    for c in (3,) if trial.rank == 0 else (1, 2, 6):
        session.backward(c, weight=1)
    report = session.step()
    expect_near(report.grad_norm, 6)
    expect_equal(report.weight, 4)
    expect_equal(report.micro_batches, 3)
    session.expect_value(-0.075)
