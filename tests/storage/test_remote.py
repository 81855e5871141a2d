"""Reading from object stores: real S3 servers, and fsspec's memory for what needs none."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager, NotACheckpointError, StorageError
from ckpt_tools.storage import RemoteStore, is_url, read
from tests.command import run_ckpt
from tests.jobs import torchrun_command
from tests.servers import servers
from tests.servers.faults import faulty, serving
from tests.servers.servers import SECRET, Server, storage_words
from tests.stock_jobs import RESHARDED

Saved = Callable[[int], Path]


@pytest.fixture(scope="session")
def uploaded(server: Server, saved: Saved) -> Path:
    """A checkpoint of four real ranks, in the bucket `bucket` under `run/` and on the disk."""
    fs = server.bucket("bucket")
    local = saved(4) / "adamw"
    fs.put(f"{local}/", "bucket/run/step-7/", recursive=True)
    fs.pipe("bucket/run/notes.txt", b"no checkpoint")
    return local


URL = "s3://bucket/run/step-7"


def data_files(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*.distcp"))
    assert found
    return found


def test_what_is_a_url() -> None:
    assert all(
        map(is_url, ("s3://b/k", "gs://b", "memory://x", "filecache::s3://b/k", "https://h/x"))
    )
    assert not any(
        map(is_url, ("/a/b", "a:b", "run/step-1", "file:///a", "c:\\x", Path("s3:/b"), None))
    )


def test_merge_and_reshard_read_a_bucket_as_they_read_a_disk(
    server: Server, uploaded: Path, tmp_path: Path
) -> None:
    options = server.options
    result = ckpt_tools.merge(URL, tmp_path / "remote.safetensors", storage_options=options)
    ckpt_tools.merge(uploaded, tmp_path / "local.safetensors")
    assert (tmp_path / "remote.safetensors").read_bytes() == (
        tmp_path / "local.safetensors"
    ).read_bytes()
    assert result.source == URL
    ckpt_tools.reshard(URL, tmp_path / "remote", to_ranks=3, storage_options=options)
    ckpt_tools.reshard(uploaded, tmp_path / "local", to_ranks=3)
    for ours in data_files(tmp_path / "local"):
        assert (tmp_path / "remote" / ours.name).read_bytes() == ours.read_bytes()


@pytest.mark.slow
def test_a_team_reads_a_bucket_too(server: Server, uploaded: Path, tmp_path: Path) -> None:
    ckpt_tools.reshard(uploaded, tmp_path / "one", to_ranks=3)
    command = torchrun_command(
        2, "-m", "ckpt_tools", "reshard", URL, tmp_path / "group", "--to", 3, *storage_words(server)
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert (
        ckpt_tools.verify(tmp_path / "group").problems == []
        and ckpt_tools.diff(tmp_path / "one", tmp_path / "group").is_same
    )


def test_an_object_that_is_replaced_between_two_reads_is_an_error_and_not_a_mix(
    server: Server,
) -> None:
    fs = server.bucket("changing")
    fs.pipe("changing/file", b"a" * 100)
    store = RemoteStore("s3://changing", server.options)
    assert dict(store.list_files()) == {"file": 100} and read(store, "file", 0, 50) == b"a" * 50
    fs.pipe("changing/file", b"b" * 100)
    with pytest.raises(StorageError) as raised:
        read(store, "file", 50, 50)
    assert "replaced meanwhile" in (raised.value.hint or ""), raised.value
    store.close()


@pytest.mark.slow
def test_faults_on_the_way_end_in_the_right_bytes_or_in_a_clear_error(
    server: Server, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(
            1,
            {"model": nn.Sequential(*(nn.Linear(500, 400) for _ in range(6)))},
            asynchronous=False,
        )
    server.bucket("faults").put(
        f"{tmp_path}/run/step-00000001/", "faults/step-00000001/", recursive=True
    )
    ckpt_tools.merge(tmp_path / "run", tmp_path / "right.safetensors")
    right, faults, failed = (tmp_path / "right.safetensors").read_bytes(), [], 0
    for seed in range(6):
        out = tmp_path / f"{seed}.safetensors"
        with faulty(server.endpoint, 0.3, seed) as (url, log):
            options = server.options | {"endpoint_url": url, "skip_instance_cache": True}
            told = None
            try:
                ckpt_tools.merge("s3://faults/step-00000001", out, storage_options=options)
            except CheckpointError as error:
                told = error
        if told is None:
            assert out.read_bytes() == right, log
        else:
            assert "corrupt" in log and not out.exists(), (told, log)
            failed += 1
        faults += log
    assert set(faults) == {"503", "reset", "truncate", "corrupt", "late"} and failed < 4, (
        faults,
        failed,
    )


@pytest.mark.slow
def test_a_bit_that_flips_once_on_the_way_is_fetched_again(
    server: Server, uploaded: Path, tmp_path: Path
) -> None:
    ckpt_tools.merge(uploaded, tmp_path / "right.safetensors")
    right, flips = load_file(tmp_path / "right.safetensors"), 0
    for seed in range(4):
        with faulty(server.endpoint, 0.4, seed, ("corrupt",), most=1) as (url, log):
            options = server.options | {"endpoint_url": url, "skip_instance_cache": True}
            ckpt_tools.merge(URL, tmp_path / f"{seed}.safetensors", storage_options=options)
            state = {"model": {name: torch.zeros_like(value) for name, value in right.items()}}
        with faulty(server.endpoint, 0.4, seed, ("corrupt",), most=1) as (url, log2):
            options = server.options | {"endpoint_url": url, "skip_instance_cache": True}
            ckpt_tools.load(URL, state, strict=False, storage_options=options)
        flips += len(log) + len(log2)
        assert (tmp_path / f"{seed}.safetensors").read_bytes() == (
            tmp_path / "right.safetensors"
        ).read_bytes()
        assert all(torch.equal(state["model"][name], value) for name, value in right.items())
    assert flips > 4


def test_inspect_costs_a_listing_and_the_metadata(server: Server, uploaded: Path) -> None:
    report = ckpt_tools.inspect(URL, server.options)
    here = ckpt_tools.inspect(uploaded)
    assert (report.total, report.by_dtype, report.world_size) == (
        here.total,
        here.by_dtype,
        here.world_size,
    )
    assert report.traffic.requests == 2
    assert report.traffic.nbytes == (uploaded / ".metadata").stat().st_size


def test_a_checkpoint_below_is_found_and_several_are_listed(server: Server, uploaded: Path) -> None:
    assert ckpt_tools.inspect("s3://bucket", server.options).path == URL
    fs = server.bucket("two")
    for step in (1, 2):
        fs.put(f"{uploaded}/", f"two/step-{step}/", recursive=True)
    with pytest.raises(NotACheckpointError, match=r"2 checkpoints lie below s3://two"):
        ckpt_tools.inspect("s3://two", server.options)


@pytest.mark.slow
def test_a_model_is_loaded_straight_from_a_bucket(server: Server, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5))
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(3, {"model": model, "epoch": 8}, asynchronous=False)
    server.bucket("loading").put(
        f"{tmp_path}/run/step-00000003/", "loading/step-00000003/", recursive=True
    )
    other, state = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5)), {"epoch": 0}
    report = ckpt_tools.load(
        "s3://loading/step-00000003", {"model": other} | state, storage_options=server.options
    )
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert report.num_proved == 4 and report.read_nbytes < 1.01 * report.needed_nbytes
    script = (
        "import sys, torch; from torch import nn; from ckpt_tools import CheckpointManager\nmodel,"
        " state = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 5)), {'epoch': 0}\nwith"
        " CheckpointManager(sys.argv[1]) as c: step = c.resume(state | {'model': model},"
        " path='s3://loading/step-00000003')\nprint(step, model[0].weight.sum().item())"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "new"],
        env=os.environ | server.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["3", str(model[0].weight.sum().item())]


def test_the_command_takes_urls_and_storage_options(
    server: Server, uploaded: Path, tmp_path: Path
) -> None:
    done = run_ckpt("inspect", URL, "--traffic", **server.environment)
    assert done.returncode == 0 and done.stdout.startswith(f"{URL}\n"), done.stderr
    assert done.stderr.startswith("2 requests (1 GET, 1 LIST), ")
    secrets = {k: v for k, v in server.environment.items() if "KEY" in k}
    options = (
        "--storage-option",
        f"endpoint_url={server.endpoint}",
        "--storage-option",
        "client_kwargs.region_name=us-east-1",
    )
    done = run_ckpt("merge", URL, tmp_path / "m.safetensors", *options, **secrets)
    assert done.returncode == 0 and (tmp_path / "m.safetensors").exists(), done.stderr


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/nothing", "nothing lies at s3://bucket/nothing"),
        ("s3://no-such-bucket-here/x", "no-such-bucket-here"),
        ("s3://bucket/run/notes.txt", "not a checkpoint: s3://bucket/run/notes.txt"),
        (
            "s3://bucket/run/step-7/.metadata",
            "a part of a checkpoint: s3://bucket/run/step-7/.metadata",
        ),
        ("filecache::s3://bucket/run", "a chained URL is not opened: filecache::s3://bucket/run"),
        ("nosuch://bucket/run", "cannot open nosuch://bucket/run: Protocol not known: nosuch"),
        ("reference://x", "cannot open reference://x: ReferenceFileSystem"),
    ],
)
def test_what_is_not_there_is_one_clear_line(
    url: str, message: str, server: Server, uploaded: Path
) -> None:
    done = run_ckpt("inspect", url, **server.environment)
    assert (
        done.returncode in (10, 15) and message in done.stderr and "Traceback" not in done.stderr
    ), done.stderr
    assert done.stdout == ""


def test_a_wrapper_is_opened_where_that_is_asked_for(
    server: Server, uploaded: Path, tmp_path: Path
) -> None:
    cached = f"filecache::{URL}"
    options = {
        "chained": True,
        "s3": server.options,
        "filecache": {"cache_storage": str(tmp_path / "cache")},
    }
    ckpt_tools.merge(uploaded, tmp_path / "right.safetensors")
    for name in ("first", "from the cache"):
        ckpt_tools.merge(cached, tmp_path / f"{name}.safetensors", storage_options=options)
        assert (tmp_path / f"{name}.safetensors").read_bytes() == (
            tmp_path / "right.safetensors"
        ).read_bytes()
    assert (
        sum(p.stat().st_size for p in (tmp_path / "cache").iterdir())
        > (tmp_path / "right.safetensors").stat().st_size
    )
    with pytest.raises(StorageError, match="a chained URL is read-only"):
        ckpt_tools.reshard(uploaded, f"filecache::{URL}-two", to_ranks=2, storage_options=options)
    with pytest.raises(StorageError, match="a chained URL is not opened"):
        ckpt_tools.inspect("zip://run::s3://bucket/run.zip", {"chained": True})


def test_credentials_that_are_wrong_or_missing_are_named_and_never_printed(
    server: Server, uploaded: Path
) -> None:
    nowhere = {k: v for k, v in server.environment.items() if "KEY" not in k} | {
        "AWS_EC2_METADATA_DISABLED": "true"
    }
    done = run_ckpt("inspect", URL, **nowhere)
    assert done.returncode == 15 and "hint: give credentials as s3fs takes them" in done.stderr, (
        done.stderr
    )
    if server.name == "radosgw":  # moto believes anybody
        wrong = "wrong" + SECRET
        done = run_ckpt("inspect", URL, **(server.environment | {"AWS_SECRET_ACCESS_KEY": wrong}))
        assert (
            done.returncode == 15 and "Traceback" not in done.stderr and wrong not in done.stderr
        ), done.stderr
        assert "credentials" in done.stderr, done.stderr


@pytest.mark.slow
def test_an_endpoint_that_does_not_answer_is_an_error_and_no_hang(
    uploaded: Path, server: Server
) -> None:
    if server.name != "moto":
        pytest.skip("the other server is as dead")
    dead = server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{servers.free_port()}"}
    done = run_ckpt("inspect", URL, **dead)
    assert done.returncode == 15 and "Traceback" not in done.stderr, done.stderr


# ---- the store itself ----------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[RemoteStore]:
    fs = fsspec.filesystem("memory")
    fs.pipe({"/store/a": bytes(range(100)), "/store/big": bytes(5 << 20), "/store/folder/b": b"12"})
    found = RemoteStore("memory://store")
    yield found
    found.close()
    fs.rm("/store", recursive=True)


def test_what_is_announced_is_fetched_once_and_neighbours_together(store: RemoteStore) -> None:
    store.list_files()
    before = store.traffic.requests
    store.will_read([("a", 0, 10), ("a", 20, 10), ("a", 50, 50)])
    assert [read(store, "a", start, n) for start, n in ((0, 10), (20, 10), (50, 50))] == [
        bytes(range(10)),
        bytes(range(20, 30)),
        bytes(range(50, 100)),
    ]
    assert store.traffic.requests == before + 1 and not store._ahead.windows
    assert read(store, "big", 95, 5) == bytes(5)
    assert store.traffic.requests == before + 2


def test_the_last_ranges_come_in_pieces(store: RemoteStore) -> None:
    whole = bytes(range(256)) * (20 << 10)  # 5 MiB
    fsspec.filesystem("memory").pipe("/store/big", whole)
    before = store.traffic.requests
    store.will_read([("big", 100, 5_000_000)])
    store.will_read((), is_all=True)
    assert read(store, "big", 100, 5_000_000) == whole[100:5_000_100]
    assert store.traffic.requests == before + 3  # one of them for its size
    fsspec.filesystem("memory").pipe("/store/big", whole[:3_000_000])
    store.will_read([("big", 100, 5_000_000)], is_all=True)
    with pytest.raises(StorageError, match="a file ended early"):
        read(store, "big", 100, 5_000_000)


def test_what_is_announced_and_never_read_is_let_go(store: RemoteStore) -> None:
    for start in range(0, 5 << 20, 1 << 10):
        store.will_read([("big", start, 1 << 10)])
    assert len(store._ahead.windows) == 4 and 1000 < len(store._ahead.announced) <= 1024
    store.close()
    assert not store._ahead.windows and not store._ahead.announced


def test_what_frames_the_payloads_is_fetched_with_them(store: RemoteStore) -> None:
    whole = bytes(range(256)) * (5 << 12)
    fsspec.filesystem("memory").pipe("/store/big", whole)
    ranges = [("big", 2000 + i * 100_000, 98_000) for i in range(40)]
    store.will_read(ranges)
    for name, start, nbytes in ranges:
        assert read(store, name, start, nbytes) == whole[start : start + nbytes]
    before = store.traffic.requests
    for start, nbytes in (
        (0, 1500),
        (1000, 3000),
        (100_000, 2000),
        (3_999_000, 1500),
        (4_000_000, 2000),
    ):
        store.will_read([("big", start, nbytes)])
        assert read(store, "big", start, nbytes) == whole[start : start + nbytes]
    assert store.traffic.requests == before


def test_an_object_that_shrinks_is_an_error_and_not_a_short_read(store: RemoteStore) -> None:
    assert store.size("a") == 100
    fsspec.filesystem("memory").pipe("/store/a", b"short")
    store.will_read([("a", 0, 50)])
    with pytest.raises(StorageError, match="a file ended early: expected bytes 0:50, got up to 5"):
        read(store, "a", 0, 50)


class Flaky:
    """A file system whose connections break so many times."""

    def __init__(self, inner: Any, failures: int, error: Exception) -> None:
        self.inner, self.failures, self.error = inner, failures, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
        if self.failures:
            self.failures -= 1
            raise self.error
        return self.inner.cat_file(*args, **kwargs)


def test_a_connection_that_breaks_is_tried_again_and_a_refusal_is_not(store: RemoteStore) -> None:
    fs = fsspec.filesystem("memory")
    broken = RemoteStore("memory://store", fs=Flaky(fs, 3, ConnectionResetError("reset by peer")))
    broken.will_read([("a", 0, 4)])
    assert read(broken, "a", 0, 4) == bytes(range(4))
    forbidden = Flaky(fs, 2, PermissionError(f"Access Denied secret_key={SECRET}"))
    with pytest.raises(StorageError) as raised:
        RemoteStore("memory://store", fs=forbidden).read_into("a", 0, memoryview(bytearray(4)))
    assert (
        forbidden.failures == 1
        and SECRET not in str(raised.value)
        and "secret_key=***" in str(raised.value)
    )
    gone = Flaky(fs, 99, ConnectionResetError("reset by peer"))
    with pytest.raises(StorageError, match=r"cannot read: reset by peer \(memory://store/a\)"):
        RemoteStore("memory://store", fs=gone).read_into("a", 0, memoryview(bytearray(4)))
    for each in (broken,):
        each.close()


def test_a_web_server_is_read_and_not_written_to(saved: Saved, tmp_path: Path) -> None:
    app, source = web.Application(), saved(4) / "adamw"
    app.router.add_static("/", source.parent, show_index=True)
    ckpt_tools.merge(source, tmp_path / "here.safetensors")
    with serving(app) as url:
        ckpt_tools.merge(f"{url}/adamw", tmp_path / "there.safetensors")
        with pytest.raises(StorageError, match="a web server is read-only"):
            ckpt_tools.merge(source, f"{url}/new.safetensors")
    assert (tmp_path / "there.safetensors").read_bytes() == (
        tmp_path / "here.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("case", RESHARDED)
def test_every_kind_of_save_is_read_from_a_store_as_from_a_disk(
    case: str, saved: Saved, tmp_path: Path
) -> None:
    fs, local = fsspec.filesystem("memory"), saved(8) / case
    fs.put(f"{local}/", f"/cases/{case}/", recursive=True)
    ckpt_tools.reshard(f"memory://cases/{case}", tmp_path / "remote", to_ranks=3)
    ckpt_tools.reshard(local, tmp_path / "local", to_ranks=3)
    for ours in data_files(tmp_path / "local"):
        assert (tmp_path / "remote" / ours.name).read_bytes() == ours.read_bytes()
    fs.rm("/cases", recursive=True)


@pytest.mark.parametrize("alignment", [64, 128, 256, 4096])
def test_payloads_that_lie_elsewhere_than_usual_are_found(alignment: int, tmp_path: Path) -> None:
    from torch.utils.serialization import config

    wanted = {f"t{i}": torch.randn(100 + 17 * i, 30) for i in range(20)}
    with warnings.catch_warnings(), config.patch({"save.storage_alignment": alignment}):
        warnings.simplefilter("ignore")
        dcp.save({"model": dict(wanted)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    fs = fsspec.filesystem("memory")
    fs.put(f"{tmp_path}/saved/", "/aligned/", recursive=True)
    ckpt_tools.merge("memory://aligned", tmp_path / "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in wanted.items())
    state = {"model": {name: torch.zeros_like(value) for name, value in wanted.items()}}
    ckpt_tools.load("memory://aligned", state)
    assert all(torch.equal(state["model"][name], value) for name, value in wanted.items())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    fs.rm("/aligned", recursive=True)


@pytest.mark.slow
def test_a_bit_that_flips_once_does_not_condemn_a_step(server: Server, tmp_path: Path) -> None:
    """Retention would not count such a step, and a mirror would replace it."""
    root = tmp_path / "run"
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(500, 400)}, asynchronous=False)
    server.bucket("condemned").put(f"{root}/", "condemned/run/", recursive=True)
    flips = 0
    for seed in range(12):
        with faulty(server.endpoint, 0.4, seed, ("corrupt",), most=1) as (url, log):
            options = server.options | {"endpoint_url": url, "skip_instance_cache": True}
            problems = ckpt_tools.check_run(
                "s3://condemned/run", verify=True, storage_options=options
            )
        flips += len(log)
        assert not problems, (seed, problems)
    assert flips > 4
