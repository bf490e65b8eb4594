"""How deep a value must nest at least, and whether there is one at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence.schema.values import ArrayShape, Contains, Expr, ObjectShape, Sets, Values


class Circular(Exception):
    """An expression depends on itself without an array or an object between."""


class Unfounded(UnsupportedGrammar):
    """The same, as far as could be seen where a keyword was read."""


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
        return self._of_shape(shape, self.of)

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
            except (Circular, Unfounded):
                open_ones.add(one)
                continue
            for shape in _shapes(found[one]):
                waiting += self._inevitable(shape)
                waiting += [inner for several in self._more(shape) for inner in several]
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
            depth = self._of_shape(shape, lambda one: needs[one] if one in needs else self._known[one])
            if depth is not None:
                depths.append(depth)
        return min(depths, default=None)

    def _of_shape(self, shape: ArrayShape | ObjectShape, need: Callable[[Expr], int | None]) -> int | None:
        inner = [need(one) for one in self._inevitable(shape)]
        listed, unlisted = ([one for one in map(need, several) if one is not None] for several in self._more(shape))
        missing = shape.low - len(shape.required) if isinstance(shape, ObjectShape) else 0
        if missing > 0:
            found = sorted([*listed, *(min(unlisted, default=0),) * (missing if unlisted else 0)])
            inner += found[:missing] if len(found) >= missing else [None]
        return None if None in inner else 1 + max((one for one in inner if one is not None), default=0)

    def _more(self, shape: ArrayShape | ObjectShape) -> tuple[list[Expr], list[Expr]]:
        """Where an object must have more members than those required: what the other listed ones must be, each at
        most once, and what members that are not listed must be, of any number.
        """
        if isinstance(shape, ArrayShape) or shape.low <= len(shape.required):
            return [], []
        listed = [expr for name, expr in shape.named if name not in shape.required]
        return listed, self.unlisted(shape)

    def unlisted(self, shape: ObjectShape) -> list[Expr]:
        """What members must be whose names are not listed, as far as there are such names."""
        if not shape.named:
            return [expr for _, expr in shape.classes]
        names = self.sets.texts(name for name, _ in shape.named)
        return [expr for several, expr in shape.classes if not self.sets.without(several, names).empty]

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
