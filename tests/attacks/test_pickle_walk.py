"""Pickles that try to hide from the walk over their opcodes what C's unpickler would do."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools import CheckpointError, FormatError, UnsafePickleError
from ckpt_tools.formats.dcp.metadata import parse_metadata
from ckpt_tools.formats.pickle.scan import scan
from tests.attacks.hostile import alike, limited, torch_file

METADATA = b"torch.distributed.checkpoint.metadata"


def short(text: bytes) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text


def get(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def pair(numbers: tuple[float, float]) -> bytes:
    return b"".join(b"G" + struct.pack(">d", number) for number in numbers) + b"\x86"


def known(name: bytes) -> bytes:
    """A class, as memo index 2."""
    return short(METADATA) + b"\x94" + short(name) + b"\x94\x93\x94"


def tuple_after_build() -> bytes:
    """Each tuple gets a state that is None, which changes nothing, and holds the one before."""
    return b"\x80\x02}N" + b"\x85Nb" * 5000 + b"Ns."


def tuples_within_states(first: bytes = b"N\x85") -> bytes:
    """Each object's state is remembered, and holds the state before it eight times."""
    levels = b"".join(
        b"h\x02)\x81}(Nh\x02)\x81(" + bytes([ord("h"), 3 + n]) * 8 + b"t\x94bub" for n in range(20)
    )
    last = b"}" + bytes([ord("h"), 23]) + b"Nse."
    return b"\x80\x04](" + known(b"TensorProperties") + first + b"\x94" + levels + last


def tuples_of_no_tuple() -> bytes:
    """The same, and the first value is none."""
    return tuples_within_states(b"N")


def tuples_in_separate_runs() -> bytes:
    """The same, in runs of one object each."""
    return tuples_within_states(b"N").replace(b"bubh\x02", b"bubNh\x02")


def remembered_again() -> bytes:
    """Tuples of one hash are remembered a second time, within the states of objects."""
    pairs = list(alike(3000))
    first = b"".join(pair(p) + b"\x94" for p in pairs)
    again = b"".join(
        b"h\x02)\x81}(" + b"".join(b"N" + get(3 + n + m) + b"\x94" for m in range(10)) + b"ub"
        for n in range(0, 3000, 10)
    )
    keys = b"}(" + b"".join(get(3003 + n) + b"N" for n in range(3000)) + b"u"
    return b"\x80\x04](" + known(b"Metadata") + first + again + keys + b"e."


def beside_a_heavy_value() -> bytes:
    """A value of the dict has so many parts that one tuple more or less does not matter."""
    lists = b"](" + b"N" * 16 + b"eq\x00"
    for n in range(8):
        lists += b"](" + bytes([ord("h"), n]) * 16 + b"eq" + bytes([n + 1])
    keys = b"".join(pair(p) + b"N" for p in alike(3000))
    return b"\x80\x02](" + lists + b"}(Nh\x08" + keys + b"ue."


def long_integers_again() -> bytes:
    """A few integers of one hash are the keys of many dicts."""
    modulus = sys.hash_info.modulus
    longs = b"".join(
        b"\x8a\x0c" + (modulus * n).to_bytes(12, "little") + b"\x94" for n in range(1, 1001)
    )
    keys = b"".join(get(n) + b"N" for n in range(1000))
    return b"\x80\x04](" + longs + (b"}(" + keys + b"u") * 11 + b"e."


HIDDEN = {
    tuple_after_build: "a tuple holds more than 4096",
    tuples_within_states: "a tuple holds more than 4096",
    tuples_of_no_tuple: "a tuple holds more than 4096",
    tuples_in_separate_runs: "a tuple holds more than 4096",
    remembered_again: "keys of its dicts are tuples",
    beside_a_heavy_value: "keys of its dicts are tuples",
    long_integers_again: "keys of its dicts are integers",
}


@pytest.mark.slow
@pytest.mark.parametrize("made", HIDDEN, ids=lambda made: made.__name__)
def test_nothing_is_hidden_from_the_walk(made: Callable[[], bytes]) -> None:
    with pytest.raises(UnsafePickleError, match=HIDDEN[made]):
        scan(made(), "x")


@pytest.mark.parametrize("hidden", [b"\x85" * 9, b"r\xff\xff\xff\x0f"])
def test_no_opcode_crosses_the_end_of_its_frame(hidden: bytes, tmp_path: Path) -> None:
    """C's unpickler drops what is left of a frame, and reads the length of a text elsewhere."""
    body = b"\0" + b"z" * 512 + b"0}N" + hidden + b"Ns."
    body += b"z" * (131072 - len(body))
    data = b"\x80\x04\x95" + struct.pack("<Q", 2) + b"X\0\0\x02\0" + body + b"."
    with pytest.raises(FormatError, match="past its frame"):
        scan(data, "x")
    with pytest.raises(CheckpointError):
        ckpt_tools.inspect(torch_file(tmp_path / "x.pt", data))
    inner = b"\x95" + struct.pack("<Q", 1) + b"N."
    with pytest.raises(UnsafePickleError, match="opcode"):  # frames do not nest
        scan(b"\x80\x04\x95" + struct.pack("<Q", len(inner)) + inner, "x")


def test_one_dict_can_be_the_state_of_many_objects() -> None:
    items = b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(100_000))
    state = b"}\x94(" + items + b"u"
    for name in (b"Metadata", b"SavePlan"):
        data = b"\x80\x04](" + known(name) + state + b"h\x02)\x81h\x03b" * 2000 + b"e."
        with pytest.raises(CheckpointError):  # within this process's memory
            parse_metadata(data, "x")


@pytest.mark.slow
def test_unknown_types_are_few(tmp_path: Path) -> None:
    same = torch_file(tmp_path / "x.pt", b"\x80\x02](" + b"ca\nb\n" * 400_000 + b"e.")
    other = b"".join(b"ca\nb%d\n" % n for n in range(100_000))
    others = torch_file(tmp_path / "y.pt", b"\x80\x02](" + other + b"e.")
    code = "import sys, ckpt_tools; ckpt_tools.inspect(sys.argv[1])"
    for path, said in ((same, "no tensors"), (others, "more than 1000 unknown types")):
        done = limited(code, path, memory=1 << 30)
        assert done.returncode and said in done.stderr, done.stderr[-300:]


def test_a_pickle_cannot_change_the_classes_it_uses() -> None:
    def attribute(module: bytes, name: bytes) -> bytes:
        return b"c" + module + b"\n" + name + b"\n"

    key = b"X" + struct.pack("<I", 16) + b"__getattribute__"
    values = attribute(METADATA, b"_MEM_FORMAT_ENCODING")
    data = b"\x80\x02" + attribute(METADATA, b"Metadata") + b"N}(" + key + values + b"u\x86b)\x81."
    with pytest.raises(FormatError):
        parse_metadata(data, "x")
