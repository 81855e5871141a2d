"""Reads files in batches, so that several checks of the same bytes need only one read.

An archive's first and last bytes say where its records lie. Only then can a check compare the
records. On a disk, the second read costs nothing. In an object store, which also fetches small
holes, it would fetch everything again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.catalog import Extent
from ckpt_tools.storage import Store
from ckpt_tools.storage.prefetch import WINDOW_BYTES
from ckpt_tools.storage.range_cache import Span, announce, hold

_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Ranges of files, and the archives that lie completely in them.

    Attributes:
        store: reads them, from memory if they are held.
        spans: the ranges. Ranges of the same file are adjacent.
        archives: the archives in these ranges.
        is_held: the bytes are in memory, so a second read costs nothing.
    """

    store: Store
    spans: Sequence[Span]
    archives: Sequence[Extent]
    is_held: bool


class _Group:
    """Spans of one batch."""

    def __init__(self, is_held: bool) -> None:
        self.is_held, self.nbytes = is_held, 0
        self.spans: list[Span] = []
        self.archives: list[Extent] = []

    def add(self, span: Span, archives: Sequence[Extent]) -> None:
        self.spans.append(span)
        self.archives += archives
        self.nbytes += span[2]


def one_batch(
    store: Store, sizes: Mapping[str, int], archives: Sequence[Extent]
) -> Iterator[ReadBatch]:
    """Yields all files as one batch that is not held.

    For a disk, or if several processes share the work.
    """
    yield ReadBatch(
        store, [(name, 0, nbytes) for name, nbytes in sizes.items()], archives, is_held=False
    )


def cut_batches(
    store: Store, sizes: Mapping[str, int], archives: Sequence[Extent], only_archives: bool = False
) -> Iterator[ReadBatch]:
    """Yields the bytes of files, each byte once, in batches of about 32 MiB.

    The next batch is fetched while one is checked.

    An archive that is larger than a batch gets its own batch, which is not held.

    Args:
        store: an object store.
        sizes: bytes of each file.
        archives: in these files. No archive is split between two batches.
        only_archives: leave out bytes outside of archives.
    """
    groups = _groups(sizes, archives, only_archives)
    group = next(groups, None)
    if group is not None and group.is_held:
        announce(store, group.spans, WINDOW_BYTES)
    while group is not None:
        following = next(groups, None)
        if following is not None and following.is_held:
            announce(store, following.spans, WINDOW_BYTES)
        elif following is None:
            store.will_read((), is_all=True)
        yield ReadBatch(
            hold(store, group.spans, WINDOW_BYTES) if group.is_held else store,
            group.spans,
            group.archives,
            group.is_held,
        )
        group = following


def _groups(
    sizes: Mapping[str, int], archives: Sequence[Extent], only_archives: bool
) -> Iterator[_Group]:
    of_file: dict[str, list[Extent]] = {name: [] for name in sorted(sizes)}
    for archive in sorted(archives):
        of_file.setdefault(archive.file, []).append(archive)
    group = _Group(is_held=True)
    for name, found in of_file.items():
        for span, inside, is_held in _spans(name, sizes.get(name, 0), found):
            if only_archives and not inside:
                continue
            if group.spans and (not is_held or group.nbytes + span[2] > _BATCH_BYTES):
                yield group
                group = _Group(is_held=True)
            if is_held:
                group.add(span, inside)
                continue
            alone = _Group(is_held=False)
            alone.add(span, inside)
            yield alone
    if group.spans:
        yield group


def _spans(
    name: str, nbytes: int, archives: Iterable[Extent]
) -> Iterator[tuple[Span, list[Extent], bool]]:
    """Cuts a file at the edges of archives, and into long ranges between them.

    Yields each range with its archives, and whether to hold it.
    """
    begin = end = 0  # of the current range
    inside: list[Extent] = []
    for archive in archives:
        start, stop = archive.start, archive.start + archive.nbytes
        if start < end or archive.nbytes > _BATCH_BYTES:
            if start >= end:
                yield from _held(name, begin, start, inside)
                begin, end, inside = stop, stop, []
                yield (name, start, archive.nbytes), [archive], False
            else:  # it overlaps another archive: check it by itself, without a range
                yield (name, start, 0), [archive], False
            continue
        if stop - begin > _BATCH_BYTES:
            yield from _held(name, begin, start, inside)
            begin, inside = start, []
        inside.append(archive)
        end = stop
    yield from _held(name, begin, max(nbytes, end), inside)


def _held(
    name: str, begin: int, end: int, inside: list[Extent]
) -> Iterator[tuple[Span, list[Extent], bool]]:
    """Yields a range up to the end of its last archive, and the rest in ranges of a batch."""
    stop = max((archive.start + archive.nbytes for archive in inside), default=begin)
    if inside:
        yield (name, begin, stop - begin), inside, True
    for at in range(stop, end, _BATCH_BYTES):
        yield (name, at, min(_BATCH_BYTES, end - at)), [], True
