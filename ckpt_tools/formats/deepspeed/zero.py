"""DeepSpeed's ZeRO 1, 2 and 3: flat partitions, one file per rank.

The partitions hold the fp32 weights and the optimizer's state; other files hold the 16-bit weights.
In stages 1 and 2, each rank has a contiguous range of one long vector per group of parameters. In
stage 3, each rank has its shares of all parameters in a row. The elements of a parameter in such a
range become boxes. In the catalog, the fp32 weights are `model.*`, and the optimizer's state is by
name. The 16-bit weights of stages 1 and 2 are `bit16.*`.

Source: DeepSpeed 0.19 `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`;
confirmed on files that it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import CatalogError, FormatError, printable
from ckpt_tools.formats.base import below, guess_bare, locate_bare
from ckpt_tools.formats.builder import CatalogBuilder, UnreadValues
from ckpt_tools.formats.deepspeed import universal as deepspeed_universal
from ckpt_tools.formats.deepspeed.entries import EntryBuilder
from ckpt_tools.formats.pickle.state import Malformed
from ckpt_tools.formats.torch_save import OpenedFile
from ckpt_tools.storage import Store, read

NAME = "deepspeed"
LOOKS_FOR = "*_optim_states.pt"
MODEL_STATES = re.compile(
    r"(?:zero_pp_rank_(?P<dp>[0-9]{1,7})_)?mp_rank_(?P<mp>[0-9]{2,5})_model_states\.pt"
)
_OPTIM_STATES = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>[0-9]{1,7})_mp_rank_(?P<mp>[0-9]{2,5})_optim_states\.pt"
)
locate, guess, lay_out = locate_bare, guess_bare, deepspeed_universal.lay_out


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the files have states of an optimizer or a model, or `latest`.

    `latest` names the folder of the newest states.
    """
    return "latest" in files or any(
        _OPTIM_STATES.fullmatch(name) or MODEL_STATES.fullmatch(name) for name in files
    )


def read_catalog(store: Store) -> Catalog:
    """Reads `data.pkl` of every file; see `Format.read_catalog`."""
    files = store.list_files()
    pointer = next((name for name in ("latest_universal", "latest") if name in files), "")
    if pointer and not any(map(MODEL_STATES.fullmatch, files)):
        tag = read(store, pointer, 0, min(files[pointer], 255)).decode("utf-8", "replace").strip()
        if tag not in store.folders():
            raise CatalogError(
                f"`{pointer}` names a folder that is not there: {printable(tag)!r}"
                f" ({printable(store.url)})"
            )
        inner = store.enter(tag)
        try:
            return below(_read_folder(inner), tag)
        finally:
            inner.close()
    return _read_folder(store)


def _read_folder(store: Store) -> Catalog:
    files = store.list_files()
    if "zero" in store.folders() and not any(map(_OPTIM_STATES.fullmatch, files)):
        return _read_universal(store, files)
    others = UnreadValues()
    models = _by_rank(files, MODEL_STATES)
    optims = _by_rank(files, _OPTIM_STATES)
    names = [*models.values(), *optims.values()]
    opened = _open_all(store, files, models, names, others)
    found = CatalogBuilder(others)
    entries = EntryBuilder(
        [opened[n] for n in models.values()], [opened[n] for n in optims.values()], found
    )
    with _as_written(store):
        entries.build()
    found.sizes = {name: files[name] for name in names}
    ranks = {name: rank for table in (models, optims) for rank, name in table.items()}
    return found.finish(NAME, max(len(models), len(optims)), ranks)


def _read_universal(store: Store, files: Mapping[str, int]) -> Catalog:
    """Reads a directory with one folder per parameter, and the model's states."""
    found = CatalogBuilder()
    # the states of rank 0 may be there under the names of stages 1, 2 and 3
    every = sorted(name for name in files if MODEL_STATES.fullmatch(name))
    has_first = any(not name.startswith("zero_pp") for name in every)
    second = [name for name in every if has_first and name.startswith("zero_pp_rank_0_")]
    models = _by_rank({name: 0 for name in every if name not in second}, MODEL_STATES)
    opened = _open_all(store, files, models, [*models.values(), *second], found.others)
    with _as_written(store):
        EntryBuilder(list(opened.values()), [], CatalogBuilder()).check_ranks()
        EntryBuilder([opened[name] for name in models.values()], [], found).build_universal(store)
    found.sizes |= {name: files[name] for name in opened}
    found.extras["deepspeed"] = "universal"
    return found.finish(NAME)


def _open_all(
    store: Store,
    files: Mapping[str, int],
    models: Mapping[int, str],
    names: Iterable[str],
    others: UnreadValues,
) -> dict[str, OpenedFile]:
    """Opens files of ranks by name.

    Raises:
        CatalogError: there are no states of the model among them.
    """
    if not models:
        raise CatalogError(
            f"the model's states are missing: mp_rank_00_model_states.pt ({printable(store.url)})"
        )
    return {name: OpenedFile(store, name, files[name], others) for name in names}


@contextmanager
def _as_written(store: Store) -> Iterator[None]:
    """Names the directory in an error about values that DeepSpeed would not write."""
    try:
        yield
    except (
        Malformed,
        TypeError,
        KeyError,
        IndexError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        what = printable(str(error)) or type(error).__name__
        raise FormatError(
            f"not as DeepSpeed 0.19 writes it: {what} ({printable(store.url)})"
        ) from error


def _by_rank(files: Mapping[str, int], pattern: re.Pattern[str]) -> dict[int, str]:
    """Returns the files of data-parallel ranks.

    Raises:
        FormatError: the model is also split by tensor parallelism.
        CatalogError: a file is missing.
    """
    split = next((name for name in files if (m := pattern.fullmatch(name)) and int(m["mp"])), "")
    if split:
        hint = "DeepSpeed's ds_to_universal.py joins it; the result can be read here"
        raise FormatError(
            f"a model that is split by tensor parallelism is not read: {printable(split)}",
            hint=hint,
        )
    found: dict[int, str] = {}
    for name in sorted(files):
        match = pattern.fullmatch(name)
        if match and (other := found.setdefault(int(match["dp"] or 0), name)) != name:
            raise CatalogError(
                f"two files of one rank: {printable(other)} and {printable(name)}",
                hint="one of them is of another save: move it away",
            )
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        raise CatalogError(
            f"files of ranks are missing: {missing[:10]} beside"
            f" {printable(next(iter(found.values())))}"
        )
    return dict(sorted(found.items()))
