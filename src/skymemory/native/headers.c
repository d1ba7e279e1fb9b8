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
    if (start > size) /* another thread has written to the packet since its headers were checked */
        return 0;
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
        Py_ssize_t width = sky_sum(prefix.len, REF_BYTES);
        headers = width < 0 ? NULL : sky_new_bytearray(refs.len / REF_BYTES, width);
        if (headers && !fill_headers((uint8_t *)PyByteArray_AsString(headers), &prefix, &refs, (uint32_t)sequence,
                                     (size_t)sky)) {
            PyErr_SetString(PyExc_ValueError, "a chunk that no packet carries");
            Py_CLEAR(headers);
        }
    }
    PyBuffer_Release(&prefix);
    PyBuffer_Release(&refs);
    return headers;
}

/* Row i: the reference of chunk i, whose CRC is the i-th of ``crcs``. */
static void fill_refs(uint8_t *rows, const uint8_t *key, const uint8_t *crcs, uint32_t chunks, size_t chunk_bytes,
                      size_t size, uint32_t value_crc, uint32_t servers, uint32_t strategy, const int32_t *moves)
{
    for (uint32_t i = 0; i < chunks; i++, rows += REF_BYTES) {
        size_t left = size - i * chunk_bytes;
        uint32_t crc;
        memcpy(&crc, crcs + 4 * (size_t)i, 4);
        memcpy(rows, key, KEY_BYTES);
        put32(rows + REF_NUMBER_AT, i + 1);
        put32(rows + REF_CHUNKS_AT, chunks);
        put32(rows + REF_LENGTH_AT, (uint32_t)(left < chunk_bytes ? left : chunk_bytes));
        put32(rows + REF_CRC_AT, crc);
        put32(rows + REF_VALUE_BYTES_AT, (uint32_t)size);
        put32(rows + REF_VALUE_CRC_AT, value_crc);
        put16(rows + REF_TAG_AT, servers);
        put16(rows + REF_TAG_AT + 2, i % servers + 1);
        rows[REF_TAG_AT + 4] = (uint8_t)strategy;
        memset(rows + REF_TAG_AT + 5, 0, 3);
        put32(rows + REF_TAG_AT + 8, (uint32_t)moves[0]);
        put32(rows + REF_TAG_AT + 12, (uint32_t)moves[1]);
    }
}

PyObject *sky_py_value_refs(PyObject *self, PyObject *args)
{
    Py_buffer value, key;
    Py_ssize_t chunk, servers, strategy;
    int moves[2];
    if (!PyArg_ParseTuple(args, "y*y*nnn(ii):value_refs", &value, &key, &chunk, &servers, &strategy, &moves[0], &moves[1]))
        return NULL;
    PyObject *refs = NULL;
    uint32_t value_crc = 0;
    if (key.len != KEY_BYTES || chunk < 1 || servers < 1 || servers > 0xFFFF || strategy < 0 || strategy > 0xFF ||
        (uint64_t)value.len > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%zd bytes in chunks of %zd under a key of %zd, on %zd servers by strategy %zd: "
                     "a reference has no room for it", value.len, chunk, key.len, servers, strategy);
    } else {
        size_t size = (size_t)value.len, chunks = size ? size / (size_t)chunk + (size % (size_t)chunk != 0) : 1;
        uint8_t *crcs = PyMem_Calloc(chunks, 4);
        refs = crcs ? sky_new_bytearray((Py_ssize_t)chunks, REF_BYTES) : PyErr_NoMemory();
        if (refs) {
            uint8_t *rows = (uint8_t *)PyByteArray_AsString(refs);
            int32_t its_moves[2] = {moves[0], moves[1]};
            Py_BEGIN_ALLOW_THREADS
            for (size_t i = 0; size && i < chunks; i++) {
                size_t at = i * (size_t)chunk, left = size - at;
                uint32_t crc = sky_crc32(0, (uint8_t *)value.buf + at, left < (size_t)chunk ? left : (size_t)chunk);
                memcpy(crcs + 4 * i, &crc, 4);
            }
            value_crc = size ? sky_crc32_join(crcs, chunks, (size_t)chunk, size) : 0;
            fill_refs(rows, key.buf, crcs, (uint32_t)chunks, (size_t)chunk, size, value_crc, (uint32_t)servers,
                      (uint32_t)strategy, its_moves);
            Py_END_ALLOW_THREADS
        }
        PyMem_Free(crcs);
    }
    PyBuffer_Release(&key);
    PyBuffer_Release(&value);
    return refs ? Py_BuildValue("NI", refs, (unsigned)value_crc) : NULL;
}
