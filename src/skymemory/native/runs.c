/* Whole runs at once: a satellite opens what it is to store, a client places what answers it. Twin: twin_runs.py. */
#include "packet.h"

enum {
    SAME_JOURNEY = 20, /* of the SKY header: everything up to what forwarders change */
    ANSWER_AT = TELEMETRY_BYTES + 1,
    ANSWER_BYTES = 19, /* operation, flags, status, addresses, ground host, request: what one answer has in common */
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

/* Whether a run answers, in all its segments alike, one of the requests: 1 yes, 0 no, -1 an exception. */
static int answers(const uint8_t *data, size_t size, size_t segment, PyObject *requests, uint32_t *request)
{
    if (size < TELEMETRY_BYTES + SKY_BYTES || segment < TELEMETRY_BYTES + SKY_BYTES || data[ANSWER_AT] != OP_DATA)
        return 0;
    *request = be32(data + TELEMETRY_BYTES + REQUEST_AT);
    PyObject *number = PyLong_FromUnsignedLong(*request);
    int awaited = number ? PySet_Contains(requests, number) : -1;
    Py_XDECREF(number);
    for (size_t at = segment; awaited == 1 && at < size; at += segment)
        if (size - at < ANSWER_AT + ANSWER_BYTES || memcmp(data + at + ANSWER_AT, data + ANSWER_AT, ANSWER_BYTES))
            return 0;
    return awaited;
}

/* What came for one request in consecutive runs. */
typedef struct {
    uint32_t request, echo;
    Py_ssize_t runs;
} Tally;

static int note(PyObject *tallies, const Tally *tally, Value *value)
{
    if (!tally->runs)
        return 1;
    PyObject *entry = Py_BuildValue("IInnnnn", (unsigned)tally->request, (unsigned)tally->echo, tally->runs,
                                    value->placed, value->duplicates, value->corrupt, value->foreign);
    int noted = entry && PyList_Append(tallies, entry) == 0;
    Py_XDECREF(entry);
    value->placed = value->duplicates = value->corrupt = value->foreign = 0;
    return noted;
}

static PyObject *place_each(PyObject *runs, Py_ssize_t first, PyObject *requests, Value *value)
{
    PyObject *tallies = PyList_New(0);
    Tally tally = {0, 0, 0};
    int more = tallies != NULL;
    for (Py_ssize_t i = first; more == 1 && i < PyList_GET_SIZE(runs); i++) {
        Py_buffer data;
        Py_ssize_t segment, count;
        uint32_t request;
        if (!PyTuple_Check(PyList_GET_ITEM(runs, i))) {
            PyErr_SetString(PyExc_TypeError, "runs: expected a list of tuples (data, segment bytes)");
            more = -1;
        } else if (!PyArg_ParseTuple(PyList_GET_ITEM(runs, i), "y*n:run", &data, &segment)) {
            more = -1;
        } else {
            if ((count = sky_count_segments(&data, segment)) < 0) {
                more = -1;
            } else if ((more = answers(data.buf, (size_t)data.len, (size_t)segment, requests, &request)) == 1) {
                if (request != tally.request && !note(tallies, &tally, value)) {
                    more = -1;
                } else {
                    if (request != tally.request)
                        tally.runs = 0;
                    tally.request = request;
                    tally.echo = be32((const uint8_t *)data.buf + TELEMETRY_BYTES + TIMESTAMP_AT);
                    tally.runs++;
                    Py_BEGIN_ALLOW_THREADS
                    sky_place_all(value, data.buf, (size_t)data.len, (size_t)segment, count);
                    Py_END_ALLOW_THREADS
                }
            }
            PyBuffer_Release(&data);
        }
    }
    if (more < 0 || (tallies && !note(tallies, &tally, value)))
        Py_CLEAR(tallies);
    return tallies;
}

PyObject *sky_py_place_runs(PyObject *self, PyObject *args)
{
    PyObject *runs, *requests, *result = NULL;
    Py_buffer key, out, arrived, crcs;
    Py_ssize_t first, chunks, chunk_bytes, value_bytes;
    unsigned long value_crc;
    if (!PyArg_ParseTuple(args, "O!nO!y*nnnkw*w*w*:place_runs", &PyList_Type, &runs, &first, &PySet_Type, &requests, &key,
                          &chunks, &chunk_bytes, &value_bytes, &value_crc, &out, &arrived, &crcs))
        return NULL;
    Value value;
    if (first < 0)
        PyErr_Format(PyExc_ValueError, "first run %zd: expected 0 or more", first);
    else if (sky_value_fits(&value, &key, chunks, chunk_bytes, value_bytes, value_crc, &out, &arrived, &crcs))
        result = place_each(runs, first, requests, &value);
    PyBuffer_Release(&key);
    PyBuffer_Release(&out);
    PyBuffer_Release(&arrived);
    PyBuffer_Release(&crcs);
    return result;
}
