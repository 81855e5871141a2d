"""How a process ends: without close(), by a signal, with a save under way. Each case is a script of
its own, as a user writes it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps
from tests.conftest import HERE

HEAD = """
import os, signal, sys, threading, time, torch
from ckpt_tools import CheckpointManager
state = {"w": torch.ones(50)}
checkpoints = CheckpointManager(sys.argv[1])
"""


def script(body: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", HEAD + textwrap.dedent(body), str(root)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def steps(root: Path) -> list[tuple[int, str]]:
    return [(s.number, damage(s)) for s in list_steps(open_root(root))]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "del checkpoints"])
def test_a_save_in_the_background_is_finished_when_the_process_ends_without_close(
    more: str, tmp_path: Path
) -> None:
    done = script(f"checkpoints.save(1, state)\n{more}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and steps(tmp_path) == [(1, "")]


FULL = """
import resource
checkpoints.save(1, state, asynchronous=False)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # as a full disk: what is written beyond that fails
checkpoints.save(2, {"w": torch.ones(5000)})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["", "del checkpoints", "sys.exit(0)", "raise ValueError('mine')"]
)
def test_a_failed_save_that_nobody_asked_about_ends_the_process_with_an_error(
    ending: str, tmp_path: Path
) -> None:
    done = script(FULL + ending, tmp_path)
    assert done.returncode == 1, done.stderr
    assert (
        "the process ends, but its last save failed" in done.stderr
        and "StorageError: " in done.stderr
    )
    assert ("ValueError: mine" in done.stderr) == ("mine" in ending)
    assert steps(tmp_path) == [(1, "")]


@pytest.mark.slow
def test_an_exception_within_the_block_is_not_hidden_by_a_failed_save(tmp_path: Path) -> None:
    done = script(
        "with checkpoints:" + FULL.replace("\n", "\n    ") + "\n    raise ValueError('mine')",
        tmp_path,
    )
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: mine"), done.stderr
    assert "the save in the background failed as well" in done.stderr


def test_os_exit_ends_a_save_that_is_being_written_and_loses_nothing_else(tmp_path: Path) -> None:
    done = script(
        "checkpoints.save(1, state, asynchronous=False)\ncheckpoints.save(2, state)\nos._exit(0)",
        tmp_path,
    )
    assert done.returncode == 0 and steps(tmp_path)[0] == (1, "")
    assert all(problem == "" for _, problem in steps(tmp_path))


@pytest.mark.slow
def test_a_forked_child_closes_nothing_of_its_parent_s(tmp_path: Path) -> None:
    done = script(
        """
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        checkpoints.save(1, state)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "") and steps(tmp_path) == [(1, "")]


# ---- signals -------------------------------------------------------------------------------------

KILL = "os.kill(os.getpid(), signal.{name})\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_that_nobody_asks_for_does_what_it_would_have_done_and_is_logged(
    name: str, tmp_path: Path
) -> None:
    done = script(KILL.format(name=name) + "time.sleep(30)", tmp_path)
    assert done.returncode == -signal.Signals[name]
    assert (
        f"got {name}, and the training loop does not call preempted(): it is not handled"
        in done.stderr
    )


@pytest.mark.slow
def test_the_first_signal_is_told_and_the_second_one_kills(tmp_path: Path) -> None:
    done = script(
        """
        assert checkpoints.preempted() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # passed on by torchrun: the same one
        assert checkpoints.preempted() == signal.SIGTERM
        checkpoints.save(1, state, asynchronous=False)
        print("saved", flush=True)
        time.sleep(1.2)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGTERM and done.stdout == "saved\n"
    assert (
        "got SIGTERM: preempted() tells the training loop" in done.stderr
        and "got SIGTERM again" in done.stderr
    )
    assert steps(tmp_path) == [(1, "")]


@pytest.mark.slow
def test_a_handler_of_the_user_s_own_is_called_where_nobody_asks_and_comes_back_with_close(
    tmp_path: Path,
) -> None:
    done = script(
        """
        checkpoints.close()
        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        with CheckpointManager(sys.argv[1]), CheckpointManager(sys.argv[1] + "/other") as other:
            os.kill(os.getpid(), signal.SIGTERM)
            other.preempted()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "mine\nmine\n"), done.stderr


@pytest.mark.slow
def test_all_managers_of_a_process_hear_of_a_signal(tmp_path: Path) -> None:
    done = script(
        """
        other = CheckpointManager(sys.argv[1] + "/other")
        assert checkpoints.preempted() == other.preempted() == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpoints.preempted() == other.preempted() == signal.SIGUSR1
        checkpoints.close()
        assert other.preempted() == signal.SIGUSR1
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_a_manager_that_is_made_beside_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    done = script(
        """
        checkpoints.close()
        def work():
            with CheckpointManager(sys.argv[1]) as mine:
                assert mine.preempted() == 0
                mine.save(1, state)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGTERM and steps(tmp_path) == [(1, "")]


@pytest.mark.slow
def test_a_forked_child_can_be_terminated_and_cannot_save(tmp_path: Path) -> None:
    done = script(
        """
        import multiprocessing
        assert checkpoints.preempted() == 0
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.5)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM, child.exitcode
        checkpoints.save(1, state)
        if os.fork() == 0:
            try:
                checkpoints.save(2, state)
            except Exception as error:
                print(error, flush=True)
            checkpoints.close()
            os._exit(0)
        os.wait()
        checkpoints.save(3, state)
        """,
        tmp_path,
    )
    assert (
        done.returncode == 0
        and "save was called in a process that was forked from that of the manager" in done.stdout
    ), done.stderr
    assert steps(tmp_path) == [(1, ""), (3, "")]


def test_a_relative_root_stays_where_it_was_when_the_job_changes_its_directory(
    tmp_path: Path,
) -> None:
    done = script(
        """
        os.makedirs(sys.argv[1] + "/work")
        os.chdir(sys.argv[1])
        with CheckpointManager("run") as relative:
            relative.save(1, state, asynchronous=False)
            os.chdir("work")
            relative.save(2, state, asynchronous=False)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "run") == [(1, ""), (2, "")] and not list((tmp_path / "work").iterdir())
