"""What modules keep beside parameters and buffers, as get_extra_state() gives it, as text for a checkpoint's document."""

from __future__ import annotations

import base64
import io
import pickle
import warnings

import torch

from ._ballast import IoError, UseError


def _overrides(module: torch.nn.Module, name: str) -> bool:
    return getattr(type(module), name) is not getattr(torch.nn.Module, name)


def _decode(text: str):
    # Files come from strangers: nothing in them may run.
    return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)


def of(model: torch.nn.Module) -> dict[str, str]:
    """By the module's path. UseError where a load could not read it again."""
    texts = {}
    for path, module in model.named_modules():
        if not _overrides(module, "get_extra_state"):
            continue
        file, state = io.BytesIO(), module.get_extra_state()
        try:
            torch.save(state, file)
            texts[path] = base64.b64encode(file.getvalue()).decode()
            _decode(texts[path])
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise UseError(
                "[engine.save_checkpoint] a module's extra state is none that torch.load(weights_only=True) reads "
                f"({path or 'the model itself'}, a {type(module).__name__}: a {type(state).__name__}; let its "
                "get_extra_state() give tensors, numbers, text, or lists and dicts of them)"
            ) from error
    return texts


def restore(model: torch.nn.Module, texts: dict[str, str]) -> None:
    """What there is none of on either side is a warning."""
    modules = {path: m for path, m in model.named_modules() if _overrides(m, "set_extra_state")}
    for path in texts.keys() & modules.keys():
        try:
            value = _decode(texts[path])
        except Exception as error:
            raise IoError(f"[engine.load_checkpoint] a module's extra state can't be read ({path}; {error})") from None
        modules[path].set_extra_state(value)
    for what, paths in (
        ("keeps extra state that this model has no place for", texts.keys() - modules.keys()),
        ("lacks the extra state of modules here, which stays as it is", modules.keys() - texts.keys()),
    ):
        if paths:
            names = ", ".join(path or "the model itself" for path in sorted(paths))
            warnings.warn(f"the checkpoint {what} ({names})", stacklevel=3)
