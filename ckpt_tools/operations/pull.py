"""Brings a local copy of a published model to a version."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    PlanError,
    StorageError,
    printable,
    redacted,
)
from ckpt_tools.formats.base import PULLED, TOLD, attempt_for, new_attempt, note_name, note_of
from ckpt_tools.formats.deltas.chain import PatchedStore, as_patched, wrong_tensors
from ckpt_tools.formats.deltas.layout import Versions, no_versions
from ckpt_tools.formats.registry import Source, open_version, versions_in
from ckpt_tools.formats.safetensors import SUFFIX
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.copy import copy_opened
from ckpt_tools.operations.receivers import check_receiver, say
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import LocalStore, Overlay, Store, is_url, local_path, read
from ckpt_tools.storage.small_files import parse_json
from ckpt_tools.transfer.options import Options, Path_, Reading

_HOOK_TIMEOUT_S = 3600.0
_SHOWN = 5
_SHORT_BYTES = 64 << 20


class Pulling(Reading, total=False):
    """How to pull.

    Attributes:
        version: the number of the version; the newest if absent.
        base: the directory of version 0, if it is not where the publisher had it.
        hook: what to do once a version has arrived: a command for the shell, or the URL of an
            engine. It runs again at the next pull if it has failed.
        receiver: a name, under which the publisher is told what this copy has and reads. Then it
            keeps the versions that are needed here. It takes the right to write to `root`.
        dry_run: only plan, and write nothing.
    """

    version: int | None
    base: Path_ | None
    hook: str | None
    receiver: str | None
    dry_run: bool


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


class _Pulled(NamedTuple):
    """The note of the last pull: the version, its identity, and the files.

    A file has its bytes, and its CRC-64 if it is short and has no weights.
    """

    version: int
    identity: str
    files: Mapping[str, tuple[int, str]]

    def render(self) -> bytes:
        """Returns the note."""
        return json.dumps(self._asdict(), indent=1).encode("ascii")


@checked(Pulling)
def pull(root: Path_, local: Path_, **how: Unpack[Pulling]) -> PullResult:
    """Brings a local directory to a version of a publication.

    The changes since the local copy, or since the nearest complete version, are applied in one
    pass. The new directory takes the place of the old one at one instant, when it is complete and
    its checksums are right.

    Args:
        root: the directory of the versions; a path or a URL.
        local: the directory of the model on this machine: an earlier pull, or a new directory.
        **how: see `Pulling`.

    Raises:
        PlanError: there is no such version.
        IntegrityError: a change or the model below it is not the published one.
        StorageError: the local directory has files that no pull brought.
        CheckpointError: see the tree in `errors`. Then the local copy is as it was before.
    """
    began = time.monotonic()
    url, where = local_path(root).rstrip("/"), local_path(local).rstrip("/")
    _check(how, url, where)
    versions = versions_in(url, how.get("storage_options"))
    number = _wanted(versions, how.get("version"))
    version_url = versions.path(number)
    own, receiver = _last_pull(Path(where)), how.get("receiver")
    if receiver is None or how.get("dry_run"):
        return _pull(version_url, where, number, own, how, began)
    options, has = how.get("storage_options"), own.version if own is not None else 0
    if has != number:
        say(url, options, receiver, has, number)
    try:
        result = _pull(version_url, where, number, own, how, began)
    except CheckpointError:
        with suppress(CheckpointError):  # the first error is told
            say(url, options, receiver, has, 0)
        raise
    try:
        say(url, options, receiver, number, 0)
    except CheckpointError as error:  # the version is here
        note = f"the publisher does not know that version {number} is here: {error}"
        result = replace(result, notes=(*result.notes, note))
    return result


def _pull(
    version_url: str, where: str, number: int, own: _Pulled | None, how: Pulling, began: float
) -> PullResult:
    """Pulls a version; from the local copy if there is one, and it is as it was pulled."""
    if own is not None:
        try:
            return _pulled(version_url, where, number, own, how, began)
        except (IntegrityError, FormatError, CatalogError) as error:
            again = _pulled(version_url, where, number, None, how, began)
            note = f"the local copy was not as it was pulled, and is written anew: {error}"
            return replace(again, notes=(*again.notes, note))
    return _pulled(version_url, where, number, None, how, began)


def _pulled(
    version_url: str, where: str, number: int, own: _Pulled | None, how: Pulling, began: float
) -> PullResult:
    """Pulls a version, from the local copy if `own` is given."""

    def reached(version: int, store: Store) -> Store | None:
        if own is None or own.version != version:
            return None
        return LocalStore(where) if own.identity == _identity(store) else None

    base, options = how.get("base"), how.get("storage_options")
    source = open_version(version_url, options, "" if base is None else local_path(base), reached)
    try:
        version, jobs = as_patched(source.folder), num_threads(how.get("jobs"))
        if version is None and source.store.url == where:
            return _tell(how, number, _there(version_url, where, number, began))
        layers = () if version is None else version.layers
        start = layers[0].about.base_number if layers else number
        target = open_destination(where, find_foreign=_not_pulled)
        copying: Options = {k: v for k, v in how.items() if k in Options.__annotations__}  # type: ignore[assignment]
        try:
            own_store = version.layers[-1].store if version is not None else source.folder
            noted = _with_note(source, number, _identity(own_store))
            result = copy_opened(noted, target, copying, began, replaces=True)
        except IntegrityError as error:
            if version is None:
                raise
            _prove(version, jobs)
            raise IntegrityError(
                f"after the changes, a file is not the published one: {error}",
                hint=f"is {version.complete_url} the version {start} that was published? Else give"
                " it with --base",
            ) from error
        done = PullResult(
            redacted(version_url),
            where,
            number,
            start,
            len(layers),
            sum(result.files.values()),
            tuple(result.notes),
            time.monotonic() - began,
            not result.is_dry_run and result.kept_nbytes == sum(result.files.values()),
            result.is_dry_run,
        )
        return _tell(how, number, done)
    finally:
        source.store.close()


def _check(how: Pulling, url: str, where: str) -> None:
    if is_url(where):
        raise PlanError(
            f"a pull writes to a disk, got {printable(where)}", hint="copy a version: ckpt copy"
        )
    ends = [f"{os.path.realpath(path)}/" for path in (where, url)]
    if not is_url(url) and (ends[0].startswith(ends[1]) or ends[1].startswith(ends[0])):
        raise PlanError(f"the local model would lie among the versions: {printable(where)}")
    if (receiver := how.get("receiver")) is not None:
        check_receiver(receiver)
    if (how.get("group") or ALONE).size > 1:
        raise PlanError("one process of a machine pulls", hint="run it without torchrun")


def _wanted(versions: Versions, version: int | None) -> int:
    url, numbers = versions.url, versions.numbers
    if not numbers:
        raise no_versions(url)
    if version is None:
        return numbers[-1]
    if version not in numbers:
        shown = ", ".join(map(str, numbers[-_SHOWN:]))
        raise PlanError(
            f"there is no version {version} in {printable(url)}; the newest are {shown}"
        )
    return version


# ---- what the last pull left ---------------------------------------------------------------------


def _identity(store: Store) -> str:
    """Returns what tells a published version from another one with the same number.

    Without our manifest, it is when and how long its files were written: another run of a trainer
    may publish to the same directory.
    """
    manifest = find_manifest(store)
    if manifest is not None:
        return manifest.attempt
    files = sorted((name, store.version(name)) for name in store.list_files())
    return hex64(crc64nvme(repr(files).encode("utf-8", "surrogatepass")))


def _with_note(source: Source, number: int, identity: str) -> Source:
    """Returns a version with the note of this pull beside its files."""
    store = source.store
    files = {
        name: (nbytes, hex64(crc64nvme(read(store, name))) if is_short else "")
        for name, nbytes in store.list_files(below=True).items()
        if note_of(name) is None
        for is_short in [nbytes <= _SHORT_BYTES and not name.endswith(SUFFIX)]
    }
    name = note_name(PULLED, attempt_for(f"{number} {identity}"))
    note = _Pulled(number, identity, files).render()
    return replace(source, store=Overlay(store, {name: note}, is_listed=True))


def _last_pull(local: Path) -> _Pulled | None:
    """Returns the note of the last pull; None if the directory is new or empty.

    Raises:
        StorageError: it has files that no pull brought.
    """
    if not local.exists() or (local.is_dir() and not any(local.iterdir())):
        return None
    pulled = _read_note(local)
    if pulled is None:
        raise StorageError(
            f"no pull made this: {printable(str(local))}",
            hint="give a new directory; a pull replaces only what an earlier pull brought",
        )
    if foreign := _not_pulled(local):
        names = ", ".join(map(printable, foreign[:_SHOWN]))
        raise StorageError(
            f"files are not as a pull brought them: {names} ({printable(str(local))})",
            hint="move them away; or pull into a new directory",
        )
    return pulled


def _read_note(local: Path) -> _Pulled | None:
    if not local.is_dir():
        return None
    store = LocalStore(local)
    try:
        names = [name for name in store.list_files() if note_of(name) == (PULLED, "")]
        body: Any = parse_json(read(store, names[0]).decode("ascii")) if names else None
        files = {str(n): (int(size), str(crc)) for n, (size, crc) in body["files"].items()}
        return _Pulled(int(body["version"]), str(body["identity"]), files)
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        return None
    finally:
        store.close()


def _not_pulled(local: Path) -> list[str]:
    """Returns the files in the directory that the last pull did not bring, or not with these bytes.

    The bytes of weights and of long files are not compared.
    """
    pulled = _read_note(local)
    known = {} if pulled is None else pulled.files
    found = []
    for path in sorted(local.rglob("*")) if local.is_dir() else [local]:
        name = path.relative_to(local).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if name in known and path.is_file() and not path.is_symlink():
            nbytes, crc = known[name]
            if name.endswith(SUFFIX):  # damaged perhaps, and in no case somebody else's
                continue
            if path.stat().st_size == nbytes and (
                not crc or hex64(crc64nvme(path.read_bytes())) == crc
            ):
                continue
        elif note_of(name) is not None:
            continue
        found.append(name)
    return found


# ---- the hook ------------------------------------------------------------------------------------


def _there(source: str, where: str, number: int, began: float) -> PullResult:
    seconds = time.monotonic() - began
    return PullResult(redacted(source), where, number, number, 0, 0, (), seconds, is_there=True)


def _tell(how: Pulling, number: int, result: PullResult) -> PullResult:
    """Runs the hook, unless it ran already for what is there."""
    hook, folder = how.get("hook"), Path(result.destination)
    if hook is None or result.is_dry_run:
        return result
    told = note_name(TOLD, attempt_for(f"{number} {hook}"))
    if not (folder / told).exists():
        run_hook(hook, number, os.path.abspath(result.destination))
        open_destination(folder).add_note(told, b"{}\n", new_attempt())
    return result


def run_hook(hook: str, number: int, where: str) -> None:
    """Tells an engine of a new version: runs a command in the shell, or posts JSON to a URL.

    The command gets `CKPT_VERSION` and `CKPT_PATH`, and writes to stderr. The JSON has `model_path`
    and `weight_version`, as SGLang's `/update_weights_from_disk` takes them.

    Raises:
        CheckpointError: the command failed, or the answer is an error. The version stays.
    """
    try:
        if hook.startswith(("http://", "https://")):
            body = json.dumps({"model_path": where, "weight_version": str(number)}).encode()
            request = urllib.request.Request(  # noqa: S310  # the user's own URL
                hook, body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=_HOOK_TIMEOUT_S):  # noqa: S310  # as above
                return
        told = {"CKPT_VERSION": str(number), "CKPT_PATH": where}
        done = subprocess.run(hook, shell=True, check=False, env=os.environ | told, stdout=2)  # noqa: S602  # the user's own
        problem = f"exit status {done.returncode}" if done.returncode else ""
    except urllib.error.URLError as error:
        problem = str(getattr(error, "reason", error)) or str(error)
        problem = f"HTTP {error.code}: {problem}" if hasattr(error, "code") else problem
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"version {number} is in place, but its hook failed: {printable(problem)}"
            f" ({printable(redacted(hook))})",
            hint="the next pull runs it again",
        )


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
