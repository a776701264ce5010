"""The run time of compiled programs: the objects that a call passes through.

Start with plan.py, which assembles the callable; autograd.py, frozen.py, cuda_graphs.py and tiering.py are its layers.
"""
