"""What programs give as the configuration: a dict, or the path of a JSON file. The engine knows its schema."""

from __future__ import annotations

import json
import os
from typing import Any

from . import _ballast
from ._ballast import ConfigError


def read(config: Any) -> dict:
    """As a dict, checked by the engine: of a dict, or a path of a JSON file. ConfigError."""
    if isinstance(config, (str, os.PathLike)):
        return json.loads(_ballast.config_from_file(os.fspath(config)))
    if not isinstance(config, dict):
        raise ConfigError(f"[engine.initialize] the configuration is a dict or a path (got {type(config).__name__})")
    try:
        text = json.dumps(config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[engine.initialize] the configuration isn't JSON ({error})") from None
    _ballast.effective_config(text)
    return json.loads(text)
