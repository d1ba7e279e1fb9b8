/* Sends chunks of one value from its buffer, without an object for each. Twin: twin/sockets.py. */
#include "udp.h"

/* Whether chunks first, first + step, ... all begin within the value (or, of no bytes, at its end). */
static int within(Py_ssize_t value_bytes, Py_ssize_t chunk_bytes, Py_ssize_t first, Py_ssize_t step, Py_ssize_t count)
{
    Py_ssize_t last = chunk_bytes > 0 ? value_bytes / chunk_bytes : -1;
    return first >= 0 && step >= 1 && first <= last && (count < 1 || count - 1 <= (last - first) / step);
}

static PyObject *send_chunks(int fd, Endpoint *to, const Py_buffer *headers, Py_ssize_t width,
                             const Py_buffer *value, Py_ssize_t chunk_bytes, Py_ssize_t first, Py_ssize_t step)
{
    Py_ssize_t count = headers->len / width;
    Py_buffer *chunks = PyMem_Calloc((size_t)count + 1, sizeof *chunks);
    if (!chunks)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t start = (first + i * step) * chunk_bytes, left = value->len - start;
        chunks[i].buf = (char *)value->buf + start;
        chunks[i].len = left < chunk_bytes ? left : chunk_bytes;
    }
    Outgoing out = {headers->buf, (size_t)headers->len, (size_t)width, chunks, (size_t)count};
    PyObject *sent = sky_send_held(fd, to, &out);
    PyMem_Free(chunks);
    return sent;
}

PyObject *sky_py_send_slices(PyObject *self, PyObject *args)
{
    int fd, port;
    const char *host;
    Py_buffer headers, value;
    Py_ssize_t width, chunk_bytes, first, step;
    PyObject *result = NULL;
    Endpoint to;
    if (!PyArg_ParseTuple(args, "isiy*n(y*nnn):send_slices", &fd, &host, &port, &headers, &width, &value, &chunk_bytes,
                          &first, &step))
        return NULL;
    if (!sky_parse_endpoint(host, port, &to))
        ;
    else if (width < 1 || headers.len % width)
        PyErr_Format(PyExc_ValueError, "%zd bytes of headers of %zd: expected a whole number of them", headers.len, width);
    else if (!within(value.len, chunk_bytes, first, step, headers.len / width))
        PyErr_Format(PyExc_ValueError, "chunks of %zd bytes from %zd by %zd: beyond a value of %zd", chunk_bytes, first,
                     step, value.len);
    else if (chunk_bytes > MAX_RUN_BYTES - width)
        PyErr_Format(PyExc_ValueError, "a segment of %zd and %zd bytes: a datagram has at most %d", width, chunk_bytes,
                     (int)MAX_RUN_BYTES);
    else
        result = send_chunks(fd, &to, &headers, width, &value, chunk_bytes, first, step);
    PyBuffer_Release(&headers);
    PyBuffer_Release(&value);
    return result;
}
