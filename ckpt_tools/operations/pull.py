"""Brings a local copy of a published model to a version."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Unpack

from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    NotACheckpointError,
    PlanError,
    StorageError,
    printable,
    redacted,
)
from ckpt_tools.formats.deltas.chain import PatchedStore, as_patched, wrong_tensors
from ckpt_tools.formats.deltas.layout import version_name
from ckpt_tools.formats.registry import Source, open_version, versions_in
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.copy import copy_opened
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.find_manifest import find_manifest, manifest_of
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import LocalStore, Store, is_url, local_path
from ckpt_tools.transfer.options import Options, Path_

_HOOK_TIMEOUT_S = 3600.0
_SHOWN = 5


class Pulling(Options, total=False):
    """How to pull.

    Attributes:
        version: the number of the version; the newest if absent.
        base: the directory of version 0, if it is not where the publisher had it.
        hook: what to do after a version has arrived: a command, or the URL of an engine.
    """

    version: int | None
    base: Path_ | None
    hook: str | None


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull did, or with `dry_run` would do.

    Attributes:
        source, destination: path or URL of the version, and the local directory.
        version: its number.
        from_version: the complete version, or that of the local copy, to which changes were
            applied; 0 for the engine's own model.
        num_deltas: how many deltas were applied, in one pass.
        nbytes: of the files of the version; 0 if it was there already.
        notes: remarks.
        seconds: wall-clock time.
        is_there: whether the local copy had the version already.
        is_dry_run: whether nothing was written.
    """

    source: str
    destination: str
    version: int
    from_version: int
    num_deltas: int
    nbytes: int
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_there: bool = False
    is_dry_run: bool = False


@checked(Pulling)
def pull(root: Path_, local: Path_, **how: Unpack[Pulling]) -> PullResult:
    """Brings a local directory to a version of a publication.

    The changes since the local copy, or since the nearest complete version, are applied in one
    pass. The new directory takes the place of the old one at one instant, when it is complete and
    its checksums are right.

    Args:
        root: the directory of the versions; a path or a URL.
        local: the directory of the model on this machine.
        **how: see `Pulling`.

    Raises:
        PlanError: there is no such version.
        IntegrityError: a change or the model below it is not the published one.
        CheckpointError: see the tree in `errors`. Then the local copy is as it was before.
    """
    began = time.monotonic()
    url, where = local_path(root).rstrip("/"), local_path(local).rstrip("/")
    _check(how, where)
    options, base = how.get("storage_options"), how.get("base")
    number = _wanted(url, how.get("version"), options)
    own = _own_manifest(where)

    def reached(version: int, store: Store) -> Store | None:
        del version
        found = None if own is None else find_manifest(store)
        return LocalStore(where) if own and found and found.attempt == own.attempt else None

    version_url = f"{url}/{version_name(number)}"
    source = open_version(version_url, options, "" if base is None else local_path(base), reached)
    try:
        if source.store.url == where and as_patched(source.folder) is None:
            return _there(version_url, where, number, began)
        return _pulled(source, where, number, how, began)
    finally:
        source.store.close()


def _pulled(source: Source, where: str, number: int, how: Pulling, began: float) -> PullResult:
    version, jobs = as_patched(source.folder), num_threads(how.get("jobs"))
    layers = () if version is None else version.layers
    start = layers[0].about.base_number if layers else number
    if version is not None and manifest_of(version) is None:
        _prove(version, jobs)
    copying: Options = {k: v for k, v in how.items() if k in Options.__annotations__}  # type: ignore[assignment]
    target = open_destination(where, None)
    try:
        result = copy_opened(source, target, copying, began, replaces=True)
    except IntegrityError as error:
        if version is not None:
            with suppress(StorageError):
                _prove(version, jobs)
            raise IntegrityError(
                str(error.args[0]),
                hint=f"is version {start} the one that was published? Else restore {source.path}",
            ) from error
        raise
    if how.get("hook") and not result.is_dry_run:
        run_hook(str(how["hook"]), number, where)
    return PullResult(
        redacted(source.path),
        where,
        number,
        start,
        len(layers),
        sum(result.files.values()),
        result.notes,
        time.monotonic() - began,
        is_there=not result.is_dry_run and result.kept_nbytes == sum(result.files.values()),
        is_dry_run=result.is_dry_run,
    )


def _check(how: Pulling, where: str) -> None:
    for key in ("overwrite", "resume"):
        if how.get(key):
            raise PlanError(f"--{key} is not for a pull, which always replaces and continues")
    if is_url(where):
        raise PlanError(
            f"a pull writes to a disk, got {printable(where)}", hint="copy a version: ckpt copy"
        )
    if (how.get("group") or ALONE).size > 1:
        raise PlanError("one process of a machine pulls", hint="run it without torchrun")
    version = how.get("version")
    if version is not None and (isinstance(version, bool) or version < 1):
        raise PlanError(f"--version: expected a number of at least 1, got {version!r}")


def _wanted(url: str, version: int | None, options: Mapping[str, Any] | None) -> int:
    numbers = versions_in(url, options)
    if not numbers:
        raise NotACheckpointError(
            f"no version lies in {printable(url)}", hint=f"looked for {version_name(1)} and on"
        )
    if version is None:
        return numbers[-1]
    if version not in numbers:
        shown = ", ".join(map(str, numbers[-_SHOWN:]))
        raise PlanError(f"there is no version {version} in {printable(url)}; the newest: {shown}")
    return version


def _own_manifest(where: str) -> Manifest | None:
    """Returns the manifest of the local copy; None if there is none, or it cannot be read."""
    if not os.path.isdir(where):
        return None
    with suppress(CheckpointError):
        return manifest_of(LocalStore(where))
    return None


def _there(source: str, where: str, number: int, began: float) -> PullResult:
    seconds = time.monotonic() - began
    return PullResult(redacted(source), where, number, number, 0, 0, (), seconds, is_there=True)


def _prove(store: PatchedStore, jobs: int) -> None:
    """Compares every changed tensor with the checksum that its publisher noted.

    Raises:
        IntegrityError: one differs.
    """
    if wrong := sorted(wrong_tensors(store, jobs)):
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise IntegrityError(
            "after the changes, these tensors are not the published ones:"
            f" {printable(', '.join(wrong[:_SHOWN]))}{more} ({printable(store.url)})",
            hint=(
                f"the changes do not belong to {store.complete_url}: give the right model with"
                " --base, or restore the version"
            ),
        )


def run_hook(hook: str, number: int, where: str) -> None:
    """Tells an engine of a new version: runs a command, or posts JSON to a URL.

    The command gets `CKPT_VERSION` and `CKPT_PATH`. The JSON has `model_path` and
    `weight_version`, as SGLang's `/update_weights_from_disk` takes them.

    Raises:
        CheckpointError: the command failed, or the answer is an error. The version stays.
    """
    shown = printable(redacted(hook))
    try:
        if hook.startswith(("http://", "https://")):
            body = json.dumps({"model_path": where, "weight_version": str(number)}).encode()
            request = urllib.request.Request(  # noqa: S310  # the user's own URL
                hook, body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_HOOK_TIMEOUT_S):  # noqa: S310  # as above
                return
        told = {"CKPT_VERSION": str(number), "CKPT_PATH": where}
        subprocess.run(
            shlex.split(hook), check=True, env=os.environ | told
        )  # the user's own command
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise CheckpointError(
            f"version {number} is in place, but its hook failed: {printable(str(error))} ({shown})"
        ) from error
