#include "call.h"

namespace deepinfer::ascend {
namespace {

Dims ContiguousStrides(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) strides[i - 1] = strides[i] * dims[i];
  return strides;
}

}  // namespace

Call::~Call() {
  const Api& api = device_.api();
  for (aclTensorList* list : lists_) api.aclDestroyTensorList(list);
  for (aclTensor* tensor : tensors_) api.aclDestroyTensor(tensor);
  for (aclIntArray* array : arrays_) api.aclDestroyIntArray(array);
}

Tensor Call::Temporary(DataType dtype, const Dims& dims) {
  return {dtype, dims, device_.arena().Take(BytesOf(dtype, dims)), Format::kNd, {}, {}};
}

aclTensor* Call::Describe(const Tensor& tensor) {
  const Dims strides = tensor.strides.empty() ? ContiguousStrides(tensor.dims) : tensor.strides;
  const Dims& storage = tensor.storage.empty() ? tensor.dims : tensor.storage;
  aclTensor* made = device_.api().aclCreateTensor(
      tensor.dims.data(), tensor.dims.size(), static_cast<int32_t>(tensor.dtype), strides.data(), 0,
      static_cast<int32_t>(tensor.format), storage.data(), storage.size(), tensor.address);
  if (made == nullptr) throw BridgeError(Code::kInternal, "aclCreateTensor made none of " + DimsText(tensor.dims));
  tensors_.push_back(made);
  return made;
}

aclTensor* Call::Describe(const Tensor& tensor, DataType dtype, const Dims& dims) {
  return Describe({dtype, dims, tensor.address, Format::kNd, {}, {}});
}

aclTensor* Call::DescribeTransposed(const Tensor& matrix) {
  const int64_t rows = matrix.dims[0], columns = matrix.dims[1];
  return Describe({matrix.dtype, {columns, rows}, matrix.address, Format::kNd, {1, columns}, matrix.dims});
}

// When the arena has no room for it, the executor is given back in the one way that the protocol has for an executor
// that never runs: made repeatable directly after the first phase, then destroyed.
void* Call::TakeWorkspace(uint64_t bytes, aclOpExecutor* executor) {
  if (bytes == 0) return nullptr;
  try {
    return device_.arena().Take(bytes);
  } catch (const BridgeError&) {
    device_.api().aclSetAclOpExecutorRepeatable(executor);
    device_.api().aclDestroyAclOpExecutor(executor);
    throw;
  }
}

aclTensorList* Call::DescribeList(const Tensor& tensor) {
  const aclTensor* only = Describe(tensor);
  aclTensorList* made = device_.api().aclCreateTensorList(&only, 1);
  if (made == nullptr) throw BridgeError(Code::kInternal, "aclCreateTensorList made none of " + DimsText(tensor.dims));
  tensors_.pop_back();  // it is the list's from now on
  lists_.push_back(made);
  return made;
}

aclIntArray* Call::IntArray(const std::vector<int64_t>& values) {
  aclIntArray* made = device_.api().aclCreateIntArray(values.data(), values.size());
  if (made == nullptr) throw BridgeError(Code::kInternal, "aclCreateIntArray made none of " + DimsText(values));
  arrays_.push_back(made);
  return made;
}

}  // namespace deepinfer::ascend
