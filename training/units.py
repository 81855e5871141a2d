"""FSDP units: modules whose parameters are gathered and freed together."""

from __future__ import annotations

import fnmatch

import torch
from torch import nn

from training.config import Config, ConfigError
from training.initialize import tied
from training.model import Decoder, block_classes

_LISTS = (nn.ModuleList, nn.ModuleDict)


def dtype_of(name: str) -> torch.dtype | None:
    """Returns a type by its name, or None for an empty name."""
    return getattr(torch, name) if name else None


def blocks_of(model: nn.Module, config: Config) -> list[str]:
    """Returns the names of a model's layers, in order.

    If the model does not name their classes, they are those of `fsdp.wrap_classes`.
    """
    wrapped = config.fsdp.wrap_classes if config.fsdp.wrap == "classes" else []
    classes = block_classes(model) or set(wrapped)
    return [
        name for name, module in model.named_modules() if name and type(module).__name__ in classes
    ]


def check_blocks(model: nn.Module, config: Config) -> None:
    """Refuses settings that are for layers, if it is not known what a layer is.

    Raises:
        ConfigError: the message names the setting.
    """
    compute = config.compute
    for key in ("checkpoint_every", "compile"):
        if getattr(compute, key) and not blocks_of(model, config):
            raise ConfigError(
                f"compute.{key}: this model does not name its layers; give their classes in"
                ' fsdp.wrap_classes, with fsdp.wrap = "classes"'
            )


def units_of(model: nn.Module, config: Config) -> dict[str, torch.dtype | None]:
    """Returns the FSDP units of a model by name, children before parents, and "" for the root last.

    The value is a unit's compute type, if it differs from the default. A parameter belongs to the
    innermost unit around it.

    Raises:
        ConfigError: the model lacks a class, a layer or a module.
    """
    names = _wanted(model, config)
    overrides = {
        name: dtype_of(dtype)
        for glob, dtype in config.precision.overrides.items()
        for name in _matching(model, glob)
    }
    order = [name for name, _ in model.named_modules() if name and name in {*names, *overrides}]
    if lists := [name for name in order if isinstance(model.get_submodule(name), _LISTS)]:
        raise ConfigError(
            f"{lists[0]} is only a list of modules, which FSDP cannot shard as a unit: name the"
            " modules in it (fsdp.wrap_classes, precision.overrides)"
        )
    shared = _shared_outside(model, order)
    if mixed := sorted(shared & overrides.keys()):
        raise ConfigError(
            f"precision.overrides: {mixed[0]} shares a weight with another module, so it has the"
            " type of the root: leave it out"
        )
    order.sort(key=lambda name: -name.count("."))
    return {name: overrides.get(name) for name in [*order, ""] if name not in shared}


def _wanted(model: nn.Module, config: Config) -> set[str]:
    embeddings = embeddings_of(model) if config.fsdp.wrap_embeddings else []
    return {*_chosen(model, config), *embeddings}


def left_out(model: nn.Module, config: Config) -> list[str]:
    """Returns modules that are no units although they should be: they share a weight outside.

    DDP has no units.
    """
    if config.fsdp.strategy == "NO_SHARD" and config.fsdp.api == "fsdp2":
        return []
    return sorted(_wanted(model, config) - units_of(model, config).keys())


def _chosen(model: nn.Module, config: Config) -> set[str]:
    fsdp = config.fsdp
    if fsdp.strategy == "NO_SHARD" and config.model.factory:
        return set()  # DDP has no units
    if fsdp.wrap == "layers":
        if not (names := set(blocks_of(model, config))):
            raise ConfigError(
                'fsdp.wrap = "layers": this model does not name its layers; give their'
                " classes in fsdp.wrap_classes"
            )
        return names
    if fsdp.wrap == "classes":
        classes = {name: type(module).__name__ for name, module in model.named_modules()}
        if unknown := [name for name in fsdp.wrap_classes if name not in classes.values()]:
            raise ConfigError(
                f"fsdp.wrap_classes: the model has no {unknown[0]!r}; it has"
                f" {', '.join(sorted(set(classes.values())))}"
            )
        return {name for name, of_name in classes.items() if of_name in fsdp.wrap_classes and name}
    return _by_size(model, fsdp.min_num_params) if fsdp.wrap == "size" else set()


def _by_size(model: nn.Module, least: int) -> set[str]:
    """Returns the modules that FSDP1's size policy wraps.

    They have at least `least` parameters outside of wrapped modules. `units_of` then drops modules
    that share a parameter with an outside module, although FSDP1 would wrap them. Source: torch
    2.13 `torch/distributed/fsdp/wrap.py`, `_recursive_wrap` and `size_based_auto_wrap_policy`.
    """
    chosen: set[str] = set()

    def visit(name: str, module: nn.Module) -> int:
        """Returns the number of wrapped parameters in a module."""
        numel = sum(p.numel() for p in module.parameters())
        if numel < least or isinstance(module, nn.MultiheadAttention):
            return 0
        wrapped = sum(
            visit(f"{name}.{child}" if name else child, m) for child, m in module.named_children()
        )
        if name and numel - wrapped >= least and not isinstance(module, _LISTS):
            chosen.add(name)
            return numel
        return wrapped

    visit("", model)
    return chosen


def embeddings_of(model: nn.Module) -> list[str]:
    """Returns the names of the embedding and the head; nothing for the module of a factory."""
    if isinstance(model, Decoder):
        return ["tok_embeddings", "output"]
    if not hasattr(model, "get_input_embeddings"):
        return []
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is one for one in both)]


def _matching(model: nn.Module, glob: str) -> list[str]:
    names = [
        n
        for n, m in model.named_modules()
        if fnmatch.fnmatchcase(n, glob) and any(True for _ in m.parameters())
    ]
    if not names:
        raise ConfigError(f"precision.overrides.{glob}: no module with parameters is called that")
    return names


def _shared_outside(model: nn.Module, names: list[str]) -> set[str]:
    """Returns the modules that share a parameter (tied weights) with an outside module.

    Such modules stay together, in the root.
    """
    shared = [[use.path for use in uses] for uses in tied(model)]
    inside = lambda path, unit: path == unit or path.startswith(f"{unit}.")  # noqa: E731
    return {
        unit
        for unit in names
        for paths in shared
        if len({inside(path, unit) for path in paths}) == 2
    }
