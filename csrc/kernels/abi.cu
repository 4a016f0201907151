#include "../include/megakit/abi.h"

#include "../include/megakit/portable.h"

#ifndef MEGAKIT_SOURCE_HASH
#define MEGAKIT_SOURCE_HASH ""
#endif

MK_API const char* megakit_error(int error) {
#ifdef MEGAKIT_EMULATED
  (void)error;
  return "the emulation has no errors";
#else
  return cudaGetErrorString(cudaError_t(error));
#endif
}

MK_API int megakit_abi_version(void) { return MEGAKIT_ABI_VERSION; }
MK_API const char* megakit_source_hash(void) { return MEGAKIT_SOURCE_HASH; }
