"""Ranks as processes that stay: run(n, function, *arguments) calls it once on each of n, as function(rank, *arguments), and
returns what they return. function must be importable. The first failure comes back with its traceback."""

import atexit
import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile
import traceback

TIMEOUT = 120  # seconds that one function may take on any rank

_pools = {}


def _work(rank, size, store, pipe, path):
    sys.path[:0] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        task = pipe.recv()
        if task is None:
            break
        module, name, arguments = task
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, *arguments)))
        except BaseException as error:  # a failed assertion too
            pipe.send((False, f"rank {rank} of {size}: {error!r}\n{traceback.format_exc()}"))
    os._exit(0)


class _Pool:
    def __init__(self, size):
        context = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp(prefix="ballast-ranks-")
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, os.path.join(folder, "store"), theirs, list(sys.path))
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, module, name, arguments):
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                failures.append(f"rank {rank}: no answer after {TIMEOUT} s")
                break
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, f"rank {rank} died"
            (results if good else failures).append(value)
        if failures:
            self.end()
            raise AssertionError("\n\n".join(failures))
        return results

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()
        for size, pool in list(_pools.items()):
            if pool is self:
                del _pools[size]


def run(size, function, *arguments):
    if size not in _pools:
        _pools[size] = _Pool(size)
    module = function.__module__
    return _pools[size].run(module, function.__name__, arguments)


@atexit.register
def _end():
    for pool in list(_pools.values()):
        pool.end()


SOURCES = pathlib.Path(__file__).resolve().parents[2]
