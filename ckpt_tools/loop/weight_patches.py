"""Reads which elements of a model have changed between two published versions.

An engine that takes patches in memory, such as vLLM, needs no copy of the model on its disk.

Imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.errors import (
    IntegrityError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats.deltas.chain import PatchedStore, as_patched
from ckpt_tools.formats.deltas.layout import Versions, no_versions
from ckpt_tools.formats.registry import Source, open_source, open_version, versions_in
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.storage import Store, local_path
from ckpt_tools.transfer.options import Path_

_TILE_BYTES = 4 << 20
_MAX_INT32 = 2**31 - 1
_INTS: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class WeightPatch(NamedTuple):
    """The change of one tensor, as vLLM's `load_checkpoint_weight_patches` takes it.

    Attributes:
        name: of the tensor, as on the Hub.
        shape: of the whole tensor.
        dtype: its type.
        values: the new values at `indices`, in one dim; all values if `indices` is None.
        indices: ascending positions of the elements that have changed, in the flattened tensor, as
            int32, or int64 for a long tensor. None if the whole tensor is given: vLLM marks
            unchanged elements with NaN, so it takes neither new NaNs nor integers by position.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor | None = None


@checked()
def weight_patches(
    root: Path_,
    from_version: int,
    version: int | None = None,
    *,
    base: Path_ | None = None,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[WeightPatch]:
    """Yields what has changed between two versions, tensor by tensor, in host memory.

    A tensor that has not changed is left out. All bytes are compared with the checksums of the
    publication before they are given out. In memory are the changes of `jobs` tensors and one: a
    position of 4 bytes and a value for each changed element.

    Args:
        root: the directory of the versions; a path or a URL.
        from_version: the version that the engine has; 0 for its own model.
        version: the version to reach; the newest if None.
        base: the directory of version 0, if it is not where the publisher had it.
        jobs: threads that read ahead; the processors of this process if None.
        storage_options: for fsspec.

    Raises:
        NotACheckpointError: there are no versions.
        PlanError: there is no such version; or the two have different tensors.
        IntegrityError: a version is damaged, or `base` is another model.
        StorageError: a version cannot be read.
    """
    url = local_path(root).rstrip("/")
    versions = versions_in(url, storage_options)
    numbers = versions.numbers
    if not numbers:
        raise no_versions(url)
    last = numbers[-1] if version is None else version
    for number in (from_version, last):
        if number not in (0, *numbers) or last == 0:
            shown = ", ".join(map(str, numbers[-5:]))
            raise PlanError(
                f"there is no version {number} in {printable(url)}; the newest are {shown}"
            )
    if last < from_version:
        raise PlanError(f"expected a version from {from_version} on, got {last}")
    where = "" if base is None else local_path(base)
    return _patches(versions, from_version, last, where, num_threads(jobs), storage_options)


def _patches(
    versions: Versions,
    first: int,
    last: int,
    base: str,
    jobs: int,
    options: Mapping[str, Any] | None,
) -> Iterator[WeightPatch]:
    if first == last:
        return
    with ExitStack() as stack:
        old = _open_old(versions, first, base, options)
        stack.callback(old.store.close)

        def reached(number: int, store: Store) -> Store | None:
            del store
            return old.store if number == first else None

        new = open_version(versions.path(last), options, base, reached)
        stack.callback(new.store.close)
        _compare_names(old, new)
        patched = as_patched(new.folder)
        if patched is not None and patched.layers[0].about.base_number != first:
            patched = None  # a complete version lies between: nothing tells what has changed
        compared = _Compared(old, new, patched)
        names = [n for n in new.catalog.tensors if patched is None or n in patched.changed]
        for source in (new,) if patched is not None else (old, new):
            entries = [source.catalog.tensors[name] for name in names]
            extents = [chunk.extent for entry in entries for chunk in entry.chunks]
            source.store.will_read([(e.file, e.start, e.nbytes) for e in extents], is_all=True)
        pool = stack.enter_context(ThreadPoolExecutor(jobs, "ckpt-patches"))
        ahead: deque[Future[WeightPatch | None]] = deque()
        try:
            for name in names:
                ahead.append(pool.submit(compared.patch_of, name))
                if len(ahead) > jobs and (patch := ahead.popleft().result()) is not None:
                    yield patch
            while ahead:
                if (patch := ahead.popleft().result()) is not None:
                    yield patch
        finally:
            pool.shutdown(cancel_futures=True)


def _open_old(
    versions: Versions, number: int, base: str, options: Mapping[str, Any] | None
) -> Source:
    """Opens the version that the engine has."""
    if number:
        return open_version(versions.path(number), options, base, None)
    if not base and 1 in versions.numbers:
        first = open_version(versions.path(1), options, "", None)
        patched = as_patched(first.folder)
        base = "" if patched is None else patched.complete_url
        first.store.close()
    if not base:
        raise PlanError(
            "no version 1 says what version 0 is: it is complete or gone"
            f" ({printable(versions.url)})",
            hint="give the engine's own model with base=DIR",
        )
    return open_source(base, options)


def _compare_names(old: Source, new: Source) -> None:
    """Refuses versions with different tensors.

    Raises:
        PlanError: names, types or shapes differ.
    """
    was, now = (
        {name: (entry.dtype.name, entry.shape) for name, entry in source.catalog.tensors.items()}
        for source in (old, new)
    )
    if differing := sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n)):
        raise PlanError(
            "the versions have different tensors, so no patch leads from one to the other:"
            f" {printable(differing[0])!r} ({printable(old.path)}, {printable(new.path)})",
            hint="load the new version as a whole: ckpt_tools.pull",
        )


class _Compared:
    """Two versions, and what their manifests say of their tensors."""

    def __init__(self, old: Source, new: Source, patched: PatchedStore | None) -> None:
        """Takes the versions; and the new one as changes of the old one, if it is that."""
        self._sides = [(source, _sealed(source)) for source in (old, new)]
        self._patched = patched

    def patch_of(self, name: str) -> WeightPatch | None:
        """Compares a tensor; returns None if it is the same."""
        entry = self._sides[1][0].catalog.tensors[name]
        dtype: torch.dtype = getattr(torch, entry.dtype.name)
        if _takes_positions(dtype):
            where, found = self._changes(name, entry)
            if not len(where):
                return None
            values = torch.from_numpy(found).view(dtype)
            if not values.float().isnan().any():
                indices = torch.from_numpy(where)
                return WeightPatch(name, entry.shape, dtype, values, indices)
        data, differs, sums = empty_bytes(entry.nbytes), False, [0, 0]
        for start, (was, now) in self._tiles(name, entry):
            sums = [crc64nvme(t.data, crc) for t, crc in zip((was, now), sums, strict=True)]
            data[start : start + len(now)] = now
            differs = differs or not np.array_equal(was, now)
        self._prove(name, sums)
        if not differs:
            return None
        return WeightPatch(name, entry.shape, dtype, torch.from_numpy(data).view(dtype))

    def _changes(self, name: str, entry: TensorEntry) -> tuple[Any, Any]:
        """Returns the positions of changed elements, and the new ones, as integers."""
        kind, numel = _INTS[entry.dtype.itemsize], entry.nbytes // entry.dtype.itemsize
        # memory that nothing is written to takes no room
        where: Any = np.empty(numel, np.int32 if numel <= _MAX_INT32 else np.int64)
        values = np.empty(numel, kind)
        sums, count = [0, 0], 0
        for start, tiles in self._tiles(name, entry):
            sums = [crc64nvme(t.data, crc) for t, crc in zip(tiles, sums, strict=True)]
            was, now = (tile.view(kind) for tile in tiles)
            differs = np.flatnonzero(was != now)
            stop = count + len(differs)
            values[count:stop] = now[differs]
            where[count:stop] = differs
            where[count:stop] += start // now.itemsize
            count = stop
        self._prove(name, sums)
        return where[:count], values[:count]

    def _prove(self, name: str, sums: Sequence[int]) -> None:
        """Compares the CRC-64 of the old and the new bytes with what was published.

        Raises:
            IntegrityError: one differs.
        """
        for (source, sealed), crc in zip(self._sides, sums, strict=True):
            if sealed is not None and int(sealed.tensors[name].fingerprint, 16) != crc:
                raise IntegrityError(
                    f"a tensor is not what was published: {printable(name)!r}"
                    f" ({printable(source.path)})",
                    hint="ckpt verify on the directory of the versions names what is damaged; or"
                    " base is another model",
                )

    def _tiles(self, name: str, entry: TensorEntry) -> Iterator[tuple[int, list[Bytes]]]:
        """Yields the old and the new bytes of a tensor, from a byte on. Their memory is reused."""
        (old, _), (new, _) = self._sides
        patches = () if self._patched is None else self._patched.patches_of(name)
        room = [empty_bytes(min(_TILE_BYTES, entry.nbytes)) for _ in self._sides]
        for start in range(0, entry.nbytes, _TILE_BYTES):
            tiles = [data[: entry.nbytes - start] for data in room]
            _read(old, old.catalog.tensors[name], start, tiles[0])
            if self._patched is None:
                _read(new, entry, start, tiles[1])
            else:
                tiles[1][:] = tiles[0]
                for patch in patches:
                    patch.apply(tiles[1], start)
            yield start, tiles


def _sealed(source: Source) -> Manifest | None:
    manifest = checked_manifest(source)
    known = manifest is not None and source.catalog.tensors.keys() <= manifest.tensors.keys()
    return manifest if known else None


def _takes_positions(dtype: torch.dtype) -> bool:
    """Tells whether vLLM takes single elements of a type: it marks the others with NaN."""
    return dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2


def _read(source: Source, entry: TensorEntry, start: int, data: Bytes) -> None:
    if len(entry.chunks) != 1:
        raise StorageError(
            f"a version stores a tensor in parts: {printable(entry.fqn)!r}"
            f" ({printable(source.path)})",
            hint="publish it again: ckpt publish --full",
        )
    extent = entry.chunks[0].extent
    source.store.read_into(extent.file, extent.start + start, data.data)
