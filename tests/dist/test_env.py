import socket

import pytest

from leyden.base import log
from leyden.base.log import rank_zero_only
from leyden.dist import env, schedulers
from leyden.dist.env import (
    KubeflowEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
    detect_environment,
    dist_info,
    find_free_port,
)
from leyden.dist.schedulers import LSFEnvironment, MPIEnvironment, SLURMEnvironment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NAME": "train",
    "SLURM_NODELIST": "gpu[07-09],gpu12",
}
KUBEFLOW = {"KUBERNETES_PORT": "x", "MASTER_ADDR": "pod-0", "MASTER_PORT": "2222", "WORLD_SIZE": "5", "RANK": "2"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """No trace of a launcher, and none left behind: some environments write what they found."""
    for name in (*TORCHRUN, *SLURM, *KUBEFLOW, "NODE_RANK", "LSB_JOBID", "LSB_DJOB_RANKFILE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "x")  # remembered, so that writes of the code under test are undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # warnings are rank 0's, and dist_info sets the rank
    monkeypatch.setattr(log, "_said", set())
    for name in ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _facts(environment):
    return (
        environment.world_size(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
        environment.main_address,
        environment.main_port,
        environment.creates_processes_externally,
    )


@pytest.mark.parametrize(
    ("variables", "cls"),
    [
        ({}, LightningEnvironment),
        (TORCHRUN, TorchElasticEnvironment),
        (SLURM, SLURMEnvironment),
        ({**SLURM, **TORCHRUN}, TorchElasticEnvironment),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, LightningEnvironment),
        ({**SLURM, "SLURM_JOB_NAME": "interactive"}, LightningEnvironment),
        (KUBEFLOW, KubeflowEnvironment),
        ({**KUBEFLOW, "LOCAL_RANK": "0"}, LightningEnvironment),
        ({**KUBEFLOW, **TORCHRUN}, TorchElasticEnvironment),
    ],
)
def test_detection(monkeypatch, variables, cls):
    _set(monkeypatch, variables)
    assert type(detect_environment()) is cls


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        (TORCHRUN, (4, 3, 1, 1, "host0", 1234, True)),
        (SLURM, (4, 3, 1, 1, "gpu07", 15000 + 3456, True)),
        ({**SLURM, "MASTER_ADDR": "own", "MASTER_PORT": "99"}, (4, 3, 1, 1, "own", 99, True)),
        (KUBEFLOW, (5, 2, 0, 2, "pod-0", 2222, True)),
    ],
)
def test_facts(monkeypatch, variables, facts):
    _set(monkeypatch, variables)
    environment = detect_environment()
    environment.set_global_rank(100)  # ignored
    environment.set_world_size(100)
    assert _facts(environment) == facts


def test_missing_variable_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"TorchElasticEnvironment needs the environment variable RANK .*not set"):
        TorchElasticEnvironment().global_rank()
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(ValueError, match="but it is 'two'"):
        TorchElasticEnvironment().global_rank()


def test_torchrun_without_a_meeting_point_gets_defaults():
    environment = TorchElasticEnvironment()
    with pytest.warns(UserWarning, match="is not set") as warned:
        assert (environment.main_address, environment.main_port) == ("127.0.0.1", 12910)
    assert len(warned) == 2


def test_torchrun_settings(monkeypatch):
    _set(monkeypatch, TORCHRUN)
    TorchElasticEnvironment().validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(ValueError, match=r"devices=4 times num_nodes=2 is 8, but torchrun started 4 processes"):
        TorchElasticEnvironment().validate_settings(num_devices=4, num_nodes=2)


def test_own_environment(monkeypatch):
    environment = LightningEnvironment()
    assert not environment.creates_processes_externally
    assert environment.main_address == "127.0.0.1"
    assert environment.main_port == environment.main_port  # chosen once
    monkeypatch.setenv("MASTER_PORT", "4321")
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    environment = LightningEnvironment()
    info = dist_info(environment, num_devices=2, num_nodes=3)
    assert info == env.DistInfo(3, 1, 1, 6, 2, "127.0.0.1", 4321)
    assert environment.creates_processes_externally
    monkeypatch.setenv("WORLD_SIZE", "6")
    environment.teardown()
    assert "WORLD_SIZE" not in env.os.environ


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("alpha", "alpha"),
        ("alpha,beta,gamma", "alpha"),
        ("alpha beta gamma", "alpha"),
        ("1.2.3.[100-110]", "1.2.3.100"),
        ("host[22]", "host22"),
        ("n[009-011]", "n009"),
        ("cluster[5,7-9],other", "cluster5"),
        ("a[1-2,5]b,c", "a1b"),
    ],
)
def test_slurm_root_node(nodes, first):
    assert SLURMEnvironment.resolve_root_node_address(nodes) == first


def test_slurm_settings(monkeypatch):
    _set(monkeypatch, SLURM)
    environment = SLURMEnvironment()
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(ValueError, match="devices=4, but the SLURM job has --ntasks-per-node=2: set devices=2"):
        environment.validate_settings(num_devices=4, num_nodes=2)
    with pytest.raises(ValueError, match="num_nodes=1, but the SLURM job has --nodes=2: set num_nodes=2"):
        environment.validate_settings(num_devices=2, num_nodes=1)
    assert environment.job_id() == 123456
    assert environment.auto_requeue
    assert environment.requeue_signal.name == "SIGUSR1"
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    environment.validate_settings(num_devices=4, num_nodes=4)
    assert environment.job_id() is None
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    with pytest.raises(RuntimeError, match=r"--ntasks=4 does not say .* use --ntasks-per-node"):
        SLURMEnvironment()


def test_slurm_says_when_srun_is_there_and_unused(monkeypatch):
    monkeypatch.setattr(schedulers.shutil, "which", lambda name: "/usr/bin/srun")
    with pytest.warns(UserWarning, match="started without it; on SLURM write: srun python"):
        assert not SLURMEnvironment.detect()


def test_lsf(monkeypatch, tmp_path):
    path = tmp_path / "ranks"
    path.write_text("launch\nfirst\nfirst\nsecond\nsecond\n", encoding="utf-8")
    variables = {
        "LSB_JOBID": "1234567",
        "LSB_DJOB_RANKFILE": str(path),
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
    }
    _set(monkeypatch, variables)
    monkeypatch.setattr(socket, "gethostname", lambda: "second")
    environment = detect_environment()
    assert type(environment) is LSFEnvironment
    assert _facts(environment) == (4, 3, 1, 1, "first", 10567, True)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    with pytest.raises(ValueError, match=r"'elsewhere', is not in the LSF rank file, which has \['first', 'second'\]"):
        LSFEnvironment()
    path.write_text("launch\n", encoding="utf-8")
    with pytest.raises(ValueError, match="names no compute host"):
        LSFEnvironment()
    monkeypatch.delenv("LSB_DJOB_RANKFILE")
    with pytest.raises(ValueError, match="needs LSB_DJOB_RANKFILE"):
        LSFEnvironment()


def test_mpi_without_its_package(monkeypatch):
    monkeypatch.setattr(schedulers.importlib.util, "find_spec", lambda name: None)
    assert not MPIEnvironment.detect()
    with pytest.raises(ModuleNotFoundError, match="pip install mpi4py"):
        MPIEnvironment()


def test_mpi(monkeypatch):
    class World:
        def Get_size(self):
            return 4

        def Get_rank(self):
            return 2

        def bcast(self, value, root):
            return ("main", 77)

        def allgather(self, name):
            return ["b", "b", "a", name]

        def Split(self, color):
            assert color == 0
            return World()

    import sys
    import types

    package, module = types.ModuleType("mpi4py"), types.ModuleType("mpi4py.MPI")
    module.COMM_WORLD = World()
    package.MPI = module
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setattr(schedulers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    environment = detect_environment()
    assert type(environment) is MPIEnvironment
    assert _facts(environment) == (4, 2, 2, 0, "main", 77, True)


def test_free_port_can_be_bound():
    port = find_free_port()
    with socket.socket() as server:
        server.bind(("", port))


def test_schedulers_are_part_of_this_module():
    assert env.SLURMEnvironment is SLURMEnvironment
    with pytest.raises(AttributeError):
        _ = env.NothingOfThatName
