"""Describes the shards of a rank for the other ranks.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

from ckpt_tools.core.box import Box
from ckpt_tools.loop.state.shards import Shard, alias_key


class ReplicaKind(StrEnum):
    """What a difference between the copies of a tensor on several ranks means."""

    EQUAL = "equal"  # an error
    LOCAL = "local"  # an error; its shape fits one rank only, so it is compared at every save
    FREE = "free"  # a note: buffers and the states of objects may differ in an honest job
    PART = "part"  # an error, also if copies are trusted; codes and scales are of one rank


class FileKind(IntEnum):
    """Which file of a rank a shard goes to; the number in the file's name."""

    CHANGING = 0
    FROZEN = 1  # its parameter takes no gradient: it is not even copied while it stays
    SETTLED = 2  # its tensor has stayed the same for some saves


class ShardInfo(NamedTuple):
    """The description of a shard: FQN, type, global shape, box.

    `alias` is the FQN of the tensor whose memory it shares, "" for none. `file` is the file that it
    goes to. The next save links a file whose shards have all stayed the same.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    alias: str = ""
    file: FileKind = FileKind.CHANGING


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
