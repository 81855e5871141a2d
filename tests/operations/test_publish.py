"""`ckpt publish` and `ckpt pull`: versions of a model, complete or as what changed.

The oracle applies the published files by itself, with numpy, zstandard and xxhash, as their layout
is described by slime. It shares no code with the package.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import publish_version, pull
from ckpt_tools.errors import CheckpointError, FormatError, IntegrityError, PlanError, StorageError
from ckpt_tools.formats.deltas.encoding import Encoder, check_size, decode, fold, new_hasher
from tests.operations.llamas import llama
from tests.publishing import Publisher, model_directory, next_state, version
from tests.servers.servers import Server
from tests.versions import INDEX, apply_versions, loaded, same


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_what_is_published_is_what_an_engine_reads(
    encoding: str, checksum: str, publisher: Publisher
) -> None:
    for number in (1, 2, 3):
        result = publisher.publish(encoding=encoding, checksum=checksum)
        assert (result.version, result.base_version) == (number, number - 1)
        before, after = publisher.states[-2:]
        assert result.num_tensors == 8
        assert result.num_changed == sum(not torch.equal(before[n], v) for n, v in after.items())
        changed = sum(
            int((before[n].view(-1).view(torch.uint8) != v.view(-1).view(torch.uint8)).sum())
            for n, v in after.items()
            if v.numel()
        )
        assert result.changed_nbytes == changed
        files = [p for p in version(publisher.root, number).iterdir() if "manifest" not in p.name]
        assert result.written_nbytes == sum(p.stat().st_size for p in files)
        assert same(
            apply_versions(publisher.base, publisher.root, list(range(1, number + 1))), after
        )


def test_a_version_is_read_as_a_complete_checkpoint(
    publisher: Publisher, ckpt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for encoding in ("xor", "overwrite", "xor"):
        publisher.publish(encoding=encoding)
    for number in (1, 2, 3):
        path = version(publisher.root, number)
        with ckpt_tools.open(path) as found:
            for name, values in publisher.states[number].items():
                assert torch.equal(found[name][...], values), (number, name)
        assert ckpt_tools.verify(path).problems == []
    differences = ckpt_tools.diff(version(publisher.root, 2), version(publisher.root, 3))
    assert {d.fqn for d in differences.differences} == {
        n for n in publisher.states[0] if n not in ("layers.2.w", "none")
    }
    merged = publisher.folder / "merged.safetensors"
    ckpt_tools.merge(version(publisher.root, 3), merged)
    assert same(load_file(merged), publisher.states[3])
    whole = ckpt("verify", publisher.root)
    assert whole.returncode == 0 and "0 complete, 3 deltas" in whole.stdout
    quick = ckpt("verify", publisher.root, "--quick")
    assert quick.returncode == 0 and "only the indexes" in quick.stdout
    assert "a delta of 2 (xor)" in ckpt("inspect", version(publisher.root, 3)).stdout


def test_a_pull_folds_deltas_and_replaces_at_once(publisher: Publisher) -> None:
    local = publisher.folder / "local"
    for encoding in ("xor", "overwrite", "xor"):
        publisher.publish(encoding=encoding)
    result = pull(publisher.root, local, version=1)
    assert (result.version, result.from_version, result.num_deltas) == (1, 0, 1)
    assert same(loaded(local), publisher.states[1])
    with (local / "model-00001-of-00002.safetensors").open("rb") as opened:
        before = opened.read()
        result = pull(publisher.root, local)
        opened.seek(0)
        assert opened.read() == before  # an engine that had it open
    assert (result.version, result.from_version, result.num_deltas) == (3, 1, 2)
    assert same(loaded(local), publisher.states[3])
    assert ckpt_tools.verify(local).problems == []
    names = {p.name for p in local.iterdir() if not p.name.startswith("ckpt.")}
    assert names == {p.name for p in publisher.base.iterdir()}
    assert (local / "tokenizer.json").read_text() == '{"a": 1}'
    assert pull(publisher.root, local).is_there
    dry = pull(publisher.root, publisher.folder / "no", dry_run=True)
    assert dry.is_dry_run and not (publisher.folder / "no").exists()
    assert pull(publisher.root, local, version=2).version == 2  # back
    assert same(loaded(local), publisher.states[2])


def test_a_complete_version_begins_the_chain_anew(publisher: Publisher) -> None:
    first = publish_version(publisher.base, publisher.root, partial=True)
    assert (first.version, first.base_version) == (1, None)
    assert same(loaded(version(publisher.root, 1)), publisher.states[0])
    publisher.publish()
    assert publisher.publish(full=True).base_version is None
    publisher.publish()
    assert publisher.publish(full_every=3).base_version == 4
    assert publisher.publish(full_every=2).base_version is None  # above 3 are two deltas
    publisher.publish(full_every=2)
    for number in (7, 6, 5):
        shutil.rmtree(version(publisher.root, number))
        publisher.states.pop()
    local = publisher.folder / "local"
    result = pull(publisher.root, local)
    assert (result.version, result.from_version, result.num_deltas) == (4, 3, 1)
    assert same(loaded(local), publisher.states[-1])
    shutil.rmtree(version(publisher.root, 1))  # behind the complete one
    assert same(loaded(local), publisher.states[-1])
    assert pull(publisher.root, publisher.folder / "other").from_version == 3
    problems = ckpt_tools.verify(publisher.root).problems
    assert [str(p) for p in problems] == [
        "weight_v000002 is a change of version 1, which is missing"
    ]


def test_old_versions_go_behind_a_complete_one(publisher: Publisher) -> None:
    root = publisher.root
    for _ in range(3):
        publisher.publish()
    result = publisher.publish(keep_last=2)  # all build on the base
    assert (result.removed, result.notes) == ([], ["versions 1 to 2 stay: version 3 needs them"])
    publisher.publish(full=True)
    publisher.publish()
    local = publisher.folder / "local"
    pull(root, local, version=4)
    result = publisher.publish(keep_last=1)  # version 7 is a change of 6, and 6 of 5
    assert (result.removed, result.notes) == (
        [4, 3, 2, 1],
        ["versions 5 to 6 stay: version 7 needs them"],
    )
    assert sorted(path.name for path in root.iterdir()) == [
        version(root, n).name for n in (5, 6, 7)
    ]
    assert ckpt_tools.verify(root).problems == []
    done = pull(root, local)  # a receiver that was behind
    assert (done.version, done.from_version, done.num_deltas) == (7, 5, 2)
    assert same(loaded(local), publisher.states[-1])
    for _ in range(3):
        publisher.publish(full=True)
    (version(root, 7) / "ckpt.pin").touch()
    result = publisher.publish(keep_last=2)  # 10 and 11
    assert (result.removed, result.notes) == (
        [9, 8],
        ["weight_v000007 stays: it is pinned", "versions 5 to 6 stay: version 7 needs them"],
    )
    (version(root, 7) / "ckpt.pin").unlink()
    for note in version(root, 10).glob("ckpt.manifest.*"):
        note.unlink()
    result = publisher.publish(keep_last=1, full=True)
    assert result.removed == [11, 7, 6, 5] and len(result.notes) == 1
    assert "version 10 stays: another program" in result.notes[0]
    assert ckpt_tools.verify(root).problems == []
    publisher.publish(full=True)
    attempt = next(version(root, 12).glob("ckpt.manifest.*")).name.split(".")[2]
    killed = version(root, 12).rename(root / f".trash.weight_v000012.{attempt}")
    result = publisher.publish(keep_last=1)
    assert not killed.exists() and result.notes[0] == (
        f"an earlier attempt left {killed}, which was removed"
    )
    shutil.rmtree(version(root, 13))
    result = publisher.publish(full=True, keep_last=2)
    assert result.removed == () and "old versions stay: " in result.notes[0], result
    for wrong in (0, -1, True, "2"):
        with pytest.raises((PlanError, TypeError), match="keep_last"):
            publisher.publish(keep_last=wrong)
    result = publisher.publish(keep_last=1, dry_run=True)
    assert (result.removed, result.notes[-1]) == ((), "a dry run looks at no old versions")


def test_versions_stay_for_receivers_that_say_what_they_have(
    publisher: Publisher, ckpt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    root, local = publisher.root, publisher.folder / "local"
    publisher.publish(full=True)
    publisher.publish()
    publisher.publish()
    assert pull(root, local, version=2, receiver="engine-1").version == 2
    pull(root, publisher.folder / "other", version=1)  # says nothing
    publisher.publish(full=True)
    result = publisher.publish(keep_last=1)
    assert result.removed == []
    assert list(result.notes) == [
        "versions 3 to 4 stay for receiver engine-1, which has version 2",
        "versions 1 to 2 stay: version 3 needs them",
    ]
    damaged = version(root, 5) / "model-00001-of-00001.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError):
        pull(root, local, receiver="engine-1")
    said = json.loads((root / "receiver.engine-1.json").read_text())
    assert (said["has"], said["reads"]) == (2, 0)
    damaged.write_bytes(whole)
    done = ckpt("pull", root, local, "--receiver", "engine-1")
    assert done.returncode == 0, done.stderr
    assert same(loaded(local), publisher.states[5])
    path = root / "receiver.engine-1.json"
    before = path.read_bytes()
    assert pull(root, local, receiver="engine-1").is_there
    assert path.read_bytes() == before  # not again within an hour
    for text in ("", "[]", '{"has": "x", "reads": 0, "said_s": 0}', '{"has": 1e99}', "[" * 5000):
        (root / "receiver.forged.json").write_text(text)
        publisher.publish()
    # one that reads holds its version, and one that has said nothing for a day holds nothing
    reading = {"has": 0, "reads": 3, "said_s": time.time()}
    (root / "receiver.forged.json").write_text(json.dumps(reading))
    assert publisher.publish(keep_last=1).removed == []
    path.write_text(json.dumps({"has": 1, "reads": 0, "said_s": time.time() - 90_000}))
    (root / "receiver.forged.json").unlink()
    result = publisher.publish(keep_last=1)
    assert result.removed == [3, 2, 1]
    assert any("said nothing for a day" in note for note in result.notes)
    with pytest.raises(PlanError, match="receiver"):
        pull(root, local, receiver="../x")


def test_a_model_without_changes_is_a_version_too(publisher: Publisher) -> None:
    publisher.publish(publisher.states[0])
    result = publisher.publish(publisher.states[0])
    assert (result.num_changed, result.changed_nbytes) == (0, 0)
    assert list(version(publisher.root, 2).glob("*.safetensors")) == []
    local = publisher.folder / "local"
    assert pull(publisher.root, local).version == 2 and same(loaded(local), publisher.states[0])


def test_a_base_of_one_file_without_an_index(publisher: Publisher) -> None:
    base = publisher.folder / "single"
    base.mkdir()
    save_file(publisher.states[0], base / "model.safetensors")
    (base / "config.json").write_text('{"architectures": ["Mine"]}')
    for _ in range(2):
        publisher.publish(base=base)
    local = publisher.folder / "local"
    pull(publisher.root, local, version=1)
    pull(publisher.root, local)
    assert same(loaded(local), publisher.states[2])
    assert ckpt_tools.verify(local).problems == []
    assert json.loads((local / INDEX).read_text())["weight_map"]["head"] == "model.safetensors"
    assert same(apply_versions(base, publisher.root, [1, 2]), publisher.states[2])


def test_many_small_tiles_come_in_any_order(publisher: Publisher, tmp_path: Path) -> None:
    """The source is cut into columns, so that threads finish tiles in another order."""
    publisher.publish()
    state = next_state(publisher.states[-1], 0.4)  # dense
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ckpt_tools.reshard(tmp_path / "dcp", tmp_path / "three", to_ranks=3)
    for _ in range(3):
        shutil.rmtree(version(publisher.root, 2), ignore_errors=True)
        publish_version(
            tmp_path / "three", publisher.root, partial=True, jobs=8, memory_bytes=8 * 3 * 4096
        )
        assert same(apply_versions(publisher.base, publisher.root, [1, 2]), state)


def refused(kind: type[Exception], *parts: str, **how: Any) -> Callable[..., None]:
    def check(call: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*args, **how)
        text = f"{caught.value} {getattr(caught.value, 'hint', '')}"
        assert all(part in text for part in parts), text

    return check


@pytest.mark.slow
def test_another_model_is_refused_by_name(publisher: Publisher) -> None:
    state = publisher.states[0]
    publisher.publish()
    there = sorted(os.listdir(publisher.root))
    less = {n: v for n, v in state.items() if n != "head"}
    refused(PlanError, "only in the version before: 'head'", "--full")(publisher.publish, less)
    more = state | {"new": torch.ones(3)}
    refused(PlanError, "only in the source: 'new'")(publisher.publish, more)
    shape = state | {"norm": torch.ones(8).bfloat16()}
    refused(PlanError, "other shapes than the result: norm")(publisher.publish, shape)
    single = {n: v.float() if v.is_floating_point() else v for n, v in state.items()}
    refused(PlanError, "--dtype bfloat16")(publisher.publish, single)
    assert publisher.publish(single, dtype="bf16").num_changed  # the cast
    refused(PlanError, "xor, overwrite", encoding="zip")(publisher.publish)
    refused(PlanError, "adler32", checksum="md5")(publisher.publish)
    assert sorted(os.listdir(publisher.root)) == [*there, "weight_v000002"]
    with pytest.raises(PlanError, match="32 bits"):
        check_size("overwrite", "w", (1 << 32) + 1)
    check_size("xor", "w", (1 << 32) + 1)
    data, frame = np.zeros(8, np.uint8), (1).to_bytes(4, "little") + (5).to_bytes(4, "little")
    far = decode(zstandard.compress(frame + b"x"), "overwrite", 1 << 33, "it")
    far.apply(data, (1 << 32) + 7)  # another publisher may write it: nothing changed there
    assert not data.any()


def test_a_wrong_base_and_damage_are_named(publisher: Publisher) -> None:
    publisher.publish()
    publisher.publish()
    local = publisher.folder / "local"
    wrong = shutil.copytree(publisher.base, publisher.folder / "wrong")
    path = next(p for p in wrong.glob("*.safetensors") if "head" in load_file(p))
    data = bytearray(path.read_bytes())
    at = data.index(publisher.states[0]["head"].view(torch.uint8).numpy().tobytes()[:64])
    data[at] ^= 1
    path.write_bytes(data)
    refused(IntegrityError, "head", "--base", base=wrong)(pull, publisher.root, local)
    refused(StorageError, "no such path", "--base", base="nowhere")(pull, publisher.root, local)
    assert not local.exists()
    delta = version(publisher.root, 1) / "model-00001-of-00001.safetensors"
    whole = delta.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    places = json.loads(whole[8:start])
    first, last = places["layers.3.w"]["data_offsets"]
    for at in (first + 30, (first + last) // 2, last - 2):
        data = bytearray(whole)
        data[start + at] ^= 16
        delta.write_bytes(data)
        refused(IntegrityError, "layers.3.w", "weight_v000001")(pull, publisher.root, local)
        problems = ckpt_tools.verify(publisher.root).problems
        assert any(p.fqn == "layers.3.w" for p in problems)
        assert not local.exists()
    delta.write_bytes(whole)
    assert pull(publisher.root, local).version == 2


def test_a_damaged_version_before_is_not_built_upon(publisher: Publisher) -> None:
    publisher.publish()
    local = publisher.folder / "local"
    pull(publisher.root, local)
    path = publisher.base / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    there = sorted(os.listdir(publisher.root))
    refused(IntegrityError, "version before is not what was sealed", "--full")(publisher.publish)
    assert sorted(os.listdir(publisher.root)) == there


def test_a_hole_and_a_renamed_version_are_refused(publisher: Publisher) -> None:
    for _ in range(3):
        publisher.publish()
    local = publisher.folder / "local"
    version(publisher.root, 2).rename(publisher.folder / "away")
    refused(StorageError, "version 2 is missing", "version 3")(pull, publisher.root, local)
    refused(PlanError, "there is no version 2", version=2)(pull, publisher.root, local)
    with pytest.raises(FormatError, match="only the changes since another version"):
        ckpt_tools.inspect(publisher.folder / "away")
    shutil.copytree(version(publisher.root, 3), version(publisher.root, 2))  # a fork
    refused(FormatError, "says that it is version 3", version=3)(pull, publisher.root, local)
    assert not local.exists()
    with pytest.raises(CheckpointError, match="no version lies in"):
        pull(publisher.folder / "nothing", local)


def test_every_file_of_the_model_goes_along_again_and_again(publisher: Publisher) -> None:
    (publisher.base / ".gitattributes").write_text("z")
    (publisher.base / "original").mkdir()
    (publisher.base / "original" / "params.json").write_text("{}")
    (publisher.base / "onnx").mkdir()
    (publisher.base / "onnx" / "model.onnx").write_bytes(b"x")
    local = publisher.folder / "local"
    for number in (1, 2, 3):
        publisher.publish()
        assert pull(publisher.root, local).from_version == number - 1
        assert same(loaded(local), publisher.states[number])
        assert (local / "original" / "params.json").read_text() == "{}"
        assert (local / "onnx" / "model.onnx").exists() and (local / ".gitattributes").exists()
    there = [p.name for p in publisher.folder.iterdir() if not p.name.startswith("source")]
    assert sorted(there) == ["base", "local", "root"]  # the old model is gone


def test_only_what_a_pull_brought_is_replaced(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish()
    step = tmp_path / "step"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=step, no_dist=True)
    before = sorted(p.name for p in step.iterdir())
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"w": torch.ones(3)}, weights / "mine.safetensors")
    for folder in (step, weights, shutil.copytree(publisher.base, tmp_path / "plain")):
        refused(StorageError, "no pull made this", "new directory")(pull, publisher.root, folder)
    assert sorted(p.name for p in step.iterdir()) == before
    empty = tmp_path / "empty"
    empty.mkdir()
    pull(publisher.root, empty)
    publisher.publish()
    (empty / "notes.txt").write_text("mine")
    refused(StorageError, "notes.txt", "move them away")(pull, publisher.root, empty)
    (empty / "notes.txt").unlink()
    (empty / "config.json").write_text("mine")
    refused(StorageError, "config.json")(pull, publisher.root, empty)
    assert (empty / "config.json").read_text() == "mine"
    refused(PlanError, "among the versions")(pull, publisher.root, publisher.root / "local")
    refused(PlanError, "is a model", root=publisher.base)(publisher.publish)


@pytest.mark.parametrize("how", ["bit", "cut", "gone", "no config"])
def test_a_damaged_local_copy_is_written_anew(how: str, publisher: Publisher) -> None:
    publisher.publish()
    local = publisher.folder / "local"
    pull(publisher.root, local)
    publisher.publish()
    path = next(p for p in local.glob("*.safetensors") if "head" in load_file(p))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if how == "gone":
        path.unlink()
    elif how == "no config":
        (local / "config.json").unlink()
    else:
        path.write_bytes(data if how == "bit" else data[:-9])
    result = pull(publisher.root, local)
    assert (result.version, result.from_version) == (2, 0)
    assert any("written anew" in note for note in result.notes)
    assert same(loaded(local), publisher.states[2])


def test_a_complete_version_needs_nothing_below(publisher: Publisher) -> None:
    publisher.publish()
    publisher.publish()
    moved = publisher.base.rename(publisher.folder / "moved")
    refused(StorageError, "version 0 cannot be opened")(publisher.publish)
    publisher.states.pop()
    assert publisher.publish(base=moved).base_version == 2  # version 0 lies elsewhere now
    shutil.rmtree(version(publisher.root, 2))
    refused(StorageError, "version 2 is missing")(publisher.publish)
    assert publisher.publish(full=True, base=moved).base_version is None
    local = publisher.folder / "local"
    assert pull(publisher.root, local).version == 4
    assert same(loaded(local), publisher.states[-1])
    assert json.loads((local / "config.json").read_text())["architectures"] == ["Mine"]


def test_versions_of_another_publisher_are_proved_by_its_checksums(publisher: Publisher) -> None:
    """Without our manifests, as slime leaves them."""
    publisher.publish()
    publisher.publish(encoding="overwrite", checksum="adler32")
    for note in publisher.root.rglob("ckpt.manifest.*"):
        note.unlink()
    local = publisher.folder / "local"
    assert pull(publisher.root, local, version=1).num_deltas == 1
    result = pull(publisher.root, local)
    assert (result.from_version, result.num_deltas) == (1, 1)
    assert same(loaded(local), publisher.states[2])
    other_run = Publisher(Path(str(publisher.folder / "run2")))
    for _ in range(3):
        other_run.publish(next_state(other_run.states[-1], 0.3))
    for note in other_run.root.rglob("ckpt.manifest.*"):
        note.unlink()
    result = pull(other_run.root, local)  # not on top of the other run's version 2
    assert (result.version, result.from_version) == (3, 0)
    assert same(loaded(local), other_run.states[3])
    pull(publisher.root, local)
    checked = ckpt_tools.verify(version(publisher.root, 2))
    damaged = shutil.copytree(publisher.root, publisher.folder / "damaged")
    text = json.loads((version(damaged, 1) / INDEX).read_text())
    text["metadata"]["ckpt_base"] = str(
        model_directory(publisher.folder / "b2", next_state(publisher.states[0]))
    )
    (version(damaged, 1) / INDEX).write_text(json.dumps(text))
    assert "head" in ckpt_tools.verify(version(damaged, 2)).lost
    assert checked.problems == [] and not checked.is_sealed
    assert any("publisher's checksums" in note for note in checked.notes)
    index = version(publisher.root, 1) / INDEX
    text = json.loads(index.read_text())
    del text["metadata"]["ckpt_base"]
    index.write_text(json.dumps(text))
    refused(PlanError, "--base DIR")(pull, publisher.root, publisher.folder / "other")
    text["metadata"]["ckpt_base"] = "http://127.0.0.1:9/secret"
    index.write_text(json.dumps(text))
    refused(PlanError, "not opened unasked", "--base")(pull, publisher.root, publisher.folder / "o")
    other = model_directory(publisher.folder / "another", next_state(publisher.states[0]))
    refused(IntegrityError, "head", base=other)(pull, publisher.root, publisher.folder / "other")
    assert pull(publisher.root, publisher.folder / "other", base=publisher.base).version == 2


def test_without_a_manifest_every_verb_proves_what_changed(publisher: Publisher) -> None:
    publisher.publish()
    for note in publisher.root.rglob("ckpt.manifest.*"):
        note.unlink()
    path, out = version(publisher.root, 1), publisher.folder / "out.safetensors"
    ckpt_tools.merge(path, out)
    assert same(load_file(out), publisher.states[1])
    shutil.rmtree(publisher.base)
    torch.manual_seed(7)
    model_directory(publisher.base, next_state(publisher.states[0], 0.5))
    for call in (
        lambda: ckpt_tools.merge(path, publisher.folder / "no.safetensors"),
        lambda: ckpt_tools.copy(path, publisher.folder / "no"),
        lambda: ckpt_tools.diff(path, out),
        lambda: ckpt_tools.stats(path),
        lambda: ckpt_tools.open(path)["head"][...],
    ):
        with pytest.raises(IntegrityError, match="not the published one"):
            call()
    assert not (publisher.folder / "no").exists()


@pytest.mark.parametrize("how", ["no index", "no metadata"])
def test_frames_never_pass_for_weights(how: str, publisher: Publisher) -> None:
    """Of another publisher, whose versions have no manifest of ours."""
    for _ in range(2):
        publisher.publish()
    folder = version(publisher.root, 2)
    for path in folder.glob("ckpt.*"):
        path.unlink()
    about = json.loads((folder / INDEX).read_text())
    (folder / INDEX).unlink()
    if how == "no metadata":
        (folder / INDEX).write_text(json.dumps({"weight_map": about["weight_map"]}))
    for call in (ckpt_tools.verify, ckpt_tools.inspect):
        with pytest.raises(FormatError, match="does not say what it changes"):
            call(folder)
    with pytest.raises(FormatError, match="does not say what it changes"):
        pull(publisher.root, publisher.folder / "local")
    assert not (publisher.folder / "local").exists()


def test_an_index_that_hides_a_file_is_refused(publisher: Publisher) -> None:
    publisher.publish()
    index = version(publisher.root, 1) / INDEX
    text = json.loads(index.read_text())
    for key, value, problem in (
        ("weight_map", {}, "does not name one of its files"),
        ("weight_map", {"head": "../base/model-00001-of-00002.safetensors"}, "does not name"),
        ("metadata", text["metadata"] | {"version": "0" * 5000 + "1"}, "six digits"),
        ("metadata", text["metadata"] | {"base_version": "000003"}, "not of the one before"),
        ("metadata", text["metadata"] | {"delta_encoding": "zip"}, "xor or overwrite"),
    ):
        index.write_text(json.dumps(text | {key: value}))
        with pytest.raises(CheckpointError, match=problem):
            pull(publisher.root, publisher.folder / "local")
    assert not (publisher.folder / "local").exists()


def test_a_cut_frame_below_a_complete_version_is_found(publisher: Publisher) -> None:
    publisher.publish(encoding="xor")
    publisher.publish(full=True)
    path = version(publisher.root, 1) / "model-00001-of-00001.safetensors"
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + nbytes])
    name = max(header.keys() - {"__metadata__"}, key=lambda n: header[n]["data_offsets"][1])
    first, last = header[name]["data_offsets"]
    header[name] |= {"data_offsets": [first, last - 40], "shape": [last - 40 - first]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + nbytes : -40])
    assert [p.fqn for p in ckpt_tools.verify(publisher.root).problems] == [name]


@pytest.mark.slow
def test_a_long_chain_opens_few_files_and_a_full_disk_is_told(publisher: Publisher) -> None:
    for _ in range(70):
        publisher.publish()
    ckpt = f"{sys.executable} -m ckpt_tools"
    command = f"ulimit -n 50; {ckpt} pull {publisher.root} {publisher.folder}/local"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(loaded(publisher.folder / "local"), publisher.states[-1])
    base, big = publisher.folder / "bigbase", publisher.folder / "big.safetensors"
    base.mkdir()
    (base / "config.json").write_text('{"architectures": ["Mine"]}')
    save_file({"w": torch.randn(3000, 1000)}, base / "model.safetensors")
    save_file({"w": torch.randn(3000, 1000)}, big)
    words = f"publish {big} {publisher.folder}/bigroot --base {base} --partial"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 4000; {ckpt} {words}"], capture_output=True, text=True
    )
    assert done.returncode == 15 and "cannot keep the changes" in done.stderr, done.stderr
    assert not (publisher.folder / "bigroot" / "weight_v000001").exists()


def test_a_hook_runs_after_each_version(publisher: Publisher) -> None:
    publisher.publish()
    local, told = publisher.folder / "local", publisher.folder / "told"
    command = f"echo $CKPT_VERSION $CKPT_PATH >> {told}"
    for _ in range(2):  # once for each version
        pull(publisher.root, local, hook=command)
        assert told.read_text() == f"1 {local}\n"
    publisher.publish()
    failing = f"test -e {told}.ready && {command}"
    for _ in range(2):
        with pytest.raises(CheckpointError, match="version 2 is in place, but its hook failed"):
            pull(publisher.root, local, hook=failing)
    assert same(loaded(local), publisher.states[2])
    Path(f"{told}.ready").touch()
    for _ in range(2):
        assert pull(publisher.root, local, hook=failing).is_there
    assert told.read_text() == f"1 {local}\n2 {local}\n"
    assert ckpt_tools.verify(local).problems == []
    asked: list[Any] = []

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if len(asked) > 1 else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/update_weights_from_disk"
        publisher.publish()
        pull(publisher.root, local, hook=url)
        publisher.publish()
        with pytest.raises(CheckpointError, match="HTTP 500"):
            pull(publisher.root, local, hook=url)
        server.shutdown()
    assert asked[0] == {"model_path": str(local), "weight_version": "3"}


def test_a_follower_goes_along(publisher: Publisher) -> None:
    local = publisher.folder / "local"
    words = [sys.executable, "-m", "ckpt_tools", "pull", publisher.root, local, "--follow"]
    follower = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follower.stdout is not None and follower.stderr is not None
    try:
        told = follower.stderr.readline()  # nothing is published yet
        assert "no version lies in" in told, told
        for number in (1, 2):
            publisher.publish()
            line = follower.stdout.readline()  # it is told at once, also into a pipe
            assert line.startswith(f"version {number} in"), line
            assert same(loaded(local), publisher.states[number])
    finally:
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=60)
    assert follower.returncode == 130


def test_publish_to_a_bucket_and_pull_from_it(server: Server, publisher: Publisher) -> None:
    server.bucket("versions")
    url, options = "s3://versions/root", {"storage_options": server.options}
    for encoding in ("xor", "overwrite"):
        publisher.publish(
            root=url,
            base=publisher.base if encoding == "xor" else None,
            encoding=encoding,
            **options,
        )
    local = publisher.folder / "local"
    assert pull(url, local, **options).num_deltas == 2
    assert same(loaded(local), publisher.states[2])
    publisher.publish(root=url, full=True, **options)
    publisher.publish(root=url, **options)
    assert pull(url, local, **options).version == 4
    assert same(loaded(local), publisher.states[4])
    assert publisher.publish(root=url, keep_last=1, **options).removed == [2, 1]
    assert {path.split("/")[2] for path in server.bucket("versions").find("versions/root")} == {
        f"weight_v00000{number}" for number in (3, 4, 5)
    }
    assert pull(url, local, **options).version == 5
    assert same(loaded(local), publisher.states[5])
    assert (local / "config.json").exists()  # of the complete version, which came from the bucket
    fs = server.bucket("bases")
    fs.put(str(publisher.base), "bases/base", recursive=True)
    result = publisher.publish(root="s3://versions/two", base="s3://bases/base", **options)
    assert result.base_version == 0
    pull("s3://versions/two", publisher.folder / "two", **options)
    assert same(loaded(publisher.folder / "two"), publisher.states[6])
    assert ckpt_tools.verify(url, **options).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_job_s_step_becomes_what_transformers_loads(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = llama(tied).bfloat16()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    trained = llama(tied)
    trained.load_state_dict(model.float().state_dict())
    tokens = torch.arange(24).view(2, 12)
    for number in (1, 2):
        with torch.no_grad():
            for values in trained.parameters():
                values += (torch.rand_like(values) < 0.05) * 0.1
        step = tmp_path / f"step-{number}"
        dcp.save({"model": trained.state_dict()}, checkpoint_id=step, no_dist=True)
        how = {"base": tmp_path / "base"} if number == 1 else {}
        result = publish_version(step, tmp_path / "root", dtype="bf16", **how)
        assert result.base_version == number - 1, result.notes
    pull(tmp_path / "root", tmp_path / "local")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "local", dtype="auto")
    expected = llama(tied).bfloat16()
    expected.load_state_dict(trained.state_dict())
    assert all(torch.equal(v, found.state_dict()[n]) for n, v in expected.state_dict().items())
    assert found(tokens).logits.isfinite().all()


@settings(max_examples=25)
@given(
    st.one_of(
        st.integers(1, 5_000),
        st.integers((2 << 20) - 20, (2 << 20) + 20),
        st.integers((4 << 20) - 9, (4 << 20) + 9),
    ),
    st.sampled_from(["xor", "overwrite"]),
    st.sampled_from([0.0, 1e-5, 0.01, 0.3, 1.0]),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6),
    st.integers(1 << 10, 1 << 20),
)
def test_a_change_is_applied_to_any_range(
    nbytes: int,
    encoding: str,
    part: float,
    seed: int,
    ranges: list[tuple[float, float]],
    piece: int,
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, nbytes, np.uint8)
    new = np.where(rng.random(nbytes) < part, rng.integers(0, 256, nbytes, np.uint8), old)
    encoder = Encoder(encoding, nbytes, new_hasher("xxh3-128"))
    frame = b"".join(
        encoder.add(new[at : at + piece], old[at : at + piece].copy())
        for at in range(0, nbytes, piece)
    )
    rest, checksum = b"".join(encoder.finish()), encoder.checksum
    encoder.close()
    assert encoder.num_changed == int((new != old).sum())
    assert checksum == xxhash.xxh3_128(new.tobytes()).hexdigest()
    change = decode(frame + rest, encoding, nbytes, "it")
    changes = {}
    for one, two in [*ranges, (0.0, 1.0)]:
        low, high = sorted((int(one * nbytes), int(two * nbytes)))
        changes[low, high] = old[low:high].copy()
        change.apply(changes[low, high], low)
    second = np.where(rng.random(nbytes) < part, rng.integers(0, 256, nbytes, np.uint8), new)
    encoder = Encoder(encoding, nbytes, new_hasher("adler32"))
    frame_two = encoder.add(second, new.copy()) + b"".join(encoder.finish())
    encoder.close()
    both = fold(change, decode(frame_two, encoding, nbytes, "it"))
    assert both is not None
    found = old.copy()
    both.apply(found, 0)
    assert np.array_equal(found, second)
    for (low, high), found in changes.items():
        assert np.array_equal(found, new[low:high])
    for wrong in (nbytes - 1, nbytes + 1):
        if encoding == "xor":
            with pytest.raises(IntegrityError):
                decode(frame + rest, encoding, wrong, "it")
