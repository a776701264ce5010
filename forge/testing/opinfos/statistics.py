"""OpInfos of statistics: quantiles, histograms, reductions of segments."""

import math

import torch

from forge.testing.opinfo import FLOATS, Directive, OpInfo, Sample, register_opinfo, sample
from forge.testing.opinfos.cases import method
from forge.testing.opinfos.specs import Spec, calls, errors, given, t, wrong
from forge.torch_internals.versions import TORCH

_DTYPES = (torch.float32, torch.float64)

_INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")
_NANS = t(2, 4, values=[[3.0, 1.0, math.nan, 2.0], [1.0, 2.0, 4.0, 3.0]])
_quantiles = calls(
    sample(t(5), 0.4),
    sample(t(3, 4), 0.5),
    sample(t(), 0.5),
    sample(t(4, 3, swapped=True), given(0.0, 0.3, 1.0), dim=1),
    sample(t(2, 3, 4), t(low=0, high=1), 0, True),
    sample(t(2, 3, 4), 0.25, keepdim=True),
    sample(t(2, 3), given(0.1, 0.9), 1, keepdim=True),
    *[sample(t(3, 7), given(0.1, 0.5, 0.75), -1, interpolation=each) for each in _INTERPOLATIONS],
    *[sample(_NANS, given(0.2, 1.0), 1, interpolation=each) for each in _INTERPOLATIONS],
    sample(t(3, values=[math.nan] * 3), 0.5),
)
_bad_quantiles = errors(
    wrong(t(0), 0.5, match="must be non-empty"),
    wrong(t(3, dtype=torch.float16), 0.5, match="either float or double"),
    wrong(t(3), 1.5, match=r"in the range \[0, 1\]"),
    wrong(t(3), t(1, 1, low=0, high=1), match="scalar or 1D"),
    wrong(t(3), given(0.5, dtype=torch.float64), match="same dtype"),
    wrong(t(3), 0.5, interpolation="x", match="interpolation must be one of"),
    wrong(t(3), 0.5, 1, error=IndexError, match="out of range"),
)
_untraced = Directive("skip", "before torch 2.13, Dynamo does not trace it", test="test_jit")
_directives = (_untraced,) if TORCH < (2, 13) else ()
for _name in ("quantile", "nanquantile"):
    register_opinfo(
        OpInfo(_name, getattr(torch, _name), _quantiles, _bad_quantiles, dtypes=_DTYPES, directives=_directives)
    )
    register_opinfo(
        OpInfo(
            f"Tensor.{_name}",
            method(_name),
            _quantiles,
            _bad_quantiles,
            dtypes=_DTYPES[:1],
            symbols=(f"torch.{_name}",),
            directives=_directives,
        )
    )


# histograms

_NO_HISTOGRAM = Directive("skip", "torch has a kernel for a CPU alone", devices=("cuda",))
_EDGES = given(-2.0, -0.5, 0.5, 2.5)
register_opinfo(
    OpInfo(
        "histogram",
        torch.histogram,
        calls(
            sample(t(20), 4),
            sample(t(3, 4, swapped=True), 5, range=(-1.0, 2.0)),
            sample(t(3, 4), _EDGES),
            sample(t(3, 4), 3, weight=t(3, 4, low=0, high=1), density=True),
            sample(t(0), _EDGES),
        ),
        errors(
            wrong(t(3), 0, match="bins must be > 0"),
            wrong(t(3), 3, weight=t(2), match="should have the same shape"),
            wrong(t(3), t(2, 2), match="should have one dimension"),
        ),
        dtypes=_DTYPES,
        gradient=False,
        directives=(_NO_HISTOGRAM,),
    )
)
register_opinfo(
    OpInfo(
        "histogramdd",
        torch.histogramdd,
        calls(
            sample(t(10, 2), [2, 3]),
            sample(t(10, 2), 3, range=[-1.0, 1.0, -2.0, 2.0]),
            sample(t(2, 5, 2), [_EDGES, given(-3.0, 0.0, 3.0)], density=True),
            sample(t(2, 10, swapped=True), [4] * 10, weight=t(2, low=0, high=1)),
        ),
        errors(
            wrong(t(5, 2), [2, 3, 4], match="must be equal to the innermost dimension"),
            wrong(t(5), [2], match="at least 2 dimensions|innermost dimension"),  # the latter since torch 2.15
        ),
        dtypes=_DTYPES,
        gradient=False,
        directives=(_NO_HISTOGRAM,),
    )
)


# segments

_LENGTHS = given(2, 0, 3, dtype=torch.int64)
_LENGTHS_OF_ROWS = t(2, 2, dtype=torch.int64, values=[[2, 3], [4, 1]])
_OFFSETS = given(1, 3, 3, 5, dtype=torch.int64)


def _ways(reduce: str, data: Spec) -> list[Sample]:
    return [
        sample(data, reduce, lengths=_LENGTHS, initial=1),
        sample(data, reduce, offsets=_OFFSETS, initial=0.5),
        sample(data, reduce, lengths=given(1, 3, dtype=torch.int64), unsafe=True),
    ]


_ALL = ("sum", "mean", "prod", "max", "min")
register_opinfo(
    OpInfo(
        "segment_reduce",
        torch.segment_reduce,
        calls(
            *[each for reduce in _ALL for each in _ways(reduce, t(5))],
            *[each for reduce in _ALL for each in _ways(reduce, t(5, 2))],
            *[sample(t(2, 5, 3), reduce, lengths=_LENGTHS_OF_ROWS, axis=1, initial=1) for reduce in _ALL],
            # of a largest or smallest element that repeats, torch divides only positive gradients
            sample(t(5, values=[1.0, 1.0, 0.0, 2.0, 0.0]), "prod", lengths=_LENGTHS, initial=1),
            sample(t(5, values=[1.0, 1.0, 3.0, 2.0, 0.0]), "prod", lengths=_LENGTHS, initial=1),
        ),
        errors(
            wrong(t(5), "sum", match="Either lengths or offsets"),
            wrong(t(5), "xx", lengths=_LENGTHS, match="must be either sum, prod"),
            wrong(t(5), "sum", lengths=_LENGTHS, axis=1, error=IndexError, match="out of range"),
            wrong(t(5), "sum", indices=_LENGTHS, match="indices based reduction"),
        ),
        dtypes=FLOATS,
        directives=(
            Directive(
                "tolerance",
                "terms that cancel are rounded to half precision in another order",
                executors=("torch-prims",),
                dtypes=(torch.bfloat16, torch.float16),
                tolerance=(2e-2, 2e-2),
            ),
        ),
    )
)
