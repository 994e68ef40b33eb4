import csv
import pickle

import pytest
import torch
import yaml

from leyden.base.log import rank_zero_only
from leyden.loggers import CSVLogger, csv_logs


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


class FakeClock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(csv_logs, "monotonic", clock)
    return clock


def test_writes_what_lightning_writes(tmp_path):
    from lightning.pytorch.loggers import CSVLogger as Theirs

    for cls, folder in ((CSVLogger, "ours"), (Theirs, "theirs")):
        logger = cls(tmp_path / folder, name="exp", prefix="p")
        logger.log_hyperparams({"lr": 0.1, "sizes": (1, 2), "nested": {"a": None}})
        logger.log_metrics({"b": 1.5, "a": torch.tensor(2.0)}, step=0)
        logger.log_metrics({"a": 3}, step=99)  # a flush
        logger.log_metrics({"c": 0.1, "a": 4}, step=120)
        logger.log_metrics({"d": 7})
        logger.finalize("success")
    ours, theirs = (tmp_path / f / "exp" / "version_0" for f in ("ours", "theirs"))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    assert (ours / "hparams.yaml").read_text() == (theirs / "hparams.yaml").read_text()
    ours, theirs = rows(ours / "metrics.csv"), rows(theirs / "metrics.csv")
    assert ours[:3] == theirs[:3]
    assert ours[0] == {"p-a": "2.0", "p-b": "1.5", "p-c": "", "p-d": "", "step": "0"}
    # Without a step: ours counts all rows, Lightning those that are not on disk yet.
    assert ours[3]["step"] == "3"


def test_log_metrics_touches_no_file_before_the_flush_step(tmp_path, clock):
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    for step in range(9):
        logger.log_metrics({"x": step}, step)
    assert not path.exists()
    assert len(logger.experiment.metrics) == 9
    logger.log_metrics({"x": 9}, 9)
    assert len(rows(path)) == 10
    assert logger.experiment.metrics == []


def test_save_writes_at_most_once_a_second(tmp_path, clock):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"x": 0}, 0)
    logger.save()
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    assert len(rows(path)) == 1
    clock.now += 0.9
    logger.log_metrics({"x": 1}, 1)
    logger.save()
    assert len(rows(path)) == 1
    clock.now += 0.2
    logger.save()
    assert len(rows(path)) == 2
    logger.log_metrics({"x": 2}, 2)
    logger.experiment.save()
    assert len(rows(path)) == 3


@pytest.mark.parametrize("status", ["success", "failed"])
def test_finalize_writes_everything_and_logging_can_go_on(tmp_path, clock, status):
    logger = CSVLogger(tmp_path)
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    logger.save()
    logger.finalize(status)  # nothing was logged: no folder
    assert not path.parent.exists()
    for step in range(3):
        logger.log_metrics({"x": step}, step)
        logger.save()
    logger.finalize(status)
    assert [row["x"] for row in rows(path)] == ["0", "1", "2"]
    logger.log_metrics({"y": 3}, 3)
    logger.finalize(status)
    assert [(row["x"], row["y"]) for row in rows(path)] == [("0", ""), ("1", ""), ("2", ""), ("", "3")]


def test_metrics_of_an_earlier_run_are_kept(tmp_path):
    for value in (1, 2, 3):
        logger = CSVLogger(tmp_path, version=0)
        if value > 1:
            with pytest.warns(UserWarning, match=f"metrics-{value - 1}.csv"):
                logger.log_metrics({"x": value}, 0)
        else:
            logger.log_metrics({"x": value}, 0)
        logger.finalize("success")
    folder = tmp_path / "lightning_logs" / "version_0"
    found = {path.name: rows(path)[0]["x"] for path in folder.iterdir()}
    assert found == {"metrics.csv": "3", "metrics-1.csv": "1", "metrics-2.csv": "2"}


def test_tensors_are_read_when_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    value = torch.tensor([2.0])
    logger.log_metrics({"x": value}, 0)
    value += 1
    logger.finalize("success")
    assert rows(tmp_path / "lightning_logs/version_0/metrics.csv")[0]["x"] == "2.0"
    with pytest.raises(ValueError, match=r"can't log y: a tensor of shape \(2,\)"):
        logger.log_metrics({"y": torch.zeros(2)}, 1)


def test_remote_folder(clock):
    import fsspec

    logger = CSVLogger("memory://csv-test", name="exp")
    assert logger.log_dir == "memory://csv-test/exp/version_0"
    logger.log_hyperparams({"a": 1})
    for step in range(3):
        logger.log_metrics({"x": step, **({"y": 1} if step == 2 else {})}, step)
        logger.save()
    logger.finalize("success")
    with fsspec.open("memory://csv-test/exp/version_0/metrics.csv", "rt", newline="") as file:
        assert [row["x"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    with fsspec.open("memory://csv-test/exp/version_0/hparams.yaml") as file:
        assert yaml.safe_load(file) == {"a": 1}
    assert CSVLogger("memory://csv-test", name="exp").version == 1


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"x": 1}, 0)
    logger.log_hyperparams({"a": 1})
    logger.experiment.anything("goes")
    logger.experiment[0] = 1
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_pickle_and_bad_arguments(tmp_path):
    logger = CSVLogger(tmp_path, version=4)
    logger.log_metrics({"x": 1}, 0)
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    assert copy._experiment is None
    with pytest.raises(ValueError, match="flush_logs_every_n_steps=0 must be 1 or more"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)


def test_log_metrics_is_cheap(tmp_path):
    import sys

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10**9)
    logger.log_metrics({"a": 1.0}, 0)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    metrics = {f"m{i}": 1.0 for i in range(20)}
    sys.setprofile(count)
    logger.log_metrics(metrics, 1)
    sys.setprofile(None)
    assert calls <= 5  # not a call per value
