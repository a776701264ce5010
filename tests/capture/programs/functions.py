"""Uses of torch.autograd.Function in a program: the effects of its two bodies on memory, numbers, modes and ctx."""

import torch
from capture.programs.table import no_jit, program
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import forge


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def trained(run, *inputs):
    """Return a call's results, and the gradients of a loss over its floating point results."""
    results = run(*inputs)
    floats = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
    loss = sum((t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in floats)
    loss.backward()
    return results, [t.grad for t in inputs if isinstance(t, torch.Tensor) and t.is_leaf]


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale * 10, None


class ScattersInBackward(Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(x, index)
        return x.gather(0, index)

    @staticmethod
    def backward(ctx, g):
        x, index = ctx.saved_tensors
        e = torch.zeros_like(x)
        e.scatter_add_(0, index, g)
        return e * 3, None


class ScattersAtOnce(Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(x, index)
        return x.gather(0, index)

    @staticmethod
    def backward(ctx, g):
        x, index = ctx.saved_tensors
        return torch.zeros_like(x).scatter_(0, index, g), None


class ManyInPlaceInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        out.copy_(g)
        out[0] = 5
        out[1:].mul_(x[1:].cos())
        out.view(-1)[-1] += 2
        out += 1
        return out


class InPlaceInForward(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(2)
        y[0] = 7
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


class Reversal(Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None


class ReturnsItsInput(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -3 * g


class Transposed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.t()

    @staticmethod
    def backward(ctx, g):
        return 5 * g.t()


class DirtyRelu(Function):
    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x > 0) * 2


class SortedWithIndices(Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort()
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, g, _):
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter_(0, indices, g)


class NonDifferentiableFloat(Function):
    @staticmethod
    def forward(ctx, x):
        y, z = x * 2, x * 3
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 + h


class WithSetupContext(Function):
    @staticmethod
    def forward(x, y):
        return x * y, x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx, g, h):
        x, y, out = ctx.saved_tensors
        return g * y + h * out, g * x + h


class AsksWhatIsNeeded(Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = g @ w.t() if ctx.needs_input_grad[0] else None
        gw = x.t() @ g if ctx.needs_input_grad[1] else None
        gb = g.sum(0) * 2 if ctx.needs_input_grad[2] else None
        return gx, gw, gb


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 3 - h * x.sin()


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        if g is None:
            return h * 100
        if h is None:
            return g * 10
        return g + h


class Outer(Function):
    @staticmethod
    def forward(ctx, x):
        y = Scaled.apply(x, 2.0)
        ctx.save_for_backward(y)
        return y.exp()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return Scaled.apply(g, 3.0) * y


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class TensorOnCtx(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.exp()
        ctx.shape = x.shape
        return ctx.y.sum()

    @staticmethod
    def backward(ctx, g):
        return g.expand(ctx.shape) * ctx.y


class WithModesInside(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = (y * y).sum()
        (ctx.slope,) = torch.autograd.grad(z, y)
        return z.detach()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope * 3


class RandomInForward(Function):
    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask * 4


class RandomInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g + torch.rand_like(g)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * 7


class Clipped(Function):
    """A function that changes its input without mark_dirty."""

    @staticmethod
    def forward(ctx, x, memory):
        memory.add_(x.detach().sum())
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


class GivesNone(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, g):
        return g, None


class IntegerInput(Function):
    @staticmethod
    def forward(ctx, table, ids):
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table[ids]

    @staticmethod
    def backward(ctx, g):
        (ids,) = ctx.saved_tensors
        out = g.new_zeros(ctx.rows, g.shape[-1])
        out.index_add_(0, ids.view(-1), g.view(-1, g.shape[-1]))
        return out, None


@program
def a_function_with_a_number(jit):
    return trained(jit(lambda x: Scaled.apply(x.sin(), 2.5)), leaf(3))


@program
def a_function_with_a_number_that_changes(jit):
    run = jit(lambda x, scale: Scaled.apply(x.sin(), scale))
    return [trained(run, leaf(3), scale) for scale in (2.0, 3.0, 4.0, 5)]


@program
def a_function_with_a_length_that_changes(jit):
    run = jit(lambda x: Scaled.apply(x.sin(), x.shape[0]))
    return [trained(run, leaf(n)) for n in (3, 4, 5)]


@program
def a_function_dynamic_from_the_start(jit):
    run = jit(lambda x: TensorOnCtx.apply(x * 2), dynamic=True)
    return [trained(run, leaf(n, 2)) for n in (3, 4)]


@program
def a_backward_that_scatters_in_place(jit):
    index = torch.tensor([0, 2, 2, 1])
    return trained(jit(lambda x: ScattersInBackward.apply(x * 2, index)), leaf(3))


@program
def a_backward_that_scatters_at_once(jit):
    index = torch.tensor([0, 2, 1])
    return trained(jit(lambda x: ScattersAtOnce.apply(x * 2, index)), leaf(3))


@program
def a_backward_with_many_changes_in_place(jit):
    return trained(jit(lambda x: ManyInPlaceInBackward.apply(x * 2)), leaf(4))


@program
def a_forward_that_changes_a_clone(jit):
    return trained(jit(lambda x: InPlaceInForward.apply(x * 2)), leaf(4))


@program
def a_forward_that_changes_a_clone_of_a_leaf(jit):
    return trained(jit(lambda x: InPlaceInForward.apply(x)), leaf(4))


@program
def a_gradient_reversal_layer(jit):
    first, last = nn.Linear(3, 3), nn.Linear(3, 1)
    x = leaf(2, 3)
    out = trained(jit(lambda x: last(Reversal.apply(first(x), 0.5))), x)
    return out, first.weight.grad, last.weight.grad


@program
def a_gradient_reversal_of_an_input(jit):
    return trained(jit(lambda x: Reversal.apply(x, 0.5)), leaf(2, 3))


@program
def a_gradient_reversal_of_an_input_that_is_no_leaf(jit):
    run = jit(lambda x: Reversal.apply(x, 0.5))
    return trained(lambda x: run(x * 2), leaf(2, 3))


@program
def a_function_that_returns_its_input(jit):
    return trained(jit(lambda x: ReturnsItsInput.apply(x * 2) * 3), leaf(2, 3))


@program
def a_function_that_returns_the_programs_input(jit):
    return trained(jit(lambda x: ReturnsItsInput.apply(x)), leaf(2, 3))


@program
def a_function_that_returns_a_transpose(jit):
    return trained(jit(lambda x: Transposed.apply(x * 2) + 1), leaf(2, 3))


@program
def a_function_that_returns_a_transpose_of_an_input(jit):
    return trained(jit(lambda x: Transposed.apply(x)), leaf(2, 3))


@program
def a_view_from_a_function_changed_in_place(jit):
    def run(x):
        y = Reversal.apply(x * 2, 0.5)
        y.mul_(2)
        return y

    return trained(jit(run), leaf(2, 3))


@program
def a_view_from_a_function_under_no_grad_changed_in_place(jit):
    def run(x):
        z = x * 2
        y = Transposed.apply(z)
        y.mul_(2)
        return y, z

    with torch.no_grad():
        return jit(run)(leaf(2, 3))


@program
def a_dirty_input(jit):
    return trained(jit(lambda x: DirtyRelu.apply(x.sin())), leaf(5))


@program
def a_dirty_input_used_afterwards(jit):
    def run(x):
        y = x.sin()
        z = DirtyRelu.apply(y)
        return y * 2, z * 3, y is z

    return jit(run)(leaf(5))[:2], trained(lambda x: jit(run)(x)[:2], leaf(5))


@program
def a_dirty_input_of_the_program(jit):
    run = jit(lambda x: DirtyRelu.apply(x) * 2)

    def around(x):
        y = x.sin()
        out = run(y)
        return out, y

    return trained(around, leaf(5))


@program
def a_dirty_view(jit):
    def run(x):
        y = x.sin()
        DirtyRelu.apply(y[1:3])
        return y

    return jit(run)(torch.randn(5))


@program
def a_non_differentiable_output(jit):
    return trained(jit(lambda x: SortedWithIndices.apply(x * 2)), leaf(4))


@program
def a_non_differentiable_float_output(jit):
    return trained(jit(lambda x: NonDifferentiableFloat.apply(x * 2)), leaf(4))


@program
def a_function_with_setup_context(jit):
    return trained(jit(lambda x, y: WithSetupContext.apply(x * 2, y)), leaf(4), leaf(4))


@program
def a_function_that_asks_what_is_needed(jit):
    run = jit(lambda x, w, b: AsksWhatIsNeeded.apply(x, w, b))
    return trained(run, torch.randn(2, 3), leaf(3, 4), leaf(4)), trained(run, leaf(2, 3), torch.randn(3, 4), leaf(4))


@program
def one_of_two_outputs_used(jit):
    return trained(jit(lambda x: TwoOutputs.apply(x * 2)[1]), leaf(4))


@program
def two_outputs_used(jit):
    return trained(jit(lambda x: TwoOutputs.apply(x * 2)), leaf(4))


@program
def one_of_two_outputs_used_without_materialized_gradients(jit):
    return trained(jit(lambda x: Unmaterialized.apply(x * 2)[0]), leaf(4))


@program
def the_other_output_used_without_materialized_gradients(jit):
    return trained(jit(lambda x: Unmaterialized.apply(x * 2)[1]), leaf(4))


@program
def both_outputs_used_without_materialized_gradients(jit):
    return trained(jit(lambda x: Unmaterialized.apply(x * 2)), leaf(4))


@program
def outputs_without_materialized_gradients_used_outside(jit):
    run = jit(lambda x: Unmaterialized.apply(x * 2))
    return trained(lambda x: run(x)[1], leaf(4))


@program
def a_function_in_a_functions_bodies(jit):
    return trained(jit(lambda x: Outer.apply(x * 2)), leaf(4))


@program
def a_straight_through_estimator(jit):
    return trained(jit(lambda x: StraightThrough.apply(x * 2).square()), leaf(4))


@program
def a_tensor_on_ctx(jit):
    return trained(jit(lambda x: TensorOnCtx.apply(x * 2)), leaf(4, 2))


@program
def autograd_inside_a_function(jit):
    return trained(jit(lambda x: WithModesInside.apply(x * 2)), leaf(4))


@program
def a_random_forward(jit):
    return trained(jit(lambda x: RandomInForward.apply(x * 2)), leaf(8))


@program
def a_random_backward(jit):
    return trained(jit(lambda x: RandomInBackward.apply(x * 2)), leaf(8))


@program
def a_backward_differentiable_once(jit):
    return trained(jit(lambda x: Once.apply(x * 2)), leaf(4))


@program
def a_function_that_changes_another_input(jit):
    memory = torch.zeros(3)
    result = trained(jit(lambda x: Clipped.apply(x * 2, memory)), leaf(3))
    return result, memory


@program
def a_function_that_gives_none(jit):
    return trained(jit(lambda x, y: GivesNone.apply(x * 2, y)), leaf(3), leaf(3))


@program
def an_embedding_of_ones_own(jit):
    ids = torch.tensor([[0, 1], [1, 3]])
    return trained(jit(lambda table: IntegerInput.apply(table * 2, ids)), leaf(4, 2))


@program
def a_function_under_no_grad(jit):
    run = jit(lambda x: Scaled.apply(x.sin(), 2.5))
    with torch.no_grad():
        first = run(leaf(3))
    return first, trained(run, leaf(3))


@program
def a_function_under_no_grad_in_a_program(jit):
    def run(x):
        with torch.no_grad():
            y = Scaled.apply(x, 2.0)
        return y * x

    return trained(jit(run), leaf(3))


@program
def a_function_in_a_checkpoint(jit):
    def block(x):
        return InPlaceInForward.apply(x.sin()).cos()

    return trained(jit(lambda x: checkpoint(block, x, use_reentrant=False)), leaf(3))


@program
def a_function_in_a_module_twice(jit):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return Scaled.apply(Scaled.apply(self.layer(x), 2.0), 3.0)

    model = Twice()
    return trained(jit(model), leaf(2, 3)), model.layer.weight.grad


@program
def a_router_of_experts(jit):
    class Route(Function):
        @staticmethod
        def forward(ctx, scores, index):
            ctx.save_for_backward(scores, index)
            return scores.gather(-1, index)

        @staticmethod
        def backward(ctx, g):
            scores, index = ctx.saved_tensors
            probabilities = scores.softmax(-1)
            out = torch.zeros_like(scores)
            out.scatter_add_(-1, index, g * probabilities.gather(-1, index))
            out.add_(probabilities, alpha=0.1)
            return out, None

    gate = nn.Linear(4, 6)

    def run(x):
        scores = gate(x)
        index = scores.topk(2, -1).indices
        return Route.apply(scores, index)

    return trained(jit(run), leaf(3, 4)), gate.weight.grad


@program
def forge_grad_takes_a_functions_own_backward(jit):
    gradient = torch.func.grad if jit is no_jit else forge.grad
    return gradient(lambda x: WithSetupContext.apply(x, x)[0].sum())(torch.randn(3))


@program
def a_function_in_autocast(jit):
    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return Scaled.apply(x @ w, 2.0)

    return trained(jit(run), leaf(3, 3), leaf(3, 3))


@program
def a_function_with_custom_fwd(jit):
    class Product(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t() * 2, x.t() @ g

    def run(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return Product.apply(x.sin(), w)

    return trained(jit(run), leaf(3, 3), leaf(3, 3))


@program
def a_complex_function(jit):
    class Conjugated(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2j

        @staticmethod
        def backward(ctx, g):
            return g * 5

    def run(x):
        return torch.view_as_real(Conjugated.apply(torch.complex(x, x)))

    return trained(jit(run), leaf(3))


class Tripled(torch.autograd.Function):
    """The function x * x with a declared gradient of 3 * x."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.saved_tensors[0]


@program
def a_function_in_a_gradient_inside_of_a_program(jit):
    def run(x):
        return torch.func.grad(lambda y: Tripled.apply(y.sin()).sum())(x) * x

    return jit(run)(torch.randn(3))


@program(eager="differentiates")  # torch 2.11 compiles the pullback
def a_function_in_a_vjp_inside_of_a_program(jit):
    def run(x):
        out, pullback = torch.func.vjp(lambda y: Tripled.apply(y) + y, x)
        return out, pullback(x)

    return jit(run)(torch.randn(3))


@program
def a_function_in_a_gradient_with_its_value(jit):
    def run(x, weight):
        return torch.func.grad_and_value(lambda w: (Tripled.apply(w) * x).sum())(weight)

    return jit(run)(torch.randn(3), torch.randn(3))


_WITHOUT_SOURCE = """
class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * 7

class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * Inner.apply(ctx.saved_tensors[0])
"""


@program
def a_backward_that_calls_a_function_without_source_differentiated_again(jit):
    scope = {"torch": torch}
    exec(_WITHOUT_SOURCE, scope)
    x = torch.randn(3, requires_grad=True)
    result = jit(lambda x: scope["Outer"].apply(x) * x)(x)
    (first,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    return result, first, torch.autograd.grad(first.sum(), x)


@program(eager="differentiates")  # torch 2.11 compiles the pullback
def a_graph_break_in_a_vjp_inside_of_a_program(jit):
    def squared(y):
        torch._dynamo.graph_break()
        return y * y + y

    def run(x):
        out, pullback = torch.func.vjp(squared, x)
        return out, pullback(x)

    return jit(run)(torch.randn(3))
