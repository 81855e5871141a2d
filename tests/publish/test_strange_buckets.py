"""Buckets as people have them: rollbacks over old steps, folders within steps, files that belong to
nobody, missing permissions.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError, StorageError
from ckpt_tools.loop.steps.retention import pin_step
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import RunListing, find_latest, list_steps
from tests.command import run_ckpt
from tests.servers.buckets import deny, names, save_locally
from tests.servers.servers import Server


def run(
    root: Path | str,
    steps: list[int],
    server: Server,
    mirror: str | None = None,
    back: int | None = None,
) -> None:
    with CheckpointManager(
        root, keep_last=None, mirror=mirror, storage_options=server.options
    ) as checkpoints:
        if back is not None:
            assert checkpoints.resume({"w": torch.zeros(3), "n": 0}, step=back) == back
        for step in steps:
            checkpoints.save(
                step,
                {"w": torch.full((3,), float(step + 1000 * (back is not None))), "n": step},
                asynchronous=False,
            )
            if checkpoints._mirror is not None:
                checkpoints._mirror.wait()  # else an older step may give way to a newer one


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_rollback_sets_aside_the_mirror_s_step_of_the_same_number(
    is_kept: bool, server: Server, tmp_path: Path
) -> None:
    fs, url = server.bucket("mirrored"), f"s3://mirrored/run{is_kept}"
    run(tmp_path / "run", [10, 20, 30], server, url)
    pin_step(f"{url}/step-00000020", server.options)
    fs.pipe_file(f"{url}/step-00000020/eval.json", b"mine")
    fs.pipe_file(f"{url}/step-00000020/hf/deep/x.json", b"mine too")
    if not is_kept:
        shutil.rmtree(tmp_path / "run")  # the machine is gone
    run(tmp_path / "run", [20], server, url, back=10)
    there = [name.removeprefix(url.removeprefix("s3://") + "/") for name in names(fs, url)]
    aside = next(name.partition("/")[0] for name in there if ".superseded-" in name)
    assert aside.startswith("step-00000020.superseded-")
    for name in ("ckpt.pin", "eval.json", "hf/deep/x.json", "__0_0.distcp"):
        assert f"{aside}/{name}" in there, there
    assert find_latest(open_root(url, server.options)).step.number == 20
    state = {"w": torch.zeros(3), "n": 0}
    ckpt_tools.load(f"{url}/step-00000020", state, storage_options=server.options)
    assert state["w"].tolist() == [1020.0] * 3
    ckpt_tools.load(f"{url}/{aside}", state, storage_options=server.options)
    assert state["w"].tolist() == [20.0] * 3


def test_a_misspelt_storage_option_is_named_with_the_one_that_was_meant(
    server: Server, tmp_path: Path
) -> None:
    save_locally(tmp_path / "src", {"w": torch.ones(3)})
    options = {**server.options, "endpoint_urll": server.options["endpoint_url"]}
    with pytest.raises(
        StorageError, match="(?s)no option 'endpoint_urll'.*did you mean endpoint_url"
    ):
        ckpt_tools.copy(
            tmp_path / "src" / "step-00000001", "s3://misspelt/x", to_storage_options=options
        )


def test_an_endpoint_without_its_scheme_is_explained(server: Server, tmp_path: Path) -> None:
    server.bucket("schemeless")
    options = {**server.options, "endpoint_url": server.endpoint.removeprefix("http://")}
    with pytest.raises(StorageError, match="endpoint_url=https://HOST:9000"):
        ckpt_tools.inspect("s3://schemeless/x", storage_options=options)


def test_a_foreign_file_at_the_destination_is_not_offered_for_overwriting(
    server: Server, tmp_path: Path
) -> None:
    save_locally(tmp_path / "src", {"w": torch.ones(3)})
    fs = server.bucket("foreign")
    fs.pipe_file("foreign/out/notes.txt", b"mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_bytes(b"mine")
    for place in ("s3://foreign/out", tmp_path / "out"):
        with pytest.raises(StorageError, match="the destination exists") as caught:
            ckpt_tools.reshard(
                tmp_path / "src" / "step-00000001",
                place,
                to_ranks=2,
                storage_options=server.options,
            )
        assert "--overwrite" not in str(caught.value)
    assert fs.cat_file("foreign/out/notes.txt") == b"mine"


def test_a_rollback_in_a_bucket_takes_folders_along(server: Server) -> None:
    fs, url = server.bucket("folders"), "s3://folders/run"
    run(url, [10, 20, 30], server)
    for name in ("hf/x.json", "hf/deep/y.json"):
        fs.pipe_file(f"folders/run/step-00000020/{name}", b"mine")
    run(url, [20], server, back=10)
    there = names(fs, "folders/run")
    aside = next(name.split("/")[2] for name in there if "step-00000020.superseded-" in name)
    assert [n for n in there if "hf/" in n] == [
        f"folders/run/{aside}/hf/deep/y.json",
        f"folders/run/{aside}/hf/x.json",
    ]
    assert find_latest(open_root(url, server.options)).step.number == 20 and not [
        n for n in there if "rollback" in n
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["bucket", "disk"])
def test_a_step_that_made_way_for_nothing_comes_back(
    where: str, server: Server, tmp_path: Path
) -> None:
    """The job dies before the first step of the new branch is committed."""
    server.bucket("back")
    root = f"s3://back/{where}" if where == "bucket" else str(tmp_path / "run")
    run(root, [10, 20, 30], server)
    code = f"""
import json, os, sys, torch
from ckpt_tools import CheckpointManager
from ckpt_tools.loop.saving import background
background.write = lambda *words, **more: os._exit(9)
with CheckpointManager({root!r}, keep_last=None, storage_options=json.loads(sys.argv[1])) as checkpoints:
    checkpoints.resume({{"w": torch.zeros(3), "n": 0}}, step=10)
    checkpoints.save(20, {{"w": torch.zeros(3), "n": 0}}, asynchronous=False)
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(server.options)], timeout=90
        ).returncode
        == 9
    )
    options = server.options if where == "bucket" else None
    with CheckpointManager(root, keep_last=None, storage_options=server.options) as checkpoints:
        state = {"w": torch.zeros(3), "n": 0}
        assert checkpoints.resume(state) == 30
    assert [
        (s.number, s.superseded_by) for s in RunListing(open_root(root, options)).all_steps
    ] == [(10, ""), (20, ""), (30, "")]


def test_files_deep_in_a_step_of_a_bucket_keep_it(server: Server) -> None:
    fs, url = server.bucket("deep"), "s3://deep/run"
    run(url, [10, 20, 30], server)
    fs.pipe_file("deep/run/step-00000010/hf/deep/x.json", b"mine")
    done = run_ckpt("prune", url, "--keep-last", "1", **server.environment)
    assert done.returncode == 0 and "holds files that no save wrote: hf/deep/x.json" in done.stdout
    assert [s.number for s in list_steps(open_root(url, server.options))] == [10, 30]


def test_a_policy_by_objects_alone_is_enough_to_remove(server: Server, tmp_path: Path) -> None:
    """RadosGW asks for the permission on the bucket, too, where several objects are removed at
    once.
    """
    if server.name == "moto":
        pytest.skip("it accepts any request, whatever the policy says")
    fs = server.bucket("byobject")
    what = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject"],
        "Resource": ["arn:aws:s3:::byobject"],
    }
    fs.call_s3(
        "put_bucket_policy",
        Bucket="byobject",
        Policy=json.dumps({"Version": "2012-10-17", "Statement": [what]}),
    )
    source = save_locally(tmp_path / "run", {"w": torch.ones(300)})
    ckpt_tools.copy(source, "s3://byobject/c", storage_options=server.options)
    assert not [n for n in names(fs, "byobject/c") if n.endswith(".ckpt.lock")]
    for ranks in (2, 3):
        ckpt_tools.reshard(
            source,
            "s3://byobject/r",
            to_ranks=ranks,
            overwrite=True,
            storage_options=server.options,
        )
    assert ckpt_tools.verify("s3://byobject/r", storage_options=server.options).problems == []
    deny(fs, "byobject", "s3:DeleteObject")
    result = ckpt_tools.reshard(
        source, "s3://byobject/r", to_ranks=2, overwrite=True, storage_options=server.options
    )
    assert any("could not be removed" in note for note in result.notes)
    fs.call_s3("delete_bucket_policy", Bucket="byobject")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["bucket", "disk"])
def test_of_two_who_seal_one_checkpoint_one_wins(
    where: str, server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("twoseals")
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    path = str(tmp_path / "c")
    if where == "bucket":
        path = "s3://twoseals/c"
        fs.put(str(tmp_path / "c"), "twoseals/c", recursive=True)
    code = (
        "import json, sys, ckpt_tools; print('ready', flush=True); sys.stdin.readline();"
        " ckpt_tools.seal(sys.argv[1], storage_options=json.loads(sys.argv[2]))"
    )
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    racers = [
        subprocess.Popen([sys.executable, "-c", code, path, json.dumps(server.options)], **pipes)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    told = [racer.communicate("\n", timeout=60) for racer in racers]
    assert 0 in [racer.returncode for racer in racers], told
    assert ckpt_tools.verify(path, storage_options=server.options).problems == []


def test_a_copy_writes_over_nobody_s_file(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("nobody")
    source = save_locally(tmp_path / "run", {"w": torch.ones(300)})
    (source / "eval.json").write_text("evaluated")
    fs.pipe_file("nobody/c/eval.json", b"my own longer text")
    with pytest.raises(StorageError, match="a file that no copy wrote: eval.json"):
        ckpt_tools.copy(source, "s3://nobody/c", storage_options=server.options)
    assert fs.cat_file("nobody/c/eval.json") == b"my own longer text"


def test_links_that_stay_behind_are_named(tmp_path: Path) -> None:
    source = save_locally(tmp_path / "run", {"w": torch.ones(300)})
    (tmp_path / "out.txt").write_text("x")
    (source / "out.txt").symlink_to(tmp_path / "out.txt")
    result = ckpt_tools.copy(source, tmp_path / "copied")
    assert any("what is no regular file, stay behind: out.txt" in note for note in result.notes)


def test_overwrite_in_a_bucket_replaces_what_we_wrote_and_nothing_else(
    server: Server, tmp_path: Path
) -> None:
    fs, options = server.bucket("replaced-one"), {"storage_options": server.options}
    source = save_locally(tmp_path / "run", {"w": torch.ones(300)})
    for _ in range(2):
        ckpt_tools.convert(source, "s3://replaced-one/t.pt", to="torch", overwrite=True, **options)
        ckpt_tools.merge(source, "s3://replaced-one/m.safetensors", overwrite=True, **options)
    for name in ("t.pt", "x.safetensors"):
        fs.pipe_file(f"replaced-one/own/{name}", b"my notes")
        with pytest.raises(StorageError, match="holds files that --overwrite never replaces"):
            (
                ckpt_tools.merge(source, f"s3://replaced-one/own/{name}", overwrite=True, **options)
                if name.startswith("x")
                else ckpt_tools.convert(
                    source, f"s3://replaced-one/own/{name}", to="torch", overwrite=True, **options
                )
            )
        assert fs.cat_file(f"replaced-one/own/{name}") == b"my notes"
    (tmp_path / "x.safetensors").write_text("my notes")
    with pytest.raises(StorageError, match="holds files that --overwrite never replaces"):
        ckpt_tools.merge(source, tmp_path / "x.safetensors", overwrite=True)
    ckpt_tools.merge(source, "s3://replaced-one/sh", max_shard_bytes=400, **options)
    with pytest.raises(StorageError, match="a checkpoint of another kind is there"):
        ckpt_tools.reshard(source, "s3://replaced-one/sh", to_ranks=2, overwrite=True, **options)
    assert ckpt_tools.verify("s3://replaced-one/sh", **options).problems == []


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "s3://nobucket/run"],
        ["latest", "s3://nobucket/run"],
        ["inspect", "s3://nobucket/run"],
        ["copy", "{src}", "s3://nobucket/x", "--dry-run"],
    ],
)
def test_a_missing_bucket_is_no_empty_run(words: list[str], server: Server, tmp_path: Path) -> None:
    source = save_locally(tmp_path / "run", {"w": torch.ones(3)})
    done = run_ckpt(*[word.format(src=source) for word in words], **server.environment)
    assert done.returncode == 15 and "no such bucket" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("url", ["s3:/bucket/run", "gs:/bucket/run"])
def test_a_url_with_one_slash_is_no_path(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    source = save_locally(tmp_path / "run", {"w": torch.ones(3)})
    caplog.set_level(logging.INFO)
    with pytest.raises(StorageError, match="two slashes"):
        ckpt_tools.copy(source, url)
    with pytest.raises(StorageError, match="two slashes"):
        CheckpointManager(url)
    with pytest.raises((StorageError, PlanError)):
        ckpt_tools.inspect("S3://bucket/x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_small_files_of_a_save_that_died_do_not_block_its_step(server: Server) -> None:
    """A killed save leaves its data and its small files, and no index."""
    files = server.bucket("small")
    root, options = "s3://small/died", server.options
    state = {"w": torch.ones(4)}
    with CheckpointManager(root, storage_options=options) as checkpoints:
        checkpoints.save(1, state, files={"config.json": b"{}"})
    for name in files.find("small/died/step-00000001", refresh=True):
        if "manifest" in name or name.endswith(".metadata"):
            files.rm_file(name)
    with CheckpointManager(root, storage_options=options) as checkpoints:
        assert checkpoints.resume(state) is None
        checkpoints.save(1, state, files={"config.json": b"[]"})
        checkpoints.save(1, state, files={"config.json": b"{1}"}, overwrite=True)
    assert files.cat("small/died/step-00000001/config.json") == b"{1}"
    files.pipe("small/mine/step-00000001/config.json", b"of a user")
    with (
        pytest.raises(StorageError, match="exists"),
        CheckpointManager("s3://small/mine", storage_options=options) as checkpoints,
    ):
        checkpoints.save(1, state, files={"config.json": b"{}"})
