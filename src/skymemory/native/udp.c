/* Many datagrams a system call, with segmentation offload both ways. Twin and contract: twin_udp.py. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "udp.h"

#include <arpa/inet.h>

enum {
    MAX_SLOTS = 1024,
    RUNS_A_CALL = 32, /* at most this many offloaded sends in one sendmmsg */
};

static int no_offload(int error)
{
    return error == EINVAL || error == EIO || error == EOPNOTSUPP || error == EMSGSIZE || error == ENOPROTOOPT;
}

static PyObject *arrivals(struct mmsghdr *messages, const struct sockaddr_in *from, int count)
{
    PyObject *list = PyList_New(count), *host = NULL;
    in_addr_t host_is = 0;
    for (int i = 0; list && i < count; i++) {
        if (!host || from[i].sin_addr.s_addr != host_is) {
            char text[INET_ADDRSTRLEN] = "";
            inet_ntop(AF_INET, &from[i].sin_addr, text, sizeof text);
            Py_XDECREF(host);
            host = PyUnicode_FromString(text);
            host_is = from[i].sin_addr.s_addr;
        }
        Py_ssize_t size = (Py_ssize_t)messages[i].msg_len;
        PyObject *arrival = host ? Py_BuildValue("nnnOi", (Py_ssize_t)i * SLOT_BYTES, size,
                                                 sky_segment_of(&messages[i].msg_hdr, size), host,
                                                 (int)ntohs(from[i].sin_port))
                                 : NULL;
        if (arrival)
            PyList_SET_ITEM(list, i, arrival);
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
    if (slots < 1 || scratch.len / SLOT_BYTES < slots) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of scratch for %zd slots: expected %d for each of 1 or more",
                     scratch.len, slots, (int)SLOT_BYTES);
        PyBuffer_Release(&scratch);
        return NULL;
    }
    PyObject *result = NULL;
    unsigned wanted = (unsigned)(slots < MAX_SLOTS ? slots : MAX_SLOTS);
    struct mmsghdr *messages = PyMem_Calloc(wanted, sizeof *messages);
    struct iovec *parts = PyMem_Malloc(wanted * sizeof *parts);
    struct sockaddr_in *from = PyMem_Calloc(wanted, sizeof *from);
    Control *controls = PyMem_Malloc(wanted * sizeof *controls);
    if (!messages || !parts || !from || !controls) {
        PyErr_NoMemory();
    } else {
        for (unsigned i = 0; i < wanted; i++) {
            struct msghdr *header = &messages[i].msg_hdr;
            parts[i].iov_base = (char *)scratch.buf + (size_t)i * SLOT_BYTES;
            parts[i].iov_len = SLOT_BYTES;
            header->msg_iov = &parts[i], header->msg_iovlen = 1;
            header->msg_name = &from[i], header->msg_namelen = sizeof from[i];
            header->msg_control = &controls[i], header->msg_controllen = sizeof controls[i];
        }
        int count, error;
        Py_BEGIN_ALLOW_THREADS
        count = recvmmsg(fd, messages, wanted, MSG_DONTWAIT, NULL);
        error = errno;
        Py_END_ALLOW_THREADS
        if (count >= 0 || sky_try_later(error)) {
            result = arrivals(messages, from, count > 0 ? count : 0);
        } else {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
        }
    }
    PyMem_Free(controls);
    PyMem_Free(from);
    PyMem_Free(parts);
    PyMem_Free(messages);
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

/* Send all; the number of segments taken. *error is what stopped it, 0 if nothing did. Runs without the lock. */
static size_t send_all(int fd, struct sockaddr_in *to, const Outgoing *out, int *error)
{
    static const struct mmsghdr empty;
    struct mmsghdr messages[RUNS_A_CALL];
    struct iovec parts[RUNS_A_CALL * 2 * MAX_RUN_SEGMENTS];
    Control controls[RUNS_A_CALL];
    size_t lengths[RUNS_A_CALL], sent = 0;
    int offload = 1;
    *error = 0;
    while (sent < out->count) {
        unsigned runs = 0;
        size_t next = sent, used = 0;
        for (; runs < RUNS_A_CALL && next < out->count; runs++) {
            size_t length = offload ? run_length(out, next) : 1;
            struct msghdr *header = &messages[runs].msg_hdr;
            messages[runs] = empty;
            header->msg_name = to, header->msg_namelen = sizeof *to;
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
            if (length > 1) {
                uint16_t size = (uint16_t)segment_size(out, next);
                memset(&controls[runs], 0, sizeof controls[runs]);
                header->msg_control = &controls[runs];
                header->msg_controllen = CMSG_SPACE(sizeof size);
                struct cmsghdr *c = CMSG_FIRSTHDR(header);
                c->cmsg_level = SOL_UDP, c->cmsg_type = UDP_SEGMENT, c->cmsg_len = CMSG_LEN(sizeof size);
                memcpy(CMSG_DATA(c), &size, sizeof size);
            }
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

/* Hold the payloads' buffers; the number held, which falls short of ``count`` with an exception set. */
static Py_ssize_t hold(PyObject *payloads, Py_buffer *held, Py_ssize_t count, size_t width)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(payloads, i), &held[i], PyBUF_SIMPLE) < 0)
            return i;
        if ((size_t)held[i].len > MAX_RUN_BYTES - width) {
            PyErr_Format(PyExc_ValueError, "a segment of %zd bytes: a datagram has at most %d",
                         held[i].len + (Py_ssize_t)width, (int)MAX_RUN_BYTES);
            return i + 1;
        }
    }
    return count;
}

PyObject *sky_send_held(int fd, struct sockaddr_in *to, const Outgoing *out)
{
    size_t sent;
    int error;
    Py_BEGIN_ALLOW_THREADS
    sent = send_all(fd, to, out, &error);
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
    struct sockaddr_in to = {.sin_family = AF_INET};
    if (!PyArg_ParseTuple(args, "isiy*nO:send_batch", &fd, &host, &port, &headers, &width, &payloads))
        return NULL;
    to.sin_port = htons((uint16_t)port);
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1) {
        PyErr_Format(PyExc_ValueError, "host '%s': expected a dotted IPv4 address", host);
    } else if (port < 0 || port > 65535) {
        PyErr_Format(PyExc_OverflowError, "port %d: expected 0 to 65535", port);
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
            count = PyTuple_GET_SIZE(list);
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
