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

/* References and payloads of all requested chunks, borrowed from the share; -1 where one is absent or not as stored. */
static Py_ssize_t collect(PyObject *share, const Wanted *wanted, PyObject **refs, PyObject **payloads)
{
    Py_ssize_t found = 0;
    for (uint32_t step = 0; step < wanted->count; step++) {
        if (!(wanted->bitmap[step >> 3] >> (step & 7) & 1))
            continue;
        PyObject *index = PyLong_FromUnsignedLongLong(wanted->first - 1 + (uint64_t)wanted->stride * step);
        PyObject *chunk = index ? PyDict_GetItemWithError(share, index) : NULL;
        Py_XDECREF(index);
        if (!chunk || !PyTuple_CheckExact(chunk) || PyTuple_Size(chunk) != 2)
            return -1;
        refs[found] = PyTuple_GetItem(chunk, 0);
        payloads[found] = PyTuple_GetItem(chunk, 1);
        if (!PyBytes_CheckExact(refs[found]) || PyBytes_Size(refs[found]) != REF_BYTES ||
            !PyBytes_CheckExact(payloads[found]) || PyBytes_Size(payloads[found]) + ROW_BYTES - 7 > 0xFFFF)
            return -1;
        found++;
    }
    return found;
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

static PyObject *answer(const uint8_t *prefix, PyObject **refs, PyObject **payloads, Py_ssize_t count, uint32_t sequence,
                        const uint8_t *key)
{
    PyObject *headers = PyByteArray_FromStringAndSize(NULL, count * ROW_BYTES), *list = PyList_New(count);
    if (!headers || !list) {
        Py_XDECREF(headers);
        Py_XDECREF(list);
        return NULL;
    }
    uint8_t *row = (uint8_t *)PyByteArray_AsString(headers);
    for (Py_ssize_t i = 0; i < count; i++, row += ROW_BYTES) {
        memcpy(row, prefix, ANSWER_PREFIX_BYTES);
        memcpy(row + ANSWER_PREFIX_BYTES, PyBytes_AsString(refs[i]), REF_BYTES);
        put16(row + 2, UNSEGMENTED << 14 | ((sequence + (uint32_t)i) & 0x3FFF));
        put16(row + 4, (uint32_t)(PyBytes_Size(payloads[i]) + ROW_BYTES - 7));
        put32(row + TELEMETRY_BYTES + CRC_AT, sky_header_crc(row, TELEMETRY_BYTES, ROW_BYTES));
        PyList_SetItem(list, i, Py_NewRef(payloads[i]));
    }
    return Py_BuildValue("(y#NN)", (const char *)key, (Py_ssize_t)KEY_BYTES, headers, list);
}

PyObject *sky_answer_plain_get(const uint8_t *packet, size_t size, PyObject *shares, const AnswerTerms *terms)
{
    Wanted wanted;
    if (!is_plain_get(packet, size, &wanted))
        return NULL;
    PyObject *key = PyBytes_FromStringAndSize((const char *)packet + BODY_AT, KEY_BYTES);
    PyObject *share = key ? PyDict_GetItemWithError(shares, key) : NULL, *result = NULL;
    Py_XDECREF(key);
    PyObject **refs = share && PyDict_Check(share) ? PyMem_Malloc(2 * wanted.count * sizeof *refs) : NULL;
    Py_ssize_t count = refs ? collect(share, &wanted, refs, refs + wanted.count) : -1;
    if (count > 0 && !PyErr_Occurred()) {
        uint8_t prefix[ANSWER_PREFIX_BYTES];
        sky_write_prefix(prefix, OP_DATA, packet, terms);
        result = answer(prefix, refs, refs + wanted.count, count, terms->sequence, packet + BODY_AT);
    }
    PyMem_Free(refs);
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
