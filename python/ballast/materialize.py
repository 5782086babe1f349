"""Models that are described before they are made. Inside Init() what a constructor does to large tensors is written down
instead of done; the engine then has the values made unit by unit, and keeps a shard of each."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakIdKeyDictionary

from . import _ballast, configuration
from ._ballast import ConfigError, UseError
from .raw_reads import RawReads
from .recording import Part, Record, Recorder

_described: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> _Description of it
_OWN = "_ballast_described"  # the attribute of modules that says which parameters of theirs Init() described


@dataclass(frozen=True)
class _Description:
    record: Record
    part: Part
    version: int  # when Init ended
    memory: torch.UntypedStorage  # on the meta device, of no bytes; another one after `parameter.data = ...`

    @classmethod
    def of(cls, parameter: torch.Tensor, record: Record, part: Part) -> _Description:
        return cls(record, part, parameter._version, parameter.untyped_storage())

    def holds_for(self, parameter: torch.Tensor) -> bool:
        # A conversion, as by module.to(torch.bfloat16), is what assigns memory of another type.
        converted = parameter.dtype != self.record.storages[self.part.storage][2]
        same = parameter.untyped_storage()._cdata == self.memory._cdata
        return converted or (same and parameter._version == self.version)


class _Own:
    """A module's described parameters. Copies of the module are described as it is."""

    def __init__(self, parameters: dict[str, torch.Tensor]):
        self._parameters = parameters

    def __deepcopy__(self, memo: dict) -> _Own:
        copies = {}
        for name, parameter in self._parameters.items():
            copy, description = memo.get(id(parameter)), _described.get(parameter)
            if copy is None or description is None or not copy.is_meta:
                continue
            if description.holds_for(parameter):
                _described[copy] = _Description.of(copy, description.record, description.part)
            copies[name] = copy
        return _Own(copies)

    def __reduce__(self):
        return _Own, ({},)


def _default_device_type() -> str:
    """Without torch.get_default_device(), which makes a tensor there."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device).type
    return "cpu"


class Init:
    """Context for building a model that is larger than any memory here.

    with ballast.zero.Init():
        model = Model()
    engine, *_ = ballast.initialize(model=model, config=config)

    Inside, large tensors have no values yet; what is done to them is written down. Afterwards the parameters among them
    are on the meta device, and ballast.initialize has their values made unit by unit (an ordinary construction's time
    once more), equal to those that the constructor makes with the same seed; each rank keeps its shards. Until then the
    model can't be used. Later changes to its values belong inside GatheredParameters after initialize. numpy(), tolist(),
    __dlpack__() inside give a copy; what else reads memory past PyTorch's operators there (pickle) sees no values.

    dtype: of floating-point parameters, like torch.set_default_dtype. min_numel: tensors of at most this many elements
    are made at once, and real. enabled: False does nothing. config, config_dict_or_path: as in DeepSpeed; only checked.
    Where PyTorch's default device is a GPU, it is the CPU inside. Inside another Init() only dtype counts.
    """

    _this_thread = threading.local()  # .inside: the innermost one

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        min_numel: int = 65536,
        **unknown,
    ):
        if module is not None or unknown:
            raise ConfigError(
                f"[zero.Init] no such argument here ({', '.join(unknown) or 'module'}; placement comes from the "
                "configuration that ballast.initialize gets, which takes an ordinary module as well)"
            )
        if config is not None or config_dict_or_path is not None:
            configuration.read(config if config is not None else config_dict_or_path)
        self._enabled = enabled
        self._dtype = dtype
        self._min_numel = min_numel
        self._record = Record()
        self._undo: list[Callable[[], None]] = []
        self._outer: Init | None = None
        self._owners: list[
            weakref.ref
        ] = []  # modules that got a parameter or a child, which may be a copy with its own

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if self._dtype is not None:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._undo.append(lambda: torch.set_default_dtype(before))
        self._outer = getattr(Init._this_thread, "inside", None)
        Init._this_thread.inside = self
        self._undo.append(self._leave)
        if self._outer is not None:
            return self  # which writes down what is made here too
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            self._undo.append(register(lambda owner, name, new: self._owners.append(weakref.ref(owner))).remove)
        recorder = Recorder(self._record, self._min_numel)
        recorder.__enter__()
        self._undo.append(lambda: recorder.__exit__(None, None, None))
        if _default_device_type() not in ("cpu", "meta"):
            # Somebody's default for what runs on the GPU; the model goes there shard by shard, by the engine.
            cpu = torch.device("cpu")
            cpu.__enter__()
            self._undo.append(lambda: cpu.__exit__(None, None, None))
        reads = RawReads(self._record)
        reads.__enter__()
        self._undo.append(lambda: reads.__exit__(None, None, None))
        return self

    def _leave(self) -> None:
        Init._this_thread.inside = self._outer

    def __exit__(self, *raised) -> None:
        while self._undo:
            self._undo.pop()()
        if raised[0] is not None:
            return  # there is no model
        owners = {id(owner): owner for reference in self._owners if (owner := reference()) is not None}
        modules = {module for owner in owners.values() for module in owner.modules()}
        parameters = {
            parameter for module in modules for parameter in module._parameters.values() if parameter is not None
        }
        for parameter in parameters:
            if self._record.knows(parameter):
                part = self._record.part_of(parameter)
                _ballast.move_to_meta(parameter)
                _described[parameter] = _Description.of(parameter, self._record, part)
        for module in modules:
            parameters = {name: one for name, one in module._parameters.items() if one is not None}
            own = {name: one for name, one in parameters.items() if one in _described}
            if own:
                module.__dict__[_OWN] = _Own(own)
        self._record.make_the_rest()


def by_name(model: torch.nn.Module) -> Callable[[list[str]], list[torch.Tensor]] | None:
    """What gives the engine the values of parameters on the meta device; None where there are none.

    Init() has written down how they are made. Without, as on torch.device("meta"), the module that a parameter belongs to
    makes them by its reset_parameters(); buffers are made so here.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _reset(model, f"{path}.{name}" if path else name)
    if not any(parameter.is_meta for parameter in parameters.values()):
        return None
    return lambda names: [_value_of(parameters[name], name, model) for name in names]


def _value_of(parameter: torch.Tensor, name: str, model: torch.nn.Module) -> torch.Tensor:
    description = _described.get(parameter)
    if description is None and _OWN not in vars(model.get_submodule(name.rpartition(".")[0])):
        return _reset(model, name)
    if description is None or not description.holds_for(parameter):
        raise UseError(
            f"[zero.Init] a parameter was changed after Init() ended ({name}; change it inside, or inside "
            "GatheredParameters after ballast.initialize)"
        )
    return description.record.values([description.part])[0]


def _reset(model: torch.nn.Module, name: str) -> torch.Tensor:
    """By the reset_parameters() of the module that has it, on a copy of that module."""
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    if not callable(getattr(owner, "reset_parameters", None)):
        raise UseError(
            f"[engine.initialize] a tensor on the meta device has no values ({name}; build the model inside "
            "ballast.zero.Init(), or give its module a reset_parameters())"
        )
    stand_in = owner.__class__.__new__(owner.__class__)
    torch.nn.Module.__init__(stand_in)
    stand_in.__dict__.update({key: value for key, value in vars(owner).items() if not key.startswith("_")})
    for key, parameter in owner._parameters.items():
        made = (
            None
            if parameter is None
            else torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        )
        stand_in.register_parameter(key, made)
    for key, buffer in owner._buffers.items():
        stand_in.register_buffer(key, None if buffer is None else torch.empty_like(buffer, device="cpu"))
    stand_in.reset_parameters()
    return getattr(stand_in, own).detach()
