"""A checkpoint's client_state: what the program gives with it and its schedule's state, as one JSON document. What JSON
hasn't (infinity, keys that aren't text) is written as {"__ballast__": kind, "value": ...}."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

from ._ballast import UseError

_TAG = "__ballast__"
_SCHEDULE = "ballast.lr_scheduler"


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, dict):
        counts = isinstance(value, collections.Counter)
        if not counts and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _encode(one) for key, one in value.items()}
        pairs = [[_encode(key), _encode(one)] for key, one in value.items()]
        return {_TAG: "counter" if counts else "dict", "value": pairs}
    return [_encode(one) for one in value] if isinstance(value, (list, tuple)) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(one) for key, one in value.items()}
    if value[_TAG] == "float":
        return float(value["value"])
    made = {tuple(key) if isinstance(key, list) else key: one for key, one in _decode(value["value"])}
    return collections.Counter(made) if value[_TAG] == "counter" else made


def write(state: dict | None, schedule: dict | None) -> str:
    """Empty where there is neither. UseError where a value is none that JSON or the above can hold."""
    if state is not None and not isinstance(state, dict):
        raise UseError(f"[engine.save_checkpoint] client_state is a dict (got {type(state).__name__})")
    whole = dict(state or {})
    if _SCHEDULE in whole:
        raise UseError(f"[engine.save_checkpoint] client_state has a key of the engine's own ({_SCHEDULE}; rename it)")
    if schedule is not None:
        whole[_SCHEDULE] = schedule
    try:
        return json.dumps(_encode(whole)) if whole else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise UseError(f"[engine.save_checkpoint] client_state isn't JSON ({error})") from None


def read(text: str) -> tuple[dict, dict | None]:
    """What was given to write()."""
    whole = _decode(json.loads(text)) if text else {}
    schedule = whole.pop(_SCHEDULE, None)
    return whole, schedule
