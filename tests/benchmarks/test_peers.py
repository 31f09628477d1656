"""The pure parts of the comparison with other engines: what they print, and the table and chart made of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from batch_figure import draw, from_record
from chart import svg
from contenders import ROWS, SHOAL, Contender, Work, llama_cpp_command, shoal_command
from figures import Run, Speed, combine, describe_exit, parse_driver, parse_llama_cpp, parse_shoal
from table import best_of, keepers, markdown, rivals, value_of

SVG = "{http://www.w3.org/2000/svg}"


def test_llama_cpp_is_parsed_among_its_other_words() -> None:
    output = """
llama_context: n_ctx = 2048
{"n_kv_max": 2048, "pp": 128, "tg": 128, "pl": 1, "t_pp": 0.6, "speed_pp": 213.3, "t_tg": 1.8, "speed_tg": 70.22}
{"n_kv_max": 2048, "pp": 128, "tg": 128, "pl": 4, "t_pp": 2.1, "speed_pp": 240.95, "t_tg": 5.3, "speed_tg": 95.11}
{"cut":
"""
    assert parse_llama_cpp(output) == Run({1: Speed(213.3, 70.22), 4: Speed(240.95, 95.11)})


def test_drivers_are_parsed_as_far_as_they_came() -> None:
    output = 'WARNING {not json}\n{"startup_s": 4.5}\n' + json.dumps(
        {"batch": 16, "prefill_tokens_per_s": 2000, "decode_tokens_per_s": 384.5}
    )
    assert parse_driver(output) == Run({16: Speed(2000.0, 384.5)}, 4.5)
    assert parse_driver("Traceback ...") == Run({})


def test_shoal_is_parsed() -> None:
    record = {"results": [{"batch": 1, "prefill_tokens_per_s": 10.0, "decode_tokens_per_s": 5.0, "more": 1}]}
    assert parse_shoal(json.dumps(record)) == Run({1: Speed(10.0, 5.0)})
    assert parse_shoal("") == Run({})


def test_rounds_are_combined_by_medians() -> None:
    runs = [Run({1: Speed(10, 1), 4: Speed(1, 1)}, 3.0), Run({1: Speed(30, 5)}, 5.0, "stopped"), Run({1: Speed(20, 2)})]
    outcome = combine(runs)
    assert (outcome.decode[1].median, outcome.decode[1].lowest, outcome.decode[1].highest) == (2, 1, 5)
    assert outcome.prefill[1].median == 20
    assert outcome.decode[4].median == 1
    assert outcome.startup_s == 4.0
    assert outcome.error == "stopped"
    assert outcome.best_prefill == 20
    assert combine([]).best_prefill is None


def test_exits_are_described() -> None:
    assert describe_exit(-4, "") == "died of an illegal instruction"
    assert describe_exit(-15, "") == "died of signal 15"
    assert (
        describe_exit(2, "usage\n╭─ Error ───╮\n│ no such precision │\n╰───────────╯\n")
        == "exit status 2: no such precision"
    )
    assert describe_exit(3, "") == "exit status 3"


def test_commands_name_the_whole_work() -> None:
    work = Work(batches=(1, 8), prompt_len=500, output_len=100, vocab=9, threads=3)
    words = llama_cpp_command(Path("/bin"), Path("m.gguf"), work)
    assert words[words.index("-c") + 1] == "4800"
    assert words[words.index("-npl") + 1] == "1,8"
    words = shoal_command(Path("shoal"), Path("m.gguf"), "int8", work, 2)
    assert words[words.index("--batch") + 1] == "1,8"
    assert words[words.index("--precision") + 1] == "int8"
    assert words[words.index("--seed") + 1] == "2"


def row(name: str, engine: str, decode: dict[str, float], change: float | None, **more: Any) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "lowest": value * 0.9, "highest": value}

    return {
        "name": name,
        "engine": engine,
        "weights": name.rsplit(maxsplit=1)[-1],
        "perplexity_change": change,
        "decode": {batch: spread(value) for batch, value in decode.items()},
        "prefill": {batch: spread(10 * value) for batch, value in decode.items()},
        "startup_s": None,
        "error": None,
        **more,
    }


RECORD: dict[str, Any] = {
    "date": "2026-12-01",
    "shoal": "0.1.0",
    "machine": {"cpu": "A <fine> one", "cores": 2, "instruction_sets": ["avx2", "portable"]},
    "model": "smollm2",
    "batches": [1, 4],
    "prompt_len": 128,
    "output_len": 128,
    "threads": 2,
    "rounds": 3,
    "notes": ["compiled without AMX"],
    "rows": [
        row("Shoal auto", SHOAL, {"1": 300, "4": 900}, 0.002),
        row("fast lossy", "fast", {"1": 150, "4": 200}, 0.2, startup_s=2.5),
        row("slow exact", "slow", {"1": 100}, 0.001, error="stopped after 9 s"),
        row("absent", "absent", {}, None, error="could not be installed: no wheel"),
    ],
}


def test_the_table_has_ratios_to_the_best_and_to_the_best_that_keeps_quality() -> None:
    lines = markdown(RECORD).splitlines()
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "|" in line
    }
    assert cells["Shoal auto"] == ["+0.2%", "300", "900", "9000", "–"]
    assert cells["fast lossy"] == ["+20.0%, does not keep quality", "150", "200", "2000", "2.5 s"]
    assert cells["absent"] == ["not measured", "–", "–", "–", "–"]
    assert cells["*best rival, any format*"] == ["", "150 (fast lossy)", "200 (fast lossy)", "2000 (fast lossy)", ""]
    assert cells["*best rival that keeps quality*"] == ["", "100 (slow exact)", "–", "1000 (slow exact)", ""]
    ratios = [line for line in lines if line.startswith("| **Shoal auto** over it")]
    assert "| **2.00** | **4.50** | **4.50** |" in ratios[0]
    assert "| **3.00** | – | **9.00** |" in ratios[1]
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {7}
    assert "- absent: could not be installed: no wheel" in lines
    assert "- slow exact: stopped after 9 s" in lines
    assert "- compiled without AMX" in lines
    assert any("the slowest 10% below the fastest" in line for line in lines)


def test_whoever_is_not_known_to_keep_quality_does_not() -> None:
    others = rivals(RECORD["rows"])
    assert [item["name"] for item in others] == ["fast lossy", "slow exact", "absent"]
    assert [item["name"] for item in keepers(others)] == ["slow exact"]
    assert best_of(others, "4") == ("fast lossy", 200)
    assert best_of([], "4") is None
    assert value_of(RECORD["rows"][2], "4") is None


@pytest.mark.parametrize("batches", [[1], [1, 4, 16, 32, 64]])
def test_the_chart_keeps_everything_inside(batches: list[int]) -> None:
    root = ET.fromstring(svg({**RECORD, "batches": batches}))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    bars = [item for item in root.iter(f"{SVG}rect") if "x" in item.attrib]
    for item in bars:
        assert 0 <= float(item.attrib["x"]) <= width - float(item.attrib["width"])
        assert 0 <= float(item.attrib["y"]) <= height - float(item.attrib["height"])
    texts = [(float(item.attrib["x"]), float(item.attrib["y"])) for item in root.iter(f"{SVG}text")]
    assert len(set(texts)) == len(texts)
    assert all(0 <= x < width and 0 < y < height for x, y in texts)
    assert sum(item.text == "not measured" for item in root.iter(f"{SVG}text")) > 0


def test_every_rival_row_has_its_own_name() -> None:
    rows = [*ROWS, Contender(SHOAL, "auto")]
    assert len({item.name for item in rows}) == len(rows)
    assert [item.is_shoal for item in rows] == [False] * len(ROWS) + [True]


def test_the_figure_is_drawn_from_what_the_command_prints() -> None:
    record = {
        "model": {"name": "smollm2"},
        "precision": "int8",
        "date": "2026-12-01T10:00:00+00:00",
        "machine": {"cpu": "A fine one", "cores": 2},
        "prompt_len": 128,
        "output_len": 64,
        "results": [{"batch": 1, "decode_tokens_per_s": 280.4}, {"batch": 4, "decode_tokens_per_s": 706.0}],
    }
    data = from_record(record)
    assert data["batches"] == [1, 4]
    assert data["series"] == [{"name": "Shoal, int8", "tokens_per_s": [280, 706]}]
    root = ET.fromstring(draw(data))
    assert {"280", "706"} <= {item.text for item in root.iter(f"{SVG}text")}
