"""Builds a catalog from the entries of archives of `torch.save`: tensors, values, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import TORCH_ZIP, Catalog, Chunks, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import Path, TensorView


def name_of(path: Path) -> str:
    """Returns the name of an entry from its path of keys."""
    return ".".join(map(str, path)) or "tensor"


class UnreadValues(Counter[str]):
    """Values that the reader skips: a counter by type, with the paths of tensors and values.

    Attributes:
        tensors, foreign: kinds of skipped tensors and of other values, by path.
        numpy: paths of NumPy's numbers, which are read as Python's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[Path, str] = {}
        self.foreign: dict[Path, str] = {}
        self.numpy: list[Path] = []

    def take(self, more: UnreadValues, above: Path) -> None:
        """Adds the skipped values of another file, whose paths continue `above`."""
        self.update(more)
        self.tensors |= {(*above, *path): kind for path, kind in more.tensors.items()}
        self.foreign |= {(*above, *path): kind for path, kind in more.foreign.items()}
        self.numpy += [(*above, *path) for path in more.numpy]

    def skip(self, path: Path, why: str) -> None:
        """Adds a value that is skipped for a reason."""
        self[why] += 1
        self.foreign[path] = why

    @property
    def unknown(self) -> dict[str, str]:
        """The kinds of skipped values by name."""
        return {name_of(path): kind for path, kind in self.foreign.items()}

    @property
    def unread(self) -> dict[str, str]:
        """The kinds of skipped tensors by name."""
        return {name_of(path): kind for path, kind in self.tensors.items()}

    @property
    def told(self) -> dict[str, str]:
        """Returns the remarks on them, for a catalog's `extras`."""
        kinds = ", ".join(
            f"{printable(kind)} ({count:,})" if count else printable(kind)
            for kind, count in self.most_common(200)
        )
        warning = "; torch.load(weights_only=False) would run code for these"
        numbers = f"{len(self.numpy):,}, read as Python's"
        return ({"other values": kinds + warning} if kinds else {}) | (
            {"NumPy numbers": numbers} if self.numpy else {}
        )


class CatalogBuilder:
    """Collects entries under their paths of keys, and refuses a name that occurs twice."""

    def __init__(
        self, others: UnreadValues | None = None, memory_file: InMemoryFile | None = None
    ) -> None:
        """Begins without entries; `memory_file` receives the plain values."""
        self.others = UnreadValues() if others is None else others
        self.memory_file = memory_file or InMemoryFile()
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        self.extras: dict[str, str] = {}

    def tensor(
        self, path: Path, dtype: DType, shape: tuple[int, ...], chunks: Chunks, where: str = ""
    ) -> None:
        """Adds a tensor; `where` is for the message.

        Raises:
            FormatError: its name is taken.
        """
        fqn = self._name(path, where)
        self.tensors[fqn] = TensorEntry(fqn, dtype, shape, chunks)

    def whole(self, path: Path, view: TensorView, extent: Extent, where: str = "") -> None:
        """Adds a tensor whose elements all lie in one extent; as `tensor`."""
        chunks = one_chunk(whole(view.sizes), extent)
        self.tensor(path, view.dtype, view.sizes, chunks, where)

    def value(self, path: Path, value: object, where: str = "") -> None:
        """Adds a plain value; as `tensor`."""
        fqn = self._name(path, where)
        self.objects[fqn] = self.memory_file.value(fqn, value)

    def scalar(self, path: Path, value: float) -> None:
        """Adds a float32 tensor without dims; as `tensor`."""
        fqn = self._name(path, "")
        self.tensors[fqn] = self.memory_file.scalar(fqn, value)

    def _name(self, path: Path, where: str) -> str:
        fqn = name_of(path)
        if fqn in self.paths:
            place = f" ({printable(where)})" if where else ""
            raise FormatError(f"two entries have one name: {printable(fqn)!r}{place}")
        self.paths[fqn] = path
        return fqn

    def finish(
        self, name: str, world_size: int | None = None, ranks: Mapping[str, int] | None = None
    ) -> Catalog:
        """Returns the catalog of a format; all files in `sizes` are archives."""
        return Catalog(
            name,
            self.tensors,
            self.objects,
            self.paths,
            self.sizes,
            world_size,
            ranks or {},
            {**self.others.told, **self.extras},
            tuple(Extent(file, 0, size, TORCH_ZIP) for file, size in self.sizes.items()),
            self.memory_file.files,
            unread=self.others.unread,
            unknown=self.others.unknown,
        )
