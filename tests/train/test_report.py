"""What workers report: its price, its values, its checkpoints, and who may do it."""

import enum
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import numpy
import pytest
import torch
from local_run import LocalRun, make_plan

from leyden.train import collective, context, session
from leyden.train.artifacts import Checkpoint, CheckpointUploadMode
from leyden.train.link import Link, pack
from leyden.train.messages import CheckpointPart, Committed, Died, Failed, Finished, Metrics
from leyden.train.metrics import plain_metrics
from leyden.train.payload import load_value
from leyden.train.session import Session, SocketChannel

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc about processes")


class ListChannel:
    """A channel without another side."""

    def __init__(self) -> None:
        self.sent = []
        self.news = []

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        news, self.news = self.news, []
        return news


@pytest.fixture
def current(tmp_path):
    made = Session(
        make_plan(0, 1, tmp_path / "run", 1, checkpoint="checkpoint_000002", next_report=3), ListChannel(), {}
    )
    session.set_current(made)
    yield made
    session.set_current(None)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "local"
    (made / "sub").mkdir(parents=True)
    (made / "weights.pt").write_bytes(b"12345")
    (made / "sub" / "more").write_bytes(b"1")
    return made


# ---- metrics ---------------------------------------------------------------------------------------------------------


class Color(enum.IntEnum):
    RED = 3


def test_scalars_of_all_kinds_become_plain():
    plain = plain_metrics(
        {
            "int": 1,
            "float": 0.5,
            "nan": float("inf"),
            "text": "a",
            "bool": True,
            "none": None,
            "float32": numpy.float32(0.5),
            "float64": numpy.float64(0.25),
            "numpy int": numpy.int64(3),
            "numpy bool": numpy.bool_(True),
            "0-d": numpy.array(2.0),
            "tensor": torch.tensor(1.5, requires_grad=True),
            "one": torch.ones(1, 1, dtype=torch.int32),
            "half": torch.tensor(0.5, dtype=torch.bfloat16),
            "enum": Color.RED,
            "nested": {"a": [numpy.float32(1.0), (2, None)], 7: torch.tensor(True)},
        }
    )
    assert plain == {
        "int": 1,
        "float": 0.5,
        "nan": float("inf"),
        "text": "a",
        "bool": True,
        "none": None,
        "float32": 0.5,
        "float64": 0.25,
        "numpy int": 3,
        "numpy bool": True,
        "0-d": 2.0,
        "tensor": 1.5,
        "one": 1,
        "half": 0.5,
        "enum": 3,
        "nested": {"a": [1.0, [2, None]], "7": True},
    }
    flat = [*plain.values(), *plain["nested"].values()]
    assert {type(each) for each in flat} <= {int, float, str, bool, type(None), dict, list}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.zeros(2, 3)}, r"metrics\['loss'\] is a torch.Tensor of shape \(2, 3\); .*single numbers"),
        ({"a": {"b": [1, object()]}}, r"metrics\['a'\]\['b'\]\[1\] is a object, which can't be reported"),
        ({"loss": numpy.zeros(3)}, r"metrics\['loss'\] is a numpy.ndarray of shape \(3,\)"),
        ({("a", 1): 2}, r"metrics has the key \('a', 1\), a tuple; the names of metrics are strings"),
        ([1], r"report\(\) takes a dict of metrics, not a list"),
    ],
)
def test_other_values_are_refused_by_name_where_report_is_called(current, metrics, message):
    with pytest.raises(TypeError, match=message) as caught:
        context.report(metrics)
    assert traceback.extract_tb(caught.tb)[0].line == "context.report(metrics)"
    assert current.channel.sent == []
    context.report({"loss": 1})  # and the number of the report was not used up
    assert current.channel.sent[0].index == 3


def test_what_is_reported_is_a_copy(current):
    metrics = {"nested": {"a": 1}}
    context.report(metrics)
    metrics["nested"]["a"] = 2
    assert current.channel.sent[0].values == {"nested": {"a": 1}}


@linux
def test_a_report_costs_microseconds_and_waits_for_nobody(tmp_path):
    def measure():
        import time

        from leyden.train.context import get_context, report

        if get_context().get_world_rank() == 1:
            return None  # never reports
        costs = []
        for _ in range(20):
            begin = time.perf_counter()
            for step in range(100):
                report({"loss": 0.5, "accuracy": 0.25, "step": step})
            costs.append((time.perf_counter() - begin) / 100)
        return sorted(costs)

    with LocalRun(tmp_path / "run") as run:
        run.start(measure, world_size=2)
        run.until_dead(2)
        costs = load_value(run.of(Finished, 0)[0].value)
        assert costs[len(costs) // 4] < 50e-6, costs  # others may be using the CPUs too
        assert len(run.values()) == 2000
        assert [each.index for each in run.of(Metrics)] == list(range(2000))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_sync_stores_the_files_and_then_says_so(current, folder, tmp_path):
    context.report({"loss": 1}, Checkpoint.from_directory(folder))
    metrics, part = current.channel.sent
    assert (metrics.index, metrics.has_checkpoint) == (3, True)
    assert (part.index, part.folder, part.files) == (3, "checkpoint_000003", {"weights.pt": 5, "sub/more": 1})
    assert (tmp_path / "run" / "checkpoint_000003" / "sub" / "more").read_bytes() == b"1"
    assert folder.exists()
    context.report({}, Checkpoint.from_directory(folder), "best", delete_local_checkpoint_after_upload=True)
    assert current.channel.sent[-1].folder == "best"
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp"])
def test_a_folder_name_that_leaves_the_run_is_refused(current, folder, name):
    with pytest.raises(ValueError, match="checkpoint_dir_name="):
        context.report({}, Checkpoint.from_directory(folder), name)
    assert current.channel.sent == []


def test_async_returns_at_once_and_deletes_its_copy(current, folder, monkeypatch):
    slow_down(monkeypatch)
    begin = time.monotonic()
    context.report({}, Checkpoint.from_directory(folder), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    assert time.monotonic() - begin < 0.2
    context.report({"next": 1})  # metrics don't wait for it
    assert [type(each) for each in current.channel.sent] == [Metrics, Metrics]
    current.finish_upload()
    assert isinstance(current.channel.sent[-1], CheckpointPart)
    assert not folder.exists()


def test_async_has_one_upload_in_flight(current, folder, monkeypatch):
    slow_down(monkeypatch)
    mode = CheckpointUploadMode.ASYNC
    for _ in range(2):
        context.report({}, Checkpoint(folder), checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=False)
    assert [type(each) for each in current.channel.sent] == [Metrics, CheckpointPart, Metrics]
    current.finish_upload()


def test_an_error_of_an_async_upload_surfaces_at_the_next_report(current, tmp_path):
    context.report({}, Checkpoint(tmp_path / "missing"), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    current._upload.join()
    with pytest.raises(FileNotFoundError, match="missing"):
        context.report({"loss": 1})
    context.report({"loss": 1})  # it is raised once


def slow_down(monkeypatch):
    from leyden.train.storage import Storage

    put_dir = Storage.put_dir

    def slow(self, local, rel):
        time.sleep(0.4)
        return put_dir(self, local, rel)

    monkeypatch.setattr(Storage, "put_dir", slow)


def test_no_upload_takes_files_that_lie_in_the_run_folder(current, folder, tmp_path):
    mode = CheckpointUploadMode.NO_UPLOAD
    there = tmp_path / "run" / "mine" / "step_1"
    there.mkdir(parents=True)
    (there / "file").write_bytes(b"123")
    context.report({}, Checkpoint(there), checkpoint_upload_mode=mode)
    assert (current.channel.sent[-1].folder, current.channel.sent[-1].files) == ("mine/step_1", {"file": 3})
    with pytest.raises(ValueError, match="NO_UPLOAD needs a checkpoint that lies in the run folder"):
        context.report({}, Checkpoint(folder), checkpoint_upload_mode=mode)


def test_an_upload_function_replaces_the_upload(current, folder, tmp_path):
    def upload(checkpoint, name):
        target = tmp_path / "run" / name
        target.mkdir(parents=True)
        (target / "own").write_bytes(Path(checkpoint.path, "weights.pt").read_bytes())
        return Checkpoint(target)

    context.report({}, Checkpoint(folder), checkpoint_upload_fn=upload)
    assert (current.channel.sent[-1].folder, current.channel.sent[-1].files) == ("checkpoint_000003", {"own": 5})
    with pytest.raises(ValueError, match="must return a checkpoint that lies in the run folder"):
        context.report({}, Checkpoint(folder), checkpoint_upload_fn=lambda checkpoint, name: checkpoint)


def test_a_path_is_no_checkpoint(current, folder):
    with pytest.raises(TypeError, match=r"pass Checkpoint.from_directory\(folder\), not a str"):
        context.report({}, str(folder))
    with pytest.raises(ValueError, match="'later' is unknown; use one of CheckpointUploadMode: SYNC, ASYNC, NO_UPLOAD"):
        context.report({}, Checkpoint(folder), checkpoint_upload_mode="later")


def test_the_last_committed_checkpoint_is_the_one_to_start_from(current, tmp_path):
    assert context.get_checkpoint().path == str(tmp_path / "run" / "checkpoint_000002")
    current.channel.news = [Committed(3, "best", {}), Committed(4, "checkpoint_000004", {})]
    assert context.get_checkpoint().path == str(tmp_path / "run" / "checkpoint_000004")


def test_waiting_for_a_commit_has_a_limit(current, folder):
    context.report({}, Checkpoint(folder))
    begin = time.monotonic()
    current.wait_for_commit(0.1)
    assert 0.1 <= time.monotonic() - begin < 0.5
    current.channel.news = [Committed(3, "checkpoint_000003", {})]
    current.wait_for_commit(None)


@linux
def test_an_upload_in_the_background_is_finished_before_the_rank_is(tmp_path):
    def save(config):
        import os

        from leyden.train.artifacts import Checkpoint, CheckpointUploadMode
        from leyden.train.context import report

        os.makedirs(config)
        with open(os.path.join(config, "weights"), "wb") as file:
            file.write(bytes(20_000_000))
        report({"loss": 1}, Checkpoint(config), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    with LocalRun(tmp_path / "run") as run:
        run.start(save, str(tmp_path / "copy"))
        run.until(Died)
        kinds = [type(each) for _, each in run.messages]
        assert kinds.index(CheckpointPart) < kinds.index(Finished)
        run.start(save, "/proc/nowhere", attempt=1)
        run.until(Died, 2)
        assert run.of(Failed)[0].error.type == "FileNotFoundError"


@linux
def test_a_fork_of_the_worker_can_not_report():
    ours, theirs = socket.socketpair()
    channel = SocketChannel(theirs)
    ours.sendall(pack("news"))
    if os.fork() == 0:
        code = 0
        try:
            code = len(channel.receive())
            channel.send("mixed up")
        except RuntimeError as error:
            code += 7 if "which the worker (process" in str(error) else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert channel.receive() == ["news"]
    channel.send("last words")
    theirs.close()
    assert Link(ours).receive() == ["last words"]


# ---- collectives, and outside of a worker ----------------------------------------------------------------------------


@linux
def test_collectives_join_the_ranks(tmp_path):
    def meet():
        import time

        from leyden.train.collective import barrier, broadcast_from_rank_zero
        from leyden.train.context import get_context, report

        rank = get_context().get_world_rank()
        told = broadcast_from_rank_zero({"from": rank})
        time.sleep(0.3 * rank)
        barrier()
        report({"from": told["from"], "time": time.time()})

    with LocalRun(tmp_path / "run") as run:
        run.start(meet, world_size=2)
        run.until_dead(2)
        first, second = run.values(0)[0], run.values(1)[0]
        assert first["from"] == second["from"] == 0
        assert abs(first["time"] - second["time"]) < 0.2


@pytest.mark.parametrize(
    "call",
    [
        lambda: context.report({}),
        context.get_checkpoint,
        context.get_context,
        context.get_all_reported_checkpoints,
        lambda: context.get_dataset_shard("train"),
        collective.barrier,
    ],
)
def test_outside_of_a_worker_it_says_where_to_call(call):
    with pytest.raises(RuntimeError, match=r"works in a training worker only: .* run by fit\(\)"):
        call()


def test_the_context_knows_no_trials(current):
    made = context.get_context()
    assert made.get_local_world_size() == 1
    assert made.get_storage().url == current.plan.run_url
    with pytest.raises(AttributeError, match="belongs to trials of a tuner"):
        made.get_trial_id()
