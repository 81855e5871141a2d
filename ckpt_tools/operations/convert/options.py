"""Checks the options of a conversion, and applies `--rename` rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_tools.core.selection import substitution
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import refuse_file_name
from ckpt_tools.operations.convert.families import MAPPED_NAMES
from ckpt_tools.operations.convert.targets import TARGETS, ConvertTarget, targets_with
from ckpt_tools.operations.convert.training_state import NAMINGS
from ckpt_tools.operations.convert.transformers_names import NAMES
from ckpt_tools.operations.quantize import NVFP4_FORMS, method_of
from ckpt_tools.storage import is_url
from ckpt_tools.transfer.options import Dtype, Options, Path_

# options that apply to some targets only
_FLAGS = {
    "ranks": "--ranks",
    "check": "--check",
    "mesh": "--mesh",
    "quantize": "--quantize",
    "max_shard_bytes": "--max-shard-size",
}
_HINTS = {
    "check": "it loads the directory with transformers",
    "max_shard_bytes": "ckpt merge --max-shard-size writes shards without a config",
}


_MEANT = {
    "pt": "torch",
    "pth": "torch",
    "bin": "torch",
    "pytorch": "torch",
    "transformers": "hf",
    "huggingface": "hf",
    "deepspeed": "deepspeed-universal",
    "lora": "peft",
    "verl": "per-rank",
}


def check_request(to: str, dst: str, how: Mapping[str, Any]) -> None:
    """Refuses options that do not fit together or do not fit the target.

    Args:
        to: the target, one of `TARGETS`.
        dst: path or URL.
        how: see `Conversion`.

    Raises:
        PlanError: the message names the option.
    """
    if to not in TARGETS:
        meant = _MEANT.get(to.lower().lstrip("."))
        hint = f"--to {meant} writes it" if meant else None
        hint = f"ckpt reshard --to {to} writes for {to} ranks" if to.isdecimal() else hint
        raise PlanError(
            f"cannot write {printable(to)!r}: expected one of {', '.join(TARGETS)}", hint=hint
        )
    target = TARGETS[to]
    _check_name(to, target, dst)
    for option, flag in {"base": "--base", **_FLAGS}.items():
        is_given = how.get(option) is not None and how.get(option) is not False
        is_for_names = option == "base" and (how.get("key_map") or how.get("names"))
        if is_given and not is_for_names and option not in target.options:
            also = ", and for --map and --names" if option == "base" else ""
            raise PlanError(
                f"{flag} is for --to {targets_with(option)}{also}", hint=_HINTS.get(option)
            )
    _check_names(how.get("names"), to, how)
    if how.get("ranks") is not None and how["ranks"] < 1:
        raise PlanError(f"--ranks: expected at least 1, got {how['ranks']}")
    has_model = how.get("base") is not None and (to == "hf" or how.get("names") is not None)
    if how.get("partial") and not how.get("key_map") and not has_model:
        raise PlanError(
            "--partial is for a key map, and for --to hf or --names with a config: there is none"
        )
    if how.get("settings") and not how.get("key_map"):
        raise PlanError("--set is for a key map: there is no --map")
    if how.get("check") and how.get("base") is None:
        raise PlanError("--check needs --base DIR, whose config.json says which model it is")
    _check_quantize(how)
    if how.get("check") and is_url(dst):
        raise PlanError(
            "--check loads the result from a disk", hint="write it locally, then ckpt copy"
        )
    if target.is_local and is_url(dst):
        raise PlanError(
            f"directories of {to} are written on a disk",
            hint=(
                "write it to a disk, then upload it with the store's own tool: it has no index, so"
                " no upload of it can appear as a whole"
            ),
        )
    _check_naming(target, how.get("optimizer"), bool(how.get("model_only")))


def _check_name(to: str, target: ConvertTarget, dst: str) -> None:
    """Refuses the name of a directory for a file, and that of a file for a directory."""
    if not target.suffixes:
        refuse_file_name(dst)
    elif not dst.endswith(target.suffixes):
        raise PlanError(
            f"{to} is one file: expected a name that ends in {' or '.join(target.suffixes)}, got"
            f" {printable(dst)!r}"
        )


def _check_names(names: str | None, to: str, how: Mapping[str, Any]) -> None:
    """Refuses names that nobody has, and those of a model that nothing tells."""
    if names is None:
        return
    known = (*NAMES, *MAPPED_NAMES)
    if names not in known:
        raise PlanError(f"--names: expected one of {', '.join(known)}, got {printable(names)!r}")
    if names in MAPPED_NAMES and to == "hf":
        raise PlanError(
            f"--names {names} is not for --to hf: transformers would not find these names",
            hint="--to dcp is what torchtitan loads, and --to torch what Meta's code does",
        )
    if how.get("base") is None:
        raise PlanError("--names needs --base DIR, whose config.json says which model it is")


def _check_quantize(how: Mapping[str, Any]) -> None:
    """Refuses what does not go with `quantize`."""
    name = how.get("quantize")
    if name is None:
        return
    if name not in NVFP4_FORMS:
        method_of(name)
    elif how.get("keep_dtype"):
        raise PlanError(
            f"--keep-dtype means nothing with --quantize {name}: all codes are written anew",
            hint="leave it out",
        )
    if how.get("base") is None:
        raise PlanError("--quantize needs --base DIR: its config.json says which layers are linear")
    if how.get("check"):
        raise PlanError(
            "--check compares what transformers loads with what is written, and it turns codes into"
            " numbers while it loads",
            hint="leave --check out; ckpt diff compares the result with the source by value",
        )
    if how.get("resume"):
        raise PlanError(
            "--quantize is not resumed: what an earlier attempt read cannot be proved any more",
            hint="leave --resume out",
        )


def _check_naming(target: ConvertTarget, naming: str | None, model_only: bool) -> None:
    """Refuses a naming of optimizer state that does not fit the target."""
    if naming is None:
        return
    if naming not in NAMINGS:
        raise PlanError(
            f"--optimizer: expected one of {', '.join(NAMINGS)}, got {printable(naming)!r}"
        )
    if target.is_model or model_only:
        raise PlanError("--optimizer is for optimizers, and only the model is written")
    if naming not in target.namings:
        raise PlanError(target.naming_problem, hint="leave --optimizer out")


def substitute(rule: str) -> Callable[[str], str]:
    """Returns a function that renames by a rule `REGEX=REPLACEMENT`.

    Raises:
        PlanError: it is not such a rule.
    """
    pattern, equals, new = rule.partition("=")
    what = f"--rename {printable(rule)!r}"
    if not equals:
        raise PlanError(f"{what}: expected REGEX=REPLACEMENT")
    return substitution(pattern, new, what)


class Conversion(Options, total=False):
    """The options of a conversion, in addition to `Options`.

    Attributes:
        ranks: for `dcp`, `accelerate` and `per-rank`: the number of ranks to split for. If absent,
            the source's number, or 1.
        dtype, keep_dtype: as for `merge`; the model's tensors only.
        select: globs of names in the target; only entries that match are written.
        exclude: globs of names in the target; entries that match are left out.
        rename: `REGEX=REPLACEMENT` each, applied in order to the names of parameters, in the model
            and in optimizers.
        key_map: a file with renames and transforms, or the name of a built-in one; see `key_map`.
        partial: the key map may have rules that match nothing, and the checkpoint names that no
            rule matches. For `hf` and `names`, also tensors that the config's model lacks.
        names: the names and tensors that transformers has in files (`hub`) or in memory
            (`transformers`), or those of `torchtitan` or `meta`, with the optimizer state. Needs
            `base`. If absent, `hf` has those of files, and other targets those of the source.
        settings: the named numbers that the map needs. `heads` and `kv_heads` come from the config
            of `base`.
        param_order: the parameters that an optimizer's numbers mean. `model`: each group has its
            parameters in the model's order. Else names in order, or a file of names; see
            `param_order.read_order`.
        optimizer: one of `NAMINGS`: how optimizer state is named. If absent, by parameter, with
            groups.
        keep_prefix: keep the prefixes of wrappers in names. For `safetensors` and `hf`, also keep
            the key above the model.
        model_only: leave out everything but the model.
        base: the directory of the model's config, tokenizer and code. For `hf` and `per-rank`,
            these files are copied.
        mesh: for `per-rank`: `DEVICE:AXIS` of the job that will load the result. If absent, the
            source's, or `cuda:fsdp`.
        quantize: for `hf`: one of `METHODS`, by which the weights of linear layers become codes
            and scales. `keep_dtype` names those that do not. Or one of `NVFP4_FORMS`: NVFP4 codes
            of ModelOpt stay the same bytes, in the form of compressed-tensors; or the other way.
        max_shard_bytes: for `hf`, upper bound of a shard's payload, 5 GB if absent.
        check: for `hf`: load the result with transformers in a separate process, and compare.
        prove: before anything is published, make the source again of what was written, by the
            inverse of each relation, and compare the fingerprints. True if absent.
    """

    ranks: int | None
    dtype: Dtype | None
    keep_dtype: Sequence[str]
    select: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str]
    key_map: Path_ | None
    partial: bool
    names: str | None
    settings: Mapping[str, int] | None
    param_order: Path_ | Sequence[str] | Mapping[str, Sequence[str]] | None
    optimizer: str | None
    keep_prefix: bool
    model_only: bool
    base: Path_ | None
    mesh: str | None
    quantize: str | None
    max_shard_bytes: int | None
    check: bool
    prove: bool
