"""What compression of whole tensors would save, and what it would cost.

    python tests/benchmarks/compression.py [FILE ...] [--runs 5]

zstd, level 1, on one core: the bytes as they are, and with the bytes of equal weight of all elements
together, so that exponents lie beside exponents. Each FILE has trained weights in float32 anywhere
in it, such as an ONNX model; without one, the values are normal. bfloat16 is their rounding. The
moments are those of AdamW after 50 steps on noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard

MB = 1_000_000
PIECE = 4 << 20


def floats_of(path: Path) -> torch.Tensor:
    """Returns the numbers of a file: of each aligned stretch, what looks like weights."""
    data = np.fromfile(path, np.uint8)
    found = []
    for start in range(4):  # floats begin anywhere in a protobuf
        words = data[start : start + (len(data) - start) // 4 * 4].view("<f4").reshape(-1)
        blocks = words[: len(words) // 1024 * 1024].reshape(-1, 1024)
        with np.errstate(all="ignore"):
            size = np.abs(blocks)
            is_weights = np.isfinite(blocks).all(1) & (size.max(1) < 50) & (size.mean(1) > 1e-4)
            is_weights &= (size > 1e-30).mean(1) > 0.9
        found.append(blocks[is_weights].reshape(-1))
    return torch.from_numpy(np.concatenate(found).copy())


def moments(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both moments of AdamW after steps on noise that is as large as the weights."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([parameter])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        parameter.grad = torch.randn(weights.shape, generator=generator) * weights.abs() * 1e-3
        optimizer.step()
    state = optimizer.state[parameter]
    return state["exp_avg"], state["exp_avg_sq"]


def planes(data: np.ndarray, itemsize: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def rate(work: Callable[[], object], nbytes: int, runs: int) -> float:
    """Returns GB/s."""
    taken = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return nbytes / statistics.median(taken) / 1e9


def show(name: str, tensor: torch.Tensor, runs: int) -> None:
    itemsize = tensor.element_size()
    data = (
        tensor.contiguous().view(torch.uint8).numpy().reshape(-1)[: 64 * MB // itemsize * itemsize]
    )
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    total = sum(map(len, pieces))
    for how, turned in (("as it is", False), ("by planes", True)):
        small = [
            zstandard.ZstdCompressor(level=1).compress(planes(p, itemsize) if turned else p)
            for p in pieces
        ]

        def pack(turned: bool = turned) -> None:
            compressor = zstandard.ZstdCompressor(level=1)
            for piece in pieces:
                compressor.compress(planes(piece, itemsize) if turned else piece)

        def unpack(turned: bool = turned, small: list[bytes] = small) -> None:
            decompressor = zstandard.ZstdDecompressor()
            for one in small:
                back = np.frombuffer(decompressor.decompress(one), np.uint8)
                if turned:
                    np.ascontiguousarray(back.reshape(itemsize, -1).T)

        print(
            f"| {name} | {how} | {sum(map(len, small)) / total:.2f} | {rate(pack, total, runs):.2f}"
            f" | {rate(unpack, total, runs):.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mb", type=int, default=32)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(args.mb * MB // 4, generator=generator) * 0.02
    sources = [("normal", normal), *((path.name, floats_of(path)) for path in args.files)]
    print("| values | bytes | size | pack GB/s | unpack GB/s |\n|---|---|---:|---:|---:|")
    for name, values in sources:
        show(f"{name}, float32", values, args.runs)
        show(f"{name}, bfloat16", values.bfloat16(), args.runs)
        first, second = moments(values)
        show(f"{name}, first moment", first, args.runs)
        show(f"{name}, second moment", second, args.runs)


if __name__ == "__main__":
    main()
