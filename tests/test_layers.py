"""The house: a file imports only from the levels before it, and only a few may import torch. Checked on the syntax tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_tools

ROOT = Path(ckpt_tools.__file__).parent
LIVE = [
    f"live.{name}"
    for name in "group launch shards objects archives optimizers state restore rename numbers divide share match save load".split()
]
LEVELS = [
    ["errors", "logs", "box", "dtypes", "checksum", "version", "team", "flock", "live.at_exit", "live.signals", "live.waiting"],
    [
        "catalog",
        "chunks",
        "soundness",
        "views",
        "layout",
        "storage.base",
        "storage.looks",
        "storage.ranges",
        "storage.windows",
        "storage.ahead",
        "storage.failures",
        "storage.fast",
        "storage.s3",
        "storage.begun",
        "storage.upload",
        "storage.stream",
    ],
    ["storage.local", "storage.memory", "storage.overlay", "storage.held", "storage.side", "storage.remote", "storage", "plan"],
    [
        "formats.base",
        "formats.pickle_scan",
        "formats.unpickle",
        "formats.pickle_write",
        "formats.torch_zip",
        "formats.zip_write",
        "formats.made",
        "formats.plain_values",
        "formats.state_pickle",
        "formats.zip_check",
        "formats.dcp_metadata",
        "formats.phrases",
        "formats.dcp_bulk",
        "formats.safetensors",
        "formats.torch_save",
        "formats.dcp",
        "formats.accelerate",
        "formats.flat_param",
        "formats.xla_shards",
        "formats.gguf",
        "formats.npz",
        "formats.per_rank",
        "formats.dtensor_write",
        "formats.deepspeed_universal",
        "formats.deepspeed",
        "formats",
    ],
    [
        "engine.kernels",
        "engine.schedule",
        "engine.prints",
        "engine.regions",
        "engine.frames",
        "engine.sinks",
        "engine.scan",
        "engine.seals",
        "engine.run",
        "engine.compare",
        "engine",
        "renames",
        "commit",
        "manifest",
        "integrity",
        "journal",
        "leftovers",
        "bucket",
        "destination",
        "lock",
        "superseded",
        "steps",
    ],
    [
        "operations.arguments",
        "operations.batches",
        "operations.children",
        "operations.cached",
        "operations.proof",
        "operations.inspect",
        "operations.within",
        "operations.joint",
        "operations.shapes",
        "operations.trail",
        "operations.result",
        "operations.move",
        "operations.lora",
        "operations.param_order",
        "operations.side_files",
        "operations.mesh",
        "operations.transfer",
        "operations.keymap",
        "operations.huggingface",
        "operations.convert_options",
        "operations.convert",
        "operations.verification",
        "operations.verify",
        "operations.copy",
        "operations.parts",
        "operations.diff",
        "operations.seal",
        "operations.salvage",
        "operations",
    ],
    [*LIVE, "live.write", "live"],
    ["retention", "rollback", "candidates", "mirror", "background", "manager", "distributed"],
    ["", "render", "verdicts", "options", "cli_runs", "cli", "__main__"],
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
MAY_IMPORT_TORCH = {
    "formats.dtensor_write",
    *LIVE,
    "manager",
    "distributed",
}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{a.name}" for a in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_from_its_own_level_or_below(path: Path) -> None:
    mine = LEVEL[name_of(path)]
    for imported in imports(path):
        if imported.split(".")[0] != "ckpt_tools":
            continue
        name = imported.removeprefix("ckpt_tools").lstrip(".")
        while name not in LEVEL:
            name = name.rpartition(".")[0]
        if name:
            assert LEVEL[name] <= mine, f"{name_of(path)} (level {mine}) imports {name} (level {LEVEL[name]})"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_torch_is_imported_nowhere_but_where_it_must_be(path: Path) -> None:
    if name_of(path) not in MAY_IMPORT_TORCH:
        assert not [i for i in imports(path) if i.split(".")[0] == "torch"]


def test_every_file_has_a_level_and_every_level_a_file() -> None:
    assert {name_of(p) for p in FILES} == set(LEVEL)


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets = set()
        for imported in imports(path):
            name = imported.removeprefix("ckpt_tools").lstrip(".")
            if imported.split(".")[0] == "ckpt_tools":
                while name not in LEVEL:
                    name = name.rpartition(".")[0]
                targets.add(name)
        graph[name_of(path)] = targets - {name_of(path), ""}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_files_and_functions_stay_short() -> None:
    for path in [*FILES, *(ROOT.parent / "training").glob("*.py")]:
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
                assert (node.end_lineno or 0) - first.lineno < 50, f"{path}:{node.name}"


def test_exported_names_exist_and_are_documented() -> None:
    for name in ckpt_tools.__all__:
        value = getattr(ckpt_tools, name)
        assert name == "__version__" or value.__doc__
    with pytest.raises(AttributeError):
        _ = ckpt_tools.nothing
