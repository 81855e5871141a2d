"""A short run of every fuzzer, and the inputs that once did harm, by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools.core.catalog import TORCH_ZIP, Extent
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Target
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import FormatError, UnsafePickleError
from ckpt_tools.formats.dcp import metadata as dcp_metadata
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.publish.journal import prove_tiles, read_journals
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import MemoryStore
from tests.fuzz.fuzz import TARGETS
from tests.fuzz.seeds import SEEDS, WORK
from tests.jobs import LONG

ROOT = Path(__file__).parents[2]


SLOW = ("zero", "parts", "flats")  # they write their input with torch
QUICK = [name for name in TARGETS if name not in SLOW]
GROUPS = [list(SLOW), QUICK[:4], QUICK[4:8], QUICK[8:]]  # one process each: its start takes longest


@pytest.mark.slow
@pytest.mark.parametrize("targets", GROUPS, ids=" ".join)
def test_a_reader_reads_or_refuses_and_does_nothing_else(
    targets: list[str], tmp_path: Path
) -> None:
    runs = (150 if targets[0] in SLOW else 750) * (8 if LONG else 1)
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.fuzz",
        *targets,
        "--runs",
        str(runs),
        "--keep",
        str(tmp_path / "found"),
    ]
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=800,
        cwd=tmp_path / "cwd",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == targets
    for line in lines:
        assert f"{runs:,} runs" in line and "'read'" in line and "Error" in line  # both happen


def nested(how_deep: int) -> bytes:
    """A dict whose key is a tuple in a tuple in a tuple."""
    return b"\x80\x04})" + b"\x85" * how_deep + b"Ns."


def doubled(how_often: int) -> bytes:
    """A dict whose key is a tuple that holds one twice, which holds one twice."""
    return (
        b"\x80\x04})\x94"
        + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(how_often))
        + b"Ns."
    )


def doubled_by_put(how_often: int) -> bytes:
    return (
        b"\x80\x02})"
        + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(how_often))
        + b"Ns."
    )


def by_way_of_a_list(how_often: int) -> bytes:
    """Lists become tuples by a call, and their weight goes along."""
    size = b"ctorch\nSize\n"
    return (
        b"\x80\x02})"
        + b"".join(
            b"q" + bytes([i]) + size + b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x85R"
            for i in range(how_often)
        )
        + b"Ns."
    )


@pytest.mark.parametrize(
    "data", [nested(1_000_000), nested(5000), doubled(60), doubled_by_put(60), by_way_of_a_list(60)]
)
def test_a_tuple_that_would_end_the_process_or_never_end_is_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickleError, match="a tuple holds more than 4096 elements"):
        dcp_metadata.parse_metadata(data, "test")


def test_a_global_without_its_second_line_is_no_endless_walk() -> None:
    with pytest.raises(FormatError):
        dcp_metadata.parse_metadata(
            b"\x80\x02ctorch\nSize\n" + b"c" + b"a" * 600 + b"\n)\x81.", "test"
        )


def test_a_zip64_field_that_is_cut_short_is_refused() -> None:
    data = bytearray(SEEDS["item"]()[0])
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"version"))
    data[entry + 20 : entry + 28] = b"\xff" * 8
    # eleven bytes of extra field, a number and three bytes of another
    data[entry + 30 : entry + 32] = b"\x0b\x00"
    with pytest.raises(FormatError):
        list(
            torch_zip.locate_payloads(
                MemoryStore({"f": bytes(data)}),
                [
                    torch_zip.ArchiveItem(
                        Extent("f", 0, len(data), TORCH_ZIP), BY_NAME["float32"], (3, 4)
                    )
                ],
            )
        )


LONGEST = (1 << 64) - 1


@pytest.mark.parametrize(
    ("pieces", "nbytes"),
    [([[2, 48, 11, 0]], 48), ([[0, LONGEST, crc, 0] for crc in range(3)], 3 * LONGEST)],
)
def test_a_journal_whose_pieces_lie_outside_of_their_tensor_is_no_crash(
    pieces: list[list[int]], nbytes: int, tmp_path: Path
) -> None:
    """The share of a piece that ends behind its tensor; found by the fuzzer."""
    step = {
        "files": {"f": []},
        "prints": [{"w": pieces}, {"w": []}, {"w": nbytes}],
        "read": [],
        "overflowed": {},
    }
    lines = [
        json.dumps(line).encode() for line in ({"work": WORK, "tiles": [1 << 20, 4 << 20]}, step)
    ]
    (tmp_path / ".ckpt.journal.fuzz").write_bytes(
        b"".join(hex64(crc64nvme(line)).encode() + b" " + line + b"\n" for line in lines)
    )
    memory, sink = MemoryStore({"f": b""}), WriteSink(Target("dcp", {"f": 0}, {}), MemoryStore({}))
    prove_tiles(read_journals(tmp_path, WORK), memory, (1 << 16, 1 << 16), 1, ALONE).restore(
        sink, CrcWatch({}, MemoryStore()), {}
    )
    assert sink.fingerprints.join() == {}
