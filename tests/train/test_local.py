"""Real ranks on this machine: how they start, what they find, how they end, and that nothing outlives anything."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_run import LocalRun, parent_of, wait_for_file, wait_gone

from leyden.train import node
from leyden.train.agent import _Agent
from leyden.train.local import LocalGroup, close_warm_agents
from leyden.train.messages import Boundary, Committed, Died, Failed, Finished, Hung, Metrics, Output, StopRanks
from leyden.train.payload import UnpicklableValue, load_value

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc about processes")


@pytest.fixture
def run(tmp_path):
    with LocalRun(tmp_path / "run") as run:
        yield run


# ---- starts ----------------------------------------------------------------------------------------------------------


def test_a_rank_finds_itself_in_a_warm_process_of_its_own(run, monkeypatch):
    monkeypatch.setenv("SET_AFTER_THE_AGENT", "yes")

    def facts(config):
        import sys

        import torch
        import torch.distributed as dist

        from leyden.dist import worker
        from leyden.train.context import get_context

        context, current = get_context(), worker.current()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "ACCELERATE_TORCH_DEVICE", "SET_AFTER_THE_AGENT")
        return {
            "config": config,
            "session": os.getsid(0) == os.getpid(),
            "warm": "torch._dynamo" in sys.modules,
            "cuda": torch.cuda.is_initialized(),
            "threads": torch.get_num_threads(),
            "variables": {name: os.environ.get(name) for name in names},
            "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
            "context": (context.get_world_rank(), context.get_world_size(), context.get_experiment_name()),
            "worker": (current.info.global_rank, current.device, current.latest_checkpoint()),
            "folder": os.getcwd(),
        }

    run.start(facts, {"lr": 0.1}, world_size=2)
    run.until_dead(2)
    found = load_value(run.of(Finished, 0)[0].value)
    assert found == {
        "config": {"lr": 0.1},
        "session": True,
        "warm": True,
        "cuda": False,
        "threads": 1,
        "variables": {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "NODE_RANK": "0",
            "ACCELERATE_TORCH_DEVICE": "cpu",
            "SET_AFTER_THE_AGENT": "yes",
        },
        "group": (0, 2, "gloo"),
        "context": (0, 2, "run"),
        "worker": (0, "cpu", None),
        "folder": os.getcwd(),
    }
    assert run.of(Finished, 1)[0].value is None
    assert [each.exit_code for each in run.of(Died)] == [0, 0]


def test_a_restart_and_a_second_run_are_warm(tmp_path):
    def note_the_time():
        import time

        return time.time()

    def start(run, attempt):
        asked = time.time()
        run.start(note_the_time, attempt=attempt)
        run.until_dead(attempt + 1)
        return load_value(run.of(Finished)[-1].value) - asked

    with LocalRun(tmp_path / "first") as first:
        start(first, 0)
        assert start(first, 1) < 1.0
    with LocalRun(tmp_path / "second") as second:
        assert start(second, 0) < 1.0
        agent = second.group._agent
    assert agent is not None
    with LocalRun(tmp_path / "third") as third:
        third.group.place(1, 1, 1.0)
        assert third.group._agent is agent


def test_two_groups_at_a_time_do_not_share_an_agent(tmp_path):
    with LocalRun(tmp_path / "a") as a, LocalRun(tmp_path / "b") as b:
        a.group.place(1, 1, 1.0)
        b.group.place(1, 1, 1.0)
        assert a.group._agent is not b.group._agent


def test_ranks_draw_different_random_numbers(run):
    def draw():
        import random

        import numpy

        from leyden.train.context import report

        report({"numpy": numpy.random.rand(), "python": random.random()})

    run.start(draw, world_size=2)
    run.until_dead(2)
    first, second = run.values(0)[0], run.values(1)[0]
    assert first["numpy"] != second["numpy"]
    assert first["python"] != second["python"]


def test_more_gpu_ranks_than_devices_can_never_fit(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    group = LocalGroup(use_gpu=True)
    refused = group.place(3, 3, 0.0)
    assert refused.impossible
    assert refused.nodes == ()
    assert "3 workers need 3 GPUs, but this machine has 2 visible" in refused.waiting_for
    assert LocalGroup(use_gpu=True, gpus_per_worker=2).place(2, 2, 0.0).impossible
    group.release()


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["raise", "exit", "kill"])
def test_a_death_is_reported_in_time_with_all_that_was_reported_before(run, way):
    def die(config):
        import os
        import signal
        import time

        from leyden.train.context import report

        print("about to die")
        for step in range(500):
            report({"step": step, "time": time.time()})
        if config == "raise":
            raise ValueError("the last straw")
        if config == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)

    run.start(die, way)
    died = run.until_dead()[0]
    assert [each["step"] for each in run.values()] == list(range(500))
    assert died.exit_code == {"raise": 1, "exit": 7, "kill": -9}[way]
    assert "about to die" in died.log_tail
    last_words = run.values()[-1]["time"]
    assert run.arrival(died) - last_words < 1.0
    assert abs(died.time - last_words) < 1.0
    failures = run.of(Failed)
    if way != "raise":
        assert failures == []
        return
    assert (failures[0].error.type, failures[0].error.text) == ("ValueError", "the last straw")
    where, line = failures[0].error.traceback.splitlines()[1:3]  # the user's frame, none of ours
    assert "test_local.py" in where
    assert where.endswith("in die")
    assert line.strip() == 'raise ValueError("the last straw")'
    assert "about to die" in failures[0].log_tail
    assert run.arrival(failures[0]) - last_words < 1.0


def test_what_can_not_be_pickled_arrives_as_text(run):
    def locked():
        import threading

        return {"lock": threading.Lock()}

    def fail():
        class OddError(Exception):
            def __init__(self, lock):
                import threading

                self.lock = threading.Lock()

            def __str__(self):
                raise RuntimeError

        raise OddError(1)

    run.start(locked)
    run.until_dead()
    value = load_value(run.of(Finished)[0].value)
    assert isinstance(value, UnpicklableValue)
    assert value.type == "builtins.dict"
    assert "lock" in value.text
    assert "cannot pickle" in value.traceback
    run.start(fail, attempt=1)
    run.until_dead(2)
    error = run.of(Failed)[0].error
    assert error.type.endswith("OddError")
    assert "RuntimeError" in error.text


def test_sys_exit_ends_well_or_not_by_its_code(run):
    def leave(config):
        import sys

        sys.exit(config)

    run.start(leave, 0)
    run.until_dead()
    assert len(run.of(Finished)) == 1
    run.start(leave, 3, attempt=1)
    run.until_dead(2)
    assert run.of(Failed)[0].error.type == "SystemExit"


def test_ranks_end_when_told_and_what_they_started_too(run):
    def hold():
        import signal
        import subprocess
        import time

        from leyden.train.context import report

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report({"child": subprocess.Popen(["sleep", "600"]).pid})
        time.sleep(600)

    run.start(hold, world_size=2)
    run.until(Metrics, 2)
    children = [run.values(rank)[0]["child"] for rank in (0, 1)]
    begin = time.monotonic()
    run.send(StopRanks(0.3))
    died = run.until_dead(2)
    assert 0.25 < time.monotonic() - begin < 1.5
    assert {(each.exit_code, each.reason) for each in died} == {(-9, "killed by the agent")}
    assert wait_gone([*run.pids().values(), *children], 1.0) == []


def test_committed_and_boundary_reach_the_function(run):
    def listen():
        import time

        from leyden.dist import worker
        from leyden.train.context import get_checkpoint, report

        current = worker.current()
        report({"start": str(get_checkpoint().path)})
        while not current.stop_requested():
            time.sleep(0.01)
        return str(get_checkpoint().path), current.latest_checkpoint()

    (run.folder / "checkpoint_000005").mkdir(parents=True)
    run.start(listen, checkpoint="checkpoint_000001")
    run.until(Metrics)
    assert run.values()[0]["start"] == str(run.folder / "checkpoint_000001")
    run.send(Committed(5, "checkpoint_000005", {}))
    run.send(Boundary())
    run.until_dead()
    folder = str(run.folder / "checkpoint_000005")
    assert load_value(run.of(Finished)[0].value) == (folder, folder)


def test_a_rank_that_makes_no_progress_is_reported_with_its_stack(run):
    def hang(config):
        import os
        import signal
        import time

        def wait_for_godot():
            time.sleep(600)

        if config == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_godot()

    run.start(hang, "sleep", hang_timeout_s=0.5)
    hung = run.until(Hung)[0]
    assert "wait_for_godot" in hung.stack
    assert 0.5 <= hung.seconds < 3.0
    run.send(StopRanks(0.0))
    run.until_dead()
    run.start(hang, "stop", attempt=1, hang_timeout_s=0.5)
    assert "is in state T" in run.until(Hung, 2)[1].stack
    run.send(StopRanks(0.0))
    assert run.until_dead(2)[1].exit_code == -9


def test_a_rank_that_was_killed_for_lack_of_memory_is_said_to_be(monkeypatch):
    kills = iter([3, 3, 4])
    monkeypatch.setattr("leyden.train.node.oom_kills", lambda: next(kills))
    agent = object.__new__(_Agent)
    agent._oom_kills, agent._stopping = node.oom_kills(), False
    assert agent._reason(-9) == ""
    assert agent._reason(-9) == "out of memory"
    assert agent._reason(1) == ""


# ---- output ----------------------------------------------------------------------------------------------------------


def test_output_is_logged_and_that_of_rank_0_comes_live(run):
    def talk():
        import sys
        import time

        from leyden.train.context import get_context

        print("out of", get_context().get_world_rank())
        sys.stderr.write("err\n")
        time.sleep(1.0)

    run.start(talk, world_size=2)
    run.until(Output)
    assert run.of(Died) == []
    run.until_dead(2)
    assert {each.rank for each in run.of(Output)} == {0}
    assert "".join(each.text for each in run.of(Output)) == "out of 0\nerr\n"
    assert run.log(1) == "out of 1\nerr\n"
    run.start(talk, world_size=2, attempt=1)
    run.until_dead(4)
    assert run.log(1) == "out of 1\nerr\n---- attempt 1 ----\nout of 1\nerr\n"
    assert run.of(Died)[3].log_tail[0] != "---- attempt 1 ----"


def test_logs_of_a_remote_run_are_stored_at_its_end(run):
    def talk():
        print("from afar")

    run.start(talk, world_size=2, log_path="")
    run.until_dead(2)
    run.group.release()
    assert run.log(0) == run.log(1) == "from afar\n"


# ---- nothing survives ------------------------------------------------------------------------------------------------

_DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from local_run import LocalRun
from leyden.train.messages import Metrics

def hold():
    import subprocess, time
    from leyden.train.context import report
    report({{"child": subprocess.Popen(["sleep", "600"]).pid}})
    time.sleep(600)

run = LocalRun(Path({folder!r}))
run.start(hold, world_size=2)
run.until(Metrics, 2)
pids = [*run.pids().values(), *(run.values(rank)[0]["child"] for rank in (0, 1))]
target = Path({folder!r}) / "pids"
(target.parent / "new").write_text(" ".join(map(str, pids)))
(target.parent / "new").rename(target)
while not run.node_lost:
    run.poll(10)
run.until_dead(2) if {wait_dead} else None
(target.parent / "told").write_text("yes")
run.start(lambda: 3, attempt=1)
from leyden.train.messages import Finished
run.until(Finished)
(target.parent / "again").write_text("yes")
run.group.release()
"""


@pytest.mark.parametrize("victim", ["driver", "agent", "driver and agent"])
def test_nothing_survives_a_kill(tmp_path, victim):
    script = _DRIVER.format(tests=str(Path(__file__).parent), folder=str(tmp_path), wait_dead=False)
    driver = subprocess.Popen([sys.executable, "-c", script])
    try:
        pids = list(map(int, wait_for_file(tmp_path / "pids").split()))
        zygote = parent_of(pids[0])
        agent = parent_of(zygote)
        assert parent_of(agent) == driver.pid
        if "driver" in victim:
            driver.kill()
        if "agent" in victim:
            os.kill(agent, signal.SIGKILL)
        assert wait_gone([*pids, zygote, agent], 2.0) == []
        if victim == "agent":  # the driver is told, and can start again
            assert wait_for_file(tmp_path / "told", 5.0)
            assert wait_for_file(tmp_path / "again")
            assert driver.wait(20) == 0
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.parametrize("victim", ["driver", "agent"])
def test_nothing_survives_a_kill_while_the_warm_process_imports(tmp_path, victim):
    code = (
        "import time; from leyden.train.local import LocalGroup; group = LocalGroup(); group.place(1, 1, 1);"
        f"pid = group._agent.process.pid; open({str(tmp_path / 'new')!r}, 'w').write(str(pid)); import os;"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r}); time.sleep(60)"
    )
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        agent = int(wait_for_file(tmp_path / "pid"))
        below = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        assert len(below) == 1
        os.kill(driver.pid if victim == "driver" else agent, signal.SIGKILL)
        assert wait_gone([agent, *below], 3.0) == []
    finally:
        driver.kill()
        driver.wait()


def test_a_killed_warm_process_takes_its_ranks_along_and_is_replaced(run):
    def hold():
        import subprocess
        import time

        from leyden.train.context import report

        report({"child": subprocess.Popen(["sleep", "600"]).pid})
        time.sleep(600)

    run.start(hold, world_size=2)
    run.until(Metrics, 2)
    children = [run.values(rank)[0]["child"] for rank in (0, 1)]
    zygote = parent_of(run.pids()[0])
    begin = time.time()
    os.kill(zygote, signal.SIGKILL)
    died = run.until_dead(2)
    assert time.time() - begin < 1.0
    assert all("forked from ended with exit code -9" in each.reason for each in died)
    assert wait_gone([*run.pids().values(), *children, zygote], 1.0) == []
    run.start(lambda: 5, attempt=1)
    assert load_value(run.until(Finished)[0].value) == 5
    run.until_dead(3)


def test_a_killed_rank_leaves_nothing_behind(run):
    def hold():
        import subprocess
        import time

        from leyden.train.context import report

        report({"child": subprocess.Popen(["sleep", "600"]).pid})
        time.sleep(600)

    run.start(hold)
    run.until(Metrics)
    os.kill(run.pids()[0], signal.SIGKILL)
    assert run.until_dead()[0].exit_code == -9
    assert wait_gone([run.values()[0]["child"]], 1.0) == []


def test_agents_end_with_the_driver_and_a_fork_of_it_does_not_end_them(run):
    run.start(lambda: 1)
    run.until_dead()
    agent = run.group._agent.process.pid
    if os.fork() == 0:
        close_warm_agents()
        os._exit(0)
    os.wait()
    run.start(lambda: 2, attempt=1)
    run.until_dead(2)
    assert run.group._agent.process.pid == agent
    run.group.release()
    close_warm_agents()
    assert wait_gone([agent], 0.0) == []
