import logging
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from leyden.base.errors import MisconfigurationException
from leyden.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from leyden.profilers.pytorch import _Schedule

ALL = pytest.mark.parametrize("cls", [PassThroughProfiler, SimpleProfiler, AdvancedProfiler, PyTorchProfiler])


@pytest.fixture(autouse=True)
def caplog_sees_leyden(monkeypatch):
    monkeypatch.setattr(logging.getLogger("leyden"), "propagate", True)


@pytest.fixture
def messages(caplog):
    with caplog.at_level("INFO", logger="leyden"):
        yield caplog


def work(profiler, steps=7, name="training_step", batch=None):
    batch = torch.ones(2, 3) if batch is None else batch
    layer = torch.nn.Linear(3, 1)
    for _ in range(steps):
        with profiler.profile("run_training_batch"), profiler.profile(f"[Strategy]S.{name}"):
            layer(batch)


@ALL
def test_every_profiler_runs_twice_and_can_be_copied(cls, tmp_path, messages):
    profiler = cls(dirpath=tmp_path, filename="report")
    for stage in ("fit", "test"):
        profiler.setup(stage=stage, local_rank=0, log_dir="/nowhere")
        work(profiler)
        profiler.describe()
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".txt")
    assert names == ([] if cls is PassThroughProfiler else ["fit-report-0.txt", "test-report-0.txt"])
    for name in names:
        text = (tmp_path / name).read_text()
        assert text.startswith(f"{name.split('-')[0].upper()} Profiler Report\n")
    assert messages.messages == []
    copy = pickle.loads(pickle.dumps(profiler))
    assert (copy.dirpath, copy.filename) == (tmp_path, "report")


@ALL
def test_without_a_file_the_report_is_logged_on_rank_zero(cls, messages):
    for rank in (None, 0, 1):
        profiler = cls(**({"export_to_chrome": False} if cls is PyTorchProfiler else {}))
        profiler.setup("fit", rank)
        work(profiler)
        profiler.describe()
    assert len(messages.messages) == (0 if cls is PassThroughProfiler else 2)


def test_file_names():
    profiler = PassThroughProfiler(filename="my report")
    assert profiler._prepare_filename() == "my_report.txt"
    profiler.setup("fit", 3)
    assert profiler._prepare_filename('a/b:c*"d"', ".prof") == "fit-my_report-3-a_b_c_d_.prof"
    assert PassThroughProfiler()._prepare_filename() == "profile.txt"
    assert profiler.local_rank == 3
    profiler = SimpleProfiler()
    profiler.setup("fit", log_dir="logs")
    assert profiler.dirpath == "logs"


def test_a_profiler_of_ones_own():
    class Mine(Profiler):
        def __init__(self):
            super().__init__()
            self.seen = []

        def start(self, action_name):
            self.seen.append(("start", action_name))

        def stop(self, action_name):
            self.seen.append(("stop", action_name))

    profiler = Mine()
    with pytest.raises(KeyError), profiler.profile("a") as name:
        raise KeyError(name)
    assert profiler.seen == [("start", "a"), ("stop", "a")]
    with pytest.raises(TypeError, match="abstract"):
        Profiler()


# SimpleProfiler


def test_simple_durations():
    profiler = SimpleProfiler()
    for _ in range(2):
        with profiler.profile("sleep"):
            time.sleep(0.01)
    with profiler.profile("nothing"):
        pass
    assert [len(profiler.recorded_durations[name]) for name in ("sleep", "nothing")] == [2, 1]
    assert min(profiler.recorded_durations["sleep"]) >= 0.01
    lines = profiler.summary().splitlines()
    assert lines[0] == "Profiler Report"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert cells[0] == ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
    assert cells[1][0] == "Total"
    assert cells[1][2] == "3"
    assert [row[0] for row in cells[2:]] == ["sleep", "nothing"]
    assert len({len(line) for line in lines[1:]}) == 1  # a table
    profiler.extended = False
    cells = [line.split("|")[1].strip() for line in profiler.summary().splitlines() if line.startswith("|")]
    assert cells == ["Action", "sleep", "nothing"]
    assert "Action" in SimpleProfiler(extended=False).summary()  # nothing recorded


def test_simple_misuse():
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(ValueError, match=r"start\('a'\) again"):
        profiler.start("a")
    profiler.stop("a")
    with pytest.raises(ValueError, match=r"stop\('a'\) without a start"):
        profiler.stop("a")


# AdvancedProfiler


def test_advanced_report_and_dump(tmp_path):
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="adv", line_count_restriction=2, dump_stats=True)
    profiler.setup("fit", 0)
    work(profiler)
    text = profiler.summary()
    assert "Profile stats for: [Strategy]S.training_step rank: 0" in text
    assert "due to restriction <2>" in text
    assert sorted(path.name for path in tmp_path.glob("*.prof")) == [
        "fit-adv-0-[Strategy]S.training_step.prof",
        "fit-adv-0-run_training_batch.prof",
    ]
    import pstats

    assert pstats.Stats(str(tmp_path / "fit-adv-0-run_training_batch.prof")).total_calls > 0
    with pytest.raises(ValueError, match="without a start"):
        profiler.stop("unknown")
    profiler.dirpath = None
    with pytest.raises(MisconfigurationException, match="pass dirpath"):
        profiler.summary()


def test_advanced_outer_actions_go_on_after_inner_ones():
    def outside():
        pass

    profiler = AdvancedProfiler()
    with profiler.profile("outer"):
        with profiler.profile("inner"):
            pass
        outside()
    outer = profiler.summary().split("Profile stats for: ")[1]
    assert outer.startswith("outer")
    assert "(outside)" in outer


# PyTorchProfiler


def test_pytorch_records_three_steps_of_each_kind(tmp_path):
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="ops", row_limit=-1)
    profiler.setup("fit", 0)
    work(profiler, 20)
    work(profiler, 8, "validation_step")
    work(profiler, 20)
    text = profiler.summary()
    kinds = [line for line in text.splitlines() if line.startswith("Profile stats")]
    assert kinds == ["Profile stats for: training_step rank: 0", "Profile stats for: validation_step rank: 0"]
    (row,) = [line for line in text.split("validation_step rank")[0].splitlines() if "aten::linear " in line + " "][:1]
    assert row.split()[-1] == "3"
    names = sorted(path.name.split(".")[0] for path in tmp_path.iterdir())
    assert names == ["fit-ops-0-training_step", "fit-ops-0-validation_step"]
    assert profiler.profiler is None


def test_pytorch_labels_modules_and_skips_the_sanity_check(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    model._trainer = SimpleNamespace(
        sanity_checking=True,
        num_training_batches=100,
        num_val_batches=[9],
        max_epochs=1,
        state=SimpleNamespace(fn="fit"),
    )
    profiler = PyTorchProfiler(dirpath=tmp_path, export_to_chrome=False, row_limit=-1)
    profiler._lightning_module = model
    for name, steps in (("validation_step", 5), ("training_step", 7)):
        for _ in range(steps):
            with profiler.profile(f"x.{name}"):
                model(torch.ones(1, 3))
        model._trainer.sanity_checking = False
    text = profiler.summary()
    assert "Profile stats for: training_step" in text
    assert "validation_step" not in text
    assert "[pl][module]torch.nn.modules.linear.Linear: 0" in text
    assert not model[0]._forward_hooks
    assert list(tmp_path.iterdir()) == []


def test_pytorch_short_runs_are_recorded_whole():
    model = torch.nn.Linear(3, 1)
    model._trainer = SimpleNamespace(
        sanity_checking=False,
        num_training_batches=2,
        num_val_batches=[1],
        max_epochs=2,
        state=SimpleNamespace(fn="fit"),
    )
    profiler = PyTorchProfiler(export_to_chrome=False)
    profiler._lightning_module = model
    work(profiler, 4)
    assert "Profile stats for: run" in profiler.summary()


def test_pytorch_without_a_folder_says_so():
    profiler = PyTorchProfiler()
    with pytest.warns(UserWarning, match="wrote no trace: pass dirpath"):
        work(profiler)
    assert "aten::linear" in profiler.summary()
    assert PyTorchProfiler().summary() == ""


def test_pytorch_user_schedule_and_handler():
    traces = []
    profiler = PyTorchProfiler(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=traces.append,
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        group_by_input_shapes=True,
        sort_by_key="count",
        table_kwargs={"max_name_column_width": 20},
    )
    work(profiler)
    assert "Input Shapes" in profiler.summary()
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"sort_by_key": "cpu_tim"}, MisconfigurationException, "did you mean 'cpu_time'"),
        ({"schedule": 3}, MisconfigurationException, "must be a function"),
        ({"schedule": lambda step: "record"}, MisconfigurationException, "must return a torch.profiler.ProfilerAction"),
        ({"table_kwargs": {"row_limit": 3}}, KeyError, "arguments of their own"),
        ({"table_kwargs": {"hedaer": 3}}, KeyError, "did you mean 'header'"),
    ],
)
def test_pytorch_misuse(kwargs, error, text):
    with pytest.raises(error, match=text):
        PyTorchProfiler(**kwargs)


def test_schedule_ends_a_recording_when_another_kind_goes_on():
    schedule = _Schedule(torch.profiler.schedule(wait=1, warmup=1, active=3), lambda kind: False)
    actions = []
    for kind in "vvvv" + "ttttttt" + "vvvvvv":
        schedule.kind = kind
        actions.append(schedule(0).name)
    assert actions[:5] == ["WARMUP", "RECORD", "RECORD", "RECORD_AND_SAVE", "WARMUP"]
    assert actions.count("RECORD_AND_SAVE") == 2
    assert actions[-6:] == ["NONE"] * 6
