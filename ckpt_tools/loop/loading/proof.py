"""Compares what a load has read with the fingerprints in the manifest.

A chunk's own CRC-32 finds damage in it. Only a fingerprint finds that another chunk, or another
step's file, is in its place. Formats without checksums, such as safetensors, have nothing else.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Plan, TensorPlan
from ckpt_tools.engine.fingerprints import (
    Fingerprints,
    TensorHashes,
    deal_rows,
    join_rows,
    share_rows,
)
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.schedule import Tile
from ckpt_tools.errors import IntegrityError, PlanError, printable
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.ranks.gloo import GlooGroup


class _Sealed(NamedTuple):
    """A tensor in the manifest: its name there, its fingerprint, and its number of bytes."""

    fqn: str
    crc64: int
    nbytes: int


class LoadProof:
    """The sealed fingerprints of a checkpoint, and those of the bytes that a load has read.

    A cast tensor is not compared: its fingerprint is that of the stored bytes.
    """

    def __init__(
        self,
        manifest: Manifest | None,
        stored: Catalog,
        catalog: Catalog,
        is_joint: bool = False,
    ) -> None:
        """Takes the manifest of a checkpoint, and the names of its tensors.

        Args:
            manifest: with the fingerprints; None if there is none.
            stored: the catalog with the names of the manifest.
            catalog: the catalog with the names of the load.
            is_joint: `prove` will be called, with a group of several ranks.
        """
        self.is_joint = is_joint
        self._checks: list[Callable[[Collection[str]], int]] = []
        self._num_chunks: dict[str, int] = {}  # that wait for `prove`, by stored name
        self._read = Fingerprints()
        known = {} if manifest is None else manifest.tensors
        self._manifest = {  # the same on all ranks, whatever their states have
            name: _Sealed(name, int(known[name].fingerprint, 16), entry.nbytes)
            for name, entry in stored.tensors.items()
            if name in known
        }
        self._sealed = {
            name: self._manifest[entry.stored_name]
            for name, entry in catalog.tensors.items()
            if entry.stored_name in self._manifest
            and stored.tensors[entry.stored_name].chunks == entry.chunks
        }

    def has(self, name: str) -> bool:
        """Tells whether a tensor has a sealed fingerprint."""
        return name in self._sealed

    def named(self, names: Mapping[str, str]) -> ShareProof:
        """Returns the proof of one reading; `names` has stored names by names that differ."""
        return ShareProof(self._sealed, names)

    def absorb(self, part: ShareProof) -> None:
        """Adds what a reading has noted."""
        self._read.absorb(part.noted())

    def check_later(
        self, num_chunks: Mapping[str, int], check: Callable[[Collection[str]], int]
    ) -> None:
        """Takes a function that checks the CRC-32 of chunks that a reading has not checked.

        Args:
            num_chunks: number of these chunks by stored name.
            check: called with the stored names of tensors that no fingerprint proves. Returns the
                number of proved chunks.
        """
        self._checks.append(check)
        for name, count in num_chunks.items():
            self._num_chunks[name] = self._num_chunks.get(name, 0) + count

    def prove(self, group: GlooGroup, where: str) -> int:
        """Compares the fingerprints of tensors that all ranks have read together.

        Chunks of other tensors are compared with their CRC-32, if that has not been done.

        Returns:
            The number of chunks that were proved only now.

        Raises:
            IntegrityError: a tensor is not the sealed one.
        """
        if group.size == 1:
            return 0  # each reading was compared
        what = f"compare the fingerprints of {where}"
        wrong, differing = self._joined(group, what, where)
        unproved = {name for name, known in self._sealed.items() if known.fqn in wrong}
        num_proved = sum(n for name, n in self._num_chunks.items() if name not in unproved)
        if not wrong:
            return num_proved
        with group.phase(what):  # a CRC-32 also names the file
            num_proved += sum(check(unproved) for check in self._checks)
        with group.phase(what):
            if group.rank == 0:
                _compare(self._manifest, wrong, where)
                _refuse_differing(differing, where)
        return num_proved

    def _joined(
        self, group: GlooGroup, what: str, where: str
    ) -> tuple[dict[str, int | None], list[str]]:
        """Returns the tensors whose parts do not make the sealed fingerprint, on every rank.

        Each rank joins the parts of its share of the names. So no rank gets the parts of all. The
        list has those of which two ranks have read other bytes.
        """
        order = sorted(self._manifest)
        code = zlib.crc32(repr(order).encode("utf-8", "surrogatepass"))
        highest = group.max(np.array([code, -code], np.int64), what)
        if highest[0] != -highest[1]:
            raise PlanError(f"ranks read different manifests of {printable(where)}")
        numbers = {name: number for number, name in enumerate(order)}
        numbers = {name: numbers[known.fqn] for name, known in self._sealed.items()}
        mine = order[group.rank :: group.size]
        parts = [np.zeros((0, 5), np.uint64)] * group.size
        wrong: dict[str, int | None] = {}
        differing: list[str] = []
        with group.phase(what):
            rows = share_rows(self._read.noted, numbers)
            parts = deal_rows(rows, group.size)
        parts = group.deal(parts, what)
        with group.phase(what) as votes:
            sizes = np.array([self._manifest[name].nbytes for name in mine], np.uint64)
            joined = join_rows(np.concatenate(parts), sizes)
            for number, crc in joined.fingerprints.items():
                if crc != self._manifest[mine[number]].crc64:
                    wrong[mine[number]] = crc
            differing = [mine[number] for number in joined.differing]
            votes.mine = bool(wrong)
        if votes.num_yes:
            told = group.all_gather((wrong, differing), what)
            wrong = {name: crc for some, _ in told for name, crc in some.items()}
            differing = sorted(name for _, names in told for name in names)
        return wrong, differing


class ShareProof:
    """The fingerprints of one reading."""

    def __init__(self, sealed: Mapping[str, _Sealed], names: Mapping[str, str]) -> None:
        self._sealed, self._names = sealed, names
        self._read, self._lock = Fingerprints(), threading.Lock()

    def whole(self, plan: Plan) -> set[str]:
        """Returns the names of a plan whose tensors this reading proves alone."""
        return {t.fqn for t in plan.tensors if t.is_complete and self._wants(t)}

    def parts(self, plan: Plan) -> set[str]:
        """Returns the names of a plan's tensors that are proved if other ranks note the rest."""
        return {t.fqn for t in plan.tensors if self._wants(t) and not t.is_complete}

    def note(self, tile: Tile, data: Bytes) -> None:
        """Notes the values of a tile."""
        if not self._wants(tile.tensor):
            return
        found = Fingerprints()
        found.add(tile, crc64nvme(data.data), data)
        with self._lock:
            self._read.absorb(found.noted)

    def forget(self, names: Collection[str]) -> None:
        """Forgets tensors that are read again."""
        for table in self._read.noted:
            for name in names:
                table.pop(name, None)

    def prove(self, names: Collection[str], where: str) -> None:
        """Compares the fingerprints of tensors that were read in full.

        Raises:
            IntegrityError: a tensor is not the sealed one.
        """
        found = self._read.join()
        sealed = {name: self._sealed[self._names.get(name, name)] for name in names}
        _compare(sealed, {name: found[name] for name in names if name in found}, where)

    def noted(self) -> TensorHashes:
        """Returns what was noted, by stored names."""
        read, names = self._read.noted, self._names
        return TensorHashes(
            {names.get(name, name): found for name, found in read.pieces.items()},
            {names.get(name, name): found for name, found in read.shares.items()},
            {names.get(name, name): found for name, found in read.sizes.items()},
        )

    def _wants(self, tensor: TensorPlan) -> bool:
        is_sealed = self._names.get(tensor.fqn, tensor.fqn) in self._sealed
        return is_sealed and tensor.src_dtype is tensor.dst_dtype


def _refuse_differing(names: Sequence[str], where: str) -> None:
    """Refuses tensors of which ranks have read other bytes.

    Raises:
        IntegrityError: with the first of them.
    """
    if names:
        more = f", and {len(names) - 1} more tensors" * (len(names) > 1)
        raise IntegrityError(
            f"ranks have read different bytes of one tensor: {printable(names[0])!r}{more}"
            f" (in {printable(where)})",
            hint="each of them has to see the same files; else the memory of a rank, or the way to"
            " it, is damaged",
        )


def _compare(sealed: Mapping[str, _Sealed], found: Mapping[str, int | None], where: str) -> None:
    for name, crc in found.items():
        known = sealed.get(name)
        if known is not None and crc is not None and crc != known.crc64:
            raise IntegrityError(
                f"a tensor is not what was sealed: expected fingerprint {hex64(known.crc64)}, got"
                f" {hex64(crc)} ({printable(known.fqn)!r} in {printable(where)})",
                hint="ckpt verify names what is damaged; restore the files, or take another step",
            )
