"""The agreement of a save on columns equals that on one object for each shard of each rank."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.core.box import Box
from ckpt_tools.errors import CheckpointError, PlanError
from ckpt_tools.formats.dcp.metadata import ItemLocation, parse_metadata
from ckpt_tools.loop.saving.agreement import MetadataHead, WriteTask, assign
from ckpt_tools.loop.saving.description import JobNames, RankNames, describe_names
from ckpt_tools.loop.state.shard_info import FileKind, ReplicaKind, ShardInfo
from tests.jobs import ROOT
from tests.loop.plain_agreement import agreed

DTYPES = ("float32", "bfloat16", "int64", "uint8", "float8_e4m3fn")


def split(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns begin and length of each part, as FSDP2 cuts: the last parts may be empty."""
    step = -(-length // parts)
    lows = [min(length, n * step) for n in range(parts)]
    return [(low, min(length, low + step) - low) for low in lows]


def halves(box: Box) -> list[Box]:
    """Returns the two shards of a rank that hold a box, as after a swap of blocks."""
    if not box.sizes or box.sizes[0] < 2:
        return [box]
    (low, *offsets), (length, *sizes) = box
    some = length // 3 + 1
    return [
        Box((low + some, *offsets), (length - some, *sizes)),
        Box((low, *offsets), (some, *sizes)),
    ]


def cut(dice: random.Random, shape: tuple[int, ...], ranks: int) -> list[Box]:
    """Returns the box of each rank: shards, copies, or groups of ranks that hold the same shards."""
    whole = Box((0,) * len(shape), shape)
    if not shape or dice.random() < 0.2:
        return [whole] * ranks
    dim = dice.randrange(len(shape))
    groups = dice.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    parts = split(shape[dim], ranks // groups)
    boxes = []
    for rank in range(ranks):
        low, length = parts[rank % len(parts)]
        offsets, sizes = [0] * len(shape), [*shape]
        offsets[dim], sizes[dim] = low, length
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def job(dice: random.Random, ranks: int) -> list[RankNames]:
    """Returns the names of all ranks of a random job."""
    lengths = [0, 1, 3, 8, 33, 70_000] if dice.random() < 0.5 else [0, 1, 3, 8, 33]
    shapes = [tuple(dice.choice(lengths) for _ in range(dice.randrange(5))) for _ in "abc"]
    names = [f"model.{n}.w" for n in range(dice.randrange(1, 12))]
    infos: list[list[ShardInfo]] = [[] for _ in range(ranks)]
    kinds: dict[str, ReplicaKind] = {}
    last: tuple[str, str, tuple[int, ...], list[Box]] | None = None
    for fqn in names:
        shape, dtype = dice.choice(shapes), dice.choice(DTYPES)
        boxes, alias = cut(dice, shape, ranks), ""
        if last is not None and dice.random() < 0.2:  # tied weights
            alias, dtype, shape, boxes = last
        file = FileKind(int(max(0, 3 - 8 * dice.random())))
        if dice.random() < 0.3:
            kinds[fqn] = dice.choice([*ReplicaKind])
        untied = dice.randrange(ranks) if dice.random() < 0.1 else -1
        in_two = dice.random() < 0.2
        for rank, box in enumerate(boxes):
            tie = "" if rank == untied else alias
            for part in halves(box) if in_two else [box]:
                infos[rank].append(ShardInfo(fqn, dtype, shape, part, tie, file))
        last = (alias or fqn, dtype, shape, boxes)
    values = tuple((f"optimizer.{n}", False) for n in range(dice.randrange(3)))
    found = []
    for rank, mine in enumerate(infos):
        objects = (
            *(dict(values) if rank == 0 else ()),
            *(f"rng.{rank}.{n}" for n in range(dice.randrange(3))),
        )
        paths = [(info.fqn, tuple(info.fqn.split("."))) for info in mine]
        paths += [(fqn, ("rng", rank, fqn)) for fqn in objects]
        if dice.random() < 0.3:
            dice.shuffle(paths)
        some = {f: k for f, k in kinds.items() if dice.random() < 0.9}
        found.append(RankNames(tuple(mine), objects, values, dict(paths), some))
    return found


def spoil(dice: random.Random, names: list[RankNames]) -> None:
    """Changes one rank's names so that ranks disagree, mostly."""
    rank = dice.randrange(len(names))
    one = names[rank]
    at = dice.randrange(len(one.infos))
    info = one.infos[at]
    kind = dice.randrange(6)
    if kind == 0:
        info = info._replace(dtype=dice.choice(DTYPES))
    elif kind == 1 and not any(other.alias for other in one.infos):
        info = info._replace(
            shape=(*info.shape, 2), box=Box((*info.box.offsets, 0), (*info.box.sizes, 2))
        )
    elif kind == 2 and info.shape:
        info = info._replace(
            box=Box(info.box.offsets, (info.box.sizes[0] // 2, *info.box.sizes[1:]))
        )
    elif kind == 3:
        names[rank] = one._replace(values=(*one.values, ("more", False)))
        return
    elif kind == 4:
        paths = dict(one.paths)
        paths.pop(info.fqn)
        names[rank] = one._replace(paths=paths)
        return
    else:
        names[rank] = one._replace(infos=one.infos[:at] + one.infos[at + 1 :])
        return
    names[rank] = one._replace(infos=(*one.infos[:at], info, *one.infos[at + 1 :]))


def outcome(
    work: Callable[[Any, bool], tuple[list[WriteTask], MetadataHead]], given: Any, differ: bool
) -> Sequence[object]:
    try:
        tasks, head = work(given, differ)
    except CheckpointError as error:
        return type(error), str(error), error.hint
    places = {
        name: ItemLocation("__0_0.distcp", 10**n, n)
        for n, names in enumerate(head.objects)
        for name in names
    }
    index = head.template.render(places, "id", lambda file: f"x{file}")
    return tasks, index, head.tensors, dict(head.aliases), head.objects


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 16, 40])
def test_the_same_is_agreed_as_on_objects(ranks: int) -> None:
    refused = 0
    for seed in range(120 if ranks < 16 else 40):
        dice = random.Random(seed)
        names = job(dice, ranks)
        if seed % 3 == 2:
            spoil(dice, names)
        differ = dice.random() < 0.5
        expected = outcome(agreed, names, differ)
        told = [describe_names(one) for one in names]
        got = outcome(partial(assign, own=names[0] if seed % 2 else None), told, differ)
        assert got == expected, seed
        refused += isinstance(expected[0], type)
    assert refused > 2


def test_equal_names_are_described_by_equal_bytes() -> None:
    """So rank 0 reads them once, wherever their strings and tuples come from."""
    names = job(random.Random(1), 1)[0]
    copied = RankNames(
        tuple(
            ShardInfo(f"{i.fqn} "[:-1], f"{i.dtype} "[:-1], (*[*i.shape],), i.box, i.alias, i.file)
            for i in names.infos
        ),
        *names[1:],
    )
    assert describe_names(copied) == describe_names(names)


def test_rank_0_keeps_no_second_copy_of_its_names() -> None:
    names = job(random.Random(1), 2)
    read = JobNames([describe_names(one) for one in names], names[0])
    own = {id(word) for fqn, path in names[0].paths.items() for word in (fqn, *path)}
    assert {id(fqn) for fqn, _ in read.groups[0].common.paths} <= own and own


def names_of(
    tensors: dict[str, Box],
    values: tuple[tuple[str, bool], ...] = (),
    objects: tuple[str, ...] = (),
    paths: dict[str, tuple[str | int, ...]] | None = None,
    shape: tuple[int, ...] = (4,),
) -> RankNames:
    infos = tuple(ShardInfo(fqn, "float32", shape, box) for fqn, box in tensors.items())
    every = {name: tuple(name.split(".")) for name in (*tensors, *objects)}
    return RankNames(infos, objects, values, {**every, **(paths or {})})


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [names_of({}, (("v", False),), ("v",)), names_of({"v": Box((0,), (4,))})],
            "rank 1 and rank 0 differ: 'v' is a tensor on one rank and a value on another",
        ),
        (
            [names_of({}, (("v", False),), ("v",)), names_of({}, (("v", True),), ("v.rank_1",))],
            "'v' is a PerRank on one rank and a value of all on another",
        ),
        (
            [names_of({"v.rank_1": Box((0,), (4,))}), names_of({}, (), ("v.rank_1",))],
            "two entries of the state have one name: 'v.rank_1' is a tensor, and an object of rank",
        ),
        (
            [names_of({}, (), ("v.rank_1",)), names_of({}, (), ("v.rank_1",))],
            "'v.rank_1' is an entry of rank 0, and an object of rank 1",
        ),
        (
            [
                names_of({"a.0": Box((0,), (4,))}, paths={"a.0": ("a", 0)}),
                names_of({"a.b": Box((0,), (4,))}, paths={"a.b": ("a", "b")}),
            ],
            "different containers at 'a': a list on one rank, and a dict on another",
        ),
    ],
)
def test_what_ranks_cannot_mean_together_is_refused(ranks: list[RankNames], words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("'", ".")):
        assign([describe_names(one) for one in ranks], names_differ=True)


def test_tables_with_the_same_bytes_and_other_dims_are_apart() -> None:
    """A reviewer's: 32 chunks of two dims and 16 of four have the same numbers, in this order."""
    two = [ShardInfo("two", "float32", (0, 32), Box((0, k), (0, 1))) for k in range(32)]
    four = [
        ShardInfo("four", "float32", (0, 32, 0, 32), Box((0, 2 * k, 0, 2 * k + 1), (0, 1, 0, 1)))
        for k in range(16)
    ]
    ranks = [
        RankNames((two[k], *four[k : k + 1]), (), (), {"two": ("two",), "four": ("four",)})
        for k in range(32)
    ]
    _, head = assign([describe_names(one) for one in ranks])
    read = parse_metadata(head.template.render({}, "id"), "")
    assert [len(box.offsets) for box in read.tensors["four"].boxes] == [4] * 16
    assert [len(box.offsets) for box in read.tensors["two"].boxes] == [2] * 32


def test_metadata_of_many_ranks_is_never_held() -> None:
    """Rank 0 keeps the cuts; the places of a tensor are made when they are written."""
    ranks, tensors = 512, 40
    names = [
        RankNames(
            tuple(
                ShardInfo(f"w{n}", "float32", (ranks, 8), Box((rank, 0), (1, 8)))
                for n in range(tensors)
            ),
            (),
            (),
            {f"w{n}": (f"w{n}",) for n in range(tensors)},
        )
        for rank in range(ranks)
    ]
    _, head = assign([describe_names(one) for one in names])
    pieces = [*head.template.pieces({}, "id")]
    assert b"".join(pieces) == head.template.render({}, "id")
    kept = [part for part in head.template._parts if isinstance(part, bytes)]
    assert len(pieces) - len(kept) >= tensors - 1
    assert sum({id(part): len(part) for part in kept}.values()) < sum(map(len, pieces)) / 4
    read = parse_metadata(b"".join(pieces), "")
    assert len(read.places) == ranks * tensors
    files = {place.file for (fqn, _), place in read.places.items() if fqn == "w7"}
    assert files == {f"__{rank}_0.distcp" for rank in range(ranks)}


def test_tied_weights_are_stored_once_whatever_the_order_of_their_names() -> None:
    """A reviewer's: the first name on one rank is the second on another."""
    whole = Box((0,), (4,))
    ranks = []
    for order in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        infos = [ShardInfo(n, "float32", (4,), whole, order[0] * (n != order[0])) for n in order]
        ranks.append(RankNames(tuple(infos), (), (), {n: (n,) for n in order}))
    tasks, head = assign([describe_names(one) for one in ranks])
    assert dict(head.aliases) == {"b": "a", "c": "a"}
    written = [ranks[rank].infos[n].fqn for rank, task in enumerate(tasks) for n in task.shards]
    assert written == ["a"]
    read = parse_metadata(head.template.render({}, "id"), "")
    assert len({read.places[name, (0,)] for name in "abc"}) == 1
    ranks[2] = ranks[2]._replace(infos=tuple(i._replace(alias="") for i in ranks[2].infos))
    assert not assign([describe_names(one) for one in ranks])[1].aliases  # untied there


def test_a_shard_of_another_shape_than_its_placements_say_is_refused(tmp_path: Path) -> None:
    """As `from_local` makes it, which takes any tensor for the rank's part."""
    code = """
import sys, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
import ckpt_tools
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
part = DTensor.from_local(
    torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=(2, 2), stride=(2, 1)
)
try:
    ckpt_tools.save(sys.argv[1], {"w": part})
except ckpt_tools.PlanError as error:
    print(error)
"""
    words = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    wanted = "this rank's part of 'w' has the shape [3, 2], and its placements say [2, 2]"
    assert done.stdout.strip() == wanted, done.stderr
    assert not (tmp_path / "s").exists()
