"""Proof that a checkpoint is whole, and what is said and saved of one that is not. Stock torch is
the oracle.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager, IntegrityError, PlanError
from ckpt_tools.formats.registry import open_source
from tests.command import run_ckpt
from tests.jobs import LONG
from tests.strategies import flip

Saved = Callable[[int], Path]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
]


def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "a": torch.randn(40, 30, generator=generator),
            "b": torch.arange(70),
            "half": torch.randn(900, generator=generator).bfloat16(),
        },
        "step": 7,
        "rng": torch.get_rng_state(),
    }


def stock(path: Path) -> Path:
    dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


def loads_as_saved(path: Path) -> bool:
    """Tells whether stock torch reads what was saved."""
    want, got = (
        state(),
        {
            "model": {
                "a": torch.zeros(40, 30),
                "b": torch.zeros(70, dtype=torch.long),
                "half": torch.zeros(900).bfloat16(),
            }
        },
    )
    got |= {"step": 0, "rng": torch.zeros(0, dtype=torch.uint8)}
    got["rng"] = torch.zeros_like(want["rng"])
    try:
        dcp.load(got, checkpoint_id=path, no_dist=True)
    except BaseException:  # noqa: BLE001  # its own error is no Exception
        return False
    same = all(torch.equal(got["model"][n], want["model"][n]) for n in want["model"])
    return same and got["step"] == want["step"] and torch.equal(got["rng"], want["rng"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_flip_that_harms_a_stock_checkpoint_goes_unnoticed(tmp_path: Path) -> None:
    path = stock(tmp_path / "stock")
    data, rng, quiet = path / "__0_0.distcp", random.Random(1), []
    assert ckpt_tools.verify(path).problems == [] and loads_as_saved(path)
    positions = range(0, data.stat().st_size, 1 if LONG else 11)
    for at in positions:
        bit = rng.randrange(8)
        flip(data, at, bit)
        if not ckpt_tools.verify(path).problems:
            quiet.append(at)
            assert loads_as_saved(path), (at, bit)
        flip(data, at, bit)
    assert len(quiet) < len(positions) / 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dcp", "one", "shards"])
def test_every_flip_of_what_is_sealed_is_noticed_and_located(
    kind: str, saved: Saved, tmp_path: Path
) -> None:
    path = tmp_path / kind
    if kind == "dcp":
        ckpt_tools.reshard(saved(4) / "adamw", path, to_ranks=3)
    elif kind == "one":
        path = tmp_path / "new" / "one.safetensors"
        path.parent.mkdir()
        ckpt_tools.merge(saved(4) / "adamw", path)
    else:
        ckpt_tools.merge(saved(4) / "adamw", path, max_shard_bytes=20_000)
    source = open_source(path)
    spans: dict[str, list[tuple[str, int, int]]] = {}
    for tensor in source.catalog.tensors.values():
        located = source.format.locate(source.store, [tensor])
        extents = [located.get(c.extent, c.extent) for c in tensor.chunks]
        spans[tensor.fqn] = [(e.file, e.start, e.start + e.nbytes) for e in extents]
    rng, files = (
        random.Random(2),
        sorted(p for p in (path if path.is_dir() else path.parent).iterdir()),
    )
    for _ in range(2000 if LONG else 120):
        file = rng.choice(files)
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, at, bit)
        result = ckpt_tools.verify(path)
        flip(file, at, bit)
        assert file.name in {p.file for p in result.problems}, (file.name, at, bit, result.problems)
        hit = [
            fqn
            for fqn, found in spans.items()
            if any(f == file.name and start <= at < end for f, start, end in found)
        ]
        assert not hit or hit == list(result.lost), (file.name, at, bit, hit, result)
    assert ckpt_tools.verify(path).problems == []


def test_damage_is_told_by_entry_file_byte_and_rank(saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(4) / "adamw", tmp_path / "c", to_ranks=3)
    source = open_source(tmp_path / "c")
    tensor = next(t for t in source.catalog.tensors.values() if len(t.chunks) == 3)
    payload = source.format.locate(source.store, [tensor])[tensor.chunks[1].extent]
    flip(tmp_path / "c" / payload.file, payload.start + 5, 0)
    for is_sealed in (True, False):
        if not is_sealed:
            next((tmp_path / "c").glob("ckpt.manifest.*")).unlink()
        result = ckpt_tools.verify(tmp_path / "c")
        (found,) = (p for p in result.problems if p.fqn)
        assert (found.fqn, found.file, found.rank, list(result.lost)) == (
            tensor.fqn,
            payload.file,
            1,
            [tensor.fqn],
        )
        assert (
            found.start is not None
            and found.nbytes is not None
            and found.start <= payload.start + 5 < found.start + found.nbytes
        )
    done = run_ckpt("verify", tmp_path / "c")
    assert (
        done.returncode == 14
        and tensor.fqn in done.stdout
        and "can still be read: ckpt salvage" in done.stdout
    ), done.stdout
    assert '"lost"' in run_ckpt("verify", tmp_path / "c", "--json").stdout
    assert (
        "the bytes of 3 files, which --quick does not read"
        in run_ckpt("verify", tmp_path / "c", "--quick").stdout
    )


@pytest.mark.slow
def test_what_lies_in_the_wrong_place_is_noticed(saved: Saved, tmp_path: Path) -> None:
    """Pages that a disk lost, wrote twice or elsewhere, shards that changed places, a shard of
    another step: each of them well formed.
    """
    ckpt_tools.reshard(saved(4) / "adamw", tmp_path / "c", to_ranks=3)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step, {"model": {"w": torch.full((3000,), float(step))}}, asynchronous=False
            )
    rng, page, seen = random.Random(3), 512, 0
    first, *others = sorted((tmp_path / "c").glob("*.distcp"))
    whole = first.read_bytes()
    for kind in ("zeroed", "twice", "swapped") * 20:
        one, two = (page * rng.randrange(len(whole) // page) for _ in range(2))
        data = bytearray(whole)
        data[one : one + page] = bytes(page) if kind == "zeroed" else whole[two : two + page]
        if kind == "swapped":
            data[two : two + page] = whole[one : one + page]
        if data == whole:
            continue
        first.write_bytes(data)
        seen += 1
        assert first.name in {p.file for p in ckpt_tools.verify(tmp_path / "c").problems}, (
            kind,
            one,
            two,
        )
    assert seen > 30
    first.write_bytes(others[0].read_bytes())
    others[0].write_bytes(whole)
    assert {first.name, others[0].name} <= {
        p.file for p in ckpt_tools.verify(tmp_path / "c").problems
    }
    old, new = (
        next((tmp_path / "run" / f"step-0000000{step}").glob("*.distcp")) for step in (1, 2)
    )
    new.write_bytes(old.read_bytes())
    (found,) = (p for p in ckpt_tools.verify(new.parent).problems if p.fqn)
    assert found.fqn == "model.w"
    with pytest.raises(IntegrityError, match=r"model\.w"):
        ckpt_tools.merge(new.parent, tmp_path / "m.safetensors")


def test_what_is_missing_short_or_too_much_is_a_verdict(saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(4) / "adamw", tmp_path / "c", to_ranks=3)

    def changed(
        name: str, change: Callable[[Path], object], is_sealed: bool
    ) -> ckpt_tools.VerifyResult:
        path = tmp_path / f"{name}{is_sealed}"
        shutil.copytree(tmp_path / "c", path)
        if not is_sealed:
            next(path.glob("ckpt.manifest.*")).unlink()
        change(path)
        return ckpt_tools.verify(path)

    for is_sealed in (True, False):
        gone = changed("gone", lambda p: (p / "__1_0.distcp").unlink(), is_sealed)
        assert {p.file for p in gone.problems} == {"__1_0.distcp"} and 0 < len(
            gone.lost
        ) < gone.num_entries
        # a row names file and tensor in columns of their own
        assert {p.what for p in gone.problems if p.fqn} == {"a data file is missing"}
        short = changed("short", lambda p: os.truncate(p / "__2_0.distcp", 3000), is_sealed)
        assert {p.file for p in short.problems} == {"__2_0.distcp"} and 0 < len(
            short.lost
        ) < short.num_entries
    extra = changed("extra", lambda p: (p / "__9_0.distcp").write_bytes(b"old"), True)
    assert [(p.file, p.what) for p in extra.problems] == [
        ("__9_0.distcp", "is no part of this checkpoint")
    ] and not extra.lost
    index = changed("index", lambda p: os.truncate(p / ".metadata", 500), True)
    assert {p.file for p in index.problems} == {".metadata"} and index.num_entries == 0
    alone = changed("index", lambda p: os.truncate(p / ".metadata", 500), False)
    assert {p.file for p in alone.problems} == {".metadata"} and alone.num_entries == 0


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "plain/.metadata"])
@pytest.mark.parametrize("nbytes", [0, 20, 150])
def test_a_file_that_is_cut_short_is_damage(name: str, nbytes: int, tmp_path: Path) -> None:
    """It has no manifest, so only the structure tells. Every kind ends with the same status."""
    save_file({"w": torch.ones(999)}, tmp_path / "w.safetensors")
    torch.save({"w": torch.ones(999)}, tmp_path / "w.pt")
    stock(tmp_path / "plain")
    os.truncate(tmp_path / name, nbytes)
    done = run_ckpt("verify", tmp_path / name.partition("/")[0])
    assert done.returncode == 14 and "1 problem" in done.stdout, done
    assert f"{name.rpartition('/')[2]} cannot be read" in done.stdout
    assert ("is empty" in done.stdout) == (nbytes == 0)


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch harmed",)


def test_objects_for_which_torch_would_run_code_are_named(tmp_path: Path) -> None:
    dcp.save({**state(), "extra": {"x": Harm()}}, checkpoint_id=tmp_path / "a", no_dist=True)
    done = run_ckpt("verify", tmp_path / "a")
    assert done.returncode == 0 and "1 of 2 objects ask for unknown types" in done.stdout, done
    assert "'extra.x': posix.system" in done.stdout and "dcp.load would run code" in done.stdout
    assert not os.path.exists("harmed")
    assert "unknown types" not in run_ckpt("verify", stock(tmp_path / "b")).stdout


def test_checksums_that_nobody_kept_are_said_to_be_missing(tmp_path: Path) -> None:
    save_file({"w": torch.ones(9)}, tmp_path / "w.safetensors")
    result = ckpt_tools.verify(tmp_path / "w.safetensors")
    assert (result.problems, list(result.unknown), result.is_sealed) == (
        [],
        ["w.safetensors"],
        False,
    )
    torch.serialization.set_crc32_options(False)
    try:
        stock(tmp_path / "plain")
    finally:
        torch.serialization.set_crc32_options(True)
    assert list(ckpt_tools.verify(tmp_path / "plain").unknown) == ["__0_0.distcp"]
    done = run_ckpt("verify", tmp_path / "plain")
    assert (
        done.returncode == 0 and "as far as that can be told without a manifest" in done.stdout
    ), done.stdout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_looked_at_as_torch_sees_them(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(
        0, 256, (40_000 * dtype.itemsize,), generator=generator, dtype=torch.uint8
    ).view(dtype)
    tensors = {
        "any": words.reshape(200, 200),
        "zero": torch.zeros(300).to(dtype),
        "one": torch.ones(300).to(dtype),
        "single": torch.zeros(1).to(dtype),
    }
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    found = {f.fqn: f for f in ckpt_tools.verify(tmp_path, deep=True).findings}
    wide = torch.view_as_real(words) if dtype.is_complex else words.to(torch.float64)
    want = (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert (found["any"].nans, found["any"].infs) == want if any(want) else "any" not in found
    assert (
        found["zero"].is_zero
        and found["one"].is_constant
        and not found["one"].is_zero
        and "single" not in found
    )


# ---- seal and salvage ----------------------------------------------------------------------------


def test_a_stock_checkpoint_is_sealed_and_compared_from_then_on(tmp_path: Path) -> None:
    path = stock(tmp_path / "stock")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    done = run_ckpt("seal", path)
    assert done.returncode == 0 and done.stdout.startswith("sealed "), done.stderr
    after = {p.name: p.read_bytes() for p in path.iterdir()}
    (new,) = after.keys() - before.keys()
    assert {n: b for n, b in after.items() if n != new} == before and new.startswith(
        "ckpt.manifest."
    )
    assert ckpt_tools.verify(path).is_sealed and loads_as_saved(path)
    with pytest.raises(PlanError, match="it already has a manifest"):
        ckpt_tools.seal(path)
    ckpt_tools.reshard(path, tmp_path / "two", to_ranks=2)
    assert ckpt_tools.diff(path, tmp_path / "two").num_by_fingerprint == 4
    save_file({"w": torch.ones(9)}, tmp_path / "w.safetensors")
    assert ckpt_tools.seal(tmp_path / "w.safetensors").unknown == ("w.safetensors",)
    flip(tmp_path / "w.safetensors", (tmp_path / "w.safetensors").stat().st_size - 3, 2)
    assert list(ckpt_tools.verify(tmp_path / "w.safetensors").lost) == ["w"]


def test_the_directory_of_a_single_file_is_sealed(tmp_path: Path) -> None:
    """As transformers saves a model: no index, and other files beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(9)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    done = run_ckpt("seal", folder)
    assert done.returncode == 0 and done.stdout.startswith(f"sealed {folder}/model.safetensors")
    assert ckpt_tools.verify(folder).is_sealed
    with pytest.raises(PlanError, match="it already has a manifest"):
        ckpt_tools.seal(folder)
    flip(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 3, 2)
    assert list(ckpt_tools.verify(folder).lost) == ["w"]
    MemoryFileSystem.store.clear()
    fsspec.filesystem("memory").put(
        str(tmp_path / "model" / "model.safetensors"), "/m/model.safetensors"
    )
    assert ckpt_tools.seal("memory://m").files.keys() == {"model.safetensors"}
    assert ckpt_tools.verify("memory://m").is_sealed


def test_damage_in_zips_without_checksums_is_located_by_fingerprints(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = stock(tmp_path / "plain")
    finally:
        torch.serialization.set_crc32_options(True)
    ckpt_tools.seal(path)
    data = path / "__0_0.distcp"
    flip(data, data.read_bytes().index(state()["model"]["a"].numpy().tobytes()) + 9, 4)
    assert list(ckpt_tools.verify(path).lost) == ["model.a"]
    assert list(ckpt_tools.salvage(path, tmp_path / "rest").lost) == ["model.a"]


def test_what_is_damaged_is_not_sealed(tmp_path: Path) -> None:
    path = stock(tmp_path / "stock")
    flip(path / "__0_0.distcp", (path / "__0_0.distcp").stat().st_size // 2, 1)
    with pytest.raises(IntegrityError, match=r"a damaged checkpoint is not sealed: __0_0\.distcp"):
        ckpt_tools.seal(path)
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("is_sealed", [True, False])
def test_what_is_whole_is_salvaged(is_sealed: bool, saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(4) / "adamw", tmp_path / "c", to_ranks=3)
    if not is_sealed:
        next((tmp_path / "c").glob("ckpt.manifest.*")).unlink()
    (tmp_path / "c" / "__2_0.distcp").unlink()
    result = ckpt_tools.salvage(tmp_path / "c", tmp_path / "saved")
    saved_source = open_source(tmp_path / "saved")
    assert saved_source.catalog.tensors and result.lost
    assert not set(saved_source.catalog.tensors) & set(result.lost)
    original = open_source(saved(4) / "adamw").catalog
    assert {*saved_source.catalog.tensors, *saved_source.catalog.objects, *result.lost} == {
        *original.tensors,
        *original.objects,
    }
    assert ckpt_tools.verify(tmp_path / "saved").problems == []
    difference = ckpt_tools.diff(saved(4) / "adamw", tmp_path / "saved")
    assert (
        not difference.differences
        and not difference.only_b
        and set(difference.only_a) == set(result.lost)
    )
    done = run_ckpt("salvage", tmp_path / "c", tmp_path / "again")
    assert done.returncode == 14 and "lost" in done.stdout and result.lost[0] in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("harm", ["header", "renamed", "gone"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_shards_around_one_that_cannot_be_read_are_salvaged(
    is_sealed: bool, harm: str, tmp_path: Path
) -> None:
    whole = {f"layer{i}.w": torch.randn(100, 30) for i in range(6)}
    dcp.save({"model": dict(whole)}, checkpoint_id=tmp_path / "one", no_dist=True)
    ckpt_tools.merge(tmp_path / "one", tmp_path / "c", max_shard_bytes=24_100)
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    gone = set(load_file(shards[1]))
    assert len(shards) == 3 and len(gone) == 2
    if not is_sealed:
        next((tmp_path / "c").glob("ckpt.manifest.*")).unlink()
    if harm == "gone":
        shards[1].unlink()
    else:
        data = bytearray(shards[1].read_bytes())
        at = 8 if harm == "header" else data.index(b"layer") + 3  # "lay" + one bit
        data[at] ^= 1
        shards[1].write_bytes(data)
    told = ckpt_tools.verify(tmp_path / "c")
    assert set(told.lost) == gone and {p.file for p in told.problems} == {shards[1].name}
    result = ckpt_tools.salvage(tmp_path / "c", tmp_path / "rest")
    assert set(result.lost) == gone
    found = {
        n: v for p in (tmp_path / "rest").glob("*.safetensors") for n, v in load_file(p).items()
    }
    assert found.keys() == whole.keys() - gone and all(
        torch.equal(v, whole[n]) for n, v in found.items()
    )
    with (
        pytest.raises(IntegrityError, match="is not sealed")
        if not is_sealed
        else pytest.raises(PlanError, match="it already has a manifest")
    ):
        ckpt_tools.seal(tmp_path / "c")


def test_a_damaged_file_of_tensors_is_salvaged_into_another(saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.merge(saved(4) / "adamw", tmp_path / "m.safetensors")
    flip(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 3, 2)
    with pytest.raises(CheckpointError):
        ckpt_tools.merge(tmp_path / "m.safetensors", tmp_path / "n.safetensors")
    result = ckpt_tools.salvage(tmp_path / "m.safetensors", tmp_path / "n.safetensors")
    old, new = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "n.safetensors")
    assert (
        len(result.lost) == 1
        and new.keys() == old.keys() - {*result.lost}
        and all(torch.equal(new[k], old[k]) for k in new)
    )
