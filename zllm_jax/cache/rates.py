"""Restore or recompute: decided from rates that this engine has measured on itself."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.3


@dataclass
class Rates:
    """Moving averages; 0 until something was measured."""

    restore_bytes_s: float = 0.0
    prefill_tokens_s: float = 0.0

    def restored(self, num_bytes: int, seconds: float) -> None:
        self.restore_bytes_s = _blend(self.restore_bytes_s, num_bytes / max(seconds, 1e-9))

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self.prefill_tokens_s = _blend(self.prefill_tokens_s, num_tokens / max(seconds, 1e-9))

    def restoring_wins(self, num_bytes: int, tokens_saved: int) -> bool:
        """Whether reading `num_bytes` is predicted to take less time than computing `tokens_saved` tokens.

        Unmeasured rates count in favour of restoring, which then measures them.
        """
        if not self.restore_bytes_s or not self.prefill_tokens_s:
            return True
        return num_bytes / self.restore_bytes_s < tokens_saved / self.prefill_tokens_s


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _WEIGHT) * old + _WEIGHT * new
