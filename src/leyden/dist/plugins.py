"""Tables of plug-ins by name, whose classes are imported when they are asked for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from leyden.base.registry import did_you_mean, import_from

__all__ = ["PluginRegistry"]


@dataclass
class _Entry:
    target: Any
    description: str
    init_params: dict[str, Any] = field(default_factory=dict)


class PluginRegistry:
    """Name -> class (or ``"package.module:Class"``) with the arguments to build it with.

    Args:
        kind: What the names are of, as it stands in the Trainer call, e.g. ``"strategy"``; used in errors.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, _Entry] = {}
        self._absent: dict[str, str] = {}

    def register(
        self, name: str, target: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Adds a name; without ``target`` it is a class decorator.

        Args:
            name: What users write.
            target: The class, or where to import it from as ``"package.module:Class"``.
            description: One line for people.
            override: Replace an entry of the same name instead of raising.
            **init_params: Arguments that `get` builds the class with.

        Raises:
            ValueError: The name is taken and ``override`` is False.
        """
        if not isinstance(name, str):
            raise TypeError(f"{self.kind} name must be a str, got {name!r}")
        if name in self._entries and not override:
            raise ValueError(f"{self.kind}={name!r} is already registered; pass override=True to replace it")

        def add(cls: Any) -> Any:
            self._entries[name] = _Entry(cls, description, init_params)
            return cls

        return add if target is None else add(target)

    def mark_absent(self, name: str, reason: str) -> None:
        """Notes a name that users know from elsewhere, and what `get` says about it."""
        self._absent[name] = reason

    def get_class(self, name: str) -> Any:
        """The class registered under ``name``.

        Raises:
            ValueError: The name is unknown, or known to be absent from this version.
        """
        return self._resolve(self._entry(name))

    def get(self, name: str, **overrides: Any) -> Any:
        """Builds the class registered under ``name``; ``overrides`` win over the registered arguments.

        Raises:
            ValueError: The name is unknown, or known to be absent from this version.
        """
        entry = self._entry(name)
        return self._resolve(entry)(**{**entry.init_params, **overrides})

    def get_description(self, name: str) -> str:
        """The line given at registration."""
        return self._entry(name).description

    def remove(self, name: str) -> None:
        """Takes a name away; unknown names raise as in `get`."""
        self._entry(name)
        del self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _entry(self, name: str) -> _Entry:
        if name in self._entries:
            return self._entries[name]
        if name in self._absent:
            raise ValueError(f"{self.kind}={name!r} {self._absent[name]}")
        raise ValueError(f"{self.kind}={name!r} is unknown; {did_you_mean(str(name), self._entries)}")

    @staticmethod
    def _resolve(entry: _Entry) -> Any:
        if isinstance(entry.target, str):
            entry.target = import_from(entry.target)
        return entry.target
