"""Chooses and renames the entries of a catalog."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.errors import PlanError, printable


def keep(catalog: Catalog, wanted: Callable[[str], bool]) -> Catalog:
    """Returns the catalog with only the entries whose FQN passes `wanted`."""
    return replace(
        catalog,
        tensors={k: v for k, v in catalog.tensors.items() if wanted(k)},
        objects={k: v for k, v in catalog.objects.items() if wanted(k)},
        paths={k: v for k, v in catalog.paths.items() if wanted(k)},
        unread={k: v for k, v in catalog.unread.items() if wanted(k)},
    )


def check_new_name(old: str, new: str) -> None:
    """Refuses a new name of a tensor that no format can hold.

    Raises:
        PlanError: it is empty, or not Unicode text.
    """
    if not new:
        raise PlanError(
            f"nothing is left of a name: {printable(old)!r}",
            hint="give a replacement that leaves a name" if old else "its stored name is empty",
        )
    if not new.isascii() and any("\ud800" <= c <= "\udfff" for c in new):
        raise PlanError(
            f"a new name is not Unicode text: {printable(new)!r}, of {printable(old)!r}",
            hint="the replacement has half of a character, or bytes that are no UTF-8",
        )


def rename(catalog: Catalog, new_name: Callable[[str], str]) -> Catalog:
    """Returns the catalog with a new FQN for every tensor.

    The result has no `paths`, because they spell the old names.

    Raises:
        PlanError: two tensors would get one name.
    """
    renamed: dict[str, TensorEntry] = {}
    origin: dict[str, str] = {}
    for fqn, entry in catalog.tensors.items():
        name = new_name(fqn)
        check_new_name(fqn, name)
        if name in renamed:
            raise PlanError(
                f"two tensors would get one name: {printable(origin[name])!r} and"
                f" {printable(fqn)!r} both become {printable(name)!r}",
                hint=(
                    "keep the names as they are with --keep-prefix, or leave one out with --select"
                ),
            )
        renamed[name] = entry.named(name)
        origin[name] = fqn
    return replace(
        catalog,
        tensors=renamed,
        paths={},
        unread={new_name(fqn): kind for fqn, kind in catalog.unread.items()},
    )


def substitution(pattern: str, new: str, what: str) -> Callable[[str], str]:
    """Returns a function that replaces each match of a regular expression in a name.

    Args:
        pattern: the regular expression, not empty.
        new: the replacement, which may refer to groups of the match.
        what: the rule, for messages.

    Raises:
        PlanError: one of the two is malformed. The returned function raises it for a replacement
            that a match does not fit.
    """
    refused = f"{what}: not a regular expression and its replacement: "

    def renamed(name: str) -> str:
        try:
            return compiled.sub(new, name)
        except (re.error, IndexError) as error:
            raise PlanError(refused + printable(str(error))) from error

    try:
        if not pattern:
            raise re.error("the expression is empty")
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PlanError(refused + printable(str(error))) from error
    renamed("")
    return renamed


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Returns a test whether a name matches one of the globs; `*` matches dots too.

    Without globs, no name matches.
    """
    patterns = [fnmatch.translate(g) for g in globs]
    joined = re.compile("|".join(patterns)) if patterns else None
    return lambda name: joined is not None and joined.match(name) is not None


def check_globs(
    globs: Iterable[str], names: Sequence[str], what: str, left_out: Sequence[str] = ()
) -> None:
    """Refuses globs that match no name.

    Args:
        globs: as for `matcher`.
        names: all names that they may match.
        what: the option, for the message.
        left_out: names that the operation leaves out before it looks at the globs.

    Raises:
        PlanError: a glob matches nothing; the hint says why, or lists the nearest names.
    """
    names = list(dict.fromkeys(names))
    for glob in globs:
        wanted = matcher([glob])
        if not any(map(wanted, names)):
            shown = ", ".join(map(printable, _nearest(glob, names))) or "there are none"
            hint = f"the nearest names: {shown}"
            if gone := next(filter(wanted, left_out), ""):
                hint = f"only the model is written, and {printable(gone)!r} is not a part of it"
            raise PlanError(
                f"{what} matches none of {len(names)} names: {printable(glob)!r}", hint=hint
            )


def _nearest(glob: str, names: Sequence[str]) -> list[str]:
    """Returns the names, and the beginnings of names as globs, that are most like a glob."""
    some = names[:2000]
    tops = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in some if "." in name)
    found = difflib.get_close_matches(glob, list(tops), 2, 0.6)
    found += difflib.get_close_matches(glob.rstrip("*."), some, 3 - len(found), 0.5)
    return found or [*tops, *some][:3]


def chooser(select: Sequence[str], exclude: Sequence[str]) -> Callable[..., bool]:
    """Returns a test of an entry by its names.

    An entry passes if `select` is empty or matches one of its names, and `exclude` matches none of
    them.
    """
    wanted, unwanted = matcher(select), matcher(exclude)
    return lambda *names: (not select or any(map(wanted, names))) and not any(map(unwanted, names))


def choose(
    catalog: Catalog, select: Sequence[str], exclude: Sequence[str], left_out: Sequence[str] = ()
) -> Catalog:
    """Returns the entries that `select` matches (all if it is empty) and `exclude` does not match.

    Args:
        catalog, select, exclude: the entries and the globs.
        left_out: see `check_globs`.

    Raises:
        PlanError: a glob matches no name.
    """
    names = [*catalog.tensors, *catalog.objects, *catalog.unread]
    check_globs(select, names, "--select", left_out)
    check_globs(exclude, names, "--exclude", left_out)
    return keep(catalog, chooser(select, exclude))


def refuse_unread(catalog: Catalog, hint: str = "leave them out: --exclude GLOB") -> None:
    """Refuses a catalog with tensors of kinds that ckpt does not read.

    Raises:
        PlanError: there are such tensors; the message lists names and kinds.
    """
    if catalog.unread:
        some = [
            f"{printable(name)!r} ({printable(kind)})"
            for name, kind in list(catalog.unread.items())[:4]
        ]
        more = f" and {len(catalog.unread) - 4} more" if len(catalog.unread) > 4 else ""
        raise PlanError(
            f"tensors of kinds that ckpt does not read: {', '.join(some)}{more}", hint=hint
        )
