"""Verifies the versions of a publication as a chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import CheckpointError, redacted
from ckpt_tools.formats.deltas.chain import damaged_frames
from ckpt_tools.formats.deltas.layout import Versions, read_delta_index
from ckpt_tools.formats.registry import open_folder
from ckpt_tools.publish.check_manifest import Problem
from ckpt_tools.publish.delta import wrong_files


def look_at_versions(
    url: str,
    versions: Versions,
    options: Mapping[str, Any] | None,
    jobs: int | None,
    verify_complete: Callable[[str], list[Problem]],
    quick: bool,
) -> tuple[list[Problem], list[str]]:
    """Looks at all versions but the newest, which `verify` reads as a whole.

    Args:
        url: the directory of the versions.
        versions: all of them.
        options: of the object store.
        jobs: threads.
        verify_complete: returns the problems of a complete version by its path.
        quick: do not decompress the deltas.

    Returns:
        The problems, with the version in the name of the file, and notes.
    """
    problems, numbers = list[Problem](), versions.numbers
    num_complete = 0
    for number in numbers:
        name = versions.name(number)
        store = open_folder(f"{url}/{name}", options)
        try:
            index = read_delta_index(store)
            if index is None:
                num_complete += 1
                problems += verify_complete(f"{url}/{name}") if number != numbers[-1] else []
                continue
            if index.number != number:
                problems.append(Problem(name, f"says that it is version {index.number}"))
            if index.base_number and index.base_number not in numbers:
                what = f"is a change of version {index.base_number}, which is missing"
                problems.append(Problem(name, what))
            frames = {} if quick else damaged_frames(store, index, num_threads(jobs))
            for fqn, why in frames.items():
                problems.append(Problem(f"{name}/{index.weight_map[fqn]}", why, fqn))
            told = {index.weight_map[fqn] for fqn in frames}
            for file, why in () if quick else wrong_files(store).items():
                problems += [] if file in told else [Problem(f"{name}/{file}", why)]
        except CheckpointError as error:
            problems.append(Problem(name, f"cannot be read: {error}"))
        finally:
            store.close()
    deltas = len(numbers) - num_complete
    note = f"versions {numbers[0]} to {numbers[-1]}: {num_complete} complete, {deltas} deltas"
    how = "only the indexes of deltas were read" if quick else "each decompressed"
    return problems, [f"{note}, {how}; the result is that of the newest"]


def of_publication(
    url: str,
    newest: Any,
    problems: list[Problem],
    notes: list[str],
    versions: Versions,
    began: float,
) -> dict[str, Any]:
    """Returns the fields of a result for the whole publication, from that of the newest version."""
    name = versions.name(versions.numbers[-1])
    own = [p._replace(file=f"{name}/{p.file}" if p.file else name) for p in newest.problems]
    seen = {(p.file, p.fqn) for p in own}
    return {
        "path": redacted(url),
        "problems": [*own, *(p for p in problems if (p.file, p.fqn) not in seen)],
        "notes": [*newest.notes, *notes],
        "seconds": time.monotonic() - began,
    }
