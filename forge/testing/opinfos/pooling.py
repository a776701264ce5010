"""OpInfos of pooling, unfold and fold."""

from forge.testing.opinfo import Sample
from forge.testing.table import Value, op, sample, t, tolerance, wrong

_LENGTHS = (8, 7, 6)


def _image(count: int, *batch: int) -> Value:
    return t(*batch, *_LENGTHS[:count])


def _windows(count: int) -> tuple[Sample, ...]:
    """Return rows of every option that max_pool and avg_pool share."""
    x = _image(count, 2, 3)
    return (
        sample(x, 2),
        sample(x, 3, 2, 1),
        sample(x, (3,) * count, (2,) * count, (1,) * count),
        sample(_image(count, 3), 3, ceil_mode=True),
        sample(x, 3, stride=2, ceil_mode=True),
        sample(_image(count, 0, 3), 2),
    )


def _window_errors(count: int) -> tuple:
    return (
        wrong(t(*(3,) * (count + 3)), 2, match=f"Expected {count + 1}D or {count + 2}D"),
        wrong(t(2, 3, *(4,) * count), 5, match="too small"),
        wrong(t(2, 3, *(4,) * count), 2, 2, 2, match="at most half"),
        wrong(t(2, 3, *(4,) * count), (2,) * (count + 1), match="a list of"),
    )


for _count in (1, 2, 3):
    _pooled = (*_windows(_count), sample(_image(_count, 2, 3), 2, 1, 0, 2))
    op(
        f"nn.functional.max_pool{_count}d",
        _pooled,
        sample(_image(_count, 2, 3), 2, return_indices=True),
        _window_errors(_count),
        symbols=(f"torch.nn.functional.max_pool{_count}d_with_indices",),
    )
    op(f"max_pool{_count}d", _pooled[:3], _window_errors(_count)[:2])
    _divisor = () if _count == 1 else (sample(_image(_count, 2, 3), 2, divisor_override=3),)
    op(
        f"nn.functional.avg_pool{_count}d",
        _windows(_count),
        sample(_image(_count, 2, 3), 3, 2, 1, True, False),
        _divisor,
        _window_errors(_count),
    )
    _sizes = ((1,) * _count, (3,) * _count, (2, None, 1)[:_count])
    _adaptive = (
        *[sample(_image(_count, 2, 3), size) for size in _sizes],
        sample(_image(_count, 3), 4),
        sample(_image(_count, 2, 3), 1),
        sample(_image(_count, 0, 3), 2),
        sample(_image(_count, 0), 2),
    )
    _rank = wrong(t(*(3,) * (_count + 3)), 2, match=f"Expected {_count + 1}D or {_count + 2}D")
    op(f"nn.functional.adaptive_avg_pool{_count}d", _adaptive, sample(_image(_count, 2, 0), 1), _rank)
    op(
        f"nn.functional.adaptive_max_pool{_count}d",
        _adaptive,
        sample(_image(_count, 2, 3), 2, return_indices=True),
        _rank,
        symbols=(f"torch.nn.functional.adaptive_max_pool{_count}d_with_indices",),
    )
    op(
        f"nn.functional.lp_pool{_count}d",
        sample(_image(_count, 2, 3), 2, 3),
        sample(_image(_count, 2, 3), 3.0, 2 if _count == 1 else (2,) * _count, 2, True),
        sample(_image(_count, 3), 1, 2),
        wrong(t(2, 3, *(4,) * _count), 2, 5, match="too small"),
        domain=(0.1, 3.0),
        directives=(tolerance("the decomposition's powers round at other places", 3e-2, 3e-2),),
    )

op(
    "nn.functional.unfold",
    [sample(t(2, 3, 8, 9), (3, 2), padding=1), sample(t(3, 8, 9), 2, 2, 1, 2), sample(t(2, 3, 4, 4), 2, stride=(1, 2))],
    [wrong(t(2, 3, 4, 4), 5, match="too small|at least one"), wrong(t(2, 3, 4, 4), 0, match="greater than zero")],
)
op(
    "nn.functional.fold",
    sample(t(2, 12, 12), (4, 5), 2),
    sample(t(12, 12), (4, 5), (2, 2)),
    sample(t(2, 12, 9), (4, 4), (2, 2), padding=1, stride=2),
    wrong(t(2, 12, 11), (4, 5), 2, match="sliding blocks"),
    wrong(t(2, 11, 12), (4, 5), 2, match="divisible by the product"),
)
