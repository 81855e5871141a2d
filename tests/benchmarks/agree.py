"""What a save costs besides its bytes, at many ranks: the plan, what ranks tell each other, the
metadata.

    python tests/benchmarks/agree.py [--ranks 64 128 256 512 1024] [--tensors 1000]

One process plays all ranks: it makes what each would send, measures it, and does rank 0's work on
it. The first save plans; the next ones, with an unchanged layout, do not. Beside it, what stock DCP
does on rank 0 in every save: gather all plans, join them (`create_default_global_save_plan`),
gather all results, pickle the metadata.
"""

import argparse
import pickle
import tempfile
import time
import uuid
from pathlib import Path

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
    join_rows,
    share_rows,
)
from ckpt_tools.formats.dcp.metadata import ItemLocation
from ckpt_tools.loop.saving.agreement import assign
from ckpt_tools.loop.saving.description import RankDescription, RankNames, describe_names
from ckpt_tools.loop.saving.replicas import Proof, ReplicaProof
from ckpt_tools.loop.saving.save import SaveLayout, _fingerprints, _seal
from ckpt_tools.loop.saving.write import RankFile, ShardInfo, commit, describe, plan_rank_files
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.storage import write_file

ROWS, COLUMNS = 4096, 64


def shard_infos(rank: int, num_ranks: int, num_tensors: int) -> tuple[ShardInfo, ...]:
    step = -(-ROWS // num_ranks)
    low, high = min(ROWS, rank * step), min(ROWS, (rank + 1) * step)
    box = Box((low, 0), (high - low, COLUMNS))
    return tuple(
        ShardInfo(f"model.layers.{i // 10}.block.w{i % 10}", "float32", (ROWS, COLUMNS), box)
        for i in range(num_tensors)
    )


def description(
    rank: int, num_ranks: int, num_tensors: int, paths: dict[str, tuple[str, ...]]
) -> RankDescription:
    infos = shard_infos(rank, num_ranks, num_tensors)
    more = {"step": ("step",)} if rank == 0 else {}
    return describe_names(RankNames(infos, (*more,), (("step", False),), {**paths, **more}))


def ours(num_ranks: int, num_tensors: int) -> tuple[float, int, float, int]:
    """Returns seconds and bytes on rank 0 of a first save, and of the second."""
    infos = shard_infos(0, num_ranks, num_tensors)
    paths = {info.fqn: tuple(info.fqn.split(".")) for info in infos}
    names = RankNames(infos, ("step",), (("step", False),), {**paths, "step": ("step",)})
    sent = [pickle.dumps(description(r, num_ranks, num_tensors, paths)) for r in range(num_ranks)]
    began = time.perf_counter()
    with no_gc():  # as `agree` does
        tasks, head = assign([pickle.loads(s) for s in sent])
    tasks_sent = [pickle.dumps(t, protocol=4) for t in tasks]
    files = plan_rank_files(0, [infos[i] for i in tasks[0].shards])
    planned = time.perf_counter() - began
    layout = SaveLayout(
        names, tasks[0], files, head, ReplicaProof(tasks[0].replicas, names.infos, Proof.TRUST)
    )
    shares = {info.fqn: 1 for info in infos}
    parts = [
        [RankFile(f"__{r}_0.distcp", 1000, 1, (), ((900, 100),) if r == 0 else (), {})]
        for r in range(num_ranks)
    ]
    attempt = str(uuid.uuid4())
    with tempfile.TemporaryDirectory() as folder:
        target = open_destination(Path(folder) / "step-00000001")
        with target.stage(attempt, False) as staged:
            for rank in range(num_ranks):  # the files that the ranks wrote
                write_file(staged.writable, f"__{rank}_0.distcp", bytes(1000))
            results = [pickle.dumps(p, protocol=4) for p in parts]
            began = time.perf_counter()
            parts = [pickle.loads(r) for r in results]
            prints = _fingerprints(layout, [parts[0][0]._replace(shares=shares)])
            places = {"step": ItemLocation("__0_0.distcp", 900, 100)}
            index = head.template.render(places, attempt, lambda name: name)
            tensors = _seal(head, prints, parts)
            commit(staged, describe(target, staged, index, parts, tensors, {}), index)
            again = time.perf_counter() - began
    # the fingerprints, by exclusive-or on the way: what rank 0 receives does not grow with the
    # ranks
    reduced = 8 * num_tensors
    return (
        planned + again,
        sum(map(len, sent + tasks_sent)),
        again,
        sum(map(len, results)) + reduced,
    )


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
    """Returns seconds on each rank, seconds and bytes on rank 0, of the proof of a load."""
    numbers = {info.fqn: number for number, info in enumerate(shard_infos(0, 1, num_tensors))}
    nbytes = -(-ROWS // num_ranks) * COLUMNS * 4
    sizes = dict.fromkeys(numbers, nbytes * num_ranks)
    sent, mine = [], 0.0
    for rank in range(num_ranks):
        pieces = {n: HashedRanges([HashedRange(rank * nbytes, nbytes, rank, 0)]) for n in numbers}
        began = time.perf_counter()
        sent.append(pickle.dumps(share_rows(TensorHashes(pieces, {}, sizes), numbers)))
        mine += time.perf_counter() - began
    began = time.perf_counter()
    rows = np.concatenate([pickle.loads(s) for s in sent])
    found = join_rows(rows, np.array(list(sizes.values()), np.uint64))
    assert len(found) == num_tensors and None not in found.values()
    return mine / num_ranks, time.perf_counter() - began, sum(map(len, sent))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tensors", type=int, default=1000)
    args = parser.parse_args()
    print(
        "| ranks | first save s | MB sent | next save s | KB sent | next / first | stock, every"
        " save, s | MB sent |\n|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for num_ranks in args.ranks:
        first, sent, again, resent = ours(num_ranks, args.tensors)
        torch_s, torch_sent = stock(num_ranks, args.tensors)
        print(
            f"| {num_ranks} | {first:.2f} | {sent / 1e6:.1f} | {again:.3f} | {resent / 1e3:.0f} |"
            f" {again / first:.3f} | {torch_s:.2f} | {torch_sent / 1e6:.0f} |",
            flush=True,
        )
    print(
        "\n| ranks | proof of a load: each rank, s | rank 0, s | MB sent |\n|---:|---:|---:|---:|"
    )
    for num_ranks in args.ranks:
        mine, joined, nbytes = proof(num_ranks, args.tensors)
        print(f"| {num_ranks} | {mine:.4f} | {joined:.2f} | {nbytes / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
