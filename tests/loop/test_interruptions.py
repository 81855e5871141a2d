"""Waits that are interrupted, threads that die, and resumes from other places."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import find_latest
from tests.jobs import open_files
from tests.servers.servers import Server


def held(manager: CheckpointManager) -> threading.Event:
    """Makes the background thread wait before it writes the next save."""
    go = threading.Event()
    manager._writer._background().submit(go.wait, 60)
    return go


def test_an_interrupted_wait_does_not_let_the_next_save_overwrite_the_memory(
    tmp_path: Path,
) -> None:
    state = {"w": torch.zeros(1000)}
    with CheckpointManager(tmp_path) as checkpoints:
        go = held(checkpoints)
        checkpoints.save(1, state)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            checkpoints.wait()
        state["w"].fill_(7)
        threading.Timer(0.3, go.set).start()
        checkpoints.save(2, state)
    for step, value in ((1, 0.0), (2, 7.0)):
        found = {"w": torch.ones(1000)}
        ckpt_tools.load(tmp_path / f"step-{step:08d}", found)
        assert found["w"].unique().tolist() == [value]


def test_the_failure_of_a_save_is_raised_after_an_interrupted_wait(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run")
    go = held(checkpoints)
    checkpoints.save(1, {"w": torch.zeros(3)})
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    (tmp_path / "run/step-00000001").write_text("a file in the way of the commit")
    go.set()
    with pytest.raises(StorageError):
        checkpoints.close()


def test_a_mirror_whose_thread_dies_does_not_hold_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw: the URL of a file system that is none."""

    class Broken(Exception):
        pass

    def fail(*args: object, **kwargs: object) -> None:
        raise Broken("unforeseen")

    checkpoints = CheckpointManager(tmp_path / "run", mirror="memory://dies/run")
    checkpoints._mirror.wait()
    # fsspec's own file system fails, not ours
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    monkeypatch.setattr(MemoryFileSystem, "open", fail)
    checkpoints.save(1, {"w": torch.zeros(3)}, asynchronous=False)
    began = time.process_time()
    with pytest.raises(StorageError, match="could not be mirrored"):
        checkpoints.close()
    assert time.process_time() - began < 30
    CheckpointManager(tmp_path / "run").close()  # its lock is free


@pytest.mark.slow
def test_a_path_in_the_mirror_is_a_way_back_there_too(server: Server, tmp_path: Path) -> None:
    server.bucket("back")
    url, options = "s3://back/run", server.options

    def manager(folder: str) -> CheckpointManager:
        return CheckpointManager(
            tmp_path / folder, keep_last=None, mirror=url, storage_options=options
        )

    with manager("first") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((3,), float(step))}, asynchronous=False)
            checkpoints._mirror.wait()
    state = {"w": torch.zeros(3)}
    with manager("second") as checkpoints:
        assert checkpoints.resume(state, path=f"{url}/step-00000001") == 1
        checkpoints.save(2, {"w": torch.full((3,), 22.0)}, asynchronous=False)
    assert find_latest(open_root(url, options)).step.number == 2
    with manager("third") as checkpoints:
        assert checkpoints.resume(state) == 2 and state["w"].tolist() == [22.0] * 3


def test_the_number_of_a_path_is_that_of_a_step_alone(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "Llama-3-8B", {"w": torch.ones(3)})
    ckpt_tools.save(tmp_path / "step-00000000", {"w": torch.ones(3)})
    os.rename(tmp_path / "step-00000000", tmp_path / "base-7b")
    for name in ("Llama-3-8B", "base-7b"):
        with CheckpointManager(tmp_path / f"run-{name}") as checkpoints:
            assert checkpoints.resume({"w": torch.zeros(3)}, path=tmp_path / name) == 0
    checkpoints = CheckpointManager(tmp_path / "run")
    with pytest.raises(ValueError, match="not both"):
        checkpoints.resume({"w": torch.zeros(3)}, step=1, path=tmp_path / "base-7b")
    checkpoints.close()


def test_a_mirror_opens_no_file_for_good(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "run", keep_last=2, mirror="memory://fds/run", asynchronous=False
    ) as checkpoints:
        held = []
        for step in range(1, 9):
            checkpoints.save(step, {"w": torch.zeros(3)})
            checkpoints._mirror.wait()
            held.append(len(open_files(tmp_path)))
    assert held[-1] < held[0] + 4, held  # a file for each step would be seven more


def test_a_step_with_a_foreign_link_to_a_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    with CheckpointManager(tmp_path / "run", keep_last=1, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.zeros(3)})
        (tmp_path / "run/step-00000001/samples").symlink_to(tmp_path / "samples")
        checkpoints.save(2, {"w": torch.zeros(3)})
    assert (tmp_path / "run/step-00000001/samples").is_symlink()


def test_a_loop_of_links_in_a_root_breaks_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.zeros(3)})
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert [step.number for step in ckpt_tools.steps(tmp_path)] == [1]
