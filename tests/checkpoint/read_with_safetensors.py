#!/usr/bin/env python3
"""Reads a checkpoint with the safetensors package and docs/checkpoint_format.md alone, and checks its values.

usage: read_with_safetensors.py PROGRAM   (PROGRAM FOLDER writes the checkpoint)
"""

import json
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "build" / "python"))  # where ./dev test puts packages
try:
    import safetensors
    import torch
except ImportError as missing:
    print(f"skip: {missing} (./dev test installs it; or: pip install safetensors)")
    sys.exit(77)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}


def read(folder, shape, dtype, pieces):
    """One logical tensor out of its pieces."""
    parts, end = [], 0
    for piece in pieces:
        assert piece["begin"] == end, piece
        end = piece["end"]
        with safetensors.safe_open(folder / piece["file"], framework="pt") as file:
            parts.append(file.get_tensor(piece["tensor"]).flatten())
        assert parts[-1].numel() == end - piece["begin"], piece
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[dtype])
    return flat.reshape(shape)


def load(root):
    folder = root / (root / "latest").read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("ballast-checkpoint", 1)
    for file in manifest["files"]:
        assert (folder / file["name"]).stat().st_size == file["bytes"]
    states = {}
    for parameter in manifest["parameters"]:
        dtypes = {"param": parameter["dtype"]}  # all else is fp32
        values = {
            key: read(folder, parameter["shape"], dtypes.get(key, "F32"), pieces)
            for key, pieces in parameter["states"].items()
        }
        states.update((name, values) for name in parameter["names"])
    buffers = {b["name"]: read(folder, b["shape"], b["dtype"], b["pieces"]) for b in manifest["buffers"]}
    return manifest, states, buffers


def expect(tensor, shape, value, dtype=torch.float32):
    assert list(tensor.shape) == shape, (tensor.shape, shape)
    assert tensor.dtype == dtype, tensor.dtype
    if tensor.numel():
        assert (tensor.double() - value).abs().max() < 1e-6, (tensor.flatten()[0], value)


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "run"
        subprocess.run([sys.argv[1], str(root)], check=True)
        manifest, states, buffers = load(root)
    assert manifest["tag"] == "global_step1" and manifest["world"] == 2
    assert manifest["counters"]["applied_steps"] == 1 and manifest["client_state"] == {"epoch": 7}
    assert manifest["optimizer"]["states"] == ["exp_avg", "exp_avg_sq"]
    # Adam with lr 0.1 and eps 1: the first update is -0.1 g / (|g| + 1).
    expect(states["lin.a.p"]["master"], [3, 50], 0.95)
    expect(states["lin.a.p"]["exp_avg"], [3, 50], 0.1)
    expect(states["lin.tied.p"]["exp_avg_sq"], [3, 50], 0.001)
    expect(states["lin.b.p"]["master"], [70], 2 - 0.1 * 3 / 4)
    expect(states["lin.b.p"]["exp_avg"], [70], 0.3)
    expect(states["lin.b.p"]["gradient"], [70], 5)  # 2 of rank 0 and 3 of rank 1
    assert "gradient" not in states["lin.a.p"]
    expect(states["lin.empty.p"]["master"], [0, 4], 0)
    expect(states["lin.scalar.p"]["master"], [], 2.95)
    expect(states["lin.cold.p"]["param"], [2, 3], 0.5, torch.bfloat16)
    assert buffers["counts"].tolist() == [0, 1, 2, 3, 4]
    assert manifest["window"]["backwards"] == 1 and manifest["window"]["scaling"] == "mean"
    pieces = [len(p["states"].get("master", [])) for p in manifest["parameters"]]
    assert max(pieces) == 2, "no parameter lies in both ranks' files"
    print("read with safetensors", safetensors.__version__)


main()
