"""The table of element types: name, safetensors tag, torch storage class and width.

It imports neither torch nor numpy. A type that is not in the table is refused, and the error names
it.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tools.errors import FormatError, printable


class DType(NamedTuple):
    """One element type.

    `name` is torch's without the `torch.` prefix. `tag` is None if safetensors has none.
    `storage_class` is the class that a `torch.save` pickle names. It is `UntypedStorage` if the
    pickle carries the dtype separately.
    """

    name: str
    tag: str | None
    storage_class: str
    bits: int
    is_castable: bool = False

    @property
    def itemsize(self) -> int:
        """Width of an element in bytes."""
        return self.bits // 8


_UNTYPED = "UntypedStorage"
_TABLE = (
    DType("float64", "F64", "DoubleStorage", 64, True),
    DType("float32", "F32", "FloatStorage", 32, True),
    DType("float16", "F16", "HalfStorage", 16, True),
    DType("bfloat16", "BF16", "BFloat16Storage", 16, True),
    DType("int64", "I64", "LongStorage", 64),
    DType("int32", "I32", "IntStorage", 32),
    DType("int16", "I16", "ShortStorage", 16),
    DType("int8", "I8", "CharStorage", 8),
    DType("uint8", "U8", "ByteStorage", 8),
    DType("bool", "BOOL", "BoolStorage", 8),
    DType("complex64", "C64", "ComplexFloatStorage", 64),
    DType("complex128", None, "ComplexDoubleStorage", 128),
    DType("complex32", None, _UNTYPED, 32),
    DType("uint16", "U16", _UNTYPED, 16),
    DType("uint32", "U32", _UNTYPED, 32),
    DType("uint64", "U64", _UNTYPED, 64),
    DType("float8_e4m3fn", "F8_E4M3", _UNTYPED, 8),
    DType("float8_e5m2", "F8_E5M2", _UNTYPED, 8),
    DType("float8_e8m0fnu", "F8_E8M0", _UNTYPED, 8),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", _UNTYPED, 8),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", _UNTYPED, 8),
    DType("float4_e2m1fn_x2", "F4", _UNTYPED, 8),
)
BY_NAME = {d.name: d for d in _TABLE}
MAX_ITEMSIZE = max(d.itemsize for d in _TABLE)
BY_TAG = {d.tag: d for d in _TABLE if d.tag is not None}
BY_STORAGE_CLASS = {d.storage_class: d for d in _TABLE if d.storage_class != _UNTYPED}
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def by_name(name: str, where: str) -> DType:
    """Returns the type that torch calls `name`.

    `where` appears in the FormatError for an unknown name.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise FormatError(
            f"unknown dtype: expected one of {', '.join(BY_NAME)}, got {printable(name)!r}"
            f" ({where})"
        ) from None


def by_tag(tag: str, where: str) -> DType:
    """Returns the type that safetensors calls `tag`.

    `where` appears in the FormatError for an unknown tag.
    """
    try:
        return BY_TAG[tag]
    except KeyError:
        raise FormatError(
            f"unknown dtype: expected one of {', '.join(BY_TAG)}, got {printable(tag)!r} ({where})"
        ) from None
