"""forge: a compiler framework for PyTorch with every operation in plain sight."""

from forge.jit import StrictError, jit, last_backward_traces, last_traces

__all__ = ["StrictError", "jit", "last_backward_traces", "last_traces"]
__version__ = "0.1.0"
