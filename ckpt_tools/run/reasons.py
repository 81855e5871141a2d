"""Why a step stays as it is, whatever a rule says: a pin, a link, or files of somebody else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckpt_tools.core.checksum import hex64
from ckpt_tools.errors import printable
from ckpt_tools.formats.dcp.format import is_data_file
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.step import Step

MAX_NAMES = 3  # that a message shows


def reason_to_stay(
    root: RunRoot,
    step: Step,
    links: Sequence[tuple[str, str]],
    name: str = "",
    with_host: bool = False,
) -> str | None:
    """Returns why a step must stay; None if it may be removed.

    Args:
        root: of the run.
        step: the step.
        links: of the root.
        name: under which it lies now, if that is not its own.
        with_host: files that the job's own host has added are a reason, too.
    """
    if step.is_pinned:
        return f"it is pinned; ckpt pin --remove {printable(str(step.path))} lets it go"
    own = os.path.join(os.path.realpath(step.path), "")
    for link, target in links:
        if os.path.join(target, "").startswith(own) and not link.startswith(own):
            return f"the link {printable(os.path.relpath(link, Path(own).parent))} leads to it"
    assert step.manifest is not None
    if foreign := files_to_keep(root, name or step.name, step.manifest, with_host):
        more = f" and {len(foreign) - MAX_NAMES} more" if len(foreign) > MAX_NAMES else ""
        return (
            "it holds files that no save wrote:"
            f" {printable(', '.join(foreign[:MAX_NAMES]))}{more}; move them to let it go"
        )
    return None


def files_to_keep(
    root: RunRoot, name: str, manifest: Manifest, with_host: bool = False
) -> list[str]:
    """Returns the files of a checkpoint that no save wrote.

    They are those that its manifest does not name, and small files (`files=` of a save) that
    somebody has changed since.

    Args:
        root: of the run.
        name: of the directory of the checkpoint.
        manifest: of the checkpoint.
        with_host: also those that the host of the job has added.
    """
    listed = {*manifest.files, *(manifest.index or ())[:1]}
    foreign = root.foreign_files(name, listed, with_host)
    small = {n: s for n, s in manifest.files.items() if not is_data_file(n)}
    if not small:
        return foreign
    store = root.step_store(name)
    try:
        sizes = store.list_files()
        same = {n: s.nbytes for n, s in small.items() if sizes.get(n) == s.nbytes}
        crcs = hash_files(store, same)
    finally:
        store.close()
    changed = {n for n, crc in crcs.items() if hex64(crc) != small[n].crc64nvme}
    return foreign + sorted(changed | {n for n in small if n in sizes and n not in same})
