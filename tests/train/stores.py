"""File systems for tests: one in memory that fails for a while, and a real S3 server on this machine."""

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from leyden.train.retry import RetryPolicy
from leyden.train.storage import Storage


class FlakyFileSystem(MemoryFileSystem):
    """Everything that touches data raises ``error`` for the next ``fail`` calls; -1: until told otherwise."""

    protocol = "memory"
    cachable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fail = 0
        self.error: Exception = OSError(errno.EIO, "the store has a hiccup")
        self.calls = 0
        self._count = threading.Lock()

    def _touch(self) -> None:
        with self._count:
            self.calls += 1
            if self.fail == 0:
                return
            self.fail -= self.fail > 0
        raise self.error

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._touch()
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def put_file(self, lpath, rpath, *args, **kwargs):
        self._touch()
        return super().put_file(lpath, rpath, *args, **kwargs)

    def get_file(self, rpath, lpath, *args, **kwargs):
        self._touch()
        return super().get_file(rpath, lpath, *args, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._touch()
        return super().cat_file(path, start=start, end=end, **kwargs)

    def find(self, path, *args, **kwargs):
        self._touch()
        return super().find(path, *args, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._touch()
        return super().ls(path, detail=detail, **kwargs)

    def rm(self, path, *args, **kwargs):
        self._touch()
        return super().rm(path, *args, **kwargs)


def no_wait(attempts: int = 6) -> RetryPolicy:
    """Retries without waiting."""
    return RetryPolicy(attempts=attempts, first_delay_s=0.0, sleep=lambda _: None)


class Interruption:
    """A WSGI application that answers the next ``fail`` requests with ``status`` instead of passing them on."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.fail = 0
        self.status = "503 Slow Down"
        self.code = "SlowDown"
        self.refused = 0

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if self.fail == 0:
            return self.app(environ, start_response)
        self.fail -= 1
        self.refused += 1
        with contextlib.suppress(Exception):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{self.code}</Code><Message>later</Message></Error>".encode()
        start_response(self.status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, Interruption]]:
    """A moto server; yields its address and what can interrupt it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = Interruption(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", app
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[dict[str, Any], Interruption]]:
    """(options, interruption) of a bucket ``leyden`` on a server of ours."""
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    pytest.importorskip("moto.server", reason="the S3 server of these tests is moto[server]", exc_type=ImportError)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server() as (address, interruption):
        options = {
            "key": "someone",
            "secret": "secret",
            "endpoint_url": address,
            "client_kwargs": {"region_name": "eu-west-1"},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
        Storage("s3://leyden", options).filesystem.mkdir("leyden")
        yield options, interruption
