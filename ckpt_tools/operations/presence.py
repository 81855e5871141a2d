"""Compares the names and shapes of a checkpoint's model with those of a model's configuration.

No save and no conversion fails because experts are missing. The configuration tells how many there
should be.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.operations.convert.families import foreign_names
from ckpt_tools.operations.convert.huggingface import read_config
from ckpt_tools.operations.convert.model_names import shapes_in
from ckpt_tools.operations.convert.transformers_names import HUB, MEMORY, ask_transformers
from ckpt_tools.operations.merge_reshard import model_view

Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.")
_FUSED = re.compile(r".*\bexperts\b")
_MOST = 12  # patterns of names that are shown
_MOST_PREFIXES = 16  # that are tried: a model has few parts


class _Expected(NamedTuple):
    """The tensors that a model should have.

    Attributes:
        told_by: who says so.
        namings: shapes by name, per naming.
        tied: sets of names that are one tensor.
    """

    told_by: str
    namings: Mapping[str, Mapping[str, Shape]]
    tied: Sequence[Collection[str]] = ()


@dataclass(frozen=True, slots=True)
class Presence:
    """What a checkpoint has of a model.

    Attributes:
        base: the model's directory.
        told_by: the release of transformers that read the configuration, or the weights there.
        naming: `hub`, `transformers` (its names in memory) or "" if both are the same.
        prefix: how names were made to fit, such as "+bert." or "-module."; "" if they fit.
        expected: shape of every tensor of the model.
        missing: names of the model that the checkpoint lacks.
        unexpected: names of the checkpoint that the model does not have.
        other_shapes: the checkpoint's shape and the model's, by name.
        remark: whose names the checkpoint has, if it is another framework; "" if none is known.
    """

    base: str
    told_by: str
    naming: str
    prefix: str
    expected: Mapping[str, Shape]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other_shapes: Mapping[str, tuple[Shape, Shape]]
    remark: str = ""

    @property
    def is_complete(self) -> bool:
        """Tells whether names and shapes are those of the model."""
        is_wrapped = self.prefix.startswith("-")  # transformers adds one, and removes none
        return not (is_wrapped or self.missing or self.unexpected or self.other_shapes)

    def lines(self) -> Iterator[str]:
        """Yields the differences, for people. Numbers in names are joined."""
        if self.remark:
            yield self.remark
        if self.prefix:
            how = "with" if self.prefix[0] == "+" else "without"
            yield f"names are compared {how} the prefix {printable(self.prefix[1:])!r}"
        yield from self._experts()
        if self.missing:
            number, all_of = len(self.missing), len(self.expected)
            yield f"missing: {number:,} of {all_of:,} tensors"
            yield from _by_pattern(self.missing, self.expected)
        if self.unexpected:
            yield f"not in the model: {_count(self.unexpected)}"
            yield from _by_pattern(self.unexpected)
        if self.other_shapes:
            yield f"another shape: {_count(self.other_shapes)}"
            for name, (got, wanted) in list(self.other_shapes.items())[:_MOST]:
                yield f"  {printable(name)}: {list(got)}, in the model {list(wanted)}"
            if len(self.other_shapes) > _MOST:
                yield f"  … and {len(self.other_shapes) - _MOST:,} more"

    def _experts(self) -> Iterator[str]:
        """Yields how many experts are there, if some are not."""
        lacking = {m[1]: set[str]() for n in self.missing if (m := _EXPERT.match(n))}
        every = {above: set[str]() for above in lacking}
        for name in self.expected:
            if (m := _EXPERT.match(name)) and m[1] in every:
                every[m[1]].add(m[2])
        for name in self.missing:
            if m := _EXPERT.match(name):
                lacking[m[1]].add(m[2])
        found = {(len(every[a]) - len(gone), len(every[a])) for a, gone in lacking.items()}
        number = len(lacking)
        for name, (got, wanted) in self.other_shapes.items():
            if _FUSED.match(name) and got[1:] == wanted[1:]:
                found.add((got[0], wanted[0]))
                number += 1
        if not found:
            return
        least, most = min(found)[0], max(found)[0]
        counts = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        where = f"{number:,} {'layer' if lacking else 'tensor'}{'s' * (number != 1)}"
        yield f"{counts} of {max(all_of for _, all_of in found):,} experts are present, in {where}"


def _count(names: Collection[str]) -> str:
    return f"{len(names):,} tensor{'s' * (len(names) != 1)}"


def _by_pattern(names: Collection[str], among: Collection[str] | None = None) -> Iterator[str]:
    counts, totals = (Counter(_NUMBER.sub("*", n) for n in some or ()) for some in (names, among))
    for pattern, number in list(counts.items())[:_MOST]:
        of = f" of {totals[pattern]:,}" if among is not None else ""
        yield f"  {printable(pattern)}" + f" ({number:,}{of})" * ("*" in pattern)
    if len(counts) > _MOST:
        yield f"  … and {len(counts) - _MOST:,} more kinds of names"


def find_presence(catalog: Catalog, base: str | os.PathLike[str]) -> Presence:
    """Compares the model of a checkpoint with a model's directory. It reads metadata only.

    transformers builds the model of the configuration without weights, in a separate process. If it
    cannot, the weights in the directory are the measure.

    Args:
        catalog: of the checkpoint.
        base: a local directory with a `config.json`.

    Raises:
        PlanError: neither transformers nor weights tell what the model has, or the checkpoint has
            no model.
    """
    model, _ = model_view(catalog, keep_prefix=False)
    shapes: dict[str, Shape | None] = {}
    for name, entry in model.tensors.items():
        if entry.quantized is None:
            shapes[name] = entry.shape
        elif entry.quantized.codes == entry.stored_name:
            shapes[_of_codes(name)] = None  # codes may be packed
    expected = _expected(base)
    remark = _remark(list(shapes), base)
    naming, prefix = _best_fit(shapes, expected)
    shapes = {_with_prefix(name, prefix): shape for name, shape in shapes.items()}
    wanted = expected.namings[naming]
    if not wanted.keys() & shapes:
        raise PlanError(
            f"no tensor has a name of the model in {printable(os.fspath(base))}: the checkpoint has"
            f" {printable(next(iter(shapes), 'none'))!r}, the model"
            f" {printable(next(iter(wanted), 'none'))!r}",
            hint="is it the config of these weights? ckpt convert --key-map gives them the model's"
            " names",
        )
    tied = {name: others for others in expected.tied for name in others}
    return Presence(
        os.fspath(base),
        expected.told_by,
        naming if len(expected.namings) > 1 else "",
        prefix,
        wanted,
        tuple(
            name
            for name in wanted
            if name not in shapes and not any(other in shapes for other in tied.get(name, ()))
        ),
        tuple(name for name in shapes if name not in wanted),
        {
            name: (shape, wanted[name])
            for name, shape in shapes.items()
            if shape is not None and name in wanted and shape != wanted[name]
        },
        remark,
    )


def _remark(names: list[str], base: str | os.PathLike[str]) -> str:
    try:
        family = foreign_names(names, read_config(base))
    except PlanError as error:  # of another model
        return str(error)
    if family is None:
        return ""
    return (
        f"the names are those of {family.writers} for {family.title}: ckpt convert --to hf"
        " --base DIR gives them the Hub's, and compares"
    )


def _best_fit(shapes: Collection[str], expected: _Expected) -> tuple[str, str]:
    """Returns the naming and the prefix with which most names are those of the model.

    A model's body is often saved without the name that the whole model has for it, or the other way
    around; and a wrapper adds a name of its own.
    """
    own = dict.fromkeys(name.partition(".")[0] for name in shapes)
    found: list[tuple[int, str, str]] = []
    for naming, wanted in expected.namings.items():
        firsts = dict.fromkeys(name.partition(".")[0] for name in wanted)
        prefixes = ["", *(f"+{first}." for first in list(firsts)[:_MOST_PREFIXES])]
        prefixes += [f"-{first}." for first in own] if len(own) == 1 else []
        for prefix in prefixes:
            fitting = sum(_with_prefix(name, prefix) in wanted for name in shapes)
            found.append((fitting, naming, prefix))
    _, naming, prefix = max(found, key=lambda item: item[0])  # the first of the best
    return naming, prefix


def _with_prefix(name: str, prefix: str) -> str:
    return name.removeprefix(prefix[1:]) if prefix[:1] == "-" else prefix[1:] + name


def _of_codes(name: str) -> str:
    """Returns the name of a weight whose codes have this name."""
    module, _, last = name.rpartition(".")
    if last.endswith("_blocks"):
        return name.removesuffix("_blocks")
    return f"{module}.weight" if last in ("qweight", "weight_packed") else name


def _expected(base: str | os.PathLike[str]) -> _Expected:
    names, reason = ask_transformers(base, read_config(base))
    if names is not None:
        namings = {HUB: names.files, MEMORY: names.memory}
        if names.files == names.memory:
            namings.pop(MEMORY)
        return _Expected(f"config.json, read by transformers {names.release}", namings, names.tied)
    if shapes := shapes_in(base):
        return _Expected(f"weights; transformers says {reason!r}", {HUB: shapes})
    raise PlanError(
        f"cannot tell which tensors the model in {printable(os.fspath(base))} has: transformers"
        f" says {printable(reason)!r}, and it has no weights",
        hint="pip install transformers",
    )
