"""The environments of the peers that write the test checkpoints, laid over the present one, so that
torch is installed once.

Each peer's packages go in without those that they depend on: none may replace what the tests run
with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import LONG, torchrun_command

ROOT = Path(__file__).parent.parent.parent
JOBS = Path(__file__).parent
FOLDER = ROOT / ".peers"
_PEERS = {
    "deepspeed": (
        "deepspeed==0.19.8 hjson msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types"
        " typing-inspection einops"
    ),
    "lightning": "lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities torchmetrics",
    "megatron": "megatron-core==0.16.1",
    "torch_checkpointing": "torch_checkpointing==0.1.1",
    "composer": (
        "mosaicml==0.32.1 mosaicml-cli torchvision==0.28.0 torchmetrics lightning-utilities"
        " torch-optimizer pytorch-ranger coolname tabulate py-cpuinfo importlib-metadata==8.7.0"
        " zipp requests urllib3 idna certifi charset-normalizer questionary prompt-toolkit wcwidth"
        " ruamel.yaml gql graphql-core validators backoff argcomplete arrow pillow tenacity"
        " websockets"
    ),
    "accelerate_1": "accelerate==1.6.0",
    "lightning_2": "lightning==2.4.0 pytorch-lightning==2.4.0 lightning-utilities torchmetrics",
    "peft": "peft==0.21.2",
    "quantized": "bitsandbytes==0.50.2 compressed-tensors==0.20.0 loguru torchao==0.18.0",
    "ray": (
        "ray==2.60.0 msgpack protobuf cloudpickle pandas pytz tzdata python-dateutil six pyarrow"
        " jsonschema jsonschema-specifications referencing rpds-py"
    ),
    "transformers_4": "transformers==4.57.3 huggingface_hub==0.36.2 tokenizers==0.22.2",
    "torchtitan": (
        "torchtitan==0.3.0 torchdata tyro docstring-parser typeguard einops spmd_types==0.2.3"
    ),
    "trackers": (
        "wandb mlflow-skinny tensorboard gitpython gitdb smmap platformdirs protobuf pydantic"
        " pydantic-core annotated-types typing-inspection sentry-sdk cachetools cloudpickle"
        " importlib-metadata==8.7.0 xxhash zipp opentelemetry-api opentelemetry-sdk opentelemetry-proto"
        " opentelemetry-semantic-conventions sqlparse requests urllib3 idna certifi"
        " charset-normalizer absl-py grpcio markdown tensorboard-data-server werkzeug python-dotenv"
        " databricks-sdk google-auth pyasn1 pyasn1-modules fastapi starlette uvicorn h11 anyio"
    ),
    "verl": (
        "verl==0.9.1 tensordict pyvers orjson omegaconf hydra-core antlr4-python3-runtime==4.9.3"
        " peft==0.21.2 ray msgpack cloudpickle codetiming protobuf datasets multiprocess dill"
        " xxhash pandas pytz tzdata python-dateutil six pyarrow"
    ),
    "clouds": (
        "adlfs azure-core azure-identity azure-storage-blob msal msal-extensions isodate pyjwt"
        " decorator gcsfs gcp-storage-emulator google-api-core google-auth google-auth-oauthlib"
        " google-cloud-core google-cloud-storage google-cloud-storage-control google-crc32c"
        " google-resumable-media googleapis-common-protos grpc-google-iam-v1 grpcio grpcio-status"
        " oauthlib proto-plus protobuf pyasn1 pyasn1-modules requests-oauthlib opentelemetry-api fs"
        " appdirs six"
    ),
}


# composer's torchvision has kernels for CUDA only, and others that see it import it; the others are
# the oldest releases that are admitted
_ALONE = ("composer", "transformers_4", "accelerate_1", "lightning_2")
_LONG_ONLY = ("verl", "clouds")  # only the long form of the tests needs them


def python_of(peer: str) -> str:
    """Returns the interpreter of an environment with a peer installed; skips the test where that
    cannot be done.
    """
    folder = FOLDER.with_name(f"{FOLDER.name}-{peer}") if peer in _ALONE else FOLDER
    done = folder / f"{peer}.done"
    with (ROOT / ".peers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run side by side
        if not done.exists() or done.read_text() != _PEERS[peer]:  # other packages since then
            log = _install(folder, _PEERS[peer].split())
            if log:
                pytest.skip(f"{peer} cannot be installed here: {log}")
            done.write_text(_PEERS[peer])
    return str(folder / "bin" / "python")


def _install(folder: Path, packages: list[str]) -> str:
    """Makes an environment where it is missing, and installs; returns the last line of what went
    wrong, "" for nothing.
    """
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    if not (folder / "bin" / "python").exists():
        log = _run([sys.executable, "-m", "venv", str(folder)]) or _run(
            [*pip, "setuptools", "wheel"]
        )
        if log:
            return log
        (packages_folder,) = (folder / "lib").glob("python*/site-packages")
        (packages_folder / "zz_parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return _run([*pip, "--no-build-isolation", *packages])


def _run(step: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        step,
        env=environment | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""


def run_job(peer: str, num_ranks: int, script: str, *arguments: object) -> None:
    """Runs one of the scripts of this folder in a peer's environment, under torchrun where it has
    several ranks.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    words = [JOBS / script, *arguments]
    command = [
        python_of(peer),
        *(torchrun_command(num_ranks, *words)[1:] if num_ranks else map(str, words)),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


if __name__ == "__main__":  # installs all, while other tests run
    for peer in (name for name in _PEERS if LONG or name not in _LONG_ONLY):
        with contextlib.suppress(pytest.skip.Exception):  # the test that needs it says why
            python_of(peer)
