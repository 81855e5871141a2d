from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, Chunk, ChunkList, Extent, TensorEntry, one_chunk
from ckpt_tools.core.coverage import check, replicas
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.naming import model_only, strip_wrappers, stripper
from ckpt_tools.core.selection import rename
from ckpt_tools.errors import CatalogError, PlanError
from tests.strategies import full_shapes, tilings

F32 = BY_NAME["float32"]


def catalog(shape: tuple[int, ...], boxes: Iterable[Box], fqn: str = "w") -> Catalog:
    chunks, at = [], 0
    for box in boxes:
        chunks.append(Chunk(box, Extent("f", at, max(0, box.numel * 4))))
        at += max(0, box.numel * 4)
    return Catalog(
        "test", {fqn: TensorEntry(fqn, F32, shape, ChunkList(chunks))}, file_sizes={"f": at}
    )


def named(*names: str, paths: dict[str, tuple[str, ...]] | None = None) -> Catalog:
    entries = {
        n: TensorEntry(n, F32, (1,), one_chunk(whole((1,)), Extent("f", 4 * i, 4)))
        for i, n in enumerate(names)
    }
    return Catalog("test", entries, paths=paths or {}, file_sizes={"f": 4 * len(names)})


@given(full_shapes, st.data())
def test_an_exact_cover_passes_and_any_missing_chunk_is_a_hole(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = data.draw(tilings(shape))
    check(catalog(shape, boxes))
    without = data.draw(st.sampled_from([b for b in boxes if b.numel]))
    with pytest.raises(CatalogError, match="hole"):
        check(catalog(shape, [b for b in boxes if b is not without]))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (2, 4)), Box((1, 0), (2, 4)), Box((3, 0), (1, 4))], "overlap"),
        ([Box((0, 0), (4, 2)), Box((0, 1), (4, 3))], "overlap"),
        ([Box((0, 0), (3, 4)), Box((3, 0), (2, 4))], "exceeds"),
        ([Box((-1, 0), (5, 4))], "exceeds"),
        ([Box((0,), (4,))], "number of dims"),
        ([Box((0, 0), (4,))], r"number of dims: expected 2, got \[offsets \[0, 0\], sizes \[4\]\]"),
        ([Box((0,), (4, 4))], "number of dims"),
        ([], "hole"),
    ],
)
def test_what_is_no_exact_cover_is_refused(boxes: list[Box], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        check(catalog((4, 4), boxes))


def test_equal_boxes_are_replicas_and_not_an_overlap() -> None:
    twice = catalog((4,), [Box((0,), (4,)), Box((0,), (4,))])
    check(twice)
    assert [len(g) for g in replicas(twice.tensors["w"])] == [2]


@pytest.mark.parametrize(
    ("extent", "message"),
    [
        (Extent("f", 8, 16), "outside its file"),
        (Extent("f", -4, 16), "outside its file"),
        (Extent("g", 0, 16), "missing .g,"),
    ],
)
def test_extents_must_lie_in_files_that_exist(extent: Extent, message: str) -> None:
    entry = TensorEntry("w", F32, (4,), one_chunk(whole((4,)), extent))
    with pytest.raises(CatalogError, match=message):
        check(Catalog("test", {"w": entry}, file_sizes={"f": 16}))


def test_items_that_share_bytes_are_refused() -> None:
    entries = {
        n: TensorEntry(n, F32, (4,), one_chunk(whole((4,)), Extent("f", s, 16)))
        for n, s in (("a", 0), ("b", 8))
    }
    with pytest.raises(CatalogError, match="share bytes"):
        check(Catalog("test", entries, file_sizes={"f": 24}))


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("_orig_mod.a.w", "a.w"),
        ("a._checkpoint_wrapped_module._orig_mod.w", "a.w"),
        ("module.module._orig_mod.module.w", "w"),
        ("a.module.w", "a.module.w"),
        ("a_orig_mod.w", "a_orig_mod.w"),
        ("module", "module"),
    ],
)
def test_wrappers_go_as_whole_segments_however_nested(name: str, stripped: str) -> None:
    assert strip_wrappers(name) == stripped


def test_names_that_collide_after_stripping_are_refused() -> None:
    with pytest.raises(PlanError, match=r"'a\._orig_mod\.w' and 'a\.w' both become 'a\.w'"):
        rename(named("a._orig_mod.w", "a.w"), strip_wrappers)


@pytest.mark.parametrize(
    ("names", "paths", "prefix", "model"),
    [
        (("model.a", "optimizer.state.a"), None, ("model",), ["a"]),
        (("model.a", "lm_head.w"), None, (), ["model.a", "lm_head.w"]),
        (
            ("model.a", "ema.a"),
            {"model.a": ("model", "a"), "ema.a": ("ema", "a")},
            ("model",),
            ["a"],
        ),
        (("app.model.a.w", "app.optim.state.a.w"), None, ("app", "model"), ["a.w"]),
        (("state.model.a", "state.optimizers.a"), None, ("state", "model"), ["a"]),
        (("a.w", "model.x", "optimizer.a", "train_state.n"), None, (), ["a.w", "model.x"]),
        (
            ("model.step", "model.optim.w", "step"),
            {"model.step": ("model", "step"), "model.optim.w": ("model", "optim.w")},
            ("model",),
            ["step", "optim.w"],
        ),
        (("optimizer.a",), None, (), []),
    ],
)
def test_the_model_is_found_wherever_it_stands(
    names: tuple[str, ...],
    paths: dict[str, tuple[str, ...]] | None,
    prefix: tuple[str, ...],
    model: list[str],
) -> None:
    kept, found = model_only(named(*names, paths=paths))
    assert (found, list(kept.tensors)) == (prefix, model)


def test_a_child_called_module_keeps_its_name() -> None:
    """DDP puts `module` in front of all names; a child of the model has some of them."""
    for names, wanted in (
        (("module.a.w", "module.b"), ("a.w", "b")),
        (("module.w", "w"), ("module.w", "w")),
        (("module._orig_mod.w", "head.w"), ("module.w", "head.w")),
        (("_orig_mod.module.w", "_orig_mod.module.b"), ("w", "b")),
    ):
        assert tuple(map(stripper(names), names)) == wanted
