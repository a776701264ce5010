"""Programs ahead of time: torch.export's program through the whole pipeline to one file, and back.

errors.py        ExportError, the one error of a file, of what cannot be exported, and of a call that does not fit
tree.py          nests of arguments and results as plain data
signature.py     the inputs of a program: what a call must give, by how it is given
call.py          the generated function that checks a call and runs the program
dim_names.py     the user's names of sizes
entry_point.py   one entry point, compiled
package.py       AOTInductor's packages
functions.py     forge's own form
kernels.py       the kernels of repositories that a program runs
weights.py       weights as safetensors, each once
requirements.py  what a file needs of a process
archive.py       the file: members, their hashes, the index
exported.py      several entry points to a file
loaded.py        a file to callables

An entry point is in one of two forms. A program of torch's operators and generated kernels alone is an AOTInductor
package, which C++ and Python run by torch without forge. Any other is kept as forge's cache keeps programs.
"""
