import pickle
from argparse import Namespace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leyden.loggers import TensorBoardLogger, tensorboard


def events(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def scalars(folder):
    read = events(folder)
    return {tag: [(e.step, pytest.approx(e.value)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def use(cls, folder, **kwargs):
    logger = cls(folder, name="exp", **kwargs)
    logger.log_hyperparams({"lr": 0.1, "opt": {"name": "sgd", "betas": (0.9, 0.99)}, "act": torch.nn.ReLU})
    for step in range(5):
        logger.log_metrics({"loss": 1.0 / (step + 1), "n": step, "t": torch.tensor([step * 2.0])}, step)
        logger.save()
    logger.log_metrics({"loss": 9.0}, 100)
    logger.finalize("success")
    return logger


@pytest.mark.parametrize("kwargs", [{}, {"prefix": "p"}, {"default_hp_metric": False}, {"sub_dir": "s"}], ids=str)
def test_event_files_say_what_lightnings_say(tmp_path, kwargs):
    from lightning.pytorch.loggers import TensorBoardLogger as Theirs

    ours, theirs = use(TensorBoardLogger, tmp_path / "a", **kwargs), use(Theirs, tmp_path / "b", **kwargs)
    mine = scalars(ours.log_dir)
    assert mine == scalars(theirs.log_dir)
    assert len(mine[f"{kwargs['prefix']}-loss" if "prefix" in kwargs else "loss"]) == 6
    plugins = [sorted(events(x.log_dir).summary_metadata) for x in (ours, theirs)]
    assert plugins[0] == plugins[1]
    values = [
        {k: v.string_value or v.number_value for k, v in _hparams(x.log_dir).items()}
        if "default_hp_metric" not in kwargs
        else {}
        for x in (ours, theirs)
    ]
    assert values[0] == values[1]
    assert set(ours.hparams) == {"lr", "opt", "act"}
    text = (tmp_path / "a" / "exp" / "version_0" / kwargs.get("sub_dir", "") / "hparams.yaml").read_text()
    assert yaml.full_load(text) == {
        "lr": 0.1,
        "opt": {"name": "sgd", "betas": (0.9, 0.99)},
        "act": "torch.nn.modules.activation.ReLU",
    }


def _hparams(folder):
    from tensorboard.plugins.hparams import plugin_data_pb2

    metadata = events(folder).summary_metadata["_hparams_/session_start_info"]
    return plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams


def test_rows_are_held_until_save_is_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tensorboard, "monotonic", lambda: now[0])
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_metrics({"x": 0.0}, 0)
    logger.save()
    assert len(scalars(logger.log_dir)["x"]) == 1
    for step in range(1, 4):
        now[0] += 0.3
        logger.log_metrics({"x": 0.0}, step)
        logger.save()
    assert len(logger._rows) == 3
    now[0] += 0.2
    logger.save()
    assert logger._rows == []
    assert len(scalars(logger.log_dir)["x"]) == 4
    # Using the writer keeps the order of events.
    logger.log_metrics({"x": 0.0}, 4)
    logger.experiment.add_text("note", "hello")
    assert logger._rows == []


def test_values_keep_the_time_of_logging(tmp_path, monkeypatch):
    times = iter([50.0, 60.0])
    monkeypatch.setattr(tensorboard, "time", lambda: next(times))
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"x": 1.0}, 0)
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize("failed")
    assert [e.wall_time for e in events(logger.log_dir).Scalars("x")] == [50.0, 60.0]


def test_held_rows_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "_MOST_ROWS_HELD", 10)
    logger = TensorBoardLogger(tmp_path)
    for step in range(25):
        logger.log_metrics({"x": 1.0}, step)
    assert len(logger._rows) == 5
    logger.finalize("success")
    assert len(scalars(logger.log_dir)["x"]) == 25


def test_logging_goes_on_after_finalize(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"x": float(step)}, step)
        logger.finalize("success")
    assert [step for step, _ in scalars(logger.log_dir)["x"]] == [0, 1, 2]


def test_dict_values_and_bad_values(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"both": {"a": 1.0, "b": 2.0}, "flag": True}, 1)
    logger.finalize("success")
    assert scalars(logger.log_dir)["flag"] == [(1, 1.0)]
    assert {p.name for p in (tmp_path / "lightning_logs/version_0").iterdir()} >= {"both_a", "both_b", "hparams.yaml"}
    for bad in ("text", torch.zeros(2), object()):
        with pytest.raises(ValueError, match="can't log y"):
            logger.log_metrics({"y": bad}, 0)


def test_hyperparameters_of_every_form(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams(Namespace(a=1))
    assert logger._experiment is None  # without a metric there is nothing to show
    logger.log_hyperparams({"b": [{"c": 1}], "t": torch.zeros(2, 2)}, metrics={"acc": 0.5})
    logger.log_hyperparams({"d": 2}, metrics=3.0)
    logger.finalize("success")
    assert logger.hparams.keys() == {"a", "b", "t", "d"}
    assert scalars(logger.log_dir) == {"acc": [(0, 0.5)], "hp_metric": [(0, 3.0)]}


def test_hparams_file_is_written_once_and_also_when_empty(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    path = tmp_path / "lightning_logs/version_0/hparams.yaml"
    assert path.read_text() == "{}\n"
    path.write_text("mine: 1\n")
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize("success")
    assert path.read_text() == "mine: 1\n"


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("LEYDEN_TEST_DIR", "/somewhere")
    assert TensorBoardLogger("$LEYDEN_TEST_DIR", "e", 1).log_dir == "/somewhere/e/version_1"
    assert not TensorBoardLogger("~/logs", "e", 1).log_dir.startswith("~")


def test_graph(tmp_path, recwarn):
    import leyden as L

    class Net(L.LightningModule):
        def __init__(self, example):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)
            self.example_input_array = example

        def forward(self, x):
            return self.layer(x)

    off = TensorBoardLogger(tmp_path / "off")
    off.log_graph(Net(torch.zeros(1, 3)))
    assert off._experiment is None
    logger = TensorBoardLogger(tmp_path / "on", log_graph=True)
    with pytest.warns(UserWarning, match="`example_input_array` is not set"):
        logger.log_graph(Net(None))
    with pytest.warns(UserWarning, match="is a list"):
        logger.log_graph(Net([1]))
    outer = Net(torch.zeros(1, 3))
    outer.layer = Net(None)  # a module in a module: neither has a trainer
    models = ((Net(torch.zeros(1, 3)), None), (outer, None), (torch.nn.Linear(3, 2), torch.zeros(1, 3)))
    for model, given in models:
        logger.log_graph(model, given)
    logger.finalize("success")
    assert events(logger.log_dir).Tags()["graph"]


def test_pickle_leaves_the_writer_behind(tmp_path):
    logger = TensorBoardLogger(tmp_path, version=2, max_queue=5)
    logger.log_metrics({"x": 1.0}, 0)
    _ = logger.experiment
    copy = pickle.loads(pickle.dumps(logger))
    assert copy._experiment is None
    assert copy.log_dir == logger.log_dir
    logger.finalize("success")
