"""Names in a training state: which entries are the model, an optimizer, or something else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.selection import keep, rename
from ckpt_tools.errors import PlanError, printable

# segments that wrappers of a model add: torch.compile, FSDP1, activation checkpointing
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


# buffers of torch's norms: nothing trains them, no optimizer has them, and each rank has its own
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")


def is_norm_buffer(fqn: str) -> bool:
    """Tells by its name whether a tensor is a running statistic of one of torch's norms."""
    return fqn.rpartition(".")[2] in _OF_NORMS


_MAY_BE_WRAPPED = re.compile("|".join([*sorted(WRAPPERS), r"\Amodule\."]))


def strip_wrappers(fqn: str) -> str:
    """Returns an FQN without the segments that wrappers of the model add.

    torch.compile, FSDP1 and activation checkpointing add their segments anywhere. DDP and DeepSpeed
    put `module` in front.
    """
    if not _MAY_BE_WRAPPED.search(fqn):
        return fqn
    bare = _without_segments(fqn)
    while bare.startswith("module."):
        bare = bare.removeprefix("module.")
    return bare


def stripper(fqns: Iterable[str]) -> Callable[[str], str]:
    """Returns the function that strips the segments of wrappers from the names of one model.

    DDP and DeepSpeed put `module` in front of all names. Where only some begin so, a child of the
    model is called `module`.
    """
    is_wrapped = all(_without_segments(fqn).startswith("module.") for fqn in fqns)
    return strip_wrappers if is_wrapped else _without_segments


def _without_segments(fqn: str) -> str:
    return ".".join(s for s in fqn.split(".") if s not in WRAPPERS) or fqn


def stripped_from(fqn: str, strip: Callable[[str], str]) -> str:
    """Returns the segments that a function of `stripper` removes, joined; "" for none."""
    gone = [s for s in fqn.split(".") if s in WRAPPERS]
    front = len(_without_segments(fqn).split(".")) - len(strip(fqn).split("."))
    return ".".join([*gone, *(["module"] * front)])


_OTHER_STATE = re.compile(
    r"(optim(izer)?s?(_states?)?(_\d+)?|(lr_)?schedulers?(_\d+)?|dataloaders?|train_state|train_loop|trainer|samplers?|(grad_)?scalers?"
    r"|rngs?(_states?)?|random_states?(_\d+)?|callbacks?|loops|timestamp|hparams|hyper_parameters|(global_)?steps?|epochs?|iterations?)"
)


_OPTIMIZER_STATE = re.compile(r"(?:^|\.)optim(?:izer)?s?(?:_\d+)?\.state\.")
_MOST_NAMES = 4  # below one key
_MODEL_KEYS = ("model", "MODEL", "model_state_dict", "state_dict", "module", "model_state")


def is_other_state(segment: str) -> bool:
    """Tells whether a key of a training state usually holds optimizer, scheduler or other state."""
    return _OTHER_STATE.fullmatch(segment) is not None


def is_optimizer_state(fqn: str) -> bool:
    """Tells by its name whether an entry lies below `state` of an optimizer."""
    return _OPTIMIZER_STATE.search(fqn) is not None


def key_path(catalog: Catalog, fqn: str) -> tuple[str, ...]:
    """Returns the keys that lead to an entry.

    They are the keys that the format kept, or else the FQN split at its dots.
    """
    path = catalog.paths.get(fqn)
    return tuple(map(str, path)) if path else tuple(fqn.split("."))


def shortest_names(
    catalog: Catalog, sizes: Mapping[str, int], kept: Iterable[str]
) -> dict[str, int]:
    """Returns the shortest names of entries below which nothing is kept, with their bytes.

    Many such names below one key are told as a part of that key.

    Args:
        catalog: of all entries.
        sizes: the bytes of those that are not kept.
        kept: the names of the others.
    """
    if not sizes:
        return {}
    held: dict[str, Any] = {}  # by key, the keys below: a name may have thousands of them
    for fqn in kept:
        below = held
        for key in key_path(catalog, fqn):
            below = below.setdefault(key, {})
    found: dict[tuple[str, ...], int] = {}
    for fqn, nbytes in sizes.items():
        path, depth, below = key_path(catalog, fqn), 1, held
        while depth < len(path) and path[depth - 1] in below:
            below, depth = below[path[depth - 1]], depth + 1
        found[path[:depth]] = found.get(path[:depth], 0) + nbytes
    beside = Counter(path[0] for path in found)
    named: dict[str, int] = {}
    for path, nbytes in found.items():
        name = ".".join(path) if beside[path[0]] <= _MOST_NAMES else f"part of {path[0]}"
        named[name] = named.get(name, 0) + nbytes
    return named


def find_optimizers(catalog: Catalog) -> set[tuple[str, ...]]:
    """Returns the keys above each optimizer, whatever its name.

    An optimizer is a dict that holds `param_groups`, usually with `state` beside it.
    """
    found: dict[tuple[str, ...], set[str]] = {}
    for fqn in chain(catalog.objects, catalog.tensors):
        path = key_path(catalog, fqn)
        for depth, key in enumerate(path):
            # a plain state dict keeps its groups as one object
            if key == "param_groups" or (key == "state" and depth < len(path) - 1):
                found.setdefault(path[:depth], set()).add(key)
                break
    return {prefix for prefix, keys in found.items() if prefix and "param_groups" in keys}


def find_model(catalog: Catalog) -> tuple[str, ...]:
    """Returns the keys above the model: `("model",)` for Accelerate, `()` for torchtitan.

    If the format kept the paths, a key such as `model` leads to the model. Without paths, `model.`
    may also be the first attribute of the module, as in Hugging Face's models. Then it counts only
    if other state lies beside it, such as an optimizer, and nothing else.
    """
    optimizers = find_optimizers(catalog)
    is_below = _below(optimizers)
    paths = [path for fqn in catalog.tensors if not is_below(path := key_path(catalog, fqn))]
    prefix: tuple[str, ...] = ()
    for depth in range(3):
        level = [p for p in paths if p[:depth] == prefix and len(p) > depth]
        inner = {p[depth] for p in level if len(p) > depth + 1}
        keys = {p[depth] for p in level}
        beside = {key for key in keys if not is_other_state(key)}
        found = [k for k in _MODEL_KEYS if k in inner]
        has_others = bool(optimizers) or keys != beside
        if found and (catalog.paths or (beside == {found[0]} and has_others)):
            return _below_its_file(catalog, paths, (*prefix, found[0]))
        if (
            len(beside) == 1
            and beside <= inner
            and catalog.paths
            and {o[:depth] for o in optimizers if len(o) == depth + 1} == {prefix}
        ):
            # the only dict beside an optimizer is the model, whatever its key
            return (*prefix, *beside)
        if len(beside) != 1 or not any(
            len(p) > depth + 1 and p[depth + 1] in _MODEL_KEYS for p in level
        ):
            return ()
        prefix = (*prefix, beside.pop())
    return ()


def shared_key(catalog: Catalog) -> tuple[str, ...]:
    """Returns the key that all names of tensors begin with, if it may be that of a model."""
    keys = {key_path(catalog, fqn)[0] for fqn in catalog.tensors}
    return tuple(keys) if len(keys) == 1 and keys <= set(_MODEL_KEYS) else ()


def _below(prefixes: Collection[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    """Returns a test whether a path lies below one of these."""
    depths = sorted({len(prefix) for prefix in prefixes})
    return lambda path: any(path[:depth] in prefixes for depth in depths if depth < len(path))


def _below_its_file(
    catalog: Catalog, paths: Iterable[tuple[str, ...]], prefix: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the keys of a model whose files are named like its key.

    An example is `model_rank_0.pt` that holds `{"model": …, "optimizer": …}`.
    """
    below = [p[len(prefix) :] for p in paths if p[: len(prefix)] == prefix]
    keys = {p[0] for p in below if not is_other_state(p[0])}
    is_twice = (
        bool(catalog.paths)
        and len(keys) == 1
        and keys <= set(_MODEL_KEYS)
        and all(len(p) == 2 for p in below if p[0] in keys)
    )
    return (*prefix, *keys) if is_twice else prefix


def model_only(catalog: Catalog, key: str | None = None) -> tuple[Catalog, tuple[str, ...]]:
    """Returns the model's tensors under their names within the model, and the keys taken off.

    Args:
        catalog: of the whole state.
        key: of the model, such as `ema.model`; found if None.

    Raises:
        PlanError: no tensor is below that key.
    """
    prefix, is_below = find_model(catalog), _below(find_optimizers(catalog))
    if key is not None:
        prefix = tuple(key.split("."))
        if not any(key_path(catalog, fqn)[: len(prefix)] == prefix for fqn in catalog.tensors):
            roots = sorted({key_path(catalog, fqn)[0] for fqn in catalog.tensors})
            raise PlanError(
                f"no tensor is below the key {printable(key)!r}",
                hint=f"the keys at the top: {printable(', '.join(roots[:8]))}",
            )

    def is_model(fqn: str) -> bool:
        path = key_path(catalog, fqn)
        return (
            path[: len(prefix)] == prefix
            if prefix
            else not (is_other_state(path[0]) or is_below(path))
        )

    kept = replace(keep(catalog, is_model), objects={})
    cut = len(".".join(prefix)) + 1 if prefix else 0
    return rename(kept, lambda fqn: fqn[cut:]), prefix
