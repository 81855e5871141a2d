"""A value that many threads want is made once, and the recent ones are kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_tools.core.shared_cache import SharedCache


def test_a_value_is_made_once_however_many_threads_want_it() -> None:
    cache, made = SharedCache[str, bytes](1000, 2, len), list[str]()
    begin = threading.Barrier(8)

    def want(number: int) -> bytes:
        begin.wait()
        key = "ab"[number % 2]

        def make() -> bytes:
            made.append(key)
            return key.encode() * 3

        return cache.get(key, make)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(want, range(8))] == [b"aaa", b"bbb"] * 4
    assert sorted(made) == ["a", "b"]


def test_the_oldest_go_first_and_an_error_is_not_kept() -> None:
    cache = SharedCache[int, bytes](25, 2, len)

    def fail() -> bytes:
        raise ValueError("no value")

    with pytest.raises(ValueError, match="no value"):
        cache.get(1, fail)
    for key in (1, 2, 3):
        assert cache.get(key, lambda: bytes(10)) == bytes(10)  # 1 goes: 30 bytes are too many
    assert cache.get(3, fail) and cache.get(2, fail)
    with pytest.raises(ValueError, match="no value"):
        cache.get(1, fail)
    for key in (4, 5):  # two are kept at any size
        cache.get(key, lambda: bytes(100))
    assert len(cache.get(4, fail)) == len(cache.get(5, fail)) == 100
    cache.clear()
    with pytest.raises(ValueError, match="no value"):
        cache.get(5, fail)
