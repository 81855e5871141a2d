"""The suite that every store passes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from ckpt_tools.errors import StorageError
from ckpt_tools.storage import LocalStore, MemoryStore, RemoteStore, Store, read


@pytest.fixture(params=["local", "memory", "remote"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[dict[str, bytes]], Store]]:
    fs = fsspec.filesystem("memory")

    def build(files: dict[str, bytes]) -> Store:
        if request.param == "remote":
            if request.function is test_an_existing_file_is_never_written_over:
                pytest.skip(
                    "a store is told so when something appears: tests/publish/test_bucket.py"
                )
            fs.makedirs("/contract", exist_ok=True)
            fs.pipe({f"/contract/{name}": data for name, data in files.items()})
            return RemoteStore("memory://contract")
        if request.param == "memory":
            return MemoryStore(files)
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        return LocalStore(tmp_path)

    yield build
    if fs.exists("/contract"):
        fs.rm("/contract", recursive=True)


def test_files_are_listed_with_their_sizes(make) -> None:
    assert dict(make({"b": b"12", "a": b""}).list_files()) == {"a": 0, "b": 2}


def test_ranges_are_half_open_and_zero_length_is_legal_up_to_the_end(make) -> None:
    store = make({"f": b"0123456789"})
    assert read(store, "f", 2, 3) == b"234"
    assert read(store, "f") == b"0123456789"
    assert read(store, "f", 10, 0) == b""


def test_a_short_file_is_an_error_and_not_a_short_read(make) -> None:
    with pytest.raises(StorageError, match="ended early"):
        read(make({"f": b"0123"}), "f", 2, 3)


def test_a_missing_file_is_named(make) -> None:
    with pytest.raises(StorageError, match="nothing"):
        make({}).size("nothing")


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a//b",
        "",
        ".",
        "c:\\x",
        "s3://b/x",
        "a::b",
        "a\0b",
        "x" * 300,
    ],
)
def test_a_name_that_leaves_the_root_is_refused(make, path: str) -> None:
    with pytest.raises(StorageError):
        make({"f": b""}).size(path)
    with pytest.raises(StorageError):
        make({"f": b""}).create(path, 1)


def test_writes_in_any_order_make_the_whole_file(make) -> None:
    store = make({})
    writer = store.create("new", 6)
    writer.write_at(3, b"def")
    writer.write_at(0, memoryview(b"abc"))
    writer.finish()
    assert read(store, "new") == b"abcdef"


def test_an_existing_file_is_never_written_over(make) -> None:
    store = make({"f": b"old"})
    with pytest.raises(StorageError, match="exists"):
        store.create("f", 3)
    assert read(store, "f") == b"old"


def test_hints_are_harmless(make) -> None:
    make({"f": b"0123"}).will_read([("f", 0, 4)])


def test_memory_is_shown_only_where_there_is_some_and_within_the_file(make) -> None:
    store = make({"f": b"0123"})
    seen = store.view("f", 1, 2)
    assert seen is None or bytes(seen) == b"12"
    if seen is not None:
        with pytest.raises(StorageError):
            store.view("f", 1, 9)


def test_the_files_of_folders_below_are_listed_when_asked_for(make) -> None:
    store = make({"a": b"1"})
    if isinstance(store, LocalStore):
        (store.root / "folder").mkdir()
        (store.root / "folder" / "b").write_bytes(b"12")
    else:
        store = make({"a": b"1", "folder/b": b"12", "folder/deeper/c": b"123"})
    assert dict(store.list_files()) == {"a": 1}
    assert dict(store.list_files(below=True)) == {"a": 1, "folder/b": 2}
    assert read(store, "folder/b") == b"12"


def test_folders_are_listed_and_entered(make) -> None:
    store = make({"a": b"1"})
    if isinstance(store, LocalStore):
        (store.root / "folder").mkdir()
        (store.root / "folder" / "b").write_bytes(b"12")
    else:
        store = make({"a": b"1", "folder/b": b"12"})
    assert store.folders() == ["folder"]
    inner = store.enter("folder")
    assert dict(inner.list_files()) == {"b": 2} and inner.folders() == []
    assert read(inner, "b") == b"12" and inner.url == f"{store.url}/folder"
