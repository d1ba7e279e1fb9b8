/* Who is where: the satellites' addresses, which stay, and the ground hosts heard lately, by tokens of our own.
 *
 * A token is a place in a table and how often that place was used before: that of a host which was forgotten names nobody.
 */
#ifndef SKY_POSIX_ENDPOINTS_H
#define SKY_POSIX_ENDPOINTS_H

#include <stdbool.h>

#include "endpoint.h"
#include "orbits.h"
#include "satellite.h"

typedef struct endpoints endpoints;

/* NULL: out of memory. By the secret seed nobody can choose addresses so that searches grow long. */
endpoints *endpoints_new(unsigned satellites, const uint64_t seed[2]);
void endpoints_free(endpoints *all);
void endpoints_add(endpoints *all, sky_link satellite, const udp_endpoint *address);
/* Whose packets come from there; a ground host that is not known gets a token. */
sky_link endpoints_link(endpoints *all, const udp_endpoint *address);
/* Where a satellite listens: for who has no table of his own. Not for every packet: it looks at all of them. */
bool endpoints_satellite(const endpoints *all, sky_link satellite, udp_endpoint *address);
/* Where packets of a ground host's link go; false: nobody known. */
bool endpoints_ground(const endpoints *all, sky_link link, udp_endpoint *address);

/* Where on the ground a host says that it is; NULL: where the plan's host is. One that is known no more is nowhere. */
void endpoints_set_place(endpoints *all, sky_link link, const orbits_place *place);
const orbits_place *endpoints_place(const endpoints *all, sky_link link);

#endif
