"""Loads a checkpoint into a live state. Each rank reads only the bytes of its own shards.

The saved and the present layout may differ. A load is a copy plan from the checkpoint's catalog
into the shards' memory. Before it reads a byte, it lists everything that does not fit in one table.

Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.coverage import replicas
from ckpt_tools.core.laps import Laps, format_laps
from ckpt_tools.core.logs import log
from ckpt_tools.core.memory import no_gc
from ckpt_tools.core.selection import keep
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.pickle.state import plain_path
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop.loading.divide import divide
from ckpt_tools.loop.loading.load_request import LoadReport, LoadRequest, OnMismatch
from ckpt_tools.loop.loading.match import (
    Match,
    check_unread,
    int_keys,
    match,
    stored_state,
)
from ckpt_tools.loop.loading.misfits import shown_names
from ckpt_tools.loop.loading.names import places_above, root_of
from ckpt_tools.loop.loading.numbers import name_numbers
from ckpt_tools.loop.loading.proof import LoadProof
from ckpt_tools.loop.loading.read_shards import empty_tensor, read_shards
from ckpt_tools.loop.loading.rename import parameter_renamer, renamed, substituter
from ckpt_tools.loop.loading.shared_read import read_together
from ckpt_tools.loop.state.archives import unpack
from ckpt_tools.loop.state.composite import check_kind, not_live, part_front
from ckpt_tools.loop.state.late_staging import hold_all
from ckpt_tools.loop.state.loader_states import deal_in_turn, has_read_all
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.restore import restore, set_state_of_rank
from ckpt_tools.loop.state.shards import Shard, alias_key, local_shards
from ckpt_tools.loop.state.state_dict import (
    STRUCTURE,
    Only,
    PerRank,
    PlacedPerRank,
    check_state,
    export,
    flat_name,
    holders_of,
    name_of_rank,
)
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import open_sealed, read_object
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.storage.prefetch import GAP_BYTES
from ckpt_tools.transfer.prove import prove_replicas


@checked(names_only=("rename", "select"))
def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    select: Sequence[str] = (),
    strict: bool = True,
    cast: bool = False,
    trust_pickle: bool = False,
    rename: Mapping[str, str] | None = None,
    on_mismatch: Mapping[str, OnMismatch] | None = None,
    read_once: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Loads any checkpoint into a live state, for example pretrained weights into a sharded model.

    It needs no run directory.

    Args:
        path: a path or a URL of any checkpoint that `ckpt` reads: safetensors (a file, or shards
            with an index), DCP, Accelerate's directory.
        state: for example `{"model": model}`. Plain values in it are replaced.
        storage_options: options of the object store, in fsspec's form. Others come from the store's
            own configuration.
        process_group: the ranks that load together; all if None. Without an initialised
            torch.distributed, this process alone.
        timeout_s: how long ranks wait for each other before the missing one is named.
        select, strict, cast, trust_pickle, rename, on_mismatch: as in `CheckpointManager.resume`.
        read_once: as in `CheckpointManager`.

    Raises:
        PlanError: the checkpoint does not fit the state; the message is a table of everything that
            does not.
        CheckpointError: it is damaged or cannot be read; or another rank failed.
    """
    check_state(state)
    request = LoadRequest(select, strict, cast, trust_pickle, rename or {}, on_mismatch or {})
    group = GlooGroup(timeout_s, process_group)
    try:
        return load_into(path, state, group, request, read_once, storage_options)
    finally:
        group.close()


@no_gc()
def load_into(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    group: GlooGroup,
    request: LoadRequest,
    read_once: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    jobs: int | None = None,
) -> LoadReport:
    """Loads a checkpoint into modules, optimizers and values. All ranks of `group` call it.

    Args:
        path: any checkpoint that `ckpt` reads.
        state: the state as given to `save`. Plain values in it are replaced.
        group: the ranks that load together.
        request: the entries to load, and how.
        read_once: as in `CheckpointManager`.
        storage_options: of the object store, as fsspec takes them.
        jobs: threads.

    Raises:
        PlanError: the checkpoint does not fit the state; the message is a table of everything that
            does not.
        CheckpointError: it is damaged or cannot be read; or another rank failed.
    """
    job = _Load(state, group, request, num_threads(jobs, is_beside_training=True))
    hold_all()
    where, laps = printable(str(path)), Laps()
    with group.phase(f"open {where}"):
        shards = job.open(path, storage_options)
    _compare_extra(group, job, where)
    laps.lap("open")
    shards = _share(group, job, shards, read_once)
    laps.lap("share")
    replicated = _replicated(group, job, where)
    with group.phase(f"read {where}"):
        job.prove_replicas(replicated)
        job.read(shards)
    job.report.num_proved += job.proof.prove(group, where)
    job.source.store.close()
    laps.lap("read")
    with group.phase(f"restore {where}"):
        job.restore()
    laps.lap("restore")
    job.report.timing = laps.seconds
    log.info("loaded %s (%s)", where, format_laps(laps.seconds))
    return job.report


def _replicated(group: GlooGroup, job: _Load, where: str) -> list[str]:
    """Returns the stored names that several ranks saved and that any rank of this load needs."""
    what, mine = f"compare the replicas of {where}", set(job.replicated())
    if not group.sum([bool(mine)], what)[0]:
        return []
    names = group.broadcast(job.all_replicated() if group.rank == 0 else [], what)
    rest = sorted(mine.difference(names))  # names follow the state, and ranks may have several
    *counts, num_rest = group.sum([*(n in mine for n in names), len(rest)], what)
    found = {name for name, count in zip(names, counts, strict=True) if count}
    if num_rest:
        found.update(*group.all_gather(rest, what))
    return sorted(found)


def _compare_extra(group: GlooGroup, job: _Load, where: str) -> None:
    """Finds the stored names and keys that no rank's state has: notes them, or refuses them.

    Raises:
        PlanError: there are such names under the state's keys, and the load is strict.
    """
    found, report, what = job.found, job.report, f"compare the names of {where}"
    if not group.sum([bool(found.extra or found.left_out)], what)[0]:
        return
    mine = [*((0, n) for n in found.extra), *((1, n) for n in found.left_out)]
    names, own = group.broadcast(mine, what), set(mine)  # of rank 0
    counts = group.sum([name in own for name in names], what)
    common = [n for n, count in zip(names, counts, strict=True) if count == group.size]
    extra, left_out = ([name for kind, name in common if kind == k] for k in (0, 1))
    with group.phase(what):
        if extra and found.extra_error is not None:
            raise found.extra_error
    if left_out:
        report.left_out = left_out
        report.notes.append(report.left_out_note)
    if extra:
        report.notes.append(
            f"{len(extra)} entries of the checkpoint are not in the state: {shown_names(extra)}"
        )


class _Load:
    """One load on one rank: `open`, `read` and `restore`, in this order."""

    source: Source
    manifest: Manifest | None
    found: Match
    report: LoadReport
    proof: LoadProof

    def __init__(
        self, state: MutableMapping[str, Any], group: GlooGroup, request: LoadRequest, jobs: int
    ) -> None:
        self.state, self.group, self.request, self.jobs = state, group, request, jobs
        self.added: dict[str, torch.Tensor] = {}  # tensors that the state lacks
        # tensors that the user's functions fit to another shape
        self.by_hand: dict[str, OnMismatch] = {}
        self.values: dict[str, Any] = {}
        self.of_rank: dict[str, tuple[Any] | None] = {}

    def open(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
    ) -> list[Shard]:
        """Opens the checkpoint, pairs its names with the state's, and returns shards to read."""
        source, self.manifest = open_sealed(path, storage_options)
        self.as_stored = source.catalog
        catalog = renamed(source.catalog, self.request.rename)
        values, owners = replace(source, catalog=catalog), holders_of(self.state)

        def read_value(name: str) -> Any:
            return _read_object(values, name, self.request.trust_pickle)

        catalog = _without_empty(catalog, owners, read_value)
        self.named = name_numbers(catalog, owners, read_value, self.request.wants)
        self.source = source = replace(source, catalog=self.named.catalog)
        self.proof = LoadProof(
            self.manifest, self.as_stored, source.catalog, is_joint=self.group.size > 1
        )
        check_unread(source.catalog, self.state, self.request)
        self.exported = exported = export(
            self.state, stored_state(source.catalog), wants=self.request.wants
        )
        self.found = found = match(
            exported,
            source.catalog,
            self.request,
            str(source.path),
            _lacks_frozen(self.manifest),
        )
        undescribed = self._check_descriptions()
        unread = [
            f"{printable(n)} is {printable(kind)}, which is not read"
            for n, kind in source.catalog.unread.items()
        ]
        self.report = LoadReport(
            str(source.path), notes=[*self.named.notes, *found.notes, *undescribed, *unread]
        )
        self.added = {
            n: empty_tensor(source.catalog.tensors[n])
            for n in found.new
            if n in source.catalog.tensors
        }
        self.by_hand = {n: how for n, how in found.resized.items() if callable(how)}
        tensors = {
            n: exported.tensors[n] for n in found.tensors if n not in self.by_hand
        } | self.added
        self.report.num_tensors = len(tensors) + len(self.by_hand)
        self.tensors = tensors
        return _distinct(
            [
                _cut(s, source.catalog.tensors[found.tensors.get(s.fqn, s.fqn)])
                for s in local_shards(tensors)
            ]
        )

    def _check_descriptions(self) -> list[str]:
        """Checks that quantized weights of the state are of the kinds that were saved.

        Returns a note on those of which the checkpoint tells no kind: other writers do not.

        Raises:
            PlanError: one is of another class, or its tensors mean something else.
        """
        untold, objects = list[str](), self.source.catalog.objects
        for name, found in self.exported.composites.items():
            if not any(part in self.found.tensors for part in found.parts):
                continue
            stored = self.found.objects.get(name, name)
            if stored not in objects:
                untold.append(name)
                continue
            theirs = _read_object(self.source, stored, self.request.trust_pickle)
            check_kind(name, theirs, found.described)
        self._refuse_other_parts()
        what = f"the checkpoint does not tell the kind of {len(untold):,} quantized weights"
        return (
            [f"{what}; they are taken for those of the state: {shown_names(untold)}"]
            if untold
            else []
        )

    def _refuse_other_parts(self) -> None:
        """Checks that quantized weights have no parts in the checkpoint that the state lacks.

        Raises:
            PlanError: with the name of such a part.
        """
        fronts, used = dict[str, str](), set(self.found.tensors.values())
        for name, found in self.exported.composites.items():
            for part in found.parts:
                key = part.removeprefix(part_front(name))
                if stored := self.found.tensors.get(part, ""):
                    fronts[stored.removesuffix(key)] = name
        every = tuple(fronts)
        for stored in self.source.catalog.tensors if fronts else ():
            if stored not in used and stored.startswith(every):
                front = next(one for one in every if stored.startswith(one))
                raise PlanError(
                    f"a quantized weight has a part that the state lacks: {printable(stored)!r} of"
                    f" {printable(fronts[front])!r}",
                    hint="quantize the model as it was quantized for the save",
                )

    def replicated(self) -> list[str]:
        """Returns the stored names that this rank loads and that several ranks saved."""
        found = self.found
        return self._replicated([*found.tensors.values(), *found.objects.values(), *found.new])

    def all_replicated(self) -> list[str]:
        """Returns the stored names that several ranks saved."""
        catalog = self.source.catalog
        return self._replicated([*catalog.tensors, *catalog.objects])

    def _replicated(self, names: Sequence[str]) -> list[str]:
        """Picks the names with copies to compare: a sealed fingerprint needs no second copy."""
        catalog = self.source.catalog
        return [
            n
            for n in dict.fromkeys(names)
            if (n in catalog.objects and catalog.objects[n].replicas)
            or (n in catalog.tensors and not self.proof.has(n) and replicas(catalog.tensors[n]))
        ]

    def prove_replicas(self, names: Sequence[str]) -> None:
        """Compares the copies that several ranks saved; the ranks of this load share the work.

        Args:
            names: the stored names, the same on all ranks.

        Raises:
            IntegrityError: two copies differ.
        """
        catalog = self.source.catalog
        prove_replicas(
            self.source,
            [catalog.tensors[n] for n in names if n in catalog.tensors],
            [catalog.objects[n] for n in names if n in catalog.objects],
            self.jobs,
            group=self.group,
        )

    def read(self, shards: Sequence[Shard]) -> None:
        """Reads the shards into their memory, and the objects."""
        source, found, exported, request = self.source, self.found, self.exported, self.request
        read_shards(
            source,
            shards,
            found.tensors,
            self.jobs,
            DEFAULT_MEMORY_BYTES,
            self.report,
            self.proof,
        )
        for name, how in self.by_hand.items():
            _fit_by_hand(
                source,
                found.tensors[name],
                name,
                exported.tensors[name],
                how,
                request.cast,
                self.jobs,
                self.report,
                self.proof,
            )
        by_stored = {
            found.tensors.get(n, n): value for n, value in exported.tensors.items()
        } | self.added
        wanted = found.objects | {n: n for n in found.new if n in source.catalog.objects}
        self.values = {
            n: _read_object(source, stored, request.trust_pickle, by_stored)
            for n, stored in wanted.items()
        }
        if request.rename:
            _rename_params(
                self.values, source, parameter_renamer(self.as_stored, substituter(request.rename))
            )
        self.values |= {
            n: self.named.params[s] for n, s in wanted.items() if s in self.named.params
        }
        self._check_alike()
        self.report.num_objects = len(self.values)
        self.of_rank = {
            n: _per_rank(source, n, held.wrapper, self.group, request, self.report)
            for n, held in exported.per_rank.items()
            if request.wants(n)
        }

    def _check_alike(self) -> None:
        """Checks that the parameters of one group were saved with the same options."""
        for ours, names in self.found.alike.items():
            first, *others = map(self._option, names)
            different = [n for n, data in zip(names[1:], others, strict=True) if data != first]
            if different:
                raise PlanError(
                    "parameters of one group were saved with different options:"
                    f" {printable(names[0])!r} and {printable(different[0])!r}",
                    hint=(
                        "group the parameters as they were when they were saved"
                        f" ({printable(ours)!r})"
                    ),
                )

    def _option(self, stored: str) -> bytes:
        """Returns the bytes of a stored option: of an object, or the elements of a tensor."""
        entry = self.source.catalog.tensors.get(stored)
        if entry is None:
            return read_object(self.source.store, self.source.catalog.objects[stored])
        value = _read_tensor(self.source, stored, stored, self.jobs, self.report, self.proof)
        return bytes(value.reshape(-1).view(torch.uint8).tolist())

    def restore(self) -> None:
        """Hands everything to the state."""
        exported, report = self.exported, self.report
        stored = {name: plain_path(path) for name, path in self.source.catalog.paths.items()}
        current: dict[str, Any] = {**exported.tensors, **exported.objects}
        names = [*current, *self.added, *self.values]
        plain_values = {flat_name(path) for path in exported.plain}
        mine = exported.paths
        # these become the stored values; a key with a dot stays the key that the state has
        replaced = {
            n
            for n in names
            if n in stored
            and places_above(n, plain_values)
            and len(mine.get(n, stored[n])) == len(stored[n])
        }
        paths = {
            n: (
                stored[n]
                if n in replaced
                else exported.paths.get(n) or stored.get(n) or tuple(n.split("."))
            )
            for n in names
        }
        touched = {root_of(n, paths) for n in (*self.tensors, *self.values, *self.by_hand)}
        left = self.found.gone | self._idle(paths)
        given = {n: v for n, v in current.items() if root_of(n, paths) in touched and n not in left}
        given |= self.added | self.values
        for name, found in exported.composites.items():  # filled where they lie
            for part in (name, *found.parts):
                given.pop(part, None)
        made = not_live(exported.composites, (m for _, m in exported.owners.modules))
        given |= {n: found.value for n, found in made.items() if not left.issuperset(found.parts)}
        manifest = self.manifest
        # checkpoints of the manager keep integer keys
        if manifest is None or manifest.operation != "save" or manifest.step is None:
            int_keys(exported, given, paths, report.notes)
        refused, notes = restore(self.state, given, paths)
        report.notes += notes
        if refused:
            what = f"modules have exported {len(refused)} values that they do not take back"
            shown = ", ".join(map(printable, refused[:8])) + (" …" if len(refused) > 8 else "")
            if self.request.strict:
                raise PlanError(
                    f"{what}: {shown}",
                    hint="their load_state_dict must accept the names of their state_dict",
                )
            report.notes.append(f"{what}: {shown}")
        for name, value in self.of_rank.items():
            if value is not None:
                loader = _set_per_rank(self.state, exported.per_rank[name], value[0])
                if has_read_all(loader, value[0]):
                    report.notes.append(
                        f"{printable(name)}: the step was saved after the last batch of an epoch,"
                        " so the next loop over it is empty; begin the next epoch"
                    )
        kept = [n for n in exported.kept if root_of(n, paths) in touched]
        if kept:
            shown = ", ".join(kept[:8]) + (" …" if len(kept) > 8 else "")
            report.notes.append(
                f"{len(kept)} buffers are not persistent, are in no checkpoint and keep what they"
                f" have: {shown}"
            )

    def _idle(self, paths: Mapping[str, Key]) -> set[str]:
        """Returns the names of new optimizer state memory that was not loaded."""
        fresh = {flat_name(path) for path in self.exported.fresh}
        loaded = {*self.tensors, *self.by_hand}
        return {
            n
            for n in self.exported.tensors
            if n not in loaded
            and any(flat_name(paths[n][:-depth]) in fresh for depth in (1, 2))  # 2: parts
        }


def _without_empty(
    catalog: Catalog, owners: StateOwners, read_value: Callable[[str], Any]
) -> Catalog:
    """Returns the catalog without the empty dicts of optimizers and modules that keep nothing.

    `torch.save` stores them, for example the state of plain SGD. A save of this tool does not.
    """
    places = [f"{flat_name(path)}.state" for path, _ in owners.optimizers]
    places += [flat_name(path) for path, _ in owners.modules]
    empty = {n for n in places if n in catalog.objects and read_value(n) == {}}
    return keep(catalog, lambda fqn: fqn not in empty) if empty else catalog


def _cut(shard: Shard, entry: TensorEntry) -> Shard:
    """Returns the part of a shard that the checkpoint has, if its tensor was smaller."""
    if shard.shape == entry.shape:
        return shard
    box = shard.box.intersect(whole(entry.shape)) or Box(
        shard.box.offsets, (0,) * len(shard.box.sizes)
    )
    inner = tuple(
        slice(o - p, o - p + n)
        for o, p, n in zip(box.offsets, shard.box.offsets, box.sizes, strict=True)
    )
    offsets = box.offsets if box.numel else (0,) * len(box.offsets)
    return Shard(shard.fqn, shard.dtype, entry.shape, Box(offsets, box.sizes), shard.tensor[inner])


def _fit_by_hand(
    source: Source,
    stored: str,
    name: str,
    tensor: torch.Tensor,
    how: OnMismatch,
    cast: bool,
    jobs: int,
    report: LoadReport,
    proof: LoadProof,
) -> None:
    """Reads a whole tensor and fits it to the state's shape with the user's function."""
    whole_tensor = _read_tensor(source, stored, name, jobs, report, proof)
    assert callable(how)
    result = how(whole_tensor, tuple(tensor.shape))
    if not isinstance(result, torch.Tensor) or result.shape != tensor.shape:
        got = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise PlanError(
            f"the function of on_mismatch returned {got} for {printable(name)!r}: expected"
            f" {list(tensor.shape)}"
        )
    if result.dtype != tensor.dtype and not cast:
        raise PlanError(
            f"the function of on_mismatch returned {result.dtype} for {printable(name)!r}: expected"
            f" {tensor.dtype}",
            hint="pass cast=True",
        )
    for shard in local_shards({name: tensor}):
        inner = tuple(slice(o, e) for o, e in zip(shard.box.offsets, shard.box.ends, strict=True))
        shard.tensor.copy_(result[inner])


def _read_tensor(
    source: Source, stored: str, name: str, jobs: int, report: LoadReport, proof: LoadProof
) -> torch.Tensor:
    """Reads a whole tensor; `name` is that of the state."""
    found = empty_tensor(source.catalog.tensors[stored])
    shards = local_shards({name: found})
    read_shards(source, shards, {name: stored}, jobs, DEFAULT_MEMORY_BYTES, report, proof)
    return found


def _rename_params(values: dict[str, Any], source: Source, new_name: Callable[[str], str]) -> None:
    """Renames the parameters in the lists of optimizer groups, as their states are renamed."""
    for name, value in values.items():
        path = plain_path(source.catalog.paths.get(name, ())) or tuple(name.split("."))
        if (
            path[-1] == "params"
            and len(path) > 2
            and path[-3] == "param_groups"
            and isinstance(value, list)
        ):
            value[:] = [new_name(item) if isinstance(item, str) else item for item in value]


def _share(
    group: GlooGroup, job: _Load, shards: list[Shard], read_once: bool | None
) -> list[Shard]:
    """Reads shards together with other ranks if this pays; returns the remaining shards."""
    source, report = job.source, job.report
    is_remote = source.store.capabilities.is_remote
    if group.size == 1 or not (is_remote if read_once is None else read_once):
        return shards
    near = group if read_once else group.of_host()
    gap_nbytes = GAP_BYTES if is_remote else 0
    division = divide(near, source.catalog, shards, job.found.tensors, gap_nbytes)
    if not division.areas:
        return shards
    shared = {number: shard for number, shard in enumerate(shards) if number not in division.alone}
    done = read_together(near, source, division, shared, job.jobs, DEFAULT_MEMORY_BYTES, job.proof)
    if done is None:
        source.store.close()  # the bytes may have been damaged on the way: read them again
        return shards
    report.read_nbytes, report.needed_nbytes, report.received_nbytes, report.num_proved = done
    return [shard for number, shard in enumerate(shards) if number in division.alone]


# ---- reading -------------------------------------------------------------------------------------


def _distinct(shards: Sequence[Shard]) -> list[Shard]:
    """Returns the shards without those whose memory another shard fills already."""
    seen: dict[Any, Shard] = {}
    return [s for s in shards if (key := alias_key(s)) is None or seen.setdefault(key, s) is s]


def _read_object(
    source: Source, name: str, trust_pickle: bool, tensors: Mapping[str, Any] | None = None
) -> Any:
    """Reads an object. `tensors` has the tensors that it may refer to, by stored name."""
    data = read_object(source.store, source.catalog.objects[name])
    return unpack(
        data,
        name,
        trust_pickle,
        tensors.__getitem__ if tensors and name.endswith(f".{STRUCTURE}") else None,
    )


def _per_rank(
    source: Source,
    name: str,
    wrapper: PerRank,
    group: GlooGroup,
    request: LoadRequest,
    report: LoadReport,
) -> tuple[Any] | None:
    """Returns this rank's state of a per-rank value; None if it keeps its present one."""
    stored = 0
    while name_of_rank(name, stored) in source.catalog.objects:
        stored += 1
    if stored == group.size:
        return (_read_object(source, name_of_rank(name, group.rank), request.trust_pickle),)
    what = (
        f"{name}: the checkpoint has the states of {stored} rank{'s' * (stored != 1)}, this job has"
        f" {group.size}"
        if stored
        else f"{name} is not in the checkpoint"
    )
    if stored and (callable(wrapper.on_resize) or wrapper.on_resize == "round-robin"):
        states = [
            _read_object(source, name_of_rank(name, r), request.trust_pickle) for r in range(stored)
        ]
        if callable(wrapper.on_resize):
            state, note = wrapper.on_resize(states, group.rank, group.size), "redistributed"
        else:
            state, note = deal_in_turn(states, group.rank, group.size)
        report.notes.append(f"{what}; {note}")
        return (state,)
    if wrapper.on_resize == "refuse":
        raise PlanError(
            what,
            hint=(
                "PerRank(value, on_resize='reset') keeps each rank's own state; a function can"
                " redistribute the states"
            ),
        )
    report.notes.append(f"{what}; reset: every rank keeps its own")
    return None


def _lacks_frozen(manifest: Manifest | None) -> bool:
    """Tells whether the save may have left out frozen parameters."""
    return manifest is not None and manifest.source.get("only") in tuple(Only)


def _set_per_rank(state: Any, held: PlacedPerRank, value: Any) -> Any:
    """Sets the value of a `PerRank`, and returns it."""
    holder = state
    for key in held.path:
        holder = (
            holder[next(k for k in holder if k == key or str(k) == key)]
            if isinstance(holder, Mapping)
            else holder[key]
        )
    inner = holder.value if isinstance(holder, PerRank) else holder
    made = set_state_of_rank(inner, value, held.path)
    if isinstance(holder, PerRank):
        holder.value = made
    return made
