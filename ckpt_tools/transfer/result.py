"""What a merge, reshard or convert tells of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core.box import whole
from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.execute import Totals
from ckpt_tools.errors import redacted
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.base import Destination
from ckpt_tools.storage import is_url


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a merge or reshard did, or with `dry_run` would do.

    Attributes:
        source, destination, format: from where, to where, in which format.
        files: bytes of every file written, the index included, the manifest not.
        num_tensors, num_objects, num_copies: counts of the plan; a copy is one overlap of a source
            and a target chunk.
        read_nbytes, written_nbytes, needed_nbytes: bytes read, written, and of the elements that
            were needed.
        kept_nbytes: bytes of those written that an earlier, interrupted attempt had written.
        store_nbytes: bytes of those written that an object store copied by itself, without their
            passing through this process.
        num_proved, proved_nbytes: tensors of the source that the inverse made again of what was
            written, and their bytes.
        bytes_by_dtype: bytes written, by element type.
        left_out: entries that were not taken, with their bytes. A name stands for all below it.
        stripped: how many names lost a prefix, by prefix.
        overflowed: finite values that a cast made infinite, by tensor.
        quantization_errors: of each weight that was quantized, the norm of its errors over its own.
        notes: remarks.
        seconds: wall-clock time.
        is_dry_run: whether nothing was written.
    """

    source: str
    destination: str
    format: str
    files: Mapping[str, int]
    num_tensors: int
    num_objects: int
    num_copies: int
    read_nbytes: int
    written_nbytes: int
    needed_nbytes: int
    kept_nbytes: int
    store_nbytes: int
    bytes_by_dtype: Mapping[str, int]
    left_out: Mapping[str, int] = field(default_factory=dict)
    stripped: Mapping[str, int] = field(default_factory=dict)
    overflowed: Mapping[str, int] = field(default_factory=dict)
    quantization_errors: Mapping[str, float] = field(default_factory=dict)
    num_proved: int = 0
    proved_nbytes: int = 0
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False

    @property
    def read_amplification(self) -> float:
        """Returns the bytes read over the bytes needed.

        Of bytes that existed already, the needed share is assumed to equal the written share.

        From an object store, an earlier result is read again to check it, and counts as read.
        """
        written = 0 if is_url(self.destination) else sum(self.bytes_by_dtype.values())
        needed = (
            self.needed_nbytes
            - self.store_nbytes
            - (self.needed_nbytes * self.kept_nbytes // written if written else 0)
        )
        return self.read_nbytes / needed if needed > 0 else 1.0


def result_of(
    source: Source, dst: Destination, plan: Plan, totals: Totals, kept_nbytes: int
) -> TransferResult:
    """Returns the result of a plan, of which an earlier attempt had written `kept_nbytes`."""
    layout, sizes = plan.target, bytes_by_dtype(plan)
    files = dict(layout.file_sizes) | (
        {layout.index.file: len(layout.index.data)} if layout.index else {}
    )
    return TransferResult(
        redacted(source.path),
        redacted(dst.url),
        layout.format,
        files,
        sum(not t.is_object for t in plan.tensors),
        sum(t.is_object for t in plan.tensors),
        plan.num_overlaps,
        totals.read_nbytes,
        sum(files.values()),
        plan.payload_bytes,
        kept_nbytes,
        totals.store_nbytes,
        sizes,
        overflowed=totals.overflowed,
    )


def bytes_by_dtype(plan: Plan) -> dict[str, int]:
    """Returns the bytes that a plan writes by element type; `objects` for objects."""
    sizes: dict[str, int] = {}
    for tensor in plan.tensors:
        key = "objects" if tensor.is_object else tensor.dst_dtype.name
        sizes[key] = sizes.get(key, 0) + whole(tensor.shape).numel * tensor.dst_dtype.itemsize
    return sizes
