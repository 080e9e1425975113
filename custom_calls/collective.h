// What the collective targets have in common.
#pragma once

#include "target.h"

namespace deepinfer::custom_calls {

// The element types that cross devices.
const std::vector<DataType>& CollectiveTypes();
int32_t HcclTypeOf(DataType dtype);

// The attributes `family` and `size`.
const std::vector<Attribute>& GroupAttributes();

// The size that the caller named; throws INVALID_ARGUMENT below 1, or for an x without rows.
int64_t NeedGroup(const Request& request);

// This device's communicator, whose size must be the one that the caller named.
ascend::Communicator CommunicatorOf(const Request& request, Call& call);

}  // namespace deepinfer::custom_calls
