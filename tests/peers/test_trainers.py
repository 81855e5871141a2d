"""Our saves and resumes inside the trainers that people use, each a real job of several ranks.

A job that is killed during a save and resumes has the losses of one that was never interrupted,
number by number.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from tests import jobs
from tests.jobs import LONG, PYTHON_PATH, torchrun_command
from tests.peers.environments import JOBS, python_of
from tests.servers.hub import hub
from tests.servers.servers import running

RANKS = (2, 3) if LONG else (2,)
# the environment and the script of each host; "" is the environment of the tests
HOSTS = {
    "transformers": ("", "transformers_job.py", "."),
    "transformers_4": ("transformers_4", "transformers_job.py", "."),  # the oldest that is admitted
    "peft": ("peft", "transformers_job.py", "."),
    "accelerate": ("", "accelerate_job.py", "run"),
    "accelerate_1": ("accelerate_1", "accelerate_job.py", "run"),  # the oldest
    "lightning": ("lightning", "lightning_saves_job.py", "saved"),
    "lightning_2": ("lightning_2", "lightning_saves_job.py", "saved"),  # the oldest
    "torchtitan": ("torchtitan", "torchtitan_saves_job.py", "run"),
    "verl": ("verl", "verl_saves_job.py", "."),
    "trackers": ("trackers", "trackers_job.py", ""),
}


def consoles(page: str) -> list[str]:
    """Returns the console blocks of a how-to."""
    text = (jobs.ROOT / "docs" / "how-to" / page).read_text()
    return re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)


def command(host: str, num_ranks: int, out: Path, wanted: dict[str, Any]) -> list[str]:
    peer, script, _ = HOSTS[host]
    words = [JOBS / script, out, json.dumps({"ranks": num_ranks, **wanted})]
    python = python_of(peer) if peer else sys.executable
    return [python, *(torchrun_command(num_ranks, *words)[1:] if num_ranks else map(str, words))]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": PYTHON_PATH,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


def run(
    host: str, num_ranks: int, out: Path, wanted: dict[str, Any], code: int = 0, **more: str
) -> str:
    words = command(host, num_ranks, out, wanted)
    done = subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=600, cwd=jobs.ROOT
    )
    assert (done.returncode == 0) == (code == 0), done.stdout[-2000:] + done.stderr[-6000:]
    return done.stderr + done.stdout


def kill(host: str, num_ranks: int, out: Path, root: Path, wanted: dict[str, Any]) -> None:
    """Kills a rank at random while a save is under way, or right after it."""
    words = command(host, num_ranks, out, wanted)

    def is_saving() -> bool:
        return (len(steps_in(root)) >= 2 and any(root.glob(".tmp.*"))) or len(steps_in(root)) >= 3

    member = random.randrange(num_ranks) if num_ranks else None
    done = jobs.interrupt(words, is_saving, signal.SIGKILL, member, environment())
    assert done.returncode != 0 and steps_in(root)


def steps_in(root: Path) -> list[int]:
    return sorted(
        int(found[1])
        for path in root.glob("*")
        if path.is_dir() and (found := re.fullmatch(r"[a-z]+[-=](\d+)(?:\.ckpt)?", path.name))
    )


def losses(out: Path) -> dict[str, dict[int, str]]:
    """Each rank's losses by step; of a step that was taken twice, the last one."""
    return {
        path.name: {
            int(line.split()[0]): line.partition(" ")[2] for line in path.read_text().splitlines()
        }
        for path in out.glob("losses*.txt")
    }


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("host", "fsdp"),
    [("transformers", 2), ("accelerate", 2), ("lightning", 2), ("torchtitan", 2)]
    + [("accelerate_1", 2), ("lightning_2", 2)]
    + [("accelerate", 1), ("transformers", 1), ("transformers", 0), ("accelerate", 0)] * LONG,
)
def test_a_killed_job_has_the_losses_of_one_that_was_not(
    host: str, fsdp: int, num_ranks: int, tmp_path: Path
) -> None:
    wanted = {"steps": 20, "fsdp": fsdp, "save": 3}
    run(host, num_ranks, tmp_path / "whole", wanted)
    part = tmp_path / "part"
    root = part / HOSTS[host][2]
    kill(host, num_ranks, part, root, wanted)
    is_lightning = host.startswith("lightning")
    newest = str(root / f"step={max(steps_in(root))}.ckpt") if is_lightning else True
    run(host, num_ranks, part, {**wanted, "resume": newest})
    want, got = losses(tmp_path / "whole"), losses(part)
    assert got == want and all(len(found) == 20 for found in want.values())


# ---- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_the_trainer_switches_from_its_own_checkpoint(version: int, tmp_path: Path) -> None:
    """The first ten steps are the Trainer's own. What follows is as if it had gone on itself.

    Under FSDP1, the stock loader leaves the optimizer empty, and so did a switch.
    """
    wanted = {"steps": 20, "fsdp": version, "save": 10}
    run("transformers", 2, tmp_path / "whole", {**wanted, "stock": True})
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoint-20")
    (tmp_path / "part" / "losses.txt").unlink()
    told = run("transformers", 2, tmp_path / "part", {**wanted, "resume": True})
    assert "checkpoint-10 was written by the trainer itself" in told
    assert ("Accelerate has loaded no state into optimizer" in told) == (version == 1)
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
    assert got["losses.txt"] == {n: w for n, w in want["losses.txt"].items() if n > 10}
    assert ckpt_tools.verify(tmp_path / "part" / "checkpoint-20").problems == []


def test_the_trainer_on_three_ranks_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    wanted = {"steps": 9, "fsdp": 2, "save": 3, "arguments": {"save_total_limit": 2}}
    run("transformers", 2, tmp_path, wanted)
    assert steps_in(tmp_path) == [6, 9]
    data = bytearray((tmp_path / "checkpoint-9" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "checkpoint-9" / "__0_0.distcp").write_bytes(data)
    told = run("transformers", 3, tmp_path, {**wanted, "steps": 12, "resume": True})
    assert "passed over" in told and "checkpoint-9" in told
    assert steps_in(tmp_path) == [9, 12]  # the limit of two; 9 was replaced
    assert all(
        ckpt_tools.verify(tmp_path / f"checkpoint-{n}").problems == [] for n in steps_in(tmp_path)
    )


@pytest.mark.parametrize("host", ["transformers", "transformers_4"])
@pytest.mark.parametrize(("limit", "greater"), [(1, False), (1, True), (2, True)])
def test_the_best_step_stays_and_is_loaded_at_the_end(
    host: str, limit: int, greater: bool, tmp_path: Path
) -> None:
    """The best step is the first one, or the last one, which is still being written then."""
    arguments = {
        "save_total_limit": limit,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "greater_is_better": greater,
    }
    wanted = {"steps": 8, "save": 2, "evaluate": True, "arguments": arguments}
    run(host, 0, tmp_path / "stock", {**wanted, "stock": True})
    slow = {"max_mbps": 0.5} if limit == 1 else {"install": True}
    run(host, 0, tmp_path / "ours", {**wanted, **slow})
    # the Trainer removes the newest step at the end, if only the best one may stay
    newest = {8} if limit == 1 else set()
    assert {*steps_in(tmp_path / "ours")} == {*steps_in(tmp_path / "stock")} | newest
    want, got = (torch.load(tmp_path / kind / "end.pt") for kind in ("stock", "ours"))
    assert Path(got["best"]).name == Path(want["best"]).name
    assert all(torch.equal(got["model"][n], t) for n, t in want["model"].items())


def test_files_of_a_callback_go_with_their_checkpoint(tmp_path: Path) -> None:
    """Those of a person stay."""
    limit = {"save_total_limit": 2}
    run("transformers", 0, tmp_path, {"steps": 10, "save": 2, "writes": True, "arguments": limit})
    assert steps_in(tmp_path) == [4, 8, 10]
    assert (tmp_path / "checkpoint-4" / "notes.txt").exists()
    for step in (4, 8, 10):
        assert (tmp_path / f"checkpoint-{step}" / "ema" / "average.bin").read_bytes() == b"average"
        assert not ckpt_tools.verify(tmp_path / f"checkpoint-{step}").problems
        config = json.loads((tmp_path / f"checkpoint-{step}" / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"], "as the callback has written it"
    wanted = {"steps": 12, "save": 2, "writes": True, "resume": True, "arguments": limit}
    assert "passed over" not in run("transformers", 0, tmp_path, wanted)
    assert steps_in(tmp_path) == [4, 10, 12]


def test_another_release_of_a_host_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    from ckpt_tools.integrations.common import refuse_release

    refuse_release("transformers", ("4.57", "6"))
    with pytest.raises(ckpt_tools.PlanError, match="transformers 5.* is not known: expected 6 or"):
        refuse_release("transformers", ("6", "7"))
    refuse_release("no-such-package", ("1", "2"))
    assert "the release of no-such-package is not known" in caplog.text


def test_only_trackers_that_upload_checkpoints_make_a_save_wait() -> None:
    from transformers import ProgressCallback, TrainerCallback

    from ckpt_tools.integrations.transformers import _may_read_checkpoints

    def made(name: str, module: str, **values: Any) -> Any:
        methods = {"on_save": lambda *_, **__: None, "__module__": module}
        return type(name, (TrainerCallback,), {**methods, **values})()

    theirs = "transformers.integrations.integration_utils"
    assert not _may_read_checkpoints(ProgressCallback())
    assert not _may_read_checkpoints(made("Wandb", theirs, _log_model="false"))
    assert not _may_read_checkpoints(made("MLflow", theirs, _log_artifacts=False))
    assert _may_read_checkpoints(made("Wandb", theirs, _log_model="checkpoint"))
    assert _may_read_checkpoints(made("Unknown", theirs))
    own = made("Own", "my_project")
    assert _may_read_checkpoints(own)
    assert _may_read_checkpoints(type("Heir", (type(own),), {})())  # inherits the method


def test_only_the_model(tmp_path: Path) -> None:
    wanted = {"steps": 4, "save": 2, "arguments": {"save_only_model": True}}
    run("transformers", 0, tmp_path, wanted)
    with ckpt_tools.open(tmp_path / "checkpoint-4") as step:
        assert not any(name.startswith("optimizer") for name in step.names())
    told = run("transformers", 0, tmp_path, {**wanted, "steps": 6, "resume": True})
    assert "checkpoint-4 has no optimizer, scheduler: it starts anew" in told


@pytest.mark.parametrize("fsdp", [0, 2])
def test_each_save_is_pushed_to_the_hub_as_a_model_that_loads(fsdp: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    more = {"push_to_hub": True, "hub_model_id": "somebody/model", "hub_token": "hf_none"}
    wanted = {"steps": 4, "save": 2, "fsdp": fsdp, "arguments": {**more, "hub_always_push": True}}
    with hub() as server:
        ranks, out = (2 if fsdp else 0), tmp_path / "run"
        run("transformers", ranks, out, wanted, HF_ENDPOINT=server.url)
        assert server.titles == [f"Training in progress, step {step}" for step in (2, 4)]
        for name, data in server.files.items():
            path = tmp_path / "pushed" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    assert not any("manifest" in name or "distcp" in name for name in server.files)
    pushed = AutoModelForCausalLM.from_pretrained(tmp_path / "pushed")
    trained = torch.load(out / "end.pt")["model"]
    assert all(torch.equal(pushed.state_dict()[n], t) for n, t in trained.items())


def test_the_ways_back_of_the_how_to(tmp_path: Path) -> None:
    """A stock Trainer continues from the converted step, and `from_pretrained` reads the model."""
    from transformers import AutoModelForCausalLM

    wanted, step = {"steps": 10, "fsdp": 2}, tmp_path / "ours" / "checkpoint-5"
    run("transformers", 2, tmp_path / "ours", wanted)
    (lines,) = consoles("transformers.md")
    lines = lines.replace("checkpoint-500", step.name).replace("stock/", f"{tmp_path}/stock/")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ckpt").write_text(f'exec {sys.executable} -m ckpt_tools "$@"')
    (tmp_path / "bin" / "ckpt").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", lines], env=environment(PATH=path), cwd=step.parent, check=True)
    run("transformers", 2, tmp_path / "stock", {**wanted, "stock": True, "resume": True})
    want = losses(tmp_path / "ours")["losses.txt"]
    assert losses(tmp_path / "stock")["losses.txt"] == {n: w for n, w in want.items() if n > 5}
    ckpt_tools.convert(step, tmp_path / "hf", to="hf", base=step)
    names = {p.name for p in (tmp_path / "hf").iterdir()}
    assert len([n for n in names if "manifest" in n]) == 1 and "trainer_state.json" not in names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with ckpt_tools.open(step) as stored:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stored[f"model.{name}"].torch()), name


def test_a_bucket_as_the_root(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with running("moto", tmp_path / "server") as server:
        server.bucket("runs")
        root, more = "s3://runs/a", server.environment
        wanted = {"steps": 10, "fsdp": 2, "save": 5, "root": root}
        run("transformers", 2, tmp_path / "whole", {**wanted, "root": None})
        run("transformers", 2, tmp_path / "part", {**wanted, "steps": 10}, **more)
        (tmp_path / "part" / "losses.txt").unlink()
        server.bucket("runs").rm("runs/a/checkpoint-10", recursive=True)
        run("transformers", 2, tmp_path / "part", {**wanted, "resume": True}, **more)
        want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
        assert got["losses.txt"] == {n: w for n, w in want["losses.txt"].items() if n > 5}
        assert not any((tmp_path / "part").glob("checkpoint-*"))


@pytest.mark.parametrize("fsdp", [0, 2])
def test_an_adapter_is_saved_killed_resumed_and_exported(fsdp: int, tmp_path: Path) -> None:
    """The step has no base model, and PEFT's own merge of the export gives the trained model."""
    ranks, wanted = (2 if fsdp else 0), {"steps": 20, "save": 4, "fsdp": fsdp, "peft": True}
    run("peft", ranks, tmp_path / "whole", wanted)
    part = tmp_path / "part"
    kill("peft", ranks, part, part, wanted)
    run("peft", ranks, part, {**wanted, "resume": True})
    assert losses(part) == losses(tmp_path / "whole")
    step = part / "checkpoint-20"
    with ckpt_tools.open(step) as stored:
        names = [name for name in stored if name.startswith("model.")]
    assert len(names) == 8 and all("lora_" in name for name in names)
    ckpt_tools.convert(step, tmp_path / "adapter", to="peft", base=step)
    words = [python_of("peft"), JOBS / "peft_loads_job.py", tmp_path / "adapter", part / "end.pt"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "loaded" in done.stdout, done.stderr[-3000:]


def test_a_full_disk_is_a_clear_error_and_leaves_a_sound_step(tmp_path: Path) -> None:
    """The disk has room for one step. The job goes on from it once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    wanted = {"steps": 12, "fsdp": 2, "save": 4}
    try:
        told = run("transformers", 2, tmp_path / "out", {**wanted, "root": str(disk)}, code=1)
        assert "No space left" in told or "no room: expected" in told
        (saved,) = steps_in(disk)
        assert ckpt_tools.verify(disk / f"checkpoint-{saved}").problems == []
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        run("transformers", 2, tmp_path / "out", {**wanted, "root": str(disk), "resume": True})
        assert steps_in(disk) == [4, 8, 12]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    run("transformers", 2, tmp_path / "whole", wanted)
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "out")
    assert got["losses.txt"] == want["losses.txt"]


# ---- Accelerate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "more"),
    [
        (0, {}),
        (0, {"seedable": True}),
        (0, {"next": True, "save": 7}),
        (0, {"save": 7}),
        (2, {"next": True, "save": 7}),
        (2, {"seedable": True}),
        (2, {"seedable": True, "save": 7}),
        (0, {"seedable": True, "save": 7}),
    ],
)
def test_accelerate_continues_the_shuffle(
    num_ranks: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """In the middle of an epoch and at its end; two epochs later the order is still the same.

    An epoch has 14 batches, or seven for each of two ranks.
    """
    wanted = {"steps": 40, "save": 10, **more}
    run("accelerate", num_ranks, tmp_path / "whole", wanted)
    stop = {**wanted, "steps": 7 if "save" in more else 10}
    if num_ranks == 0 and "save" in more:
        wanted["save"] = stop["save"] = stop["steps"] = 14
    run("accelerate", num_ranks, tmp_path / "part", stop)
    run("accelerate", num_ranks, tmp_path / "part", wanted)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_accelerate_loads_a_step_of_two_ranks_in_one_process(tmp_path: Path) -> None:
    run("accelerate", 2, tmp_path, {"steps": 5})
    run("accelerate", 0, tmp_path, {"steps": 8})
    assert ckpt_tools.latest(tmp_path / "run").number == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("version", [1, 2])
def test_accelerate_switches_from_its_own_checkpoint(version: int, tmp_path: Path) -> None:
    wanted = {"steps": 10, "fsdp": version, "save": 5}
    run("accelerate", 2, tmp_path / "whole", wanted)
    run("accelerate", 2, tmp_path / "stock", {**wanted, "stock": True, "steps": 5})
    step, epoch, batch = json.loads((tmp_path / "stock" / "at.json").read_text())
    there = {"load": str(tmp_path / "stock" / "stock-5"), "at": step, "epoch": epoch}
    run("accelerate", 2, tmp_path / "part", {**wanted, **there, "batch": batch})
    want, got = losses(tmp_path / "whole"), losses(tmp_path / "part")
    assert got.keys() == want.keys()
    for name, found in got.items():
        assert found == {n: w for n, w in want[name].items() if n > 5}
    assert ckpt_tools.verify(tmp_path / "part" / "run" / "step-00000010").problems == []


# ---- Lightning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", [False, True])
def test_lightning_resumes_on_other_ranks_and_stock_lightning_reads_it(
    fabric: bool, tmp_path: Path
) -> None:
    wanted = {"steps": 10, "fabric": fabric}
    run("lightning", 2, tmp_path / "whole", wanted)
    (five,) = (tmp_path / "whole" / "saved").glob("*=5.ckpt")
    run("lightning", 3, tmp_path / "three", {**wanted, "steps": 6, "resume": str(five)})
    run("lightning", 2, tmp_path / "part", {**wanted, "resume": str(five)})
    run("lightning", 2, tmp_path / "stock", {**wanted, "resume": str(five), "stock": True})
    want = losses(tmp_path / "whole")["losses-0.txt"]
    for name in ("part", "stock"):
        assert losses(tmp_path / name)["losses-0.txt"] == {n: w for n, w in want.items() if n > 5}
    assert list(losses(tmp_path / "three")["losses-0.txt"]) == [6]
    # and the other way: ours continues from stock
    run("lightning", 2, tmp_path / "theirs", {**wanted, "steps": 5, "stock": True})
    (stock,) = (tmp_path / "theirs" / "saved").glob("*=5.ckpt")
    run("lightning", 2, tmp_path / "back", {**wanted, "resume": str(stock)})
    assert losses(tmp_path / "back")["losses-0.txt"] == {n: w for n, w in want.items() if n > 5}


def test_model_checkpoint_decides_which_stay(tmp_path: Path) -> None:
    """The previous checkpoint goes only after the next one is complete."""
    kept = {"save_top_k": 1, "monitor": "loss", "mode": "min", "save_last": "link"}
    run("lightning", 2, tmp_path / "ours", {"steps": 12, "save": 2, "checkpoint": kept})
    run(
        "lightning",
        2,
        tmp_path / "theirs",
        {"steps": 12, "save": 2, "checkpoint": kept, "stock": 1},
    )
    ours, theirs = tmp_path / "ours" / "saved", tmp_path / "theirs" / "saved"
    assert steps_in(ours) == steps_in(theirs)
    assert os.path.realpath(ours / "last.ckpt") != str(ours / "last.ckpt")
    for number in steps_in(ours):
        assert ckpt_tools.verify(ours / f"step={number}.ckpt").problems == []


def test_a_filter_of_fabric(tmp_path: Path) -> None:
    """The filter keeps the last layer, which stock refuses for sharded checkpoints."""
    run("lightning", 2, tmp_path, {"steps": 5, "fabric": True, "filter": True})
    (step,) = (tmp_path / "saved").glob("*=5.ckpt")
    with ckpt_tools.open(step) as checkpoint:
        names = [n for n in checkpoint if n.startswith("model.")]
    assert names == ["model.2.weight"]


# ---- torchtitan ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2])
def test_torchtitan_continues_from_stock_and_stock_from_ours(stages: int, tmp_path: Path) -> None:
    """Also if the ranks are stages of a pipeline, each with names of its own."""
    ranks, wanted = 2 * stages, {"steps": 10, "stages": stages}
    run("torchtitan", ranks, tmp_path / "whole", wanted)
    want = losses(tmp_path / "whole")
    for first, second in (("stock", ""), ("", "stock")):
        out = tmp_path / f"{first}-{second}"
        run("torchtitan", ranks, out, {**wanted, "steps": 5, "stock": bool(first)})
        run("torchtitan", ranks, out, {**wanted, "stock": bool(second)})
        assert losses(out) == want


def test_hugging_face_formats_of_torchtitan_in_a_bucket(tmp_path: Path) -> None:
    """Stock torchtitan refuses them there."""
    (tmp_path / "server").mkdir()
    with running("moto", tmp_path / "server") as server:
        server.bucket("runs")
        more = server.environment
        config = {"folder": "s3://runs/a", "last_save_model_only": True, "last_save_in_hf": True}
        run("torchtitan", 2, tmp_path / "one", {"steps": 10, "config": config}, **more)
        config = {
            "folder": "s3://runs/b",
            "initial_load_in_hf": True,
            "initial_load_path": "s3://runs/a/step-10-hf",
        }
        run("torchtitan", 2, tmp_path / "two", {"steps": 0, "seed": 3, "config": config}, **more)
        names = server.bucket("runs").ls("runs/a", detail=False)
        assert sorted(name.rpartition("/")[2] for name in names if "step" in name) == [
            "step-10-hf",
            "step-5",
        ]
    want, got = (torch.load(tmp_path / name / "end-0.pt") for name in ("one", "two"))
    assert want.keys() == got.keys() and all(torch.equal(got[n], t) for n, t in want.items())


def test_a_seed_of_torchtitan_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    config = {"last_save_model_only": True}
    run("torchtitan", 1, tmp_path, {"steps": 0, "seed": 7, "seed_only": True, "config": config})
    want = torch.load(tmp_path / "end-0.pt")
    run("torchtitan", 2, tmp_path, {"steps": 0, "seed": 1})
    got = torch.load(tmp_path / "end-0.pt")
    assert all(torch.equal(got[n], t) for n, t in want.items())


# ---- verl ----------------------------------------------------------------------------------------

EXPORTS = dict(re.findall(r"(?m)^export (\w+)=(\S+)$", "".join(consoles("verl.md"))))
OURS = {"CKPT_VERL": EXPORTS["CKPT_VERL"]}
needs_verl = pytest.mark.skipif(not LONG, reason="600 MB to install: CKPT_LONG=1")


@needs_verl
def test_verl_switches_resumes_on_other_ranks_and_keeps_one(tmp_path: Path) -> None:
    """From verl's own checkpoint on two ranks, to ours on two and three."""
    run("verl", 2, tmp_path / "whole", {"steps": 6})
    run("verl", 2, tmp_path / "part", {"steps": 2})
    run("verl", 2, tmp_path / "part", {"steps": 4, "from": 2}, **OURS)
    run("verl", 2, tmp_path / "part", {"steps": 6, "from": 4, "keep": 1}, **OURS)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    step = tmp_path / "part" / "global_step_4" / "actor"
    assert ckpt_tools.verify(step).problems == [] and (step / "config.json").is_file()
    run("verl", 3, tmp_path / "part", {"steps": 5, "from": 4}, **OURS)
    run("verl", 2, tmp_path / "kept", {"steps": 6, "keep": 1}, **OURS)
    assert [p.parent.name for p in (tmp_path / "kept").glob("*/actor")] == ["global_step_6"]


@needs_verl
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_verl_killed_during_a_save_has_the_losses_of_one_that_was_not(
    num_ranks: int, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    run("verl", num_ranks, whole, {"steps": 20}, **OURS)

    def saved() -> list[int]:
        return sorted(
            int(p.parent.name.rpartition("_")[2]) for p in part.glob("global_step_*/actor")
        )

    def is_saving() -> bool:
        return (len(saved()) >= 2 and any(part.glob("global_step_*/.tmp.*"))) or len(saved()) >= 6

    words, member = command("verl", num_ranks, part, {"steps": 20}), random.randrange(num_ranks)
    jobs.interrupt(words, is_saving, signal.SIGKILL, member, environment(**OURS))
    assert saved() and saved()[-1] < 20
    run("verl", num_ranks, part, {"steps": 20, "from": saved()[-1]}, **OURS)
    assert losses(part) == losses(whole) and all(len(x) == 20 for x in losses(whole).values())


@needs_verl
def test_verl_saves_an_adapter_alone_and_in_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    with running("moto", tmp_path / "server") as server:
        files = server.bucket("bucket")
        more = {**server.environment, **EXPORTS}
        wanted = {"steps": 4, "lora": True, "config": {"save_lora_only": True}, "keep": 1}
        run("verl", 2, tmp_path / "whole", {**wanted, "steps": 6}, **OURS)
        run("verl", 2, tmp_path / "part", wanted, **more)
        run("verl", 2, tmp_path / "part", {**wanted, "steps": 6, "from": 4}, **more)
        assert losses(tmp_path / "part") == losses(tmp_path / "whole")
        assert not list((tmp_path / "part").glob("global_step_*"))
        assert sorted(p.rpartition("/")[2] for p in files.ls("bucket/run", refresh=True)) == [
            "global_step_4",  # verl forgets, when it starts again, what it saved before
            "global_step_6",
        ]
    with ckpt_tools.open(tmp_path / "whole" / "global_step_6" / "actor") as step:
        names = [n for n in step if n.startswith("model.")]
    assert names and all("lora_" in n for n in names)


# ---- trackers ------------------------------------------------------------------------------------


def test_trackers_are_told_of_each_step(tmp_path: Path) -> None:
    """W&B offline, MLflow in files, TensorBoard."""
    run("trackers", 0, tmp_path, {})


def test_the_training_program_tells_tensorboard_and_wandb(tmp_path: Path) -> None:
    """The step of a resumed run replaces the one of the run before; W&B is offline."""
    python = python_of("trackers")
    options = [
        "model.dim=32",
        "model.num_layers=1",
        "model.num_heads=2",
        "data.seq_len=32",
        "data.batch_size=4",
        "metrics.progress=false",
        "metrics.tensorboard=true",
        "metrics.wandb=tests",
        "checkpoint.every=2",
        f"run.dir={tmp_path}/run",
    ]
    for steps in (4, 6):
        words = [python, "-m", "training"]
        for option in (*options, f"run.steps={steps}"):
            words += ["--set", option]
        done = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=300, cwd=jobs.ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
    script = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[e.step, e.value] for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}))
"""
    folder = str(tmp_path / "run" / "tensorboard")
    words = [python, "-c", script, folder]
    read = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600)
    scalars = json.loads(read.stdout.splitlines()[-1])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    for key in ("loss", "lr", "grad_norm"):
        want = [[line["step"], line[key]] for line in map(json.loads, lines)]
        assert [step for step, _ in scalars[key]] == [1, 2, 3, 4, 5, 6]
        for (_, got), (_, value) in zip(scalars[key], want, strict=True):
            assert got == pytest.approx(value, rel=1e-6)
    assert [step for step, _ in scalars["checkpoint/bytes"]] == [2, 4, 6]
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 2
