/* The loops over packets: verify runs of segments, place payloads. Twin and contract: twin/segments.py.
 * Every byte of a packet is untrusted; each offset used is checked against the packet's own end first. */
#include "packet.h"

Py_ssize_t sky_count_segments(const Py_buffer *data, Py_ssize_t segment)
{
    if (segment < 1) {
        PyErr_Format(PyExc_ValueError, "segments of %zd bytes: expected 1 or more", segment);
        return -1;
    }
    return data->len / segment + (data->len % segment != 0);
}

static void verify(const uint8_t *data, size_t size, size_t segment, Py_ssize_t count, uint8_t *codes)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t start = (size_t)i * segment, length = size - start < segment ? size - start : segment, ref;
        int code = sky_check_packet(data + start, length, &ref);
        if (ref && !sky_payload_is_sound(data + start, length, ref))
            code = PAYLOAD_CRC;
        codes[i] = (uint8_t)code;
    }
}

PyObject *sky_py_verify_segments(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment;
    if (!PyArg_ParseTuple(args, "y*n:verify_segments", &data, &segment))
        return NULL;
    PyObject *codes = NULL;
    Py_ssize_t count = sky_count_segments(&data, segment);
    if (count >= 0 && (codes = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(codes);
        if (data.len < SKY_RELEASE_BYTES) {
            verify(data.buf, (size_t)data.len, (size_t)segment, count, out);
        } else {
            Py_BEGIN_ALLOW_THREADS
            verify(data.buf, (size_t)data.len, (size_t)segment, count, out);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    return codes;
}

/* Bytes of the value from ``start`` on, to their places. */
static void put(const Value *value, uint64_t start, const uint8_t *from, size_t length)
{
    if (start < value->head_bytes) {
        size_t part = value->head_bytes - start < length ? value->head_bytes - start : length;
        memcpy(value->head + start, from, part);
        start += part, from += part, length -= part;
    }
    uint64_t row = (start - value->head_bytes) / value->row_bytes, at = (start - value->head_bytes) % value->row_bytes;
    for (; length; row++, at = 0) {
        size_t part = value->row_bytes - at < length ? value->row_bytes - at : length;
        memcpy(value->rows + row * value->stride + at, from, part);
        from += part, length -= part;
    }
}

static void place(Value *value, const uint8_t *packet, size_t size)
{
    size_t ref_at;
    if (sky_check_header(packet, size, &ref_at) != OK) {
        value->corrupt++;
        return;
    }
    const uint8_t *ref = packet + ref_at;
    size_t op_at = ((packet[0] & 0x10) ? COMMAND_BYTES : TELEMETRY_BYTES) + 1;
    if (packet[op_at] != OP_DATA || !ref_at || memcmp(ref, value->key, KEY_BYTES) ||
        be32(ref + REF_CHUNKS_AT) != value->chunks || be32(ref + REF_VALUE_BYTES_AT) != value->value_bytes ||
        be32(ref + REF_VALUE_CRC_AT) != value->value_crc) {
        value->foreign++;
        return;
    }
    uint64_t number = be32(ref + REF_NUMBER_AT);
    if (number < 1 || number > value->chunks) {
        value->corrupt++;
        return;
    }
    uint64_t index = number - 1, start = index * value->chunk_bytes, left = value->value_bytes - start;
    size_t length = size - ref_at - REF_BYTES;
    if (length != (left < value->chunk_bytes ? left : value->chunk_bytes)) {
        value->foreign++;
    } else if (value->arrived[index]) {
        value->duplicates++;
    } else if (!sky_payload_is_sound(packet, size, ref_at)) {
        value->corrupt++;
    } else {
        uint32_t crc = be32(ref + REF_CRC_AT);
        put(value, start, ref + REF_BYTES, length);
        memcpy(value->crcs + 4 * index, &crc, 4);
        value->arrived[index] = 1;
        value->placed++;
    }
}

void sky_place_all(Value *value, const uint8_t *data, size_t size, size_t segment, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t start = (size_t)i * segment;
        place(value, data + start, size - start < segment ? size - start : segment);
    }
}

static int open_destination(Destination *to, PyObject *out)
{
    *to = (Destination){0};
    if (!PyTuple_Check(out))
        return PyArg_Parse(out, "w*", &to->room);
    return PyArg_ParseTuple(out, "w*w*nnnn:rows", &to->head, &to->room, &to->first, &to->count, &to->row_bytes,
                            &to->stride);
}

static void close_destination(Destination *to)
{
    PyBuffer_Release(&to->head);
    PyBuffer_Release(&to->room);
}

/* Whether the rows are the value's, all within the room, none over another. */
static int rows_fit(const Destination *out, Py_ssize_t value_bytes)
{
    if (out->first < 0 || out->row_bytes < 1 || out->count < 1 || out->stride < out->row_bytes ||
        out->first > out->room.len || out->row_bytes > out->room.len - out->first || out->head.len > value_bytes)
        return 0;
    Py_ssize_t rest = value_bytes - out->head.len, last = out->room.len - out->first - out->row_bytes;
    return last / out->stride >= out->count - 1 && rest % out->row_bytes == 0 && rest / out->row_bytes == out->count;
}

/* Whether the buffers can hold the value whose geometry is given; with an exception if not. */
static int value_fits(Landing *to, Py_ssize_t chunks, Py_ssize_t chunk_bytes, Py_ssize_t value_bytes, unsigned long value_crc)
{
    const Py_buffer *key = &to->key, *arrived = &to->arrived, *crcs = &to->crcs;
    const Destination *out = &to->out;
    Py_ssize_t expected = 0;
    if (chunk_bytes >= 1 && value_bytes >= 0) {
        expected = value_bytes / chunk_bytes + (value_bytes % chunk_bytes != 0);
        expected = expected ? expected : 1;
    }
    if (!expected || chunks != expected || key->len != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd chunks of %zd bytes for %zd, key of %zd: no geometry", chunks, chunk_bytes,
                     value_bytes, key->len);
        return 0;
    }
    int fits = out->head.obj ? rows_fit(out, value_bytes) : out->room.len >= value_bytes;
    if (!fits || arrived->len < chunks || crcs->len / 4 < chunks) {
        PyErr_SetString(PyExc_ValueError, "out, arrived or crcs: too small for the value, or rows that are not its");
        return 0;
    }
    uint64_t whole = value_bytes ? (uint64_t)value_bytes : 1; /* one buffer: one row */
    to->value = (Value){
        .key = key->buf,
        .chunks = (uint64_t)chunks,
        .chunk_bytes = (uint64_t)chunk_bytes,
        .value_bytes = (uint64_t)value_bytes,
        .value_crc = (uint32_t)value_crc,
        .head = out->head.buf,
        .rows = (uint8_t *)out->room.buf + out->first,
        .head_bytes = (uint64_t)out->head.len,
        .row_bytes = out->head.obj ? (uint64_t)out->row_bytes : whole,
        .stride = out->head.obj ? (uint64_t)out->stride : whole,
        .arrived = arrived->buf,
        .crcs = crcs->buf,
    };
    return 1;
}

int sky_open_landing(Landing *to, PyObject *landing)
{
    Py_ssize_t chunks, chunk_bytes, value_bytes;
    unsigned long value_crc;
    PyObject *out;
    if (!PyArg_ParseTuple(landing, "y*nnnkOw*w*:landing", &to->key, &chunks, &chunk_bytes, &value_bytes, &value_crc, &out,
                          &to->arrived, &to->crcs))
        return 0;
    if (open_destination(&to->out, out)) {
        if (value_fits(to, chunks, chunk_bytes, value_bytes, value_crc))
            return 1;
        close_destination(&to->out);
    }
    PyBuffer_Release(&to->key);
    PyBuffer_Release(&to->arrived);
    PyBuffer_Release(&to->crcs);
    return 0;
}

void sky_close_landing(Landing *to)
{
    PyBuffer_Release(&to->key);
    close_destination(&to->out);
    PyBuffer_Release(&to->arrived);
    PyBuffer_Release(&to->crcs);
}

PyObject *sky_py_place_segments(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment, count;
    PyObject *landing, *result = NULL;
    Landing to;
    if (!PyArg_ParseTuple(args, "y*nO!:place_segments", &data, &segment, &PyTuple_Type, &landing))
        return NULL;
    if (sky_open_landing(&to, landing)) {
        Value *value = &to.value;
        if ((count = sky_count_segments(&data, segment)) >= 0) {
            if (data.len < SKY_RELEASE_BYTES) {
                sky_place_all(value, data.buf, (size_t)data.len, (size_t)segment, count);
            } else {
                Py_BEGIN_ALLOW_THREADS
                sky_place_all(value, data.buf, (size_t)data.len, (size_t)segment, count);
                Py_END_ALLOW_THREADS
            }
            result = Py_BuildValue("nnnn", value->placed, value->duplicates, value->corrupt, value->foreign);
        }
        sky_close_landing(&to);
    }
    PyBuffer_Release(&data);
    return result;
}
