"""Shapes, groups, ties and the life of an engine: what must keep its form or move together."""

import weakref

import torch
from case import case
from device import DEVICE
from expect import ScalarAdam, bit_equal, expect_all, expect_equal, expect_near, expect_reason
from models import lin
from usage import heap

import ballast

ALL = ("fp32", "bf16", "fp16")
SHAPES = ((0,), (0, 8), (1,), (), (7,), (3, 5))


@case(world=4, dtypes=ALL)
def test_case_20(trial):
    """pytorch#176076, verl#7834: a tied table lost one of its two gradients, or its names drifted apart."""
    model = lin({"first.table": (10, 3)}, ties=[("first.table", "second.table")])
    session = trial.start(model)

    def share_storage(model):
        first, second = model.get_parameter("first.table"), model.get_parameter("second.table")
        assert first is second and first.untyped_storage()._cdata == second.untyped_storage()._cdata

    share_storage(model)
    for value in (-0.075, -0.15, -0.225):
        report = session.window({"first.table": trial.shared(1), "second.table": 2})
        expect_near(report.grad_norm, 16.431677, 1e-5)
        session.expect_value(value, "first.table")
        session.expect_value(value, "second.table")
        share_storage(model)
    session.engine.save_checkpoint(trial.save)
    again = lin({"first.table": (10, 3)}, start=7, ties=[("first.table", "second.table")])
    loaded = trial.start(again)
    loaded.engine.load_checkpoint(trial.save)
    share_storage(again)
    loaded.expect_value(-0.225, "second.table")


def _every_shape(trial):
    for unit in ("", ".p"):  # all in one unit, each in its own
        shapes = {f"p{i}{unit}": shape for i, shape in enumerate(SHAPES)}
        session = trial.start(lin(shapes))

        def window(value):
            report = session.window({name: trial.shared(1) for name in shapes})
            expect_near(report.grad_norm, 4.898979)
            for name, shape in shapes.items():
                expect_equal(session.model.get_parameter(name).shape, shape)
                expect_equal(session.value(name).shape, shape)
                session.expect_value(value, name)

        window(-0.05)
        session.engine.save_checkpoint(trial.save, tag="shapes" + unit)
        window(-0.10)
        session = trial.start(lin(shapes, start=3))
        session.engine.load_checkpoint(trial.save)
        for name in shapes:
            session.expect_state("step", 1, name, 0)
        window(-0.10)
        window(-0.15)


@case(world=1, dtypes=ALL)
def test_case_21_one_rank(trial):
    """DeepSpeed#8280, #8297, pytorch#144045: empty, zero-dimensional and tiny parameters crashed or changed their
    shapes."""
    _every_shape(trial)


@case(world=4, dtypes=ALL)
def test_case_21_four_ranks(trial):
    """The same where most ranks' shards hold none of their elements."""
    _every_shape(trial)


@case()
def test_case_22(trial):
    """DeepSpeed#482, #503, #735: Adam's decay was the wrong one, and vector code spoilt what was no multiple of its
    width."""
    lengths = [*range(1, 68), 255, 256, 257, 1023, 1024, 1025]
    for kind, values in (
        (torch.optim.Adam, (0.9, 0.8000473, 0.7001746)),
        (torch.optim.AdamW, (0.89, 0.7811, 0.673289)),
    ):
        shapes = {f"p{n}": (n,) for n in lengths}  # one after the other in one unit, so that they start anywhere
        model = lin(shapes, start=1)
        optimizer = kind(model.parameters(), lr=0.1, eps=1e-8, weight_decay=0.1)
        session = trial.start(model, given={"optimizer": optimizer}, zero_optimization={"sub_group_size": 4096})
        for value in values:
            session.window({name: 0.5 for name in shapes})
            first = session.value("p1")
            expect_all(first, value, 5e-7, "p1")
        for name in shapes:
            full = session.value(name)
            assert bit_equal(full, first.expand_as(full).contiguous()), name


@case(dtypes=ALL)
def test_case_24(trial):
    """DeepSpeed#7050, #7906: interleaved groups got each other's learning rate, decay or, behind a trip to the host,
    state."""
    for way in ("torch's", "configured", "configured, the other first"):
        model = lin({"a": (3,), "b": (5,), "c": (7,), "d": (2,)}, start=1)
        groups = [{"params": [model.a, model.c]}, {"params": [model.b, model.d], "lr": 0.01, "weight_decay": 0.5}]
        rates = [0.1, 0.01]
        if way == "configured, the other first":
            groups.reverse()
            rates.reverse()
        given = {"model_parameters": groups}
        if way == "torch's":
            given = {"optimizer": torch.optim.AdamW(groups, lr=0.1, eps=1.0, weight_decay=0.0)}
        session = trial.start(model, given=given, optimizer={"type": "AdamW"})
        expect_equal(session.engine.get_lr(), rates, way)
        for plain, decayed in ((0.95, 0.99), (0.90, 0.98005)):
            session.window({name: trial.shared(1) for name in "abcd"})
            for name, value in zip("abcd", (plain, decayed, plain, decayed)):
                session.expect_value(value, name)
            session.engine.offload_states()
            session.engine.reload_states()


@case(dtypes=ALL)
def test_case_25(trial):
    """DeepSpeed#7982, #1823: equal parameters in different groups and parts of the optimizer took different steps."""
    names = [f"unit{i}.p" for i in range(5)]
    model = lin({name: (131,) for name in names})
    at = [model.get_parameter(name) for name in names]
    groups = [{"params": [at[0], at[3]]}, {"params": [at[1]]}, {"params": [at[2], at[4]]}]
    given = {"model_parameters": groups}
    session = trial.start(model, given=given)
    for value in (-0.05, -0.10, -0.15):
        report = session.window({name: trial.shared(1) for name in names})
        expect_equal(len(report.lr), 3)
        for name in names:
            session.expect_value(value, name)
            assert bit_equal(session.value(name), session.value("unit0.p")), name


@case(dtypes=ALL)
def test_case_27_written(trial):
    """DeepSpeed#762, #1322, #4141: weights written from outside were overwritten by the old masters in the next
    step."""
    for by_context in (False, True):
        session = trial.start(lin(4, start=0.9))
        p = session.model.p
        if by_context:
            with ballast.zero.GatheredParameters(p, modifier_rank=0):
                if trial.rank == 0:
                    with torch.no_grad():
                        p.fill_(5)
        else:
            ballast.safe_set_full_fp32_param(p, torch.full((4,), 5.0))
        session.expect_value(5)
        session.window(trial.shared(1))
        session.expect_value(4.95)
        expect_all(p.detach() * 1, 4.95, 0.02, "p as the model sees it")


@case(world=3, dtypes=ALL)
def test_case_28(trial):
    """DeepSpeed#3090, #2413, #3407: frozen weights changed or lost their shapes, tied names differed."""
    shapes = {f"unit{i // 2}.p{i}": (2 * i + 1, 3) for i in range(6)}
    frozen = list(shapes)[1::2]
    start = {name: 0.25 * i for i, name in enumerate(shapes)}
    model = lin(shapes, start, frozen, ties=[("unit0.p0", "last.tied")])
    session = trial.start(model)

    def copies():
        return {name: model.get_parameter(name).detach().clone() for name in shapes}

    before = copies()
    adam = ScalarAdam()
    for _ in range(3):
        session.backward({"last.tied": trial.shared(1), **{name: trial.shared(2) for name in shapes}})
        expect_reason(session.step(), "applied")
        value = adam.step(3)
        session.expect_value(value, "unit0.p0")
        session.expect_value(value, "last.tied")
    for name, now in copies().items():
        assert bit_equal(now, before[name]) == (name in frozen), name
        expect_equal(session.value(name).shape, shapes[name])
        expect_equal(model.get_parameter(name).requires_grad, name not in frozen)


@case()
def test_case_30(trial):
    """DeepSpeed#4858, #896, #5674: a destroyed engine left hooks behind, and the next one counted twice."""
    model = lin(100_000)
    large = {"sub_group_size": 20_000}
    for _ in range(3):
        session = trial.start(model, zero_optimization=large)
        session.window(trial.shared(0))
        trial.finish()
        engine = weakref.ref(session.engine)
        del session
        assert engine() is None, "something still holds the engine"
    assert not model.p._backward_hooks and not model.p._post_accumulate_grad_hooks
    expect_equal(model.p.shape, (100_000,))
    expect_all(model.p.detach(), 0, 0, "the module's own parameter behind its engines")
    model.to(DEVICE)(3).backward()  # it came back where there was room
    expect_all(model.p.grad, 3, 0, "a gradient without an engine")
    model.p.grad = None
    session = trial.start(model, zero_optimization=large)
    session.backward(trial.shared(1))
    session.expect_grad(1, tolerance=0)
    session.step()
    session.expect_value(-0.05)


@case(world=1)
def test_case_30_memory(trial):
    """DeepSpeed#4858, #896, #5674: memory of destroyed engines stayed."""
    model = lin(1_000_000)
    after = []
    for _ in range(4):
        session = trial.start(model, zero_optimization={"sub_group_size": 200_000})
        session.window(1)
        trial.finish()
        del session
        after.append(heap())
    assert after[3] <= 1.01 * after[1], after
    trial.start(lin(1))  # for the ranks to compare


@case()
def test_case_42(trial):
    """A placement on disk turned fp32 parameters into halves."""
    session = trial.start(lin({"a.p": (77,), "b.p": (5,)}, start=1 / 3))
    session.window({"b.p": trial.shared(0)})  # an update by nothing, and none
    third = torch.tensor(1 / 3).item()
    for name in ("a.p", "b.p"):
        seen = session.model.get_parameter(name) * 1
        expect_equal(seen.dtype, torch.float32)
        expect_equal(session.model.get_parameter(name).dtype, torch.float32)
        expect_all(seen.detach(), third, 0, name)
        session.expect_value(third, name, 0)
