"""Samples for verification: OpInfo samples, a model's actual arguments, and variations of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from math import prod
from typing import Any

import torch

from forge import torchlang
from forge.executors.calls import Call, Case, Meta, NotReproducible, call_of, with_strides
from forge.executors.hubex.assumptions import taken_values
from forge.executors.hubex.kernels import Kernel
from forge.executors.hubex.verification.generic import generic_calls
from forge.executors.hubex.verification.search import Constraints, Values, arguments, dtype_of, lengths, record, search
from forge.executors.hubex.verification.symbolic import SymbolicCall
from forge.ir.pytree import tensors
from forge.ir.strides import without_gaps
from forge.testing import OpInfo, all_opinfos, make_tensor

ODD = (1, 7, 100)
LARGE = 1 << 20
LONG = (128, 129, 256, 257, 512, 513, 1000, 2048, 2049, 4096, 4097)
USUAL_LENGTH = 128
_NEAR_ZERO = 0.05
HUGE = 100.0  # its exponential overflows float32; its rounding in a sum is within tolerances
SPECIAL = {
    "NaN": (float("nan"), float("nan")),
    "infinities": (float("inf"), float("-inf")),
    "huge values": (HUGE, -HUGE),
}
_PASSES = {  # zero times NaN, infinity minus infinity: the results depend on how a formula is written
    "NaN": lambda actual, expected: actual.isnan(),
    "infinities": lambda actual, expected: actual.isnan() | expected.isnan(),
}
TEMPLATES, TRIES = 6, 2000  # the number of samples to change, and of calls to try for each


def opinfos_of(kernel: Kernel) -> list[OpInfo]:
    """Return the OpInfos of the operation that a kernel implements; none for a pattern."""
    symbol = kernel.target.symbol
    return [info for info in all_opinfos() if symbol.id in info.symbols or torchlang.find(info.op) is symbol]


def general_cases(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the operation's OpInfo samples, changed if the constraints allow none of them; for an operation without
    OpInfo, arguments that the constraints allow, and variations of them."""
    infos = opinfos_of(kernel) if kernel.samples is None else []
    templates = []
    for info in infos:
        for sample in info.samples(info, device, dtype):
            yield Case(sample.args, sample.kwargs)
            templates.append((sample.args, sample.kwargs))
    if infos and any(True for _ in _allowed_calls(kernel, templates)):
        return
    changed = next(_changed_calls(kernel, templates), None)
    if changed is not None:
        yield from call_cases(kernel, changed)
        return
    for call in generic_calls(kernel, device, dtype):
        yield from call_cases(kernel, call)


def _calls(templates: Iterable[tuple[tuple, dict]]) -> Iterator[Call]:
    for args, kwargs in templates:
        try:
            yield call_of(args, kwargs)
        except NotReproducible:
            continue


def _allowed_calls(kernel: Kernel, templates: Iterable[tuple[tuple, dict]]) -> Iterator[Call]:
    """Return calls that the constraints allow."""
    constraints = Constraints(kernel)
    return (call for call in _calls(templates) if not constraints.violations(call))


def _changed_calls(kernel: Kernel, templates: Iterable[tuple[tuple, dict]]) -> Iterator[Call]:
    """Yield samples with sizes, dtypes and numbers changed to satisfy the constraints, for which the operation stays
    valid."""
    constraints = Constraints(kernel)
    if any(parameter.rest for parameter in kernel.target.signature.parameters):
        return
    problems = [_problem(kernel, constraints, template) for template in _distinct(_calls(templates))]
    problems.sort(key=lambda problem: len(constraints.violations(problem[1](problem[0]))))
    for start, build, candidates in problems[:TEMPLATES]:
        solution = search(constraints, start, build, candidates, TRIES)
        if solution is not None:
            yield build(solution)


def _distinct(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield one of each group of calls that differ only in sizes."""
    visited = set()
    for call in calls:
        form = repr(call.map(lambda leaf: (len(leaf.shape), leaf.dtype) if isinstance(leaf, Meta) else leaf))
        if form not in visited:
            visited.add(form)
            yield call


def _with_dtype(kernel: Kernel, name: str, value: Any) -> Any:
    return replace(value, dtype=dtype_of(kernel, name, value.dtype), strides=None) if isinstance(value, Meta) else value


def _problem(
    kernel: Kernel, constraints: Constraints, template: Call
) -> tuple[Values, Callable[[Values], Call], Callable[[str, Values], Sequence[Any]]]:
    """Return the variables of a sample (its sizes, and the numbers in conditions), a function that builds a call from
    their values, and a function that returns the candidate values."""
    bound = kernel.target.signature.bind(template.args, template.kwargs)
    typed = {name: _with_dtype(kernel, name, value) for name, value in bound.items()}
    call = arguments(kernel, typed)
    sizes = sorted({size for meta in call.metas for size in meta.shape if size > 1})
    ours = {theirs: name for name, theirs in kernel.target.names.items()}
    names = [ours[name] for name in constraints.names if name in ours]
    numbers = {name: typed[name] for name in names if name in typed and not isinstance(typed[name], (Meta, list))}
    start = {**{f"length {size}": size for size in sizes}, **numbers}

    def build(values: Values) -> Call:
        changed = with_lengths(call, {size: values[f"length {size}"] for size in sizes})
        by_name = kernel.target.signature.bind(changed.args, changed.kwargs)
        return arguments(kernel, {**by_name, **{n: values[n] for n in numbers if values[n] is not numbers[n]}})

    def candidates(name: str, values: Values) -> Sequence[Any]:
        if name not in numbers:
            return lengths(constraints, values, values[name])
        return [*constraints.compared_values(kernel.target.names[name], build(values)), None]

    return start, build, candidates


def call_cases(kernel: Kernel, call: Call) -> Iterator[Case]:
    """Yield the call itself and variations: odd sizes, unaligned memory, strided rows, no elements."""
    values = _Values(kernel, call)
    yield values.case(call)
    yield from variations(kernel, call)


def variations(kernel: Kernel, call: Call) -> Iterator[Case]:
    """Yield calls of the same structure in other layouts, alignments and sizes."""
    values, small = _Values(kernel, call), _smaller(call)
    yield values.case(small, "unaligned", offset=1)
    yield values.case(small.map(_stride_rows), "strided rows")
    for note, variant in _layouts(small):
        yield values.case(variant, note)
    yield from values.special(small)
    yield from values.with_shared_tensor(small)
    for resized in _resize(kernel, small):
        yield values.case(resized)
        yield values.case(resized, "unaligned", offset=1)
    first = next((meta for meta in small.metas if meta.shape), None)
    if first is not None and not kernel.particular:
        yield values.case(with_lengths(small, {first.shape[0]: 0}), "empty")


def symbolic_cases(kernel: Kernel, symbolic: SymbolicCall) -> Iterator[Case]:
    """Yield a call at small, odd and large sizes of each of its symbols, the others at their least."""
    values = _Values(kernel, symbolic.at({}))
    for position in range(len(symbolic.ranges)):
        small = (symbolic.at({position: size}) for size in ODD if symbolic.allows(position, size))
        for call in (*small, *islice(_long_calls(kernel, symbolic, position), 2)):
            yield replace(values.case(call), layouts=False)


def _long_calls(kernel: Kernel, symbolic: SymbolicCall, position: int) -> Iterator[Call]:
    """Yield the call at the largest size of a symbol that the constraints allow and some MB hold, then at half of it,
    and so on. Constant sizes are made smaller if that is needed."""
    constraints, last = Constraints(kernel), 2 * LONG[-1]
    wide = dict.fromkeys((size for size in symbolic.sizes if size > USUAL_LENGTH), USUAL_LENGTH)
    for size in sorted({*LONG, symbolic.ranges[position][1] or LONG[-1]}, reverse=True):
        if size > last / 2 or size in wide or not symbolic.allows(position, size):
            continue
        call = symbolic.at({position: size})
        allowed = (each for each in (call, with_lengths(call, wide)) if not constraints.violations(each))
        fitting_call = next((each for each in allowed if _largest(kernel, each) <= LARGE), None)
        if fitting_call is not None:
            last = size
            yield fitting_call


def _largest(kernel: Kernel, call: Call) -> int:
    """Return the number of elements of the largest tensor of a call and its decomposition."""
    calls, largest = list(record(kernel, call).bound_symbols), 0
    while calls:
        bound = calls.pop()
        calls += bound.subsymbols
        largest = max([largest, *(int(prod(each.shape)) for each in tensors([bound.args, bound.kwargs, bound.output]))])
    return largest


class _Values:
    """Random values in the domain of the kernel's operation."""

    def __init__(self, kernel: Kernel, call: Call) -> None:
        self.has_strides = all(meta.strides is not None for meta in call.metas)
        infos = opinfos_of(kernel)
        self.low, self.high = infos[0].domain if infos else (None, None)
        self.kernel = kernel

    def case(self, call: Call, note: str = "", offset: int = 0) -> Case:
        own = None if self.kernel.samples is None else own_samples(self.kernel, call)
        if own is not None:
            return Case(own.args, own.kwargs, note, offset, self.has_strides)
        sample = call.map(lambda leaf: self.tensor(leaf) if isinstance(leaf, Meta) else leaf)
        return Case(sample.args, sample.kwargs, note, offset, self.has_strides)

    def with_shared_tensor(self, call: Call) -> Iterator[Case]:
        """Yield a call that passes one tensor for all arguments with the first one's metadata."""
        if not call.metas or call.metas.count(call.metas[0]) < 2 or self.kernel.samples or self.kernel.assumes:
            return
        one = self.tensor(call.metas[0])
        sample = call.map(
            lambda leaf: one if leaf == call.metas[0] else self.tensor(leaf) if isinstance(leaf, Meta) else leaf
        )
        yield Case(sample.args, sample.kwargs, "one tensor for several arguments", 0, self.has_strides, gradients=False)

    def special(self, call: Call) -> Iterator[Case]:
        """Yield calls with special values, on which kernels differ that agree otherwise: at one position per tensor, a
        different one in each, so that no result hides another. The difference of two infinities and the gradient of a
        value that is not finite depend on the order of operations and on convention."""
        own = self.kernel.samples or self.kernel.assumes  # these define the valid values
        if own is not None or not any(meta.dtype.is_floating_point for meta in call.metas):
            return
        within = all(bound is None or abs(bound) >= HUGE for bound in (self.low, self.high))
        zeros = lambda leaf: self.tensor(leaf).zero_() if isinstance(leaf, Meta) else leaf
        sample = call.map(zeros)
        yield Case(sample.args, sample.kwargs, "zeros", 0, self.has_strides, gradients=False)
        if within:
            sample = call.map(lambda leaf: self._some_large(leaf) if isinstance(leaf, Meta) else leaf)
            yield Case(sample.args, sample.kwargs, "large values", 0, self.has_strides)
        for note, (first, last) in SPECIAL.items():
            if note != "huge values" or within:
                places = count()
                sample = call.map(lambda leaf: self._with(leaf, next(places), first, last))  # noqa: B023  runs here
                gradients, passes = note == "huge values", _PASSES.get(note)
                yield Case(sample.args, sample.kwargs, note, 0, self.has_strides, gradients=gradients, passes=passes)

    def _some_large(self, meta: Meta) -> torch.Tensor:
        """Draw values and make every third four times as large, since drawn values lie within three of zero."""
        values = self.tensor(replace(meta, strides=None))
        if meta.dtype.is_floating_point and values.numel():
            values.view(-1)[::3] *= 4
        return with_strides(values, meta.strides)

    def _with(self, leaf: Any, place: int, first: float, last: float) -> Any:
        if not isinstance(leaf, Meta):
            return leaf
        values = self.tensor(replace(leaf, strides=None))
        if leaf.dtype.is_floating_point and values.numel():
            flat, place = values.view(-1), place % values.numel()
            flat[-1 - place], flat[place] = last, first
        return with_strides(values, leaf.strides)

    def tensor(self, meta: Meta) -> torch.Tensor:
        if meta.dtype.is_floating_point:
            values = make_tensor(meta.shape, meta.device, meta.dtype, low=self.low, high=self.high)
            if self.low is None and self.high is None:  # the norm of one element near zero is inconclusive
                values = torch.where(values.abs() < _NEAR_ZERO, values + values.sign(), values)
        elif meta.dtype.is_complex:
            values = torch.randn(meta.shape, dtype=meta.dtype, device=meta.device)
        else:  # small enough to be an index
            values = torch.randint(0, 2, meta.shape, device=meta.device).to(meta.dtype)
        return with_strides(values, meta.strides)


def own_samples(kernel: Kernel, call: Call) -> Call | None:
    """Return the call with tensors from the repository's own function of the call's dtype, device and dims. Tensors of
    other shapes than requested (no elements, say) are used as they are, in the requested layout. Raises ValueError if
    the function returns an unknown argument or omits one."""
    names = kernel.bind(call.args, call.kwargs)
    dims: dict[str, Any] = {}
    for name, pattern in kernel.entry.shape.items():
        if isinstance(names.get(name), Meta) and pattern.mismatch(names[name].shape, dims) is not None:
            return None  # the kernel does not take such shapes
        if isinstance(names.get(name), Meta) and pattern.rest is not None:
            dims.setdefault("batch", pattern.middle(names[name].shape))
    first = call.metas[0]
    properties = {"dtype": first.dtype, "device": first.device, **dims}
    assert kernel.samples is not None, "only kernels with samples of their own come here"
    samples = kernel.samples(**taken_values(kernel.samples, properties))
    if not isinstance(samples, Mapping):
        samples = samples if isinstance(samples, (tuple, list)) else (samples,)
        if len(samples) > len(names):
            raise ValueError(f"samples makes {len(samples)} values for {', '.join(names)}")
        samples = dict(zip(names, samples, strict=False))
    unknown = [name for name in samples if name not in names]
    missing = [name for name, value in names.items() if isinstance(value, Meta) and name not in samples]
    if unknown or missing:
        what = f"makes {unknown[0]!r}, which is none of its arguments" if unknown else f"makes no {missing[0]!r}"
        raise ValueError(f"samples {what}; arguments: {', '.join(names)}")
    ours = {theirs: name for name, theirs in kernel.target.names.items()}
    arguments_by_name = kernel.target.signature.bind(call.args, call.kwargs)
    replaced = {ours[name]: _in_strides_of(value, names[name]) for name, value in samples.items() if name in names}
    return arguments(kernel, {**arguments_by_name, **replaced})


def _in_strides_of(value: Any, meta: Any) -> Any:
    alike = isinstance(value, torch.Tensor) and isinstance(meta, Meta) and tuple(value.shape) == meta.shape
    return with_strides(value, meta.strides) if alike else value


def _smaller(call: Call) -> Call:
    """Return a call with the leading dims cut if it has millions of elements."""
    first = next(iter(call.metas), None)
    if first is None or prod(first.shape) <= LARGE:
        return call
    last = first.shape[-1]
    return with_lengths(call, {size: 5 for size in first.shape[:-1] if size > 16 and size != last})


def _layouts(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call in other layouts: of all tensors, of the first only, and of the others only, to detect a kernel
    that uses one tensor's strides for another."""
    yield "transposed", call.map(_transpose)
    if sum(len(meta.shape) > 1 for meta in call.metas) > 1:
        places, others = count(), count()
        yield "the first transposed", call.map(lambda leaf: leaf if next(places) else _transpose(leaf))
        yield "but the first transposed", call.map(lambda leaf: _transpose(leaf) if next(others) else leaf)
    yield "expanded", call.map(_expand)


def _stride_rows(leaf: Any) -> Any:
    """Give x the strides of x[:, ::2]."""
    if not isinstance(leaf, Meta) or len(leaf.shape) < 2:
        return leaf
    return replace(leaf, strides=tuple(2 * each for each in _dense(leaf.shape, leaf.strides)))


def _transpose(leaf: Any) -> Any:
    """Reverse the order of the dims in memory."""
    if not isinstance(leaf, Meta) or len(leaf.shape) < 2:
        return leaf
    order = [-each for each in _dense(leaf.shape, leaf.strides)]
    return replace(leaf, strides=_dense(leaf.shape, order))


def _expand(leaf: Any) -> Any:
    """Expand one row along the first dim."""
    if not isinstance(leaf, Meta) or len(leaf.shape) < 2:
        return leaf
    return replace(leaf, strides=(0, *_dense(leaf.shape, leaf.strides)[1:]))


def _resize(kernel: Kernel, call: Call) -> Iterator[Call]:
    """Yield odd sizes for each named dim and for the last dim of the first tensor; if the constraints allow none of
    them, sizes that they allow."""
    names = kernel.bind(call.args, call.kwargs)
    bound: dict[str, int] = {}
    times: dict[str, set[int]] = {}
    for name, pattern in kernel.entry.shape.items():
        if isinstance(names.get(name), Meta) and pattern.mismatch(names[name].shape, bound) is None:
            for dim in (*pattern.first, *(pattern.rest or ())):
                if dim.name is not None:
                    times.setdefault(dim.name, set()).add(dim.times)
    resized = {name: {each * bound[name]: each for each in multiples} for name, multiples in times.items()}
    last = next((meta.shape[-1] for meta in call.metas if meta.shape), None)
    if last is not None and not kernel.particular and not any(last in multiples for multiples in resized.values()):
        resized["last dim"] = {last: 1}
    constraints = Constraints(kernel)
    for multiples in resized.values():
        odd = [_of_length(call, multiples, size) for size in ODD]
        odd = [each for each in odd if all(prod(meta.shape) <= LARGE for meta in each.metas)]
        yield from odd
        if all(map(constraints.violations, odd)):
            others = (_of_length(call, multiples, size) for size in constraints.numbers if size not in multiples)
            small = (each for each in others if all(prod(meta.shape) <= LARGE for meta in each.metas))
            yield from islice((each for each in small if not constraints.violations(each)), len(ODD))


def _of_length(call: Call, multiples: Mapping[int, int], length: int) -> Call:
    return with_lengths(call, {old: each * length for old, each in multiples.items()})


def with_lengths(call: Call, lengths: Mapping[int, int]) -> Call:
    """Return the call with sizes replaced wherever they occur: in shapes, and in lists of numbers such as
    normalized_shape."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Meta) or lengths.keys().isdisjoint(leaf.shape):
            return leaf
        shape = tuple(lengths.get(size, size) for size in leaf.shape)
        return replace(leaf, shape=shape, strides=None if leaf.strides is None else _dense(shape, leaf.strides))

    def numbers(value: Any) -> Any:
        if type(value) in (tuple, list, torch.Size) and all(type(each) is int for each in value):
            return tuple(lengths.get(each, each) for each in value)
        return value

    changed = call.map(change)
    return Call(tuple(map(numbers, changed.args)), {name: numbers(value) for name, value in changed.kwargs.items()})


def _dense(shape: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Return strides without gaps, with the dims in the order of the given strides."""
    dims = sorted(range(len(shape)), key=lambda dim: (0 if order is None else order[dim], -dim))
    return without_gaps([max(size, 1) for size in shape], dims)
