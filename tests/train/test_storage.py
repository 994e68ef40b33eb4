"""One suite for local folders, a file system of fsspec, and a real S3 server; then the faults."""

import errno
import os
import pickle
import resource
import shutil
import threading
import uuid
from pathlib import Path

import pytest
from stores import FlakyFileSystem, no_wait

from leyden.train.retry import RetryPolicy
from leyden.train.storage import Storage, StorageError


@pytest.fixture(params=["local", "memory", "given", "s3"])
def storage(request, tmp_path) -> Storage:
    name = uuid.uuid4().hex
    if request.param == "local":
        return Storage(tmp_path / "run")
    if request.param == "memory":
        return Storage(f"memory://{name}/run")
    if request.param == "given":
        return Storage(f"{name}/run", {"filesystem": FlakyFileSystem()})
    return Storage(f"s3://leyden/{name}/run", request.getfixturevalue("s3")[0])


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder of 12 files, in folders."""
    folder = tmp_path / "source"
    for number in range(12):
        path = folder / ("deep/er" if number % 3 == 0 else "") / f"part-{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(number * 100))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_objects(storage):
    assert not storage.exists("a/b.json")
    assert storage.listdir() == []
    storage.write_atomic("a/b.json", b"one")
    storage.write_atomic("a/b.json", b"two")
    assert storage.read("a/b.json") == b"two"
    assert storage.exists("a/b.json")
    assert storage.exists("a")
    assert storage.is_dir("a")
    assert not storage.is_dir("a/b.json")
    storage.write_atomic("c.json", b"")
    assert storage.listdir() == ["a", "c.json"]
    assert storage.listdir(folders=True) == ["a"]
    assert storage.files() == {"a/b.json": 3, "c.json": 0}
    storage.delete("c.json")
    storage.delete("c.json")
    assert storage.listdir() == ["a"]
    with pytest.raises(FileNotFoundError):
        storage.read("c.json")


def test_folders_go_there_and_back(storage, source, tmp_path):
    sizes = storage.put_dir(source, "x")
    assert sizes == {name: len(data) for name, data in content(source).items()}
    assert storage.files("x") == sizes
    assert storage.get_dir("x", tmp_path / "back") == sizes
    assert content(tmp_path / "back") == content(source)
    storage.delete_tree("x")
    storage.delete_tree("x")
    assert not storage.exists("x")
    with pytest.raises(FileNotFoundError, match="not there"):
        storage.get_dir("x", tmp_path / "again")


def test_ranks_fill_one_folder(storage, tmp_path):
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / f"shard-{rank}").write_text(str(rank))
        storage.put_checkpoint(tmp_path / str(rank), "checkpoint_000000")
    names = set(storage.files("checkpoint_000000")) - {".uploading"}
    assert names == {"shard-0", "shard-1", "shard-2"}
    storage.write_atomic("checkpoint_000000/.commit.json", b"{}")
    with pytest.raises(StorageError, match="committed already"):
        storage.put_checkpoint(tmp_path / "0", "checkpoint_000000")


def test_logs_are_continued(storage):
    for number in range(3):
        lines = storage.open_lines("m.jsonl")
        lines.append({"n": number})
        lines.close()
    assert storage.read_lines("m.jsonl") == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert storage.read_lines("other.jsonl") == []


def test_it_can_be_pickled_and_checked(storage):
    storage.check()
    assert storage.listdir() == []
    again = pickle.loads(pickle.dumps(storage))
    assert again.url == storage.url
    if not isinstance(storage.options.get("filesystem"), FlakyFileSystem):
        again.write_atomic("a", b"1")
        assert storage.read("a") == b"1"


def test_what_others_wrote_is_seen_at_once(storage):
    other = pickle.loads(pickle.dumps(storage))
    assert storage.listdir() == []
    other.write_atomic("x/1", b"1")
    assert storage.listdir() == ["x"]
    assert storage.files() == {"x/1": 1}
    other.write_atomic("x/2", b"22")
    assert storage.exists("x/2")
    assert storage.files("x") == {"1": 1, "2": 2}


def test_a_folder_in_place_is_only_listed(tmp_path, source):
    storage = Storage(tmp_path)
    assert storage.put_dir(source, "source") == storage.files("source")


def test_links_are_followed_but_not_in_circles(tmp_path, source):
    storage = Storage(tmp_path / "run")
    (source / "last").symlink_to(source / "part-1.bin")
    assert "last" in storage.put_dir(source, "x")
    assert not (tmp_path / "run/x/last").is_symlink()
    (source / "circle").symlink_to(source)
    with pytest.raises(OSError, match="holds it"):
        storage.put_dir(source, "y")
    (tmp_path / "run/x/nothing").symlink_to(tmp_path / "nowhere")
    assert "nothing" not in storage.files()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "logs", "a\\b"])
def test_folders_that_are_no_checkpoints_are_refused(tmp_path, source, name):
    with pytest.raises(ValueError, match="checkpoint_dir_name"):
        Storage(tmp_path / "run").put_checkpoint(source, name)


# ---- faults ----------------------------------------------------------------------------------------------------------


class Throttled(Exception):
    """As botocore tells it."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def _caused_by(cause: Exception) -> Exception:
    error = PermissionError(errno.EACCES, "no")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "x"), OSError(errno.EBUSY, "x"), ConnectionResetError(), TimeoutError(), Throttled(503)],
)
def test_errors_that_pass_are_waited_out(error, source, tmp_path):
    filesystem = FlakyFileSystem()
    waits: list[float] = []
    policy = RetryPolicy(attempts=5, first_delay_s=1.0, jitter=0.0, max_delay_s=3.0, sleep=waits.append)
    storage = Storage(f"{uuid.uuid4().hex}/run", {"filesystem": filesystem, "retry": policy})
    filesystem.error, filesystem.fail = error, 4
    storage.write_atomic("a", b"1")
    assert waits == [1.0, 2.0, 3.0, 3.0]
    filesystem.fail = 3
    storage.put_dir(source, "x")
    filesystem.fail = 3
    storage.get_dir("x", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    filesystem.fail = 5
    with pytest.raises(type(error)):
        storage.read("a")


@pytest.mark.parametrize("error", [PermissionError(), FileNotFoundError(), OSError(errno.ENOSPC, "x"), Throttled(403)])
def test_errors_that_stay_are_raised_at_once(error):
    filesystem = FlakyFileSystem()
    storage = Storage(f"{uuid.uuid4().hex}/run", {"filesystem": filesystem, "retry": no_wait()})
    filesystem.error, filesystem.fail = error, -1
    with pytest.raises(type(error)):
        storage.write_atomic("a", b"1")
    assert filesystem.calls == 1


def test_the_cause_of_an_error_counts_too():
    assert RetryPolicy().is_transient(_caused_by(Throttled(500)))
    assert not RetryPolicy().is_transient(_caused_by(Throttled(404)))
    with pytest.raises(ValueError, match="attempts=0"):
        RetryPolicy(attempts=0)


def test_the_policy_can_be_widened():
    class Stubborn(RetryPolicy):
        def is_transient(self, error: BaseException) -> bool:
            return isinstance(error, PermissionError) or super().is_transient(error)

    filesystem = FlakyFileSystem()
    storage = Storage("p/run", {"filesystem": filesystem, "retry": Stubborn(first_delay_s=0, sleep=lambda _: None)})
    filesystem.error, filesystem.fail = PermissionError(), 3
    storage.write_atomic("a", b"1")


def test_one_failing_file_stops_the_others(tmp_path):
    filesystem = FlakyFileSystem()
    storage = Storage("q/run", {"filesystem": filesystem, "retry": no_wait()}, parallel=2)
    source = tmp_path / "many"
    source.mkdir()
    for number in range(200):
        (source / str(number)).write_text("x")
    filesystem.error, filesystem.fail = PermissionError("not yours"), -1
    with pytest.raises(PermissionError):
        storage.put_dir(source, "x")
    assert filesystem.calls < 20


def test_a_file_that_is_too_big_for_the_disk_leaves_what_was_there(tmp_path, source):
    storage = Storage(tmp_path / "run")
    storage.put_dir(source, "x")
    before = content(tmp_path / "run")
    (source / "part-1.bin").write_bytes(b"y" * 5_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            storage.put_dir(source, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(tmp_path / "run") == before


def test_a_source_that_goes_away_is_named(tmp_path, source):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Storage(tmp_path / "run").put_dir(source / "nothing", "x")


def test_a_place_that_cannot_be_written_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"RunConfig\(storage_path"):
        Storage(tmp_path / "file" / "run").check()
    filesystem = FlakyFileSystem()
    filesystem.error, filesystem.fail = PermissionError("403"), -1
    with pytest.raises(StorageError, match=r"credentials and endpoint in RunConfig\(storage_options"):
        Storage("b/run", {"filesystem": filesystem, "retry": no_wait()}).check()


def test_an_unknown_or_missing_file_system_is_named():
    with pytest.raises(StorageError, match="wrong"):
        Storage("wrong://x/run").check()


def test_deleting_while_another_deletes(tmp_path):
    storage = Storage(tmp_path)
    for number in range(80):
        storage.write_atomic(f"x/{number % 8}/{number}", b"")
    threads = [threading.Thread(target=storage.delete_tree, args=("x",)) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert storage.listdir() == []
    with pytest.raises(ValueError, match="never"):
        storage.delete_tree("")


def test_s3_says_slow_down_for_a_while(s3, source, tmp_path):
    options, interruption = s3
    storage = Storage(f"s3://leyden/{uuid.uuid4().hex}", {**options, "retry": RetryPolicy(first_delay_s=0.05)})
    storage.filesystem.retries = 1  # s3fs's own, so that ours are what is tested
    interruption.fail = 4
    assert len(storage.put_dir(source, "x")) == 12
    interruption.fail = 4
    storage.get_dir("x", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert interruption.refused >= 8


def test_s3_a_bucket_that_is_not_there(s3):
    with pytest.raises(StorageError, match="check that the bucket"):
        Storage("s3://nowhere/run", {**s3[0], "retry": no_wait(2)}).check()


def test_s3_a_big_file_in_parts(s3, tmp_path):
    (tmp_path / "big").mkdir()
    data = os.urandom(1 << 20) * 60  # over the 50 MiB from which s3fs sends parts
    (tmp_path / "big" / "weights").write_bytes(data)
    storage = Storage(f"s3://leyden/{uuid.uuid4().hex}", s3[0])
    assert storage.put_dir(tmp_path / "big", "x") == {"weights": len(data)}
    storage.get_dir("x", tmp_path / "back")
    assert (tmp_path / "back" / "weights").read_bytes() == data


def test_s3_after_a_fork(s3):
    """A rank is forked from a process that may have used the store."""
    storage = Storage(f"s3://leyden/{uuid.uuid4().hex}", s3[0])
    storage.write_atomic("a", b"1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            storage.write_atomic("b", storage.read("a") + b"2")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.read("b") == b"12"


def test_a_full_disk(tmp_path, source):
    """A real one, of one megabyte, where this process may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or os.system(f"mount -t tmpfs -o size=1m none {disk} 2>/dev/null") != 0:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        storage = Storage(disk / "run")
        storage.put_dir(source, "x")
        (source / "huge").write_bytes(b"h" * 3_000_000)
        with pytest.raises(OSError, match="No space") as caught:
            storage.put_dir(source, "y")
        assert caught.value.errno == errno.ENOSPC
        del caught
        (source / "huge").unlink()
        assert {name: (disk / "run/x" / name).read_bytes() for name in storage.files("x")} == content(source)
    finally:
        os.system(f"umount -l {disk}")
