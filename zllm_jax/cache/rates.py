"""Restore or recompute: decided from rates that this engine has measured on itself."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.7  # what a measurement still counts after the next one
_DOUBT = 0.8  # how much of a restore's time is still believed after it was decided against
_TYPICAL_PREFILL, _TYPICAL_RESTORE = 500.0, 1e9  # tokens/s and bytes/s of a laptop, until something was measured


@dataclass(frozen=True)
class Prediction:
    """Seconds for reading a state and for computing what it saves; None where nothing was measured yet.

    Unmeasured rates count in favour of restoring, which then measures them.
    """

    restore_s: float | None
    compute_s: float | None

    @property
    def restoring_wins(self) -> bool:
        return self.restore_s is None or self.compute_s is None or self.restore_s < self.compute_s


@dataclass
class _Rate:
    """Amount over seconds of all measurements: a long one counts more than a short one, a new one than an old.

    The first is left out: its programs may have been compiled in it.
    """

    amount: float = 0.0
    seconds: float = 0.0
    started: bool = False

    def add(self, amount: float, seconds: float) -> None:
        if not self.started:
            self.started = True
            return
        self.amount = _MEMORY * self.amount + amount
        self.seconds = _MEMORY * self.seconds + max(seconds, 1e-9)

    @property
    def value(self) -> float:
        return self.amount / self.seconds if self.seconds else 0.0


@dataclass
class Rates:
    """How fast states are restored and computed here; 0 until something was measured."""

    _restore: _Rate = field(default_factory=_Rate)
    _prefill: _Rate = field(default_factory=_Rate)

    @property
    def restore_bytes_s(self) -> float:
        return self._restore.value

    @property
    def prefill_tokens_s(self) -> float:
        return self._prefill.value

    def restored(self, num_bytes: int, seconds: float) -> None:
        self._restore.add(num_bytes, seconds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._prefill.add(num_tokens, seconds)

    def predict(self, num_bytes: int, tokens_saved: int) -> Prediction:
        """What reading `num_bytes` and computing `tokens_saved` tokens would take."""
        if not self.restore_bytes_s or not self.prefill_tokens_s:
            return Prediction(None, None)
        return Prediction(num_bytes / self.restore_bytes_s, tokens_saved / self.prefill_tokens_s)

    def doubt(self) -> None:
        """A restore was decided against: the measured ones count for less.

        So that one slow moment of a disk does not decide for ever.
        """
        self._restore.seconds *= _DOUBT

    def seconds_back(self, num_bytes: int | None, num_tokens: int) -> float:
        """The least time in which `num_tokens` are there again: read from disk (None: not there), or computed."""
        compute_s = num_tokens / (self.prefill_tokens_s or _TYPICAL_PREFILL)
        if num_bytes is None:
            return compute_s
        return min(compute_s, num_bytes / (self.restore_bytes_s or _TYPICAL_RESTORE))
