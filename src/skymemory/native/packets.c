/* Many small packets per call: built from one prefix, sent each to its own address. Twin: twin/sockets.py. */
#include "udp.h"

#include "packet.h"

enum { PACKETS_A_CALL = 64 };

static PyObject *command_packet(const uint8_t *prefix, PyObject *row, uint32_t sequence)
{
    unsigned long destination, source, request;
    Py_buffer body;
    const size_t head = COMMAND_BYTES + SKY_BYTES;
    if (!row || !PyArg_ParseTuple(row, "kkky*:row", &destination, &source, &request, &body))
        return NULL;
    PyObject *packet = NULL;
    if (body.len > MAX_RUN_BYTES - (Py_ssize_t)head) {
        PyErr_Format(PyExc_ValueError, "a body of %zd bytes: no packet carries it", body.len);
    } else if ((packet = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)head + body.len)) != NULL) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(packet);
        size_t size = head + (size_t)body.len;
        memcpy(out, prefix, head);
        memcpy(out + head, body.buf, (size_t)body.len);
        put16(out + 2, UNSEGMENTED << 14 | (sequence & 0x3FFF));
        put16(out + 4, (uint32_t)size - 7);
        put32(out + COMMAND_BYTES + DESTINATION_AT, (uint32_t)destination);
        put32(out + COMMAND_BYTES + SOURCE_AT, (uint32_t)source);
        put32(out + COMMAND_BYTES + REQUEST_AT, (uint32_t)request);
        put32(out + COMMAND_BYTES + CRC_AT, sky_header_crc(out, COMMAND_BYTES, size));
    }
    PyBuffer_Release(&body);
    return packet;
}

PyObject *sky_py_command_packets(PyObject *self, PyObject *args)
{
    Py_buffer prefix;
    Py_ssize_t sequence;
    PyObject *rows, *kept = NULL, *packets = NULL;
    if (!PyArg_ParseTuple(args, "y*nO!:command_packets", &prefix, &sequence, &PyList_Type, &rows))
        return NULL;
    if (prefix.len != COMMAND_BYTES + SKY_BYTES || sequence < 0) {
        PyErr_Format(PyExc_ValueError, "a prefix of %zd bytes, sequence %zd: expected %d, and 0 or more", prefix.len,
                     sequence, COMMAND_BYTES + SKY_BYTES);
    } else if ((kept = PyList_AsTuple(rows)) != NULL) { /* a number may be an object whose code changes the list */
        packets = PyList_New(0);
        for (Py_ssize_t i = 0; packets && i < PyTuple_Size(kept); i++) {
            PyObject *row = sky_tuple_at(kept, i, "rows: expected tuples (destination, source, request, body)");
            PyObject *packet = command_packet(prefix.buf, row, (uint32_t)sequence + (uint32_t)i);
            if (!packet || PyList_Append(packets, packet) < 0)
                Py_CLEAR(packets);
            Py_XDECREF(packet);
        }
    }
    Py_XDECREF(kept);
    PyBuffer_Release(&prefix);
    return packets;
}

static int address_of(PyObject *row, Py_buffer *packet, Endpoint *to)
{
    const char *host;
    int port;
    if (!row || !PyArg_ParseTuple(row, "y*si:packet", packet, &host, &port))
        return 0;
    if (sky_parse_endpoint(host, port, to)) {
        if (packet->len <= MAX_RUN_BYTES)
            return 1;
        PyErr_Format(PyExc_ValueError, "a segment of %zd bytes: a datagram has at most %d", packet->len, (int)MAX_RUN_BYTES);
    }
    PyBuffer_Release(packet);
    return 0;
}

PyObject *sky_py_send_each(PyObject *self, PyObject *args)
{
    int fd, taken = 0, error = 0;
    Py_ssize_t first;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "iOn:send_each", &fd, &given, &first))
        return NULL;
    if (first < 0)
        return PyErr_Format(PyExc_ValueError, "first packet %zd: expected 0 or more", first);
    PyObject *rows = sky_tuple(given, "packets: expected a sequence");
    if (!rows)
        return NULL;
    struct mmsghdr messages[PACKETS_A_CALL];
    struct iovec parts[PACKETS_A_CALL];
    Endpoint to[PACKETS_A_CALL];
    Py_buffer packets[PACKETS_A_CALL];
    unsigned count = 0;
    for (; count < PACKETS_A_CALL && first + count < PyTuple_Size(rows); count++) {
        PyObject *row = sky_tuple_at(rows, first + count, "packets: expected tuples (packet, host, port)");
        if (!address_of(row, &packets[count], &to[count]))
            break;
        parts[count] = (struct iovec){packets[count].buf, (size_t)packets[count].len};
        messages[count] = (struct mmsghdr){.msg_hdr = {.msg_name = &to[count],
                                                       .msg_namelen = sky_endpoint_bytes(&to[count]),
                                                       .msg_iov = &parts[count], .msg_iovlen = 1}};
    }
    if (count && !PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        taken = sendmmsg(fd, messages, count, MSG_DONTWAIT);
        error = errno;
        Py_END_ALLOW_THREADS
    }
    for (unsigned i = 0; i < count; i++)
        PyBuffer_Release(&packets[i]);
    Py_DECREF(rows);
    if (PyErr_Occurred())
        return NULL;
    if (taken < 0 && !sky_try_later(error)) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong(taken > 0 ? taken : 0);
}
