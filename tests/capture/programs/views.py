"""Views by every function that makes them, changed in place on either side, and results that share memory."""

import torch
import torch.nn.functional as F
from capture.programs.table import PROGRAMS, program


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# calls that look like computations and may return a view of the first tensor
VIEWS = {
    "einsum_transposing": ((2, 3), lambda x: torch.einsum("ij->ji", x)),
    "einsum_diagonal": ((3, 3), lambda x: torch.einsum("ii->i", x)),
    "einsum_identity": ((2, 3), lambda x: torch.einsum("ij->ij", x)),
    "meshgrid": ((3,), lambda x: torch.meshgrid(x, x, indexing="ij")[0]),
    "meshgrid_of_one": ((3,), lambda x: torch.meshgrid(x)[0]),
    "item_of_a_0d_index": ((3, 2), lambda x: x[torch.tensor(1)]),
    "items_of_an_index_tensor": ((3, 2), lambda x: x[torch.tensor([1])]),
    "item_of_a_0d_index_and_a_slice": ((3, 2), lambda x: x[torch.tensor(1), 1:]),
    "item_of_a_0d_bool": ((3, 2), lambda x: x[torch.tensor(True)]),
    "as_strided": ((4, 3), lambda x: x.as_strided((2, 2), (3, 1), 1)),
    "as_strided_from_the_first_element": ((4, 3), lambda x: x.as_strided((2, 2), (3, 1))),
    "as_strided_overlapping": ((6,), lambda x: x.as_strided((3, 2), (1, 1))),
    "unfold": ((6,), lambda x: x.unfold(0, 2, 2)),
    "unfold_overlapping": ((6,), lambda x: x.unfold(0, 3, 1)),
    "real_of_real": ((3,), lambda x: x.real),
    "diagonal": ((3, 3), lambda x: x.diagonal()),
    "linalg_diagonal": ((3, 3), lambda x: torch.linalg.diagonal(x)),
    "unsafe_split_in_one": ((2, 3), lambda x: torch.unsafe_split(x, 2)[0]),
    "copy_to_the_same_device": ((2, 3), lambda x: torch.ops.aten._to_copy.default(x, device=torch.device("cpu"))),
    "clone_operator": ((2, 3), lambda x: torch.ops.aten.clone.default(x)),
    "alias_operator": ((2, 3), lambda x: torch.ops.aten.alias.default(x)),
    "movedim": ((2, 3), lambda x: x.movedim(0, 1)),
    "moveaxis": ((2, 3), lambda x: torch.moveaxis(x, 0, 1)),
    "swapaxes": ((2, 3), lambda x: x.swapaxes(0, 1)),
    "adjoint": ((2, 3), lambda x: x.adjoint()),
    "mT": ((2, 3), lambda x: x.mT),
    "T": ((2, 3), lambda x: x.T),
    "H": ((2, 3), lambda x: x.H),
    "squeeze": ((2, 1, 3), lambda x: x.squeeze(1)),
    "unsqueeze": ((2, 3), lambda x: x.unsqueeze(0)),
    "atleast_2d": ((3,), lambda x: torch.atleast_2d(x)),
    "atleast_1d": ((3,), lambda x: torch.atleast_1d(x)),
    "ravel": ((2, 3), lambda x: x.ravel()),
    "flatten": ((2, 3), lambda x: x.flatten()),
    "flatten_of_a_transpose": ((2, 3), lambda x: x.t().flatten()),
    "unflatten": ((6,), lambda x: x.unflatten(0, (2, 3))),
    "narrow": ((4, 3), lambda x: x.narrow(0, 1, 2)),
    "select": ((4, 3), lambda x: x.select(0, 1)),
    "split": ((4, 3), lambda x: x.split(2)[1]),
    "chunk": ((4, 3), lambda x: x.chunk(2)[1]),
    "tensor_split": ((4, 3), lambda x: x.tensor_split(2)[1]),
    "hsplit": ((4, 4), lambda x: x.hsplit(2)[1]),
    "unbind": ((2, 3), lambda x: x.unbind(0)[1]),
    "unsafe_chunk": ((4, 3), lambda x: x.unsafe_chunk(2)[1]),
    "expand_as_of_the_same_shape": ((2, 3), lambda x: x.expand_as(torch.ones(2, 3))),
    "broadcast_to_of_the_same_shape": ((2, 3), lambda x: torch.broadcast_to(x, (2, 3))),
    "broadcast_tensors_of_the_same_shape": ((2, 3), lambda x: torch.broadcast_tensors(x, torch.ones(2, 3))[0]),
    "contiguous": ((2, 3), lambda x: x.contiguous()),
    "contiguous_of_a_transpose": ((2, 3), lambda x: x.t().contiguous()),
    "to_of_the_same_dtype": ((2, 3), lambda x: x.to(torch.float32)),
    "to_of_another_dtype": ((2, 3), lambda x: x.to(torch.float64)),
    "float": ((2, 3), lambda x: x.float()),
    "cpu": ((2, 3), lambda x: x.cpu()),
    "reshape_as": ((2, 3), lambda x: x.reshape_as(torch.ones(3, 2))),
    "view_as": ((2, 3), lambda x: x.view_as(torch.ones(3, 2))),
    "view_of_a_dtype": ((2, 4), lambda x: x.view(torch.int32).view(torch.float32)),
    "permute": ((2, 3), lambda x: x.permute(1, 0)),
    "pad_of_nothing": ((2, 3), lambda x: F.pad(x, (0, 0))),
    "pad_negative": ((2, 3), lambda x: F.pad(x, (-1, -1))),
    "dropout_in_evaluation": ((2, 3), lambda x: F.dropout(x, 0.5, training=False)),
    "dropout_of_nothing": ((2, 3), lambda x: F.dropout(x, 0.0)),
    "sum_over_no_dims": ((2, 3), lambda x: x.sum(())),
    "cat_of_one": ((2, 3), lambda x: torch.cat([x])),
    "stack_of_one": ((2, 3), lambda x: torch.stack([x])),
    "clone": ((2, 3), lambda x: x.clone()),
    "detach": ((2, 3), lambda x: x.detach()),
    "positive": ((2, 3), lambda x: +x),
    "positive_function": ((2, 3), lambda x: torch.positive(x)),
    "alias": ((2, 3), lambda x: torch.ops.aten.alias(x)),
    "resolve_conj": ((2, 3), lambda x: x.resolve_conj()),
    "resolve_neg": ((2, 3), lambda x: x.resolve_neg()),
    "conj_of_real": ((2, 3), lambda x: x.conj()),
    "type_as": ((2, 3), lambda x: x.type_as(torch.ones(1))),
    "as_tensor": ((2, 3), lambda x: torch.as_tensor(x)),
    "nn_unfold_of_all": ((1, 1, 2, 2), lambda x: F.unfold(x, 1)),
    "pixel_shuffle_by_one": ((1, 1, 2, 2), lambda x: F.pixel_shuffle(x, 1)),
    "channel_shuffle_of_one_group": ((1, 4, 2, 2), lambda x: F.channel_shuffle(x, 2)),
    "roll_by_nothing": ((2, 3), lambda x: x.roll(0, 0)),
    "flip_of_nothing": ((2, 3), lambda x: x.flip(())),
    "tile_once": ((2, 3), lambda x: x.tile(1, 1)),
    "repeat_once": ((2, 3), lambda x: x.repeat(1, 1)),
    "block_diag_of_one": ((2, 3), lambda x: torch.block_diag(x)),
    "cartesian_prod_of_one": ((3,), lambda x: torch.cartesian_prod(x)),
    "repeat_interleave_once": ((3,), lambda x: x.repeat_interleave(1)),
    "take_along_dim": ((2, 3), lambda x: x.take_along_dim(torch.tensor([[0]]), 1)),
    "rot90_by_nothing": ((2, 3), lambda x: torch.rot90(x, 0)),
    "nested_views": ((4, 6), lambda x: x.t()[1:].unfold(0, 2, 3)[..., 0]),
    "vsplit": ((4, 4), lambda x: torch.vsplit(x, 2)[0]),
    "slice_with_a_step": ((6, 2), lambda x: x[::2]),
    "nan_to_num": ((2, 3), lambda x: torch.nan_to_num(x)),
    "clamp_without_bounds_hit": ((2, 3), lambda x: x.clamp(-100, 100)),
    "where_always": ((2, 3), lambda x: torch.where(torch.ones(2, 3, dtype=torch.bool), x, 0.0)),
    "masked_fill_of_nothing": ((2, 3), lambda x: x.masked_fill(torch.zeros(2, 3, dtype=torch.bool), 0.0)),
    "swapdims": ((2, 3), lambda x: torch.swapdims(x, 0, 1)),
    "nn_flatten": ((2, 3, 2), lambda x: torch.nn.Flatten()(x)),
    "nn_identity": ((2, 3), lambda x: torch.nn.Identity()(x)),
    "mean_over_no_dims": ((2, 3), lambda x: x.mean(())),
    "matmul_with_one": ((2, 3), lambda x: x @ torch.eye(3)),
    "interpolate_to_the_same_size": ((1, 1, 2, 2), lambda x: F.interpolate(x, (2, 2))),
    "batch_norm": ((2, 3), lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3))),
    "view_as_real_of_complex": ((2, 3), lambda x: torch.view_as_real(torch.complex(x, x))),
}


_EAGER = {"as_strided_changed_through": "may show memory around it"}  # an input's storage offset is not known


def _add(name, shape, view):
    def shown(jit):
        """Return a view of an input, a value, and a view of the value."""

        def run(x):
            y = x * 2
            return view(x), y, view(y)

        x = torch.randn(shape)
        return x, jit(run)(x)

    def changed_after(jit):
        """Change the value after the view is made."""

        def run(x):
            y = x * 2
            z = view(y)
            y.add_(10)
            return y, z, z * 1

        return jit(run)(torch.randn(shape))

    def changed_through(jit):
        """Change the value, and with it an input, through the view."""

        def run(x):
            y = x * 2
            view(y).mul_(5)
            view(x).add_(3)
            return y * 1, x * 1, y

        x = torch.randn(shape)
        return jit(run)(x), x

    def in_training(jit):
        """Compute gradients through a change made through the view."""

        def run(x):
            y = x * 2
            z = view(y)
            z.mul_(5)
            return y * torch.linspace(1, 2, y.numel()).view(y.shape), z

        x = leaf(*shape)
        y, z = jit(run)(x)
        (y.sum() + z.sum() if z.requires_grad else y.sum()).backward()
        return y, z, x

    overlapping = "overlapping" in name or "meshgrid" in name
    kinds = (shown,) if overlapping else (shown, changed_after, changed_through, in_training)
    kinds = kinds[:3] if "unsafe" in name else kinds  # autograd does not track changes through these
    for kind in kinds:
        kind.__name__ = f"{name}_{kind.__name__}"
        program(eager=_EAGER.get(kind.__name__))(kind)


for _name, (_shape, _view) in VIEWS.items():
    _add(_name, _shape, _view)


@program
def the_real_part_and_a_slice(jit):
    return jit(lambda x: (x.exp().real, x[:4]))(torch.randn(6))


@program
def a_slice_and_the_real_part(jit):
    def run(x):
        y = x.exp()
        return x[:4], y.real, y[1:]

    return jit(run)(torch.randn(6))


@program
def parts_of_complex_numbers(jit):
    def run(x):
        y = x * 2
        return y.real, y.imag, y.conj(), torch.view_as_real(y)

    return jit(run)(torch.randn(3, dtype=torch.complex64))


@program
def the_imaginary_part_changed(jit):
    def run(x):
        y = x * 2
        y.imag.zero_()
        y.real.add_(1)
        return y

    return jit(run)(torch.randn(3, dtype=torch.complex64))


@program
def a_complex_view_changed(jit):
    def run(x):
        y = x * 2
        torch.view_as_complex(y).mul_(1j)
        return y

    return jit(run)(torch.randn(3, 2))


@program
def a_conjugate_changed(jit):
    def run(x):
        y = x * 2
        y.conj().mul_(1j)
        y.conj().imag.add_(1)
        return y, x.mH[0].conj()

    return jit(run)(torch.randn(3, 2, dtype=torch.complex64))


@program
def conjugates_and_negations_of_what_is_read(jit):
    def run(x):
        y = x.conj()
        return y.imag, y.real, y.resolve_conj(), y.imag.resolve_neg(), torch.fft.ihfft(x.real), y.imag + x.real

    return jit(run)(torch.randn(3, 2, dtype=torch.complex64))


@program
def the_real_part_of_an_argument_changed(jit):
    def run(x):
        x.real.mul_(2)
        torch.view_as_real(x)[..., 1] = 1.0
        return x.imag

    x = torch.randn(3, dtype=torch.complex64)
    return jit(run)(x), x


@program
def meshgrid_results_changed(jit):
    def run(x, y):
        a, b = torch.meshgrid(x, y, indexing="ij")
        x.add_(1)
        y.mul_(2)
        return a + b, a, b

    x, y = torch.randn(2), torch.randn(3)
    return jit(run)(x, y), x, y


@program
def an_index_of_a_loop(jit):
    def run(x, indices):
        for i in range(3):
            x[indices[i]] = x[indices[i]] * 2
        return x

    x = torch.randn(4, 2)
    return jit(run)(x, torch.tensor([2, 0, 3])), x


@program
def a_row_by_a_0d_index_changed(jit):
    def run(x, i):
        row = x[i]
        row.add_(1)
        return x * 2, row

    x = torch.randn(4, 2)
    return jit(run)(x, torch.tensor(2)), x


@program
def rows_by_0d_indices_changed_in_a_value_and_returned(jit):
    def run(x, i, j):
        y = x * 2
        y[i].add_(1)
        y[j, i].mul_(3)
        return y, y[j]

    x = leaf(4, 2)
    call = jit(run)
    return [call(x, torch.tensor(i), torch.tensor(j)) for i, j in ((1, 3), (0, 2), (-1, 1))]


@program
def an_unfolded_window_changed(jit):
    def run(x):
        y = x.clone()
        y.unfold(0, 2, 2)[:, 0] = 0
        return y

    return jit(run)(torch.randn(6))


@program
def a_diagonal_by_strides_changed(jit):
    def run(x):
        y = x.clone()
        y.as_strided((3,), (4,)).fill_(7)
        return y

    return jit(run)(torch.randn(3, 3))


@program
def an_input_by_strides_changed(jit):
    def run(x):
        x.as_strided((3,), (4,)).fill_(7)
        return x * 2

    x = torch.randn(3, 3)
    return jit(run)(x), x


@program
def a_view_of_a_view_of_an_input_returned_and_changed(jit):
    def run(x):
        y = x.view(3, 4)
        z = y[1:].t()
        z.mul_(2)
        return z, y, x

    return jit(run)(torch.randn(12))


@program
def a_mask_assigned(jit):
    def run(x):
        y = x * 1
        y[y > 0] = -1.0
        return y

    return jit(run)(torch.randn(5))


@program
def a_masked_part_scattered(jit):
    def run(x):
        y = torch.zeros_like(x)
        y[1:].scatter_(0, torch.tensor([0, 1]), x)
        return y

    return jit(run)(torch.randn(5))


@program
def an_expanded_tensor_changed_below(jit):
    def run(x):
        y = x * 1
        z = y.expand(3, 2)
        y.add_(1)
        return z * 1, z

    return jit(run)(torch.randn(2))


assert len(PROGRAMS) > 300


@program
def a_value_detached_in_place(jit):
    def run(x):
        y = x * 2
        y.detach_()
        return y * x, y

    x = torch.randn(3, requires_grad=True)
    out, y = jit(run)(x)
    out.sum().backward()
    return out, y, x.grad


@program
def a_value_detached_in_place_beside_its_view(jit):
    def run(x):
        y = x.exp()
        row = y[0]
        z = torch.detach_(y)
        return row * x, y * x, z, y.add(1)

    x = torch.randn(3, 3, requires_grad=True)
    results = jit(run)(x)
    (results[0].sum() + results[1].sum()).backward()
    return results, x.grad


@program
def a_value_detached_in_place_and_changed(jit):
    def run(x):
        y = (x * 2).detach_()
        y.mul_(x)
        return y.sum(), y

    x = torch.randn(3, requires_grad=True)
    total, y = jit(run)(x)
    total.backward()
    return total, y, x.grad


@program(eager="detach_")
def an_input_detached_in_place(jit):
    def run(x):
        return x.detach_() * 2

    x = torch.randn(3, requires_grad=True)
    h = x * 3
    return jit(run)(h), h


@program
def sizes_given_one_by_one(jit):
    def run(x):
        return x.broadcast_to(2, 2, 3), x.broadcast_to((4, 2, 3)), torch.broadcast_to(x * 2, (2, 2, 3))

    return jit(run)(torch.randn(2, 3)), jit(run)(torch.randn(2, 3, requires_grad=True))


@program
def a_window_whose_length_is_a_number_of_a_tensor(jit):
    def run(x):
        n = int(x.abs().sum().item()) % 3 + 1
        y = x * 2
        return x[:n], y[n:], y, x.narrow(0, 0, n)

    jitted, found = jit(run), []
    for length in (4, 5, 7):
        x = torch.randn(length, 3, requires_grad=True)
        results = jitted(x)
        sum(t.sum() for t in results).backward()
        found.append([results, x, x.grad])
    return found


@program
def a_window_whose_length_is_read_before_it_changes(jit):
    def run(x, n):
        k = n.sum().item()
        torch._check(k >= 0)
        torch._check(k <= 3)
        n.add_(1)
        y = x * 2
        return x[k:], y.narrow(0, 0, k), y

    found = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        jitted = jit(run)
        for _ in range(2):
            x, n = torch.randn(4, 3, requires_grad=True), torch.tensor([1, 1])
            results = jitted(x, n)
            sum(t.sum() for t in results).backward()
            found.append([results, x, n, x.grad])
    return found
