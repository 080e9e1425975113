#include "collective.h"

namespace deepinfer::custom_calls {

using ascend::HcclType;

const std::vector<DataType>& CollectiveTypes() {
  static const std::vector<DataType> types = {DataType::kBf16, DataType::kFloat, DataType::kInt32};
  return types;
}

int32_t HcclTypeOf(DataType dtype) {
  if (dtype == DataType::kBf16) return static_cast<int32_t>(HcclType::kBf16);
  return static_cast<int32_t>(dtype == DataType::kFloat ? HcclType::kFloat : HcclType::kInt32);
}

const std::vector<Attribute>& GroupAttributes() {
  static const std::vector<Attribute> attributes = {{"family", Attribute::kI64, "number that make_groups() gave"},
                                                    {"size", Attribute::kI64, "devices of a group"}};
  return attributes;
}

int64_t NeedGroup(const Request& request) {
  if (request.in(0).dims.empty()) request.NeedRank(0, 1);
  const int64_t size = request.i64("size");
  if (size < 1) {
    request.Refuse("attribute size is " + std::to_string(size) + "; it must be at least 1");
  }
  return size;
}

ascend::Communicator CommunicatorOf(const Request& request, Call& call) {
  const ascend::Communicator found = call.communicator(request.i64("family"));
  if (found.size != request.i64("size")) {
    request.Refuse("attribute size is " + std::to_string(request.i64("size")) + "; the group of this device has " +
                   std::to_string(found.size));
  }
  return found;
}

}  // namespace deepinfer::custom_calls
