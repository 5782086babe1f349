"""What programs give as the configuration: a dict, or the path of a JSON file. The engine knows its schema."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from . import _ballast
from ._ballast import ConfigError


def _leaves(value: Any, path: str = ""):
    """("zero_optimization.stage", 3), ..."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]")
    else:
        yield path, value


def read(config: Any) -> dict:
    """As a dict, checked by the engine: of a dict, or a path of a JSON file. ConfigError."""
    if isinstance(config, (str, os.PathLike)):
        return json.loads(_ballast.config_from_file(os.fspath(config)))
    if not isinstance(config, dict):
        raise ConfigError(f"[engine.initialize] the configuration is a dict or a path (got {type(config).__name__})")
    for path, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"[engine.initialize] not a finite number ({path} = {value}; JSON has no such value)")
    try:
        text = json.dumps(config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[engine.initialize] the configuration isn't JSON ({error})") from None
    _ballast.effective_config(text)
    return json.loads(text)
