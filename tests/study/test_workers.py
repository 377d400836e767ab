"""Workers give the rows of one process, whatever happens to them; what cannot go on is one line, in time."""

import shutil
import signal
import socket
import subprocess
import sys
import time

import dask
import psutil
import pytest
from distributed import Client, LocalCluster
from study.shapes_of_tests import install
from support import assert_one_line
from threadpoolctl import threadpool_info

from ddtree import study_cluster, study_workers
from ddtree.errors import UsageError
from ddtree.study_recordings import open_recordings
from ddtree.study_replay import findable, replay
from ddtree.study_workers import MOST_WEIGHT, PIECES, cut

SWEEP = (["best_first", "oracle"], [4, 64], [3, 15])


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a process behind."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, alive = psutil.wait_procs([each for each in left if "resource_tracker" not in command_of(each)], 60)
    assert not alive


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def spawned():
    """The processes of workers that this one started."""
    return [each for each in psutil.Process().children(recursive=True) if "spawn_main" in command_of(each)]


def refused(match, *arguments, **options):
    """The one line that `replay` ends in."""
    with pytest.raises(UsageError, match=match) as caught:
        replay(*arguments, **options)
    assert_one_line(caught.value)
    return str(caught.value)


@pytest.fixture
def cluster():
    """Someone else's scheduler with one worker."""
    with LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        yield cluster


def test_workers_give_the_same_rows(recorded):
    """Fresh processes map the files themselves; few recordings are cut into pieces by setting."""
    arguments, heard = (recorded.recordings[:2], *SWEEP), []
    rows = replay(*arguments, workers=2, progress=lambda *step: heard.append(step))
    assert rows == replay(*arguments)
    assert heard[0] == (0, 16) and sum(done for done, _ in heard) == 16 and len(heard) > 4


def test_a_killed_worker_costs_nothing_but_time(recorded, monkeypatch, tmp_path):
    """Killed in the middle of a piece: its cells come from another, and the rows are those of one process."""
    install(monkeypatch, tmp_path)
    arguments, killed = (recorded.recordings, ["slow"], [2, 4, 8, 16]), []

    def progress(done, total):
        if done and not killed:
            killed.append(spawned()[0])
            killed[0].send_signal(signal.SIGKILL)

    rows = replay(*arguments, workers=2, progress=progress)
    assert killed and not killed[0].is_running()
    assert rows == replay(*arguments)


def test_a_piece_that_kills_workers_ends_in_one_line(recorded, monkeypatch, tmp_path):
    """After as many deaths as Dask allows, by default four; here two, for each takes a second."""
    install(monkeypatch, tmp_path)
    dask_allows = {"distributed.scheduler.allowed-failures": 1}
    with dask.config.set(dask_allows):
        said = refused("2 of them ended in the piece", recorded.recordings[:1], ["crashing"], [2], workers=2)
    assert f"prompt {recorded.prompts[0].id}, shape crashing, budget " in said


def test_a_fault_of_a_shape_comes_through(recorded, monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)
    with pytest.raises(ZeroDivisionError, match="a fault of the shape"):
        replay(recorded.recordings[:1], ["failing"], [2], workers=2)


def test_a_running_scheduler(recorded, request, monkeypatch):
    """Its rows are the same; its workers get one BLAS thread; other versions there are refused."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "2")
    cluster, arguments = request.getfixturevalue("cluster"), (recorded.recordings[:2], *SWEEP)
    assert replay(*arguments, scheduler=cluster.scheduler_address) == replay(*arguments)
    with Client(cluster) as client:
        (libraries,) = client.run(threadpool_info).values()
    assert {library["num_threads"] for library in libraries} == {1}
    for module in (study_cluster, study_workers):
        monkeypatch.setattr(module, "package_version", lambda name: "1.0")
    refused(
        "the scheduler has python 3.* this process 1.0; use", *arguments, scheduler=cluster.scheduler_address
    )
    monkeypatch.setattr(study_cluster, "ALIKE", ())
    refused("worker on .* it has ddtree .* this sweep 1.0", *arguments, scheduler=cluster.scheduler_address)


def test_a_worker_that_does_not_see_the_recordings(recorded, cluster, tmp_path):
    """A folder that is gone, or holds another file of that name, where the worker is."""
    shutil.copytree(recorded.directory, tmp_path / "seen")
    recordings = open_recordings(tmp_path / "seen")
    (tmp_path / "seen").rename(tmp_path / "unseen")
    said = refused("cannot be read here: each worker must", recordings, scheduler=cluster.scheduler_address)
    assert said.startswith(f"worker on {socket.gethostname()}: {recordings[0].path}")
    shutil.copytree(tmp_path / "unseen", tmp_path / "seen")
    shutil.copyfile(recordings[1].path, recordings[0].path)
    refused("is another file here: each worker must", recordings, scheduler=cluster.scheduler_address)


def test_a_worker_that_has_another_file_of_a_shape(recorded, tmp_path):
    (template := tmp_path / "two.json").write_text("[[0], [1]]")
    refused(
        "worker on .*: shape: fixed:.*: its code or file is not the one that the sweep began with",
        *(recorded.recordings, [f"fixed:{template}"], [2]),
        workers=2,
        progress=lambda done, total: template.write_text("[[0], [0, 0]]"),
    )


def test_a_relative_file_of_a_shape_is_found_from_another_folder(recorded, cluster, monkeypatch, tmp_path):
    """The scheduler's worker stands where it was started; rows name the shape as it was asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.json").write_text("[[0], [1]]")
    arguments = recorded.recordings, ["fixed:two.json", "best_first"], [2]
    rows = replay(*arguments, scheduler=cluster.scheduler_address)
    assert rows == replay(*arguments) and {row["shape"] for row in rows} == {"fixed:two.json", "best_first"}


def test_what_follows_a_colon_is_a_file_only_where_the_shape_reads_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("8", "two.json"):
        (tmp_path / name).write_text("[[0], [1]]")
    assert findable("fixed:two.json") == f"fixed:{tmp_path / 'two.json'}"
    for shape in ("beam:8", "fixed:medusa64", "best_first", "beam:3"):
        assert findable(shape) == shape


def test_a_scheduler_that_cannot_be_reached(recorded, monkeypatch):
    monkeypatch.setattr(study_cluster, "CONNECT", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (silent, closed)]
        for address in (*addresses, "", "nowhere", "ftp://127.0.0.1:1", "tcp://127.0.0.1:port"):
            start = time.perf_counter()
            refused(f"scheduler: {address} cannot be reached", recorded.recordings, scheduler=address)
            assert time.perf_counter() - start < 30  # a second or two; the machine may be busy


def test_workers_that_go_and_stay_away(recorded, request, monkeypatch, tmp_path):
    """All of them in the middle of a sweep; then there is none to begin with; then the scheduler goes too."""
    install(monkeypatch, tmp_path)
    cluster = request.getfixturevalue("cluster")  # its worker finds the shapes
    monkeypatch.setattr(study_cluster, "NO_WORKERS", 2)
    arguments, options = (
        (
            recorded.recordings,
            ["slow"],
            [1, 2, 3, 4, 6, 8, 12, 16],
        ),  # seconds, of which the workers see a part
        {"scheduler": cluster.scheduler_address},
    )
    refused("all are gone", *arguments, **options, progress=lambda done, total: done and cluster.scale(0))
    refused("has no worker, and none came in 2 s", *arguments, **options)
    cluster.scale(1)
    refused("^scheduler: ", *arguments, **options, progress=lambda done, total: done and cluster.close())


def test_without_dask_all_else_runs(recorded, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert len(replay(recorded.recordings[:1], *SWEEP)) == 8
    refused("distributed is not installed; pip install distributed, or", recorded.recordings, workers=2)


def test_dask_is_not_imported_before_it_is_needed():
    code = "import sys, ddtree.cli, ddtree.study_replay; sys.exit(bool({'dask', 'distributed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_pieces_hold_every_cell_once_and_in_order(workers):
    for weights in ([], [1], [5] * 100, [MOST_WEIGHT * 3, 1, 1], [100] * 10_000, [1] * 3):
        pieces = cut(weights, workers)
        assert [place for piece in pieces for place in piece] == list(range(len(weights)))
        assert len(pieces) >= min(len(weights), workers * PIECES) * 0.9 or max(weights) > sum(weights) / 2
        assert all(sum(weights[place] for place in piece[:-1]) <= MOST_WEIGHT for piece in pieces)
