import os
from pathlib import Path

import pytest

from ckpt_tools.errors import StorageError
from ckpt_tools.storage import LocalStore, read


def test_links_are_followed_as_long_as_they_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "real").write_bytes(b"in")
    (tmp_path / "secret").write_bytes(b"out")
    (root / "inside").symlink_to("sub/real")
    (root / "outside").symlink_to("../secret")
    (root / "away").symlink_to("..")
    store = LocalStore(root)
    assert read(store, "inside") == b"in"
    for path in ("outside", "away/secret"):
        with pytest.raises(StorageError, match="leads out"):
            store.size(path)
    assert "outside" not in store.list_files()


def test_devices_and_pipes_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match="not a regular file"):
            LocalStore(tmp_path).size(name)
