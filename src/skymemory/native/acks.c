/* Parses an acknowledgement in one call: the packet that a client gets most while it writes. Twin: twin/sockets.py. */
#include "packet.h"

enum {
    SELECTION_AT = TELEMETRY_BYTES + SKY_BYTES,
    SELECTION_BYTES = KEY_BYTES + 12,
    MOST_BITS = 1 << 16,
    MOST_MOVES = 1 << 30,
    STATUS_AT = TELEMETRY_BYTES + 3,
    ASKER_AT = 12, /* within the SKY header: the ground host */
};

static int all_set(const uint8_t *bits, uint32_t count)
{
    for (uint32_t i = 0; i < count / 8; i++)
        if (bits[i] != 0xFF)
            return 0;
    return !(count % 8) || bits[count / 8] == (1u << count % 8) - 1;
}

static int sane(int32_t moves)
{
    return -MOST_MOVES <= moves && moves <= MOST_MOVES;
}

PyObject *sky_py_open_ack(PyObject *self, PyObject *packet)
{
    Py_buffer data;
    if (PyObject_GetBuffer(packet, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    const uint8_t *p = data.buf, *sky = p + TELEMETRY_BYTES, *selection = p + SELECTION_AT;
    size_t ref;
    PyObject *ack = NULL;
    if (data.len > SELECTION_AT + SELECTION_BYTES && !(p[0] & 0x10) && sky[1] == OP_ACK && !p[STATUS_AT] &&
        sky_check_header(p, (size_t)data.len, &ref) == OK) {
        uint32_t first = be32(selection + KEY_BYTES), stride = be32(selection + KEY_BYTES + 4);
        uint32_t count = be32(selection + KEY_BYTES + 8);
        int32_t slot_moves = (int32_t)be32(sky + SLOT_MOVES_AT), plane_moves = (int32_t)be32(sky + SLOT_MOVES_AT + 4);
        if (first && stride && count && count <= MOST_BITS && first + (uint64_t)stride * (count - 1) <= UINT32_MAX &&
            data.len - SELECTION_AT - SELECTION_BYTES == (count + 7) / 8 && sane(slot_moves) && sane(plane_moves) &&
            all_set(selection + SELECTION_BYTES, count))
            ack = Py_BuildValue("IIIiiIy#III", (unsigned)be32(sky + REQUEST_AT), (unsigned)be32(sky + ASKER_AT),
                                (unsigned)be32(sky + TIMESTAMP_AT), (int)slot_moves, (int)plane_moves,
                                (unsigned)be16(sky + CREDIT_AT), (const char *)selection, (Py_ssize_t)KEY_BYTES,
                                (unsigned)first - 1, (unsigned)stride, (unsigned)count);
    }
    PyBuffer_Release(&data);
    if (!ack && !PyErr_Occurred())
        Py_RETURN_NONE;
    return ack;
}
