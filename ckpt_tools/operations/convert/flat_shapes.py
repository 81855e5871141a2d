"""Gets the shapes of a model's parameters for files that lack them.

They come from a JSON file, or from a model's config with the help of transformers.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats.base import SHAPES
from ckpt_tools.operations.convert.child_process import last_line, run_python
from ckpt_tools.storage.small_files import parse_json, read_named

_OF_CONFIG = """
import json, sys
import torch, transformers
config = transformers.AutoConfig.from_pretrained(
    sys.argv[1], trust_remote_code=False, local_files_only=True
)
kind = find_class(config.architectures or ["AutoModelForCausalLM"])
with torch.device("meta"):
    is_auto = kind.__name__.startswith("Auto")
    model = kind.from_config(config, trust_remote_code=False) if is_auto else kind(config)
print(json.dumps({name: list(parameter.shape) for name, parameter in model.named_parameters()}))
"""


def lay_beside(path: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """Returns the shapes file to add to a checkpoint's files, by name; nothing without a path.

    Args:
        path: JSON of names and shapes, in the model's order. Or a model's config.json, or its
            directory: then transformers lists the parameters in a separate process. That process
            loads no weights and runs no code of the model's directory.

    Raises:
        PlanError: the file cannot be read, transformers is not installed, or it does not know the
            model.
    """
    if path is None:
        return {}
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        data = read_named(file)
        body = parse_json(data)
    except (StorageError, ValueError) as error:
        raise PlanError(
            f"--shapes: cannot be read: {printable(str(file))}: {printable(str(error))}"
        ) from error
    is_config = isinstance(body, dict) and isinstance(body.get("model_type"), str)
    return {SHAPES: _of_config(file) if is_config else data}


def check_needed(shapes: str | os.PathLike[str] | None, *catalogs: Catalog) -> None:
    """Refuses a shapes file that none of these checkpoints needs.

    Raises:
        PlanError: the user gave it, but all checkpoints have their own shapes.
    """
    if shapes is not None and not any(catalog.lacks_shapes for catalog in catalogs):
        raise PlanError(
            f"--shapes {printable(os.fspath(shapes))}: the files have the shapes of all parameters",
            hint="leave --shapes out; only FSDP1's flat parameters lack their shapes",
        )


def _of_config(file: Path) -> bytes:
    done = run_python(_OF_CONFIG, str(file))
    if done.returncode:
        last = last_line(done)
        is_missing = last.startswith("ModuleNotFoundError")
        hint = (
            "pip install transformers"
            if is_missing
            else "make the file of shapes where the model can be made"
        )
        raise PlanError(
            f"--shapes: transformers cannot build a model from {printable(str(file))}:"
            f" {printable(last)}",
            hint=hint,
        )
    return done.stdout.strip().splitlines()[-1]
