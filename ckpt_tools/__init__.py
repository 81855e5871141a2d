"""Inspect, merge and reshard PyTorch FSDP checkpoints at the speed of a file copy, without running what they contain.

    >>> import ckpt_tools
    >>> ckpt_tools.inspect("run/step-500").world_size
    >>> ckpt_tools.merge("run/step-500", "model.safetensors", dtype="bf16")
    >>> ckpt_tools.reshard("run/step-500", "run4/step-500", to_ranks=4)
"""

from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    PlanError,
    StorageError,
    UnsafePickleError,
)
from ckpt_tools.operations.inspect import Report, inspect
from ckpt_tools.operations.transfer import TransferResult, merge, reshard
from ckpt_tools.version import __version__

__all__ = [
    "CatalogError",
    "CheckpointError",
    "FormatError",
    "IntegrityError",
    "NotACheckpointError",
    "PlanError",
    "Report",
    "StorageError",
    "TransferResult",
    "UnsafePickleError",
    "__version__",
    "inspect",
    "merge",
    "reshard",
]
