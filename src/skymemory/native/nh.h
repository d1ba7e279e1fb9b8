/* The hash of payloads that MACs cover: NH of UMAC (RFC 4418, 5.2.2) in two Toeplitz passes over blocks of 1,024 bytes. */
#ifndef SKYMEMORY_NH_H
#define SKYMEMORY_NH_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of a block, of its hash, and of the key: a block and the second pass's shift. */
enum { NH_BLOCK = 1024, NH_HASH_BYTES = 16, NH_KEY_BYTES = NH_BLOCK + 16 };

/* The hashes of a payload's blocks, NH_HASH_BYTES each, at ``out``; how many bytes. Twin: twin/segments.py. */
size_t sky_nh(const uint8_t *key, const uint8_t *payload, size_t size, uint8_t *out);

#endif
