"""Lines that survive torn writes, full disks, and stores that go away for a while."""

import json
import math
import os
import resource
import threading

import pytest

from leyden.base.events import EventLog, LocalLines, SegmentedLines, parse_lines


def read(path) -> list[dict]:
    return parse_lines([path.read_bytes()])


def test_lines_are_in_the_file_before_append_returns(tmp_path):
    log = LocalLines(str(tmp_path / "a.jsonl"))
    log.append({"n": 1})
    assert read(tmp_path / "a.jsonl") == [{"n": 1}]
    log.append({"n": math.nan})
    assert log.close()
    assert math.isnan(read(tmp_path / "a.jsonl")[1]["n"])
    assert log.close()  # twice is no error


def test_a_torn_line_is_skipped_and_the_next_writer_stays_apart_from_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')  # its writer was killed in the middle
    log = LocalLines(str(path))
    log.append({"n": 3})
    log.close()
    assert read(path) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_a_file_that_is_cut_anywhere_gives_its_whole_lines(tmp_path, cut):
    path = tmp_path / "a.jsonl"
    log = LocalLines(str(path))
    for number in range(5):
        log.append({"n": number})
    log.close()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    # A last line without its end is whole all the same when it parses.
    assert [each["n"] for each in read(path)] == list(range(len(read(path))))
    assert len(read(path)) >= data[:cut].count(b"\n")


def test_lines_that_are_no_objects_are_skipped():
    assert parse_lines([b'1\n[]\n\n{"a":1}\nnull\n\xff\xfe\n']) == [{"a": 1}]


def test_a_full_disk_delays_lines_and_loses_none(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    log = LocalLines(str(path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # no room after 100 bytes, in the middle of a line
    try:
        for number in range(50):
            log.append({"number": number})
        assert os.path.getsize(path) == 100
        assert not log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append({"number": 50})
    assert read(path) == [{"number": number} for number in range(51)]
    assert log.close()
    assert len([each for each in caplog.records if "can't be written now" in each.message]) <= 1


def test_values_that_json_does_not_know_become_text(tmp_path):
    events = EventLog(LocalLines(str(tmp_path / "e.jsonl")), clock=lambda: 5.0)
    events.emit("start", where=tmp_path)
    events.close()
    assert read(tmp_path / "e.jsonl") == [{"time": 5.0, "event": "start", "where": str(tmp_path)}]


def test_many_threads_write_whole_lines(tmp_path):
    log = LocalLines(str(tmp_path / "a.jsonl"))

    def write(thread: int) -> None:
        for number in range(200):
            log.append({"thread": thread, "number": number})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    log.close()
    assert len(read(tmp_path / "a.jsonl")) == 800


class Store(dict):
    """Objects by name, in a store that can go away."""

    away = False
    puts = 0

    def put(self, name: str, data: bytes) -> None:
        self.puts += 1
        if self.away:
            raise ConnectionError("the store is away")
        self[name] = data

    def lines(self, name: str = "m.jsonl") -> list[dict]:
        return parse_lines(self[each] for each in SegmentedLines.segments(name, self))


def test_segments_are_bounded_and_read_in_order():
    store = Store()
    log = SegmentedLines(store.put, "m.jsonl", every_s=60, segment_bytes=100)
    for number in range(100):
        log.append({"n": number})
        if number % 7 == 0:
            log.flush()
    assert log.close()
    assert store.lines() == [{"n": number} for number in range(100)]
    assert max(map(len, store.values())) < 120
    assert store.puts < 60  # a full segment is not put again


def test_a_store_that_goes_away_gets_all_lines_later():
    store = Store()
    log = SegmentedLines(store.put, "m.jsonl", every_s=60, segment_bytes=100)
    for number in range(90):
        store.away = 20 <= number < 70
        log.append({"n": number})
        assert log.flush() is not store.away
    assert log.close()
    assert store.lines() == [{"n": number} for number in range(90)]


def test_a_store_that_stays_away_is_named_at_the_end(caplog):
    store = Store()
    store.away = True
    log = SegmentedLines(store.put, "m.jsonl", every_s=60)
    log.append({"n": 1})
    assert not log.close()


def test_the_thread_flushes_by_itself():
    store = Store()
    arrived = threading.Event()

    def put(name: str, data: bytes) -> None:
        store.put(name, data)
        arrived.set()

    log = SegmentedLines(put, "m.jsonl", every_s=0.01)
    log.append({"n": 1})
    assert arrived.wait(5)
    log.close()
    assert store.lines() == [{"n": 1}]


def test_a_second_writer_goes_on_in_a_new_segment():
    store = Store()
    for first, number in ((0, 1), (1, 2)):
        log = SegmentedLines(store.put, "m.jsonl", first=first)
        log.append({"n": number})
        log.close()
    store.put("m.other.jsonl", json.dumps({"n": 9}).encode())  # not one of the log
    assert store.lines() == [{"n": 1}, {"n": 2}]
