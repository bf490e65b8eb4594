"""Restore or recompute: decided from rates that this engine has measured on itself."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.7  # what a measurement still counts after the next one
_DOUBT = 0.8  # how much of a restore's time is still believed after it was decided against


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

    def restoring_wins(self, num_bytes: int, tokens_saved: int) -> bool:
        """Whether reading `num_bytes` is predicted to take less time than computing `tokens_saved` tokens.

        Unmeasured rates count in favour of restoring, which then measures them. Each time that recomputing wins, the
        measured restores count for less, so that one slow moment of a disk does not decide for ever.
        """
        if not self.restore_bytes_s or not self.prefill_tokens_s:
            return True
        wins = num_bytes / self.restore_bytes_s < tokens_saved / self.prefill_tokens_s
        if not wins:
            self._restore.seconds *= _DOUBT
        return wins
