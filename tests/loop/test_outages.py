"""Stores that cannot be reached for a while: training goes on, saves are tried again, and a restart
takes what there is.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import CheckpointManager, Outages, StorageError, Writing
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps
from ckpt_tools.storage.retries import error_text, hint
from tests.loop.outages import Impatient, later
from tests.servers.buckets import until
from tests.servers.gate import Gate, gated
from tests.servers.servers import Server
from tests.states import filled


@pytest.fixture
def away(server: Server) -> Any:
    with gated(server) as (reached, gate):
        yield Impatient(reached.name, reached.endpoint), gate


Away = tuple[Server, Gate]


@pytest.mark.slow
def test_a_save_in_the_background_sits_an_outage_out_and_training_does_not_wait_for_it(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = away
    server.bucket("outage")
    root = "s3://outage/run"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        checkpoints.save(1, filled(1.0))
        checkpoints.wait()
        gate.shut()
        checkpoints.save(2, filled(2.0))
        # it has returned with nothing written: the store was not asked
        assert checkpoints._writer.is_busy
        until(lambda: "trying again for" in caplog.text, 60)
        assert "step-00000002: cannot " in caplog.text
        gate.open()
        checkpoints.wait()
        checkpoints.save(3, filled(3.0))
    assert [(s.number, damage(s)) for s in list_steps(open_root(root, server.options))] == [
        (1, ""),
        (2, ""),
        (3, ""),
    ]


@pytest.mark.slow
def test_the_time_of_retries_counts_from_the_first_failure(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that has worked for longer than `retry_s` before an outage is tried again, too."""
    server, gate = away
    server.bucket("long")
    root, weights = "s3://long/run", torch.zeros(2_000_000)
    with CheckpointManager(
        root,
        storage_options=server.options,
        outages=Outages(retry_s=1),
        writing=Writing(max_mbps=2.0),
    ) as checkpoints:
        checkpoints.save(1, {"w": weights})
        time.sleep(2)
        assert checkpoints._writer.is_busy
        gate.shut()
        until(lambda: "trying again for" in caplog.text, 60)
        gate.open()
    assert [(s.number, damage(s)) for s in list_steps(open_root(root, server.options))] == [(1, "")]


def test_saves_that_fail_are_warnings_until_so_many_have_failed_in_a_row(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = away
    server.bucket("failures")
    root = "s3://failures/run"
    with CheckpointManager(
        root, storage_options=server.options, outages=Outages(retry_s=0, max_failures=3)
    ) as checkpoints:
        gate.shut()
        checkpoints.save(1, filled(1.0))
        checkpoints.save(2, filled(1.0))
        assert caplog.text.count("a save failed, 1 of at most 2 in a row: ") == 1
        gate.open()
        checkpoints.wait()  # whichever way the second one went
        checkpoints.save(3, filled(1.0), asynchronous=False)
        gate.shut()
        caplog.clear()
        checkpoints.save(4, filled(1.0))
        checkpoints.save(5, filled(1.0))
        checkpoints.save(6, filled(1.0))
        assert "2 of at most 2 in a row" in caplog.text
        with pytest.raises(StorageError, match="cannot "):
            checkpoints.save(7, filled(1.0))
        gate.open()
        checkpoints.save(8, filled(1.0))
    numbers = [s.number for s in list_steps(open_root(root, server.options))]
    assert numbers[-2:] == [3, 8]


@pytest.mark.slow
def test_a_start_and_a_resume_sit_an_outage_out(
    away: Away, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = away
    server.bucket("start")
    root = "s3://start/run"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        checkpoints.save(1, filled(7.0))
    gate.shut()
    timer = later(6, gate.open)
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        timer.join()
        assert "cannot open s3://start/run: " in caplog.text and "trying again for" in caplog.text
        gate.shut()
        timer = later(6, gate.open)
        got = filled(0.0)
        assert checkpoints.resume(got) == 1 and got["w"][0] == 7
        timer.join()
    gate.shut()
    with pytest.raises(StorageError):
        CheckpointManager(root, storage_options=server.options, outages=Outages(retry_s=0))
    gate.open()


def test_wrong_credentials_are_no_outage(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    if server.name == "moto":
        pytest.skip("moto takes any credentials")
    server.bucket("denied")
    with pytest.raises(StorageError, match="cannot "):
        CheckpointManager("s3://denied/run", storage_options=server.options | {"secret": "wrong"})
    assert "trying again" not in caplog.text


# ---- a mirror ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restart_takes_the_newer_step_of_the_disk_while_the_mirror_is_away(
    away: Away, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = away
    server.bucket("far")
    settings: dict[str, Any] = {
        "mirror": "s3://far/run",
        "storage_options": server.options,
        "keep_last": None,
    }
    with CheckpointManager(tmp_path, **settings) as checkpoints:
        checkpoints.save(1, filled(1.0))
    gate.shut()
    with (
        pytest.raises(StorageError, match="the newest step could not be mirrored"),
        CheckpointManager(tmp_path, **settings) as checkpoints,
    ):
        checkpoints.save(2, filled(2.0))
    caplog.clear()
    checkpoints = CheckpointManager(tmp_path, **settings)
    got = filled(0.0)
    assert checkpoints.resume(got) == 2 and got["w"][0] == 2
    assert (
        "the mirror cannot be read, and may have a newer step: cannot " in caplog.text
        and "resuming from the disk" in caplog.text
    )
    checkpoints.save(3, filled(3.0), asynchronous=False)
    gate.open()
    checkpoints._mirror.wait()
    checkpoints.save(4, filled(4.0))
    checkpoints.close()
    assert [s.number for s in list_steps(open_root("s3://far/run", server.options))][-1] == 4
    gate.shut()
    checkpoints = CheckpointManager(tmp_path / "new disk", **settings, outages=Outages(retry_s=1))
    with pytest.raises(StorageError, match="cannot list"):
        checkpoints.resume(filled(1.0))  # the disk has nothing, and what the mirror has is unknown
    with pytest.raises(StorageError, match="could not be mirrored"):
        checkpoints.close()
    gate.open()


def test_a_mirror_that_denies_access_does_not_stop_a_restart(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if server.name == "moto":
        pytest.skip("moto takes any credentials")
    server.bucket("denying")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, filled(1.0))
    options = server.options | {"secret": "wrong"}
    checkpoints = CheckpointManager(tmp_path, mirror="s3://denying/run", storage_options=options)
    got = filled(0.0)
    assert checkpoints.resume(got) == 1 and got["w"][0] == 1
    assert (
        "the mirror cannot be read" in caplog.text
        and "(hint: the credentials are wrong" in caplog.text
    )
    with pytest.raises(
        StorageError, match=r"could not be mirrored.*\(hint: the credentials are wrong"
    ):
        checkpoints.close()


@pytest.mark.slow
def test_waiting_for_a_slow_store_is_said(
    away: Away, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, gate = away
    server.bucket("slow")
    monkeypatch.setattr("ckpt_tools.loop.steps.waiting.FIRST_WORD_S", 0.2)
    monkeypatch.setattr("ckpt_tools.loop.steps.waiting.NEXT_WORD_S", 0.5)
    with CheckpointManager("s3://slow/run", storage_options=server.options) as checkpoints:
        gate.shut()
        checkpoints.save(1, filled(1.0))
        timer = later(3, gate.open)
        with caplog.at_level(logging.WARNING, "ckpt_tools"):
            checkpoints.wait()
        timer.join()
        assert caplog.text.count("waiting for a save to s3://slow/run, for ") >= 2
    caplog.clear()
    patient = {key: value for key, value in server.options.items() if key != "config_kwargs"}
    checkpoints = CheckpointManager(tmp_path, mirror="s3://slow/mirror", storage_options=patient)
    checkpoints._mirror.wait()
    gate.shut()
    checkpoints.save(1, filled(1.0))
    with pytest.raises(StorageError, match="could not be mirrored"):
        checkpoints.close()
    assert "waiting for a step to be mirrored to s3://slow/mirror, for " in caplog.text
    gate.open()


def test_an_expired_token_has_a_hint_where_the_store_says_only_400() -> None:
    assert "expired" in (hint(OSError(22, "Bad Request")) or "")


def test_words_that_are_no_secrets_are_shown(server: Server) -> None:
    url = f"{server.endpoint}/bucket?list-type=2&max-keys=1&KeyCount=3&key-marker=a&secret_key=abc&X-Amz-Security-Token=xyz&key=k"
    shown = error_text(OSError(url))
    assert (
        "max-keys=1&KeyCount=3&key-marker=a" in shown
        and "abc" not in shown
        and "xyz" not in shown
        and "key=k" not in shown
    )
