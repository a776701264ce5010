"""The C++ kernels of several regions in one shared object.

Each time that it runs, g++ takes most of a second for the header that all kernels include and for linking, and less
than half a second for a region's kernels. Inductor runs it for each region; here, the kernels that are asked for while
it runs are one translation unit of the next run, each in a namespace of its own. What cannot be one with others, or was
in one that could not be built, Inductor builds by itself.

Source: torch._inductor.codecache.CppPythonBindingsCodeCache, by whose flags and in whose folder a unit is built.
"""

import re

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+).*$", re.MULTILINE)
_SIMPLE = frozenset({"include", "pragma"})

# What a unit begins with: how its functions read what Python gives them. A tensor is its data's address, which a
# function of torch's finds, whose own address Inductor leaves in this variable of the environment.
_BINDING = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

static void* (*address_of)(PyObject*);

template <typename T> static inline T read(PyObject* given) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(address_of(given));
    } else if constexpr (std::is_floating_point_v<T>) {
        const double value = PyFloat_AsDouble(given);
        if (value == -1.0 && PyErr_Occurred()) [[unlikely]] throw std::invalid_argument("expected a float");
        return static_cast<T>(value);
    } else {
        const long long value = PyLong_AsLongLong(given);
        if (value == -1 && PyErr_Occurred()) [[unlikely]] throw std::invalid_argument("expected an int");
        return static_cast<T>(value);
    }
}
"""

_FUNCTION = """
static PyObject* call_{name}(PyObject*, PyObject* const* given, Py_ssize_t count) {{
    try {{
        if (count != {count}) [[unlikely]] throw std::invalid_argument("expected {count} arguments");
        {name}({arguments});
    }} catch (const std::exception& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }}
    Py_RETURN_NONE;
}}
"""

_MODULE = """
static PyMethodDef functions[] = {{
{functions}
    {{nullptr, nullptr, 0, nullptr}}}};

static PyModuleDef unit = {{PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, functions}};

PyMODINIT_FUNC PyInit_kernel() {{
    const char* address = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (address == nullptr) {{
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
        return nullptr;
    }}
    address_of = reinterpret_cast<void* (*)(PyObject*)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&unit);
}}
"""
