"""OpInfos of hashes, and of the places of elements that are not 0."""

from forge.testing.opinfo import ALL
from forge.testing.table import op, sample, t, values, wrong

_NOT_A_TENSOR = wrong([1.0], error=TypeError, match="must be Tensor")

op(
    "hash_tensor",
    sample(t(5)),
    sample(t(2, 3), 0),
    sample(t(2, 3, 4), (0, -1), keepdim=True),
    sample(t(3, 4).t(), dim=1, mode=0),
    sample(t()),
    sample(t(0, 3), 1),
    _NOT_A_TENSOR,
    [wrong(t(3), mode=1, match="Unknown hash_tensor mode"), wrong(t(3), 2, error=IndexError, match="out of range")],
    dtypes=ALL,
    gradient=False,
)
op(
    "nonzero_static",
    sample(t(5), size=3),
    sample(values([0, 1, 2, 0, 3]), size=2),
    sample(values([0, 1]), size=4, fill_value=7),
    sample(t(3, 4).t(), size=5),
    sample(t(2, 3), size=0),
    sample(t(), size=1),
    sample(t(0, 3), size=2),
    [wrong([1.0], size=2, error=TypeError, match="must be Tensor"), wrong(t(3), size=-1, match="non-negative")],
    dtypes=ALL,
    gradient=False,
)
