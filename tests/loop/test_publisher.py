"""`Publisher`: real jobs publish from the memory of their ranks; engines apply what they publish.

The oracle is `tests.versions`, and for the values torch's own `full_tensor`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools import PlanError, Publisher, pull
from ckpt_tools.formats.deltas.joined_frames import BlockCompressor, frame_of
from tests.conftest import torchrun
from tests.jobs import PYTHON_PATH, children, torchrun_command
from tests.servers.servers import Server
from tests.versions import apply_skyrl, apply_versions, loaded, same

CASES = [
    (2, "fsdp2", {}),
    (3, "fsdp2-overwrite", {"encoding": "overwrite", "checksum": "xxh3-128", "baseline": "files"}),
    (2, "fsdp2-dense", {"dtype": None, "part": 1.0, "checksum": "blake3", "asynchronous": False}),
    (3, "fsdp2-joined", {"dtype": None, "part": 0.9}),
    (2, "tp", {}),
    (2, "tied", {}),
    (4, "boxes", {"dtype": None}),
    (4, "boxes-overwrite", {"dtype": None, "encoding": "overwrite", "baseline": "files"}),
    (4, "hsdp", {}),
]


def job(num_ranks: int, folder: Path, case: str, versions: int = 3, **how: Any) -> list[Any]:
    """Runs a job, and returns what rank 0 was told of each version."""
    first = str(how.pop("first", 1))
    torchrun(
        num_ranks, "publish.py", str(folder), case, str(versions), json.dumps(how), FIRST=first
    )
    return results(folder, case)[0]


def results(folder: Path, case: str) -> list[Any]:
    found: list[Any] = json.loads((folder / f"{case}.json").read_text())
    return found


def check(folder: Path, case: str, number: int, found: dict[str, torch.Tensor]) -> None:
    """Compares a version with what torch gathered."""
    want = torch.load(folder / f"{case}-{number}.pt")
    base = loaded(folder / f"{case}-base")
    assert found.keys() == base.keys() and len(found) >= len(want) - 1
    for name, values in found.items():
        assert values.dtype == base[name].dtype
        assert torch.equal(values, want[name].to(values.dtype)), (number, name)


@pytest.mark.parametrize(("num_ranks", "case", "how"), CASES, ids=[c[1] for c in CASES])
def test_engines_get_what_the_job_had(
    num_ranks: int, case: str, how: dict[str, Any], tmp_path: Path
) -> None:
    told = job(num_ranks, tmp_path, case, **how)
    root = tmp_path / case
    for number, result in enumerate(told, 1):
        assert (result["version"], result["base_version"]) == (number, number - 1)
        check(
            tmp_path,
            case,
            number,
            apply_versions(tmp_path / f"{case}-base", root, list(range(1, number + 1))),
        )
        version = root / f"weight_v{number:06d}"
        files = [p.stat().st_size for p in version.iterdir() if "manifest" not in p.name]
        assert result["written_nbytes"] == sum(files)
    before, after = (torch.load(tmp_path / f"{case}-{n}.pt") for n in (2, 3))
    names = loaded(tmp_path / f"{case}-base")
    cast = {n: (before[n].to(v.dtype), after[n].to(v.dtype)) for n, v in names.items()}
    raw = {n: [t.reshape(-1).view(torch.uint8) for t in pair] for n, pair in cast.items()}
    assert told[2]["num_changed"] == sum(not torch.equal(a, b) for a, b in cast.values())
    assert told[2]["changed_nbytes"] == sum(int((a != b).sum()) for a, b in raw.values())
    assert ckpt_tools.verify(root).problems == []
    assert pull(root, tmp_path / "local").num_deltas == 3
    check(tmp_path, case, 3, loaded(tmp_path / "local"))


def test_a_chain_goes_on_in_other_jobs_and_begins_anew(tmp_path: Path) -> None:
    root = tmp_path / "fsdp2"
    job(2, tmp_path, "fsdp2", 2)
    told = job(3, tmp_path, "fsdp2", 3, first=3, full=[4], keep_last=1)
    assert [r["base_version"] for r in told] == [2, None, 4]
    assert "goes on from version 2, which was there" in told[0]["notes"]
    assert told[1]["removed"] == [3, 2, 1]
    check(tmp_path, "fsdp2", 4, loaded(root / "weight_v000004"))
    check(tmp_path, "fsdp2", 5, apply_versions(root / "weight_v000004", root, [5]))
    assert (root / "weight_v000004" / "config.json").exists()
    told = job(1, tmp_path, "fsdp2", 4, first=6, full_every=2)
    assert [r["base_version"] for r in told] == [5, None, 7, 8]
    check(tmp_path, "fsdp2", 9, apply_versions(root / "weight_v000007", root, [8, 9]))
    shutil.rmtree(root / "weight_v000008")  # which version 9 needs
    (told,) = job(2, tmp_path, "fsdp2", 1, first=10)
    assert told["base_version"] is None and any("version 8 is missing" in n for n in told["notes"])
    check(tmp_path, "fsdp2", 10, loaded(root / "weight_v000010"))
    assert sorted(p.name for p in root.iterdir() if p.name.startswith(".")) == []


def test_what_is_wrong_is_refused_on_every_rank(tmp_path: Path) -> None:
    job(2, tmp_path, "fsdp2", 1)
    root = tmp_path / "fsdp2"
    there = sorted(p.name for p in root.iterdir())
    damaged = root / "weight_v000001" / "model-00002-of-00002.safetensors"
    whole = damaged.read_bytes()
    for at in (11, whole.index(b"__metadata__") + 30, len(whole) - 30):
        data = bytearray(whole)
        data[at] ^= 1
        damaged.write_bytes(data)
        try:
            problems = ckpt_tools.verify(root / "weight_v000001").problems
        except ckpt_tools.CheckpointError:
            continue
        assert [p.file for p in problems] == [damaged.name]
    (told,) = job(2, tmp_path, "fsdp2", 1, first=2)
    assert told["base_version"] is None, told
    assert any("is complete, because the version before" in note for note in told["notes"])
    check(tmp_path, "fsdp2", 2, loaded(root / "weight_v000002"))
    shutil.rmtree(root / "weight_v000002")
    damaged.write_bytes(whole)
    other = {"asynchronous": False, "dtype": None}
    torchrun(2, "publish.py", str(tmp_path), "fsdp2", "1", json.dumps(other), FIRST="2")
    told = results(tmp_path, "fsdp2")
    assert all("is not that of the version before" in r[0] for r in told), told
    base = tmp_path / "fsdp2-base"
    moved = base.rename(tmp_path / "base")
    shutil.copytree(moved, base)
    state = load_file(base / "model.safetensors")
    state["up.weight"] += 1
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    (told,) = job(2, tmp_path, "fsdp2", 1, first=2)
    assert told["base_version"] is None and "fsdp2-base as version 0" in str(told["notes"])
    shutil.rmtree(root / "weight_v000002")
    shutil.rmtree(base)
    moved.rename(base)
    for others in ({"encoding": "overwrite"}, {"asynchronous": False}, {"full_every": 3}):
        with pytest.raises(AssertionError, match=next(iter(others))):
            job(2, tmp_path, "fsdp2", 1, first=2, last_rank=others, timeout_s=20)
    job(4, tmp_path, "hsdp", 1, differs=True, asynchronous=False)
    assert all("differ" in r[0] for r in results(tmp_path, "hsdp")), results(tmp_path, "hsdp")
    assert sorted(p.name for p in root.iterdir()) == there
    assert not list((tmp_path / "hsdp").glob("weight*"))


def test_stages_of_a_pipeline_are_one_model(tmp_path: Path) -> None:
    told = job(3, tmp_path, "stages", 2, names_differ=True, dtype=None)
    assert [r["base_version"] for r in told] == [0, 1] and told[0]["num_tensors"] == 10
    found = apply_versions(tmp_path / "stages-base", tmp_path / "stages", [1, 2])
    pull(tmp_path / "stages", tmp_path / "local")
    assert same(found, loaded(tmp_path / "local"))
    assert not torch.equal(found["stage1.a"], found["stage2.a"])


def wait_and_sleep(publisher: Publisher) -> None:
    publisher.wait()
    time.sleep(1)


def test_an_interrupted_wait_leaves_the_version_whole(tmp_path: Path) -> None:
    model = {f"w{n:03d}": torch.randn(100_000).bfloat16() for n in range(100)}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Publisher(tmp_path / "versions") as publisher:
            for _ in range(3):
                for values in model.values():
                    values.mul_(1.37)
                want = {name: values.clone() for name, values in model.items()}
                publisher.publish(model)
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(KeyboardInterrupt):
                    wait_and_sleep(publisher)
                for values in model.values():
                    values.mul_(0.5)
                publisher.publish(model)
                result = publisher.wait()
                assert result is not None
                folder = tmp_path / f"local{result.version}"
                pull(tmp_path / "versions", folder, version=result.version - 1)
                assert same(loaded(folder), want)
                pull(tmp_path / "versions", folder)
                assert same(loaded(folder), model)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_hooks_hold_up_nothing_and_options_are_looked_at_early(tmp_path: Path) -> None:
    model, seen = nn.Linear(8, 8), list[int]()

    def told(result: ckpt_tools.PublishResult) -> None:
        time.sleep(0.3)
        seen.append(result.version)
        raise SystemExit(3)

    with Publisher(tmp_path / "versions", on_publish=told) as publisher:
        for _ in range(3):
            publisher.publish(model)
        publisher.wait()
        assert len(seen) < 3
    assert seen == [1, 2, 3]
    wrong: dict[str, Any] = {"dtype": "bf17", "base": tmp_path / "none", "on_publish": 3}
    for name, value in wrong.items():
        with pytest.raises((ckpt_tools.CheckpointError, TypeError)):
            Publisher(tmp_path / "versions", **{name: value})


def test_ranks_publish_for_receivers_of_skyrl(tmp_path: Path) -> None:
    told = job(2, tmp_path, "fsdp2", 2, layout="skyrl")
    assert [r["base_version"] for r in told] == [0, 1]
    base, root = tmp_path / "fsdp2-base", tmp_path / "fsdp2"
    check(tmp_path, "fsdp2", 2, apply_skyrl(base, root, [1, 2]))
    files = [p.stat().st_size for p in (root / "delta-00000002").iterdir() if "ckpt." not in p.name]
    assert told[1]["written_nbytes"] == sum(files)


def test_a_bucket_takes_deltas_of_all_ranks(server: Server, tmp_path: Path) -> None:
    server.bucket("jobs")
    url, options = f"s3://jobs/{uuid4()}", {"storage_options": server.options}
    told = job(2, tmp_path, "fsdp2", 2, root=url, **options)
    assert [r["base_version"] for r in told] == [0, 1]
    assert pull(url, tmp_path / "local", **options).num_deltas == 2  # type: ignore[arg-type]
    check(tmp_path, "fsdp2", 2, loaded(tmp_path / "local"))
    assert ckpt_tools.verify(url, **options).problems == []  # type: ignore[arg-type]
    model, alone = nn.Linear(9, 8), f"{url}-alone"
    with Publisher(alone, full_every=1, **options) as publisher:  # type: ignore[arg-type]
        for base_version in (None, 1, None):
            with torch.no_grad():
                model.weight[0] += 1
            publisher.publish(model)
            result = publisher.wait()
            assert result is not None and result.base_version == base_version
    pull(alone, tmp_path / "alone", **options)  # type: ignore[arg-type]
    assert torch.equal(loaded(tmp_path / "alone")["weight"], model.weight)


COMPLETE = [
    (2, "fsdp2", {}),
    (4, "boxes", {"dtype": None, "part": 1.0, "memory_bytes": 1 << 20}),
    (3, "stages", {"dtype": None, "names_differ": True}),
    pytest.param(2, "tp", {"asynchronous": False}, marks=pytest.mark.slow),
    pytest.param(4, "hsdp", {"dtype": None}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_ranks", "case", "how"), COMPLETE)
def test_a_bucket_takes_complete_versions_of_all_ranks(
    num_ranks: int, case: str, how: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    """Each part of a file has bytes of several ranks. The 2nd and the 4th version are complete."""
    server.bucket("jobs")
    url, options = f"s3://jobs/{uuid4()}", {"storage_options": server.options}
    told = job(num_ranks, tmp_path, case, 4, root=url, full=[2], full_every=1, **how, **options)
    assert [r["base_version"] for r in told] == [0, None, 2, None]
    assert ckpt_tools.verify(url, **options).problems == []  # type: ignore[arg-type]
    for number in range(1, 5):
        local = tmp_path / f"local{number}"
        result = pull(url, local, version=number, **options)  # type: ignore[arg-type]
        assert result.num_deltas == number % 2
        if not how.get("names_differ"):
            check(tmp_path, case, number, loaded(local))
    if how.get("names_differ"):
        job(num_ranks, tmp_path, case, 4, full=[2], full_every=1, **how)
        for number in (2, 4):
            want = loaded(tmp_path / case / f"weight_v{number:06d}")
            assert same(loaded(tmp_path / f"local{number}"), want)


def test_one_process_publishes_without_a_job(tmp_path: Path) -> None:
    model = nn.Linear(40, 30)
    with Publisher(tmp_path / "versions", full_every=2, keep_last=1) as publisher:
        assert publisher.wait() is None
        for number in range(1, 6):
            with torch.no_grad():
                model.weight[number] += 1
            publisher.publish(model)
            published = model.weight.detach().clone()
            with torch.no_grad():  # the copy has it
                model.weight[number] += 1
            result = publisher.wait()
            assert result is not None and result.version == number
            assert result.base_version == (None if number in (1, 4) else number - 1)
    assert publisher.last_result is not None and publisher.last_result.version == 5
    pull(tmp_path / "versions", tmp_path / "local")
    found = loaded(tmp_path / "local")
    assert torch.equal(found["weight"], published) and torch.equal(found["bias"], model.bias)
    with pytest.raises(ckpt_tools.CheckpointError, match="closed"):
        publisher.publish(model)
    for wrong in ({"baseline": "disk"}, {"encoding": "lz4"}, {"full": True}, {"keep_last": 0}):
        with pytest.raises((PlanError, ValueError), match=str(next(iter(wrong)))):
            Publisher(tmp_path / "versions", **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="encodng"):
        Publisher(tmp_path / "versions", encodng="xor")  # type: ignore[call-arg]


def test_a_failed_version_leaves_the_chain_and_the_next_one_is_right(tmp_path: Path) -> None:
    model = nn.Linear(40, 30, bias=False)
    root = tmp_path / "versions"
    with Publisher(root, checksum="xxh3-128") as publisher:
        publisher.publish(model)
        publisher.publish(model)
        taken = root / "weight_v000003"
        taken.mkdir()  # somebody else's
        (taken / "theirs").write_text("x")
        with torch.no_grad():
            model.weight[3] += 1
        publisher.publish(model)
        with pytest.raises(ckpt_tools.CheckpointError):
            publisher.wait()
        shutil.rmtree(taken)
        with torch.no_grad():
            model.weight[5] += 1
        publisher.publish(model)
        result = publisher.wait()
        assert result is not None and (result.version, result.base_version) == (3, 2)
    found = apply_versions(root / "weight_v000001", root, [2, 3])
    assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("how", [{"checksum": "xxh3-128"}, {"encoding": "overwrite"}])
def test_old_bytes_that_are_read_a_second_time_are_proved(
    how: dict[str, Any], tmp_path: Path
) -> None:
    model, root = nn.Linear(40, 30, bias=False), tmp_path / "versions"
    with Publisher(root, **how) as publisher:
        publisher.publish(model)
        with torch.no_grad():
            model.weight[3] += 1
        publisher.publish(model)
        publisher.wait()
        (file,) = (root / "weight_v000001").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with torch.no_grad():
            model.weight[-1] += 1
        publisher.publish(model)  # it compares with its own memory, which is right
        with pytest.raises(ckpt_tools.IntegrityError, match="not what was sealed"):
            publisher.wait()
        publisher.publish(model, full=True)
        publisher.wait()
    assert torch.equal(loaded(root / "weight_v000003")["weight"], model.weight)


@pytest.mark.slow
def test_a_killed_job_leaves_whole_versions_and_another_goes_on(tmp_path: Path) -> None:
    """Random ranks of three die at random instants, ten times in a row on one chain."""
    rng, root, how = random.Random(1), tmp_path / "fsdp2", {"pause_s": 0.001, "part": 0.3}
    reached = 0
    for number in range(10):
        script = Path(__file__).parent.parent / "dist" / "publish.py"
        words = [str(tmp_path), "fsdp2", "1000", json.dumps(how)]
        first = str(1 + 1000 * number)
        running = subprocess.Popen(
            torchrun_command(3, script, *words),
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "FIRST": first},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert running.stdout is not None
        for _ in range(rng.randrange(1, 25)):
            assert running.stdout.readline()
        time.sleep(rng.random() * 0.05)
        ranks = children(running.pid)
        for pid in rng.sample(ranks, rng.randrange(1, len(ranks) + 1)):
            os.kill(pid, signal.SIGKILL)
        running.stdout.close()
        running.wait(60)
        if not list(root.glob("weight*")):
            continue
        found = ckpt_tools.verify(root)
        assert found.problems == []
        newest = pull(root, tmp_path / "local").version
        assert newest >= reached
        reached = newest
    assert reached > 10
    assert len(list(root.glob(".*"))) <= 1  # of the last kill; each job removes what is left


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_that_were_compressed_apart_are_one_frame(data: st.DataObject) -> None:
    """Of differences as they are: mostly zeros, dense, periodic, and without any run of zeros."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pieces: list[tuple[int, int, bytes]] = []
    want, at, compressor = (
        np.zeros(data.draw(st.integers(1, 400_000)), np.uint8),
        0,
        BlockCompressor(),
    )
    while at < len(want):
        at += data.draw(st.sampled_from([0, 0, 1, 200_000]))
        part = want[at : at + data.draw(st.sampled_from([1, 63, 64, 700, 130_000, 300_000]))]
        if not len(part):
            break
        kind = data.draw(st.sampled_from(["sparse", "dense", "periodic", "near"]))
        if kind == "dense":
            part[:] = rng.integers(0, 256, len(part))
        elif kind == "periodic":  # repeats its last offset at once
            part[:] = np.resize(rng.integers(0, 256, rng.integers(1, 20)), len(part))
            part[len(part) // 3 :][:40] = 0
        else:
            where = rng.random(len(part)) < (0.02 if kind == "sparse" else 0.2)
            part[where] = rng.integers(0, 256, int(where.sum()))
        blocks = compressor.compress(part)
        alone = b"".join(frame_of(len(part), [(0, len(part), blocks.data)]))
        assert zstandard.ZstdDecompressor().decompress(alone) == part.tobytes()
        if blocks.can_follow or not pieces:
            pieces.append((at, len(part), blocks.data))
        else:
            part[:] = 0
        at += len(part)
    frame = b"".join(frame_of(len(want), pieces))
    assert zstandard.ZstdDecompressor().decompress(frame) == want.tobytes()
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        assert zlib.crc32(reader.read()) == zlib.crc32(want.tobytes())
