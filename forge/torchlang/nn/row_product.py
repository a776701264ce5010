"""A linear layer of one row; forge/transforms/row_products.py finds it."""

from forge.ir import Symbol, TensorProxy
from forge.torchlang.linalg import linear


def _row_product(input: TensorProxy, weight: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    """torch.nn.functional.linear of one row, as a sum along each row of the weight.

    Shapes: input (1, ..., 1, in), weight (out, in), bias (out); returns (1, ..., 1, out).
    """
    return linear(input, weight, bias)


row_product = Symbol("row_product", "forge.row_product", body=_row_product)
