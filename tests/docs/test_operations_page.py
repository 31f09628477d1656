"""docs/operations.md lists every flag with its default and every metric; what is in deploy/ fits the program."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from doc_pages import DOCS, ROOT, Page
from engine_support import make_loaded
from prometheus_client.parser import text_string_to_metric_families

from shoal import LLM
from shoal.cli.app import make_app
from shoal.cli.service_manager import tell_ready
from shoal.server.access.key_sources import read_keys
from shoal.server.metrics import Metrics
from shoal.server.service import ServedModel, Service

PAGE = Page(DOCS / "operations.md")
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana-dashboard.json"


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.text, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def options() -> dict[str, Any]:
    """The options of ``shoal serve`` by their first flag."""
    group = typer.main.get_command(make_app())
    command = group.commands["serve"]  # type: ignore[attr-defined]
    return {item.opts[0]: item for item in command.params if "--help" not in item.opts}


def test_every_flag_has_its_default_and_a_reason() -> None:
    listed = {flag.strip("`"): (default, why) for flag, default, why in rows("Every flag")}
    assert set(listed) == set(options())
    for flag, option in options().items():
        default, why = listed[flag]
        assert why
        value = option.default
        if isinstance(value, bool) and option.secondary_opts:
            assert default == (flag if value else option.secondary_opts[0]).lstrip("-")
        elif isinstance(value, bool):
            assert default == "no"
        else:
            assert default == ("none" if value in (None, []) else str(value)), flag


def exposed() -> set[str]:
    """Names of the metrics that the server has, as Prometheus will know them; histograms by their base."""
    service = Service(version="0", clock=lambda: 0.0)
    with LLM.from_loaded(make_loaded()) as llm:
        service.open(
            ServedModel.of(llm.model, llm._engine, name="fake", created=0, version="0")  # what the server does
        )
        text = Metrics(service).render().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert {family.type for family in text_string_to_metric_families(text)} == {"counter", "gauge", "histogram"}
    return {name for name in kinds if not name.endswith("_created")}


def test_every_metric_is_listed() -> None:
    listed = set(re.findall(r"`([a-z_]+)`", " ".join(row[0] for row in rows("Every metric"))))
    assert {f"shoal_{name}" for name in listed} == {name for name in exposed() if name.startswith("shoal_")}
    text = Page(DOCS / "operations.md").text
    assert set(re.findall(r"(process_[a-z_]+)`", text)) <= exposed()


def test_metrics_named_in_advice_exist() -> None:
    names = {name.removesuffix("_bucket") for name in re.findall(r"shoal_([a-z_]+)", PAGE.prose)} - {""}
    advice = " ".join(cell for row in rows("When it is slow") for cell in (row[0], row[2]))
    names |= set(re.findall(r"`([a-z]+_[a-z_]+)`", advice)) - {"max_tokens"}
    assert {f"shoal_{name}" for name in names} <= exposed()
    flags = set(re.findall(r"`(--[a-z-]+)", PAGE.prose)) - {"--cpus", "--cpuset-cpus", "--rate", "--url"}
    known = {flag for item in options().values() for flag in (*item.opts, *item.secondary_opts)}
    assert flags <= known


def test_the_keys_of_the_example_are_keys(tmp_path: Path) -> None:
    (text,) = PAGE.blocks("toml")
    (tmp_path / "keys.toml").write_text(text)
    chat, nightly = read_keys(tmp_path / "keys.toml")
    assert (chat.name, chat.highest, chat.weight) == ("chat", 2, 2.0)
    assert (nightly.priority, nightly.max_concurrent, nightly.tokens_per_minute) == (-1, 8, 200_000)


# The dashboard.


def test_the_dashboard_is_current() -> None:
    sys.path.append(str(ROOT / "scripts"))
    from grafana_dashboard import dashboard

    assert json.loads(DASHBOARD.read_text(encoding="utf-8")) == dashboard(), "run: make docs"


def test_the_dashboard_asks_for_metrics_that_exist_and_for_all() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in panels
        for target in panel.get("targets", ())
        for name in re.findall(r"(?:shoal|process)_[a-z_]+", target["expr"])
    }
    assert asked <= exposed()
    assert {name for name in exposed() if name.startswith("shoal_")} <= asked
    for panel in panels:
        for target in panel.get("targets", ()):
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count("{") == target["expr"].count("}")


def test_the_dashboards_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


# The unit and the image.


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "shoal.service")
    return parser


def test_the_unit_fits_the_command() -> None:
    service = unit()["Service"]
    program, command, *flags = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("shoal", "serve")
    _parse(flags)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert int(service["TimeoutStopSec"].removesuffix("s")) > int(given["--grace"])
    assert int(service["LimitNOFILE"]) >= options()["--max-connections"].default + 128
    assert service["Type"] == "notify"


def _parse(flags: list[str]) -> None:
    group = typer.main.get_command(make_app())
    group.commands["serve"].make_context("serve", list(flags))  # type: ignore[attr-defined]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    text = (
        (DEPLOY / "shoal.service")
        .read_text(encoding="utf-8")
        .replace("/opt/shoal/bin/shoal", shutil.which("true") or "")
    )
    (tmp_path / "shoal.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "shoal.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_copies_what_is_there_and_runs_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)
    program, command, *flags = json.loads(entry)
    assert (program, command) == ("shoal", "serve")
    _parse(flags)
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.+)$", text, re.MULTILINE)
    python, option, code = json.loads(check)
    assert (python, option) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    # What the build needs that the copies leave out would only be missed in the image.
    included = re.findall(r'"/([^"]+?)/?"', re.search(r"sdist.include = \[(.*?)\]", _pyproject(), re.DOTALL)[1])  # type: ignore[index]
    copied = set(re.findall(r"[\w.]+", " ".join(re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE))))
    assert set(included) - {"examples"} <= copied


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_is_told(tmp_path: Path, abstract: bool) -> None:
    address = f"@{tmp_path}/notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(30)
        tell_ready({"NOTIFY_SOCKET": address})
        assert manager.recv(100) == b"READY=1"
    tell_ready({"NOTIFY_SOCKET": address})  # it has gone
    tell_ready({"NOTIFY_SOCKET": "vsock:1:2"})
    tell_ready({})
