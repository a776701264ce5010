"""Linear layers with quantized weights of one input become one call, if an executor computes several by one kernel.

    linear_int4(x, q, ...), linear_int4(x, k, ...), linear_int4(x, v, ...)  ->  quantized_linears(x, (q, k, v), ...)

For a single row, as in decoding, each takes about as long as a kernel launch. The weights are not copied.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forge import clang, torchlang
from forge.ir import BoundSymbol, TensorProxy, Trace, recording
from forge.ir.pytree import names
from forge.ir.symbol import substitute

_SYMBOLS = frozenset({torchlang.linear_int8, torchlang.linear_int4})


class _Layer(NamedTuple):
    bound: BoundSymbol
    operands: dict[str, Any]

    def operand(self, name: str) -> TensorProxy | None:
        """Return an operand by its name, None if there is none."""
        return self.operands.get(name)

    @property
    def form(self) -> tuple[Any, ...]:
        """Return the key of layers that one call may compute."""
        input, weight, scale, zero_point = map(self.operand, ("input", "weight", "scale", "zero_point"))
        assert input is not None and weight is not None and scale is not None
        zero = None if zero_point is None else zero_point.dtype
        forms = weight.dtype, weight.shape[1], scale.dtype, tuple(scale.shape[1:]), zero
        return input.name, *forms, self.bound.mode


def join_quantized(trace: Trace, takes: Callable[[BoundSymbol, Sequence[BoundSymbol]], bool], most: int = 3) -> Trace:
    """Return a program without gradients with quantized layers of one input joined.

    Args:
        trace: The program.
        takes: Returns whether an executor accepts a joined call, and would run each of these calls alone.
        most: The number of layers that one call computes at most: queries, keys and values.
    """
    groups: dict[tuple[Any, ...], list[_Layer]] = {}
    inputs = set(trace.input_names)
    for bound in trace.bound_symbols:
        if bound.symbol in _SYMBOLS:
            layer = _Layer(bound, bound.symbol.bind(bound.args, bound.kwargs))
            rest = names([value for name, value in layer.operands.items() if name != "input"])
            if inputs.issuperset(rest):  # inputs, which are available at the first of the calls
                groups.setdefault(layer.form, []).append(layer)
    parts = [group[i : i + most] for group in groups.values() for i in range(0, len(group), most)]
    new = trace.derive("join_quantized", [])
    joined: dict[int, BoundSymbol | None] = {}
    with recording(new, clang.language):
        for layers in parts:
            call = _join(new, layers) if len(layers) > 1 else None
            if call is not None and takes(call, [each.bound for each in layers]):
                joined |= {id(each.bound): None for each in layers}
                joined[id(layers[0].bound)] = call
    if not joined:
        return trace
    calls = (joined.get(id(bound), bound) for bound in trace.bound_symbols)
    new.bound_symbols[:] = [call for call in calls if call is not None]
    return new


def _join(new: Trace, layers: Sequence[_Layer]) -> BoundSymbol:
    first = layers[0]
    operands = [tuple(each.operand(name) for each in layers) for name in ("weight", "scale", "zero_point", "bias")]
    with new.collecting() as recorded, new.set_tags(first.bound.tags, first.bound.source):
        outputs = torchlang.quantized_linears(first.operand("input"), *operands)
    (call,) = recorded
    return substitute(call, {out.name: each.bound.output for out, each in zip(outputs, layers, strict=True)})
