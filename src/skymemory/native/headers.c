/* Headers: their checksum, checked, sealed, and made for whole bursts. Twins: twin/segments.py, twin/runs.py. */
#include "packet.h"

/* CRC of packet[0:end] without the CRC field, with the forwarders' four bytes as zero. */
uint32_t sky_header_crc(const uint8_t *packet, size_t sky, size_t end)
{
    uint8_t copy[LONGEST_BULK_HEADER];
    size_t head = sky + CRC_AT, rest = end - sky - SKY_BYTES;
    if (sky > TELEMETRY_BYTES) { /* only seal_headers has such offsets */
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

static size_t mac_bytes(const uint8_t *sky_header)
{
    return sky_header[FLAGS_AT] & AUTHENTICATED ? MAC_BYTES : 0;
}

int sky_check_packet(const uint8_t *packet, size_t size, size_t *ref)
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
    size_t mac = mac_bytes(packet + sky), end = carries ? prefix + REF_BYTES + mac : size;
    if (end > size || end < prefix + mac)
        return MALFORMED;
    if (sky_header_crc(packet, sky, end) != be32(packet + sky + CRC_AT))
        return HEADER_CRC;
    if (!carries)
        return OK;
    if (be32(packet + prefix + REF_LENGTH_AT) != size - end)
        return MALFORMED;
    *ref = prefix;
    return OK;
}

int sky_check_header(const uint8_t *packet, size_t size, size_t *ref)
{
    int code = sky_check_packet(packet, size, ref);
    if (code != OK || !mac_bytes(packet + (packet[0] & 0x10 ? COMMAND_BYTES : TELEMETRY_BYTES)))
        return code;
    *ref = 0;
    return MALFORMED;
}

int sky_payload_is_sound(const uint8_t *packet, size_t size, size_t ref)
{
    size_t start = ref + REF_BYTES + mac_bytes(packet + ref - SKY_BYTES);
    return sky_crc32(0, packet + start, size - start) == be32(packet + ref + REF_CRC_AT);
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
            uint32_t crc = sky_header_crc(rows + at, (size_t)sky, (size_t)width);
            put32(rows + at + sky + CRC_AT, crc);
        }
    } else {
        PyErr_Format(PyExc_ValueError, "%zd bytes of headers in rows of %zd, SKY header at %zd", headers.len, width, sky);
    }
    PyBuffer_Release(&headers);
    if (!sound)
        return NULL;
    Py_RETURN_NONE;
}

/* Row i: the prefix with its own sequence count and length, the i-th reference, and the CRC over both. */
static int fill_headers(uint8_t *rows, const Py_buffer *prefix, const Py_buffer *refs, uint32_t sequence, size_t sky)
{
    size_t head = (size_t)prefix->len, width = head + REF_BYTES;
    const uint8_t *ref = refs->buf, *end = ref + refs->len;
    for (uint8_t *row = rows; ref < end; ref += REF_BYTES, row += width, sequence++) {
        uint64_t length = (uint64_t)be32(ref + REF_LENGTH_AT) + width - 7;
        if (length > 0xFFFF)
            return 0;
        memcpy(row, prefix->buf, head);
        memcpy(row + head, ref, REF_BYTES);
        put16(row + 2, UNSEGMENTED << 14 | (sequence & 0x3FFF));
        put16(row + 4, (uint32_t)length);
        put32(row + sky + CRC_AT, sky_header_crc(row, sky, width));
    }
    return 1;
}

PyObject *sky_py_bulk_headers(PyObject *self, PyObject *args)
{
    Py_buffer prefix, refs;
    Py_ssize_t sequence, sky;
    if (!PyArg_ParseTuple(args, "y*y*nn:bulk_headers", &prefix, &refs, &sequence, &sky))
        return NULL;
    PyObject *headers = NULL;
    if (sky < 6 || prefix.len < SKY_BYTES || sky > prefix.len - SKY_BYTES || refs.len % REF_BYTES || sequence < 0) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of references after a prefix of %zd, SKY header at %zd, sequence %zd",
                     refs.len, prefix.len, sky, sequence);
    } else {
        Py_ssize_t size = refs.len / REF_BYTES * (prefix.len + REF_BYTES);
        headers = PyByteArray_FromStringAndSize(NULL, size);
        if (headers && !fill_headers((uint8_t *)PyByteArray_AS_STRING(headers), &prefix, &refs, (uint32_t)sequence,
                                     (size_t)sky)) {
            PyErr_SetString(PyExc_ValueError, "a chunk that no packet carries");
            Py_CLEAR(headers);
        }
    }
    PyBuffer_Release(&prefix);
    PyBuffer_Release(&refs);
    return headers;
}
