"""Lays out a training state for each target of a conversion: its catalog, format and request."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.coverage import check as check_catalog
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.naming import model_only, strip_wrappers
from ckpt_tools.core.placements import split
from ckpt_tools.core.quantized import weights_in
from ckpt_tools.core.selection import choose, matcher, refuse_unread
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import accelerate, safetensors, torch_save
from ckpt_tools.formats.builder import name_of
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.per_rank import files as per_rank
from ckpt_tools.formats.pickle.state import TupleItem
from ckpt_tools.formats.registry import (
    Format,
    Request,
    Source,
    TargetTensor,
    whole_tensor,
)
from ckpt_tools.formats.torch_save import nested
from ckpt_tools.formats.zip.write import render_archive
from ckpt_tools.operations.convert.dtensor_mesh import (
    find_sharded,
    mesh_of,
    scheduler_of,
    sharded_state,
)
from ckpt_tools.operations.convert.huggingface import (
    adapter_config,
    base_files,
    check_quantization,
    find_base,
    quantization_of,
    read_config,
    render_config,
    untie,
)
from ckpt_tools.operations.convert.lora import adapter_of, refuse_adapters
from ckpt_tools.operations.convert.model_names import compare_with_model
from ckpt_tools.operations.convert.nvfp4 import rewrite
from ckpt_tools.operations.convert.object_reader import unpack_objects
from ckpt_tools.operations.convert.options import Conversion
from ckpt_tools.operations.convert.training_state import TrainingState, put_together, refuse_unnamed
from ckpt_tools.operations.merge_reshard import (
    check_kept,
    keeper,
    saved_boxes,
    shards,
    target_dtype,
    uncast,
)
from ckpt_tools.operations.quantize import NVFP4_FORMS, Quantization, method_of, quantize
from ckpt_tools.operations.side_files import carried
from ckpt_tools.storage import read
from ckpt_tools.transfer.options import Path_

_MAX_SHARD_BYTES = 5_000_000_000  # the default of transformers
_Layout = tuple[Catalog, Format, Request]


class TargetLayout:
    """One conversion: its source, and the catalog and request for the target."""

    def __init__(
        self, source: Source, parts: TrainingState, how: Conversion, is_model: bool
    ) -> None:
        self.source, self.parts, self.how, self.is_model = source, parts, how, is_model
        self.memory_file = InMemoryFile(source.catalog.memory_files)
        self.ranks = how.get("ranks") or source.catalog.world_size or 1
        self._is_kept = matcher(())  # known with the catalog
        self._model_names: set[str] = set()
        self.quantization: Quantization | None = None
        self.before: Catalog | None = None  # its codes are written in another form

    def lay_out(self, to: str, dst: str) -> _Layout:
        """Returns the catalog to write from, the target's format, and the request."""
        return {
            "dcp": self._dcp,
            "safetensors": self._safetensors,
            "hf": self._huggingface,
            "torch": self._torch,
            "accelerate": self._accelerate,
            "peft": self._adapter,
            "deepspeed-universal": self._universal,
            "per-rank": self._per_rank,
        }[to](dst)

    def _catalog(self, prefix: tuple[str, ...] | None = None, naming: str | None = None) -> Catalog:
        """Returns the catalog of the entries to write, under the target's names."""
        catalog = put_together(
            self.parts, naming or self.how.get("optimizer") or "groups", self.memory_file, prefix
        )
        above = self.parts.prefix if prefix is None else prefix
        if above != self.parts.prefix:
            gone = f"{'.'.join(self.parts.prefix)}. ({len(self.parts.model):,})"
            self.parts.notes.append(f"stripped from names: {printable(gone)}")
        self._model_names = {name_of((*above, fqn)) for fqn in self.parts.model}
        select, exclude = self.how.get("select", ()), self.how.get("exclude", ())
        changes = self.how.get("dtype") or self.how.get("quantize")
        check_kept(self.how.get("keep_dtype", ()), changes, catalog)
        self._is_kept = keeper(self.how.get("keep_dtype", ()), catalog)
        self.parts.notes += uncast(catalog.tensors.values(), self.how.get("dtype"))
        self.parts.notes += self._not_of_the_model()
        stored = {entry.stored_name for entry in catalog.tensors.values()}
        every = (*self.source.catalog.tensors, *self.source.catalog.objects)
        left_out = [n for n in every if n not in stored] if self.is_model else []
        kept = choose(replace(catalog, unread=self._unread()), select, exclude, left_out)
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

    def _not_of_the_model(self) -> list[str]:
        """Returns a note on tensors that no `dtype` casts: those of neither model nor optimizer."""
        names = [fqn for fqn, t in self.parts.tensors.items() if t.dtype.is_castable]
        if self.how.get("dtype") is None or not names:
            return []
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return [f"not of the model, so not cast: {printable(', '.join(names[:3]))}{more}"]

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
        return unpack_objects(
            catalog, self.source.with_memory_files(self.memory_file.files).store, self.memory_file
        )

    def _dtype(self, entry: TensorEntry) -> DType:
        return target_dtype(entry, self.how.get("dtype"), self._is_kept)

    def _check_quantization(
        self, base: Path_, config: Mapping[str, Any], tensors: Iterable[TensorEntry]
    ) -> None:
        """Makes sure that a config says how the weights are quantized, and that they are.

        Raises:
            PlanError: they disagree, or some weights have become numbers and others have not.
        """
        if not self.parts.is_dequantized:
            check_quantization(base, config, tensors)
        elif weights := weights_in(tensors):
            raise PlanError(
                "--dtype turns some quantized weights into numbers and leaves others as codes, such"
                f" as {printable(weights[0].codes)!r}: no config says that",
                hint="leave --keep-dtype out; or leave --dtype out, and keep all codes",
            )

    def _targets(self, catalog: Catalog) -> list[TargetTensor]:
        """Returns whole tensors, those of the model in the requested type."""
        return [
            whole_tensor(t, self._dtype(t) if t.fqn in self._model_names else None)
            for t in catalog.tensors.values()
        ]

    def _safetensors(self, dst: str) -> _Layout:
        catalog = self._catalog(None if self.how.get("keep_prefix") else ())
        name = dst.rstrip("/").rpartition("/")[2]
        return catalog, safetensors, shards(self._targets(catalog), None, name)

    def _huggingface(self, dst: str) -> _Layout:
        """Plans a directory for transformers: shards, index, and the files of `base`."""
        del dst
        catalog = self._catalog(None if self.how.get("keep_prefix") else ())
        most = self.how.get("max_shard_bytes") or _MAX_SHARD_BYTES
        refuse_adapters(catalog.tensors, self.source.path)
        base = self.how.get("base")
        if base is None:
            self.parts.notes.append(
                "no config and no tokenizer go along:"
                f" --base {find_base(self.source.path)} would bring them"
            )
        config, files = (
            base_files(
                base,
                [self._dtype(t).name for t in catalog.tensors.values()],
                self.parts.notes,
                self.parts.is_dequantized or self.how.get("quantize") in NVFP4_FORMS,
            )
            if base is not None
            else ({}, {})
        )
        if base is not None:
            # `config` does not tell any more of codes that are written in another form
            self._check_quantization(base, read_config(base), catalog.tensors.values())
        catalog = untie(self.source, catalog, config, self.parts.notes)
        if base is not None:
            is_part = bool(self.how.get("select") or self.how.get("exclude"))
            is_partial = bool(self.how.get("partial"))
            saved = self.parts.saved_by_transformers
            self.parts.notes += compare_with_model(
                base, config, catalog, is_part, is_partial, saved
            )
            if (name := self.how.get("quantize")) is not None:
                catalog, how, more = self._quantized(catalog, name, base)
                config = {**config, "quantization_config": how}
                files |= {"config.json": render_config(config, base), **more}
        return (
            catalog,
            safetensors,
            replace(shards(self._targets(catalog), most, ""), files=files),
        )

    def _quantized(
        self, catalog: Catalog, name: str, base: Path_
    ) -> tuple[Catalog, Mapping[str, Any], Mapping[str, bytes]]:
        """Returns the catalog with codes and scales, and notes it.

        With it come the `quantization_config`, and other files that tell the same.
        """
        if name in NVFP4_FORMS:
            # ModelOpt's own file may tell more than config.json
            told = (quantization_of(base, config)[1] for config in ({}, read_config(base)))
            said = {k: v for one in told if isinstance(one, Mapping) for k, v in one.items()}
            self.before = catalog
            made = rewrite(catalog, name, self.source, said, self.memory_file)
            self.parts.notes += made.notes
            return made.catalog, made.config, made.files
        catalog = replace(catalog, file_sizes=self.source.catalog.file_sizes)
        check_catalog(catalog, shares=True)
        found = quantize(catalog, method_of(name), base, self._is_kept, self._dtype)
        self.quantization = found
        self.parts.notes += found.notes
        return found.catalog, found.config(), {}

    def _adapter(self, dst: str) -> _Layout:
        """Plans a PEFT directory: only the adapter, and its config from `base`."""
        del dst
        base = self.how.get("base")
        if base is None:
            raise PlanError("--to peft needs --base DIR with the adapter_config.json of the job")
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

    def _torch(self, dst: str) -> _Layout:
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

    def _universal(self, dst: str) -> _Layout:
        """Plans fp32 weights and moments with one folder per parameter, groups, and client state.

        The groups are those of the only optimizer. Plain values become the client state.
        """
        del dst
        if len(self.parts.optimizers) != 1:
            raise PlanError(
                "a universal checkpoint has one optimizer by parameter name, got"
                f" {len(self.parts.optimizers)}"
            )
        refuse_unnamed(self.parts, "a universal checkpoint names its parameters")
        optimizer = self.parts.optimizers[0]
        optimizer.prefix = "optimizer"
        trained = {fqn for group in optimizer.groups for fqn in group["params"]}
        rest = put_together(
            replace(self.parts, model={}, optimizers=[]), "groups", self.memory_file
        )
        unpacked, values, unknown = self._unpacked(replace(rest, tensors={}))
        self._note_not_universal({*rest.tensors, *unpacked.tensors, *unknown}, trained)
        self.parts = replace(
            self.parts,
            tensors={},
            objects={},
            paths={},
            model={n: t for n, t in self.parts.model.items() if n in trained},
        )
        catalog = self._catalog(("model",))
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        steps += [group["step"] for group in optimizer.groups if "step" in group]
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

    def _note_not_universal(self, lost: set[str], trained: set[str]) -> None:
        """Names what a universal checkpoint cannot hold: tensors but those of the optimizer."""
        frozen = [fqn for fqn in self.parts.model if fqn not in trained]
        for what, names in (
            ("tensors without optimizer state", frozen),
            ("values with tensors", sorted(lost)),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                self.parts.notes.append(
                    f"left behind, since DeepSpeed's universal format has no place for them: {what}"
                    f" ({printable(', '.join(names[:5]))}{more})"
                )

    def _per_rank(self, dst: str) -> _Layout:
        """Plans one file per rank for the model, the numbered optimizer, and the scheduler."""
        del dst
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
                f" ({printable(', '.join(plain[:5]))}{', …' if len(plain) > 5 else ''})"
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
        config, beside = (
            base_files(
                base,
                [t.dtype.name for t in targets if t.fqn in self._model_names],
                self.parts.notes,
                self.parts.is_dequantized,
            )
            if base is not None
            else ({}, {})
        )
        if base is not None:
            self._check_quantization(base, config, self.parts.model.values())
        files = {f"huggingface/{name}": data for name, data in beside.items()}
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
            put_together(replace(self.parts, model={}, optimizers=[]), "groups", self.memory_file)
        )
        state, left = scheduler_of(values, rest.paths)
        if left := sorted(
            {*left, *unknown, *(str(rest.paths.get(fqn, (fqn,))[0]) for fqn in rest.tensors)}
        ):
            self.parts.notes.append(f"left behind, since {why}: {printable(', '.join(left))}")
        self.parts = replace(self.parts, tensors={}, objects={}, paths={})
        return state

    def _scalar(self, value: TensorEntry | float) -> float:
        """Returns an optimizer step, given as a number or a tensor of one element.

        Raises:
            PlanError: it is another tensor.
        """
        if not isinstance(value, TensorEntry):
            return float(value)
        found = self.source.format.locate(self.source.store, [value])
        extent = found.get(value.chunks[0].extent, value.chunks[0].extent)
        data = read(self.source.with_memory_files(self.memory_file.files).store, *extent[:3])
        code = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}.get(
            value.dtype.name
        )
        if code is None or math.prod(value.shape) != 1:
            raise PlanError(
                f"the optimizer's step is {value.dtype.name} {list(value.shape)}, not one number"
            )
        return float(struct.unpack(code, data)[0])

    def _dcp(self, dst: str) -> _Layout:
        del dst
        catalog = self._catalog()
        return catalog, dcp, self._split(catalog)

    def _accelerate(self, dst: str) -> _Layout:
        del dst
        files = self._for_accelerate()
        catalog = self._catalog(("model",))
        return catalog, accelerate, replace(self._split(catalog), files=files)

    def _split(self, catalog: Catalog) -> Request:
        """Plans DCP files for a number of ranks."""
        is_split = self.source.format.NAME in ("dcp", "accelerate", "per_rank")
        world_size = (self.source.catalog.world_size if is_split else None) or 1
        pairs = zip(self._targets(catalog), catalog.tensors.values(), strict=True)
        targets = [
            replace(target, boxes=tuple(saved_boxes(t, world_size, self.ranks)))
            for target, t in pairs
        ]
        objects = {o.fqn: o.extent.nbytes for o in catalog.objects.values()}
        self.parts.notes += _tuples(catalog)
        return Request(targets, self.ranks, objects, catalog.paths)

    def _for_accelerate(self) -> dict[str, bytes]:
        """Names optimizers as Accelerate does; returns the scheduler's file, if there is one."""
        refuse_unnamed(self.parts, "Accelerate names the parameters")
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
