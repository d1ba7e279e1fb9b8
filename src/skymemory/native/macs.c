/* MACs of whole runs of packets: created, checked, removed. Twin and contract: twin/segments.py. */
#include "sha.h"

enum { MOST_SIGNED_CHUNK_BYTES = LONGEST_PACKET - LONGEST_BULK_HEADER - MAC_BYTES };

static int has_library(void)
{
    if (!sky_sha_ready())
        PyErr_SetString(PyExc_RuntimeError, "no libcrypto: the twin makes and checks MACs");
    return sky_sha_ready();
}

static int is_sky(Py_ssize_t sky)
{
    if (sky == COMMAND_BYTES || sky == TELEMETRY_BYTES)
        return 1;
    PyErr_Format(PyExc_ValueError, "SKY header at %zd: expected %d or %d", sky, COMMAND_BYTES, TELEMETRY_BYTES);
    return 0;
}

size_t sky_mac_end(const uint8_t *packet, size_t size, size_t sky)
{
    size_t prefix = sky + SKY_BYTES;
    if (size < prefix + MAC_BYTES || !(packet[0] & 0x10) != (sky == TELEMETRY_BYTES) ||
        !(packet[sky + FLAGS_AT] & AUTHENTICATED))
        return 0;
    if (!sky_carries_payload(packet, sky))
        return size;
    size_t end = prefix + REF_BYTES + MAC_BYTES;
    return end <= size && size - end <= MOST_SIGNED_CHUNK_BYTES ? end : 0;
}

int sky_find_mac_key(MacCheck *check, long key_id)
{
    if (key_id && key_id == check->key_id)
        return 1;
    PyObject *number = PyLong_FromLong(key_id);
    PyObject *key = number ? sky_dict_get(check->keys, number) : NULL;
    Py_XDECREF(number);
    if (!key)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyBytes_Check(key) ||
        !sky_mac_key(&check->mac, (const uint8_t *)PyBytes_AsString(key), (size_t)PyBytes_Size(key))) {
        Py_DECREF(key);
        PyErr_Format(PyExc_TypeError, "keys: expected %d or %d bytes by number", MAC_KEY_BYTES,
                     MAC_KEY_BYTES + NH_KEY_BYTES);
        return -1;
    }
    Py_DECREF(key);
    check->key_id = key_id;
    return 1;
}

int sky_check_mac(MacCheck *check, const uint8_t *packet, size_t size, size_t sky, long long *sent_us)
{
    size_t end = sky_mac_end(packet, size, sky), ref;
    *sent_us = 0;
    /* Here, because a packet whose MAC is taken off gets another length and another CRC. */
    if (!end || sky_check_packet(packet, size, &ref) != OK)
        return 0;
    if (sky == COMMAND_BYTES) { /* the low half of the time is sent; the high half is the one nearest to now */
        uint32_t low = be32(packet + sky + TIMESTAMP_AT) - (uint32_t)(unsigned long long)check->now_us;
        long long ahead_us = (long long)low - (low >= 1u << 31 ? 1LL << 32 : 0);
        if ((ahead_us < 0 ? -ahead_us : ahead_us) > check->skew_us)
            return 0;
        if (__builtin_add_overflow(check->now_us, ahead_us, sent_us)) { /* a clock at the limit of the type */
            *sent_us = 0;
            return 0;
        }
    }
    int known = sky_find_mac_key(check, (long)be16(packet + sky + KEY_ID_AT));
    if (known != 1)
        return known;
    uint8_t expected[MAC_BYTES], wrong = 0;
    uint32_t time_high = (uint32_t)((unsigned long long)*sent_us >> 32);
    Payload payload = {packet + end, size - end};
    sky_mac_of(&check->mac, time_high, packet, sky, end - MAC_BYTES, payload, expected);
    for (size_t i = 0; i < MAC_BYTES; i++) /* in constant time */
        wrong |= expected[i] ^ packet[end - MAC_BYTES + i];
    return !wrong;
}

void sky_strip_mac(const uint8_t *packet, size_t size, size_t sky, size_t end, uint8_t *out)
{
    size_t head = end - MAC_BYTES;
    memcpy(out, packet, head);
    memcpy(out + head, packet + end, size - end);
    put16(out + 4, (uint32_t)(size - MAC_BYTES - 7));
    out[sky + FLAGS_AT] &= (uint8_t)~AUTHENTICATED;
    put16(out + sky + KEY_ID_AT, 0);
    put32(out + sky + CRC_AT, sky_header_crc(out, sky, head));
}

int sky_sign(uint8_t *row, size_t width, size_t sky, const MacKey *mac, unsigned key_id, unsigned long long time_us,
             Payload payload)
{
    uint32_t length = be16(row + 4) + MAC_BYTES;
    if (length + 7 > LONGEST_PACKET)
        return 0;
    put16(row + 4, length);
    row[sky + FLAGS_AT] |= AUTHENTICATED;
    put16(row + sky + KEY_ID_AT, key_id);
    if (sky == COMMAND_BYTES)
        put32(row + sky + TIMESTAMP_AT, (uint32_t)time_us);
    sky_mac_of(mac, (uint32_t)(time_us >> 32), row, sky, width, payload, row + width);
    put32(row + sky + CRC_AT, sky_header_crc(row, sky, width + MAC_BYTES));
    return 1;
}

/* Sign a row, whose payload is in ``payloads`` (a tuple, or NULL); 0 with an exception. */
static int sign_row(uint8_t *row, size_t width, size_t sky, const MacKey *mac, unsigned key_id,
                    unsigned long long time_us, PyObject *payloads, Py_ssize_t number)
{
    Py_buffer held = {0};
    int covers = sky_mac_covers_payload(mac, row, sky);
    if (covers && !payloads) {
        PyErr_SetString(PyExc_ValueError, "the MAC covers payloads: expected them");
        return 0;
    }
    if (covers && PyObject_GetBuffer(PyTuple_GetItem(payloads, number), &held, PyBUF_SIMPLE) < 0)
        return 0;
    Payload payload = {held.buf, (size_t)held.len};
    int signs = held.len < LONGEST_PACKET && sky_sign(row, width, sky, mac, key_id, time_us, payload);
    if (covers)
        PyBuffer_Release(&held);
    if (!signs)
        PyErr_SetString(PyExc_ValueError, "a packet with no room for a MAC");
    return signs;
}

PyObject *sky_py_sign_packets(PyObject *self, PyObject *args)
{
    Py_buffer headers, key;
    Py_ssize_t width, sky, signed_width, rows;
    unsigned key_id;
    long long time_us;
    PyObject *payloads = Py_None, *kept = NULL, *result = NULL;
    MacKey mac;
    if (!PyArg_ParseTuple(args, "y*nny*IL|O:sign_packets", &headers, &width, &sky, &key, &key_id, &time_us, &payloads))
        return NULL;
    if (!has_library() || !is_sky(sky)) {
    } else if (width < sky + SKY_BYTES || headers.len % width || !key_id || key_id > 0xFFFF ||
               !sky_mac_key(&mac, key.buf, (size_t)key.len)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of headers in rows of %zd, key %u of %zd bytes", headers.len, width,
                     key_id, key.len);
    } else if (payloads != Py_None && (kept = PySequence_Tuple(payloads)) == NULL) {
    } else if (rows = headers.len / width, kept && PyTuple_Size(kept) != rows) {
        PyErr_Format(PyExc_ValueError, "%zd payloads for %zd rows", PyTuple_Size(kept), rows);
    } else if ((signed_width = sky_sum(width, MAC_BYTES)) >= 0 &&
               (result = sky_new_bytearray(rows, signed_width)) != NULL) {
        uint8_t *row = (uint8_t *)PyByteArray_AsString(result);
        const uint8_t *plain = headers.buf;
        for (Py_ssize_t number = 0; number < rows; number++, plain += width, row += signed_width) {
            memcpy(row, plain, (size_t)width);
            if (!sign_row(row, (size_t)width, (size_t)sky, &mac, key_id, (unsigned long long)time_us, kept, number)) {
                Py_CLEAR(result);
                break;
            }
        }
    }
    Py_XDECREF(kept);
    PyBuffer_Release(&headers);
    PyBuffer_Release(&key);
    return result;
}

PyObject *sky_py_check_macs(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t segment, sky;
    MacCheck check = {0};
    if (!PyArg_ParseTuple(args, "y*nnO!LL:check_macs", &data, &segment, &sky, &PyDict_Type, &check.keys, &check.now_us,
                          &check.skew_us))
        return NULL;
    Py_ssize_t count = sky_count_segments(&data, segment);
    PyObject *found = count < 0 || !has_library() || !is_sky(sky) ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        Py_ssize_t at = i * segment;
        long long sent_us;
        size_t size = (size_t)(data.len - at < segment ? data.len - at : segment);
        int right = sky_check_mac(&check, (const uint8_t *)data.buf + at, size, (size_t)sky, &sent_us);
        PyObject *item = right < 0 ? NULL : right ? PyLong_FromLongLong(sent_us) : Py_NewRef(Py_None);
        if (item)
            PyList_SetItem(found, i, item);
        else
            Py_CLEAR(found);
    }
    PyBuffer_Release(&data);
    return found;
}

PyObject *sky_py_strip_macs(PyObject *self, PyObject *args)
{
    Py_buffer data, keep;
    Py_ssize_t segment, sky;
    if (!PyArg_ParseTuple(args, "y*nny*:strip_macs", &data, &segment, &sky, &keep))
        return NULL;
    PyObject *plain = NULL;
    Py_ssize_t count = sky_count_segments(&data, segment), written = 0;
    if (count < 0 || !is_sky(sky)) {
    } else if (count != keep.len) {
        PyErr_Format(PyExc_ValueError, "%zd packets, %zd of which are to be kept or not", count, keep.len);
    } else {
        plain = PyByteArray_FromStringAndSize(NULL, data.len);
    }
    for (Py_ssize_t i = 0; plain && i < count; i++) {
        const uint8_t *packet = (const uint8_t *)data.buf + i * segment;
        size_t size = (size_t)(data.len - i * segment < segment ? data.len - i * segment : segment), end;
        if (!((const uint8_t *)keep.buf)[i])
            continue;
        if ((end = sky_mac_end(packet, size, (size_t)sky)) == 0) {
            PyErr_SetString(PyExc_ValueError, "a packet to keep without a MAC");
            Py_CLEAR(plain);
            break;
        }
        sky_strip_mac(packet, size, (size_t)sky, end, (uint8_t *)PyByteArray_AsString(plain) + written);
        written += (Py_ssize_t)size - MAC_BYTES;
    }
    if (plain && PyByteArray_Resize(plain, written) < 0)
        Py_CLEAR(plain);
    PyBuffer_Release(&data);
    PyBuffer_Release(&keep);
    return plain;
}
