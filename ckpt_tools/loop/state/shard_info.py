"""Describes the shards of a rank for the other ranks.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from ckpt_tools.core.box import Box
from ckpt_tools.loop.state.shards import Shard, alias_key


class ReplicaKind(StrEnum):
    """What a difference between the copies of a tensor on several ranks means."""

    EQUAL = "equal"  # an error
    LOCAL = "local"  # an error; its shape fits one rank only, so it is compared at every save
    FREE = "free"  # a note: buffers and the states of objects may differ in an honest job


class ShardInfo(NamedTuple):
    """The description of a shard: FQN, type, global shape, box.

    `alias` is the FQN of the tensor whose memory it shares, "" for none. `is_frozen` tells that its
    values are expected to stay: it goes into a file of its own, which the next save links.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    alias: str = ""
    is_frozen: bool = False


def shard_infos(
    shards: Sequence[Shard], seen: dict[object, str] | None = None
) -> tuple[ShardInfo, ...]:
    """Returns a `ShardInfo` for each of this rank's shards; `alias` marks tied weights.

    Args:
        shards: of this rank.
        seen: the name of each memory that was seen before. Those of these shards are added.
    """
    seen = {} if seen is None else seen
    infos = []
    for shard in shards:
        key = alias_key(shard)
        first = shard.fqn if key is None else seen.setdefault(key, shard.fqn)
        infos.append(
            ShardInfo(
                shard.fqn,
                shard.dtype.name,
                shard.shape,
                shard.box,
                "" if first == shard.fqn else first,
            )
        )
    return tuple(infos)
