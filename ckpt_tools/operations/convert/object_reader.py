"""Reads the objects of a checkpoint: archives of `torch.save`, one per object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import BytesEntry, Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.errors import FormatError, IntegrityError, UnsafePickleError, printable
from ckpt_tools.formats.builder import UnreadValues, name_of
from ckpt_tools.formats.in_memory import FILE, InMemoryFile
from ckpt_tools.formats.pickle.state import Path, TensorView, is_value
from ckpt_tools.formats.torch_save import read_leaves
from ckpt_tools.publish.sealed_source import read_object
from ckpt_tools.storage import MemoryStore, Store

_MAX_OBJECT_BYTES, _OPTION_BYTES = 64 << 20, 4096


Leaves = list[tuple[Path, object, tuple[Extent, ...]]]


class ObjectReader:
    """Reads objects. Equal small objects are unpacked only once.

    For example, an option of a flattened optimizer occurs for every parameter.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[bytes, tuple[Leaves, UnreadValues]] = {}

    def will_read(self, items: Iterable[BytesEntry]) -> None:
        """Announces the objects to the store."""
        self._store.will_read(item.extent[:3] for item in items)

    def leaves(self, item: BytesEntry, others: UnreadValues) -> tuple[bytes, Leaves]:
        """Returns an object's archive and its leaves.

        Raises:
            FormatError: it is too long to be an object, or malformed.
        """
        if item.extent.nbytes > _MAX_OBJECT_BYTES:
            raise FormatError(
                f"an object is too long: {item.extent.nbytes} bytes ({printable(item.fqn)!r})"
            )
        data = read_object(self._store, item)
        known = self._known.get(data)
        if known is None:
            found = UnreadValues()
            try:
                known = list(read_leaves(MemoryStore({FILE: data}), FILE, len(data), found)), found
            except IntegrityError as error:
                raise IntegrityError(
                    f"an object is damaged: {printable(item.fqn)!r}: {error}", hint=error.hint
                ) from error
            if not known[0] and not found and not found.tensors:
                known[0].append(((), {}, ()))  # an empty dict
            if len(data) <= _OPTION_BYTES:
                self._known[data] = known
        others.update(known[1])
        others.tensors |= known[1].tensors
        return data, known[0]

    def plain(self, item: BytesEntry) -> Any:
        """Returns an object that is a plain value.

        Raises:
            FormatError: it is something else.
        """
        _, leaves = self.leaves(item, UnreadValues())
        if len(leaves) != 1 or leaves[0][0] or not is_value(leaves[0][1]):
            raise FormatError(f"an optimizer's option is no plain value: {printable(item.fqn)!r}")
        return leaves[0][1]

    def is_same(self, item: BytesEntry, others: ObjectReader, other: BytesEntry) -> bool:
        """Tells whether two objects have equal bytes, or equal plain values and tensors.

        Raises:
            FormatError: one is malformed, or too long to be an object.
        """
        unknown = UnreadValues()
        (one, ones), (two, twos) = self.leaves(item, unknown), others.leaves(other, unknown)
        return one == two or (
            not unknown and not unknown.tensors and _flattened(one, ones) == _flattened(two, twos)
        )


def _flattened(data: bytes, leaves: Leaves) -> list[tuple[Path, str]]:
    """Returns the values and tensors of an archive as strings that can be compared."""
    found = []
    for path, value, extents in leaves:
        if isinstance(value, TensorView):
            (extent,) = extents
            content = data[extent.start : extent.start + extent.nbytes].hex()
            found.append((path, f"{value.dtype.name} {value.sizes} {extent.strides} {content}"))
        else:
            found.append((path, f"{type(value).__name__} {value!r}"))
    return found


def unpack_objects(
    catalog: Catalog, store: Store, memory_file: InMemoryFile
) -> tuple[Catalog, dict[str, Any], list[str]]:
    """Returns a catalog with the tensors of its objects, the plain values, and other names.

    The other names are those of leaves that are neither tensors nor plain values.

    Args:
        catalog: the catalog; all its objects are read.
        store: where they lie.
        memory_file: receives the tensors that were found in objects.

    Raises:
        FormatError: an object is malformed.
    """
    tensors, paths, values = dict(catalog.tensors), dict(catalog.paths), dict[str, Any]()
    unknown: list[str] = []
    reader = ObjectReader(store)
    reader.will_read(catalog.objects.values())
    for fqn, item in catalog.objects.items():
        path = paths.pop(fqn, (fqn,))
        others = UnreadValues()
        try:
            data, leaves = reader.leaves(item, others)
        except UnsafePickleError:
            others["unsafe"] += 1
            leaves = []
        unknown += [fqn] if others or others.tensors else []
        for inner, value, extents in leaves:
            name = name_of((*path, *inner))
            paths[name] = (*path, *inner)
            if isinstance(value, TensorView):
                extent = extents[0]._replace(start=extents[0].start + memory_file.add(data).start)
                tensors[name] = TensorEntry(
                    name, value.dtype, value.sizes, one_chunk(whole(value.sizes), extent)
                )
            else:
                values[name] = value
    return replace(catalog, tensors=tensors, objects={}, paths=paths), values, unknown
