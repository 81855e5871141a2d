"""Two values are the same where their texts are: types, order and bits, also of tensors and NaN."""

from __future__ import annotations

import collections
from typing import Any

import torch


def looks(value: Any) -> str:
    """Returns a value's whole text with types; an ordered dict is a dict to DCP."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        kind = "dict" if type(value) is collections.OrderedDict else type(value).__name__
        return f"{kind}({', '.join(f'{looks(k)}: {looks(v)}' for k, v in sorted(value.items(), key=lambda item: repr(item[0])))})"
    if isinstance(value, (list, tuple, collections.deque)):
        return f"{type(value).__name__}({', '.join(map(looks, value))})"
    return f"{type(value).__name__} {value!r}"
