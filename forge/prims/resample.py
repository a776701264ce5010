"""The prims that resample the input: interpolation, padding with the input's own values, grid sampling."""

from enum import Enum

from forge.ir import Dim, TensorProxy, check, end_grad, get_grad, needs_grad, put_grad, register_grad
from forge.prims.core import check_same_device, like, primitive, register_vjp, same, statically_true, torch_check

Lengths = tuple[Dim, ...]


class Upsampling(Enum):
    """The methods of interpolation between the input's values; "antialias" widens the kernel when downsampling."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    LINEAR = "linear"
    CUBIC = "cubic"
    LINEAR_ANTIALIAS = "linear, antialias"
    CUBIC_ANTIALIAS = "cubic, antialias"


@primitive()
def upsample(
    x: TensorProxy, mode: str, output_size: Lengths, align_corners: bool, scales: tuple[float | None, ...]
) -> TensorProxy:
    """Resize x's dims after the channels to `output_size`.

    mode: a value of Upsampling. scales: the user's, in place of output_size / input size, or None. Shapes: x (N, C,
    *lengths). Source: torch.nn.functional.interpolate.
    """
    op = "prims.upsample"
    Upsampling(mode)
    torch_check(
        x.ndim == len(output_size) + 2,
        lambda: f"{op}: It is expected output_size equals to {x.ndim - 2}, but got {output_size} for {x}",
    )
    torch_check(
        not any(statically_true(size <= 0) for size in (*x.shape[1:], *output_size)),
        lambda: f"{op}: Input and output sizes should be greater than 0, but got input {x} and output {output_size}",
    )
    return like(x, shape=(*x.shape[:2], *output_size))


@primitive()
def upsample_backward(
    g: TensorProxy, mode: str, input_size: Lengths, align_corners: bool, scales: tuple[float | None, ...]
) -> TensorProxy:
    """Return the gradient of upsample's input, which has `input_size`. Source: aten.upsample_bilinear2d_backward."""
    return like(g, shape=input_size)


register_vjp(
    upsample_backward,
    g=lambda grad, g, mode, align_corners, scales: upsample(grad, mode, g.shape[2:], align_corners, scales),
)
register_vjp(
    upsample, x=lambda g, x, mode, align_corners, scales: upsample_backward(g, mode, x.shape, align_corners, scales)
)


# padding


@primitive()
def pad_edges(x: TensorProxy, padding: Lengths, mode: str) -> TensorProxy:
    """Pad x's last dims with its own values: mirrored at the edge (mode "reflect") or the edge's (mode "replicate").

    padding: (before, after) of the last dim, then of the one before it, …
    Source: torch.nn.functional.pad.
    """
    op = "prims.pad_edges"
    check(mode in ("reflect", "replicate"), lambda: f"{op}: mode is {mode!r}, but must be 'reflect' or 'replicate'")
    count = len(padding) // 2
    torch_check(
        len(padding) % 2 == 0 and 1 <= count <= 3 and x.ndim in (count + 1, count + 2),
        lambda: (
            f"{op}: padding {padding} does not go with {x}: it must name the last 1 to 3 dims, which one or two "
            "dims stand before"
        ),
    )
    shape = list(x.shape)
    for i in range(count):
        dim, before, after = x.ndim - 1 - i, padding[2 * i], padding[2 * i + 1]
        torch_check(
            mode == "replicate" or not (statically_true(before >= shape[dim]) or statically_true(after >= shape[dim])),
            lambda dim=dim, before=before, after=after: (
                f"{op}: Padding size should be less than the corresponding "
                f"input dimension, but got: padding ({before}, {after}) at dimension {dim} of input {x}"
            ),
        )
        shape[dim] = shape[dim] + before + after
        torch_check(
            not statically_true(shape[dim] < 1), lambda: f"{op}: padding {padding} leaves a dim of {x} no elements"
        )
    return like(x, shape=shape)


@primitive()
def pad_edges_backward(g: TensorProxy, x: TensorProxy, padding: Lengths, mode: str) -> TensorProxy:
    """Return the gradient of pad_edges' input, of which only the shape is read. Source:
    aten.reflection_pad2d_backward."""
    return like(x)


register_vjp(pad_edges_backward, g=lambda grad, padding, mode: pad_edges(grad, padding, mode), x=None)
register_vjp(pad_edges, x=lambda g, x, padding, mode: pad_edges_backward(g, x, padding, mode))


# grids


_NEAREST = 1


@primitive()
def grid_sampler(
    x: TensorProxy, grid: TensorProxy, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> TensorProxy:
    """Return x's values at the grid's coordinates, in [-1, 1] from edge to edge.

    interpolation_mode: 0 linear, 1 nearest, 2 cubic. padding_mode: 0 zeros, 1 border, 2 reflection.
    Shapes: x (N, C, *lengths), grid (N, *out lengths, rank); out (N, C, *out lengths).
    Source: torch.nn.functional.grid_sample.
    """
    op = "prims.grid_sampler"
    check_same_device(op, x, grid)
    torch_check(
        x.ndim in (4, 5) and grid.ndim == x.ndim,
        lambda: f"{op}: Expected 4D or 5D input and grid with same number of dimensions, but got {x} and {grid}",
    )
    torch_check(
        x.dtype == grid.dtype, lambda: f"{op}: expected input and grid to have same dtype, but got {x} and {grid}"
    )
    torch_check(
        same(x.shape[0], grid.shape[0]),
        lambda: f"{op}: expected grid and input to have same batch size, but got {x} and {grid}",
    )
    torch_check(
        same(grid.shape[-1], x.ndim - 2),
        lambda: f"{op}: expected grid to have size {x.ndim - 2} in last dimension, but got {grid}",
    )
    torch_check(
        interpolation_mode != 2 or x.ndim == 4,
        lambda: f"{op}: bicubic interpolation only supports 4D input, but got {x}",
    )
    return like(x, shape=(*x.shape[:2], *grid.shape[1:-1]))


@primitive()
def grid_sampler_backward(
    g: TensorProxy,
    x: TensorProxy,
    grid: TensorProxy,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: tuple[bool, bool],
) -> tuple[TensorProxy | None, TensorProxy]:
    """Return the gradients of x (None if output_mask[0] is False) and grid. Source:
    aten.grid_sampler_2d_backward."""
    return like(x) if output_mask[0] else None, like(grid)


@primitive()
def grid_sampler_double_backward(
    of_x: TensorProxy | None, of_grid: TensorProxy, g: TensorProxy, x: TensorProxy, grid: TensorProxy, *how: object
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    """Return the gradients of g, x and grid from those of grid_sampler_backward's results; how: its other arguments.

    Source: the derivative of aten.grid_sampler_2d_backward.
    """
    return like(g), like(x), like(grid)


@register_grad(grid_sampler_backward)
def _grid_sampler_backward_grad(
    g: TensorProxy, x: TensorProxy, grid: TensorProxy, *how: object
) -> tuple[TensorProxy | None, TensorProxy]:
    of_x, of_grid = grid_sampler_backward(g, x, grid, *how)
    incoming = (None if of_x is None else get_grad(of_x), get_grad(of_grid))
    of_g, of_x_again, of_grid_again = grid_sampler_double_backward(*incoming, g, x, grid, *how)
    put_grad(g, of_g)
    put_grad(grid, of_grid_again)
    if how[0] == _NEAREST:
        end_grad(x)
    else:
        put_grad(x, of_x_again, of=(of_grid,))
    return of_x, of_grid


@register_grad(grid_sampler)
def _grid_sampler_grad(x: TensorProxy, grid: TensorProxy, *how: object) -> TensorProxy:
    out = grid_sampler(x, grid, *how)
    of_x, of_grid = grid_sampler_backward(get_grad(out), x, grid, *how, (needs_grad(x), needs_grad(grid)))
    put_grad(x, of_x)
    put_grad(grid, of_grid)
    return out


@primitive()
def affine_grid(theta: TensorProxy, size: Lengths, align_corners: bool) -> TensorProxy:
    """Return the grid of an output of `size`, mapped by affine transformations.

    Shapes: theta (N, rank, rank + 1), size (N, C, *lengths); out (N, *lengths, rank).
    Source: torch.nn.functional.affine_grid.
    """
    return like(theta, shape=(size[0], *size[2:], len(size) - 2))


@primitive()
def affine_grid_backward(g: TensorProxy, size: Lengths, align_corners: bool) -> TensorProxy:
    """Return the gradient of affine_grid's theta. Source: aten.affine_grid_generator_backward."""
    return like(g, shape=(size[0], len(size) - 2, len(size) - 1))


register_vjp(affine_grid_backward, g=lambda grad, size, align_corners: affine_grid(grad, size, align_corners))
register_vjp(affine_grid, theta=lambda g, size, align_corners: affine_grid_backward(g, size, align_corners))
