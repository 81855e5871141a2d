"""Ranks read what others hold in memory: the ranges that are asked for, and the store over them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools import StorageError
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import MemoryStore, Store
from ckpt_tools.transfer.exchange import in_rounds

T = TypeVar("T")


class Threads:
    """The ranks of a group as threads, which exchange what they have at a barrier."""

    def __init__(self, size: int) -> None:
        self.barrier, self.there = threading.Barrier(size), dict[int, Sequence[Any]]()

    def rank(self, number: int, size: int) -> Any:
        def deal(parts: Sequence[T], what: str) -> list[T]:
            self.there[number] = parts
            self.barrier.wait()
            found = [self.there[other][number] for other in range(size)]
            self.barrier.wait()
            return found

        return SimpleNamespace(
            rank=number, size=size, phase=ALONE.phase, deal=deal, deal_objects=deal
        )


def batch(reads: list[tuple[str, int, int]]) -> Any:
    found = [SimpleNamespace(file=f, start=s, nbytes=n) for f, s, n in reads]
    tile = SimpleNamespace(reads=found)
    return SimpleNamespace(tiles=(tile,), read_nbytes=sum(n for _, _, n in reads))


def check(store: Store, read: Any, data: bytes, is_own: bool) -> None:
    room = bytearray(read.nbytes)
    store.read_into(read.file, read.start, memoryview(room))
    assert room == data[read.start : read.start + read.nbytes]
    more = memoryview(bytearray(70_000))  # than anybody has asked for
    with suppress(StorageError) if is_own else pytest.raises(StorageError):
        store.read_into(read.file, read.start, more)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_each_rank_reads_the_bytes_of_all(data: st.DataObject) -> None:
    """Also across gaps, whose bytes nobody fetched, if a range begins and ends with others."""
    size, rng = (
        data.draw(st.integers(1, 4)),
        np.random.default_rng(data.draw(st.integers(0, 2**32))),
    )
    files = {
        f"{r}-{n}": rng.bytes(int(rng.integers(1, 60_000))) for r in range(size) for n in (0, 1)
    }
    held = {name: int(name[0]) for name in files}

    def some_reads() -> list[tuple[str, int, int]]:
        found = []
        for _ in range(int(rng.integers(0, 6))):
            name = str(rng.choice(sorted(files)))
            low, high = sorted(int(n) for n in rng.integers(0, len(files[name]) + 1, 2))
            found += [(name, low, high - low)] * (low < high)
        return found

    batches = [[batch(some_reads()) for _ in range(int(rng.integers(0, 5)))] for _ in range(size)]
    threads, seen, failed = Threads(size), [0] * size, list[BaseException]()

    def work(number: int) -> None:
        try:
            own = MemoryStore({n: d for n, d in files.items() if held[n] == number})
            group = threads.rank(number, size)
            for round_, store in in_rounds(batches[number], own, held, group, 1):
                for one in round_:
                    for read in one.tiles[0].reads:
                        check(store, read, files[read.file], held[read.file] == number)
                    seen[number] += 1
        except BaseException as error:  # noqa: BLE001  # told below
            failed.append(error)
            threads.barrier.abort()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed, failed
    assert seen == list(map(len, batches))
