/* Hashes of the blocks of a prompt: XXH64 (Yann Collet's, by its specification), chained or each for itself, and chains
 * of SHA-256; and its tokens as bytes. Twin and contract: twin/backend.py; XXH64 is tested against the xxhash library. */
#include "sha.h"

#define PRIME_1 0x9E3779B185EBCA87u
#define PRIME_2 0xC2B2AE3D27D4EB4Fu
#define PRIME_3 0x165667B19E3779F9u
#define PRIME_4 0x85EBCA77C2B2AE63u
#define PRIME_5 0x27D4EB2F165667C5u

enum { STRIPE_BYTES = 32, LINK_BYTES = 8 };

static uint64_t rotate(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

/* Little-endian whatever the machine; compilers make one load of it. */
static uint64_t read_8(const uint8_t *at)
{
    return (uint64_t)at[0] | (uint64_t)at[1] << 8 | (uint64_t)at[2] << 16 | (uint64_t)at[3] << 24 |
           (uint64_t)at[4] << 32 | (uint64_t)at[5] << 40 | (uint64_t)at[6] << 48 | (uint64_t)at[7] << 56;
}

static uint32_t read_4(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void write_8(uint8_t *at, uint64_t value)
{
    for (int byte = 0; byte < 8; byte++)
        at[byte] = (uint8_t)(value >> 8 * byte);
}

static void write_4(uint8_t *at, uint32_t value)
{
    for (int byte = 0; byte < 4; byte++)
        at[byte] = (uint8_t)(value >> 8 * byte);
}

static uint64_t mixed(uint64_t lane, uint64_t input)
{
    return rotate(lane + input * PRIME_2, 31) * PRIME_1;
}

static uint64_t merged(uint64_t hash, uint64_t lane)
{
    return (hash ^ mixed(0, lane)) * PRIME_1 + PRIME_4;
}

static void stripe(uint64_t lanes[4], const uint8_t *at)
{
    for (int lane = 0; lane < 4; lane++)
        lanes[lane] = mixed(lanes[lane], read_8(at + 8 * lane));
}

/* XXH64 of ``size`` bytes and then, where ``link`` is not NULL, of the eight of ``link``. */
static uint64_t xxh64(const uint8_t *data, size_t size, const uint8_t *link, uint64_t seed)
{
    uint8_t rest[STRIPE_BYTES + LINK_BYTES];
    size_t whole = size / STRIPE_BYTES * STRIPE_BYTES, left = size - whole;
    uint64_t total = size + (link ? LINK_BYTES : 0), hash;
    const uint8_t *at = rest;
    if (left) /* memcpy from a NULL buffer is undefined even for no bytes */
        memcpy(rest, data + whole, left);
    if (link) {
        memcpy(rest + left, link, LINK_BYTES);
        left += LINK_BYTES;
    }
    if (total >= STRIPE_BYTES) {
        uint64_t lanes[4] = {seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1};
        for (size_t done = 0; done < whole; done += STRIPE_BYTES)
            stripe(lanes, data + done);
        if (left >= STRIPE_BYTES) {
            stripe(lanes, at);
            at += STRIPE_BYTES;
            left -= STRIPE_BYTES;
        }
        hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
        for (int lane = 0; lane < 4; lane++)
            hash = merged(hash, lanes[lane]);
    } else {
        hash = seed + PRIME_5;
    }
    hash += total;
    for (; left >= 8; at += 8, left -= 8)
        hash = rotate(hash ^ mixed(0, read_8(at)), 27) * PRIME_1 + PRIME_4;
    if (left >= 4) {
        hash = rotate(hash ^ read_4(at) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        at += 4;
        left -= 4;
    }
    for (; left; at++, left--)
        hash = rotate(hash ^ *at * PRIME_5, 11) * PRIME_1;
    hash = (hash ^ hash >> 33) * PRIME_2;
    hash = (hash ^ hash >> 29) * PRIME_3;
    return hash ^ hash >> 32;
}

static void hash_all(const uint8_t *data, size_t blocks, size_t block_bytes, uint64_t seed, int chained, char *out)
{
    uint8_t link[LINK_BYTES];
    write_8(link, seed);
    for (size_t block = 0; block < blocks; block++) {
        const uint8_t *at = data + block * block_bytes;
        uint64_t hash = chained ? xxh64(at, block_bytes, link, 0) : xxh64(at, block_bytes, NULL, seed);
        write_8(link, hash);
        memcpy(out + 8 * block, &hash, 8);
    }
}

static PyObject *hashes(PyObject *args, const char *format, int chained)
{
    Py_buffer data;
    Py_ssize_t block_bytes;
    PyObject *seed_object, *result = NULL;
    if (!PyArg_ParseTuple(args, format, &data, &block_bytes, &seed_object))
        return NULL;
    uint64_t seed = PyLong_AsUnsignedLongLongMask(seed_object);
    if (block_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes: expected 1 or more", block_bytes);
    } else if (seed != (uint64_t)-1 || !PyErr_Occurred()) {
        size_t blocks = (size_t)(data.len / block_bytes);
        result = sky_new_bytes((Py_ssize_t)blocks, 8);
        if (result && data.len < SKY_RELEASE_BYTES) {
            hash_all(data.buf, blocks, (size_t)block_bytes, seed, chained, PyBytes_AsString(result));
        } else if (result) {
            char *out = PyBytes_AsString(result);
            Py_BEGIN_ALLOW_THREADS
            hash_all(data.buf, blocks, (size_t)block_bytes, seed, chained, out);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    return result;
}

PyObject *sky_py_chain_hashes(PyObject *self, PyObject *args)
{
    return hashes(args, "y*nO:chain_hashes", 1);
}

PyObject *sky_py_piece_hashes(PyObject *self, PyObject *args)
{
    return hashes(args, "y*nO:piece_hashes", 0);
}

/* --- SHA-256 --- */

/* Each digest goes where its bytes object keeps it: no other code has these objects yet. */
static void chain(const Py_buffer *data, size_t block_bytes, const uint8_t *previous, uint8_t **digests, size_t blocks)
{
    const uint8_t *at = data->buf;
    for (size_t block = 0; block < blocks; block++, at += block_bytes) {
        sky_sha256(previous, SHA_BYTES, at, block_bytes, digests[block]);
        previous = digests[block];
    }
}

static PyObject *chained(const Py_buffer *data, Py_ssize_t block_bytes, const uint8_t *seed)
{
    Py_ssize_t blocks = data->len / block_bytes;
    uint8_t **digests = PyMem_New(uint8_t *, (size_t)blocks + 1);
    PyObject *found = digests ? PyList_New(blocks) : PyErr_NoMemory();
    for (Py_ssize_t block = 0; found && block < blocks; block++) {
        PyObject *digest = PyBytes_FromStringAndSize(NULL, SHA_BYTES);
        if (digest) {
            PyList_SetItem(found, block, digest);
            digests[block] = (uint8_t *)PyBytes_AsString(digest);
        } else {
            Py_CLEAR(found);
        }
    }
    if (found && data->len < SKY_RELEASE_BYTES) {
        chain(data, (size_t)block_bytes, seed, digests, (size_t)blocks);
    } else if (found) {
        Py_BEGIN_ALLOW_THREADS
        chain(data, (size_t)block_bytes, seed, digests, (size_t)blocks);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(digests);
    return found;
}

PyObject *sky_py_chain_sha256(PyObject *self, PyObject *args)
{
    Py_buffer data, seed;
    Py_ssize_t block_bytes;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*ny*:chain_sha256", &data, &block_bytes, &seed))
        return NULL;
    if (!sky_sha_ready())
        PyErr_SetString(PyExc_RuntimeError, "no libcrypto: the twin hashes");
    else if (block_bytes < 1)
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes: expected 1 or more", block_bytes);
    else if (seed.len != SHA_BYTES)
        PyErr_Format(PyExc_ValueError, "a seed of %zd bytes: expected %d", seed.len, (int)SHA_BYTES);
    else
        result = chained(&data, block_bytes, seed.buf);
    PyBuffer_Release(&data);
    PyBuffer_Release(&seed);
    return result;
}

/* --- tokens --- */

/* The value of a plain int in 0 .. 2^32-1; -1 for anything else. */
static long long token_of(PyObject *token)
{
    int overflow;
    if (!PyLong_CheckExact(token))
        return -1;
    long long value = PyLong_AsLongLongAndOverflow(token, &overflow);
    return overflow || value > UINT32_MAX ? -1 : value;
}

PyObject *sky_py_pack_tokens(PyObject *self, PyObject *tokens)
{
    if (!PyList_CheckExact(tokens) && !PyTuple_CheckExact(tokens))
        Py_RETURN_NONE;
    PyObject *(*item)(PyObject *, Py_ssize_t) = PyList_CheckExact(tokens) ? PyList_GetItem : PyTuple_GetItem;
    PyObject *packed = NULL;
    Py_ssize_t count = PyObject_Size(tokens);
    if (!(packed = sky_new_bytes(count, 4)))
        return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(packed);
    for (Py_ssize_t at = 0; at < count; at++, out += 4) {
        long long token = token_of(item(tokens, at));
        if (token < 0) {
            Py_DECREF(packed);
            Py_RETURN_NONE;
        }
        write_4(out, (uint32_t)token);
    }
    return packed;
}
