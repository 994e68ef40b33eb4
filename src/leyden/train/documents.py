"""Small JSON files that a crash can't destroy: each is written twice, and read from the copy that is whole."""

import json
from collections.abc import Mapping
from typing import Any

from leyden.base.log import log
from leyden.train.storage import Storage

__all__ = ["read_document", "write_document"]


def write_document(storage: Storage, name: str, content: Mapping[str, Any]) -> None:
    """Writes ``content`` to ``NAME.bak``, then to ``NAME``: at any moment one of them is whole."""
    data = json.dumps(content, indent=1, default=str).encode()
    storage.write_atomic(f"{name}.bak", data)
    storage.write_atomic(name, data)


def read_document(storage: Storage, name: str) -> tuple[dict[str, Any] | None, bool]:
    """What `write_document` wrote last, or before that; None where there is none, or no copy is whole.

    Returns:
        The content, and whether a copy was found that is damaged.
    """
    damaged = False
    for copy in (name, f"{name}.bak"):
        try:
            content = json.loads(storage.read(copy))
            if isinstance(content, dict):
                return content, damaged
            raise ValueError("no JSON object")
        except FileNotFoundError:
            continue
        except ValueError as error:
            damaged = True
            log.warning("%s is damaged (%s)", storage.url_of(copy), error)
    return None, damaged
