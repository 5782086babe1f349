"""What a constructor does to large tensors, written down instead of done, and done later for the tensors that are wanted."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._ballast import UseError

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on

# Random operators that take as many numbers from the generator as their result has elements, whatever the inputs hold.
# Others run on real inputs when they are met.
_FILLS = {
    f"aten::{name}"
    for name in (
        *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_", "random_"),
        *("rand", "randn", "rand_like", "randn_like", "normal"),
    )
}


@dataclass(frozen=True)
class Part:
    """What a tensor shows of a storage that isn't there yet."""

    storage: int
    size: tuple
    stride: tuple
    offset: int


@dataclass
class Operation:
    function: Any
    arguments: tuple
    keywords: dict
    reads: set[int]
    writes: set[int] = field(default_factory=set)  # storages that it makes or changes
    results: list = field(default_factory=list)  # Part of each that it makes, else None
    random_state: torch.Tensor | None = None  # of its generator, before


@dataclass
class Record:
    operations: list[Operation] = field(default_factory=list)
    storages: dict[int, tuple[Any, int, torch.dtype]] = field(default_factory=dict)  # -> (itself, elements, dtype)

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.storages

    def add(self, tensor: torch.Tensor) -> Part:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = (storage, storage.nbytes() // tensor.element_size(), tensor.dtype)
        return self.part_of(tensor)

    def part_of(self, tensor: torch.Tensor) -> Part:
        storage = tensor.untyped_storage()
        _, _, dtype = self.storages[storage._cdata]
        if tensor.dtype != dtype:
            raise UseError(
                f"[zero.Init] a view as another dtype can't be written down ({dtype} as {tensor.dtype}; make this tensor "
                "outside Init())"
            )
        return Part(storage._cdata, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())

    def values(self, parts: list[Part]) -> list[torch.Tensor]:
        """Runs again what these depend on."""
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
            return [self._show(part, real) for part in parts]

    def make_the_rest(self) -> None:
        """Storages that somebody beside this record still holds (buffers, other attributes) get their values."""
        for key, (storage, elements, dtype) in self.storages.items():
            if torch._C._storage_Use_Count(key) > 1:
                whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
                whole.copy_(self.values([Part(key, (elements,), (1,), 0)])[0])
        self.storages = {key: (None, elements, dtype) for key, (_, elements, dtype) in self.storages.items()}

    @staticmethod
    def _show(part: Part, real: dict[int, torch.Tensor]) -> torch.Tensor:
        return real[part.storage].as_strided(part.size, part.stride, part.offset)

    def _run(self, operation: Operation, real: dict[int, torch.Tensor]) -> None:
        def fill(value):
            if isinstance(value, _Kept):
                return value.tensor()
            return self._show(value, real) if isinstance(value, Part) else value

        arguments, keywords = pytree.tree_map(fill, (operation.arguments, operation.keywords), is_leaf=_is_note)
        if operation.random_state is None:
            results = operation.function(*arguments, **keywords)
        else:
            generator = keywords.get("generator") or torch.default_generator
            now = generator.get_state()
            generator.set_state(operation.random_state)
            try:
                results = operation.function(*arguments, **keywords)
            finally:
                generator.set_state(now)
        for part, result in zip(operation.results, pytree.tree_leaves(results)):
            if part is None:
                continue
            _, elements, dtype = self.storages[part.storage]
            real[part.storage] = _pages(elements, dtype)
            self._show(part, real).copy_(result)


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
    return isinstance(value, (Part, _Kept))


class Recorder(TorchDispatchMode):
    def __init__(self, record: Record, min_numel: int):
        super().__init__()
        self.record = record
        self.min_numel = min_numel

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = _tensors_in((args, kwargs))
        known = [tensor for tensor in tensors if self.record.knows(tensor)]
        if not known and (tensors or not self._makes_a_large_one(function, args, kwargs)):
            return function(*args, **kwargs)
        tags = function.tags
        if torch.Tag.inplace_view in tags or (known and _only_looks(function)):
            return function(*args, **kwargs)  # touches no values
        writes = [value for argument, value in _bind(function._schema.arguments, args, kwargs) if _is_written(argument)]
        if writes and not all(self.record.knows(value) for value in writes):
            return self._now(function, args, kwargs, known)
        decides = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(tags)
        if decides or not all("Tensor" in str(result.type) for result in function._schema.returns):
            return self._now(function, args, kwargs, known)
        if torch.Tag.nondeterministic_seeded in tags and function._schema.name not in _FILLS:
            return self._now(function, args, kwargs, known)
        try:
            return self._write_down(function, args, kwargs)
        except NotImplementedError:  # no description of what it gives
            return self._now(function, args, kwargs, known)

    def _makes_a_large_one(self, function, args, kwargs) -> bool:
        if not any(argument.name == "device" for argument in function._schema.arguments):
            return False
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":
            return False
        made = function(*args, **_on_meta(function, kwargs))
        if not isinstance(made, torch.Tensor) or made.numel() <= self.min_numel:
            return False
        if device.type != "cpu":
            raise UseError(
                f"[zero.Init] initial values are made on the CPU (a tensor is made on {device}; name no device inside "
                "Init(), or the CPU: the engine moves the model)"
            )
        return True

    def _now(self, function, args, kwargs, known):
        """Where values decide: runs on real tensors, and the result is real."""
        written = [
            value for argument, value in _bind(function._schema.arguments, args, kwargs) if _is_written(argument)
        ]
        if any(self.record.knows(value) for value in written):
            raise UseError(
                f"[zero.Init] {function._schema.name} can't be written down (it changes a large tensor in a way that depends on "
                "values; do this inside GatheredParameters after ballast.initialize)"
            )
        values = dict(zip(map(id, known), self.record.values([self.record.part_of(tensor) for tensor in known])))
        real_args, real_kwargs = pytree.tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        return function(*real_args, **real_kwargs)

    def _write_down(self, function, args, kwargs):
        record = self.record
        schema = function._schema
        if not _tensors_in(args) and kwargs.get("dtype") is None and any(a.name == "dtype" for a in schema.arguments):
            kwargs["dtype"] = function(*args, **_on_meta(function, kwargs)).dtype  # whatever the default is later
        reads: set[int] = set()

        def note(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not record.knows(leaf):
                return _Kept(leaf)
            part = record.part_of(leaf)
            reads.add(part.storage)
            return part

        notes = pytree.tree_map(note, (args, kwargs))
        operation = Operation(function, notes[0], notes[1], reads)
        if torch.Tag.nondeterministic_seeded in function.tags:
            operation.random_state = (kwargs.get("generator") or torch.default_generator).get_state()
            self._draw(function, args, kwargs)

        written = {}  # alias set -> the argument
        for argument, value in _bind(schema.arguments, args, kwargs):
            if not _is_written(argument):
                continue
            operation.writes.add(record.part_of(value).storage)
            written[frozenset(argument.alias_info.before_set)] = value
        described = pytree.tree_map(_description, (args, kwargs))
        results = function(*described[0], **_on_meta(function, described[1]))
        made = []
        for result, declared in zip(pytree.tree_leaves(results), _declared(schema.returns, results)):
            alias = declared.alias_info
            if alias is not None and frozenset(alias.before_set) in written:
                made.append(written[frozenset(alias.before_set)])
                operation.results.append(None)
            else:
                tensor = _like(result)
                operation.results.append(record.add(tensor))
                operation.writes.add(operation.results[-1].storage)
                made.append(tensor)
        record.operations.append(operation)
        return pytree.tree_unflatten(made, pytree.tree_structure(results))

    @staticmethod
    def _draw(function, args, kwargs) -> None:
        """Takes from the generator what the real operator takes, by running it on memory of its own."""

        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, _like, (args, kwargs))
        function(*real_args, **real_kwargs)


def _pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat CPU tensor of pages of its own: they cost nothing until somebody touches them, and go back to the system with
    the tensor. (malloc would hand out pages that others have touched, and keep what is freed among what isn't.)"""
    if elements == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same shape, strides and dtype, in pages of its own; without values."""
    strides = tensor.stride()
    extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), strides)) + 1 if tensor.numel() else 0
    return _pages(extent, tensor.dtype).as_strided(tensor.size(), strides)


def _tensors_in(tree) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _only_looks(function) -> bool:
    """Its results are views of its inputs."""
    returns = function._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_written(argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _declared(returns, results):
    """What the schema says of each tensor among the results; a list of tensors is one return."""
    many = len(returns) == 1 and isinstance(results, (list, tuple))
    return [returns[0]] * len(pytree.tree_leaves(results)) if many else returns


def _on_meta(function, kwargs) -> dict:
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "generator" in kwargs:
        kwargs["generator"] = None
    if any(argument.name == "device" for argument in function._schema.arguments):
        kwargs["device"] = "meta"
    return kwargs


def _description(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")


def _bind(schema, args, kwargs):
    """(argument, tensor) pairs of a call."""
    for index, argument in enumerate(schema):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, torch.Tensor):
                yield argument, one
