"""The commands in process, on the null backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Shell

from shoal.backends.null import Fault

GREEDY = ("--temperature", "0", "--ignore-eos")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "first", "prompt": "one", "max_tokens": 30},
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3},
        {"id": "third", "prompt": "three", "max_tokens": 5, "n": 2},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# shoal run


def test_run_writes_answers_in_order_and_a_summary(shell: Shell, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = shell("run", str(prompts), "--output", str(out), *GREEDY)
    assert done.exit_code == 0, done.stderr
    answers = records(out.read_text(encoding="utf-8"))
    assert [answer["id"] for answer in answers] == ["first", "line-2", "third"]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30, 3, 10]
    assert all(answer["finish_reason"] == "length" for answer in answers)
    for part in (
        "requests",
        "3 of 3",
        "43 out",
        "tokens/s",
        "TTFT",
        "ITL",
        "p99",
        "KV blocks",
        "wasted",
        "preemptions",
    ):
        assert part in done.stdout
    assert "--- first: one" in done.stderr
    assert "3/3 requests" in done.stderr


def test_run_to_standard_output_puts_nothing_else_there(shell: Shell, prompts: Path) -> None:
    done = shell("run", str(prompts), "-o", "-", *GREEDY)
    assert [answer["id"] for answer in records(done.stdout)] == ["first", "line-2", "third"]
    assert "throughput" in done.stderr


def test_run_json_summary(shell: Shell, prompts: Path) -> None:
    done = shell("run", str(prompts), "--json", "--stream", "0", *GREEDY)
    (summary,) = records(done.stdout)
    assert (summary["requests"], summary["done"], summary["failed"]) == (3, 3, 0)
    assert summary["completion_tokens"] == 43
    assert set(summary["ttft_s"]) == set(summary["itl_s"]) == {"p50", "p95", "p99"}
    assert summary["mean_batch"] > 1
    assert 0 < summary["kv_blocks_peak"] <= summary["kv_blocks_total"]
    assert 0 <= summary["waste"] < 1
    assert "---" not in done.stderr


def test_run_reads_standard_input(shell: Shell, prompts: Path) -> None:
    for arguments in (("run",), ("run", "-")):
        done = shell(*arguments, "-o", "-", *GREEDY, stdin=prompts.read_text(encoding="utf-8"))
        assert len(records(done.stdout)) == 3


def test_run_reports_every_bad_line_before_loading_anything(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "x": 1}\n{"prompt": "a"}\n{"top_k": -1, "prompt": "b"}\n', encoding="utf-8")
    done = shell("run", str(path), "--model", "/no/such/file.gguf")
    assert done.exit_code == 1
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {path}:1: x: unknown field")
    assert second.startswith(f"error: {path}:3: top_k: must be in")


def test_run_says_which_requests_failed(shell: Shell, prompts: Path, tmp_path: Path) -> None:
    shell.options["faults"] = (Fault(request_id="request-2", kind="raise"),)
    out = tmp_path / "out.jsonl"
    done = shell("run", str(prompts), "-o", str(out), *GREEDY)
    assert done.exit_code == 1
    assert "error: request line-2: ScriptedFaultError" in done.stderr
    assert [answer["finish_reason"] for answer in records(out.read_text())] == ["length", "error", "length"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--output", "-", "--json"), "--json"),
        (("--block-size", "17"), "--block-size"),
        (("--policy", "lifo"), "--policy"),
        (("--temperature", "nan"), "--temperature"),
        (("--max-tokens", "-1"), "--max-tokens"),
        (("--stream", "-1"), "--stream"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_wrong_usage_names_the_flag(shell: Shell, prompts: Path, arguments: tuple[str, ...], part: str) -> None:
    done = shell("run", str(prompts), *arguments)
    assert done.exit_code == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("run", "/no/such/file"), ("run", "{prompts}", "-o", "/no/such/folder/out")])
def test_files_that_cannot_be_opened(shell: Shell, prompts: Path, arguments: tuple[str, ...]) -> None:
    done = shell(*(part.format(prompts=prompts) for part in arguments))
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "No such file or directory" in line


def test_run_refuses_bytes_that_are_not_text(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9"}\n')
    done = shell("run", str(path))
    assert done.exit_code == 1
    assert "not UTF-8" in done.stderr


def test_an_interrupt_keeps_what_was_done(shell: Shell, prompts: Path, tmp_path: Path) -> None:
    shell.interrupt_at = 20  # the engine is done with the short ones by then, not with the first
    out = tmp_path / "out.jsonl"
    done = shell("run", str(prompts), "-o", str(out), *GREEDY)
    assert done.exit_code == 130
    # How much of it the main thread had read when it was interrupted is not fixed.
    answers = [answer["id"] for answer in records(out.read_text(encoding="utf-8"))]
    assert answers == ["line-2", "third"][: len(answers)]
    assert f"interrupted: {len(answers)} of 3" in done.stderr
    assert f"{len(answers)} of 3" in done.stdout


# shoal generate


def test_generate_streams_the_answer(shell: Shell) -> None:
    shell.options["script"] = "an answer"
    done = shell("generate", "question", "--max-tokens", "9")
    assert (done.exit_code, done.stdout) == (0, "an answer\n")


def test_generate_json(shell: Shell) -> None:
    shell.options["script"] = "an answer"
    done = shell("generate", "question", "--max-tokens", "9", "--json", "--n", "2")
    (answer,) = records(done.stdout)
    assert answer["text"] == "an answer"
    assert [item["text"] for item in answer["completions"]] == ["an answer"] * 2
    assert answer["usage"]["completion_tokens"] == 18


def test_generate_several(shell: Shell) -> None:
    shell.options["script"] = "abc"
    done = shell("generate", "question", "--max-tokens", "3", "--n", "2")
    assert done.stdout == "[1] abc\n[2] abc\n"


def test_generate_uses_the_chat_template_unless_raw(shell: Shell) -> None:
    def prompt_tokens(*arguments: str, stdin: str | None = None) -> int:
        done = shell("generate", *arguments, "--json", "--max-tokens", "1", stdin=stdin)
        tokens: int = json.loads(done.stdout)["usage"]["prompt_tokens"]
        return tokens

    assert prompt_tokens("question", "--raw") == len("question")
    assert prompt_tokens("-", "--raw", stdin="question?") == len("question?")
    templated = prompt_tokens("question")
    assert templated > len("question")
    assert prompt_tokens("question", "--system", "be brief") > templated
    shell.options["template"] = False
    assert prompt_tokens("question") == len("question")
    assert "no chat template" in shell("generate", "a", "--system", "b").stderr
    assert shell("generate", "a", "--system", "b", "--raw").exit_code == 2


def test_a_failing_request_is_one_line_unless_debugging(shell: Shell) -> None:
    shell.options["faults"] = (Fault(request_id="request-1", kind="error"),)
    done = shell("generate", "question", "--max-tokens", "3")
    assert (done.exit_code, done.stderr) == (1, "error: scripted fault\n")
    debugged = shell("--debug", "generate", "question", "--max-tokens", "3")
    assert type(debugged.exception).__name__ == "RequestFailedError"
    by_environment = shell("generate", "question", "--max-tokens", "3", env={"SHOAL_DEBUG": "1"})
    assert type(by_environment.exception).__name__ == "RequestFailedError"


def test_an_interrupt_ends_generate_with_130(shell: Shell) -> None:
    shell.interrupt_at = 3
    assert shell("generate", "question", "--max-tokens", "50", *GREEDY).exit_code == 130


# shoal chat


def test_chat_remembers_and_obeys(shell: Shell) -> None:
    shell.options["script"] = "ok"
    lines = [
        "hello",
        "/undo",
        "/undo",
        "again",
        "/system be kind",
        "/reset",
        "/nonsense",
        "/help",
        "",
        "/exit",
        "never",
    ]
    done = shell("chat", "--max-tokens", "2", stdin="\n".join(lines))
    assert (done.exit_code, done.stdout) == (0, "ok\nok\n")
    for part in ("taken back", "nothing to take back", "system message set", "forgotten", "unknown command /nonsense"):
        assert part in done.stderr
    assert "/undo" in done.stderr


def test_chat_drops_the_oldest_turns_when_the_context_is_full(shell: Shell) -> None:
    shell.options.update(script="ok", context_length=128)
    done = shell("chat", "--max-tokens", "2", stdin="\n".join(["x" * 60, "y" * 60, "z" * 60]))
    assert done.stdout == "ok\nok\nok\n\n"
    assert done.stderr.count("the context is full: the oldest turn") == 2


def test_chat_survives_a_question_that_does_not_fit(shell: Shell) -> None:
    shell.options.update(script="ok", context_length=64)
    done = shell("chat", "--max-tokens", "2", stdin="\n".join(["x" * 100, "short"]))
    assert done.stdout == "ok\n\n"
    assert "error: prompt: " in done.stderr


def test_an_interrupt_stops_the_answer_not_the_chat(shell: Shell) -> None:
    shell.interrupt_at = 3
    done = shell("chat", "--max-tokens", "20", *GREEDY, stdin="one\ntwo\n")
    assert done.exit_code == 0
    assert done.stderr == "stopped\n"
    assert shell.steps >= 20, "the second answer was complete"


def test_chat_needs_a_template(shell: Shell) -> None:
    shell.options["template"] = False
    done = shell("chat", stdin="hello\n")
    assert done.exit_code == 1
    assert "no chat template" in done.stderr


# The root command


def test_help_everywhere(shell: Shell) -> None:
    text = shell("--help").stdout
    for command in ("run", "chat", "generate"):
        assert command in text
        helped = shell(command, "--help")
        assert helped.exit_code == 0
        assert "--token-budget" in helped.stdout
        assert "--temperature" in helped.stdout


def test_version(shell: Shell) -> None:
    done = shell("--version")
    assert done.exit_code == 0
    assert done.stdout.startswith("shoal ")


def test_an_unknown_command_is_wrong_usage(shell: Shell) -> None:
    done = shell("swim")
    assert done.exit_code == 2
    assert "swim" in done.stderr


def test_a_schema_file_holds_the_answer(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    result = shell("generate", "really?", "--json-schema", str(file))
    assert result.exit_code == 0
    assert json.loads(result.stdout) in ("yes", "no")


def test_a_grammar_file_and_a_regex_hold_the_answer(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "answer.lark"
    file.write_text('start: "yes" | "no"')
    assert shell("generate", "really?", "--grammar", str(file)).stdout.strip() in ("yes", "no")
    assert shell("generate", "really?", "--regex", "a{3}b").stdout.strip() == "aaab"


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_a_file_that_cannot_be_read_names_its_flag(shell: Shell, tmp_path: Path, flag: str) -> None:
    (tmp_path / "broken").write_bytes(b"\xff{")
    for name in ("missing", "broken"):
        result = shell("generate", "hi", flag, str(tmp_path / name))
        assert result.exit_code == 2
        assert flag in result.output


def test_lines_of_a_prompts_file_may_be_constrained(shell: Shell) -> None:
    line = json.dumps({"prompt": "x", "regex": "[0-9]{4}"})
    result = shell("run", "-", "--output", "-", stdin=line + "\n")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[0])["completions"][0]["text"].isdigit()
