"""Loading a checkpoint into a live state: each rank reads the bytes that its shards need, straight into their memory.

Any saved layout into any present one: a load is a copy plan from the checkpoint's catalog into memory. What does not fit is
told in one table before a byte is read. Imports torch. May import levels 0 to 4, shards, state and group.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ckpt_tools.catalog import Catalog, Extent, TensorEntry, find_model, matcher, strip_wrappers
from ckpt_tools.engine.run import run
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import FillSink
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import Source, open_source
from ckpt_tools.live.group import Group
from ckpt_tools.live.shards import Shard, alias_key, as_bytes, local_shards
from ckpt_tools.live.state import Exported, Key, PerRank, export, name_of_rank, restore, unpack
from ckpt_tools.plan import Plan, Slot, Target, plan_transfer
from ckpt_tools.storage import MemoryStore, read

_SHOWN = 8


@dataclass(slots=True)
class LoadReport:
    """What a load did on this rank.

    Attributes:
        path: the checkpoint.
        num_tensors, num_objects: how many of the state's entries were loaded.
        read_nbytes, needed_nbytes: bytes read, and bytes of this rank's shards.
        num_proved: chunks that were read in full and whose checksum was right.
        notes: what did not carry over and what became of it; names that were mapped; what was left out.
    """

    path: str
    num_tensors: int = 0
    num_objects: int = 0
    read_nbytes: int = 0
    needed_nbytes: int = 0
    num_proved: int = 0
    notes: list[str] = field(default_factory=list)


class Match(NamedTuple):
    """How the names of a state and of a checkpoint meet: ours to stored.

    `new` has stored names below free values, which become whatever was stored; `gone` ours that are left out for that reason,
    or because the checkpoint has no optimizer state of that parameter.
    """

    tensors: dict[str, str]
    objects: dict[str, str]
    new: list[str]
    gone: set[str]
    notes: list[str]


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    group: Group,
    *,
    select: Sequence[str] = (),
    strict: bool = True,
    cast: bool = False,
    trust_pickle: bool = False,
    jobs: int | None = None,
    memory_bytes: int | None = None,
) -> LoadReport:
    """Loads a checkpoint into modules, optimizers and values; called by all ranks of `group`.

    Args:
        path: any checkpoint that `ckpt` reads.
        state: as it was given to `save`; plain values in it are replaced.
        group: the ranks that load together.
        select: globs of names to load; everything where empty. The rest keeps what it has.
        strict: refuse where the checkpoint lacks something of the state or has more under the same keys; else note it.
        cast: let floating-point tensors change their type on the way.
        trust_pickle: run the code that objects of the checkpoint ask for.
        jobs, memory_bytes: threads and budget of buffers.

    Raises:
        PlanError: the checkpoint does not fit the state; the message is a table of everything that does not.
        CheckpointError: it is damaged or cannot be read; or another rank failed.
    """
    with group.phase(f"open {printable(str(path))}"):
        source = open_source(path)
        exported = export(state, for_loading=True)
        found = match(exported, source.catalog, matcher(select) if select else lambda _: True, strict, cast, str(source.path))
    report = LoadReport(str(source.path), notes=found.notes)
    jobs = jobs or min(4, max(1, (os.cpu_count() or 1)))
    with group.phase(f"read {printable(str(path))}"):
        made = {n: _make(source.catalog.tensors[n]) for n in found.new if n in source.catalog.tensors}
        tensors = {n: exported.tensors[n] for n in found.tensors} | made
        _read_tensors(source, tensors, found.tensors, jobs, memory_bytes or DEFAULT_MEMORY_BYTES, report)
        wanted = found.objects | {n: n for n in found.new if n in source.catalog.objects}
        values: dict[str, Any] = {ours: _read_object(source, stored, trust_pickle) for ours, stored in wanted.items()}
        report.num_objects = len(values)
        ranks = {n: _per_rank(source, n, w, group, trust_pickle, report) for n, w in exported.per_rank.items() if not select}
        source.store.close()
    with group.phase(f"restore {printable(str(path))}"):
        touched = {_root(n) for n in (*tensors, *values)}
        current: dict[str, Any] = {**exported.tensors, **exported.objects}
        given = {n: v for n, v in current.items() if _root(n) in touched and n not in found.gone} | made | values
        paths = {n: exported.paths.get(n) or source.catalog.paths.get(n) or tuple(n.split(".")) for n in given}
        restore(state, given, paths)
        for name, value in ranks.items():
            if value is not None:
                _set_per_rank(state, name, value[0])
    return report


def _root(name: str) -> str:
    return name.partition(".")[0]


# ---- what fits what --------------------------------------------------------------------------------------------------------


def match(exported: Exported, catalog: Catalog, wanted: Callable[[str], bool], strict: bool, cast: bool, where: str) -> Match:
    """Pairs a state's names with a checkpoint's.

    Raises:
        PlanError: with a table of all that does not fit.
    """
    notes: list[str] = []
    names = _mapping(exported, catalog, notes)
    tensors = {n: names.get(n, n) for n in exported.tensors if wanted(n)}
    objects = {n: names.get(n, n) for n in exported.objects if wanted(n)}
    missing = [n for n, stored in tensors.items() if stored not in catalog.tensors]
    missing_objects = [n for n, stored in objects.items() if stored not in catalog.objects]
    tied = _tied(exported, missing, tensors, catalog)
    stateless = set(_stateless(missing, catalog, names, exported))
    free = [".".join(map(str, path)) for path in exported.free]
    below = {f: [n for n in (*catalog.tensors, *catalog.objects) if _is_below(n, f) and wanted(n)] for f in free}
    gone = {n for n in (*missing, *missing_objects) for f in free if _is_below(n, f) and below[f]} | stateless
    absent = [n for n in (*missing, *missing_objects) if n not in tied and n not in gone]
    used = {*tensors.values(), *objects.values()}
    new = [n for names_below in below.values() for n in names_below if n not in used]
    extra = _extra(exported, catalog, {*used, *new}, wanted) if strict else []
    fitting = {n: s for n, s in tensors.items() if s in catalog.tensors}
    shapes = [n for n, s in fitting.items() if tuple(exported.tensors[n].shape) != catalog.tensors[s].shape]
    types = [n for n, s in fitting.items() if not _fits_type(exported.tensors[n], catalog.tensors[s], cast)]
    if shapes or types or (strict and (absent or extra)):
        raise PlanError(_table(exported, catalog, names, absent, extra, shapes, types, where), hint=_hint(absent, extra, types))
    if stateless:
        notes.append(f"{len(stateless)} entries of optimizer state are not in the checkpoint: those parameters start without")
    if absent:
        notes.append(f"{len(absent)} entries are not in the checkpoint and keep what they have: {_some(absent)}")
    left = sorted(
        {_root(n) for n in (*catalog.tensors, *catalog.objects)} - {_root(names.get(n, n)) for n in exported.paths} - set(exported.per_rank)
    )
    if left and not any(names):
        notes.append(f"not asked for and left out: {_some(left)}")
    return Match(fitting, {n: s for n, s in objects.items() if s in catalog.objects}, new, gone, notes)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _mapping(exported: Exported, catalog: Catalog, notes: list[str]) -> dict[str, str]:
    """Returns stored names for those of the state's keys of which nothing is there under its own name."""
    plain: dict[str, str] = {}
    for stored in catalog.tensors:
        plain.setdefault(strip_wrappers(stored), stored)
    result: dict[str, str] = {}
    model = ".".join(find_model(catalog))
    for root in {_root(n) for n in exported.tensors}:
        ours = [n for n in exported.tensors if _root(n) == root]
        if any(n in catalog.tensors for n in ours):
            continue
        for prefix in dict.fromkeys((f"{root}.", f"{model}." if model else "", "")):
            candidate = {n: plain.get(prefix + n[len(root) + 1 :], "") for n in ours}
            if sum(map(bool, candidate.values())) * 2 > len(ours):
                result |= {n: s for n, s in candidate.items() if s}
                notes.append(
                    f"{root}.* was stored as {prefix}*" if prefix != f"{root}." else f"{root}.* was stored with the prefixes of wrappers"
                )
                break
    return result


def _tied(exported: Exported, missing: Sequence[str], tensors: Mapping[str, str], catalog: Catalog) -> set[str]:
    """Returns the missing names that are the same memory as a name that is there."""
    if not missing:
        return set()
    keys = {s.fqn: alias_key(s) for s in local_shards({n: exported.tensors[n] for n in tensors})}
    there = {keys.get(n) for n, stored in tensors.items() if stored in catalog.tensors} - {None}
    return {n for n in missing if keys.get(n) in there}


def _stateless(missing: Sequence[str], catalog: Catalog, names: Mapping[str, str], exported: Exported) -> list[str]:
    """Returns the missing names that are state of a parameter for which the checkpoint has no optimizer state at all."""
    with_state = {name.rpartition(".")[0] for name in catalog.tensors}
    optimizers = {path[: path.index("param_groups")] for path in exported.paths.values() if "param_groups" in path}

    def is_state(path: Key) -> bool:
        return len(path) > 3 and path[-3] == "state" and path[:-3] in optimizers

    return [n for n in missing if is_state(exported.paths[n]) and names.get(n, n).rpartition(".")[0] not in with_state]


def _extra(exported: Exported, catalog: Catalog, used: set[str], wanted: Callable[[str], bool]) -> list[str]:
    roots = {_root(n) for n in exported.paths}
    known = tuple(f"{name}." for name in exported.per_rank)
    return [
        n
        for n in (*catalog.tensors, *catalog.objects)
        if _root(n) in roots and n not in used and wanted(n) and not n.startswith(known or ("\0",))
    ]


def _fits_type(tensor: torch.Tensor, entry: TensorEntry, cast: bool) -> bool:
    name = str(tensor.dtype).removeprefix("torch.")
    return name == entry.dtype.name or (cast and tensor.dtype.is_floating_point and entry.dtype.is_castable)


def _table(
    exported: Exported, catalog: Catalog, names: Mapping[str, str],
    absent: Sequence[str], extra: Sequence[str], shapes: Sequence[str], types: Sequence[str], where: str,
) -> str:  # fmt: skip
    def ours(name: str) -> str:
        value = exported.tensors.get(name)
        return "" if value is None else f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

    def theirs(name: str) -> str:
        entry = catalog.tensors.get(names.get(name, name))
        return "" if entry is None else f"{entry.dtype.name} {list(entry.shape)}"

    lines = [f"the checkpoint does not fit the state ({printable(where)})"]
    for title, group, describe in (
        ("missing from the checkpoint", absent, lambda n: ours(n) + _nearest(n, extra)),
        ("in the checkpoint, but not in the state", extra, theirs),
        ("shapes differ", shapes, lambda n: f"state {ours(n)}, checkpoint {theirs(n)}"),
        ("types differ", [n for n in types if n not in set(shapes)], lambda n: f"state {ours(n)}, checkpoint {theirs(n)}"),
    ):
        if group:
            width = min(60, max(len(printable(n)) for n in group[:_SHOWN]))
            lines.append(f"  {title}: {len(group)}")
            lines += [f"    {printable(n):{width}}  {describe(n)}".rstrip() for n in group[:_SHOWN]]
            lines += [f"    … and {len(group) - _SHOWN} more"] if len(group) > _SHOWN else []
    return "\n".join(lines)


def _nearest(name: str, others: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, others[:2000], 1, 0.8)
    return f"  nearest: {printable(close[0])}" if close else ""


def _hint(absent: Sequence[str], extra: Sequence[str], types: Sequence[str]) -> str:
    if absent and len(absent) == len(extra):
        ours, theirs = _difference(absent[0], extra[0])
        if {ours + n.removeprefix(theirs) for n in extra} == set(absent):
            return f"the names differ by a prefix only: {printable(theirs)!r} in the checkpoint, {printable(ours)!r} in the state"
    if types and not absent and not extra:
        return "pass cast=True to convert on the way"
    return "pass strict=False to load what fits and keep the rest, or select=[…] to load a part"


def _difference(ours: str, theirs: str) -> tuple[str, str]:
    """Returns what stands before the longest common end of two names."""
    same = next((i for i, (a, b) in enumerate(zip(reversed(ours), reversed(theirs), strict=False)) if a != b), min(len(ours), len(theirs)))
    return ours[: len(ours) - same], theirs[: len(theirs) - same]


def _some(names: Sequence[str]) -> str:
    return ", ".join(printable(n) for n in names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# ---- reading ---------------------------------------------------------------------------------------------------------------


def _make(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))


def _read_tensors(
    source: Source, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], jobs: int, memory_bytes: int, report: LoadReport
) -> None:
    """Fills this rank's shards of `tensors`; `names` has those that are stored under another name."""
    shards = _distinct(local_shards(tensors))
    report.num_tensors = len(tensors)
    memory: dict[str, memoryview] = {}
    bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
    slots: dict[str, list[Slot]] = {}
    for number, shard in enumerate(shards):
        view = as_bytes(shard.tensor)
        if view is None:  # on a device, or strided: by way of the host
            host = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, pin_memory=shard.tensor.device.type == "cuda")
            bounced.append((shard.tensor, host))
            view = as_bytes(host)
        assert view is not None
        memory[str(number)] = view
        slots.setdefault(shard.fqn, []).append(Slot(shard.box, str(number), 0))
    catalog = replace(source.catalog, tensors={n: replace(source.catalog.tensors[names.get(n, n)], fqn=n) for n in slots})
    target = Target("memory", {name: len(view) for name, view in memory.items()}, {n: tuple(s) for n, s in slots.items()})
    plan = plan_transfer(catalog, target, {s.fqn: s.dtype for s in shards})
    located = source.format.locate(source.store, [_used(catalog.tensors[t.fqn], {c.src for c in t.copies}) for t in plan.tensors])
    sink = FillSink(MemoryStore(memory), _read_whole(plan, located))
    totals = run(schedule(plan, located, *tile_bytes(memory_bytes, jobs)), source.store, sink, jobs)
    sink.finish()
    for tensor, host in bounced:
        tensor.copy_(host)
    report.read_nbytes, report.needed_nbytes, report.num_proved = totals.read_nbytes, plan.payload_bytes, sink.num_proved


def _distinct(shards: Sequence[Shard]) -> list[Shard]:
    """Leaves out shards whose memory another one fills already."""
    seen: dict[Any, Shard] = {}
    return [s for s in shards if (key := alias_key(s)) is None or seen.setdefault(key, s) is s]


def _used(entry: TensorEntry, numbers: set[int]) -> TensorEntry:
    return replace(entry, chunks=tuple(entry.chunks[i] for i in sorted(numbers)))


def _read_whole(plan: Plan, located: Mapping[Extent, Extent]) -> list[Extent]:
    """Returns the payloads that this rank reads in full and whose checksum is known."""
    whole: list[Extent] = []
    for tensor in plan.tensors:
        taken: dict[int, int] = {}
        for copy in tensor.copies:
            taken[copy.src] = taken.get(copy.src, 0) + copy.box.numel
        for number, numel in taken.items():
            extent = located.get(tensor.chunks[number].extent, tensor.chunks[number].extent)
            if extent.crc32 is not None and extent.strides is None and numel == tensor.chunks[number].box.numel:
                whole.append(extent)
    return whole


def _read_object(source: Source, name: str, trust_pickle: bool) -> Any:
    extent = source.catalog.objects[name].extent
    return unpack(read(source.store, extent.file, extent.start, extent.nbytes), name, trust_pickle)


def _per_rank(source: Source, name: str, wrapper: PerRank, group: Group, trust_pickle: bool, report: LoadReport) -> tuple[Any] | None:
    """Returns this rank's state of a per-rank value, None where it keeps what it has."""
    stored = 0
    while name_of_rank(name, stored) in source.catalog.objects:
        stored += 1
    if stored == group.size:
        return (_read_object(source, name_of_rank(name, group.rank), trust_pickle),)
    what = f"{name}: the checkpoint has the states of {stored} ranks, this job has {group.size}"
    if callable(wrapper.on_resize) and stored:
        states = [_read_object(source, name_of_rank(name, r), trust_pickle) for r in range(stored)]
        report.notes.append(f"{what}; redistributed")
        return (wrapper.on_resize(states, group.rank, group.size),)
    if wrapper.on_resize == "refuse":
        raise PlanError(what, hint="PerRank(value, on_resize='reset') keeps each rank's own; a function can deal them out again")
    report.notes.append(f"{what}; reset: every rank keeps its own")
    return None


def _set_per_rank(state: MutableMapping[str, Any], name: str, value: Any) -> None:
    *path, key = name.split(".")
    owner = state
    for part in path:
        owner = owner[part]
    holder = owner[key]
    inner = holder.value if isinstance(holder, PerRank) else holder
    if hasattr(inner, "load_state_dict"):
        inner.load_state_dict(value)
    else:
        holder.value = value
