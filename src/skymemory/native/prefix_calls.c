/* The table's Python methods. Twin and contract: twin/prefix.py. */
#include "ttft.h"

#include <string.h>

typedef struct {
    PyObject_HEAD
    Table table;
} Object;

static Table *table_of(PyObject *self)
{
    return &((Object *)self)->table;
}

Table *sky_table_of(PyObject *object)
{
    return Py_TYPE(object) == sky_prefix_table_type.object ? table_of(object) : NULL;
}

static int slot_from(PyObject *number, void *slot)
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
    *(size_t *)slot = (size_t)value;
    return 1;
}

static int capacity_from(PyObject *number, void *capacity)
{
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (value == -1 && PyErr_Occurred())
        return 0;
    if (overflow || value < 0 || value > (long long)MAX_CAPACITY) {
        PyErr_Format(PyExc_ValueError, "a capacity of %S blocks: expected 0 to %zu", number, MAX_CAPACITY);
        return 0;
    }
    *(size_t *)capacity = (size_t)value;
    return 1;
}

static int count_of(const Py_buffer *blocks, size_t *count)
{
    *count = (size_t)(blocks->len / 8);
    if (blocks->len % 8 == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", blocks->len);
    return 0;
}

static int fill_depths(Table *table, const Py_buffer *blocks, PyObject *slots, PyObject *depths)
{
    uint64_t left[MAX_SLOTS / 64];
    size_t count, slot;
    Py_ssize_t asked = PyList_Size(depths);
    if (!count_of(blocks, &count))
        return 0;
    memset(left, 0, table->rows.words * sizeof(uint64_t));
    for (Py_ssize_t at = 0; at < asked; at++) {
        if (!slot_from(PyTuple_GetItem(slots, at), &slot))
            return 0;
        if (slot < table->slots)
            left[slot / 64] |= (uint64_t)1 << slot % 64;
    }
    sky_table_walk(table, blocks->buf, count, left);
    for (Py_ssize_t at = 0; at < asked; at++) {
        slot_from(PyTuple_GetItem(slots, at), &slot);
        PyObject *depth = PyLong_FromUnsignedLong(slot < table->slots ? table->depths[slot] : 0);
        if (!depth)
            return 0;
        PyList_SetItem(depths, at, depth);
    }
    return 1;
}

static PyObject *match(PyObject *self, PyObject *args)
{
    Py_buffer blocks;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "y*O:match", &blocks, &given))
        return NULL;
    PyObject *slots = sky_tuple(given, "slots: expected a sequence of numbers");
    PyObject *depths = slots ? PyList_New(PyTuple_Size(slots)) : NULL;
    if (depths && !fill_depths(table_of(self), &blocks, slots, depths))
        Py_CLEAR(depths);
    Py_XDECREF(slots);
    PyBuffer_Release(&blocks);
    return depths;
}

static PyObject *learn(PyObject *self, PyObject *args)
{
    Py_buffer blocks;
    size_t slot, count;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O&y*:learn", slot_from, &slot, &blocks))
        return NULL;
    if (count_of(&blocks, &count)) {
        table_of(self)->changes++;
        if (sky_table_learn(table_of(self), slot, blocks.buf, count) == 0)
            result = Py_NewRef(Py_None);
        else
            PyErr_NoMemory();
    }
    PyBuffer_Release(&blocks);
    return result;
}

static PyObject *drop(PyObject *self, PyObject *args)
{
    size_t slot;
    PyObject *block;
    if (!PyArg_ParseTuple(args, "O&O!:drop", slot_from, &slot, &PyLong_Type, &block))
        return NULL;
    uint64_t key = PyLong_AsUnsignedLongLong(block);
    if (key == (uint64_t)-1 && PyErr_Occurred()) { /* no block has such a hash */
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
        return PyLong_FromLong(0);
    }
    table_of(self)->changes++;
    long long gone = sky_table_drop(table_of(self), slot, key);
    return gone < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(gone);
}

static PyObject *forget(PyObject *self, PyObject *number)
{
    Table *table = table_of(self);
    size_t slot;
    if (!slot_from(number, &slot))
        return NULL;
    table->changes++;
    sky_table_trim(table, slot, 0);
    if (slot < table->slots)
        table->shelves[slot].own_capacity = 0;
    Py_RETURN_NONE;
}

static PyObject *set_capacity(PyObject *self, PyObject *args)
{
    size_t slot, capacity;
    if (!PyArg_ParseTuple(args, "O&O&:set_capacity", slot_from, &slot, capacity_from, &capacity))
        return NULL;
    Shelf *shelf = sky_table_shelf(table_of(self), slot);
    if (!shelf)
        return PyErr_NoMemory();
    table_of(self)->changes++;
    shelf->capacity = capacity;
    shelf->own_capacity = 1;
    sky_table_trim(table_of(self), slot, capacity);
    Py_RETURN_NONE;
}

static PyObject *capacity(PyObject *self, PyObject *number)
{
    size_t slot;
    return slot_from(number, &slot) ? PyLong_FromSize_t(sky_table_capacity(table_of(self), slot)) : NULL;
}

static PyObject *held(PyObject *self, PyObject *number)
{
    Table *table = table_of(self);
    size_t slot;
    return slot_from(number, &slot) ? PyLong_FromSize_t(slot < table->slots ? table->shelves[slot].used : 0) : NULL;
}

static PyObject *oldest(PyObject *self, PyObject *number)
{
    size_t slot;
    return slot_from(number, &slot) ? PyLong_FromLongLong(sky_table_oldest(table_of(self), slot)) : NULL;
}

static PyObject *used_every(PyObject *self, PyObject *args)
{
    Table *table = table_of(self);
    Py_buffer blocks;
    size_t slot, count, found = 0;
    unsigned long long interval;
    if (!PyArg_ParseTuple(args, "O&y*K:used_every", slot_from, &slot, &blocks, &interval))
        return NULL;
    int good = count_of(&blocks, &count);
    if (good && slot < table->slots)
        found = sky_table_used_every(table, slot, blocks.buf, count, interval);
    PyBuffer_Release(&blocks);
    return good ? PyLong_FromSize_t(found) : NULL;
}

static PyObject *ages(PyObject *self, PyObject *none)
{
    const Ages *ages = &table_of(self)->ages;
    PyObject *used = PyTuple_New(AGES), *evicted = PyTuple_New(AGES), *both = NULL;
    for (Py_ssize_t at = 0; used && evicted && at < AGES; at++) {
        PyObject *first = PyLong_FromUnsignedLongLong(ages->used[at]), *second = PyLong_FromUnsignedLongLong(ages->evicted[at]);
        if (first)
            PyTuple_SetItem(used, at, first);
        if (second)
            PyTuple_SetItem(evicted, at, second);
        if (!first || !second)
            Py_CLEAR(used);
    }
    if (used && evicted)
        both = PyTuple_Pack(2, used, evicted);
    Py_XDECREF(used);
    Py_XDECREF(evicted);
    return both;
}

static PyObject *blocks(PyObject *self, PyObject *none)
{
    return PyLong_FromSize_t(table_of(self)->rows.keys);
}

static PyObject *changes(PyObject *self, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(table_of(self)->changes);
}

static PyObject *dump(PyObject *self, PyObject *number)
{
    Table *table = table_of(self);
    size_t slot;
    if (!slot_from(number, &slot))
        return NULL;
    size_t used = slot < table->slots ? table->shelves[slot].used : 0;
    PyObject *result = sky_new_bytes((Py_ssize_t)used, DUMP_ROW_BYTES);
    if (result && used && sky_table_dump(table, slot, PyBytes_AsString(result)) < 0) {
        Py_DECREF(result);
        return PyErr_NoMemory();
    }
    return result;
}

static PyObject *load(PyObject *self, PyObject *args)
{
    Py_buffer rows;
    size_t slot;
    if (!PyArg_ParseTuple(args, "O&y*:load", slot_from, &slot, &rows))
        return NULL;
    const char *wrong;
    table_of(self)->changes++;
    if (rows.len % DUMP_ROW_BYTES) {
        sky_table_trim(table_of(self), slot, 0);
        PyErr_Format(PyExc_ValueError, "%zd bytes are no dump of a slot: expected %d for each block", rows.len,
                     DUMP_ROW_BYTES);
    } else if ((wrong = sky_table_load(table_of(self), slot, rows.buf, (size_t)rows.len / DUMP_ROW_BYTES))) {
        if (*wrong)
            PyErr_SetString(PyExc_ValueError, wrong);
        else
            PyErr_NoMemory();
    }
    PyBuffer_Release(&rows);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *size_of(PyObject *self, PyObject *none)
{
    return PyLong_FromSize_t(sizeof(Object) + sky_table_bytes(table_of(self)));
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"capacity", "secret", NULL};
    size_t most;
    unsigned long long secret = 0x9E3779B97F4A7C15u;
    PyObject *given = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O&|O!:PrefixTable", names, capacity_from, &most, &PyLong_Type, &given))
        return NULL;
    if (given && ((secret = PyLong_AsUnsignedLongLong(given)) == (unsigned long long)-1) && PyErr_Occurred())
        return NULL;
    if (!(secret & 1)) {
        PyErr_SetString(PyExc_ValueError, "the secret of a table must be odd");
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self) {
        table_of(self)->capacity = most;
        table_of(self)->rows.secret = secret;
    }
    return self;
}

static void destroy(PyObject *self)
{
    sky_table_clear(table_of(self));
    sky_free(self);
}

static PyMethodDef methods[] = {
    {"match", match, METH_VARARGS, "match(blocks, slots) -> list of int"},
    {"learn", learn, METH_VARARGS, "learn(slot, blocks)"},
    {"drop", drop, METH_VARARGS, "drop(slot, block) -> int"},
    {"forget", forget, METH_O, "forget(slot)"},
    {"set_capacity", set_capacity, METH_VARARGS, "set_capacity(slot, capacity)"},
    {"capacity", capacity, METH_O, "capacity(slot) -> int"},
    {"block_count", held, METH_O, "block_count(slot) -> int"},
    {"oldest", oldest, METH_O, "oldest(slot) -> int"},
    {"used_every", used_every, METH_VARARGS, "used_every(slot, blocks, interval) -> int"},
    {"ages", ages, METH_NOARGS, "ages() -> tuple of used, evicted"},
    {"blocks", blocks, METH_NOARGS, "blocks() -> int"},
    {"changes", changes, METH_NOARGS, "changes() -> int"},
    {"dump", dump, METH_O, "dump(slot) -> bytes"},
    {"load", load, METH_VARARGS, "load(slot, dump)"},
    {"__sizeof__", size_of, METH_NOARGS, "bytes of memory, rows and shelves included"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"PrefixTable(capacity, secret=...): which slots hold which blocks"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_prefix_table_type = {
    .spec = {
        .name = "skymemory.native._fast.PrefixTable",
        .basicsize = sizeof(Object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
