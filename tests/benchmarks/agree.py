"""What a save costs besides its bytes, at many ranks: the plan, what ranks tell each other, the
metadata.

    python tests/benchmarks/agree.py [--ranks 64 128 256 512 1024] [--tensors 1000] [--copies 1]

One process plays all ranks: it makes what each would send, measures it, and does rank 0's work on
it. The first save plans; the next ones, with an unchanged layout, do not. The tensors have the
shapes of a model of Llama's kind, and each is split over all ranks; with `--copies 4`, over a
quarter of them, four times. Beside it, what stock DCP does on rank 0 in every save: gather all
plans, join them (`create_default_global_save_plan`), gather all results, pickle the metadata. Above
1,024 ranks, it and the proof of a load are left out: to play all ranks takes minutes.
"""

import argparse
import multiprocessing
import pickle
import tempfile
import time
import uuid
import zlib
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_tools.core.box import Box
from ckpt_tools.core.memory import no_gc
from ckpt_tools.engine.fingerprints import (
    HashedRange,
    HashedRanges,
    TensorHashes,
    deal_rows,
    join_rows,
    share_rows,
)
from ckpt_tools.formats.dcp.metadata import ItemLocation
from ckpt_tools.loop.saving.agreement import assign
from ckpt_tools.loop.saving.description import RankDescription, RankNames, describe_names
from ckpt_tools.loop.saving.replicas import Proof, ReplicaProof
from ckpt_tools.loop.saving.save import SaveLayout, _fingerprints, _seal
from ckpt_tools.loop.saving.write import (
    RankFile,
    commit,
    describe,
    plan_rank_files,
    write_index,
)
from ckpt_tools.loop.state.shard_info import ShardInfo
from ckpt_tools.publish.destinations import open_destination

# of the tensors of a layer, and how many rows a rank would have if none were short
SHAPES = [(16_384, 64), (4_096, 64), (4_096, 64), (16_384, 64), (53_248, 64), (53_248, 64)]
SHAPES += [(16_384, 208), (16_384,), (16_384,), (128_256, 16)]
MOST_PLAYED = 1024


def shard_infos(
    rank: int, num_ranks: int, num_tensors: int, copies: int = 1
) -> tuple[ShardInfo, ...]:
    parts, place = num_ranks // copies, rank % (num_ranks // copies)
    boxes = []
    for rows, *more in SHAPES:
        step = -(-rows // parts)
        low, high = min(rows, place * step), min(rows, (place + 1) * step)
        boxes.append(Box((low, *(0 for _ in more)), (high - low, *more)))
    return tuple(
        ShardInfo(
            f"model.layers.{i // 10}.block.w{i % 10}", "float32", SHAPES[i % 10], boxes[i % 10]
        )
        for i in range(num_tensors)
    )


def descriptions(
    names: RankNames, num_ranks: int, num_tensors: int, copies: int
) -> list[tuple[RankDescription, int]]:
    """Returns what each rank sends first.

    Ranks differ in their boxes alone. So those of one layer are described again for each rank.
    """
    first = describe_names(names)
    paths = {fqn: path for fqn, path in names.paths.items() if fqn not in names.objects}
    of_others = names._replace(objects=(), paths=paths)
    others = describe_names(of_others)
    sent = []
    for rank in range(num_ranks):
        few = RankNames(shard_infos(rank, num_ranks, min(10, num_tensors), copies), (), (), {})
        mine = describe_names(few)
        which = np.frombuffer(zlib.decompress(mine.which), np.uint32)[np.arange(num_tensors) % 10]
        same = {"boxes": mine.boxes, "which": zlib.compress(which.tobytes(), 1)}
        whole = others._replace(**same) if rank else first
        if rank in (1, num_ranks // 2, num_ranks - 1):
            infos = shard_infos(rank, num_ranks, num_tensors, copies)
            assert whole == describe_names(of_others._replace(infos=infos))
        sent.append((whole._replace(common=blake2b(whole.common).digest()[:16]), len(whole.common)))
    return sent


class Cost(NamedTuple):
    """What rank 0 does: seconds and bytes of a first save and of the next, and MB of its memory."""

    first_s: float
    first_nbytes: int
    next_s: float
    next_nbytes: int
    peak_mb: float
    index_mb: float


def ours(num_ranks: int, num_tensors: int, copies: int) -> Cost:
    infos = shard_infos(0, num_ranks, num_tensors, copies)
    paths = {info.fqn: tuple(info.fqn.split(".")) for info in infos}
    names = RankNames(infos, ("step",), (("step", False),), {**paths, "step": ("step",)})
    sent = [pickle.dumps(d) for d in descriptions(names, num_ranks, num_tensors, copies)]
    common = describe_names(names).common  # all ranks have the same
    digest = blake2b(common).digest()[:16]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = memory_mb("VmRSS")
    began = time.perf_counter()
    with no_gc():  # as `agree` does
        short = [pickle.loads(s)[0] for s in sent]
        assert all(one.common == digest for one in short)
        told = [one._replace(common=common) for one in short]
        tasks, head = assign(told)
    tasks_nbytes = sum(len(pickle.dumps(t, protocol=4)) for t in tasks)
    files = plan_rank_files(0, [infos[i] for i in tasks[0].shards])
    planned = time.perf_counter() - began
    layout = SaveLayout(
        names, tasks[0], files, head, ReplicaProof(tasks[0].replicas, names.infos, Proof.TRUST)
    )
    del tasks, told, short
    shares = {infos[i].fqn: 1 for i in layout.task.shards}
    parts = [
        [RankFile(f"__{r}_0.distcp", 1000, 1, (), ((900, 100),) if r == 0 else (), {})]
        for r in range(num_ranks)
    ]
    attempt = str(uuid.uuid4())
    with tempfile.TemporaryDirectory() as folder:
        target = open_destination(Path(folder) / "step-00000001")
        with target.stage(attempt, False) as staged:
            for rank in range(num_ranks):  # the files that the ranks wrote
                (Path(staged.folder) / f"__{rank}_0.distcp").write_bytes(bytes(1000))
            results = [pickle.dumps(p, protocol=4) for p in parts]
            began = time.perf_counter()
            parts = [pickle.loads(r) for r in results]
            prints = _fingerprints(layout, [parts[0][0]._replace(shares=shares)])
            places = {"step": ItemLocation("__0_0.distcp", 900, 100)}
            index = write_index(staged, head.template.pieces(places, attempt, lambda name: name))
            tensors = _seal(head, prints, parts)
            commit(staged, describe(target, staged, index, parts, tensors, {}), index)
            again = time.perf_counter() - began
    # the fingerprints, by exclusive-or on the way: what rank 0 receives does not grow with the
    # ranks
    reduced = 8 * num_tensors
    return Cost(
        planned + again,
        sum(map(len, sent)) + tasks_nbytes,
        again,
        sum(map(len, results)) + reduced,
        memory_mb("VmHWM") - before,
        index.nbytes / 1e6,
    )


def memory_mb(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def stock(num_ranks: int, num_tensors: int) -> tuple[float, int]:
    plans = []
    for rank in range(num_ranks):
        items = [
            WriteItem(
                MetadataIndex(o.fqn, torch.Size(o.box.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(o.box.offsets), torch.Size(o.box.sizes)),
                    TensorProperties(torch.float32),
                    torch.Size(o.shape),
                ),
            )
            for o in shard_infos(rank, num_ranks, num_tensors)
        ]
        plans.append(pickle.dumps(SavePlan(items), protocol=4))
    began = time.perf_counter()
    _, metadata = create_default_global_save_plan([pickle.loads(p) for p in plans])
    pickle.dumps(metadata)
    return time.perf_counter() - began, sum(map(len, plans))


def proof(num_ranks: int, num_tensors: int) -> tuple[float, float, int]:
    """Returns, of the proof of a load, seconds to make a rank's parts, and to join what it gets,
    and the bytes that it gets."""
    numbers = {info.fqn: number for number, info in enumerate(shard_infos(0, 1, num_tensors))}
    nbytes = 1 << 20
    sizes = dict.fromkeys(numbers, nbytes * num_ranks)
    received, mine = [], 0.0
    for rank in range(num_ranks):
        pieces = {n: HashedRanges([HashedRange(rank * nbytes, nbytes, rank, 0)]) for n in numbers}
        began = time.perf_counter()
        dealt = deal_rows(share_rows(TensorHashes(pieces, {}, sizes), numbers), num_ranks)
        mine += time.perf_counter() - began
        received.append(dealt[0])
    own = list(sizes.values())[::num_ranks]
    began = time.perf_counter()
    found = join_rows(np.concatenate(received), np.array(own, np.uint64))
    joined = time.perf_counter() - began
    assert len(found.fingerprints) == len(own) and None not in found.fingerprints.values()
    return mine / num_ranks, joined, sum(part.nbytes for part in received)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=1)
    args = parser.parse_args()
    print(
        "| ranks | first save s | MB sent | next save s | KB sent | memory MB | `.metadata` MB |"
        " stock, every save, s | MB sent |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    alone = multiprocessing.get_context("spawn")  # a new process each, for its memory
    for num_ranks in args.ranks:
        with ProcessPoolExecutor(1, mp_context=alone) as pool:
            cost = pool.submit(ours, num_ranks, args.tensors, args.copies).result()
        torch_s, torch_mb = "–", "–"
        if num_ranks <= MOST_PLAYED:
            seconds, sent = stock(num_ranks, args.tensors)
            torch_s, torch_mb = f"{seconds:.2f}", f"{sent / 1e6:.0f}"
        print(
            f"| {num_ranks} | {cost.first_s:.2f} | {cost.first_nbytes / 1e6:.1f} | {cost.next_s:.3f}"
            f" | {cost.next_nbytes / 1e3:.0f} | {cost.peak_mb:.0f} | {cost.index_mb:.0f} | {torch_s}"
            f" | {torch_mb} |",
            flush=True,
        )
    print(
        "\n| ranks | proof of a load: parts of a rank, s | what it joins, s | KB |\n|---:|---:|---:|---:|"
    )
    for num_ranks in (n for n in args.ranks if n <= MOST_PLAYED):
        mine, joined, nbytes = proof(num_ranks, args.tensors)
        print(f"| {num_ranks} | {mine:.4f} | {joined:.4f} | {nbytes / 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    main()
