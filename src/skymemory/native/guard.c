/* Limits each server to little more than its share of requests. Twin and contract: twin/ttft.py. */
#include "ttft.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BARS = 4 };

typedef struct {
    long long servers; /* 0: none */
    Ring highest;      /* when a request was sent, and its bar; only those without a later one at least as high */
    long long judged;
} Bar;

typedef struct {
    Ring sent; /* the time, and the number of earlier requests to all servers */
    long long first;
    Bar bars[BARS];
} Share;

struct Guard {
    PyObject_HEAD
    double limit, window_s, requests, mean;
    long long count;
    Share *shares;
    size_t slots;
};

static void clear_bars(Share *share)
{
    for (int which = 0; which < BARS; which++)
        free(share->bars[which].highest.pairs);
    memset(share->bars, 0, sizeof(share->bars));
}

static Bar *bar_of(Share *share, long long servers)
{
    for (int which = 0; which < BARS; which++) {
        if (!share->bars[which].servers)
            share->bars[which].servers = servers;
        if (share->bars[which].servers == servers)
            return &share->bars[which];
    }
    clear_bars(share);
    share->bars[0].servers = servers;
    return &share->bars[0];
}

int sky_guard_over(Guard *self, size_t slot, long long servers, double now_s)
{
    Share *share = slot < self->slots ? &self->shares[slot] : NULL;
    if (!share || !share->sent.count || servers < 1 || self->limit >= (double)servers)
        return 0;
    double mean = self->requests / (double)servers > self->mean ? self->requests / (double)servers : self->mean;
    double least = floor(self->limit * mean + 1e-9);
    if (least < 1)
        least = 1; /* a run has at least one request */
    if ((double)share->sent.count < least)
        return 0;
    long long free_ones = (long long)least, upcoming = share->first + (long long)share->sent.count;
    Bar *bar = bar_of(share, servers);
    Ring *highest = &bar->highest;
    double per_request = (double)servers / self->limit;
    if (bar->judged < share->first)
        bar->judged = share->first;
    while (bar->judged < upcoming + 1 - free_ones) {
        const Pair *sent = sky_ring_at(&share->sent, (size_t)(bar->judged - share->first));
        double height = sent->second - per_request * (double)bar->judged;
        while (highest->count && sky_ring_at(highest, highest->count - 1)->second <= height)
            highest->count--;
        if (sky_ring_push(highest, sent->first, height) < 0)
            return -1;
        bar->judged++;
    }
    while (highest->count && sky_ring_at(highest, 0)->first <= now_s - self->window_s)
        sky_ring_drop_first(highest);
    return highest->count && sky_ring_at(highest, 0)->second > (double)(self->count + 1) -
                                                                   per_request * (double)(upcoming + 1) + 1e-6;
}

static PyObject *over(PyObject *object, PyObject *args)
{
    PyObject *where;
    long long servers;
    double now_s;
    size_t slot;
    if (!PyArg_ParseTuple(args, "OLd:over", &where, &servers, &now_s) || !sky_slot_from(where, &slot))
        return NULL;
    int found = sky_guard_over((Guard *)object, slot, servers, now_s);
    return found < 0 ? PyErr_NoMemory() : PyBool_FromLong(found);
}

static PyObject *sent(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Guard *self = (Guard *)object;
    size_t slot;
    double now_s;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "sent: expected a slot and seconds");
        return NULL;
    }
    if (!sky_slot_from(args[0], &slot) || ((now_s = PyFloat_AsDouble(args[1])) == -1.0 && PyErr_Occurred()))
        return NULL;
    if (slot >= self->slots) {
        size_t slots = (slot / 64 + 1) * 64;
        Share *shares = sky_realloc(self->shares, slots, sizeof(Share));
        if (!shares)
            return PyErr_NoMemory();
        memset(shares + self->slots, 0, (slots - self->slots) * sizeof(Share));
        self->shares = shares;
        self->slots = slots;
    }
    Share *share = &self->shares[slot];
    if (sky_ring_push(&share->sent, now_s, (double)self->count) < 0)
        return PyErr_NoMemory();
    self->count++;
    while (share->sent.count && sky_ring_at(&share->sent, 0)->first <= now_s - self->window_s) {
        sky_ring_drop_first(&share->sent);
        share->first++;
    }
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *object, PyObject *number)
{
    Guard *self = (Guard *)object;
    size_t slot;
    if (!sky_slot_from(number, &slot))
        return NULL;
    if (slot < self->slots) {
        clear_bars(&self->shares[slot]);
        free(self->shares[slot].sent.pairs);
        memset(&self->shares[slot], 0, sizeof(Share));
    }
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *keys[] = {"limit", "window_s", "requests", "mean", NULL};
    double limit, window_s, requests, mean;
    if (!PyArg_ParseTupleAndKeywords(args, named, "dddd:ShareGuard", keys, &limit, &window_s, &requests, &mean))
        return NULL;
    if (!(limit >= 1 && window_s > 0 && requests >= 1 && mean >= 0)) {
        PyErr_SetString(PyExc_ValueError, "a guard's limit is 1 or more, its window over 0 s, its requests 1 or more");
        return NULL;
    }
    PyObject *object = PyType_GenericAlloc(type, 0);
    if (object) {
        Guard *self = (Guard *)object;
        self->limit = limit;
        self->window_s = window_s;
        self->requests = requests;
        self->mean = mean;
    }
    return object;
}

static void destroy(PyObject *object)
{
    Guard *self = (Guard *)object;
    for (size_t slot = 0; slot < self->slots; slot++) {
        clear_bars(&self->shares[slot]);
        free(self->shares[slot].sent.pairs);
    }
    free(self->shares);
    sky_free(object);
}

static PyMethodDef methods[] = {
    {"over", over, METH_VARARGS, "over(slot, servers, now_s) -> bool"},
    {"sent", (PyCFunction)(void (*)(void))sent, METH_FASTCALL, "sent(slot, now_s)"},
    {"forget", forget, METH_O, "forget(slot)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"ShareGuard(limit, window_s, requests, mean): whether a slot had its share of requests"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_share_guard_type = {
    .spec = {
        .name = "skymemory.native._fast.ShareGuard",
        .basicsize = sizeof(Guard),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
