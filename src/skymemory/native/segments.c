/* The loops over packets: seal headers, verify runs of segments, place payloads. Twin and contract: twin_segments.py.
 * Every byte of a packet is untrusted; each offset used is checked against the packet's own end first. */
#include "fast.h"

#include <string.h>

enum { OK, MALFORMED, HEADER_CRC, PAYLOAD_CRC };

enum {
    PRIMARY_WORD = 0x0800 | 0x0C0, /* version 0, secondary header, our APID; the type bit is masked out */
    VERSION = 1,
    UNSEGMENTED = 3,
    COMMAND_BYTES = 8,
    TELEMETRY_BYTES = 16,
    SKY_BYTES = 44,
    REF_BYTES = 72,
    MUTABLE_AT = 20,
    MUTABLE_END = 24,
    CRC_AT = 40,
    OP_SET = 0x01,
    OP_MIGRATE = 0x05,
    OP_DATA = 0x42,
    KEY_BYTES = 32,
    REF_NUMBER_AT = 32,
    REF_CHUNKS_AT = 36,
    REF_LENGTH_AT = 40,
    REF_CRC_AT = 44,
    REF_VALUE_BYTES_AT = 48,
    REF_VALUE_CRC_AT = 52,
    LONGEST_BULK_HEADER = TELEMETRY_BYTES + SKY_BYTES + REF_BYTES,
};

static uint32_t be16(const uint8_t *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

static uint32_t be32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* CRC of packet[0:end] without the CRC field, the forwarders' four bytes taken as zero. */
static uint32_t header_crc(const uint8_t *packet, size_t sky, size_t end)
{
    uint8_t copy[LONGEST_BULK_HEADER];
    size_t head = sky + CRC_AT, rest = end - sky - SKY_BYTES;
    if (sky > TELEMETRY_BYTES) { /* only seal_headers can ask for such an offset */
        const uint8_t zeros[MUTABLE_END - MUTABLE_AT] = {0};
        uint32_t crc = sky_crc32(0, packet, sky + MUTABLE_AT);
        crc = sky_crc32(crc, zeros, sizeof zeros);
        crc = sky_crc32(crc, packet + sky + MUTABLE_END, CRC_AT - MUTABLE_END);
        return sky_crc32(crc, packet + sky + SKY_BYTES, rest);
    }
    memcpy(copy, packet, head);
    memset(copy + sky + MUTABLE_AT, 0, MUTABLE_END - MUTABLE_AT);
    if (rest > REF_BYTES)
        return sky_crc32(sky_crc32(0, copy, head), packet + sky + SKY_BYTES, rest);
    memcpy(copy + head, packet + sky + SKY_BYTES, rest);
    return sky_crc32(0, copy, head + rest);
}

/* The reason code of a packet's headers; *ref is where its chunk reference stands, 0 where it carries no payload. */
static int check_header(const uint8_t *packet, size_t size, size_t *ref)
{
    *ref = 0;
    if (size < COMMAND_BYTES)
        return MALFORMED;
    uint32_t word = be16(packet);
    if ((word & 0xEFFF) != PRIMARY_WORD || be16(packet + 2) >> 14 != UNSEGMENTED || be16(packet + 4) + 7 != size)
        return MALFORMED;
    size_t sky = (word & 0x1000) ? COMMAND_BYTES : TELEMETRY_BYTES, prefix = sky + SKY_BYTES;
    if (size < prefix || packet[sky] != VERSION)
        return MALFORMED;
    uint8_t op = packet[sky + 1];
    int carries = op == OP_SET || op == OP_MIGRATE || op == OP_DATA;
    size_t end = carries ? prefix + REF_BYTES : size;
    if (end > size)
        return MALFORMED;
    if (header_crc(packet, sky, end) != be32(packet + sky + CRC_AT))
        return HEADER_CRC;
    if (!carries)
        return OK;
    if (be32(packet + prefix + REF_LENGTH_AT) != size - end)
        return MALFORMED;
    *ref = prefix;
    return OK;
}

static int payload_is_sound(const uint8_t *packet, size_t size, size_t ref)
{
    const uint8_t *payload = packet + ref + REF_BYTES;
    return sky_crc32(0, payload, size - ref - REF_BYTES) == be32(packet + ref + REF_CRC_AT);
}

PyObject *sky_py_seal_headers(PyObject *self, PyObject *args)
{
    Py_buffer headers;
    Py_ssize_t width, sky;
    if (!PyArg_ParseTuple(args, "w*nn:seal_headers", &headers, &width, &sky))
        return NULL;
    int sound = sky >= 0 && width >= SKY_BYTES && sky <= width - SKY_BYTES && headers.len % width == 0;
    if (sound) {
        uint8_t *rows = headers.buf;
        for (Py_ssize_t at = 0; at < headers.len; at += width) {
            uint32_t crc = header_crc(rows + at, (size_t)sky, (size_t)width);
            uint8_t *field = rows + at + sky + CRC_AT;
            field[0] = (uint8_t)(crc >> 24), field[1] = (uint8_t)(crc >> 16);
            field[2] = (uint8_t)(crc >> 8), field[3] = (uint8_t)crc;
        }
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes of headers in rows of %zd, SKY header at %zd", headers.len, width, sky);
    }
    PyBuffer_Release(&headers);
    if (!sound)
        return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t count_segments(const Py_buffer *data, Py_ssize_t segment)
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
        int code = check_header(data + start, length, &ref);
        if (ref && !payload_is_sound(data + start, length, ref))
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
    Py_ssize_t count = count_segments(&data, segment);
    if (count >= 0 && (codes = PyBytes_FromStringAndSize(NULL, count)) != NULL) {
        uint8_t *out = (uint8_t *)PyBytes_AS_STRING(codes);
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

/* The value whose chunks are awaited, and the tally of what came. */
typedef struct {
    const uint8_t *key;
    uint64_t chunks, chunk_bytes, value_bytes;
    uint32_t value_crc;
    uint8_t *out, *arrived, *crcs;
    Py_ssize_t placed, duplicates, corrupt, foreign;
} Value;

static void place(Value *value, const uint8_t *packet, size_t size)
{
    size_t ref_at;
    if (check_header(packet, size, &ref_at) != OK) {
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
    } else if (!payload_is_sound(packet, size, ref_at)) {
        value->corrupt++;
    } else {
        uint32_t crc = be32(ref + REF_CRC_AT);
        memcpy(value->out + start, ref + REF_BYTES, length);
        memcpy(value->crcs + 4 * index, &crc, 4);
        value->arrived[index] = 1;
        value->placed++;
    }
}

static void place_all(Value *value, const uint8_t *data, size_t size, size_t segment, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t start = (size_t)i * segment;
        place(value, data + start, size - start < segment ? size - start : segment);
    }
}

PyObject *sky_py_place_segments(PyObject *self, PyObject *args)
{
    Py_buffer data, key, out, arrived, crcs;
    Py_ssize_t segment, chunks, chunk_bytes, value_bytes, count;
    unsigned long value_crc;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*ny*nnnkw*w*w*:place_segments", &data, &segment, &key, &chunks, &chunk_bytes,
                          &value_bytes, &value_crc, &out, &arrived, &crcs))
        return NULL;
    Py_ssize_t expected = 0;
    if (chunk_bytes >= 1 && value_bytes >= 0) {
        expected = value_bytes / chunk_bytes + (value_bytes % chunk_bytes != 0);
        expected = expected ? expected : 1;
    }
    if (!expected || chunks != expected || key.len != KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd chunks of %zd bytes for %zd, key of %zd: no geometry", chunks, chunk_bytes,
                     value_bytes, key.len);
    } else if (out.len < value_bytes || arrived.len < chunks || crcs.len / 4 < chunks) {
        PyErr_SetString(PyExc_ValueError, "out, arrived or crcs: too small for the value");
    } else if ((count = count_segments(&data, segment)) >= 0) {
        Value value = {
            .key = key.buf,
            .chunks = (uint64_t)chunks,
            .chunk_bytes = (uint64_t)chunk_bytes,
            .value_bytes = (uint64_t)value_bytes,
            .value_crc = (uint32_t)value_crc,
            .out = out.buf,
            .arrived = arrived.buf,
            .crcs = crcs.buf,
        };
        if (data.len < SKY_RELEASE_BYTES) {
            place_all(&value, data.buf, (size_t)data.len, (size_t)segment, count);
        } else {
            Py_BEGIN_ALLOW_THREADS
            place_all(&value, data.buf, (size_t)data.len, (size_t)segment, count);
            Py_END_ALLOW_THREADS
        }
        result = Py_BuildValue("nnnn", value.placed, value.duplicates, value.corrupt, value.foreign);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&key);
    PyBuffer_Release(&out);
    PyBuffer_Release(&arrived);
    PyBuffer_Release(&crcs);
    return result;
}
