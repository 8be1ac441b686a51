"""The fleet's states by a clock that only the test moves; no server, no thread."""

import itertools

import pytest

from tether.scale.servers.fleet import Fleet, Limits, State


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def healthy(clock, *names, **limits):
    fleet = Fleet(names, clock, Limits(**limits))
    for name in names:
        fleet.started(name)
    fleet.want("v0")
    for name in names:
        assert fleet.due(name) == "load"
        fleet.loaded(name, "v0")
    assert fleet.at(State.HEALTHY) == list(names)
    return fleet


def test_nobody_samples_before_it_holds_the_wanted_version(clock):
    fleet = Fleet(["a", "b"], clock)
    assert fleet.pick([1]) is None
    fleet.started("a")
    fleet.want("v1")
    assert fleet.pick([1]) is None and fleet.due("a") == "load" and fleet.due("b") == ""
    fleet.loaded("a", "v0")  # a load that was under way when v1 became wanted
    assert fleet.pick([1]) is None and fleet.members["a"].state is State.STALE
    fleet.loaded("a", "v1")
    assert fleet.pick([1]) == "a"


def test_a_new_version_makes_every_server_stale_until_it_has_it(clock):
    fleet = healthy(clock, "a", "b")
    fleet.want("v1")
    assert fleet.pick([1]) is None and fleet.at(State.STALE) == ["a", "b"]
    fleet.loaded("b", "v1")
    assert fleet.pick([1]) == "b"


def test_a_server_that_has_failed_to_load_is_not_waited_for(clock):
    fleet = healthy(clock, "a", "b")
    fleet.want("v1")
    assert fleet.loading() == ["a", "b"]
    fleet.failed("b", "load: no answer")
    assert fleet.loading() == ["a"] and fleet.due("b") == "load"
    fleet.loaded("a", "v1"), fleet.loaded("b", "v1")
    assert fleet.loading() == [] and fleet.at(State.HEALTHY) == ["a", "b"]


def test_one_failure_makes_it_suspect_an_answer_heals_it_and_three_kill_it(clock):
    fleet = healthy(clock, "a", failures=3)
    fleet.failed("a", "no connection")
    assert (
        fleet.members["a"].state is State.SUSPECT
        and fleet.pick([1]) is None
        and fleet.due("a") == "probe"
    )
    fleet.answered("a")
    assert fleet.pick([1]) == "a"
    for _ in range(3):
        fleet.failed("a", "no connection")
    assert fleet.members["a"].state is State.DEAD and fleet.members["a"].version == ""


def test_a_suspect_that_stays_silent_dies_by_the_clock(clock):
    fleet = healthy(clock, "a", suspect_seconds=10)
    fleet.failed("a", "slow")
    clock.now = 9
    assert fleet.due("a") == "probe"
    clock.now = 10.5
    assert fleet.due("a") == "restart" and fleet.members["a"].state is State.RESTARTING


def test_the_reason_why_a_server_cannot_start_is_named_and_forgotten(clock):
    fleet = healthy(clock, "a", start_seconds=10, failures=3)
    fleet.exited("a", "killed")
    assert fleet.due("a") == "restart"
    for _ in range(5):
        fleet.failed("a", "restart: OSError: No space left on device")
    fleet.started("a")
    assert fleet.loading() == ["a"]  # what it could not do before it started does not count
    fleet.failed("a", "load: time-out")
    assert fleet.members["a"].state is State.STALE
    fleet.exited("a", "killed")
    clock.now += 60
    assert fleet.due("a") == "restart"
    fleet.failed("a", "restart: OSError: No space left on device")
    clock.now += 11
    fleet.due("a")
    assert any(
        change.after == "dead"
        and change.why.endswith(
            "not started after 10 s, the last: restart: OSError: No space left on device",
        )
        for change in fleet.changes
    )


def test_the_dead_come_back_only_through_restart_and_load(clock):
    fleet = healthy(clock, "a", "b")
    fleet.exited("a", "killed")
    fleet.answered("a")  # an answer that was on its way
    fleet.loaded("a", "v0")
    assert fleet.members["a"].state is State.DEAD and fleet.pick([1]) == "b"
    assert fleet.due("a") == "restart"
    fleet.loaded("a", "v0")
    assert fleet.members["a"].state is State.RESTARTING
    fleet.started("a")
    assert fleet.members["a"].state is State.STALE and fleet.due("a") == "load"
    fleet.loaded("a", "v0")
    assert fleet.at(State.HEALTHY) == ["a", "b"]
    assert [(c.before, c.after) for c in fleet.changes if c.server == "a"][-4:] == [
        ("healthy", "dead"),
        ("dead", "restarting"),
        ("restarting", "stale"),
        ("stale", "healthy"),
    ]


def test_a_server_at_work_that_says_nothing_is_asked_whether_it_lives(clock):
    fleet = healthy(clock, "a", quiet=10)
    clock.now += 60
    assert fleet.due("a") == ""  # nothing is expected of it
    fleet.use("a", 1), fleet.use("a", 1)
    clock.now += 9
    assert fleet.due("a") == ""
    fleet.answered("a"), fleet.use("a", -1)
    clock.now += 9
    assert fleet.due("a") == ""
    clock.now += 2
    assert fleet.due("a") == "look"
    fleet.answered("a")  # it is slow
    assert fleet.due("a") == "" and fleet.at(State.HEALTHY) == ["a"]
    clock.now += 11
    assert fleet.due("a") == "look"
    fleet.failed("a", "look: no answer")
    assert fleet.due("a") == "probe"
    fleet.failed("a", "probe: no answer"), fleet.failed("a", "probe: no answer")
    assert fleet.members["a"].state is State.DEAD


def test_restarts_wait_longer_each_time_and_end(clock):
    fleet = healthy(clock, "a", restarts=3, window=100, backoff=1.0)
    began, _ = [], fleet.exited("a", "killed")
    while fleet.members["a"].state is not State.RETIRED:
        if fleet.members["a"].state is State.RESTARTING:
            fleet.exited("a", "again")
        if fleet.due("a") == "restart":
            began.append(clock.now)
        clock.now += 0.25
        assert clock.now < 50
    assert [round(later - sooner) for sooner, later in itertools.pairwise(began)] == [2, 4]
    fleet.started("a")
    assert fleet.members["a"].state is State.RETIRED and fleet.due("a") == ""


def test_a_server_that_came_back_whole_is_restarted_at_once_the_next_time(clock):
    fleet = healthy(clock, "a", restarts=10, window=100, backoff=1.0)
    for _ in range(6):
        fleet.exited("a", "killed")
        assert fleet.due("a") == "restart"
        fleet.started("a")
        fleet.loaded("a", "v0")
    assert fleet.pick([1]) == "a"


def test_old_restarts_are_forgotten(clock):
    fleet = healthy(clock, "a", restarts=2, window=100, backoff=0.5)
    for _ in range(6):
        fleet.exited("a", "killed")
        clock.now += 101
        assert fleet.due("a") == "restart"
        fleet.started("a")
        fleet.loaded("a", "v0")
    assert fleet.pick([1]) == "a"


def test_a_start_that_takes_too_long_is_a_death(clock):
    fleet = Fleet(["a"], clock, Limits(start_seconds=5))
    clock.now = 5.5
    assert fleet.due("a") == "restart" and fleet.changes[0].why == "not started after 5 s"


def test_a_server_that_lost_the_adapter_loads_it_again(clock):
    fleet = healthy(clock, "a", "b")
    fleet.emptied("a", "it has no v0")
    assert fleet.pick([1]) == "b" and fleet.due("a") == "load"


def test_prompts_that_begin_alike_go_where_their_beginning_is_known(clock):
    fleet = healthy(clock, "a", "b", spill=2)
    one, two = list(range(64)), list(range(100, 164))
    first = fleet.pick(one)
    fleet.members[first].inflight += 1
    second = fleet.pick(two)
    assert {first, second} == {"a", "b"}
    fleet.members[second].inflight += 1
    for _ in range(2):  # up to `spill` more than the emptiest
        assert fleet.pick([*one[:48], 7, 8]) == first
        fleet.members[first].inflight += 1
    fleet.members[first].inflight += 1
    assert fleet.pick([*one[:48], 9]) == second
    fleet.members[first].inflight = fleet.members[second].inflight = 0
    fleet.exited(first, "killed")  # its cache has gone with it
    fleet.due(first), fleet.started(first), fleet.loaded(first, "v0")
    assert fleet.members[first].prefixes == {}


def test_a_server_that_failed_a_request_is_avoided_where_there_is_another(clock):
    fleet = healthy(clock, "a", "b")
    assert fleet.pick([1], avoid={"a"}) == "b"
    fleet.exited("b", "killed")
    assert fleet.pick([1], avoid={"a"}) == "a"


def test_the_share_of_the_time_in_which_servers_work(clock):
    fleet = healthy(clock, "a", "b")
    fleet.usage()
    fleet.use("a", 1), fleet.use("a", 1)
    clock.now += 3
    fleet.use("a", -1)
    clock.now += 1
    fleet.use("a", -1)
    clock.now += 6
    metrics, work = fleet.usage()
    assert metrics == pytest.approx({"engine/busy": (4 + 0) / 2 / 10, "engine/queue": 2})
    assert work == {"a": [pytest.approx((-10, -6))], "b": []}
    clock.now += 1
    fleet.use("b", 1)
    clock.now += 2
    metrics, work = fleet.usage()
    assert metrics == pytest.approx({"engine/busy": 2 / 3 / 2, "engine/queue": 1})
    assert work == {"a": [], "b": [pytest.approx((-2, 0))]}
    clock.now += 5  # still under way
    metrics, work = fleet.usage()
    assert metrics == pytest.approx({"engine/busy": 0.5, "engine/queue": 1})
    assert work["b"] == [pytest.approx((-5, 0))]
