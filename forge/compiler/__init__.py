"""The compiler: from a captured program to an executable, without the front ends.

Start with pipeline.py, the tuple of all passes in order; passes.py has their functions, context.py their shared state.
claim.py and fusion.py choose executors and form regions; executable.py runs the result, and report.py explains it.
"""
