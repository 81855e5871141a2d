"""The command as a user runs it: bad input gives one clear line and an exit code, nothing at DST,
nothing left behind.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ckpt_tools import CheckpointManager

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A small DCP checkpoint of one process, with an optimizer and an object."""
    torch.manual_seed(0)
    state = {
        "model": {"a.w": torch.randn(5, 4), "b": torch.randn(3), "n": torch.tensor([1, 2, 3])},
        "optimizer": {"state": {"a.w": {"exp_avg": torch.randn(5, 4), "step": torch.tensor(3.0)}}},
        "step": 7,
    }
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    return tmp_path / "src"


def data_file(src: Path) -> Path:
    return next(src.glob("*.distcp"))


def with_metadata(src: Path, change: Callable[[object], None]) -> None:
    metadata = pickle.loads((src / ".metadata").read_bytes())
    change(metadata)
    (src / ".metadata").write_bytes(pickle.dumps(metadata))


def chunk(metadata, fqn: str = "model.a.w"):
    return metadata.state_dict_metadata[fqn].chunks[0]


def place(metadata, fqn: str = "model.a.w"):
    return next(v for k, v in metadata.storage_data.items() if k.fqn == fqn)


class Harm:
    def __reduce__(self):
        return os.system, ("touch canary",)


DAMAGE = {
    "missing data file": (lambda s: data_file(s).unlink(), 12, "missing"),
    "truncated data file": (lambda s: os.truncate(data_file(s), 3000), 12, "outside its file"),
    "zero-byte data file": (lambda s: os.truncate(data_file(s), 0), 12, "is empty"),
    "data file overwritten": (
        lambda s: data_file(s).write_bytes(bytes(data_file(s).stat().st_size)),
        11,
        "no zip directory",
    ),
    "truncated metadata": (lambda s: os.truncate(s / ".metadata", 100), 11, "truncated"),
    "empty metadata": (lambda s: os.truncate(s / ".metadata", 0), 11, ".metadata is empty"),
    "hostile metadata": (
        lambda s: (s / ".metadata").write_bytes(pickle.dumps(Harm())),
        11,
        "asks for posix.system",
    ),
    "past the end": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(offset=1 << 40)),
        12,
        "outside its file",
    ),
    "negative offset": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(offset=-1)),
        12,
        "outside its file",
    ),
    "negative length": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(length=-5)),
        12,
        "outside its file",
    ),
    "beyond 63 bits": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(offset=1 << 63)),
        11,
        "62 bits",
    ),
    "climbing path": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(relative_path="../x")),
        15,
        "outside the checkpoint",
    ),
    "absolute path": (
        lambda s: with_metadata(s, lambda m: place(m).__dict__.update(relative_path="/etc/passwd")),
        15,
        "outside the checkpoint",
    ),
    "hole": (
        lambda s: with_metadata(s, lambda m: chunk(m).__dict__.update(sizes=torch.Size([4, 4]))),
        12,
        "hole",
    ),
    "exceeds": (
        lambda s: with_metadata(s, lambda m: chunk(m).__dict__.update(sizes=torch.Size([6, 4]))),
        12,
        "exceeds",
    ),
    "overlap": (
        lambda s: with_metadata(
            s,
            lambda m: m.state_dict_metadata["model.a.w"].chunks.append(
                type(chunk(m))(torch.Size([0, 0]), torch.Size([2, 4]))
            ),
        ),
        12,
        "overlap",
    ),
    "lost chunk": (
        lambda s: with_metadata(s, lambda m: m.storage_data.clear()),
        12,
        "without a location",
    ),
    "another dtype": (
        lambda s: with_metadata(
            s,
            lambda m: m.state_dict_metadata["model.a.w"].properties.__dict__.update(
                dtype=torch.float16
            ),
        ),
        11,
        "expected float16",
    ),
    "unknown dtype": (
        lambda s: with_metadata(
            s,
            lambda m: m.state_dict_metadata["model.a.w"].properties.__dict__.update(
                dtype=torch.bits8
            ),
        ),
        11,
        "it asks for torch.bits8, which no checkpoint needs",
    ),
}


@pytest.mark.parametrize("verb", ["merge", "reshard"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_source_is_one_clear_line_and_nothing_at_the_destination(
    damage: str, verb: str, src: Path, ckpt: Run, tmp_path: Path
) -> None:
    spoil, code, message = DAMAGE[damage]
    spoil(src)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    args = (
        ("merge", src, tmp_path / "new" / "out.safetensors")
        if verb == "merge"
        else ("reshard", src, tmp_path / "new" / "out", "--to", 2)
    )
    result = ckpt(*args, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if not line.startswith("hint: ")]) == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_link_that_leads_out_of_the_checkpoint_is_refused(
    src: Path, ckpt: Run, tmp_path: Path
) -> None:
    shutil.move(data_file(src), tmp_path / "elsewhere")
    (src / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    result = ckpt("merge", src, tmp_path / "m.safetensors")
    assert result.returncode == 15
    assert "leads out of the checkpoint" in result.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["inspect", "nowhere"], 10, "no such path: nowhere"),
        (
            ["inspect", "empty"],
            10,
            "looked for .metadata or pytorch_model_fsdp_0/ or *.safetensors",
        ),
        (["inspect", "src/__0_0.distcp"], 10, "give the directory: src"),
        (["inspect", "two"], 10, "2 checkpoints lie below two"),
        (["merge", "src", "src/m.safetensors"], 15, "lies in the source"),
        (["reshard", "src", "src", "--to", "2"], 15, "lies in the source"),
        (["reshard", "src", ".", "--to", "2", "--overwrite"], 15, "lies in the destination"),
        (["merge", "src", "old.safetensors"], 15, "exists"),
        (["merge", "src", "notes.txt", "--overwrite"], 13, "one .safetensors file"),
        (
            ["reshard", "src", "folder", "--to", "2", "--overwrite"],
            15,
            "never replaces: thesis.txt",
        ),
        (["reshard", "src", "out", "--to", "2", "--from", "8"], 13, "expected 8, got 1"),
        (["reshard", "src", "out", "--to", "0"], 2, "--to"),
        (["reshard", "src", "out"], 2, "--to"),
        (["reshard", "src", "out", "--to", "2", "--mesh", "fsdp=2"], 2, "--mesh"),
        (
            ["merge", "src", "out.safetensors", "--select", "nothing*"],
            13,
            "matches none of 6 names",
        ),
        (["merge", "src", "out.safetensors", "--dtype", "int3"], 2, "bf16, fp16, fp32 or fp64"),
        (["merge", "src", "out.safetensors", "--memory", "lots"], 2, "5GB or 512MiB"),
        (["merge", "src", "notes.txt/out.safetensors"], 15, "not a directory"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_wrong_requests_are_named_and_change_nothing(
    args: list[str], code: int, message: str, src: Path, ckpt: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "old.safetensors").write_bytes(b"old")
    for name in ("step-900", "step-10000"):
        shutil.copytree(src, tmp_path / "two" / name)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    result = ckpt(*args, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_checkpoints_below_are_listed_in_the_order_of_their_numbers(
    src: Path, ckpt: Run, tmp_path: Path
) -> None:
    for name in ("step-900", "step-10000", "step-88"):
        shutil.copytree(src, tmp_path / "run" / name)
    done = ckpt("inspect", tmp_path / "run")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["step-88/", "step-900/", "step-10000/"]
    assert "/step-10000;" in done.stderr.splitlines()[1]


def test_the_only_checkpoint_below_is_taken(src: Path, ckpt: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    shutil.move(src, tmp_path / "checkpoint-5" / "pytorch_model_fsdp_0")
    result = ckpt("merge", tmp_path / "checkpoint-5", tmp_path / "m.safetensors")
    assert result.returncode == 0, result.stderr
    assert set(load_file(tmp_path / "m.safetensors")) == {"a.w", "b", "n"}


def test_a_merge_reports_what_it_left_out_and_stripped_and_stdout_is_the_result_alone(
    src: Path, ckpt: Run, tmp_path: Path
) -> None:
    result = ckpt("merge", src, tmp_path / "m.safetensors")
    assert "left out: optimizer (84 B), step" in result.stdout
    assert "stripped: model. (3 names)" in result.stdout
    assert result.stderr == ""
    as_json = json.loads(
        ckpt("merge", src, tmp_path / "m.safetensors", "--overwrite", "--json").stdout
    )
    assert (as_json["num_tensors"], as_json["stripped"]) == (3, {"model.": 3})
    assert ckpt("merge", src, tmp_path / "m.safetensors", "--overwrite", "--quiet").stdout == ""


def test_a_merged_file_says_pt_and_stands_beside_its_manifest(
    src: Path, ckpt: Run, tmp_path: Path
) -> None:
    from awscrt.checksums import crc64nvme
    from safetensors import safe_open

    for _ in range(2):
        assert ckpt("merge", src, tmp_path / "m.safetensors", "--overwrite").returncode == 0
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    (path,) = tmp_path.glob("m.safetensors.ckpt.manifest.*.json")
    manifest = json.loads(path.read_text())
    data = (tmp_path / "m.safetensors").read_bytes()
    assert manifest["files"] == {
        "m.safetensors": {"nbytes": len(data), "crc64nvme": f"{crc64nvme(data):016x}"}
    }
    want = load_file(tmp_path / "m.safetensors")["a.w"].numpy().tobytes()
    assert manifest["tensors"]["a.w"] == {
        "dtype": "float32",
        "shape": [5, 4],
        "fingerprint": f"{crc64nvme(want):016x}",
    }


def test_the_manifest_of_a_directory_holds_for_every_byte_in_it(
    src: Path, ckpt: Run, tmp_path: Path
) -> None:
    from awscrt.checksums import crc64nvme

    assert ckpt("reshard", src, tmp_path / "r", "--to", 3, "--from", 1).returncode == 0
    (path,) = (tmp_path / "r").glob("ckpt.manifest.*.json")
    manifest = json.loads(path.read_text())
    sealed = manifest["files"] | {manifest["index"]["name"]: manifest["index"]}
    assert {p.name for p in (tmp_path / "r").iterdir()} == {*sealed, path.name}
    for name, seal in sealed.items():
        data = (tmp_path / "r" / name).read_bytes()
        assert (seal["nbytes"], seal["crc64nvme"]) == (len(data), f"{crc64nvme(data):016x}")
    assert (manifest["world_size"], manifest["source"]["world_size"]) == (3, 1)
    assert ckpt("reshard", src, tmp_path / "again", "--to", 3).returncode == 0
    # `.metadata` as well
    assert all(
        (tmp_path / "again" / name).read_bytes() == (tmp_path / "r" / name).read_bytes()
        for name in sealed
    )
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize("verb", [["merge", "out.safetensors"], ["reshard", "out", "--to", "3"]])
def test_a_dry_run_writes_nothing_and_says_what_a_run_would(
    verb: list[str], src: Path, ckpt: Run, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    args = (verb[0], "src", *verb[1:])
    dry = json.loads(ckpt(*args, "--dry-run", "--json", cwd=tmp_path).stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert "would write" in ckpt(*args, "--dry-run", cwd=tmp_path).stdout
    wet = json.loads(ckpt(*args, "--json", cwd=tmp_path).stdout)
    same = ("files", "num_copies", "written_nbytes", "needed_nbytes", "bytes_by_dtype")
    assert {k: dry[k] for k in same} == {k: wet[k] for k in same}
    assert all(
        (tmp_path / verb[1] / n if verb[0] == "reshard" else tmp_path / n).stat().st_size == b
        for n, b in wet["files"].items()
    )


def test_a_cast_is_asked_for_kept_off_where_told_and_reports_overflow(
    ckpt: Run, tmp_path: Path
) -> None:
    state = {
        "model": {
            "w": torch.tensor([1.0, 1e6, float("inf"), -7e4]),
            "norm": torch.tensor([1e6]),
            "i": torch.tensor([1]),
        }
    }
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    result = ckpt(
        "merge",
        tmp_path / "src",
        tmp_path / "m.safetensors",
        "--dtype",
        "fp16",
        "--keep-dtype",
        "norm*",
    )
    assert "overflow: 2 finite values became infinite in w" in result.stdout
    got = load_file(tmp_path / "m.safetensors")
    assert (got["w"].dtype, got["norm"].dtype, got["i"].dtype) == (
        torch.float16,
        torch.float32,
        torch.int64,
    )
    assert torch.equal(got["w"], state["model"]["w"].half())


def test_names_from_a_checkpoint_cannot_reach_the_terminal(ckpt: Run, tmp_path: Path) -> None:
    dcp.save(
        {"model": {"\x1b]0;pwn\x07": torch.ones(1), "a\u202eb": torch.ones(1)}},
        checkpoint_id=tmp_path / "src",
        no_dist=True,
    )
    for args in (
        ("inspect", tmp_path / "src", "--tree", "--files"),
        ("inspect", tmp_path / "src", "--json"),
    ):
        out = ckpt(*args).stdout
        assert "\x1b" not in out
        assert "\u202e" not in out


def test_select_takes_globs_of_new_or_stored_names(src: Path, ckpt: Run, tmp_path: Path) -> None:
    ckpt("merge", src, tmp_path / "m.safetensors", "--select", "a.*", "--select", "model.n")
    assert set(load_file(tmp_path / "m.safetensors")) == {"a.w", "n"}


def test_keep_prefix_keeps_the_names_as_stored(src: Path, ckpt: Run, tmp_path: Path) -> None:
    ckpt("merge", src, tmp_path / "m.safetensors", "--keep-prefix")
    assert set(load_file(tmp_path / "m.safetensors")) == {"model.a.w", "model.b", "model.n"}


def test_overwriting_replaces_a_checkpoint_whole(src: Path, ckpt: Run, tmp_path: Path) -> None:
    for ranks in (5, 2):
        assert ckpt("reshard", src, tmp_path / "r", "--to", ranks, "--overwrite").returncode == 0
    assert sorted(p.name for p in (tmp_path / "r").glob("*.distcp")) == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r", "src"]


def test_version_help_and_completion(ckpt: Run) -> None:
    assert ckpt("--version").stdout == "ckpt 0.2.0\n"
    assert "does not average models" in " ".join(ckpt("merge", "--help-all").stdout.split())
    assert "DCP reshards by itself" in " ".join(ckpt("reshard", "--help-all").stdout.split())
    assert all(
        "EXIT STATUS" in ckpt(verb, "--help-all").stdout for verb in ("inspect", "merge", "reshard")
    )
    shown = ckpt(
        "--show-completion",
        "bash",
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert "complete -o default" in shown.stdout


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("inspect src", "torch numpy hashlib concurrent.futures tempfile"),
        ("verify src", "torch ssl hashlib"),
        ("merge src m.safetensors --dtype bf16", "torch ssl asyncio"),
        ("reshard src r --to 2", "torch ssl asyncio"),
    ],
)
def test_a_verb_does_not_import_what_it_does_not_need(
    words: str, unneeded: str, src: Path, tmp_path: Path
) -> None:
    code = f"""
import sys
from ckpt_tools.cli.app import main
try: main()
finally: assert not (found := {{*{unneeded.split()}}} & {{*sys.modules}}), found
"""
    result = subprocess.run(
        [sys.executable, "-c", code, *words.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", "inspect merge reshard verify copy ls latest prune".split())
def test_help_says_what_every_argument_is(
    verb: str, ckpt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    text = ckpt(verb, "--help-all", env=os.environ | {"COLUMNS": "200"}).stdout
    assert (
        "A run: the directory of step-"
        if verb in ("ls", "latest", "prune")
        else "A checkpoint, or a directory that contains one"
    ) in text
    assert verb not in ("merge", "reshard", "copy") or "dst" in text.lower()


@pytest.mark.slow
def test_a_bar_is_shown_on_a_terminal_and_nowhere_else(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    source = saved(4) / "adamw"
    for words in (
        ("merge", source, tmp_path / "m.safetensors"),
        ("reshard", source, tmp_path / "r", "--to", 2),
        ("verify", tmp_path / "r"),
    ):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "ckpt_tools", *map(str, words)]
        assert (
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=theirs, timeout=60, check=False
            ).returncode
            == 0
        )
        os.close(theirs)
        shown = os.read(ours, 65536).decode()
        os.close(ours)
        assert f"{words[0]}:" in shown and "0%" in shown
        again = subprocess.run(
            [*command, *([] if words[0] == "verify" else ["--overwrite"])],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["--nope"], "ckpt [OPTIONS] COMMAND [ARGS]...; see ckpt --help"),
        (["mrge", "a", "b"], "ckpt [OPTIONS] COMMAND [ARGS]...; see ckpt --help"),
        (["prune", "a", "--nope"], "ckpt prune [OPTIONS] ROOT; see ckpt prune --help"),
        (["ls", ".", "--price", "1"], "ckpt ls [OPTIONS] ROOT; see ckpt ls --help"),
    ],
)
def test_a_usage_error_looks_like_any_other(words: list[str], usage: str, ckpt: Run) -> None:
    done = ckpt(*words)
    error, hint = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout
    assert error.startswith("error: ") and hint == f"hint: usage: {usage}"


def test_the_path_of_a_run_leads_to_its_newest_step(src: Path, ckpt: Run, tmp_path: Path) -> None:
    for name in ("step-0", "step-12"):
        shutil.copytree(src, tmp_path / "run" / name)
    done = ckpt("inspect", "run/", cwd=tmp_path)
    assert done.returncode == 10
    assert "hint: this is a run: give a step, such as run/step-12;" in done.stderr
    shutil.rmtree(tmp_path / "run" / "step-12")
    shutil.copytree(src, tmp_path / "run" / "other")
    assert "such as run/step-0;" in ckpt("verify", "run", cwd=tmp_path).stderr


def test_prune_sums_up_and_ls_tells_where_a_metric_ends(ckpt: Run, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 5):
            metrics = {"loss": 1.0 / step} if step < 4 else None
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False, metrics=metrics)
    lines = ckpt("ls", tmp_path).stdout.splitlines()
    assert lines[-1].startswith("loss: ") and lines[-1].endswith("1 → 0.3333 (step 3)")
    nbytes = sum(
        path.stat().st_size
        for step in ("step-00000001", "step-00000002", "step-00000003")
        for path in (tmp_path / step).iterdir()
    )
    shown = f"{nbytes / 1000:.3g} KB"
    dry = ckpt("prune", tmp_path, "--keep-last", 1, "--dry-run").stdout
    assert f"would remove 3 steps, {shown}\n" in dry
    done = ckpt("prune", tmp_path, "--keep-last", 1).stdout
    assert done.endswith(f"removed 3 steps, {shown}\n")
    assert ckpt("prune", tmp_path, "--keep-last", 1).stdout == "nothing to remove\n"
