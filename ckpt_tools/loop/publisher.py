"""Publishes the model of a job for inference engines, from the memory of its ranks.

    with Publisher("versions", base="base", dtype="bf16") as publisher:
        for step in range(1, last + 1):
            …
            publisher.publish(model)  # returns after a copy to host memory

Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack, cast

import torch
import torch.distributed as dist

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.laps import Laps
from ckpt_tools.core.logs import log
from ckpt_tools.core.memory import no_gc
from ckpt_tools.core.threads import num_threads, ranks_on_host
from ckpt_tools.errors import CheckpointError, PlanError, StorageError, printable
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.deltas.layout import LAYOUTS
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop import at_exit
from ckpt_tools.loop.arguments import check_timeout
from ckpt_tools.loop.saving.collect import Collected, Collector, SaveRequest
from ckpt_tools.loop.saving.replicas import Proof
from ckpt_tools.loop.saving.save import SaveLayout
from ckpt_tools.loop.state.staging import StagedTensors, Stager
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.merge_reshard import dtype_by_name
from ckpt_tools.operations.publish import (
    Publication,
    PublishResult,
    check_layout,
    check_publication,
    publish_part,
    without_old,
)
from ckpt_tools.publish.delta import DeltaJob
from ckpt_tools.publish.delta_changes import Baseline
from ckpt_tools.publish.destinations import refuse_tilde
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.storage import MemoryStore, is_url, local_path

_MODEL, _WHAT = "model", "the next version"
_MEMORY, _FILES = "memory", "files"
_SHOWN = 3
_MAY_DIFFER = ("jobs", "memory_bytes", "storage_options")  # between ranks
_Row = tuple[str, str, tuple[int, ...], Box]


class _Shards(MemoryStore):
    """This rank's shards, each as a file. They have no version: nothing is continued from them."""

    def version(self, path: str) -> str:
        del path
        return ""


class Publisher:
    """Publishes the model of a job as versions, for inference engines to pull.

    All ranks create it, and call its methods in the same order with the same arguments. Each rank
    compares its own shards with those of the version before, and sends the compressed changes of a
    tensor to the rank that writes it. No rank gathers a tensor.

    A version appears as a whole or not at all. If a rank fails or dies, the versions are as before,
    and a new job goes on from them, on any number of ranks.
    """

    last_result: PublishResult | None = None
    _running: Future[PublishResult] | None = None
    _layout: SaveLayout | None = None
    _catalog: Catalog
    _is_open = True

    @checked(Publication, name="Publisher", names_only=("on_publish",))
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        asynchronous: bool = True,
        baseline: str = _MEMORY,
        replicas: str = Proof.CHECK,
        names_differ: bool = False,
        on_publish: Callable[[PublishResult], object] | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        **how: Unpack[Publication],
    ) -> None:
        """Prepares to publish; nothing is written yet.

        Args:
            root: the directory of the versions, which all ranks share; or a URL. One job at a time
                publishes there.
            asynchronous: encode and write in the background.
            baseline: where the version before is kept, to compare with: in `"memory"`, which takes
                as many bytes as this rank's part of a version; or in its `"files"`, which are then
                read for each version.
            replicas: `"check"` compares the copies of parameters that several ranks hold, and
                refuses a difference; `"trust"` does not.
            names_differ: ranks have different tensors, such as the stages of a pipeline.
            on_publish: a function of the `PublishResult` of each version. Rank 0 calls it, in a
                thread of its own; `close` waits for it. An exception is logged.
            process_group: the ranks that publish together; all if None. Without an initialised
                torch.distributed, this process alone.
            timeout_s: how long ranks wait for each other before the missing one is named.
            **how: see `Publication`, with other defaults: `checksum` is "adler32", for which no
                rank needs all bytes of a tensor, and `full_every` is 20; as far as the receivers of
                the `layout` take them.

        Raises:
            PlanError: an option has a wrong value, or does not fit the root.
            StorageError: there is no such `base`.
            PeerError: the ranks have different options; the message has each rank's.
        """
        if taken := {"full", "dry_run", "group", "progress", "shapes"} & how.keys():
            raise PlanError(
                f"Publisher: {min(taken)} is no option of it", hint="see Publisher.publish"
            )
        if on_publish is not None and not callable(on_publish):
            raise TypeError(f"on_publish: expected a function, got {on_publish!r}")
        if baseline not in (_MEMORY, _FILES):
            raise ValueError(
                f"baseline: expected {_MEMORY!r} or {_FILES!r}, got {printable(repr(baseline))}"
            )
        check_timeout(timeout_s)
        refuse_tilde(root)
        check_publication(how)
        if (layout := how.get("layout")) is not None:
            check_layout(LAYOUTS[layout], how, has_versions=True)  # which is looked at later
        self._how: Publication = {**how}
        self._how.pop("keep_last", None)
        self._keep_last = how.get("keep_last")
        if (dtype := how.get("dtype")) is not None:
            dtype_by_name(dtype)
        # absolute: the job may change its working directory
        self.root = str(root) if is_url(root) else os.path.abspath(local_path(root))
        if (base := how.get("base")) is not None and not is_url(base):
            self._how["base"] = where = os.path.abspath(local_path(base))
            if not os.path.isdir(where):
                raise StorageError(f"base: no such directory: {printable(where)}")
        self.asynchronous, self._on_publish = asynchronous, on_publish
        jobs = num_threads(how.get("jobs"), ranks_on_host(), is_beside_training=True)
        self._how["jobs"] = jobs
        self._baseline = Baseline() if baseline == _MEMORY else None
        self._stage, self._pid, self._logged = Stager(), os.getpid(), set[str]()
        proof = Proof.of(replicas)
        self._group, self._writers = (
            GlooGroup(timeout_s, process_group),
            GlooGroup(timeout_s, process_group),
        )
        self._collector, self._names_differ = Collector(self._group, proof), names_differ
        self._pool = ThreadPoolExecutor(1, "ckpt-publish")
        self._hooks = ThreadPoolExecutor(1, "ckpt-on-publish")
        same = {name: value for name, value in how.items() if name not in _MAY_DIFFER}
        same |= {"asynchronous": asynchronous, "baseline": baseline, "names_differ": names_differ}
        shown = ", ".join(f"{name}={value!r}" for name, value in sorted(same.items()))
        try:
            self._group.meet("Publisher", f"Publisher({shown})")
        except BaseException:
            self._release()
            raise
        at_exit.register(self.close)

    @checked()
    def publish(self, model: Any, *, full: bool = False) -> None:
        """Publishes the model as the next version, and returns when it may change again.

        In the background, that is after a copy to host memory. It waits for the version before.

        Args:
            model: the module, or its state dict with tensors or DTensors.
            full: publish a complete version.

        Raises:
            PlanError: the model is not that of the version before; the message lists what differs.
            CheckpointError: this version was not published; or the one before was not, if that
                happened in the background.
        """
        self._check_open("publish")
        state = {_MODEL: model}
        with torch.no_grad():
            self._group.meet("publish", "publish(full=True)" if full else "publish()")
            self.wait()
            request = SaveRequest(_WHAT, False, state, None, None, None, False, self._names_differ)
            with no_gc():
                collected = self._collector.collect(request, Laps())
                staged = self._staged(collected.tensors)
        if self.asynchronous:
            self._running = self._pool.submit(self._publish, collected, staged, full, self._writers)
        else:
            self._publish(collected, staged, full, self._group)

    def wait(self) -> PublishResult | None:
        """Waits until the last version is published, and returns what was published last.

        Returns:
            The same on all ranks; None if this publisher has published nothing yet.

        Raises:
            CheckpointError: it was not published; raised once.
        """
        if (running := self._running) is not None:
            try:
                running.result()
            finally:
                if running.done():  # an interrupted wait leaves it
                    self._running = None
        return self.last_result

    def close(self) -> None:
        """Waits for the last version, and releases the memory.

        Raises:
            CheckpointError: it was not published.
        """
        if not self._is_open or os.getpid() != self._pid:
            return
        try:
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_open = False
        at_exit.unregister(self.close)
        self._pool.shutdown()
        self._hooks.shutdown()
        self._stage.close()
        self._group.close()
        self._writers.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise
            log.exception("the version in the background was not published either")

    def _check_open(self, method: str) -> None:
        if not self._is_open or os.getpid() != self._pid:
            raise CheckpointError(
                f"{method} was called on a publisher that is closed, or of another process"
                f" ({printable(self.root)})",
                hint="make a new one",
            )

    def _staged(self, tensors: Sequence[torch.Tensor]) -> StagedTensors:
        """Returns this rank's shards in host memory. The writer raises what fails here."""
        try:
            return self._stage.copy(tensors) if self.asynchronous else self._stage.live(tensors)
        except Exception as error:  # noqa: BLE001  # so that every rank hears of it
            return StagedTensors((), error=error)

    def _publish(
        self, collected: Collected, staged: StagedTensors, full: bool, group: GlooGroup
    ) -> PublishResult:
        with group.phase("copy the model to host memory"):
            memory = staged.wait()
        if collected.layout is not self._layout:
            self._catalog = _catalog_of(collected.layout, group)
            self._layout = collected.layout
        files = {f"{group.rank}-{number}": data for number, data in enumerate(memory)}
        held = {file: int(file.partition("-")[0]) for file in self._catalog.file_sizes}
        source = Source("memory:", _Shards(files), cast(Any, safetensors), self._catalog, held)
        is_first = self.last_result is None
        job = DeltaJob(group, self._baseline, self._how["jobs"] or 1)
        how = cast(Publication, {**self._how, "full": full})
        result = publish_part(source, self.root, how, job, needs_chain=not is_first)
        with group.phase("remove old versions"):
            if group.rank == 0:
                notes = [*result.notes, *_left_out(collected)]
                if is_first and result.base_version:
                    notes.append(f"goes on from version {result.base_version}, which was there")
                last = self.last_result.version if self.last_result else result.version - 1
                if last != result.version - 1:
                    notes.append(f"somebody else has published versions from {last + 1} on")
                result = replace(result, notes=notes)
                self._warn(result)
                if self._keep_last is not None:
                    options = self._how.get("storage_options")
                    result = without_old(result, self.root, self._keep_last, options)
        self.last_result = result = group.broadcast(result, "tell what was published")
        if group.rank == 0:
            self._hooks.submit(self._tell, result)
        return result

    def _warn(self, result: PublishResult) -> None:
        """Logs the notes on a version, each once. Those on old versions are in the result alone."""
        for note in result.notes:
            if note not in self._logged:
                log.warning("version %d: %s", result.version, note)
        self._logged.update(result.notes)

    def _tell(self, result: PublishResult) -> None:
        log.info(
            "published version %d: %s bytes in %.2f s",
            result.version,
            result.written_nbytes,
            result.seconds,
        )
        if self._on_publish is not None:
            try:
                self._on_publish(result)
            except BaseException:  # noqa: BLE001  # the version is published
                log.exception("on_publish failed for version %d", result.version)


def _left_out(collected: Collected) -> list[str]:
    if not (names := list(collected.objects)):
        return []
    some = printable(", ".join(names[:_SHOWN])) + ", …" * (len(names) > _SHOWN)
    return [f"not published, since they are no tensors: {some}"]


def _catalog_of(layout: SaveLayout, group: GlooGroup) -> Catalog:
    """Returns the catalog of the model. Each shard is a file in the memory of the rank that has it.

    All ranks call it.
    """
    infos, head = layout.names.infos, layout.head
    rows: list[_Row] = []
    for number in layout.task.shards:
        info = infos[number]
        rows.append((_bare(info.fqn), info.dtype, info.shape, info.box))
    order = group.broadcast([_bare(info.fqn) for info in infos], "share the names")
    tied = group.broadcast(dict(head.aliases) if head is not None else {}, "share the names")
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    sizes: dict[str, int] = {}
    for rank, theirs in enumerate(group.all_gather(rows, "share where the shards are")):
        for number, (name, dtype, shape, box) in enumerate(theirs):
            nbytes, file = box.numel * BY_NAME[dtype].itemsize, f"{rank}-{number}"
            sizes[file], kinds[name] = nbytes, (dtype, shape)
            chunks.setdefault(name, []).append(Chunk(box, Extent(file, 0, nbytes)))
    tensors = {}
    of = {_bare(name): _bare(other) for name, other in tied.items()}
    for name in dict.fromkeys([*order, *kinds]):
        other = of.get(name, name)
        if other in kinds:
            dtype, shape = kinds[other]
            tensors[name] = TensorEntry(name, BY_NAME[dtype], shape, ChunkList(chunks[other]))
    return Catalog("the memory of a job", tensors, file_sizes=sizes, world_size=group.size)


def _bare(fqn: str) -> str:
    """Returns the name of a tensor in its model."""
    return fqn.removeprefix(f"{_MODEL}.")
