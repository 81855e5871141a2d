"""The run of docs/spot.md, as its page prints it: a machine dies, and another one goes on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import ckpt_tools
from tests import jobs
from tests.servers import servers

PAGE = (jobs.ROOT / "docs" / "spot.md").read_text()

HEADER = "name bytes saved ranks finite state"
assert HEADER.split() in [line.split() for line in PAGE.splitlines()]


def commands() -> list[list[str]]:
    """The lines of the page that are typed, but for the one with a secret."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line)[1:] for line in lines if not line.startswith("$ export")]


def kill_all_in(folder: Path) -> None:
    """Kills every process that works in a folder: ranks are no part of torchrun's process group."""

    def works_there(process: Path) -> bool:
        with suppress(OSError):  # it has ended
            return os.readlink(process / "cwd") == str(folder)
        return False

    while found := [process for process in Path("/proc").glob("[0-9]*") if works_there(process)]:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.slow
def test_a_machine_dies_and_another_one_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = re.search(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S)
    assert config is not None
    first, look, second = commands()
    assert [first[0], look[0], second[0]] == ["torchrun", "ckpt", "torchrun"]
    (tmp_path / "config.toml").write_text(config[1])
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with servers.running("moto", tmp_path_factory.mktemp("moto")) as server:
        server.bucket("bucket")
        env = os.environ | server.environment
        env |= {"PATH": scripts, "PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1"}

        def steps() -> list[str]:
            listed = subprocess.run(look, cwd=tmp_path, env=env, capture_output=True, text=True)
            found = re.findall(r"step-\d+(?=.*complete)", listed.stdout)
            assert not found or listed.stdout.splitlines()[0].split() == HEADER.split()
            return found

        with (
            (tmp_path / "log").open("wb") as log,
            subprocess.Popen(
                first, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True
            ) as job,
        ):
            try:
                deadline = time.monotonic() + 240
                while len(steps()) < 2:
                    assert job.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline
            finally:
                kill_all_in(tmp_path)
        shutil.rmtree(tmp_path / "run")
        newest = steps()[-1]
        done = subprocess.run(
            second, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        number = int(newest.removeprefix("step-"))
        assert f"parameters on 2 ranks (cpu), resumed at step {number}" in said
        assert f"{newest}: rng: the checkpoint has the states of 4 ranks, this job has 2" in said
        assert f"saved {tmp_path}/run/step-00000060" in said
        last = ckpt_tools.verify("s3://bucket/run/step-00000060", storage_options=server.options)
        assert last.problems == []
