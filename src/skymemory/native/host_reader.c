/* A client's side of a host arena: values found and held without asking their owner, and copied into it.
 *
 * A hold is a hazard pointer: the client writes the value's place into its page and then looks again whether the entry is
 * still the same; the owner retires the entry and then reads all pages. One of both sees the other. */
#define _GNU_SOURCE
#include "host.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif

enum { PIECE_BYTES = 32 << 10, STREAMED_BYTES = 1 << 20 };

typedef struct {
    PyObject_HEAD
    Py_buffer directory, values;
    HostMap map;
    HostPage *head;
    size_t page_bytes;
    int page_fd; /* its lock says that this process lives */
    uint64_t connections; /* room that was given out over an earlier one is void */
    uint64_t *holds, *uses;
    uint32_t *free_holds;
    uint64_t hold_count, use_count, free_count, slot_count;
    HostSlot *slots;
    uint64_t filling; /* a bit for each slot that a thread writes to */
    pid_t process;
} Reader;

typedef struct {
    PyObject_HEAD
    Reader *reader;
    uint64_t offset, check;
    Py_ssize_t size;
    uint32_t hold;
} View;

/* --- A value that is held --- */

static int get_buffer(PyObject *object, Py_buffer *buffer, int flags)
{
    View *self = (View *)object;
    void *bytes = (char *)self->reader->values.buf + self->offset;
    return PyBuffer_FillInfo(buffer, object, bytes, self->size, 1, flags);
}

static PyObject *is_sound(PyObject *object, PyObject *none)
{
    View *self = (View *)object;
    const uint8_t *bytes = (const uint8_t *)self->reader->values.buf + self->offset;
    uint32_t crc;
    if (self->size < SKY_RELEASE_BYTES) {
        crc = sky_crc32(0, bytes, (size_t)self->size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        crc = sky_crc32(0, bytes, (size_t)self->size);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(crc == (uint32_t)self->check);
}

static PyObject *get_checked(PyObject *object, void *none) { return PyBool_FromLong((((View *)object)->check & HOST_CHECKED) != 0); }
static PyObject *get_crc(PyObject *object, void *none) { return PyLong_FromUnsignedLong((uint32_t)((View *)object)->check); }
static PyObject *get_offset(PyObject *object, void *none) { return PyLong_FromUnsignedLongLong(((View *)object)->offset); }

static void destroy_view(PyObject *object)
{
    View *self = (View *)object;
    Reader *reader = self->reader;
    if (reader && reader->process == getpid()) { /* else the hold is a parent's */
        HOST_STORE(reader->holds[self->hold], 0);
        reader->free_holds[reader->free_count++] = self->hold;
    }
    Py_XDECREF((PyObject *)reader);
    sky_free(object);
}

static PyMethodDef view_methods[] = {
    {"is_sound", is_sound, METH_NOARGS, "is_sound() -> bool"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef view_fields[] = {
    {"checked", get_checked, NULL, "whether the owner has compared the bytes with their CRC-32", NULL},
    {"crc", get_crc, NULL, "the CRC-32 of the bytes as they were stored", NULL},
    {"offset", get_offset, NULL, "where the bytes lie in the arena", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_doc, (void *)"A value of a host arena, held until this object ends"},
    {Py_tp_dealloc, (void *)destroy_view},
    {Py_tp_methods, view_methods},
    {Py_tp_getset, view_fields},
    {Py_bf_getbuffer, (void *)get_buffer},
    {0, NULL},
};

SkyType sky_host_view_type = {
    .spec = {
        .name = "skymemory.native._fast.HostView",
        .basicsize = sizeof(View),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = view_slots,
    },
};

/* --- Room that is written in place: a view whose `check` is the grant --- */

static uint64_t grant(Reader *self)
{
    return __atomic_load_n(&self->map.head->epoch, __ATOMIC_SEQ_CST) << 32 |
           __atomic_load_n(&self->connections, __ATOMIC_SEQ_CST);
}

static int get_writable_buffer(PyObject *object, Py_buffer *buffer, int flags)
{
    View *self = (View *)object;
    if (self->reader->process != getpid()) {
        PyErr_SetString(PyExc_BufferError, "this room is the parent process's: a forked child may not write there");
        return -1;
    }
    return PyBuffer_FillInfo(buffer, object, (char *)self->reader->values.buf + self->offset, self->size, 0, flags);
}

static PyObject *get_room_crc(PyObject *object, PyObject *known)
{
    View *self = (View *)object;
    Reader *reader = self->reader;
    unsigned long long crc = 0;
    if (known != Py_None) {
        crc = PyLong_AsUnsignedLongLong(known);
        if (PyErr_Occurred())
            return NULL;
    } else if (reader->process == getpid()) {
        Py_BEGIN_ALLOW_THREADS
        crc = sky_crc32(0, (const uint8_t *)reader->values.buf + self->offset, (size_t)self->size);
        Py_END_ALLOW_THREADS
    }
    if (reader->process == getpid() && grant(reader) == self->check)
        return PyLong_FromUnsignedLongLong(crc);
    Py_RETURN_NONE;
}

static PyMethodDef room_methods[] = {
    {"crc", get_room_crc, METH_O, "crc(known) -> CRC-32 or None"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot room_slots[] = {
    {Py_tp_doc, (void *)"Room of a host arena, held until this object ends"},
    {Py_tp_dealloc, (void *)destroy_view},
    {Py_tp_methods, room_methods},
    {Py_bf_getbuffer, (void *)get_writable_buffer},
    {0, NULL},
};

SkyType sky_host_room_type = {
    .spec = {
        .name = "skymemory.native._fast.HostRoom",
        .basicsize = sizeof(View),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        .slots = room_slots,
    },
};

/* --- The client --- */

/* The slot with what this process has stored last under a key and the owner has not entered yet, or NULL. */
static HostSlot *posted_slot(Reader *self, const uint64_t key[HOST_KEY_WORDS], uint64_t *state)
{
    HostSlot *last = NULL;
    if (self->head->posted == __atomic_load_n(&self->head->entered, __ATOMIC_SEQ_CST))
        return NULL;
    for (uint64_t at = 0; at < self->slot_count; at++) {
        HostSlot *slot = &self->slots[at];
        uint64_t now = HOST_LOAD(slot->state);
        if ((now & HOST_KIND) == HOST_FULL && !memcmp(slot->key, key, sizeof slot->key) && (!last || slot->number > last->number)) {
            last = slot;
            *state = now;
        }
    }
    return last;
}

/* As sky_host_find, but an expired value is absent, though the owner has not removed it. */
static int find_living(Reader *self, const uint64_t key[HOST_KEY_WORDS], HostFound *found)
{
    int known = sky_host_find(&self->map, key, found);
    return known == 1 && found->end_ns && found->end_ns <= sky_host_now_ns() ? 0 : known;
}

static int find(Reader *self, const uint64_t key[HOST_KEY_WORDS], HostFound *found)
{
    uint64_t state;
    HostSlot *slot = posted_slot(self, key, &state);
    if (!slot)
        return find_living(self, key, found);
    *found = (HostFound){NULL, state, slot->offset, slot->bytes, (uint32_t)slot->check, 0};
    return HOST_LOAD(slot->state) == state ? 1 : find_living(self, key, found);
}

/* Hold what a key's entry names: 1, and `found` is what is held; 0 absent; -1 the owner changed it all the time. */
static int hold_one(Reader *self, const uint64_t key[HOST_KEY_WORDS], uint32_t hold, HostFound *found)
{
    for (int tries = 0; tries < HOST_MOST_TRIES; tries++) {
        uint64_t state;
        HostSlot *slot = posted_slot(self, key, &state);
        int known = slot ? 1 : find_living(self, key, found);
        if (known != 1)
            return known;
        if (slot)
            *found = (HostFound){NULL, state, slot->offset, slot->bytes, (uint32_t)slot->check, 0};
        __atomic_store_n(&self->holds[hold], found->offset + 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (__atomic_load_n(slot ? &slot->state : &found->entry->version, __ATOMIC_SEQ_CST) == found->version)
            return found->offset <= (uint64_t)self->values.len && found->bytes <= (uint64_t)self->values.len - found->offset;
        HOST_STORE(self->holds[hold], 0);
    }
    return -1;
}

static void note_use(Reader *self, uint64_t offset)
{
    uint64_t used = self->head->used;
    __atomic_store_n(&self->uses[used % self->use_count], offset, __ATOMIC_RELAXED);
    HOST_STORE(self->head->used, used + 1);
}

/* A hold that is free, or -1 if all are in use. */
static int64_t free_hold(Reader *self)
{
    if (!self->free_count)
        return -1;
    uint32_t hold = self->free_holds[self->free_count - 1];
    if (hold >= self->head->highest)
        __atomic_store_n(&self->head->highest, (uint64_t)hold + 1, __ATOMIC_SEQ_CST);
    return hold;
}

/* A view of the key's value, None if absent, False if that cannot be found or held now, NULL with an exception. */
static PyObject *view_of(Reader *self, PyObject *given)
{
    uint64_t key[HOST_KEY_WORDS];
    HostFound found;
    if (!sky_host_key(given, key))
        return NULL;
    int64_t hold = free_hold(self);
    if (hold < 0)
        Py_RETURN_FALSE;
    int held = hold_one(self, key, (uint32_t)hold, &found);
    View *view = held == 1 ? (View *)PyType_GenericAlloc(sky_host_view_type.object, 0) : NULL;
    if (!view) {
        HOST_STORE(self->holds[hold], 0);
        return held == 1 ? NULL : Py_NewRef(held == 0 ? Py_None : Py_False);
    }
    self->free_count--;
    view->reader = (Reader *)Py_NewRef((PyObject *)self);
    view->offset = found.offset, view->size = (Py_ssize_t)found.bytes, view->check = found.check, view->hold = (uint32_t)hold;
    note_use(self, found.offset);
    return (PyObject *)view;
}

static PyObject *hold(PyObject *object, PyObject *keys)
{
    PyObject *tuple = sky_tuple(keys, "keys: expected a list of bytes"), *list = tuple ? PyList_New(PyTuple_Size(tuple)) : NULL;
    for (Py_ssize_t at = 0; list && at < PyTuple_Size(tuple); at++) {
        PyObject *view = view_of((Reader *)object, PyTuple_GetItem(tuple, at));
        if (!view || PyList_SetItem(list, at, view) < 0)
            Py_CLEAR(list);
    }
    Py_XDECREF(tuple);
    return list;
}

static PyObject *sizes(PyObject *object, PyObject *keys)
{
    Reader *self = (Reader *)object;
    PyObject *tuple = sky_tuple(keys, "keys: expected a list of bytes"), *list = tuple ? PyList_New(PyTuple_Size(tuple)) : NULL;
    for (Py_ssize_t at = 0; list && at < PyTuple_Size(tuple); at++) {
        uint64_t key[HOST_KEY_WORDS];
        HostFound found;
        int known = sky_host_key(PyTuple_GetItem(tuple, at), key) ? find(self, key, &found) : -2;
        PyObject *size = known == 1 ? PyLong_FromUnsignedLongLong(found.bytes) : known == -2 ? NULL : Py_NewRef(Py_None);
        if (!size || PyList_SetItem(list, at, size) < 0)
            Py_CLEAR(list);
    }
    Py_XDECREF(tuple);
    return list;
}

static PyObject *prefix(PyObject *object, PyObject *keys)
{
    Reader *self = (Reader *)object;
    PyObject *tuple = sky_tuple(keys, "keys: expected a list of bytes");
    Py_ssize_t at = 0;
    for (; tuple && at < PyTuple_Size(tuple); at++) {
        uint64_t key[HOST_KEY_WORDS];
        HostFound found;
        if (!sky_host_key(PyTuple_GetItem(tuple, at), key))
            Py_CLEAR(tuple);
        else if (find(self, key, &found) != 1)
            break;
    }
    if (!tuple)
        return NULL;
    Py_DECREF(tuple);
    return PyLong_FromSsize_t(at);
}

/* A copy that reads nothing of its target first, and leaves none of it in the processor's cache. */
static void copy_past_cache(uint8_t *to, const uint8_t *from, size_t size)
{
#ifdef __SSE2__
    size_t whole = (uintptr_t)to % 16 ? 0 : size / 64 * 64;
    for (size_t at = 0; at < whole; at += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + at)), b = _mm_loadu_si128((const __m128i *)(from + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + at + 32)), d = _mm_loadu_si128((const __m128i *)(from + at + 48));
        _mm_stream_si128((__m128i *)(to + at), a);
        _mm_stream_si128((__m128i *)(to + at + 16), b);
        _mm_stream_si128((__m128i *)(to + at + 32), c);
        _mm_stream_si128((__m128i *)(to + at + 48), d);
    }
    memcpy(to + whole, from + whole, size - whole);
    _mm_sfence();
#else
    memcpy(to, from, size);
#endif
}

/* Copy piece by piece, each into the checksum while it is in the processor's cache. */
static uint32_t copied(uint8_t *to, const uint8_t *from, size_t size)
{
    uint32_t crc = 0;
    for (size_t at = 0; at < size; at += PIECE_BYTES) {
        size_t piece = size - at < PIECE_BYTES ? size - at : PIECE_BYTES;
        if (size < STREAMED_BYTES)
            memcpy(to + at, from + at, piece);
        else
            copy_past_cache(to + at, from + at, piece);
        crc = sky_crc32(crc, from + at, piece);
    }
    return crc;
}

/* Room is held while it is written. Who gives it to others begins with a new epoch or connection and then reads the holds;
 * who writes holds it and then looks whether both are what they were: one of them sees the other. */
static int claim(Reader *self, int64_t hold, uint64_t offset, uint64_t granted)
{
    __atomic_store_n(&self->holds[hold], offset + 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return grant(self) == granted;
}

/* Whether these bytes lie in the arena and may be written; else ValueError. */
static int may_write(const Reader *self, uint64_t offset, uint64_t size)
{
    if (!self->values.readonly && offset <= (uint64_t)self->values.len && size <= (uint64_t)self->values.len - offset)
        return 1;
    PyErr_Format(PyExc_ValueError, "%llu bytes at %llu: beyond the arena, or it is mapped read-only",
                 (unsigned long long)size, (unsigned long long)offset);
    return 0;
}

static PyObject *give_room(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    unsigned long long offset, size, granted;
    if (!PyArg_ParseTuple(args, "KKK:room", &offset, &size, &granted) || !may_write(self, offset, size))
        return NULL;
    int64_t hold = free_hold(self);
    if (hold < 0)
        Py_RETURN_NONE;
    View *room = (View *)PyType_GenericAlloc(sky_host_room_type.object, 0);
    if (!room)
        return NULL;
    self->free_count--;
    room->reader = (Reader *)Py_NewRef((PyObject *)self);
    room->offset = offset, room->size = (Py_ssize_t)size, room->check = granted, room->hold = (uint32_t)hold;
    if (!claim(self, hold, offset, granted)) {
        Py_DECREF((PyObject *)room);
        Py_RETURN_NONE;
    }
    return (PyObject *)room;
}

static PyObject *write_value(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    unsigned long long offset, granted;
    Py_buffer value;
    uint32_t crc = 0;
    if (!PyArg_ParseTuple(args, "Ky*K:write", &offset, &value, &granted))
        return NULL;
    if (!may_write(self, offset, (uint64_t)value.len)) {
        PyBuffer_Release(&value);
        return NULL;
    }
    int64_t hold = free_hold(self);
    int may = 0;
    if (hold >= 0) {
        self->free_count--;
        may = claim(self, hold, offset, granted);
        uint8_t *to = (uint8_t *)self->values.buf + offset;
        if (may && value.len < SKY_RELEASE_BYTES) {
            crc = copied(to, value.buf, (size_t)value.len);
        } else if (may) {
            Py_BEGIN_ALLOW_THREADS
            crc = copied(to, value.buf, (size_t)value.len);
            Py_END_ALLOW_THREADS
        }
        HOST_STORE(self->holds[hold], 0);
        self->free_holds[self->free_count++] = (uint32_t)hold;
    }
    PyBuffer_Release(&value);
    return may ? PyLong_FromUnsignedLong(crc) : Py_NewRef(Py_None);
}

/* A slot with room of this size, which is held from then on; -1 if there is none, -2 if the owner has not emptied it yet. Who
 * takes room back changes its state and then reads the holds. */
static int64_t held_slot(Reader *self, uint64_t room_bytes, uint32_t hold, uint64_t *state, uint64_t *offset)
{
    int64_t none = -1;
    for (uint64_t at = 0; at < self->slot_count; at++) {
        HostSlot *slot = &self->slots[at];
        *state = HOST_LOAD(slot->state);
        *offset = HOST_RELAXED(slot->offset);
        if (HOST_RELAXED(slot->room_bytes) != room_bytes || (*state & HOST_KIND) == HOST_EMPTY)
            continue;
        if (self->filling >> at & 1 || (*state & HOST_KIND) == HOST_FULL) {
            none = -2;
            continue;
        }
        __atomic_store_n(&self->holds[hold], *offset + 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        uint64_t all = (uint64_t)self->values.len;
        if (__atomic_load_n(&slot->state, __ATOMIC_SEQ_CST) == *state && *offset <= all && room_bytes <= all - *offset)
            return (int64_t)at;
        HOST_STORE(self->holds[hold], 0);
    }
    return none;
}

/* The value is in the slot's room: 1 it is stored, 2 and the owner has to be woken, 0 the room was taken back. */
static int post(Reader *self, HostSlot *slot, uint64_t state)
{
    uint64_t before = self->head->posted;
    slot->number = before + 1;
    slot->at_ns = sky_host_now_ns();
    if (!__atomic_compare_exchange_n(&slot->state, &state, (state & ~(uint64_t)HOST_KIND) | HOST_FULL, 0, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST))
        return 0;
    __atomic_store_n(&self->head->posted, before + 1, __ATOMIC_SEQ_CST);
    uint64_t waiting = before + 1 - __atomic_load_n(&self->head->entered, __ATOMIC_SEQ_CST);
    return waiting == HOST_WAKE_AT || !__atomic_load_n(&self->map.head->awake, __ATOMIC_SEQ_CST) ? 2 : 1;
}

static PyObject *store(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    PyObject *given, *given_parent;
    Py_buffer value;
    int kind, done = 0;
    unsigned long long depth;
    uint64_t key[HOST_KEY_WORDS], parent[HOST_KEY_WORDS] = {0}, state, offset;
    if (!PyArg_ParseTuple(args, "Sy*iKO:store", &given, &value, &kind, &depth, &given_parent))
        return NULL;
    if (!sky_host_key(given, key) || (given_parent != Py_None && !sky_host_key(given_parent, parent))) {
        PyBuffer_Release(&value);
        return NULL;
    }
    uint64_t size = (uint64_t)value.len, unit = size >= HOST_LARGE_BYTES ? HOST_LARGE_UNIT : HOST_UNIT;
    uint64_t room_bytes = size ? (size + unit - 1) / unit * unit : unit;
    int64_t hold = self->values.readonly ? -1 : free_hold(self);
    int64_t at = hold < 0 ? -1 : held_slot(self, room_bytes, (uint32_t)hold, &state, &offset);
    if (at >= 0) {
        HostSlot *slot = &self->slots[at];
        uint8_t *to = (uint8_t *)self->values.buf + offset;
        uint32_t crc;
        self->free_count--;
        self->filling |= UINT64_C(1) << at;
        if (size < SKY_RELEASE_BYTES) {
            crc = copied(to, value.buf, (size_t)size);
        } else {
            Py_BEGIN_ALLOW_THREADS
            crc = copied(to, value.buf, (size_t)size);
            Py_END_ALLOW_THREADS
        }
        memcpy(slot->key, key, sizeof key);
        memcpy(slot->parent, parent, sizeof parent);
        slot->bytes = size, slot->check = (uint64_t)(kind & 255) << 32 | crc, slot->depth = depth;
        done = post(self, slot, state);
        self->filling &= ~(UINT64_C(1) << at);
        HOST_STORE(self->holds[hold], 0);
        self->free_holds[self->free_count++] = (uint32_t)hold;
    }
    PyBuffer_Release(&value);
    return PyLong_FromLong(at == -2 ? -1 : done);
}

/* --- Its life --- */

static int open_page(Reader *self)
{
    struct stat status;
    if (fstat(self->page_fd, &status) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return 0;
    }
    uint64_t bytes = (uint64_t)status.st_size, room = bytes < HOST_HEAD_BYTES ? 0 : (bytes - HOST_HEAD_BYTES) / 8;
    if (!room) {
        PyErr_SetString(PyExc_ValueError, "a client's page without room for a hold");
        return 0;
    }
    HostPage *head = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, self->page_fd, 0);
    if (head == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        return 0;
    }
    self->head = head, self->page_bytes = bytes;
    if (head->magic != HOST_PAGE_MAGIC || head->holds < 1 || head->holds > room || head->holds > UINT32_MAX ||
        head->uses < 1 || head->uses > room - head->holds) {
        PyErr_SetString(PyExc_ValueError, "a client's page of another release, or a damaged one");
        return 0;
    }
    self->hold_count = head->holds, self->use_count = head->uses;
    self->holds = (uint64_t *)((uint8_t *)head + HOST_HEAD_BYTES);
    self->uses = self->holds + self->hold_count;
    self->slots = sky_host_slots(head, bytes, &self->slot_count);
    if (!self->slots)
        self->slot_count = 0;
    self->free_holds = sky_realloc(NULL, (size_t)self->hold_count, sizeof *self->free_holds);
    if (!self->free_holds) {
        PyErr_NoMemory();
        return 0;
    }
    for (uint64_t at = self->hold_count; at-- > 0;) /* the lowest is the first to be taken */
        self->free_holds[self->free_count++] = (uint32_t)at;
    return 1;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *named)
{
    PyObject *directory, *values;
    int page_fd;
    if (!PyArg_ParseTuple(args, "OOi:HostReader", &directory, &values, &page_fd))
        return NULL;
    Reader *self = (Reader *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->process = getpid();
    self->page_fd = page_fd;
    if (PyObject_GetBuffer(directory, &self->directory, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(values, &self->values, PyBUF_SIMPLE) < 0 ||
        !sky_host_open(&self->map, &self->directory, 0) || !open_page(self)) {
        self->page_fd = -1; /* it stays the caller's */
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void destroy(PyObject *object)
{
    Reader *self = (Reader *)object;
    Py_buffer *buffers[] = {&self->directory, &self->values};
    if (self->head)
        munmap(self->head, self->page_bytes);
    if (self->page_fd >= 0)
        close(self->page_fd);
    for (int at = 0; at < 2; at++)
        if (buffers[at]->obj)
            PyBuffer_Release(buffers[at]);
    free(self->free_holds);
    sky_free(object);
}

static PyObject *get_held(PyObject *object, void *none)
{
    Reader *self = (Reader *)object;
    return PyLong_FromUnsignedLongLong(self->hold_count - self->free_count);
}

static PyObject *let_go(PyObject *object, PyObject *none)
{
    Reader *self = (Reader *)object;
    if (self->page_fd >= 0)
        close(self->page_fd);
    self->page_fd = -1;
    Py_RETURN_NONE;
}

/* Let the kernel map pages now: the first touch of each costs more than filling it. */
static PyObject *populate(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    unsigned long long offset, size;
    if (!PyArg_ParseTuple(args, "KK:populate", &offset, &size))
        return NULL;
    uint64_t all = (uint64_t)self->values.len;
    if (offset > all || size > all - offset) {
        PyErr_Format(PyExc_ValueError, "%llu bytes at %llu: beyond the arena", size, offset);
        return NULL;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = madvise((uint8_t *)self->values.buf + offset, (size_t)size, MADV_POPULATE_WRITE);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(status == 0);
}

static PyObject *renew(PyObject *object, PyObject *none)
{
    __atomic_fetch_add(&((Reader *)object)->connections, 1, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"populate", populate, METH_VARARGS, "populate(offset, size) -> bool"},
    {"renew", renew, METH_NOARGS, "renew(): room that was given out before is void"},
    {"let_go", let_go, METH_NOARGS, "let_go(): in a forked child, close its copy of the page's descriptor"},
    {"hold", hold, METH_O, "hold(keys) -> list of HostView, None or False"},
    {"sizes", sizes, METH_O, "sizes(keys) -> list of int or None"},
    {"prefix", prefix, METH_O, "prefix(keys) -> int"},
    {"room", give_room, METH_VARARGS, "room(offset, size_bytes, grant) -> HostRoom or None"},
    {"write", write_value, METH_VARARGS, "write(offset, value, grant) -> CRC-32 or None"},
    {"store", store, METH_VARARGS, "store(key, value, kind, depth, parent) -> -1, 0, 1 or 2"},
    {NULL, NULL, 0, NULL},
};

static PyObject *get_epoch(PyObject *object, void *none)
{
    return PyLong_FromUnsignedLongLong(HOST_LOAD(((Reader *)object)->map.head->epoch));
}

static PyObject *get_grant(PyObject *object, void *none) { return PyLong_FromUnsignedLongLong(grant((Reader *)object)); }

static PyGetSetDef fields[] = {
    {"grant", get_grant, NULL, "what room is given out under: it is void once this is another", NULL},
    {"epoch", get_epoch, NULL, "how many owners the arena has had", NULL},
    {"held", get_held, NULL, "how many values are held", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_doc, (void *)"HostReader(directory, values, page_fd): a client's side of a host arena; the descriptor is its own from then on"},
    {Py_tp_new, (void *)make},
    {Py_tp_dealloc, (void *)destroy},
    {Py_tp_methods, methods},
    {Py_tp_getset, fields},
    {0, NULL},
};

SkyType sky_host_reader_type = {
    .spec = {
        .name = "skymemory.native._fast.HostReader",
        .basicsize = sizeof(Reader),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = type_slots,
    },
};
