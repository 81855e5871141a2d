"""Inspects, merges and reshards PyTorch FSDP checkpoints at the speed of a file copy.

It runs no code from checkpoints.

>>> import ckpt_tools
>>> ckpt_tools.inspect("run/step-00000500").world_size
>>> ckpt_tools.merge("run/step-00000500", "model.safetensors", dtype="bf16")
>>> ckpt_tools.reshard("run/step-00000500", "run4/step-00000500", to_ranks=4)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    PeerError,
    PlanError,
    StorageError,
    UnsafePickleError,
)
from ckpt_tools.version import __version__

if TYPE_CHECKING:
    from ckpt_tools.core.statistics import TensorStatistics
    from ckpt_tools.loop.loading.load import load
    from ckpt_tools.loop.loading.load_request import LoadReport
    from ckpt_tools.loop.loading.reader import Checkpoint, StoredTensor, open_checkpoint
    from ckpt_tools.loop.manager import CheckpointManager
    from ckpt_tools.loop.options import Mirror, Outages, Resuming, Writing
    from ckpt_tools.loop.publisher import Publisher
    from ckpt_tools.loop.saving.huggingface_copies import HuggingFace
    from ckpt_tools.loop.saving.save import SaveReport
    from ckpt_tools.loop.saving.single_save import save
    from ckpt_tools.loop.state.ema import Ema
    from ckpt_tools.loop.state.state_dict import PerRank, RngState
    from ckpt_tools.loop.steps.retention import Pruned
    from ckpt_tools.loop.steps.runs import latest, prune, steps
    from ckpt_tools.loop.weight_patches import WeightPatch, weight_patches
    from ckpt_tools.operations.average import average
    from ckpt_tools.operations.check_run import RunProblem, check_run
    from ckpt_tools.operations.convert.convert import convert
    from ckpt_tools.operations.copy import CopyResult, copy
    from ckpt_tools.operations.diff import Change, Difference, DiffResult, diff
    from ckpt_tools.operations.inspect import Report, inspect
    from ckpt_tools.operations.merge_reshard import merge, reshard
    from ckpt_tools.operations.publish import PublishResult, publish_version
    from ckpt_tools.operations.pull import PullResult, pull
    from ckpt_tools.operations.report.plot import plot
    from ckpt_tools.operations.report.report import report, report_data
    from ckpt_tools.operations.run_bytes import StepBytes, du
    from ckpt_tools.operations.salvage import SalvageResult, salvage
    from ckpt_tools.operations.seal import SealResult, seal
    from ckpt_tools.operations.stats import StatsResult, stats
    from ckpt_tools.operations.thin import ThinnedStep, ThinResult, thin
    from ckpt_tools.operations.verify import VerifyResult, verify
    from ckpt_tools.publish.check_manifest import Problem
    from ckpt_tools.publish.manifest import Manifest
    from ckpt_tools.run.retention import Retention
    from ckpt_tools.run.step import Step
    from ckpt_tools.transfer.result import TransferResult

    open = open_checkpoint  # noqa: A001  # not in __all__: `import *` would replace Python's own

__all__ = [
    "CatalogError",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CopyResult",
    "DiffResult",
    "Difference",
    "Ema",
    "FormatError",
    "HuggingFace",
    "IntegrityError",
    "LoadReport",
    "Manifest",
    "Mirror",
    "NotACheckpointError",
    "Outages",
    "PeerError",
    "PerRank",
    "PlanError",
    "Problem",
    "Pruned",
    "PublishResult",
    "Publisher",
    "PullResult",
    "Report",
    "Resuming",
    "Retention",
    "RngState",
    "RunProblem",
    "SalvageResult",
    "SaveReport",
    "SealResult",
    "StatsResult",
    "Step",
    "StepBytes",
    "StorageError",
    "StoredTensor",
    "TensorStatistics",
    "ThinResult",
    "ThinnedStep",
    "TransferResult",
    "UnsafePickleError",
    "VerifyResult",
    "WeightPatch",
    "Writing",
    "__version__",
    "average",
    "check_run",
    "convert",
    "copy",
    "diff",
    "du",
    "inspect",
    "latest",
    "load",
    "merge",
    "plot",
    "prune",
    "publish_version",
    "pull",
    "report",
    "report_data",
    "reshard",
    "salvage",
    "save",
    "seal",
    "stats",
    "steps",
    "thin",
    "verify",
    "weight_patches",
]

_LAZY = {
    "PublishResult": "operations.publish",
    "Publisher": "loop.publisher",
    **dict.fromkeys(("WeightPatch", "weight_patches"), "loop.weight_patches"),
    "publish_version": "operations.publish",
    "PullResult": "operations.pull",
    "pull": "operations.pull",
    "Report": "operations.inspect",
    "inspect": "operations.inspect",
    "TransferResult": "transfer.result",
    "merge": "operations.merge_reshard",
    "reshard": "operations.merge_reshard",
    "average": "operations.average",
    "check_run": "operations.check_run",
    "RunProblem": "operations.check_run",
    "convert": "operations.convert.convert",
    "CopyResult": "operations.copy",
    "copy": "operations.copy",
    "VerifyResult": "operations.verify",
    "verify": "operations.verify",
    "DiffResult": "operations.diff",
    "diff": "operations.diff",
    "SealResult": "operations.seal",
    "seal": "operations.seal",
    "SalvageResult": "operations.salvage",
    "salvage": "operations.salvage",
    "CheckpointManager": "loop.manager",
    **dict.fromkeys(("Mirror", "Outages", "Resuming", "Writing"), "loop.options"),
    "load": "loop.loading.load",
    "PerRank": "loop.state.state_dict",
    "RngState": "loop.state.state_dict",
    "save": "loop.saving.single_save",
    "Ema": "loop.state.ema",
    "HuggingFace": "loop.saving.huggingface_copies",
    "latest": "loop.steps.runs",
    "steps": "loop.steps.runs",
    "prune": "loop.steps.runs",
    "Pruned": "loop.steps.retention",
    "Retention": "run.retention",
    "Step": "run.step",
    "SaveReport": "loop.saving.save",
    "LoadReport": "loop.loading.load_request",
    "Checkpoint": "loop.loading.reader",
    "StoredTensor": "loop.loading.reader",
    "Manifest": "publish.manifest",
    "Problem": "publish.check_manifest",
    "StatsResult": "operations.stats",
    "stats": "operations.stats",
    "thin": "operations.thin",
    "du": "operations.run_bytes",
    "plot": "operations.report.plot",
    "report": "operations.report.report",
    "report_data": "operations.report.report",
    "StepBytes": "operations.run_bytes",
    "ThinResult": "operations.thin",
    "ThinnedStep": "operations.thin",
    "TensorStatistics": "core.statistics",
    "Change": "operations.diff",
    "Difference": "operations.diff",
}


def __getattr__(name: str) -> object:
    """Imports an operation at its first use.

    `ckpt --help` should not wait for numpy, nor `ckpt merge` for torch.
    """
    if name == "distributed":  # a module; `import ckpt_tools` alone does not load it
        return import_module("ckpt_tools.distributed")
    if name == "open":
        return import_module("ckpt_tools.loop.loading.reader").open_checkpoint
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ckpt_tools.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    """Returns the names of the package, with operations that are not imported yet."""
    return sorted({*globals(), *__all__, "open"})
