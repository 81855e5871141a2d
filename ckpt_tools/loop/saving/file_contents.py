"""Decides what goes into each file of a rank: the bytes of its shards, or a file that is known.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.loop.saving.known_files import (
    IMPOSSIBLE,
    KnownFile,
    LinkSource,
    ResumedStep,
    Unchanged,
)
from ckpt_tools.loop.saving.save import SaveLayout
from ckpt_tools.loop.saving.write import RankFile
from ckpt_tools.loop.state.shard_info import FileKind
from ckpt_tools.publish.base import Destination


class FileContent(NamedTuple):
    """What goes into a file.

    Attributes:
        given: the bytes of its shards, or where they are already.
        checksums: one of each shard, if the next save may link the file; else none.
    """

    given: Sequence[memoryview] | Unchanged
    checksums: tuple[int, ...] = ()


class KnownFiles:
    """The files of shards that stay the same, of the last save that had each of them.

    Attributes:
        resumed: until the first save is committed, the step that was loaded.
    """

    resumed: ResumedStep | None = None

    def __init__(self) -> None:
        self._known: dict[FileKind, KnownFile] = {}
        self._can_link = True  # as far as is known

    def frozen(
        self,
        layout: SaveLayout,
        tensors: Sequence[torch.Tensor],
        checksums: tuple[int, ...],
        measures: bool,
    ) -> Unchanged | None:
        """Returns the frozen shards of a save, if the step before has them; else None.

        Args:
            layout: of the save.
            tensors: that this rank writes.
            checksums: of the frozen ones.
            measures: the save has statistics.
        """
        known = self._find(FileKind.FROZEN, layout, checksums, measures)
        if known is None:
            return None
        return Unchanged(known, [tensors[n] for n in layout.numbers_in(FileKind.FROZEN)])

    def contents(
        self,
        layout: SaveLayout,
        memory: Sequence[memoryview],
        frozen: Unchanged | None,
        frozen_checksums: tuple[int, ...],
        measures: bool,
        jobs: int,
    ) -> list[FileContent]:
        """Returns what goes into each file of this rank.

        Args:
            layout: of the save.
            memory: the copied shards, in the order of `SaveLayout.staged_plans`.
            frozen, frozen_checksums: the frozen shards if they are not copied, and their checksums.
            measures: the save has statistics.
            jobs: threads for the checksums of settled shards.
        """
        found: dict[FileKind, FileContent] = {}
        for plan in layout.staged_plans(frozen is None):
            copies, memory = memory[: len(plan.numbers)], memory[len(plan.numbers) :]
            found[plan.kind] = FileContent(copies)
            if plan.kind == FileKind.SETTLED and self._can_link:
                with ThreadPoolExecutor(jobs, "ckpt-prove") as pool:
                    checksums = tuple(pool.map(crc64nvme, copies))
            elif plan.kind == FileKind.FROZEN:
                checksums = frozen_checksums
            else:
                continue
            known = self._find(plan.kind, layout, checksums, measures)
            if known is None and self.resumed is not None and self._can_link and checksums:
                shards = layout.shards_in(plan.kind)
                known = self.resumed.find(plan, shards, checksums, copies, jobs, measures)
            given = copies if known is None else Unchanged(known, copies=copies)
            found[plan.kind] = FileContent(given, checksums)
        if frozen is not None:
            found[FileKind.FROZEN] = FileContent(frozen, frozen_checksums)
        return [found[plan.kind] for plan in layout.files]

    def _find(
        self, kind: FileKind, layout: SaveLayout, checksums: tuple[int, ...], measures: bool
    ) -> KnownFile | None:
        """Returns the file of the step before, if it has the same shards and values."""
        known = self._known.get(kind)
        if (
            known is None
            or not checksums
            or not self._can_link
            or known.checksums != checksums
            or known.shards != layout.shards_in(kind)
            or (measures and not known.part.moments)
        ):
            return None
        return known

    def remember(
        self,
        layout: SaveLayout,
        contents: Sequence[FileContent],
        parts: Sequence[RankFile],
        step: str,
        target: Destination,
        attempt: str,
    ) -> None:
        """Notes the files that the next save may link.

        Args:
            layout, contents: of the save that is committed.
            parts: the files as they were written or linked.
            step, target, attempt: where they are.
        """
        if len(layout.files) > 1:  # a save of a part of the state may have no such file
            self.resumed = None
        for plan, (given, checksums), part in zip(layout.files, contents, parts, strict=True):
            self._can_link = self._can_link and part.how != IMPOSSIBLE
            if plan.kind == FileKind.CHANGING or not checksums:
                self._known.pop(plan.kind, None)
                continue
            if isinstance(given, Unchanged) and part.linked:
                known = given.known._replace(is_resumed=False)
            else:
                written = part._replace(how="", remark="")
                known = KnownFile(layout.shards_in(plan.kind), checksums, (), written)
            source = LinkSource(step, target, attempt, part.identity)
            self._known[plan.kind] = known.and_in(source)
