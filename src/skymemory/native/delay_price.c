/* The rate at which a second of computing delays later requests. Twin and contract: twin/ttft.py. */
#include "ttft.h"

#include <math.h>

typedef struct {
    PyObject_HEAD
    double weight, window_s, most_busy, requests, work_s, at_s;
} Price;

static double kept(const Price *self, double now_s)
{
    double gone_s = now_s - self->at_s;
    return exp(-(gone_s > 0.0 ? gone_s : 0.0) / self->window_s);
}

static PyObject *sent(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Price *self = (Price *)object;
    double work_s, now_s;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "sent: expected seconds of work and the time");
        return NULL;
    }
    if (((work_s = PyFloat_AsDouble(args[0])) == -1.0 && PyErr_Occurred()) ||
        ((now_s = PyFloat_AsDouble(args[1])) == -1.0 && PyErr_Occurred()))
        return NULL;
    double part = kept(self, now_s);
    self->requests = self->requests * part + 1.0;
    self->work_s = self->work_s * part + work_s;
    self->at_s = now_s > self->at_s ? now_s : self->at_s;
    Py_RETURN_NONE;
}

static PyObject *rate(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    const Price *self = (const Price *)object;
    double servers, now_s;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "rate: expected a number of servers and the time");
        return NULL;
    }
    if (((servers = PyFloat_AsDouble(args[0])) == -1.0 && PyErr_Occurred()) ||
        ((now_s = PyFloat_AsDouble(args[1])) == -1.0 && PyErr_Occurred()))
        return NULL;
    if (!(servers >= 1)) {
        PyErr_SetString(PyExc_ValueError, "a rate at less than one server");
        return NULL;
    }
    double share = kept(self, now_s) / (self->window_s * servers), busy = self->work_s * share;
    busy = self->most_busy < busy ? self->most_busy : busy;
    return PyFloat_FromDouble(self->weight * self->requests * share / (1.0 - busy));
}

/* Not in ``tp_new``: Python callers check first, with better messages. */
static int init(PyObject *object, PyObject *args, PyObject *named)
{
    static char *keys[] = {"weight", "window_s", "most_busy", NULL};
    double weight = 0.3, window_s = 60.0, most_busy = 0.9;
    if (!PyArg_ParseTupleAndKeywords(args, named, "|ddd:DelayPrice", keys, &weight, &window_s, &most_busy))
        return -1;
    if (!(weight >= 0) || !(window_s > 0) || !(most_busy >= 0 && most_busy < 1)) {
        PyErr_SetString(PyExc_ValueError, "a price has a weight of 0 or more, a window over 0 s, and is less than 1 busy");
        return -1;
    }
    Price *self = (Price *)object;
    self->weight = weight;
    self->window_s = window_s;
    self->most_busy = most_busy;
    self->requests = self->work_s = 0.0;
    self->at_s = -INFINITY;
    return 0;
}

static PyMethodDef methods[] = {
    {"sent", (PyCFunction)(void (*)(void))sent, METH_FASTCALL, "sent(work_s, now_s)"},
    {"rate", (PyCFunction)(void (*)(void))rate, METH_FASTCALL, "rate(servers, now_s) -> float"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"DelayPrice(weight=0.3, window_s=60.0, most_busy=0.9): what work costs those who come later"},
    {Py_tp_new, (void *)PyType_GenericNew},
    {Py_tp_init, (void *)init},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_delay_price_type = {
    .spec = {
        .name = "skymemory.native._fast.DelayPrice",
        .basicsize = sizeof(Price),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
