"""Where the ranks come from: torch.distributed's process group if there is one, else the environment's variables."""

from __future__ import annotations

import argparse
import datetime
import os

import torch
import torch.distributed as dist

from ._ballast import UseError, World

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def init_distributed(
    dist_backend: str | None = None,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    dist_init_required: bool | None = None,
    **unknown,
) -> None:
    """Makes torch.distributed's default process group, if there is none yet.

    dist_backend: "nccl", "gloo"; None for NCCL where there is a GPU, else Gloo. init_method, rank, world_size: as in
    torch.distributed.init_process_group; by default from torchrun's variables, or one rank where none are set.
    dist_init_required: False makes nothing, as in DeepSpeed.
    """
    if unknown:
        raise UseError(
            f"[distributed.init_distributed] no such argument here ({', '.join(unknown)}; ranks come from torchrun's, mpirun's or "
            "srun's variables, or from init_method, rank and world_size)"
        )
    if dist_init_required is False or dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    options = {} if timeout is None else {"timeout": timeout}
    if init_method is None and rank < 0 and not any(name in os.environ for name in _RANK_VARIABLES):
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    else:
        options.update(init_method=init_method, rank=rank, world_size=world_size)
    dist.init_process_group(backend, **options)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed_config PATH, which initialize(args=...) reads, and --deepspeed, which only says so."""
    group = parser.add_argument_group("Ballast", "the training engine")
    group.add_argument("--deepspeed", action="store_true", help="use the engine (for programs that ask)")
    group.add_argument("--deepspeed_config", metavar="PATH", default=None, help="the engine's configuration, JSON")
    return parser


def world_of(device: str | torch.device | None, timeout: float) -> World:
    """This process among its peers. device: None for the local rank's GPU where there is one, else the CPU."""
    options = {"device": "auto" if device is None else str(device), "timeout": timeout}
    if not dist.is_initialized():
        return World.from_env(**options)
    on_gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    backend = _backend_of(dist.get_backend_config(), "cuda" if on_gpu else "cpu")
    return World.from_process_group(dist.group.WORLD, backend=backend, **options)


def _backend_of(group: str, kind: str) -> str:
    """What carries a kind of device ("cpu", "cuda") in a group like "gloo" or "cpu:gloo,cuda:nccl". UseError."""
    by_device = dict(part.split(":") if ":" in part else (kind, part) for part in group.split(","))
    backend = by_device.get(kind, "none")
    if backend not in ("nccl", "gloo"):
        raise UseError(
            f"[distributed.world] no such backend here (torch.distributed's for {kind} is {backend}; want nccl or gloo)"
        )
    return backend
