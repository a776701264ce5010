"""The functions that `forge` exports, and the backend of torch.compile.

Start with jit.py (forge.jit); functional.py has trace, grad and vjp, backend.py the entry that Dynamo calls.
"""
