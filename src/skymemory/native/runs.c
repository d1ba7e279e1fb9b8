/* Whole runs at once: a satellite opens what it is to store. Twin: twin_runs.py. */
#include "packet.h"

enum {
    SAME_JOURNEY = 20, /* of the SKY header: everything up to what forwarders change */
    REF_SERVERS_AT = 56,
    REF_SERVER_AT = 58,
};

/* Whether the packet, already known to be sound, can be chunk ``number`` of the run that ``first`` began. */
static int belongs(const uint8_t *packet, const uint8_t *first, uint32_t after)
{
    const size_t sky = COMMAND_BYTES, at = COMMAND_BYTES + SKY_BYTES;
    const uint8_t *ref = packet + at, *first_ref = first + at;
    if (memcmp(packet + sky, first + sky, SAME_JOURNEY) || memcmp(ref, first_ref, REF_NUMBER_AT) ||
        memcmp(ref + REF_CHUNKS_AT, first_ref + REF_CHUNKS_AT, 4) ||
        memcmp(ref + REF_VALUE_BYTES_AT, first_ref + REF_VALUE_BYTES_AT, REF_BYTES - REF_VALUE_BYTES_AT))
        return 0;
    uint32_t number = be32(ref + REF_NUMBER_AT), chunks = be32(ref + REF_CHUNKS_AT), length = be32(ref + REF_LENGTH_AT);
    uint32_t value_bytes = be32(ref + REF_VALUE_BYTES_AT), servers = be16(ref + REF_SERVERS_AT);
    return number > after && number <= chunks && chunks <= (value_bytes ? value_bytes : 1) && length <= value_bytes &&
           servers && be16(ref + REF_SERVER_AT) == (number - 1) % servers + 1;
}

static int is_one_run(const uint8_t *data, size_t size, size_t segment)
{
    uint32_t after = 0;
    for (size_t start = 0, ref; start < size; start += segment) {
        size_t length = size - start < segment ? size - start : segment;
        const uint8_t *packet = data + start;
        if (sky_check_header(packet, length, &ref) != OK || ref != COMMAND_BYTES + SKY_BYTES ||
            packet[COMMAND_BYTES + 1] == OP_DATA || !belongs(packet, data, after) ||
            !sky_payload_is_sound(packet, length, ref))
            return 0;
        after = be32(packet + ref + REF_NUMBER_AT);
    }
    return size > 0;
}

PyObject *sky_py_open_run(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment;
    if (!PyArg_ParseTuple(args, "y*n:open_run", &data, &segment))
        return NULL;
    PyObject *indices = NULL, *chunks = NULL, *result = NULL;
    Py_ssize_t count = sky_count_segments(&data, segment), size_bytes = 0;
    const size_t ref = COMMAND_BYTES + SKY_BYTES, payload = ref + REF_BYTES;
    if (count < 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    int one;
    Py_BEGIN_ALLOW_THREADS
    one = is_one_run(data.buf, (size_t)data.len, (size_t)segment);
    Py_END_ALLOW_THREADS
    if (!one) {
        PyBuffer_Release(&data);
        Py_RETURN_NONE;
    }
    indices = PyList_New(count);
    chunks = PyList_New(count);
    for (Py_ssize_t i = 0; indices && chunks && i < count; i++) {
        size_t start = (size_t)(i * segment), left = (size_t)data.len - start;
        const char *packet = (const char *)data.buf + start;
        size_t length = (left < (size_t)segment ? left : (size_t)segment) - payload;
        PyObject *index = PyLong_FromUnsignedLong(be32((const uint8_t *)packet + ref + REF_NUMBER_AT) - 1);
        PyObject *its_ref = PyBytes_FromStringAndSize(packet + ref, REF_BYTES);
        PyObject *its_payload = PyBytes_FromStringAndSize(packet + payload, (Py_ssize_t)length);
        PyObject *chunk = its_ref && its_payload ? PyTuple_Pack(2, its_ref, its_payload) : NULL;
        Py_XDECREF(its_ref);
        Py_XDECREF(its_payload);
        size_bytes += (Py_ssize_t)length + REF_BYTES;
        if (!index || !chunk) {
            Py_XDECREF(index);
            Py_XDECREF(chunk);
            Py_CLEAR(indices);
            break;
        }
        PyList_SET_ITEM(indices, i, index);
        PyList_SET_ITEM(chunks, i, chunk);
    }
    if (indices && chunks)
        result = Py_BuildValue("OOn", indices, chunks, size_bytes);
    Py_XDECREF(indices);
    Py_XDECREF(chunks);
    PyBuffer_Release(&data);
    return result;
}
