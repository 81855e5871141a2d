"""A store with some ranges held in memory, so that several reads cost one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_tools.storage.base import Store

Span = tuple[str, int, int]  # file, start, bytes


class RangeCacheStore:
    """The inner store, with ranges that were read in advance."""

    def __init__(self, inner: Store, held: Mapping[Span, memoryview]) -> None:
        self.inner, self._held = inner, held
        self.url, self.capabilities, self.traffic = inner.url, inner.capabilities, inner.traffic
        self.size, self.version, self.list_files = inner.size, inner.version, inner.list_files
        self.folders, self.enter, self.create, self.close = (
            inner.folders,
            inner.enter,
            inner.create,
            inner.close,
        )
        self.strays, self.blob_name = inner.strays, inner.blob_name
        self.stored_crcs = inner.stored_crcs

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        for (file, at, length), data in self._held.items():
            if file == path and at <= start and start + nbytes <= at + length:
                return data[start - at : start - at + nbytes]
        return self.inner.view(path, start, nbytes)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        view = self.view(path, start, len(buffer))
        if view is None:
            self.inner.read_into(path, start, buffer)
        else:
            buffer[:] = view

    def will_read(self, ranges: Iterable[Span], is_all: bool = False) -> None:
        self.inner.will_read([r for r in ranges if self.view(*r) is None], is_all)


def announce(store: Store, spans: Sequence[Span], step: int) -> None:
    """Announces spans that will be held, in reads of at most `step` bytes."""
    store.will_read(
        [(file, at, n) for file, start, nbytes in spans for at, n in _cut(start, nbytes, step)]
    )


def hold(store: Store, spans: Sequence[Span], step: int) -> RangeCacheStore:
    """Reads spans into memory, and returns a store that holds them."""
    held = {}
    for span in spans:
        file, start, nbytes = span
        view = memoryview(bytearray(nbytes))
        for at, n in _cut(start, nbytes, step):
            store.read_into(file, at, view[at - start : at - start + n])
        held[span] = view
    return RangeCacheStore(store, held)


def _cut(start: int, nbytes: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(step, start + nbytes - at)) for at in range(start, start + nbytes, step)]
