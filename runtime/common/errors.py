"""Every error a user of Quire can meet, as one tree.

This file must not know who raises or who reports; it fixes names, codes and whether a retry can help.
The one invariant: whatever crosses the Engine facade towards a user is a `QuireError`.

    QuireError
    ├── InvalidRequest            INVALID_ARGUMENT     the request asks for something not allowed
    │   └── ContextLengthExceeded OUT_OF_RANGE         prompt (+ max_tokens) does not fit the model or the pool
    ├── ProtocolError             INVALID_ARGUMENT     the connection broke the protocol and is closed
    ├── Unauthenticated           UNAUTHENTICATED      missing or unknown token
    ├── Overloaded                RESOURCE_EXHAUSTED   queue or pool is full; retry later
    ├── QuotaExceeded             RESOURCE_EXHAUSTED   more than its tenant may ever hold: a retry cannot help
    ├── DeadlineExceeded          DEADLINE_EXCEEDED    the request's own deadline passed
    ├── Cancelled                 CANCELLED            the client cancelled or went away
    ├── Unavailable               UNAVAILABLE          server is starting, draining or gone; retry
    ├── RequestNotFound           NOT_FOUND            nothing to resume: unknown, over for too long, or somebody else's
    ├── Quarantined               ABORTED              two engine crashes in a row had only this request in common
    ├── GenerationFailed          INTERNAL             this request's computation failed (NaN logits, detokenizer)
    ├── ConfigError               INVALID_ARGUMENT     a flag, environment variable or file setting is not allowed
    ├── MissingDependency         FAILED_PRECONDITION  an optional package is not installed
    └── ModelError                FAILED_PRECONDITION  the model cannot be served
        ├── ModelNotFound         NOT_FOUND
        ├── UnsupportedModel      UNIMPLEMENTED        architecture or config value we do not run
        ├── MissingTensor         DATA_LOSS
        ├── WrongTensor           DATA_LOSS            a tensor's shape or dtype is not what config.json implies
        └── CorruptCheckpoint     DATA_LOSS            truncated or unreadable file
"""

from __future__ import annotations

from typing import ClassVar


class QuireError(Exception):
    """Base of the tree. `code` is the gRPC code name sent on the wire; `retryable`: whether trying again can help."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False
    retry_after_ms: int | None = None


class InvalidRequest(QuireError):
    code = "INVALID_ARGUMENT"


class ContextLengthExceeded(InvalidRequest):
    code = "OUT_OF_RANGE"


class ProtocolError(QuireError):
    code = "INVALID_ARGUMENT"


class Unauthenticated(QuireError):
    code = "UNAUTHENTICATED"


class Overloaded(QuireError):
    """Rejected before any work was done. `retry_after_ms` is the predicted wait, where one is known."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QuotaExceeded(QuireError):
    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(QuireError):
    code = "DEADLINE_EXCEEDED"


class Cancelled(QuireError):
    code = "CANCELLED"


class Unavailable(QuireError):
    code = "UNAVAILABLE"
    retryable = True


class RequestNotFound(QuireError):
    code = "NOT_FOUND"


class Quarantined(QuireError):
    code = "ABORTED"


class GenerationFailed(QuireError):
    code = "INTERNAL"


class ConfigError(QuireError):
    code = "INVALID_ARGUMENT"


class MissingDependency(QuireError):
    code = "FAILED_PRECONDITION"


class ModelError(QuireError):
    code = "FAILED_PRECONDITION"


class ModelNotFound(ModelError):
    code = "NOT_FOUND"


class UnsupportedModel(ModelError):
    code = "UNIMPLEMENTED"


class MissingTensor(ModelError):
    code = "DATA_LOSS"


class WrongTensor(ModelError):
    code = "DATA_LOSS"


class CorruptCheckpoint(ModelError):
    code = "DATA_LOSS"
