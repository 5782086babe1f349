"""Makes the body of a case one test in every cell that it holds in. The body runs on every rank, in processes of
ranks.py.

    @case()
    def test_case_01(trial):
        session = trial.start(lin(4), steps=4)
"""

import concurrent.futures
import functools
import importlib
import os
import shutil
import tempfile

import pytest
import ranks
from cells import cells
from trial import Trial

# Cases spend much of their time waiting for sockets, so a few run at once; conftest.py starts what was selected.
_workers = concurrent.futures.ThreadPoolExecutor(6)
_started = {}


def forget_started():
    """Those that haven't begun never will."""
    for future in _started.values():
        future.cancel()
    _started.clear()


def case(world=2, lives=1, **which):
    """In the cells() that the arguments choose. lives: of the processes: body is called once in each, with trial.life
    0, 1, ..., one after the other, with one folder."""
    return in_cells(cells(**which), world, lives)


def in_cells(chosen, world=2, lives=1):
    def decorate(body):
        @pytest.mark.parametrize("cell", chosen, ids=str)
        @functools.wraps(body, assigned=("__module__", "__name__", "__doc__"), updated=())
        def test(cell):
            (_started.pop((body, cell), None) or start(cell)).result()

        def start(cell):
            return _workers.submit(run_case, world, lives, body, cell)

        def start_early(cell):
            _started[body, cell] = start(cell)

        del test.__wrapped__  # pytest would look for the body's arguments
        test.body = body
        test.start_early = start_early
        return test

    return decorate


def run_case(world, lives, body, cell):
    folder = tempfile.mkdtemp(prefix="ballast-case-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        for kind in ("save", "swap"):
            os.mkdir(os.path.join(folder, kind))
        for life in range(lives):
            seen = ranks.run(world, _play, body.__module__, body.__name__, cell, life, folder, life=life)
            for rank in range(1, world):
                assert [entry[0] for entry in seen[rank]] == [entry[0] for entry in seen[0]], f"rank {rank}"
                for mine, first in zip(seen[rank], seen[0]):
                    assert mine == first, f"rank {rank}: {mine}, rank 0: {first}"
            assert seen[0], "nothing was compared between ranks"
            assert os.listdir(os.path.join(folder, "swap")) == [], "swap files were left behind"
    finally:
        shutil.rmtree(folder)


def _play(rank, module, name, cell, life, folder):
    trial = Trial(rank, cell, life, folder)
    try:
        getattr(importlib.import_module(module), name).body(trial)
        trial.finish()
    except BaseException as error:
        raise AssertionError(f"in {cell!r}") from error
    return trial.seen
