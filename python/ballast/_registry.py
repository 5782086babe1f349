"""Which engine trains a parameter, and under which name. Holds neither alive."""

from __future__ import annotations

import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ._ballast import UseError

_engines = WeakIdKeyDictionary()  # parameter -> (weak reference to its _ballast.Engine, name)


def enter(engine, names: dict[torch.Tensor, str]) -> None:
    reference = weakref.ref(engine)
    for parameter, name in names.items():
        _engines[parameter] = (reference, name)


def leave(engine, names) -> None:
    for parameter in names:
        entry = _engines.get(parameter)
        if entry is not None and entry[0]() is engine:  # else another engine has taken it over
            del _engines[parameter]


def find(parameter: torch.Tensor):
    """(engine, name), or None where no living engine trains it."""
    entry = _engines.get(parameter)
    engine = entry[0]() if entry else None
    return None if engine is None else (engine, entry[1])


def engine_of(parameter: torch.Tensor, call: str):
    found = find(parameter) if isinstance(parameter, torch.Tensor) else None
    if found is None:
        raise UseError(
            f"[utils.{call}] no engine trains this ({_describe(parameter)}; pass a parameter of a module "
            "that was given to ballast.initialize, itself, not a view of it)"
        )
    return found


def _describe(what) -> str:
    return f"a tensor of shape {list(what.shape)}" if isinstance(what, torch.Tensor) else repr(what)
