"""Full values of one parameter, wherever its parts lie. Collective: all ranks call them alike, between the engine's calls."""

from __future__ import annotations

import torch

from . import _registry
from ._missing import FUNCTIONS

__path__: list = []  # as a package's, so that importing a name that isn't there asks _missing


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The fp32 master weights."""
    engine, name = _registry.engine_of(param, "safe_get_full_fp32_param")
    return engine.full_parameter(name)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Takes the same value on every rank."""
    engine, name = _registry.engine_of(param, "safe_set_full_fp32_param")
    engine.set_full_parameter(name, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """What the window has so far, fp32, divided by its normaliser, before clipping; None where no rank has any."""
    engine, name = _registry.engine_of(param, "safe_get_full_grad")
    return engine.full_grad(name)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Takes the same value on every rank."""
    engine, name = _registry.engine_of(param, "safe_set_full_grad")
    engine.set_full_grad(name, value)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """optim_state_key: "exp_avg", "exp_avg_sq", "momentum_buffer" (fp32, the parameter's shape) or "step"."""
    engine, name = _registry.engine_of(param, "safe_get_full_optimizer_state")
    return engine.full_optimizer_state(name, optim_state_key)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Takes the same value on every rank."""
    engine, name = _registry.engine_of(param, "safe_set_full_optimizer_state")
    engine.set_full_optimizer_state(name, optim_state_key, value)


def __getattr__(name: str):
    full = f"utils.{name}"
    if full in FUNCTIONS:
        raise AttributeError(f"ballast has no {full}: {FUNCTIONS[full]}")
    raise AttributeError(f"module 'ballast.utils' has no attribute {name!r}")
