"""Converts any checkpoint into the layout of another tool, names and optimizer state included.

It takes a training state apart, renames its entries, and assembles them for the target. The
transfer engine then copies the bytes.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import (
    Catalog,
    TensorEntry,
    choose,
    matcher,
    model_only,
    refuse_unread,
    strip_wrappers,
    stripped_from,
)
from ckpt_tools.core.coverage import check as check_catalog
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.placements import split
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import accelerate, safetensors, torch_save
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.per_rank import files as per_rank
from ckpt_tools.formats.per_rank.flat_param import read_shapes
from ckpt_tools.formats.pickle.state import TupleItem
from ckpt_tools.formats.registry import (
    Format,
    Request,
    Source,
    TargetTensor,
    open_source,
    whole_tensor,
)
from ckpt_tools.formats.torch_save import name_of, nested
from ckpt_tools.formats.zip.write import render_archive
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.dtensor_mesh import (
    find_sharded,
    mesh_of,
    scheduler_of,
    sharded_state,
)
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.huggingface import (
    adapter_config,
    base_files,
    check_loads,
    find_base,
    head_counts,
    untie,
)
from ckpt_tools.operations.convert.key_map import apply_map, check_settings, read_map
from ckpt_tools.operations.convert.lora import adapter_of, refuse_adapters
from ckpt_tools.operations.convert.options import check_request, substitute
from ckpt_tools.operations.convert.param_order import ModelOrder, read_order
from ckpt_tools.operations.convert.training_state import (
    TrainingState,
    check_used,
    in_order,
    put_together,
    take_apart,
    unpack_objects,
)
from ckpt_tools.operations.merge_reshard import (
    check_kept,
    left_out,
    saved_boxes,
    shards,
    target_dtype,
    uncast,
    unknown_values,
)
from ckpt_tools.operations.side_files import carried, left_beside
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import read
from ckpt_tools.transfer.options import Options, Path_
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_COPIES = ("bit16.",)  # DeepSpeed's second copy of the weights
_MAX_SHARD_BYTES = 5_000_000_000  # the default of transformers


class Conversion(Options, total=False):
    """The options of a conversion, in addition to `Options`.

    Attributes:
        ranks: for `dcp`, `accelerate` and `per-rank`: the number of ranks to split for. If absent,
            the source's number, or 1.
        dtype, keep_dtype: as for `merge`; the model's tensors only.
        select: globs of names in the target; only entries that match are written.
        exclude: globs of names in the target; entries that match are left out.
        rename: `REGEX=REPLACEMENT` each, applied in order to the names of parameters, in the model
            and in optimizers.
        key_map: a file with renames and transforms, or the name of a built-in one; see `key_map`.
        settings: the named numbers that the map needs. `heads` and `kv_heads` come from the config
            of `base`.
        param_order: the parameters that an optimizer's numbers mean. `model`: each group has its
            parameters in the model's order. Else names in order, or a file of names; see
            `param_order.read_order`.
        optimizer: one of `FORMS`: how optimizer state is named. If absent, by parameter, with
            groups.
        keep_prefix: keep the prefixes of wrappers in names. For `safetensors` and `hf`, also keep
            the key above the model.
        model_only: leave out everything but the model.
        base: the directory of the model's config, tokenizer and code. For `hf` and `per-rank`,
            these files are copied.
        mesh: for `per-rank`: `DEVICE:AXIS` of the job that will load the result. If absent, the
            source's, or `cuda:fsdp`.
        max_shard_bytes: for `hf`, upper bound of a shard's payload, 5 GB if absent.
        check: for `hf`: load the result with transformers in a separate process, and compare.
    """

    ranks: int | None
    dtype: str | None
    keep_dtype: Sequence[str]
    select: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str]
    key_map: Path_ | None
    settings: Mapping[str, int] | None
    param_order: Path_ | Sequence[str] | Mapping[str, Sequence[str]] | None
    optimizer: str | None
    keep_prefix: bool
    model_only: bool
    base: Path_ | None
    mesh: str | None
    max_shard_bytes: int | None
    check: bool


@checked(Conversion)
def convert(src: Path_, dst: Path_, *, to: str, **how: Unpack[Conversion]) -> TransferResult:
    """Writes a checkpoint in another layout.

    Args:
        src: a checkpoint of any format that can be read, or a directory with one below.
        dst: the directory to write; for `safetensors` and `torch`, the file.
        to: one of `TARGETS`.
        **how: see `Conversion`.

    Raises:
        CheckpointError: see the tree in `errors`. Then `dst` is as it was before.
    """
    check_request(to, str(dst), how)
    storage_options = how.get("storage_options")
    source = open_source(src, storage_options, lay_beside(how.get("shapes")))
    if how.get("param_order") != "model":  # "model" also uses the shapes file
        check_needed(how.get("shapes"), source.catalog)
    is_model = how.get("model_only") or to in ("safetensors", "hf", "peft")
    given = read_order(how.get("param_order"))
    if is_model and given is not None:
        raise PlanError("--param-order is for optimizers, and only the model is written")
    order = _model_order(source) if isinstance(given, str) else given
    keeps_order = source.format in (torch_save, per_rank)
    taken = take_apart(
        replace(source.catalog, objects={}) if is_model else source.catalog,
        source.store,
        order,
        keeps_order,
    )
    is_numbered = not is_model and (to == "per-rank" or how.get("optimizer") == "ids")
    check_used(
        order,
        [o.prefix for o in taken.optimizers if o.is_numbered or (is_numbered and not o.has_order)],
    )
    if is_numbered:
        taken.optimizers = [in_order(optimizer, order) for optimizer in taken.optimizers]
    if is_model:
        taken = replace(taken, optimizers=[], tensors={}, objects={}, paths={}, notes=[])
    if how.get("optimizer") in ("groups", "flat"):
        if taken.untouched:
            whose = printable(taken.untouched[0])
            raise PlanError(
                f"--optimizer {how.get('optimizer')} names the parameters, and the state of"
                f" {whose!r} is not by parameter",
                hint=(
                    "LBFGS and the like keep one state for all parameters: leave --optimizer out"
                    " to copy it unchanged"
                ),
            )
        _refuse_unnamed(taken, f"--optimizer {how.get('optimizer')} names the parameters")
    parts = _renamed(taken, source, how)
    parts.tensors = {fqn: t for fqn, t in parts.tensors.items() if not fqn.startswith(_COPIES)}
    if not parts.model and not parts.optimizers and not parts.tensors:
        what = f"no tensors are left of {len(source.catalog.tensors)} ({printable(source.path)})"
        raise PlanError(what, hint=f"ckpt inspect {source.path}")
    job = _Job(source, parts, how, bool(is_model))
    catalog, form, request = job.lay_out(to, str(dst))
    catalog = replace(catalog, made=job.made.files, file_sizes=source.catalog.file_sizes)
    check_catalog(catalog, shares=True)
    options = cast(
        Options, {key: value for key, value in how.items() if key in Options.__annotations__}
    )
    accept = check_loads if how.get("check") else None
    result = transfer(
        TransferRequest(
            "convert",
            source.with_made(job.made.files),
            catalog,
            open_destination(dst, storage_options, accept),
            form,
            request,
            options,
            left_out=_dropped(source.catalog, catalog, job.parts),
        )
    )
    parts.notes.extend(_notes_on(source.catalog, to, bool(is_model)))
    if accept and not result.is_dry_run and (how.get("group") or ALONE).rank == 0:
        parts.notes.append(
            "transformers loads it: no name missing or unexpected, every tensor as it was written"
        )
    return replace(result, notes=(*result.notes, *parts.notes))


def _notes_on(catalog: Catalog, to: str, is_model: bool) -> list[str]:
    """Returns what a conversion leaves behind of the source, or gives another name."""
    top = catalog.extras.get(torch_save.TOP_LEVEL)
    beside = [] if to == "accelerate" or is_model else left_beside(catalog)
    renamed = [f"the source has {top}"] if top else []
    return [*renamed, *beside, *unknown_values(catalog, only_model=is_model)]


def _model_order(source: Source) -> ModelOrder:
    """Returns the order of a model's parameters, from `--shapes` or a state dict.

    safetensors and DCP do not keep this order.
    """
    shapes = read_shapes(source.store, source.store.list_files())
    if shapes:
        return ModelOrder(tuple(shapes))
    if source.format not in (torch_save, per_rank):
        return ModelOrder(())
    return ModelOrder(tuple(model_only(source.catalog)[0].tensors))


def _renamed(parts: TrainingState, source: Source, how: Conversion) -> TrainingState:
    """Returns the training state under the names of the target."""
    if not how.get("keep_prefix"):
        parts = _stripped(parts, has_keys=bool(source.catalog.paths))
    if key_map := how.get("key_map"):
        base = how.get("base")
        numbers = (head_counts(base) if base is not None else {}) | dict(how.get("settings") or {})
        keys = read_map(key_map, numbers)
        check_settings(keys, how.get("settings") or {})
        _refuse_unnamed(parts, "a key map changes parameters and their state")
        parts = apply_map(parts, keys, source)
    for rule in how.get("rename", ()):
        before, parts = parts, parts.renamed(substitute(rule))
        states = zip(parts.optimizers, before.optimizers, strict=True)
        if parts.model.keys() == before.model.keys() and all(
            new.state.keys() == old.state.keys() for new, old in states
        ):
            some = ", ".join(map(printable, list(parts.model)[:3]))
            raise PlanError(
                f"--rename {printable(rule)!r} changes no name", hint=f"names look like: {some}"
            )
    return parts


def _stripped(parts: TrainingState, has_keys: bool) -> TrainingState:
    """Returns the training state without the prefixes of wrappers, and notes them.

    Args:
        parts: the training state.
        has_keys: the format keeps the keys above the model. If it has only names, `module.` is the
            prefix of a wrapper and not a key.
    """
    prefix = (
        parts.prefix
        if has_keys
        else tuple(key for key in parts.prefix if strip_wrappers(f"{key}.x") != "x")
    )
    gone = (
        [".".join(key for key in parts.prefix if key not in prefix)] * len(parts.model)
        if prefix != parts.prefix
        else []
    )
    gone += [found for fqn in parts.model if (found := stripped_from(fqn))]
    if gone:
        counts = ", ".join(f"{name}. ({number:,})" for name, number in Counter(gone).most_common(8))
        parts.notes.append(f"stripped from names: {printable(counts)}")
    return replace(parts.renamed(strip_wrappers), prefix=prefix)


def _dropped(before: Catalog, after: Catalog, parts: TrainingState) -> dict[str, int]:
    """Returns the top-level keys that are left out completely, with their bytes."""
    kept = {f.partition(".")[0] for f in after.tensors} if parts.optimizers else set()
    return {
        key: nbytes
        for key, nbytes in left_out(before, after, with_objects=False).items()
        if key not in kept
    }


def _tuples(catalog: Catalog) -> list[str]:
    """Returns a note on tuples with tensors, which DCP stores like lists."""
    found = {
        ".".join(map(str, path[:number]))
        for path in catalog.paths.values()
        for number, key in enumerate(path)
        if isinstance(key, TupleItem)
    }
    if not found:
        return []
    names = ", ".join(map(printable, sorted(found)))
    return [f"tuples with tensors become lists, because DCP has no tuples: {names}"]


def _refuse_unnamed(parts: TrainingState, why: str) -> None:
    """Refuses optimizers whose parameter numbers have no known names, if names are needed."""
    for optimizer in parts.optimizers:
        if optimizer.is_unnamed:
            raise PlanError(
                f"{why}, and {printable(optimizer.prefix) or 'the optimizer'} has numbers for its"
                " parameters",
                hint=(
                    "say what they mean with --param-order FILE or --param-order model, or leave it"
                    " out with --model-only"
                ),
            )


class _Job:
    """One conversion: its source, and the catalog and request for the target."""

    def __init__(
        self, source: Source, parts: TrainingState, how: Conversion, is_model: bool
    ) -> None:
        self.source, self.parts, self.how, self.is_model = source, parts, how, is_model
        self.made = InMemoryFile(source.catalog.made)
        self.ranks = how.get("ranks") or source.catalog.world_size or 1
        self._is_kept = matcher(how.get("keep_dtype", ()))
        self._model_names: set[str] = set()

    def lay_out(self, to: str, dst: str) -> tuple[Catalog, Format, Request]:
        """Returns the catalog to write from, the target's format, and the request."""
        if to in ("safetensors", "hf"):
            return self._model(to, dst)
        if to == "peft":
            return self._adapter()
        if to == "deepspeed-universal":
            return self._universal()
        if to == "per-rank":
            return self._per_rank()
        return self._torch(dst) if to == "torch" else self._ranks(to)

    def _catalog(self, prefix: tuple[str, ...] | None = None, form: str = "") -> Catalog:
        """Returns the catalog of the entries to write, under the target's names."""
        catalog = put_together(
            self.parts, form or self.how.get("optimizer") or "groups", self.made, prefix
        )
        above = self.parts.prefix if prefix is None else prefix
        self._model_names = {name_of((*above, fqn)) for fqn in self.parts.model}
        select, exclude = self.how.get("select", ()), self.how.get("exclude", ())
        check_kept(self.how.get("keep_dtype", ()), self.how.get("dtype"), list(catalog.tensors))
        self.parts.notes += uncast(catalog.tensors.values(), self.how.get("dtype"))
        kept = choose(replace(catalog, unread=self._unread()), select, exclude)
        refuse_unread(kept)
        if excluded := [t for fqn, t in catalog.tensors.items() if fqn not in kept.tensors]:
            self.parts.notes.append(
                f"--select and --exclude leave out {len(excluded)} tensors with"
                f" {sum(t.nbytes for t in excluded):,} bytes"
            )
        if not kept.tensors:
            raise PlanError(
                f"no tensors are left of {len(catalog.tensors)}",
                hint="choose other globs for --select and --exclude",
            )
        return kept

    def _unread(self) -> dict[str, str]:
        """Returns the tensors of unread kinds, by the names that they would have."""
        unread = (
            model_only(self.source.catalog)[0].unread
            if self.is_model
            else self.source.catalog.unread
        )
        return {
            fqn if self.how.get("keep_prefix") else strip_wrappers(fqn): kind
            for fqn, kind in unread.items()
        }

    def _unpacked(self, catalog: Catalog) -> tuple[Catalog, dict[str, Any], list[str]]:
        return unpack_objects(catalog, self.source.with_made(self.made.files).store, self.made)

    def _dtype(self, entry: TensorEntry) -> DType:
        return target_dtype(entry, self.how.get("dtype"), self._is_kept)

    def _targets(self, catalog: Catalog) -> list[TargetTensor]:
        """Returns whole tensors, those of the model in the requested type."""
        return [
            whole_tensor(t, self._dtype(t) if t.fqn in self._model_names else None)
            for t in catalog.tensors.values()
        ]

    def _model(self, to: str, dst: str) -> tuple[Catalog, Format, Request]:
        catalog, most = (
            self._catalog(None if self.how.get("keep_prefix") else ()),
            self.how.get("max_shard_bytes"),
        )
        if to == "safetensors":
            return (
                catalog,
                safetensors,
                shards(self._targets(catalog), most, dst.rstrip("/").rpartition("/")[2]),
            )
        refuse_adapters(catalog.tensors, self.source.path)
        base = self.how.get("base")
        if base is None:
            self.parts.notes.append(
                f"no config and no tokenizer go along: --base {find_base(self.source.path)} would"
                " bring them"
            )
        config, files = (
            base_files(base, [self._dtype(t).name for t in catalog.tensors.values()])
            if base is not None
            else ({}, {})
        )
        catalog = untie(self.source, catalog, config, self.parts.notes)
        return (
            catalog,
            safetensors,
            replace(shards(self._targets(catalog), most or _MAX_SHARD_BYTES, ""), files=files),
        )

    def _adapter(self) -> tuple[Catalog, Format, Request]:
        """Plans a PEFT directory: only the adapter, and its config from `base`."""
        base = self.how.get("base")
        if base is None:
            raise PlanError(
                "--to peft needs --base DIR with the adapter_config.json that the job was made with"
            )
        catalog = self._catalog(())
        catalog = replace(catalog, tensors=adapter_of(catalog.tensors), objects={}, paths={})
        files = {"adapter_config.json": adapter_config(base, catalog.tensors)}
        # the names are those of PEFT
        targets = [whole_tensor(t, self._dtype(t)) for t in catalog.tensors.values()]
        return (
            catalog,
            safetensors,
            Request(
                targets,
                file_name="adapter_model.safetensors",
                files=files,
                index="adapter_config.json",
            ),
        )

    def _torch(self, dst: str) -> tuple[Catalog, Format, Request]:
        catalog = self._catalog()
        catalog, values, unknown = self._unpacked(catalog)
        if unknown := [name for name in unknown if name not in self.source.catalog.unknown]:
            self.parts.notes.append(
                f"values of types that are not known stay behind: {printable(', '.join(unknown))}"
            )
        name = dst.rpartition("/")[2]
        return (
            catalog,
            torch_save,
            Request(self._targets(catalog), paths=catalog.paths, file_name=name, values=values),
        )

    def _universal(self) -> tuple[Catalog, Format, Request]:
        """Plans fp32 weights and moments with one folder per parameter, groups, and client state.

        The groups are those of the only optimizer. Plain values become the client state.
        """
        if len(self.parts.optimizers) != 1:
            raise PlanError(
                "a universal checkpoint has one optimizer by parameter name, got"
                f" {len(self.parts.optimizers)}"
            )
        _refuse_unnamed(self.parts, "a universal checkpoint names its parameters")
        optimizer = self.parts.optimizers[0]
        optimizer.prefix = "optimizer"
        trained = {fqn for group in optimizer.groups for fqn in group["params"]}
        rest = put_together(replace(self.parts, model={}, optimizers=[]), "groups", self.made)
        _, values, _ = self._unpacked(replace(rest, tensors={}))
        self.parts = replace(
            self.parts,
            tensors={},
            objects={},
            paths={},
            model={n: t for n, t in self.parts.model.items() if n in trained},
        )
        catalog = self._catalog(("model",))
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        step = self._scalar(steps[0]) if steps else 0.0
        targets = [
            replace(t, dtype=BY_NAME["float32"]) if t.dtype.is_castable else t
            for t in self._targets(catalog)
        ]
        states: dict[str, Any] = {
            "global_steps": int(step),
            "global_samples": 0,
            "skipped_steps": 0,
            "lr_scheduler": None,
        }
        states |= {"dp_world_size": 1, "mp_world_size": 1}
        states |= nested(values, {fqn: path for fqn, path in rest.paths.items() if fqn in values})
        groups = [{**group, "params": list(group["params"])} for group in optimizer.groups]
        request = Request(targets, values={"param_groups": groups, "step": step, "states": states})
        return replace(catalog, objects={}), deepspeed, request

    def _per_rank(self) -> tuple[Catalog, Format, Request]:
        """Plans one file per rank for the model, the numbered optimizer, and the scheduler."""
        if len(self.parts.optimizers) > 1:
            raise PlanError(
                f"verl has one optimizer, got {len(self.parts.optimizers)}", hint="--model-only"
            )
        for optimizer in self.parts.optimizers:
            optimizer.prefix = "optim"
        scheduler = self._scheduler("verl keeps no such thing, or every rank its own")
        catalog, values, _ = self._unpacked(self._catalog(("model",), "ids"))
        trained = {
            fqn
            for optimizer in self.parts.optimizers
            if not optimizer.is_unnamed
            for fqn in optimizer.state
        }
        found = find_sharded(self.parts.model, trained)
        if plain := sorted(self.parts.model.keys() - found):
            self.parts.notes.append(
                f"taken for buffers, which every rank holds whole: {len(plain)}"
                f" ({printable(', '.join(plain[:5]))})"
            )
        sharded = sharded_state(catalog, found)
        targets = [
            (
                replace(
                    t,
                    boxes=tuple(
                        split(whole(t.shape), 0, self.ranks, rank) for rank in range(self.ranks)
                    ),
                )
                if t.fqn in sharded
                else t
            )
            for t in self._targets(catalog)
        ]
        base = self.how.get("base")
        config = (
            base_files(base, [t.dtype.name for t in targets if t.fqn in self._model_names])[1]
            if base is not None
            else {}
        )
        files = {f"huggingface/{name}": data for name, data in config.items()}
        files |= {
            "fsdp_config.json": (
                json.dumps({"FSDP_version": 2, "world_size": self.ranks}, indent=4).encode()
            )
        }
        return (
            catalog,
            per_rank,
            Request(
                targets,
                self.ranks,
                paths={
                    **catalog.paths,
                    "extra_state.lr_scheduler": ("extra_state", "lr_scheduler"),
                },
                values={**values, "extra_state.lr_scheduler": scheduler},
                files=files,
                index="fsdp_config.json",
                mesh=mesh_of(
                    self.how.get("mesh"), self.source.catalog.extras.get("mesh", ""), sharded
                ),
            ),
        )

    def _scheduler(self, why: str) -> Any:
        """Returns the state of the scheduler; None if there is none.

        It removes all entries except the model and the optimizers, and notes those that are lost.
        """
        rest, values, unknown = self._unpacked(
            put_together(replace(self.parts, model={}, optimizers=[]), "groups", self.made)
        )
        state, left = scheduler_of(values, rest.paths)
        if left := sorted(
            {*left, *unknown, *(str(rest.paths.get(fqn, (fqn,))[0]) for fqn in rest.tensors)}
        ):
            self.parts.notes.append(f"left behind, since {why}: {printable(', '.join(left))}")
        self.parts = replace(self.parts, tensors={}, objects={}, paths={})
        return state

    def _scalar(self, value: TensorEntry | float) -> float:
        """Returns an optimizer step, given as a number or a float32 scalar tensor."""
        if not isinstance(value, TensorEntry):
            return float(value)
        found = self.source.format.locate(self.source.store, [value])
        extent = found.get(value.chunks[0].extent, value.chunks[0].extent)
        data = read(self.source.with_made(self.made.files).store, *extent[:3])
        return (
            float(struct.unpack("<f", data)[0])
            if value.dtype.name == "float32" and not value.shape
            else 0.0
        )

    def _ranks(self, to: str) -> tuple[Catalog, Format, Request]:
        files = self._for_accelerate() if to == "accelerate" else {}
        catalog = self._catalog(("model",) if to == "accelerate" else None)
        is_split = self.source.format.NAME in ("dcp", "accelerate", "per_rank")
        world_size = (self.source.catalog.world_size if is_split else None) or 1
        pairs = zip(self._targets(catalog), catalog.tensors.values(), strict=True)
        targets = [
            replace(target, boxes=tuple(saved_boxes(t, world_size, self.ranks)))
            for target, t in pairs
        ]
        objects = {o.fqn: o.extent.nbytes for o in catalog.objects.values()}
        self.parts.notes += _tuples(catalog)
        return (
            catalog,
            accelerate if to == "accelerate" else dcp,
            Request(targets, self.ranks, objects, catalog.paths, files=files),
        )

    def _for_accelerate(self) -> dict[str, bytes]:
        """Names optimizers as Accelerate does; returns the scheduler's file, if there is one."""
        _refuse_unnamed(self.parts, "Accelerate names the parameters")
        for number, found in enumerate(self.parts.optimizers):
            found.prefix = "optimizer" if number == 0 else f"optimizer_{number}.optimizer"
        files: dict[str, bytes] = {}
        if self.source.format is accelerate:
            files, keys, notes = carried(self.source, self.ranks)
            self.parts.notes += notes
            objects = {
                fqn: item
                for fqn, item in self.parts.objects.items()
                if self.parts.paths[fqn][0] not in keys
            }
            self.parts = replace(self.parts, objects=objects)
        scheduler = self._scheduler(
            "Accelerate has it in pickles of its own, which are not written, or has no such thing"
        )
        return files if scheduler is None else files | {"scheduler.bin": render_archive(scheduler)}
