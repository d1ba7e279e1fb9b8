/* Prompts that servers are computing. Twin and contract: twin/queues.py.
 *
 * A tree: each node is a run of blocks that some chains share, its parent the run before. Equal hashes mean equal
 * prefixes, so a run's first hash finds it without its parent, and how far a chain follows it is found by halving.
 * A node counts the chains through it by slot, and is removed with the last. Chains are not copied: a node keeps the memory
 * of the chain that it was created from alive. Parents are followed by pointer, never by content, so even if the memory
 * has changed, counts are taken back where they were added. */
#include "ttft.h"

#include <stdlib.h>
#include <string.h>

enum { FEW = 2 };

typedef struct {
    size_t uses;
    Py_buffer view;
} Memory;

typedef struct {
    uint32_t slot, chains;
} Holder;

typedef struct Node {
    uint64_t key; /* its first hash, as it was then */
    struct Node *parent;
    Memory *memory;
    uint32_t begin, end; /* blocks of the memory */
    uint32_t used, room;
    Holder *holders; /* slots with chains through it: ``few``, or memory of their own */
    Holder few[FEW];
} Node;

typedef struct {
    Node *end;
    uint32_t slot;
    uint32_t generation; /* 0: never used; odd: open */
    uint32_t next;       /* the next free one, behind 0 */
} Record;

struct UnderWay {
    PyObject_HEAD
    uint64_t secret;
    Node **cells; /* by first hash: open addressing, linear probing */
    size_t size, nodes;
    int shift;
    Record *records; /* the first is none */
    uint32_t room, made, vacant;
    size_t open, blocks, most_blocks;
    unsigned long long changes;
};

static size_t home_of(const UnderWay *self, uint64_t key)
{
    return sky_place(self->secret, key, self->shift);
}

static Node *find(const UnderWay *self, uint64_t key)
{
    if (!self->nodes)
        return NULL;
    for (size_t at = home_of(self, key); self->cells[at]; at = (at + 1) & (self->size - 1))
        if (self->cells[at]->key == key)
            return self->cells[at];
    return NULL;
}

static void put(UnderWay *self, Node *node)
{
    size_t at = home_of(self, node->key);
    while (self->cells[at])
        at = (at + 1) & (self->size - 1);
    self->cells[at] = node;
}

/* Room for another node. -1: no memory, and nothing has changed. */
static int reserve(UnderWay *self)
{
    if (2 * (self->nodes + 1) <= self->size)
        return 0;
    size_t size = self->size ? 2 * self->size : 64, before = self->size;
    Node **cells = calloc(size, sizeof(Node *)), **old = self->cells;
    if (!cells)
        return -1;
    self->cells = cells;
    self->size = size;
    self->shift = sky_shift(size);
    for (size_t at = 0; at < before; at++)
        if (old[at])
            put(self, old[at]);
    free(old);
    return 0;
}

/* Removes a cell; those behind it move up as far as their search needs it. */
static void take(UnderWay *self, const Node *node)
{
    size_t mask = self->size - 1, hole = home_of(self, node->key);
    while (self->cells[hole] != node)
        hole = (hole + 1) & mask;
    for (size_t at = (hole + 1) & mask; self->cells[at]; at = (at + 1) & mask) {
        if (((at - home_of(self, self->cells[at]->key)) & mask) >= ((at - hole) & mask)) {
            self->cells[hole] = self->cells[at];
            hole = at;
        }
    }
    self->cells[hole] = NULL;
}

/* Releasing memory may run other code: callers do it when the tree is consistent. */
static void let_go(Memory *memory)
{
    if (--memory->uses == 0) {
        PyBuffer_Release(&memory->view);
        free(memory);
    }
}

static uint64_t hash_of(const Node *node, uint32_t block)
{
    return sky_hash_at(node->memory->view.buf, block);
}

/* Number of a chain's blocks from ``at`` on that are the node's. */
static uint32_t shared_with(const Node *node, const char *hashes, uint32_t at, uint32_t count)
{
    uint32_t low = 0, high = node->end - node->begin;
    if (high > count - at)
        high = count - at;
    if (high && hash_of(node, node->begin + high - 1) == sky_hash_at(hashes, at + high - 1))
        return high;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (hash_of(node, node->begin + middle) == sky_hash_at(hashes, at + middle))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

size_t sky_under_way_open(const UnderWay *self)
{
    return self->open;
}

void sky_under_way_walk(const UnderWay *self, const char *hashes, size_t count, uint32_t *depths, size_t slots)
{
    for (uint32_t at = 0; at < count;) {
        const Node *node = find(self, sky_hash_at(hashes, at));
        uint32_t shared = node ? shared_with(node, hashes, at, (uint32_t)count) : 0;
        if (!shared)
            return;
        at += shared;
        for (uint32_t which = 0; which < node->used; which++) {
            const Holder *holder = &node->holders[which];
            if (holder->slot < slots && depths[holder->slot] < at)
                depths[holder->slot] = at;
        }
        if (shared < node->end - node->begin)
            return;
    }
}

static int count_chain(Node *node, uint32_t slot)
{
    for (uint32_t which = 0; which < node->used; which++)
        if (node->holders[which].slot == slot) {
            node->holders[which].chains++;
            return 0;
        }
    if (node->used == node->room) {
        uint32_t room = 2 * node->room;
        Holder *holders = room < node->room ? NULL : sky_realloc(node->holders == node->few ? NULL : node->holders, room, sizeof(Holder));
        if (!holders)
            return -1;
        if (node->holders == node->few)
            memcpy(holders, node->few, sizeof(node->few));
        node->holders = holders;
        node->room = room;
    }
    node->holders[node->used++] = (Holder){slot, 1};
    return 0;
}

/* Removes one chain of a slot from the nodes up to ``until``, and nodes without any chain. Their memory is linked up by
 * ``freed``, for the caller to release. */
static void uncount(UnderWay *self, Node *node, const Node *until, uint32_t slot, Node **freed)
{
    while (node != until) {
        Node *parent = node->parent;
        for (uint32_t which = 0; which < node->used; which++)
            if (node->holders[which].slot == slot) {
                if (--node->holders[which].chains == 0)
                    node->holders[which] = node->holders[--node->used];
                break;
            }
        if (!node->used) {
            take(self, node);
            self->nodes--;
            self->blocks -= node->end - node->begin;
            node->parent = *freed;
            *freed = node;
        }
        node = parent;
    }
}

static void free_nodes(Node *node)
{
    while (node) {
        Node *next = node->parent;
        let_go(node->memory);
        if (node->holders != node->few)
            free(node->holders);
        free(node);
        node = next;
    }
}

/* A node of no chain yet. There must be a cell for it. NULL: no memory. */
static Node *new_node(UnderWay *self, uint64_t key, Node *parent, Memory *memory, uint32_t begin, uint32_t end)
{
    Node *node = malloc(sizeof(Node));
    if (!node)
        return NULL;
    *node = (Node){key, parent, memory, begin, end, 0, FEW, NULL, {{0, 0}}};
    node->holders = node->few;
    memory->uses++;
    put(self, node);
    self->nodes++;
    return node;
}

/* Splits a node: its first ``shared`` blocks are a new one, its parent. NULL: no memory, or another has the key
 * that the rest would have. */
static Node *split(UnderWay *self, Node *node, uint32_t shared)
{
    uint64_t rest = hash_of(node, node->begin + shared), key = node->key;
    Holder *holders = NULL;
    if (find(self, rest))
        return NULL;
    if (reserve(self) < 0 || (node->used > FEW && !(holders = sky_realloc(NULL, node->room, sizeof(Holder)))))
        return NULL;
    take(self, node);
    node->key = rest;
    put(self, node);
    Node *upper = new_node(self, key, node->parent, node->memory, node->begin, node->begin + shared);
    if (!upper) {
        free(holders);
        take(self, node);
        node->key = key;
        put(self, node);
        return NULL;
    }
    if (holders) {
        upper->holders = holders;
        upper->room = node->room;
    }
    memcpy(upper->holders, node->holders, node->used * sizeof(Holder));
    upper->used = node->used;
    node->begin += shared;
    node->parent = upper;
    return upper;
}

/* A free record, whose number is returned; 0: no memory. */
static uint32_t new_record(UnderWay *self)
{
    if (self->vacant)
        return self->vacant;
    if (self->made + 1 >= self->room) {
        uint32_t room = self->room ? 2 * self->room : 64;
        Record *records = room > self->room ? sky_realloc(self->records, room, sizeof(Record)) : NULL;
        if (!records)
            return 0;
        self->records = records;
        self->room = room;
    }
    self->records[self->made + 1] = (Record){0};
    return self->made + 1;
}

/* The node where a chain ends in the tree, after as many of its blocks as could be inserted. */
static Node *insert(UnderWay *self, Memory *memory, uint32_t count)
{
    const char *hashes = memory->view.buf;
    Node *end = NULL;
    for (uint32_t at = 0; at < count;) {
        Node *node = find(self, sky_hash_at(hashes, at));
        if (!node) {
            if (reserve(self) == 0 && (node = new_node(self, sky_hash_at(hashes, at), end, memory, at, count))) {
                self->blocks += count - at;
                end = node;
            }
            return end;
        }
        uint32_t shared = node->parent == end ? shared_with(node, hashes, at, count) : 0;
        if (shared && shared < node->end - node->begin)
            node = split(self, node, shared);
        if (!shared || !node)
            return end; /* a contradictory chain, or memory is short */
        end = node;
        at += shared;
    }
    return end;
}

static PyObject *add(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    UnderWay *self = (UnderWay *)object;
    size_t slot;
    Node *freed = NULL;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "add: expected a slot and blocks");
        return NULL;
    }
    if (!sky_slot_from(args[0], &slot))
        return NULL;
    Memory *memory = malloc(sizeof(Memory));
    if (!memory)
        return PyErr_NoMemory();
    memory->uses = 1;
    if (PyObject_GetBuffer(args[1], &memory->view, PyBUF_SIMPLE) < 0) {
        free(memory);
        return NULL;
    }
    if (memory->view.len % 8) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", memory->view.len);
        let_go(memory);
        return NULL;
    }
    size_t count = (size_t)memory->view.len / 8;
    if (count > self->most_blocks)
        count = self->most_blocks;
    uint32_t number = new_record(self);
    /* A new node has room for the count, so one without room has other chains. */
    Node *end = number ? insert(self, memory, (uint32_t)count) : NULL, *counted = end;
    while (counted && count_chain(counted, (uint32_t)slot) == 0)
        counted = counted->parent;
    if (counted || !number) {
        uncount(self, end, counted, (uint32_t)slot, &freed);
        free_nodes(freed);
        let_go(memory);
        return PyErr_NoMemory();
    }
    Record *record = &self->records[number];
    if (number == self->vacant)
        self->vacant = record->next;
    else
        self->made = number;
    *record = (Record){end, (uint32_t)slot, record->generation + 1, 0};
    uint32_t generation = record->generation;
    self->open++;
    self->changes++;
    let_go(memory); /* runs no code if the tree uses it; else the tree is consistent by now */
    return PyLong_FromUnsignedLongLong((unsigned long long)generation << 32 | number);
}

static void drop_record(UnderWay *self, uint32_t number, Node **freed)
{
    Record *record = &self->records[number];
    uncount(self, record->end, NULL, record->slot, freed);
    record->end = NULL;
    record->generation++;
    record->next = self->vacant;
    self->vacant = number;
    self->open--;
    self->changes++;
}

static PyObject *drop(PyObject *object, PyObject *ticket)
{
    UnderWay *self = (UnderWay *)object;
    Node *freed = NULL;
    unsigned long long given = PyLong_AsUnsignedLongLong(ticket);
    if (given == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear(); /* not a valid ticket */
        Py_RETURN_NONE;
    }
    uint32_t number = (uint32_t)given, generation = (uint32_t)(given >> 32);
    if (number && number <= self->made && generation & 1 && self->records[number].generation == generation)
        drop_record(self, number, &freed);
    free_nodes(freed);
    Py_RETURN_NONE;
}

static PyObject *forget(PyObject *object, PyObject *number)
{
    UnderWay *self = (UnderWay *)object;
    size_t slot;
    Node *freed = NULL;
    if (!sky_slot_from(number, &slot))
        return NULL;
    for (uint32_t at = 1; at <= self->made; at++)
        if (self->records[at].generation & 1 && self->records[at].slot == slot)
            drop_record(self, at, &freed);
    free_nodes(freed);
    Py_RETURN_NONE;
}

static PyObject *depths(PyObject *object, PyObject *const *args, Py_ssize_t given)
{
    UnderWay *self = (UnderWay *)object;
    Py_buffer blocks;
    PyObject *result = NULL;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "depths: expected blocks and slots");
        return NULL;
    }
    PyObject *asked = PySequence_Tuple(args[1]); /* a copy: a list could change while other code runs */
    if (!asked)
        return NULL;
    if (PyObject_GetBuffer(args[0], &blocks, PyBUF_SIMPLE) < 0) {
        Py_DECREF(asked);
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(asked);
    size_t most = 0, slot;
    for (Py_ssize_t at = 0; at < count && sky_slot_from(PyTuple_GetItem(asked, at), &slot); at++)
        most = slot >= most ? slot + 1 : most;
    if (!PyErr_Occurred() && blocks.len % 8)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", blocks.len);
    uint32_t *found = PyErr_Occurred() ? NULL : calloc(most + 1, sizeof(uint32_t));
    if (!found && !PyErr_Occurred())
        PyErr_NoMemory();
    int any = self->open != 0; /* once: the garbage collector may run code that changes it while a list is made */
    if (found && (result = PyList_New(any ? count : 0)) && any) {
        size_t whole = (size_t)blocks.len / 8;
        sky_under_way_walk(self, blocks.buf, whole < UINT32_MAX ? whole : UINT32_MAX, found, most);
        for (Py_ssize_t at = 0; result && at < count; at++) {
            sky_slot_from(PyTuple_GetItem(asked, at), &slot);
            PyObject *depth = PyLong_FromUnsignedLong(found[slot]);
            if (depth)
                PyList_SetItem(result, at, depth);
            else
                Py_CLEAR(result);
        }
    }
    free(found);
    PyBuffer_Release(&blocks);
    Py_DECREF(asked);
    return result;
}

static Py_ssize_t length(PyObject *self)
{
    return (Py_ssize_t)((UnderWay *)self)->open;
}

static PyObject *blocks_of(PyObject *self, PyObject *none)
{
    return PyLong_FromSize_t(((UnderWay *)self)->blocks);
}

static PyObject *changes(PyObject *self, PyObject *none)
{
    return PyLong_FromUnsignedLongLong(((UnderWay *)self)->changes);
}

static PyObject *most_blocks(PyObject *self, void *none)
{
    return PyLong_FromSize_t(((UnderWay *)self)->most_blocks);
}

static PyObject *size_of(PyObject *object, PyObject *none)
{
    const UnderWay *self = (const UnderWay *)object;
    size_t bytes = sizeof(UnderWay) + self->size * sizeof(Node *) + self->room * sizeof(Record);
    for (size_t at = 0; at < self->size; at++)
        if (self->cells[at]) {
            const Node *node = self->cells[at];
            bytes += sizeof(Node) + (node->holders == node->few ? 0 : node->room * sizeof(Holder));
        }
    return PyLong_FromSize_t(bytes);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    static char *names[] = {"most_blocks", "secret", NULL};
    unsigned long long secret = 0x9E3779B97F4A7C15u;
    long long most;
    PyObject *given = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, named, "L|O!:UnderWay", names, &most, &PyLong_Type, &given))
        return NULL;
    if (most < 0 || most >= UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "at most %lld blocks of a chain: expected 0 or more", most);
        return NULL;
    }
    if (given && ((secret = PyLong_AsUnsignedLongLong(given)) == (unsigned long long)-1) && PyErr_Occurred())
        return NULL;
    if (!(secret & 1)) {
        PyErr_SetString(PyExc_ValueError, "the secret of a table must be odd");
        return NULL;
    }
    PyObject *self = PyType_GenericAlloc(type, 0);
    if (self) {
        ((UnderWay *)self)->secret = secret;
        ((UnderWay *)self)->most_blocks = (size_t)most;
    }
    return self;
}

static void destroy(PyObject *object)
{
    UnderWay *self = (UnderWay *)object;
    for (size_t at = 0; at < self->size; at++)
        if (self->cells[at]) {
            self->cells[at]->parent = NULL;
            free_nodes(self->cells[at]);
        }
    free(self->cells);
    free(self->records);
    sky_free(object);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, "add(slot, blocks) -> ticket"},
    {"drop", drop, METH_O, "drop(ticket)"},
    {"forget", forget, METH_O, "forget(slot)"},
    {"depths", (PyCFunction)(void (*)(void))depths, METH_FASTCALL, "depths(blocks, slots) -> list of int"},
    {"blocks", blocks_of, METH_NOARGS, "blocks() -> int"},
    {"changes", changes, METH_NOARGS, "changes() -> int"},
    {"__sizeof__", size_of, METH_NOARGS, "bytes of memory, the chains' own left out"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef members[] = {
    {"most_blocks", most_blocks, NULL, "of one chain, no more count", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"UnderWay(most_blocks, secret=...): chains that slots are computing"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {Py_sq_length, (void *)length},
    {Py_tp_getset, members},
    {0, NULL},
};

SkyType sky_under_way_type = {
    .spec = {
        .name = "skymemory.native._fast.UnderWay",
        .basicsize = sizeof(UnderWay),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
