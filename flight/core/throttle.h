/* Limits how often an action may run that others cause: at once while rare, once a second while it goes on.
 *
 * Twin of skymemory.protocol.congestion.Throttle.
 */
#ifndef SKY_THROTTLE_H
#define SKY_THROTTLE_H

#include <stdbool.h>

#include "satellite.h"

#define SKY_LONG_HOLD_US 1000000
#define SKY_SHORT_HOLD_US 20000
#define SKY_AT_ONCE 64

typedef struct {
    sky_us burst_us, short_hold_us;
    sky_us open_us;   /* when the action may next run */
    sky_us earned_us; /* until when the long holds of all runs so far extend */
} sky_throttle;

static inline void sky_throttle_begin(sky_throttle *throttle, int32_t at_once, sky_us short_hold_us) {
    throttle->burst_us = (sky_us)(at_once - 1) * SKY_LONG_HOLD_US;
    throttle->short_hold_us = short_hold_us;
    throttle->open_us = 0;
    throttle->earned_us = INT64_MIN / 4;
}

static inline bool sky_throttle_is_open(const sky_throttle *throttle, sky_us now) { return now >= throttle->open_us; }

/* The action runs now. */
static inline void sky_throttle_done(sky_throttle *throttle, sky_us now) {
    const sky_us least = now - throttle->burst_us;
    throttle->earned_us = (throttle->earned_us > least ? throttle->earned_us : least) + SKY_LONG_HOLD_US;
    throttle->open_us = now + throttle->short_hold_us;
    if (throttle->earned_us > throttle->open_us) {
        throttle->open_us = throttle->earned_us;
    }
}

#endif
