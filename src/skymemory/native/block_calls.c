/* The table of blocks as a Python type, and the records of a journal that change it. Twin and contract: twin/blocks.py. */
#include "blocks.h"

#include <structmember.h>

#include <stdlib.h>
#include <string.h>

enum { FRAME_BYTES = 12, FRAME_CRC_AT = 8, ADD_BYTES = 44, MARKER = 0x5B, OP_ADD_BLOCKS = 1, OP_REMOVE_BLOCKS = 2, FEW = 64 };

typedef struct {
    PyObject_HEAD
    Blocks table;
} Object;

static const uint8_t *key_from(PyObject *key)
{
    char *bytes;
    Py_ssize_t size;
    if (!PyBytes_CheckExact(key) && !PyBytes_Check(key))
        return NULL;
    return PyBytes_AsStringAndSize(key, &bytes, &size) == 0 && size == HASH_BYTES ? (const uint8_t *)bytes : NULL;
}

static PyObject *hash_from(const Blocks *table, uint32_t at)
{
    if (at == NO_BLOCK)
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)table->blocks[at].hash, HASH_BYTES);
}

static uint32_t block_from(const Object *self, PyObject *key)
{
    uint32_t at;
    const uint8_t *hash = key_from(key);
    sky_blocks_look_up(&self->table, &hash, 1, &at);
    return at;
}

static PyObject *enter(PyObject *self, PyObject *args)
{
    Py_buffer hashes, rows;
    PyObject *first, *parent, *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*O!O:enter", &hashes, &rows, &PyLong_Type, &first, &parent))
        return NULL;
    Py_ssize_t count = hashes.len / HASH_BYTES;
    int overflow;
    long long start = PyLong_AsLongLongAndOverflow(first, &overflow);
    const uint8_t *above = key_from(parent);
    if (hashes.len % HASH_BYTES)
        PyErr_Format(PyExc_ValueError, "%zd bytes of hashes: expected a multiple of %d", hashes.len, HASH_BYTES);
    else if (rows.len % ROW_BYTES)
        PyErr_Format(PyExc_ValueError, "%zd bytes of rows: expected a multiple of %d", rows.len, ROW_BYTES);
    else if (rows.len / ROW_BYTES != count)
        PyErr_Format(PyExc_ValueError, "%zd hashes and %zd rows: one row for each is expected", count, rows.len / ROW_BYTES);
    else if (!above && parent != Py_None)
        PyErr_Format(PyExc_ValueError, "a parent must be None or %d bytes", HASH_BYTES);
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < count; i++)
        if (group_of((const uint8_t *)rows.buf + i * ROW_BYTES) >= MOST_GROUPS)
            PyErr_Format(PyExc_ValueError, "a row names a group beyond %d", MOST_GROUPS - 1);
    if (!PyErr_Occurred()) {
        int64_t fresh = -1;
        if (overflow || start < 0 || start > (long long)UINT32_MAX - count || (start == 0) != !above)
            result = Py_NewRef(Py_None);
        else if (!sky_blocks_enter(&((Object *)self)->table, hashes.buf, rows.buf, NULL, (size_t)count, (uint32_t)start, above,
                                   &fresh))
            PyErr_NoMemory();
        else
            result = fresh < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(fresh);
    }
    PyBuffer_Release(&hashes);
    PyBuffer_Release(&rows);
    return result;
}

static PyObject *remove_block(PyObject *self, PyObject *key)
{
    const uint8_t *hash = key_from(key);
    return PyBool_FromLong(hash && sky_blocks_remove(&((Object *)self)->table, hash));
}

/* Look up a sequence of keys. ``rows``: a list of their rows; else how many of the first are all there. */
static PyObject *look_up(const Object *self, PyObject *keys, int rows)
{
    PyObject *asked = sky_tuple(keys, "keys: expected a sequence of bytes"), *result = NULL;
    if (!asked)
        return NULL;
    size_t count = (size_t)PyTuple_Size(asked);
    const uint8_t *few[FEW], **hashes = count <= FEW ? few : sky_realloc(NULL, count, sizeof *hashes);
    uint32_t few_found[FEW], *found = !rows ? NULL : count <= FEW ? few_found : sky_realloc(NULL, count, sizeof *found);
    if (rows) /* before the table is read: the garbage collector may run here, and code that changes the table */
        result = PyList_New((Py_ssize_t)count);
    if (!hashes || (rows && !found)) {
        Py_CLEAR(result);
        PyErr_NoMemory();
    } else if (result || !rows) {
        for (size_t i = 0; i < count; i++)
            hashes[i] = key_from(PyTuple_GetItem(asked, (Py_ssize_t)i));
        size_t leading = sky_blocks_look_up(&self->table, hashes, count, found);
        if (!rows)
            result = PyLong_FromSize_t(leading);
        for (size_t i = 0; rows && result && i < count; i++) {
            PyObject *row = found[i] == NO_BLOCK ? Py_NewRef(Py_None)
                                                 : PyBytes_FromStringAndSize(
                                                       (const char *)self->table.blocks[found[i]].row, ROW_BYTES);
            if (row)
                PyList_SetItem(result, (Py_ssize_t)i, row);
            else
                Py_CLEAR(result);
        }
    }
    if (hashes != few)
        free(hashes);
    if (found != few_found)
        free(found);
    Py_DECREF(asked);
    return result;
}

static PyObject *find(PyObject *self, PyObject *keys)
{
    return look_up((Object *)self, keys, 1);
}

static PyObject *leading(PyObject *self, PyObject *keys)
{
    return look_up((Object *)self, keys, 0);
}

static PyObject *place(PyObject *self, PyObject *key)
{
    const Blocks *table = &((Object *)self)->table;
    uint32_t at = block_from((Object *)self, key);
    if (at == NO_BLOCK)
        Py_RETURN_NONE;
    return Py_BuildValue("kN", (unsigned long)table->blocks[at].depth, hash_from(table, table->blocks[at].parent));
}

static PyObject *below(PyObject *self, PyObject *key)
{
    const Blocks *table = &((Object *)self)->table;
    const uint8_t *hash = key_from(key);
    uint32_t at = hash ? sky_blocks_named(table, hash) : NO_BLOCK;
    if (at == NO_BLOCK || table->blocks[at].present)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong((unsigned long)table->blocks[at].depth + 1);
}

static PyObject *held(PyObject *self, PyObject *none)
{
    const Blocks *table = &((Object *)self)->table;
    PyObject *list = PyList_New(0); /* not of the table's size: other code may run here, and change that */
    for (size_t i = 0; list && i < table->groups; i++) {
        PyObject *its = PyFloat_FromDouble(table->held[i]);
        if (!its || PyList_Append(list, its) < 0)
            Py_CLEAR(list);
        Py_XDECREF(its);
    }
    return list;
}

static PyObject *items(PyObject *self, PyObject *none)
{
    const Blocks *table = &((Object *)self)->table;
    PyObject *list = PyList_New(0);
    for (uint32_t at = 0; list && at < table->used; at++) {
        const Block *block = &table->blocks[at];
        if (!block->present)
            continue;
        PyObject *item = Py_BuildValue("Nkk", hash_from(table, at), (unsigned long)block->depth,
                                       (unsigned long)group_of(block->row));
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Whether the table is still as it was; with an exception if not. */
static int is_unchanged(const Blocks *table, uint64_t changes)
{
    if (table->changes == changes)
        return 1;
    PyErr_SetString(PyExc_RuntimeError, "the table was changed while its runs were visited");
    return 0;
}

/* One run, from ``head`` along ``follows``, as the arguments of ``visit``. */
static PyObject *run_of(const Blocks *table, uint64_t changes, const uint32_t *follows, uint32_t head)
{
    Py_ssize_t count = 0;
    for (uint32_t at = head; at != NO_BLOCK; at = follows[at])
        count++;
    PyObject *hashes = sky_new_bytes(count, HASH_BYTES), *rows = sky_new_bytes(count, ROW_BYTES);
    PyObject *groups = PyDict_New(), *parent = NULL, *numbers = NULL, *run = NULL;
    uint32_t at = head, last = 0, last_place = NO_BLOCK, depth = 0;
    int good = hashes && rows && groups && is_unchanged(table, changes); /* the garbage collector may have run code */
    if (good) {
        depth = table->blocks[head].depth;
        parent = hash_from(table, table->blocks[head].parent);
    }
    for (Py_ssize_t i = 0; good && i < count; i++, at = follows[at]) {
        const Block *block = &table->blocks[at];
        uint8_t *row = (uint8_t *)PyBytes_AsString(rows) + i * ROW_BYTES;
        memcpy(PyBytes_AsString(hashes) + i * HASH_BYTES, block->hash, HASH_BYTES);
        memcpy(row, block->row, ROW_BYTES);
        if (last_place == NO_BLOCK || group_of(row) != last) {
            last = group_of(row);
            PyObject *number = PyLong_FromUnsignedLong(last), *fresh = PyLong_FromSsize_t(PyDict_Size(groups));
            PyObject *known = number && fresh ? sky_set_default(groups, number, fresh) : NULL;
            last_place = known ? (uint32_t)PyLong_AsUnsignedLong(known) : 0;
            Py_XDECREF(number);
            Py_XDECREF(fresh);
            if (!known)
                break;
        }
        set_group(row, last_place);
    }
    if (parent && !PyErr_Occurred() && (numbers = PyDict_Keys(groups)))
        run = Py_BuildValue("kOOOO", (unsigned long)depth, parent, hashes, rows, numbers);
    Py_XDECREF(parent);
    Py_XDECREF(hashes);
    Py_XDECREF(rows);
    Py_XDECREF(groups);
    Py_XDECREF(numbers);
    return run;
}

static PyObject *runs(PyObject *self, PyObject *visit)
{
    const Blocks *table = &((Object *)self)->table;
    uint32_t used = table->used;
    uint64_t changes = table->changes;
    uint32_t *follows = sky_realloc(NULL, (size_t)used + 1, sizeof *follows);
    uint8_t *inside = calloc((size_t)used + 1, 1); /* it follows another in its run */
    int good = follows && inside;
    if (!good)
        PyErr_NoMemory();
    for (uint32_t at = 0; good && at < used; at++)
        follows[at] = NO_BLOCK;
    for (uint32_t at = 0; good && at < used; at++) {
        uint32_t above = table->blocks[at].present ? table->blocks[at].parent : NO_BLOCK;
        if (above != NO_BLOCK && table->blocks[above].present && follows[above] == NO_BLOCK)
            follows[above] = at, inside[at] = 1;
    }
    for (uint32_t at = 0; good && at < used; at++) {
        if (!table->blocks[at].present || inside[at])
            continue;
        PyObject *run = run_of(table, changes, follows, at), *done = run ? PyObject_Call(visit, run, NULL) : NULL;
        good = done != NULL;
        Py_XDECREF(run);
        Py_XDECREF(done);
        good = good && is_unchanged(table, changes);
    }
    free(follows);
    free(inside);
    return good ? Py_NewRef(Py_None) : NULL;
}

/* The numbers of the groups of one record after the other: most have the same. */
typedef struct {
    PyObject *numbers_of, *raw;
    uint32_t *numbers;
    size_t count;
    int sized;
} Groups;

static int groups_from(Groups *groups, const uint8_t *raw, Py_ssize_t raw_bytes, uint32_t count, int sized)
{
    if (groups->raw && groups->sized == sized && groups->count == count && PyBytes_Size(groups->raw) == raw_bytes &&
        !memcmp(PyBytes_AsString(groups->raw), raw, (size_t)raw_bytes))
        return 1;
    Py_CLEAR(groups->raw);
    PyObject *packed = PyBytes_FromStringAndSize((const char *)raw, raw_bytes);
    PyObject *given = packed ? PyObject_CallFunction(groups->numbers_of, "OkO", packed, (unsigned long)count,
                                                     sized ? Py_True : Py_False)
                             : NULL;
    PyObject *listed = given ? sky_tuple(given, "numbers of groups: expected a sequence") : NULL;
    size_t many = listed ? (size_t)PyTuple_Size(listed) : 0;
    uint32_t *numbers = listed ? sky_realloc(groups->numbers, many, sizeof *numbers) : NULL;
    if (listed && !numbers)
        PyErr_NoMemory();
    for (size_t i = 0; numbers && i < many && !PyErr_Occurred(); i++) {
        unsigned long number = PyLong_AsUnsignedLong(PyTuple_GetItem(listed, (Py_ssize_t)i));
        if (!PyErr_Occurred() && number >= MOST_GROUPS)
            PyErr_Format(PyExc_ValueError, "a row names a group beyond %d", MOST_GROUPS - 1);
        numbers[i] = (uint32_t)number;
    }
    if (numbers)
        groups->numbers = numbers, groups->count = many;
    Py_XDECREF(given);
    Py_XDECREF(listed);
    if (PyErr_Occurred() || many != count) { /* asked again next time */
        Py_XDECREF(packed);
        return PyErr_Occurred() ? -1 : 1;
    }
    groups->raw = packed, groups->sized = sized;
    return 1;
}

/* 1: applied, 0: the caller's, -1: an exception. */
static int apply_add(Blocks *table, const uint8_t *body, size_t size, int sized, Groups *groups)
{
    static const uint8_t none[HASH_BYTES];
    if (size < ADD_BYTES)
        return 0;
    uint32_t start = le32(body);
    size_t count = le32(body + 4);
    const uint8_t *parent = body + 12;
    if (count > (size - ADD_BYTES) / (HASH_BYTES + ROW_BYTES) || (start == 0 && memcmp(parent, none, HASH_BYTES)) ||
        start > UINT32_MAX - count)
        return 0;
    size_t groups_bytes = size - ADD_BYTES - count * (HASH_BYTES + ROW_BYTES);
    int known = groups_from(groups, body + ADD_BYTES, (Py_ssize_t)groups_bytes, le32(body + 8), sized);
    if (known <= 0)
        return known;
    const uint8_t *hashes = body + ADD_BYTES + groups_bytes, *rows = hashes + count * HASH_BYTES;
    for (size_t i = 0; i < count; i++)
        if (group_of(rows + i * ROW_BYTES) >= groups->count)
            return 0;
    int64_t fresh;
    if (!sky_blocks_enter(table, hashes, rows, groups->numbers, count, start, start ? parent : NULL, &fresh)) {
        PyErr_NoMemory();
        return -1;
    }
    return fresh >= 0;
}

static int apply(Blocks *table, int op, int version, const uint8_t *body, size_t size, Groups *groups)
{
    if (op == OP_ADD_BLOCKS && (version == 1 || version == 2))
        return apply_add(table, body, size, version == 2, groups);
    if (op != OP_REMOVE_BLOCKS || version != 1 || size % HASH_BYTES)
        return 0;
    for (size_t at = 0; at < size; at += HASH_BYTES)
        sky_blocks_remove(table, body + at);
    return 1;
}

static PyObject *replay(PyObject *self, PyObject *args)
{
    static const uint8_t blank[4];
    Py_buffer data;
    Py_ssize_t at;
    Groups groups = {0};
    if (!PyArg_ParseTuple(args, "y*nO:replay", &data, &at, &groups.numbers_of))
        return NULL;
    int applied = 1;
    if (at < 0 || at > data.len) {
        PyErr_Format(PyExc_ValueError, "records from byte %zd on, of %zd", at, data.len);
        applied = -1;
    }
    while (applied > 0 && data.len - at >= FRAME_BYTES) {
        const uint8_t *frame = (const uint8_t *)data.buf + at, *body = frame + FRAME_BYTES;
        size_t size = le32(frame + 4);
        if (frame[0] != MARKER || size > (size_t)(data.len - at - FRAME_BYTES))
            break;
        uint32_t crc = sky_crc32(sky_crc32(sky_crc32(0, frame, FRAME_CRC_AT), blank, 4), body, size);
        if (crc != le32(frame + FRAME_CRC_AT))
            break;
        applied = apply(&((Object *)self)->table, frame[1], frame[2] | frame[3] << 8, body, size, &groups);
        if (applied > 0)
            at += FRAME_BYTES + (Py_ssize_t)size;
    }
    PyBuffer_Release(&data);
    Py_XDECREF(groups.raw);
    free(groups.numbers);
    return applied < 0 ? NULL : PyLong_FromSsize_t(at);
}

static PyObject *clear(PyObject *self, PyObject *none)
{
    Blocks *table = &((Object *)self)->table, empty;
    if (!sky_blocks_init(&empty))
        return PyErr_NoMemory();
    empty.capacity_bytes = table->capacity_bytes;
    empty.changes = table->changes + 1;
    sky_blocks_free(table);
    *table = empty;
    Py_RETURN_NONE;
}

static Py_ssize_t length(PyObject *self)
{
    return ((Object *)self)->table.present;
}

static PyObject *size_of(PyObject *self, PyObject *none)
{
    const Blocks *table = &((Object *)self)->table;
    return PyLong_FromSize_t(sizeof(Object) + table->room * sizeof(Block) + (sizeof(Slot) << table->bits) +
                             table->groups * sizeof(double));
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, ":BlockTable", names))
        return NULL;
    Object *self = (Object *)PyType_GenericAlloc(type, 0);
    if (self && !sky_blocks_init(&self->table)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void destroy(PyObject *self)
{
    sky_blocks_free(&((Object *)self)->table);
    sky_free(self);
}

static PyMethodDef methods[] = {
    {"enter", enter, METH_VARARGS, "enter(hashes, rows, start, parent) -> int or None"},
    {"remove", remove_block, METH_O, "remove(key) -> bool"},
    {"find", find, METH_O, "find(keys) -> list of rows"},
    {"leading", leading, METH_O, "leading(keys) -> int"},
    {"place", place, METH_O, "place(key) -> (depth, parent) or None"},
    {"below", below, METH_O, "below(key) -> int or None"},
    {"group_bytes", held, METH_NOARGS, "group_bytes() -> list of float"},
    {"items", items, METH_NOARGS, "items() -> list of (key, depth, group)"},
    {"runs", runs, METH_O, "runs(visit)"},
    {"replay", replay, METH_VARARGS, "replay(data, at, numbers_of) -> int"},
    {"clear", clear, METH_NOARGS, "clear()"},
    {"__sizeof__", size_of, METH_NOARGS, "bytes of memory"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"capacity_bytes", T_DOUBLE, offsetof(Object, table.capacity_bytes), 0, "of the memory that the values are in"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"BlockTable(): the blocks of a radix index"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_sq_length, (void *)length},
    {0, NULL},
};

SkyType sky_block_table_type = {
    .spec = {
        .name = "skymemory.native._fast.BlockTable",
        .basicsize = sizeof(Object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
