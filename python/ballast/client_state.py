"""A checkpoint's client_state: what the program gives with it, its schedule's state and the modules' extra states, as one
JSON document. What JSON hasn't (infinity, integers of more than 64 bits, keys that aren't text) is written as {"__ballast__": kind, "value": ...}."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

from ._ballast import UseError

_TAG = "__ballast__"
_SCHEDULE = "ballast.lr_scheduler"
_EXTRA = "ballast.extra_state"


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return {_TAG: "int", "value": str(value)}
    if isinstance(value, dict):
        counts = isinstance(value, collections.Counter)
        if not counts and _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _encode(one) for key, one in value.items()}
        pairs = [[_encode(key), _encode(one)] for key, one in value.items()]
        return {_TAG: "counter" if counts else "dict", "value": pairs}
    return [_encode(one) for one in value] if isinstance(value, (list, tuple)) else value


def _as_key(value: Any) -> Any:  # keys that came as lists were tuples
    return tuple(map(_as_key, value)) if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(one) for key, one in value.items()}
    if value[_TAG] in ("float", "int"):
        return {"float": float, "int": int}[value[_TAG]](value["value"])
    made = {_as_key(key): one for key, one in _decode(value["value"])}
    return collections.Counter(made) if value[_TAG] == "counter" else made


def write(state: dict | None, schedule: dict | None, extra: dict[str, str]) -> str:
    """Empty where there is none of them. UseError where a value is none that JSON or the above can hold."""
    if state is not None and not isinstance(state, dict):
        raise UseError(f"[engine.save_checkpoint] client_state is a dict (got {type(state).__name__})")
    whole = dict(state or {})
    for own in (_SCHEDULE, _EXTRA):
        if own in whole:
            raise UseError(f"[engine.save_checkpoint] client_state has a key of the engine's own ({own}; rename it)")
    if schedule is not None:
        whole[_SCHEDULE] = schedule
    if extra:
        whole[_EXTRA] = extra
    try:
        return json.dumps(_encode(whole)) if whole else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise UseError(f"[engine.save_checkpoint] client_state isn't JSON ({error})") from None


def read(text: str) -> tuple[Any, dict | None, dict[str, str]]:
    """What was given to write(); of a document that another program wrote, whatever it is."""
    plain = json.loads(text) if text else {}
    try:
        whole = _decode(plain)
    except (AttributeError, KeyError, TypeError, ValueError):  # not written here, though it has our mark
        whole = plain
    if not isinstance(whole, dict):
        return whole, None, {}
    schedule, extra = whole.pop(_SCHEDULE, None), whole.pop(_EXTRA, {})
    return whole, schedule, extra if isinstance(extra, dict) else {}
