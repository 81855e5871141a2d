"""Pairs the names of a live state with those of a checkpoint.

Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.naming import find_model, strip_wrappers
from ckpt_tools.core.selection import check_globs
from ckpt_tools.loop.loading.load_request import LoadRequest
from ckpt_tools.loop.loading.misfits import shown_names
from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.shards import alias_key, local_shards
from ckpt_tools.loop.state.state_dict import (
    STRUCTURE,
    ExportedState,
    flat_name,
    value_of_ranks,
)


def root_of(name: str, paths: Mapping[str, Key]) -> str:
    """Returns the top-level key of the state for an entry."""
    path = paths.get(name)
    return str(path[0]) if path else name.partition(".")[0]


class PairedNames:
    """The names of a state and of a checkpoint, as far as one pairs with the other.

    Attributes:
        names: names of the state to the stored names that they have there, where these differ.
        alike: see `Match`.
        settled: names of the state whose values other entries of the checkpoint give.
        free: names of values of the state that take any stored form.
        own: those of them that are the user's own values.
        is_strict: whether the state must have all of its names in the checkpoint.
        below: for each of `free`, the wanted stored names below it.
        tensors, objects: wanted names of the state to stored names.
        kinds: names that are a tensor in one and an object in the other.
    """

    def __init__(
        self, exported: ExportedState, catalog: Catalog, request: LoadRequest, notes: list[str]
    ) -> None:
        self.exported, self.catalog, self.notes, wanted = exported, catalog, notes, request.wants
        self.names = _mapping(exported, catalog, notes)
        self.alike, self.settled = _groups_by_parameter(exported, catalog)
        self.replaced = list[str]()
        self.own, self.is_strict = {flat_name(path) for path in exported.own}, request.strict
        free = {flat_name(path) for path in exported.free}
        # a dict whose tensors are stored under another name takes these, and nothing else
        self.free = free - {place for n in self.names for place in places_above(n, free)}
        self.names |= {n: stored[0] for n, stored in self.alike.items()}
        below = _stored_below(catalog, {flat_name(path): path for path in exported.free})
        below = {place: names for place, names in below.items() if place in self.free}
        self._check_globs(request, list(dict.fromkeys(chain.from_iterable(below.values()))))
        self.below = {
            place: [n for n in names if wanted(n) and not self._is_of_a_rank(n)]
            for place, names in below.items()
        }
        self.tensors = {n: self.names.get(n, n) for n in exported.tensors if wanted(n)}
        self.objects = {n: self.names.get(n, n) for n in exported.objects if wanted(n)}
        self.kinds = _kinds(catalog, self.tensors, self.objects, self.free)

    def _check_globs(self, request: LoadRequest, stored_below: Sequence[str]) -> None:
        exported = self.exported
        ours = [*exported.tensors, *exported.objects, *exported.per_rank]
        check_globs(request.select, [*ours, *stored_below], "select")
        check_globs(request.on_mismatch, [*exported.tensors], "on_mismatch")

    def paired(self) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the tensors and the objects that the checkpoint has."""
        tensors = {
            n: s
            for n, s in self.tensors.items()
            if s in self.catalog.tensors and n not in self.kinds
        }
        objects = {
            n: s
            for n, s in self.objects.items()
            if s in self.catalog.objects and n not in self.kinds
        }
        return tensors, objects

    def absent(self, lacks_frozen: bool) -> tuple[list[str], set[str]]:
        """Returns the names that the checkpoint lacks, and those that are left out for a reason.

        Args:
            lacks_frozen: the save has left out parameters that take no gradient.
        """
        exported, catalog = self.exported, self.catalog
        tensors, objects = self.paired()
        missing = [n for n in self.tensors if n not in tensors and n not in self.kinds]
        missing_objects = [n for n in self.objects if n not in objects and n not in self.kinds]
        every = [*missing, *missing_objects]
        tied = _tied(exported, missing, self.tensors, catalog)
        stateless = set(_stateless(missing, catalog, self.names, exported))
        if stateless:
            self.notes.append(
                f"{len(stateless)} entries of optimizer state are not in the checkpoint: those"
                " parameters start with empty state"
            )
        gone = {n for n in every if self._makes_way(n)} | stateless
        if self.replaced:
            self.notes.append(
                f"{len(self.replaced)} values of the state are replaced by what was stored in place"
                f" of their container: {shown_names(self.replaced)}"
            )
        empty = set(filter(self._is_empty, missing_objects))  # DCP stores none of them
        # torch's `load_state_dict` keeps the names of the job, if none are stored
        own = {n for n in missing_objects if exported.paths[n][-1] == "param_names"}
        own |= {n for n in missing_objects if n in exported.composites}  # other writers have none
        absent = [n for n in every if n not in tied | self.settled | empty | gone | own]
        if lacks_frozen:
            absent = _without_frozen(absent, exported.frozen, self.notes)
        return absent, gone

    def _is_of_a_rank(self, stored: str) -> bool:
        """Tells whether a `PerRank` has stored a name where the state has one value for all."""
        place = value_of_ranks(stored)
        if place in self.exported.tensors:
            return True
        return not isinstance(self.exported.objects.get(place), Mapping | None)

    def _is_empty(self, name: str) -> bool:
        """Tells whether a value of the state is an empty dict."""
        value = self.exported.objects.get(name)
        return isinstance(value, Mapping) and not value

    def _makes_way(self, name: str) -> bool:
        """Tells whether other stored names take the place of a missing name.

        The state of an object may have another form than now. A value of the user's own may have
        become a container. But a container of the user's own loses no name.
        """
        for place in places_above(name, self.free):
            if not self.below[place]:
                continue
            if place == name or place not in self.own:
                return True
            if any(n == name or n.startswith(f"{name}.") for n in self.below[place]):
                return True  # it was a single value, and is a container in the checkpoint
            # an empty container is no misfit (see `absent`), so it makes way, too
            may_go = not self.is_strict or self._is_empty(name)
            if may_go and any(self._takes_container(n, name) for n in self.below[place]):
                self.replaced.append(name)
                return True
        return False

    def _takes_container(self, stored: str, name: str) -> bool:
        """Tells whether a stored entry replaces a container of the state that holds a name.

        It is a value in place of the container, or one in a list where the state has a dict.
        """
        mine, theirs = self.exported.paths[name], self.catalog.paths.get(stored) or ()
        if theirs and theirs[-1] == STRUCTURE:  # such as a tuple, which is stored as one value
            return _begins(mine, theirs[:-1])
        pairs = zip(mine, theirs, strict=False)
        first = next(((a, b) for a, b in pairs if type(a) is not type(b) or a != b), None)
        is_other_kind = first is not None and type(first[0]) is not type(first[1])
        return is_other_kind or name.startswith(f"{stored}.")

    def used(self) -> set[str]:
        """Returns the stored names that a name of the state has taken."""
        tensors, objects = self.paired()
        used = {*tensors.values(), *objects.values()}
        used |= {self.names.get(n, n) for n in self.kinds}
        return used | {s for stored in self.alike.values() for s in stored}

    def left_out(self, used: set[str]) -> list[str]:
        """Returns the top-level keys of the checkpoint that the state lacks."""
        paths = self.catalog.paths
        stored = {root_of(n, paths) for n in (*self.catalog.tensors, *self.catalog.objects)}
        left = sorted(
            stored
            - self.exported.roots
            - {root_of(s, paths) for s in self.names.values()}
            - {root for s in used for root in (root_of(s, {}), root_of(s, paths))}
        )
        return [] if any(self.names) else left


def _without_frozen(absent: Sequence[str], frozen: set[str], notes: list[str]) -> list[str]:
    """Returns the absent names but for frozen parameters, which a note names."""
    kept = [n for n in absent if n in frozen]
    if kept:
        notes.append(
            f"the step has only what trains: {len(kept)} frozen parameters keep their values:"
            f" {shown_names(kept)}"
        )
    return [n for n in absent if n not in frozen]


def _stored_below(catalog: Catalog, free: Mapping[str, Key]) -> dict[str, list[str]]:
    """Returns the stored names at or below each place.

    A key with a dot has the name of two keys: `{"a.b": 1}` lies not below the key `a`.
    """
    below: dict[str, list[str]] = {place: [] for place in free}
    for name in (*catalog.tensors, *catalog.objects):
        path = catalog.paths.get(name)
        for place in places_above(name, free.keys()):
            if path is None or _begins(path, free[place]):
                below[place].append(name)
    return below


def _begins(path: Key, start: Key) -> bool:
    """Tells whether a path of keys begins with another one. A number may be stored as text."""
    return tuple(map(str, path[: len(start)])) == tuple(map(str, start))


def _kinds(
    catalog: Catalog, tensors: Mapping[str, str], objects: Mapping[str, str], free: set[str]
) -> list[str]:
    """Returns the state's names whose stored entry is of the other kind.

    These are tensors stored as values, and values of modules and optimizers stored as tensors.

    A plain value of the state takes any stored form, also a tensor. A tensor of the state stays
    one, because other objects may refer to it.
    """
    found = [n for n, stored in tensors.items() if stored in catalog.objects]
    return found + [
        n
        for n, stored in objects.items()
        if stored in catalog.tensors and not places_above(n, free)
    ]


def places_above(name: str, places: Collection[str]) -> list[str]:
    """Returns those of `places` that equal a flat name or contain it."""
    ends = [i for i, c in enumerate(name) if c == "."]
    return [place for end in (*ends, len(name)) if (place := name[:end]) in places]


def _mapping(exported: ExportedState, catalog: Catalog, notes: list[str]) -> dict[str, str]:
    """Returns stored names for top-level keys of the state that the checkpoint lacks."""
    plain: dict[str, str] = {}
    for stored in catalog.tensors:
        plain.setdefault(strip_wrappers(stored), stored)
    result: dict[str, str] = {}
    model = ".".join(find_model(catalog))
    by_root: dict[str, list[str]] = {}
    plain_values = {flat_name(path) for path in exported.plain}
    # a plain dict takes whatever a job has stored below its key; weights alone have no such keys
    free = plain_values if catalog.paths else set()
    for name in (n for n in exported.tensors if not places_above(n, free)):
        by_root.setdefault(root_of(name, exported.paths), []).append(name)
    direct = exported.tensors.keys() & catalog.tensors.keys()
    found: dict[str, tuple[str, dict[str, str]]] = {}  # prefix and stored names, by root
    for root, ours in by_root.items():
        if direct.isdisjoint(ours) and (fit := _prefix_that_fits(root, ours, model, plain)):
            found[root] = fit
    takers = Counter(s for _, names in found.values() for s in names.values())
    for root, (prefix, names) in found.items():
        # another part of the state has these values: this one was not saved
        if any(s in direct or takers[s] > 1 for s in names.values()):
            continue
        result |= names
        notes.append(
            f"{root}.* was stored as {prefix}*"
            if prefix != f"{root}."
            else f"{root}.* was stored with the prefixes of wrappers"
        )
    return result


def _prefix_that_fits(
    root: str, ours: Sequence[str], model: str, plain: Mapping[str, str]
) -> tuple[str, dict[str, str]] | None:
    """Returns a prefix with which most names of a key are stored, and the stored names."""
    usual = (f"{root}.", f"{root}.module.", f"{model}." if model else "", "")  # DDP's module
    for prefix in dict.fromkeys(usual):
        names = {n: s for n in ours if (s := plain.get(prefix + n[len(root) + 1 :]))}
        if len(names) * 2 > len(ours):
            return prefix, names
    return None


def _groups_by_parameter(
    exported: ExportedState, catalog: Catalog
) -> tuple[dict[str, list[str]], set[str]]:
    """Pairs the options of param_groups with those of a flattened optimizer.

    A flattened optimizer (torchtitan) keeps the options per parameter.

    Returns:
        All stored names for each option of the state; and the names of the groups' parameter lists,
        for which nothing is stored.
    """
    alike: dict[str, list[str]] = {}
    settled: set[str] = set()
    stored_names = {*catalog.objects, *catalog.tensors}
    for name, path in exported.paths.items():
        if len(path) < 4 or path[-3] != "param_groups":
            continue
        *root, _, option = map(str, path)
        params = ".".join((*map(str, path[:-1]), "params"))
        # the name of a parameter may be the number of a group: `0` in a ParameterList
        if name in stored_names and (option == "params" or _has_list(params, stored_names)):
            continue
        members = exported.objects.get(params, ())
        stored = [s for fqn in members if (s := ".".join((*root, fqn, option))) in stored_names]
        if stored:
            alike[name] = stored
            settled.add(params)
    return alike, settled


def _has_list(name: str, stored_names: set[str]) -> bool:
    """Tells whether a list is stored, as one object or by its items."""
    return name in stored_names or f"{name}.0" in stored_names


def _tied(
    exported: ExportedState, missing: Sequence[str], tensors: Mapping[str, str], catalog: Catalog
) -> set[str]:
    """Returns the missing names that share memory with a name that is present."""
    if not missing:
        return set()
    keys = {s.fqn: alias_key(s) for s in local_shards({n: exported.tensors[n] for n in tensors})}
    there = {keys.get(n) for n, stored in tensors.items() if stored in catalog.tensors} - {None}
    return {n for n in missing if keys.get(n) in there}


def _stateless(
    missing: Sequence[str], catalog: Catalog, names: Mapping[str, str], exported: ExportedState
) -> list[str]:
    """Returns the missing names whose parameter has no optimizer state in the checkpoint."""
    with_state = {name.rpartition(".")[0] for name in catalog.tensors}
    optimizers = {
        path[: path.index("param_groups")]
        for path in exported.paths.values()
        if "param_groups" in path
    }

    def is_state(path: Key) -> bool:
        return len(path) > 3 and path[-3] == "state" and path[:-3] in optimizers

    return [
        n
        for n in missing
        if is_state(exported.paths[n]) and names.get(n, n).rpartition(".")[0] not in with_state
    ]
