/* Commands and housekeeping of the app itself; docs/reference/skymemory.xtce.xml has them too. */
#ifndef SKYMEMORY_MSG_H
#define SKYMEMORY_MSG_H

#include "cfe_msg_hdr.h"

/* Function codes of SKYMEMORY_CMD_MID; neither has a payload. */
#define SKYMEMORY_NOOP_CC           0
#define SKYMEMORY_RESET_COUNTERS_CC 1

typedef struct
{
    CFE_MSG_CommandHeader_t CommandHeader;
} SKYMEMORY_NoArgsCmd_t;

/* All figures are big-endian on every processor, as those of PONG are. */
typedef struct
{
    uint8 CommandCounter;
    uint8 CommandErrorCounter;
    uint8 Satellites[2];
    uint8 PacketsPublished[4];   /* answers onto the software bus */
    uint8 PacketsUnpublished[4]; /* answers that the bus had no room for */
    /* Of all its satellites together. */
    uint8 ChunksHeld[8];
    uint8 MemoryUsedBytes[8];
    uint8 PacketsReceived[8];
    uint8 PacketsRejected[8]; /* malformed, refused, replayed, unsupported, unroutable */
} SKYMEMORY_HkTlm_Payload_t;

typedef struct
{
    CFE_MSG_TelemetryHeader_t TelemetryHeader;
    SKYMEMORY_HkTlm_Payload_t Payload;
} SKYMEMORY_HkTlm_t;

#endif
