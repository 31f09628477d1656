"""Every error that Shoal raises on purpose, in one tree.

::

    ShoalError
    ├── InvalidRequestError     a parameter or prompt is wrong; ``field`` names it       (also a ValueError)
    ├── ConfigError             an option is wrong; ``field`` names it                   (also a ValueError)
    ├── ModelError              something about a model
    │   ├── ModelNotFoundError  no such model or file
    │   ├── ModelFileError      the file is malformed; ``path`` and ``where`` say where
    │   ├── UnsupportedModelError   well-formed, but not something Shoal can run; names the thing
    │   └── DownloadError       fetching a model failed
    ├── QueueFullError          the waiting queue is at its limit
    ├── RequestFailedError      this one request failed inside a step
    ├── EngineError             the engine as a whole
    │   ├── EngineClosedError   used after close
    │   └── EngineDeadError     the engine thread stopped on an internal error
    └── KernelError             native code refused its arguments or is missing a feature

A message says what was wrong, what was expected and, where there is one, what to do.
Anything that is not a ``ShoalError`` is a bug in Shoal.
"""

from __future__ import annotations


class ShoalError(Exception):
    """Base class of all errors raised on purpose."""


class InvalidRequestError(ShoalError, ValueError):
    """A request is wrong; ``field`` is the parameter's public name, ``code`` a word for programs where one is usual."""

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class ConfigError(ShoalError, ValueError):
    """An option is wrong; ``field`` is the option's name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ModelError(ShoalError):
    """Base class of errors about a model."""


class ModelNotFoundError(ModelError):
    """No model of that name, or no such file."""


class ModelFileError(ModelError):
    """A model file is malformed.

    ``path`` is the file, ``where`` the tensor, key or part of the file.
    """

    def __init__(self, path: str, where: str, message: str) -> None:
        super().__init__(f"{path}: {where}: {message}")
        self.path = path
        self.where = where
        self.message = message


class UnsupportedModelError(ModelError):
    """The file is well formed but holds something Shoal cannot run; the message names it."""


class DownloadError(ModelError):
    """A model could not be fetched."""


class QueueFullError(ShoalError):
    """The waiting queue holds ``limit`` requests already."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the waiting queue is full ({limit} requests); retry later or raise max_waiting")
        self.limit = limit


class RequestFailedError(ShoalError):
    """One request failed inside a step; its neighbours did not."""


class EngineError(ShoalError):
    """Base class of errors about the engine as a whole."""


class EngineClosedError(EngineError):
    """The engine was closed."""


class EngineDeadError(EngineError):
    """The engine thread stopped on an internal error."""


class KernelError(ShoalError):
    """Native code refused its arguments or lacks a feature."""
