"""Why a step stays as it is, whatever a rule says: a pin, a link, or files of somebody else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckpt_tools.errors import printable
from ckpt_tools.publish.run_root import RunRoot
from ckpt_tools.publish.steps import Step

MAX_NAMES = 3  # that a message shows


def reason_to_stay(root: RunRoot, step: Step, links: Sequence[tuple[str, str]]) -> str:
    """Returns why a step must stay; "" if it may be removed."""
    if step.is_pinned:
        return f"it is pinned; ckpt pin --remove {printable(str(step.path))} lets it go"
    own = os.path.join(os.path.realpath(step.path), "")
    for link, target in links:
        if os.path.join(target, "").startswith(own) and not link.startswith(own):
            return f"the link {printable(os.path.relpath(link, Path(own).parent))} leads to it"
    if foreign := _foreign_files(root, step):
        more = f" and {len(foreign) - MAX_NAMES} more" if len(foreign) > MAX_NAMES else ""
        return (
            "it holds files that no save wrote:"
            f" {printable(', '.join(foreign[:MAX_NAMES]))}{more}; move them to let it go"
        )
    return ""


def _foreign_files(root: RunRoot, step: Step) -> list[str]:
    """Returns the files of a step that its manifest does not name."""
    assert step.manifest is not None
    listed = {*step.manifest.files, *(step.manifest.index or ())[:1]}
    return root.foreign_files(step.name, listed)
