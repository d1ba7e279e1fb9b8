/* What SCH_LAB of the minimal mission asks for: housekeeping of the app every second. */
#include "cfe_tbl_filedef.h"

#include "cfe_sb.h"
#include "sch_lab_table.h"

#include "../../apps/skymemory/fsw/platform_inc/skymemory_msgids.h"

SCH_LAB_ScheduleTable_t SCH_TBL_Structure = {.TickRate = 100,
                                             .Config   = {{CFE_SB_MSGID_WRAP_VALUE(SKYMEMORY_SEND_HK_MID), 100, 0}}};

CFE_TBL_FILEDEF(SCH_TBL_Structure, SCH_LAB_APP.SCH_LAB_SchTbl, SkyMemory housekeeping, sch_lab_table.tbl)
