"""The folders are the layers: a folder imports only from the folders below it. Checked on the
syntax tree.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import ckpt_tools

ROOT = Path(ckpt_tools.__file__).parent
LAYERS = [
    "errors",
    "version",
    "core",
    "ranks",
    "storage",
    "engine",
    "formats",
    "publish",
    "run",
    "transfer",
    "operations",
    "loop",
    "distributed",
    "",
    "integrations",
    "cli",
    "__main__",
]
TORCH_LIVES_IN = (
    "loop/",
    "integrations/",
    "ranks/gloo.py",
    "ranks/launch.py",
    "formats/per_rank/dtensor_write.py",
)
LOOP_LAYERS = ["state", "steps", "loading", "saving", ""]  # folders of `loop/`, and its own files
FILES = sorted(ROOT.rglob("*.py"))


def dotted(path: Path) -> str:
    """Returns a module's name within the package; "" for the package itself."""
    return ".".join(p for p in path.relative_to(ROOT).with_suffix("").parts if p != "__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[str]:
    """Returns everything that a file imports, by full name."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{a.name}" for a in node.names]
    return found


def layer(module: str) -> int:
    top = module.split(".")[0]
    return LAYERS.index(top if top in LAYERS else "")


def loop_layer(module: str) -> int:
    folder = module.removeprefix("loop.").split(".")[0]
    return LOOP_LAYERS.index(folder if folder in LOOP_LAYERS else "")


def own_imports(path: Path) -> list[str]:
    return [
        name.removeprefix("ckpt_tools").lstrip(".")
        for name in imports(path)
        if name.split(".")[0] == "ckpt_tools"
    ]


def test_a_folder_imports_only_from_the_folders_below_it() -> None:
    for path in FILES:
        for name in own_imports(path):
            is_lazy_name = dotted(path) == "" or layer(name) == LAYERS.index("")
            is_below = layer(name) <= layer(dotted(path))
            assert is_lazy_name or is_below, f"{dotted(path)} imports {name}"


def test_a_folder_of_the_loop_imports_only_from_those_below_it() -> None:
    for path in (f for f in FILES if "/loop/" in str(f)):
        for name in own_imports(path):
            is_below = loop_layer(name) <= loop_layer(dotted(path))
            assert not name.startswith("loop.") or is_below, f"{dotted(path)} imports {name}"


def test_every_folder_is_a_layer_and_few_files_are_loose() -> None:
    there = {
        path.name.removesuffix(".py")
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__"} == set(LAYERS) - {""}
    assert len(list(ROOT.glob("*.py"))) <= 5


def test_torch_is_imported_nowhere_but_where_it_must_be() -> None:
    for path in FILES:
        if not path.relative_to(ROOT).as_posix().startswith(TORCH_LIVES_IN):
            assert not [i for i in imports(path) if i.split(".")[0] == "torch"], path


def test_no_test_file_imports_another() -> None:
    """What two of them need is in a file of its own."""
    for path in ROOT.parent.joinpath("tests").rglob("*.py"):
        assert not [name for name in imports(path) if re.match(r"tests\.([\w.]+\.)?test_", name)], (
            path
        )


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config) -> None:
    """Its own list of folders to leave out has `dist`, which is one of ours."""
    here = Path(__file__).parent
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(here) for path in here.rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.parts}
    assert "dist" in parts
    assert [p for p in parts if any(fnmatch.fnmatch(p, pattern) for pattern in left_out)] == []


def test_no_cycles() -> None:
    modules = {dotted(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets = {
            name if name in modules else name.rpartition(".")[0] for name in own_imports(path)
        }
        graph[dotted(path)] = targets - {dotted(path), ""}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_files_and_functions_stay_short() -> None:
    for path in [*FILES, *(ROOT.parent / "training").rglob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 900, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                assert (node.end_lineno or 0) - first.lineno < 100, f"{path}:{node.name}"


PUBLIC_IN_0_1_0 = (
    "CatalogError CheckpointError CheckpointManager CopyResult DiffResult FormatError"
    " IntegrityError NotACheckpointError PeerError PerRank PlanError Report RngState SalvageResult"
    " SealResult StorageError TransferResult UnsafePickleError VerifyResult __version__ convert"
    " copy diff inspect load merge reshard salvage seal verify"
).split()


def test_every_public_name_of_0_1_0_is_still_there_and_documented() -> None:
    assert set(PUBLIC_IN_0_1_0) <= set(ckpt_tools.__all__)
    assert "open" not in ckpt_tools.__all__, "import * would replace Python's own"
    for name in ckpt_tools.__all__:
        value = getattr(ckpt_tools, name)
        assert name == "__version__" or value.__doc__
    with pytest.raises(AttributeError):
        _ = ckpt_tools.nothing


def test_the_readers_and_writers_of_dcp_keep_their_public_path() -> None:
    from ckpt_tools.distributed import StorageReader, StorageWriter

    assert StorageReader.__doc__ and StorageWriter.__doc__


def test_the_engine_and_the_core_know_no_object_store() -> None:
    for path in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "core").rglob("*.py")]:
        assert not [i for i in own_imports(path) if i.startswith(("storage.s3", "storage.remote"))]
        assert "RemoteStore" not in path.read_text()


def test_nobody_examines_attempts_and_destinations() -> None:
    """They are protocols with two implementations: ask them."""
    names = ("LocalAttempt", "RemoteAttempt", "LocalDestination", "RemoteDestination")
    for path in FILES:
        if not dotted(path).startswith(("publish.", "run.")):
            assert not [name for name in names if name in path.read_text()], path


# Here a path or URL of the user becomes a store, a root or a destination. Elsewhere nobody asks.
TELLS_URLS = (
    "storage/base.py storage/__init__.py publish/destinations.py run/roots.py formats/registry.py cli/options.py"
    " operations/convert/huggingface.py operations/convert/options.py"
    " publish/delta.py operations/copy.py operations/folder.py operations/publish.py operations/pull.py cli/render.py loop/arguments.py loop/saving/huggingface_copies.py loop/manager.py loop/options.py loop/publisher.py"
    " loop/steps/retention.py"
    " transfer/result.py transfer/transfer.py"
).split()
STORES = (
    "LocalStore",
    "RemoteStore",
    "LocalRoot",
    "BucketRoot",
    "MemoryStore",
    "Overlay",
    "OneFile",
)


def test_nobody_examines_stores_and_roots() -> None:
    """They are protocols: a capability or a method answers the question."""
    for path in FILES:
        where = str(path.relative_to(ROOT))
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            called = node.func.id
            if called == "isinstance" and not where.startswith("storage/"):
                kinds = ast.unparse(node.args[1])
                assert not [name for name in STORES if name in kinds], (where, node.lineno)
            if called == "is_url":
                is_known = where in TELLS_URLS or where.startswith("integrations/")
                assert is_known, (where, node.lineno)


def test_benchmarks_import_what_is_there() -> None:
    """No test runs them, so a renamed function would be noticed when somebody wants a figure."""
    gone = []
    for path in sorted((ROOT.parent / "tests" / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.startswith("ckpt_tools") and "integrations" not in node.module:
                module = importlib.import_module(node.module)
                gone += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not importlib.util.find_spec(f"{node.module}.{alias.name}")
                ]
    assert not gone
