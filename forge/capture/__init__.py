"""The front ends: a user's function or a Dynamo graph becomes a trace.

Start with direct.py, which runs a function on proxies, or with dynamo.py, which reads a graph that Dynamo captured.
"""
