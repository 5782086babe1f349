"""What is wrong with a configuration is an error that shows key and value, before anything is allocated."""

import math

import pytest
from case import case
from cells import cells, settings
from device import DEVICE
from expect import error_of, expect_equal
from models import lin

import ballast

# What to merge over a good configuration, and what the error must show.
WRONG = {
    39: [
        ({"gradient_clipp1ng": 1.0}, "gradient_clipp1ng = 1.0; nearest known key: gradient_clipping"),
        ({"fp16": {"loss_scale": "inf"}}, 'fp16.loss_scale = "inf"'),
        ({"fp16": {"loss_scale": "NaN"}}, 'fp16.loss_scale = "NaN"'),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale = -1"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale = true"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window = 0"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8x"}}, 'zero_optimization.reduce_bucket_size = "5e8x"'),
    ],
    46: [
        ({"gradient_clipping": -1}, "gradient_clipping = -1"),
        ({"gradient_clipping": "NaN"}, 'gradient_clipping = "NaN"'),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping = "1.0"'),
        ({"managed_gradient_accumulation": "no"}, 'managed_gradient_accumulation = "no"'),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0"),
    ],
}
# Numbers that JSON hasn't, but Python has.
NOT_JSON = [
    (39, ("fp16", "loss_scale"), math.inf),
    (39, ("fp16", "loss_scale"), math.nan),
    (46, ("gradient_clipping",), math.nan),
    (46, ("gradient_clipping",), math.inf),
]


def _refuse(cell, changes):
    config = settings(cell, swap="/nowhere", **changes)
    return error_of(ballast.ConfigError, lambda: ballast.initialize(model=lin(4), config=config, device=DEVICE))


def _expect_refused(number, cell):
    for changes, shown in WRONG[number]:
        error = _refuse(cell, changes)
        assert shown in error, error
    for case_number, keys, value in NOT_JSON:
        if case_number != number:
            continue
        changes = value
        for key in reversed(keys):
            changes = {key: changes}
        error = _refuse(cell, changes)
        assert f"{'.'.join(keys)} = {value}" in error, error


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_case_39(cell):
    """DeepSpeed#653, #7889: a wrong key or value was taken for something else, or for nothing."""
    _expect_refused(39, cell)


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_case_46(cell):
    """The same kind: numbers as text, text as numbers, and windows of nothing."""
    _expect_refused(46, cell)


def _batch(train, micro, steps):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {key: value for key, value in zip(keys, (train, micro, steps))}


@case(managed=(True,))
def test_case_39_batch(trial):
    """The three numbers of a batch: what is left out follows from the rest, a contradiction shows them all."""
    for given, want in (
        ((8, 2, None), (8, 2, 2)),
        ((None, 2, 2), (8, 2, 2)),
        ((8, None, 2), (8, 2, 2)),
        ((8, None, None), (8, 4, 1)),
        ((None, 3, None), (6, 3, 1)),
    ):
        engine = trial.start(lin(4), **_batch(*given)).engine
        found = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
        expect_equal(found, want, f"{given}")
    for given in ((8, 3, 1), (7, None, None)):
        error = error_of(ballast.ConfigError, lambda: trial.start(lin(4), **_batch(*given)))
        for name, number in _batch(*given).items():
            assert f"{name} = {'not given' if number is None else number}" in error, error
        assert "ranks = 2" in error, error
