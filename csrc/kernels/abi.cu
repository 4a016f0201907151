#include "../include/megakit/abi.h"

#include "../include/megakit/portable.h"

#ifndef MEGAKIT_SOURCE_HASH
#define MEGAKIT_SOURCE_HASH ""
#endif

MK_API int megakit_abi_version(void) { return MEGAKIT_ABI_VERSION; }
MK_API const char* megakit_source_hash(void) { return MEGAKIT_SOURCE_HASH; }
