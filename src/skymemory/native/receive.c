/* The rest of a value from a stream socket, right behind the bytes that are there. Twin: twin/sockets.py. */
#include "fast.h"

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

static double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

PyObject *sky_py_receive_all(PyObject *self, PyObject *args)
{
    int fd;
    Py_buffer head;
    Py_ssize_t size, at, got = 1;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "iy*nd", &fd, &head, &size, &timeout_s))
        return NULL;
    at = head.len;
    double until_s = monotonic_s() + timeout_s;
    PyObject *made = size < 0 ? PyErr_Format(PyExc_ValueError, "%zd bytes", size)
                              : PyBytes_FromStringAndSize(NULL, head.len + size);
    if (made) {
        char *data = PyBytes_AS_STRING(made);
        memcpy(data, head.buf, head.len);
        while (at < head.len + size) {
            Py_BEGIN_ALLOW_THREADS
            got = recv(fd, data + at, head.len + size - at, MSG_WAITALL);
            Py_END_ALLOW_THREADS
            if (got < 0 && errno == EINTR && PyErr_CheckSignals() == 0)
                continue;
            if (got <= 0)
                break;
            at += got;
            if (at < head.len + size && monotonic_s() > until_s) {
                PyErr_Format(PyExc_TimeoutError, "%zd bytes of the value did not come in time", head.len + size - at);
                break;
            }
        }
        if (at < head.len + size) {
            if (got == 0 && !PyErr_Occurred())
                PyErr_Format(PyExc_ConnectionError, "the stream ended %zd bytes before the value did",
                             head.len + size - at);
            else if (!PyErr_Occurred())
                PyErr_SetFromErrno(PyExc_OSError);
            Py_CLEAR(made);
        }
    }
    PyBuffer_Release(&head);
    return made;
}
