"""Reads a tensor that is needed as a whole, such as scales or a matrix of an adapter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Slot, Target, plan_transfer
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

    Args:
        source: the checkpoint.
        entry: the tensor, under any name.
        manifest: of the checkpoint, if it is sealed.

    Raises:
        IntegrityError: the values are not what was sealed, have not the checksum of their archive,
            or differ between ranks.
    """
    sealed = manifest.tensors.get(entry.stored_name) if manifest is not None else None
    if sealed is None:
        prove_replicas(source, [entry], jobs=1)
    data = bytearray(entry.nbytes)
    slot = Slot(whole(entry.shape), "", 0)
    target = Target("one tensor", {"": entry.nbytes}, {entry.fqn: (slot,)})
    plan = plan_transfer(Catalog("one tensor", {entry.fqn: entry}), target)
    located = source.format.locate(source.store, [entry])
    batches = schedule(plan, located, *tile_bytes(DEFAULT_MEMORY_BYTES, 1))
    sink = FillSink(MemoryStore({"": memoryview(data)}))
    watched = read_whole(plan, located) if sealed is None else {}
    watch = CrcWatch(watched, source.store)
    execute_batches(batches, source.store, sink, 1, looks_ahead=False, crc_watch=watch)
    watch.prove({})
    if sealed is not None and hex64(crc64nvme(data)) != sealed.fingerprint:
        raise IntegrityError(
            f"a tensor is not what was sealed: expected fingerprint {sealed.fingerprint}, got"
            f" {hex64(crc64nvme(data))} ({printable(entry.fqn)!r})",
            hint="ckpt verify names what is damaged; restore the file",
        )
    singles = np.empty(whole(entry.shape).numel * _SINGLE.itemsize, np.uint8)
    cast(np.frombuffer(data, np.uint8), entry.dtype, singles, _SINGLE)
    return singles.view(np.float32).reshape(entry.shape)
