"""OpInfos of statistics: quantiles, histograms, reductions of segments."""

import math
from functools import partial

import torch

from forge.testing.opinfo import FLOATS, Directive, Sample
from forge.testing.table import Value, ints, op, sample, t, tolerance, values, wrong
from forge.torch_internals.versions import TORCH

_DTYPES = (torch.float32, torch.float64)

_INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")
_NANS = values([[3.0, 1.0, math.nan, 2.0], [1.0, 2.0, 4.0, 3.0]])
_quantiles = [
    sample(t(5), 0.4),
    sample(t(3, 4), 0.5),
    sample(t(), 0.5),
    sample(t(3, 4).t(), values([0.0, 0.3, 1.0]), dim=1),
    sample(t(2, 3, 4), t(low=0, high=1), 0, True),
    sample(t(2, 3, 4), 0.25, keepdim=True),
    sample(t(2, 3), values([0.1, 0.9]), 1, keepdim=True),
    *[sample(t(3, 7), values([0.1, 0.5, 0.75]), -1, interpolation=each) for each in _INTERPOLATIONS],
    *[sample(_NANS, values([0.2, 1.0]), 1, interpolation=each) for each in _INTERPOLATIONS],
    sample(values([math.nan] * 3), 0.5),
]
_bad_quantiles = [
    wrong(t(0), 0.5, match="must be non-empty"),
    wrong(t(3, dtype=torch.float16), 0.5, match="either float or double"),
    wrong(t(3), 1.5, match=r"in the range \[0, 1\]"),
    wrong(t(3), t(1, 1, low=0, high=1), match="scalar or 1D"),
    wrong(t(3), values([0.5], torch.float64), match="same dtype"),
    wrong(t(3), 0.5, interpolation="x", match="interpolation must be one of"),
    wrong(t(3), 0.5, 1, error=IndexError, match="out of range"),
]
_untraced = Directive("skip", "before torch 2.13, Dynamo does not trace it", test="test_jit")
_directives = (_untraced,) if TORCH < (2, 13) else ()
_quantile = partial(op, family=(_quantiles, _bad_quantiles), directives=_directives)
_quantile("quantile nanquantile", dtypes=_DTYPES)
_quantile("Tensor.quantile Tensor.nanquantile", dtypes=_DTYPES[:1])


# histograms

_NO_HISTOGRAM = Directive("skip", "torch has a kernel for a CPU alone", devices=("cuda",))
_EDGES = values([-2.0, -0.5, 0.5, 2.5])
op(
    "histogram",
    sample(t(20), 4),
    sample(t(4, 3).t(), 5, range=(-1.0, 2.0)),
    sample(t(3, 4), _EDGES),
    sample(t(3, 4), 3, weight=t(3, 4, low=0, high=1), density=True),
    sample(t(0), _EDGES),
    wrong(t(3), 0, match="bins must be > 0"),
    wrong(t(3), 3, weight=t(2), match="should have the same shape"),
    wrong(t(3), t(2, 2), match="should have one dimension"),
    dtypes=_DTYPES,
    gradient=False,
    directives=(_NO_HISTOGRAM,),
)
op(
    "histogramdd",
    sample(t(10, 2), [2, 3]),
    sample(t(10, 2), 3, range=[-1.0, 1.0, -2.0, 2.0]),
    sample(t(2, 5, 2), [_EDGES, values([-3.0, 0.0, 3.0])], density=True),
    sample(t(10, 2).t(), [4] * 10, weight=t(2, low=0, high=1)),
    wrong(t(5, 2), [2, 3, 4], match="must be equal to the innermost dimension"),
    wrong(t(5), [2], match="at least 2 dimensions|innermost dimension"),  # the latter since torch 2.15
    dtypes=_DTYPES,
    gradient=False,
    directives=(_NO_HISTOGRAM,),
)


# segments

_LENGTHS = ints(2, 0, 3)
_LENGTHS_OF_ROWS = values([[2, 3], [4, 1]], torch.int64)
_OFFSETS = ints(1, 3, 3, 5)


def _ways(reduce: str, data: Value) -> list[Sample]:
    return [
        sample(data, reduce, lengths=_LENGTHS, initial=1),
        sample(data, reduce, offsets=_OFFSETS, initial=0.5),
        sample(data, reduce, lengths=ints(1, 3), unsafe=True),
    ]


_ALL = ("sum", "mean", "prod", "max", "min")
op(
    "segment_reduce",
    *[each for reduce in _ALL for each in _ways(reduce, t(5))],
    *[each for reduce in _ALL for each in _ways(reduce, t(5, 2))],
    *[sample(t(2, 5, 3), reduce, lengths=_LENGTHS_OF_ROWS, axis=1, initial=1) for reduce in _ALL],
    # of a largest or smallest element that repeats, torch divides only positive gradients
    sample(values([1.0, 1.0, 0.0, 2.0, 0.0]), "prod", lengths=_LENGTHS, initial=1),
    sample(values([1.0, 1.0, 3.0, 2.0, 0.0]), "prod", lengths=_LENGTHS, initial=1),
    wrong(t(5), "sum", match="Either lengths or offsets"),
    wrong(t(5), "xx", lengths=_LENGTHS, match="must be either sum, prod"),
    wrong(t(5), "sum", lengths=_LENGTHS, axis=1, error=IndexError, match="out of range"),
    wrong(t(5), "sum", indices=_LENGTHS, match="indices based reduction"),
    dtypes=FLOATS,
    directives=(tolerance("terms that cancel are rounded to half precision in another order"),),
)
