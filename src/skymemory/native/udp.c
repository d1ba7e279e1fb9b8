/* Many datagrams a system call, with segmentation offload both ways. Twin and contract: twin/sockets.py. */
#include "udp.h"

#include <errno.h>

enum {
    MAX_RUN_SEGMENTS = 64,
    MAX_SLOTS = 1024,
    RUNS_A_CALL = 32, /* at most this many offloaded sends in one sendmmsg */
};

int sky_try_later(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == EINTR;
}

static int no_offload(int error)
{
    return error == EINVAL || error == EIO || error == EOPNOTSUPP || error == EMSGSIZE || error == ENOPROTOOPT;
}

Py_ssize_t sky_segment_of(struct msghdr *header, Py_ssize_t size)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level == SOL_UDP && c->cmsg_type == UDP_GRO && c->cmsg_len >= CMSG_LEN(sizeof(int))) {
            int segment;
            memcpy(&segment, CMSG_DATA(c), sizeof segment);
            if (segment > 0)
                return segment;
        }
    }
    return size > 0 ? size : 1;
}

int sky_receive(int fd, const Py_buffer *scratch, Py_ssize_t slots, Inbox *inbox)
{
    *inbox = (Inbox){0};
    if (slots < 1 || scratch->len / SLOT_BYTES < slots) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of scratch for %zd slots: expected %d for each of 1 or more",
                     scratch->len, slots, (int)SLOT_BYTES);
        return -1;
    }
    unsigned wanted = (unsigned)(slots < MAX_SLOTS ? slots : MAX_SLOTS);
    inbox->messages = PyMem_Calloc(wanted, sizeof *inbox->messages);
    inbox->parts = PyMem_Malloc(wanted * sizeof *inbox->parts);
    inbox->from = PyMem_Calloc(wanted, sizeof *inbox->from);
    inbox->controls = PyMem_Malloc(wanted * sizeof *inbox->controls);
    if (!inbox->messages || !inbox->parts || !inbox->from || !inbox->controls) {
        PyErr_NoMemory();
        return -1;
    }
    for (unsigned i = 0; i < wanted; i++) {
        struct msghdr *header = &inbox->messages[i].msg_hdr;
        inbox->parts[i].iov_base = (char *)scratch->buf + (size_t)i * SLOT_BYTES;
        inbox->parts[i].iov_len = SLOT_BYTES;
        header->msg_iov = &inbox->parts[i], header->msg_iovlen = 1;
        header->msg_name = &inbox->from[i], header->msg_namelen = sizeof inbox->from[i];
        header->msg_control = &inbox->controls[i], header->msg_controllen = sizeof inbox->controls[i];
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    inbox->count = recvmmsg(fd, inbox->messages, wanted, MSG_DONTWAIT, NULL);
    error = errno;
    Py_END_ALLOW_THREADS
    if (inbox->count < 0 && !sky_try_later(error)) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    inbox->count = inbox->count > 0 ? inbox->count : 0;
    return 0;
}

void sky_inbox_free(Inbox *inbox)
{
    PyMem_Free(inbox->controls);
    PyMem_Free(inbox->from);
    PyMem_Free(inbox->parts);
    PyMem_Free(inbox->messages);
}

Py_ssize_t sky_segment_bytes(const Inbox *inbox, int i)
{
    return sky_segment_of(&inbox->messages[i].msg_hdr, (Py_ssize_t)inbox->messages[i].msg_len);
}

static PyObject *host_text(const Endpoint *from)
{
    char text[INET6_ADDRSTRLEN] = "";
    int family = from->any.sa_family;
    inet_ntop(family, family == AF_INET6 ? (const void *)&from->v6.sin6_addr : &from->v4.sin_addr, text, sizeof text);
    return PyUnicode_FromString(text);
}

int sky_parse_host(const char *host, int port, Endpoint *endpoint)
{
    endpoint->v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host, &endpoint->v4.sin_addr) == 1)
        return 1;
    endpoint->v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    return inet_pton(AF_INET6, host, &endpoint->v6.sin6_addr) == 1;
}

int sky_parse_endpoint(const char *host, int port, Endpoint *endpoint)
{
    if (!sky_parse_host(host, port, endpoint))
        PyErr_Format(PyExc_ValueError, "host '%s': expected an IPv4 or IPv6 address", host);
    else if (port < 0 || port > 65535)
        PyErr_Format(PyExc_OverflowError, "port %d: expected 0 to 65535", port);
    else
        return 1;
    return 0;
}

PyObject *sky_arrivals(Inbox *inbox)
{
    PyObject *list = PyList_New(inbox->count), *host = NULL;
    const Endpoint *known = NULL; /* whose host that is */
    for (int i = 0; list && i < inbox->count; i++) {
        const Endpoint *from = &inbox->from[i];
        if (!host || !sky_same_host(from, known)) {
            Py_XDECREF(host);
            host = host_text(from);
            known = from;
        }
        PyObject *arrival = host ? Py_BuildValue("nnnOi", (Py_ssize_t)i * SLOT_BYTES,
                                                 (Py_ssize_t)inbox->messages[i].msg_len, sky_segment_bytes(inbox, i), host,
                                                 sky_port(from))
                                 : NULL;
        if (arrival)
            PyList_SetItem(list, i, arrival);
        else
            Py_CLEAR(list);
    }
    Py_XDECREF(host);
    return list;
}

PyObject *sky_py_recv_batch(PyObject *self, PyObject *args)
{
    int fd;
    Py_buffer scratch;
    Py_ssize_t slots;
    if (!PyArg_ParseTuple(args, "iw*n:recv_batch", &fd, &scratch, &slots))
        return NULL;
    Inbox inbox;
    PyObject *result = sky_receive(fd, &scratch, slots, &inbox) < 0 ? NULL : sky_arrivals(&inbox);
    sky_inbox_free(&inbox);
    PyBuffer_Release(&scratch);
    return result;
}

static size_t header_size(const Outgoing *out, size_t i)
{
    size_t left = out->headers_bytes - i * out->width;
    return left < out->width ? left : out->width;
}

static size_t segment_size(const Outgoing *out, size_t i)
{
    return header_size(out, i) + (out->payloads ? (size_t)out->payloads[i].len : 0);
}

/* How many segments from ``first`` one offloaded send can carry: equally long, but the last may be shorter. */
static size_t run_length(const Outgoing *out, size_t first)
{
    size_t size = segment_size(out, first), total = size, end = first + 1;
    while (end < out->count && end - first < MAX_RUN_SEGMENTS) {
        size_t next = segment_size(out, end);
        if (next == 0 || next > size || total + next > MAX_RUN_BYTES)
            break;
        total += next, end++;
        if (next < size)
            break;
    }
    return end - first;
}

/* The kernel cuts the message into datagrams of this size. */
static void set_segment(struct msghdr *header, Control *control, size_t segment)
{
    uint16_t size = (uint16_t)segment;
    memset(control, 0, sizeof *control);
    header->msg_control = control;
    header->msg_controllen = CMSG_SPACE(sizeof size);
    struct cmsghdr *c = CMSG_FIRSTHDR(header);
    c->cmsg_level = SOL_UDP, c->cmsg_type = UDP_SEGMENT, c->cmsg_len = CMSG_LEN(sizeof size);
    memcpy(CMSG_DATA(c), &size, sizeof size);
}

size_t sky_send_all(int fd, Endpoint *to, const Outgoing *out, int *error)
{
    static const struct mmsghdr empty;
    struct mmsghdr messages[RUNS_A_CALL];
    struct iovec parts[RUNS_A_CALL * 2 * MAX_RUN_SEGMENTS];
    Control controls[RUNS_A_CALL];
    size_t lengths[RUNS_A_CALL], sent = 0;
    int offload = 1;
    const socklen_t to_bytes = sky_endpoint_bytes(to);
    *error = 0;
    while (sent < out->count) {
        unsigned runs = 0;
        size_t next = sent, used = 0;
        for (; runs < RUNS_A_CALL && next < out->count; runs++) {
            size_t length = offload ? run_length(out, next) : 1;
            struct msghdr *header = &messages[runs].msg_hdr;
            messages[runs] = empty;
            header->msg_name = to, header->msg_namelen = to_bytes;
            header->msg_iov = &parts[used];
            for (size_t i = next; i < next + length; i++) {
                parts[used].iov_base = (char *)out->headers + i * out->width;
                parts[used++].iov_len = header_size(out, i);
                if (out->payloads && out->payloads[i].len) {
                    parts[used].iov_base = out->payloads[i].buf;
                    parts[used++].iov_len = (size_t)out->payloads[i].len;
                }
            }
            header->msg_iovlen = (size_t)(&parts[used] - header->msg_iov);
            if (length > 1)
                set_segment(header, &controls[runs], segment_size(out, next));
            lengths[runs] = length;
            next += length;
        }
        int taken = sendmmsg(fd, messages, runs, MSG_DONTWAIT);
        if (taken < 0) {
            if (lengths[0] > 1 && no_offload(errno)) {
                offload = 0;
                continue;
            }
            *error = errno;
            break;
        }
        for (int i = 0; i < taken; i++)
            sent += lengths[i];
    }
    return sent;
}

int sky_send_wholes(int fd, Whole *runs, size_t count)
{
    static const struct mmsghdr empty;
    struct mmsghdr messages[RUNS_A_CALL];
    struct iovec parts[RUNS_A_CALL];
    Control controls[RUNS_A_CALL];
    int refused = 0;
    for (size_t next = 0; next < count;) {
        unsigned together = 0;
        for (; together < RUNS_A_CALL && next + together < count; together++) {
            Whole *run = &runs[next + together];
            struct msghdr *header = &messages[together].msg_hdr;
            messages[together] = empty;
            parts[together] = (struct iovec){(char *)run->data, run->size};
            header->msg_name = &run->to, header->msg_namelen = sky_endpoint_bytes(&run->to);
            header->msg_iov = &parts[together], header->msg_iovlen = 1;
            if (run->size > run->segment)
                set_segment(header, &controls[together], run->segment);
            if (!run->to.any.sa_family)
                break;
        }
        if (!together) { /* for no endpoint */
            next++;
            continue;
        }
        int taken = sendmmsg(fd, messages, together, MSG_DONTWAIT), error = errno;
        for (int i = 0; i < taken; i++, next++)
            runs[next].sent = sky_whole_packets(&runs[next]);
        if (taken > 0)
            continue;
        if (sky_try_later(error))
            break;
        /* Refused: perhaps only as a whole. */
        Whole *run = &runs[next];
        Outgoing out = {run->data, run->size, run->segment, NULL, sky_whole_packets(run)};
        run->sent = sky_send_all(fd, &run->to, &out, &error);
        if (error && sky_try_later(error))
            break;
        if (error)
            refused++, run->sent = out.count;
        next++;
    }
    return refused;
}

/* Acquire the payloads' buffers; returns their number, less than ``count`` with an exception set. */
static Py_ssize_t hold(PyObject *payloads, Py_buffer *held, Py_ssize_t count, size_t width)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(payloads, i), &held[i], PyBUF_SIMPLE) < 0)
            return i;
        if ((size_t)held[i].len > MAX_RUN_BYTES - width) {
            PyErr_Format(PyExc_ValueError, "a segment of %zd bytes: a datagram has at most %d",
                         held[i].len + (Py_ssize_t)width, (int)MAX_RUN_BYTES);
            return i + 1;
        }
    }
    return count;
}

PyObject *sky_send_held(int fd, Endpoint *to, const Outgoing *out)
{
    size_t sent;
    int error;
    Py_BEGIN_ALLOW_THREADS
    sent = sky_send_all(fd, to, out, &error);
    Py_END_ALLOW_THREADS
    if (error && !sent && !sky_try_later(error)) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromSize_t(sent);
}

PyObject *sky_py_send_batch(PyObject *self, PyObject *args)
{
    int fd, port;
    const char *host;
    Py_buffer headers, *held = NULL;
    Py_ssize_t width, count = 0, holding = 0;
    PyObject *payloads, *list = NULL, *result = NULL;
    Endpoint to;
    if (!PyArg_ParseTuple(args, "isiy*nO:send_batch", &fd, &host, &port, &headers, &width, &payloads))
        return NULL;
    if (!sky_parse_endpoint(host, port, &to)) {
        ;
    } else if (width < 1) {
        PyErr_Format(PyExc_ValueError, "headers of %zd bytes: expected 1 or more", width);
    } else if ((width < headers.len ? width : headers.len) > MAX_RUN_BYTES) {
        PyErr_Format(PyExc_ValueError, "a segment of %zd bytes: a datagram has at most %d", width, (int)MAX_RUN_BYTES);
    } else {
        Outgoing out = {headers.buf, (size_t)headers.len, (size_t)width, NULL, 0};
        out.count = (size_t)(headers.len / width + (headers.len % width != 0));
        if (payloads == Py_None) {
            result = sky_send_held(fd, &to, &out);
        } else if ((list = PySequence_Tuple(payloads)) != NULL) {
            count = PyTuple_Size(list);
            if (headers.len % width || headers.len / width != count)
                PyErr_Format(PyExc_ValueError, "%zd bytes of headers of %zd for %zd payloads", headers.len, width, count);
            else if ((held = PyMem_Calloc((size_t)count + 1, sizeof *held)) == NULL)
                PyErr_NoMemory();
            else if ((holding = hold(list, held, count, (size_t)width)) == count && !PyErr_Occurred()) {
                out.payloads = held;
                result = sky_send_held(fd, &to, &out);
            }
        }
    }
    for (Py_ssize_t i = 0; i < holding; i++)
        PyBuffer_Release(&held[i]);
    PyMem_Free(held);
    Py_XDECREF(list);
    PyBuffer_Release(&headers);
    return result;
}
