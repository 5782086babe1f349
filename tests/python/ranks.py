"""Ranks as processes: run(n, function, *arguments) calls function(rank, *arguments) on each of n and returns what they
return, by rank. function must be importable. The processes stay for the next call; what runs in one life never runs in
the processes of another. The first failure ends the ranks that it was among and comes back with the tracebacks of all
that had one, and with what they wrote to standard error."""

import atexit
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
import traceback

import torch.distributed as dist

TIMEOUT = 120  # seconds that one function may take
_GRACE = 5  # seconds for the others to tell what they saw, once a rank has failed

_lock = threading.Lock()  # guards what follows: tests may run side by side
_idle = {}  # (size, life) -> pools that wait for a call
_store = None  # one server for all ranks of all calls
_groups = 0


def _work(rank, size, port, group, pipe, path, log):
    gc.freeze()  # what was loaded before the fork stays; looking through it would copy it
    sys.path[:] = path
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    import torch

    torch.set_num_threads(1)
    store = dist.PrefixStore(group, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            task = pipe.recv()
        except EOFError:  # the tests are over
            break
        module, name, arguments = task
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(rank, *arguments)))
        except BaseException as error:  # a failed assertion too
            pipe.send((False, f"rank {rank} of {size}: {error!r}\n{traceback.format_exc()}"))
    os._exit(0)


def _context():
    # Processes that have loaded PyTorch once fork from there in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch._dynamo", "ballast"])
    return context


class _Pool:
    def __init__(self, size):
        global _store, _groups
        with _lock:
            if _store is None:
                _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            _groups += 1
            group = f"group {_groups}"
        context = _context()
        self.pipes, self.processes = [], []
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ballast-ranks-"))
        for rank in range(size):
            mine, theirs = context.Pipe()
            arguments = (rank, size, _store.port, group, theirs, list(sys.path), str(self.folder / f"rank {rank}"))
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function, arguments):
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        results, failures = {}, []
        deadline = time.monotonic() + TIMEOUT
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, f"rank {rank} died"
                if good:
                    results[rank] = value
                    continue
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _GRACE)
            if not ready:
                failures.append(f"no answer in time from ranks {sorted(waiting.values())}")
                break
        if failures:
            logs = [f"{log.name} wrote:\n{log.read_text()}" for log in sorted(self.folder.iterdir())]
            raise AssertionError("\n\n".join(failures + logs))
        return [results[rank] for rank in range(len(self.pipes))]

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder)


def run(size, function, *arguments, life=0):
    with _lock:
        idle = _idle.setdefault((size, life), [])
        pool = idle.pop() if idle else None
    pool = pool or _Pool(size)
    try:
        result = pool.run(function, arguments)
    except BaseException:
        pool.end()
        raise
    with _lock:
        idle.append(pool)
    return result


@atexit.register
def _end():
    for pool in sum(_idle.values(), []):
        pool.end()
