"""A Slurm of one node on this machine, for `srun`: a controller and a daemon, with files and ports
of their own and nobody to authenticate.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.servers import free_port

NEEDS = ("slurmctld", "slurmd", "srun", "sinfo")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns what is not there of what it takes, "" for nothing."""
    if os.geteuid():
        return "root"
    try:
        socket.gethostbyname(_host())
    except OSError:
        return f"an address of {_host()}"
    return ", ".join(name for name in NEEDS if shutil.which(name) is None)


def _host() -> str:
    return socket.gethostname().partition(".")[0]


@contextmanager
def cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Starts it; yields what `srun` wants to find in its environment."""
    for name in ("state", "spool"):
        (directory / name).mkdir()
    (directory / "slurm.conf").write_text(
        CONFIG.format(host=_host(), ports=(free_port(), free_port()), at=directory)
    )
    environment = {"SLURM_CONF": str(directory / "slurm.conf")}
    with (directory / "log").open("wb") as log:
        daemons = [
            subprocess.Popen(
                [name, "-D"],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for name in ("slurmctld", "slurmd")
        ]
        try:
            _wait(os.environ | environment, directory / "log")
            yield environment
        finally:
            # The node's daemon first: it reports its last steps, and waits while no controller answers.
            for daemon in reversed(daemons):
                _end(daemon)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """Asks a daemon to end, and kills it when it has not after 20 s."""
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait(environment: dict[str, str], log: Path) -> None:
    """Waits until the node takes work."""
    for _ in range(240):
        told = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        if told.stdout.strip() == "idle":
            return
        time.sleep(0.25)
    raise RuntimeError(f"Slurm's node takes no work: {log.read_text(errors='replace')[-2000:]}")
