"""is_shared() of tensors that are away. PyTorch's own asks the storage for its memory where an error ends the process
(`terminate called ...`), and a storage that is unmapped answers with one."""

import torch

_of_torch = torch.UntypedStorage.is_shared


def _is_shared(self: torch.UntypedStorage) -> bool:
    try:
        self.data_ptr()
    except RuntimeError:  # the memory that comes back there is the engine's own
        return self.device.type == "cuda"
    return _of_torch(self)


def install() -> None:
    _is_shared.__doc__ = _of_torch.__doc__
    torch.UntypedStorage.is_shared = _is_shared
