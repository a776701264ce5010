"""OpInfos of decompositions of low rank."""

from collections.abc import Callable
from typing import Any

from forge.testing.opinfos.matrices import register, regular
from forge.testing.table import sample, t, wrong


def _product_of(function: Callable) -> Callable:
    """Return singular values and the product of the factors.

    Vectors of values that are 0, or near each other, may be others."""

    def call(*args: Any, **kwargs: Any) -> Any:
        U, S, V = function(*args, **kwargs)
        return S, (U * S.unsqueeze(-2)) @ V.mH

    call.__name__ = f"product_of_{function.__name__}"
    return call


register(
    "svd_lowrank",
    sample(regular(5, 4), 2),
    sample(regular(2, 4, 5), q=3, niter=1),
    sample(regular(4, 4), 2, 0),
    sample(regular(4, 3), q=3, M=t(3)),
    [wrong(regular(4, 3), -1, match="negative"), wrong(regular(4, 3), 2, M=t(2), match="size|expand")],
    wrap=_product_of,
)
register(
    "pca_lowrank",
    [sample(regular(5, 4), 2), sample(regular(2, 4, 5), 3), sample(regular(4, 4), q=2, center=False, niter=1)],
    wrong(regular(4, 3), 4, error=ValueError, match="not greater than min"),
    wrong(regular(4, 3), 2, niter=-1, error=ValueError, match="non-negative"),
    wrap=_product_of,
)
