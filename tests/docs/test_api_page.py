"""docs/api.md names every endpoint, parameter, status and code that the server has, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from doc_pages import DOCS, ROOT, Page

from shoal.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shoal.server.responses import Timings

PAGE = Page(DOCS / "api.md")


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_every_parameter_has_its_place() -> None:
    both, chat, completions = re.split(r"^`/v1/[a-z/]+` only:$", section("Parameters"), flags=re.MULTILINE)
    named = [
        set(re.findall(r"`([a-z_]+)`", cell))
        for cell in (first_cells(both), first_cells(chat), first_cells(completions))
    ]
    ours = (set(ChatRequest.model_fields), set(CompletionRequest.model_fields))
    # logprobs differs between the two, so each has its own line.
    assert named[0] == (ours[0] & ours[1]) - {"logprobs"}
    assert named[1] == ours[0] - ours[1] | {"logprobs"}
    assert named[2] == ours[1] - ours[0] | {"logprobs"}
    for model in (TokenizeRequest, DetokenizeRequest):
        assert all(f"`{name}`" in completions for name in model.model_fields if name != "model")


def first_cells(text: str) -> str:
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))


def test_every_timing_is_explained() -> None:
    assert all(f"`{name}`" in section("Answers") for name in Timings.model_fields)


def test_every_code_is_listed() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for path in Path(ROOT / "src" / "shoal" / "server").rglob("*.py")
    )
    sources += (ROOT / "src" / "shoal" / "engine" / "request.py").read_text(encoding="utf-8")
    raised = set(re.findall(r'code="([a-z_]+)"', sources)) | set(re.findall(r'TOO_LONG = "([a-z_]+)"', sources))
    listed = set(re.findall(r"`([a-z]+_[a-z_]+)`", section("Errors"))) - {"max_body_bytes"}
    assert listed == raised
