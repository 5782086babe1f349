"""Inside zero.Init: calls on tensors that read memory without an operator, so that the record doesn't see them. They get
the values, as a copy; NumPy's arrays of it can't be written to, because that would be lost."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_READS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__dlpack__)


class RawReads(TorchFunctionMode):
    def __init__(self, record):
        super().__init__()
        self._record = record

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copies = function is torch.Tensor.__deepcopy__
        if not (copies or function in _READS) or not self._record.knows(args[0]):
            return function(*args, **kwargs)
        return self._copy(*args, **kwargs) if copies else self._read(function, *args, **kwargs)

    def _read(self, function, tensor, *others, **kwargs):
        part = self._record.part_of(tensor)
        with _disable_current_modes():
            values = self._record.values([part])[0].requires_grad_(tensor.requires_grad)
            result = function(values, *others, **kwargs)
        if function in (torch.Tensor.numpy, torch.Tensor.__array__):
            result.flags.writeable = False
        return result

    @staticmethod
    def _copy(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
        """What copy.deepcopy() gives, by operators. Not for parameters, whose own does that."""
        if id(tensor) not in memo:
            if not tensor.is_leaf:
                raise RuntimeError("only tensors that no operator made can be deep-copied (use detach())")
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]
