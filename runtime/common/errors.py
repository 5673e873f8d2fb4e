"""All errors that a user of Quire can meet: their names, their codes, and whether a retry can help.

Every error that reaches a user is a `QuireError`:

    QuireError
    ├── InvalidRequest            INVALID_ARGUMENT
    │   └── ContextLengthExceeded OUT_OF_RANGE
    ├── ProtocolError             INVALID_ARGUMENT
    ├── Unauthenticated           UNAUTHENTICATED
    ├── TLSError                  FAILED_PRECONDITION
    ├── Overloaded                RESOURCE_EXHAUSTED
    ├── QuotaExceeded             RESOURCE_EXHAUSTED
    ├── DeadlineExceeded          DEADLINE_EXCEEDED
    ├── Cancelled                 CANCELLED
    ├── Unavailable               UNAVAILABLE
    ├── NotOpen                   FAILED_PRECONDITION
    ├── RequestNotFound           NOT_FOUND
    ├── Quarantined               ABORTED
    ├── GenerationFailed          INTERNAL
    ├── SnapshotNotSaved          DATA_LOSS
    ├── ConfigError               INVALID_ARGUMENT
    ├── MissingDependency         FAILED_PRECONDITION
    └── ModelError                FAILED_PRECONDITION
        ├── ModelNotFound         NOT_FOUND
        ├── UnsupportedModel      UNIMPLEMENTED
        ├── MissingTensor         DATA_LOSS
        ├── WrongTensor           DATA_LOSS
        └── CorruptCheckpoint     DATA_LOSS
"""

from __future__ import annotations

from typing import ClassVar


class QuireError(Exception):
    """Base class of all errors that Quire raises on purpose.

    `code` is the gRPC code name sent on the wire; `retryable` says whether a retry can help.
    """

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    retry_after_ms: int | None = None


class InvalidRequest(QuireError):
    """The request asks for something that is not allowed."""

    code = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt and `max_tokens` together, exceeds what the model or the KV cache can hold."""

    code = "OUT_OF_RANGE"


class ProtocolError(QuireError):
    """The peer broke the wire protocol, and the connection is closed."""

    code = "INVALID_ARGUMENT"


class Unauthenticated(QuireError):
    """The token is missing or unknown to the server."""

    code = "UNAUTHENTICATED"


class TLSError(QuireError):
    """TLS failed for a reason that a retry does not change, such as a certificate that the client does not trust."""

    code = "FAILED_PRECONDITION"


class Overloaded(QuireError):
    """The queue is full and the request was refused before any work; retry after `retry_after_ms`, if it is set."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QuotaExceeded(QuireError):
    """The request needs more than its tenant may ever hold, so a retry cannot help."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(QuireError):
    """The request's own deadline passed, or cannot be met."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(QuireError):
    """The client cancelled the request or disconnected."""

    code = "CANCELLED"


class Unavailable(QuireError):
    """The server or engine is starting, draining, restarting or closed; a retry may help."""

    code = "UNAVAILABLE"
    retryable = True


class NotOpen(QuireError):
    """A client or an `LLM` is used outside its context: before it is entered, or after it is closed."""

    code = "FAILED_PRECONDITION"


class RequestNotFound(QuireError):
    """There is nothing to resume: the request is unknown, expired or belongs to another tenant."""

    code = "NOT_FOUND"


class Quarantined(QuireError):
    """The request was running in two engine crashes in a row, so it is not run again."""

    code = "ABORTED"


class GenerationFailed(QuireError):
    """The request's computation failed, for example because of NaN logits."""

    code = "INTERNAL"


class SnapshotNotSaved(QuireError):
    """The prefix cache could not be saved when the server stopped; the next start may be cold."""

    code = "DATA_LOSS"
    retryable = True


class ConfigError(QuireError):
    """A flag, environment variable or setting has a value that is not allowed."""

    code = "INVALID_ARGUMENT"


class MissingDependency(QuireError):
    """An optional package that this feature needs is not installed."""

    code = "FAILED_PRECONDITION"


class ModelError(QuireError):
    """The model cannot be served."""

    code = "FAILED_PRECONDITION"


class ModelNotFound(ModelError):
    """The model folder, or a file it needs, does not exist."""

    code = "NOT_FOUND"


class UnsupportedModel(ModelError):
    """The model has an architecture or a config value that Quire does not support."""

    code = "UNIMPLEMENTED"


class MissingTensor(ModelError):
    """The checkpoint lacks a tensor that config.json implies."""

    code = "DATA_LOSS"


class WrongTensor(ModelError):
    """A tensor has another shape or dtype than config.json implies."""

    code = "DATA_LOSS"


class CorruptCheckpoint(ModelError):
    """A file of the checkpoint is truncated or unreadable."""

    code = "DATA_LOSS"
