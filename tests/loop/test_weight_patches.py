"""`weight_patches`: what changed between two versions, for engines that take patches in memory.

The oracle compares the states that were published with torch. `applied` follows the rules of vLLM's
`load_checkpoint_weight_patches` (PR 50723): NaN marks what stays.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import WeightPatch, weight_patches
from ckpt_tools.errors import IntegrityError, NotACheckpointError, PlanError, StorageError
from ckpt_tools.formats.deltas.chain import ChangedTensor, Frame, Layer, _FramesAhead
from ckpt_tools.storage import Capabilities
from ckpt_tools.storage.base import StoreDefaults
from tests.publishing import Publisher, next_state, version
from tests.servers.faults import watched
from tests.servers.servers import Server
from tests.versions import State, same


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


def applied(state: State, patches: Iterable[WeightPatch]) -> State:
    """A model after patches, by the rules of vLLM."""
    found = {name: values.clone() for name, values in state.items()}
    for name, shape, dtype, values, indices in patches:
        old = found[name]
        assert (shape, dtype, values.dtype) == (tuple(old.shape), old.dtype, old.dtype)
        if indices is None:
            found[name] = values.view(shape)
            continue
        assert dtype.is_floating_point and indices.dtype == torch.int32
        full = torch.full((old.numel(),), float("nan"), dtype=dtype)
        full.index_copy_(0, indices.long(), values)
        full = full.view(shape)
        found[name] = torch.where(full.isnan(), old, full)
    return found


def bits(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    )


def test_each_pair_of_versions(publisher: Publisher) -> None:
    """Deltas of both encodings, and a complete version between."""
    for how in ({}, {"encoding": "overwrite"}, {}, {"full": True}, {}):
        publisher.publish(**how)
    states = publisher.states
    for first, last in itertools.combinations(range(6), 2):
        patches = list(weight_patches(publisher.root, first, last))
        assert same(applied(states[first], patches), states[last]), (first, last)
        names = [n for n, v in states[first].items() if not torch.equal(v, states[last][n])]
        assert sorted(patch.name for patch in patches) == sorted(names)
        for name, _, _, values, indices in patches:
            if indices is not None:
                differs = bits(states[first][name]) != bits(states[last][name])
                assert torch.equal(indices.long(), differs.nonzero()[:, 0])
                assert torch.equal(bits(values), bits(states[last][name])[differs])
    assert list(weight_patches(publisher.root, 5)) == []
    assert [p.name for p in weight_patches(publisher.root, 4)] == [
        p.name for p in weight_patches(publisher.root, 4, 5, jobs=1)
    ]


def test_what_nan_cannot_mark_is_given_whole(tmp_path: Path) -> None:
    """A new NaN, an integer, packed fp4; but single elements of fp8, fp32 and fp64."""
    state: State = {
        "nan": torch.ones(2, 3),
        "whole": torch.arange(6),
        "flag": torch.tensor([True, False]),
        "codes": torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "fp8": torch.ones(3, 5).to(torch.float8_e4m3fn),
        "fp64": torch.ones(3, 5, dtype=torch.float64),
        "minus": torch.zeros(4, dtype=torch.bfloat16),
        "one": torch.tensor(1.5),
    }
    publisher = Publisher(tmp_path)
    publisher.publish(state, full=True)
    new = {name: values.clone() for name, values in state.items()}
    new["nan"][0, 1] = float("nan")
    new["whole"][2] = 7
    new["flag"][1] = True
    new["codes"].view(torch.uint8)[1, 1] = 3
    new["fp8"].view(torch.uint8)[2, 4] = 9
    new["fp64"][1, 1] = 0.1
    new["minus"][3] = -0.0
    new["one"].fill_(2.5)
    publisher.publish(new)
    found = {p.name: p for p in weight_patches(publisher.root, 1)}
    assert {name: p.indices is None for name, p in found.items()} == {
        **dict.fromkeys(("nan", "whole", "flag", "codes"), True),
        **dict.fromkeys(("fp8", "fp64", "minus", "one"), False),
    }
    for name, patch in found.items():
        got = bits(state[name])
        if patch.indices is None:
            got = bits(patch.values)
        else:
            got[patch.indices.long()] = bits(patch.values)
        assert torch.equal(got, bits(new[name])), name


def test_a_job_gives_its_changes_to_engines(publisher: Publisher) -> None:
    """What `on_publish` would do, with the model of the engine."""
    engine = publisher.states[0]

    def tell(result: ckpt_tools.PublishResult) -> None:
        nonlocal engine
        engine = applied(engine, weight_patches(publisher.root, result.version - 1))

    with ckpt_tools.Publisher(publisher.root, base=publisher.base, on_publish=tell) as job:
        for _ in range(2):
            publisher.states.append(next_state(publisher.states[-1]))
            job.publish(publisher.states[-1])
    assert same(engine, publisher.states[2])


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("between", [False, True], ids=["deltas", "complete"])
def test_damage_is_found_before_a_patch_is_given_out(between: bool, publisher: Publisher) -> None:
    for how in ({}, {"full": between}, {}):
        publisher.publish(**how)
    (path,) = version(publisher.root, 2 if between else 3).glob("*.safetensors")
    flip(path, path.stat().st_size // 2)
    with pytest.raises(IntegrityError, match="not what was published" if between else "damaged"):
        list(weight_patches(publisher.root, 1))
    flip(path, path.stat().st_size // 2)
    for path in publisher.base.glob("*.safetensors"):
        flip(path, path.stat().st_size - 1001)
    with pytest.raises(IntegrityError, match="not what was published"):
        list(weight_patches(publisher.root, 1))


def test_without_our_manifest_the_publisher_s_checksums_count(publisher: Publisher) -> None:
    for _ in range(2):
        publisher.publish()
    for path in publisher.root.glob("*/*manifest*"):
        path.unlink()
    patches = weight_patches(publisher.root, 0)
    assert same(applied(publisher.states[0], patches), publisher.states[2])
    for path in publisher.base.glob("*.safetensors"):
        flip(path, path.stat().st_size - 1001)
    with pytest.raises(IntegrityError, match="after the changes, a tensor is not the published"):
        list(weight_patches(publisher.root, 0))


def test_wrong_requests(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="no version lies in"):
        weight_patches(publisher.root, 1)
    for _ in range(2):
        publisher.publish()
    root = publisher.root
    for wrong, message in (((3,), "no version 3"), ((0, 7), "no version 7"), ((2, 1), "from 2 on")):
        with pytest.raises(PlanError, match=message):
            weight_patches(root, *wrong)
    with pytest.raises(PlanError, match="at least 1; got 0"):
        weight_patches(root, 0, 0)
    for wrong_version in ("1", -1, None, False):
        with pytest.raises(PlanError, match="at least 0; got"):
            weight_patches(root, wrong_version)  # type: ignore[arg-type]
    for number in (1, 2):  # as another tool writes them
        other = version(tmp_path / "other", number)
        other.mkdir(parents=True)
        save_file({"a": torch.ones(number)}, other / "model.safetensors")
    with pytest.raises(PlanError, match="different tensors.*'a'"):
        list(weight_patches(tmp_path / "other", 1))
    with pytest.raises(PlanError, match="it is complete or gone"):
        list(weight_patches(tmp_path / "other", 0))
    with pytest.raises((NotACheckpointError, StorageError)):
        list(weight_patches(root, 0, base=tmp_path / "nothing"))
    shutil.rmtree(version(root, 1))
    with pytest.raises(PlanError, match="it is complete or gone"):
        list(weight_patches(root, 0))
    with pytest.raises(StorageError, match="version 1 is missing"):
        list(weight_patches(root, 0, base=publisher.base))


class Asked(StoreDefaults):
    """The store of a bucket, which notes what it will be asked for."""

    capabilities = Capabilities(can_write_anywhere=False, is_remote=True)

    def __init__(self) -> None:
        self.announced: list[str] = []

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        self.announced += [file for file, *_ in ranges]


def test_frames_are_announced_once_and_within_a_budget() -> None:
    """Also if threads read them in another order, and ask for some before they are announced."""
    store: Any = Asked()
    layer = Layer(cast(Any, None), store, lambda: store)
    tensors = [
        ChangedTensor(f"t{n}", "f", 0, 1, [Frame(layer, f"t{n}", 0, 40 << 20, "")])
        for n in range(9)
    ]
    ahead = _FramesAhead()
    ahead.announce(tensors)
    assert store.announced == ["t0", "t1"]
    for n in (2, 0, 1):
        ahead.has_read(tensors[n])
    assert store.announced == ["t0", "t1", "t3", "t4"]
    for n in range(3, 9):
        ahead.has_read(tensors[n])
    assert store.announced == [f"t{n}" for n in (0, 1, 3, 4, 5, 6, 7, 8)]


def test_who_stops_early_leaves_no_threads(publisher: Publisher) -> None:
    publisher.publish()
    patches = weight_patches(publisher.root, 0)
    assert next(iter(patches)).values.numel()
    del patches
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt-patches")]


@pytest.mark.parametrize("first", [0, 1])
def test_a_bucket_is_read_once(first: int, server: Server, publisher: Publisher) -> None:
    """Neighbouring changes share a request, and the old bytes are read once."""
    fs = server.bucket("patches")
    fs.put(str(publisher.base), f"patches/base{first}", recursive=True)
    url, options = f"s3://patches/root{first}", {"storage_options": server.options}
    base = f"s3://patches/base{first}"
    publisher.publish(root=url, full=first == 1, base=base, **options)
    for _ in range(2):
        publisher.publish(root=url, **options)
    with watched(server.endpoint) as (proxy, log):
        through = {"storage_options": server.options | {"endpoint_url": proxy}}
        patches = list(weight_patches(url, first, **through))
        reads = [r for r, _ in log if r.path.endswith(".safetensors")]
    assert same(applied(publisher.states[first], patches), publisher.states[3])
    # of each file: a header in two requests, and the tensors, which are neighbours
    ranges = [(request.path, request.headers["Range"]) for request in reads]
    data = [path for path, r in ranges if r != "bytes=0-7" and not r.startswith("bytes=8-")]
    assert len(data) == len(set(data)) == 3 + 2 * (first == 0)
