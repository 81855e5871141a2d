"""Reads tensors that are needed as a whole, such as scales or a matrix of an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Slot, Target, plan_transfer
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.kernels import cast
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import FillSink
from ckpt_tools.errors import IntegrityError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import MemoryStore
from ckpt_tools.transfer.prove import prove_replicas

Singles = npt.NDArray[np.float32]
_SINGLE = BY_NAME["float32"]


def read_singles(source: Source, entry: TensorEntry, manifest: Manifest | None) -> Singles:
    """Returns a tensor as float32, in its shape.

    The arguments and errors are those of `read_small`.
    """
    data = read_small(source, [entry], manifest)[entry.fqn]
    singles = np.empty(whole(entry.shape).numel * _SINGLE.itemsize, np.uint8)
    cast(np.frombuffer(data, np.uint8), entry.dtype, singles, _SINGLE)
    return singles.view(np.float32).reshape(entry.shape)


def read_small(
    source: Source, entries: Sequence[TensorEntry], manifest: Manifest | None
) -> dict[str, bytes]:
    """Returns the bytes of tensors, row-major, by their names.

    Args:
        source: the checkpoint.
        entries: the tensors, under any names.
        manifest: of the checkpoint, if it is sealed.

    Raises:
        IntegrityError: the values are not what was sealed, have not the checksum of their archive,
            or differ between ranks.
    """
    if not entries:
        return {}
    sealed = manifest.tensors if manifest is not None else {}
    unsealed = [entry for entry in entries if entry.stored_name not in sealed]
    prove_replicas(source, unsealed, jobs=1)
    data = {entry.fqn: bytearray(entry.nbytes) for entry in entries}
    slots = {entry.fqn: (Slot(whole(entry.shape), entry.fqn, 0),) for entry in entries}
    target = Target("small tensors", {e.fqn: e.nbytes for e in entries}, slots)
    plan = plan_transfer(Catalog("small tensors", {e.fqn: e for e in entries}), target)
    located = source.format.locate(source.store, entries)
    jobs = num_threads(None) if len(entries) > 1 else 1
    batches = schedule(plan, located, *tile_bytes(DEFAULT_MEMORY_BYTES, jobs))
    sink = FillSink(MemoryStore({fqn: memoryview(found) for fqn, found in data.items()}))
    own = {entry.fqn for entry in unsealed}
    watch = CrcWatch(
        read_whole(plan, located, [e.fqn for e in entries if e.fqn not in own]), source.store
    )
    execute_batches(
        batches, source.store, sink, jobs, looks_ahead=len(entries) > 1, crc_watch=watch
    )
    watch.prove({})
    for entry in entries:
        if entry.fqn in own:
            continue
        expected = sealed[entry.stored_name].fingerprint
        if hex64(crc64nvme(data[entry.fqn])) != expected:
            raise IntegrityError(
                f"a tensor is not what was sealed: expected fingerprint {expected}, got"
                f" {hex64(crc64nvme(data[entry.fqn]))} ({printable(entry.fqn)!r})",
                hint="ckpt verify names what is damaged; restore the file",
            )
    return {fqn: bytes(found) for fqn, found in data.items()}
