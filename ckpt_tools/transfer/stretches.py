"""Proves the bytes of tensors that are cut, joined, reordered or cast on the way.

The fingerprint of a tensor is that of its stretches, one after the other. So the results of a cut
tensor prove its bytes, if they are all of it, and sealed tensors prove what they are joined to.
A tensor that the results cannot prove is read once more.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.catalog import RAW, Catalog, TensorEntry
from ckpt_tools.core.checksum import join_crc64
from ckpt_tools.core.plan import Plan
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.transfer.prove import SealedFingerprint, hash_tensors, prove_fingerprints


class Stretch(NamedTuple):
    """Elements that follow each other in a tensor, and also in a stored tensor.

    Attributes:
        stored: name of the stored tensor.
        start: of the elements in the row-major order of the stored tensor.
        at: of the elements in the row-major order of the tensor.
        number: of elements; 0 for elements that do not follow each other, and for those beside
            computed ones. They prove nothing.
    """

    stored: str
    start: int
    at: int
    number: int


def stretches_of(entry: TensorEntry) -> list[Stretch]:
    """Returns the parts of stored tensors that a tensor was made of, in order."""
    found = [
        Stretch(relation.left.name, relation.left.offset, relation.right.offset, relation.numel)
        if relation.is_stretch and not entry.is_computed
        else Stretch(relation.left.name, 0, relation.right.offset, 0)
        for relation in entry.relations
    ]
    return sorted(found, key=lambda stretch: stretch.at)


class StretchProofs(NamedTuple):
    """What proves the sealed tensors that a plan cuts, joins or reorders.

    Attributes:
        sealed: their fingerprints, by their stored names.
        nbytes: their bytes.
        cut: the results that prove a stored tensor, one after the other, with their bytes.
        joined: the stored tensors that prove a result, one after the other.
        apart: the stored tensors that no result proves: also those that are cast, if their format
            keeps no checksums.
    """

    sealed: Mapping[str, SealedFingerprint]
    nbytes: Mapping[str, int]
    cut: Mapping[str, Sequence[tuple[str, int]]]
    joined: Mapping[str, Sequence[str]]
    apart: Sequence[str]


def stretch_proofs(
    manifest: Manifest | None,
    source: Source,
    catalog: Catalog,
    plan: Plan,
    altered: Container[str] = (),
) -> StretchProofs:
    """Returns what proves the sealed tensors that a plan cuts, joins, reorders or changes.

    Args:
        manifest: the source's.
        source: the checkpoint.
        catalog: the view of it that the plan was made for.
        plan: results that are cast prove nothing.
        altered: results with other values than those read. They prove nothing either.
    """
    taken: dict[str, list[tuple[Stretch, str]]] = {}  # by stored tensor: of which results
    joined: dict[str, Sequence[str]] = {}
    stored, sealed = source.catalog.tensors, dict[str, SealedFingerprint]()
    tensors = [t for t in plan.tensors if not t.is_object]
    same = {t.fqn for t in tensors if t.src_dtype is t.dst_dtype and t.fqn not in altered}
    results = [t for t in tensors if catalog.tensors[t.fqn].relations]
    bare = [catalog.tensors[t.fqn] for t in tensors if t.fqn not in same]
    bare = [entry for entry in bare if not entry.relations and _lacks_checksums(entry)]
    stretches = {t.fqn: stretches_of(catalog.tensors[t.fqn]) for t in results}
    if (results or bare) and manifest is not None:
        sealed = {
            fqn: SealedFingerprint(fqn, int(tensor.fingerprint, 16))
            for fqn, tensor in manifest.tensors.items()
            if fqn in stored
        }
    nbytes = {fqn: stored[fqn].nbytes for fqn in sealed}
    for tensor in results:
        is_same = tensor.fqn in same
        for stretch in stretches[tensor.fqn]:
            if stretch.stored in sealed:
                found = stretch if is_same else Stretch(stretch.stored, 0, 0, 0)
                taken.setdefault(stretch.stored, []).append((found, tensor.fqn))
        parts = [s.stored for s in stretches[tensor.fqn] if _is_all(s, stored)]
        if is_same and len(parts) == len(stretches[tensor.fqn]) and sealed.keys() >= set(parts):
            joined[tensor.fqn] = parts
    proved = {fqn for fqn, found in taken.items() if all(name in joined for _, name in found)}
    cut = {
        fqn: [(name, s.number * stored[fqn].dtype.itemsize) for s, name in sorted(found)]
        for fqn, found in taken.items()
        if fqn not in proved and _tile(found, stretches, math.prod(stored[fqn].shape))
    }
    apart = [fqn for fqn in taken if fqn not in proved and fqn not in cut]
    apart += sorted({entry.stored_name for entry in bare} & sealed.keys() - taken.keys())
    return StretchProofs(sealed, nbytes, cut, joined, apart)


def _lacks_checksums(entry: TensorEntry) -> bool:
    """Tells whether bytes of a stored tensor have no checksum of their own, as in safetensors."""
    extents = (chunk.extent for chunk in entry.chunks)
    return not entry.is_computed and any(e.packing == RAW and e.crc32 is None for e in extents)


def _is_all(stretch: Stretch, stored: Mapping[str, TensorEntry]) -> bool:
    """Tells whether a stretch is all of a stored tensor."""
    held = stored.get(stretch.stored)
    return held is not None and not stretch.start and stretch.number == math.prod(held.shape)


def _tile(
    found: Sequence[tuple[Stretch, str]], stretches: Mapping[str, Sequence[Stretch]], numel: int
) -> bool:
    """Tells whether results are one stretch of a tensor each, and together all of it."""
    end = 0
    for stretch, name in sorted(found):
        if stretch.start != end or not stretch.number or len(stretches[name]) != 1:
            return False
        end += stretch.number
    return end == numel


def prove_apart(
    source: Source, proofs: StretchProofs, names: Sequence[str], jobs: int, tiles: tuple[int, int]
) -> None:
    """Reads sealed tensors once more, and compares their fingerprints.

    Args:
        source: the checkpoint.
        proofs: from `stretch_proofs`.
        names: of those that no result proves.
        jobs: threads.
        tiles: see `tile_bytes`.

    Raises:
        IntegrityError: a tensor is not what was written.
    """
    tensors = [source.catalog.tensors[fqn] for fqn in names]
    if not tensors:
        return
    located = source.format.locate(source.store, tensors)
    expected = {fqn: proofs.sealed[fqn] for fqn in names}
    prove_fingerprints(source, expected, hash_tensors(tensors, source.store, located, jobs, tiles))


def prove_stretches(source: Source, proofs: StretchProofs, computed: Mapping[str, int]) -> None:
    """Compares the fingerprints of results with those of the sealed tensors that they consist of.

    Args:
        source: the checkpoint.
        proofs: from `stretch_proofs`.
        computed: fingerprints of the results.

    Raises:
        IntegrityError: a tensor is not what was written, on the disk, or on the way.
    """
    for fqn, results in proofs.cut.items():
        crc = join_crc64((computed[name], nbytes) for name, nbytes in results)
        prove_fingerprints(source, {fqn: proofs.sealed[fqn]}, {fqn: crc})
    for name, parts in proofs.joined.items():
        crc = join_crc64((proofs.sealed[fqn].crc64, proofs.nbytes[fqn]) for fqn in parts)
        prove_fingerprints(source, {name: SealedFingerprint(name, crc)}, computed)
