"""Sharded parameters: reading and writing them whole, and building models that fit nowhere whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import _registry
from ._ballast import UseError
from ._missing import FUNCTIONS
from .materialize import Init

__path__: list = []  # as a package's, so that importing a name that isn't there asks _missing

__all__ = ["GatheredParameters", "Init"]


class GatheredParameters:
    """Context in which these parameters are whole, for reading by anything; collective.

    with ballast.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        if rank == 0: torch.nn.init.zeros_(model.head.weight)

    params: one, or several, the same on all ranks in any order; those that no engine keeps (integers, float64) are whole
    anyhow, and each rank's own. modifier_rank: this rank's values at the end become every rank's, master weights
    included; None: what is written is an error or lost.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ):
        self._parameters = [params] if isinstance(params, torch.Tensor) else list(params)
        self._writer = modifier_rank
        self._enabled = enabled
        self._guards: list = []

    def __enter__(self) -> None:
        if not self._enabled:
            return
        by_engine: dict = {}
        for parameter in self._parameters:
            found = _registry.find(parameter)
            if found is not None:
                by_engine.setdefault(found[0], []).append(parameter)
            elif parameter.is_meta:
                raise UseError(
                    f"[zero.GatheredParameters] a parameter has no values yet (shape {list(parameter.shape)}; call "
                    "ballast.initialize with its model first)"
                )
        try:
            for engine, parameters in by_engine.items():
                self._guards.append(engine.gathered(parameters, self._writer))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised) -> None:
        guards, self._guards = self._guards, []
        for guard in reversed(guards):
            guard.end()


def __getattr__(name: str):
    full = f"zero.{name}"
    if full in FUNCTIONS:
        raise AttributeError(f"ballast has no {full}: {FUNCTIONS[full]}")
    raise AttributeError(f"module 'ballast.zero' has no attribute {name!r}")
