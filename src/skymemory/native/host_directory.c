/* The owner's side of a host arena's directory: what it says of values, and which of them clients hold. The owner is one
 * process, which calls this under one lock. */
#include "host.h"

typedef struct {
    PyObject_HEAD
    Py_buffer directory;
    HostMap map;
    uint32_t *free_entries;
    uint64_t free_count;
} Directory;

static void change(HostMap *map) { __atomic_fetch_add(&map->head->changes, 1, __ATOMIC_SEQ_CST); }

/* The bucket of an entry's key; the entry stands there. */
static uint64_t bucket_of(const HostMap *map, uint32_t number)
{
    uint64_t bucket = sky_host_bucket(map, map->entries[number].key);
    while (map->buckets[bucket] != number + 1)
        bucket = (bucket + 1) & map->mask;
    return bucket;
}

/* Take a bucket away, and close its gap: a probe ends at the first empty bucket. */
static void close_bucket(HostMap *map, uint64_t gap)
{
    change(map);
    for (uint64_t next = (gap + 1) & map->mask; map->buckets[next]; next = (next + 1) & map->mask) {
        uint64_t home = sky_host_bucket(map, map->entries[map->buckets[next] - 1].key);
        if (((next - home) & map->mask) >= ((next - gap) & map->mask)) {
            HOST_STORE(map->buckets[gap], map->buckets[next]);
            gap = next;
        }
    }
    HOST_STORE(map->buckets[gap], 0);
    change(map);
}

static void fill(HostEntry *entry, const uint64_t key[HOST_KEY_WORDS], uint64_t offset, uint64_t bytes, uint64_t check)
{
    uint64_t version = entry->version | 1;
    __atomic_store_n(&entry->version, version, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int at = 0; at < HOST_KEY_WORDS; at++)
        __atomic_store_n(&entry->key[at], key[at], __ATOMIC_RELAXED);
    __atomic_store_n(&entry->offset, offset, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->bytes, bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&entry->check, check, __ATOMIC_RELAXED);
    HOST_STORE(entry->version, version + 1);
}

/* No reader takes this entry any more from now on: who held its bytes before is seen by `held`. */
static void retire(Directory *self, HostEntry *entry)
{
    __atomic_store_n(&entry->version, entry->version | 1, __ATOMIC_SEQ_CST);
    self->free_entries[self->free_count++] = (uint32_t)(entry - self->map.entries);
}

static PyObject *put(PyObject *object, PyObject *args)
{
    Directory *self = (Directory *)object;
    HostMap *map = &self->map;
    PyObject *given;
    unsigned long long offset, bytes, check;
    uint64_t key[HOST_KEY_WORDS];
    HostFound old;
    if (!PyArg_ParseTuple(args, "SKKK:put", &given, &offset, &bytes, &check) || !sky_host_key(given, key))
        return NULL;
    if (offset > map->head->values_bytes || bytes > map->head->values_bytes - offset) {
        PyErr_Format(PyExc_ValueError, "%llu bytes at %llu: beyond the arena", bytes, offset);
        return NULL;
    }
    check &= UINT32_MAX | HOST_CHECKED;
    if (!self->free_count)
        Py_RETURN_FALSE;
    uint32_t number = self->free_entries[--self->free_count];
    int known = sky_host_find(map, key, &old);
    fill(&map->entries[number], key, offset, bytes, check);
    if (known == 1) {
        uint64_t bucket = bucket_of(map, (uint32_t)(old.entry - map->entries));
        change(map);
        HOST_STORE(map->buckets[bucket], number + 1);
        change(map);
        retire(self, old.entry);
        Py_RETURN_TRUE;
    }
    uint64_t bucket = sky_host_bucket(map, key);
    while (map->buckets[bucket])
        bucket = (bucket + 1) & map->mask;
    HOST_STORE(map->buckets[bucket], number + 1);
    Py_RETURN_TRUE;
}

static PyObject *take(PyObject *object, PyObject *given)
{
    Directory *self = (Directory *)object;
    uint64_t key[HOST_KEY_WORDS];
    HostFound found;
    if (!sky_host_key(given, key))
        return NULL;
    if (sky_host_find(&self->map, key, &found) != 1)
        Py_RETURN_FALSE;
    close_bucket(&self->map, bucket_of(&self->map, (uint32_t)(found.entry - self->map.entries)));
    retire(self, found.entry);
    Py_RETURN_TRUE;
}

/* The entry of the value that lies there under this key. 1 found, 0 absent or another value, -1 an exception. */
static int find_at(Directory *self, PyObject *given, uint64_t offset, HostFound *found)
{
    uint64_t key[HOST_KEY_WORDS];
    if (!sky_host_key(given, key))
        return -1;
    return sky_host_find(&self->map, key, found) == 1 && found->offset == offset;
}

static PyObject *mark_checked(PyObject *object, PyObject *args)
{
    Directory *self = (Directory *)object;
    PyObject *given;
    unsigned long long offset;
    HostFound found;
    if (!PyArg_ParseTuple(args, "SK:mark_checked", &given, &offset))
        return NULL;
    int known = find_at(self, given, offset, &found);
    if (known == 1)
        HOST_STORE(found.entry->check, found.check | HOST_CHECKED);
    return known < 0 ? NULL : PyBool_FromLong(known);
}

static PyObject *set_end(PyObject *object, PyObject *args)
{
    Directory *self = (Directory *)object;
    PyObject *given;
    unsigned long long offset, end_ns;
    HostFound found;
    if (!PyArg_ParseTuple(args, "SKK:set_end", &given, &offset, &end_ns))
        return NULL;
    int known = find_at(self, given, offset, &found);
    if (known == 1) {
        if (end_ns) /* before the flag: who sees that reads this */
            __atomic_store_n(&self->map.ends[found.entry - self->map.entries], end_ns, __ATOMIC_RELAXED);
        HOST_STORE(found.entry->check, end_ns ? found.check | HOST_EXPIRES : found.check & ~HOST_EXPIRES);
    }
    return known < 0 ? NULL : PyBool_FromLong(known);
}

static PyObject *entries(PyObject *object, PyObject *none)
{
    Directory *self = (Directory *)object;
    PyObject *list = PyList_New(0);
    for (uint64_t bucket = 0; list && bucket <= self->map.mask; bucket++) {
        uint32_t number = self->map.buckets[bucket];
        if (!number)
            continue;
        HostEntry *entry = &self->map.entries[number - 1];
        PyObject *row = Py_BuildValue("(y#KKKK)", (const char *)entry->key, (Py_ssize_t)sizeof entry->key,
                                      (unsigned long long)entry->offset, (unsigned long long)entry->bytes,
                                      (unsigned long long)entry->check,
                                      (unsigned long long)(entry->check & HOST_EXPIRES ? self->map.ends[number - 1] : 0));
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

/* Begin with what the directory says; whatever does not fit is dropped: a crash may have left a change half made. */
static int recover(Directory *self)
{
    HostMap *map = &self->map;
    uint64_t kept = 0;
    uint8_t *live = calloc(map->count, 1);
    if (!live)
        return 0;
    for (uint64_t bucket = 0; bucket <= map->mask; bucket++) {
        uint32_t number = map->buckets[bucket];
        if (!number || number > map->count)
            continue;
        const HostEntry *entry = &map->entries[number - 1];
        live[number - 1] = !(entry->version & 1) && entry->offset <= map->head->values_bytes &&
                           entry->bytes <= map->head->values_bytes - entry->offset;
    }
    map->head->awake = 0;
    __atomic_fetch_add(&map->head->epoch, 1, __ATOMIC_SEQ_CST);
    if (map->head->changes & 1)
        map->head->changes++;
    change(map);
    memset(map->buckets, 0, (size_t)(map->mask + 1) * sizeof *map->buckets);
    for (uint32_t number = (uint32_t)map->count; number-- > 0;) {
        HostEntry *entry = &map->entries[number];
        HostFound twin;
        if (live[number] && sky_host_find(map, entry->key, &twin) != 1 && ++kept) {
            uint64_t bucket = sky_host_bucket(map, entry->key);
            while (map->buckets[bucket])
                bucket = (bucket + 1) & map->mask;
            map->buckets[bucket] = number + 1;
            entry->check &= ~HOST_CHECKED;
        } else {
            retire(self, entry);
        }
    }
    change(map);
    free(live);
    return 1;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    PyObject *given;
    if (!PyArg_ParseTuple(args, "O:HostDirectory", &given))
        return NULL;
    Directory *self = (Directory *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(given, &self->directory, PyBUF_WRITABLE) < 0 || !sky_host_open(&self->map, &self->directory, 1)) {
        Py_DECREF(self);
        return NULL;
    }
    self->free_entries = sky_realloc(NULL, (size_t)self->map.count, sizeof *self->free_entries);
    if (!self->free_entries || !recover(self)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void destroy(PyObject *object)
{
    Directory *self = (Directory *)object;
    free(self->free_entries);
    if (self->directory.obj)
        PyBuffer_Release(&self->directory);
    sky_free(object);
}

/* Adds the offsets that one page holds to a set; whatever its client wrote there. */
static int add_held(PyObject *set, const Py_buffer *page)
{
    const HostPage *head = page->buf;
    uint64_t room = page->len < HOST_HEAD_BYTES ? 0 : ((uint64_t)page->len - HOST_HEAD_BYTES) / 8;
    uint64_t count = room ? HOST_LOAD(head->highest) : 0;
    const uint64_t *holds = (const uint64_t *)((const uint8_t *)head + HOST_HEAD_BYTES);
    for (uint64_t at = 0; at < count && at < room; at++) {
        uint64_t held = HOST_LOAD(holds[at]);
        PyObject *offset = held ? PyLong_FromUnsignedLongLong(held - 1) : NULL;
        if (held && (!offset || PySet_Add(set, offset) < 0)) {
            Py_XDECREF(offset);
            return 0;
        }
        Py_XDECREF(offset);
    }
    return 1;
}

static PyObject *held(PyObject *object, PyObject *pages)
{
    PyObject *tuple = sky_tuple(pages, "pages: expected a list of buffers"), *set = tuple ? PySet_New(NULL) : NULL;
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after what was retired, before the pages are read */
    for (Py_ssize_t at = 0; set && at < PyTuple_Size(tuple); at++) {
        Py_buffer page;
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, at), &page, PyBUF_SIMPLE) < 0) {
            Py_CLEAR(set);
            break;
        }
        if (!add_held(set, &page))
            Py_CLEAR(set);
        PyBuffer_Release(&page);
    }
    Py_XDECREF(tuple);
    return set;
}

static PyObject *uses(PyObject *object, PyObject *args)
{
    Py_buffer page;
    unsigned long long from;
    if (!PyArg_ParseTuple(args, "y*K:uses", &page, &from))
        return NULL;
    const HostPage *head = page.buf;
    uint64_t room = page.len < HOST_HEAD_BYTES ? 0 : ((uint64_t)page.len - HOST_HEAD_BYTES) / 8;
    uint64_t holds = room ? head->holds : 0, ring = room ? head->uses : 0, until = room ? HOST_LOAD(head->used) : 0;
    PyObject *list = PyList_New(0);
    if (holds > room || ring > room - holds || !ring)
        until = from;
    const uint64_t *notes = (const uint64_t *)((const uint8_t *)head + HOST_HEAD_BYTES) + holds;
    for (uint64_t at = until - from > ring ? until - ring : from; list && at != until; at++) {
        PyObject *offset = PyLong_FromUnsignedLongLong(HOST_RELAXED(notes[at % ring]));
        if (!offset || PyList_Append(list, offset) < 0)
            Py_CLEAR(list);
        Py_XDECREF(offset);
    }
    PyBuffer_Release(&page);
    return list ? Py_BuildValue("(KN)", (unsigned long long)until, list) : NULL;
}

/* One slot of a page, or NULL with ValueError. The buffer is to be released. */
static HostSlot *slot_of(PyObject *given, unsigned long long number, Py_buffer *page)
{
    uint64_t count;
    if (PyObject_GetBuffer(given, page, PyBUF_WRITABLE) < 0)
        return NULL;
    HostSlot *slots = sky_host_slots(page->buf, (uint64_t)page->len, &count);
    if (slots && number < count)
        return &slots[number];
    PyErr_Format(PyExc_ValueError, "the page has no slot %llu", number);
    PyBuffer_Release(page);
    return NULL;
}

static PyObject *set_awake(PyObject *object, PyObject *given)
{
    int awake = PyObject_IsTrue(given);
    if (awake < 0)
        return NULL;
    __atomic_store_n(&((Directory *)object)->map.head->awake, (uint64_t)awake, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *give_room(PyObject *object, PyObject *args)
{
    PyObject *given;
    unsigned long long number, offset, room_bytes;
    Py_buffer page;
    if (!PyArg_ParseTuple(args, "OKKK:give_room", &given, &number, &offset, &room_bytes))
        return NULL;
    HostSlot *slot = slot_of(given, number, &page);
    if (!slot)
        return NULL;
    uint64_t state = HOST_LOAD(slot->state);
    if ((state & HOST_KIND) == HOST_EMPTY) {
        __atomic_store_n(&slot->offset, offset, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->room_bytes, room_bytes, __ATOMIC_RELAXED);
        HOST_STORE(slot->state, (state + 4) | HOST_ROOM);
    }
    PyBuffer_Release(&page);
    return PyBool_FromLong((state & HOST_KIND) == HOST_EMPTY);
}

static PyObject *take_room(PyObject *object, PyObject *args)
{
    PyObject *given;
    unsigned long long number;
    Py_buffer page;
    if (!PyArg_ParseTuple(args, "OK:take_room", &given, &number))
        return NULL;
    HostSlot *slot = slot_of(given, number, &page);
    if (!slot)
        return NULL;
    uint64_t state = HOST_LOAD(slot->state);
    int taken = (state & HOST_KIND) == HOST_ROOM &&
                __atomic_compare_exchange_n(&slot->state, &state, state & ~(uint64_t)HOST_KIND, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    PyBuffer_Release(&page);
    return PyBool_FromLong(taken);
}

static PyObject *end_post(PyObject *object, PyObject *args)
{
    PyObject *given;
    unsigned long long number;
    Py_buffer page;
    if (!PyArg_ParseTuple(args, "OK:end_post", &given, &number))
        return NULL;
    HostSlot *slot = slot_of(given, number, &page);
    if (!slot)
        return NULL;
    uint64_t state = HOST_LOAD(slot->state), posted = HOST_RELAXED(slot->number);
    if ((state & HOST_KIND) == HOST_FULL) {
        HOST_STORE(slot->state, state & ~(uint64_t)HOST_KIND);
        __atomic_store_n(&((HostPage *)page.buf)->entered, posted, __ATOMIC_SEQ_CST);
    }
    PyBuffer_Release(&page);
    Py_RETURN_NONE;
}

static PyObject *posted(PyObject *object, PyObject *pages)
{
    PyObject *tuple = sky_tuple(pages, "pages: expected a list of buffers"), *list = tuple ? PyList_New(0) : NULL;
    for (Py_ssize_t at = 0; list && at < PyTuple_Size(tuple); at++) {
        Py_buffer page;
        if (PyObject_GetBuffer(PyTuple_GetItem(tuple, at), &page, PyBUF_SIMPLE) < 0) {
            Py_CLEAR(list);
            break;
        }
        const HostPage *head = page.buf;
        int some = page.len >= HOST_HEAD_BYTES &&
                   __atomic_load_n(&head->posted, __ATOMIC_SEQ_CST) != __atomic_load_n(&head->entered, __ATOMIC_SEQ_CST);
        PyBuffer_Release(&page);
        PyObject *number = some ? PyLong_FromSsize_t(at) : NULL;
        if (some && (!number || PyList_Append(list, number) < 0))
            Py_CLEAR(list);
        Py_XDECREF(number);
    }
    Py_XDECREF(tuple);
    return list;
}

static PyObject *posts(PyObject *object, PyObject *given)
{
    Py_buffer page;
    uint64_t count;
    if (PyObject_GetBuffer(given, &page, PyBUF_SIMPLE) < 0)
        return NULL;
    HostSlot *slots = sky_host_slots(page.buf, (uint64_t)page.len, &count);
    PyObject *list = PyList_New(0);
    for (uint64_t at = 0; slots && list && at < count; at++) {
        const HostSlot *slot = &slots[at];
        if ((HOST_LOAD(slot->state) & HOST_KIND) != HOST_FULL)
            continue;
        PyObject *row = Py_BuildValue("(KKKKKy#KKKKy#)", (unsigned long long)slot->at_ns, (unsigned long long)slot->number,
                                      (unsigned long long)at,
                                      (unsigned long long)slot->offset, (unsigned long long)slot->room_bytes, (const char *)slot->key,
                                      (Py_ssize_t)sizeof slot->key, (unsigned long long)slot->bytes, (unsigned long long)(uint32_t)slot->check,
                                      (unsigned long long)(slot->check >> 32), (unsigned long long)slot->depth, (const char *)slot->parent,
                                      (Py_ssize_t)sizeof slot->parent);
        if (!row || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    PyBuffer_Release(&page);
    if (list && PyList_Sort(list) < 0)
        Py_CLEAR(list);
    return list;
}

static PyMethodDef methods[] = {
    {"put", put, METH_VARARGS, "put(key, offset, size_bytes, check) -> bool"},
    {"take", take, METH_O, "take(key) -> bool"},
    {"mark_checked", mark_checked, METH_VARARGS, "mark_checked(key, offset) -> bool"},
    {"set_end", set_end, METH_VARARGS, "set_end(key, offset, end_ns) -> bool"},
    {"entries", entries, METH_NOARGS, "entries() -> list of (key, offset, size_bytes, check, end_ns)"},
    {"held_offsets", held, METH_O, "held_offsets(pages) -> set"},
    {"uses", uses, METH_VARARGS, "uses(page, since) -> (count, list of offsets)"},
    {"set_awake", set_awake, METH_O, "set_awake(awake)"},
    {"give_room", give_room, METH_VARARGS, "give_room(page, slot, offset, room_bytes) -> bool"},
    {"take_room", take_room, METH_VARARGS, "take_room(page, slot) -> bool"},
    {"posted", posted, METH_O, "posted(pages) -> list of positions"},
    {"posts", posts, METH_O, "posts(page) -> list of (at_ns, number, slot, offset, room_bytes, key, size_bytes, crc, kind, depth, parent)"},
    {"end_post", end_post, METH_VARARGS, "end_post(page, slot)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"HostDirectory(directory): the owner's side of a host arena's directory"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {0, NULL},
};

SkyType sky_host_directory_type = {
    .spec = {
        .name = "skymemory.native._fast.HostDirectory",
        .basicsize = sizeof(Directory),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
