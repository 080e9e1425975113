// Block-scaled ("MX") numbers: 32 elements of a row share one power-of-two scale, scales lie in pairs.
#pragma once

#include "operator.h"

namespace ascend_sim {

inline constexpr int64_t kMxGroup = 32;

// The shape of the scales of a tensor: its last axis becomes (ceil(K / 64), 2).
Dims MxScaleDims(const Dims& dims);

// Values times their scales; `dims` is the shape of the values, rows of K.
Values ApplyMxScales(Values values, const Values& scales, const Dims& dims);

struct MxRows {
  Values codes;   // already rounded to E4M3
  Values scales;  // powers of two; 1 where the last pair has no second group
};

// E4M3 rows of K with scales by one of two rules: 0 takes the exponent of the largest value less that of E4M3's largest
// power of two, 1 the smallest power of two that brings the largest value below E4M3's largest value.
MxRows QuantiseE4m3(const Values& values, int64_t width, int64_t scale_rule);

}  // namespace ascend_sim
