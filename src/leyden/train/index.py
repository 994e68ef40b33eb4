"""Which committed checkpoints a run folder holds: from the ledger, checked against what is there."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from leyden.base.log import log
from leyden.train.documents import read_document
from leyden.train.records import COMMIT_RECORD, Record, decode_record
from leyden.train.storage import Storage

__all__ = ["LEDGER", "load_records", "read_commit", "what_is_missing"]

LEDGER = "ledger.json"


def read_commit(storage: Storage, folder: str) -> Record | None:
    """The commit record of a folder; None where there is none, or it is torn or another folder's: it doesn't count."""
    try:
        record = decode_record(storage.read(f"{folder}/{COMMIT_RECORD}"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s/%s is damaged (%s): it is no checkpoint", storage.url_of(folder), COMMIT_RECORD, error)
        return None
    # A copy that somebody made under another name is theirs: not to resume from, and not to delete.
    return record if record.folder == folder else None


def what_is_missing(record: Record, there: Mapping[str, int]) -> str:
    """Why the files ``there`` (path in the folder -> size) are not this checkpoint; "" when they are."""
    for name, sizes in record.sizes.items():
        if name not in there:
            return f"{name} is not there"
        if there[name] not in sizes:
            return f"{name} has {there[name]} bytes instead of {' or '.join(map(str, sorted(sizes)))}"
    return ""


def load_records(storage: Storage) -> tuple[list[Record], int]:
    """The checkpoints of a run, oldest first, each of them whole; and the highest index that was ever committed (-1).

    The ledger says what counts. Where no copy of it is whole, the commit records do. A checkpoint committed just before
    a crash, which the ledger doesn't name yet, counts too: its index is higher than any that the ledger has seen. One
    that the ledger names and that is not there, or not whole, is left out with a warning.
    """
    for last in (False, False, True):
        known, newest, damaged = _read_ledger(storage)
        listing = _by_folder(storage.files())
        committed = [folder for folder, there in listing.items() if COMMIT_RECORD in there]
        found = {record.folder: record for record in _commits(storage, committed)}
        records, missing = _compare(known, newest, found, listing)
        # While we looked, the driver may have given up what the ledger named: then the ledger differs now.
        if last or not missing or _read_ledger(storage)[:2] == (known, newest):
            break
    if known is None and damaged:
        log.warning("%s is rebuilt from the commit records of %d checkpoints", storage.url_of(LEDGER), len(records))
    for folder, why in missing.items():
        log.warning("the checkpoint %s is left out: %s", storage.url_of(folder), why)
    records.sort(key=lambda each: (each.index, each.time))
    return records, max([newest, *(each.index for each in records)])


def _read_ledger(storage: Storage) -> tuple[list[Record] | None, int, bool]:
    """What the ledger names, None where there is no whole one; its highest index; whether a damaged one was found."""
    content, damaged = read_document(storage, LEDGER)
    if content is None:
        return None, -1, damaged
    try:
        return [decode_record(each) for each in content["checkpoints"]], int(content["newest"]), damaged
    except (KeyError, TypeError, ValueError) as error:
        log.warning("%s is no ledger (%s: %s)", storage.url_of(LEDGER), type(error).__name__, error)
        return None, -1, True


def _compare(
    known: list[Record] | None, newest: int, found: Mapping[str, Record], listing: Mapping[str, Mapping[str, int]]
) -> tuple[list[Record], dict[str, str]]:
    """The records that count, and folder -> why it doesn't. Pure.

    Args:
        known: What the ledger names; None: there is none.
        newest: The highest index that it has seen.
        found: Folder -> its commit record.
        listing: Folder -> path in it -> size.
    """
    named = {} if known is None else {record.folder: record for record in known}
    records, missing = [], {}
    for folder in named.keys() | found.keys():
        record = found.get(folder)
        if record is None:
            missing[folder] = "its commit record is not there" if folder in listing else "it was deleted"
        elif known is not None and folder not in named and record.index <= newest:
            continue  # given up already; its files are about to go
        elif why := what_is_missing(record, listing[folder]):
            missing[folder] = why
        else:
            records.append(replace(record, parts={}))
    return records, missing


def _by_folder(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Paths in the run folder -> for each folder directly in it: path there -> size."""
    folders: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        folder, slash, name = path.partition("/")
        if slash:
            folders.setdefault(folder, {})[name] = size
    return folders


def _commits(storage: Storage, folders: Iterable[str]) -> list[Record]:
    records: list[Any] = storage.each(folders, lambda folder: read_commit(storage, folder))
    return [record for record in records if record is not None]
