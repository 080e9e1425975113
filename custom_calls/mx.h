// Shapes of block-scaled numbers: 32 channels share one E8M0 scale, scales lie in pairs.
#pragma once

#include "target.h"

namespace deepinfer::custom_calls {

inline constexpr int64_t kMxGroup = 32;
inline constexpr int64_t kMxPair = 2 * kMxGroup;
// The group sizes (1, 1, 32) in one number, our reading of how the quantised product takes them.
inline constexpr int64_t kMxGroupSizes = (int64_t{1} << 32) | (int64_t{1} << 16) | kMxGroup;

// The last axis K of a shape becomes (K / 64, 2).
Dims MxScaleDims(const Dims& dims);

// Throws unless the operand has the shape of the scales of another one.
void NeedScales(const Request& request, size_t scale, size_t of);

}  // namespace deepinfer::custom_calls
