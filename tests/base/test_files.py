"""base/files.py: with real faults (killed writers, full disks, locked folders) and a remote file system."""

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from leyden.base import files

SRC = str(Path(files.__file__).parents[2])


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def run_python(code: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env={**os.environ, "PYTHONPATH": SRC},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_local_and_remote_paths_are_told_apart():
    assert files.is_local("runs/a.ckpt")
    assert files.is_local(Path("/runs/a.ckpt"))
    assert files.is_local("file:///runs/a.ckpt")
    assert not files.is_local("s3://bucket/a.ckpt")
    assert not files.is_local("simplecache::s3://bucket/a.ckpt")
    assert files.local_path("file:///runs/a.ckpt") == "/runs/a.ckpt"


def test_paths_are_joined_and_split_in_their_own_way():
    assert files.join("runs", "a", "b.ckpt") == os.path.join("runs", "a", "b.ckpt")
    assert files.join("s3://bucket/runs/", "a", "b.ckpt") == "s3://bucket/runs/a/b.ckpt"
    assert files.parent("s3://bucket/runs/b.ckpt") == "s3://bucket/runs"
    assert files.parent("b.ckpt") == ""


def test_a_local_write_does_not_import_fsspec(tmp_path):
    done = run_python(
        """
        import sys
        from leyden.base import files
        files.atomic_write(sys.argv[1], lambda file: file.write(b"x"))
        files.rm(sys.argv[1])
        assert "fsspec" not in sys.modules
        """,
        tmp_path / "a",
    )
    assert done.returncode == 0, done.stderr


def test_write_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.ckpt"
    files.atomic_write(path, lambda file: file.write(b"old"))
    files.atomic_write(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.ckpt"]


def test_a_new_file_has_the_usual_rights(tmp_path):
    usual = tmp_path / "usual"
    usual.write_bytes(b"")
    files.atomic_write(tmp_path / "ours", lambda file: file.write(b""))
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_a_failing_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.atomic_write(path, fail)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.ckpt"]


def test_a_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 250)
    files.atomic_write(path, lambda file: file.write(b"x"))
    assert path.read_bytes() == b"x"


def test_a_killed_writer_leaves_the_old_file_and_its_rest_is_swept(tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom leyden.base import files\n"
            "def slow(file):\n"
            "    file.write(b'x' * (4 << 20)); file.flush(); print('half', flush=True); time.sleep(60)\n"
            "files.atomic_write(sys.argv[1], slow)",
            str(path),
        ],
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    [rest] = [tmp_path / name for name in names(tmp_path) if name != "a.ckpt"]
    an_hour_ago = time.time() - 3600
    os.utime(rest, (an_hour_ago, an_hour_ago))
    assert files.sweep_unfinished(tmp_path) == []  # its writer lives, however old it looks

    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert path.read_bytes() == b"old"
    os.utime(rest, None)
    assert files.sweep_unfinished(tmp_path) == []  # too young
    os.utime(rest, (an_hour_ago, an_hour_ago))
    assert files.sweep_unfinished(tmp_path) == [str(rest)]
    assert names(tmp_path) == ["a.ckpt"]


def test_a_file_too_large_is_an_os_error_even_when_the_writer_hides_it(tmp_path):
    path = tmp_path / "a.ckpt"
    path.write_bytes(b"old")
    done = run_python(
        """
        import resource, sys
        from leyden.base import files
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        def hide(file):
            try:
                file.write(b"x" * (8 << 20))
            except OSError:
                raise RuntimeError("unexpected pos 64 vs 0")
        try:
            files.atomic_write(sys.argv[1], hide)
        except OSError as error:
            print(error.errno)
        """,
        path,
    )
    assert done.stdout.strip() == str(errno.EFBIG), done.stderr
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.ckpt"]


def test_link_is_replaced_in_one_step(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link = tmp_path / "last"
    for name in ("one", "two"):
        files.replace_link(str(tmp_path / name), str(link))
        assert link.is_symlink()
        assert os.readlink(link) == name
        assert link.read_text() == name
    files.replace_link(str(link), str(link))
    assert link.read_text() == "two"
    files.replace_link(f"file://{tmp_path / 'one'}", f"file://{link}")
    assert link.read_text() == "one"


def test_link_takes_the_place_of_a_folder_and_a_file(tmp_path):
    (tmp_path / "one").write_text("one")
    folder = tmp_path / "last"
    folder.mkdir()
    (folder / "shard").write_text("x")
    files.replace_link(str(tmp_path / "one"), str(folder))
    assert folder.read_text() == "one"


def test_without_links_the_file_is_copied(tmp_path, monkeypatch):
    (tmp_path / "one").write_text("one")

    def no_links(*args):
        raise OSError("no privilege")

    monkeypatch.setattr(os, "symlink", no_links)
    files.replace_link(str(tmp_path / "one"), str(tmp_path / "last"))
    assert not (tmp_path / "last").is_symlink()
    assert (tmp_path / "last").read_text() == "one"


def test_rm_removes_a_link_and_not_its_target(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    (tmp_path / "link").symlink_to("folder")
    files.rm(tmp_path / "link")
    assert names(tmp_path) == ["folder"]
    files.rm(tmp_path / "folder")
    files.rm(tmp_path / "folder")  # gone already
    assert names(tmp_path) == []


def test_latest_takes_the_newest_that_exists(tmp_path):
    old, new, missing = tmp_path / "old", tmp_path / "new", tmp_path / "missing"
    for number, path in enumerate((old, new)):
        path.write_text("")
        os.utime(path, (1000 + number, 1000 + number))
    assert files.latest(new, old, missing) == str(new)
    assert files.latest(missing) is None


@pytest.fixture
def bucket():
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True) if fs.exists("/bucket") else None


def test_remote_files(bucket):
    path = files.join(bucket, "run", "a.ckpt")
    files.makedirs(files.parent(path))
    assert not files.exists(path)
    files.atomic_write(path, lambda file: file.write(b"old"))
    files.atomic_write(path, lambda file: file.write(b"new"))
    with files.get_filesystem(path).open(path) as file:
        assert file.read() == b"new"
    assert files.exists(path)
    assert files.is_dir(files.parent(path))
    assert [name.rsplit("/", 1)[-1] for name in files.list_dir(files.parent(path))] == ["a.ckpt"]
    assert abs(files.modified(path) - time.time()) < 60
    assert files.latest(path, files.join(bucket, "missing")) == path
    files.rm(path)
    assert not files.exists(path)
    assert files.list_dir(files.join(bucket, "nowhere")) == []


def test_a_failing_remote_write_leaves_the_old_file(bucket):
    path = files.join(bucket, "a.ckpt")
    files.atomic_write(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        files.atomic_write(path, fail)
    with files.get_filesystem(path).open(path) as file:
        assert file.read() == b"old"
    assert len(files.list_dir(bucket)) == 1


def test_a_failing_upload_leaves_the_old_file(bucket, monkeypatch):
    path = files.join(bucket, "a.ckpt")
    files.atomic_write(path, lambda file: file.write(b"old"))
    fs = files.get_filesystem(path)

    def fail(*args, **kwargs):
        raise ConnectionError("gone")

    monkeypatch.setattr(type(fs), "mv", fail)
    with pytest.raises(ConnectionError, match="gone"):
        files.atomic_write(path, lambda file: file.write(b"new"))
    with fs.open(path) as file:
        assert file.read() == b"old"
    assert len(files.list_dir(bucket)) == 1
