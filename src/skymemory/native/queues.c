/* How long a request would wait at each server. Twin and contract: twin/queues.py. */
#include "ttft.h"

#include <stdlib.h>
#include <string.h>

#define STALE_S 5.0

/* A prefill that was sent. Free ones are linked by ``next``; those of a queue by both, in the order of sending. */
typedef struct {
    double work_s, routed_s, drain_s;
    uint32_t slot, generation; /* odd: in a queue */
    uint32_t before, next;
    int unseen;
} Prefill;

typedef struct {
    PyObject *report; /* the last one read, or NULL */
    double report_at_s, report_waiting;
    int known; /* something was sent to the slot */
    int guessed;
    uint32_t first, last; /* 0: none waits */
    size_t unseen;
    double rest_s, first_s, drain_s, since_s, believed_s;
    double others_at_s, others;
    Ring ended; /* when each was sent, and when it ended */
} Queue;

struct Queues {
    PyObject_HEAD
    double overdue, usual_s;
    Queue *queues;
    size_t slots;
    Prefill *prefills; /* the first is none */
    uint32_t room, made, vacant;
};

static PyObject *name_slot, *name_reported, *name_at_s, *name_waiting;

static int names(void)
{
    if (!name_waiting) {
        name_slot = PyUnicode_InternFromString("slot");
        name_reported = PyUnicode_InternFromString("reported");
        name_at_s = PyUnicode_InternFromString("at_s");
        name_waiting = PyUnicode_InternFromString("waiting");
    }
    return name_slot && name_reported && name_at_s && name_waiting ? 0 : -1;
}

int sky_ring_push(Ring *ring, double first, double second)
{
    if (ring->count == ring->size) {
        size_t size = ring->size ? 2 * ring->size : 8;
        Pair *pairs = sky_realloc(NULL, size, sizeof(Pair));
        if (!pairs)
            return -1;
        for (size_t at = 0; at < ring->count; at++)
            pairs[at] = *sky_ring_at(ring, at);
        free(ring->pairs);
        *ring = (Ring){pairs, size, 0, ring->count};
    }
    ring->count++;
    *sky_ring_at(ring, ring->count - 1) = (Pair){first, second};
    return 0;
}

int sky_slot_from(PyObject *number, size_t *slot)
{
    if (!PyLong_Check(number)) {
        sky_no_number("slot", number);
        return 0;
    }
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow || value < 0 || value >= MAX_SLOTS) {
        PyErr_Format(PyExc_ValueError, "slot %S: expected 0 to %d", number, MAX_SLOTS - 1);
        return 0;
    }
    *slot = (size_t)value;
    return 1;
}

static int slot_of(PyObject *server, size_t *slot)
{
    PyObject *number = names() < 0 ? NULL : PyObject_GetAttr(server, name_slot);
    int found = number && sky_slot_from(number, slot);
    Py_XDECREF(number);
    return found ? 0 : -1;
}

/* Queues for slots up to this one. -1: no memory, and nothing has changed. */
static int widen(Queues *self, size_t slot)
{
    if (slot < self->slots)
        return 0;
    size_t slots = (slot / 64 + 1) * 64;
    Queue *queues = sky_realloc(self->queues, slots, sizeof(Queue));
    if (!queues)
        return -1;
    memset(queues + self->slots, 0, (slots - self->slots) * sizeof(Queue));
    self->queues = queues;
    self->slots = slots;
    return 0;
}

static int number_of(PyObject *object, PyObject *name, double *number)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (!found)
        return -1;
    *number = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *number == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int read_one(Queues *self, PyObject *server, Asked *asked)
{
    double at_s, waiting;
    PyObject *report;
    if (slot_of(server, &asked->slot) < 0 || !(report = PyObject_GetAttr(server, name_reported)))
        return -1;
    if (widen(self, asked->slot) < 0) {
        Py_DECREF(report);
        PyErr_NoMemory();
        return -1;
    }
    asked->reports = report != Py_None;
    if (asked->reports && self->queues[asked->slot].report != report) {
        if (number_of(report, name_at_s, &at_s) < 0 || number_of(report, name_waiting, &waiting) < 0) {
            Py_DECREF(report);
            return -1;
        }
        Queue *queue = &self->queues[asked->slot];
        PyObject *old = queue->report;
        queue->report = Py_NewRef(report);
        queue->report_at_s = at_s;
        queue->report_waiting = waiting;
        Py_XDECREF(old);
        asked->at_s = at_s;
        asked->waiting = waiting;
    } else {
        asked->at_s = self->queues[asked->slot].report_at_s;
        asked->waiting = self->queues[asked->slot].report_waiting;
    }
    Py_DECREF(report);
    return 0;
}

int sky_queues_read(Queues *self, PyObject *servers, Asked *asked)
{
    Py_ssize_t count = PyTuple_Size(servers);
    for (Py_ssize_t at = 0; at < count; at++)
        if (read_one(self, PyTuple_GetItem(servers, at), &asked[at]) < 0)
            return -1;
    return 0;
}

PyObject *sky_queues_report(const Queues *self, size_t slot)
{
    return slot < self->slots ? self->queues[slot].report : NULL;
}

double sky_queues_usual_s(const Queues *self)
{
    return self->usual_s;
}

static Prefill *prefill_at(const Queues *self, uint32_t number)
{
    return &self->prefills[number];
}

/* If memory is short the oldest end is dropped, or this one: ends only correct for what reports count twice. */
static void note_end(Queue *queue, double routed_s, double at_s)
{
    if (sky_ring_push(&queue->ended, routed_s, at_s) < 0) {
        if (!queue->ended.count)
            return;
        sky_ring_drop_first(&queue->ended);
        sky_ring_push(&queue->ended, routed_s, at_s);
    }
    while (queue->ended.count > 1 && sky_ring_at(&queue->ended, 0)->second < at_s - STALE_S)
        sky_ring_drop_first(&queue->ended);
}

static void unlink_prefill(Queues *self, Queue *queue, uint32_t number)
{
    Prefill *prefill = prefill_at(self, number);
    if (prefill->before)
        prefill_at(self, prefill->before)->next = prefill->next;
    else
        queue->first = prefill->next;
    if (prefill->next)
        prefill_at(self, prefill->next)->before = prefill->before;
    else
        queue->last = prefill->before;
    prefill->generation++;
    prefill->next = self->vacant;
    self->vacant = number;
}

static void end(Queues *self, Queue *queue, uint32_t number, double at_s, int guessed)
{
    Prefill prefill = *prefill_at(self, number);
    int first = queue->first == number;
    unlink_prefill(self, queue, number);
    queue->unseen -= prefill.unseen ? 1 : 0;
    if (!first) {
        queue->rest_s -= prefill.work_s;
    } else if (queue->first) {
        const Prefill *following = prefill_at(self, queue->first);
        double begun_s = at_s - prefill.drain_s;
        queue->first_s = following->work_s;
        queue->drain_s = following->drain_s;
        queue->since_s = begun_s > following->routed_s ? begun_s : following->routed_s;
        queue->rest_s -= queue->first_s;
    }
    queue->guessed = guessed;
    note_end(queue, prefill.routed_s, at_s);
}

static double sent_by(const Queues *self, const Queue *queue, double at_s)
{
    double ours = 0;
    for (uint32_t number = queue->first; number; number = prefill_at(self, number)->next)
        ours += prefill_at(self, number)->routed_s <= at_s;
    return ours;
}

/* Ends the first unseen prefills whose time is over, or that the report no longer has. */
static void pass_unseen(Queues *self, Queue *queue, const Asked *asked, double now_s)
{
    double surplus = 0;
    int reports = asked && asked->reports;
    if (reports && queue->believed_s != asked->at_s) {
        queue->believed_s = asked->at_s;
        surplus = sent_by(self, queue, asked->at_s) - 1 - asked->waiting; /* one may be the one that is computed */
    }
    while (queue->first) {
        const Prefill *first = prefill_at(self, queue->first);
        double end_s = queue->since_s + first->work_s;
        if (!first->unseen)
            return;
        if (end_s <= now_s)
            end(self, queue, queue->first, end_s, 1);
        else if (surplus > 0 && reports)
            end(self, queue, queue->first, queue->since_s > asked->at_s ? queue->since_s : asked->at_s, 1);
        else
            return;
        surplus -= 1;
    }
}

/* Waiting requests in the report that we did not send; counted once per report. */
static double of_others(const Queues *self, Queue *queue, const Asked *asked)
{
    if (queue->others_at_s != asked->at_s) {
        double ours = sent_by(self, queue, asked->at_s);
        for (size_t at = 0; at < queue->ended.count; at++) {
            const Pair *one = sky_ring_at(&queue->ended, at);
            ours += one->first <= asked->at_s && asked->at_s < one->second;
        }
        queue->others_at_s = asked->at_s;
        queue->others = asked->waiting > ours ? asked->waiting - ours : 0.0;
    }
    return queue->others;
}

double sky_queues_wait_s(Queues *self, const Asked *asked, double now_s)
{
    if (asked->slot >= self->slots) /* other code ran since it was read */
        return 0.0;
    Queue *queue = &self->queues[asked->slot];
    double wait_s = 0.0;
    if (queue->unseen)
        pass_unseen(self, queue, asked, now_s);
    if (queue->first) {
        double elapsed_s = now_s - queue->since_s, left_s = queue->first_s - elapsed_s;
        double least_s = elapsed_s * self->overdue;
        if (queue->drain_s != 0.0) { /* those behind it may have begun */
            least_s = left_s < -queue->drain_s ? least_s : -queue->drain_s;
            wait_s = queue->rest_s + (least_s > left_s ? least_s : left_s);
            wait_s = wait_s > 0.0 ? wait_s : 0.0;
        } else {
            wait_s = queue->rest_s + (left_s > least_s ? left_s : least_s);
        }
    }
    if (asked->reports && asked->waiting != 0.0 && now_s - asked->at_s <= STALE_S)
        wait_s += (queue->known ? of_others(self, queue, asked) : asked->waiting) * self->usual_s;
    return wait_s;
}

static PyObject *waits_s(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Queues *self = (Queues *)object;
    double now_s;
    PyObject *waits = NULL;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "waits_s: expected servers and seconds");
        return NULL;
    }
    if ((now_s = PyFloat_AsDouble(args[1])) == -1.0 && PyErr_Occurred())
        return NULL;
    PyObject *servers = PySequence_Tuple(args[0]);
    if (!servers)
        return NULL;
    Py_ssize_t count = PyTuple_Size(servers);
    Asked one, *asked = count > 1 ? sky_realloc(NULL, (size_t)count, sizeof(Asked)) : &one;
    if (!asked)
        PyErr_NoMemory();
    else if (sky_queues_read(self, servers, asked) == 0)
        waits = PyList_New(count);
    for (Py_ssize_t at = 0; waits && at < count; at++) {
        PyObject *wait = PyFloat_FromDouble(sky_queues_wait_s(self, &asked[at], now_s));
        if (wait)
            PyList_SetItem(waits, at, wait);
        else
            Py_CLEAR(waits);
    }
    if (asked != &one)
        free(asked);
    Py_DECREF(servers);
    return waits;
}

/* A free prefill, whose number is returned; 0: no memory. */
static uint32_t new_prefill(Queues *self)
{
    if (self->vacant)
        return self->vacant;
    if (self->made + 1 >= self->room) {
        uint32_t room = self->room ? 2 * self->room : 64;
        Prefill *prefills = room > self->room ? sky_realloc(self->prefills, room, sizeof(Prefill)) : NULL;
        if (!prefills)
            return 0;
        self->prefills = prefills;
        self->room = room;
    }
    self->prefills[self->made + 1] = (Prefill){0};
    return self->made + 1;
}

static PyObject *add(PyObject *object, PyObject *args, PyObject *named)
{
    static char *keys[] = {"slot", "work_s", "now_s", "drain_s", "unseen", NULL};
    Queues *self = (Queues *)object;
    PyObject *where;
    double work_s, now_s, drain_s = 0.0;
    int unseen = 0;
    size_t slot;
    if (!PyArg_ParseTupleAndKeywords(args, named, "Odd|dp:add", keys, &where, &work_s, &now_s, &drain_s, &unseen) ||
        !sky_slot_from(where, &slot))
        return NULL;
    uint32_t number = widen(self, slot) < 0 ? 0 : new_prefill(self);
    if (!number)
        return PyErr_NoMemory();
    Queue *queue = &self->queues[slot];
    if (number == self->vacant)
        self->vacant = prefill_at(self, number)->next;
    else
        self->made = number;
    if (!queue->known) {
        queue->known = 1;
        queue->others_at_s = queue->believed_s = -1.0;
    }
    if (queue->unseen)
        pass_unseen(self, queue, NULL, now_s);
    queue->unseen += unseen ? 1 : 0;
    if (queue->first) {
        queue->rest_s += work_s;
    } else {
        queue->first_s = work_s;
        queue->rest_s = 0.0;
        queue->since_s = now_s;
        queue->drain_s = drain_s;
    }
    Prefill *prefill = prefill_at(self, number);
    uint32_t generation = prefill->generation + 1;
    *prefill = (Prefill){work_s, now_s, drain_s, (uint32_t)slot, generation, queue->last, 0, unseen};
    if (queue->last)
        prefill_at(self, queue->last)->next = number;
    else
        queue->first = number;
    queue->last = number;
    self->usual_s += (work_s - self->usual_s) * (self->usual_s != 0.0 ? 0.1 : 1.0);
    return PyLong_FromUnsignedLongLong((unsigned long long)generation << 32 | number);
}

static int waits(const Queues *self, uint32_t number, uint32_t generation, size_t slot)
{
    return number && number <= self->made && generation & 1 && prefill_at(self, number)->generation == generation &&
           prefill_at(self, number)->slot == slot;
}

static PyObject *removed(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    Queues *self = (Queues *)object;
    size_t slot;
    double now_s;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "remove: expected a slot, a ticket and seconds");
        return NULL;
    }
    if (!sky_slot_from(args[0], &slot) || ((now_s = PyFloat_AsDouble(args[2])) == -1.0 && PyErr_Occurred()))
        return NULL;
    unsigned long long ticket = PyLong_AsUnsignedLongLong(args[1]);
    if (ticket == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear(); /* not a valid ticket */
        Py_RETURN_NONE;
    }
    uint32_t number = (uint32_t)ticket, generation = (uint32_t)(ticket >> 32);
    if (!waits(self, number, generation, slot))
        Py_RETURN_NONE;
    Queue *queue = &self->queues[slot];
    if (queue->unseen) {
        pass_unseen(self, queue, NULL, now_s);
        /* A later one cannot end before it. */
        while (waits(self, number, generation, slot) && queue->first != number &&
               prefill_at(self, queue->first)->unseen)
            end(self, queue, queue->first, now_s, 1);
        if (!waits(self, number, generation, slot))
            Py_RETURN_NONE;
    }
    double routed_s = prefill_at(self, number)->routed_s;
    int unseen = prefill_at(self, number)->unseen;
    double last_s = queue->ended.count ? sky_ring_at(&queue->ended, queue->ended.count - 1)->second : routed_s;
    int shown = !unseen && !(queue->guessed && last_s > routed_s);
    end(self, queue, number, now_s, unseen);
    if (!shown)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(now_s - (last_s > routed_s ? last_s : routed_s));
}

static PyObject *forget(PyObject *object, PyObject *number)
{
    Queues *self = (Queues *)object;
    size_t slot;
    if (!sky_slot_from(number, &slot))
        return NULL;
    if (slot < self->slots) {
        Queue *queue = &self->queues[slot];
        PyObject *report = queue->report;
        while (queue->first)
            unlink_prefill(self, queue, queue->first);
        free(queue->ended.pairs);
        *queue = (Queue){0};
        Py_XDECREF(report);
    }
    Py_RETURN_NONE;
}

static PyObject *usual_s(PyObject *self, void *none)
{
    return PyFloat_FromDouble(((Queues *)self)->usual_s);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *keys[] = {"overdue", NULL};
    double overdue;
    if (names() < 0 || !PyArg_ParseTupleAndKeywords(args, named, "d:PrefillQueues", keys, &overdue))
        return NULL;
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self)
        ((Queues *)self)->overdue = overdue;
    return self;
}

static void destroy(PyObject *object)
{
    Queues *self = (Queues *)object;
    for (size_t slot = 0; slot < self->slots; slot++) {
        free(self->queues[slot].ended.pairs);
        Py_CLEAR(self->queues[slot].report);
    }
    free(self->queues);
    free(self->prefills);
    sky_free(object);
}

static PyMethodDef methods[] = {
    {"waits_s", (PyCFunction)(void (*)(void))waits_s, METH_FASTCALL, "waits_s(servers, now_s) -> list of float"},
    {"add", (PyCFunction)(void (*)(void))add, METH_VARARGS | METH_KEYWORDS,
     "add(slot, work_s, now_s, drain_s=0.0, unseen=False) -> ticket"},
    {"remove", (PyCFunction)(void (*)(void))removed, METH_FASTCALL, "remove(slot, ticket, now_s) -> float or None"},
    {"forget", forget, METH_O, "forget(slot)"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef members[] = {
    {"usual_s", usual_s, NULL, "what a prefill takes, lately", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"PrefillQueues(overdue): what was sent to each slot and waits there"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {Py_tp_getset, members},
    {0, NULL},
};

SkyType sky_prefill_queues_type = {
    .spec = {
        .name = "skymemory.native._fast.PrefillQueues",
        .basicsize = sizeof(Queues),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
