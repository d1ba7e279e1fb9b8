/* The CRC for Python: of bytes, of chunks, and of a whole from its parts. Twin and contract: twin/backend.py. */
#include "fast.h"

#include <string.h>

PyObject *sky_py_crc32(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer data;
    unsigned long value = 0;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32(data, value=0)");
        return NULL;
    }
    if (count == 2) {
        value = PyLong_AsUnsignedLongMask(args[1]);
        if (value == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
    }
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t crc = (uint32_t)value;
    if (data.len < SKY_RELEASE_BYTES) {
        crc = sky_crc32(crc, data.buf, (size_t)data.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = sky_crc32(crc, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* The factor of a CRC for appending that many bytes; its exponents repeat after 2^32 - 1. */
static uint32_t shift_of(uint64_t bytes)
{
    return sky_power_of_x(bytes % 0xFFFFFFFFu * 8);
}

PyObject *sky_py_crc32_combine(PyObject *self, PyObject *args)
{
    unsigned long crc1, crc2;
    long long length;
    if (!PyArg_ParseTuple(args, "kkL:crc32_combine", &crc1, &crc2, &length))
        return NULL;
    if (length < 0)
        return PyErr_Format(PyExc_ValueError, "length %lld: expected 0 or more", length);
    uint32_t shift = shift_of((uint64_t)length);
    return PyLong_FromUnsignedLong(sky_multiply((uint32_t)crc1, shift) ^ (uint32_t)crc2);
}

PyObject *sky_py_crc32_chunks(PyObject *self, PyObject *args)
{
    Py_buffer value;
    Py_ssize_t chunk;
    if (!PyArg_ParseTuple(args, "y*n:crc32_chunks", &value, &chunk))
        return NULL;
    PyObject *result = NULL;
    if (chunk < 1) {
        PyErr_Format(PyExc_ValueError, "chunks of %zd bytes: expected 1 or more", chunk);
    } else {
        Py_ssize_t chunks = value.len / chunk + (value.len % chunk != 0);
        result = sky_new_bytes(chunks, 4);
        if (result) {
            const uint8_t *data = value.buf;
            char *out = PyBytes_AsString(result);
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t at = 0; at < value.len; at += chunk, out += 4) {
                Py_ssize_t size = value.len - at < chunk ? value.len - at : chunk;
                uint32_t crc = sky_crc32(0, data + at, (size_t)size);
                memcpy(out, &crc, 4);
                if (size < chunk)
                    break;
            }
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&value);
    return result;
}

/* Multiplication by one fixed polynomial as 8 tables of 16: eight lookups for each chunk. */
uint32_t sky_crc32_join(const uint8_t *crcs, size_t chunks, size_t chunk_bytes, size_t size)
{
    uint32_t whole = 0, part, nibbles[8][16];
    if (chunks > 2) {
        uint32_t column = shift_of(chunk_bytes); /* the image of bit 31, then of 30, ... */
        for (int bit = 31; bit >= 0; bit--) {
            uint32_t *table = nibbles[bit / 4];
            table[1 << bit % 4] = column;
            column = (column >> 1) ^ ((column & 1) ? SKY_POLYNOMIAL : 0);
        }
        for (int i = 0; i < 8; i++) {
            nibbles[i][0] = 0;
            for (int j = 3; j < 16; j++)
                if (j & (j - 1))
                    nibbles[i][j] = nibbles[i][j & (j - 1)] ^ nibbles[i][j & -j];
        }
    }
    for (size_t i = 0; i < chunks; i++) {
        memcpy(&part, crcs + 4 * i, 4);
        if (i == 0) {
            whole = part;
        } else if (i < chunks - 1) {
            uint32_t next = part;
            for (int j = 0; j < 8; j++)
                next ^= nibbles[j][whole >> 4 * j & 15];
            whole = next;
        } else {
            whole = sky_multiply(whole, shift_of(size - (chunks - 1) * chunk_bytes)) ^ part;
        }
    }
    return whole;
}

PyObject *sky_py_crc32_join(PyObject *self, PyObject *args)
{
    Py_buffer crcs;
    Py_ssize_t chunk, size;
    if (!PyArg_ParseTuple(args, "y*nn:crc32_join", &crcs, &chunk, &size))
        return NULL;
    Py_ssize_t chunks = crcs.len / 4;
    uint32_t whole = 0;
    if (chunk < 1)
        PyErr_Format(PyExc_ValueError, "chunks of %zd bytes: expected 1 or more", chunk);
    else if (size < 0 || crcs.len % 4 || chunks != size / chunk + (size % chunk != 0))
        PyErr_Format(PyExc_ValueError, "%zd CRCs for %zd bytes in chunks of %zd: the count disagrees", chunks, size, chunk);
    else
        whole = sky_crc32_join(crcs.buf, (size_t)chunks, (size_t)chunk, (size_t)size);
    PyBuffer_Release(&crcs);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(whole);
}
