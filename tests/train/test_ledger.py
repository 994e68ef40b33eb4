"""The truth of a run: what counts, what goes, and how it is found again. Faults are in test_ledger_faults."""

import json
import math
import time
import uuid
from pathlib import Path

import pytest

from leyden.train.artifacts import Result
from leyden.train.config import CheckpointConfig
from leyden.train.index import load_records
from leyden.train.ledger import Ledger
from leyden.train.messages import Metrics
from leyden.train.records import Record, by_score, checkpoint_folder, live_rows, score_of, to_drop
from leyden.train.runfile import RunExistsError, check_shared
from leyden.train.storage import Storage, StorageError


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request, tmp_path) -> Storage:
    if request.param == "s3":
        return Storage(f"s3://leyden/{uuid.uuid4().hex}", request.getfixturevalue("s3")[0])
    return Storage(tmp_path / "run" if request.param == "local" else f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights.pt").write_bytes(b"w" * 1000)
    return folder


def report(ledger: Ledger, index: int, values: dict, source: Path | None = None, attempt: int = 0, **kwargs) -> None:
    """One report of rank 0, with a checkpoint when there is a ``source``."""
    ledger.metrics(Metrics(attempt, 0, index, values, source is not None, float(index)))
    if source is not None:
        folder = kwargs.get("folder") or checkpoint_folder(index)
        files = ledger.storage.put_checkpoint(source, folder)
        ledger.commit(Record(index, folder, values, 1.0, attempt, 1, {0: files}))


def folders(storage: Storage) -> list[str]:
    return [name for name in storage.listdir(folders=True) if name != "logs"]


def keep(number: int | None = None, name: str | None = None, order: str = "max") -> CheckpointConfig:
    return CheckpointConfig(number, name, order)  # pyright: ignore[reportArgumentType]


def test_a_run_from_start_to_result(storage, source):
    ledger = Ledger.open(storage, name="digits", config=keep(2, "acc"), info={"num_workers": 2})
    assert (ledger.resumed, ledger.next_attempt(), ledger.latest()) == (False, 0, None)
    ledger.event("start", attempt=0, world=2)
    for index, accuracy in enumerate([0.5, 0.9, 0.7, 0.1]):
        report(ledger, index, {"acc": accuracy, "epoch": index}, source)
    report(ledger, 4, {"acc": 0.2, "epoch": 4})
    latest = ledger.latest()
    assert latest is not None
    assert latest.folder == "checkpoint_000003"
    result = ledger.finish(return_value={"a": [1]})
    assert folders(storage) == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    assert ".uploading" not in storage.files("checkpoint_000003")
    assert result.metrics == {"acc": 0.2, "epoch": 4}
    assert result.checkpoint is not None
    assert result.checkpoint.path.endswith("checkpoint_000003")
    assert [metrics["acc"] for _, metrics in result.best_checkpoints] == [0.1, 0.7, 0.9]
    again = Result.from_path(storage.url, storage_options=storage.options)
    assert again == result
    assert [row["epoch"] for row in again.metrics_history] == [0, 1, 2, 3, 4]
    events = [each["event"] for each in storage.read_lines("events.jsonl")]
    assert events == ["start", *["commit"] * 4]
    assert Ledger.load(storage).run["info"] == {"num_workers": 2}


def test_a_result_of_a_failed_run(storage):
    ledger = Ledger.open(storage)
    report(ledger, 0, {"loss": 1.0})
    ledger.status("errored")
    ledger.finish(error=ValueError("rank 3 ran out of memory"), return_value=object())
    result = Result.from_path(storage.url, storage_options=storage.options)
    assert "rank 3 ran out of memory" in str(result.error)
    assert (result.metrics, result.checkpoint, result.return_value) == ({"loss": 1.0}, None, None)


def test_no_run_is_no_result(storage):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        Result.from_path(storage.url, storage_options=storage.options)


# ---- which are kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "scores", "kept"),
    [
        (keep(), [1, 2, 3], [0, 1, 2]),
        (keep(1), [1, 2, 3], [2]),
        (keep(2), [1, 2, 3], [1, 2]),
        (keep(1, "s"), [1, 3, 2], [1, 2]),
        (keep(1, "s", "min"), [1, 3, 2], [0, 2]),
        (keep(1, "s"), [1, 2, 3], [2]),
        (keep(2, "s"), [math.nan, 1, 2, 0.5], [1, 2, 3]),
        (keep(2, "s"), [None, -5, -6], [1, 2]),
        (keep(1, "s"), [1, 1, 1], [2]),
        (keep(1, "s", "min"), [math.nan, math.nan], [1]),
        (keep(2, "s"), [math.inf, 1, -math.inf, 0], [0, 1, 3]),
    ],
)
def test_the_best_and_the_newest_are_kept(config, scores, kept):
    records: list[Record] = []
    for index, score in enumerate(scores):
        records.append(Record(index, checkpoint_folder(index), {} if score is None else {"s": score}))
        drop = to_drop(records, config)
        records = [each for each in records if each not in drop]
    assert [each.index for each in records] == kept


def test_the_best_comes_last():
    records = [Record(index, str(index), {"s": score}) for index, score in enumerate([2, math.nan, 3, 3, 1])]
    assert [each.index for each in by_score(records, keep(None, "s"))] == [1, 4, 0, 2, 3]
    assert [each.index for each in by_score(records, keep(None, "s", "min"))] == [1, 2, 3, 0, 4]
    assert [each.index for each in by_score(records, keep())] == [0, 1, 2, 3, 4]


def test_scores_are_found_by_name_and_by_path():
    metrics = {"a": {"b": 1}, "val/loss": 2.0, "text": "x", "yes": True}
    assert (score_of(metrics, "a/b"), score_of(metrics, "val/loss"), score_of(metrics, "yes")) == (1, 2, 1)
    assert (score_of(metrics, "text"), score_of(metrics, "a"), score_of(metrics, "a/b/c")) == (None, None, None)


def test_nan_survives_a_restart_and_the_next_ranking(storage, source):
    for start in range(2):
        ledger = Ledger.open(storage, config=keep(2, "loss", "min"))
        for index in range(3 * start, 3 * start + 3):
            report(ledger, index, {"loss": math.nan if index % 2 else float(index)}, source, attempt=start)
        ledger.close()
    found = Ledger.load(storage)
    assert [each.index for each in found.records] == [0, 2, 5]
    assert math.isnan(found.records[-1].metrics["loss"])
    assert [math.isnan(row["loss"]) for row in found.rows()] == [False, True, False, True, False, True]


# ---- restarts --------------------------------------------------------------------------------------------------------


def test_metrics_made_again_count_once(storage, source):
    ledger = Ledger.open(storage)
    for index in range(6):
        report(ledger, index, {"step": index, "try": 0}, source if index == 2 else None)
    ledger.event("start", attempt=1)
    for index in range(3, 8):  # from the checkpoint of report 2
        report(ledger, index, {"step": index, "try": 1}, attempt=1)
    result = ledger.finish()
    assert [(row["step"], row["try"]) for row in result.metrics_history] == [
        *((0, 0), (1, 0), (2, 0)),
        *((3, 1), (4, 1), (5, 1), (6, 1), (7, 1)),
    ]


def test_an_attempt_that_reports_nothing_takes_nothing_away():
    def row(attempt: int, base: int, index: int) -> dict:
        return {"attempt": attempt, "base": base, "rank": 0, "index": index, "values": {}}

    rows = [row(0, -1, 0), row(0, -1, 1), row(2, 0, 1), {"foreign": 1}]
    assert [(each["attempt"], each["index"]) for each in live_rows(rows)] == [(0, 0), (2, 1)]
    assert len(live_rows(rows[:2])) == 2


def test_another_driver_goes_on(storage, source):
    first = Ledger.open(storage, name="a")
    first.event("start", attempt=first.next_attempt())
    first.event("start", attempt=1)
    report(first, 0, {"x": 1}, source, attempt=1)
    report(first, 1, {"x": 2}, attempt=1)
    first.close()  # the driver is gone; the status is still "running"
    second = Ledger.open(storage, name="a")
    latest = second.latest()
    assert (second.resumed, second.next_attempt(), latest and latest.index) == (True, 2, 0)
    assert second.finish().metrics == {"x": 2}


@pytest.mark.parametrize(
    ("status", "resume", "allowed"),
    [
        (None, "auto", True),
        (None, "never", True),
        (None, "must", False),
        ("running", "auto", True),
        ("errored", "auto", True),
        ("aborted", "must", True),
        ("running", "never", False),
        ("finished", "auto", False),
        ("finished", "never", False),
        ("finished", "must", True),
    ],
)
def test_the_same_name_twice(storage, status, resume, allowed):
    if status is not None:
        first = Ledger.open(storage)
        report(first, 0, {"x": 1})
        first.status(status)
        first.finish()
    before = storage.files()
    if allowed:
        Ledger.open(storage, resume=resume).close()
    else:
        with pytest.raises(RunExistsError, match="resume="):
            Ledger.open(storage, resume=resume)
        assert {name: size for name, size in storage.files().items() if name != ".lock"} == {
            name: size for name, size in before.items() if name != ".lock"
        }


def test_one_driver_at_a_time(storage):
    ledger = Ledger.open(storage)
    with pytest.raises(RunExistsError, match="another process"):
        Ledger.open(storage)
    ledger.close()
    Ledger.open(storage).close()


def test_a_driver_that_could_not_begin_leaves_no_lock(storage):
    with pytest.raises(RunExistsError):
        Ledger.open(storage, resume="must")
    Ledger.open(storage).close()


def test_a_loaded_ledger_changes_nothing(storage, source):
    ledger = Ledger.open(storage)
    report(ledger, 0, {"x": 1}, source)
    storage.put_checkpoint(source, "checkpoint_000001")  # on its way
    before = storage.stamps()
    loaded = Ledger.load(storage)
    assert len(loaded.reported()) == 1
    assert loaded.best() == loaded.records[0]
    with pytest.raises(ValueError, match=r"Ledger\.open"):
        loaded.metrics(Metrics(0, 0, 1, {}, False, 0.0))
    assert storage.stamps() == before
    ledger.close()


def test_a_status_that_does_not_exist(storage):
    ledger = Ledger.open(storage)
    with pytest.raises(ValueError, match="aborted"):
        ledger.status("done")
    ledger.close()


def test_sweep_takes_what_nobody_committed_and_nothing_else(storage, source):
    ledger = Ledger.open(storage)
    report(ledger, 0, {"x": 1}, source, folder="epoch=0")
    report(ledger, 1, {"x": 1}, source)
    storage.put_checkpoint(source, "checkpoint_000002")
    storage.put_checkpoint(source, "epoch=2")
    storage.put_dir(source, "plots of mine")
    storage.put_dir(source, "logs")
    assert ledger.sweep() == ["checkpoint_000002", "epoch=2"]
    assert storage.listdir(folders=True) == ["checkpoint_000001", "epoch=0", "logs", "plots of mine"]
    ledger.close()


def test_nodes_that_do_not_share_the_folder_are_told_before_step_0(tmp_path):
    ledger = Ledger.open(Storage(tmp_path / "shared"))
    check_shared(Storage(tmp_path / "shared"))
    with pytest.raises(StorageError, match="s3://bucket/path"):
        check_shared(Storage(tmp_path / "of-this-node"), attempts=3, sleep=lambda _: None)
    ledger.close()


def test_ten_thousand_ranks(tmp_path, source):
    """A commit of that many parts, and their metrics: seconds would stall the controller."""
    ledger = Ledger.open(Storage(tmp_path / "run"), config=keep(1))
    begun = time.perf_counter()
    for rank in range(10_000):
        ledger.metrics(Metrics(0, rank, 0, {"loss": 1.0}, True, 0.0))
    parts = {rank: {} for rank in range(1, 10_000)}
    files = ledger.storage.put_checkpoint(source, "checkpoint_000000")
    ledger.commit(Record(0, "checkpoint_000000", {}, 1.0, 0, 10_000, {0: files, **parts}))
    assert time.perf_counter() - begun < 5
    ledger.close()
    assert load_records(ledger.storage)[0][0].world_size == 10_000


def test_the_ledger_stays_short(tmp_path, source):
    ledger = Ledger.open(Storage(tmp_path / "run"))
    for number in range(50):
        (source / f"part-{number}").write_text("x")
    report(ledger, 0, {"x": 1}, source)
    ledger.close()
    assert len(json.loads(ledger.storage.read("checkpoint_000000/.commit.json"))["parts"]["0"]) == 51
    assert len(ledger.storage.read("ledger.json")) < 600
