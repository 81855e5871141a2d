"""Meta's files of a Llama for several GPUs: `consolidated.00.pth`, `consolidated.01.pth`, ….

Each file is a plain state dict with one GPU's rows or columns of the matrices. Nothing in it tells
which: the names do, as in fairscale's layers that the model is made of. Norms are in every file.

Source: meta-llama/llama `llama/model.py` (`ColumnParallelLinear`, `RowParallelLinear`,
`ParallelEmbedding`), meta-llama/llama3 (`VocabParallelEmbedding`); transformers 5.24
`models/llama/convert_llama_weights_to_hf.py`, which joins them alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import Chunk, ChunkList, TensorEntry
from ckpt_tools.errors import CatalogError, FormatError, printable
from ckpt_tools.formats.builder import name_of
from ckpt_tools.formats.per_rank.flat_param import RankValue, Raw
from ckpt_tools.formats.pickle.state import Path, TensorView

FILE = re.compile(r"(?P<part>)consolidated\.(?P<rank>[0-9]{2,4})(?P<size>)(?P<of>)\.pth")
_BY_ROWS = re.compile(r"(?:.+\.)?(?:attention\.w[qkv]|feed_forward\.w[13]|output)\.weight")
_BY_COLUMNS = re.compile(r"(?:.+\.)?(?:attention\.wo|feed_forward\.w2)\.weight")
_TABLE = "tok_embeddings.weight"  # by columns until Llama 2, by rows from Llama 3 on
_EACH = re.compile(r"(?:.+\.)?(?:norm|attention_norm|ffn_norm)\.weight|rope\.freqs")
_NORM = "norm.weight"


def are_of_meta(files: Iterable[str]) -> bool:
    """Tells whether the files of ranks are those of Meta."""
    return any(map(FILE.fullmatch, files))


def refuse_one_of(name: str, files: Iterable[str]) -> None:
    """Refuses one of Meta's files as a checkpoint, where it has only a part of each matrix.

    Raises:
        CatalogError: there are others beside it.
    """
    others = [other for other in files if FILE.fullmatch(other)]
    if len(others) > 1:
        raise CatalogError(
            f"one of {len(others)} files of a model, with a part of each matrix: {printable(name)}",
            hint="give the directory with all of them",
        )


def join_parts(raw: Raw, num_files: int) -> dict[Path, TensorEntry]:
    """Takes the parts of matrices out of the entries, and returns the matrices.

    Args:
        raw: all entries. Taken entries are removed.
        num_files: of the model.

    Raises:
        FormatError: how files share a tensor is not known, or the parts do not fit.
        CatalogError: a part is missing.
    """
    found = dict[Path, TensorEntry]()
    if num_files == 1:
        return found
    norm = next(iter(raw.get((_NORM,), {}).values()), None)
    view = norm.value if norm is not None else None
    width = view.sizes[-1] if isinstance(view, TensorView) and view.sizes else 0
    for path in [p for p, held in raw.items() if any(_is_tensor(h.value) for h in held.values())]:
        name = name_of(path)
        if _EACH.fullmatch(name):
            continue  # copies, which are compared
        held = raw.pop(path)
        missing = [number for number in range(num_files) if number not in held]
        if missing:
            raise CatalogError(
                f"a part of {printable(name)!r} is missing in file {missing[0]} of {num_files}"
            )
        dim = _dim(name, held, num_files, width)
        found[path] = _joined(name, [held[number] for number in range(num_files)], dim)
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, TensorView)


def _dim(name: str, held: Mapping[int, RankValue], num_files: int, width: int) -> int:
    """Returns the dim along which files share a tensor.

    Raises:
        FormatError: it is not known.
    """
    if _BY_ROWS.fullmatch(name):
        return 0
    if _BY_COLUMNS.fullmatch(name):
        return 1
    value = held[0].value
    columns = value.sizes[-1] if isinstance(value, TensorView) and len(value.sizes) == 2 else 0
    if name == _TABLE and width and columns in (width, width // num_files):
        return 0 if columns == width else 1
    raise FormatError(
        f"how {num_files} files share {printable(name)!r} is not known",
        hint=f"known are the names of Meta's Llama 1 to 3; {_TABLE} needs {_NORM} beside it",
    )


def _joined(name: str, parts: list[RankValue], dim: int) -> TensorEntry:
    """Returns a matrix of which each file has some rows or columns."""
    views = [part.value for part in parts if isinstance(part.value, TensorView)]
    first = views[0]
    is_alike = len(views) == len(parts) and all(
        view.dtype is first.dtype and view.sizes == first.sizes for view in views
    )
    if not is_alike or len(first.sizes) != 2:
        raise FormatError(f"files have parts of different kinds or shapes: {printable(name)!r}")
    sizes = list(first.sizes)
    chunks = []
    for number, part in enumerate(parts):
        starts = [0, 0]
        starts[dim] = number * first.sizes[dim]
        chunks.append(Chunk(Box(tuple(starts), first.sizes), *part.extents))
    sizes[dim] *= len(parts)
    return TensorEntry(name, first.dtype, tuple(sizes), ChunkList(chunks))
