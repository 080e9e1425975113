// Number formats of the simulator: decoded to float64, encoded from it with one rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <vector>

#include "../src/acl_min.h"

namespace ascend_sim {

using deepinfer::ascend::DataType;

int64_t BitsOf(DataType dtype);  // 0 for a type that the simulator does not know
const char* NameOf(DataType dtype);

// Element `index` of packed data; 4-bit values lie two in a byte, the even index in the low half.
double Decode(DataType dtype, const char* data, int64_t index);
// As many elements as `out` has, from `first` on.
void DecodeRow(DataType dtype, const char* data, int64_t first, std::vector<double>& out);
void Encode(DataType dtype, char* data, int64_t index, double value);

// The value as the type holds it.
double RoundTo(DataType dtype, double value);

}  // namespace ascend_sim
