#pragma once

// Which instruction sets the passes are compiled for. Included before anything of Highway, by every source that goes
// through foreach_target.h and by tests that switch instruction sets: all must agree.
//
// Left out: SSSE3 (every CPU that LibTorch still runs on has SSE4), the later AVX-512 variants (they add nothing that
// these passes use and cost a compilation each) and SVE (its vectors have no size, so they can't stand in arrays; Neon
// serves there). Names that an older Highway lacks count as 0.
#if defined(__aarch64__)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | BALLAST_LATER_AVX512)
#endif

#include <hwy/detect_targets.h>

#if defined(HWY_AVX3_ZEN4)
#define BALLAST_LATER_AVX512 (HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#else
#define BALLAST_LATER_AVX512 0
#endif

#include <hwy/targets.h>
