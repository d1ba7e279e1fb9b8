/* Authentication of packets: MACs are made and checked, replays refused; past the gate a packet is a plain one. Twin of
 * skymemory.protocol.auth. */
#ifndef SKY_AUTH_H
#define SKY_AUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arena.h"
#include "config.h"
#include "counters.h"
#include "wire/nh.h"
#include "wire/packet.h"
#include "wire/sha.h"

typedef struct {
    uint16_t id;
    sky_us from;
    sky_hmac_key hmac;
    uint8_t payload_key[SKY_NH_KEY_BYTES]; /* where answers are signed */
} sky_mac_key;

/* The keys that may command, derived for MACs. */
typedef struct {
    uint32_t count;
    sky_auth auth;
    sky_us wall_shift; /* by how much the computer's wall clock is ahead of the time that satellites are given */
    sky_mac_key keys[SKY_MOST_KEYS_IN_RING];
} sky_authority;

void sky_authority_begin(sky_authority *authority, const sky_ring *ring);
/* Whether packets of this operation get a MAC where they go (an address): see sky_auth. */
bool sky_authority_signs(const sky_authority *authority, uint8_t op, uint32_t destination);
/* Adds a MAC to a packet that is sealed; `end`: of its body, where 16 bytes more must have room (a payload is kept elsewhere).
 * Commands get the time `now`. False: no room for a MAC in a packet with so large a payload. */
bool sky_authority_sign(const sky_authority *authority, uint8_t *packet, size_t end, sky_us now);

/* The same in steps, for a payload that comes in pieces: begin (false as above), take each piece, end. */
typedef struct {
    const sky_mac_key *key;
    uint8_t *packet;
    size_t end;
    bool covers_payload;
    sky_sha inner;
    sky_nh payload;
} sky_signing;
bool sky_signing_begin(sky_signing *signing, const sky_authority *authority, uint8_t *packet, size_t end, sky_us now);
void sky_signing_take(sky_signing *signing, const uint8_t *piece, size_t bytes);
void sky_signing_end(sky_signing *signing);
/* Where the MAC of a packet ends; 0: it has none, or is too short or too large. */
size_t sky_mac_end(const uint8_t *packet, size_t bytes);
/* Whether it is authentic, and of now (`skew`: how far a command's time may be off); *sent: when a command was made. */
bool sky_authority_check(const sky_authority *authority, const uint8_t *packet, size_t bytes, sky_us now, sky_us skew,
                         sky_us *sent);
/* Takes the MAC off an authentic packet, in place: 16 bytes less, sealed. */
void sky_mac_strip(uint8_t *packet, size_t bytes);

/* --- Replays --- */

typedef struct sky_replay sky_replay;

typedef struct {
    uint16_t key_id;
    uint32_t ground, source; /* the source counts between satellites, where `ground` is 0 */
} sky_sender;

/* Refuses what was made before `start`. NULL while the arena only counts. */
sky_replay *sky_replay_new(sky_arena *arena, const sky_config *config, sky_us start);
/* Whether this authentic, recent command is seen for the first time; it is then remembered. */
bool sky_replay_first(sky_replay *replay, const sky_sender *sender, sky_us sent, uint16_t sequence);

/* --- The gate --- */

typedef struct sky_gate sky_gate;

/* Called for the first sound command of a ground host among those refused of a run, at most 100 times a second. */
typedef void (*sky_refuse)(void *context, const uint8_t *packet, size_t bytes, sky_link source, sky_us now);

/* NULL while the arena only counts. */
sky_gate *sky_gate_new(sky_arena *arena, const sky_config *config, sky_counters *counters, sky_refuse refuse,
                       void *context, sky_us now);
void sky_gate_set_ring(sky_gate *gate, const sky_ring *ring);
void sky_gate_set_wall(sky_gate *gate, sky_us shift);
/* When an authentic command of now was last admitted; *by_wall: when one of now by a wall clock ahead alone. 0: never. */
sky_us sky_gate_heard(const sky_gate *gate, sky_us *by_wall);
const sky_authority *sky_gate_authority(const sky_gate *gate);

/* Admits packets of one link, in place: those for this satellite without their MACs. Gives them as runs, in order, by
 * sky_gate_next. The bytes must stay until then. */
void sky_gate_admit(sky_gate *gate, uint8_t *packets, size_t bytes, size_t segment_bytes, sky_link source, sky_us now);
bool sky_gate_next(sky_gate *gate, uint8_t **packets, size_t *bytes, size_t *segment_bytes);
/* Whether an authentic command for this satellite was among them: only then is the other end known. */
bool sky_gate_commanded(const sky_gate *gate);

#endif
