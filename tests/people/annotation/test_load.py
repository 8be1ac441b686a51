"""People at once in several processes, and processes that are killed: no place twice, no judgment
that was acknowledged lost.
"""

from __future__ import annotations

import pytest
from sqlalchemy import text
from tests.people.annotation import load

from tether.people.annotation.store import Store


def test_processes_share_the_work_and_every_judgment_is_kept(url, tmp_path):
    people = load.build(url, tasks=20, needed=3, annotators=6)
    found = load.load_test(url, tmp_path, people, processes=3)
    assert found["judgments"] == found["acknowledged"] == 60 and found["open_judgments"] == 0
    assert (
        found["lost"],
        found["twice"],
        found["kept_without_note"],
        found["faults"],
        found["exit_codes"],
    ) == (0, 0, 0, {}, [0])


def killed(url, folder, *, judgments, kills, processes, within):
    people = load.build(url, tasks=judgments // 4, needed=4, annotators=8)
    rows = load.kill_test(
        url,
        folder,
        people,
        processes=processes,
        kills=kills,
        seed=1,
        within=within,
    )
    for row in rows:
        # What was kept without a note returned to nobody: one at most for each process and kill.
        assert (row["lost"], row["twice"], row["faults"]) == (0, 0, {}) and row[
            "kept_without_note"
        ] <= row["kill"] * processes
    assert [row["acknowledged"] for row in rows] == sorted(
        row["acknowledged"] for row in rows
    ) and rows[0]["acknowledged"] > 0
    finished = load.load_test(url, folder, people, processes=processes)
    assert (
        finished["judgments"] == judgments
        and finished["open_judgments"] == 0
        and not finished["faults"]
    )
    assert finished["lost"] == finished["twice"] == 0


def test_acknowledged_judgments_survive_kill_9(url, tmp_path):
    killed(url, tmp_path, judgments=400, kills=2, processes=2, within=0.4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_acknowledged_judgments_survive_ten_kills_under_load(url, tmp_path):
    killed(url, tmp_path, judgments=8000, kills=10, processes=6, within=4.0)


def test_the_checks_see_what_they_look_for(url, tmp_path):
    """A check that finds no fault anywhere would be none."""
    people = load.build(url, tasks=4, needed=2, annotators=2)
    load.load_test(url, tmp_path, people, processes=1)
    store = Store(url)
    assert (
        load.faults(store) == {} and load.compare(store, load.acknowledged(tmp_path))["lost"] == 0
    )
    with store.transaction() as session:
        session.execute(text("UPDATE tasks SET judged = 3, taken = 1 WHERE id = 1"))
        session.execute(text("DELETE FROM judgments WHERE task_id = 2 AND annotator_id = 1"))
        session.execute(
            text("UPDATE assignments SET state = 'skipped' WHERE task_id = 3 AND annotator_id = 1"),
        )
        session.execute(text("UPDATE tasks SET state = 'open' WHERE id = 4"))
    found = load.faults(store)
    store.close()
    assert found == {
        "judged more often than asked": 1,
        "`judged` is not the number of judgments": 2,
        "`taken` is not the number of judgments and leases": 2,
        "judged without a judgment": 1,
        "a judgment without an assignment that is judged": 1,
        "open though all have judged": 1,
    }
    assert load.compare(store, load.acknowledged(tmp_path))["lost"] == 1
