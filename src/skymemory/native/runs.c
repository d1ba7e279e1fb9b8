/* Whole runs in one call: opens the chunks that a satellite is to store. Twin: twin/runs.py. */
#include "packet.h"

enum {
    SAME_JOURNEY = 20, /* bytes of the SKY header before the forwarders' fields */
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

int sky_continues_run(const uint8_t *data, size_t size, size_t segment, const uint8_t *first, size_t mac, uint32_t *after)
{
    uint32_t number = *after;
    for (size_t start = 0, ref; start < size; start += segment) {
        size_t length = size - start < segment ? size - start : segment;
        const uint8_t *packet = data + start;
        if (sky_check_packet(packet, length, &ref) != OK || ref != COMMAND_BYTES + SKY_BYTES ||
            packet[COMMAND_BYTES + 1] == OP_DATA || !(packet[COMMAND_BYTES + FLAGS_AT] & AUTHENTICATED) != !mac || !belongs(packet, first, number) ||
            !sky_payload_is_sound(packet, length, ref))
            return 0;
        number = be32(packet + ref + REF_NUMBER_AT);
    }
    *after = number;
    return size > 0;
}

PyObject *sky_chunk_of(const uint8_t *packet, size_t size, size_t mac)
{
    const char *ref = (const char *)packet + COMMAND_BYTES + SKY_BYTES;
    PyObject *its_ref = PyBytes_FromStringAndSize(ref, REF_BYTES);
    PyObject *its_payload = PyBytes_FromStringAndSize(ref + REF_BYTES + mac, (Py_ssize_t)(size - RUN_START_BYTES - mac));
    PyObject *chunk = its_ref && its_payload ? PyTuple_Pack(2, its_ref, its_payload) : NULL;
    Py_XDECREF(its_ref);
    Py_XDECREF(its_payload);
    return chunk;
}

/* Append index and (reference, payload) of every packet; their bytes, or -1 with an exception. */
static Py_ssize_t take_apart(const uint8_t *data, size_t size, size_t segment, PyObject *indices, PyObject *chunks)
{
    Py_ssize_t size_bytes = 0;
    for (size_t start = 0; start < size; start += segment) {
        const uint8_t *packet = data + start;
        size_t length = size - start < segment ? size - start : segment;
        PyObject *index = PyLong_FromUnsignedLong(be32(packet + COMMAND_BYTES + SKY_BYTES + REF_NUMBER_AT) - 1);
        PyObject *chunk = index ? sky_chunk_of(packet, length, 0) : NULL;
        int taken = chunk && PyList_Append(indices, index) == 0 && PyList_Append(chunks, chunk) == 0;
        Py_XDECREF(index);
        Py_XDECREF(chunk);
        if (!taken)
            return -1;
        size_bytes += (Py_ssize_t)(length - COMMAND_BYTES - SKY_BYTES);
    }
    return size_bytes;
}

PyObject *sky_py_open_runs(PyObject *self, PyObject *args)
{
    PyObject *runs, *indices = NULL, *chunks = NULL, *result = NULL;
    Py_ssize_t first, taken = 0, size_bytes = 0;
    if (!PyArg_ParseTuple(args, "O!n:open_runs", &PyList_Type, &runs, &first))
        return NULL;
    if (first < 0)
        return PyErr_Format(PyExc_ValueError, "first run %zd: expected 0 or more", first);
    PyObject *kept = PyList_AsTuple(runs); /* a number may be an object whose code changes the list */
    uint8_t began[RUN_START_BYTES];
    uint32_t after = 0;
    indices = PyList_New(0);
    chunks = PyList_New(0);
    int more = kept && indices && chunks ? 1 : -1;
    for (Py_ssize_t i = first; more == 1 && i < PyTuple_Size(kept); i++) {
        Py_buffer data;
        Py_ssize_t segment, bytes = 0;
        PyObject *run = sky_tuple_at(kept, i, "runs: expected a list of tuples (data, segment bytes)");
        if (!run || !PyArg_ParseTuple(run, "y*n:run", &data, &segment)) {
            more = -1;
            break;
        }
        if (segment < 1 || (size_t)data.len < sizeof began) {
            more = 0;
        } else {
            if (!taken)
                memcpy(began, data.buf, sizeof began);
            Py_BEGIN_ALLOW_THREADS
            more = sky_continues_run(data.buf, (size_t)data.len, (size_t)segment, began, 0, &after);
            Py_END_ALLOW_THREADS
        }
        if (more == 1 && (bytes = take_apart(data.buf, (size_t)data.len, (size_t)segment, indices, chunks)) < 0)
            more = -1;
        PyBuffer_Release(&data);
        if (more == 1)
            taken++, size_bytes += bytes;
    }
    if (more >= 0)
        result = taken ? Py_BuildValue("OOnn", indices, chunks, size_bytes, taken) : Py_NewRef(Py_None);
    Py_XDECREF(kept);
    Py_XDECREF(indices);
    Py_XDECREF(chunks);
    return result;
}
