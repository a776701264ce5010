"""A linear layer of a row or a few; forge/transforms/row_products.py finds it."""

from forge.ir import Symbol, TensorProxy
from forge.torchlang.linalg import linear


def _row_product(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    """torch.nn.functional.linear of few rows, as sums along the rows of the weight.

    Shapes: input (..., in), weight (out, in), bias (out); returns (..., out).
    """
    return linear(input, weight, bias)


row_product = Symbol("row_product", "forge.row_product", body=_row_product)
