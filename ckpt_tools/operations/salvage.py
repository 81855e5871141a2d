"""Writes the undamaged entries of a damaged checkpoint as a new checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.placements import reshard_boxes
from ckpt_tools.core.selection import keep
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import Request, Source, TargetTensor, whole_tensor
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.side_files import left_beside
from ckpt_tools.operations.verification import Verification
from ckpt_tools.publish.check_manifest import Problem
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.manifest import NUM_LOST
from ckpt_tools.transfer.options import Options, Path_
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer


@dataclass(frozen=True, slots=True)
class SalvageResult:
    """The result of `salvage`.

    Attributes:
        written: the result of the transfer.
        lost: names of the tensors and objects that are not in the result.
        problems: the reasons.
    """

    written: TransferResult
    lost: Sequence[str]
    problems: Sequence[Problem]


@checked(Options)
def salvage(src: Path_, dst: Path_, **options: Unpack[Options]) -> SalvageResult:
    """Writes the undamaged entries of a checkpoint as DCP, for the same number of ranks.

    safetensors stays safetensors. If DST is a .safetensors file, the tensors of other formats are
    written as safetensors, too.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        dst: the directory to write; a .safetensors file for one such file.
        **options: see `Options`.

    Raises:
        PlanError: nothing is left.
        FormatError: the index is unreadable, so the tensors cannot be located.
        CheckpointError: it cannot be read, or the destination cannot be written.
    """
    work = Verification(src, options)
    problems, _ = work.compare(quick=False) if work.manifest else work.examine_all(quick=False)
    catalog = work.require_catalog()
    unread = {**catalog.unread, **work.find_unread({p.fqn for p in problems}), **catalog.unknown}
    lost = sorted({p.fqn for p in problems if p.fqn} | unread.keys())
    problems = [*problems, *(Problem("", f"not read: {kind}", fqn) for fqn, kind in unread.items())]
    gone = set(lost)
    kept = keep(catalog, lambda fqn: fqn not in gone)
    if not kept.tensors and not kept.objects:
        raise PlanError(
            f"nothing is left of {len(catalog.tensors) + len(catalog.objects)} entries"
            f" ({printable(work.store.url)})"
        )
    source = Source(work.store.url, work.store, work.format, kept)
    target = open_destination(dst, options.get("storage_options"))
    form = safetensors if work.format is safetensors or target.url.endswith(".safetensors") else dcp
    request = _request(kept, form is dcp, target.url)
    written = transfer(
        TransferRequest(
            "salvage",
            source,
            kept,
            target,
            form,
            request,
            options,
            about={NUM_LOST: len(lost)},
            is_damaged=bool(problems),
        )
    )
    if form is safetensors and kept.objects:
        left = (
            f"{len(kept.objects)} objects stay behind: safetensors holds tensors; give a directory"
            " for all"
        )
        written = replace(written, notes=(*written.notes, left))
    written = replace(written, notes=(*written.notes, *left_beside(catalog)))
    return SalvageResult(written, lost, problems)


def _request(catalog: Catalog, is_dcp: bool, url: str) -> Request:
    if not is_dcp:
        tensors = [whole_tensor(t) for t in catalog.tensors.values()]
        name = url.rpartition("/")[2]
        is_file = name.endswith(".safetensors")
        return Request(
            tensors, file_name=name if is_file else "model.safetensors", with_index=not is_file
        )
    ranks = catalog.world_size or 1
    targets = [
        TargetTensor(
            t.fqn, t.dtype, t.shape, tuple(reshard_boxes([c.box for c in t.chunks], t.shape, ranks))
        )
        for t in catalog.tensors.values()
    ]
    return Request(
        targets, ranks, {o.fqn: o.extent.nbytes for o in catalog.objects.values()}, catalog.paths
    )
