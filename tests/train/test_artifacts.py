"""`Checkpoint` and `Result`, as users hold them."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import types
import uuid
from pathlib import Path

import pytest
from stores import FlakyFileSystem

from leyden.train import downloads
from leyden.train.artifacts import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus, Result
from leyden.train.storage import Storage


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    """Downloads land where the test can look."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def local(tmp_path) -> Path:
    folder = tmp_path / "local"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "b.txt").write_text("b")
    return folder


@pytest.fixture(params=["memory", "given"])
def remote(request, local) -> Checkpoint:
    options = {"filesystem": FlakyFileSystem()} if request.param == "given" else {}
    url = f"{'memory://' if request.param == 'memory' else ''}{uuid.uuid4().hex}/run"
    Storage(url, options).put_dir(local, "checkpoint_000000")
    return Checkpoint(f"{url}/checkpoint_000000", options.get("filesystem"))


def texts(folder: str) -> dict[str, str]:
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


ALL = {"a.txt": "a", "sub/b.txt": "b"}


def test_a_local_checkpoint_is_its_folder(local):
    checkpoint = Checkpoint.from_directory(local)
    with checkpoint.as_directory() as folder:
        assert folder == str(local)
    assert texts(folder) == ALL
    assert os.path.isabs(Checkpoint("x").path)
    assert checkpoint == Checkpoint(f"file://{local}")
    assert pickle.loads(pickle.dumps(checkpoint)) == checkpoint
    assert len({checkpoint, Checkpoint(local)}) == 1
    assert repr(checkpoint) == f"Checkpoint({str(local)!r})"
    assert checkpoint.filesystem.isdir(checkpoint.path)


def test_to_directory(local, tmp_path, temporary):
    checkpoint = Checkpoint(local)
    assert checkpoint.to_directory(tmp_path / "there") == str(tmp_path / "there")
    assert texts(str(tmp_path / "there")) == ALL
    folder = checkpoint.to_directory()
    assert Path(folder).parent == temporary
    assert texts(folder) == ALL
    assert checkpoint.to_directory() == folder


def test_a_remote_checkpoint_comes_and_goes(remote, temporary):
    with remote.as_directory() as folder:
        with remote.as_directory() as again:
            assert again == folder
        assert texts(folder) == ALL
    assert not os.path.exists(folder)
    kept = remote.to_directory()
    assert texts(kept) == ALL
    assert [path.name for path in temporary.iterdir() if path.is_dir()] == [os.path.basename(kept)]


def test_a_remote_checkpoint_that_changed_is_fetched_again(remote):
    first = remote.to_directory()
    remote.storage.write_atomic("a.txt", b"changed")
    second = remote.to_directory()
    assert texts(second)["a.txt"] == "changed"
    assert texts(first)["a.txt"] == "a"


def test_the_commit_record_is_no_file_of_the_user(remote):
    remote.storage.write_atomic(".commit.json", b"{}")
    with remote.as_directory() as folder:
        assert texts(folder) == ALL


@pytest.mark.parametrize("path", ["/nowhere/at/all", "memory://nowhere/at/all"])
def test_a_checkpoint_that_is_gone_is_named(path):
    checkpoint = Checkpoint(path)
    for use in (lambda: checkpoint.as_directory().__enter__(), checkpoint.to_directory):
        with pytest.raises(FileNotFoundError, match="is not there"):
            use()


def test_metadata(local):
    for checkpoint in (Checkpoint(local), Checkpoint(f"memory://{uuid.uuid4().hex}/c")):
        assert checkpoint.metadata == {}
        checkpoint.set_metadata({"classes": ["a"], "n": 1})
        checkpoint.update_metadata({"n": 2})
        assert checkpoint.get_metadata() == {"classes": ["a"], "n": 2}
        with pytest.raises(TypeError):
            checkpoint.set_metadata({"n": object()})
        assert checkpoint.metadata["n"] == 2


def test_a_failed_download_leaves_nothing(remote, temporary, monkeypatch):
    monkeypatch.setattr(Storage, "_get_file", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    for use in (remote.to_directory, lambda: remote.as_directory().__enter__()):
        with pytest.raises(PermissionError):
            use()
    assert [path for path in temporary.iterdir() if path.is_dir()] == []


# ---- several processes of one machine --------------------------------------------------------------------------------


def _hold(url: str, options: dict, temporary: str, entered, leave: str, results) -> None:
    tempfile.tempdir = temporary
    count = 0
    get = Storage.get_dir

    def counted(self, *args):
        nonlocal count
        count += 1
        return get(self, *args)

    Storage.get_dir = counted
    with Checkpoint(url, storage_options=options).as_directory() as folder:
        before = texts(folder)
        entered.release()
        while not os.path.exists(leave):
            time.sleep(0.01)
        results.put((count, before == texts(folder) == ALL))


def test_readers_share_one_download_and_the_last_one_takes_it_away(local, temporary, tmp_path):
    from fsspec.implementations.local import LocalFileSystem

    context = multiprocessing.get_context("fork")
    # Nothing that a killed reader could leave locked.
    entered, leave, results = context.Semaphore(0), tmp_path / "leave", context.Queue()
    # A given file system is never taken for a local folder.
    arguments = (str(local), {"filesystem": LocalFileSystem()}, str(temporary), entered, str(leave), results)
    readers = [context.Process(target=_hold, args=arguments) for _ in range(4)]
    for each in readers:
        each.start()
    for _ in readers:
        assert entered.acquire(timeout=30)
    assert len([path for path in temporary.iterdir() if path.is_dir()]) == 1
    readers[0].kill()  # the lock of a dead reader is nobody's
    readers[0].join()
    leave.touch()
    found = [results.get(timeout=30) for _ in readers[1:]]
    for each in readers:
        each.join()
    assert all(right for _, right in found)
    assert sum(count for count, _ in found) <= 1
    assert [path for path in temporary.iterdir() if path.is_dir()] == []


def test_processes_that_wait_for_one_folder_take_what_is_there(local, tmp_path):
    storage = Storage(local)
    target = str(tmp_path / "target")
    for _ in range(2):  # no one else at work: copied again, whatever somebody did there meanwhile
        downloads.to_folder(storage, target)
        assert texts(target) == ALL
        (Path(target) / "a.txt").write_text("mine")
    downloads.to_folder(storage, target)
    assert texts(target) == ALL


# ---- Result ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def result() -> Result:
    scores = [{"acc": 0.1, "val": {"loss": 3.0}}, {"acc": 0.9, "val": {"loss": float("nan")}}, {"acc": 0.5}]
    kept = [(Checkpoint(f"/c{number}"), metrics) for number, metrics in enumerate(scores)]
    rows = [{"acc": 0.1, "val": {"loss": 3.0}}, {"acc": 0.9}]
    return Result(scores[-1], kept[-1][0], None, "/run", kept, rows=lambda: rows)


def test_the_best_checkpoint(result):
    assert result.get_best_checkpoint("acc", "max") == Checkpoint("/c1")
    assert result.get_best_checkpoint("acc", "min") == Checkpoint("/c0")
    assert result.get_best_checkpoint("val/loss", "min") == Checkpoint("/c0")  # NaN is never best
    with pytest.raises(ValueError, match="val/loss"):
        result.get_best_checkpoint("loss", "min")
    with pytest.raises(ValueError, match="'min' or 'max'"):
        result.get_best_checkpoint("acc", "best")
    assert Result(None, None).get_best_checkpoint("acc", "max") is None


def test_rows_without_pandas(result, monkeypatch):
    assert result.metrics_history == [{"acc": 0.1, "val/loss": 3.0}, {"acc": 0.9}]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        _ = result.metrics_dataframe


def test_rows_as_a_data_frame(result, monkeypatch):
    pandas = pytest.importorskip("pandas", reason="Result.metrics_dataframe needs pandas")
    frame = result.metrics_dataframe
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["acc", "val/loss"]
    assert frame["acc"].tolist() == [0.1, 0.9]


def test_a_result_can_be_compared_and_read(result):
    assert "rows" not in repr(result)
    assert ReportedCheckpoint(Checkpoint("/c"), {}).status is ReportedCheckpointStatus.COMMITTED


def test_a_file_system_of_pyarrow_is_wrapped(monkeypatch):
    given = type("LocalFileSystem", (), {"__module__": "pyarrow._fs"})()
    fake = types.ModuleType("fsspec.implementations.arrow")
    fake.ArrowFSWrapper = lambda each: ("wrapped", each)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "fsspec.implementations.arrow", fake)
    assert Checkpoint("bucket/x", filesystem=given).filesystem == ("wrapped", given)
