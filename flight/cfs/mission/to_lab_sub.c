/* What TO_LAB of the minimal mission downlinks: events, housekeeping of the app, and what its satellites answer. */
#include "cfe_tbl_filedef.h"

#include "to_lab_sub_table.h"

#include "../../apps/skymemory/fsw/platform_inc/skymemory_msgids.h"

TO_LAB_Subs_t TO_LAB_Subs = {.Subs = {{CFE_SB_MSGID_WRAP_VALUE(CFE_EVS_LONG_EVENT_MSG_MID), {0, 0}, 32},
                                      {CFE_SB_MSGID_WRAP_VALUE(SKYMEMORY_HK_TLM_MID), {0, 0}, 4},
                                      {CFE_SB_MSGID_WRAP_VALUE(SKYMEMORY_PACKET_TLM_MID), {0, 0}, 32},
                                      {CFE_SB_MSGID_RESERVED, {0, 0}, 0}}};

CFE_TBL_FILEDEF(TO_LAB_Subs, TO_LAB_APP.TO_LAB_Subs, SkyMemory telemetry, to_lab_sub.tbl)
