"""Messages between the ranks of a job during a save or a load: short, in step, with a deadline.

Every phase ends with one exchange of who failed. An error on one rank thus becomes an error on
every rank, and no rank waits for one that has failed. A separate process group keeps these messages
apart from the collectives of the training.
"""

from __future__ import annotations

import datetime as dt
import pickle
import socket
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ckpt_tools.core import ending
from ckpt_tools.errors import CheckpointError, PeerError, PlanError, StorageError

T = TypeVar("T")
_ROLL_CALL_S = 3.0


@dataclass(slots=True)
class Votes:
    """The votes of the ranks at the end of a phase.

    Attributes:
        mine: whether this rank says yes.
        num_yes: how many ranks do, after the phase.
    """

    mine: bool = False
    num_yes: int = 0


class RankSet(ABC):
    """Some ranks that work in step: all of them call every method in the same order."""

    rank: int
    size: int

    @abstractmethod
    def sum(self, values: Sequence[int], what: str) -> list[int]:
        """Returns the element-wise sum over all ranks, on every rank."""

    @abstractmethod
    def gather(self, value: T, what: str) -> list[T]:
        """Returns every rank's value on rank 0, and an empty list on the others."""

    @abstractmethod
    def all_gather(self, value: T, what: str) -> list[T]:
        """Returns every rank's value on every rank."""

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[int, int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor]],
        what: str,
    ) -> None:
        """Sends tensors to ranks and receives tensors from ranks, all at once.

        Each item is `(rank, tag, tensor)`; sender and receiver use the same tag.
        """

    @contextmanager
    def phase(self, what: str) -> Iterator[Votes]:
        """Runs the body on every rank, then tells all ranks which ranks failed.

        It yields the ranks' votes on a question. The body may set this rank's vote. The number of
        votes is known afterwards.

        Args:
            what: names the phase in messages: "write step 500".

        Raises:
            PeerError: another rank failed, with its own message; or a rank did not answer in time.
            BaseException: this rank's own error, after the others know of it.
        """
        own: BaseException | None = None
        votes = Votes()
        try:
            yield votes
        except BaseException as error:  # noqa: BLE001  # sent to all ranks, then raised below
            own = error
        try:
            self._settle(what, own, votes)
        except PeerError:
            if own is None:
                raise
        if own is not None:
            raise own

    def _settle(self, what: str, own: BaseException | None, votes: Votes) -> None:
        if self.size == 1:
            votes.num_yes = int(votes.mine)
            return
        failed, votes.num_yes = self.sum([own is not None, votes.mine], what)
        if not failed:
            return
        hint = own.hint if isinstance(own, CheckpointError) else None
        notes = [note for note in getattr(own, "__notes__", ()) if not note.startswith("hint: ")]
        mine = (
            None
            if own is None
            else (
                " ".join((f"{type(own).__name__}: {own}", *(f"({note})" for note in notes))),
                hint,
            )
        )
        told = [
            (rank, *theirs) for rank, theirs in enumerate(self.all_gather(mine, what)) if theirs
        ]
        texts, hint = (
            [(rank, text) for rank, text, _ in told],
            next((hint for *_, hint in told if hint), None),
        )
        shown = "\n".join(f"  rank {rank}: {t}" for rank, t in texts[:8]) + (
            f"\n  and {len(texts) - 8} more" if len(texts) > 8 else ""
        )
        raise PeerError(f"{what} failed on {len(texts)} of {self.size} ranks:\n{shown}", hint=hint)


class GlooGroup(RankSet):
    """All ranks of a job, or one process alone.

    After one exchange has failed, every later exchange raises. A process alone exchanges nothing:
    each method returns what it would have received from itself.
    """

    _made = 0
    _broken = ""
    _pg: Any = None  # of torch; None for a process alone

    def __init__(
        self,
        timeout_s: float,
        pg: dist.ProcessGroup | None = None,
        is_interruptible: bool = False,
    ) -> None:
        """Opens a gloo group over the ranks of `pg`, or over all ranks if it is None.

        Without an initialised torch.distributed, the process is alone.

        Args:
            timeout_s: the longest wait for another rank, in seconds.
            pg: the ranks.
            is_interruptible: a signal ends a wait for other ranks. Each exchange then takes a tenth
                of a millisecond more, because it runs on a thread of its own: no signal is handled
                while the main thread waits within torch.
        """
        self._thread = ThreadPoolExecutor(1, "ckpt-ranks") if is_interruptible else None
        has_peers = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(pg), dist.get_world_size(pg)) if has_peers else (0, 1)
        if self.rank < 0:
            raise PlanError("this process is no member of the process group that was given")
        self._timeout_s = timeout_s
        if self.size > 1:
            ranks = None if pg is None else dist.get_process_group_ranks(pg)
            self._pg = dist.new_group(
                ranks,
                timeout=dt.timedelta(seconds=timeout_s),
                backend="gloo",
                use_local_synchronization=ranks is not None,  # the others make no such group
            )
            self._root = 0 if ranks is None else ranks[0]
            GlooGroup._made += 1  # the same number on all ranks: they create groups in one order
            self._name = f"ckpt/{GlooGroup._made}/{self._root}"

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        sums = np.array(values, np.int64)
        self._call(what, lambda: dist.all_reduce(torch.from_numpy(sums), group=self._pg))
        return sums.tolist()  # type: ignore[no-any-return]

    def meet(self, kind: str, call: str, flags: Sequence[int] = (0, 0)) -> list[int]:
        """Makes sure that all ranks make the same call.

        Returns the maximum of each flag over all ranks.

        Args:
            kind: name of the public method.
            call: the call with its arguments, as a person would write it. Ranks compare its
                checksum.
            flags: two numbers of this rank.

        Raises:
            PeerError: the ranks make different calls; the message has each rank's. None of these
                calls has begun its own exchange.
        """
        if self._pg is None:
            return list(flags)
        # these are called after every step, and must cost no more than the exchange
        if kind != "should_save" and not self._broken:
            self._put_note("call", f"{call} at {time.strftime('%H:%M:%S')}")
        code = zlib.crc32(call.encode())
        found = np.array([code, -code, *flags], np.int64)
        self._call(
            call.rstrip(")").replace("(", " ").strip(),
            lambda: dist.all_reduce(torch.from_numpy(found), dist.ReduceOp.MAX, self._pg),
        )
        if found[0] != -found[1]:
            calls = self.all_gather(call, "compare calls")
            shown = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(calls))
            raise PeerError(
                f"the ranks do not make the same call:\n{shown}",
                hint=("every rank makes the same calls in the same order, with the same arguments"),
            )
        return found[2:].tolist()  # type: ignore[no-any-return]

    def max(self, values: npt.NDArray[np.int64], what: str) -> list[int]:
        """Returns the element-wise maximum over all ranks, on every rank. Changes `values`."""
        self._call(
            what, lambda: dist.all_reduce(torch.from_numpy(values), dist.ReduceOp.MAX, self._pg)
        )
        return values.tolist()  # type: ignore[no-any-return]

    def xor(self, values: Sequence[int], what: str) -> list[int]:
        """Returns the element-wise exclusive-or over all ranks of values below 2**64.

        Only rank 0 has the result.
        """
        found = np.array(values, np.uint64)
        mine = torch.from_numpy(found.view(np.int64))
        self._call(what, lambda: dist.reduce(mine, self._root, dist.ReduceOp.BXOR, group=self._pg))
        return found.tolist()  # type: ignore[no-any-return]

    def gather(self, value: T, what: str) -> list[T]:
        values = [value] * self.size if self.rank == 0 else None
        self._call(what, lambda: dist.gather_object(value, values, self._root, group=self._pg))
        return values or []

    def all_gather(self, value: T, what: str) -> list[T]:
        values = [value] * self.size
        self._call(what, lambda: dist.all_gather_object(values, value, group=self._pg))
        return values

    def deal(
        self, parts: Sequence[npt.NDArray[np.uint64]], what: str
    ) -> list[npt.NDArray[np.uint64]]:
        """Sends each rank one array, and returns those from all ranks, this one included.

        Args:
            parts: for each rank, `[n, columns]`. All ranks have the same number of columns.
            what: names the exchange in messages.
        """
        if self._pg is None:
            return [*parts]
        columns = parts[0].shape[1]
        sent = torch.tensor([len(part) for part in parts], device="cpu")
        received = torch.zeros_like(sent)
        self._call(what, lambda: dist.all_to_all_single(received, sent, group=self._pg))
        data = torch.from_numpy(np.concatenate(parts).view(np.int64))
        room = torch.empty((int(received.sum()), columns), dtype=torch.int64, device="cpu")
        counts, lengths = received.tolist(), sent.tolist()
        self._call(
            what, lambda: dist.all_to_all_single(room, data, counts, lengths, group=self._pg)
        )
        found = room.numpy().view(np.uint64)
        return np.split(found, np.cumsum(counts)[:-1])

    def deal_objects(self, values: Sequence[T], what: str) -> list[T]:
        """Sends each rank its item of `values`, and returns what all ranks have sent to this one.

        Both lists are in the order of the ranks.
        """
        if self._pg is None:
            return [*values]
        parts = []
        for value in values:
            data = pickle.dumps(value)
            words = np.zeros((1 + -(-len(data) // 8), 1), np.uint64)
            words[0] = len(data)
            words[1:].view(np.uint8).reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
            parts.append(words)
        return [
            pickle.loads(words[1:].tobytes()[: int(words[0, 0])])  # noqa: S301  # from this job
            for words in self.deal(parts, what)
        ]

    def scatter(self, values: Sequence[T], what: str) -> T:
        """Returns to each rank its own item of rank 0's `values`."""
        mine: list[Any] = [values[0] if self._pg is None else None]
        self._call(
            what,
            lambda: dist.scatter_object_list(
                mine, list(values) if self.rank == 0 else None, self._root, group=self._pg
            ),
        )
        return mine[0]  # type: ignore[no-any-return]

    def broadcast(self, value: T, what: str) -> T:
        """Returns rank 0's value on every rank."""
        values = [value]
        self._call(what, lambda: dist.broadcast_object_list(values, self._root, group=self._pg))
        return values[0]

    def exchange(
        self,
        sends: Sequence[tuple[int, int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor]],
        what: str,
    ) -> None:
        def move() -> None:
            works = [
                dist.irecv(t, dist.get_global_rank(self._pg, rank), self._pg, tag)
                for rank, tag, t in receives
            ]
            works += [
                dist.isend(t, dist.get_global_rank(self._pg, rank), self._pg, tag)
                for rank, tag, t in sends
            ]
            for work in works:
                if work is not None:
                    work.wait()

        self._call(what, move)

    def of_host(self) -> RankSet:
        """Returns the ranks on this rank's host."""
        hosts = self.all_gather(_host(), "find the ranks of each host")
        near = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        return self if len(near) == self.size else HostGroup(self, near)

    def _call(self, what: str, collective: Callable[[], object]) -> None:
        if self._pg is None:
            return
        if self._broken:
            raise PeerError(
                f"{what}: this manager cannot exchange anything any more: {self._broken}",
                hint="close it and make a new one on all ranks, or restart the job",
            )
        began = time.time()
        try:
            if self._thread is None:
                collective()
            else:
                ending.result(self._thread.submit(collective), keeps=True, is_last_word=True)
        except StorageError as error:
            self._broken = "a signal ends this process"
            raise PeerError(f"{what}: {self._broken}") from error
        except (RuntimeError, ValueError) as error:
            self._broken = self._diagnose(what, began, str(error).splitlines()[0])
            raise PeerError(
                f"{what}: {self._broken}",
                hint=(
                    "look at that rank's own log; all that was complete is as it was. Then make a"
                    " new manager or publisher on all ranks, or restart the job"
                ),
            ) from error

    def _diagnose(self, what: str, began: float, reason: str) -> str:
        """Returns why an exchange failed: who did not come, or who gave up before this rank came.

        Args:
            what: names the exchange.
            began: when this rank began the exchange, by the wall clock.
            reason: torch's message.
        """
        try:
            store = dist.distributed_c10d._get_default_store()
            gave_up = f"{self._name}/gave_up"
            if store.check([gave_up]):
                when, _, text = store.get(gave_up).decode().partition(" ")
                if float(when) < began:
                    return f"this rank, {self.rank}, came too late: {text}"
            now = time.time()
            waited_s = now - began
            store.set(gave_up, f"{now} rank {self.rank} waited {waited_s:.0f} s at {what}")
            missing = self._missing(store)
            calls = {rank: self._note_of(store, "call", rank) for rank in missing}
            made = [f"rank {rank} {call}" for rank, call in calls.items() if call]
            last = f"last call: {', '.join(made)}" if made else "it has made no call of this group"
            who = f"rank {', '.join(map(str, missing))}"
            if missing:
                store.set(
                    gave_up, f"{now} rank {self.rank} waited {waited_s:.0f} s at {what} for {who}"
                )
        except (RuntimeError, ValueError):  # the store died with the rank that served it
            return (
                "a rank did not answer, and the job's store is gone: rank 0 or the launcher has"
                f" ended ({reason})"
            )
        if not missing:
            return f"the connection between the ranks broke ({reason})"
        return (
            f"{who} did not answer ({last}; waited {waited_s:.0f} s, at most {self._timeout_s:g} s:"
            f" {reason})"
        )

    def _put_note(self, key: str, text: str) -> None:
        """Writes a note to the job's store, which ranks can read after an exchange has failed."""
        with suppress(RuntimeError, ValueError):
            dist.distributed_c10d._get_default_store().set(f"{self._name}/{key}/{self.rank}", text)

    def _note_of(self, store: Any, key: str, rank: int) -> str:
        where = f"{self._name}/{key}/{rank}"
        return store.get(where).decode() if store.check([where]) else ""

    def _missing(self, store: Any, call: str = "roll", wait_s: float = _ROLL_CALL_S) -> list[int]:
        """Returns the ranks that do not answer a roll call.

        After a failed exchange, every rank that is alive has seen the failure and answers.
        """
        store.set(f"{self._name}/{call}/{self.rank}", "here")
        deadline = time.monotonic() + wait_s
        missing = list(range(self.size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"{self._name}/{call}/{rank}"])]
            if missing:
                time.sleep(0.05)
        return missing

    def missing_after(self, wait_s: float) -> list[int]:
        """Returns the ranks that have not made this call after some seconds; none as a rule.

        It goes through the job's store, so it does not end in a broken group.
        """
        if self._pg is None:
            return []
        return self._missing(dist.distributed_c10d._get_default_store(), "here", wait_s)

    def store(self, name: str) -> Any:
        """Returns a part of the job's store, for a thread of its own; None for one process alone.

        It has a connection of its own where this torch can make one.
        """
        if self._pg is None:
            return None
        store = dist.distributed_c10d._get_default_store()
        with suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()  # type: ignore[attr-defined]
        return dist.distributed_c10d.PrefixStore(f"{self._name}/{name}", store)

    def close(self) -> None:
        """Destroys the process group.

        Its threads must end now. A thread that still holds a tensor of Python when the interpreter
        ends would abort the process (pytorch/pytorch#179291).
        """
        if self._thread is not None:
            self._thread.shutdown()
        if self._pg is not None and dist.is_initialized():
            dist.destroy_process_group(self._pg)
        self._pg = None


def _host() -> str:
    """Returns a string that identifies this machine. Many containers are called localhost."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class HostGroup(RankSet):
    """Some ranks of a group, which exchange messages through that group.

    A process group of their own would need all ranks to create it, or a name that is not unique.
    """

    def __init__(self, group: GlooGroup, ranks: Sequence[int]) -> None:
        self._all, self._ranks = group, ranks
        self.rank, self.size = ranks.index(group.rank), len(ranks)

    def sum(self, values: Sequence[int], what: str) -> list[int]:
        return [sum(column) for column in zip(*self.all_gather(values, what), strict=True)]

    def gather(self, value: T, what: str) -> list[T]:
        values = self.all_gather(value, what)
        return [] if self.rank else values

    def all_gather(self, value: T, what: str) -> list[T]:
        others = [rank for rank in range(self.size) if rank != self.rank]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in others}
        nbytes = torch.tensor([len(data)], device="cpu")
        self.exchange(
            [(r, 0, nbytes) for r in others], [(r, 0, size) for r, size in sizes.items()], what
        )
        rooms = {
            rank: torch.empty(int(size), dtype=torch.uint8, device="cpu")
            for rank, size in sizes.items()
        }
        self.exchange(
            [(r, 1, data) for r in others], [(r, 1, room) for r, room in rooms.items()], what
        )
        told = {rank: pickle.loads(room.numpy().tobytes()) for rank, room in rooms.items()}  # noqa: S301  # from this job
        return [value if rank == self.rank else told[rank] for rank in range(self.size)]

    def exchange(
        self,
        sends: Sequence[tuple[int, int, torch.Tensor]],
        receives: Sequence[tuple[int, int, torch.Tensor]],
        what: str,
    ) -> None:
        there, here = (
            [(self._ranks[rank], tag, tensor) for rank, tag, tensor in moves]
            for moves in (sends, receives)
        )
        self._all.exchange(there, here, what)
