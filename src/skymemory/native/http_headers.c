/* Headers of HTTP, by their names whatever the case. Twin: twin/backend.py. */
#include "fast.h"

#include <string.h>

/* The header at an index, borrowed; 0 with an exception if there is none. */
static int header_at(PyObject *headers, Py_ssize_t at, PyObject **name, PyObject **value)
{
    PyObject *pair = PyTuple_GetItem(headers, at);
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        *name = PyTuple_GetItem(pair, 0);
        *value = PyTuple_GetItem(pair, 1);
        if (PyBytes_CheckExact(*name) && PyBytes_CheckExact(*value))
            return 1;
    }
    PyErr_SetString(PyExc_TypeError, "headers: expected a sequence of (name, value), both bytes");
    return 0;
}

/* Like bytes.lower; the object itself if it has no capitals. */
static PyObject *lowered(PyObject *name)
{
    char *from;
    Py_ssize_t size, at = 0;
    if (PyBytes_AsStringAndSize(name, &from, &size) < 0)
        return NULL;
    while (at < size && !(from[at] >= 'A' && from[at] <= 'Z'))
        at++;
    if (at == size)
        return Py_NewRef(name);
    /* Without its content: made from one byte it would be the interpreter's own object for that byte, shared by all. */
    PyObject *low = PyBytes_FromStringAndSize(NULL, size);
    char *to = low ? PyBytes_AsString(low) : NULL;
    for (at = 0; low && at < size; at++)
        to[at] = (char)(from[at] >= 'A' && from[at] <= 'Z' ? from[at] + ('a' - 'A') : from[at]);
    return low;
}

PyObject *sky_py_first_values(PyObject *self, PyObject *given)
{
    PyObject *headers = sky_tuple(given, "headers: expected a sequence"), *name, *value;
    PyObject *first = headers ? PyDict_New() : NULL;
    for (Py_ssize_t at = 0; first && at < PyTuple_Size(headers); at++) {
        PyObject *low = header_at(headers, at, &name, &value) ? lowered(name) : NULL;
        if (!low || !sky_set_default(first, low, value))
            Py_CLEAR(first);
        Py_XDECREF(low);
    }
    Py_XDECREF(headers);
    return first;
}

/* Whether a header is kept; -1 with an exception. */
static int stays(PyObject *name, PyObject *left_out)
{
    PyObject *low = lowered(name);
    int within = low ? PySet_Contains(left_out, low) : -1;
    Py_XDECREF(low);
    return within < 0 ? -1 : !within;
}

static char *put(char *to, const char *from, Py_ssize_t size)
{
    memcpy(to, from, (size_t)size);
    return to + size;
}

/* The lines of the marked headers. */
static PyObject *lines_of(PyObject *headers, const char *marks, Py_ssize_t bytes)
{
    PyObject *lines = PyBytes_FromStringAndSize(NULL, bytes), *name, *value;
    char *to = lines ? PyBytes_AsString(lines) : NULL;
    for (Py_ssize_t at = 0; lines && at < PyTuple_Size(headers); at++) {
        if (!marks[at] || !header_at(headers, at, &name, &value))
            continue;
        to = put(to, PyBytes_AsString(name), PyBytes_Size(name));
        to = put(to, ": ", 2);
        to = put(to, PyBytes_AsString(value), PyBytes_Size(value));
        to = put(to, "\r\n", 2);
    }
    return lines;
}

PyObject *sky_py_header_lines(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    if (given != 2 || !PyAnySet_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "header_lines: expected headers and a set of names");
        return NULL;
    }
    /* A copy as a tuple: looking names up in a set may run other code, which could change a list. */
    PyObject *headers = PySequence_Tuple(args[0]), *lines = NULL, *name, *value;
    char *marks = headers ? PyMem_Malloc((size_t)PyTuple_Size(headers) + 1) : NULL;
    Py_ssize_t bytes = 0, at = 0;
    for (; marks && at < PyTuple_Size(headers); at++) {
        int kept = header_at(headers, at, &name, &value) ? stays(name, args[1]) : -1;
        if (kept < 0)
            break;
        marks[at] = (char)kept;
        Py_ssize_t line = kept ? sky_sum(PyBytes_Size(name), PyBytes_Size(value)) : 0;
        if (line < 0 || (bytes = sky_sum(bytes, line)) < 0 || (kept && (bytes = sky_sum(bytes, 4)) < 0))
            break;
    }
    if (headers && !marks)
        PyErr_NoMemory();
    else if (headers && at == PyTuple_Size(headers))
        lines = lines_of(headers, marks, bytes);
    PyMem_Free(marks);
    Py_XDECREF(headers);
    return lines;
}

static PyObject *append_pair(PyObject *list, PyObject *const *args, Py_ssize_t given)
{
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a name and a value");
        return NULL;
    }
    PyObject *pair = PyTuple_Pack(2, args[0], args[1]);
    int failed = !pair || PyList_Append(list, pair) < 0;
    Py_XDECREF(pair);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *sky_py_pairs_into(PyObject *self, PyObject *list)
{
    static PyMethodDef method = {"append_pair", (PyCFunction)(void (*)(void))append_pair, METH_FASTCALL, NULL};
    if (!PyList_CheckExact(list)) {
        PyErr_SetString(PyExc_TypeError, "pairs_into: expected a list");
        return NULL;
    }
    return PyCFunction_NewEx(&method, list, NULL);
}
