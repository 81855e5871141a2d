"""Real jobs, run once a session: `saved(n)` is a folder of checkpoints that an n-rank torchrun job
wrote, with their oracles.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.command import run_command, run_job
from tests.jobs import PYTHON_PATH, torchrun_command
from tests.servers import servers
from tests.servers.servers import Server

# a shell's background ignores it, and so would the processes of these tests
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("COLUMNS", None)  # the runner's width is not that of a pipe
if "PYTEST_XDIST_WORKER" not in os.environ:  # all workers of this session share one
    _answers = tempfile.TemporaryDirectory(prefix="ckpt-answers-")
    os.environ["CKPT_CACHE"] = _answers.name
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
HERE = Path(__file__).parent
SERVERS, CLIENTS = ("moto", "radosgw"), ("s3fs", "obstore")
_SERVERS = "servers"
_WITH_BOTH = ("test_obstore_client.py",)
# These take long. They run on the reference server, RadosGW, and on moto's with CKPT_LONG=1.
_LONG_ON_MOTO = set(
    "test_a_reshard_by_whole_cells_is_copied_by_the_store"
    " test_of_two_copies_at_one_instant_one_wins test_a_start_and_a_resume_sit_an_outage_out"
    " test_a_process_that_ends_with_reads_on_their_way_ends_quietly"
    " test_a_lease_of_another_machine_holds_while_it_is_renewed_and_expires_after_that"
    " test_waiting_for_a_slow_store_is_said test_a_killed_merge_goes_on_and_sends_nothing_twice"
    " test_a_step_that_made_way_for_nothing_comes_back test_each_verb_tells_its_requests"
    " test_three_ranks_list_no_more_than_one test_of_two_writers_of_one_step_exactly_one_wins"
    " test_without_checksums_of_pieces_a_reshard_passes_through"
    " test_what_is_written_to_a_bucket_is_what_is_written_to_a_disk"
    " test_a_bucket_takes_deltas_of_all_ranks"
    " test_a_bucket_takes_complete_versions_of_all_ranks".split()
)
_FIRST = (_SERVERS, "training/", "faults/test_saving", "peers/", "faults/", "transfer/test_group")
ALL_CASES = (
    "adamw sgd hsdp tp columns dtypes strided names fsdp1 compiled titan flat headless local differ"
)
CASES = {
    8: ALL_CASES,
    4: "adamw columns tp hsdp",
    3: "adamw columns",
    1: "adamw columns",
    16: "adamw columns",
}


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """A test leaves no environment to the next one: pip takes what PYTHONPATH has for installed."""
    before = dict(os.environ)
    yield
    now = {name: os.environ.get(name) for name in {*before, "PYTHONPATH"}}
    del now["PYTEST_CURRENT_TEST"]
    assert {n: v for n, v in now.items() if v != before.get(n)} == {}


def torchrun(num_ranks: int, script: str, *args: str, **environment: str) -> None:
    """Runs a script of tests/dist on real gloo processes, and shows what it printed if it fails."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH} | environment
    command = torchrun_command(num_ranks, HERE / "dist" / script, *args)
    result = run_job(command, env=os.environ | environment)
    assert result.returncode == 0, result.stdout + result.stderr


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever needs an S3 server is read by either client."""
    if "server" in metafunc.fixturenames:
        if "client" not in metafunc.fixturenames:
            metafunc.fixturenames.append("client")
        metafunc.parametrize("client", CLIENTS, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where tests run side by side, a file's stay together. So do those that need the same S3
    server, in two parts, each with a server of its own.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    part = sum(item.path.name.encode()) % 2
    name = (
        f"{_SERVERS}-{params.get('server', '')}-{part}"
        if "server" in getattr(item, "fixturenames", ())
        else str(item.path.relative_to(HERE))
    )
    item.add_marker(pytest.mark.xdist_group(name))


def _is_wanted(item: pytest.Item) -> bool:
    """All that reads S3 is tried with both clients on both servers; of the rest, each on one,
    unless there is time.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    is_pair = (params.get("server"), params.get("client")) in {
        ("moto", "obstore"),
        ("radosgw", "s3fs"),
    }
    name = getattr(item, "originalname", "")
    if params.get("server") == "moto" and name in _LONG_ON_MOTO and "CKPT_LONG" not in os.environ:
        return False
    if "automatic" in getattr(item, "fixturenames", ()) and params.get("client") == "s3fs":
        return False  # where nobody has chosen, there is one case and not two
    return (
        "server" not in params
        or is_pair
        or "CKPT_LONG" in os.environ
        or item.path.name in _WITH_BOTH
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with what takes longest, so that no process is left with it at the end."""
    if spared := [item for item in items if not _is_wanted(item)]:
        items[:] = [item for item in items if _is_wanted(item)]
        config.hook.pytest_deselected(items=spared)
    groups = {item: next(item.iter_markers("xdist_group")).args[0] for item in items}
    items.sort(
        key=lambda item: next(
            (n for n, first in enumerate(_FIRST) if groups[item].startswith(first)), len(_FIRST)
        )
    )


@pytest.fixture(scope="session")
def shared(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, Callable[[Path], object]], Path]:
    """`shared(name, make)` is a folder that `make(folder)` fills once, for all the processes that
    run the tests.
    """
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        out = base / name
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                making = base / f"{name}.making"
                making.mkdir()
                make(making)
                making.rename(out)
        return out

    return get


@pytest.fixture(scope="session")
def saved(shared: Callable[[str, Callable[[Path], object]], Path]) -> Callable[[int], Path]:
    return lambda n: shared(
        f"ranks{n}", lambda out: torchrun(n, "save.py", str(out), *CASES[n].split())
    )


@pytest.fixture
def ckpt() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command as a user would, in a process of its own."""
    return run_command


@pytest.fixture
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package that reads S3, here and in the processes of a test."""
    if request.param == "obstore":
        pytest.importorskip("obstore")
    monkeypatch.setenv("CKPT_S3_CLIENT", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_client_after_the_other(request: pytest.FixtureRequest) -> Iterator[None]:
    """With CKPT_LONG=1, both clients run each test on one server: removes what a test has left."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if "CKPT_LONG" not in os.environ or not {"server", "client"} <= params.keys():
        yield
        return
    running: Server = request.getfixturevalue("server")
    before = running.contents()
    yield
    running.remove(running.contents() - before)


@pytest.fixture(scope="session", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A real S3 server on loopback."""
    if why := servers.missing(request.param):
        pytest.skip(why)
    with servers.running(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running
