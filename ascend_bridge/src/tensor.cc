#include "tensor.h"

#include "errors.h"

namespace deepinfer::ascend {

int64_t CountOf(const Dims& dims) {
  int64_t count = 1;
  for (int64_t dim : dims) count *= dim;
  return count;
}

int64_t BitsOf(DataType dtype) {
  switch (dtype) {
    case DataType::kInt4:
    case DataType::kFloat4E2m1:
    case DataType::kFloat4E1m2:
      return 4;
    case DataType::kInt8:
    case DataType::kUint8:
    case DataType::kBool:
    case DataType::kHifloat8:
    case DataType::kFloat8E5m2:
    case DataType::kFloat8E4m3:
    case DataType::kFloat8E8m0:
      return 8;
    case DataType::kFloat16:
    case DataType::kBf16:
    case DataType::kInt16:
    case DataType::kUint16:
      return 16;
    case DataType::kFloat:
    case DataType::kInt32:
    case DataType::kUint32:
      return 32;
    case DataType::kInt64:
    case DataType::kUint64:
    case DataType::kDouble:
      return 64;
  }
  throw BridgeError(Code::kInvalidArgument,
                    "type code " + std::to_string(static_cast<int32_t>(dtype)) + " is not one that the bridge carries");
}

int64_t BytesOf(DataType dtype, const Dims& dims) { return (CountOf(dims) * BitsOf(dtype) + 7) / 8; }

std::string DimsText(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + (dims.size() == 1 ? ",)" : ")");
}

}  // namespace deepinfer::ascend
