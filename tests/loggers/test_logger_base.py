import os
import pickle

import pytest

from leyden.base.log import rank_zero_only
from leyden.loggers import CSVLogger, DummyLogger, Logger, TensorBoardLogger
from leyden.loggers.logger import DummyExperiment, rank_zero_experiment

BOTH = pytest.mark.parametrize("cls", [CSVLogger, TensorBoardLogger])


@BOTH
def test_version_is_the_next_free_one_as_in_lightning(cls, tmp_path):
    import lightning.pytorch.loggers as theirs

    root = tmp_path / "exp"
    for name in ("version_0", "version_7", "version_x", "version_9_old", "other_12"):
        (root / name).mkdir(parents=True)
    (root / "version_30").write_text("a file")
    (root / ".hidden").mkdir()
    logger, other = cls(tmp_path, "exp"), getattr(theirs, cls.__name__)(tmp_path, "exp")
    assert logger.version == other.version == 10
    assert logger.log_dir == other.log_dir
    (root / "version_11").mkdir()
    assert logger.version == 10  # decided once


@BOTH
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"name": ""},
        {"name": None},
        {"name": "a/b"},
        {"version": 3},
        {"version": "mine"},
        {"name": "e", "version": "v"},
    ],
)
def test_folders_are_those_of_lightning(cls, kwargs, tmp_path):
    import lightning.pytorch.loggers as theirs

    ours, other = cls(tmp_path, **kwargs), getattr(theirs, cls.__name__)(tmp_path, **kwargs)
    for attribute in ("name", "version", "save_dir", "root_dir", "log_dir", "group_separator"):
        assert getattr(ours, attribute) == getattr(other, attribute), attribute


def test_dummy_logger_takes_anything():
    logger = DummyLogger()
    logger.log_metrics({"a": 1}, step=1)
    logger.log_hyperparams({})
    logger.save()
    logger.finalize("success")
    logger.watch("anything", log="all")
    logger[0].experiment.add_image("x", 1)
    logger.experiment[3] = 1
    assert logger.name == logger.version == ""
    assert logger.save_dir is logger.log_dir is None
    assert isinstance(pickle.loads(pickle.dumps(logger)), DummyLogger)


def test_a_logger_of_ones_own(monkeypatch):
    class Mine(Logger):
        saved = 0

        name = "mine"
        version = 1

        @property
        @rank_zero_experiment
        def experiment(self):
            return "the real one"

        @rank_zero_only
        def log_metrics(self, metrics, step=None):
            self.metrics = metrics

        def log_hyperparams(self, params, *args, **kwargs):
            self.params = params

        def save(self):
            self.saved += 1

    logger = Mine()
    assert logger.experiment == "the real one"
    logger.finalize("success")
    assert logger.saved == 1
    logger.after_save_checkpoint(None)
    logger.log_graph(None)
    monkeypatch.setattr(rank_zero_only, "rank", 2)
    assert isinstance(logger.experiment, DummyExperiment)
    logger.log_metrics({"a": 1})
    assert not hasattr(logger, "metrics")
    with pytest.raises(TypeError, match="abstract"):
        Logger()


def test_importing_the_package_imports_no_tensorboard():
    import subprocess
    import sys

    code = (
        "import sys, leyden.loggers as l; l.TensorBoardLogger('x'), l.CSVLogger('x')\n"
        "print([m for m in ('tensorboard', 'yaml', 'rich', 'fsspec') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout.strip() == "[]"
