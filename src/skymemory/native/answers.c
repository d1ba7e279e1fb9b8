/* A satellite's answer to a plain GET: the headers of all requested chunks, in one call. Twin: twin/runs.py. */
#include "answers.h"

enum {
    BODY_AT = COMMAND_BYTES + SKY_BYTES,
    SELECTION_BYTES = KEY_BYTES + 12,
    MOST_BITS = 1 << 16,
    ROW_BYTES = ANSWER_PREFIX_BYTES + REF_BYTES,
    HOP_LIMIT = 64,
};

typedef struct {
    uint32_t first, stride, count;
    const uint8_t *bitmap;
} Wanted;

/* Whether the packet is one sound GET whose selection is well formed; the caller handles anything else. */
static int is_plain_get(const uint8_t *packet, size_t size, Wanted *wanted)
{
    size_t ref;
    if (size <= BODY_AT + SELECTION_BYTES || !(packet[0] & 0x10) || packet[COMMAND_BYTES + 1] != OP_GET ||
        packet[COMMAND_BYTES + 3] != 0 || sky_check_header(packet, size, &ref) != OK)
        return 0;
    const uint8_t *body = packet + BODY_AT;
    wanted->first = be32(body + KEY_BYTES);
    wanted->stride = be32(body + KEY_BYTES + 4);
    wanted->count = be32(body + KEY_BYTES + 8);
    wanted->bitmap = body + SELECTION_BYTES;
    return wanted->first >= 1 && wanted->stride >= 1 && wanted->count >= 1 && wanted->count <= MOST_BITS &&
           size - BODY_AT - SELECTION_BYTES == (wanted->count + 7) / 8;
}

static int is_chunk(PyObject *chunk)
{
    if (!PyTuple_CheckExact(chunk) || PyTuple_Size(chunk) != 2)
        return 0;
    PyObject *ref = PyTuple_GetItem(chunk, 0), *payload = PyTuple_GetItem(chunk, 1);
    return PyBytes_CheckExact(ref) && PyBytes_Size(ref) == REF_BYTES && PyBytes_CheckExact(payload) &&
           PyBytes_Size(payload) <= 0xFFFF - (ROW_BYTES - 7);
}

/* All requested chunks, each a new reference, which the caller gives back: other code may change the share meanwhile.
 * Whether all are there, as they are stored. */
static int collect(PyObject *share, const Wanted *wanted, PyObject **chunks, Py_ssize_t *found)
{
    for (uint32_t step = 0; step < wanted->count; step++) {
        if (!(wanted->bitmap[step >> 3] >> (step & 7) & 1))
            continue;
        PyObject *index = PyLong_FromUnsignedLongLong(wanted->first - 1 + (uint64_t)wanted->stride * step);
        PyObject *chunk = index ? sky_dict_get(share, index) : NULL;
        Py_XDECREF(index);
        if (!chunk)
            return 0;
        chunks[(*found)++] = chunk;
        if (!is_chunk(chunk))
            return 0;
    }
    return 1;
}

void sky_write_prefix(uint8_t *row, uint8_t op, const uint8_t *request, const AnswerTerms *terms)
{
    uint8_t *sky = row + TELEMETRY_BYTES;
    const uint8_t *asked = request + COMMAND_BYTES;
    memset(row, 0, ANSWER_PREFIX_BYTES);
    put16(row, PRIMARY_WORD);
    put32(row + 6, terms->seconds);
    put16(row + 10, terms->fraction);
    sky[0] = VERSION, sky[1] = op;
    memcpy(sky + 4, asked + 8, 4); /* the source becomes the destination */
    memcpy(sky + 8, asked + 4, 4);
    memcpy(sky + 12, asked + 12, 8); /* ground host, request id */
    sky[MUTABLE_AT] = HOP_LIMIT;
    memcpy(sky + TIMESTAMP_AT, asked + TIMESTAMP_AT, 4);
    put32(sky + 28, (uint32_t)terms->slot_moves);
    put32(sky + 32, (uint32_t)terms->plane_moves);
    put16(sky + 36, terms->credit < 0xFFFF ? terms->credit : 0xFFFF);
}

static PyObject *answer(const uint8_t *prefix, PyObject **chunks, Py_ssize_t count, uint32_t sequence, const uint8_t *key)
{
    PyObject *headers = sky_new_bytearray(count, ROW_BYTES), *list = PyList_New(count);
    if (!headers || !list) {
        Py_XDECREF(headers);
        Py_XDECREF(list);
        return NULL;
    }
    uint8_t *row = (uint8_t *)PyByteArray_AsString(headers);
    for (Py_ssize_t i = 0; i < count; i++, row += ROW_BYTES) {
        PyObject *payload = PyTuple_GetItem(chunks[i], 1);
        memcpy(row, prefix, ANSWER_PREFIX_BYTES);
        memcpy(row + ANSWER_PREFIX_BYTES, PyBytes_AsString(PyTuple_GetItem(chunks[i], 0)), REF_BYTES);
        put16(row + 2, UNSEGMENTED << 14 | ((sequence + (uint32_t)i) & 0x3FFF));
        put16(row + 4, (uint32_t)(PyBytes_Size(payload) + ROW_BYTES - 7));
        put32(row + TELEMETRY_BYTES + CRC_AT, sky_header_crc(row, TELEMETRY_BYTES, ROW_BYTES));
        PyList_SetItem(list, i, Py_NewRef(payload));
    }
    return Py_BuildValue("(y#NN)", (const char *)key, (Py_ssize_t)KEY_BYTES, headers, list);
}

PyObject *sky_answer_plain_get(const uint8_t *packet, size_t size, PyObject *shares, const AnswerTerms *terms)
{
    Wanted wanted;
    if (!is_plain_get(packet, size, &wanted))
        return NULL;
    PyObject *key = PyBytes_FromStringAndSize((const char *)packet + BODY_AT, KEY_BYTES);
    PyObject *share = key ? sky_dict_get(shares, key) : NULL, *result = NULL;
    Py_XDECREF(key);
    PyObject **chunks = share && PyDict_Check(share) ? PyMem_New(PyObject *, wanted.count) : NULL;
    Py_ssize_t count = 0;
    if (chunks && collect(share, &wanted, chunks, &count) && count && !PyErr_Occurred()) {
        uint8_t prefix[ANSWER_PREFIX_BYTES];
        sky_write_prefix(prefix, OP_DATA, packet, terms);
        result = answer(prefix, chunks, count, terms->sequence, packet + BODY_AT);
    }
    while (count)
        Py_DECREF(chunks[--count]);
    PyMem_Free(chunks);
    Py_XDECREF(share);
    return result;
}

PyObject *sky_py_answer_get(PyObject *self, PyObject *args)
{
    Py_buffer packet;
    PyObject *shares;
    AnswerTerms terms;
    if (!PyArg_ParseTuple(args, "y*O!(iiIIII):answer_get", &packet, &PyDict_Type, &shares, SKY_TERMS(&terms)))
        return NULL;
    PyObject *result = sky_answer_plain_get(packet.buf, (size_t)packet.len, shares, &terms);
    PyBuffer_Release(&packet);
    if (!result && !PyErr_Occurred())
        Py_RETURN_NONE;
    return result;
}
