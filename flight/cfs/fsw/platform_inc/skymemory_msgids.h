/* Message ids of the app; a mission may choose others for all but the first two, which are the APID of SkyMemory's packets. */
#ifndef SKYMEMORY_MSGIDS_H
#define SKYMEMORY_MSGIDS_H

#define SKYMEMORY_PACKET_MID     0x18C0 /* commands for a satellite, as on the link: docs/reference/wire.md */
#define SKYMEMORY_PACKET_TLM_MID 0x08C0 /* its answers */
#define SKYMEMORY_CMD_MID        0x18C1 /* commands for the app itself: skymemory_msg.h */
#define SKYMEMORY_SEND_HK_MID    0x18C2 /* a scheduler's request for housekeeping */
#define SKYMEMORY_HK_TLM_MID     0x08C1

#endif
