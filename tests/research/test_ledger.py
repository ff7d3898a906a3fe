"""The ledger is only appended to, and a change of a line is noticed."""

import json

import msgspec
import pytest

from gptlite.errors import UserError
from gptlite.research.ledger import (
    Confirming,
    Failed,
    Ledger,
    Look,
    Opened,
    Runs,
    Speed,
    Tuned,
    Variant,
)

OPENED = Opened("ab" * 32, "cd" * 8, 100, 100)
BASE = Variant("ab" * 8, "base", None, None, None, {}, {"jax": "0.10"}, 90, 500)
VARIANT = Variant("ef" * 8, "n_layers=3", "ab" * 8, 0.02, "steps", {}, {"jax": "0.10"}, 100, 600)
TWIN = msgspec.structs.replace(VARIANT, variant="56" * 8, level=None)
LATER = msgspec.structs.replace(VARIANT, variant="34" * 8, twin="56" * 8)
RUNS = Runs("ef" * 8, [0, 1], 8, [4, 8], [[2.0, 1.5], [2.0, None]], 3.0)
LOOK = Look("ef" * 8, 2, -0.1, None, "no difference found")
ENTRIES = [
    OPENED,
    BASE,
    VARIANT,
    Speed("ef" * 8, 8, [1.0, 1.5]),
    RUNS,
    Failed("ef" * 8, [2], "XlaRuntimeError: no memory"),
    LOOK,
    TWIN,
    Runs("ef" * 8, [2], 8, [4], [[2.0]], 1.0, "stopped at step 4 of 8"),
]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "new" / "ledger.jsonl"
    ledger = Ledger(path)
    for entry in ENTRIES:
        ledger.append(entry)
    return path


def test_entries_are_read_as_they_were_written(path):
    ledger = Ledger(path)
    assert ledger.entries == ENTRIES
    assert list(ledger.of(Runs)) == [ENTRIES[4], ENTRIES[8]]
    before = path.read_bytes()
    ledger.append(LATER)
    assert path.read_bytes().startswith(before)
    assert Ledger(path).entries == [*ENTRIES, LATER]


def test_a_line_that_was_cut_off_never_was(path):
    """A process that is killed, or a full disk."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    ledger = Ledger(path)
    assert ledger.entries == ENTRIES[:-1]
    ledger.append(LATER)
    assert Ledger(path).entries == [*ENTRIES[:-1], LATER]


def test_a_line_that_was_changed_taken_out_or_moved_is_noticed(path):
    lines = path.read_bytes().splitlines(keepends=True)

    def refused(content, number):
        path.write_bytes(b"".join(content))
        with pytest.raises(UserError, match=rf"damaged, or was changed, at line {number}: "):
            Ledger(path)

    refused([*lines[:4], lines[4].replace(b"1.5", b"1.4"), *lines[5:]], 6)
    refused([*lines[:4], lines[4].replace(b": 3.0", b": 3.00"), *lines[5:]], 6)
    refused([*lines[:3], *lines[4:]], 4)
    refused([lines[0], lines[2], lines[1], *lines[3:]], 2)
    refused([*lines, lines[-1]], 10)
    refused(lines[1:], 1)
    # A whole line without its end was not cut off when it was written.
    path.write_bytes(b"".join(lines).rstrip(b"\n"))
    with pytest.raises(UserError, match="its last line has no end"):
        Ledger(path)
    path.write_bytes(b"".join(lines))
    assert Ledger(path).entries == ENTRIES


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        (RUNS, {"entry": "other"}),
        *((RUNS, {"steps": x}) for x in (None, 0, 10**400, 6)),
        *((RUNS, {"evaluated_at": x}) for x in ([], [4], [8, 8], [4, 9], 4)),
        *((RUNS, {"curves": x}) for x in ([], [[], []], [[2.0, "2"], [2.0, 2.0]], [[2.0, -2.0]])),
        *((RUNS, {"seeds": x}) for x in ([0], [0, 0], [0, -1])),
        *((RUNS, {"seconds": x}) for x in (-1.0, 10**400, "1")),
        *((VARIANT, {"level": x}) for x in (0.0, 1.0, "a")),
        *((VARIANT, {"variant": x}) for x in ("", "../../etc", 4)),
        (VARIANT, {"name": "a\x1b[2J"}),
        *((Speed("ef" * 8, 8, [1.0]), {"ratios": x}) for x in ([], [0.0])),
        (RUNS, {"stopped": "\x1b[2J"}),
        (Failed("ef" * 8, [2], "no memory"), {"reason": "a\nb"}),
        (Look("ef" * 8, 2, 0.1, 0.1, "better"), {"words": "\x9b2J"}),
        (Tuned("ef" * 8, "ab" * 8, "base", {"a.b": 1.0}, [9], 8, [2.0]), {"values": {"\r": 1.0}}),
    ],
)
def test_a_line_that_cannot_be_is_refused(tmp_path, entry, changes, monkeypatch):
    """Also if its checksums are right: a folder may come from a stranger."""
    path = tmp_path / "ledger.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_fits", lambda *_: True)
        Ledger(path).append(entry)
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(
        UserError, match=r"ledger\.jsonl is damaged, or was changed, at line 1: (?!it does)"
    ):
        Ledger(path)


@pytest.mark.parametrize(
    ("entry", "changes"),
    [
        *(
            (RUNS, {"variant": "12" * 8}),
            (RUNS, {"seeds": [2, 3], "steps": 9, "evaluated_at": [4, 9]}),
        ),
        (RUNS, {"seeds": [2, 3], "evaluated_at": [2, 8]}),
        (RUNS, {"seeds": [1, 2]}),
        (VARIANT, {"variant": "34" * 8, "base": "12" * 8}),
        (VARIANT, {"variant": "34" * 8, "twin": "12" * 8}),
        (VARIANT, {}),
        # A base is nobody's variant, and is not judged.
        (BASE, {"variant": "34" * 8, "level": 0.02}),
        (BASE, {"variant": "34" * 8, "twin": "56" * 8}),
        (VARIANT, {"variant": "34" * 8, "base": "ef" * 8}),
        (VARIANT, {"variant": "34" * 8, "equal": None}),
        # A twin is a base, too, and not that itself.
        *((LATER, {"twin": x}) for x in ("ab" * 8, "ef" * 8)),
        (LATER, {"level": None}),
        *((LOOK, {"variant": x}) for x in ("12" * 8, "ab" * 8)),
        (Confirming("ef" * 8, [300_000], 0.02, 1), {"variant": "ab" * 8}),
    ],
)
def test_a_line_that_does_not_fit_the_others_is_refused(path, entry, changes, monkeypatch):
    """What it says would be compared with what cannot be compared."""
    wrong = msgspec.structs.replace(entry, **changes)
    with pytest.raises(AssertionError):
        Ledger(path).append(wrong)
    assert Ledger(path).entries == ENTRIES
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "_fits", lambda *_: True)
        Ledger(path).append(wrong)
    with pytest.raises(UserError, match="at line 10: it does not fit the ones before"):
        Ledger(path)


def test_a_ledger_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.ledger\.jsonl cannot be written: "):
        Ledger(tmp_path / "file" / "ledger.jsonl").append(OPENED)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="link cannot be read: it is a link"):
        Ledger(tmp_path / "link")
