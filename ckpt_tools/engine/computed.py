"""A store that has computed tensors as further files: to read one is to compute it.

They are the numbers of quantized weights, or the codes and scales of weights that are quantized. An
operation that reads these files works as with any tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, flat_start, whole
from ckpt_tools.core.catalog import Payloads
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.plan import Plan, TensorPlan
from ckpt_tools.core.shared_cache import SharedCache
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.execute import Reader, check_filled
from ckpt_tools.engine.fingerprints import Fingerprints
from ckpt_tools.engine.formulas import Formula, Part, Unit, value_of
from ckpt_tools.engine.schedule import Sources, Tile
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.storage import Store
from ckpt_tools.storage.overlay import Overlay

_FOLDER = "numbers/"  # before the names of these files; no format looks into it
_KEPT_BYTES = 16 << 20  # of boxes that other results may need, too


def numbers_file(name: str) -> str:
    """Returns the file that has the numbers of a weight, by the name of the numbers."""
    return _FOLDER + name


@dataclass
class PartsReading:
    """How the tensors are read from which others are computed.

    Attributes:
        plan: the tensors that are read.
        located: the positions of their payloads.
        watch: compares their CRC-32.
        fingerprints: of the bytes that were read.
    """

    plan: Plan
    located: Payloads
    watch: CrcWatch
    fingerprints: Fingerprints = field(default_factory=Fingerprints)


class ComputedStore(Overlay):
    """A store with computed tensors as files over its own. They are not listed."""

    def __init__(
        self,
        inner: Store,
        formulas: Mapping[str, Formula],
        begin: Callable[[], PartsReading],
        kept_boxes: int = 8,
    ) -> None:
        """Takes the formula of each tensor.

        Args:
            inner: the store of the checkpoint.
            formulas: by the name of the file that has the results.
            begin: called before anything is read, and again after `close`.
            kept_boxes: at least so many boxes stay in memory for other results.
        """
        super().__init__(inner, {})
        self.capabilities = replace(inner.capabilities, has_descriptors=False)
        self._formulas, self._begin, self._kept_boxes = formulas, begin, kept_boxes
        self._boxes: _Boxes | None = None
        self._lock = threading.Lock()
        self._announced = set[tuple[str, Box]]()
        self.close = self._close

    def opened(self) -> PartsReading:
        """Returns how the tensors are read."""
        return self._opened().reading

    def size(self, path: str) -> int:
        formula = self._formulas.get(path)
        return self.inner.size(path) if formula is None else result_nbytes(formula)

    def version(self, path: str) -> str:
        if path not in self._formulas:
            return self.inner.version(path)
        return ""  # an earlier attempt is not continued: nothing proves the results that it wrote

    def view(self, path: str, start: int, nbytes: int) -> memoryview | None:
        return None if path in self._formulas else self.inner.view(path, start, nbytes)

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        if not self.capabilities.fetches_ahead:
            return
        found: list[tuple[str, int, int]] = []
        for path, start, nbytes in ranges:
            formula = self._formulas.get(path)
            if formula is None:
                found.append((path, start, nbytes))
                continue
            size = formula.item.itemsize
            at, stop = start // size, (start + nbytes) // size
            while at < stop:
                unit = formula.unit(at)
                found += self._reads(formula, unit)
                at = unit.stop
        self.inner.will_read(found, is_all)

    def _reads(self, formula: Formula, unit: Unit) -> Iterable[tuple[str, int, int]]:
        """Yields the reads of a unit that were not announced before."""
        for role, box in unit.boxes.items():
            key = formula.parts[role].name, box
            if key not in self._announced:
                self._announced.add(key)
                for read in self._opened().tile(*key).reads:
                    yield read.file, read.start, read.nbytes

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        formula = self._formulas.get(path)
        if formula is None:
            self.inner.read_into(path, start, buffer)
            return
        into, at = np.frombuffer(buffer, formula.item), start // formula.item.itemsize
        boxes, first, stop = self._opened(), at, at + len(into)
        while at < stop:
            unit = formula.unit(at)
            end = min(stop, unit.stop)
            found = _Found(boxes, formula.parts, unit)
            with np.errstate(over="ignore", invalid="ignore"):  # `stats` tells of such numbers
                formula.fill(found, at, into[at - first : end - first])
            at = end

    def _opened(self) -> _Boxes:
        with self._lock:
            if self._boxes is None:
                self._boxes = _Boxes(self.inner, self._begin(), self._kept_boxes)
            return self._boxes

    def _close(self) -> None:
        with self._lock:
            self._boxes = None  # a second try reads everything again
            self._announced.clear()
        self.inner.close()


def result_nbytes(formula: Formula) -> int:
    """Returns the bytes of a tensor that is computed."""
    return whole(formula.shape).numel * formula.item.itemsize


class _Found(Mapping[str, npt.NDArray[Any]]):
    """The contents of the boxes of a unit, each read when it is asked for."""

    def __init__(self, boxes: _Boxes, parts: Mapping[str, Part], unit: Unit) -> None:
        self._boxes, self._parts, self._wanted = boxes, parts, unit.boxes
        self._values = dict[str, npt.NDArray[Any]]()

    def __getitem__(self, role: str) -> npt.NDArray[Any]:
        if role not in self._values:
            self._values[role] = self._boxes.get(self._parts[role], self._wanted[role])
        return self._values[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)


class _Boxes:
    """Boxes of tensors, in memory while they are in use.

    Each is read once, however many threads want it.
    """

    def __init__(self, store: Store, reading: PartsReading, kept_boxes: int) -> None:
        self._store, self.reading = store, reading
        self.tensors = {tensor.fqn: tensor for tensor in reading.plan.tensors}
        self._sources: dict[str, Sources] = {}
        self._lock = threading.Lock()
        self._kept = SharedCache[tuple[str, Box], npt.NDArray[Any]](
            _KEPT_BYTES, kept_boxes, lambda array: array.nbytes
        )

    def get(self, part: Part, box: Box) -> npt.NDArray[Any]:
        """Returns the elements of a box of a part."""
        return self._kept.get((part.name, box), lambda: self._read(part, box))

    def tile(self, name: str, box: Box) -> Tile:
        """Returns the reads of a box of a tensor."""
        tensor = self.tensors[name]
        with self._lock:
            sources = self._sources.get(name)
            if sources is None:
                sources = self._sources[name] = Sources(tensor, self.reading.located)
        tile = Tile(tensor, box, sources.reads(box), ())
        check_filled(tile)
        return tile

    def _read(self, part: Part, box: Box) -> npt.NDArray[Any]:
        tile = self.tile(part.name, box)
        data = empty_bytes(box.numel * part.dtype.itemsize)
        Reader(self._store, self.reading.watch).fill([(tile, data)])
        self._note(tile.tensor, box, crc64nvme(data.data), len(data))
        return value_of(part, data, box.sizes)

    def _note(self, tensor: TensorPlan, box: Box, crc: int, nbytes: int) -> None:
        start = flat_start(box, tensor.shape) * tensor.src_dtype.itemsize
        with self._lock:
            self.reading.fingerprints.add_range(tensor, start, nbytes, crc)
