"""Tensors whose shape changes in place."""

import torch
import torch.nn.functional as F
from capture.programs.table import program


def _grad(jit, run, *shape):
    x = torch.randn(*(shape or (3, 4)), requires_grad=True)
    results = jit(run)(x)
    torch.autograd.backward([each.sum() for each in results if each.requires_grad])
    return results, x


@program
def a_shape_is_read_after_a_transpose_in_place(jit):
    def run(x):
        y = x * 2
        y.t_()
        return y * y.shape[0], y @ x

    return _grad(jit, run)


@program
def a_branch_on_a_length_after_two_changes_of_shape(jit):
    def run(x):
        y = x * 2
        z = y
        y.t_()
        y.unsqueeze_(0)
        return (z + 1 if z.shape[1] == 4 and z.dim() == 3 else z - 1), z.sum(1)

    return _grad(jit, run)


@program
def a_tensor_squeezed_and_swapped_in_place(jit):
    def run(x):
        y = (x * 2)[:1]
        y.squeeze_(0)
        z = x.sin().swapdims_(0, 1).swapaxes_(0, 1).transpose_(0, 1)
        return y * y.dim(), z + len(z)

    return _grad(jit, run)


@program
def a_view_made_before_sees_writes_through_a_transposed_tensor(jit):
    def run(x):
        y = x * 2
        flat = y.view(-1)
        y.t_()
        y[0].add_(1)
        flat.mul_(3)
        return y, flat * y.shape[1]

    return _grad(jit, run)


@program
def a_row_of_a_tensor_unsqueezed_in_place(jit):
    def run(x):
        y = x * 2
        row = y[1]
        row.unsqueeze_(0)
        row.add_(torch.ones(1, 4))
        return y, row * row.dim()

    return _grad(jit, run)


@program
def a_tensor_strided_in_place(jit):
    def run(x):
        y = x * 2
        y.as_strided_((2, 2), (4, 1), 1)
        return (y * y.shape[0],)

    return _grad(jit, run)


@program
def a_tensor_with_two_names_of_its_calls_transposed_in_place(jit):
    def run(x):
        y = x * 2
        z = y.add_(1)
        y.t_()
        return y * y.shape[0], z * z.shape[0], torch.tensor(y is z)

    return _grad(jit, run)


@program
def an_input_unsqueezed_in_place_before_its_shape_is_read(jit):
    def run(x):
        x.unsqueeze_(0)
        return x * x.dim(), x

    x = torch.randn(3, 4)
    return jit(run)(x), x, x.dim()


@program
def a_transpose_in_place_without_grad_of_what_has_one(jit):
    def run(x):
        y = x * 2
        with torch.no_grad():
            z = y.detach()
            z.t_()
            w = x + 1
            w.unsqueeze_(0)
        return y * z.shape[1], w * w.dim()

    return _grad(jit, run)


@program
def a_transpose_in_place_in_a_checkpointed_block(jit):
    def block(x):
        y = x.sin()
        y.t_()
        return y * y.shape[0]

    def run(x):
        return (torch.utils.checkpoint.checkpoint(block, x * 2, use_reentrant=False),)

    return _grad(jit, run)


@program
def a_loss_of_an_image_with_channels_last_that_is_upsampled(jit):
    """On a GPU, torch's kernel keeps the layout of images with few channels, although its fake tensors are
    row-major."""
    labels = torch.randint(3, (2, 8, 8))

    def run(x):
        return F.cross_entropy(F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=False), labels)

    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    loss = jit(run)(x)
    return loss, torch.autograd.grad(loss, x)
