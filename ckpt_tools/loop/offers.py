"""Describes the shards that a rank offers to write.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.loop.shards import Shard, alias_key
from ckpt_tools.loop.write import ShardInfo


def offers_of(
    shards: Sequence[Shard], seen: dict[object, str] | None = None
) -> tuple[ShardInfo, ...]:
    """Returns a `ShardInfo` for each of this rank's shards; `alias` marks tied weights.

    Args:
        shards: of this rank.
        seen: the name of each memory that was seen before. Those of these shards are added.
    """
    seen = {} if seen is None else seen
    offers = []
    for shard in shards:
        key = alias_key(shard)
        first = shard.fqn if key is None else seen.setdefault(key, shard.fqn)
        offers.append(
            ShardInfo(
                shard.fqn,
                shard.dtype.name,
                shard.shape,
                shard.box,
                "" if first == shard.fqn else first,
            )
        )
    return tuple(offers)
