"""Prints this Python's path, its PyTorch version, the folder of LibTorch's CMake package, the suffix of its extension
modules and the folder where its C headers belong, one a line.

Exits 1 with the reason where there is no PyTorch in the supported range. Doesn't import torch, which takes a second.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys
import sysconfig

OLDEST, NEWEST = (2, 11), (2, 14)


def main():
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"no PyTorch in {sys.executable}")
    version = importlib.metadata.version("torch")
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        sys.exit(f"PyTorch {version} in {sys.executable}; supported are 2.11 to 2.14")
    cmake = pathlib.Path(spec.submodule_search_locations[0]) / "share" / "cmake"
    if not (cmake / "Torch" / "TorchConfig.cmake").is_file():
        sys.exit(f"PyTorch {version} in {sys.executable} brings no LibTorch ({cmake} lacks Torch/TorchConfig.cmake)")
    suffix = sysconfig.get_config_var("EXT_SUFFIX").lstrip(".")
    print(sys.executable, version, cmake, suffix, sysconfig.get_paths()["include"], sep="\n")


main()
