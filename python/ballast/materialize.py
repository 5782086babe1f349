"""Models that are described before they are made. Inside Init() a module's tensors are on the meta device, and what its
constructor does to them is written down; the engine then has the values made unit by unit, and keeps a shard of each."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.utils._pytree as pytree
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ._ballast import ConfigError, UseError

aten = torch.ops.aten

# Random operators that take as many numbers from the generator as their result has elements, whatever the inputs hold.
# Others run on real inputs when they are met.
_FILLS = {
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_", "random_"),
        *("rand", "randn", "rand_like", "randn_like", "normal"),
    )
}

_registered: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter or buffer -> (its Record, version when Init ended)


@dataclass(frozen=True)
class _Part:
    """What a tensor shows of a storage that isn't there yet."""

    storage: int
    size: tuple
    stride: tuple
    offset: int


@dataclass
class _Operation:
    function: Any
    arguments: tuple
    keywords: dict
    reads: set[int]
    writes: set[int]  # storages that it makes or changes
    results: list  # _Part, or None, for each result
    generator: torch.Generator | None = None
    random_state: torch.Tensor | None = None  # of the generator, before


@dataclass
class _Record:
    operations: list[_Operation] = field(default_factory=list)
    storages: dict[int, tuple[Any, int, torch.dtype]] = field(default_factory=dict)  # -> (held, elements, dtype)

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and tensor.untyped_storage()._cdata in self.storages

    def part_of(self, tensor: torch.Tensor) -> _Part:
        storage = tensor.untyped_storage()
        _, _, dtype = self.storages[storage._cdata]
        if tensor.dtype != dtype:
            raise UseError(
                f"[zero.Init] a view as another dtype can't be written down ({dtype} as {tensor.dtype}; make this tensor "
                "outside Init())"
            )
        return _Part(storage._cdata, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())

    def values(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs again what these depend on."""
        parts = [self.part_of(tensor) for tensor in tensors]
        wanted = {part.storage for part in parts}
        chosen = []
        for operation in reversed(self.operations):
            if operation.writes & wanted:
                chosen.append(operation)
                wanted |= operation.reads
        real: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for operation in reversed(chosen):
                self._run(operation, real)
            return [self._show(part, real).clone() for part in parts]

    @staticmethod
    def _show(part: _Part, real: dict[int, torch.Tensor]) -> torch.Tensor:
        return real[part.storage].as_strided(part.size, part.stride, part.offset)

    def _run(self, operation: _Operation, real: dict[int, torch.Tensor]) -> None:
        def fill(value):
            if isinstance(value, _Kept):
                return value.tensor()
            return self._show(value, real) if isinstance(value, _Part) else value

        arguments, keywords = pytree.tree_map(fill, (operation.arguments, operation.keywords), is_leaf=_is_note)
        if operation.random_state is None:
            results = operation.function(*arguments, **keywords)
        else:
            generator = operation.generator or torch.default_generator
            now = generator.get_state()
            generator.set_state(operation.random_state)
            try:
                results = operation.function(*arguments, **keywords)
            finally:
                generator.set_state(now)
        for part, result in zip(operation.results, pytree.tree_leaves(results)):
            if part is None or part.storage in real:
                continue
            _, elements, dtype = self.storages[part.storage]
            flat = torch.empty(elements, dtype=dtype)
            flat.as_strided(part.size, part.stride, part.offset).copy_(result)
            real[part.storage] = flat


class _Kept:
    """A real tensor among the arguments, which nobody may change before the values are made."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._version = tensor, tensor._version

    def tensor(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise UseError(
                "[zero.Init] a tensor that the model's initial values depend on was changed in place after Init() used it "
                f"(shape {list(self._tensor.shape)}; clone() it for the model)"
            )
        return self._tensor


def _is_note(value) -> bool:
    return isinstance(value, (_Part, _Kept))


class _Recorder(TorchDispatchMode):
    def __init__(self, record: _Record):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        record = self.record
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [leaf for leaf in leaves if record.knows(leaf)]
        if not known and not self._makes_floats(function, leaves, kwargs):
            return function(*args, **kwargs)
        if function in (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default) or any(
            leaf.is_meta and not record.knows(leaf) for leaf in leaves
        ):
            return self._now(function, args, kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags and function._schema.name not in _FILLS:
            return self._now(function, args, kwargs)
        return self._write_down(function, args, kwargs)

    @staticmethod
    def _makes_floats(function, leaves, kwargs) -> bool:
        if leaves or not any(argument.name == "device" for argument in function._schema.arguments):
            return False
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type != "cpu":
            if device.type == "meta":
                return False
            raise UseError(f"[zero.Init] initial values are made on the CPU (a tensor is made on {device})")
        dtype = kwargs.get("dtype")
        if dtype is None and function._schema.name in ("aten::arange", "aten::full", "aten::scalar_tensor"):
            return False  # whole numbers mostly, and small
        return (dtype or torch.get_default_dtype()).is_floating_point

    def _now(self, function, args, kwargs):
        """Where values decide: runs on real tensors, and the result is real."""
        record = self.record
        known = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and record.knows(leaf)]
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in function._schema.arguments):
            raise UseError(
                f"[zero.Init] {function._schema.name} writes random values that depend on others, which can't be written "
                "down (do this outside Init(), inside GatheredParameters after ballast.initialize)"
            )
        values = dict(zip(map(id, known), record.values(known)))
        real_args, real_kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        return function(*real_args, **real_kwargs)

    def _write_down(self, function, args, kwargs):
        record = self.record
        reads: set[int] = set()

        def note(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if record.knows(leaf):
                part = record.part_of(leaf)
                reads.add(part.storage)
                return part
            return _Kept(leaf)

        def describe(leaf):
            if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")

        schema = function._schema.arguments
        if any(argument.name == "dtype" for argument in schema) and not reads and kwargs.get("dtype") is None:
            if any(argument.name == "device" for argument in schema) and not args_have_tensors(args):
                kwargs["dtype"] = torch.get_default_dtype()  # which may be another when this runs again
        generator = kwargs.pop("generator", None)
        notes = pytree.tree_map(note, (args, kwargs))
        written = {
            record.part_of(value).storage
            for argument, value in _bind(schema, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write and record.knows(value)
        }
        operation = _Operation(function, notes[0], notes[1], reads, set(written), [], generator)
        if torch.Tag.nondeterministic_seeded in function.tags:
            operation.random_state = (generator or torch.default_generator).get_state()
            self._draw(function, args, kwargs, generator)
            if generator is not None:
                operation.keywords["generator"] = generator

        meta_args, meta_kwargs = pytree.tree_map(describe, (args, kwargs))
        if any(argument.name == "device" for argument in schema):
            meta_kwargs["device"] = "meta"
            operation.keywords["device"] = "cpu"
        meta_kwargs.pop("pin_memory", None)
        results = function(*meta_args, **meta_kwargs)
        for result in pytree.tree_leaves(results):
            if not isinstance(result, torch.Tensor):
                operation.results.append(None)
                continue
            storage = result.untyped_storage()
            if storage._cdata not in record.storages:
                elements = storage.nbytes() // result.element_size()
                record.storages[storage._cdata] = (storage, elements, result.dtype)
                operation.writes.add(storage._cdata)
                operation.results.append(record.part_of(result))
            else:
                operation.results.append(None)  # shows what is known
        if operation.writes:  # else it only looks
            record.operations.append(operation)
        return results

    @staticmethod
    def _draw(function, args, kwargs, generator) -> None:
        """Takes from the generator what the real operator takes, by running it on memory without values."""

        def stand_in(leaf):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)

        real_args, real_kwargs = pytree.tree_map(stand_in, (args, kwargs))
        if generator is not None:
            real_kwargs["generator"] = generator
        function(*real_args, **real_kwargs)


def args_have_tensors(args) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))


def _bind(schema, args, kwargs):
    """(argument, tensor) pairs of a call."""
    for index, argument in enumerate(schema):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, torch.Tensor):
                yield argument, one


class Init:
    """Context for building a model that is larger than any memory here.

    with ballast.zero.Init():
        model = Model()
    engine, *_ = ballast.initialize(model=model, config=config)

    Inside, tensors have shapes and no memory; ballast.initialize has the values made unit by unit (twice the time of an
    ordinary construction), equal to those that the constructor makes with the same seed, and each rank keeps its shards.
    Until then the model can't be used. Later changes to its values belong inside GatheredParameters after initialize.

    dtype: of floating-point parameters, like torch.set_default_dtype. enabled: False does nothing.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **unknown,
    ):
        if module is not None or unknown:
            raise ConfigError(
                f"[zero.Init] no such argument here ({', '.join(unknown) or 'module'}; placement comes from the "
                "configuration that ballast.initialize gets, which takes an ordinary module as well)"
            )
        self._enabled = enabled
        self._dtype = dtype
        self._record = _Record()
        self._undo: list[Callable[[], None]] = []
        self._tensors: list[weakref.ref] = []

    def __enter__(self) -> Init:
        if not self._enabled:
            return self
        if self._dtype is not None:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._undo.append(lambda: torch.set_default_dtype(before))
        for register in (hooks.register_module_parameter_registration_hook, hooks.register_module_buffer_registration_hook):
            self._undo.append(register(self._registered).remove)
        recorder = _Recorder(self._record)
        recorder.__enter__()
        self._undo.append(lambda: recorder.__exit__(None, None, None))
        return self

    def _registered(self, module, name, tensor) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tensors.append(weakref.ref(tensor))

    def __exit__(self, *raised) -> None:
        while self._undo:
            self._undo.pop()()
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and self._record.knows(tensor):
                _registered[tensor] = (self._record, tensor._version)


def by_name(model: torch.nn.Module) -> Callable[[list[str]], list[torch.Tensor]] | None:
    """What gives the engine the values of parameters on the meta device; None where there are none.

    Init() has written down how they are made. Without, as on torch.device("meta"), the module that a parameter belongs to
    makes them by its reset_parameters(). Buffers are made here.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _values_of([buffer], [name], model)[0]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta and value in _registered:
                setattr(module, name, _values_of([value], [name], model)[0])
    if not any(parameter.is_meta for parameter in parameters.values()):
        return None
    return lambda names: _values_of([parameters[name] for name in names], names, model)


def _values_of(tensors: list[torch.Tensor], names: list[str], model: torch.nn.Module) -> list[torch.Tensor]:
    values: list = [None] * len(tensors)
    by_record: dict[int, tuple[_Record, list[int]]] = {}
    for index, tensor in enumerate(tensors):
        entry = _registered.get(tensor)
        if entry is None:
            values[index] = _reset(model, names[index], tensor)
            continue
        record, version = entry
        if tensor._version != version:
            raise UseError(
                f"[zero.Init] a tensor was changed after Init() ended ({names[index]}; change it inside, or inside "
                "GatheredParameters after ballast.initialize)"
            )
        by_record.setdefault(id(record), (record, []))[1].append(index)
    for record, indices in by_record.values():
        for index, value in zip(indices, record.values([tensors[index] for index in indices])):
            values[index] = value
    return values


def _reset(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
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
        made = None if parameter is None else torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        stand_in.register_parameter(key, made)
    for key, buffer in owner._buffers.items():
        stand_in.register_buffer(key, None if buffer is None else torch.empty_like(buffer, device="cpu"))
    stand_in.reset_parameters()
    return getattr(stand_in, own).detach()
