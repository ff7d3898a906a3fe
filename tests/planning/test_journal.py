"""gptlite/planning/journal.py: the order of its entries, and a stranger's file."""

import json

import msgspec
import pytest

from gptlite.errors import UserError
from gptlite.planning.journal import Begun, ForecastJournal, Judged, Sealed, Trained

BEGUN = Begun("ab" * 32, "cd" * 8, "ef" * 8, {}, 1000)
RUNG = Trained(2, 32, 65536, 18464, 65536, [0, 1], [2.1, 2.2], 3.0)
SEALED = Sealed(3, 64, 655360, [0, 1], 1.9, 1.8, 2.0)
OPENED = Trained(3, 64, 655360, 98304, 655360, [0, 1], [1.8, 1.9], 30.0)
JUDGED = Judged(1.85, True)
ENTRIES = [BEGUN, RUNG, SEALED, OPENED, JUDGED]


@pytest.fixture
def path(tmp_path):
    journal = ForecastJournal(tmp_path / "ledger.jsonl")
    for entry in ENTRIES:
        journal.append(entry)
    return journal.path


def test_what_was_written_is_read(path):
    journal = ForecastJournal(path)
    assert journal.entries == ENTRIES
    assert journal.trained(2, 32, 65536) == RUNG
    assert journal.trained(2, 32, 65537) is None
    assert journal.sealed is None  # it was judged


def test_a_forecast_waits_until_it_is_judged(tmp_path):
    journal = ForecastJournal(tmp_path / "ledger.jsonl")
    for entry, waits in [(BEGUN, 0), (RUNG, 0), (SEALED, 1), (OPENED, 1), (JUDGED, 0)]:
        journal.append(entry)
        assert journal.sealed == (SEALED if waits else None)


def test_the_checksum_is_of_all_that_was_written(path):
    """As it was printed when the forecast was sealed, whoever wants may compute it again."""
    import hashlib

    last = path.read_bytes().splitlines()[-1]
    assert ForecastJournal(path).checksum == hashlib.sha256(last).hexdigest()


@pytest.mark.parametrize(
    ("config", "said"), [(None, "is empty"), ({}, "has no config"), ({"model": 3}, "has no config")]
)
def test_a_config_that_is_none_is_refused(config, said, tmp_path):
    journal = ForecastJournal(tmp_path / "ledger.jsonl")
    if config is not None:
        journal.append(msgspec.structs.replace(BEGUN, config=config))
    with pytest.raises(UserError, match=said):
        journal.config(())


@pytest.mark.parametrize(
    "order",
    [
        [RUNG],  # nothing was begun
        [BEGUN, BEGUN],
        [BEGUN, RUNG, RUNG],
        [BEGUN, RUNG, OPENED, SEALED],  # a forecast of what is known
        [BEGUN, RUNG, SEALED, msgspec.structs.replace(SEALED, asked=10**6)],  # two at a time
        [BEGUN, RUNG, SEALED, JUDGED],  # before it was trained
        [BEGUN, RUNG, JUDGED],
    ],
)
def test_an_order_that_cannot_be_is_refused(order, tmp_path, monkeypatch):
    journal = ForecastJournal(tmp_path / "ledger.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(ForecastJournal, "_fits", lambda self, entry: True)
        for entry in order:
            journal.append(entry)
    with pytest.raises(UserError, match=f"at line {len(order)}: it does not fit the ones before"):
        ForecastJournal(journal.path)


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (1, {"losses": [2.1]}),
        (1, {"losses": [2.1, 0.0]}),
        (1, {"seeds": [], "losses": []}),
        (1, {"seconds": -1.0}),
        (1, {"n_layers": 0}),
        (2, {"low": "low"}),
        (2, {"loss": 1e300}),
        (0, {"text": "../text"}),
        (0, {"unique": 0}),
    ],
)
def test_a_value_that_cannot_be_is_refused(number, changes, tmp_path):
    entry = ENTRIES[number]
    record = {**msgspec.to_builtins(entry), **changes}
    record |= {"at": "2026-01-01T00:00:00+00:00", "before": "0" * 64}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match="is damaged, or was changed, at line 1"):
        ForecastJournal(tmp_path / "ledger.jsonl")
