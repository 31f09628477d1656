"""Who has had how much, and whose turn it is."""

from __future__ import annotations

from collections import Counter

from core_support import answer, drain, make_request, make_scheduler
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.fair_share import FairShare
from shoal.core.scheduler import Scheduler


def rows_by_tenant(scheduler: Scheduler, steps: int) -> Counter[str]:
    """Rows each tenant gets in so many steps."""
    rows: Counter[str] = Counter()
    for _ in range(steps):
        plan = scheduler.schedule(0.0)
        for entry in plan.entries:
            rows[entry.request.tenant] += len(entry.token_ids)
        scheduler.commit(plan, answer(plan))
        scheduler.check()
    return rows


def test_a_pause_saves_nothing_up_and_forgets_nothing() -> None:
    share = FairShare()
    share.enter("a")
    share.enter("b")
    assert share.contended
    share.charge("a", 10, 1.0)
    share.charge("b", 4, 2.0)
    assert (share.had("a"), share.had("b")) == (10.0, 2.0)
    share.leave("b")
    assert not share.contended
    share.charge("a", 90, 1.0)
    share.enter("b")
    assert share.had("b") == 100.0  # level with who stayed, not 98 ahead
    share.charge("b", 50, 1.0)
    share.leave("b")
    share.enter("b")
    assert share.had("b") == 150.0
    share.enter("new")
    assert share.had("new") == 100.0


def test_an_idle_engine_starts_everybody_anew() -> None:
    share = FairShare()
    share.enter("a")
    share.charge("a", 5, 1.0)
    share.leave("a")
    share.enter("a")
    assert share.had("a") == 0.0


def test_tenants_that_went_away_are_forgotten_in_the_end() -> None:
    share = FairShare()
    share.enter("stays")
    for number in range(1000):
        share.enter(f"t{number}")
        share.leave(f"t{number}")
    assert len(share._served) <= 66
    assert share.check(Counter({"stays": 1}))
    assert not share.check(Counter())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=60))
def test_nobody_comes_back_ahead_of_all_that_stayed(moves: list[tuple[str, int]]) -> None:
    share = FairShare()
    live: Counter[str] = Counter()
    for tenant, rows in moves:
        if rows == 0 and live[tenant]:
            share.leave(tenant)
            live[tenant] -= 1
            live += Counter()
        elif rows == 0 or not live[tenant]:
            least = min((share.had(name) for name in live), default=0.0)
            share.enter(tenant)
            live[tenant] += 1
            assert share.had(tenant) >= least
        else:
            before = share.had(tenant)
            share.charge(tenant, rows, 1.0)
            assert share.had(tenant) == before + rows
        assert share.check(live)
        assert share.contended == (len(live) > 1)


def test_a_flood_does_not_hold_up_another_tenant() -> None:
    """A tenant that comes when a thousand requests of another's wait is next when a place is free."""
    scheduler = make_scheduler(policy="priority", max_num_seqs=2, priority_ageing=1.0)
    for number in range(1000):
        scheduler.add(make_request(f"flood{number}", [1], max_tokens=2, tenant="flood"), 0.0)
    rows_by_tenant(scheduler, 3)
    scheduler.add(make_request("one", [2], max_tokens=2, tenant="other"), 900.0)  # ageing is not a way around it
    assert rows_by_tenant(scheduler, 3)["other"] == 2


def test_shares_are_even_whatever_the_number_and_length_of_requests() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=4, max_waiting=5000)
    for number in range(400):
        scheduler.add(make_request(f"long{number}", [1] * 8, max_tokens=20, tenant="long"), 0.0)
    for number in range(1200):
        scheduler.add(make_request(f"short{number}", [2], max_tokens=3, tenant="short"), 0.0)
    rows = rows_by_tenant(scheduler, 400)
    assert 0.9 < rows["long"] / rows["short"] < 1.1


def test_weights_divide_the_engine() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=4, max_waiting=5000)
    for number in range(700):
        scheduler.add(make_request(f"a{number}", [1], max_tokens=4, tenant="a", weight=3.0), 0.0)
        scheduler.add(make_request(f"b{number}", [1], max_tokens=4, tenant="b"), 0.0)
    rows = rows_by_tenant(scheduler, 600)
    assert 2.8 < rows["a"] / rows["b"] < 3.2


def test_priority_comes_before_fairness() -> None:
    scheduler = make_scheduler(policy="priority", max_num_seqs=1)
    scheduler.add(make_request("first", [1], max_tokens=1, tenant="a"), 0.0)
    scheduler.add(make_request("second", [1], max_tokens=1, tenant="b"), 0.0)
    scheduler.add(make_request("high", [1], max_tokens=1, tenant="a", priority=1), 0.0)
    order = [entry.request.request_id for plan in drain(scheduler) for entry in plan.entries]
    assert order == ["high", "second", "first"]  # a has had something by then


def test_under_other_policies_tenants_are_not_looked_at() -> None:
    scheduler = make_scheduler(policy="fcfs", max_num_seqs=1)
    for number in range(3):
        scheduler.add(make_request(f"a{number}", [1], max_tokens=1, tenant="a"), 0.0)
    scheduler.add(make_request("b", [1], max_tokens=1, tenant="b"), 0.0)
    order = [entry.request.request_id for plan in drain(scheduler) for entry in plan.entries]
    assert order == ["a0", "a1", "a2", "b"]
