"""checkpoint/io.py: whole or absent on write; on read no code runs and every fault is named."""

import argparse
import collections
import datetime
import errno
import functools
import http.server
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from leyden.base import files
from leyden.base.errors import CheckpointError, UnsafeCheckpointError
from leyden.checkpoint.io import CheckpointIO, TorchCheckpointIO, load, save

SRC = str(Path(files.__file__).parents[2])


def a_checkpoint() -> dict:
    return {
        "epoch": 3,
        "state_dict": collections.OrderedDict(weight=torch.arange(6.0).reshape(2, 3), bias=torch.ones(2)),
        "hyper_parameters": {"lr": 0.1, "layers": [1, 2], "name": "x", "none": None},
    }


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert one["epoch"] == other["epoch"]
    assert one["hyper_parameters"] == other["hyper_parameters"]
    assert all(torch.equal(one["state_dict"][k], other["state_dict"][k]) for k in one["state_dict"])


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a.ckpt"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def run(command: list[str], *args: object) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.run([*command, *map(str, args)], env=env, capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------------------- the good case


def test_what_was_saved_is_loaded(path):
    io = TorchCheckpointIO()
    io.save_checkpoint(a_checkpoint(), path)
    assert_same(io.load_checkpoint(path), a_checkpoint())
    assert_same(torch.load(path, weights_only=True), a_checkpoint())  # plain torch reads it, too
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()
    io.teardown()


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.ckpt"
    save(a_checkpoint(), path)
    assert_same(load(str(path)), a_checkpoint())


def test_a_file_url_and_an_open_file_can_be_read(path):
    save(a_checkpoint(), path)
    assert_same(load(f"file://{path}"), a_checkpoint())
    with open(path, "rb") as file:
        assert_same(load(file), a_checkpoint())


def test_a_remote_file():
    fsspec = pytest.importorskip("fsspec")
    url = "memory://io-test/run/a.ckpt"
    io = TorchCheckpointIO()
    io.save_checkpoint(a_checkpoint(), url)
    assert_same(io.load_checkpoint(url), a_checkpoint())
    io.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt"):
        io.load_checkpoint(url)
    fsspec.filesystem("memory").rm("/io-test", recursive=True)


def test_a_web_address(tmp_path):
    save(a_checkpoint(), tmp_path / "a.ckpt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *args: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert_same(load(f"http://127.0.0.1:{server.server_port}/a.ckpt"), a_checkpoint())
        server.shutdown()


def test_an_own_checkpoint_io_needs_three_methods():
    with pytest.raises(TypeError, match="abstract"):
        CheckpointIO()


def test_storage_options_are_refused_with_the_way_out(path):
    with pytest.raises(TypeError, match=r"storage_options.*plugins"):
        TorchCheckpointIO().save_checkpoint({}, path, storage_options={"x": 1})


# ---------------------------------------------------------------------------- devices


def test_a_tensor_from_a_device_that_is_not_here_goes_to_the_cpu(path):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    save({"weight": torch.ones(3)}, path)
    on_gpu = path.with_name("gpu.ckpt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(on_gpu, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.endswith("data.pkl"):
                assert data.count(b"X\x03\x00\x00\x00cpu") == 1
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
            target.writestr(item.filename, data)
    assert load(on_gpu)["weight"].device.type == "cpu"
    assert TorchCheckpointIO().load_checkpoint(on_gpu)["weight"].device.type == "cpu"
    assert load(on_gpu, map_location="meta")["weight"].device.type == "meta"
    with pytest.raises(CheckpointError, match="CUDA"):
        load(on_gpu, map_location="cuda")


# ---------------------------------------------------------------------------- damaged files


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    save({}, tmp_path / "epoch=1.ckpt")
    with pytest.raises(FileNotFoundError, match=r"epoch=2.ckpt.*its folder has epoch=1.ckpt"):
        load(tmp_path / "epoch=2.ckpt")
    with pytest.raises(FileNotFoundError, match="neither does its folder"):
        load(tmp_path / "no" / "a.ckpt")


def test_an_empty_file(path):
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a.ckpt.*is empty"):
        load(path)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("keep", [0.02, 0.5, 0.99])
def test_a_truncated_file(path, keep, weights_only):
    save({"state_dict": {"w": torch.randn(5000)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=r"a.ckpt.*damaged or cut short") as caught:
        load(path, weights_only=weights_only)
    assert str(path.stat().st_size) in str(caught.value)


def test_a_file_that_is_no_checkpoint(path):
    for content in (b"hello world\n" * 100, bytes(1000), b"{}", b"\x80"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a checkpoint") as caught:
            load(path)
        assert not isinstance(caught.value, UnsafeCheckpointError)


def test_some_other_zip_file(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello.txt", "hello")
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_a_flipped_pickle_byte(path):
    save(a_checkpoint(), path)
    broken = path.with_name("broken.ckpt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(broken, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            target.writestr(item.filename, data[:20] + b"\xff" + data[21:] if "data.pkl" in item.filename else data)
    with pytest.raises(CheckpointError):
        load(broken)


def test_a_folder_is_not_a_checkpoint_file(tmp_path):
    folder = tmp_path / "sharded.ckpt"
    folder.mkdir()
    (folder / "__0_0.distcp").write_text("")
    with pytest.raises(CheckpointError, match="folder with 1 entries"):
        load(folder)
    with pytest.raises(OSError, match="directory"):
        save({}, folder)
    assert os.listdir(folder) == ["__0_0.distcp"]
    TorchCheckpointIO().remove_checkpoint(folder)
    assert not folder.exists()


# ---------------------------------------------------------------------------- hostile files


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/leyden-was-here",)


class HostileEval:
    def __reduce__(self):
        return eval, ("open('/tmp/leyden-was-here', 'w')",)


class HostileState:
    def __setstate__(self, state):
        Path("/tmp/leyden-was-here").touch()


def hostile_state() -> HostileState:
    made = HostileState()
    made.__dict__["x"] = 1
    return made


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (Hostile(), r"(posix|nt).system.*attack"),
        (HostileEval(), r"\beval\b.*attack"),
        (hostile_state(), "HostileState"),
        (functools.partial(os.remove, "/tmp/x"), "functools.partial"),
        (argparse.Namespace(a=1), "argparse.Namespace"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_refused_by_name_and_does_not_run(path, payload, named, zipped):
    torch.save({"state_dict": {}, "hyper_parameters": payload}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpointError, match=named) as caught:
        load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "weights_only=False" in text
    assert "add_safe_globals" in text
    assert not os.path.exists("/tmp/leyden-was-here")


def test_a_bare_hostile_pickle_is_refused(path):
    path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(CheckpointError):
        load(path)
    assert not os.path.exists("/tmp/leyden-was-here")


def test_all_classes_that_are_needed_are_named_at_once(path):
    torch.save({"a": argparse.Namespace(), "b": Hostile()}, path)
    with pytest.raises(UnsafeCheckpointError) as caught:
        load(path)
    assert "argparse.Namespace" in str(caught.value)
    assert "system" in str(caught.value)


def test_the_two_ways_out_work(path):
    torch.save({"a": argparse.Namespace(x=1)}, path)
    assert load(path, weights_only=False)["a"].x == 1
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert load(path)["a"].x == 1


def test_harmless_values_of_hyper_parameters_are_read(path):
    values = {
        "path": pathlib.PurePosixPath("/data"),
        "own": Path("/data/x"),
        "time": datetime.timedelta(minutes=5),
        "day": datetime.date(2026, 1, 2),
        "moment": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
        "hour": datetime.time(3, 4),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "frozen set": frozenset({1, 2}),
        "range": range(3),
        "slice": slice(1, None),
        "complex": 1 + 2j,
        "bytes": b"x",
    }
    torch.save({"hyper_parameters": values}, path)
    before = set(torch.serialization.get_safe_globals())
    assert load(path)["hyper_parameters"] == values
    assert set(torch.serialization.get_safe_globals()) == before  # nothing is left allowed for others


def test_a_harmless_class_does_not_let_a_harmful_one_in(path):
    torch.save({"path": Path("/data"), "b": Hostile()}, path)
    with pytest.raises(UnsafeCheckpointError, match="system") as caught:
        load(path)
    assert "Path" not in str(caught.value).split("needs", 1)[1]
    assert not os.path.exists("/tmp/leyden-was-here")


def test_a_harmless_class_keeps_what_the_user_allowed(path):
    torch.save({"path": Path("/data"), "own": argparse.Namespace(x=1)}, path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert load(path)["own"].x == 1
        assert argparse.Namespace in torch.serialization.get_safe_globals()


def test_a_numpy_scalar_is_named(path):
    torch.save({"score": np.float64(1.5)}, path)
    with pytest.raises(UnsafeCheckpointError, match="numpy"):
        load(path)


# ---------------------------------------------------------------------------- faults while writing


def test_an_object_that_can_not_be_pickled(path):
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"a.ckpt.*can't be pickled.*save_hyperparameters"):
        save({"hyper_parameters": {"fn": lambda x: x}}, path)
    with pytest.raises(CheckpointError, match="can't be pickled"):
        save({"lock": threading.Lock()}, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_a_file_over_the_size_limit(path):
    save(a_checkpoint(), path)
    code = """
        import resource, sys, torch
        from leyden.checkpoint.io import save
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            save({"state_dict": {"w": torch.zeros(1 << 20)}}, sys.argv[1])
        except OSError as error:
            print(error.errno, error)
    """
    done = run(python(code), path)
    assert done.stdout.startswith(str(errno.EFBIG)), done.stderr
    assert str(path) in done.stdout
    assert "intact" in done.stdout
    assert_same(load(path), a_checkpoint())
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_a_full_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    code = """
        import os, sys, torch
        from leyden.checkpoint.io import save, load
        folder = sys.argv[1]
        path = os.path.join(folder, "a.ckpt")
        save({"state_dict": {"w": torch.ones(1000)}}, path)
        for kind in range(2):
            try:
                save({"state_dict": {"w": torch.zeros(1 << 20)}}, path)
            except OSError as error:
                print(error.errno, error)
        assert os.listdir(folder) == ["a.ckpt"], os.listdir(folder)
        assert load(path)["state_dict"]["w"].sum() == 1000
        print("old file is there")
    """
    shell = f'mount -t tmpfs -o size=1m tmpfs {mount} && exec "$@"'
    isolated = ["unshare", "-rm", "sh", "-c", shell, "sh"]
    if not shutil.which("unshare") or run([*isolated, "true"]).returncode != 0:
        pytest.skip("can't mount a small disk here")
    done = run([*isolated, *python(code)], mount)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{errno.ENOSPC} [Errno {errno.ENOSPC}] can't write checkpoint: No space left") == 2
    assert "MiB are free" in done.stdout
    assert "old file is there" in done.stdout


def test_a_folder_without_write_permission(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a.ckpt").write_bytes(b"old")
    folder.chmod(0o555)

    def write() -> None:
        with pytest.raises(PermissionError, match=r"can't write checkpoint.*a.ckpt"):
            save({}, folder / "a.ckpt")

    if os.geteuid() != 0:
        write()
        folder.chmod(0o755)
        return
    # The superuser may write anywhere: try as somebody else.
    for part in (tmp_path, *tmp_path.parents[:3]):
        part.chmod(part.stat().st_mode | 0o055)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            write()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (folder / "a.ckpt").read_bytes() == b"old"


def test_a_path_through_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="can't write checkpoint"):
        save({}, tmp_path / "file" / "a.ckpt")


def test_kill_at_any_moment_leaves_a_whole_file(path):
    """The writer is killed at different moments of an endless row of saves; each time the file must be whole."""
    code = """
        import sys, torch
        from leyden.checkpoint.io import save
        number = 0
        while True:
            save({"number": number, "state_dict": {"w": torch.full((500_000,), float(number))}}, sys.argv[1])
            print(number, flush=True)
            number += 1
    """
    env = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1"}
    for saves in (1, 2, 4):
        writer = subprocess.Popen([*python(code), str(path)], env=env, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(saves):
            last = int(writer.stdout.readline())
        threading.Event().wait(0.003 * saves)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = load(path)
        assert found["number"] >= last
        assert torch.all(found["state_dict"]["w"] == found["number"])
