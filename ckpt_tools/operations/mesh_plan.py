"""Which box of each tensor does a rank of a mesh save?

A mesh has up to four axes: copies of the model (`replicate`), FSDP2 (`fsdp`), tensor parallelism
(`tp`), and parallel experts (`ep`). `fsdp` splits every parameter along dim 0. A plan tells along
which dim `tp` and `ep` split which parameters. The moments of an optimizer go with their parameter.

Source: torchtitan 0.3, `distributed/parallel_dims.py` (`ep` takes its ranks from those of `fsdp`
and `tp`) and `distributed/fsdp.py` (along which dim FSDP splits experts).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import model_only, strip_wrappers, stripper
from ckpt_tools.core.placements import (
    Placement,
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
    rank_boxes,
    split_dims,
)
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.operations.convert.dtensor_mesh import find_sharded
from ckpt_tools.ranks.base import MAX_RANKS
from ckpt_tools.storage.small_files import parse_json, read_named

_OWN = Path(__file__).parents[1] / "plans"
_RULED = ("fsdp", "tp", "ep")  # axes for which a plan has rules
_SHOWN, _MOST_DIMS = 4, 64


class RankMesh(NamedTuple):
    """The ranks along each axis. `ep` takes its ranks from those of `fsdp` and `tp`."""

    replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks."""
        return self.replicate * self.fsdp * self.tp

    def __str__(self) -> str:
        return ",".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1) or "fsdp=1"


def mesh_of_axes(text: str) -> RankMesh:
    """Reads a mesh, such as `fsdp=8,tp=2,ep=4`.

    Raises:
        PlanError: it has another form; or `ep` does not divide the ranks of `fsdp` and `tp`.
    """
    hint = "give axes and their sizes: --mesh fsdp=8,tp=2. There are replicate, fsdp, tp and ep"
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        is_number = size.isdecimal() and size.isascii() and len(size) < 8
        if axis not in RankMesh._fields or axis in sizes or not is_number or int(size) < 1:
            raise PlanError(f"not an axis of a mesh: {printable(part)!r}", hint=hint)
        sizes[axis] = int(size)
    mesh = RankMesh(**sizes)
    if mesh.num_ranks > MAX_RANKS:
        raise PlanError(f"a mesh has at most {MAX_RANKS:,} ranks, got {mesh.num_ranks:,}")
    if mesh.fsdp * mesh.tp % mesh.ep:
        raise PlanError(
            f"ep={mesh.ep} does not divide the ranks of fsdp and tp, which are"
            f" {mesh.fsdp * mesh.tp}",
            hint="experts are spread over these ranks; ep adds none",
        )
    return mesh


Dims = tuple[int, ...]  # none for no split; of several, the first that has an element per rank
Rules = Sequence[tuple[re.Pattern[str], Dims]]


@dataclass(frozen=True)
class MeshPlan:
    """Along which dim each axis splits a parameter.

    Attributes:
        title: what tells it apart.
        rules: by axis, regular expressions of whole names of parameters. The first one counts.
        is_own: it comes along, and has rules for several models.
    """

    title: str
    rules: Mapping[str, Rules]
    is_own: bool = False

    def dims(self, axis: str, name: str) -> Dims | None:
        """Returns the dims along which an axis may split a parameter; None if no rule fits."""
        return next((d for fits, d in self.rules.get(axis, ()) if fits.fullmatch(name)), None)


def read_plan(path: str | os.PathLike[str]) -> MeshPlan:
    """Reads a plan from a file, or one that comes along by its name.

    Raises:
        PlanError: there is none, or it is malformed.
    """
    where = os.fspath(path)
    is_own = where in own_plans()
    try:
        body = parse_json(read_named(_OWN / f"{where}.json" if is_own else Path(where)))
        if not isinstance(body, dict) or body.keys() - {"about", *_RULED}:
            raise ValueError(f"expected a table with some of {', '.join(_RULED)}")
        rules = {axis: _rules(axis, body[axis]) for axis in _RULED if axis in body}
    except StorageError as error:
        raise PlanError(f"not a plan of a mesh: {error}", hint=error.hint) from error
    except (ValueError, TypeError, re.error, RecursionError, OverflowError, Warning) as error:
        raise PlanError(
            f"not a plan of a mesh: {printable(str(error))} ({printable(where)})",
            hint=f"plans that come along: {', '.join(own_plans())}; docs/scale.md has the form",
        ) from error
    return MeshPlan(where if is_own else os.path.basename(where), rules, is_own)


def own_plans() -> list[str]:
    """Returns the names of the plans that come along."""
    return sorted(path.stem for path in _OWN.glob("*.json"))


def _rules(axis: str, told: object) -> Rules:
    if not isinstance(told, dict):
        raise TypeError(f"{axis}: expected a table of regular expressions and dims")
    rules = []
    for pattern, dim in told.items():
        is_several = axis == "fsdp" and isinstance(dim, list) and dim
        dims = dim if is_several else [] if dim is None else [dim]
        if any(type(d) is not int or not 0 <= d < _MOST_DIMS for d in dims):
            raise ValueError(f"{axis}: {pattern}: expected a dim or null, got {dim!r:.40}")
        with warnings.catch_warnings(action="error"):  # sets that may get another meaning
            rules.append((re.compile(pattern), tuple(dims)))
    return rules


class MeshBoxes:
    """The boxes that the ranks of a mesh save of the tensors of a checkpoint."""

    def __init__(
        self, catalog: Catalog, world_size: int | None, mesh: RankMesh, plan: MeshPlan | None
    ) -> None:
        """Finds the parameters, and a plan that comes along if one is needed and none is given.

        Raises:
            PlanError: a rule fits no parameter; a parameter lacks the dim of its rule; or an axis
                splits nothing.
        """
        self.mesh, found = mesh, model_only(catalog)[0].tensors
        strip = stripper(found)
        model = {strip(n): t for n, t in found.items()}
        self._is_any_cut = any(map(_is_cut, catalog.tensors.values())) and world_size != 1
        self._shapes = {name: entry.shape for name, entry in model.items()}
        self._own = {entry.stored_name: name for name, entry in model.items()}
        self._lost, self._whole = list[str](), list[str]()
        needs = [axis for axis in ("tp", "ep") if getattr(mesh, axis) > 1]
        self.plan = plan or _plan_for(self._shapes, needs)
        self._check(needs)
        self._loads = [0] * mesh.num_ranks
        others = (t for t in catalog.tensors.values() if t.stored_name not in self._own)
        self._sharded = find_sharded(model, {self._parameter(t) for t in others} - {""})
        ruled = [{n for n in model if self.plan.dims(axis, n) is not None} for axis in _RULED]
        self._sharded |= set().union(*ruled)

    def _check(self, needs: Sequence[str]) -> None:
        name, num_fitting = next(iter(self._shapes), ""), 0
        for axis, rules in self.plan.rules.items():
            rest = list(self._shapes)
            for fits, dims in rules:
                found = [n for n in rest if fits.fullmatch(n)]
                rest = [n for n in rest if not fits.fullmatch(n)]
                num_fitting += len(found)
                if not found and not self.plan.is_own:
                    raise PlanError(
                        f"a rule of the plan fits no parameter that no earlier one fits: {axis}:"
                        f" {printable(fits.pattern)!r} ({printable(self.plan.title)})",
                        hint=f"names are those of the model, such as {printable(name)}",
                    )
                short = [n for n in found if dims and max(dims) >= len(self._shapes[n])]
                if short:
                    raise PlanError(
                        f"the plan splits {printable(short[0])!r} along dim {max(dims)}, and its"
                        f" shape is {list(self._shapes[short[0]])}"
                    )
        if self.plan.rules and not num_fitting:
            raise PlanError(
                f"no rule of the plan {printable(self.plan.title)} fits a parameter, such as"
                f" {printable(name)}",
                hint="leave --plan out, or give the plan of this model",
            )
        for axis in needs:
            if not any(self.plan.dims(axis, n) for n in self._shapes):
                raise PlanError(
                    f"{axis}={getattr(self.mesh, axis)} splits no parameter by the plan"
                    f" {printable(self.plan.title)}",
                    hint=f"leave {axis} out, or give rules for it: --plan FILE",
                )

    def of(self, entry: TensorEntry) -> tuple[Box | None, ...]:
        """Returns the box that each rank saves of a tensor; None for a rank that saves nothing.

        Of ranks with the same box, the one with the fewest bytes of such boxes so far saves it.
        """
        held = _held(entry.shape, *self._splits(entry))
        if not held.shared:
            return held.boxes
        saved = list(held.boxes)
        for ranks in held.shared:
            rank = min(ranks, key=self._loads.__getitem__)
            box = held.boxes[rank]
            assert box is not None
            self._loads[rank] += box.numel * entry.dtype.itemsize
            for other in ranks:
                if other != rank:
                    saved[other] = None
        return tuple(saved)

    def notes(self) -> list[str]:
        """Returns notes on the plan, and on what it has no rule for."""
        notes = []
        if self.plan.title:
            notes.append(f"split for {self.mesh} by the plan {printable(self.plan.title)}")
        if self.mesh.tp > 1:
            left = [
                n
                for n, shape in self._shapes.items()
                if shape
                and n in self._sharded
                and self.plan.dims("tp", n) is None
                and not (self.mesh.ep > 1 and self.plan.dims("ep", n))
            ]
            if left:
                notes.append(
                    f"the plan has no rule of tp for {_some(left)}: tp does not split them"
                )
        if self._lost:
            notes.append(
                f"fsdp alone splits {_some(self._lost)}: no parameter of the model has these names."
                " ckpt convert --to dcp writes names for numbers of parameters"
            )
        if self._whole:
            notes.append(
                f"whole, as buffers are: {_some(self._whole)}. A rule for fsdp splits them"
            )
        return notes

    def _splits(self, entry: TensorEntry) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
        """Returns the sizes of the axes that share a tensor, and its placements on them."""
        name, shape = self._parameter(entry), entry.shape
        is_sharded = name in self._sharded if name else _is_cut(entry) or not self._is_any_cut
        if not is_sharded or (whole(shape).numel < 2 and not name) or not shape:
            if whole(shape).numel > 1:
                self._whole.append(entry.fqn)
            return (self.mesh.num_ranks,), (ReplicatePlacement(),)
        if not name:
            self._lost.append(entry.fqn)
        mesh = self.mesh
        found = {axis: self.plan.dims(axis, name) or () for axis in ("tp", "ep")}
        sizes, inner = (mesh.replicate, mesh.fsdp, mesh.tp), found["tp"]
        num_sharing = mesh.replicate * mesh.fsdp  # as torchtitan counts them without `ep`
        if mesh.ep > 1 and found["ep"]:
            sizes, inner = (mesh.replicate, mesh.fsdp * mesh.tp // mesh.ep, mesh.ep), found["ep"]
            num_sharing = sizes[1] * sizes[2]
        wanted = self.plan.dims("fsdp", name)
        outer = (0,) if wanted is None else wanted
        outer = next(((d,) for d in outer if shape[d] >= num_sharing), outer[-1:])
        first: Placement = ReplicatePlacement()
        if outer:
            is_strided = inner == outer and sizes[2] > 1
            first = StridedShardPlacement(*outer) if is_strided else ShardPlacement(*outer)
        last = ShardPlacement(*inner) if inner else ReplicatePlacement()
        return sizes, (ReplicatePlacement(), first, last)

    def _parameter(self, entry: TensorEntry) -> str:
        """Returns a tensor's own name in the model, or that of whose moment it is; else ""."""
        own = self._own.get(entry.stored_name)
        if own is not None:
            return own
        keys = entry.fqn.split(".")
        for at in (number for number, key in enumerate(keys) if key == "state"):
            for end in range(len(keys) - 1, at + 1, -1):
                name = ".".join(keys[at + 1 : end])
                for found in (name, strip_wrappers(name)):
                    if found in self._shapes and _is_like(entry.shape, self._shapes[found]):
                        return found
        return ""


def _is_like(shape: Sequence[int], parameter: Sequence[int]) -> bool:
    """Tells whether state has the shape of a parameter, or has one element for several of it."""
    pairs = [*zip(shape, parameter, strict=False)]
    return len(shape) == len(parameter) and all(a == b or (a > 1 and b % a == 0) for a, b in pairs)


def _is_cut(entry: TensorEntry) -> bool:
    return bool(split_dims(entry.chunks.kinds(), entry.shape))


class _Held(NamedTuple):
    """The boxes of a tensor on the ranks of a mesh.

    Attributes:
        boxes: the box of each rank; None for an empty one, if another rank has that offset.
        shared: ranks with the same box.
    """

    boxes: tuple[Box | None, ...]
    shared: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def _held(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> _Held:
    boxes = [box for boxes in rank_boxes(shape, sizes, placements) for box in boxes]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, box in enumerate(boxes):  # DCP keeps one chunk per offset
        ranks = holders.setdefault(box.offsets, [])
        if ranks and boxes[ranks[0]].numel < box.numel:
            ranks.clear()
        if not ranks or boxes[ranks[0]] == box:
            ranks.append(rank)
    kept = {rank for ranks in holders.values() for rank in ranks}
    numel = sum(boxes[ranks[0]].numel for ranks in holders.values())
    assert numel == whole(shape).numel, (shape, sizes, placements)
    return _Held(
        tuple(box if rank in kept else None for rank, box in enumerate(boxes)),
        tuple(tuple(ranks) for ranks in holders.values() if len(ranks) > 1),
    )


def _plan_for(shapes: Mapping[str, Any], needs: Sequence[str]) -> MeshPlan:
    """Returns the plan that comes along with rules for most parameters of a model.

    Raises:
        PlanError: none does, or several do.
    """
    fitting = []
    for plan in map(read_plan, own_plans()):
        splits = [any(plan.dims(axis, n) for n in shapes) for axis in needs]
        known = [n for n in shapes if any(plan.dims(axis, n) is not None for axis in ("tp", "ep"))]
        if all(splits) and 2 * len(known) > len(shapes):
            fitting.append(plan)
    if not needs and len(fitting) != 1:
        return MeshPlan("", {})
    if len(fitting) != 1:
        some = ", ".join(plan.title for plan in fitting) or "none"
        raise PlanError(
            f"{' and '.join(needs)}: no single plan fits the names of the model, such as"
            f" {printable(next(iter(shapes), ''))!r} (fitting: {some})",
            hint=f"--plan FILE, or one that comes along: {', '.join(own_plans())}",
        )
    return fitting[0]


def _some(names: Iterable[str]) -> str:
    found = list(names)
    some = ", ".join(map(printable, found[:_SHOWN])) + ", …" * (len(found) > _SHOWN)
    return f"{len(found):,} tensors ({some})"
