"""Which storage errors pass by themselves, and how long to wait for that."""

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from leyden.base.log import log

__all__ = ["RetryPolicy"]

T = TypeVar("T")

# s3fs turns "slow down" into EBUSY and server errors into EIO; network file systems give EIO and ESTALE on a hiccup.
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
# By class, wherever it stands in the ancestry; by name, because these packages are optional.
_TRANSIENT_CLASSES = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "aiohttp.client_exceptions.ServerTimeoutError",
        "asyncio.exceptions.TimeoutError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.exceptions.ResponseStreamingError",
        "fsspec.exceptions.FSTimeoutError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.HTTPError",
    }
)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of botocore, aiohttp or requests carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


@dataclass(frozen=True)
class RetryPolicy:
    """Tries again when an error may pass by itself. Make a subclass with another `is_transient` to widen or narrow it.

    Given to a run as ``RunConfig(storage_options={"retry": RetryPolicy(attempts=10)})``.

    Attributes:
        attempts: How often one operation is tried in all, at least 1.
        first_delay_s: Seconds before the second attempt; each further wait is ``factor`` times as long.
        factor: See ``first_delay_s``.
        max_delay_s: No wait is longer.
        jitter: Waits vary by this share, so that many ranks don't come back at the same moment.
        sleep: Waits for so many seconds.
    """

    attempts: int = 6
    first_delay_s: float = 0.25
    factor: float = 2.0
    max_delay_s: float = 20.0
    jitter: float = 0.25
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"RetryPolicy(attempts={self.attempts}): pass 1 for a single try, or more")
        if min(self.first_delay_s, self.max_delay_s, self.jitter) < 0 or self.factor < 1:
            raise ValueError(f"{self}: delays and jitter can't be negative, and factor is at least 1")

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same operation may succeed a moment later. Decided by class, error number and HTTP status."""
        seen: set[int] = set()
        cause: BaseException | None = error
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            if isinstance(cause, (ConnectionError, TimeoutError)):
                return True
            # What a system call says counts for this error only: ENOENT raised from a timeout was a timeout.
            if isinstance(cause, OSError) and cause.errno is not None and cause.errno in _TRANSIENT_ERRNOS:
                return True
            if any(f"{each.__module__}.{each.__qualname__}" in _TRANSIENT_CLASSES for each in type(cause).__mro__):
                return True
            if _status(cause) in _TRANSIENT_STATUS:
                return True
            cause = cause.__cause__
        return False

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the failed attempt number ``attempt`` (1, 2, ...)."""
        plain = min(self.first_delay_s * self.factor ** (attempt - 1), self.max_delay_s)
        return plain * (1 + self.jitter * (2 * random.random() - 1))

    def call(self, operation: Callable[[], T], what: str) -> T:
        """Runs ``operation``, again after each transient error while attempts are left; the last error is raised.

        Args:
            operation: Must be safe to run more than once.
            what: For the message that says what is tried again.
        """
        for attempt in range(1, self.attempts):
            try:
                return operation()
            except Exception as error:
                if not self.is_transient(error):
                    raise
                wait = self.delay(attempt)
                log.warning(
                    "%s failed (%s: %s); attempt %d of %d in %.1f s",
                    what,
                    type(error).__name__,
                    error,
                    attempt + 1,
                    self.attempts,
                    wait,
                )
                self.sleep(wait)
        return operation()
