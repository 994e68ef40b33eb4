"""One suite for every group of workers; see `conformance`. Below it, what only real processes can show."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conformance import GroupSuite, RealRun, SimulatedRun
from local_run import wait_for_file, wait_gone

from leyden.train.artifacts import Result
from leyden.train.fake import Barrier, Die, Report
from leyden.train.ledger import Ledger
from leyden.train.local import LocalGroup
from leyden.train.storage import Storage

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc about processes")


class TestFake(GroupSuite):
    @pytest.fixture
    def backend(self, tmp_path):
        return SimulatedRun(tmp_path / "run")


@linux
class TestLocal(GroupSuite):
    @pytest.fixture
    def backend(self, tmp_path):
        return RealRun(tmp_path / "run", lambda nodes, ranks: LocalGroup())

    def test_death_is_seen_and_the_next_step_made_within_two_seconds(self, backend):
        def script(plan):
            yield Report({"at": time.time()}, {f"{plan.rank}": b"a"})
            yield Barrier()
            if plan.attempt == 0 and plan.rank == 1:
                yield Report({"dies at": time.time()})
                yield Die(-9)
            yield Barrier()

        outcome = self.run(backend, script, failures=1)
        (died,) = [row["time"] for row in outcome.rows if "dies at" in row["values"]]
        again = [row["time"] for row in outcome.rows if row["attempt"] == 1]
        seen = next(event["time"] for event in outcome.events if event["event"] == "failure")
        assert seen - died < 1
        assert min(again) - died < 2


DRIVER = """
    import os, sys, time
    from pathlib import Path

    from leyden import train
    from leyden.train.torch import TorchTrainer

    folder = Path(sys.argv[1])

    def train_func():
        rank = train.get_context().get_world_rank()
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        own = folder / f"state-{rank}"
        own.mkdir(exist_ok=True)
        (own / f"{rank}.pt").write_text("state")
        train.report({"step": 1}, checkpoint=train.Checkpoint.from_directory(own))
        while True:
            time.sleep(0.1)

    trainer = TorchTrainer(
        train_func,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="run", storage_path=str(folder)),
    )
    try:
        trainer.fit()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


@linux
@pytest.mark.parametrize(("phase", "limit"), [("starting", 10), ("running", 5)])  # the first start imports torch
def test_ctrl_c_ends_everything_in_seconds_with_the_result_so_far(tmp_path, phase, limit):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if phase == "running":
            pids = [int(wait_for_file(tmp_path / f"pid-{rank}")) for rank in range(2)]
            _wait_for(lambda: (tmp_path / "run" / "checkpoint_000000" / ".commit.json").exists())
        else:
            _wait_for(lambda: "SCHEDULING" in _text(tmp_path / "run" / "events.jsonl"))
            pids = []
        before = time.monotonic()
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
        output, _ = driver.communicate(timeout=30)
        seconds = time.monotonic() - before
    finally:
        driver.kill()
    assert "interrupted" in output, output
    assert driver.returncode in (1, -signal.SIGINT)
    assert seconds < limit, output
    assert wait_gone(pids, 1.0) == []
    assert Ledger.load(Storage(str(tmp_path / "run"))).run["status"] == "aborted"
    if phase == "running":
        result = Result.from_path(tmp_path / "run")
        assert result.metrics == {"step": 1}
        assert sorted(path.name for path in Path(result.checkpoint.path).glob("*.pt")) == ["0.pt", "1.pt"]


def _text(path):
    return path.read_text() if path.exists() else ""


def _wait_for(condition, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
