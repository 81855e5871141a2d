from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.storage.ranges import Range, coalesce

ranges = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 500), st.integers(0, 60)), max_size=30
)


@given(ranges, st.integers(0, 50), st.integers(1, 200))
def test_windows_hold_every_range_once_within_gap_and_size(
    items: list[tuple[str, int, int]], gap: int, limit: int
) -> None:
    wanted = [Range(f, s, n, i) for i, (f, s, n) in enumerate(items)]
    windows = list(coalesce(wanted, gap, limit))
    assert sorted(r for w in windows for r in w.ranges) == sorted(wanted)
    for window in windows:
        assert window.nbytes <= limit or len(window.ranges) == 1
        covered = end = window.start
        for r in window.ranges:
            assert r.file == window.file
            assert window.start <= r.start
            assert r.start + r.nbytes <= window.start + window.nbytes
            assert r.start <= end + gap
            end = max(end, r.start + r.nbytes)
        assert (end, covered) == (window.start + window.nbytes, min(r.start for r in window.ranges))
