from __future__ import annotations

from pathlib import Path

import pytest

from shoal.bench.machine import Disturbance, MachineWatch, machine_facts
from shoal.bench.neighbours import Neighbours, fair_share


def write_stat(proc: Path, user: int, idle: int, steal: int) -> None:
    (proc / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 1 2 3\n")


def test_time_of_others_and_the_hypervisor_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    times = iter([0.0, 10.0])
    write_stat(tmp_path, 1000, 5000, 0)
    watch = MachineWatch(tmp_path, clock=lambda: next(times))
    write_stat(tmp_path, 1000 + 800, 5000 + 1000, 200)
    report = watch.report(own_children=4.0)
    # 20 processor seconds passed: 2 stolen, 8 busy, of which 4 were children and (nearly) none this process.
    assert report.steal == pytest.approx(0.1)
    assert report.others == pytest.approx(0.2, abs=0.05)


def test_a_system_that_says_nothing_gives_nothing(tmp_path: Path) -> None:
    report = MachineWatch(tmp_path).report()
    assert (report.steal, report.others) == (None, None)
    assert machine_facts(("portable",), tmp_path)["cpu"]


def test_warnings_name_what_was_busy() -> None:
    assert Disturbance(0.1, 0.0, 0.01).warnings(2) == []
    assert Disturbance(None, None, None).warnings(2) == []
    busy = Disturbance(1.5, 0.3, 0.4).warnings(2)
    assert [word for line, word in zip(busy, ("load", "hypervisor", "other"), strict=True) if word in line] == [
        "load",
        "hypervisor",
        "other",
    ]


def test_facts_name_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A fine one\n")
    facts = machine_facts(("avx2", "portable"), tmp_path)
    assert facts["cpu"] == "A fine one"
    assert facts["instruction_sets"] == ["avx2", "portable"]
    assert facts["cores"] >= 1


@pytest.mark.parametrize(
    ("threads", "cores", "neighbours", "taken", "by_count", "by_taken"),
    [
        (2, 2, 1, 2 / 3, 1.5, 1.5),
        (2, 4, 1, 1.0, 1.0, 1.0),
        (2, 4, 2, 2.0, 1.0, 1.0),
        (1, 1, 1, 0.5, 2.0, 2.0),
        (4, 4, 4, 2.0, 2.0, 2.0),
        (8, 4, 0, 0.0, 1.0, 1.0),
        (2, 2, 1, 0.0, 1.5, 1.0),
    ],
)
def test_fair_shares(
    threads: int, cores: int, *, neighbours: int, taken: float, by_count: float, by_taken: float
) -> None:
    fair = fair_share(threads, cores, neighbours, taken)
    assert fair.by_count == pytest.approx(by_count)
    assert fair.by_taken == pytest.approx(by_taken)


def test_neighbours_spin_and_leave() -> None:
    with Neighbours(2) as company:
        running = list(company._running)
        before = company.cpu_seconds()
        while company.cpu_seconds() <= before:  # the test's timeout is the only limit
            pass
        assert all(process.poll() is None for process in running)
    assert all(process.poll() is not None for process in running)
    assert company.cpu_seconds() == 0.0
