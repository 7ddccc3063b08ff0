"""Every exception hybridkv raises on purpose.

    HybridKVError
    ├── ConfigError             a plan, a limit or an option that cannot work
    │   ├── MissingFieldError       a model config without a field that is needed
    │   ├── UnsupportedModelError   a model with layer types that are not handled
    │   └── CapacityError           memory too small for the request
    ├── SchemaError             a file or message of another (usually newer) schema
    ├── SessionError            a session file that is damaged, or of another model
    ├── TraceError              a malformed line in a trace or prompt file
    ├── SweepError              a sweep that cannot continue; finished cells are kept
    ├── CacheError              misuse of the pool, the manager or the scheduler
    │   ├── BlockError              double free, foreign id, more blocks than are free
    │   ├── StalePlanError          a plan committed after the pool moved on
    │   ├── HashError               a hasher that failed; the tokens of the block were not taken
    │   └── OwnershipError          a second thread drives a scheduler
    ├── WorkerError             a Step that the worker cannot apply
    └── WireError               bytes that are not a message, or a Step that cannot be sent
    AssumptionWarning       a UserWarning: a plan rests on an assumption, not on a config field

A message names the mistake and the fix. A command prints it as one line, without traceback.
A cache that is merely full raises nothing: it answers with a reasoned Refusal.
"""

from __future__ import annotations


class AssumptionWarning(UserWarning):
    """A plan rests on something that no field of the model's config says; the message names what was assumed."""


class HybridKVError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(HybridKVError, ValueError):
    """A value handed in cannot work; the message names the value and the fix."""


class MissingFieldError(ConfigError):
    """A model config lacks a field; the message names the field."""


class UnsupportedModelError(ConfigError):
    """The model has layers of a type that is not supported; the message names them."""


class CapacityError(ConfigError):
    """The memory is too small; the message says how much is needed."""


class SchemaError(HybridKVError, ValueError):
    """A document carries a schema that this version does not read."""


class SessionError(HybridKVError, ValueError):
    """A session file that is damaged, signed otherwise, or made with another model; nothing of it was taken."""


class TraceError(HybridKVError, ValueError):
    """A malformed line; the message names file, line and the mistake."""


class SweepError(HybridKVError):
    """A sweep that cannot continue; the message says how to resume it."""


class CacheError(HybridKVError):
    """The pool, the manager or the scheduler was misused."""


class BlockError(CacheError, ValueError):
    """A block id that cannot be taken, touched or freed."""


class StalePlanError(CacheError):
    """The pool changed between plan_slots and commit; plan again."""


class HashError(CacheError):
    """A block could not be hashed: the token that fills it was not appended. Other requests have their tokens.

    request_ids: the requests without their token.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.request_ids = request_ids

    def __reduce__(self) -> tuple[type[HashError], tuple[str, tuple[str, ...]]]:
        """Return a recipe, because errors cross processes."""
        return HashError, (str(self), self.request_ids)


class OwnershipError(CacheError, RuntimeError):
    """A second thread called what only the owning thread may call."""


class WorkerError(HybridKVError):
    """A Step that does not fit the worker's tables or arrived out of order."""


class WireError(HybridKVError, ValueError):
    """A message between scheduler and worker that is damaged, or contradicts itself; the message names the field."""
