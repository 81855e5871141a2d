"""Which steps there are, which one is resumed from, and which ones retention may take."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from awscrt.checksums import crc64nvme

import ckpt_tools
from ckpt_tools import CheckpointManager, FormatError, StorageError
from ckpt_tools.loop.steps.retention import removable
from ckpt_tools.publish.disk.attempt_mark import mark_name
from ckpt_tools.publish.manifest import parse_manifest
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step, damage
from ckpt_tools.run.steps import find_latest, list_steps

Run = Callable[..., subprocess.CompletedProcess[str]]


STEPS = (900, 1000, 10000)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    with CheckpointManager(root, keep_last=None) as checkpoints:
        for step in STEPS:
            checkpoints.save(
                step,
                {"w": torch.arange(100.0), "b": torch.ones(3, 2), "note": "x"},
                asynchronous=False,
            )
    return root


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A run with those steps."""
    for number in STEPS:
        shutil.copytree(template / step_name(number), tmp_path / step_name(number))
    return tmp_path


def numbers(steps: list[Step]) -> list[int]:
    return [s.number for s in steps]


def test_steps_are_ordered_by_number_and_other_names_are_not_steps(run: Path) -> None:
    for name in (
        "step-",
        "step--2",
        "step-5.bak",
        "latest",
        ".tmp.step-00000001.abcdabcd",
        "logs",
        "step-1_x",
    ):
        (run / name).mkdir()
    (run / "step-7").write_text("a file")
    (run / "step-99999999999999999999").mkdir()
    assert numbers(list_steps(open_root(run))) == [900, 1000, 10000]
    assert list_steps(open_root(run / "nothing")) == []


def newest(run: Path) -> Path:
    return run / step_name(10000)


def manifest_of(step: Path) -> Path:
    return next(step.glob("ckpt.manifest.*.json"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


INCOMPLETE = {
    "a file is gone": (lambda s: (s / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a file is cut": (
        lambda s: os.truncate(s / "__0_0.distcp", 100),
        "has 100 bytes, the manifest says",
    ),
    "a file has grown": (lambda s: os.truncate(s / "__0_0.distcp", 100_000), "has 100000 bytes"),
    "no index": (lambda s: (s / ".metadata").unlink(), ".metadata is missing"),
    "index damaged": (lambda s: flip(s / ".metadata", 50), "checksum"),
    "no manifest, no index": (
        lambda s: (manifest_of(s).unlink(), (s / ".metadata").unlink()),
        "never finished",
    ),
    "manifest cut": (lambda s: os.truncate(manifest_of(s), 60), "malformed"),
    "two manifests": (
        lambda s: shutil.copy(manifest_of(s), s / "ckpt.manifest.00000000.json"),
        "2 manifests",
    ),
    "empty": (lambda s: [f.unlink() for f in s.iterdir()], "never finished"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_step_is_passed_over_with_the_reason(case: str, run: Path) -> None:
    change, reason = INCOMPLETE[case]
    change(newest(run))
    found = find_latest(open_root(run))
    assert found.step is not None and found.step.number == 1000
    assert [path for path, _ in found.passed_over] == [newest(run)]
    assert reason in found.passed_over[0][1]
    assert numbers(removable(list_steps(open_root(run)), Retention(1, None))) == [
        900
    ]  # neither counted nor removed


def test_a_damaged_step_is_passed_over_when_every_byte_is_read(run: Path) -> None:
    data = newest(run) / "__0_0.distcp"
    for at in range(0, data.stat().st_size, 97):
        flip(data, at)
        assert "damaged" in damage(list_steps(open_root(run))[-1])
        flip(data, at)
    flip(data, 200)
    assert find_latest(open_root(run)).step == list_steps(open_root(run))[-1]
    found = find_latest(open_root(run), verify=True)
    assert found.step is not None and found.step.number == 1000
    assert "checksum" in found.passed_over[0][1]


def test_a_step_that_stands_aside_for_one_that_never_came_is_brought_back(run: Path) -> None:
    """As a kill leaves it where a file system cannot exchange two names."""
    step = newest(run)
    aside = run / f".aside.{step.name}.abcdef12"
    (step / mark_name("abcdef12")).touch()
    step.rename(aside)
    assert open_root(run).remove_leftovers(dry_run=True) == [] and not step.exists()
    # its place is taken: the new one came
    shutil.copytree(aside, run / ".aside.step-00001000.abcdef12")
    held = os.open(aside, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    # at work
    assert [Path(left.url).name for left in open_root(run).remove_leftovers()] == [
        ".trash.step-00001000.abcdef12"
    ] and aside.exists()
    os.close(held)
    assert open_root(run).remove_leftovers() == [] and not aside.exists()
    assert not (step / mark_name("abcdef12")).exists()
    assert (
        find_latest(open_root(run)).step == list_steps(open_root(run))[-1]
        and find_latest(open_root(run), verify=True).passed_over == []
    )


MANIFEST = json.dumps(
    {
        "ckpt_manifest": 2,
        "checksum": "crc64nvme",
        "attempt": "00000000-0000-4000-8000-000000000000",
        "created": "",
        "tool": "",
        "operation": "save",
        "format": "dcp",
        "source": {},
        "world_size": 1,
        "step": 3,
        "files": {"f": {"nbytes": 3, "crc64nvme": "0" * 16}},
        "index": {"name": "i", "nbytes": 1, "crc64nvme": "f" * 16},
        "tensors": {"w": {"dtype": "float32", "shape": [1], "fingerprint": "0" * 16}},
    }
).encode()


ENTRY_BEFORE = b'"v": {"dtype": "float32", "shape": [1 ], "fingerprint": "0000000000000000"}, '


def signed(body: bytes) -> bytes:
    """The manifest with the checksum of its own text, as an attacker can write it too."""
    text = body.rstrip()[:-1]
    return text + f',\n "crc64nvme": "{crc64nvme(text):016x}"\n}}\n'.encode()


def without(key: str) -> bytes:
    return signed(json.dumps({k: v for k, v in json.loads(MANIFEST).items() if k != key}).encode())


def with_runs(runs: object) -> bytes:
    return signed(
        MANIFEST.replace(
            b'{"nbytes": 3', b'{"runs": ' + json.dumps(runs).encode() + b', "nbytes": 3'
        )
    )


def changed(old: bytes, new: bytes) -> bytes:
    assert old in MANIFEST
    return signed(MANIFEST.replace(old, new))


def test_checksums_of_payloads_are_taken_along() -> None:
    data = with_runs([[0, 2, "1" * 16, "3" * 8], [2, 1, "2" * 16, "4" * 8]])
    assert parse_manifest(data, "here").files == {
        "f": (3, "0" * 16, ((0, 2, "1" * 16, "3" * 8), (2, 1, "2" * 16, "4" * 8)), "")
    }
    assert (
        parse_manifest(parse_manifest(data, "here").render(), "here").files
        == parse_manifest(data, "here").files
    )


def test_runs_without_crc32_are_of_no_use() -> None:
    assert parse_manifest(with_runs([[0, 2, "1" * 16], [2, 1, "2" * 16]]), "here").files == {
        "f": (3, "0" * 16, (), "")
    }


def test_the_manifest_of_these_tests_is_a_right_one() -> None:
    assert parse_manifest(signed(MANIFEST), "here").step == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        MANIFEST[:-3],
        without("files"),
        without("tensors"),
        without("checksum"),
        changed(b'"nbytes": 3', b'"nbytes": -3'),
        changed(b'"nbytes": 3', b'"nbytes": true'),
        changed(b'"shape": [1]', b'"shape": ["x"]'),
        # a number times a text or a list would be a long one
        changed(b'"shape": [1]', b'"shape": [3000000000000, "aaaaaaaaaaaaaaaaaaaaaa"]'),
        changed(b'"shape": [1]', b'"shape": [3000000000000, [0]]'),
        changed(b'"shape": [1]', b'"shape": [4611686018427387903, 2, 0]'),
        changed(b'"shape": [1]', b'"shape": [true]'),
        changed(b'"shape": [1]', b'"shape": [1.0]'),
        # equal to the shape of the tensor before
        signed(
            MANIFEST.replace(b'"w": {', ENTRY_BEFORE + b'"w": {').replace(
                b'"shape": [1]', b'"shape": [1.0]'
            )
        ),
        changed(b"ffffffffffffffff", b"FFFF"),
        changed(b'"files": {', b'"files": 3, "x": {'),
        changed(b'"ckpt_manifest": 2', b'"ckpt_manifest": 1'),
        MANIFEST.replace(b'"ckpt_manifest": 2', b'"ckpt_manifest": 1'),
        MANIFEST,
        with_runs([[0, 4, "0" * 16, "0" * 8]]),
        with_runs([[-1, 3, "0" * 16, "0" * 8]]),
        with_runs([[0, 0, "0" * 16, "0" * 8]]),
        with_runs([[0, 3, "0", "0" * 8]]),
        with_runs([[0, 3, "0" * 16, "0" * 16]]),
        with_runs([[0, 3]]),
        with_runs([[True, 2, "0" * 16, "0" * 8]]),
        with_runs(3),
        with_runs({"a": 1}),
    ],
)
def test_a_malformed_manifest_is_one_clear_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_manifest(data, "ckpt.manifest.00000000.json")


def test_a_manifest_survives_rendering(template: Path) -> None:
    text = manifest_of(template / step_name(900)).read_bytes()
    assert parse_manifest(text, "m").render() == text


def test_a_link_in_a_step_is_looked_at_each_time(tmp_path: Path) -> None:
    """One file has two names, and a link goes from the one inside to the one outside."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(9, {"w": torch.ones(9)}, asynchronous=False)
        data = tmp_path / "run" / "step-00000009" / "__0_0.distcp"
        data.rename(data.with_name("real"))
        data.symlink_to("real")
        os.link(data.with_name("real"), tmp_path / "same")
        time.sleep(2.2)  # the files do not change any more
        assert [step.problem for step in checkpoints.steps()] == [""]
        data.unlink()
        data.symlink_to(tmp_path / "same")
        (step,) = checkpoints.steps()
        assert "leads out of the checkpoint" in step.problem


def test_an_unchanged_step_is_read_once_and_a_changed_one_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(9, {"w": torch.ones(9)}, asynchronous=False)
        folder = tmp_path / "run" / "step-00000009"
        time.sleep(2.2)
        (first,) = checkpoints.steps()
        (again,) = checkpoints.steps()
        assert again.manifest is first.manifest and not again.problem
        index = folder / ".metadata"
        at, text = index.stat(), index.read_bytes()
        index.write_bytes(text[:-2] + b"x.")
        os.utime(index, ns=(at.st_atime_ns, at.st_mtime_ns))
        assert "damaged" in checkpoints.steps()[0].problem
        index.write_bytes(text)
        assert not checkpoints.steps()[0].problem
        (folder / "ckpt.pin").touch()
        assert len(checkpoints.steps()) == 1
        (folder / "__0_0.distcp").unlink()
        assert "is missing" in checkpoints.steps()[0].problem


# ---- one job at a time ---------------------------------------------------------------------------

HOLD = (
    "import sys, time; from pathlib import Path; from ckpt_tools.publish.disk.lock import FileLock; held ="
    " FileLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
)


def test_a_second_job_is_refused_with_the_first_ones_host_pid_and_time(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            StorageError, match=rf"another job writes to .*: host .+, pid {other.pid}, since 20"
        ):
            CheckpointManager(tmp_path)
        other.kill()
    CheckpointManager(tmp_path).close()  # the kernel released it


# ---- the command ---------------------------------------------------------------------------------


def test_ls_shows_every_step_and_why_one_is_incomplete(run: Path, ckpt: Run) -> None:
    (newest(run) / "__0_0.distcp").unlink()
    lines = ckpt("ls", run).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "name",
        *map(step_name, (900, 1000, 10000)),
    ]
    assert "complete" in lines[1] and "incomplete: __0_0.distcp is missing" in lines[3]
    steps = json.loads(ckpt("ls", run, "--json").stdout)
    assert [(s["step"], s["is_complete"], s["world_size"]) for s in steps] == [
        (900, True, 1),
        (1000, True, 1),
        (10000, False, 1),
    ]
    assert ckpt("ls", run / "nothing").returncode == 10


def test_latest_prints_one_path_and_says_what_it_passed_over(
    run: Path, ckpt: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flip(newest(run) / "__0_0.distcp", 300)
    assert ckpt("latest", run).stdout == f"{newest(run)}\n"
    result = ckpt("latest", run, "--verify")
    assert result.stdout == f"{run / step_name(1000)}\n"
    assert f"passed over {newest(run)}: __0_0.distcp is damaged" in result.stderr
    nothing = ckpt("latest", tmp_path_factory.mktemp("empty"))
    assert (nothing.returncode, nothing.stdout) == (10, "")


@pytest.mark.parametrize(
    "text", ["[[1,[3,4]]]", '{"a\\u0000b":[1,2]}', '{"\\ud800":[1,2]}', '{"eval.json":[2,1]}', "3"]
)
def test_a_forged_note_of_a_host_vouches_for_nothing(text: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, {"x": number}, asynchronous=False)
    step = tmp_path / "step-00000001"
    (step / "eval.json").write_text("{}")
    (step / "extra.safetensors").write_bytes(b"mine")
    for attempt in ("1234abcd", next(step.glob("ckpt.manifest.*")).name.split(".")[2]):
        (step / f"ckpt.host.{attempt}.json").write_text(text)
    kept = ckpt_tools.prune(tmp_path, 1).kept
    assert "eval.json" in kept[str(step)] and step.exists()
    assert [p.file for p in ckpt_tools.verify(step).problems] == ["extra.safetensors"]
