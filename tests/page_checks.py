"""Assertions about the owners of pages, for tests with too few pages."""

from collections import Counter

from spd.runtime.engine.page_table import PageTable
from spd.runtime.engine.scheduler import Scheduler
from spd.runtime.engine.sequence import NO_SLOT
from spd.runtime.round.limits import NUM_RESERVED_PAGES


def check_table(table: PageTable) -> None:
    """Assert that every page is in exactly one state."""
    in_use = set(table._users)
    idle = set(table._idle)
    assert not (in_use & idle or in_use & table._free or idle & table._free)
    assert len(in_use) + len(idle) + len(table._free) == table.num_pages - NUM_RESERVED_PAGES
    assert all(table._key_of[page] == digest for digest, page in table._page_of.items())
    assert all(table._key_of[tail.page] == before for before, tail in table._tails.items())
    assert len(table._key_of) == len(table._tails) + len(table._page_of)
    assert idle <= table._key_of.keys() and all(count > 0 for count in table._users.values())


def check_pages(scheduler: Scheduler) -> None:
    """Assert that the uses of every page are counted, and that only one sequence may write to it."""
    check_table(scheduler.pages)
    owners = Counter[int]()
    for sequence in scheduler.running():
        owners.update(sequence.pages)
    for enqueued in scheduler.in_flight:
        owners.update(enqueued.pages)
    assert owners == scheduler.pages._users, "a page has no owner, or an unknown one"
    for sequence in scheduler.running():
        written = (
            sequence.prefill_end if sequence is not scheduler.prefilling else sequence.prefilled
        )
        assert all(owners[page] == 1 for page in sequence.pages[written // scheduler.page_size :])
    assert all(not sequence.pages and sequence.slot == NO_SLOT for sequence in scheduler.waiting)
    assert len(scheduler.by_id) == len(scheduler.waiting) + len(scheduler.running())
