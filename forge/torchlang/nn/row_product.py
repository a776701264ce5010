"""The linear layer of a few rows; forge/transforms/row_products.py matches it."""

from forge.ir import Symbol, TensorProxy
from forge.torchlang.linalg import linear


def _row_product(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    """Return torch.nn.functional.linear of few rows, computed as sums along the rows of the weight.

    Shapes: input (..., in), weight (out, in), bias (out); returns (..., out).
    """
    return linear(input, weight, bias)


row_product = Symbol("row_product", "forge.row_product", body=_row_product)
