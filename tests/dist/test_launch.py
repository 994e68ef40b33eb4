"""Launchers with real processes. A script that imports torch costs seconds, so each one checks much at once."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leyden.dist.env import LightningEnvironment
from leyden.dist.launch import MultiProcessingLauncher, SubprocessScriptLauncher

LAUNCHER_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Joins a group, then does what the case says; the group shows up as a broken connection when a rank is gone.
SCRIPT = """
    import os, signal, sys, time, traceback
    from leyden.dist.comm import Comm, init_process_group
    from leyden.dist.env import LightningEnvironment, dist_info
    from leyden.dist.launch import SubprocessScriptLauncher
    import torch

    case = sys.argv[1]

    def work(value, extra=None):
        info = dist_info(environment, 2, 1)
        init_process_group(info, "gloo")
        comm = Comm(torch.device("cpu"))
        assert comm.all_gather_object(os.environ["OMP_NUM_THREADS"]) == [str(torch.get_num_threads())] * 2
        child = info.global_rank == 1
        if case == "child fails" and child:
            try:
                raise ValueError("the reason")
            except ValueError:
                traceback.print_exc()
                sys.exit(7)
        if case == "child is done" and child:
            sys.exit(0)
        if case == "parent raises" and not child:
            print("child", launcher.procs[0].pid, flush=True)
            raise ValueError("the reason")
        if case == "parent is killed":
            print("parent" if not child else "child", os.getpid(), flush=True)
            if not child:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        comm.barrier()
        return (value, extra, info.global_rank, comm.reduce_bool(True))

    environment = LightningEnvironment()
    launcher = SubprocessScriptLauncher(environment, 2)
    result = launcher.launch(work, 5, extra=6, trainer=object())
    say = lambda *words: os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece: two ranks write
    say(result)
    # A second launch finds the processes there.
    again = SubprocessScriptLauncher(LightningEnvironment(), 2)
    say("again", again.launch(lambda: 3), again.procs)
    if case == "child fails at the end" and result[2] == 1:
        sys.exit(4)
"""


@pytest.fixture
def run_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    variables = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    variables.pop("OMP_NUM_THREADS", None)

    def run(case):
        return subprocess.run(
            [sys.executable, str(path), case], capture_output=True, text=True, timeout=120, env=variables, check=False
        )

    return run


def _is_alive(pid):
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_script_is_started_once_per_rank(run_script):
    done = run_script("good")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "(5, 6, 0, True)",
        "(5, 6, 1, True)",
        "again 3 []",
        "again 3 []",
    ]


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("child fails", 7, "failed with exit code 7"),
        ("child is done", 1, "ended normally while local rank 0 was still running"),
    ],
)
def test_end_of_a_child_is_the_error_of_the_parent(run_script, case, code, message):
    done = run_script(case)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    if case == "child fails":
        assert "WorkerFailedError: local rank 1 (process" in done.stderr
        assert done.stderr.rstrip().endswith("ValueError: the reason")


def test_failure_after_the_last_launch_is_reported_too(run_script):
    done = run_script("child fails at the end")
    assert done.returncode == 4
    assert "leyden: local rank 1" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_do_not_outlive_a_failed_parent(run_script):
    begin = time.monotonic()
    done = run_script("parent raises")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the reason")
    child = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("child"))
    assert not _is_alive(child)
    assert time.monotonic() - begin < 60


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_children_do_not_outlive_a_killed_parent(run_script):
    done = run_script("parent is killed")
    assert done.returncode == -signal.SIGKILL
    child = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("child"))
    deadline = time.monotonic() + 10
    while _is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_hanging_parent_is_ended_with_the_childs_exit_code(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            from leyden.dist.children import Children
            children = Children(grace=0.3)
            code = "import sys; print('the reason', file=sys.stderr); sys.exit(9)"
            children.start(1, [sys.executable, "-c", code], dict(os.environ), None)
            slow = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
            children.start(2, [sys.executable, "-c", slow], dict(os.environ), None)
            with children.watched():
                time.sleep(100)
        """),
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9
    assert "leyden: local rank 1" in done.stderr
    assert "failed with exit code 9; its error:\nthe reason" in done.stderr


def test_nothing_is_started_when_the_processes_exist(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    launcher = SubprocessScriptLauncher(LightningEnvironment(), 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert launcher.launch(lambda a, b: a + b, 1, b=2) == 3
    assert launcher.procs == []
    launcher.kill()
    assert not launcher.is_interactive_compatible
    assert not launcher.runs_in_children


def test_wrong_environment_is_named(monkeypatch):
    class Wrong(LightningEnvironment):
        creates_processes_externally = False

    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match=r"this is local rank 1: is Wrong.creates_processes_externally right"):
        SubprocessScriptLauncher(Wrong(), 2).launch(print)


# ---- worker processes ------------------------------------------------------------------------------------------------


class Recorder:
    """A callback with state."""

    state_key = "Recorder"

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class FakeCheckpoint(Recorder):
    state_key = "FakeCheckpoint"
    best_model_path = ""

    def load_state_dict(self, state):
        raise AssertionError("a checkpoint callback's state_dict is for resumed runs")


class FakeTrainer:
    """As much of a Trainer as a launcher reads and writes."""

    def __init__(self):
        self.state = SimpleNamespace(fn="fit", status="initializing")
        self.lightning_module = nn.Linear(2, 1)
        self.callback_metrics = {}
        self.callbacks = [Recorder(), FakeCheckpoint()]
        self.checkpoint_callbacks = self.callbacks[1:]

    def fit(self, scale):
        rank = int(os.environ["LOCAL_RANK"])
        self.state.status = "finished"
        self.callback_metrics["loss"] = torch.tensor(float(rank))
        self.callbacks[0].count = 3 + rank
        self.callbacks[1].best_model_path = f"best-{rank}.ckpt"
        with torch.no_grad():
            self.lightning_module.weight.fill_(scale + rank)
        time.sleep(0.5)  # for the other rank to write: each must have weights of its own
        assert self.lightning_module.weight.tolist() == [[scale + rank] * 2]
        return {"rank": rank, "big": torch.zeros(100_000), "seed": torch.initial_seed()}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_results_of_rank_0_come_back(start_method, monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    trainer = FakeTrainer()
    launcher = MultiProcessingLauncher(LightningEnvironment(), 2, start_method=start_method)
    assert launcher.runs_in_children
    assert launcher.is_interactive_compatible == (start_method == "fork")
    result = launcher.launch(trainer.fit, 10, trainer=trainer)
    assert result["rank"] == 0
    assert result["big"].shape == (100_000,)
    assert result["seed"] == torch.initial_seed()
    assert trainer.state.status == "finished"
    assert trainer.callback_metrics["loss"].item() == 0.0
    assert trainer.callbacks[0].count == 3
    assert trainer.callbacks[1].best_model_path == "best-0.ckpt"
    assert trainer.lightning_module.weight.tolist() == [[10.0, 10.0]]
    assert not {"LOCAL_RANK", "MASTER_PORT"} & os.environ.keys()
    with pytest.raises(NotImplementedError, match="can't fit the same Trainer twice"):
        launcher.launch(trainer.fit, 10, trainer=trainer)
    trainer.state.fn = "test"
    launcher._check_start(fitting=False)


def test_fork_after_spawn_does_not_inherit_shared_weights():
    trainer = FakeTrainer()
    trainer.lightning_module.share_memory()
    MultiProcessingLauncher(LightningEnvironment(), 2, start_method="fork").launch(trainer.fit, 10, trainer=trainer)


def _fail():
    if os.environ["LOCAL_RANK"] == "1":
        raise KeyError("the reason")
    time.sleep(100)


def test_failure_of_a_worker_ends_the_others():
    launcher = MultiProcessingLauncher(LightningEnvironment(), 2, start_method="fork")
    with pytest.raises(Exception, match="the reason"):
        launcher.launch(_fail)
    assert launcher.procs == []
    assert not multiprocessing.active_children()


def test_what_a_start_method_can_not_do(monkeypatch):
    with pytest.raises(ValueError, match="start_method='thread' is not available here; use one of fork"):
        MultiProcessingLauncher(LightningEnvironment(), 2, start_method="thread")
    fork = MultiProcessingLauncher(LightningEnvironment(), 2, start_method="fork")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA was used in this process"):
        fork.launch(print)
    spawn = MultiProcessingLauncher(LightningEnvironment(), 2)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match='if __name__ == "__main__"'):
        spawn.launch(print)


def test_launchers_can_be_sent_to_a_process():
    script = SubprocessScriptLauncher(LightningEnvironment(), 2)
    assert pickle.loads(pickle.dumps(script)).procs == []
    workers = MultiProcessingLauncher(LightningEnvironment(), 2)
    workers.procs = [object()]
    assert pickle.loads(pickle.dumps(workers)).procs == []
