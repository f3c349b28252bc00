"""Sizes by name: numbers whose values are set for each run, and the assumptions that were made about them.

    space = SizeSpace()
    n = space.symbol("n", 17)
    shape = (n, 4 * n + 1)          # sizes, of which the present values are 17 and 69
    if n > 8: ...                   # True, and an assumption: a run in which n is 8 or less needs another plan

A `Size` is a polynomial of symbols and of quotients of polynomials.  Equal polynomials are equal sizes.  A comparison that holds
for all values of the symbols, which are at least `LOWEST`, is decided without an assumption; any other one is decided by the
present values and becomes an assumption of the scope.  A size has no `int` that Python or NumPy could convert it to, unless the
space is `settled`: then the present values may be read, because whoever reads them does so again for other values.

An assumption of the first segment of a plan that a symbol or a quotient has one value makes it a `pin`: a trace begins again with
that number in its place, so that no size is written in two ways.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

LOWEST = 2
"""The lowest value of a symbol: sizes of 0 and 1 broadcast, or are empty, and are numbers of a plan."""

Monomial = tuple[int, ...]
"""The numbers of the atoms that are multiplied, in order."""

Terms = tuple[tuple[Monomial, int], ...]
"""The coefficient of each monomial, in order; none is zero."""


class OpenSize(Exception):
    """A size that differs between runs is used where a number is needed."""


_numbers = itertools.count()


class Scope:
    """What is known and assumed of the sizes of one segment of a plan, which may follow others.

    Attributes:
        guards: the assumptions: a difference that must be zero ("=="), not zero ("!=") or positive (">"), and the reason.
        number: differs from that of any other scope.
        is_first: whether the segment is the first one.
        symbols: the place of the value of each symbol, with those of the segments before.
        lowest: the number below which each atom does not fall.
        quotients: the atoms that are quotients.
        calls: those whose results have symbols as sizes.
        tensors: the bytes of the tensors that have a symbol as size.
        largest: returns the bytes of the largest tensor for the values of all symbols, when the trace has ended.
    """

    def __init__(self, space: SizeSpace, before: Scope | None = None) -> None:
        self._space = space
        self.number = next(_numbers)
        self.is_first = before is None
        self.guards: dict[tuple[Terms, str], str] = {}
        self.symbols: dict[str, int] = {} if before is None else dict(before.symbols)
        self.lowest: dict[int, int] = {} if before is None else dict(before.lowest)
        self.quotients: dict[tuple[Terms, int], int] = {} if before is None else dict(before.quotients)
        self.calls: list[Any] = [] if before is None else list(before.calls)
        self.tensors: set[Any] = set()
        self._test: Callable[[Sequence[int]], bool]
        self.largest: Callable[[Sequence[int]], tuple[int, ...]]

    def seal(self, largest: int = 0) -> None:
        """End the trace of the segment: from now on the assumptions are tested by one function.

        Args:
            largest: the bytes of the largest tensor without symbols.
        """
        tests = [f"{self._space.text(terms)} {kind} 0" for terms, kind in self.guards]
        self._test = eval(f"lambda a: {' and '.join(tests) or True}")
        formulas = Formulas(self._space)
        self.largest = formulas.made([f"max(0, {', '.join([str(largest), *map(formulas.name, self.tensors)])})"])

    def failing(self) -> str | None:
        """The first assumption that the present values do not meet; None if they meet all."""
        if not self._test(self._space.present):
            for (terms, kind), reason in self.guards.items():
                now = _evaluated(terms, self._space.present)
                if not (now == 0 if kind == "==" else now != 0 if kind == "!=" else now > 0):
                    return f"{self._space.described(terms)} {kind} 0: {reason}"
        return None


class SizeSpace:
    """The sizes of one plan.

    Attributes:
        names: the symbols.
        values: their present values.
        present: the present values of the atoms.
        scope: what is assumed in the segment that is being traced.
        pins: the symbols and quotients that are numbers, by their names and expressions.
        found: further symbols and quotients that the first segment assumes to have one value.
        settled: whether present values may be read without an assumption.
        reason: for which call something is being decided: the reason of an assumption.
        epoch: the number of times that the values were set.
        decisions: the number of times that the values or the scope were set: what was decided before does not hold.
    """

    def __init__(self, pins: Mapping[str, int] | None = None) -> None:
        self.pins: dict[str, int] = dict(pins or {})
        self.found: dict[str, int] = {}
        self.names: list[str] = []
        self.values: list[int] = []
        self.settled = 0
        self.reason = ""
        self.epoch = self.decisions = 0
        self._atoms: list[str] = []  # the expression of each, in terms of those before it
        self._parts: dict[int, tuple[Terms, int]] = {}
        self._evaluate: list[Callable[[Sequence[int], Sequence[int]], int]] = []
        self.present: list[int] = []
        self._made: dict[Terms, Size] = {}
        self._usual: list[int] = []  # the values of the atoms if that of each symbol is `TYPICAL`
        self.scope = Scope(self)

    def symbol(self, name: str, value: int) -> Size:
        """A further symbol; its value is at least `LOWEST`."""
        self.scope.symbols[name] = len(self.names)
        self.names.append(name)
        self.values.append(value)
        number = self._atom(f"s[{len(self.values) - 1}]", LOWEST)
        return self._size((((number,), 1),))

    def set(self, values: Sequence[int]) -> None:
        """Let the symbols have other values."""
        self.values = list(values)
        self.epoch += 1
        self.decisions += 1
        self.present = self._atoms_of(self.values)

    def _atoms_of(self, values: Sequence[int]) -> list[int]:
        """The values of the atoms for these values of the symbols."""
        atoms: list[int] = []
        for f in self._evaluate:
            atoms.append(f(values, atoms))
        return atoms

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let present values be read: what reads them does so again when the values have changed."""
        self.settled += 1
        try:
            yield
        finally:
            self.settled -= 1

    def of(self, terms: Mapping[Monomial, int]) -> int | Size:
        """The size of a polynomial: a number if it is constant."""
        kept = tuple(sorted((m, c) for m, c in terms.items() if c))
        if not kept:
            return 0
        if len(kept) == 1 and kept[0][0] == ():
            return kept[0][1]
        return self._size(kept)

    def quotient(self, terms: Terms, divisor: int) -> int | Size:
        """The floor of a polynomial over a positive number."""
        whole = {m: c // divisor for m, c in terms if c % divisor == 0}
        rest = {m: c for m, c in terms if c % divisor}
        if rest and all(c < 0 for c in rest.values()):  # -(n // -d) is a quotient that is rounded up
            up = {m: -c for m, c in rest.items()} | {(): divisor - 1 - rest.get((), 0)}
            return self.of(whole) - self.quotient(tuple(sorted(up.items())), divisor)
        if () in rest and len(rest) > 1:  # (2 n + 5) // 4 is (2 n + 1) // 4 + 1
            whole[()] = rest[()] // divisor
            rest[()] %= divisor
        elif () in rest:  # what is left is a number: its floor
            whole[()] = rest.pop(()) // divisor
        if rest:
            common = math.gcd(divisor, *rest.values())
            divisor //= common
            kept = tuple(sorted((m, c // common) for m, c in rest.items() if c))
            number = self.scope.quotients.get((kept, divisor))
            pin = self.pins.get(self._key(kept, divisor)) if self.pins else None
            if pin is not None:
                above, below = (dict(kept) | {(): dict(kept).get((), 0) - n} for n in (divisor * pin - 1, divisor * (pin + 1)))
                for bound in (above, {m: -c for m, c in below.items()}):  # kept - d p + 1 > 0, d (p + 1) - kept > 0
                    self._assume(tuple(sorted((m, c) for m, c in bound.items() if c)), ">")
                whole[()] = whole.get((), 0) + pin
                return self.of(whole)
            if number is None:
                low = self.lowest(kept)
                number = self._atom(f"({self.text(kept)}) // {divisor}", -(1 << 62) if low is None else low // divisor)
                self.scope.quotients[kept, divisor] = number
                self._parts[number] = kept, divisor
            whole[number,] = whole.get((number,), 0) + 1
        return self.of(whole)

    def lowest(self, terms: Terms) -> int | None:
        """A number that a polynomial does not fall below; None if there is none that follows from what is known of its atoms.

        If the numbers below which atoms do not fall are not enough, quotients are replaced by what bounds them, from the last on:
        q = p // d is at most p / d, and at least (p - d + 1) / d.
        """
        low, scale = self._shifted(terms), 1
        while low is None:
            found = next((a for a in reversed(self._parts) if any(a in m for m, _ in terms)), None)
            if found is None or any(found in m and len(m) > 1 for m, _ in terms):
                return None
            part, divisor = self._parts[found]
            count = dict(terms)[found,]
            bounded = {m: c * divisor for m, c in terms if m != (found,)}
            for m, c in (*part, ((), 1 - divisor if count > 0 else 0)):
                bounded[m] = bounded.get(m, 0) + count * c
            terms, scale = tuple((m, c) for m, c in bounded.items() if c), scale * divisor
            low = self._shifted(terms)
        return -(-low // scale)

    def _shifted(self, terms: Terms) -> int | None:
        """The value at the lowest values of all atoms, if no value is lower."""
        shifted: dict[Monomial, int] = {}
        for monomial, coefficient in terms:
            parts: dict[Monomial, int] = {(): coefficient}
            for atom in monomial:
                low, before, parts = self.scope.lowest[atom], parts, {}
                for m, c in before.items():
                    grown = tuple(sorted((*m, atom)))
                    parts[grown] = parts.get(grown, 0) + c
                    parts[m] = parts.get(m, 0) + low * c
            for m, c in parts.items():
                shifted[m] = shifted.get(m, 0) + c
        return shifted.get((), 0) if all(c >= 0 for m, c in shifted.items() if m) else None

    def decide(self, difference: int | Size, kind: str) -> bool:
        """Whether a difference is zero ("=="), or positive (">"): by what is known, or by the present value and an assumption."""
        if isinstance(difference, int):
            return difference == 0 if kind == "==" else difference > 0
        if self.settled:
            now = difference.now()
            return now == 0 if kind == "==" else now > 0
        if difference.decided_at != self.decisions:
            difference.decided_at, difference.decided = self.decisions, {}
        decision = difference.decided.get(kind)
        if decision is None:
            decision = difference.decided[kind] = self._decide(difference.terms, kind)
        return decision

    def _decide(self, terms: Terms, kind: str) -> bool:
        """Decide without what was decided before."""
        now = _evaluated(terms, self.present)
        holds = now == 0 if kind == "==" else now > 0
        low = self.lowest(terms)
        if low is not None and low > 0:
            return kind == ">"
        negative = tuple((m, -c) for m, c in terms)
        high = self.lowest(negative)
        if high is not None and high >= (1 if kind == "==" else 0):
            return False
        if kind == ">" and not holds:  # 1 - d > 0
            opposite = self.of({m: -c for m, c in terms} | {(): 1 - dict(terms).get((), 0)})
            assert isinstance(opposite, Size)
            self._assume(opposite.terms, ">")
        elif kind == "==" and not holds and (low == 0 or high == 0):
            self._assume(terms if low == 0 else negative, ">")
        else:
            self._assume(terms, kind if holds else "!=")
        return holds

    def _assume(self, terms: Terms, kind: str) -> None:
        """Add an assumption, and let what follows be decided by it."""
        self.scope.guards.setdefault((terms, kind), self.reason)
        rest = dict(terms)
        constant = rest.pop((), 0)
        if kind == "==" and len(rest) == 1 and self.scope.is_first:
            ((monomial, count),) = rest.items()
            if len(monomial) == 1:
                part = self._parts.get(monomial[0])
                self.found[self.names_of(monomial[0]) if part is None else self._key(*part)] = -constant // count
        if kind == ">" and len(rest) == 1:
            ((monomial, count),) = rest.items()
            if len(monomial) == 1 and count > 0:  # c a + k > 0
                self.scope.lowest[monomial[0]] = max(self.scope.lowest[monomial[0]], -constant // count + 1)

    def typical(self, terms: Terms) -> int:
        """The value of a polynomial if that of each symbol is `TYPICAL`."""
        usual = self._usual
        for f in self._evaluate[len(usual) :]:
            usual.append(f([TYPICAL] * len(self.values), usual))
        return _evaluated(terms, usual)

    def _key(self, terms: Terms, divisor: int) -> str:
        return f"({self.described(terms)}) // {divisor}"

    def text(self, terms: Terms) -> str:
        """The Python expression of a polynomial, over the list of atoms `a`."""
        return " + ".join("*".join([str(c)] * (c != 1 or not m) + [f"a[{i}]" for i in m]) for m, c in terms)

    def quotient_of(self, atom: int) -> tuple[Terms, int] | None:
        """The polynomial and the divisor of an atom that is a quotient; None for a symbol."""
        return self._parts.get(atom)

    def symbol_text(self, atom: int) -> str:
        """The expression of a symbol, over the list of their values `s`."""
        return self._atoms[atom]

    def seal(self) -> None:
        """End a trace."""
        for size in self._made.values():
            size.combined = {}
        self._made.clear()
        self.settled = 1

    def enter(self, scope: Scope) -> None:
        """Trace a segment, with its own assumptions."""
        self.scope, self.settled = scope, 0
        self.decisions += 1

    def described(self, terms: Terms) -> str:
        """A polynomial with the names of the symbols."""
        parts = []
        for monomial, count in terms:
            factors = [self._described_atom(i) for i in monomial]
            parts.append("*".join([str(count)] * (count != 1 or not monomial) + factors))
        return " + ".join(sorted(parts))

    def _described_atom(self, atom: int) -> str:
        part = self._parts.get(atom)
        return self.names_of(atom) if part is None else self._key(*part)

    def names_of(self, atom: int) -> str:
        """The name of the symbol that is an atom."""
        return self.names[int(self._atoms[atom][2:-1])]

    def _atom(self, text: str, low: int) -> int:
        self.scope.lowest[len(self._atoms)] = low
        self._atoms.append(text)
        function = eval(f"lambda s, a: {text}")
        self._evaluate.append(function)
        self.present.append(function(self.values, self.present))
        return len(self._atoms) - 1

    def _size(self, terms: Terms) -> Size:
        found = self._made.get(terms)
        if found is None:
            found = self._made[terms] = Size(self, terms)
        return found


class Size:
    """A size whose value is set for each run; see the module.

    Attributes:
        space: whose symbols it depends on.
        terms: the polynomial.
        combined: the results of operations during a trace, and the other operand.
        decided: what was decided of it, if `decided_at` is the present number of the space's `decisions`.
    """

    __slots__ = ("_epoch", "_hash", "_value", "combined", "decided", "decided_at", "space", "terms")

    def __init__(self, space: SizeSpace, terms: Terms) -> None:
        self.space, self.terms = space, terms
        self.combined: dict[tuple[int, int], tuple[int | Size, Any]] = {}
        self.decided: dict[str, bool] = {}
        self.decided_at = -1
        self._hash = hash((id(space), terms))
        self._epoch = -1
        self._value = 0

    def now(self) -> int:
        """The present value, without an assumption."""
        space = self.space
        if self._epoch != space.epoch:
            self._value, self._epoch = _evaluated(self.terms, space.present), space.epoch
        return self._value

    def __index__(self) -> int:
        if not self.space.settled:
            raise OpenSize("it needs numbers for sizes that differ between runs")
        return self.now()

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        """Of the size in the present scope: what a cache holds for sizes was decided by the assumptions of one scope."""
        return hash((self._hash, self.space.scope.number))

    def __bool__(self) -> bool:
        return not self.space.decide(self, "==")

    def __add__(self, other: Any) -> Any:
        return self._combined(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._combined(other, -1)

    def __rsub__(self, other: Any) -> Any:
        made = self._combined(other, -1)
        return made if made is NotImplemented else -made

    def __neg__(self) -> Any:
        return self.space.of({m: -c for m, c in self.terms})

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __pos__(self) -> Size:
        return self

    def _combined(self, other: Any, sign: int) -> Any:
        """The sum or the difference, or with a sign of 0 the product."""
        if type(other) is int:
            key = sign, other
        elif type(other) is Size:
            key = sign + 3, id(other)
        else:
            return self._computed(other, sign)
        result = self.combined.get(key)
        if result is None:
            result = self.combined[key] = self._computed(other, sign), other
        return result[0]

    def _computed(self, other: Any, sign: int) -> Any:
        """The same of any object."""
        terms = self._terms_of(other)
        if terms is None:
            return NotImplemented
        result: dict[Monomial, int] = dict(self.terms) if sign else {}
        for m, c in terms:
            for n, d in self.terms if not sign else [((), sign)]:
                both = tuple(sorted(m + n))
                result[both] = result.get(both, 0) + c * d
        return self.space.of(result)

    def __mul__(self, other: Any) -> Any:
        return self._combined(other, 0)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Size):
            found = self._exact(other)
            if found is not None:
                return found
            other = other.__index__()  # an assumption
        if not isinstance(other, int):
            return NotImplemented
        if other < 0:
            return (-self) // -other
        return self.space.quotient(self.terms, other) if other else 1 // other

    def __rfloordiv__(self, other: Any) -> Any:
        return other // self.__index__() if isinstance(other, int) else NotImplemented

    def __mod__(self, other: Any) -> Any:
        if not isinstance(other, (int, Size)):
            return NotImplemented
        return self - self // other * other

    def __rmod__(self, other: Any) -> Any:
        return other % self.__index__() if isinstance(other, int) else NotImplemented

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def _terms_of(self, x: Any) -> Terms | None:
        """The polynomial of a size or a number; None for anything else."""
        if isinstance(x, Size):
            if x.space is not self.space:
                raise ValueError("sizes of two plans cannot be combined")
            return x.terms
        if not isinstance(x, bool) and hasattr(x, "__index__"):
            n = int(x)
            return (((), n),) if n else ()
        return None

    def _exact(self, other: Size) -> Any:
        """The quotient by a monomial that divides every monomial; None if one is left."""
        if len(other.terms) != 1:
            return 1 if self.terms == other.terms else None
        divisor, by = other.terms[0]
        made: dict[Monomial, int] = {}
        for m, c in self.terms:
            rest = list(m)
            for atom in divisor:
                if atom not in rest:
                    return None
                rest.remove(atom)
            if c % by:
                return None
            made[tuple(rest)] = c // by
        return self.space.of(made)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, (int, Size)) or isinstance(other, bool):
            return NotImplemented
        if isinstance(other, Size) and other.space is not self.space:
            return False
        return self.space.decide(self - other, "==")

    def __lt__(self, other: Any) -> Any:
        return _compared(self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(other, self)

    def __le__(self, other: Any) -> Any:
        found = _compared(other, self)
        return found if found is NotImplemented else not found

    def __ge__(self, other: Any) -> Any:
        found = _compared(self, other)
        return found if found is NotImplemented else not found

    def __repr__(self) -> str:
        return f"<{self.space.described(self.terms)} = {self.now()}>"


def _compared(low: Any, high: Any) -> Any:
    """Whether one is less than the other."""
    one = low if isinstance(low, Size) else high
    other = high if one is low else low
    if isinstance(other, float):
        return low.__index__() < high if one is low else low < high.__index__()
    if not isinstance(other, (int, Size)):
        return NotImplemented
    difference = high - low
    return one.space.decide(difference, ">")


def _evaluated(terms: Terms, atoms: Sequence[int]) -> int:
    total = 0
    for monomial, product in terms:
        for i in monomial:
            product *= atoms[i]
        total += product
    return total


TYPICAL = 64
"""The value of every symbol by which it is decided what is fast, if all choices return the same."""


def typical(x: Any) -> int:
    """A positive size for symbols of `TYPICAL`: what is chosen by it does not depend on the request, and assumes nothing."""
    return max(x.space.typical(x.terms), 1) if isinstance(x, Size) else int(x)


class Formulas:
    """Numbers that one generated function computes for the values of symbols, each once."""

    def __init__(self, space: SizeSpace) -> None:
        self._space = space
        self._lines: list[str] = []
        self._names: dict[Any, str] = {}
        self._used: dict[str, Any] = {}

    def name(self, n: Any) -> str:
        """The variable of a number in the function, or its digits."""
        if isinstance(n, Size):
            return self._named(n.terms, lambda: self._polynomial(n.terms))
        if isinstance(n, Late):
            return self.call(n.function, *n.sizes)
        return str(int(n))

    def call(self, function: Callable[..., int], *numbers: Any) -> str:
        """The variable of what a function returns for numbers."""
        arguments = ", ".join(map(self.name, numbers))
        code = getattr(function, "__code__", function)
        cells = tuple(id(c.cell_contents) for c in getattr(function, "__closure__", None) or ())
        return self._named((code, cells, arguments), lambda: f"{self.use(function)}({arguments})")

    def use(self, thing: Any) -> str:
        """The name of an object in the function."""
        name = f"f{len(self._used)}"
        self._used[name] = thing
        return name

    def line(self, text: str) -> str:
        """The variable of an expression of variables."""
        return self._named(text, lambda: text)

    def made(self, results: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """The function that returns the values of variables for those of the symbols."""
        body = "".join(f"    {line}\n" for line in self._lines)
        scope = dict(self._used)
        exec(f"def made(s):\n{body}    return ({', '.join(results)},)", scope)
        found: Callable[[Sequence[int]], tuple[int, ...]] = scope["made"]
        return found

    def _named(self, key: Any, text: Callable[[], str]) -> str:
        if key not in self._names:
            expression = text()
            self._names[key] = f"v{len(self._names)}"
            self._lines.append(f"{self._names[key]} = {expression}")
        return self._names[key]

    def _polynomial(self, terms: Terms) -> str:
        parts = []
        for monomial, count in terms:
            factors = [self._atom(i) for i in monomial]
            parts.append("*".join([str(count)] * (count != 1 or not monomial) + factors))
        return " + ".join(parts)

    def _atom(self, i: int) -> str:
        part = self._space.quotient_of(i)
        if part is None:
            return self._named(("atom", i), lambda: self._space.symbol_text(i))
        return self._named(("atom", i), lambda: f"({self._polynomial(part[0])}) // {part[1]}")


class Late:
    """A number that a function computes from present sizes whenever they have changed; no result of a step depends on it."""

    __slots__ = ("function", "sizes")

    def __init__(self, function: Callable[..., int], sizes: Sequence[Any]) -> None:
        self.function, self.sizes = function, sizes

    def now(self) -> int:
        """The present value."""
        return int(self.function(*[now(n) for n in self.sizes]))


def late(function: Callable[..., int], *sizes: Any) -> Any:
    """What a function returns for sizes: a number, or if one of them has a name a `Late` one."""
    if any(type(n) is Size or type(n) is Late for n in sizes):
        return Late(function, sizes)
    return function(*sizes)


def now(x: Any) -> int:
    """The present value of a size or a number, without an assumption."""
    return x if type(x) is int else x.now() if isinstance(x, (Size, Late)) else int(x)


def is_open(sizes: Iterable[Any]) -> bool:
    """Whether a size among some differs between runs."""
    return any(type(d) is Size for d in sizes)


def settled(sizes: Iterable[Any]) -> tuple[int, ...]:
    """The present values of sizes, without an assumption."""
    return tuple([d.now() if type(d) is Size else int(d) for d in sizes])


def at_least_zero(n: Any) -> Any:
    """The larger of a number and 0; `max` would assume more of a size."""
    if isinstance(n, int):
        return max(n, 0)
    low, high = n.space.lowest(n.terms), n.space.lowest((-n).terms)
    if low is not None and low >= 0:
        return n
    return 0 if high is not None and high >= 0 else n if n > 0 else 0


def broadcast_sizes(*shapes: Sequence[Any]) -> tuple[Any, ...]:
    """As NumPy's function of this name, for sizes too."""
    rank = max(map(len, shapes), default=0)
    made: list[Any] = [1] * rank
    for shape in shapes:
        for axis, d in enumerate(shape, rank - len(shape)):
            before = made[axis]
            if before is d or d == 1:
                continue
            if before == 1:
                made[axis] = d
            elif before != d:
                raise ValueError(f"shapes do not broadcast: {', '.join(map(str, shapes))}")
            elif isinstance(before, Size):
                made[axis] = d if isinstance(d, int) else before
    return tuple(made)
