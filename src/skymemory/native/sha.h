/* SHA-256, and HMAC-SHA-256 of packets, by OpenSSL's libcrypto where that can be loaded: the hash is not ours. */
#ifndef SKYMEMORY_SHA_H
#define SKYMEMORY_SHA_H

#include "packet.h"

enum { MAC_KEY_BYTES = 32, SHA_BYTES = 32 };

/* A SHA256_CTX (112 bytes in every OpenSSL there is), with room. */
typedef struct {
    _Alignas(16) uint8_t bytes[128];
} ShaState;

/* The two hash states that depend on the key alone: caching them halves the time of a MAC. */
typedef struct {
    ShaState inner, outer;
} MacKey;

/* Whether there is a library; looked for once. */
int sky_sha_ready(void);
/* For tests: disable the library (0), or look for it again (1). */
int sky_sha_select(int wanted);
/* Of ``head`` and then ``body``. */
void sky_sha256(const uint8_t *head, size_t head_bytes, const uint8_t *body, size_t body_bytes, uint8_t *digest);
void sky_mac_key(MacKey *mac, const uint8_t *key);
/* The MAC that stands at packet[end], over the packet up to there; ``sky`` is where its SKY header begins. */
void sky_mac_of(const MacKey *mac, uint32_t time_high, const uint8_t *packet, size_t sky, size_t end, uint8_t *out);

/* macs.c: the keys and the time to check against. ``keys``: 32 bytes by key id. */
typedef struct {
    PyObject *keys;
    long long now_us, skew_us;
    long key_id; /* of ``mac``; 0: none yet */
    MacKey mac;
} MacCheck;

/* Where the MAC of such a packet ends: 0 for one without, or too short, or too large. */
size_t sky_mac_end(const uint8_t *packet, size_t size, size_t sky);
/* 1 and when it was sent, in microseconds (0 in telemetry), for an authentic packet; 0 for any other; -1: exception. */
int sky_check_mac(MacCheck *check, const uint8_t *packet, size_t size, size_t sky, long long *sent_us);
/* Whether there is a key of this id, which is then the check's ``mac``: 1 or 0; -1: exception. */
int sky_find_mac_key(MacCheck *check, long key_id);
/* Add a MAC to a plain packet of ``width`` bytes, which has room for 16 more, and seal it: 0 for one too long. */
int sky_sign(uint8_t *row, size_t width, size_t sky, const MacKey *mac, unsigned key_id, unsigned long long time_us);
/* The plain packet of one whose MAC ends at ``end``: ``size`` - 16 bytes, sealed. */
void sky_strip_mac(const uint8_t *packet, size_t size, size_t sky, size_t end, uint8_t *out);

#endif
