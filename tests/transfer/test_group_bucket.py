"""Several processes write into one bucket: whole files each, or parts of one; one commit, and
nothing visible before it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import ckpt_tools
from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Plan, plan_transfer
from ckpt_tools.engine.partition import cut_regions, within_regions
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.registry import Request, TargetTensor
from ckpt_tools.storage.s3.parts import part_starts
from tests.jobs import LONG, interrupt, torchrun_command
from tests.servers.buckets import real
from tests.servers.hosts import ended, network, reachable, two_by_two
from tests.servers.servers import Server, storage_words
from tests.transfer.groups import group


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 MB: two tensors that are longer than a part, one of them to be cut along its columns, and
    small ones.
    """
    path = tmp_path_factory.mktemp("source")
    torch.manual_seed(1)
    state = {f"layers.{i}.w": torch.randn(50 + i, 30) for i in range(20)}
    state |= {
        "embed": torch.randn(10_000, 1000),
        "head": torch.randn(5000, 1500),
        "step": torch.tensor(5),
    }
    dcp.save({"model": state, "lr": 0.5}, checkpoint_id=path / "src", no_dist=True)
    ckpt_tools.merge(path / "src", path / "one.safetensors")
    return path


def objects(server: Server, prefix: str) -> list[str]:
    fs = server.bucket(prefix.split("/")[0])
    fs.invalidate_cache()
    return sorted(name.rpartition("/")[2] for name in fs.find(prefix))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5] if LONG else [3])
def test_a_team_writes_into_a_bucket_what_one_process_writes(
    size: int, server: Server, source: Path
) -> None:
    real(server)
    fs, at = server.bucket(f"group{size}"), f"s3://group{size}"
    done = group(size, "merge", source / "src", f"{at}/out.safetensors", *storage_words(server))
    assert done.returncode == 0 and done.stdout.count("wrote ") == 1, done.stderr
    fs.invalidate_cache()
    assert fs.cat(f"group{size}/out.safetensors") == (source / "one.safetensors").read_bytes()
    for verb, *options in (
        ("reshard", "--to", "5"),
        ("convert", "--to", "hf", "--max-shard-size", "21MB"),
    )[: 2 if LONG else 1]:
        done = group(size, verb, source / "src", f"{at}/{verb}", *options, *storage_words(server))
        assert done.returncode == 0, done.stderr
        assert ckpt_tools.verify(f"{at}/{verb}", storage_options=server.options).problems == []
    assert ckpt_tools.diff(source / "src", f"{at}/reshard", storage_options=server.options).is_same
    assert (
        not LONG
        or ckpt_tools.diff(
            source / "one.safetensors", f"{at}/convert", storage_options=server.options
        ).is_same
    )
    assert not fs.call_s3("list_multipart_uploads", Bucket=f"group{size}").get("Uploads")


@pytest.mark.skipif(not LONG, reason="three more jobs of processes: CKPT_LONG=1")
def test_from_one_bucket_to_another_and_over_what_is_there(server: Server, source: Path) -> None:
    fs = server.bucket("group-origin")
    fs.put(f"{source}/src/", "group-origin/src/", recursive=True)
    for overwrite in ((), ("--overwrite",)):
        done = group(
            2,
            "merge",
            "s3://group-origin/src",
            "s3://group-origin/out.safetensors",
            *overwrite,
            *storage_words(server),
        )
        assert done.returncode == 0, done.stderr
        out = "s3://group-origin/out.safetensors"
        assert ckpt_tools.verify(out, storage_options=server.options).problems == []
        assert ckpt_tools.diff(
            source / "one.safetensors", out, storage_options=server.options
        ).is_same
    done = group(
        2,
        "merge",
        "s3://group-origin/src",
        "s3://group-origin/out.safetensors",
        *storage_words(server),
    )
    assert done.returncode and "the destination exists" in done.stderr


@pytest.mark.slow
def test_a_member_that_is_killed_leaves_nothing_that_is_seen(
    server: Server, source: Path, tmp_path: Path
) -> None:
    real(server)
    shutil.copytree(source / "src", tmp_path / "src")
    fs = server.bucket("group-killed")
    command = torchrun_command(
        3,
        "-m",
        "ckpt_tools",
        "merge",
        tmp_path / "src",
        "s3://group-killed/out.safetensors",
        *storage_words(server),
    )
    job = interrupt(
        command,
        lambda: bool(fs.call_s3("list_multipart_uploads", Bucket="group-killed").get("Uploads")),
        member=2,
    )
    assert job.returncode and objects(server, "group-killed") == []
    done = group(
        2, "merge", tmp_path / "src", "s3://group-killed/out.safetensors", *storage_words(server)
    )
    assert done.returncode == 0, done.stderr
    assert fs.cat("group-killed/out.safetensors") == (source / "one.safetensors").read_bytes()


@pytest.mark.slow
def test_two_hosts_write_into_a_bucket(server: Server, source: Path) -> None:
    real(server)
    fs = server.bucket("group-hosts")
    with network() as net:
        if net is None:
            pytest.skip("network namespaces cannot be made here")
        with reachable(net, int(server.endpoint.rpartition(":")[2])) as url:
            environment = server.environment | {"AWS_ENDPOINT_URL": url}
            outputs = ended(
                two_by_two(
                    net,
                    "merge",
                    source / "src",
                    "s3://group-hosts/out.safetensors",
                    environment=environment,
                )
            )
            if LONG:
                ended(
                    two_by_two(
                        net,
                        "reshard",
                        source / "src",
                        "s3://group-hosts/four",
                        "--to",
                        4,
                        environment=environment,
                    )
                )
    assert sum(out.count("wrote ") for out, _ in outputs) == 1
    fs.invalidate_cache()
    assert fs.cat("group-hosts/out.safetensors") == (source / "one.safetensors").read_bytes()
    assert not fs.call_s3("list_multipart_uploads", Bucket="group-hosts").get("Uploads")
    assert (
        not LONG
        or ckpt_tools.diff(
            source / "src", "s3://group-hosts/four", storage_options=server.options
        ).is_same
    )


@pytest.mark.skipif(not LONG, reason="one more job of processes: CKPT_LONG=1")
def test_damage_in_what_no_member_reads_in_full_is_found(
    server: Server, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source / "src", tmp_path / "src")
    server.bucket("group-damage")
    path = max((tmp_path / "src").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = group(
        3, "merge", tmp_path / "src", "s3://group-damage/out.safetensors", *storage_words(server)
    )
    assert (
        done.returncode
        and "damaged since they were written" in done.stderr
        and objects(server, "group-damage") == []
    )


def a_plan(shapes: list[tuple[int, int]], dtype: str) -> Plan:
    """A plan of one file."""
    kind, at, tensors = BY_NAME[dtype], 0, {}
    for number, shape in enumerate(shapes):
        nbytes = whole(shape).numel * kind.itemsize
        tensors[f"t{number}"] = TensorEntry(
            f"t{number}", kind, shape, one_chunk(whole(shape), Extent("f", at, nbytes))
        )
        at += nbytes
    layout = safetensors.lay_out(
        Request(
            [TargetTensor(f, kind, t.shape, (whole(t.shape),)) for f, t in tensors.items()],
            1,
            with_index=False,
        )
    )
    return plan_transfer(Catalog("x", tensors, file_sizes={"f": at}), layout)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 4000)), min_size=1, max_size=8),
    st.sampled_from(["uint8", "float32", "float64"]),
    st.integers(1, 9),
    st.booleans(),
)
def test_regions_tile_every_file_at_parts_and_elements(
    shapes: list[tuple[int, int]], dtype: str, count: int, takes_parts: bool
) -> None:
    plan = a_plan(shapes, dtype)
    ((name, nbytes),) = plan.target.file_sizes.items()
    regions = cut_regions(plan, count, part_starts if takes_parts else None)
    ranges = sorted(
        r[name] for r in regions if name in r and (r[name][0] < r[name][1] or not nbytes)
    )
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])] and ranges[-1][
        1
    ] == nbytes
    assert (
        all(low in part_starts(nbytes) for low, _ in ranges)
        and name in regions[0]
        and (takes_parts or len(ranges) == 1)
    )
    parts = [within_regions(plan, r) for r in regions]
    written = sorted(
        (s.start, s.box.numel * t.dst_dtype.itemsize, t.fqn)
        for p in parts
        for t in p.tensors
        for s in t.slots
        if s.box.numel
    )
    literals = sorted((lit.start, len(lit.data), "") for p in parts for lit in p.target.literals)
    end = 0
    for start, length, _ in sorted(written + literals):
        assert start == end
        end += length
    assert end == nbytes
    assert max(high - low for low, high in ranges) <= nbytes / (count if takes_parts else 1) + 3 * (
        8 << 20
    )
