"""Real trackers, without a network: `trackers_job.py OUT` saves two steps and tells each tracker."""

import glob
import json
import os
import sys
import time
from pathlib import Path

OUT = Path(sys.argv[1])
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_DIR": str(OUT),
    "WANDB_SILENT": "true",
    "MLFLOW_TRACKING_URI": f"file://{OUT}/mlruns",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
import mlflow
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ckpt_tools import CheckpointManager
from ckpt_tools.integrations.trackers import (
    mlflow_reference,
    mlflow_scalars,
    tensorboard_scalars,
    wandb_reference,
    wandb_scalars,
)


def main():
    run, writer = wandb.init(project="p"), SummaryWriter(OUT / "tb")
    active = mlflow.start_run()
    told = []
    hooks = [
        told.append,
        tensorboard_scalars(writer),
        wandb_scalars(run),
        wandb_reference(run),
        mlflow_scalars(),
        mlflow_reference(),
    ]
    with CheckpointManager(OUT / "run", on_commit=hooks) as checkpoints:
        for step in (1, 2):
            checkpoints.save(
                step, {"w": torch.ones(1000)}, metrics={"loss": 1.0 / step, "acc@5%": 0.25}
            )
    writer.close()
    found = EventAccumulator(str(OUT / "tb"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("checkpoint/loss")] == [(1, 1.0), (2, 0.5)]
    assert {"checkpoint/stall_s", "checkpoint/bytes"} <= set(found.Tags()["scalars"])
    client = mlflow.MlflowClient()
    history = client.get_metric_history(active.info.run_id, "checkpoint/bytes")
    assert [m.step for m in history] == [1, 2] and history[0].value == told[0].nbytes > 4000
    odd = client.get_metric_history(active.info.run_id, "checkpoint/acc_5_")
    assert [m.value for m in odd] == [0.25, 0.25], "MLflow takes no @ and %"
    (path,) = glob.glob(f"{OUT}/mlruns/*/{active.info.run_id}/artifacts/checkpoints/step-2.json")
    facts = json.loads(Path(path).read_text())
    assert facts["uri"] == f"file://{told[1].path}" and facts["metrics"]["loss"] == 0.5
    assert facts["digest"] == f"crc64nvme:{told[1].digest}"
    mlflow.end_run()
    run.finish()
    wanted = [b"checkpoint/loss", f"file://{told[1].path}".encode(), told[1].digest.encode()]
    for _ in range(120):  # another process writes it
        if all(text in log() for text in wanted):
            break
        time.sleep(0.5)
    else:
        raise AssertionError([text for text in wanted if text not in log()])
    kept = [p for p in OUT.glob("wandb/**/*") if p.is_file() and p.suffix == ".distcp"]
    assert kept == [], "a reference copies nothing"


def log():
    """What W&B has logged: blocks of 32 KiB, each with a header of seven bytes."""
    logs = [p.read_bytes() for p in OUT.glob("wandb/*/*.wandb")]
    return b"".join(log[at + 7 : at + 32768] for log in logs for at in range(0, len(log), 32768))


if __name__ == "__main__":
    main()
