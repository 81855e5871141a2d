"""A save and a resume of anything at all give the saved value or an error: random states, before
and after.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckpt_tools import CheckpointManager, PlanError
from tests.jobs import LONG
from tests.looks import looks

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=4)
    | st.complex_numbers()
    | st.dates()
    | st.timedeltas()
    | st.decimals()
    | st.uuids()
    | st.sampled_from(
        [
            np.float32(1.5),
            np.int64(-3),
            Path("a/b"),
            torch.float16,
            range(3),
            np.dtype("i4"),
            torch.Size([1]),
        ]
    )
)
leaves = (
    scalars
    | st.builds(lambda n: torch.arange(n, dtype=torch.float32), st.integers(0, 4))
    | st.builds(np.arange, st.integers(0, 4))
)
keys = st.text("abc._1", min_size=1, max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(-3, 3) | st.booleans() | keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.dictionaries(keys, inner, max_size=2).map(collections.OrderedDict)
        | st.dictionaries(st.integers(0, 3), inner, max_size=2).map(
            lambda d: collections.defaultdict(list, d)
        )
    ),
    max_leaves=8,
)
EXAMPLES = 3000 if LONG else 150


DICTS = (dict, collections.OrderedDict)  # those that are stored value by value


def is_hollow(value: Any) -> bool:
    """Tells whether a dict holds nothing, or only such dicts: stock DCP stores none."""
    if type(value) is collections.defaultdict:
        return not value
    return (
        type(value) in DICTS
        and all(type(key) is str for key in value)
        and all(map(is_hollow, value.values()))
    )


def with_kept(want: Any, mine: Any) -> Any:
    """Returns a stored value with the hollow dicts of the present one."""
    if type(want) not in DICTS or type(mine) not in DICTS or not want:
        return want
    if not all(type(key) is str for key in (*want, *mine)):
        return want
    found = {key: with_kept(item, mine.get(key)) for key, item in want.items()}
    return found | {key: v for key, v in mine.items() if key not in want and is_hollow(v)}


@pytest.mark.slow
@example(saved={"1": None, "11": [None, torch.ones(1)]}, now={"11": {"1": None}}, data=None)
@example(saved={"1": {"1": None}}, now={"1": {"_": {}}}, data=None)
@example(saved={"1": [{"1": None}]}, now={"1": {"1": {}}}, data=None)
@example(saved={"1": {}}, now={"1": {"_": {}}}, data=None)
@example(saved={"1": None}, now={"1": {"_": {}}}, data=None)
@example(saved={"a": {"0": 1, "1": torch.ones(1)}}, now={"a": [2, 3]}, data=None)
@example(saved={"1": {"_": None}}, now={"1": {"1": collections.defaultdict(list)}}, data=None)
@example(saved={"1": [torch.ones(0), None]}, now={"1": {"1": [torch.ones(0)]}}, data=None)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    saved=st.dictionaries(keys, values, max_size=4),
    now=st.dictionaries(keys, values, max_size=4),
    data=st.data(),
)
def test_a_resume_gives_the_saved_value_or_an_error(
    saved: dict[str, Any],
    now: dict[str, Any],
    data: st.DataObject | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever is in a state when it is saved, and whatever is in its place when it is resumed."""
    now |= {key: data.draw(values) for key in saved if data.draw(st.booleans())} if data else {}
    root = tmp_path_factory.mktemp("run")
    with CheckpointManager(root) as checkpoints:
        try:
            checkpoints.save(1, saved, asynchronous=False)
        except PlanError:  # two keys that make one name
            return
    state = dict(now)
    with CheckpointManager(root) as checkpoints:
        try:
            checkpoints.resume(state)
        # a tensor is not replaced by something else, nor by one of another shape or type
        except PlanError:
            return
    for key, value in state.items():
        want = with_kept(saved[key], now[key]) if key in saved else now[key]
        assert looks(value) == looks(want), (key, value, want)
