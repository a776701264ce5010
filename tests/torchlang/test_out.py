"""The dtype of `out=`: a function casts its result to it, computes in it, or refuses it, as in eager."""

from collections.abc import Callable

import pytest
import torch

from forge.api.functional import Direct

X = torch.tensor([[1.7, 2.7], [0.3, -1.2]])

FUNCTIONS: dict[str, Callable] = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "exp": lambda x, out: torch.exp(x, out=out),
    "mean": lambda x, out: torch.mean(x, 0, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "prod": lambda x, out: torch.prod(x, 0, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "mm": lambda x, out: torch.mm(x, x, out=out),
    "amax": lambda x, out: torch.amax(x, 0, out=out),
    "abs": lambda x, out: torch.abs(x, out=out),
    "argmax": lambda x, out: torch.argmax(x, 0, out=out),
    "tril": lambda x, out: torch.tril(x, out=out),
    "gather": lambda x, out: torch.gather(x, 0, torch.zeros(2, 2, dtype=torch.int64), out=out),
    "aminmax": lambda x, out: torch.aminmax(x, dim=0, out=(out, out.clone())),
    "max along a dim": lambda x, out: torch.max(x, 0, out=(out, torch.empty(2, dtype=torch.int64))),
    "max of two": lambda x, out: torch.max(x, x + 1, out=out),
    "sort": lambda x, out: torch.sort(x, out=(out, torch.empty(2, 2, dtype=torch.int64))),
}
OUT_OF_ONE_DIM = ("mean", "sum", "prod", "amax", "argmax", "aminmax", "max along a dim")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_out_takes_the_dtypes_that_eager_takes(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    outs = [torch.zeros((2,) if name in OUT_OF_ONE_DIM else (2, 2), dtype=dtype) for _ in range(2)]
    try:
        function(X, outs[0])
    except RuntimeError:
        with pytest.raises(RuntimeError, match=r"out tensor|can't be cast"):
            Direct(function)(X, outs[1])
    else:
        Direct(function)(X, outs[1])
        torch.testing.assert_close(outs[1], outs[0])
