"""Kills, cuts, deletions, full disks, stores that fail: the ledger loads, and names nothing that isn't whole."""

import errno
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from stores import FlakyFileSystem, no_wait
from test_ledger import folders, keep, report

from leyden.train.artifacts import Result
from leyden.train.index import read_commit, what_is_missing
from leyden.train.ledger import Ledger
from leyden.train.records import checkpoint_folder
from leyden.train.runfile import RunExistsError
from leyden.train.storage import Storage


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(3):
        (folder / f"part-{number}").write_bytes(os.urandom(20_000))
    return folder


@pytest.fixture
def storage(tmp_path) -> Storage:
    return Storage(tmp_path / "run")


def assert_whole(ledger: Ledger) -> None:
    for record in ledger.records:
        commit = read_commit(ledger.storage, record.folder)
        assert commit is not None, record
        assert len(commit.files) == 3
        assert what_is_missing(commit, ledger.storage.files(record.folder)) == ""


def filled(storage: Storage, source: Path, number: int = 3, **kwargs) -> Ledger:
    ledger = Ledger.open(storage, **kwargs)
    for index in range(number):
        report(ledger, index, {"x": index}, source)
    return ledger


# ---- the driver is killed --------------------------------------------------------------------------------------------


def _train(storage: Storage, source: Path, ready: int) -> None:
    """What a driver and its rank do, until somebody ends it."""
    ledger = Ledger.open(storage, config=keep(2, "x"))
    latest = ledger.latest()
    attempt, index = ledger.next_attempt(), 0 if latest is None else latest.index + 1
    ledger.event("start", attempt=attempt)
    os.write(ready, b"x")
    while True:
        report(ledger, index, {"x": index % 5}, source, attempt=attempt)
        os.write(ready, bytes([index % 256]))
        index += 1


@pytest.mark.slow
def test_kill_9_at_any_moment(storage, source):
    """100 drivers, each killed somewhere in uploads, commits and deletions, each going on from the one before."""
    waits = random.Random(0)
    newest = -1
    for round_ in range(100):
        ready, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _train(storage, source, write)
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(ready, 1) == b"x", f"driver {round_} could not begin"
        done = [os.read(ready, 1)[0] for _ in range(waits.randrange(3))]
        time.sleep(waits.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        ledger = Ledger.load(storage)
        assert_whole(ledger)
        latest = ledger.latest()
        found = -1 if latest is None else latest.index
        assert found >= newest + len(done), "a committed checkpoint was lost"
        newest = found
    assert newest >= 50
    ledger = Ledger.open(storage, config=keep(2, "x"))
    ledger.close()
    assert folders(storage) == [each.folder for each in ledger.records]
    assert len(ledger.records) <= 3
    steps = [row["x"] for row in ledger.rows()]
    assert steps[: newest + 1] == [index % 5 for index in range(newest + 1)], "a report is missing, or there twice"


def test_a_killed_driver_lets_the_next_one_in(storage):
    code = "import sys, time; from leyden.train.ledger import Ledger; from leyden.train.storage import Storage\n"
    code += "Ledger.open(Storage(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, storage.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(RunExistsError, match="another process"):
        Ledger.open(storage)
    child.kill()
    child.wait()
    child.stdout.close()
    Ledger.open(storage).close()


# ---- files are damaged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b'{"checkpoints": 3}', b"\x00" * 100, None])
@pytest.mark.parametrize("copies", [("ledger.json",), ("ledger.json.bak",), ("ledger.json", "ledger.json.bak")])
def test_a_damaged_ledger_is_read_from_its_copy_or_rebuilt(storage, source, damage, copies):
    ledger = filled(storage, source, config=keep(2))
    ledger.close()
    for name in copies:
        if damage is None:
            storage.delete(name)
        else:
            Path(storage.url_of(name)).write_bytes(damage)
    found = Ledger.load(storage)
    assert found.records == ledger.records
    again = Ledger.open(storage, config=keep(2))
    report(again, 3, {"x": 3}, source, attempt=1)
    again.close()
    assert folders(storage) == ["checkpoint_000002", "checkpoint_000003"]


def test_the_ledger_cut_at_every_length(storage, source):
    ledger = filled(storage, source)
    ledger.close()
    whole = storage.read("ledger.json")
    for length in range(0, len(whole), 61):
        for name in ("ledger.json", "ledger.json.bak"):
            Path(storage.url_of(name)).write_bytes(whole[:length])
        assert Ledger.load(storage).records == ledger.records


def test_a_damaged_run_json(storage, source):
    ledger = filled(storage, source)
    ledger.status("finished")
    ledger.close()
    Path(storage.url_of("run.json")).write_bytes(b'{"stat')
    assert Ledger.load(storage).run["status"] == "finished"
    Path(storage.url_of("run.json.bak")).write_bytes(b"")
    found = Ledger.load(storage)
    assert (found.run["status"], len(found.records)) == ("running", 3)


def test_a_commit_record_from_the_future_is_left_alone(storage, source, caplog):
    filled(storage, source).close()
    path = Path(storage.url_of("checkpoint_000002/.commit.json"))
    path.write_text(path.read_text().replace('"format":1', '"format":99'))
    assert [each.index for each in Ledger.load(storage).records] == [0, 1]


# ---- checkpoints are damaged -----------------------------------------------------------------------------------------


def half_uploaded(folder: Path) -> None:
    (folder / ".commit.json").unlink()


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


def without_a_file(folder: Path) -> None:
    (folder / "part-1").unlink()


def cut(folder: Path) -> None:
    with open(folder / "part-2", "r+b") as file:
        file.truncate(100)


def torn_record(folder: Path) -> None:
    with open(folder / ".commit.json", "r+b") as file:
        file.truncate(50)


@pytest.mark.parametrize("damage", [half_uploaded, deleted, without_a_file, cut, torn_record])
def test_a_damaged_checkpoint_is_left_out_with_a_warning(storage, source, damage, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)
    caplog.set_level(logging.INFO, logger="leyden")
    ledger = filled(storage, source)
    ledger.close()
    damage(Path(storage.url_of("checkpoint_000002")))
    with caplog.at_level("WARNING", "leyden"):
        found = Ledger.load(storage)
    assert [each.index for each in found.records] == [0, 1]
    assert "checkpoint_000002" in caplog.text
    result = Result.from_path(storage.url)
    assert result.checkpoint is not None
    assert result.checkpoint.path.endswith("000001")
    resumed = Ledger.open(storage)
    assert folders(storage) == ["checkpoint_000000", "checkpoint_000001"]
    report(resumed, 2, {"x": "again"}, source, attempt=1)  # the same number, in a folder that is new
    resumed.close()
    assert [each.index for each in Ledger.load(storage).records] == [0, 1, 2]


@pytest.mark.parametrize("damage", [half_uploaded, deleted, without_a_file, cut, torn_record])
def test_a_checkpoint_damaged_during_the_run_is_not_resumed_from(storage, source, damage):
    ledger = filled(storage, source)
    ledger._janitor.wait()
    damage(Path(storage.url_of("checkpoint_000002")))
    latest = ledger.latest()
    assert latest is not None
    assert latest.index == 1
    ledger.sweep()
    report(ledger, 2, {"x": 2}, source, attempt=1)
    ledger.close()
    assert [each.index for each in Ledger.load(storage).records] == [0, 1, 2]
    assert_whole(Ledger.load(storage))


def test_a_checkpoint_deleted_by_somebody_is_no_error_when_its_turn_comes(storage, source):
    ledger = filled(storage, source, 1, config=keep(1))
    ledger._janitor.wait()
    shutil.rmtree(storage.url_of("checkpoint_000000"))
    report(ledger, 1, {"x": 1}, source)
    ledger.close()
    assert folders(storage) == ["checkpoint_000001"]


def test_a_commit_that_the_ledger_did_not_hear_of_counts(storage, source):
    """Killed between the commit record and the ledger."""
    ledger = filled(storage, source, 2, config=keep(1))
    before = storage.read("ledger.json")
    report(ledger, 2, {"x": 2}, source)
    ledger.close()
    for name in ("ledger.json", "ledger.json.bak"):
        storage.write_atomic(name, before)
    assert [each.index for each in Ledger.load(storage).records if each.index == 2] == [2]


def test_a_deletion_that_was_cut_off_is_not_undone(storage, source, tmp_path):
    """Killed between the ledger and the deletion: the old checkpoint is whole, and given up all the same."""
    ledger = filled(storage, source, 2)
    shutil.copytree(storage.url_of("checkpoint_000000"), tmp_path / "copy")
    ledger.close()
    pruned = Ledger.open(storage, config=keep(1))
    report(pruned, 2, {"x": 2}, source, attempt=1)
    pruned.close()
    shutil.copytree(tmp_path / "copy", storage.url_of("checkpoint_000000"))
    assert [each.index for each in Ledger.load(storage).records] == [2]
    Ledger.open(storage, config=keep(1)).close()
    assert folders(storage) == ["checkpoint_000002"]


def test_a_copy_that_somebody_made_is_theirs(storage, source):
    filled(storage, source, 2).close()
    shutil.copytree(storage.url_of("checkpoint_000001"), storage.url_of("the good one"))
    for name in ("ledger.json", "ledger.json.bak"):
        storage.delete(name)
    ledger = Ledger.open(storage, config=keep(1))
    report(ledger, 2, {"x": 2}, source, attempt=1)
    ledger.close()
    assert folders(storage) == ["checkpoint_000002", "the good one"]


def test_a_deletion_that_fails_is_a_warning_and_is_tried_again(storage, source, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)
    caplog.set_level(logging.INFO, logger="leyden")
    ledger = filled(storage, source, 1, config=keep(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not yours")))
        report(ledger, 1, {"x": 1}, source)
        ledger._janitor.wait()
    assert "not yours" in caplog.text
    ledger.close()
    Ledger.open(storage, config=keep(1)).close()
    assert folders(storage) == ["checkpoint_000001"]


# ---- full disk, failing store ----------------------------------------------------------------------------------------


def test_a_full_disk_loses_nothing_that_was_committed(storage, source):
    ledger = filled(storage, source, 2, config=keep(5))
    records = list(ledger.records)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            report(ledger, 2, {"x": 2}, source)
        assert caught.value.errno == errno.EFBIG
        ledger.status("errored")  # a warning: there is no room to say so
        assert Ledger.load(storage).records == records
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ledger.sweep()
    report(ledger, 3, {"x": 3}, source)
    ledger.close()
    found = Ledger.load(storage)
    assert [each.index for each in found.records] == [0, 1, 3]
    assert [row["x"] for row in found.rows()] == [0, 1, 2, 3]  # not even the metrics of the one that failed


def test_where_only_the_ledger_cannot_be_written_nothing_is_given_up(storage, source):
    ledger = filled(storage, source, 2, config=keep(1))
    files = storage.put_checkpoint(source, "checkpoint_000002")
    from leyden.train.records import Record

    write, denied = storage.write_atomic, []

    def only_commits(rel: str, data: bytes) -> None:
        if rel.startswith("ledger"):
            denied.append(rel)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(rel, data)

    storage.write_atomic = only_commits
    ledger.commit(Record(2, "checkpoint_000002", {}, 1.0, 0, 1, {0: files}))
    assert denied
    assert [each.index for each in Ledger.load(Storage(storage.url)).records] == [1, 2]
    storage.write_atomic = write
    report(ledger, 3, {"x": 3}, source)
    ledger.close()
    assert [each.index for each in Ledger.load(storage).records] == [3]


def test_a_store_that_fails_for_a_while(source):
    filesystem = FlakyFileSystem()
    storage = Storage(f"{uuid.uuid4().hex}/run", {"filesystem": filesystem, "retry": no_wait(8)})
    ledger = Ledger.open(storage, config=keep(2))
    for index in range(12):
        filesystem.error = random.Random(index).choice(
            [OSError(errno.EIO, "x"), ConnectionResetError(), TimeoutError()]
        )
        filesystem.fail = 5
        report(ledger, index, {"x": index}, source)
    filesystem.fail = 0
    ledger.close()
    found = Ledger.load(storage)
    assert [each.index for each in found.records] == [10, 11]
    assert folders(storage) == [checkpoint_folder(10), checkpoint_folder(11)]
    assert [row["x"] for row in found.rows()] == list(range(12))
    assert_whole(found)


def test_a_store_that_stays_away_keeps_what_was_committed(source):
    filesystem = FlakyFileSystem()
    storage = Storage(f"{uuid.uuid4().hex}/run", {"filesystem": filesystem, "retry": no_wait(3)})
    ledger = Ledger.open(storage)
    report(ledger, 0, {"x": 0}, source)
    filesystem.error, filesystem.fail = ConnectionError("the store is away"), -1
    with pytest.raises(ConnectionError):
        report(ledger, 1, {"x": 1}, source)
    ledger.finish(error=RuntimeError("storage"))
    filesystem.fail = 0
    assert [each.index for each in Ledger.load(storage).records] == [0]
