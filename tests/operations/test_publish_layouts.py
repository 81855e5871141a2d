"""Versions in the layout of SkyRL. The oracle follows its receiver, and shares no code with ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import xxhash
import zstandard
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    FormatError,
    PlanError,
    StorageError,
    publish_version,
    pull,
)
from ckpt_tools.formats.deltas.layout import LAYOUTS
from ckpt_tools.run.roots import open_root
from tests.publishing import Publisher, first_state, model_directory, next_state
from tests.servers.faults import losing
from tests.servers.servers import Server
from tests.versions import State, apply_skyrl, loaded, same


def published(folder: Path, number: int = 3, **how: Any) -> Publisher:
    """Publishes versions; the last one changes nothing."""
    publisher = Publisher(folder)
    for _ in range(number):
        publisher.publish(layout="skyrl", **how)
    return publisher


def test_receivers_of_skyrl_read_what_is_published(tmp_path: Path) -> None:
    publisher = published(tmp_path)
    states, root, base = publisher.states, publisher.root, publisher.base
    assert sorted(p.name for p in root.iterdir()) == [f"delta-{n:08d}" for n in (1, 2, 3)]
    for number in (1, 2, 3):
        assert same(apply_skyrl(base, root, list(range(1, number + 1))), states[number])
        with ckpt_tools.open(root / f"delta-{number:08d}") as found:
            assert torch.equal(found["head"][...], states[number]["head"])
    assert ckpt_tools.verify(root).problems == []
    assert (pull(root, tmp_path / "local", version=1).num_deltas) == 1
    result = pull(root, tmp_path / "local")
    assert (result.version, result.from_version, result.num_deltas) == (3, 1, 2)
    assert same(loaded(tmp_path / "local"), states[3])
    changed = {p.name for p in ckpt_tools.weight_patches(root, from_version=2)}
    assert changed == {n for n in states[2] if not torch.equal(states[2][n], states[3][n])}
    again = publish_version(root / "delta-00000003", root)  # the layout is that of the versions
    assert (again.version, again.num_changed) == (4, 0)
    assert same(apply_skyrl(base, root, [1, 2, 3, 4]), states[3])


def publish_in_a_job(root: Path, full: bool = False, **how: Any) -> None:
    with ckpt_tools.Publisher(root, asynchronous=False, **how) as publisher:
        publisher.publish(first_state(), full=full)


def test_what_the_receivers_of_skyrl_lack_is_refused(
    tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    publisher = published(tmp_path, 1)
    wrong: list[dict[str, Any]] = [
        {"full": True},
        {"full_every": 3},
        {"encoding": "overwrite"},
        {"checksum": "adler32"},
        {"layout": "slime"},
        {"layout": "miles"},
    ]
    for how in wrong:
        with pytest.raises(PlanError, match=next(iter(how)).replace("_", "-")):
            publish_version(publisher.base, publisher.root, **how)
        with pytest.raises(PlanError, match=next(iter(how)).replace("_", "-")):
            publish_in_a_job(publisher.root, **{"layout": "skyrl", **how})
    with pytest.raises(PlanError, match="nothing to change"):
        publish_version(publisher.base, tmp_path / "new", layout="skyrl")
    assert not (tmp_path / "new").exists()
    shown = ckpt("publish", publisher.base, publisher.root, "--layout", "slime")
    assert shown.returncode and "those of skyrl" in shown.stderr
    assert [p.name for p in publisher.root.iterdir()] == ["delta-00000001"]
    shutil.copytree(publisher.root / "delta-00000001", publisher.root / "weight_v000001")
    with pytest.raises(FormatError, match="two layouts"):
        pull(publisher.root, tmp_path / "local")


def test_a_job_publishes_for_skyrl(tmp_path: Path) -> None:
    state = {n: v for n, v in first_state().items() if v.dim()}
    base, root = model_directory(tmp_path / "base", state), tmp_path / "root"
    with ckpt_tools.Publisher(root, layout="skyrl", base=base) as publisher:
        for number in range(1, 25):  # every 21st would be complete
            with torch.no_grad():
                state["head"][number] += 1
            publisher.publish(state)
            result = publisher.wait()
            assert result is not None and result.base_version == number - 1
    assert same(apply_skyrl(base, root, list(range(1, 25))), state)


def theirs(base: Path, root: Path, states: list[State], num_files: int = 2) -> None:
    """Publishes as SkyRL's publisher does."""
    for number in range(1, len(states)):
        folder = root / f"delta-{number:08d}"
        folder.mkdir(parents=True)
        records: list[dict[str, Any]] = []
        files: list[State] = [{} for _ in range(num_files)]
        for name, values in states[number].items():
            old, new = (
                t[name].reshape(-1).view(torch.uint8) for t in states[number - 1 : number + 1]
            )
            if torch.equal(old, new):
                continue
            frame = zstandard.ZstdCompressor(level=1).compress((old ^ new).numpy().tobytes())
            at = len(records) % num_files
            files[at][name] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
            records.append(
                {
                    "name": name,
                    "dtype": str(values.dtype).removeprefix("torch."),
                    "shape": list(values.shape),
                    "uncompressed_num_bytes": len(new),
                    "compressed_num_bytes": len(frame),
                    "payload_file": f"delta-rank00000-file{at:06d}.safetensors",
                    "payload_key": name,
                    "checksum": xxhash.xxh3_128(new.numpy().tobytes()).hexdigest(),
                    "checksum_algorithm": "xxh3-128",
                }
            )
        for at, tensors in enumerate(files):
            if tensors:
                save_file(tensors, folder / f"delta-rank00000-file{at:06d}.safetensors")
        told = {
            "version": number,
            "base_version": number - 1,
            "tensors": records,
            "total_uncompressed_num_bytes": sum(r["uncompressed_num_bytes"] for r in records),
            "total_compressed_num_bytes": sum(r["compressed_num_bytes"] for r in records),
            "payload_files": sorted({r["payload_file"] for r in records}),
        }
        (folder / "manifest.json").write_text(json.dumps(told))


def test_what_skyrl_publishes_is_pulled_and_gone_on_from(tmp_path: Path) -> None:
    states = [{n: v for n, v in first_state().items() if n not in ("count", "none")}]
    for number in range(3):
        states.append(
            next_state({**states[-1], "count": torch.tensor(0)}) if number != 1 else states[-1]
        )
        states[-1].pop("count", None)
    base, root = model_directory(tmp_path / "base", states[0]), tmp_path / "root"
    theirs(base, root, states)
    assert same(apply_skyrl(base, root, [1, 2, 3]), states[3])
    assert pull(root, tmp_path / "local", base=base).num_deltas == 3
    assert same(loaded(tmp_path / "local"), states[3])
    with pytest.raises(PlanError, match="does not say where that is"):
        ckpt_tools.verify(root / "delta-00000002")
    new = next_state({**states[3], "count": torch.tensor(0)})
    new.pop("count")
    model_directory(tmp_path / "new", new)
    assert publish_version(tmp_path / "new", root, base=base).version == 4
    assert same(apply_skyrl(base, root, [1, 2, 3, 4]), new)
    assert pull(root, tmp_path / "local", base=base).from_version == 3
    assert same(loaded(tmp_path / "local"), new)
    other = {**states[0], "head": states[0]["head"] + 1}
    with pytest.raises(CheckpointError, match="head"):
        pull(root, tmp_path / "other", base=model_directory(tmp_path / "wrong", other))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"base_version": 7},
        {"version": "x"},
        {"tensors": 3},
        {"tensors": [{"name": "head"}]},
        {"tensors": [3]},
        {"version": -1, "base_version": -2},
        {"version": True},
        {"version": float("inf")},
    ],
    ids=str,
)
def test_a_malformed_manifest_of_skyrl_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    states = [{n: v for n, v in first_state().items() if n not in ("count", "none")}]
    states.append({**states[0], "head": states[0]["head"] * 2})
    base, root = model_directory(tmp_path / "base", states[0]), tmp_path / "root"
    theirs(base, root, states)
    path = root / "delta-00000001" / "manifest.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | change).replace("Infinity", "1e999"))
    with pytest.raises(FormatError):
        pull(root, tmp_path / "local", base=base)
    for key in ("version", "base_version", "tensors"):  # frames must never pass for weights
        path.write_text(json.dumps({name: value for name, value in told.items() if name != key}))
        with pytest.raises(FormatError):
            pull(root, tmp_path / "local", base=base)
    path.write_text("{}")
    with pytest.raises(FormatError):
        pull(root, tmp_path / "local", base=base)
    record = told["tensors"][0]
    for key, value in {"checksum_algorithm": "sha256", "payload_key": "x", "name": "x"}.items():
        path.write_text(json.dumps(told | {"tensors": [record | {key: value}]}))
        with pytest.raises(FormatError, match="under"):
            pull(root, tmp_path / "local", base=base)
    path.write_text(json.dumps(told | {"tensors": [record | {"payload_file": "../x.safetensors"}]}))
    with pytest.raises(CheckpointError):
        pull(root, tmp_path / "local", base=base)
    path.write_text(json.dumps(told | {"tensors": [record | {"checksum": "0" * 32}]}))
    with pytest.raises(CheckpointError, match="head"):
        pull(root, tmp_path / "local", base=base)
    assert not (tmp_path / "local").exists()


def test_a_job_takes_the_layout_that_is_there(tmp_path: Path) -> None:
    publisher = published(tmp_path, 2)
    state = {name: values.clone() for name, values in publisher.states[-1].items()}
    state["head"][3] += 1
    with ckpt_tools.Publisher(publisher.root, base=publisher.base) as job:
        job.publish(state)
        result = job.wait()
        assert result is not None and (result.version, result.base_version) == (3, 2)
    assert same(apply_skyrl(publisher.base, publisher.root, [1, 2, 3]), state)


def test_what_another_publisher_left_is_refused_with_the_way_out(tmp_path: Path) -> None:
    publisher = published(tmp_path, 2)
    left = publisher.root / "delta-00000003"
    shutil.copytree(publisher.root / "delta-00000002", left)
    (left / "manifest.json").unlink()  # SkyRL's publisher writes it last
    assert pull(publisher.root, tmp_path / "local").version == 2
    with pytest.raises(StorageError, match="is not whole"):
        publisher.publish(layout="skyrl")
    shutil.rmtree(left)
    assert publisher.publish(layout="skyrl").version == 3
    (publisher.root / "delta-00000002" / "manifest.json").unlink()
    with pytest.raises(FormatError, match="has no manifest"):
        pull(publisher.root, tmp_path / "other")
    with pytest.raises(FormatError, match="has no manifest"):
        ckpt_tools.verify(publisher.root)


def test_a_bucket_has_a_version_of_skyrl_once_it_is_whole(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("jobs")
    url, options = f"s3://jobs/{uuid4()}", {"storage_options": server.options}
    publisher = Publisher(tmp_path)
    states = [publisher.states[0]]
    for number in (1, 2):
        states.append(next_state(states[-1]))
        model = model_directory(tmp_path / f"model{number}", states[-1])
        publish_version(model, url, base=publisher.base, layout="skyrl", **options)  # type: ignore[arg-type]
    fs.rm_file(f"{url}/delta-00000002/manifest.json")  # which is written last
    assert pull(url, tmp_path / "local", **options).version == 1  # type: ignore[arg-type]
    result = publish_version(tmp_path / "model2", url, **options)  # type: ignore[arg-type]
    assert result.version == 2  # that of the attempt which was killed before its last step
    assert pull(url, tmp_path / "local", **options).version == 2  # type: ignore[arg-type]
    assert same(loaded(tmp_path / "local"), states[2])
    assert ckpt_tools.verify(url, **options).problems == []  # type: ignore[arg-type]
    there = tmp_path / "root"
    fs.invalidate_cache()
    for key in fs.find(url):
        path = there / key.partition(url[5:])[2].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fs.cat_file(key))
    assert same(apply_skyrl(publisher.base, there, [1, 2]), states[2])


@pytest.mark.parametrize("layout", ["slime", "skyrl"])
def test_what_dead_publishers_left_goes_and_what_is_published_stays(
    layout: str, server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("jobs")
    url, options = f"s3://jobs/{uuid4()}", {"storage_options": server.options}
    publisher = Publisher(tmp_path)
    for _ in range(2):
        publisher.publish(root=url, layout=layout, base=publisher.base, **options)
    there, names = sorted(fs.find(url)), LAYOUTS[layout].version_name
    fs.pipe(f"{url}/{names(2)}/x.deadbeef.safetensors", b"somebody else's")
    key = f"{url[10:]}/{names(3)}/model-00001-of-00001.deadbeef.safetensors"
    fs.call_s3("create_multipart_upload", Bucket="jobs", Key=key)
    root = open_root(url, server.options)
    (gone,) = root.remove_leftovers(grace_s=-5)
    assert gone.what == "upload" and gone.url.endswith(key)
    fs.invalidate_cache()
    assert set(there) < set(fs.find(url))
    assert pull(url, tmp_path / "local", **options).version == 2  # type: ignore[arg-type]
    assert same(loaded(tmp_path / "local"), publisher.states[2])


@pytest.mark.parametrize("layout", ["slime", "skyrl"])
def test_a_version_whose_commit_was_not_answered_is_whole(
    layout: str, server: Server, tmp_path: Path
) -> None:
    server.bucket("jobs")
    url, ending = f"s3://jobs/{uuid4()}", {"slime": "index.json", "skyrl": "/manifest.json"}[layout]
    publisher = Publisher(tmp_path)
    publisher.publish(root=url, layout=layout, base=publisher.base, storage_options=server.options)
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    with losing(server.endpoint, ending, most=1, then=interrupt) as (proxy, log):
        options = server.options | {"endpoint_url": proxy}
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(root=url, base=publisher.base, storage_options=options)
    assert log
    options = {"storage_options": server.options}
    assert pull(url, tmp_path / "local", **options).version == 2
    assert same(loaded(tmp_path / "local"), publisher.states[2])
    assert publisher.publish(root=url, base=publisher.base, **options).version == 3
    assert ckpt_tools.verify(url, **options).problems == []


@pytest.mark.parametrize("layout", ["slime", "skyrl"])
def test_what_a_dead_attempt_left_beside_a_version_does_not_hide_it(
    layout: str, server: Server, tmp_path: Path
) -> None:
    """Two attempts at one version died: one before its last step, one just after it."""
    fs = server.bucket("jobs")
    url, options = f"s3://jobs/{uuid4()}", {"storage_options": server.options}
    publisher, folder = Publisher(tmp_path), f"{url}/{LAYOUTS[layout].version_name(1)}"
    publisher.publish(root=url, layout=layout, base=publisher.base, **options)
    index = LAYOUTS[layout].index_file
    left = {path: fs.cat_file(path) for path in fs.find(folder) if not path.endswith(f"/{index}")}
    fs.rm(folder, recursive=True)
    publisher.publish(root=url, layout=layout, base=publisher.base, **options)
    fs.pipe(left)
    assert pull(url, tmp_path / "local", **options).version == 1  # type: ignore[arg-type]
    assert same(loaded(tmp_path / "local"), publisher.states[2])
    assert ckpt_tools.verify(url, **options).problems == []  # type: ignore[arg-type]
    assert publisher.publish(root=url, base=publisher.base, **options).version == 2


@pytest.mark.parametrize("layout", ["slime", "skyrl"])
def test_a_flipped_bit_in_the_index_of_a_delta_is_found(layout: str, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path)
    for _ in range(2):
        publisher.publish(layout=layout)
    path = publisher.root / LAYOUTS[layout].version_name(1) / LAYOUTS[layout].index_file
    whole = path.read_bytes()
    for at in range(3, len(whole), 41):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            problems = ckpt_tools.verify(publisher.root).problems
        except CheckpointError:
            continue
        assert path.name in {Path(problem.file).name for problem in problems} or any(
            "cannot be read" in problem.what for problem in problems
        ), at
