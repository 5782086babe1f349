"""What this process holds of memory, without what malloc and the kernel keep or add on their own account."""

import contextlib
import ctypes

_libc = ctypes.CDLL(None)
_PR_SET_THP_DISABLE = 41


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


_libc.mallinfo2.restype = _Mallinfo


def heap():
    """Bytes in use in the heap and in the mappings that malloc made: what is resident also holds what malloc keeps."""
    info = _libc.mallinfo2()
    return info.uordblks + info.hblkhd


def resident():
    """Resident bytes, without the pages of program files and without what malloc keeps of freed memory."""
    _libc.malloc_trim(0)
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


@contextlib.contextmanager
def small_pages():
    """The kernel's khugepaged makes a whole huge page (2 MiB) resident where a host arena has used a few small ones,
    whenever it comes by: within this, what is resident is what was touched."""
    _libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)
