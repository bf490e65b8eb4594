"""The error tree.

Everything a caller can cause is a `ZllmError`; a programmer's mistake is a plain `ValueError`.

    ZllmError
    ├── InvalidRequest          the request itself is wrong (names the parameter)
    │   ├── BudgetExceeded      prompt + max_tokens do not fit (names the three numbers)
    │   └── UnsupportedGrammar  a schema, pattern or grammar cannot be enforced exactly (names the keyword's path)
    ├── Overloaded              the queue is full; try again later
    ├── ModelError              a model cannot be used
    │   ├── UnknownModel        no such name, directory or file
    │   ├── ModelNotPulled      known, but not on this machine
    │   ├── DownloadFailed      fetching it failed (offline, half a file, wrong digest)
    │   ├── BadCheckpoint       a file is truncated, has a wrong shape, or an unknown architecture
    │   └── BadTokenizer        tokenizer files are missing or unusable
    ├── CacheError              internal to the cache: callers of the engine see a miss instead
    │   ├── CorruptSnapshot     a stored snapshot fails its checks (names the file)
    │   └── StoreUnavailable    the store cannot be read or written
    │       └── StoreStalled    the store has given nothing for too long
    ├── HistoryUnavailable      the responses that a server keeps for its clients cannot be read or written
    ├── DeviceLost              an earlier device call failed and took the state of all sequences with it
    ├── ConfigError             a setting or an experiment file is wrong
    └── NotReleased             `release` was asked for the payload of an envelope that is not COMPLETED
"""

from __future__ import annotations


class ZllmError(Exception):
    """Base of all errors that a caller can cause or must handle."""

    code = "error"


class InvalidRequest(ZllmError):
    """A request that cannot be served as written. `param` names the argument."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BudgetExceeded(InvalidRequest):
    """`prompt_tokens + max_tokens > budget_tokens`: refused before anything is queued."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, budget_tokens: int) -> None:
        super().__init__(
            f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) = "
            f"{prompt_tokens + max_tokens} tokens, but one sequence may hold {budget_tokens}: "
            "shorten the prompt, lower max_tokens, or raise EngineConfig.max_seq_tokens",
            param="max_tokens" if prompt_tokens < budget_tokens else "prompt",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.budget_tokens = budget_tokens


class UnsupportedGrammar(InvalidRequest):
    """What cannot be enforced exactly. `reason` says why, `where` is the path of the keyword (empty: the whole)."""

    code = "unsupported_grammar"

    def __init__(self, reason: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason, param="schema" if where else None)
        self.reason = reason
        self.where = where


class Overloaded(ZllmError):
    """The bounded queue is full."""

    code = "overloaded"


class ModelError(ZllmError):
    """A model cannot be used."""

    code = "model_error"


class UnknownModel(ModelError):
    """Neither a known name nor a readable directory or file."""

    code = "model_not_found"


class HistoryUnavailable(ZllmError):
    """The responses that are kept for clients cannot be read or written."""

    code = "history_unavailable"


class ModelNotPulled(ModelError):
    """A known model whose files are not on this machine."""

    code = "model_not_pulled"


class DownloadFailed(ModelError):
    """Fetching a model failed; what was fetched so far is kept for the next try."""

    code = "download_failed"


class BadCheckpoint(ModelError):
    """A checkpoint is truncated, has a wrong shape, or an unknown architecture. `tensor` names where."""

    code = "bad_checkpoint"

    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class BadTokenizer(ModelError):
    """Tokenizer files are missing or unusable."""

    code = "bad_tokenizer"


class CacheError(ZllmError):
    """Raised inside the cache only: the engine turns it into a logged miss."""

    code = "cache_error"


class CorruptSnapshot(CacheError):
    """A stored snapshot fails one of its checks. `path` names the file, the message the check."""

    code = "corrupt_snapshot"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StoreUnavailable(CacheError):
    """The store cannot be read or written (permissions, full disk, I/O error)."""

    code = "store_unavailable"


class StoreStalled(StoreUnavailable):
    """The store has given nothing for longer than anybody should wait."""

    code = "store_stalled"


class DeviceLost(ZllmError):
    """A device call failed earlier and took the state of all sequences with it: the engine must be opened anew."""

    code = "device_lost"


class ConfigError(ZllmError):
    """A setting or an experiment file is wrong; the message names the key and what it accepts."""

    code = "bad_config"


class NotReleased(ZllmError):
    """The payload of an envelope that did not complete was asked for (quarantine)."""

    code = "not_released"
