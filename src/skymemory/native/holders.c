/* Which slots hold which blocks, medium by medium, by the engines' events. Twin and contract: twin/prefix.py. */
#include "holders.h"

#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    Rows media[MAX_MEDIA];
} Object;

static int number_from(PyObject *given, const char *what, size_t most, size_t *number)
{
    if (!PyLong_Check(given)) {
        sky_no_number(what, given);
        return 0;
    }
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow || value < 0 || (unsigned long long)value >= most) {
        PyErr_Format(PyExc_ValueError, "%s %S: expected 0 to %zu", what, given, most - 1);
        return 0;
    }
    *number = (size_t)value;
    return 1;
}

static int change_from(PyObject *args, size_t *medium, size_t *slot, uint64_t *block)
{
    PyObject *which, *where, *hash;
    if (!PyArg_ParseTuple(args, "OOO!", &which, &where, &PyLong_Type, &hash))
        return 0;
    if (!number_from(which, "medium", MAX_MEDIA, medium) || !number_from(where, "slot", MAX_SLOTS, slot))
        return 0;
    *block = PyLong_AsUnsignedLongLong(hash);
    return !(*block == (uint64_t)-1 && PyErr_Occurred());
}

static PyObject *add(PyObject *self, PyObject *args)
{
    size_t medium, slot;
    uint64_t block;
    if (!change_from(args, &medium, &slot, &block))
        return NULL;
    Rows *rows = &((Object *)self)->media[medium];
    if (sky_rows_widen(rows, slot + 1) < 0 || sky_rows_add(rows, block, slot) < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *self, PyObject *args)
{
    size_t medium, slot;
    uint64_t block;
    if (!change_from(args, &medium, &slot, &block))
        return NULL;
    sky_rows_take(&((Object *)self)->media[medium], block, slot);
    Py_RETURN_NONE;
}

/* A whole chain of one slot; none of it if memory is short. */
static PyObject *change_all(PyObject *self, PyObject *args, int adds)
{
    Py_buffer blocks;
    PyObject *which, *where;
    size_t medium, slot, done = 0;
    if (!PyArg_ParseTuple(args, "OOy*", &which, &where, &blocks))
        return NULL;
    if (blocks.len % 8)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", blocks.len);
    else if (number_from(which, "medium", MAX_MEDIA, &medium) && number_from(where, "slot", MAX_SLOTS, &slot)) {
        Rows *rows = &((Object *)self)->media[medium];
        size_t count = (size_t)blocks.len / 8;
        if (adds && sky_rows_widen(rows, slot + 1) < 0)
            PyErr_NoMemory();
        for (; done < count && !PyErr_Occurred(); done++) {
            if (!adds)
                sky_rows_take(rows, sky_hash_at(blocks.buf, done), slot);
            else if (sky_rows_add(rows, sky_hash_at(blocks.buf, done), slot) < 0)
                PyErr_NoMemory();
        }
        while (PyErr_Occurred() && done--)
            sky_rows_take(rows, sky_hash_at(blocks.buf, done), slot);
    }
    PyBuffer_Release(&blocks);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *add_all(PyObject *self, PyObject *args)
{
    return change_all(self, args, 1);
}

static PyObject *take_all(PyObject *self, PyObject *args)
{
    return change_all(self, args, 0);
}

static int media_from(Object *self, PyObject *order, Walk *walk)
{
    PyObject *entries = PySequence_Tuple(order); /* a copy: reading a weight may run other code */
    if (!entries)
        return 0;
    Py_ssize_t given = PyTuple_Size(entries);
    if (given > MAX_MEDIA)
        PyErr_Format(PyExc_ValueError, "%zd media: expected at most %d", given, MAX_MEDIA);
    for (Py_ssize_t at = 0; at < given && !PyErr_Occurred(); at++) {
        PyObject *entry = PyTuple_GetItem(entries, at), *which;
        size_t medium;
        if (!PyTuple_Check(entry))
            PyErr_SetString(PyExc_TypeError, "media: expected pairs of a number and a weight");
        else if (PyArg_ParseTuple(entry, "Od", &which, &walk->weights[at]) &&
                 number_from(which, "medium", MAX_MEDIA, &medium))
            walk->rows[at] = &self->media[medium];
    }
    walk->media = (size_t)given;
    Py_DECREF(entries);
    return !PyErr_Occurred();
}

static PyObject *walked(Walk *walk, const Py_buffer *blocks, const size_t *slots, Py_ssize_t asked)
{
    size_t places = walk->words * 64, cells = walk->words * (1 + 2 * walk->media);
    uint64_t *scratch = calloc(cells ? cells : 1, sizeof(uint64_t));
    uint32_t *numbers = calloc(places * (1 + walk->media) + 1, sizeof(uint32_t));
    PyObject *depths = NULL, *sums = NULL, *both = NULL;
    if (!scratch || !numbers) {
        PyErr_NoMemory();
    } else {
        walk->left = scratch;
        walk->here = scratch + walk->words;
        walk->now = walk->here + walk->media * walk->words;
        walk->depths = numbers;
        walk->counts = numbers + places;
        for (Py_ssize_t at = 0; at < asked; at++)
            walk->left[slots[at] / 64] |= (uint64_t)1 << slots[at] % 64;
        sky_holders_walk(walk, blocks->buf, (size_t)blocks->len / 8);
        depths = PyList_New(asked);
        sums = PyList_New(asked);
    }
    for (Py_ssize_t at = 0; depths && sums && at < asked && !PyErr_Occurred(); at++) {
        double sum = 0;
        for (size_t medium = 0; medium < walk->media; medium++)
            sum += walk->weights[medium] * walk->counts[medium * places + slots[at]];
        PyObject *depth = PyLong_FromUnsignedLong(walk->depths[slots[at]]), *total = PyFloat_FromDouble(sum);
        if (depth)
            PyList_SetItem(depths, at, depth);
        if (total)
            PyList_SetItem(sums, at, total);
    }
    if (!PyErr_Occurred())
        both = PyTuple_Pack(2, depths, sums);
    Py_XDECREF(depths);
    Py_XDECREF(sums);
    free(scratch);
    free(numbers);
    return both;
}

/* Slots are copied first: a list could change while other code runs. */
static PyObject *match(PyObject *self, PyObject *args)
{
    Py_buffer blocks;
    PyObject *given, *order, *result = NULL;
    Walk walk = {0};
    if (!PyArg_ParseTuple(args, "y*OO:match", &blocks, &given, &order))
        return NULL;
    PyObject *asked = sky_tuple(given, "slots: expected a sequence of numbers");
    Py_ssize_t count = asked ? PyTuple_Size(asked) : 0;
    size_t *slots = asked ? sky_realloc(NULL, (size_t)count, sizeof(size_t)) : NULL;
    if (asked && !slots)
        PyErr_NoMemory();
    for (Py_ssize_t at = 0; slots && at < count && !PyErr_Occurred(); at++)
        if (number_from(PyTuple_GetItem(asked, at), "slot", MAX_SLOTS, &slots[at]) &&
            slots[at] / 64 >= walk.words)
            walk.words = slots[at] / 64 + 1;
    if (!PyErr_Occurred() && blocks.len % 8)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", blocks.len);
    if (!PyErr_Occurred() && media_from((Object *)self, order, &walk))
        result = walked(&walk, &blocks, slots, count);
    free(slots);
    Py_XDECREF(asked);
    PyBuffer_Release(&blocks);
    return result;
}

static PyObject *blocks(PyObject *self, PyObject *none)
{
    size_t keys = 0;
    for (int medium = 0; medium < MAX_MEDIA; medium++)
        keys += ((Object *)self)->media[medium].keys;
    return PyLong_FromSize_t(keys);
}

static PyObject *size_of(PyObject *self, PyObject *none)
{
    size_t bytes = sizeof(Object);
    for (int medium = 0; medium < MAX_MEDIA; medium++)
        bytes += sky_rows_bytes(&((Object *)self)->media[medium]);
    return PyLong_FromSize_t(bytes);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"secret", NULL};
    unsigned long long secret = 0x9E3779B97F4A7C15u;
    PyObject *given = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, named, "|O!:HolderTable", names, &PyLong_Type, &given))
        return NULL;
    if (given && ((secret = PyLong_AsUnsignedLongLong(given)) == (unsigned long long)-1) && PyErr_Occurred())
        return NULL;
    if (!(secret & 1)) {
        PyErr_SetString(PyExc_ValueError, "the secret of a table must be odd");
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    for (int medium = 0; self && medium < MAX_MEDIA; medium++)
        ((Object *)self)->media[medium].secret = secret;
    return self;
}

static void destroy(PyObject *self)
{
    for (int medium = 0; medium < MAX_MEDIA; medium++)
        sky_rows_free(&((Object *)self)->media[medium]);
    sky_free(self);
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(medium, slot, block)"},
    {"take", take, METH_VARARGS, "take(medium, slot, block)"},
    {"add_all", add_all, METH_VARARGS, "add_all(medium, slot, blocks)"},
    {"take_all", take_all, METH_VARARGS, "take_all(medium, slot, blocks)"},
    {"match", match, METH_VARARGS, "match(blocks, slots, media) -> (list of int, list of float)"},
    {"blocks", blocks, METH_NOARGS, "blocks() -> int"},
    {"__sizeof__", size_of, METH_NOARGS, "bytes of memory, rows included"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"HolderTable(secret=...): which slots hold which blocks, by medium"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_holder_table_type = {
    .spec = {
        .name = "skymemory.native._fast.HolderTable",
        .basicsize = sizeof(Object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
