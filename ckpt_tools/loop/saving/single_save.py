"""Saves one checkpoint at a path, without a run and without a manager.

Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tools.core.laps import Laps
from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import printable
from ckpt_tools.formats.base import new_attempt
from ckpt_tools.formats.registry import refuse_file_name
from ckpt_tools.loop.saving.collect import Collector, SaveRequest
from ckpt_tools.loop.saving.replicas import Proof
from ckpt_tools.loop.saving.save import Save, SaveReport, write
from ckpt_tools.loop.state.archives import ReadBack
from ckpt_tools.loop.state.device_statistics import measure_on_device
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.ranks.gloo import GlooGroup


@checked(names_only=("only", "files"))
def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    overwrite: bool = False,
    only: str | Callable[[str], bool] | None = None,
    files: Mapping[str, bytes] | Callable[[], Mapping[str, bytes]] | None = None,
    metrics: Mapping[str, float] | None = None,
    statistics: bool = False,
    replicas: str = Proof.CHECK,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> SaveReport:
    """Saves a state as one checkpoint, and returns when it is durable.

    All ranks call it with the same arguments. The checkpoint appears in one step once it is
    complete. `ckpt_tools.load(path, state)` and stock `dcp.load` read it.

    Args:
        path: a new directory that all ranks share, or a URL such as `s3://bucket/checkpoint`.
        state: modules, optimizers, other objects with `state_dict`, tensors and plain values by
            name, as `CheckpointManager.save` takes them.
        overwrite: replace a checkpoint at that path, once the new one is complete.
        only, files, metrics: as for `CheckpointManager.save`.
        statistics: measure every tensor, as for `CheckpointManager`.
        replicas: `"check"` compares the copies of parameters and optimizer states that several
            ranks hold, and refuses a difference. `"trust"` does not compare them.
        jobs: threads of this rank; the processors of the machine, at most 4, if None.
        storage_options: of the object store, as fsspec takes them.
        process_group: the ranks that save together; all if None. Without an initialised
            torch.distributed, this process alone.
        timeout_s: how long ranks wait for each other before the missing one is named.

    Raises:
        PlanError: the state has something that no load could restore; or the path has the suffix
            of a file.
        StorageError: the path exists already, or it cannot be written.
        PeerError: another rank failed; nothing is visible then.
    """
    refuse_file_name(path)
    proof = Proof.of(replicas)
    group = GlooGroup(timeout_s, process_group)
    try:
        group.meet("save", f"save({os.fspath(path)!r}{', overwrite=True' * overwrite})")
        with torch.no_grad():
            what = printable(os.path.basename(os.fspath(path).rstrip("/")))
            request = SaveRequest(what, False, state, only, files, metrics, statistics)
            found = Collector(group, proof).collect(request, Laps())
            extras = found.extras
            with group.phase("copy the state"):
                ReadBack().check(found.objects)
                if statistics:
                    extras = replace(extras, measured=measure_on_device(found.tensors))
                memory = Stager().live(found.tensors).wait()
        target = open_destination(path, storage_options)
        step = number_in(target.url.rstrip("/").rpartition("/")[2])
        attempt = group.broadcast(new_attempt(), "begin")
        num_jobs = num_threads(jobs, is_beside_training=True)
        one = Save(step, found.layout, found.objects, overwrite, extras)
        report, *_ = write(group, target, one, [memory], attempt, num_jobs)
        return report
    finally:
        group.close()
