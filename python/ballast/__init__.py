"""Ballast: a ZeRO training engine with DeepSpeed's calling conventions.

    engine, optimizer, _, scheduler = ballast.initialize(model=model, config=config)
    for batches in windows:                       # of any length, which nobody knows in advance
        for batch in batches:
            engine.backward(engine(batch))
        engine.step()

The engine is C++; this package names its parts as DeepSpeed does. docs/from_deepspeed.md lists what is the same, what
differs and what is missing.
"""

import torch

from . import _built_for

if torch.__version__.split(".")[:2] != _built_for.TORCH.split(".")[:2]:
    raise ImportError(
        f"ballast was built for PyTorch {_built_for.TORCH}, and this is {torch.__version__}: build it again with "
        "'pip install --no-build-isolation --force-reinstall .' in its sources, or install that PyTorch"
    )

from . import shared_storage, utils, zero
from ._ballast import (
    CommError,
    ConfigError,
    Error,
    IoError,
    MemoryError,
    StepReport,
    UseError,
    World,
    __version__,
)
from ._missing import FUNCTIONS as MISSING_FUNCTIONS
from .distributed import add_config_arguments, init_distributed
from .engine import Engine
from .optimizer import Optimizer
from .start import initialize
from .utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

shared_storage.install()

__all__ = [
    "CommError",
    "ConfigError",
    "Engine",
    "Error",
    "IoError",
    "MemoryError",
    "Optimizer",
    "StepReport",
    "UseError",
    "World",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "utils",
    "zero",
]


def __getattr__(name: str):
    if name in MISSING_FUNCTIONS:
        raise AttributeError(f"ballast has no {name}: {MISSING_FUNCTIONS[name]}")
    raise AttributeError(f"module 'ballast' has no attribute {name!r} (docs/from_deepspeed.md lists what differs)")
