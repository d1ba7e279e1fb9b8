/* Stores the chunks of a plain SET: verified, stored, acknowledged. Twin: twin/runs.py. */
#include "serve.h"

enum {
    MOST_BITS = 1 << 16,
    SELECTION_BYTES = KEY_BYTES + 12,
    ACK_BYTES = ANSWER_PREFIX_BYTES + SELECTION_BYTES,
    REF_AT = COMMAND_BYTES + SKY_BYTES,
};

/* The messages of one run, and their chunks: number, number + step, …, ``chunks`` of them. */
typedef struct {
    int messages;
    uint32_t number, step, chunks;
    Py_ssize_t bytes;
} Extent;

/* Whether the numbers of a run continue in equal steps; extends the extent if so. */
static int in_steps(const uint8_t *data, size_t size, size_t segment, size_t mac, Extent *extent)
{
    Extent next = *extent;
    for (size_t start = 0; start < size; start += segment) {
        uint32_t number = be32(data + start + REF_AT + REF_NUMBER_AT);
        if (!next.chunks)
            next.number = number, next.step = 1;
        else if (next.chunks == 1)
            next.step = number - next.number;
        else if (number != next.number + next.step * next.chunks)
            return 0;
        size_t length = size - start < segment ? size - start : segment;
        next.chunks++, next.bytes += (Py_ssize_t)(length - REF_AT - mac);
    }
    if (next.chunks > MOST_BITS || (uint64_t)next.step * (next.chunks - 1) + next.number > UINT32_MAX)
        return 0;
    next.messages++;
    *extent = next;
    return 1;
}

static Extent measure(const Service *service, int first)
{
    const Endpoint *sender = service->messages[first].from;
    uint8_t began[RUN_START_BYTES];
    uint32_t after = 0;
    size_t mac = service->first ? MAC_BYTES : 0;
    Extent extent = {0};
    for (int i = first; i < service->count; i++) {
        size_t size, segment;
        const uint8_t *data = sky_message(service, i, &size, &segment);
        const Endpoint *from = service->messages[i].from;
        if (size < sizeof began ||
            (sender && (from->v4.sin_port != sender->v4.sin_port || !sky_same_host(from, sender))))
            break;
        if (i == first)
            memcpy(began, data, sizeof began);
        if (!sky_continues_run(data, size, segment, began, mac, &after) || !in_steps(data, size, segment, mac, &extent))
            break;
    }
    return extent;
}

/* The share of ``key``, a new reference; created if there is none. */
static PyObject *share_of(PyObject *shares, PyObject *key)
{
    PyObject *share = sky_dict_get(shares, key);
    if (!share && !PyErr_Occurred() && (share = PyDict_New()) != NULL && PyObject_SetItem(shares, key, share) < 0)
        Py_CLEAR(share); /* PyObject_SetItem, since the order of an OrderedDict needs its own method */
    if (share && !PyDict_Check(share))
        Py_CLEAR(share);
    return share;
}

/* Count a chunk that another replaces; 0 with an exception. */
static int count_replaced(PyObject *old, Taken *taken)
{
    if (!PyTuple_Check(old) || PyTuple_Size(old) != 2)
        return 1;
    Py_ssize_t its_bytes = PyObject_Size(PyTuple_GetItem(old, 1));
    if (its_bytes < 0 || (its_bytes = sky_sum(its_bytes, REF_BYTES)) < 0 ||
        (its_bytes = sky_sum(taken->replaced_bytes, its_bytes)) < 0)
        return 0;
    taken->replaced++, taken->replaced_bytes = its_bytes;
    return 1;
}

static int store_chunk(PyObject *share, const uint8_t *packet, size_t size, size_t mac, Taken *taken)
{
    PyObject *index = PyLong_FromUnsignedLong(be32(packet + REF_AT + REF_NUMBER_AT) - 1);
    PyObject *old = index ? sky_dict_get(share, index) : NULL;
    PyObject *chunk = index && !PyErr_Occurred() ? sky_chunk_of(packet, size, mac) : NULL;
    int stored = chunk && (!old || count_replaced(old, taken)) && PyDict_SetItem(share, index, chunk) == 0;
    Py_XDECREF(chunk);
    Py_XDECREF(old);
    Py_XDECREF(index);
    taken->chunks++, taken->added_bytes += (Py_ssize_t)(size - REF_AT - mac);
    return stored;
}

static PyObject *acknowledgement(Service *service, const uint8_t *request, const Extent *extent)
{
    uint32_t count = extent->chunks, bitmap = (count + 7) / 8, size = ACK_BYTES + bitmap;
    int found = service->signer ? sky_find_mac_key(&service->check, (long)service->signer) : 1;
    if (!found)
        PyErr_Format(PyExc_KeyError, "no key %u to sign by", service->signer);
    PyObject *packet = found == 1 ? PyByteArray_FromStringAndSize(NULL, size + (service->signer ? MAC_BYTES : 0)) : NULL;
    if (!packet)
        return NULL;
    uint8_t *row = (uint8_t *)PyByteArray_AsString(packet), *body = row + ANSWER_PREFIX_BYTES;
    sky_write_prefix(row, OP_ACK, request, &service->terms);
    put16(row + 2, UNSEGMENTED << 14 | (service->terms.sequence & 0x3FFF));
    put16(row + 4, size - 7);
    memcpy(body, request + REF_AT, KEY_BYTES);
    put32(body + KEY_BYTES, extent->number);
    put32(body + KEY_BYTES + 4, extent->step);
    put32(body + KEY_BYTES + 8, count);
    memset(body + SELECTION_BYTES, 0xFF, bitmap);
    if (count % 8)
        body[SELECTION_BYTES + bitmap - 1] = (uint8_t)((1u << count % 8) - 1);
    if (service->signer)
        sky_sign(row, size, TELEMETRY_BYTES, &service->check.mac, service->signer, 0, (Payload){NULL, 0});
    else
        put32(row + TELEMETRY_BYTES + CRC_AT, sky_header_crc(row, TELEMETRY_BYTES, size));
    return packet;
}

int sky_is_first(const Service *service, const uint8_t *packet, long long sent_us, PyObject *sequences)
{
    PyObject *first = sequences ? PyObject_CallFunction(service->first, "y#LN", (const char *)packet,
                                                        (Py_ssize_t)(COMMAND_BYTES + SKY_BYTES), sent_us, sequences)
                                : NULL;
    int truth = first ? PyObject_IsTrue(first) : -1;
    Py_XDECREF(first);
    return truth;
}

int sky_is_admitted(Service *service, int first, int messages)
{
    size_t size, segment;
    const uint8_t *request = sky_message(service, first, &size, &segment);
    PyObject *sequences = PyList_New(0);
    long long sent_us = 0, its_us;
    int right = sequences ? 1 : -1;
    for (int i = first; right == 1 && i < first + messages; i++) {
        const uint8_t *data = sky_message(service, i, &size, &segment);
        for (size_t start = 0; right == 1 && start < size; start += segment) {
            const uint8_t *packet = data + start;
            size_t length = size - start < segment ? size - start : segment;
            if (memcmp(packet + COMMAND_BYTES + KEY_ID_AT, request + COMMAND_BYTES + KEY_ID_AT, 2)) {
                right = 0;
                break;
            }
            right = sky_check_mac(&service->check, packet, length, COMMAND_BYTES, &its_us);
            if (right != 1)
                break;
            PyObject *sequence = PyLong_FromUnsignedLong(be16(packet + 2) & 0x3FFF);
            if (!sequence)
                right = -1;
            else if (PyList_Size(sequences) && its_us != sent_us)
                right = 0;
            else
                right = PyList_Append(sequences, sequence) < 0 ? -1 : 1;
            Py_XDECREF(sequence);
            sent_us = its_us;
        }
    }
    if (right == 1)
        return sky_is_first(service, request, sent_us, sequences);
    Py_XDECREF(sequences);
    return right;
}

int sky_take_sets(Service *service, int first, Taken *taken, PyObject **ack)
{
    size_t size, segment;
    const uint8_t *request = sky_message(service, first, &size, &segment);
    if (size < RUN_START_BYTES)
        return 0;
    PyObject *tag = PyBytes_FromStringAndSize((const char *)request + REF_AT + REF_TAG_AT, TAG_BYTES);
    int settled = tag ? PySet_Contains(service->settled, tag) : -1;
    Py_XDECREF(tag);
    if (settled != 1)
        return settled;
    Extent extent = measure(service, first);
    if (!extent.messages || extent.bytes > service->room_bytes)
        return 0;
    int admitted = service->first ? sky_is_admitted(service, first, extent.messages) : 1;
    if (admitted != 1)
        return admitted;
    size_t mac = service->first ? MAC_BYTES : 0;
    PyObject *key = PyBytes_FromStringAndSize((const char *)request + REF_AT, KEY_BYTES);
    PyObject *share = key ? share_of(service->shares, key) : NULL;
    Py_XDECREF(key);
    if (!share)
        return PyErr_Occurred() ? -1 : 0;
    int stored = 1;
    for (int i = first; stored && i < first + extent.messages; i++) {
        const uint8_t *data = sky_message(service, i, &size, &segment);
        for (size_t start = 0; stored && start < size; start += segment)
            stored = store_chunk(share, data + start, size - start < segment ? size - start : segment, mac, taken);
    }
    Py_DECREF(share);
    if (!stored)
        return -1;
    taken->added_bytes -= taken->replaced_bytes; /* neither is below 0 */
    if (__builtin_sub_overflow(service->room_bytes, taken->added_bytes, &service->room_bytes))
        service->room_bytes = PY_SSIZE_T_MAX;
    *ack = acknowledgement(service, request, &extent);
    return *ack ? extent.messages : -1;
}
