"""Restore or recompute: decided from rates that this engine has measured on itself."""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.7  # what a measurement still counts after the next one
_DOUBT = 0.8  # how much of a restore's time is still believed after it was decided against
_LINE_MEMORY = 0.9  # the same for a measurement of what positions cost
_LINE_COUNT = 4  # so many measurements tell what positions cost,
_LINE_SPREAD = 0.2  # when their positions differ by this part of the mean
_LARGE_PART = 0.25  # of all tokens up to there, that a measurement of what positions cost computes
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
class _Line:
    """Seconds a token as a line over positions: `base + slope * position`, from whole prompts and large parts of them.

    Least squares, each measurement weighted with its tokens; with a slope of zero that is the tokens over the seconds.
    A short tail far behind says more about what a call costs than about its position, and is left out.
    """

    tokens: float = 0.0
    places: float = 0.0  # the sum of the tokens' positions
    squares: float = 0.0  # of tokens * (mean position)^2
    seconds: float = 0.0
    placed_seconds: float = 0.0  # of seconds * mean position
    furthest: int = 0
    count: int = 0

    def add(self, start: int, stop: int, seconds: float) -> None:
        num_tokens, place = stop - start, (start + stop) / 2
        if num_tokens < _LARGE_PART * stop:
            return
        self.count += 1
        self.furthest = max(self.furthest, stop)
        new = (num_tokens, num_tokens * place, num_tokens * place**2, seconds, seconds * place)
        old = (self.tokens, self.places, self.squares, self.seconds, self.placed_seconds)
        self.tokens, self.places, self.squares, self.seconds, self.placed_seconds = (
            _LINE_MEMORY * a + b for a, b in zip(old, new, strict=True)
        )

    def predict(self, start: int, stop: int) -> float | None:
        """Seconds for the tokens [start, stop); None while the positions are too few or too alike to tell.

        Behind the furthest position that was measured a token costs what it costs there.
        """
        if self.count < _LINE_COUNT:
            return None
        place, cost = self.places / self.tokens, self.seconds / self.tokens
        spread = self.squares / self.tokens - place**2
        if spread < (_LINE_SPREAD * place) ** 2:
            return None
        slope = (self.placed_seconds / self.tokens - place * cost) / spread
        slope = min(max(slope, 0.0), cost / place)  # so that neither is negative
        return (cost - slope * place) * (stop - start) + slope * (self._places(stop) - self._places(start))

    def _places(self, stop: int) -> float:
        """The sum of the positions below `stop`, none counted for more than the furthest."""
        near = min(stop, self.furthest)
        return near**2 / 2 + self.furthest * (stop - near)


@dataclass
class Rates:
    """How fast states are restored and computed here; 0 until something was measured."""

    _restore: _Rate = field(default_factory=_Rate)
    _prefill: _Rate = field(default_factory=_Rate)
    _line: _Line = field(default_factory=_Line)

    @property
    def restore_bytes_s(self) -> float:
        return self._restore.value

    @property
    def prefill_tokens_s(self) -> float:
        return self._prefill.value

    def restored(self, num_bytes: int, seconds: float) -> None:
        self._restore.add(num_bytes, seconds)

    def prefilled(self, start: int, stop: int, seconds: float) -> None:
        """Computing the tokens [start, stop) of a prompt took so long."""
        if self._prefill.started:
            self._line.add(start, stop, seconds)
        self._prefill.add(stop - start, seconds)

    def prefill_s(self, start: int, stop: int) -> float | None:
        """What computing the tokens [start, stop) of a prompt would take; None before anything was measured.

        A token costs more the more are before it, as far as the measurements show that.
        """
        if not self.prefill_tokens_s:
            return None
        seconds = self._line.predict(start, stop)
        return (stop - start) / self.prefill_tokens_s if seconds is None else seconds

    def predict(self, num_bytes: int, start: int, stop: int) -> Prediction:
        """What reading `num_bytes` and computing the tokens [start, stop), which that saves, would take."""
        compute_s = self.prefill_s(start, stop)
        if not self.restore_bytes_s or compute_s is None:
            return Prediction(None, None)
        return Prediction(num_bytes / self.restore_bytes_s, compute_s)

    def doubt(self) -> None:
        """A restore was decided against: the measured ones count for less.

        So that one slow moment of a disk does not decide for ever.
        """
        self._restore.seconds *= _DOUBT

    def seconds_back(self, num_bytes: int | None, start: int, stop: int) -> float:
        """The least time in which the tokens [start, stop) are there again: read from disk (None: not there), or
        computed.
        """
        compute_s = self.prefill_s(start, stop)
        if compute_s is None:
            compute_s = (stop - start) / _TYPICAL_PREFILL
        if num_bytes is None:
            return compute_s
        return min(compute_s, num_bytes / (self.restore_bytes_s or _TYPICAL_RESTORE))
