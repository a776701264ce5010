"""Symbols of CPython that are not in the limited API of 3.9: those added later, and some that it never had.

kernel-abi-check knows all of them and is preferred; this table serves where it is not installed.
Source: the Python documentation, "Contents of Limited API".
"""

ADDED_IN = {
    name: version
    for version, names in {
        "3.10": "PyCodec_Unregister PyErr_SetInterruptEx PyGC_Disable PyGC_Enable PyGC_IsEnabled PyIter_Check "
        "PyIter_Send PyModule_AddObjectRef PyModule_AddType PyObject_GetAIter PyType_GetModule PyType_GetModuleState "
        "PyType_FromModuleAndSpec PyUnicode_AsUTF8AndSize Py_Is Py_IsFalse Py_IsNone Py_IsTrue Py_NewRef Py_XNewRef "
        "Py_GetArgcArgv",
        "3.11": "PyBuffer_Release PyObject_GetBuffer PyObject_CheckBuffer PyBuffer_FillInfo PyBuffer_GetPointer "
        "PyBuffer_IsContiguous PyBuffer_ToContiguous PyBuffer_FromContiguous PyBuffer_SizeFromFormat "
        "PyMemoryView_FromBuffer PyErr_GetHandledException PyErr_SetHandledException PyType_GetName "
        "PyType_GetQualName",
        "3.12": "PyObject_Vectorcall PyObject_VectorcallMethod PyVectorcall_Call PyVectorcall_NARGS "
        "PyErr_GetRaisedException PyErr_SetRaisedException PyType_FromMetaclass PyObject_GetTypeData "
        "PyType_GetTypeDataSize PyErr_DisplayException",
        "3.13": "PyDict_GetItemRef PyDict_GetItemStringRef PyImport_AddModuleRef PyList_GetItemRef PyLong_AsInt "
        "PyMem_RawMalloc PyMem_RawFree PyModule_Add PyObject_GetOptionalAttr PyObject_GetOptionalAttrString "
        "PyObject_HasAttrWithError PyUnicode_EqualToUTF8 PyWeakref_GetRef PySys_AuditTuple",
    }.items()
    for name in names.split()
}
PRIVATE = frozenset(
    "PyUnicode_AsUTF8 PyUnicode_New PyFrame_New PyCode_New PyThreadState_GetUnchecked _PyThreadState_UncheckedGet "
    "_PyObject_GC_New _PyObject_CallMethodId _PyUnicode_Ready _PyType_Lookup _PyObject_GetDictPtr _PyLong_AsByteArray "
    "_PyLong_FromByteArray _PyFloat_Pack8 _PyGILState_GetInterpreterStateUnsafe _PyDict_NewPresized _Py_FatalErrorFunc "
    "PyObject_CallOneArg PyObject_CallMethodOneArg PyFunction_Type PyFrame_GetBack PyFrame_GetLocals PyMethod_New "
    "PyInstanceMethod_New PyCell_New PyDateTime_CAPI PyContext_New PyContextVar_New PyContextVar_Get".split()
)
