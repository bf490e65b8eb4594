"""How deep a value must nest at least, and whether there is one at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zllm_jax.fence.schema.values import ArrayShape, Contains, Expr, ObjectShape, Sets, Values


class Circular(Exception):
    """An expression depends on itself without an array or an object between."""


@dataclass(eq=False)
class Needs:
    """`of(expr)`: frames that the least nested of its values takes, 0 for a scalar; None where there is no value.

    `values` may raise while a recursive expression is being read; its need then counts as 0.
    """

    values: Callable[[Expr], Values]
    sets: Sets
    _known: dict[Expr, int | None] = field(default_factory=dict)

    def of(self, expr: Expr) -> int | None:
        if expr not in self._known:
            self._settle(expr)
        return self._known.get(expr, 0)

    def of_shape(self, shape: ArrayShape | ObjectShape) -> int | None:
        """The same of an array or an object of this shape, its own frame included."""
        inner = [self.of(one) for one in self._inevitable(shape)]
        return None if None in inner else 1 + max((one for one in inner if one is not None), default=0)

    def _settle(self, expr: Expr) -> None:
        """Least fixed point over what the values of `expr` inevitably contain."""
        found: dict[Expr, Values] = {}
        waiting, open_ones = [expr], set[Expr]()
        while waiting:
            one = waiting.pop()
            if one in found or one in self._known or one in open_ones:
                continue
            try:
                found[one] = self.values(one)
            except Circular:
                open_ones.add(one)
                continue
            waiting += [inner for shape in _shapes(found[one]) for inner in self._inevitable(shape)]
        needs: dict[Expr, int | None] = dict.fromkeys(found)
        needs |= dict.fromkeys(open_ones, 0)
        changed = True
        while changed:
            changed = False
            for one, values in found.items():
                new = self._least(values, needs)
                if new != needs[one]:
                    needs[one], changed = new, True
        if not open_ones:
            self._known |= needs
        elif needs[expr] is None:  # no value even if the open ones have some
            self._known[expr] = None

    def _least(self, values: Values, needs: dict[Expr, int | None]) -> int | None:
        text = values.string
        if values.null or values.true or values.false or values.number or (text is not None and not text.counted):
            return 0
        depths = [] if text is None else [1]  # a counted text has a frame of its own
        for shape in _shapes(values):
            inner = [needs[one] if one in needs else self._known[one] for one in self._inevitable(shape)]
            if None not in inner:
                depths.append(1 + max((one for one in inner if one is not None), default=0))
        return min(depths, default=None)

    def _inevitable(self, shape: ArrayShape | ObjectShape) -> list[Expr]:
        """What every value of the shape contains."""
        if isinstance(shape, ArrayShape):
            items = [shape.item(i) for i in range(min(shape.low, len(shape.prefix) + 1))]
            return items + [self._met(shape, one) for one in shape.contains if one.low]
        named = dict(shape.named)
        listed = [named[name] for name in shape.required if name in named]
        return listed + [expr for expr in _of_classes(shape) if expr is not None]

    def _met(self, shape: ArrayShape, rule: Contains) -> Expr:
        """The items that meet a rule, wherever in the array they may stand."""
        places = [shape.item(i) for i in range(rule.offset, len(shape.prefix))]
        last = shape.high if shape.high is not None else len(shape.prefix) + 1
        if last > len(shape.prefix):
            places.append(shape.rest)
        enough = shape.high is None or rule.offset + rule.low <= shape.high
        return self.sets.either(*(self.sets.both(one, rule.expr) for one in places)) if enough else self.sets.nothing


def _shapes(values: Values) -> Iterable[ArrayShape | ObjectShape]:
    return (*values.arrays, *values.objects)


def _of_classes(shape: ObjectShape) -> Iterable[Expr | None]:
    """The members that are required but not listed."""
    for name in shape.required - dict(shape.named).keys():
        text = name.encode(errors="surrogatepass")
        yield next((expr for names, expr in shape.classes if names.automaton.accepts(text)), None)
