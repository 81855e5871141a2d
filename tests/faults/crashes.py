"""What a disk may hold after a power cut: every prefix of the system calls of a real run, with what
was not yet made durable lost in part.

`record` runs a command under strace and keeps what changed the disk below a folder. `Disk.crashed`
builds one of the states that a POSIX file system may be found in after it: bytes and sizes that no
fsync of their file came after may be there, be zeros, be cut, in blocks of 512; names that no fsync
of their directory came after may be there or not, one by one (`LOOSE`), or all up to some point
(`JOURNALED`), as those that keep a log do.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.jobs import QUICK_STRACE

BLOCK = 512
LOOSE, JOURNALED = "loose", "journaled"
CALLS = "openat,mkdir,mkdirat,pwrite64,write,ftruncate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink"
_LINE = re.compile(r"(\d+) (\w+)\((.*)\) += (-?\d+)(?:<(.*)>)?.*")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)(?:<([^>]*)>)?, )?"((?:[^"\\]|\\.)*)"')


@dataclass
class Inode:
    """A file or directory: what it ends up as, and what was done to it, each with the number of the
    call.
    """

    is_folder: bool
    writes: list[tuple[int, int, int]] = field(default_factory=list)  # when, from, to
    sizes: list[tuple[int, int]] = field(default_factory=list)  # when, bytes
    syncs: list[int] = field(default_factory=list)
    data: bytes = b""


@dataclass(frozen=True)
class Naming:
    """A change of names: in which directories, which name is gone, and which stands for what
    afterwards.
    """

    when: int
    parents: tuple[Inode, ...]
    gone: tuple[tuple[int, str], ...]
    added: tuple[tuple[int, str, int], ...]


class Disk:
    """The history of a folder."""

    def __init__(self, root: Path) -> None:
        """Takes what is there now as durable."""
        self.root, self.inodes, self.namings, self.now = root, [Inode(True)], list[Naming](), 0
        self.tree: dict[tuple[int, str], int] = {}  # names as they are now
        self.first: dict[tuple[int, str], int] = {}
        for folder, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = Path(folder) / name
                inode = Inode(path.is_dir())
                if path.is_file():
                    inode.data = path.read_bytes()
                    inode.sizes, inode.writes = [(0, len(inode.data))], [(0, 0, len(inode.data))]
                inode.syncs = [0]
                self.inodes.append(inode)
                self.first[self.find(Path(folder)), name] = len(self.inodes) - 1
                self.tree = dict(self.first)

    def find(self, path: Path) -> int:
        """Returns the number of what a path stands for, -1 for nothing that is looked at."""
        if path == self.root:
            return 0
        if not path.is_relative_to(self.root):
            return -1
        number = 0
        for part in path.relative_to(self.root).parts:
            number = self.tree.get((number, part), -1)
        return number

    def name(self, gone: Sequence[Path], added: Sequence[tuple[Path, int]]) -> None:
        """Notes a change of names, all at once."""
        out = tuple((self.find(p.parent), p.name) for p in gone)
        new = tuple((self.find(p.parent), p.name, number) for p, number in added)
        parents = {n for n, *_ in (*out, *new)}
        assert -1 not in parents, (gone, added)
        self.namings.append(
            Naming(self.now, tuple(self.inodes[n] for n in sorted(parents)), out, new)
        )
        self._apply(self.tree, self.namings[-1])

    def make(self, path: Path, is_folder: bool) -> int:
        """Notes a new file or directory."""
        self.inodes.append(Inode(is_folder, sizes=[] if is_folder else [(self.now, 0)]))
        self.name([], [(path, len(self.inodes) - 1)])
        return len(self.inodes) - 1

    @staticmethod
    def _apply(tree: dict[tuple[int, str], int], naming: Naming) -> None:
        for key in naming.gone:
            tree.pop(key, None)
        for parent, name, number in naming.added:
            tree[parent, name] = number

    def crashed(
        self, when: int, mode: str, rng: random.Random, keep: float
    ) -> dict[tuple[int, str], int]:
        """Returns the names that are there after a crash right behind call number `when`; each that
        is not durable stays with a chance of `keep`.
        """
        done = [n for n in self.namings if n.when <= when]
        sure = [
            all(any(n.when < s <= when for s in parent.syncs) for parent in n.parents) for n in done
        ]
        if mode == JOURNALED:  # what is durable brings everything before it along
            last = max((i for i, is_sure in enumerate(sure) if is_sure), default=-1)
            kept = done[: rng.randint(last + 1, len(done)) if keep < 1 else len(done)]
        else:
            kept = [
                n for n, is_sure in zip(done, sure, strict=True) if is_sure or rng.random() < keep
            ]
        tree = dict(self.first)
        for naming in kept:
            self._apply(tree, naming)
        return tree

    def content(self, inode: Inode, when: int, rng: random.Random, keep: float) -> bytes:
        """Returns what a file may hold then."""
        synced = max((s for s in inode.syncs if s <= when), default=-1)
        sizes = [(at, n) for at, n in inode.sizes if at <= when]
        later = [n for at, n in sizes if at > synced]
        size = next((n for at, n in reversed(sizes) if at <= synced), 0)
        if later and rng.random() < keep:
            size = rng.choice(later)
        writes = [w for w in inode.writes if w[0] <= when]
        found = bytearray(max([size, *(end for at, _, end in writes if at <= synced)]))
        for at, start, end in writes:
            for block in range(start, end, BLOCK):
                until = min(block + BLOCK, end)
                if at <= synced or rng.random() < keep:
                    found.extend(bytes(max(0, until - len(found))))
                    found[block:until] = inode.data[block:until]
        return bytes(found)

    def build(self, into: Path, when: int, mode: str, rng: random.Random) -> None:
        """Makes the directory that is found after a crash."""
        keep = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        tree = self.crashed(when, mode, rng, keep)

        def fill(number: int, path: Path) -> None:
            for (parent, name), child in tree.items():
                if parent == number:
                    inode, at = self.inodes[child], path / name
                    if inode.is_folder:
                        at.mkdir()
                        fill(child, at)
                    else:
                        at.write_bytes(self.content(inode, when, rng, keep))

        into.mkdir()
        fill(0, into)


def record(
    command: Sequence[str], root: Path, log: Path, faults: Sequence[str] = (), **environment: str
) -> Disk:
    """Runs a command, with faults injected, and returns what it did below a folder, call by call in
    the order of their ends.
    """
    disk = Disk(root)
    strace = [
        *QUICK_STRACE,
        "-y",
        "-s",
        "0",
        "-o",
        str(log),
        "-e",
        f"trace={CALLS}",
        "-e",
        "signal=none",
    ]
    strace += [word for fault in faults for word in ("-e", f"inject={fault}")]
    done = subprocess.run(
        [*strace, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    at: dict[int, int] = {}  # where the next `write` to an inode goes
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            begun[pid] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        if rest.startswith("<... "):
            rest = begun.pop(pid) + rest.partition(" resumed>")[2]
        match = _LINE.fullmatch(f"{pid} {rest}")
        if match and int(match[4]) >= 0:
            disk.now += 1
            _note(disk, match[2], match[3], int(match[4]), at)
    for (parent, name), number in disk.tree.items():
        inode = disk.inodes[number]
        if not inode.is_folder and inode.sizes and inode.sizes[-1][0]:
            inode.data = (_path_of(disk, parent) / name).read_bytes()
    return disk


def _path_of(disk: Disk, number: int) -> Path:
    if number == 0:
        return disk.root
    parent, name = next(key for key, child in disk.tree.items() if child == number)
    return _path_of(disk, parent) / name


def _note(disk: Disk, call: str, text: str, result: int, at: dict[int, int]) -> None:
    """Notes one call that ended well."""
    paths = [Path(folder or "/") / name for folder, name in _PATH.findall(text)]
    opened = re.match(r"\d+<([^>]*)>", text)
    number = disk.find(Path(opened[1])) if opened else -1
    inode = disk.inodes[number] if number >= 0 else None
    numbers = [int(n) for n in re.findall(r", (\d+)", text)]
    if (
        call == "openat"
        and "O_CREAT" in text
        and disk.find(paths[0].parent) >= 0
        and disk.find(paths[0]) < 0
    ):
        disk.make(paths[0], False)
    elif call == "openat":
        assert "O_TRUNC" not in text or disk.find(paths[0]) < 0, (
            f"written over in place: {paths[0]}"
        )
    elif call in ("mkdir", "mkdirat"):
        _ = disk.find(paths[0].parent) >= 0 and disk.make(paths[0], True)
    elif call in ("pwrite64", "write") and inode is not None:
        start = numbers[-1] if call == "pwrite64" else at.get(number, 0)
        inode.writes.append((disk.now, start, start + result))
        inode.sizes.append((disk.now, max(start + result, inode.sizes[-1][1])))
        at[number] = start + result
    elif call == "ftruncate" and inode is not None:
        inode.sizes.append((disk.now, numbers[-1]))
    elif call in ("fsync", "fdatasync") and inode is not None:
        inode.syncs.append(disk.now)
    elif call.startswith("rename") and disk.find(paths[0]) >= 0:
        _note_rename(disk, paths[0], paths[1], "RENAME_EXCHANGE" in text)
    elif call in ("unlink", "unlinkat", "rmdir") and disk.find(paths[0]) >= 0:
        disk.name([paths[0]], [])
    elif call.startswith(("link", "symlink")) and any(disk.find(p.parent) >= 0 for p in paths):
        assert call.startswith("link") and disk.find(paths[0]) >= 0, f"not looked at: {text}"
        disk.name([], [(paths[1], disk.find(paths[0]))])


def _note_rename(disk: Disk, old: Path, new: Path, is_exchange: bool) -> None:
    """Notes a rename: at once within a directory; from one to another the new name may last without
    the old one's being gone.
    """
    number, other = disk.find(old), disk.find(new)
    if is_exchange:
        disk.name([], [(new, number), (old, other)])
    elif old.parent == new.parent:
        disk.name([old], [(new, number)])
    else:
        disk.name([], [(new, number)])
        disk.name([old], [])


def crash(
    disk: Disk, states: int, seed: int, scratch: Path, check: Callable[[Path, bool], None]
) -> None:
    """Builds that many states and checks each: the directory, and whether the command had ended.

    Half of them are right behind a change of names, of which there are few among all calls.
    """
    rng = random.Random(seed)
    changes = sorted({naming.when for naming in disk.namings}) or [disk.now]
    scratch.mkdir(exist_ok=True)
    for number in range(states):
        when = (
            disk.now
            if number % 8 == 0
            else rng.choice(changes)
            if number % 2
            else rng.randrange(disk.now + 1)
        )
        folder = scratch / f"crash{number}"
        disk.build(folder, when, rng.choice((LOOSE, JOURNALED)), rng)
        check(folder, when == disk.now)
        shutil.rmtree(folder)
