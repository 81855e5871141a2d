"""Applies published versions, as an engine does: the oracle of what a publication means.

It uses numpy, zstandard, xxhash and blake3, after slime's description and SkyRL's
`delta_checkpoint.py`, and nothing of the package.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import blake3
import numpy as np
import torch
import xxhash
import zstandard
from safetensors.torch import load_file

State = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def apply_versions(folder: Path, root: Path, numbers: list[int]) -> State:
    """Applies deltas to a copy of the base, in place, as an engine does; compares the checksums."""
    files, places = _of_base(folder)
    for number in numbers:
        version = root / f"weight_v{number:06d}"
        about = json.loads((version / INDEX).read_text())["metadata"]
        assert about["version"] == f"{number:06d}"
        assert about["base_version"] == f"{number - 1:06d}"
        assert about["compression_format"] == "zstd"
        for file in version.glob("*.safetensors"):
            data = file.read_bytes()
            nbytes = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + nbytes])
            checksums = header.pop("__metadata__")
            for name, entry in header.items():
                first, last = (8 + nbytes + at for at in entry["data_offsets"])
                assert entry["dtype"] == "U8" and entry["shape"] == [last - first]
                found = zstandard.ZstdDecompressor().stream_reader(data[first:last]).read()
                path, low, high = places[name]
                new = np.frombuffer(files[path][low:high], np.uint8).copy()
                if about["delta_encoding"] == "xor":
                    new ^= np.frombuffer(found, np.uint8)
                else:
                    count = int.from_bytes(found[:4], "little")
                    new[np.frombuffer(found[4 : 4 + 4 * count], "<u4")] = np.frombuffer(
                        found[4 + 4 * count :], np.uint8
                    )
                checksum = {
                    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
                    "blake3": lambda data: blake3.blake3(data).hexdigest(),
                    "adler32": lambda data: f"{zlib.adler32(data):08x}",
                }[about["checksum_format"]]
                assert checksums[name] == checksum(new.tobytes())
                files[path][low:high] = new.tobytes()
    return _loaded(files)


def apply_skyrl(folder: Path, root: Path, numbers: list[int]) -> State:
    """Applies versions as SkyRL's receiver does: it reads `manifest.json` and the files it names.

    The records must have these keys and no others: its class takes them by name.
    """
    files, places = _of_base(folder)
    kinds = loaded(folder)
    for number in numbers:
        version = root / f"delta-{number:08d}"
        told = json.loads((version / "manifest.json").read_text())
        assert (told["version"], told["base_version"]) == (number, number - 1)
        payloads: dict[str, bytes] = {}
        for file in told["payload_files"]:
            data = (version / file).read_bytes()
            nbytes = int.from_bytes(data[:8], "little")
            for key, entry in json.loads(data[8 : 8 + nbytes]).items():
                if key != "__metadata__":
                    first, last = (8 + nbytes + at for at in entry["data_offsets"])
                    payloads[f"{file} {key}"] = data[first:last]
        for record in told["tensors"]:
            name, path = record.pop("name"), record.pop("payload_file")
            payload = payloads.pop(f"{path} {record.pop('payload_key')}")
            assert record.pop("compressed_num_bytes") == len(payload)
            numbers_before = kinds[name]
            assert record.pop("dtype") == str(numbers_before.dtype).removeprefix("torch.")
            assert record.pop("shape") == list(numbers_before.shape)
            size = record.pop("uncompressed_num_bytes")
            found = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size)
            path, low, high = places[name]
            assert len(found) == size == high - low
            new = np.frombuffer(files[path][low:high], np.uint8) ^ np.frombuffer(found, np.uint8)
            assert record.pop("checksum_algorithm") == "xxh3-128"
            assert record.pop("checksum") == xxhash.xxh3_128(new.tobytes()).hexdigest()
            assert not record
            files[path][low:high] = new.tobytes()
        assert not payloads
    return _loaded(files)


def _of_base(
    folder: Path,
) -> tuple[dict[Path, bytearray], dict[str, tuple[Path, int, int]]]:
    """Returns the files of a model, and by tensor the file and its first and last byte there."""
    files, places = {}, {}
    for path in folder.glob("*.safetensors"):
        data = files[path] = bytearray(path.read_bytes())
        nbytes = int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8 : 8 + nbytes]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                places[name] = path, 8 + nbytes + first, 8 + nbytes + last
    return files, places


def _loaded(files: dict[Path, bytearray]) -> State:
    result: State = {}
    for path, data in files.items():
        changed = path.with_name(f"changed-{path.name}")
        changed.write_bytes(data)
        result |= load_file(changed)
        changed.unlink()
    return result


def loaded(folder: Path) -> State:
    found: State = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
