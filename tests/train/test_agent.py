"""The parts that ranks are made with: connections, payloads, logs, and an agent that needs only its arguments."""

import os
import pickle
import socket
import subprocess
import sys
import threading
import warnings
from multiprocessing import AuthenticationError

import pytest
from local_run import make_plan

from leyden.dist.env import find_free_port
from leyden.train import node, payload
from leyden.train.agent import AUTHKEY, agent_command
from leyden.train.link import Link, accept, connect, listen
from leyden.train.logs import RankLog, open_log
from leyden.train.messages import AgentUp, CloseAgent, Died, Finished, StartRanks
from leyden.train.payload import call_with_config, load_value, pack_payload, unpack_payload

# ---- connections -----------------------------------------------------------------------------------------------------


def test_a_link_never_blocks_and_loses_nothing():
    left, right = map(Link, socket.socketpair())
    sent = [b"x" * 3_000_000, "small", {"a": 1}]
    for message in sent:
        left.send(message)
    assert left.pending  # more than the kernel takes
    got = []
    while len(got) < 3:
        left.flush()
        got += right.receive()
    assert got == sent
    assert not left.pending


def test_what_was_sent_before_the_end_is_read_after_it():
    left, right = map(Link, socket.socketpair())
    right.send("unread by the other")
    left.send("last words")
    left.close()
    right.send("too late")
    assert right.receive() == ["last words"]
    assert right.closed


def test_one_who_talks_all_the_time_is_read_in_turns():
    left, right = map(Link, socket.socketpair())
    for index in range(200):
        left.send((index, b"x" * 500))
    got = right.receive(1)
    while left.pending:
        left.flush()
        got += right.receive(1)
    assert [each[0] for each in got + right.receive(None)] == list(range(200))


def test_only_who_knows_the_key_is_let_in(tmp_path):
    path = str(tmp_path / "socket")
    errors = []

    def intrude():
        try:
            connect(path, b"wrong")
        except AuthenticationError as error:
            errors.append(error)

    with listen(path) as server:
        intruder = threading.Thread(target=intrude)
        intruder.start()
        with pytest.raises(AuthenticationError):
            accept(server, b"right", 5.0)
        intruder.join()
        assert len(errors) == 1
        with pytest.raises(TimeoutError):
            accept(server, b"right", 0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks of one node meet at lo")
def test_an_agent_needs_an_address_and_a_key(tmp_path):
    key = b"0123456789abcdef"
    with listen(("127.0.0.1", 0)) as server:
        command = agent_command(("127.0.0.1", server.getsockname()[1]), "node-7", "127.0.0.1")
        assert key.hex() not in " ".join(command)
        agent = subprocess.Popen(command, env={**os.environ, AUTHKEY: key.hex()})
        link = accept(server, key, 30.0)
    messages = []

    def wait_for(kind):
        while not any(isinstance(each, kind) for each in messages):
            assert not link.closed
            messages.extend(link.receive())
            link.flush()
        return next(each for each in messages if isinstance(each, kind))

    up = wait_for(AgentUp)
    assert (up.node, up.address, up.pid) == ("node-7", "127.0.0.1", agent.pid)
    plan = make_plan(0, 1, tmp_path, find_free_port(), environment={"A": "1"}, unset=("HOME",))
    link.send(
        StartRanks((plan,), pack_payload(lambda: (os.environ["A"], os.environ.get("HOME"), AUTHKEY in os.environ)))
    )
    assert load_value(wait_for(Finished).value) == ("1", None, False)
    assert wait_for(Died).exit_code == 0
    link.send(CloseAgent())
    assert agent.wait(10) == 0


# ---- payloads --------------------------------------------------------------------------------------------------------


class Holder:
    def __init__(self):
        self.inner = {"lock": threading.Lock()}


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("function", "config", "path"),
    [
        (print, {"model": {"parts": [1, threading.Lock()]}}, r"train_loop_config\['model'\]\['parts'\]\[1\]"),
        (print, {"holder": Holder()}, r"train_loop_config\['holder'\].inner\['lock'\]"),
        (lambda: LOCK, None, "train_func -> variable 'LOCK'"),
    ],
)
def test_what_can_not_be_pickled_is_named_by_its_path(function, config, path):
    with pytest.raises(TypeError, match=rf"^{path} can't be sent to the workers: <unlocked .*create it inside"):
        pack_payload(function, config)


def test_a_big_config_is_named_in_a_warning():
    with pytest.warns(UserWarning, match=r"^train_loop_config\['data'\] makes train_loop_config 11 MiB .*pass a path"):
        pack_payload(print, {"lr": 0.1, "data": bytes(11 << 20)})
    big = bytes(11 << 20)
    with pytest.warns(UserWarning, match=r"^train_func -> variable 'big' makes train_func 11 MiB .*load it inside"):
        pack_payload(lambda: big)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_payload(print, {"data": bytes(9 << 20)})


def test_a_payload_brings_its_modules_folder_and_file_names(tmp_path, monkeypatch):
    (tmp_path / "module_of_a_test.py").write_text("VALUE = 42\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.chdir(tmp_path)
        import module_of_a_test

        data = pack_payload(lambda: module_of_a_test.VALUE, None, {"train": [1]})
    del sys.modules["module_of_a_test"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir("/")
    function, config, datasets = unpack_payload(data)
    assert function() == 42
    assert (config, datasets) == (None, {"train": [1]})
    assert os.getcwd() == str(tmp_path)
    assert function.__code__.co_filename == __file__


def test_a_function_is_called_with_a_config_if_it_takes_one():
    assert call_with_config(lambda: 1, {"a": 1}) == 1
    assert call_with_config(lambda config: config, {"a": 1}) == {"a": 1}
    assert call_with_config(lambda config: config, None) == {}
    assert call_with_config(lambda config=5: config, None) == 5
    assert call_with_config(lambda config=5: config, {"a": 1}) == {"a": 1}
    with pytest.raises(TypeError, match=r"needs 2 arguments \(a, b\), but it is called with one"):
        call_with_config(lambda a, b: 1, {})


def test_a_value_that_can_not_be_loaded_is_text():
    assert load_value(None) is None
    assert load_value(payload.dump_value([1])) == [1]
    assert "ModuleNotFoundError" in load_value(b"cno_such_module\nf\n.").traceback
    assert pickle.loads(payload.dump_value(threading.Lock())).type == "_thread.lock"


# ---- logs and nodes --------------------------------------------------------------------------------------------------


def test_a_log_is_read_while_it_grows(tmp_path):
    log = RankLog(str(tmp_path / "logs" / "rank-0.log"), 0)
    os.write(log.descriptor, "a\xe4\n".encode()[:2])
    assert log.fresh() == "a"
    os.write(log.descriptor, "a\xe4\n".encode()[2:])
    assert log.fresh() == "\xe4\n"
    for index in range(100):
        os.write(log.descriptor, f"{index}\n".encode())
    assert log.tail() == tuple(map(str, range(50, 100)))
    log.close()


def test_a_log_that_can_not_be_written_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log, trouble = open_log(str(tmp_path / "file" / "rank-0.log"), 0)
    assert f"can't write {tmp_path / 'file'}" in trouble
    assert log.path.parent.parent == tmp_path
    log.close()


def test_devices_are_known_without_a_driver(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert node.device_ids() == (3, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert node.device_ids() == (0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert node.device_ids() == ()
    assert 1 <= node.cpu_count() <= os.cpu_count()
    assert node.oom_kills() >= 0
