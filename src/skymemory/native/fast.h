/* Declarations that the files of the compiled helper share. The Python twin (twin/) specifies each function. */
#ifndef SKYMEMORY_FAST_H
#define SKYMEMORY_FAST_H

#include <pyconfig.h>

/* One file for each Python from 3.11 up. A Python without the interpreter lock has no stable ABI. */
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crc.h"

/* Below this many bytes a loop is faster than releasing the interpreter lock. */
#define SKY_RELEASE_BYTES 16384

/* A type of the module. It is made at the import, since the stable ABI has no static types. */
typedef struct {
    PyType_Spec spec;
    PyTypeObject *object;
} SkyType;

/* The end of each tp_dealloc: the memory, and the object's hold on its type. */
static inline void sky_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* A list or another iterable as a tuple, a tuple as itself; a new reference. TypeError with the message if it is neither. */
static inline PyObject *sky_tuple(PyObject *given, const char *message)
{
    PyObject *tuple = PySequence_Tuple(given);
    if (!tuple && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_SetString(PyExc_TypeError, message);
    return tuple;
}

/* The entry of a copy that ``sky_tuple`` made, borrowed; TypeError with the message if it is no tuple itself. */
static inline PyObject *sky_tuple_at(PyObject *tuple, Py_ssize_t at, const char *message)
{
    PyObject *row = PyTuple_GetItem(tuple, at);
    if (row && PyTuple_Check(row))
        return row;
    PyErr_SetString(PyExc_TypeError, message);
    return NULL;
}

/* Raises the TypeError of an argument that is not a number. */
static inline void sky_no_number(const char *what, PyObject *given)
{
    PyObject *name = PyType_GetName(Py_TYPE(given));
    if (name)
        PyErr_Format(PyExc_TypeError, "%s: expected a number, got %U", what, name);
    Py_XDECREF(name);
}

/* The sum or the product of two sizes, neither below 0: -1 with MemoryError where no size is that large. */
static inline Py_ssize_t sky_sum(Py_ssize_t one, Py_ssize_t other)
{
    Py_ssize_t sum;
    if (!__builtin_add_overflow(one, other, &sum))
        return sum;
    PyErr_NoMemory();
    return -1;
}

static inline Py_ssize_t sky_product(Py_ssize_t one, Py_ssize_t other)
{
    Py_ssize_t product;
    if (!__builtin_mul_overflow(one, other, &product))
        return product;
    PyErr_NoMemory();
    return -1;
}

/* ``count`` rows of ``width`` bytes as an object that is not filled yet; NULL with MemoryError where there is no room. */
static inline PyObject *sky_new_bytes(Py_ssize_t count, Py_ssize_t width)
{
    Py_ssize_t size = sky_product(count, width);
    return size < 0 ? NULL : PyBytes_FromStringAndSize(NULL, size);
}

static inline PyObject *sky_new_bytearray(Py_ssize_t count, Py_ssize_t width)
{
    Py_ssize_t size = sky_product(count, width);
    return size < 0 ? NULL : PyByteArray_FromStringAndSize(NULL, size);
}

/* Like realloc, for ``count`` items of ``width`` bytes (at least one, so that NULL always means: no memory). */
static inline void *sky_realloc(void *memory, size_t count, size_t width)
{
    size_t bytes;
    if (__builtin_mul_overflow(count ? count : 1, width, &bytes) || bytes > PY_SSIZE_T_MAX)
        return NULL;
    return realloc(memory, bytes);
}

/* The value of a key as a new reference: a comparison of keys, or whatever runs later, may change the dict. NULL without
 * an exception where there is none. */
static inline PyObject *sky_dict_get(PyObject *dict, PyObject *key)
{
    return Py_XNewRef(PyDict_GetItemWithError(dict, key));
}

/* Like dict.setdefault; the value borrowed, NULL with an exception. */
static inline PyObject *sky_set_default(PyObject *dict, PyObject *key, PyObject *value)
{
    PyObject *known = PyDict_GetItemWithError(dict, key);
    if (!known && !PyErr_Occurred() && PyDict_SetItem(dict, key, value) == 0)
        known = value;
    return known;
}

/* crc_calls.c */
uint32_t sky_crc32_join(const uint8_t *crcs, size_t chunks, size_t chunk_bytes, size_t size);
PyObject *sky_py_crc32(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *sky_py_crc32_combine(PyObject *self, PyObject *args);
PyObject *sky_py_crc32_chunks(PyObject *self, PyObject *args);
PyObject *sky_py_crc32_join(PyObject *self, PyObject *args);

/* hashes.c */
PyObject *sky_py_chain_hashes(PyObject *self, PyObject *args);
PyObject *sky_py_piece_hashes(PyObject *self, PyObject *args);
PyObject *sky_py_chain_sha256(PyObject *self, PyObject *args);
PyObject *sky_py_pack_tokens(PyObject *self, PyObject *tokens);

/* headers.c */
PyObject *sky_py_seal_headers(PyObject *self, PyObject *args);
PyObject *sky_py_bulk_headers(PyObject *self, PyObject *args);
PyObject *sky_py_value_refs(PyObject *self, PyObject *args);

/* receive.c */
PyObject *sky_py_receive_all(PyObject *self, PyObject *args);
PyObject *sky_py_request_words(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* cached.c */
PyObject *sky_py_read_cached(PyObject *self, PyObject *args);

/* http_headers.c */
PyObject *sky_py_json_counts(PyObject *self, PyObject *text);
PyObject *sky_py_pairs_into(PyObject *self, PyObject *list);
PyObject *sky_py_cut_texts(PyObject *self, PyObject *text);
PyObject *sky_py_first_values(PyObject *self, PyObject *headers);
PyObject *sky_py_header_lines(PyObject *self, PyObject *const *args, Py_ssize_t count);

/* segments.c */
PyObject *sky_py_verify_segments(PyObject *self, PyObject *args);
PyObject *sky_py_place_segments(PyObject *self, PyObject *args);

/* runs.c */
PyObject *sky_py_open_runs(PyObject *self, PyObject *args);

/* landing.c */
PyObject *sky_py_place_runs(PyObject *self, PyObject *args);
PyObject *sky_py_recv_runs(PyObject *self, PyObject *args);

/* udp.c */
PyObject *sky_py_recv_batch(PyObject *self, PyObject *args);
PyObject *sky_py_send_batch(PyObject *self, PyObject *args);

/* macs.c, sha.c */
PyObject *sky_py_sign_packets(PyObject *self, PyObject *args);
PyObject *sky_py_check_macs(PyObject *self, PyObject *args);
PyObject *sky_py_strip_macs(PyObject *self, PyObject *args);

/* acks.c */
PyObject *sky_py_open_ack(PyObject *self, PyObject *packet);

/* slices.c */
PyObject *sky_py_send_slices(PyObject *self, PyObject *args);

/* packets.c */
PyObject *sky_py_command_packets(PyObject *self, PyObject *args);
PyObject *sky_py_send_each(PyObject *self, PyObject *args);

/* answers.c */
PyObject *sky_py_answer_get(PyObject *self, PyObject *args);

/* relay.c */
PyObject *sky_py_same_journey(PyObject *self, PyObject *args);
PyObject *sky_py_count_hops(PyObject *self, PyObject *args);

/* serve.c */
PyObject *sky_py_serve(PyObject *self, PyObject *args);
PyObject *sky_py_serve_runs(PyObject *self, PyObject *args);

#endif
