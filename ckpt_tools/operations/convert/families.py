"""Finds the key map of a model by its config, and by the names that a checkpoint has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.operations.convert.map_file import read_map

TORCHTITAN, META = "torchtitan", "meta"
_MAPPED = {TORCHTITAN: "titan", META: "meta"}  # in the names of maps
MAPPED_NAMES = tuple(_MAPPED)
_MOST, _SHOWN = 0.5, 3
_LOOKED_AT = 200  # names, evenly from all
HUB_ENDING = "on the Hub"  # of what people are told of its names


class Family(NamedTuple):
    """Models that the same key maps convert.

    Attributes:
        title: what people call it.
        model_types: as `model_type` in a config says.
        writers: whose names the map to the Hub's knows.
        stem: of the names of its maps.
        namings: whose names there are maps to.
    """

    title: str
    model_types: tuple[str, ...]
    writers: str
    stem: str
    namings: tuple[str, ...] = (TORCHTITAN,)

    @property
    def to_hub(self) -> str:
        """Returns the map to the names of the Hub."""
        return f"{self.stem}_titan_to_hf"

    def from_hub(self, naming: str = TORCHTITAN) -> str:
        """Returns the map from the names of the Hub to those of one of `namings`."""
        return f"{self.stem}_hf_to_{_MAPPED[naming]}"


FAMILIES = (
    Family("Llama", ("llama",), "torchtitan or Meta", "llama", MAPPED_NAMES),
    Family("Qwen3", ("qwen3", "qwen3_moe"), TORCHTITAN, "qwen3"),
    Family("DeepSeek-V3", ("deepseek_v3",), TORCHTITAN, "deepseek_v3"),
    Family("gpt-oss", ("gpt_oss",), TORCHTITAN, "gpt_oss"),
)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a config's model, if there are maps for it."""
    kind = config.get("model_type")
    return next((family for family in FAMILIES if kind in family.model_types), None)


def share_explained(names: Iterable[str], key_map: str) -> float:
    """Returns the share of names that a built-in map changes, as a source has them."""
    return read_map(key_map).share_of(list(names))


def naming_of(names: Sequence[str]) -> str:
    """Returns whose names a model has, for people; "" if no built-in map is for all of them.

    Several models have the same names, so it tells only what they are like.

    Args:
        names: of its parameters and buffers. Some of them are looked at.
    """
    some = names[:: -(-len(names) // _LOOKED_AT) or 1]
    for is_hub in (False, True):
        found = [
            one
            for one in FAMILIES
            if share_explained(some, one.from_hub() if is_hub else one.to_hub) == 1
        ]
        if found:
            titles = " or ".join(one.title for one in found)
            return (
                f"like those of {titles} {HUB_ENDING}"
                if is_hub
                else f"like {found[0].writers} has those of {titles}; if it is that, convert"
                " --to hf --base DIR writes those of the Hub"
            )
    return ""


def foreign_names(names: Iterable[str], config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a config's model if a checkpoint has another framework's names of it.

    Most names have to be such ones. The map then refuses the others by name.

    Raises:
        PlanError: the names are those of models of another kind than the config's.
    """
    found, mine = list(names), family_of(config)
    if mine is not None and share_explained(found, mine.to_hub) > _MOST:
        return mine
    others = [one for one in FAMILIES if one != mine and share_explained(found, one.to_hub) == 1]
    if not others:
        return None
    kinds = " or ".join(f"{family.title} ({family.writers})" for family in others)
    raise PlanError(
        f"the names are those of {kinds}, and the config is of another model:"
        f" {printable(str(config.get('model_type')))!r}"
        f" ({printable(', '.join(found[:_SHOWN]))}, …)",
        hint="give the config of this model with --base DIR; or a key map with --map",
    )
