"""Tests of the journal: appended records survive, torn tails are cut, and damaged files are refused."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from permille.choices import EstimatorKind
from permille.errors import InputError, OperatorError, PackageError, RetryableError
from permille.zo.header import MAX_GROUPS, DirectionKind
from permille.zo.journal import Journal, encode_header, parse_journal, read_journal
from permille.zo.records import StepFlag, StepRecord, coefficients_of
from permille.zo.replay import replay
from tests.unit.zo import reference
from tests.unit.zo.logs import (
    fields_of,
    flipped,
    make_header,
    make_records,
    random_rows,
    records_strategy,
    same_records,
)

ROWS = random_rows(12, seed=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.journal"


def state_of(journal: Journal) -> list[int]:
    state: list[int] = replay(journal.header, coefficients_of(journal.records(), journal.header)).tolist()
    return state


def write_journal(path: Path, rows: list[list[int]] = ROWS) -> list[int]:
    """Write a journal of `rows`. Return the ends of the header and of each record."""
    ends = []
    with Journal.create(path, make_header()) as journal:
        ends.append(path.stat().st_size)
        for record in make_records(rows):
            journal.append(record)
            ends.append(path.stat().st_size)
    return ends


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=records_strategy(queries=2, max_steps=20))
def test_records_come_back_in_order_with_their_losses(path: Path, records: list[StepRecord]) -> None:
    path.unlink(missing_ok=True)
    with Journal.create(path, make_header()) as journal:
        for record in records:
            journal.append(record)
        assert same_records(list(journal.records()), records)
    with Journal.open(path) as journal:
        assert journal.header == make_header()
        assert journal.torn_bytes == 0
        assert same_records(list(journal.records()), records)


def test_a_cut_at_any_byte_leaves_exactly_the_whole_records(path: Path) -> None:
    ends = write_journal(path)
    data = path.read_bytes()
    states = [reference.state(fields_of(make_header()), ROWS[:n]) for n in (5, 12)]
    for cut in range(ends[0], len(data) + 1):
        whole = sum(end <= cut for end in ends[1:])
        contents = parse_journal(data[:cut], path)
        assert [list(record.coefficients) for record in contents.records] == ROWS[:whole]
        assert contents.torn_bytes == cut - ends[whole]
    # The sixth record is torn after 3 bytes.
    path.write_bytes(data[: ends[5] + 3])
    with Journal.open(path) as journal:
        assert journal.torn_bytes == 3
        assert state_of(journal) == states[0]
        for record in make_records(ROWS)[5:]:
            journal.append(record)
        assert state_of(journal) == states[1]
    assert path.read_bytes() == data


@pytest.mark.parametrize("tail", [b"\0" * 40, b"\xff" * 7000, b"\x20\x00half a record"])
def test_a_tail_that_was_allocated_but_not_written_is_cut(path: Path, tail: bytes) -> None:
    ends = write_journal(path)
    data = path.read_bytes()
    path.write_bytes(data + tail)
    with Journal.open(path) as journal:
        assert journal.torn_bytes == len(tail)
        assert journal.next_step == len(ROWS)
    assert path.stat().st_size == ends[-1]


def test_a_flipped_bit_before_the_last_record_is_damage_that_is_left_as_it_is(path: Path) -> None:
    ends = write_journal(path)
    data = path.read_bytes()
    for position in range(ends[0], ends[-2]):
        with pytest.raises(PackageError, match="journal-corrupt"):
            parse_journal(flipped(data, position), path)
    damaged = flipped(data, ends[3] + 5)
    path.write_bytes(damaged)
    with pytest.raises(PackageError, match="journal-corrupt"):
        Journal.open(path)
    assert path.read_bytes() == damaged


def test_a_torn_header_and_every_flipped_bit_of_one_are_refused_by_name(path: Path) -> None:
    data = encode_header(make_header())
    torn = [data[:kept] for kept in (0, 5, 11, 12, 100, -1)]
    for damaged in (*torn, *(flipped(data, position) for position in range(len(data)))):
        with pytest.raises(PackageError, match="journal-header"):
            parse_journal(damaged, path)
    path.write_bytes(torn[4])
    with pytest.raises(PackageError, match="journal-header"):
        Journal.open(path)


def test_an_entry_of_another_journal_does_not_fit(path: Path, tmp_path: Path) -> None:
    ends = write_journal(path)
    other = tmp_path / "other.journal"
    with Journal.create(other, make_header(seed=1)) as journal:
        journal.append(make_records(ROWS)[0])
    foreign = other.read_bytes()[len(encode_header(make_header(seed=1))) :]
    contents = parse_journal(path.read_bytes()[: ends[0]] + foreign, path)
    assert contents.records == ()
    assert contents.torn_bytes == len(foreign)


def test_an_entry_of_as_many_and_as_large_coefficients_as_there_may_be_comes_back(path: Path) -> None:
    header = make_header(
        estimator=EstimatorKind.GRADIENT, directions=DirectionKind.GROUPS, queries=MAX_GROUPS
    )
    record = make_records([[2**31 - 1] * MAX_GROUPS])[0]
    with Journal.create(path, header) as journal:
        journal.append(record)
    assert read_journal(path).records == (record,)


def test_a_second_writer_is_told_to_wait_and_a_reader_is_not(path: Path) -> None:
    with Journal.create(path, make_header()) as journal:
        journal.append(make_records(ROWS)[0])
        with pytest.raises(RetryableError, match="Another process writes"):
            Journal.open(path)
        assert len(read_journal(path).records) == 1
    Journal.open(path).close()


WRITER = """
import pathlib, sys
from permille.zo.journal import Journal
from permille.zo.records import StepRecord
journal = Journal.open(pathlib.Path(sys.argv[1]))
while True:
    step = journal.next_step
    journal.append(StepRecord(step=step, coefficients=(step, -step), loss=0.0))
    print(step, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    Journal.create(path, make_header()).close()
    acknowledged = -1
    for lines in (1, 7, 30):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(lines):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
        with Journal.open(path) as journal:  # the lock died with its process
            records = list(journal.records())
        assert len(records) > acknowledged
        assert [record.coefficients for record in records] == [(step, -step) for step in range(len(records))]


def test_create_never_overwrites_and_is_for_its_user_alone_and_open_never_creates(path: Path) -> None:
    with pytest.raises(InputError, match="There is no journal"):
        Journal.open(path)
    with pytest.raises(InputError, match="There is no journal"):
        read_journal(path)
    assert not path.exists()
    write_journal(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="never overwritten"):
        Journal.create(path, make_header())


@pytest.mark.parametrize(
    "record",
    [
        StepRecord(step=1, coefficients=(0, 0), loss=0.0),
        StepRecord(step=0, coefficients=(0,), loss=0.0),
        StepRecord(step=0, coefficients=(0, 2**31), loss=0.0),
        StepRecord(step=0, coefficients=(3, 0), loss=0.0, flags=StepFlag.REJECTED),
    ],
)
def test_a_record_that_does_not_continue_the_journal_is_not_written(path: Path, record: StepRecord) -> None:
    with Journal.create(path, make_header()) as journal:
        size = path.stat().st_size
        with pytest.raises(InputError, match="expected"):
            journal.append(record)
        assert path.stat().st_size == size
        journal.append(make_records(ROWS)[0])


def test_a_record_that_could_leave_the_exact_range_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("permille.zo.records.STATE_LIMIT", 1000)
    records = make_records([[-400, 100]] * 3)
    with Journal.create(path, make_header()) as journal:
        for record in records[:2]:
            journal.append(record)
        with pytest.raises(InputError, match="2\\*\\*53"):
            journal.append(records[2])
        assert journal.next_step == 2
    with Journal.open(path) as journal, pytest.raises(InputError, match="2\\*\\*53"):
        journal.append(records[2])


def test_every_append_is_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    with Journal.create(path, make_header()) as journal:
        monkeypatch.setattr(os, "fsync", synced.append)
        for record in make_records(ROWS)[:3]:
            journal.append(record)
    assert len(synced) == 3


def test_a_full_disk_ends_the_journal_at_its_last_whole_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def half_then_full(descriptor: int, data: bytes, offset: int) -> int:
        if offset + len(data) > ends[6]:
            real(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    ends = write_journal(path)
    path.write_bytes(path.read_bytes()[: ends[4]])
    monkeypatch.setattr(os, "pwrite", half_then_full)
    with Journal.open(path) as journal:
        for record in make_records(ROWS)[4:6]:
            journal.append(record)
        with pytest.raises(OperatorError, match="No space left"):
            journal.append(make_records(ROWS)[6])
        with pytest.raises(OperatorError, match="could not be written"):
            journal.append(make_records(ROWS)[6])
    monkeypatch.undo()
    with Journal.open(path) as journal:
        assert [list(record.coefficients) for record in journal.records()] == ROWS[:6]
        assert journal.torn_bytes > 0


def test_a_closed_journal_takes_no_more(path: Path) -> None:
    journal = Journal.create(path, make_header())
    journal.close()
    journal.close()
    with pytest.raises(OperatorError, match="is closed"):
        journal.append(make_records(ROWS)[0])


def test_a_step_costs_some_two_dozen_bytes(path: Path) -> None:
    ends = write_journal(path, random_rows(200))
    assert (ends[-1] - ends[0]) / 200 < 25
