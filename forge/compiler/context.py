"""The state of one trace on its way through the pipeline (forge/compiler/pipeline.py)."""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from forge.compiler.claim import Claim, ClaimedCall, Reasons
from forge.compiler.config import Config
from forge.compiler.layout import Layouts
from forge.compiler.program import Program
from forge.compiler.region_artifacts import FusedRegion
from forge.compiler.report import CompileReport
from forge.ir import TensorProxy, Trace
from forge.runtime.frozen import FoldedWeights
from forge.runtime.plan import GeneratedFunction
from forge.torchlang.opaque import keeps_graph
from forge.transforms import Freezing
from forge.transforms.double import ForwardCall
from forge.transforms.grad import Joint
from forge.transforms.split import Split, leaf_calls


class Kind(Enum):
    """The kinds of traces that go through the pipeline."""

    PROGRAM = "a captured program"
    CALL = "one call, compiled to be measured"
    DOUBLE_BACKWARD = "a backward as a program, to be differentiated"
    BACKWARD = "the backward of a program that was split"
    EPILOGUE = "what runs outside of the autograd.Function"
    FOLDED = "what depends on frozen weights alone"
    STANDALONE = "calls outside of a program, or a part that runs by itself"


class Form(IntEnum):
    """The stages of lowering: the kind of calls in a trace between two passes."""

    TORCH = 0  # torch's functions, of a program that may be differentiated
    JOINT = 1  # the same, after the gradient rules
    PROGRAM = 2  # one function to lower: a forward with saved values, a backward, or a program without gradients
    CLAIMED = 3  # calls of executors
    FUSED = 4  # the same, with each region as one call
    CODE = 5  # the same, with a generated function


@dataclass
class Derivative:
    """A differentiated program.

    trace: the program before differentiation. joint: the program with its gradient rules run. flowing: the indices of
    the outputs through which gradients flow. backward: from all of these to the inputs. copied, unread: see
    transforms.split.backward_of. forward_calls: the calls that must not be recomputed. parts, epilogue: set by `split`.
    """

    trace: Trace
    joint: Joint
    flowing: dict[int, TensorProxy]
    backward: Trace
    copied: set[str]
    unread: set[str]
    forward_calls: list[ForwardCall]
    parts: Split = field(init=False)
    epilogue: Trace | None = field(init=False)

    @property
    def outputs(self) -> list[TensorProxy]:
        """The outputs of the forward."""
        return list(self.joint.forward.output)

    @property
    def inputs_with_grad(self) -> list[int]:
        """The positions of the inputs that have a gradient."""
        return [i for i, gradient in enumerate(self.backward.output) if gradient is not None]

    @property
    def has_opaque_graphs(self) -> bool:
        """True if opaque calls save graphs of their own for the backward: some of their gradients may be None."""
        return any(map(keeps_graph, leaf_calls(self.parts.forward.bound_symbols)))


@dataclass
class Buckets:
    """The gradients that leave a backward together.

    limit: the bytes that DistributedDataParallel sends together; None outside of it. positions: of the inputs, by
    bucket; `bucket_gradients` sets it in the first backward of a program, whose nodes the others share.
    """

    limit: int | None = None
    positions: Sequence[Sequence[int]] | None = None

    @property
    def are_sent(self) -> bool:
        """True if a backward returns gradients in buckets."""
        return self.limit is not None if self.positions is None else bool(self.positions)


@dataclass(kw_only=True)
class Context:
    """The state of one trace in the pipeline: inputs of the passes beside the trace, and results for later passes.

    Attributes:
        kind: The part of a program that the trace is.
        config: The config of the program.
        program: The captured program that the trace belongs to.
        report_of: A weak reference to the report of the program, which no executable may own.
        run_passes: Runs the passes from one form to another (pipeline.run_passes), for passes that compile a part.
        times_passes: True if the time of each pass goes to the report, by its phase.
        stages: Traces after each pass that is a stage; `run_passes` appends.
        claims: The claims of calls; `claim` appends.
        declined: By output name, the reasons of executors that declined calls decomposed before `claim`.
        freezing: The state of freeze=True; read by the passes that fold weights.
        folded_weights: The values computed from frozen weights; `fold_weights` sets it.
        joint: The program with its gradient rules run; `gradient_rules` sets it.
        optimized: The program before its gradients; `differentiate` or `inline_effects` sets it.
        derivative_or_none: The result of `differentiate`, if gradients flow; a backward's is its program's.
        layouts: Strides of values; `split` or `inline_effects` sets it, later passes add to it.
        returned: Names of outputs that the caller of the program gets; `split` or `inline_effects` sets it.
        eager_strides: Names of outputs that must have eager's strides.
        reference: The trace that values are compared with under check="eager".
        buckets: The buckets of the gradients of a backward.
        is_batched: True if a backward computes several gradients of each input at once, by vmap.
        is_partial: True if a backward lacks gradients of opaque calls.
        claimed: The calls that `fuse` forms regions of; `claim` sets it.
        regions: The fused regions of all traces of the program; `fuse` adds to it.
        wrap: Wraps the generated function; `compare` sets it.
        generated: The generated function and its trace; `codegen` sets it.
    """

    kind: Kind
    config: Config
    program: Program
    report_of: "weakref.ref[CompileReport]"
    run_passes: "Callable[[Trace, Context, Form, Form], Trace]"
    times_passes: bool = True
    stages: list[Trace] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    declined: dict[str, Reasons] = field(default_factory=dict)
    freezing: Freezing = field(default_factory=lambda: Freezing(()))
    folded_weights: FoldedWeights | None = None
    joint: Joint | None = None
    optimized: Trace = field(init=False)
    derivative_or_none: Derivative | None = None
    layouts: Layouts | None = None
    returned: Collection[str] = ()
    eager_strides: Collection[str] = ()
    reference: Trace | None = None
    buckets: Buckets | None = None
    is_batched: bool = False
    is_partial: bool = False
    claimed: list[ClaimedCall] = field(default_factory=list)
    regions: list[FusedRegion] = field(default_factory=list)
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    generated: GeneratedFunction = field(init=False)

    @property
    def report(self) -> CompileReport:
        """The report of the program; a temporary one if that is gone."""
        return self.report_of() or CompileReport()

    @property
    def derivative(self) -> Derivative:
        """The derivative of a program that was differentiated."""
        assert self.derivative_or_none is not None
        return self.derivative_or_none

    def without_results(self, config: Config | None = None, *, times_passes: bool = True) -> "Context":
        """Return the context of a trace that is lowered from here, with empty stages, claims and regions."""
        config = config or self.config
        fresh: dict[str, Any] = {name: [] for name in ("stages", "claims", "claimed", "regions")}
        return dataclasses.replace(self, config=config, times_passes=times_passes, **fresh)

    def attempt(self, config: Config | None = None, *, times_passes: bool = True) -> "Context":
        """Return the same with a copy of the layouts as well, to which lowering adds."""
        layouts = None if self.layouts is None else self.layouts.copy()
        return dataclasses.replace(self.without_results(config, times_passes=times_passes), layouts=layouts)

    def of_another(self, kind: Kind, config: Config | None = None, **fields: Any) -> "Context":
        """Return the context of another trace of this program; they share the list of regions."""
        return Context(
            kind=kind,
            config=config or self.config,
            program=self.program,
            report_of=self.report_of,
            run_passes=self.run_passes,
            times_passes=False,
            regions=self.regions,
            **fields,
        )
