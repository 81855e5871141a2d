"""Merges and reshards checkpoints: two presets of `transfer.transfer`.

Both read a catalog, select and rename entries, plan a target, copy, and commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.dtypes import BY_NAME, SHORT_NAMES, DType
from ckpt_tools.core.naming import (
    model_only,
    shortest_names,
    strip_wrappers,
    stripper,
)
from ckpt_tools.core.placements import reshard_boxes, split
from ckpt_tools.core.quantized import beside_codes, described, may_be_codes, weights_in
from ckpt_tools.core.selection import check_globs, chooser, keep, matcher, refuse_unread, rename
from ckpt_tools.core.tables import is_table
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import safetensors, torch_save
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.registry import (
    Request,
    Source,
    TargetTensor,
    open_source,
    refuse_file_name,
    whole_tensor,
)
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert import lora as adapters
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.operations.folder import note_on_others
from ckpt_tools.operations.mesh_plan import MeshBoxes, mesh_of_axes, read_plan
from ckpt_tools.operations.side_files import left_beside
from ckpt_tools.publish.base import Destination
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.transfer.options import Dtype, Options, Path_
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_SHOWN = 200


@checked(Options)
def merge(
    src: Path_,
    dst: Path_,
    *,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: Dtype | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_bytes: int | None = None,
    keep_prefix: bool = False,
    lora: Path_ | None = None,
    model_key: str | None = None,
    **options: Unpack[Options],
) -> TransferResult:
    """Joins the shards of a model into one safetensors file, ready for inference.

    It does not average models.

    Args:
        src: a checkpoint, or a directory with one below.
        dst: the file to write. With `max_shard_bytes`, the directory for shards and an index.
        select: globs; only tensors whose name, before or after stripping, matches one are taken.
        exclude: globs; tensors whose name, before or after stripping, matches one are left out.
        dtype: `bf16`, `fp16`, `fp32`, `fp64`, or torch's names of these types. Only tensors of
            these four types are cast, and quantized weights whose formula is known: their codes
            become numbers. If None, nothing is cast.
        keep_dtype: globs of tensors that keep their type.
        max_shard_bytes: upper bound of a shard's payload. A larger tensor gets its own shard.
        keep_prefix: keep the model's key and wrappers' prefixes in the names.
        lora: a PEFT directory whose LoRA adapter is added to the weights, in float32 arithmetic.
        model_key: the key of the state below which the model lies, such as `ema.model`. If None,
            it is found. A file that has names only, such as one of transformers, has no key.
        **options: see `Options`.

    Raises:
        CheckpointError: see the tree in `errors`; nothing is then at `dst` that was not there
            before.
    """
    source, target = _source(src, options), _destination(dst, options)
    if max_shard_bytes is None and not target.url.endswith(".safetensors"):
        raise PlanError(
            f"merge writes one .safetensors file, got {printable(str(dst))!r}",
            hint="name it so, or give --max-shard-size for a directory",
        )
    if max_shard_bytes is not None:
        refuse_file_name(str(dst))
    numbers = Dequantized(source, source)
    if dtype is not None:
        numbers = dequantize(source, matcher(keep_dtype), model_key)
        numbers.refuse_resume(options.get("resume", False))
    shown = numbers.shown.catalog
    catalog, stripped = model_view(shown, keep_prefix, model_key)
    model = catalog
    if select or exclude:
        catalog = select_from(catalog, select, exclude, shown)
    refuse_unread(catalog)
    if lora is None:
        adapters.refuse_adapters(catalog.tensors, source.path)
    if not catalog.tensors:
        raise PlanError(
            f"no tensor of a model is left of {len(source.catalog.tensors)}"
            f" ({printable(str(source.path))})",
            hint=f"ckpt inspect {source.path}",
        )
    check_kept(keep_dtype, dtype, catalog)
    is_kept = keeper(keep_dtype, catalog)
    targets = [whole_tensor(t, target_dtype(t, dtype, is_kept)) for t in catalog.tensors.values()]
    request = shards(targets, max_shard_bytes, target.url.rpartition("/")[2])
    alter, notes = (
        adapters.read_lora(lora, catalog, model, options.get("storage_options"))
        if lora is not None
        else (None, [])
    )
    notes += [
        *numbers.notes,
        *uncast(catalog.tensors.values(), dtype),
        *unknown_values(source.catalog, only_model=True),
        *left_beside(source.catalog),
        *note_on_others(src, source.store),
    ]
    if source.is_remote:  # the store may copy the long tensors on the server
        request = replace(request, small_first=target.min_part_bytes)
    result = transfer(
        TransferRequest(
            "merge",
            numbers.stored,
            catalog,
            target,
            safetensors,
            request,
            options,
            left_out=left_out(shown, catalog),
            stripped=stripped,
            alter=alter or {},
            changes=adapters.version(lora, options.get("storage_options")) if lora else "",
            prove=partial(numbers.prove, catalog),
        )
    )
    return replace(result, notes=(*result.notes, *notes))


@checked(Options)
def reshard(
    src: Path_,
    dst: Path_,
    *,
    to_ranks: int | None = None,
    from_ranks: int | None = None,
    mesh: str | None = None,
    plan: Path_ | None = None,
    **options: Unpack[Options],
) -> TransferResult:
    """Rewrites a checkpoint as DCP, with the chunks that a job of another size would save.

    Args:
        src: a checkpoint of any format except whole tensors in safetensors, or a directory with one
            below.
        dst: the directory to write.
        to_ranks: number of ranks to split for. Give this or `mesh`.
        from_ranks: number of ranks that wrote the source. It is checked.
        mesh: the mesh to split for, such as `fsdp=8,tp=2,ep=4`; also `replicate`. `ep` takes its
            ranks from those of `fsdp` and `tp`.
        plan: which dims `tp` and `ep` split: `torchtitan`, `transformers`, or a JSON file. If None,
            it is found by the names of the model.
        **options: see `Options`.

    Raises:
        CheckpointError: see the tree in `errors`; nothing is then at `dst` that was not there
            before.
    """
    refuse_file_name(str(dst))
    source = _source(src, options)
    catalog = source.catalog
    if source.format is safetensors and catalog.world_size is None:
        raise PlanError(
            "reshard needs a job's checkpoint (such as DCP), got safetensors"
            f" ({printable(str(source.path))})",
            hint="ckpt convert --to dcp",
        )
    refuse_unread(catalog, "leave them out: ckpt convert --to dcp --exclude GLOB")
    if (to_ranks is None) == (mesh is None):
        raise PlanError(
            "reshard splits for a number of ranks, or for a mesh: give one of the two",
            hint="--to N, or --mesh fsdp=N,tp=M",
        )
    if mesh is None and plan is not None:
        raise PlanError("--plan means nothing without --mesh", hint="give --mesh, or leave it out")
    if to_ranks is not None and to_ranks < 1:
        raise PlanError(f"a checkpoint is split for at least 1 rank, got {to_ranks}")
    if from_ranks is not None and from_ranks != catalog.world_size:
        raise PlanError(
            f"the source was written by another number of ranks: expected {from_ranks}, got"
            f" {catalog.world_size} ({printable(str(source.path))})",
            hint=f"--from {catalog.world_size}, or leave it out",
        )
    world_size = (None if source.format in (torch_save, deepspeed) else catalog.world_size) or 1
    notes: list[str] = []
    if mesh is not None:
        ranks = mesh_of_axes(mesh)
        boxes = MeshBoxes(catalog, world_size, ranks, read_plan(plan) if plan else None)
        found = {t.fqn: boxes.of(t) for t in catalog.tensors.values()}
        to_ranks, notes = ranks.num_ranks, boxes.notes()
    else:
        assert to_ranks is not None
        tensors = catalog.tensors.values()
        found = {t.fqn: tuple(saved_boxes(t, world_size, to_ranks)) for t in tensors}
    targets = [
        TargetTensor(t.fqn, t.dtype, t.shape, found[t.fqn]) for t in catalog.tensors.values()
    ]
    request = Request(
        targets, to_ranks, {o.fqn: o.extent.nbytes for o in catalog.objects.values()}, catalog.paths
    )
    notes += [
        *unknown_values(catalog),
        *left_beside(catalog),
        *note_on_others(src, source.store),
    ]
    result = transfer(
        TransferRequest(
            "reshard", source, catalog, _destination(dst, options), dcp, request, options
        )
    )
    return replace(result, notes=(*result.notes, *notes))


def unknown_values(catalog: Catalog, only_model: bool = False) -> list[str]:
    """Returns notes on values of unknown types, which are not read.

    Args:
        catalog: of the source.
        only_model: only the model is written, which has no numbers.
    """
    names = list(catalog.unknown)
    some = ", ".join(
        f"{printable(name)} ({printable(catalog.unknown[name])})" for name in names[:_SHOWN]
    )
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    numbers = catalog.extras.get("NumPy numbers") if not only_model else None
    return ([f"values of types that are not known stay behind: {some}{more}"] if names else []) + (
        [f"NumPy numbers: {numbers}"] if numbers else []
    )


def _source(src: Path_, options: Options) -> Source:
    source = open_source(src, options.get("storage_options"), lay_beside(options.get("shapes")))
    check_needed(options.get("shapes"), source.catalog)
    return source


def _destination(dst: Path_, options: Options) -> Destination:
    return open_destination(dst, options.get("storage_options"))


# ---- what to take, and as what -------------------------------------------------------------------


def model_view(
    catalog: Catalog, keep_prefix: bool, key: str | None = None
) -> tuple[Catalog, dict[str, int]]:
    """Returns the model's tensors under their inference names, and a count per removed prefix."""
    model, prefix = model_only(catalog, key)
    if keep_prefix:
        front = "".join(f"{segment}." for segment in prefix)
        return rename(model, lambda fqn: front + fqn), {}
    stripped = {".".join(prefix) + ".": len(model.tensors)} if prefix else {}
    strip = stripper(model.tensors)
    for fqn in model.tensors:
        gone = strip(fqn)
        for segment in set(fqn.split(".")) if gone != fqn else ():
            if fqn.split(".").count(segment) != gone.split(".").count(segment):
                stripped[f"{segment}."] = stripped.get(f"{segment}.", 0) + 1
    return rename(model, strip), stripped


def select_from(
    catalog: Catalog, select: Sequence[str], exclude: Sequence[str], original: Catalog
) -> Catalog:
    """Returns the tensors whose new or stored name matches the globs."""
    stored = {fqn: entry.stored_name for fqn, entry in catalog.tensors.items()}
    for fqn in catalog.unread:
        stored[fqn] = next(
            (name for name in original.unread if strip_wrappers(name).endswith(f".{fqn}")), fqn
        )
    is_chosen = chooser(select, exclude)
    kept = keep(catalog, lambda fqn: is_chosen(fqn, stored.get(fqn, fqn)))
    names = list(dict.fromkeys([*catalog.tensors, *stored.values(), *catalog.unread]))
    written = {*names, *original.unread}
    rest = [name for name in (*original.tensors, *original.objects) if name not in written]
    check_globs(select, names, "--select", rest)
    check_globs(exclude, names, "--exclude", rest)
    return kept


def check_kept(keep_dtype: Sequence[str], dtype: object, catalog: Catalog) -> None:
    """Refuses `keep_dtype` globs that have no effect on the tensors of a catalog.

    Raises:
        PlanError: no type to cast to is given, or a glob matches no name.
    """
    if keep_dtype and dtype is None:
        raise PlanError(
            "--keep-dtype means nothing without --dtype: no type is changed",
            hint="give --dtype, or leave --keep-dtype out",
        )
    codes = [t.stored_name for t in catalog.tensors.values() if t.quantized is not None]
    check_globs(keep_dtype, [*dict.fromkeys([*catalog.tensors, *codes])], "--keep-dtype")


def keeper(keep_dtype: Sequence[str], catalog: Catalog) -> Callable[[str], bool]:
    """Returns a test of the tensors that no cast changes.

    They are those of the globs, and the numbers beside what may be codes of an unknown scheme.
    """
    is_named, beside = matcher(keep_dtype), beside_codes(catalog.tensors.values())
    return lambda fqn: fqn in beside or is_named(fqn)


def target_dtype(entry: TensorEntry, dtype: Dtype | None, is_kept: Callable[[str], bool]) -> DType:
    """Returns the type of a tensor in the target: `dtype` if it can be cast and is not kept.

    Raises:
        PlanError: tensors cannot be cast to this type.
    """
    is_number = entry.dtype.is_castable and entry.quantized is None
    if entry.is_computed and is_kept(entry.fqn):
        raise PlanError(
            f"--keep-dtype names a quantized weight by its new name: {printable(entry.fqn)!r}",
            hint="give the name of its codes in the source: ckpt inspect --tree lists them",
        )
    if dtype is None or not is_number or is_kept(entry.fqn):
        return entry.dtype
    return dtype_by_name(dtype)


def dtype_by_name(dtype: Dtype) -> DType:
    """Returns a type to cast to, by its short or long name.

    Raises:
        PlanError: tensors cannot be cast to this type.
    """
    name = str(dtype).removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in SHORT_NAMES.values():
        raise PlanError(
            f"cannot cast to {printable(str(dtype))!r}: expected one of {', '.join(SHORT_NAMES)}"
        )
    return BY_NAME[name]


def uncast(entries: Iterable[TensorEntry], dtype: Dtype | None) -> list[str]:
    """Returns notes on tensors that a cast leaves alone, though their types are numbers.

    These are types that are not cast, and the parts of quantized weights.
    """
    entries = list(entries) if dtype else []
    parts = [e for e in entries if e.quantized is not None]
    left = [
        e
        for e in entries
        if e.quantized is None
        and e.dtype.name.startswith(("float", "complex"))
        and not e.dtype.is_castable
    ]
    notes = []
    if left:
        kinds = ", ".join(sorted({e.dtype.name for e in left}))
        first = printable(left[0].fqn)
        notes.append(
            f"{len(left)} tensors keep their types, which are not cast: {kinds} ({first}, …)"
        )
    if codes := may_be_codes(entries):
        notes.append(
            f"{len(codes)} matrices of integers may be codes of quantized weights, of a scheme"
            f" that ckpt does not know ({printable(codes[0])}, …): the numbers of their modules"
            " keep their types"
        )
    if parts:
        notes.append(
            f"{len(parts)} tensors keep their types, as codes and scales belong together: of"
            f" quantized weights ({printable(described(weights_in(parts)))})"
        )
    return notes


def shards(targets: list[TargetTensor], max_shard_bytes: int | None, name: str) -> Request:
    """Puts tensors into shards in order. A tensor that does not fit starts a new shard."""
    if max_shard_bytes is None:
        return Request(targets, file_name=name)
    numbers, number, filled = [], 0, 0
    for tensor in targets:
        nbytes = whole(tensor.shape).numel * tensor.dtype.itemsize
        if filled and filled + nbytes > max_shard_bytes:
            number, filled = number + 1, 0
        filled += nbytes
        numbers.append(number)
    spread = [
        TargetTensor(
            t.fqn,
            t.dtype,
            t.shape,
            tuple(t.boxes[0] if i == mine else None for i in range(number + 1)),
        )
        for t, mine in zip(targets, numbers, strict=True)
    ]
    return Request(spread, number + 1, with_index=True)


def saved_boxes(entry: TensorEntry, world_size: int | None, to_ranks: int) -> Sequence[Box | None]:
    """Returns the box that each of `to_ranks` ranks saves of a tensor; see `reshard_boxes`."""
    boxes = entry.chunks.kinds()
    # one rank saves whole tensors; FSDP would split them along dim 0
    if world_size == 1 and entry.shape and to_ranks > 1:
        boxes = [split(whole(entry.shape), 0, 2, part) for part in range(2)]
    return reshard_boxes(boxes, entry.shape, to_ranks)


def left_out(before: Catalog, after: Catalog) -> dict[str, int]:
    """Returns the names of tensors and objects that were left out; see `shortest_names`."""
    left = not_taken(before, after)
    kept = [fqn for fqn in before.tensors if fqn not in left]
    left |= {fqn: item.extent.nbytes for fqn, item in before.objects.items()}
    return shortest_names(before, left, kept)


def not_taken(before: Catalog, after: Catalog, used: Container[str] = ()) -> dict[str, int]:
    """Returns the tensors of a catalog that are not in another one, with their bytes.

    Args:
        before, after: the catalogs.
        used: names of tensors whose rows are in `after`.
    """
    taken = {
        c.extent
        for t in after.tensors.values()
        for c in (t.chunks[:1] if is_table(t.chunks) else t.chunks)
    }
    return {
        fqn: entry.nbytes
        for fqn, entry in before.tensors.items()
        if fqn not in used and not (entry.chunks and entry.chunks[0].extent in taken)
    }
